#include <gmock/gmock.h>

#include "comm_cases.h"
#include "files.h"
#include "mantissa/backend/functions.h"
#include "mantissa/comm/communicator.h"
#include "thread_ranks.h"

namespace mantissa::test::comm_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

TEST(Collectives, DoWhatTheySayOnAnyNumberOfRanks) {
  const Threads one(1);
  for (int ranks = 1; ranks <= 8; ++ranks) {
    std::atomic<int> there{0};
    expect_on_ranks(ranks, [&](const Communicator& world) {
      const auto device = make_backend("cpu_reference");
      for (uint32_t seed = 0; seed < 30; ++seed) {
        check_all_gather(world, seed, seed % 4 == 0 ? 3 : 2000);
        check_all_to_all(world, seed, seed % 4 == 0 ? 3 : 2000);
        check_sum_scatter(*device, world, seed, 300);
        if (seed % 3 == 0) check_split(world, seed);  // groups keep the order of their ranks
      }
      for (const int64_t count : {0, 1, 2, 15, 16, 17, 100, 127, 128, 129, 1000, 4097}) {
        check_sum<float>(*device, world, count, 1);
        check_sum<double>(*device, world, count, 2);
      }
      check_small(world);
      for (int round = 1; round <= 50; ++round) {
        ++there;
        world.barrier();
        require(there >= round * world.size(), "round ", round, ": ", there, " of ", world.size());
      }
    });
  }
}

// The ranks of a job continue the tree that each began over its own micro batches.
TEST(Sum, OverRanksContinuesTheTreeOverMicroBatches) {
  const Threads one(1);
  std::vector<std::vector<float>> batches;
  for (int i = 0; i < 16; ++i) {
    const std::vector<double> values = addends(i, 500, 9);
    batches.emplace_back(values.begin(), values.end());
  }
  const std::vector<float> expected = tree(batches);
  for (const int ranks : {1, 2, 4, 8, 16}) {
    expect_on_ranks(ranks, [&](const Communicator& world) {
      const auto device = make_backend("cpu");
      const auto begin = batches.begin() + world.rank() * (16 / ranks);
      const std::vector<float> own = tree(std::vector<std::vector<float>>(begin, begin + 16 / ranks));
      const Tensor tensor = from_host(*device, Dtype::f32, {500}, own.data());
      world.sum(tensor, Purpose::gradients);
      require(to_host<float>(tensor) == expected, "another sum");
    });
  }
}

// Each element lies on another rank than its neighbor.
TEST(Sum, OfBf16IsExactWhereAllButOneAddendAreZero) {
  constexpr int64_t kCount = 533;
  const std::vector<double> all = random_values(kCount, 5, 1e3);
  for (const int ranks : {2, 5}) {
    expect_on_ranks(ranks, [&](const Communicator& world) {
      const auto device = make_backend("cpu");
      std::vector<double> own = all;
      for (size_t i = 0; i < own.size(); ++i) own[i] = static_cast<int>(i) % ranks == world.rank() ? own[i] : 0.0;
      const Tensor tensor = tensor_of(*device, Dtype::bf16, {kCount}, own);
      world.sum(tensor, Purpose::activations);
      require(values(tensor) == values(tensor_of(*device, Dtype::bf16, {kCount}, all)), "not exact");
    });
  }
}

TEST(GroupOfOne, HasNoTransportAndStillMovesItsBytes) {
  const Communicator one;
  Bytes in(10, std::byte{3}), out(10);
  const std::vector<int64_t> counts{10};
  one.all_to_all(in, counts, out, counts, Purpose::other);
  EXPECT_EQ(out, in);
  one.all_gather(out, counts, Purpose::other);
  one.broadcast(out, 0, Purpose::other);
  one.barrier();
  one.stop();
  EXPECT_EQ(one.sum(7), 7);
  EXPECT_EQ(one.all(5), std::vector<int>{5});
  EXPECT_EQ(one.split(3).size(), 1);
  EXPECT_EQ(one.traffic().control, 0);
  EXPECT_TRUE(one.latest_calls().empty());
  EXPECT_EQ(Communicator(std::move(thread_transports(1)[0])).traffic().control, 0);
}

