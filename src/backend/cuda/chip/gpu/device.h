// Functions that device code is written with; the only file with intrinsics of CUDA. tests/simt/gpu/device.h has the same functions for the
// host.
//
// No block waits for another one, no thread returns before a barrier of its block, and what lanes hand over goes through a barrier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "mantissa/formats/element.h"

// Unrolls a loop of a fixed length over an array of a thread, so that the array is in registers; by a number, another loop, so that its
// loads do not wait for each other.
#define MANTISSA_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define MANTISSA_UNROLL MANTISSA_PRAGMA(unroll)
#define MANTISSA_UNROLL_BY(number) MANTISSA_PRAGMA(unroll number)

namespace mantissa::gpu {

inline constexpr unsigned kWarp = 32, kAllLanes = ~0U;

__device__ inline int64_t block() { return blockIdx.x; }
__device__ inline int64_t blocks() { return gridDim.x; }
__device__ inline unsigned thread() { return threadIdx.x; }
__device__ inline unsigned threads() { return blockDim.x; }
__device__ inline unsigned lane() { return threadIdx.x % kWarp; }
__device__ inline unsigned warp() { return threadIdx.x / kWarp; }

// Shared memory of the block for a T: one for each type.
template <class T>
__device__ inline T& block_shared() {
  static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 16);
  __shared__ __align__(16) unsigned char memory[sizeof(T)];
  return *reinterpret_cast<T*>(memory);
}

// Dynamic shared memory of the block, whose size its launch gives, up to 98.5 KiB: every GPU of 8.0 or later has 99, of which some are
// block_shared().
template <class T>
__device__ inline T& launched_shared() {
  static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 16 && sizeof(T) <= size_t{197} << 9);
  extern __shared__ __align__(16) unsigned char launched_memory[];
  return *reinterpret_cast<T*>(launched_memory);
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

// Load and store at an address that is aligned to the type: in one access if the type has 16 bytes or less.
template <class V>
__device__ inline V load(const void* from) {
  return *static_cast<const V*>(from);
}
template <class V>
__device__ inline void store(void* to, V value) {
  *static_cast<V*>(to) = value;
}
// Loads like load() what no thread of the launch writes, so that the compiler may do it before stores that come first.
template <class V>
__device__ inline V load_constant(const void* from) {
  V value;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < sizeof(V) / sizeof(uint4); ++i) {
    const uint4 part = __ldg(static_cast<const uint4*>(from) + i);
    memcpy(reinterpret_cast<unsigned char*>(&value) + i * sizeof(uint4), &part, sizeof(uint4));
  }
  return value;
}

// Stores multiples of 16 bytes in global memory, each at once: of an assignment the compiler makes smaller stores at times.
template <class V>
__device__ inline void store_wide(void* to, V value) {
  MANTISSA_UNROLL
  for (unsigned i = 0; i < sizeof(V) / sizeof(uint4); ++i) {
    uint4 part;
    memcpy(&part, reinterpret_cast<const unsigned char*>(&value) + i * sizeof(uint4), sizeof(uint4));
    __stwb(static_cast<uint4*>(to) + i, part);
  }
}

// a * b + c, rounded once.
inline constexpr bool kMultiplyAddRoundsOnce = true;
__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }

// 2^x within two units in the last place; subnormal results are zeros.
__device__ inline float fast_exp2(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// 1 / x within a unit in the last place; subnormal numbers count as zeros.
__device__ inline float fast_reciprocal(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// Asynchronous copies of 16 bytes into shared memory; zeros where not `inside`. The copies before a commit_copies() are a group;
// wait_copies<n>() returns when all groups of this thread but the latest n have arrived.
__device__ inline void copy_async16(void* shared, const void* global, bool inside) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(inside ? 16 : 0) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Four matrices of 8 x 8 elements of two bytes in shared memory: lane 8 m + i has the address of row i of matrix m, and gets elements 2 c
// and 2 c + 1 of row r of matrix m in out[m], lane being 4 r + c. Transposed: rows 2 c and 2 c + 1 of column r.
__device__ inline void load_matrices(uint32_t (&out)[4], const void* row) {
  const auto from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&out)[4], const void* row) {
  const auto from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}
// d [16, 8] += a [16, 16] * b [16, 8], of bf16 into fp32, with the fragments of mma.m16n8k16 in the PTX ISA: lane 4 r + c has d of rows r
// and r + 8 and columns 2 c and 2 c + 1.
__device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two values that are rounded to bf16, to nearest, ties to even; the first is in the low half.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// The codes of four values as E4M3 or E5M2, as its encode() gives them at scale 127; the first is in the low byte.
template <class E>
__device__ inline uint32_t encode_fp8(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint32_t out = 0;
  if constexpr (std::is_same_v<E, E4M3>)
    asm("{.reg .b16 x, y;\n cvt.rn.satfinite.e4m3x2.f32 x, %2, %1;\n cvt.rn.satfinite.e4m3x2.f32 y, %4, %3;\n mov.b32 %0, {x, y};}"
        : "=r"(out)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  if constexpr (std::is_same_v<E, E5M2>)
    asm("{.reg .b16 x, y;\n cvt.rn.satfinite.e5m2x2.f32 x, %2, %1;\n cvt.rn.satfinite.e5m2x2.f32 y, %4, %3;\n mov.b32 %0, {x, y};}"
        : "=r"(out)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  return out;
#else
  const auto code = [](float value) { return uint32_t{E::encode(__float_as_uint(value), 127)}; };
  return code(a) | code(b) << 8 | code(c) << 16 | code(d) << 24;
#endif
}

// The elements of two codes of E4M3 or E5M2, the first in the low byte: exact. A NaN is some NaN.
template <class E>
__device__ inline void decode_fp8(uint16_t codes, float& low, float& high) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves = 0;
  if constexpr (std::is_same_v<E, E4M3>) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  if constexpr (std::is_same_v<E, E5M2>) asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(codes));
  asm("{.reg .b16 first, second;\n mov.b32 {first, second}, %2;\n cvt.f32.f16 %0, first;\n cvt.f32.f16 %1, second;}"
      : "=f"(low), "=f"(high)
      : "r"(halves));
#else
  low = __uint_as_float(E::decode(static_cast<uint8_t>(codes), 127)), high = __uint_as_float(E::decode(codes >> 8, 127));
#endif
}

// The larger of the low halves and of the high halves, without signs.
__device__ inline uint32_t largest_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

__device__ inline uint32_t fetch_add(uint32_t* at, uint32_t value) { return atomicAdd(at, value); }
__device__ inline uint32_t fetch_min(uint32_t* at, uint32_t value) { return atomicMin(at, value); }
__device__ inline uint32_t fetch_or(uint32_t* at, uint32_t value) { return atomicOr(at, value); }

}  // namespace mantissa::gpu
