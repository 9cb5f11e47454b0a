// Checks limits that the system sets on this process. Kernels and libraries that exceed one would crash, so it is checked here first, by
// name.
#pragma once

#include <cstdint>
#include <string>

namespace mantissa {

// Bytes of stack that a body of parallel_for may use, with all that it calls.
inline constexpr int64_t kStackBytes = int64_t{1} << 20;

// Makes sure that the calling thread has kStackBytes left and that they are mapped. Throws Error(environment) that names limit, value and
// need.
void require_stack();

// Makes sure that `bytes` more can be mapped at this moment. Throws Error(environment) that names limit, value and need; `purpose` is its
// subject: "thread 2 of 4".
void require_memory(int64_t bytes, const std::string& purpose);

// Loads what the C library unwinds its own frames with. By itself it does so when an exception first meets one, perhaps for want of memory;
// if memory is then too short to load it, the process ends. Throws Error(environment).
void require_unwinding();

// Returns "; the address space is limited to 102400 KiB (ulimit -v)", or "" if the memory of this process is not limited.
std::string memory_limits();

}  // namespace mantissa
