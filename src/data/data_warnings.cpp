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

void warn_of_cut_examples(const TokenFile& file, std::vector<std::string>& warnings) {
  const ExampleCounts& counts = file.examples();
  if (counts.cut_examples == 0) return;
  const std::string warning = text(file.path(), ": ", counts.cut_examples, " of ", count_text(counts.examples, "example"),
                                   " longer than training.seq_len: the end is cut off, with ", counts.cut_targets, " of ",
                                   counts.targets + counts.cut_targets, " targets");
  if (std::ranges::find(warnings, warning) == warnings.end()) warnings.push_back(warning);  // a file may be in several sets
}

}  // namespace

std::vector<std::string> data_warnings(const DataConfig& config, const Data& data) {
  std::vector<std::string> warnings;
  warn_of_idle_options(config, data, warnings);
  for (const auto& set : data.files)
    for (const TokenFile& file : set->files()) warn_of_cut_examples(file, warnings);
  return warnings;
}

}  // namespace mantissa
