// The store among ranks that belong to it: values, barriers, comparison, failures, and what there is to say of who is missing.
#include "mantissa/job/store.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <atomic>
#include <set>

#include "store_ranks.h"

namespace mantissa::store_test {

using ::testing::HasSubstr;
using ::testing::Not;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

class StoreRanks : public test::StoreTest {
 protected:
  static int free_port() {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof name;
    EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&name), size), 0);
    EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size), 0);
    ::close(fd);
    return ntohs(name.sin_port);
  }
};

TEST_F(StoreRanks, ValuesReachEveryRankAndAreWaitedFor) {
  expect_no_errors(in_store(4, options(), [](Store& store, int rank) {
    store.set("of " + std::to_string(rank), std::string(1000, static_cast<char>('a' + rank)));
    for (int other = 0; other < 4; ++other)
      EXPECT_EQ(store.get("of " + std::to_string(other)), std::string(1000, static_cast<char>('a' + other)));
    if (rank == 3) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (rank == 3) store.set("late", std::string("\0\n\xff", 3));
    EXPECT_EQ(store.get("late"), std::string("\0\n\xff", 3));
    store.set("empty", "");
    EXPECT_EQ(store.get("empty"), "");
  }));
}

TEST_F(StoreRanks, LargeValuesTravelAndTooLargeOnesAreRefused) {
  expect_no_errors(in_store(2, options(), [](Store& store, int rank) {
    const std::string value(Store::kMostValueBytes - 1, 'x');
    if (rank == 0) store.set("k", value);
    EXPECT_EQ(store.get("k"), value);
    EXPECT_EQ(test::error_of([&] { store.set("k", std::string(Store::kMostValueBytes, 'x')); }).code(), ExitCode::internal);
  }));
}

TEST_F(StoreRanks, WhatAllGiveReachesAll) {
  for (const size_t bytes : {size_t{0}, size_t{200}, Store::kMostValueBytes * 2 / 5, Store::kMostValueBytes - 2000}) {
    expect_no_errors(in_store(5, options(), [&](Store& store, int rank) {
      const auto given = [&](int of) { return std::string(bytes, static_cast<char>('a' + of)) + std::to_string(of); };
      for (const std::string name : {"first", "second"}) {
        const std::vector<std::string> all = store.gather(name, given(rank) + name);
        ASSERT_EQ(all.size(), 5U);
        for (int of = 0; of < 5; ++of) EXPECT_EQ(all[static_cast<size_t>(of)], given(of) + name);
      }
    }));
  }
}

