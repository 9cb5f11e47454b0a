// The store among ranks that belong to it: values, barriers, comparison, failures, and messages about ranks that are missing.
#include "job/store.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>

#include "store_ranks.h"

namespace mantissa::store_test {

using test::Errors;
using test::expect_error;
using test::expect_no_errors;
using test::on_ranks;
using test::pause_ms;
using test::StoreJob;
using test::wait_for_failure;

// A port of loopback, and a socket that holds it if it listens.
std::pair<int, int> bound_port(bool listens) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof name;
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&name), size), 0);
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size), 0);
  if (!listens || ::listen(fd, 1) != 0) ::close(fd);
  return {ntohs(name.sin_port), fd};
}

TEST(StoreRanks, ValuesReachEveryRankAndAreWaitedFor) {
  const StoreJob job;
  expect_no_errors(job.in_store(4, job.options(), [](Store& store, int rank) {
    const auto value = [](int of) { return std::string(1000, static_cast<char>('a' + of)); };
    store.set("of " + std::to_string(rank), value(rank));
    for (int other = 0; other < 4; ++other) EXPECT_EQ(store.get("of " + std::to_string(other)), value(other));
    if (rank == 3) pause_ms(50);
    if (rank == 3) store.set("late", std::string("\0\n\xff", 3));
    EXPECT_EQ(store.get("late"), std::string("\0\n\xff", 3));
    store.set("empty", "");
    EXPECT_EQ(store.get("empty"), "");
    const std::string large(Store::kMostValueBytes - 1, 'x');
    if (rank == 0) store.set("k", large);
    EXPECT_EQ(store.get("k"), large);
    EXPECT_EQ(test::error_of([&] { store.set("k", std::string(Store::kMostValueBytes, 'x')); }).code(), ExitCode::internal);
  }));
}

TEST(StoreRanks, WhatAllGiveReachesAllAndIsCompared) {
  const StoreJob job;
  expect_no_errors(job.in_store(5, job.options(), [](Store& store, int rank) {
    for (const size_t bytes : {size_t{0}, size_t{200}, Store::kMostValueBytes * 2 / 5, Store::kMostValueBytes - 2000}) {
      const auto given = [&](int of) { return std::string(bytes, static_cast<char>('a' + of)) + std::to_string(of); };
      const std::vector<std::string> all = store.gather(text("of ", bytes), given(rank));
      ASSERT_EQ(all.size(), 5U);
      for (int of = 0; of < 5; ++of) EXPECT_EQ(all[static_cast<size_t>(of)], given(of));
    }
    store.compare({{"config", "1"}, {"plan", "2"}});
    store.compare({{"config", "3"}});
  }));
}

TEST(StoreRanks, NobodyPassesABarrierOrEndsTheStoreBeforeAllAreThere) {
  const StoreJob job;
  std::atomic<int> arrived{0};
  expect_no_errors(on_ranks(4, [&](int rank) {
    Store store(job.launch(rank, 4), job.options());
    for (int round = 1; round <= 50; ++round) {
      if (rank == round % 4) pause_ms(1);
      ++arrived;
      store.barrier("same name");
      EXPECT_GE(arrived, 4 * round);
    }
    if (rank == 1) pause_ms(200);
    EXPECT_FALSE(store.failure());
    ++arrived;
    store.leave();
    EXPECT_TRUE(rank != 0 || arrived == 204) << "rank 0 stays until all have left";
  }));
}

using Run = std::function<Errors(const StoreJob&)>;

// One goes without leaving, after `misses` may have heard of it first, also if that rank goes itself meanwhile.
Run losing(int lost, int misses = -1) {
  return [=](const StoreJob& job) {
    StoreOptions patient = job.options();
    patient.cause_timeout_s = 20;
    return on_ranks(4, [&](int rank) {
      Store store(job.launch(rank, 4), patient);
      store.progress().set_phase(7, "forward");
      store.barrier("begin");
      if (rank == lost) return pause_ms(1000);  // a step is told a tenth of a second after the last
      if (rank == misses) store.fail_all(ExitCode::peer_lost, "receiving from a rank: Input/output error");
      store.get("never");
    });
  };
}

