// Functions that device code is written with, for the executor of the host (simt/executor.h). src/backend/cuda/chip/gpu/device.h has them
// for a chip.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "mantissa/base/error.h"
#include "mantissa/formats/element.h"
#include "simt/executor.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define MANTISSA_UNROLL
#define MANTISSA_UNROLL_BY(number)

namespace mantissa::gpu {

inline constexpr unsigned kWarp = simt::kWarp, kAllLanes = ~0U;

inline int64_t block() { return simt::block(); }
inline int64_t blocks() { return simt::blocks(); }
inline unsigned thread() { return simt::thread(); }
inline unsigned threads() { return simt::threads(); }
inline unsigned lane() { return thread() % kWarp; }
inline unsigned warp() { return thread() / kWarp; }

template <class T>
T& block_shared() {
  static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 16);
  static const char key = 0;
  return *reinterpret_cast<T*>(simt::block_shared(&key, sizeof(T)));
}

template <class T>
T& launched_shared() {
  static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 16 && sizeof(T) <= size_t{197} << 9);
  require(sizeof(T) == simt::launched_bytes(), "a block has ", simt::launched_bytes(), " bytes of shared memory by its launch, and uses ",
          sizeof(T));
  static const char key = 0;
  return *reinterpret_cast<T*>(simt::block_shared(&key, sizeof(T)));
}

inline void barrier() { simt::sync(simt::Sync::barrier, kAllLanes); }
inline void warp_barrier(unsigned mask = kAllLanes) { simt::sync(simt::Sync::warp_barrier, mask); }

template <class T>
T shuffle(T value, unsigned from, unsigned mask = kAllLanes) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = simt::sync(simt::Sync::shuffle, mask, bits, from);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
T shuffle_xor(T value, unsigned lanes, unsigned mask = kAllLanes) {
  return shuffle(value, lane() ^ lanes, mask);
}
inline unsigned ballot(bool vote, unsigned mask = kAllLanes) {
  return static_cast<unsigned>(simt::sync(simt::Sync::ballot, mask, vote ? 1 : 0));
}

inline unsigned lowest_bit(unsigned bits) { return static_cast<unsigned>(std::countr_zero(bits)); }

template <class V>
V load(const void* from) {
  require(std::bit_cast<uintptr_t>(from) % alignof(V) == 0, "thread ", thread(), " of block ", block(), ": a load of ", sizeof(V),
          " bytes that are not aligned");
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}
template <class V>
void store(void* to, V value) {
  require(std::bit_cast<uintptr_t>(to) % alignof(V) == 0, "thread ", thread(), " of block ", block(), ": a store of ", sizeof(V),
          " bytes that are not aligned");
  std::memcpy(to, &value, sizeof(V));
}

template <class V>
void store_wide(void* to, V value) {
  store(to, value);
}
template <class V>
V load_constant(const void* from) {
  return load<V>(from);
}

// The host rounds twice: without instructions of its own one rounding is a call.
inline constexpr bool kMultiplyAddRoundsOnce = false;
inline float multiply_add(float a, float b, float c) { return a * b + c; }

inline float fast_exp2(float x) {
  const float out = std::exp2(x);
  return out < std::numeric_limits<float>::min() ? 0.0F : out;
}

inline float fast_reciprocal(float x) {
  const auto flushed = [](float value) { return std::abs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0F, value) : value; };
  return flushed(1.0F / flushed(x));
}

// Shared memory is read and written here, by the thread whose copy it is, so that sanitizers see it.
inline void copy_async16(void* shared, const void* global, bool inside) {
  require(std::bit_cast<uintptr_t>(shared) % 16 == 0 && (!inside || std::bit_cast<uintptr_t>(global) % 16 == 0), "thread ", thread(),
          " of block ", block(), ": a copy of 16 bytes that are not aligned");
  std::memset(shared, 0xff, 16);
  simt::copy_later({.to = shared, .from = inside ? global : nullptr, .bytes = 16});
}
inline void commit_copies() { simt::commit(); }
template <int kLeft>
void wait_copies() {
  for (const simt::Copy& copy : simt::arrived(kLeft)) {
    if (copy.from) std::memcpy(copy.to, copy.from, copy.bytes);
    if (!copy.from) std::memset(copy.to, 0, copy.bytes);
  }
}

// The row at which a lane's address lies.
struct RowsOfLanes {
  const uint64_t* addresses;
  explicit RowsOfLanes(const void* own) : addresses(simt::exchange(std::bit_cast<uint64_t>(own))) {
    require(std::bit_cast<uintptr_t>(own) % 16 == 0, "thread ", thread(), " of block ", block(), ": a row of a matrix that is not aligned");
  }
  uint32_t at(unsigned row, unsigned col) const { return std::bit_cast<const uint16_t*>(addresses[row])[col]; }
};
inline void load_matrices(uint32_t (&out)[4], const void* row) {
  const RowsOfLanes rows(row);
  const unsigned own = lane() / 4, col = lane() % 4 * 2;
  for (unsigned m = 0; m < 4; ++m) out[m] = rows.at(m * 8 + own, col) | rows.at(m * 8 + own, col + 1) << 16;
}
inline void load_matrices_transposed(uint32_t (&out)[4], const void* row) {
  const RowsOfLanes rows(row);
  const unsigned own = lane() % 4 * 2, col = lane() / 4;
  for (unsigned m = 0; m < 4; ++m) out[m] = rows.at(m * 8 + own, col) | rows.at(m * 8 + own + 1, col) << 16;
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { simt::mma({.d = d, .a = a, .b = b}); }

// The chip has one NaN.
inline uint32_t pack_bf16(float low, float high) {
  const auto rounded = [](float value) { return value == value ? uint32_t{to_bf16(value).bits} : 0x7fffU; };
  return rounded(low) | rounded(high) << 16;
}

template <class E>
uint32_t encode_fp8(float a, float b, float c, float d) {
  const auto code = [](float value) { return uint32_t{E::encode(std::bit_cast<uint32_t>(value), 127)}; };
  return code(a) | code(b) << 8 | code(c) << 16 | code(d) << 24;
}

template <class E>
void decode_fp8(uint16_t codes, float& low, float& high) {
  low = std::bit_cast<float>(E::decode(static_cast<uint8_t>(codes), 127));
  high = std::bit_cast<float>(E::decode(static_cast<uint8_t>(codes >> 8), 127));
}

inline uint32_t largest_halves(uint32_t a, uint32_t b) { return std::max(a & 0xffffU, b & 0xffffU) | std::max(a >> 16, b >> 16) << 16; }

inline uint32_t fetch_add(uint32_t* at, uint32_t value) { return std::atomic_ref(*at).fetch_add(value, std::memory_order_relaxed); }
inline uint32_t fetch_min(uint32_t* at, uint32_t value) {
  std::atomic_ref all(*at);
  uint32_t old = all.load(std::memory_order_relaxed);
  while (value < old && !all.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
  }
  return old;
}
inline uint32_t fetch_or(uint32_t* at, uint32_t value) { return std::atomic_ref(*at).fetch_or(value, std::memory_order_relaxed); }

}  // namespace mantissa::gpu
