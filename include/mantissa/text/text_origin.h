// Where a text comes from.
#pragma once

#include <cstdint>
#include <string>

#include "mantissa/base/error.h"

namespace mantissa {

// For the message of an error and its code: a prompt is usage, a file is data.
struct TextOrigin {
  std::string name = "the text";
  ExitCode code = ExitCode::usage;
  int64_t offset = 0;  // of the text's first byte in what it comes from
};

}  // namespace mantissa
