// The room that files have on a disk. Implemented in file.cpp.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace mantissa {

// Returns the bytes that are free for this user on the file system of `directory`; none where the system does not say.
std::optional<int64_t> free_bytes(const std::filesystem::path& directory);

// Returns the bytes that must be free to write so many: a tenth more, as require_free_space() asks for.
int64_t room_for(int64_t bytes);

}  // namespace mantissa
