#include "comm/comm_queue.h"

#include <gmock/gmock.h>

#include <numeric>

#include "comm_cases.h"
#include "files.h"
#include "thread_ranks.h"

namespace mantissa::test::comm_queue_test {

TEST(CommQueue, RunsWhatItIsGivenInOrderOnAThreadOfItsOwn) {
  expect_on_ranks(4, [](const Communicator& world) {
    std::vector<int> order;
    std::vector<Bytes> large(20, Bytes(1000));
    const std::vector<int64_t> counts{100, 0, 600, 300};
    std::thread::id other;
    {
      CommQueue queue(world);
      std::vector<Work> work;
      for (int i = 0; i < 20; ++i) {
        large[static_cast<size_t>(i)] = gathered(counts, world.rank());
        work.push_back(queue.submit([&, i] {
          world.all_gather(large[static_cast<size_t>(i)], counts, Purpose::parameters);
          order.push_back(i);
          other = std::this_thread::get_id();
        }));
      }
      work[7].wait();
      work[7].wait();
      require(large[7] == gathered(counts, -1), "not done after wait()");
    }
    std::vector<int> expected(20);
    std::iota(expected.begin(), expected.end(), 0);
    require(order == expected, "the queue left something, or another order");
    require(other != std::this_thread::get_id(), "not beside the computation");
  });
}

TEST(CommQueue, TimeInCommunicationIsCountedByThread) {
  expect_on_ranks(2, [](const Communicator& world) {
    const double late = 0.1;
    const auto be_late = [&] {
      if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::duration<double>(late));
    };
    const CommunicationMeter meter;
    const auto waited = [&] { return meter.seconds(); };
    be_late();
    EXPECT_EQ(waited(), 0) << "what a thread does else is none";
    world.barrier();
    const double called = waited();
    CommQueue queue(world);
    const Work work = queue.submit([&] {
      be_late();
      world.barrier();
    });
    EXPECT_EQ(waited(), called) << "nor what the queue does";
    work.wait();
    if (world.rank() == 0) {
      EXPECT_GT(called, 0.5 * late);
      EXPECT_GT(waited() - called, 0.5 * late);
    }
    const double before = waited();
    std::atomic<bool> done{false};
    queue.submit([&] {
      world.barrier();
      done = true;
    });
    while (!done) std::this_thread::yield();
    EXPECT_EQ(waited(), before) << "nor what the queue did meanwhile";
  });
}

TEST(CommQueue, AnExceptionReachesEveryWaitAndWhatFollowsDoesNotRun) {
  for (const int ranks : {1, 2}) {
    expect_on_ranks(ranks, [](const Communicator& world) {
      CommQueue queue(world);
      bool ran = false;
      const Work before = queue.submit([&] { world.barrier(); });
      const Work fails = queue.submit([] { fail(ExitCode::data, "no such thing"); });
      const Work after = queue.submit([&] { ran = true; });
      before.wait();
      for (const Work& work : {fails, fails, after}) {
        const Error error = error_of([&] { work.wait(); });
        EXPECT_STREQ(error.what(), "no such thing");
        EXPECT_EQ(error.code(), ExitCode::data);
      }
      EXPECT_FALSE(ran);
    });
  }
}

TEST(CommQueue, AnExceptionThatUnwindsItsBlockEndsWhatIsUnderWay) {
  std::atomic<bool> gone{false};
  const auto errors = run_ranks(2, [&](const Communicator& world) {
    if (world.rank() == 1) {
      while (!gone) std::this_thread::yield();  // never comes to the barrier
      return;
    }
    Work work;
    const Error error = error_of([&] {
      CommQueue queue(world);
      work = queue.submit([&] { world.barrier(); });
      fail(ExitCode::data, "damaged");
    });
    EXPECT_EQ(error.code(), ExitCode::data);
    gone = true;
    work.wait();
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"6: rank 0 aborted its communication", ""}));
}

TEST(CommQueue, ACollectiveBesideItBeginsWhenItHasNoWork) {
  expect_on_ranks(4, [](const Communicator& world) {
    CommQueue queue(world);
    for (int round = 0; round < 50; ++round) {
      std::vector<int> submitted(3);
      for (int& sum : submitted) {
        queue.submit([&, round] { sum = static_cast<int>(world.sum(int64_t{world.rank()} + round)); });
      }
      const int64_t own = world.sum(int64_t{round});
      require(own == 4 * round && submitted == std::vector<int>(3, 6 + 4 * round), "before the queue's work");
    }
  });
}