TEST(Arguments, AreCheckedBeforeAnythingIsSent) {
  expect_on_ranks(2, [](const Communicator& world) {
    Bytes bytes(5);
    const std::vector<int64_t> few{5}, negative{6, -1}, large{4, 4}, right{2, 3};
    const auto refused = [&](const std::vector<int64_t>& counts) {
      EXPECT_THROW(world.all_gather(bytes, counts, Purpose::other), Error);
      EXPECT_THROW(world.all_to_all(bytes, counts, bytes, right, Purpose::other), Error);
      EXPECT_THROW(world.all_to_all(bytes, right, bytes, counts, Purpose::other), Error);
    };
    for (const auto& counts : {few, negative, large}) refused(counts);
    EXPECT_THROW(world.broadcast(bytes, 2, Purpose::other), Error);
    EXPECT_THROW(world.broadcast(bytes, -1, Purpose::other), Error);
    const auto device = make_backend("cpu_reference");
    EXPECT_THROW(world.sum(zeros(*device, Dtype::i32, {4}), Purpose::other), Error);
    EXPECT_THROW(Communicator().sum(zeros(*device, Dtype::u8, {4}), Purpose::other), Error);
    const std::vector<int64_t> own{world.rank() == 0 ? 5 : 0, world.rank() == 0 ? 0 : 5};
    EXPECT_THROW(world.all_to_all(bytes, own, bytes, right, Purpose::other), Error) << "the share that stays";
    require(world.traffic().control == 0 && world.traffic().other == 0, "something was sent");
    check_small(world);
  });
}

TEST(Traffic, CountsWhatEachRankSentByPurpose) {
  expect_on_ranks(3, [](const Communicator& world) {
    const auto device = make_backend("cpu_reference");
    const int64_t rank = world.rank();
    Bytes bytes(60);
    const std::vector<int64_t> counts{10, 20, 30};
    world.all_gather(bytes, counts, Purpose::parameters);
    const Traffic gather = world.traffic();
    require(gather.parameters == 2 * 10 * (rank + 1) && gather.control == 32, "gather: ", gather.parameters);
    world.sum_scatter(zeros(*device, Dtype::f32, {60}), counts, Purpose::gradients);
    require(world.traffic().gradients == 4 * (60 - counts[static_cast<size_t>(rank)]), "sum_scatter");
    world.split(0).broadcast(bytes, 1, Purpose::other);
    const Traffic all = world.traffic();
    require(all.other == (rank == 1 ? 120 : 0), "broadcast: ", all.other);
    require(all.control == 4 * 32 + 2 * 4, "headers and colors: ", all.control);
    require(all.parameters == gather.parameters, "parameters changed");
  });
}

struct Mismatch {
  const char *name, *words;  // words of the message: the call of the mismatching rank
  std::function<void(Backend&, const Communicator&)> call;
};

void majority(Backend& device, const Communicator& world) { world.sum(zeros(device, Dtype::f32, {100}), Purpose::gradients); }

std::vector<Mismatch> mismatching_calls() {
  const auto sum_of = [](Dtype dtype, int64_t count) {
    return [=](Backend& device, const Communicator& world) { world.sum(zeros(device, dtype, {count}), Purpose::gradients); };
  };
  return {
      {"operation", "broadcast of 100 bytes from 1",
       [](Backend&, const Communicator& world) {
         Bytes bytes(100);
         world.broadcast(bytes, 1, Purpose::other);
       }},
      {"sequence", "sum of 100 fp32 (call 2",
       [](Backend& device, const Communicator& world) {
         world.barrier();
         majority(device, world);
       }},
      {"dtype", "sum of 100 fp64", sum_of(Dtype::f64, 100)},
      {"count", "sum of 99 fp32", sum_of(Dtype::f32, 99)},
      {"nothing", "sum of 0 fp32", sum_of(Dtype::f32, 0)},
      {"shares", "sum_scatter of 100 fp32",
       [](Backend& device, const Communicator& world) {
         std::vector<int64_t> counts(static_cast<size_t>(world.size()), 0);
         counts[0] = 100;
         world.sum_scatter(zeros(device, Dtype::f32, {100}), counts, Purpose::gradients);
       }},
      {"all_to_all", "all_to_all of 4 bytes",
       [](Backend&, const Communicator& world) {
         const std::vector<int64_t> counts(static_cast<size_t>(world.size()), 4);
         Bytes in(counts.size() * 4), out(counts.size() * 4);
         world.all_to_all(in, counts, out, counts, Purpose::other);
       }},
  };
}

