#include "mantissa/data/data_warnings.h"

#include <algorithm>

namespace mantissa {
namespace {

bool is_one_text(const TokenFiles& set) { return set.files().size() == 1 && set.files().front().format() == DataFormat::text; }

void warn_of_idle_options(const DataConfig& config, const Data& data, std::vector<std::string>& warnings) {
  const bool one_text_each = std::all_of(data.files.begin(), data.files.end(), [](const auto& set) { return is_one_text(*set); });
  const bool occurs_in_text = config.eod_id && data.tokenizer && *config.eod_id < data.tokenizer->size();
  if (!one_text_each || occurs_in_text) return;
  const auto warn = [&](const char* key, bool on) {
    if (!on) return;
    warnings.push_back(text(key, " does nothing: each data set is one text, which is one document",
                            config.eod_id ? text(", and no character has the id data.eod_id ", *config.eod_id) : ""));
  };
  warn("data.mask_eod_loss", config.mask_eod_loss);
  warn("data.reset_position_ids", config.resets_positions());
  warn("data.document_mask", config.masks_documents());
}

std::vector<std::string> file_warnings(const TokenFile& file, const char* row_length) {
  std::vector<std::string> warnings = repetition_warnings(file.path(), file.repeated());
  const ExampleCounts& counts = file.examples();
  if (counts.cut_examples == 0) return warnings;
  warnings.push_back(text(file.path(), ": ", counts.cut_examples, " of ", count_text(counts.examples, "example"), " longer than ",
                          row_length, ": the end is cut off, with ", counts.cut_targets, " of ", counts.targets + counts.cut_targets,
                          " targets"));
  return warnings;
}

}  // namespace

std::vector<std::string> repetition_warnings(const std::string& name, const RepeatedTokens& repeated) {
  std::vector<std::string> warnings;
  const auto warn = [&](const char* token, const char* where, int64_t texts) {
    if (texts > 0)
      warnings.push_back(text(name, ": the ", token, " token, which the tokenizer puts ", where, " each text, is also spelled in ",
                              count_text(texts, "text"), ", so it is there twice"));
  };
  warn("begin", "before", repeated.begins);
  warn("end", "behind", repeated.ends);
  return warnings;
}

std::vector<std::string> data_warnings(const DataConfig& config, const Data& data, const char* row_length) {
  std::vector<std::string> warnings;
  warn_of_idle_options(config, data, warnings);
  for (const auto& set : data.files) {
    for (const TokenFile& file : set->files()) {
      for (std::string& warning : file_warnings(file, row_length))
        if (std::ranges::find(warnings, warning) == warnings.end()) warnings.push_back(std::move(warning));  // it may be in several sets
    }
  }
  return warnings;
}

}  // namespace mantissa
