// Connections that the store lets in and those it does not: unauthenticated ones on the port, files of others, and ranks that break the
// protocol.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <atomic>
#include <random>

#include "raw_ranks.h"

namespace mantissa::store_unauthenticated_test {

using ::testing::HasSubstr;
namespace fs = std::filesystem;
using test::Errors;
using test::expect_error;
using test::expect_no_errors;
using test::kSecret;
using test::on_ranks;
using test::pause_ms;
using test::RawConnection;
using test::StoreJob;

std::string received_for(int port, const std::string& bytes) {
  RawConnection raw(port);
  raw.send(bytes);
  return raw.receive(100);
}

// The refusal that rank 0 sends behind the MAC to one who has the secret.
std::string refusal(int port, const Hello& hello) {
  RawConnection raw(port);
  raw.authenticate(hello, kSecret);
  EXPECT_EQ(raw.receive(kMacBytes).size(), kMacBytes);
  return raw.receive(500);
}

void expect_that_nobody_gets_in(int port) {
  std::mt19937 random(7);
  const Hello hello{.rank = 1, .world = 2};
  for (int i = 0; i < 20; ++i) {
    std::string garbage(64, '\0');
    for (char& c : garbage) c = static_cast<char>(random());
    EXPECT_EQ(received_for(port, garbage).size(), 32U) << "its hello, and no MAC";
    RawConnection wrong_secret(port), wrong_job(port);
    wrong_secret.authenticate(hello, "another secret");
    wrong_job.authenticate(hello, kSecret, "another job");
    EXPECT_TRUE(wrong_secret.is_closed() && wrong_job.is_closed());
    EXPECT_EQ(received_for(port, RawConnection(port).authenticate(hello, kSecret)).size(), 32U) << "replayed";
  }
  EXPECT_LE(received_for(port, std::string(100000, 'G')).size(), 32U) << "dropped after 64 bytes";
  const std::vector<std::pair<Hello, std::string>> misplaced = {
      {hello, "rank 1 has joined already"},
      {{.rank = 0, .world = 2}, "rank 0 has joined already"},
      {{.rank = 2, .world = 2}, "there is no rank 2 among 2"},
      {{.rank = 0xffffffff, .world = 2}, "there is no rank"},
      {{.rank = 1, .world = 3}, "its world has 3 ranks, but that of rank 0 has 2"},
      {{.attempt = 1, .rank = 1, .world = 2}, "it belongs to restart 1, but rank 0 to restart 0"},
      {{.protocol = 9, .rank = 1, .world = 2}, "it has version 9"}};
  for (const auto& [who, why] : misplaced) EXPECT_THAT(refusal(port, who), HasSubstr(why));
  std::vector<RawConnection> open;
  for (int i = 0; i < 1000; ++i) {
    if (open.size() >= 300) open.erase(open.begin());
    open.emplace_back(port);
  }
  EXPECT_THAT(refusal(port, hello), HasSubstr("already")) << "who has the secret is heard behind 300 who say nothing";
}

TEST(UnauthenticatedConnections, DoNothingToTwoRanksAtWork) {
  const StoreJob job;
  std::atomic<bool> done{false};
  std::atomic<int> inside{0};  // one with the secret must not take their place
  const Errors errors = on_ranks(3, [&](int thread) {
    if (thread == 2) {
      while (inside < 2) pause_ms(1);
      expect_that_nobody_gets_in(port(job, job.launch(0, 2)));
      const Error refused = test::error_of([&] { Store store(job.launch(1, 2), job.options()); });
      done = true;
      throw refused;
    }
    Store store(job.launch(thread, 2), job.options());
    ++inside;
    for (int step = 0; step < 20 || store.get("more " + std::to_string(step)) == "1"; ++step) {
      store.barrier("step");
      if (thread == 0) store.set("more " + std::to_string(step + 1), done ? "0" : "1");
      pause_ms(1);
    }
    store.leave();
  });
  EXPECT_FALSE(errors[0] || errors[1]);
  expect_error(errors[2], ExitCode::usage, "rank 0 refuses it: rank 1 has joined already");
}

// Rank 1 meets a rank 0 that answers and has another secret.
Errors meet_impostor(const StoreJob& job) {
  const Listener impostor = listen_for_ranks(job.launch(0, 2), {.secret = "not the secret at all", .folder = job.folder.path()});
  std::atomic<bool> over{false};
  std::thread answers([&] {
    for (; !over; pause_ms(20)) {
      Socket socket = test::accepted(impostor);
      if (!socket) continue;
      RawConnection raw(std::move(socket));
      raw.receive(32);
      raw.send(new_hello({.world = 2}));
      raw.receive(32);
      raw.send(std::string(32, 'x'));
      pause_ms(20);
    }
  });
  const Errors errors = on_ranks(1, [&](int) { Store store(job.launch(1, 2), job.options(20, 1)); });
  over = true;
  answers.join();
  return errors;
}

Errors meet_liar(const StoreJob& job, const std::string& frame) {
  return on_ranks(2, [&](int thread) {
    if (thread == 0) {
      Store store(job.launch(0, 2), job.options());
      return test::wait_for_failure(store);
    }
    Connection bad = joined_rank(job, 2);
    ::send(bad.fd(), frame.data(), frame.size(), MSG_NOSIGNAL);
    EXPECT_TRUE(test::eventually([&] { return !bad.receive(); }));
  });
}

TEST(UnauthenticatedConnections, LiarsAreNotBelievedAndCostNoMemory) {
  std::vector<test::StoreCase> cases = {{"impostor", meet_impostor, 1, ExitCode::peer_lost, "within 1 s"}};
  for (const auto& [name, frame] : {std::pair("a length beyond the cap", std::string("\xff\xff\xff\xff", 4)),
                                    {"no length", std::string("\0\0\0\0", 4)},
                                    {"no such message", std::string("\1\0\0\0\x63", 5)},
                                    {"fields missing", std::string("\2\0\0\0\x04\x01", 6)},
                                    {"a text longer than its frame", std::string("\5\0\0\0\x04\xff\xff\xff\xff", 9)}}) {
    cases.push_back({name, [frame](const StoreJob& job) { return meet_liar(job, frame); }, 1, ExitCode::peer_lost,
                     "rank 1 \\(raw\\) sent an unreadable message"});
  }
  test::expect_at_once(cases);
}

TEST(UnauthenticatedConnections, OtherAddressesThanLoopbackNeedASecret) {
  const StoreJob job;
  for (const std::string address : {"0.0.0.0", "192.0.2.1", "::"}) {
    for (const int rank : {0, 1}) {
      Launch of = job.launch(rank, 2);
      of.address = address;
      of.port = 45671;
      StoreOptions without = job.options();
      without.secret.reset();
      expect_error(test::error_of([&] { Store store(of, without); }), ExitCode::usage, "MANTISSA_SECRET or MANTISSA_SECRET_FILE");
    }
  }
}

// /etc/hosts may give a host's own name a loopback address, which is no use to the ranks of other hosts.
TEST(UnauthenticatedConnections, OnSeveralHostsRank0ListensBeyondLoopback) {
  for (const int local_size : {1, 2}) {
    const StoreJob job;
    Launch of = job.launch(0, 2);
    of.local_size = local_size;
    const Listener listener = listen_for_ranks(of, job.options());
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
    name.sin_port = htons(static_cast<uint16_t>(port(job, of)));
    const Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
    EXPECT_EQ(::connect(socket.fd(), reinterpret_cast<sockaddr*>(&name), sizeof name) == 0, local_size == 1);
  }
}

// ---- files that are published

std::vector<fs::path> files_in(const StoreJob& job) { return {fs::directory_iterator(job.folder.path()), fs::directory_iterator()}; }

void write_private(const std::string& path, const std::string& content) {
  test::write_file(path, content);
  ::chmod(path.c_str(), 0600);
}

TEST(PublishedFiles, OnLoopbackRank0MakesThePrivateSecret) {
  const StoreJob job;
  StoreOptions without = job.options();
  without.secret.reset();
  expect_no_errors(job.in_store(3, without, [&](Store& store, int rank) {
    for (const fs::path& path : rank == 0 ? files_in(job) : std::vector<fs::path>()) {
      struct stat status {};
      EXPECT_EQ(::stat(path.c_str(), &status), 0);
      EXPECT_EQ(status.st_mode & 0777, 0600U);
      EXPECT_GE(test::read_file(path).size(), 64U);
    }
    EXPECT_EQ(rendezvous_files(job.folder.path(), job.launch(0, 3)).size(), 1U);
    store.barrier("seen");
  }));
  EXPECT_TRUE(files_in(job).empty());
}

TEST(PublishedFiles, LieInTheRuntimeFolderOfTheUserIfThereIsOne) {
  const StoreJob job;
  const char* const before = ::getenv("XDG_RUNTIME_DIR");
  const std::string kept = before == nullptr ? "" : before, own = job.folder.path();
  test::write_file(job.folder / "file", "");
  fs::create_directory(job.folder / "others");
  std::vector<std::string> runtimes = {own, "", job.folder / "absent", job.folder / "file"};
  if (::chown((job.folder / "others").c_str(), 12345, 12345) == 0) runtimes.push_back(job.folder / "others");
  for (const std::string& runtime : runtimes) {
    ::setenv("XDG_RUNTIME_DIR", runtime.c_str(), 1);
    const Launch of = job.launch(0, 2, "runtime folder " + std::to_string(::getpid()));
    StoreOptions unnamed = job.options();
    unnamed.folder = "";
    const Listener listener = listen_for_ranks(of, unnamed);
    EXPECT_EQ(rendezvous_files(runtime == own ? own : fs::temp_directory_path().string(), of).size(), 1U) << runtime;
  }
  before == nullptr ? ::unsetenv("XDG_RUNTIME_DIR") : ::setenv("XDG_RUNTIME_DIR", kept.c_str(), 1);
}

TEST(PublishedFiles, OfAnotherUserAreNotBelievedByRootEither) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  const StoreJob job;
  const PublishedRendezvous published(job.folder.path(), job.launch(0, 2), {.port = 1, .secret = "token"});
  const std::string path = files_in(job).at(0);
  EXPECT_EQ(rendezvous_files(job.folder.path(), job.launch(0, 2)).size(), 1U);
  ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
  EXPECT_EQ(rendezvous_files(job.folder.path(), job.launch(0, 2)).size(), 0U);
  EXPECT_TRUE(job_secret({{"MANTISSA_SECRET_FILE", path}})) << "a file that root names himself";
}

