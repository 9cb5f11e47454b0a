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

namespace mantissa::simt {

inline constexpr unsigned kWarp = 32;

// Calls `body` as each of `threads` threads of each block. Throws Error(internal) with the place of every thread where a block stands
// still, and what the first thread that throws has thrown; the block ends there.
void run_blocks(int64_t blocks, unsigned threads, uint32_t seed, const std::function<void()>& body);

// Makes the next launch of this process fail instead.
void fail_next_launch();

// What a thread waits for. All lanes of the mask must come to the same one; all threads of a block to a barrier.
enum class Sync : uint8_t { barrier, warp_barrier, shuffle, ballot };

// Within device code.
int64_t block();
int64_t blocks();
unsigned thread();
unsigned threads();
// Returns when all have come: a shuffle the value of lane `from`, a ballot the lanes whose value is not 0, others 0.
uint64_t sync(Sync kind, unsigned mask, uint64_t value = 0, unsigned from = 0);
// Returns the block's memory of this key, which is poisoned when the first thread asks for it.
std::byte* block_shared(const void* key, size_t bytes);

}  // namespace mantissa::simt
