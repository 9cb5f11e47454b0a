// Tokens after which a model has said all.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "mantissa/data/data_config.h"

namespace mantissa {

// Returns the end tokens that a model learned from this data: the one that data.append_eod appends, the end of an answer of
// data.chat_template, and the end token of the tokenizer, as far as they are there. tokenizer: none if the data was tokens.
std::vector<int32_t> learned_end_tokens(const DataConfig& config, const std::optional<Tokenizer>& tokenizer);

// Returns the learned end tokens that this data taught, whatever the model knew before: all but the end token of a tokenizer that nothing
// appended.
std::vector<int32_t> taught_end_tokens(const DataConfig& config, const std::optional<Tokenizer>& tokenizer);

}  // namespace mantissa
