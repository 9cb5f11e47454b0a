// Errors in device code that the executor of the host notices: values that depend on the order of threads, and blocks that stand still.
#include <gmock/gmock.h>

#include <numeric>
#include <vector>

#include "backend/ceilings.h"
#include "comm/comm_queue.h"
#include "gpu/device.h"
#include "gpu/runtime.h"
#include "testing.h"
#include "thread_ranks.h"

namespace mantissa::executor_test {

using ::testing::HasSubstr;
using namespace mantissa::gpu;

constexpr unsigned kThreadsOfBlock = 128;
constexpr int kSeeds = 5;

struct Values {
  int values[kThreadsOfBlock];
};

// Returns what each thread finds, by seed.
template <class Body>
std::vector<std::vector<int>> found(Body body) {
  std::vector<std::vector<int>> all;
  for (uint32_t seed = 1; seed <= kSeeds; ++seed) {
    std::vector<int> out(kThreadsOfBlock, -1);
    simt::run_blocks(1, kThreadsOfBlock, seed, [&] { out[thread()] = body(); });
    all.push_back(out);
  }
  return all;
}
std::string failure(const std::function<void()>& body, unsigned threads = 64) {
  try {
    simt::run_blocks(2, threads, 1, body);
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing failed";
}

int neighbor(bool barrier_before, bool barrier_after) {
  auto& shared = block_shared<Values>();
  int sum = 0;
  for (int round = 1; round <= 3; ++round) {
    shared.values[thread()] = round;
    if (barrier_before) barrier();
    sum += shared.values[(thread() + kWarp) % kThreadsOfBlock];
    if (barrier_after) barrier();
  }
  return sum;
}

TEST(Executor, BarriersHandOver) {
  for (const auto& values : found([] { return neighbor(true, true); })) EXPECT_THAT(values, ::testing::Each(6));
}

TEST(Executor, MemoryOfALaunchHasTheSizeThatTheLaunchGives) {
  const auto sum = [] {
    auto& shared = launched_shared<Values>();
    shared.values[thread()] = static_cast<int>(thread());
    barrier();
    EXPECT_EQ(shared.values[kWarp - 1 - thread()], static_cast<int>(kWarp - 1 - thread()));
  };
  simt::run_blocks(2, kWarp, 1, sum, sizeof(Values));
  EXPECT_THROW(simt::run_blocks(2, kWarp, 1, sum, sizeof(Values) - 1), Error);
}

TEST(Executor, AMissingBarrierMeetsOtherValues) {
  for (const auto& values : found([] { return neighbor(false, true); })) EXPECT_THAT(values, ::testing::Contains(::testing::Ne(6)));
  for (const auto& values : found([] { return neighbor(true, false); })) EXPECT_THAT(values, ::testing::Contains(::testing::Ne(6)));
}

TEST(Executor, WarpsHandOverBehindTheirBarrier) {
  const auto reverse = [](bool with_barrier) {
    auto& shared = block_shared<Values>();
    shared.values[thread()] = static_cast<int>(thread());
    if (with_barrier) warp_barrier();
    return shared.values[thread() ^ 31U];
  };
  for (const auto& values : found([&] { return reverse(true); })) {
    for (unsigned t = 0; t < kThreadsOfBlock; ++t) EXPECT_EQ(values[t], static_cast<int>(t ^ 31U));
  }
  for (const auto& values : found([&] { return reverse(false); })) EXPECT_THAT(values, ::testing::Contains(-1)) << "poison";
}

TEST(Executor, LanesShuffleAndVote) {
  for (const auto& values : found([] { return shuffle_xor(static_cast<int>(thread()), 5); })) {
    for (unsigned t = 0; t < kThreadsOfBlock; ++t) EXPECT_EQ(values[t], static_cast<int>(t ^ 5U));
  }
  for (const auto& values : found([] { return static_cast<int>(ballot(lane() % 3 == 0)); }))
    EXPECT_THAT(values, ::testing::Each(0x49249249));
  for (const auto& values : found([] { return lane() < 8 ? static_cast<int>(shuffle(lane(), 3, 0xffU)) : 3; }))
    EXPECT_THAT(values, ::testing::Each(3));
}

TEST(Executor, EveryBlockRunsOnce) {
  std::vector<int> runs(10);
  simt::run_blocks(10, 32, 3, [&] {
    if (thread() == 0) ++runs[static_cast<size_t>(block())];
  });
  EXPECT_THAT(runs, ::testing::Each(1));
}

TEST(Executor, ABlockThatStandsStillSaysWhere) {
  EXPECT_THAT(failure([] {
                if (thread() < 32) return;
                barrier();
              }),
              HasSubstr("stands still: threads 0 to 31 have returned, threads 32 to 63 at a barrier"));
  EXPECT_THAT(failure([] { thread() < 40 ? barrier() : static_cast<void>(ballot(true)); }), HasSubstr("stands still"));
  EXPECT_THAT(failure([] { static_cast<void>(lane() < 16 ? shuffle_xor(1U, 1) : ballot(true)); }), HasSubstr("stands still"));
  EXPECT_THAT(failure([] { warp_barrier(lane() < 16 ? 0xffffU : kAllLanes); }), HasSubstr("at a barrier of a warp with mask"));
}

// They do not meet, whichever of them comes last.
TEST(Executor, LanesWithDifferentMasksDoNotMeet) {
  for (uint32_t seed = 1; seed <= 20; ++seed)
    EXPECT_THROW(simt::run_blocks(1, kWarp, seed, [] { ballot(true, lane() < 16 ? ~0U : ~1U); }), Error) << seed;
}

TEST(Executor, MasksAndAddressesAreChecked) {
  EXPECT_THAT(failure([] { warp_barrier(0xffffU); }), HasSubstr("its lane is not in mask 65535"));
  EXPECT_THAT(failure([] {
                if (lane() < 16) shuffle(1, 20, 0xffffU);
              }),
              HasSubstr("a shuffle from lane 20, which is not in mask 65535"));
  alignas(16) std::byte bytes[32] = {};
  EXPECT_THAT(failure([&] { load<uint64_t>(bytes + 4); }), HasSubstr("a load of 8 bytes that are not aligned"));
  EXPECT_THAT(failure([&] { store(bytes + 2, 1.0F); }), HasSubstr("a store of 4 bytes that are not aligned"));
  EXPECT_THAT(failure([] {}, 33), HasSubstr("a launch of 2 blocks of 33 threads"));
}

TEST(Executor, SharedMemoryIsPoisonAtAnotherPlaceInEachBlock) {
  std::vector<const void*> places;
  simt::run_blocks(2, 32, 1, [&] {
    const auto& shared = block_shared<Values>();
    if (thread() != 0) return;
    EXPECT_EQ(shared.values[7], -1);
    places.push_back(&shared);
  });
  EXPECT_NE(places[0], places[1]);
}

TEST(Executor, WhatAThreadThrowsEndsTheBlock) {
  EXPECT_THAT(failure([] {
                barrier();
                require(thread() != 5, "thread 5 has a reason");
              }),
              HasSubstr("thread 5 has a reason"));
}

TEST(Executor, AWaitForALaunchThatFailedNamesTheLatestKernels) {
  const auto device = make_backend("cuda");
  const Tensor x = empty(*device, Dtype::f32, {40});
  device->run(Fill{.out = x, .value = 1.0});
  device->synchronize();
  simt::fail_next_launch();
  device->run(Add{.a = x, .b = x, .out = x});
  try {
    device->synchronize();
    FAIL() << "nobody was told";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("this launch was to fail; the latest kernels that were launched: fill, add"));
  }
}

// A host that runs ahead is told by what it asks for next.
TEST(Executor, ALaunchBehindOneThatFailedNamesTheLatestKernels) {
  const auto device = make_backend("cuda");
  const Tensor x = empty(*device, Dtype::f32, {40}), y = empty(*device, Dtype::f32, {40});
  simt::fail_next_launch();
  std::string told;
  try {
    device->run(Fill{.out = x, .value = 1.0});
    for (int i = 0; i < 100'000 && told.empty(); ++i) device->run(Convert{.x = x, .out = y}), device->run(Add{.a = x, .b = y, .out = x});
  } catch (const Error& error) {
    told = error.what();
  }
  EXPECT_THAT(told, HasSubstr("this launch was to fail; the latest kernels that were launched: "));
  EXPECT_THAT(told, HasSubstr("add"));
  EXPECT_EQ(told.find("the latest kernels"), told.rfind("the latest kernels"));
}

// A GPU has cuBLASLt, or its speed is no ratio.
TEST(Executor, IsNoCeilingOfGemmsWithoutTheLibrary) {
  const auto device = make_backend("cuda");
  EXPECT_THROW(GemmCeiling(*device, Dtype::bf16, 64), Error);
}

// The error of the device ends the rank, not the process: the queue is destroyed while it unwinds.
TEST(Executor, AQueueOfADeviceThatHasFailedEndsWithItsError) {
  const auto errors = test::run_ranks(2, [](const Communicator& world) {
    const test::Threads one(1);
    const auto device = make_backend("cuda");
    CommQueue queue(world, device.get());
    const Tensor x = zeros(*device, Dtype::f32, {40});
    queue.submit([&world, x] { world.sum(x, Purpose::gradients); }).wait();
    device->synchronize();
    world.barrier();
    if (world.rank() == 1) return;
    simt::fail_next_launch();
    for (int i = 0; i < 100'000; ++i) device->run(Add{.a = x, .b = x, .out = x});
  });
  EXPECT_THAT(errors[0], HasSubstr("this launch was to fail"));
}

TEST(Executor, MemoryThatIsNotThereIsToldWithItsSizeAndWhatHelps) {
  const auto device = make_backend("cuda");
  const auto held = device->allocate(1000);
  try {
    device->allocate(int64_t{1} << 60);
    FAIL() << "there is so much";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::environment);
    EXPECT_THAT(error.what(),
                HasSubstr("cannot allocate 1152921504606846976 bytes for a tensor; 1000 bytes are in use, at most 1000 so far"));
    EXPECT_THAT(
        error.what(),
        HasSubstr(
            "; host executor has 8589934592 bytes, of which 8589934592 are free; training needs less with a smaller training.micro_batch"));
  }
}

// Memory that one lane keeps is given back where the other one finds none.
TEST(Executor, LanesLeaveEachOtherTheMemoryThatTheyDoNotUse) {
  const Gpu described = simt::described_gpu();
  simt::described_gpu().memory = int64_t{100} << 20;
  {
    const auto device = make_backend("cuda");
    const auto take = [&](int64_t megabytes) { return device->allocate(megabytes << 20); };
    {
      const LaneScope scope(Lane::communication);
      const Tensor large = empty(*device, Dtype::u8, {int64_t{60} << 20});
      for (int i = 0; i < 3; ++i) device->run(Fill{.out = large.slice(0, 5000), .value = 1.0});  // which it does later
    }
    EXPECT_EQ(device->allocator_stats().reserved, int64_t{60} << 20);
    const auto held = take(64);
    EXPECT_EQ(device->allocator_stats().reserved, int64_t{64} << 20);
    EXPECT_THROW(take(40), Error);
    const LaneScope scope(Lane::communication);
    EXPECT_NO_THROW(take(32));
  }
  simt::described_gpu() = described;
}

}  // namespace mantissa::executor_test
