// Who is let in by the store and who is not: unauthenticated connections on the port, files of others, and ranks that break the protocol.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <atomic>
#include <random>

#include "job/rendezvous.h"
#include "raw_ranks.h"

namespace mantissa::store_unauthenticated_test {

using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using test::RawConnection;
using test::seconds_since;

using test::kSecret;

class UnauthenticatedConnections : public test::RawRanksTest {
 protected:
  // Two ranks work while body(port) plays the unauthenticated connections; nothing may happen to them.
  void beside_two_ranks(const std::function<void(int)>& body) {
    std::atomic<bool> done{false};
    std::atomic<int> inside{0};  // an unauthenticated connection with the secret must not take their place
    const auto errors = on_ranks(3, [&](int thread) {
      if (thread == 2) {
        while (inside < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        body(port(launch(0, 2)));
        done = true;
        return;
      }
      Store store(launch(thread, 2), options());
      ++inside;
      for (int step = 0; step < 20 || store.get("more " + std::to_string(step)) == "1"; ++step) {
        store.barrier("step");
        if (thread == 0) store.set("more " + std::to_string(step + 1), done ? "0" : "1");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      store.leave();
    });
    expect_no_errors(errors);
  }
};

TEST_F(UnauthenticatedConnections, GarbageIsDroppedAfter64Bytes) {
  beside_two_ranks([](int port) {
    std::mt19937 random(7);
    for (int i = 0; i < 200; ++i) {
      RawConnection raw(port);
      std::string garbage(64, '\0');
      for (char& c : garbage) c = static_cast<char>(random());
      raw.send(garbage);
      EXPECT_EQ(raw.receive(100).size(), 32U) << "its hello, and no MAC";
    }
    RawConnection long_one(port);
    long_one.send(std::string(100000, 'G'));
    EXPECT_LE(long_one.receive(100).size(), 32U);
  });
}

TEST_F(UnauthenticatedConnections, ThousandConnectionsAtOnceKeepNobodyOut) {
  beside_two_ranks([&](int port) {
    std::vector<RawConnection> open;
    for (int i = 0; i < 1000; ++i) {
      if (open.size() >= 300) open.erase(open.begin());
      open.emplace_back(port);
    }
    RawConnection last(port);
    last.authenticate({.rank = 1, .world = 2}, kSecret);
    EXPECT_EQ(last.receive(kMacBytes).size(), kMacBytes) << "who has the secret is heard behind 300 who say nothing";
  });
}

TEST_F(UnauthenticatedConnections, SlowAndSilentOnesAreDroppedAfterFiveSeconds) {
  beside_two_ranks([](int port) {
    RawConnection silent(port), slow(port);
    const auto start = Clock::now();
    for (int i = 0; i < 40 && seconds_since(start) < 4; ++i) {
      slow.send("x");
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    EXPECT_EQ(slow.receive(100, 15).size(), 32U);
    EXPECT_TRUE(silent.is_closed_within(15));
    EXPECT_GE(seconds_since(start), 4.5);
    EXPECT_LT(seconds_since(start), 12);
  });
}

TEST_F(UnauthenticatedConnections, WrongSecretJobOrReplayGetNoMac) {
  beside_two_ranks([](int port) {
    const Hello hello{.rank = 1, .world = 2};
    for (int i = 0; i < 20; ++i) {
      RawConnection wrong_token(port), wrong_job(port), replay(port);
      wrong_token.authenticate(hello, "another secret");
      EXPECT_TRUE(wrong_token.is_closed_within(10));
      wrong_job.authenticate(hello, kSecret, "another job");
      EXPECT_TRUE(wrong_job.is_closed_within(10));
      const std::string recorded = RawConnection(port).authenticate(hello, kSecret);
      replay.send(recorded);
      EXPECT_EQ(replay.receive(100).size(), 32U);
    }
  });
}

TEST_F(UnauthenticatedConnections, WhoHasTheSecretButNoPlaceIsToldSo) {
  beside_two_ranks([&](int port) {
    const auto refusal = [&](const Hello& hello) {
      RawConnection raw(port);
      raw.authenticate(hello, kSecret);
      EXPECT_EQ(raw.receive(kMacBytes).size(), kMacBytes);
      return raw.receive(500);
    };
    EXPECT_THAT(refusal({.rank = 1, .world = 2}), HasSubstr("rank 1 is there already"));
    EXPECT_THAT(refusal({.rank = 0, .world = 2}), HasSubstr("rank 0 is there already"));
    EXPECT_THAT(refusal({.rank = 2, .world = 2}), HasSubstr("there is no rank 2 among 2"));
    EXPECT_THAT(refusal({.rank = 0xffffffff, .world = 2}), HasSubstr("there is no rank"));
    EXPECT_THAT(refusal({.rank = 1, .world = 3}), HasSubstr("its world has 3 ranks, that of rank 0 has 2"));
    EXPECT_THAT(refusal({.attempt = 1, .rank = 1, .world = 2}), HasSubstr("it belongs to restart 1, rank 0 to restart 0"));
    EXPECT_THAT(refusal({.protocol = 9, .rank = 1, .world = 2}), HasSubstr("it speaks version 9"));
  });
}

TEST_F(UnauthenticatedConnections, RankThatDoesNotBelongLeavesWithUsage) {
  std::atomic<int> inside{0};
  std::atomic<bool> refused{false};
  const auto errors = on_ranks(3, [&](int thread) {
    if (thread == 2) {
      while (inside < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const Error error = test::error_of([&] { Store store(launch(1, 2), options()); });
      refused = true;
      throw error;
    }
    Store store(launch(thread, 2), options());
    ++inside;
    while (!refused) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    store.leave();
  });
  expect_error(errors[2], ExitCode::usage, "rank 0 refuses it: rank 1 is there already");
  EXPECT_FALSE(errors[0]);
  EXPECT_FALSE(errors[1]);
}

TEST_F(UnauthenticatedConnections, RootWithoutTheSecretIsNotBelieved) {
  Listener impostor = listen_for_ranks(launch(0, 2), {.secret = std::string("not the secret at all"), .folder = folder_.path()});
  StoreOptions patient = options();
  patient.init_timeout_s = 1;
  Launch of = launch(1, 2);
  const auto errors = on_ranks(2, [&](int thread) {
    if (thread == 1) Store store(of, patient);
    const auto end = Clock::now() + std::chrono::seconds(2);
    while (Clock::now() < end) {
      Socket socket(::accept4(impostor.socket.fd(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        continue;
      }
      RawConnection raw(std::move(socket));
      raw.receive(32);
      raw.send(new_hello({.world = 2}));
      raw.receive(32);
      raw.send(std::string(32, 'x'));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  expect_error(errors[1], ExitCode::peer_lost, "within 1 s");
}

TEST_F(UnauthenticatedConnections, OtherAddressesThanLoopbackNeedASecret) {
  for (const std::string address : {"0.0.0.0", "192.0.2.1", "::"}) {
    for (const int rank : {0, 1}) {
      Launch of = launch(rank, 2);
      of.address = address;
      of.port = 45671;
      StoreOptions without = options();
      without.secret.reset();
      const Error error = test::error_of([&] { Store store(of, without); });
      EXPECT_EQ(error.code(), ExitCode::usage) << address;
      EXPECT_THAT(error.what(), HasSubstr("MANTISSA_SECRET or MANTISSA_SECRET_FILE"));
    }
  }
}

TEST_F(UnauthenticatedConnections, OnLoopbackRank0MakesThePrivateSecret) {
  StoreOptions without = options();
  without.secret.reset();
  expect_no_errors(in_store(3, without, [&](Store& store, int rank) {
    if (rank == 0) {
      for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
        struct stat status {};
        EXPECT_EQ(::stat(entry.path().c_str(), &status), 0);
        EXPECT_EQ(status.st_mode & 0777, 0600U);
        const std::string content = test::read_file(entry.path());
        EXPECT_GE(content.size(), 64U);
      }
      EXPECT_EQ(rendezvous_files(folder_.path(), launch(0, 3)).size(), 1U);
    }
    store.barrier("seen");
  }));
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST_F(UnauthenticatedConnections, PublishedFilesLieInTheRuntimeFolderOfTheUser) {
  const char* const before = ::getenv("XDG_RUNTIME_DIR");
  const std::string kept = before == nullptr ? "" : before;
  ::setenv("XDG_RUNTIME_DIR", folder_.path().c_str(), 1);
  StoreOptions unnamed = options();
  unnamed.folder = "";
  const Listener listener = listen_for_ranks(launch(0, 2), unnamed);
  EXPECT_EQ(rendezvous_files(folder_.path(), launch(1, 2)).size(), 1U);
  before == nullptr ? ::unsetenv("XDG_RUNTIME_DIR") : ::setenv("XDG_RUNTIME_DIR", kept.c_str(), 1);
}

TEST_F(UnauthenticatedConnections, RuntimeFolderThatIsNoneOfTheUsersIsPassedOver) {
  const char* const before = ::getenv("XDG_RUNTIME_DIR");
  const std::string kept = before == nullptr ? "" : before;
  test::write_file(folder_ / "file", "");
  std::filesystem::create_directory(folder_ / "others");
  std::vector<std::string> never = {"", folder_ / "absent", folder_ / "file"};
  if (::chown((folder_ / "others").c_str(), 12345, 12345) == 0) never.push_back(folder_ / "others");
  for (const std::string& runtime : never) {
    ::setenv("XDG_RUNTIME_DIR", runtime.c_str(), 1);
    StoreOptions unnamed = options();
    unnamed.folder = "";
    Launch of = launch(0, 2);
    of.job = "runtime folder " + std::to_string(::getpid());
    const Listener listener = listen_for_ranks(of, unnamed);
    EXPECT_EQ(rendezvous_files(std::filesystem::temp_directory_path(), of).size(), 1U) << runtime;
  }
  before == nullptr ? ::unsetenv("XDG_RUNTIME_DIR") : ::setenv("XDG_RUNTIME_DIR", kept.c_str(), 1);
}

TEST_F(UnauthenticatedConnections, RendezvousFileOfAnotherUserIsNotBelievedByRootEither) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  const Launch of = launch(0, 2);
  const PublishedRendezvous published(folder_.path(), of, {.port = 1, .secret = "token"});
  const std::string path = std::filesystem::directory_iterator(folder_.path())->path();
  EXPECT_EQ(rendezvous_files(folder_.path(), of).size(), 1U);
  ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
  EXPECT_EQ(rendezvous_files(folder_.path(), of).size(), 0U);
  EXPECT_TRUE(job_secret({{"MANTISSA_SECRET_FILE", path}})) << "a file that root names himself";
}

TEST_F(UnauthenticatedConnections, WhoPublishesDeletesWhatDeadJobsOfTheUserLeft) {
  Launch of = launch(0, 2);
  const std::string prefix = "mantissa-" + std::to_string(::geteuid()) + "-";
  const std::vector<std::string> kept = {"mantissa-" + std::to_string(::geteuid() + 1) + "-0-0-0", "other", prefix + "no-rendezvous"};
  for (const std::string& name : kept) test::write_file(folder_ / name, name == kept.back() ? "x" : "mantissa 1 token\n");
  const PublishedRendezvous living(folder_.path(), of, {.port = 1, .secret = "of another job"});
  for (const std::string name : {"0-0-0", "0-0-1"}) test::write_file(folder_ / (prefix + name), "mantissa 1 token\n");
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) ::chmod(entry.path().c_str(), 0600);
  of.job = "next";
  {
    const PublishedRendezvous next(folder_.path(), of, {.port = 2, .secret = "token"});
    EXPECT_EQ(rendezvous_files(folder_.path(), of).size(), 1U);
  }
  EXPECT_EQ(rendezvous_files(folder_.path(), launch(0, 2)).size(), 1U) << "its job lives";
  for (const std::string name : {"0-0-0", "0-0-1"}) EXPECT_FALSE(std::filesystem::exists(folder_ / (prefix + name)));
  for (const std::string& name : kept) EXPECT_TRUE(std::filesystem::exists(folder_ / name)) << name;
}

// /etc/hosts may give a host's own name a loopback address, which is no use to the ranks of other hosts.
TEST_F(UnauthenticatedConnections, OnSeveralHostsRank0ListensBeyondLoopback) {
  const auto reachable_elsewhere = [&](int local_size) {
    Launch of = launch(0, 2);
    of.local_size = local_size;
    const Listener listener = listen_for_ranks(of, options());
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
    name.sin_port = htons(static_cast<uint16_t>(port(of)));
    const Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
    return ::connect(socket.fd(), reinterpret_cast<sockaddr*>(&name), sizeof name) == 0;
  };
  EXPECT_TRUE(reachable_elsewhere(1));
  EXPECT_FALSE(reachable_elsewhere(2));
}

TEST_F(UnauthenticatedConnections, FilesOfDeadJobsAndOfOthersStandInNobodysWay) {
  const Launch of = launch(0, 2);
  StoreOptions without = options();
  without.secret.reset();
  Listener other = listen_for_ranks(launch(0, 2), {.secret = kSecret, .folder = folder_.path()});  // somebody listens, and does not answer
  const PublishedRendezvous dead(folder_.path(), of, {.port = 1, .secret = "dead"});               // its lock is held
  std::string prefix;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) prefix = entry.path().string();
  prefix.resize(prefix.size() - 16);
  for (const char* const content :
       {"", "mantissa", "mantissa ", "mantissa x y\n", "mantissa 99999 y\n", "mantissa -1 y\n", "mantissa 5", "\n"}) {
    const std::string path = prefix + std::to_string(std::hash<std::string>{}(content));
    test::write_file(path, content);
    ::chmod(path.c_str(), 0600);
  }
  test::write_file(prefix + "readable", "mantissa 5 token\n");
  std::filesystem::create_symlink("/etc/passwd", prefix + "link");
  EXPECT_EQ(rendezvous_files(folder_.path(), of).size(), 2U) << "the dead one and the silent one";
  other.socket = Socket();
  expect_no_errors(in_store(2, without, [](Store& store, int) { store.barrier("met"); }));
}

TEST_F(UnauthenticatedConnections, RankThatFallsSilentIsLost) {
  StoreOptions fast = options();
  fast.heartbeat_timeout_s = 1;
  const auto errors = on_ranks(2, [&](int thread) {
    if (thread == 1) {
      Connection silent = joined_rank(2);
      std::this_thread::sleep_for(std::chrono::seconds(4));
      return;
    }
    Store store(launch(0, 2), fast);
    wait_for_failure(store);
  });
  expect_error(errors[0], ExitCode::peer_lost,
               "rank 1 (raw) sent no heartbeat for 1 s (parallel.heartbeat_timeout_s); last seen at step 0 (start)");
}

TEST_F(UnauthenticatedConnections, Rank0ThatFallsSilentIsLost) {
  StoreOptions fast = options();
  fast.heartbeat_timeout_s = 1;
  const auto errors = on_ranks(2, [&](int thread) {
    if (thread == 1) {
      Store store(launch(1, 2), fast);
      wait_for_failure(store);
      return;
    }
    Listener listener = listen_for_ranks(launch(0, 2), fast);
    Connection silent = proved_root(listener).take();
    silent.send(Message::welcome);
    silent.send(Message::reply, Fields().number(uint32_t{1}).text(""));  // the start
    silent.flush();
    std::this_thread::sleep_for(std::chrono::seconds(4));
  });
  expect_error(errors[1], ExitCode::peer_lost, "rank 0 sent no heartbeat for 1 s (parallel.heartbeat_timeout_s)");
}

TEST_F(UnauthenticatedConnections, RankThatBreaksTheProtocolIsLostAndCostsNoMemory) {
  const std::vector<std::string> frames = {std::string("\xff\xff\xff\xff", 4),               // a length beyond the cap
                                           std::string("\0\0\0\0", 4),                       // none
                                           std::string("\1\0\0\0\x63", 5),                   // no such message
                                           std::string("\2\0\0\0\x04\x01", 6),               // fields missing
                                           std::string("\5\0\0\0\x04\xff\xff\xff\xff", 9)};  // a text longer than its frame
  for (const std::string& frame : frames) {
    const auto errors = on_ranks(2, [&](int thread) {
      if (thread == 1) {
        Connection bad = joined_rank(2);
        ::send(bad.fd(), frame.data(), frame.size(), MSG_NOSIGNAL);
        const auto end = Clock::now() + std::chrono::seconds(10);
        while (bad.receive() && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
      }
      Store store(launch(0, 2), options());
      wait_for_failure(store);
    });
    expect_error(errors[0], ExitCode::peer_lost, "rank 1 (raw) sent what cannot be read");
  }
}

}  // namespace mantissa::store_unauthenticated_test
