// The sources of a configuration merged into one JSON value.
#pragma once

#include <nlohmann/json.hpp>

#include "mantissa/base/config.h"

namespace mantissa::detail {

// The file, the further files and the --set arguments in their order; the places of all keys go to the report. What cannot be read, parsed
// or applied is reported and left out.
struct Merged {
  nlohmann::json value;
  bool complete = true;  // false: a file is missing from it
};
Merged merge_sources(const ConfigSources& sources, ConfigReport& report);

// A key as it may be printed: control characters escaped, so that a name from a file cannot forge output.
std::string printable(const std::string& key);

std::string dotted(const std::string& key, std::string_view name);

}  // namespace mantissa::detail
