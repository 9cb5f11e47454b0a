// Names and deletes what killed savers leave behind, under names that nobody takes for a finished result.
#pragma once

#include <filesystem>
#include <string>

namespace mantissa {

// Returns a name that no other saver, of this or another process, uses for temporary files.
std::string unique_id();

// Deletes it. Returns false, and logs a warning, on failure.
bool remove_leftover(const std::filesystem::path& path);

// Deletes it under another name, so that a part of it is never taken for the whole.
void discard(const std::filesystem::path& path);

}  // namespace mantissa
