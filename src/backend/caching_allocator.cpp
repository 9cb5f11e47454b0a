#include "backend/caching_allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "base/limits.h"
#include "mantissa/base/integers.h"

// Functions of AddressSanitizer; null in programs that are built without it.
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" __attribute__((weak)) void __asan_poison_memory_region(const volatile void*, size_t);
extern "C" __attribute__((weak)) void __asan_unpoison_memory_region(const volatile void*, size_t);
// NOLINTEND(bugprone-reserved-identifier)

namespace mantissa {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

// Large blocks ask for huge pages: weights are read from end to end, and a page of 4 KiB ends what the CPU fetches ahead.
class HostMemory final : public MemorySource {
 public:
  std::byte* take(int64_t bytes) override {
    void* block = nullptr;
    const bool large = bytes >= kHugePage;
    const auto alignment = static_cast<size_t>(large ? kHugePage : CachingAllocator::kAlignment);
    if (posix_memalign(&block, alignment, static_cast<size_t>(bytes)) != 0) return nullptr;
    if (large) ::madvise(block, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a wish: where it fails, pages are small
    return static_cast<std::byte*>(block);
  }
  void give_back(std::byte* block) noexcept override { std::free(block); }
  void lend(std::byte* block, int64_t bytes, int64_t size) noexcept override {
    if (!__asan_poison_memory_region) return;
    __asan_unpoison_memory_region(block, static_cast<size_t>(bytes));
    __asan_poison_memory_region(block + bytes, static_cast<size_t>(size - bytes));
  }
  std::string limits() const override { return memory_limits(); }
};

}  // namespace

std::unique_ptr<MemorySource> host_memory_source() { return std::make_unique<HostMemory>(); }

int64_t CachingAllocator::size_class(int64_t bytes) {
  constexpr int64_t kLargest = int64_t{1} << 61;
  require(bytes >= 0, "cannot allocate ", bytes, " bytes");
  require(bytes <= kLargest, ExitCode::environment, "out of memory: cannot allocate ", bytes, " bytes");
  const int64_t wanted = std::max<int64_t>(bytes, 1);
  const int64_t step = std::max<int64_t>(kAlignment, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(wanted)) / 8));
  return round_up(wanted, step);
}

std::shared_ptr<std::byte> CachingAllocator::allocate(int64_t bytes) {
  const int64_t size = size_class(bytes);
  Block block{};
  {
    const std::lock_guard lock(mutex_);
    block = take(size);
    stats_.in_use += bytes;
    stats_.peak_in_use = std::max(stats_.peak_in_use, stats_.in_use);
    source_->lend(block.memory, bytes, block.size);
  }
  // shared_ptr calls the deleter if the handle itself cannot be made.
  return {block.memory, [owner = shared_from_this(), block, bytes](std::byte*) { owner->give_back(block, bytes); }};
}

AllocatorStats CachingAllocator::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

CachingAllocator::~CachingAllocator() { release_cached(); }

// Does not wait for the lock: two allocators that run out of memory at once would wait for each other.
void CachingAllocator::release_kept() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock) release_cached();
}

CachingAllocator::Block CachingAllocator::take(int64_t size) {
  for (auto kept = cached_.lower_bound(size); kept != cached_.end() && kept->first <= size + size / 2; ++kept) {
    if (kept->second.empty()) continue;
    const Block block{.memory = kept->second.back(), .size = kept->first};
    kept->second.pop_back();
    return block;
  }
  return from_source(size);
}

CachingAllocator::Block CachingAllocator::from_source(int64_t size) {
  cached_[size].reserve(blocks_[size] + 1);  // give_back must not fail
  ++stats_.system_calls;
  std::byte* block = source_->take(size);
  if (!block) {
    source_->settle();
    release_cached();
    source_->make_room();
    ++stats_.system_calls;
    block = source_->take(size);
    require(block != nullptr, ExitCode::environment, "out of memory: cannot allocate ", size, " bytes for a tensor; ", stats_.in_use,
            " bytes are in use, at most ", stats_.peak_in_use, " so far", source_->limits());
  }
  ++blocks_[size];
  stats_.reserved += size;
  return {.memory = block, .size = size};
}

void CachingAllocator::give_back(const Block& block, int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  stats_.in_use -= bytes;
  source_->lend(block.memory, 0, block.size);
  cached_.find(block.size)->second.push_back(block.memory);
}

void CachingAllocator::release_cached() {
  for (auto& [size, blocks] : cached_) {
    for (std::byte* block : blocks) source_->give_back(block);
    stats_.reserved -= size * static_cast<int64_t>(blocks.size());
    blocks_[size] -= blocks.size();
    blocks.clear();
  }
}

}  // namespace mantissa
