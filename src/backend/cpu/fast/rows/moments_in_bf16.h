#pragma once

#include "mantissa/backend/backend.h"

namespace mantissa {

// Runs AdamW with moments of bf16 and masters of fp32, in a step that is not skipped.
void adamw_in_bf16(const AdamW& k);

}  // namespace mantissa