TEST_F(StoreRanks, NobodyPassesABarrierBeforeAllAreThere) {
  std::atomic<int> arrived{0};
  expect_no_errors(in_store(4, options(), [&](Store& store, int rank) {
    for (int round = 1; round <= 50; ++round) {
      if (rank == round % 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ++arrived;
      store.barrier("same name");
      EXPECT_GE(arrived, 4 * round);
    }
  }));
}

TEST_F(StoreRanks, EqualInputsAreEqual) {
  expect_no_errors(in_store(3, options(), [](Store& store, int) {
    store.compare({{"config", "1"}, {"plan", "2"}});
    store.compare({{"config", "3"}});
  }));
}

TEST_F(StoreRanks, TheMismatchingRankAndItemAreNamedToAll) {
  const auto errors = in_store(4, options(), [](Store& store, int rank) {
    store.compare({{"config", rank == 2 ? "aaaa" : "bbbb"}, {"data", "1"}, {"plan", "2"}});
  });
  for (const auto& error : errors) {
    expect_error(error, ExitCode::usage, "config of rank 2");
    EXPECT_THAT(error->what(), HasSubstr("is aaaa, of most ranks bbbb"));
    EXPECT_THAT(error->what(), Not(HasSubstr("plan")));
  }
}

TEST_F(StoreRanks, AnItemThatOneRankLacksMismatches) {
  const auto errors = in_store(2, options(), [](Store& store, int rank) {
    std::vector<NamedHash> items = {{"a", "1"}, {"b", "2"}};
    items.resize(rank == 0 ? 2 : 1);
    store.compare(items);
  });
  for (const auto& error : errors) expect_error(error, ExitCode::usage, "b of rank 1");
}

TEST_F(StoreRanks, OneRanksFailureIsEverybodysWithItsCode) {
  const auto errors = in_store(4, options(), [](Store& store, int rank) {
    store.barrier("begin");
    if (rank == 2) {
      store.fail_all(ExitCode::data, "/data/x: damaged");
      store.check();
    } else if (rank == 1) {
      store.get("never");
    } else if (rank == 3) {
      store.barrier("never");
    } else {
      wait_for_failure(store);
    }
  });
  expect_error(errors[2], ExitCode::data, "/data/x: damaged");
  for (const size_t other : {size_t{0}, size_t{1}, size_t{3}}) {
    expect_error(errors[other], ExitCode::data, "rank 2 (");
    EXPECT_THAT(errors[other]->what(), HasSubstr("): /data/x: damaged"));
  }
}

TEST_F(StoreRanks, TheFirstFailureCounts) {
  const auto errors = in_store(2, options(), [](Store& store, int rank) {
    if (rank == 0) {
      wait_for_failure(store);
    } else {
      store.fail_all(ExitCode::data, "first");
      store.fail_all(ExitCode::storage, "second");
      EXPECT_EQ(store.failure()->message, "first");
      EXPECT_EQ(store.failure()->rank, 1);
    }
  });
  expect_error(errors[0], ExitCode::data, "first");
}

// Who misses a killed rank may be heard before the store sees that rank's connection end, also if it goes itself meanwhile.
TEST_F(StoreRanks, ALostRankIsTheCauseAlsoWhereItIsMissedFirst) {
  StoreOptions patient = options();
  patient.cause_timeout_s = 20;
  for (const int misses : {0, 1}) {
    const auto errors = on_ranks(4, [&](int rank) {
      Store store(launch(rank, 4), patient);
      store.barrier("begin");
      if (rank == 2) return std::this_thread::sleep_for(std::chrono::milliseconds(300));
      if (rank == misses) store.fail_all(ExitCode::peer_lost, "receiving from rank 2: Input/output error");
      wait_for_failure(store);
    });
    for (const int rank : {misses, 3}) {
      expect_error(errors[static_cast<size_t>(rank)], ExitCode::peer_lost, "rank 2");
      EXPECT_THAT(errors[static_cast<size_t>(rank)]->what(), HasSubstr("closed its connection")) << misses;
    }
  }
}

TEST_F(StoreRanks, FailureOfRank0ReachesTheOthers) {
  const auto errors = in_store(3, options(), [](Store& store, int rank) {
    store.barrier("begin");
    if (rank == 0) store.fail_all(ExitCode::numerical, "3 steps that are not finite");
    wait_for_failure(store);
  });
  for (const auto& error : errors) expect_error(error, ExitCode::numerical, "3 steps that are not finite");
}

TEST_F(StoreRanks, RankThatGoesWithoutLeavingIsLostAtOnce) {
  for (const int lost : {0, 2}) {
    Clock::time_point gone;
    const auto errors = on_ranks(3, [&](int rank) {
      Store store(launch(rank, 3), options());
      store.progress().at(7, "forward");
      store.barrier("begin");
      if (rank == lost) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      if (rank == lost) return void(gone = Clock::now());
      try {
        store.get("never");
      } catch (const Error&) {
        EXPECT_LT(seconds_since(gone), 5) << "of 20 s that a silent rank has";
        throw;
      }
    });
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == lost) continue;
      const auto& error = errors[static_cast<size_t>(rank)];
      expect_error(error, ExitCode::peer_lost, "rank " + std::to_string(lost));
      EXPECT_THAT(error->what(), HasSubstr("closed its connection"));
    }
  }
}

TEST_F(StoreRanks, LeavingIsNoLoss) {
  std::atomic<bool> late_left{false};
  expect_no_errors(on_ranks(3, [&](int rank) {
    Store store(launch(rank, 3), options());
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_FALSE(store.failure());
    if (rank == 1) late_left = true;
    store.leave();
    EXPECT_TRUE(rank != 0 || late_left) << "rank 0 stays until all have left";
  }));
}

