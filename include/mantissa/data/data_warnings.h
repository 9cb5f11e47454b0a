// Warns of opened data that may not be what their user meant.
#pragma once

#include <string>
#include <vector>

#include "mantissa/data/open_data.h"

namespace mantissa {

// Returns a warning for each of mask_eod_loss, reset_position_ids and document_mask that is on and does nothing because every data set is
// one text, which is one document, beginning with its key; and for each file with examples that are longer than a row, or with what
// repetition_warnings() tells, beginning with its name. `data` is what `config` opened; row_length names what sets the tokens of a row.
std::vector<std::string> data_warnings(const DataConfig& config, const Data& data, const char* row_length = "training.seq_len");

// Returns warnings, which begin with `name`, that texts spell what the tokenizer puts around each text.
std::vector<std::string> repetition_warnings(const std::string& name, const RepeatedTokens& repeated);

}  // namespace mantissa
