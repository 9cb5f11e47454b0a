#include <gmock/gmock.h>
#include <sched.h>
#include <sys/mount.h>

#include "async_device.h"
#include "comm/comm_queue.h"
#include "comm_cases.h"
#include "mantissa/backend/functions.h"
#include "process_ranks.h"

namespace mantissa::test::ucx_test {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

struct Way {
  const char *name, *transports;
};
std::ostream& operator<<(std::ostream& out, const Way& way) { return out << way.name; }

class Ucx : public ::testing::TestWithParam<Way> {
 protected:
  ProcessRanks ranks_;
  void start(int ranks, const std::function<void(const Communicator&)>& body) { ranks_.start(ranks, GetParam().transports, body); }
};

TEST_P(Ucx, CollectivesOfEverySizeAgreeWithTheTree) {
  for (const int count : {2, 5}) {
    ProcessRanks ranks;
    ranks.start(count, GetParam().transports, [](const Communicator& world) {
      set_num_threads(1);
      const auto device = make_backend("cpu");
      for (const int64_t largest : {10, 5000, 100000}) {
        for (uint32_t seed = 0; seed < 3; ++seed) {
          check_all_gather(world, seed, largest);
          check_all_to_all(world, seed, largest);
          check_sum_scatter(*device, world, seed, largest / 10);
        }
      }
      for (const int64_t elements : {0, 1, 17, 1000, 100001, 1000000}) check_sum<float>(*device, world, elements, 1);
      for (uint32_t seed = 0; seed < 4; ++seed) check_split(world, seed);
    });
    EXPECT_THAT(ranks.ends(), Each(IsEmpty())) << count << " ranks";
  }
}

// The queue's thread waits, asleep, while others come late; and the last messages of a rank that leaves arrive.
TEST_P(Ucx, ARankThatLeavesAtOnceHasSentEverything) {
  start(3, [](const Communicator& world) {
    Bytes large(3000001);
    for (size_t i = 0; world.rank() == 0 && i < large.size(); ++i) large[i] = pattern(0, 1, static_cast<int64_t>(i));
    CommQueue queue(world);
    std::vector<Work> work;
    for (int round = 0; round < 10; ++round) work.push_back(queue.submit([&] { world.broadcast(large, 0, Purpose::other); }));
    std::this_thread::sleep_for(std::chrono::milliseconds(50 * world.rank()));
    for (const Work& w : work) w.wait();
    for (size_t i = 0; i < large.size(); i += 999) require(large[i] == pattern(0, 1, static_cast<int64_t>(i)), "byte ", i);
  });
  EXPECT_THAT(ranks_.ends(), Each(IsEmpty()));
}

// This holds from the first message on, and although the sender then waits for something else than its worker.
TEST_P(Ucx, WhatACallSentArrivesWithoutTheSendersFurtherHelp) {
  for (const size_t bytes : {size_t{1}, size_t{5000}, size_t{60000}, size_t{8000000}}) {
    ProcessRanks ranks;
    ranks.start(6, GetParam().transports, [&](const Communicator& world) {
      Bytes sent(bytes);
      for (int round = 1; round <= 5; ++round) {
        world.broadcast(sent, round % 6, Purpose::other);
        ++ranks.shared().ready;
        const int64_t end = monotonic_microseconds() + 20000000;
        while (ranks.shared().ready < 6 * round) require(monotonic_microseconds() < end, "round ", round, " is stuck on another rank");
      }
    });
    EXPECT_THAT(ranks.ends(), Each(IsEmpty())) << bytes << " bytes";
  }
}

struct Sending {
  int messages;
  size_t bytes;
  int64_t unseen_us;  // after this rank 1 looks at the latest
};

// Rank 0 sends messages, waits for each to be done, and leaves at once. Rank 1 does not look before all are.
void send_and_leave(ProcessRanks& ranks, const std::string& transports, const Sending& sending) {
  ranks.start_below(2, transports, [&ranks, sending](std::unique_ptr<Transport> transport) {
    std::atomic<int>& sent = ranks.shared().ready;
    Bytes message(sending.bytes);
    for (int i = 0; i < 20; ++i)  // so that they have met
      transport->wait(transport->rank() == i % 2 ? transport->send(1 - i % 2, 1, message) : transport->receive(i % 2, 1, message));
    for (; transport->rank() == 0 && sent < sending.messages; ++sent) transport->wait(transport->send(1, 2, message));
    if (transport->rank() == 0) return;
    const int64_t end = monotonic_microseconds() + sending.unseen_us;
    while (sent < sending.messages && monotonic_microseconds() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (int i = 0; i < sending.messages; ++i) transport->wait(transport->receive(0, 2, message));
  });
}

// The number of such messages that are done and that nobody looks at.
int most_unseen(const std::string& transports, size_t bytes) {
  ProcessRanks ranks;
  send_and_leave(ranks, transports, {.messages = 1 << 20, .bytes = bytes, .unseen_us = 60000000});
  int most = 0;
  for (int before = -1; most == 0 || most > before; most = ranks.shared().ready) {
    before = most;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  return most;
}

// A send is done once UCX has its bytes, and those of the last may lie in the process that leaves: where the kernel takes no more of them.
// One device, whose buffers are small.
TEST_P(Ucx, WhatWasSentArrivesAlthoughItsReceiverLooksLate) {
  const std::vector<std::pair<const char*, const char*>> settings = {
      {"UCX_TCP_SNDBUF", "64k"}, {"UCX_TCP_RCVBUF", "64k"}, {"UCX_NET_DEVICES", "lo"}};
  for (const auto& [name, value] : settings) ::setenv(name, value, 1);
  for (const size_t bytes : {size_t{1000}, size_t{8000}}) {
    const int most = most_unseen(GetParam().transports, bytes);
    for (const int messages : {most - 1, most}) {
      ProcessRanks ranks;
      send_and_leave(ranks, GetParam().transports, {.messages = messages, .bytes = bytes, .unseen_us = 1000000});
      const int64_t end = monotonic_microseconds() + 10000000;
      while (ranks.shared().left_at[1] == 0 && monotonic_microseconds() < end) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      ranks.shared().lost = true;
      EXPECT_THAT(ranks.ends(), Each(IsEmpty())) << messages << " messages of " << bytes << " bytes";
    }
  }
  for (const auto& [name, value] : settings) ::unsetenv(name);
}

// The peer is killed in the middle of large messages, of small ones, and while others are asleep.
TEST_P(Ucx, AKilledPeerEndsTheWaitOfOthers) {
  for (const int64_t bytes : {1, 4096, 40000000}) {
    ProcessRanks ranks;
    ranks.start(3, GetParam().transports, [&](const Communicator& world) {
      Bytes out(static_cast<size_t>(3 * bytes));
      const std::vector<int64_t> counts(3, bytes);
      world.all_gather(out, counts, Purpose::other);
      ++ranks.shared().ready;
      for (int64_t round = 0; true; ++round) {
        if (bytes == 1 && world.rank() == 2 && round == 10) ::pause();
        world.all_gather(out, counts, Purpose::other);
      }
    });
    while (ranks.shared().ready < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ::kill(ranks.pid(2), SIGKILL);
    EXPECT_EQ(ranks.end(2), "137: ");
    const int64_t reported = monotonic_microseconds();
    ranks.shared().lost = true;
    for (const int rank : {0, 1}) {
      EXPECT_THAT(ranks.end(rank), StartsWith("6: ")) << bytes << " bytes, rank " << rank;
      EXPECT_LT(ranks.shared().left_at[rank] - reported, 10000000) << bytes << " bytes, rank " << rank;
    }
  }
}

// The thread that would notice waits for a device that does not end, as it does for a message of the peer.
TEST_P(Ucx, AKilledPeerEndsTheWaitForADevice) {
  start(2, [this](const Communicator& world) {
    AsyncDevice device;
    const Tensor x = zeros(device, Dtype::f32, {1000});
    world.sum(x, Purpose::other);
    ++ranks_.shared().ready;
    device.follow(AsyncDevice::never());
    to_host<float>(x);
  });
  while (ranks_.shared().ready < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ::kill(ranks_.pid(1), SIGKILL);
  EXPECT_EQ(ranks_.end(1), "137: ");
  const int64_t reported = monotonic_microseconds();
  ranks_.shared().lost = true;
  EXPECT_THAT(ranks_.end(0), StartsWith("6: "));
  EXPECT_LT(ranks_.shared().left_at[0] - reported, 10000000);
}

INSTANTIATE_TEST_SUITE_P(Ways, Ucx, ::testing::Values(Way{"SharedMemory", "posix,self"}, Way{"Tcp", "tcp,self"}, Way{"Default", ""}),
                         [](const auto& way) { return std::string(way.param.name); });

TEST(UcxStart, WithoutRoomInSharedMemoryNamesTheNeed) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) ::_exit(77);
    if (::mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=2m") != 0) ::_exit(77);
    try {
      ucx_transport(0, [](const std::string& own) { return std::vector<std::string>{own, own}; }, {});
    } catch (const Error& error) {
      const std::string message = error.what();
      const bool reported =
          message.find("/dev/shm has 2048 KiB free") != std::string::npos && message.find("--shm-size") != std::string::npos;
      ::_exit(reported ? static_cast<int>(error.code()) : 1);
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "SKIPPED: no right to mount a small /dev/shm";
  EXPECT_EQ(WEXITSTATUS(status), 3);
}

TEST(UcxStart, AnUnknownTransportIsAnErrorOfTheEnvironment) {
  ProcessRanks ranks;
  ranks.start(1, "nonsense", [](const Communicator&) {});
  EXPECT_THAT(ranks.end(0), AllOf(StartsWith("3: UCX: "), HasSubstr("UCX_TLS")));
}

// The exit code of a process that sends to a rank which was killed before, and hears of that after so many looks; 0: never.
int code_of_sender_to_killed(int looks) {
  int pipe[2];
  if (::pipe(pipe) != 0 || ::setenv("UCX_TLS", "sysv,self", 1) != 0) return 1;
  const pid_t peer = ::fork();
  if (peer == 0) {
    const auto transport = ucx_transport(0,
                                         [&](const std::string& own) {
                                           if (::write(pipe[1], own.data(), own.size()) < 0) ::_exit(1);
                                           return std::vector<std::string>{own};
                                         },
                                         {});
    ::pause();
  }
  std::string address(4096, '\0');
  address.resize(static_cast<size_t>(std::max<ssize_t>(0, ::read(pipe[0], address.data(), address.size()))));
  ::kill(peer, SIGKILL);
  ::waitpid(peer, nullptr, 0);
  try {
    int looked = 0;
    const auto transport = ucx_transport(
        0,
        [&](const std::string& own) {
          return std::vector<std::string>{own, address};
        },
        [&] { require(++looked != looks, ExitCode::peer_lost, "rank 1 was killed"); });
    transport->send(1, 0, std::as_bytes(std::span(address)));
  } catch (const Error& error) {
    return static_cast<int>(error.code());
  }
  return 0;
}

TEST(UcxStart, ARankThatDiedBeforeItWasReachedIsLost) {
  for (const auto& [looks, code] : {std::pair(4, 6), std::pair(0, 3)}) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(code_of_sender_to_killed(looks));
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), code) << "after " << looks << " looks";
  }
}

}  // namespace mantissa::test::ucx_test