TEST(DifferentCalls, AreFoundWhicheverRankMismatches) {
  const Threads one(1);
  for (const Mismatch& mismatch : mismatching_calls()) {
    for (const int ranks : {2, 3, 5}) {
      for (int who = 0; who < ranks; ++who) {
        const auto errors = run_ranks(ranks, [&](const Communicator& world) {
          const auto device = make_backend("cpu_reference");
          world.barrier();
          (world.rank() == who ? mismatch.call : majority)(*device, world);
          majority(*device, world);
        });
        const std::string mismatching_rank = text("rank ", who, " "), majority_rank = text("rank ", (who + 1) % ranks, " ");
        // Either may be seen first: the neighbor's other call, or a message of another size.
        EXPECT_THAT(errors, Contains(AllOf(StartsWith("70: rank"), HasSubstr(mismatching_rank))))
            << mismatch.name << ", rank " << who << " of " << ranks;
        EXPECT_THAT(errors, Each(Not(IsEmpty()))) << mismatch.name;
      }
    }
  }
}

TEST(DifferentCalls, AreNamedWithBothRanksAndWhatTheyCall) {
  const auto errors = run_ranks(2, [](const Communicator& world) {
    Bytes bytes(12);
    const std::vector<int64_t> counts{5, 7};
    world.rank() == 0 ? world.all_gather(bytes, counts, Purpose::other) : world.broadcast(bytes, 1, Purpose::other);
  });
  EXPECT_THAT(errors, Contains(StartsWith("70: ")));
  for (const std::string& error : errors) {
    if (error.starts_with("6:")) continue;  // the other one had left by then
    EXPECT_THAT(error,
                AllOf(StartsWith("70: ranks "), HasSubstr(" make different calls: "), HasSubstr("rank 0 all_gather of 12 bytes (call 0 of"),
                      HasSubstr("rank 1 broadcast of 12 bytes from 1 (call 0 of")));
  }
}

TEST(LentScratch, ThatDoesNotHoldASumIsRefused) {
  const auto scatter = [](Dtype dtype, int64_t elements) {
    const auto errors = run_ranks(3, [&](const Communicator& world) {
      const auto device = make_backend("cpu_reference");
      const std::vector<int64_t> counts{10, 20, 30};
      world.sum_scatter(zeros(*device, Dtype::f32, {60}), counts, Purpose::gradients, empty(*device, dtype, {elements}));
    });
    return errors[2];
  };
  EXPECT_EQ(scatter(Dtype::f32, 60), "");
  EXPECT_THAT(scatter(Dtype::f32, 59), HasSubstr("scratch is 59 elements of fp32, but 60 of fp32 are needed"));
  EXPECT_THAT(scatter(Dtype::bf16, 60), HasSubstr("needed"));
}

// Sums of counts are equal, boundaries are not; and in a pair of an all_to_all one has nothing to send.
TEST(DifferentCalls, OtherSharesOfTheSameBytesAreFound) {
  const auto gather = run_ranks(2, [](const Communicator& world) {
    Bytes bytes(12);
    const std::vector<int64_t> counts{world.rank() + 3, 9 - world.rank()};
    world.all_gather(bytes, counts, Purpose::other);
  });
  EXPECT_THAT(gather, Contains(AllOf(StartsWith("70: ranks "), HasSubstr("make different calls"))));
  const auto scatter = run_ranks(2, [](const Communicator& world) {
    const auto device = make_backend("cpu_reference");
    const std::vector<int64_t> counts{world.rank() + 30, 70 - world.rank()};
    world.sum_scatter(zeros(*device, Dtype::f32, {100}), counts, Purpose::gradients);
  });
  EXPECT_THAT(scatter, Contains(AllOf(StartsWith("70: ranks "), HasSubstr("make different calls"))));
  const auto dispatch = run_ranks(4, [](const Communicator& world) {
    std::vector<int64_t> in(4, 8), out(4, 8);
    if (world.rank() == 0) in[2] = 0;
    Bytes from(static_cast<size_t>(total(in))), to(32);
    world.all_to_all(from, in, to, out, Purpose::other);
    world.barrier();
  });
  EXPECT_THAT(dispatch[2], AllOf(StartsWith("70: ranks 0 and 2 "), HasSubstr("all_to_all of 0 bytes"), HasSubstr("all_to_all of 8 bytes")));
}

