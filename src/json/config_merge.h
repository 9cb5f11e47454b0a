// The sources of a configuration merged into one tree.
#pragma once

#include <string>
#include <string_view>

#include "mantissa/json/config.h"

namespace mantissa::detail {

// The file, the further files and the --set arguments in their order go into report.sources(). What cannot be read, parsed or applied is
// reported and left out. False if a file is missing.
bool merge_sources(const ConfigSources& sources, ConfigReport& report);

// The names of a key, each of a length that can be shown.
std::string shown_key(std::string_view key);

std::string dotted(const std::string& key, std::string_view name);

}  // namespace mantissa::detail
