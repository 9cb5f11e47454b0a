#include "backend/cpu/caching_allocator.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "mantissa/base/limits.h"

namespace mantissa {

int64_t CachingAllocator::size_class(int64_t bytes) {
  constexpr int64_t kLargest = int64_t{1} << 60;
  require(bytes >= 0 && bytes <= kLargest, "cannot allocate ", bytes, " bytes");
  const int64_t wanted = std::max<int64_t>(bytes, 1);
  const int64_t step = std::max<int64_t>(kAlignment, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(wanted)) / 8));
  return (wanted + step - 1) / step * step;
}

std::shared_ptr<std::byte> CachingAllocator::allocate(int64_t bytes) {
  const int64_t size = size_class(bytes);
  std::byte* block = nullptr;
  {
    const std::lock_guard lock(mutex_);
    block = take(size);
    stats_.in_use += size;
    stats_.peak_in_use = std::max(stats_.peak_in_use, stats_.in_use);
  }
  // If the handle itself cannot be made, shared_ptr calls the deleter.
  return {block, [owner = shared_from_this(), size](std::byte* memory) { owner->give_back(memory, size); }};
}

AllocatorStats CachingAllocator::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

CachingAllocator::~CachingAllocator() { release_cached(); }

std::byte* CachingAllocator::take(int64_t size) {
  std::vector<std::byte*>& blocks = cached_[size];
  if (blocks.empty()) return from_system(size);
  std::byte* block = blocks.back();
  blocks.pop_back();
  return block;
}

std::byte* CachingAllocator::from_system(int64_t size) {
  cached_[size].reserve(blocks_[size] + 1);  // give_back must not fail
  ++stats_.system_calls;
  void* block = nullptr;
  if (posix_memalign(&block, kAlignment, static_cast<size_t>(size)) != 0) {
    release_cached();
    ++stats_.system_calls;
    const int status = posix_memalign(&block, kAlignment, static_cast<size_t>(size));
    require(status == 0, "out of memory: cannot allocate ", size, " bytes for a tensor; ", stats_.in_use, " bytes are in use, at most ",
            stats_.peak_in_use, " so far", memory_limits());
  }
  ++blocks_[size];
  stats_.reserved += size;
  return static_cast<std::byte*>(block);
}

void CachingAllocator::give_back(std::byte* block, int64_t size) noexcept {
  const std::lock_guard lock(mutex_);
  stats_.in_use -= size;
  cached_.find(size)->second.push_back(block);
}

void CachingAllocator::release_cached() {
  for (auto& [size, blocks] : cached_) {
    for (std::byte* block : blocks) std::free(block);
    stats_.reserved -= size * static_cast<int64_t>(blocks.size());
    blocks_[size] -= blocks.size();
    blocks.clear();
  }
}

}  // namespace mantissa
