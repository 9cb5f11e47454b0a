#include "mantissa/data/data_config.h"

namespace mantissa {

void DataConfig::validate(ConfigReport& report) const {
  if (path && !(train.empty() && valid.empty())) {
    report.error("data.path",
                 "excludes data.train and data.valid; remove path, or clear these with --set data.train=[] --set data.valid=[]");
  } else if (!path && train.empty()) {
    report.error("data", "must name what to train on: path (with valid_fraction), or train and valid");
  }
  if (!path && valid_fraction != DataConfig{}.valid_fraction) {
    report.error("data.valid_fraction", "splits the one file of data.path; with data.train, list the validation sets in data.valid");
  }
  const bool is_tokens = !is_text(format) && format != DataFormat::automatic;
  if (format == DataFormat::text && !tokenizer) {
    report.error("data.tokenizer", "data.format text needs a tokenizer: byte, char or the path of a tokenizer.json");
  }
  if (append_eod && is_tokens) {
    report.error("data.append_eod", text("applies to text and JSONL only; data.format ", choice_name(format), " holds tokens already"));
  } else if (append_eod && !eod_id && (uses_bytes() || uses_characters())) {
    report.error("data.append_eod", "needs data.eod_id: the byte and char tokenizers have no end token");
  }
  const bool raw_tokens = is_tokens && format != DataFormat::megatron;
  const bool uses_boundaries = mask_eod_loss || resets_positions() || masks_documents();
  const bool may_have_end = tokenizer && !uses_bytes() && !uses_characters();
  if (raw_tokens && uses_boundaries && !eod_id && !may_have_end) {
    const char* const key = mask_eod_loss ? "data.mask_eod_loss" : masks_documents() ? "data.document_mask" : "data.reset_position_ids";
    report.error(key, text("needs data.eod_id, because data.format ", choice_name(format), " does not mark documents"));
  }
  if (chat_template && format == DataFormat::text)  // ids it may have rendered
    report.error("data.chat_template", "applies to JSONL with messages, not to data.format text");
  if (chat_date && !(chat_template && tells_date(*chat_template))) {
    report.error("data.chat_date", "applies to data.chat_template llama3 and harmony only, which tell the model a date");
  }
}

template const FieldType& detail::field_type<DataConfig>();

}  // namespace mantissa
