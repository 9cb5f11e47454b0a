// Tells where a text comes from.
#pragma once

#include <cstdint>
#include <string>

#include "mantissa/base/error.h"

namespace mantissa {

// Name and exit code of errors about a text: a prompt is usage, a file is data.
struct TextOrigin {
  std::string name = "the text";
  ExitCode code = ExitCode::usage;
  int64_t offset = 0;  // position of the text's first byte in its source
};

}  // namespace mantissa