TEST_F(StoreRanks, RequestToStopEndsEveryWaitOfTheStart) {
  for (const std::set<int>& there : {std::set{0}, {1}, {0, 1}, {0, 1, 3}}) {  // of 4 ranks; the lowest is asked
    std::atomic<bool> asked{false};
    const auto errors = on_ranks(5, [&](int rank) {
      if (rank == 4) {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        asked = true;
      }
      if (!there.contains(rank)) return;
      StoreOptions of = options();
      if (rank == *there.begin()) of.stop_asked = [&] { return asked.load(); };
      Store store(launch(rank, 4), of);
    });
    for (const int rank : there) expect_error(errors[static_cast<size_t>(rank)], ExitCode::stopped, "asked to stop");
  }
}

TEST_F(StoreRanks, LongTimeoutsDoNotOverflow) {
  StoreOptions patient = options();
  patient.init_timeout_s = patient.heartbeat_timeout_s = 1e6;
  expect_no_errors(in_store(2, patient, [](Store& store, int rank) {
    if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    store.barrier("late");
  }));
}

TEST_F(StoreRanks, MissingRanksAreNamedWithTheirHosts) {
  StoreOptions short_wait = options();
  short_wait.init_timeout_s = 1;
  const auto errors = on_ranks(2, [&](int rank) {
    Launch of = launch(rank, 5);
    of.local_size = 3;  // ranks 3 and 4 are elsewhere
    Store store(of, short_wait);
  });
  for (const auto& error : errors) {
    expect_error(error, ExitCode::peer_lost, "not all ranks are there within 1 s (parallel.init_timeout_s); missing: rank 2 (");
    EXPECT_THAT(error->what(), HasSubstr("), rank 3, rank 4"));
  }
}

TEST_F(StoreRanks, RankWithoutRank0SaysWhatItTried) {
  StoreOptions short_wait = options();
  short_wait.init_timeout_s = 0.3;
  const Error unpublished = test::error_of([&] { Store store(launch(1, 2), short_wait); });
  EXPECT_EQ(unpublished.code(), ExitCode::peer_lost);
  EXPECT_THAT(unpublished.what(), HasSubstr("no file in " + folder_.path().string()));
  Launch by_port = launch(1, 2);
  by_port.port = free_port();
  const Error refused = test::error_of([&] { Store store(by_port, short_wait); });
  EXPECT_EQ(refused.code(), ExitCode::peer_lost);
  EXPECT_THAT(refused.what(), HasSubstr("within 0.3 s (parallel.init_timeout_s): Connection refused"));
}

TEST_F(StoreRanks, BarrierThatARankDoesNotReachNamesIt) {
  const auto errors = in_store(3, options(), [](Store& store, int rank) {
    if (rank != 1) store.barrier("save", 0.5);
    wait_for_failure(store);
  });
  for (const auto& error : errors) expect_error(error, ExitCode::peer_lost, "not all ranks came to 'save' within 0.5 s; missing: rank 1");
}

TEST_F(StoreRanks, ValueThatNobodySetsEndsTheWait) {
  const auto errors = in_store(2, options(), [](Store& store, int rank) {
    if (rank == 1) store.get("never", 0.2);
    wait_for_failure(store);
  });
  for (const auto& error : errors) expect_error(error, ExitCode::peer_lost, "value of 'never': waited 0.2 s");
}

TEST_F(StoreRanks, DifferentOperationsAtOneNumberEndTheJob) {
  StoreOptions fast = options();
  fast.heartbeat_timeout_s = 2;
  const auto errors = in_store(3, fast, [](Store& store, int rank) {
    store.progress().at(4, "backward");
    for (uint32_t number = 1; number < 20; ++number) store.progress().collective(number, number);
    std::this_thread::sleep_for(std::chrono::milliseconds(500 * rank));
    store.progress().collective(20, rank == 1 ? 8 : 7);
    wait_for_failure(store);
  });
  for (const auto& error : errors) {
    expect_error(error, ExitCode::internal, "collective 20 is one operation on rank");
    EXPECT_THAT(error->what(), HasSubstr("rank 1 ("));
    EXPECT_THAT(error->what(), HasSubstr("(step 4, backward)"));
  }
}

