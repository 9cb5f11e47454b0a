// Finds uses of data.mask_eod_loss, data.reset_position_ids and data.document_mask that have no effect.
#pragma once

#include <string>
#include <vector>

#include "mantissa/data/open_data.h"

namespace mantissa {

// Returns a warning that starts with the key for each option that is on and does nothing because every data set is one text, which is one
// document. `data` is what `config` opened.
std::vector<std::string> idle_document_options(const DataConfig& config, const Data& data);

}  // namespace mantissa