TEST(PublishedFiles, OfDeadJobsOfTheUserAreDeletedByWhoPublishes) {
  const StoreJob job;
  const std::string user = "mantissa-" + std::to_string(::geteuid()), other = "mantissa-" + std::to_string(::geteuid() + 1);
  const PublishedRendezvous living(job.folder.path(), job.launch(0, 2), {.port = 1, .secret = "of another job"});
  for (const std::string& name : {user + "-0-0-0", user + "-0-0-1", other + "-0-0-0", std::string("other")})
    write_private(job.folder / name, "mantissa 1 token\n");
  write_private(job.folder / (user + "-no-rendezvous"), "x");
  {
    const PublishedRendezvous next(job.folder.path(), job.launch(0, 2, "next"), {.port = 2, .secret = "token"});
    EXPECT_EQ(rendezvous_files(job.folder.path(), job.launch(0, 2, "next")).size(), 1U);
  }
  EXPECT_EQ(rendezvous_files(job.folder.path(), job.launch(0, 2)).size(), 1U) << "its job lives";
  EXPECT_EQ(files_in(job).size(), 4U) << "two of the user are gone";
  EXPECT_FALSE(fs::exists(job.folder / (user + "-0-0-0")) || fs::exists(job.folder / (user + "-0-0-1")));
}

TEST(PublishedFiles, OfDeadJobsAndOfOthersStandInNobodysWay) {
  const StoreJob job;
  StoreOptions without = job.options();
  without.secret.reset();
  Listener silent = listen_for_ranks(job.launch(0, 2), job.options());
  const PublishedRendezvous dead(job.folder.path(), job.launch(0, 2), {.port = 1, .secret = "dead"});  // its lock is held
  std::string prefix = files_in(job).at(0);
  prefix.resize(prefix.size() - 16);
  int number = 0;
  for (const char* const content :
       {"", "mantissa", "mantissa ", "mantissa x y\n", "mantissa 99999 y\n", "mantissa -1 y\n", "mantissa 5", "\n"})
    write_private(prefix + std::to_string(++number), content);
  test::write_file(prefix + "readable", "mantissa 5 token\n");
  fs::create_symlink("/etc/passwd", prefix + "link");
  EXPECT_EQ(rendezvous_files(job.folder.path(), job.launch(0, 2)).size(), 2U) << "the dead one and the silent one";
  silent.socket = Socket();
  expect_no_errors(job.in_store(2, without, [](Store& store, int) { store.barrier("met"); }));
}

}  // namespace mantissa::store_unauthenticated_test
