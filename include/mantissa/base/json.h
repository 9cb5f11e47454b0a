// Strict JSON for files that a program wrote: UTF-8 without a byte order mark, no comments, no duplicate keys, no NaN or Inf, at most 32
// levels deep, nothing after the value. Memory is proportional to the text.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "mantissa/base/error.h"

namespace mantissa {

// Throws Error(code) whose message starts with `source` and tells the place in bytes.
nlohmann::json parse_strict_json(std::string_view text, const std::string& source, ExitCode code = ExitCode::data);

}  // namespace mantissa
