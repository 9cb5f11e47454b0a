// Runs blocks of device code on one thread of the host. Every thread of a block is a fiber; it runs until it waits for others, and then the
// first in a random order of warps and of lanes within them runs. A hand-over without its barrier thus meets old values, before or after
// the barrier that is missing. Blocks run one by one in random order.
//
// Under ThreadSanitizer the fibers of a block are threads that only barriers order: shuffles and votes do not, because on a chip they order
// no memory. Under AddressSanitizer shared memory ends where its type does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace mantissa::simt {

inline constexpr unsigned kWarp = 32;

// Calls `body` as each of `threads` threads of each block, which has so many bytes of shared memory by its launch. Throws Error(internal)
// with the place of every thread where a block stands still, and what the first thread that throws has thrown; the block ends there.
void run_blocks(int64_t blocks, unsigned threads, uint32_t seed, const std::function<void()>& body, size_t shared = 0);

// Makes the next launch of this process fail instead.
void fail_next_launch();

// Events that a thread waits for. All lanes of the mask must come to the same one; all threads of a block to a barrier.
enum class Sync : uint8_t { barrier, warp_barrier, shuffle, ballot, exchange, mma };

// These are for device code.
int64_t block();
int64_t blocks();
unsigned thread();
unsigned threads();
size_t launched_bytes();  // bytes of shared memory, by the launch
// Returns when all have come: a shuffle the value of lane `from`, a ballot the lanes whose value is not 0, others 0.
uint64_t sync(Sync kind, unsigned mask, uint64_t value = 0, unsigned from = 0);
// Gives all 32 lanes the values of all, which hold until the next exchange.
const uint64_t* exchange(uint64_t value);
// The fragments of a lane in a matrix multiply-accumulate m16n8k16 of bf16 into fp32, which sums in ascending order of the contraction.
struct Mma {
  float* d;
  const uint32_t *a, *b;
};
void mma(const Mma& own);
// A copy into shared memory that arrives where the thread waits for it: commit() ends a group, and arrived(n) takes all groups but the
// latest n of those that have ended.
struct Copy {
  void* to;
  const void* from;  // null: zeros
  size_t bytes;
};
void copy_later(const Copy& copy);
void commit();
std::vector<Copy> arrived(size_t left);
// Returns the block's memory of this key, which is poisoned when the first thread asks for it.
std::byte* block_shared(const void* key, size_t bytes);

}  // namespace mantissa::simt
