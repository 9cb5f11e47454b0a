// Merges the sources of a configuration into one tree.
#pragma once

#include <string>
#include <string_view>

#include "mantissa/json/config.h"

namespace mantissa::detail {

// Adds the file, the further files and the --set arguments in their order to report.sources(). Reports and leaves out what cannot be read,
// parsed or applied. Returns false if a file is missing.
bool merge_sources(const ConfigSources& sources, ConfigReport& report);

// Splits a key into names, each short enough to be shown.
std::string shown_key(std::string_view key);

std::string dotted(const std::string& key, std::string_view name);

}  // namespace mantissa::detail
