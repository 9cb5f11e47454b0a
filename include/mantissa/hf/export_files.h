// The files of an export that are no weights.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/checkpoint/saved_model.h"
#include "mantissa/data/tokenizer.h"
#include "mantissa/hf/hugging_face.h"

namespace mantissa {

// Writes a file, which is on the disk on return.
void write_export_file(const std::filesystem::path& folder, const std::string& name, std::string_view content);

// Returns the ids to which the config.json of the first model gave a meaning; none for a model that was trained from the start.
SpecialTokens special_tokens(const std::vector<TokenizerFile>& files);

// Returns the keys of that config.json about the balance loss of routers.
RouterLossKeys router_loss_keys(const std::vector<TokenizerFile>& files);

// Adds an end token to those that are named.
void add_end_token(int64_t id, SpecialTokens& tokens);
// Makes a generation_config.json, which readers ask first, name its own end tokens, else those of config.json, and the learned ones.
// Leaves it as it is where training taught none.
void add_end_tokens(const std::vector<int32_t>& learned, const SpecialTokens& of_config, TokenizerFile& generation_config);

// Returns true if these are the files of another tokenizer. A tokenizer that mantissa exported is known again by its vocabulary.
bool has_other_tokenizer(const std::vector<TokenizerFile>& files, const Tokenizer& tokenizer);

// Returns the tokenizer of a run; none if that of the model it started from goes along in its place.
std::optional<Tokenizer> own_tokenizer(const std::vector<TokenizerFile>& files, const std::optional<Tokenizer>& tokenizer);

// Returns tokenizer.json and tokenizer_config.json of a tokenizer: as they came, or as transformers needs them.
std::vector<TokenizerFile> files_of(const Tokenizer& tokenizer);

// Returns the files as they came, byte for byte and without config.json; else tokenizer.json of a byte or char tokenizer: one token a
// symbol, no merges.
std::vector<TokenizerFile> model_files(const std::vector<TokenizerFile>& files, const std::optional<Tokenizer>& tokenizer);

}  // namespace mantissa
