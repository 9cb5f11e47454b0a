// The files beside a model that say how it is prompted: finds its chat template, compares it with one of data.chat_template, and puts that
// in its place where a run trained it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/data/data_config.h"

namespace mantissa {

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

}  // namespace mantissa
