// The one macro header: functions compiled for host and device, and host functions compiled once per instruction set.
#pragma once

#if defined(__CUDACC__)
#define MANTISSA_HOST_DEVICE __host__ __device__
#else
#define MANTISSA_HOST_DEVICE
#endif

// A fast CPU kernel is a non-template function over a range, marked MANTISSA_CLONES: the loader picks the clone for the CPU at hand.
// Levels, not models: "arch=haswell" would be picked on that very model only, so an AMD or a newer Intel CPU would run the default.
// Empty under ThreadSanitizer, where the resolver of g++ 12 crashes before main.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__CUDACC__) && !defined(__clang__)
#define MANTISSA_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define MANTISSA_CLONES
#endif

// For a host function on 64-byte vectors, which narrower machines would keep in memory: call it where __builtin_cpu_supports("x86-64-v4").
#if defined(__x86_64__) && !defined(__CUDACC__)
#define MANTISSA_WIDE __attribute__((target("arch=x86-64-v4")))
#else
#define MANTISSA_WIDE
#endif
