#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "backend/caching_allocator.h"

// Sanitizers end the process on impossible sizes unless told to fail as the system does.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace mantissa::allocator_test {

bool aligned(const std::shared_ptr<std::byte>& block) { return reinterpret_cast<uintptr_t>(block.get()) % 64 == 0; }

TEST(CachingAllocator, BlocksAreAlignedDistinctAndAsLargeAsAsked) {
  const auto allocator = std::make_shared<CachingAllocator>(host_memory_source());
  std::vector<std::shared_ptr<std::byte>> blocks;
  const std::vector<int64_t> sizes{0, 1, 63, 64, 65, 1000, 4097, 70001, 3000000};
  for (const int64_t size : sizes) {
    blocks.push_back(allocator->allocate(size));
    ASSERT_NE(blocks.back(), nullptr) << size;
    EXPECT_TRUE(aligned(blocks.back())) << size;
    std::memset(blocks.back().get(), static_cast<int>(blocks.size()), static_cast<size_t>(size));
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    for (int64_t at = 0; at < sizes[i]; ++at) ASSERT_EQ(blocks[i].get()[at], static_cast<std::byte>(i + 1)) << "blocks overlap";
  }
}

TEST(CachingAllocator, SizeClassesLoseAtMostAnEighth) {
  for (int64_t bytes = 1; bytes < (int64_t{1} << 40); bytes = bytes * 9 / 8 + 1) {
    const int64_t size = CachingAllocator::size_class(bytes);
    EXPECT_GE(size, bytes);
    EXPECT_LE(size - bytes, std::max<int64_t>(63, bytes / 8)) << bytes;
    EXPECT_EQ(size % 64, 0) << bytes;
    EXPECT_EQ(CachingAllocator::size_class(size), size) << "a size class is its own";
  }
  EXPECT_EQ(CachingAllocator::size_class(0), 64);
  EXPECT_EQ(CachingAllocator::size_class(int64_t{1} << 20), int64_t{1} << 20);
}

// Allocates like a training step: the same requests in the same order, with handles of several lifetimes.
void step(CachingAllocator& allocator) {
  std::vector<std::shared_ptr<std::byte>> saved;
  for (const int64_t bytes : {5000, 123456, 5000, 64, 999999, 5000}) {
    const auto scratch = allocator.allocate(bytes * 2);
    saved.push_back(allocator.allocate(bytes));
    if (saved.size() % 2 == 0) saved.erase(saved.begin());
  }
}

TEST(CachingAllocator, ALoopStopsAskingTheSystemAfterItsFirstRound) {
  const auto allocator = std::make_shared<CachingAllocator>(host_memory_source());
  step(*allocator);
  const AllocatorStats warm = allocator->stats();
  EXPECT_GT(warm.system_calls, 0);
  for (int i = 0; i < 100; ++i) step(*allocator);
  const AllocatorStats later = allocator->stats();
  EXPECT_EQ(later.system_calls, warm.system_calls);
  EXPECT_EQ(later.reserved, warm.reserved);
  EXPECT_EQ(later.peak_in_use, warm.peak_in_use);
  EXPECT_EQ(later.in_use, 0);
}

// A kept block of 1.5 MiB goes to a request for 1 MiB, so the next one for 1.5 MiB asks the system.
TEST(CachingAllocator, ABlockThatIsLentToASmallerSizeIsMissedByItsOwn) {
  constexpr int64_t kMiB = int64_t{1} << 20, kLarge = kMiB + kMiB / 2;
  const auto allocator = std::make_shared<CachingAllocator>(host_memory_source());
  allocator->allocate(kLarge);
  const auto small = allocator->allocate(kMiB);
  EXPECT_EQ(allocator->stats().system_calls, 1);
  const auto large = allocator->allocate(kLarge);
  EXPECT_EQ(allocator->stats().system_calls, 2);
  EXPECT_EQ(allocator->stats().in_use, kMiB + kLarge);
  EXPECT_EQ(allocator->stats().reserved, 2 * kLarge);
}