TEST(DifferentCalls, OfTwoGroupsOfTheSameRanksAreFound) {
  const auto errors = run_ranks(2, [](const Communicator& world) {
    const Communicator a = world.split(0), b = world.split(0);
    (world.rank() == 0 ? a : b).barrier();
  });
  EXPECT_THAT(errors, Contains(AllOf(StartsWith("70:"), HasSubstr("make different calls"))));
}

TEST(Failure, OfAPeerEndsTheWaitAndEveryLaterCall) {
  const auto errors = run_ranks(3, [](const Communicator& world) {
    if (world.rank() == 1) fail(ExitCode::data, "damaged");
    Bytes bytes(100000);
    const std::vector<int64_t> counts{50000, 25000, 25000};
    EXPECT_THROW(world.all_gather(bytes, counts, Purpose::other), Error);
    EXPECT_THROW(world.split(0), Error);
    world.barrier();
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"6: a peer was lost", "4: damaged", "6: a peer was lost"}));
}

TEST(Failure, IsWhatEveryLaterCallThrows) {
  int times = 0;
  auto transports = thread_transports(2, [&] { fail(ExitCode::peer_lost, "interrupt ", times++); });
  const Communicator world(std::move(transports[0]));
  for (int call = 0; call < 3; ++call) {
    EXPECT_STREQ(error_of([&] { world.barrier(); }).what(), "interrupt 0");
  }
}

TEST(Failure, LeavesNoMessageBehind) {
  auto transports = thread_transports(3);
  const Communicator first(std::move(transports[0])), second(std::move(transports[1]));
  const std::vector<int64_t> counts{4, 4, 4};
  Bytes in(12), out(12);
  first.stop();
  EXPECT_THROW(first.all_to_all(in, counts, out, counts, Purpose::other), Error);
  second.stop();
  EXPECT_EQ(error_of([&] { second.barrier(); }).code(), ExitCode::peer_lost) << "it has read what the first told";
}

TEST(Failure, StopEndsTheWaitOfAnotherThread) {
  const auto errors = run_ranks(2, [](const Communicator& world) {
    if (world.rank() == 1) return;
    std::thread stopper([&] { world.stop(); });
    EXPECT_THROW(world.barrier(), Error);
    stopper.join();
    world.barrier();
  });
  EXPECT_EQ(errors[0], "6: rank 0 aborted its communication");
}

TEST(Failure, ASecondCollectiveAtTheSameTimeIsRefused) {
  std::atomic<bool> refused{false};
  const auto errors = run_ranks(2, [&](const Communicator& world) {
    const Communicator group = world.split(0);
    if (world.rank() == 1) {
      while (!refused) std::this_thread::yield();
      return world.barrier();
    }
    std::thread waits([&] { world.barrier(); });
    while (world.latest_calls().size() < 2) std::this_thread::yield();
    const Error error = error_of([&] { group.barrier(); });
    EXPECT_THAT(error.what(), HasSubstr("CommQueue"));
    EXPECT_EQ(error.code(), ExitCode::internal);
    refused = true;
    waits.join();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(LatestCalls, AreKeptForReports) {
  run_ranks(2, [](const Communicator& world) {
    for (int i = 0; i < 20; ++i) world.barrier();
    const std::vector<std::string> calls = world.latest_calls();
    EXPECT_EQ(calls.size(), 16U);
    EXPECT_THAT(calls.front(), StartsWith("all_gather of 2 bytes (call 4 of group "));
    EXPECT_THAT(calls.back(), StartsWith("all_gather of 2 bytes (call 19 of group "));
  });
}

}  // namespace mantissa::test::comm_test
