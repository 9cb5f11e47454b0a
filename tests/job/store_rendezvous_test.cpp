// Ranks that die before all have met: those that are there leave at once, those that come later soon, and unauthenticated connections end
// nothing.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "raw_ranks.h"

namespace mantissa::store_rendezvous_test {

using Clock = std::chrono::steady_clock;
using test::kSecret;
using test::RawConnection;
using test::seconds_since;
using ::testing::HasSubstr;

class StoreRendezvous : public test::RawRanksTest {};

TEST_F(StoreRendezvous, ARankThatDiesEndsThoseThatAreThereAndThoseThatComeLater) {
  const auto errors = on_ranks(3, [&](int rank) {
    if (rank == 1) {
      joined_rank(3);
      return;
    }
    if (rank == 2) std::this_thread::sleep_for(std::chrono::seconds(2));
    Store store(launch(rank, 3), options());
  });
  for (const int rank : {0, 2})
    expect_error(errors[static_cast<size_t>(rank)], ExitCode::peer_lost, "rank 1 (raw) closed its connection; last seen at step 0 (start)");
}

// Two jobs beside one whose rank 0 still waits for a rank to tell.
TEST_F(StoreRendezvous, WhereNobodyCanComeLaterRank0LeavesAtOnce) {
  StoreOptions fast = options();
  fast.heartbeat_timeout_s = 2;
  std::atomic<bool> reported{false};
  const auto errors = on_ranks(2, [&](int thread) {
    if (thread == 0) {
      test::error_of([&] { Store store(launch(0, 3), fast); });
      reported = true;
      return;
    }
    joined_rank(3);
    const auto all_there = on_ranks(2, [&](int rank) {
      Launch of = launch(rank, 2);
      of.job = "full";
      Store store(of, fast);
      if (rank == 0) wait_for_failure(store);
    });
    expect_error(all_there[0], ExitCode::peer_lost, "rank 1 (");
    EXPECT_FALSE(reported) << "all were there";
    StoreOptions short_of_time = fast;
    short_of_time.init_timeout_s = 0.1;
    Launch alone = launch(0, 2);
    alone.job = "alone";
    const Error late = test::error_of([&] { Store store(alone, short_of_time); });
    EXPECT_THAT(late.what(), HasSubstr("not all ranks are there within 0.1 s"));
    EXPECT_FALSE(reported) << "who comes now has no time left either";
  });
  expect_no_errors(errors);
}

TEST_F(StoreRendezvous, WhoIsAskedToStopTellsNobodyThatComesLater) {
  const auto start = Clock::now();
  const auto errors = on_ranks(2, [&](int rank) {
    if (rank == 1) {
      joined_rank(3);
      return;
    }
    StoreOptions asked = options();
    asked.stop_asked = [&] { return seconds_since(start) > 1; };
    Store store(launch(0, 3), asked);
  });
  EXPECT_TRUE(errors[0]);
  EXPECT_LT(seconds_since(start), 4) << "of at least 5 otherwise";
}

TEST_F(StoreRendezvous, ARankThatFallsSilentEndsTheRendezvous) {
  StoreOptions fast = options();
  fast.heartbeat_timeout_s = 1;
  const auto errors = on_ranks(2, [&](int rank) {
    if (rank == 1) {
      const Connection silent = joined_rank(3);
      std::this_thread::sleep_for(std::chrono::seconds(4));
      return;
    }
    Store store(launch(0, 3), fast);
  });
  expect_error(errors[0], ExitCode::peer_lost, "rank 1 (raw) sent no heartbeat for 1 s (parallel.heartbeat_timeout_s)");
}

TEST_F(StoreRendezvous, UnauthenticatedConnectionsThatCloseEndNothing) {
  expect_no_errors(on_ranks(3, [&](int thread) {
    if (thread == 2) {
      const int of = port(launch(0, 2));
      for (int i = 0; i < 20; ++i) {
        RawConnection silent(of), half(of), wrong(of);
        half.send(new_hello({.rank = 1, .world = 2}));
        half.receive(sizeof(HelloBytes));
        wrong.authenticate({.rank = 1, .world = 2}, "another secret");
        EXPECT_TRUE(wrong.is_closed_within(10));
      }
      return;
    }
    if (thread == 1) std::this_thread::sleep_for(std::chrono::seconds(1));
    Store store(launch(thread, 2), options());
    store.leave();
  }));
}

TEST_F(StoreRendezvous, ARankWithAnotherSecretIsToldSo) {
  const auto errors = on_ranks(2, [&](int rank) {
    StoreOptions of = options();
    if (rank == 1) of.secret = "another secret of this length";
    if (rank == 0) of.init_timeout_s = 9;
    Store store(launch(rank, 2), of);
  });
  expect_error(errors[1], ExitCode::usage,
               "rank 1: rank 0 at 127.0.0.1:0 refuses its secret: MANTISSA_SECRET or MANTISSA_SECRET_FILE must");
  expect_error(errors[0], ExitCode::peer_lost, "not all ranks are there");
}

// The port of a job may for a while be that of the one before.
TEST_F(StoreRendezvous, ARefusalOfShortDurationIsNone) {
  Launch of = launch(0, 2);
  {
    const Listener free = listen_for_ranks(of, options());
    of.port = port(of);
  }
  expect_no_errors(on_ranks(2, [&](int rank) {
    if (rank == 0) {
      StoreOptions other = options();
      other.secret = "another secret of this length";
      other.init_timeout_s = 1;
      test::error_of([&] { Store before(of, other); });
    }
    Launch own = of;
    own.rank = own.local_rank = rank;
    Store store(own, options());
    store.leave();
  }));
}

// What answers at the port of a job that is another's, until a flag is set.
void answer(const Listener& listener, const std::function<void(RawConnection&)>& how, const std::atomic<bool>& over) {
  std::vector<RawConnection> open;
  while (!over) {
    Socket socket(::accept4(listener.socket.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (!socket) continue;
    open.emplace_back(std::move(socket));
    how(open.back());
  }
}

// For longer than a refusal or a death takes to be believed: a proxy that closes, another protocol, a rank 0 that hangs, and one that comes
// late, with and without a port of its own.
TEST_F(StoreRendezvous, WhatIsNoRefusalAndNoDeathIsWaitedFor) {
  const auto closes = [](RawConnection& raw) { const RawConnection ended(std::move(raw)); };
  const auto greets = [&](RawConnection& raw) {
    raw.receive(sizeof(HelloBytes));
    raw.send("SSH-2.0-" + std::string(40, 'x'));  // a hello and less than a MAC
    closes(raw);
  };
  const auto hangs = [](RawConnection& raw) { raw.send(new_hello({.world = 2})); };
  StoreOptions patient = options();
  patient.init_timeout_s = 6;
  const auto not_reached = [&](const std::function<void(RawConnection&)>& how, const std::string& job) {
    Launch of = launch(0, 2);
    of.job = job;
    const Listener listener = listen_for_ranks(of, options());
    of.port = port(of);
    of.rank = of.local_rank = 1;
    std::atomic<bool> over{false};
    std::thread other([&] { answer(listener, how, over); });
    const Error error = test::error_of([&] { Store store(of, patient); });
    over = true;
    other.join();
    EXPECT_EQ(error.code(), ExitCode::peer_lost) << job;
    EXPECT_THAT(error.what(), HasSubstr("rank 1 did not reach rank 0")) << job;
  };
  const auto meets = [&](int rank, const std::string& job, int at) {
    Launch of = launch(rank, 2);
    of.job = job;
    of.port = at;
    if (rank == 0) std::this_thread::sleep_for(std::chrono::seconds(6));
    Store store(of, options());
    store.leave();
  };
  int free = 0;
  {
    const Listener taken = listen_for_ranks(launch(0, 2), options());
    free = port(launch(0, 2));
  }
  expect_no_errors(on_ranks(7, [&](int thread) {
    if (thread == 0) not_reached(closes, "closes");
    if (thread == 1) not_reached(greets, "greets");
    if (thread == 2) not_reached(hangs, "hangs");
    if (thread >= 3) meets(thread % 2, thread < 5 ? "late" : "late with a port", thread < 5 ? 0 : free);
  }));
}

TEST_F(StoreRendezvous, Rank0ThatDiesIsNotWaitedFor) {
  const std::string before = "rank 0 closed its connection before it welcomed this rank", after = "rank 0 closed its connection";
  for (const bool welcomes : {false, true}) {
    const auto errors = on_ranks(2, [&](int thread) {
      if (thread == 1) Store store(launch(1, 2), options());
      if (thread == 1) return;
      const Listener listener = listen_for_ranks(launch(0, 2), options());
      Connection connection = proved_root(listener).take();
      if (welcomes) connection.send(Message::welcome);
      connection.flush();
    });
    expect_error(errors[1], ExitCode::peer_lost, welcomes ? after : before);
  }
}

// The file that says where rank 0 listens outlives a kill; its lock does not.
TEST_F(StoreRendezvous, ARankThatComesAfterRank0DiedFindsThatOut) {
  std::string path;
  {
    const PublishedRendezvous living(folder_.path(), launch(0, 2), {.port = 1, .secret = kSecret});
    path = std::filesystem::directory_iterator(folder_.path())->path();
    ASSERT_EQ(rendezvous_files(folder_.path(), launch(0, 2)).size(), 1U);
    EXPECT_TRUE(rendezvous_files(folder_.path(), launch(0, 2))[0].held);
  }
  test::write_file(path, "mantissa 1 " + kSecret + "\n");
  ::chmod(path.c_str(), 0600);
  EXPECT_FALSE(rendezvous_files(folder_.path(), launch(0, 2))[0].held);
  const std::string died = "rank 1 did not reach rank 0, which has died: " + folder_.path().string();
  const Error error = test::error_of([&] { Store store(launch(1, 2), options()); });
  EXPECT_EQ(error.code(), ExitCode::peer_lost);
  EXPECT_THAT(error.what(), HasSubstr(died));

  StoreOptions hurried = options();
  hurried.init_timeout_s = 2;  // less than a file of an earlier job is given for its place to be taken
  EXPECT_THAT(test::error_of([&] { Store store(launch(1, 2), hurried); }).what(), HasSubstr(died));
  hurried.began = std::chrono::system_clock::now() + std::chrono::hours(1);
  EXPECT_THAT(test::error_of([&] { Store store(launch(1, 2), hurried); }).what(), HasSubstr("within 2 s (parallel.init_timeout_s)"));
}

TEST_F(StoreRendezvous, AFileOfADeadJobIsNoneOfThisRank0) {
  std::string path;
  {
    const PublishedRendezvous named(folder_.path(), launch(0, 2), {.port = 1, .secret = kSecret});
    path = std::filesystem::directory_iterator(folder_.path())->path();
  }
  test::write_file(path, "mantissa 1 " + kSecret + "\n");
  ::chmod(path.c_str(), 0600);
  StoreOptions later = options();
  later.began = std::chrono::system_clock::now() + std::chrono::milliseconds(100);
  expect_no_errors(on_ranks(2, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(std::chrono::seconds(1));
    Store store(launch(rank, 2), later);
    store.leave();
  }));
}

}  // namespace mantissa::store_rendezvous_test