// A block that is more than half as large again is too large to lend.
TEST(CachingAllocator, AKeptBlockOfMuchMoreThanARequestStaysForItsOwnSize) {
  constexpr int64_t kMiB = int64_t{1} << 20, kTooLarge = kMiB + kMiB * 5 / 8;
  const auto allocator = std::make_shared<CachingAllocator>(host_memory_source());
  allocator->allocate(kTooLarge);
  allocator->allocate(2 * kMiB);
  const auto small = allocator->allocate(kMiB);
  EXPECT_EQ(allocator->stats().system_calls, 3);
  const auto large = allocator->allocate(kTooLarge), larger = allocator->allocate(2 * kMiB);
  EXPECT_EQ(allocator->stats().system_calls, 3) << "which are there";
}

// At most four handles of each size live at once, and the blocks of a size are for those of two thirds of it and more.
TEST(CachingAllocator, InterleavedSizesHaveNoMoreBlocksThanHandlesThatTheyAreFor) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  const std::vector<int64_t> sizes{kMiB, kMiB + kMiB / 4, kMiB + kMiB / 2};
  const auto allocator = std::make_shared<CachingAllocator>(host_memory_source());
  std::minstd_rand random(1);
  std::array<std::shared_ptr<std::byte>, 12> handles;
  for (int i = 0; i < 20000; ++i) {
    const size_t at = random() % handles.size();
    handles[at] = handles[at] ? nullptr : allocator->allocate(sizes[at % sizes.size()]);
  }
  const AllocatorStats stats = allocator->stats();
  EXPECT_LE(stats.peak_in_use, 4 * (sizes[0] + sizes[1] + sizes[2]));
  EXPECT_LE(stats.reserved, 4 * sizes[0] + 8 * sizes[1] + 12 * sizes[2]);
  EXPECT_LE(stats.system_calls, 4 + 8 + 12);
}

// Rows of an expert rank change from step to step. A layer keeps tokens, both halves of gate and up and their product for its backward
// pass, which needs a gradient of each; nothing else uses the memory.
TEST(CachingAllocator, RandomRoutingsHoldAtMostTwoAndAHalfTimesThePeak) {
  const auto allocator = std::make_shared<CachingAllocator>(host_memory_source());
  std::mt19937 random(1);
  std::lognormal_distribution<double> share(0.0, 0.3);
  constexpr int kLayers = 8;
  constexpr double kRows = 4096;
  for (int step = 0; step < 1000; ++step) {
    std::vector<std::vector<std::shared_ptr<std::byte>>> saved(kLayers);
    std::array<int64_t, kLayers> rows{};
    for (size_t layer = 0; layer < kLayers; ++layer) {
      rows[layer] = static_cast<int64_t>(kRows * share(random)) / 32 * 32 + 32;
      for (const int64_t width : {64, 192, 96}) saved[layer].push_back(allocator->allocate(rows[layer] * width * 2));
      const auto out = allocator->allocate(rows[layer] * 64 * 2);
    }
    for (size_t layer = kLayers; layer-- > 0; saved[layer].clear()) {
      const auto of_product = allocator->allocate(rows[layer] * 96 * 2), of_halves = allocator->allocate(rows[layer] * 192 * 2);
      const auto of_tokens = allocator->allocate(rows[layer] * 64 * 2);
    }
  }
  const AllocatorStats stats = allocator->stats();
  EXPECT_LE(2 * stats.reserved, 5 * stats.peak_in_use) << stats.reserved << " bytes for " << stats.peak_in_use;
  EXPECT_LE(stats.system_calls, 80) << "in 1000 steps of 56";
}

TEST(CachingAllocator, CountsWhatIsInUseAndHeld) {
  const auto allocator = std::make_shared<CachingAllocator>(host_memory_source());
  auto a = allocator->allocate(1024), b = allocator->allocate(2048);
  const auto also_a = a;
  EXPECT_EQ(allocator->stats().in_use, 3072);
  a.reset();
  EXPECT_EQ(allocator->stats().in_use, 3072) << "another handle is left";
  b.reset();
  EXPECT_EQ(allocator->stats().in_use, 1024);
  EXPECT_EQ(allocator->stats().peak_in_use, 3072);
  EXPECT_EQ(allocator->stats().reserved, 3072);
  EXPECT_EQ(allocator->stats().system_calls, 2);
}

