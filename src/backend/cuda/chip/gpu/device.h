// What device code is written with, and the only file with intrinsics of CUDA. tests/simt/gpu/device.h has the same functions for the host.
//
// No block waits for another one, no thread returns before a barrier of its block, and what lanes hand over goes through a barrier.
#pragma once

#include <cstdint>
#include <type_traits>

// Before a loop of a fixed length over an array of a thread: without the loop the array is in registers.
#define MANTISSA_UNROLL _Pragma("unroll")

namespace mantissa::gpu {

inline constexpr unsigned kWarp = 32, kAllLanes = ~0U;

__device__ inline int64_t block() { return blockIdx.x; }
__device__ inline int64_t blocks() { return gridDim.x; }
__device__ inline unsigned thread() { return threadIdx.x; }
__device__ inline unsigned threads() { return blockDim.x; }
__device__ inline unsigned lane() { return threadIdx.x % kWarp; }
__device__ inline unsigned warp() { return threadIdx.x / kWarp; }

// The memory of the block that has this type: one for each type.
template <class T>
__device__ inline T& block_shared() {
  static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 16);
  __shared__ __align__(16) unsigned char memory[sizeof(T)];
  return *reinterpret_cast<T*>(memory);
}

__device__ inline void barrier() { __syncthreads(); }
__device__ inline void warp_barrier(unsigned mask = kAllLanes) { __syncwarp(mask); }

template <class T>
__device__ inline T shuffle(T value, unsigned from, unsigned mask = kAllLanes) {
  return __shfl_sync(mask, value, static_cast<int>(from));
}
template <class T>
__device__ inline T shuffle_xor(T value, unsigned lanes, unsigned mask = kAllLanes) {
  return __shfl_xor_sync(mask, value, static_cast<int>(lanes));
}
__device__ inline unsigned ballot(bool vote, unsigned mask = kAllLanes) { return __ballot_sync(mask, vote); }

// The index of the lowest bit that is set. There is one.
__device__ inline unsigned lowest_bit(unsigned bits) { return static_cast<unsigned>(__ffs(static_cast<int>(bits)) - 1); }

// Of an address that is aligned to the type: as one access where it has 16 bytes or less.
template <class V>
__device__ inline V load(const void* from) {
  return *static_cast<const V*>(from);
}
template <class V>
__device__ inline void store(void* to, V value) {
  *static_cast<V*>(to) = value;
}

// a * b + c, rounded once.
inline constexpr bool kMultiplyAddRoundsOnce = true;
__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }

__device__ inline uint32_t fetch_add(uint32_t* at, uint32_t value) { return atomicAdd(at, value); }
__device__ inline uint32_t fetch_or(uint32_t* at, uint32_t value) { return atomicOr(at, value); }
__device__ inline uint32_t fetch_max(uint32_t* at, uint32_t value) { return atomicMax(at, value); }

}  // namespace mantissa::gpu
