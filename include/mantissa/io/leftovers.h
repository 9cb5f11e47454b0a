// What savers that were killed leave behind, and how it goes: under names that nobody takes for what they were to become.
#pragma once

#include <filesystem>
#include <string>

namespace mantissa {

// No two savers, of this or another process, use the same name for what is temporary.
std::string unique_id();

// Deletes it. False, and a warning in the log, if it could not be.
bool remove_leftover(const std::filesystem::path& path);

// Deleted under another name, so that a part of it is never taken for the whole.
void discard(const std::filesystem::path& path);

}  // namespace mantissa
