// What data.mask_eod_loss, data.reset_position_ids and data.document_mask find to do.
#pragma once

#include <string>
#include <vector>

#include "mantissa/data/open_data.h"

namespace mantissa {

// A warning that starts with the key for each option that is on and does nothing, as every data set is one text, which is one document.
// `data` is what `config` opened.
std::vector<std::string> idle_document_options(const DataConfig& config, const Data& data);

}  // namespace mantissa
