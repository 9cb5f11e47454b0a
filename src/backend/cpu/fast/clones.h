// Fast CPU kernels are compiled once for each level of the instruction set (base/cpu_level.h), and cloned<body>(arguments...) calls the
// clone of the level in use:
//   cloned<add_range<float>>(a, b, out, n);
// All clones give the same bits, but for which NaN a NaN is: no sum is reassociated, and fused multiply-adds are written out.
//
// A second body runs at the level of the build, where the first has instructions of AVX2, and a third one where there is AVX-512:
//   cloned<look_up<true>, look_up<false>>(arguments...);
//   cloned<decode<false>, decode<false>, decode<true>>(arguments...);
//
// The body is an always_inline function over a range, because a clone consists of what is inlined into it: a function that it calls without
// being always_inline, lambdas included, stays at the level of the build, SSE2. The dispatch is one comparison, so a body may take as
// little as a row.
#pragma once

#include "mantissa/base/cpu_level.h"
#include "mantissa/base/host_device.h"

namespace mantissa {

// True if this build compiles clones for levels. Bodies with instructions of a level take it as a template argument, in place of true, so
// that other builds do not instantiate them.
inline constexpr bool kCpuLevels = MANTISSA_CPU_LEVELS;

template <auto kBody, auto kBaseline, auto kWidest>
struct Clones;

template <class Result, class... Args, Result (*kBody)(Args...), Result (*kBaseline)(Args...), Result (*kWidest)(Args...)>
struct Clones<kBody, kBaseline, kWidest> {
  MANTISSA_TARGET("x86-64-v4") static Result v4(Args... args) { return kWidest(args...); }
  MANTISSA_TARGET("x86-64-v3") static Result v3(Args... args) { return kBody(args...); }
  [[gnu::noinline]] static Result baseline(Args... args) { return kBaseline(args...); }

  static Result run(Args... args) {
    switch (cpu_level()) {
      case CpuLevel::x86_64_v4: return v4(args...);
      case CpuLevel::x86_64_v3: return v3(args...);
      case CpuLevel::x86_64: break;
    }
    return baseline(args...);
  }
};

template <auto kBody, auto kBaseline = kBody, auto kWidest = kBody>
inline constexpr auto cloned = &Clones<kBody, kBaseline, kWidest>::run;

}  // namespace mantissa
