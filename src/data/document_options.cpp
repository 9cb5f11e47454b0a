#include "mantissa/data/document_options.h"

#include <algorithm>

namespace mantissa {
namespace {

bool is_one_text(const TokenFiles& set) { return set.files().size() == 1 && set.files().front().format() == DataFormat::text; }

}  // namespace

std::vector<std::string> idle_document_options(const DataConfig& config, const Data& data) {
  const bool one_text_each = std::all_of(data.files.begin(), data.files.end(), [](const auto& set) { return is_one_text(*set); });
  const bool occurs_in_text = config.eod_id && data.tokenizer && *config.eod_id < data.tokenizer->size();
  if (!one_text_each || occurs_in_text) return {};
  std::vector<std::string> warnings;
  const auto warn = [&](const char* key, bool on) {
    if (!on) return;
    warnings.push_back(text(key, " does nothing: each data set is one text, which is one document",
                            config.eod_id ? text(", and no character has the id data.eod_id ", *config.eod_id) : ""));
  };
  warn("data.mask_eod_loss", config.mask_eod_loss);
  warn("data.reset_position_ids", config.reset_position_ids);
  warn("data.document_mask", config.document_mask);
  return warnings;
}

}  // namespace mantissa