// So many of 4 ranks have begun; the lowest of them is asked to stop.
Run stopping(int first, int last) {
  return [=](const StoreJob& job) {
    std::atomic<bool> asked{false};
    return on_ranks(5, [&](int rank) {
      if (rank == 4) pause_ms(300);
      if (rank == 4) asked = true;
      if (rank < first || rank > last) return;
      StoreOptions of = job.options();
      if (rank == first) of.stop_asked = [&] { return asked.load(); };
      Store store(job.launch(rank, 4), of);
    });
  };
}

Run in_store(int world, const std::function<void(Store&, int)>& body) {
  return [=](const StoreJob& job) {
    StoreOptions fast = job.options(2);
    fast.cause_timeout_s = 1;
    return job.in_store(world, fast, body);
  };
}

Run failing(int who, ExitCode code, const std::string& why) {
  return in_store(4, [=](Store& store, int rank) {
    store.barrier("begin");
    if (rank == who) {
      store.fail_all(code, why);
      store.fail_all(ExitCode::storage, "second");
      EXPECT_EQ(store.failure()->message, why);
      EXPECT_EQ(store.failure()->rank, who);
    }
    const Error told = test::error_of([&] {
      rank == 1 ? void(store.get("never")) : rank == 3 ? store.barrier("never") : wait_for_failure(store);
    });
    EXPECT_EQ(std::string(told.what()).starts_with(text("rank ", who, " (")), rank != who) << told.what();
    throw told;
  });
}

Run comparing(int world, const std::function<std::vector<NamedHash>(int)>& items_of) {
  return in_store(world, [=](Store& store, int rank) { store.compare(items_of(rank)); });
}

void different_operations(Store& store, int rank) {
  store.progress().set_phase(4, "backward");
  for (uint32_t number = 1; number < 20; ++number) store.progress().collective(number, number);
  pause_ms(500 * rank);
  store.progress().collective(20, rank == 1 ? 8 : 7);
  wait_for_failure(store);
}

void being_behind(Store& store, int rank) {
  store.progress().set_phase(4, "backward");
  store.progress().collective(rank == 2 ? 17 : 18, 0);
  pause_ms(1500);
  if (rank == 1) store.fail_all(ExitCode::peer_lost, "waited too long");
  wait_for_failure(store);
}

void never_all_there(Store& store, int rank) {
  if (rank != 1) store.barrier("save", 0.5);
  wait_for_failure(store);
}

void never_set(Store& store, int rank) {
  if (rank == 1) store.get("never", 0.2);
  wait_for_failure(store);
}

Errors missing(const StoreJob& job) {
  return on_ranks(2, [&](int rank) {
    Launch of = job.launch(rank, 5);
    of.local_size = 3;  // ranks 3 and 4 are elsewhere
    Store store(of, job.options(20, 1));
  });
}

Errors without_rank_0(const StoreJob& job, int port) {
  return on_ranks(1, [&](int) {
    Launch of = job.launch(1, 2);
    of.port = port;
    Store store(of, job.options(20, 0.3));
  });
}

