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

// Files that lie beside the weights of an export, and what config.json says of the model that training started from.
struct ExportFiles {
  std::vector<TokenizerFile> files;  // without config.json
  SpecialTokens special = {};        // with the end tokens that training taught; none are named for a model trained from the start
  RouterLossKeys router_loss = {};
  std::string chat_template = {};  // outcome of take_chat_template()
};
// Returns the files as they came with the model, byte for byte; else those of its own tokenizer. A generation_config.json, which readers
// ask first, names its end tokens, else those of config.json, and the taught ones; it stays as it is where training taught none.
ExportFiles export_files(const DataConfig& data, const std::vector<TokenizerFile>& files, const std::optional<Tokenizer>& tokenizer);

// Returns true if these are the files of another tokenizer. A tokenizer that mantissa exported is known again by its vocabulary.
bool has_other_tokenizer(const std::vector<TokenizerFile>& files, const Tokenizer& tokenizer);

// Returns the first difference of two files tokenizer.json that changes which ids a text has: "tokenizer.json: \"the\" has the id 7, not
// 6". Throws Error(data) for a text that is no JSON, with the name of its file.
std::optional<std::string> tokenizer_difference(const std::string& found, const std::string& expected, const std::string& where);

// Returns the tokenizer of a run; none if that of the model it started from goes along in its place.
std::optional<Tokenizer> own_tokenizer(const std::vector<TokenizerFile>& files, const std::optional<Tokenizer>& tokenizer);

// Returns tokenizer.json and tokenizer_config.json of a tokenizer: as they came, or as transformers needs them, a byte or char tokenizer
// with one token a symbol and no merges.
std::vector<TokenizerFile> files_of(const Tokenizer& tokenizer);

}  // namespace mantissa
