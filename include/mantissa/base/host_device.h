// The one macro header: functions compiled for host and device, and host functions compiled for a level of the instruction set.
#pragma once

#if defined(__CUDACC__)
#define MANTISSA_HOST_DEVICE __host__ __device__
#else
#define MANTISSA_HOST_DEVICE
#endif

// MANTISSA_TARGET compiles a function for a level, "x86-64-v3" or "x86-64-v4"; MANTISSA_CPU_HAS asks whether the CPU has it;
// base/cpu_level.h says which one is in use. Levels, not models: "haswell" would be that very model only. Without noipa g++ moves what it
// knows of the callers into loops: the address of a thread_local variable is then asked for in every round. MANTISSA_CPU_LEVELS is true if
// anything is compiled for a level: not with clang 14, which cannot ask the CPU for one, nor under ThreadSanitizer, whose tests are about
// threads alone.
#if defined(__x86_64__) && !defined(__CUDACC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define MANTISSA_TARGET(level) __attribute__((target("arch=" level), noipa))
#define MANTISSA_CPU_HAS(level) (__builtin_cpu_supports(level) != 0)
#define MANTISSA_CPU_LEVELS true
#else
#define MANTISSA_TARGET(level)
#define MANTISSA_CPU_HAS(level) false
#define MANTISSA_CPU_LEVELS false
#endif
