// Selects the instructions of the fast CPU kernels by the levels of the x86-64 psABI: x86-64 has SSE2, x86-64-v3 adds AVX2 and fma, and
// x86-64-v4 AVX-512. The variable MANTISSA_MAX_CPU_LEVEL makes the program run as on a smaller CPU. oneDNN chooses for itself, within
// ONEDNN_MAX_CPU_ISA.
#pragma once

#include <atomic>

namespace mantissa {

enum class CpuLevel : int { x86_64, x86_64_v3, x86_64_v4 };  // each includes those before it

const char* name(CpuLevel level);  // "x86-64", "x86-64-v3", "x86-64-v4"

// Returns the highest level that the CPU has and that this compiler can generate code for.
CpuLevel highest_cpu_level();

// Returns the level of the given name if it is lower than `highest`, else `highest`; null means no limit. Throws Error(usage) that lists
// the names for any other text.
CpuLevel limited_cpu_level(CpuLevel highest, const char* limit);

namespace detail {
inline std::atomic<int> cpu_level_in_use = -1;  // not chosen yet
CpuLevel choose_cpu_level();
}  // namespace detail

// Returns the level in use. The first call, which opening a backend makes, chooses it for the rest of the process; it throws Error(usage)
// if MANTISSA_MAX_CPU_LEVEL is not the name of a level.
inline CpuLevel cpu_level() {
  const int level = detail::cpu_level_in_use.load(std::memory_order_relaxed);
  return level >= 0 ? static_cast<CpuLevel>(level) : detail::choose_cpu_level();
}

// Tests use it to compare the levels in one process. `level` must be at most highest_cpu_level().
void use_cpu_level(CpuLevel level);

}  // namespace mantissa
