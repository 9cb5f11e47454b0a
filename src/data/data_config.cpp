#include "mantissa/data/data_config.h"

namespace mantissa {
namespace {

void validate_sets(const DataConfig& config, ConfigReport& report) {
  if (config.path && !(config.train.empty() && config.valid.empty())) {
    report.error("data.path", "excludes data.train and data.valid; drop one of them, or pass --set data.train=[] --set data.valid=[]");
  } else if (!config.path && config.train.empty()) {
    report.error("data", "must name what to train on: path (with valid_fraction), or train and valid");
  }
  if (!config.path && config.valid_fraction != DataConfig{}.valid_fraction) {
    report.error("data.valid_fraction", "splits the one file of data.path; with data.train, list the validation sets in data.valid");
  }
}

void validate_format(const DataConfig& config, ConfigReport& report) {
  const bool is_text = config.format == DataFormat::text || config.format == DataFormat::jsonl;
  const bool is_tokens = !is_text && config.format != DataFormat::automatic;
  if (config.format == DataFormat::text && !config.tokenizer) {
    report.error("data.tokenizer", "data.format text needs a tokenizer: byte, char or the path of a tokenizer.json");
  }
  if (config.append_eod && is_tokens) {
    report.error("data.append_eod", text("is for text and JSONL; data.format ", choice_name(config.format), " holds tokens already"));
  } else if (config.append_eod && !config.eod_id && (config.uses_bytes() || config.uses_characters())) {
    report.error("data.append_eod", "needs data.eod_id: the byte and char tokenizers have no end token");
  }
  const bool raw_tokens = is_tokens && config.format != DataFormat::megatron;
  const bool uses_boundaries = config.mask_eod_loss || config.resets_positions() || config.masks_documents();
  const bool may_have_end = config.tokenizer && !config.uses_bytes() && !config.uses_characters();
  if (raw_tokens && uses_boundaries && !config.eod_id && !may_have_end) {
    const char* const key = config.mask_eod_loss       ? "data.mask_eod_loss"
                            : config.masks_documents() ? "data.document_mask"
                                                       : "data.reset_position_ids";
    report.error(key, text("data.format ", choice_name(config.format), " marks no documents: needs data.eod_id"));
  }
}

void validate_chat(const DataConfig& config, ConfigReport& report) {
  if (config.chat_template && config.format == DataFormat::text)  // ids it may have rendered
    report.error("data.chat_template", "is for JSONL of messages, not for data.format text");
  if (config.chat_date && !(config.chat_template && tells_date(*config.chat_template))) {
    report.error("data.chat_date", "is for data.chat_template llama3 and harmony, which tell the model a date");
  }
}

}  // namespace

void DataConfig::validate(ConfigReport& report) const {
  validate_sets(*this, report);
  validate_format(*this, report);
  validate_chat(*this, report);
}

template const FieldType& detail::field_type<DataConfig>();

}  // namespace mantissa