TEST(CachingAllocator, ABlockOutlivesItsOwnersLastReference) {
  auto allocator = std::make_shared<CachingAllocator>(host_memory_source());
  const std::weak_ptr<CachingAllocator> watched = allocator;
  auto block = allocator->allocate(1000);
  allocator.reset();
  std::memset(block.get(), 1, 1000);
  EXPECT_FALSE(watched.expired());
  block.reset();
  EXPECT_TRUE(watched.expired());
}

TEST(CachingAllocator, ExhaustionNamesTheSizeAndKeepsTheAllocatorUsable) {
  const auto allocator = std::make_shared<CachingAllocator>(host_memory_source());
  auto cached = allocator->allocate(4096);
  cached.reset();
  for (const int64_t impossible : {int64_t{1} << 58, int64_t{1} << 62, int64_t{-1}}) {
    try {
      allocator->allocate(impossible);
      FAIL() << "allocated " << impossible;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), impossible < 0 ? ExitCode::internal : ExitCode::environment);
      EXPECT_NE(std::string(error.what()).find(std::to_string(impossible)), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(allocator->stats().in_use, 0);
  EXPECT_EQ(allocator->stats().reserved, 0) << "what was kept went back to the system before giving up";
  EXPECT_NE(allocator->allocate(4096), nullptr);
  EXPECT_EQ(allocator->stats().reserved, 4096);
}

TEST(CachingAllocator, ThreadsMayAllocateAndFreeAtOnce) {
  const auto allocator = std::make_shared<CachingAllocator>(host_memory_source());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&allocator, t] {
      for (int i = 0; i < 500; ++i) {
        const auto block = allocator->allocate(100 * (1 + i % 7));
        std::memset(block.get(), t, 100);
        const auto other = allocator->allocate(64);
        for (int at = 0; at < 100; ++at) ASSERT_EQ(block.get()[at], static_cast<std::byte>(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(allocator->stats().in_use, 0);
}

// A source of so many bytes, which another one gives back.
class Budget final : public MemorySource {
 public:
  explicit Budget(int64_t& left) : left_(left) {}
  std::byte* take(int64_t bytes) override {
    if (bytes > left_) return nullptr;
    left_ -= bytes;
    std::byte* const block = memory_->take(bytes);
    sizes_[block] = bytes;
    return block;
  }
  void give_back(std::byte* block) noexcept override {
    left_ += sizes_[block];
    memory_->give_back(block);
  }
  void make_room() override {
    if (other) other->release_kept();
  }
  CachingAllocator* other = nullptr;

 private:
  int64_t& left_;
  std::unique_ptr<MemorySource> memory_ = host_memory_source();
  std::map<std::byte*, int64_t> sizes_;
};

// Returns two allocators that give each other what they keep.
std::array<std::shared_ptr<CachingAllocator>, 2> two_of(int64_t& left) {
  std::array<std::shared_ptr<CachingAllocator>, 2> both;
  std::array<Budget*, 2> sources{};
  for (size_t i = 0; i < 2; ++i) {
    auto source = std::make_unique<Budget>(left);
    sources[i] = source.get();
    both[i] = std::make_shared<CachingAllocator>(std::move(source));
  }
  sources[0]->other = both[1].get(), sources[1]->other = both[0].get();
  return both;
}

TEST(CachingAllocator, TakesWhatOthersKeepWhereMemoryEnds) {
  int64_t left = 1024;
  const auto both = two_of(left);
  const auto held = both[1]->allocate(256);
  both[1]->allocate(512);
  EXPECT_EQ(left, 256);
  const auto taken = both[0]->allocate(768);
  EXPECT_EQ(left, 0);
  EXPECT_EQ(both[1]->stats().reserved, 256) << "what is in use stays";
  EXPECT_THROW(both[1]->allocate(64), Error);
}

// Each asks the other for room while it allocates itself.
TEST(CachingAllocator, TwoThatRunOutOfMemoryDoNotWaitForEachOther) {
  int64_t none = 0;
  const auto both = two_of(none);
  const auto ask = [&](size_t i) {
    for (int n = 0; n < 20'000; ++n) EXPECT_THROW(both[i]->allocate(64), Error);
  };
  std::thread other(ask, 1);
  ask(0);
  other.join();
}

}  // namespace mantissa::allocator_test
