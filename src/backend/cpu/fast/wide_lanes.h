// Instructions on vectors of 64 bytes, for bodies that run at x86-64-v4 alone (clones.h), and of 32 bytes, for those from x86-64-v3 on: g++
// 12 takes apart what they do where it is written out, and an intrinsic could not be inlined into a clone. All are templates because a
// compiler without levels (kCpuLevels) checks the operands of an assembly at the level of the build, but only of what is instantiated.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mantissa::wide {

// a * b + c in fp32 lanes.
template <class Floats>
[[gnu::always_inline]] inline Floats fma(Floats a, Floats b, Floats c) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "vm"(b));
  return c;
}

// 32 bytes of any alignment, twice.
template <class Bytes>
[[gnu::always_inline]] inline Bytes twice(const std::byte* from) {
  static_assert(sizeof(Bytes) == 64);
  using Half = uint8_t __attribute__((vector_size(32), aligned(1)));
  Bytes out;
  asm("vbroadcasti64x4 %1, %0" : "=v"(out) : "m"(*reinterpret_cast<const Half*>(from)));
  return out;
}

// Returns true if a < b in any unsigned byte.
template <class Bytes>
[[gnu::always_inline]] inline bool any_below(Bytes a, Bytes b) {
  bool any;
  asm("vpcmpub $1, %2, %1, %%k1\n\tkortestq %%k1, %%k1" : "=@ccnz"(any) : "v"(a), "v"(b) : "k1");
  return any;
}
// Returns true if a == b in any 16-bit lane.
template <class Pairs>
[[gnu::always_inline]] inline bool any_equal(Pairs a, Pairs b) {
  bool any;
  asm("vpcmpeqw %2, %1, %%k1\n\tkortestd %%k1, %%k1" : "=@ccnz"(any) : "v"(a), "v"(b) : "k1");
  return any;
}

// a + b in the 16-bit lanes in which no bit of the mask is set in a, else a.
template <class Pairs>
[[gnu::always_inline]] inline Pairs add_where_clear(Pairs a, Pairs mask, Pairs b) {
  Pairs out = a;
  asm("vptestnmw %[mask], %[a], %%k1\n\tvpaddw %[b], %[a], %[out]%{%%k1%}"
      : [out] "+v"(out)
      : [a] "v"(a), [mask] "v"(mask), [b] "v"(b)
      : "k1");
  return out;
}
// a + b in the 16-bit lanes in which a bit of the mask is set in `where`, else `where`.
template <class Pairs>
[[gnu::always_inline]] inline Pairs add_where_set(Pairs where, Pairs mask, Pairs a, Pairs b) {
  Pairs out = where;
  asm("vptestmw %[mask], %[where], %%k1\n\tvpaddw %[b], %[a], %[out]%{%%k1%}"
      : [out] "+v"(out)
      : [where] "v"(where), [mask] "v"(mask), [a] "v"(a), [b] "v"(b)
      : "k1");
  return out;
}

// table[lowest bits of the index] in 16-bit and 32-bit lanes of 64 bytes, and of bytes within each 16 of 32 or 64, there 0 for an index of
// 128 or more.
template <class Pairs>
[[gnu::always_inline]] inline Pairs looked_up_pairs(Pairs table, Pairs index) {
  Pairs out;
  asm("vpermw %1, %2, %0" : "=v"(out) : "v"(table), "v"(index));
  return out;
}
template <class Floats, class Words>
[[gnu::always_inline]] inline Floats looked_up_words(Floats table, Words index) {
  Floats out;
  asm("vpermps %1, %2, %0" : "=v"(out) : "v"(table), "v"(index));
  return out;
}
template <class Bytes>
[[gnu::always_inline]] inline Bytes looked_up_bytes(Bytes table, Bytes index) {
  Bytes out;
  asm("vpshufb %2, %1, %0" : "=v"(out) : "v"(table), "v"(index));
  return out;
}

}  // namespace mantissa::wide