TEST_F(StoreRanks, WhoIsBehindIsNamedWhenAWaitTimesOut) {
  StoreOptions fast = options();
  fast.heartbeat_timeout_s = 2;
  const auto errors = in_store(3, fast, [](Store& store, int rank) {
    store.progress().at(4, "backward");
    store.progress().collective(rank == 2 ? 17 : 18, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    if (rank == 1) store.fail_all(ExitCode::peer_lost, "all_gather waited too long");
    wait_for_failure(store);
  });
  for (const auto& error : errors) expect_error(error, ExitCode::peer_lost, "all_gather waited too long");
  EXPECT_THAT(errors[0]->what(), HasSubstr("all_gather waited too long; rank 2"));
  EXPECT_THAT(errors[0]->what(), HasSubstr("is behind: at collective 17 (step 4, backward), others at 18"));
}

TEST_F(StoreRanks, PortInUseIsFoundAtOnce) {
  const int held = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof name;
  ASSERT_EQ(::bind(held, reinterpret_cast<sockaddr*>(&name), size), 0);
  ASSERT_EQ(::listen(held, 1), 0);
  ASSERT_EQ(::getsockname(held, reinterpret_cast<sockaddr*>(&name), &size), 0);
  Launch taken = launch(0, 2);
  taken.port = ntohs(name.sin_port);
  const auto start = Clock::now();
  const Error error = test::error_of([&] { Store store(taken, options()); });
  EXPECT_EQ(error.code(), ExitCode::environment);
  EXPECT_THAT(error.what(), HasSubstr("MASTER_PORT=" + std::to_string(taken.port) + ": the port is in use"));
  EXPECT_LT(seconds_since(start), 1);
  ::close(held);
}

TEST_F(StoreRanks, ExplicitPortServesOneJobAfterTheOther) {
  const int port = free_port();
  for (int attempt = 0; attempt < 3; ++attempt) {
    expect_no_errors(on_ranks(3, [&](int rank) {
      Launch of = launch(rank, 3);
      of.port = port;
      of.restart = attempt;
      Store store(of, options());
      store.leave();
    }));
  }
}

TEST_F(StoreRanks, SoftLimitOfOpenFilesIsRaised) {
  rlimit before{}, raised{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit low{.rlim_cur = 150, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  expect_no_errors(in_store(2, options(), [](Store& store, int) { store.barrier("met"); }));
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &raised), 0);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(raised.rlim_cur, 2U + 128U + 64U);
  EXPECT_EQ(raised.rlim_max, before.rlim_max);
}

TEST_F(StoreRanks, HardLimitOfOpenFilesIsNamedBeforeItIsMet) {
  const auto with_hard_limit = [&] {
    const rlimit low{.rlim_cur = 100, .rlim_max = 150};
    ::setrlimit(RLIMIT_NOFILE, &low);
    const Error error = test::error_of([&] { Store store(launch(0, 2), options()); });
    std::cerr << error.what();
    ::_exit(static_cast<int>(error.code()));
  };
  EXPECT_EXIT(with_hard_limit(), ::testing::ExitedWithCode(static_cast<int>(ExitCode::environment)),
              "needs 194 open files, and the limit is 150 .ulimit -Hn.");
}

TEST_F(StoreRanks, ManyJobsAtOnceEachFindTheirOwn) {
  expect_no_errors(on_ranks(24, [&](int thread) {
    Launch of = launch(thread % 3, 3);
    of.job = "job " + std::to_string(thread / 3);
    Store store(of, options());
    if (of.rank == 0) store.set("job", of.job);
    EXPECT_EQ(store.get("job"), of.job);
    store.leave();
  }));
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path())) << "what was published is gone";
}

}  // namespace mantissa::store_test
