#include "mantissa/data/end_tokens.h"

#include <algorithm>

namespace mantissa {
namespace {

void add(std::optional<int32_t> id, std::vector<int32_t>& ids) {
  if (id && std::ranges::find(ids, *id) == ids.end()) ids.push_back(*id);
}

}  // namespace

std::vector<int32_t> learned_end_tokens(const DataConfig& config, const std::optional<Tokenizer>& tokenizer) {
  std::vector<int32_t> ids = taught_end_tokens(config, tokenizer);
  if (tokenizer) add(tokenizer->end_token(), ids);
  return ids;
}

std::vector<int32_t> taught_end_tokens(const DataConfig& config, const std::optional<Tokenizer>& tokenizer) {
  std::vector<int32_t> ids;
  if (config.append_eod && config.eod_id) add(static_cast<int32_t>(*config.eod_id), ids);
  if (tokenizer && config.chat_template) add(tokenizer->id_of(end_of_answer(*config.chat_template)), ids);
  if (config.append_eod && !config.eod_id && tokenizer) add(tokenizer->end_token(), ids);
  return ids;
}

}  // namespace mantissa
