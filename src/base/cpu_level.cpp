#include "base/cpu_level.h"

#include <cstdlib>
#include <string_view>

#include "mantissa/base/error.h"
#include "mantissa/base/host_device.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

constexpr const char* kVariable = "MANTISSA_MAX_CPU_LEVEL";
constexpr CpuLevel kLevels[] = {CpuLevel::x86_64, CpuLevel::x86_64_v3, CpuLevel::x86_64_v4};

}  // namespace

const char* name(CpuLevel level) {
  switch (level) {
    case CpuLevel::x86_64: break;
    case CpuLevel::x86_64_v3: return "x86-64-v3";
    case CpuLevel::x86_64_v4: return "x86-64-v4";
  }
  return "x86-64";
}

CpuLevel highest_cpu_level() {
  if (MANTISSA_CPU_HAS("x86-64-v4")) return CpuLevel::x86_64_v4;
  return MANTISSA_CPU_HAS("x86-64-v3") ? CpuLevel::x86_64_v3 : CpuLevel::x86_64;
}

CpuLevel limited_cpu_level(CpuLevel highest, const char* limit) {
  if (limit == nullptr) return highest;
  for (const CpuLevel level : kLevels) {
    if (std::string_view(limit) == name(level)) return level < highest ? level : highest;
  }
  fail(ExitCode::usage, kVariable, ": must be x86-64, x86-64-v3 or x86-64-v4, got \"", printable(limit), '"');
}

CpuLevel detail::choose_cpu_level() {
  const CpuLevel level = limited_cpu_level(highest_cpu_level(), std::getenv(kVariable));
  use_cpu_level(level);
  return level;
}

void use_cpu_level(CpuLevel level) {
  require(level <= highest_cpu_level(), "this CPU lacks instructions of ", name(level));
  detail::cpu_level_in_use.store(static_cast<int>(level), std::memory_order_relaxed);
}

}  // namespace mantissa
