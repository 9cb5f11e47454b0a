// What the tensor ranks of one replica send each other while one micro batch goes forward and backward, as src/ops has them do it.
#pragma once

#include "mantissa/train/config.h"

namespace mantissa {

struct TensorExchanges {
  int64_t calls = 0;
  int64_t bytes = 0;    // sent by all ranks
  int64_t busiest = 0;  // of one rank, the more of what it sends and receives
};
TensorExchanges tensor_exchanges(const RunConfig& config, const PrecisionPlan& plan);

}  // namespace mantissa
