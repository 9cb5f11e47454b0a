// Reads what `mantissa analyze --json` wrote, for a page of `mantissa report`.
#pragma once

#include <filesystem>

#include "mantissa/json/json.h"

namespace mantissa::tools {

// Returns the members that the page shows; those that the file lacks are null or empty. Throws Error(data) that names file and member for
// any other file.
Json read_analysis(const std::filesystem::path& file);

}  // namespace mantissa::tools
