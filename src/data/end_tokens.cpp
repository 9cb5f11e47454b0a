#include "mantissa/data/end_tokens.h"

#include <algorithm>

namespace mantissa {

std::vector<int32_t> learned_end_tokens(const DataConfig& config, const std::optional<Tokenizer>& tokenizer) {
  std::vector<int32_t> ids;
  const auto add = [&ids](std::optional<int32_t> id) {
    if (id && std::ranges::find(ids, *id) == ids.end()) ids.push_back(*id);
  };
  if (config.append_eod && config.eod_id) add(static_cast<int32_t>(*config.eod_id));
  add(learned_end_of_answer(config, tokenizer));
  if (tokenizer) add(tokenizer->end_token());
  return ids;
}

std::optional<int32_t> learned_end_of_answer(const DataConfig& config, const std::optional<Tokenizer>& tokenizer) {
  return tokenizer && config.chat_template ? tokenizer->id_of(end_of_answer(*config.chat_template)) : std::nullopt;
}

}  // namespace mantissa