TEST(StoreRanks, OneRanksFailureIsEverybodysWithItsCodeAndCause) {
  const ExitCode lost = ExitCode::peer_lost, stopped = ExitCode::stopped;
  const auto mismatching = [](int rank) {
    return std::vector<NamedHash>{{"config", rank == 2 ? "aa" : "bb"}, {"data", "1"}, {"plan", "2"}};
  };
  const auto lacking = [](int rank) { return std::vector<NamedHash>{{"a", "1"}, {rank == 0 ? "b" : "a", "1"}}; };
  test::expect_at_once({
      {"mismatch", comparing(4, mismatching), 4, ExitCode::usage, "different inputs: config of rank 2 \\(.*\\) is aa, of most ranks bb$"},
      {"item lacking", comparing(2, lacking), 2, ExitCode::usage, "b of rank 1"},
      {"one fails", failing(2, ExitCode::data, "x: damaged"), 4, ExitCode::data, "^(rank 2 \\(.*\\): )?x: damaged$"},
      {"rank 0 fails", failing(0, ExitCode::numerical, "not finite"), 4, ExitCode::numerical, "not finite$"},
      {"barrier", in_store(3, never_all_there), 3, lost, "not all ranks reached 'save' within 0.5 s; missing: rank 1"},
      {"value", in_store(2, never_set), 2, lost, "value of 'never': waited 0.2 s"},
      {"operations", in_store(3, different_operations), 3, ExitCode::internal,
       "collective 20 is one operation on .*rank 1 \\(.*\\(step 4, backward\\)"},
      {"behind", in_store(3, being_behind), 3, lost,
       "waited too long; rank 2 \\(.*\\) is behind: at collective 17 \\(step 4, backward\\), others at 18"},
      {"lost", losing(2), 3, lost, "rank 2 .*closed its connection; last seen at step 7 \\(forward\\)"},
      {"rank 0 lost", losing(0), 3, lost, "rank 0 .*closed its connection"},
      {"missed by 0", losing(2, 0), 3, lost, "rank 2 .*closed its connection"},
      {"missed by 1", losing(2, 1), 3, lost, "rank 2 .*closed its connection"},
      {"stop of 0", stopping(0, 0), 1, stopped, "asked to stop"},
      {"stop of 1", stopping(1, 1), 1, stopped, "asked to stop"},
      {"stop of two", stopping(0, 1), 2, stopped, "asked to stop"},
      {"stop of three", stopping(0, 2), 3, stopped, "asked to stop"},
      {"missing", missing, 2, lost,
       "not all ranks joined within 1 s \\(parallel.init_timeout_s\\); missing: rank 2 \\(.*\\), rank 3, rank 4"},
      {"no file", [](const StoreJob& job) { return without_rank_0(job, 0); }, 1, lost, "within 0.3 s .*: no file in .*mantissa-test"},
      {"no listener", [](const StoreJob& job) { return without_rank_0(job, bound_port(false).first); }, 1, lost,
       "within 0.3 s \\(parallel.init_timeout_s\\): Connection refused"},
  });
}

TEST(StoreRanks, LongTimeoutsDoNotOverflow) {
  const StoreJob job;
  expect_no_errors(job.in_store(2, job.options(1e6, 1e6), [](Store& store, int rank) {
    pause_ms(rank == 0 ? 200 : 0);
    store.barrier("late");
  }));
}

TEST(StoreRanks, PortInUseIsFoundAtOnce) {
  const StoreJob job;
  const auto [port, held] = bound_port(true);
  Launch taken = job.launch(0, 2);
  taken.port = port;
  const Errors errors = on_ranks(1, [&](int) { Store store(taken, job.options()); });
  expect_error(errors[0], ExitCode::environment, text("MASTER_PORT=", port, ": the port is in use"));
  ::close(held);
}

TEST(StoreRanks, ExplicitPortServesOneJobAfterTheOther) {
  const StoreJob job;
  const int port = bound_port(false).first;
  for (int attempt = 0; attempt < 3; ++attempt) {
    expect_no_errors(on_ranks(3, [&](int rank) {
      Launch of = job.launch(rank, 3);
      of.port = port;
      of.restart = attempt;
      Store store(of, job.options());
      store.leave();
    }));
  }
}

TEST(StoreRanks, ManyJobsAtOnceEachFindTheirOwn) {
  const StoreJob folder;
  expect_no_errors(on_ranks(24, [&](int thread) {
    const Launch of = folder.launch(thread % 3, 3, text("job ", thread / 3));
    Store store(of, folder.options());
    if (of.rank == 0) store.set("job", of.job);
    EXPECT_EQ(store.get("job"), of.job);
    store.leave();
  }));
  EXPECT_TRUE(std::filesystem::is_empty(folder.folder.path())) << "what was published is gone";
}

TEST(StoreRanks, LimitsOfOpenFilesAreRaisedOrNamed) {
  const StoreJob job;
  rlimit before{}, raised{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit low{.rlim_cur = 150, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  expect_no_errors(job.in_store(2, job.options(), [](Store& store, int) { store.barrier("met"); }));
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &raised), 0);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(raised.rlim_cur, 2U + 128U + 64U);
  EXPECT_EQ(raised.rlim_max, before.rlim_max);
  const auto with_hard_limit = [&] {
    const rlimit hard{.rlim_cur = 100, .rlim_max = 150};
    ::setrlimit(RLIMIT_NOFILE, &hard);
    const Error error = test::error_of([&] { Store store(job.launch(0, 2), job.options()); });
    std::cerr << error.what();
    ::_exit(static_cast<int>(error.code()));
  };
  EXPECT_EXIT(with_hard_limit(), ::testing::ExitedWithCode(static_cast<int>(ExitCode::environment)),
              "needs 194 open files, and the limit is 150 .ulimit -Hn.");
}

}  // namespace mantissa::store_test
