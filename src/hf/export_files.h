// The files of an export that are no weights.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/saved_model.h"
#include "data/tokenizer.h"
#include "hf/hugging_face.h"
#include "mantissa/data/data_config.h"

namespace mantissa {

// Reads what generation_config.json of a model, or an older config.json, says of sampling.

struct SamplingDefaults {
  std::optional<double> temperature = {}, top_p = {};  // as far as the file states them, where do_sample is true
  std::optional<int64_t> top_k = {};
  std::vector<std::string> unused = {};  // keys that change the tokens in transformers but not here: "repetition_penalty = 1.1"
};

// Throws Error(data) that begins with `source` for a file that is no JSON object, and for a value that would be taken and is none of its
// key.
SamplingDefaults read_sampling_defaults(std::string_view content, const std::string& source);

// The files beside a model that say how it is prompted: finds its chat template, compares it with one of data.chat_template, and puts that
// in its place where a run trained it.

struct FolderTemplate {
  std::string file;  // "chat_template.jinja"
  std::string text;
};
// Returns the template that transformers takes: chat_template.jinja, else that of tokenizer_config.json, its "default" if it has several,
// else chat_template.json. None: the model has none. Files that are no JSON have none, either.
std::optional<FolderTemplate> folder_template(const std::vector<TokenizerFile>& files);

// Reads these files, and what else of a model says how it is prompted, beside a tokenizer.json or in the folder that holds one.
std::vector<TokenizerFile> files_beside_tokenizer(const std::filesystem::path& tokenizer);

// Renders two conversations by the template of a model and by one of data.chat_template, with the same date. Returns the first difference,
// "its chat_template.jinja renders [...] as \"...\", data.chat_template chatml as \"...\"", or why the model's cannot be rendered; ""
// where there is none.
std::string chat_template_difference(const std::vector<TokenizerFile>& files, ChatTemplate which, const std::optional<std::string>& date);

// Makes data.chat_template the template of the files, unless theirs renders the same or there is no data.chat_template: writes
// chat_template.jinja and takes the others away. Returns what happened: "chat template chatml, which ..."; "": nothing.
std::string take_chat_template(const DataConfig& data, std::vector<TokenizerFile>& files);

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