TEST(CommQueue, AProcessHasOneAtATime) {
  expect_on_ranks(2, [](const Communicator& world) {
    for (int i = 0; i < 2; ++i) {
      CommQueue queue(world);
      EXPECT_THROW(CommQueue second(world), Error);
      queue.submit([&] { world.barrier(); });
    }
  });
}

TEST(CommQueue, OfAGroupOfOneRunsAtOnce) {
  CommQueue queue{Communicator()};
  std::thread::id thread;
  const Work work = queue.submit([&] { thread = std::this_thread::get_id(); });
  EXPECT_EQ(thread, std::this_thread::get_id());
  work.wait();
  Work().wait();
}

TEST(CommQueue, FreesWhatABodyHoldsBeforeItsWorkIsDone) {
  expect_on_ranks(2, [](const Communicator& world) {
    CommQueue queue(world);
    for (int round = 0; round < 200; ++round) {
      const auto held = std::make_shared<int>(3);
      queue.submit([held] {}).wait();
      EXPECT_EQ(held.use_count(), 1);
    }
  });
}

TEST(Mesh, RanksAreOrderedTensorFirst) {
  for (const int tensor : {1, 2, 3, 6}) {
    expect_on_ranks(6, [&](const Communicator& world) {
      const Mesh mesh = make_mesh(world, {.tensor = tensor});
      std::vector<int> in_tensor, in_data;
      for (int r = 0; r < 6; ++r) {
        if (r / tensor == world.rank() / tensor) in_tensor.push_back(r);
        if (r % tensor == world.rank() % tensor) in_data.push_back(r);
      }
      require(mesh.tensor.all(world.rank()) == in_tensor && mesh.data.all(world.rank()) == in_data, "other groups");
      require(mesh.world.rank() == mesh.data.rank() * tensor + mesh.tensor.rank(), "other order");
    });
  }
  EXPECT_EQ(make_mesh({}, {}).data.size(), 1);
  for (const int tensor : {0, 2, -1}) {
    EXPECT_EQ(error_of([&] { make_mesh({}, {.tensor = tensor}); }).code(), ExitCode::usage) << tensor;
  }
}

TEST(Agree, AllThrowTheErrorOfTheLowestRank) {
  const auto errors = run_ranks(4, [](const Communicator& world) {
    agree(world, [] {});
    const Error error = error_of([&] {
      agree(world, [&] {
        if (world.rank() == 1) fail(ExitCode::data, "shard 1 is damaged");
        if (world.rank() == 3) throw std::runtime_error("other");
      });
    });
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_STREQ(error.what(), world.rank() == 1 ? "shard 1 is damaged" : "rank 1: shard 1 is damaged");
    world.barrier();
    agree(world, [&] {
      if (world.rank() == 2) throw std::runtime_error("");
    });
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"70: rank 2: ", "70: rank 2: ", "70: ", "70: rank 2: "}));
}

// A rank that leaves with the error ends the waits of the others: nobody may still be on the way to it.
TEST(Agree, ThrowsAlikeHoweverSlowARankIs) {
  for (int round = 0; round < 5; ++round) {
    for (const int slow : {0, 1, 2, 3}) {
      const auto errors = run_ranks(
          4, [](const Communicator& world) { agree(world, [&] { require(world.rank() != 1, ExitCode::data, "shard 1 is damaged"); }); },
          {.rank = slow, .sleep = std::chrono::milliseconds(5)});
      EXPECT_THAT(errors, ::testing::Each(::testing::AllOf(::testing::StartsWith("4: "), ::testing::EndsWith("shard 1 is damaged"))))
          << "rank " << slow << " is slow";
    }
  }
}

TEST(Agree, WantOfMemoryIsTheHostsAndALostPeerIsThrownAtOnce) {
  const auto agreeing = [](const std::function<void()>& fails) {
    return run_ranks(2, [&](const Communicator& world) {
      agree(world, [&] {
        if (world.rank() == 1) fails();
      });
    });
  };
  EXPECT_EQ(agreeing([] { throw std::bad_alloc(); }), (std::vector<std::string>{"3: rank 1: out of memory", "3: out of memory"}));
  EXPECT_EQ(agreeing([] { fail(ExitCode::peer_lost, "nobody there"); }),
            (std::vector<std::string>{"6: a peer was lost", "6: nobody there"}));
  EXPECT_THROW(agree({}, [] { throw std::bad_alloc(); }), std::bad_alloc);
}

}  // namespace mantissa::test::comm_queue_test
