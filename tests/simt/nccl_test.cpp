// Links by NCCL, over one whose ranks are threads (thread_nccl.h).
#include <gmock/gmock.h>

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <latch>
#include <thread>

#include "backend/gpus.h"
#include "base/parallel.h"
#include "comm/comm_queue.h"
#include "files.h"
#include "gpu/runtime.h"
#include "hang.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"
#include "simt/thread_nccl.h"
#include "testing.h"
#include "thread_ranks.h"

namespace mantissa::nccl_test {

using simt::NcclResult;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

Tensor filled(Backend& device, double value, int64_t count = 1000) {
  Tensor out = empty(device, Dtype::f32, {count});
  device.run(Fill{.out = out, .value = value});
  return out;
}
void require_all(const Tensor& x, double value) {
  for (const double each : test::values(x)) require(each == value, each, " where ", value, " belongs");
}

using Body = std::function<void(Backend&, const Communicator&)>;
std::vector<std::string> errors_on_ranks(int ranks, const MakeDeviceLink& links, const Body& body, test::RanksOnHosts* where = nullptr) {
  const auto on_rank = [&](const Communicator& world) {
    const test::Threads one(1);
    const auto device = make_backend("cuda");
    try {
      body(*device, world);
    } catch (...) {
      world.stop();  // lanes of the device would wait for peers
      throw;
    }
  };
  return test::run_ranks(ranks, on_rank, {}, links, where);
}

TEST(NcclLink, BringsTheBytesOfEveryCollective) {
  simt::ThreadNccl nccl;
  const auto errors = errors_on_ranks(3, nccl.links(), [](Backend& device, const Communicator& world) {
    const int rank = world.rank();
    for (int round = 1; round <= 10; ++round) {
      const Tensor x = filled(device, round * (rank + 1));
      world.sum(x, Purpose::other);
      require_all(x, 6 * round);
      const Tensor all = filled(device, round * (rank + 1), 30);
      const std::vector<int64_t> counts(3, 10 * 4);
      world.all_gather(all, counts, Purpose::other);
      for (int r = 0; r < 3; ++r) require_all(all.slice(10 * r, 10 * (r + 1)), round * (r + 1));
      world.broadcast(x, round % 3, Purpose::other);
      const Tensor out = empty(device, Dtype::f32, {30});
      const Communicator::Exchange part{.in = all, .in_counts = counts, .out = out, .out_counts = counts};
      world.all_to_all({&part, 1}, Purpose::other);
      for (int r = 0; r < 3; ++r) require_all(out.slice(10 * r, 10 * (r + 1)), round * (rank + 1));
    }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_EQ(nccl.counts().destroyed, 3);
  EXPECT_EQ(nccl.counts().aborted, 0);
}

// Bytes between hosts, by rank: its share of a gather once, and the share of one rank of the other host as a sum of two.
TEST(NcclLink, SumsAndGathersInTwoLevels) {
  simt::ThreadNccl nccl;
  test::RanksOnHosts where{.hosts = {0, 0, 1, 1}};
  const std::vector<int64_t> counts = {12 * 4, 0, 5 * 4, 13 * 4};
  const auto body = [&](Backend& device, const Communicator& world) {
    const Communicator within = world.split(world.rank() / 2), across = world.split(world.rank() % 2);
    const Tensor all = filled(device, world.rank() + 1, 30);
    world.all_gather(all, counts, Purpose::other);
    require_all(all.slice(0, 12), 1);
    require_all(all.slice(12, 17), 3);
    require_all(all.slice(17, 30), 4);
    const Tensor x = filled(device, world.rank() + 1, 64);
    world.sum(x, Purpose::other);
    require_all(x, 10);
    within.sum(x, Purpose::other);
    require_all(x, 20);
    across.sum(x, Purpose::other);
    require_all(x, 40);
  };
  EXPECT_THAT(errors_on_ranks(4, nccl.links(), body, &where), Each(IsEmpty()));
  for (size_t r = 0; r < 4; ++r) EXPECT_EQ(where.left[r], counts[r] + 2 * 16 * 4 + 2 * 32 * 4 + 2 * 4) << r << ", with two colors";
  EXPECT_EQ(nccl.counts().destroyed, 12);
  EXPECT_EQ(nccl.counts().aborted, 0);
}

// The compute lane goes on while the queue's work is in the other, and waits for it where it is told to.
TEST(NcclLink, KeepsTheOrderOfLanes) {
  simt::ThreadNccl nccl;
  const auto errors = errors_on_ranks(2, nccl.links(), [](Backend& device, const Communicator& world) {
    CommQueue queue(world, &device);
    for (int round = 1; round <= 30; ++round) {
      const Tensor sums = filled(device, round), more = filled(device, 1);
      const Work work = queue.submit([&world, sums] { world.sum(sums, Purpose::gradients); });
      for (int i = 0; i < 5; ++i) device.run(Add{.a = more, .b = more, .out = more});
      work.wait();
      device.run(Add{.a = sums, .b = more, .out = sums});
      require_all(sums, 2 * round + 32);
    }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(NcclLink, EveryGroupHasACommunicator) {
  simt::ThreadNccl nccl;
  const auto errors = errors_on_ranks(4, nccl.links(), [](Backend& device, const Communicator& world) {
    const Communicator pairs = world.split(world.rank() / 2), others = world.split(world.rank() % 2);
    for (int round = 0; round < 10; ++round) {
      const Tensor x = filled(device, 1);
      pairs.sum(x, Purpose::activations);
      others.sum(x, Purpose::activations);
      require_all(x, 4);
    }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_EQ(nccl.counts().made, 12);
  EXPECT_EQ(nccl.counts().destroyed, 12);
}

// The first message of a pair makes its connection, and takes memory of the GPU for it.
TEST(NcclLink, ConnectsAllPeersBeforeTheFirstCall) {
  simt::ThreadNccl nccl;
  const auto errors = errors_on_ranks(4, nccl.links(), [&](Backend& device, const Communicator& world) {
    const Communicator pairs = world.split(world.rank() / 2);
    world.barrier();
    EXPECT_EQ(nccl.counts().connections, 4 * 3 + 4);
    EXPECT_EQ(nccl.counts().groups, 8);
    world.barrier();
    world.sum(filled(device, 1), Purpose::other);
    pairs.sum(filled(device, 1), Purpose::other);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_GT(nccl.counts().groups, 8);
  EXPECT_EQ(nccl.counts().connections, 4 * 3 + 4);
}

TEST(NcclLink, CallsThatDifferAreNamed) {
  simt::ThreadNccl nccl;
  const auto errors = errors_on_ranks(2, nccl.links(), [](Backend& device, const Communicator& world) {
    const Tensor x = filled(device, 1);
    world.rank() == 0 ? world.sum(x, Purpose::other) : world.broadcast(x, 1, Purpose::other);
    test::values(x);
    world.barrier();
  });
  EXPECT_THAT(errors, ::testing::Contains(HasSubstr("make different calls")));
}

// ---- a peer that is lost

class LostPeer : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_LT(std::chrono::steady_clock::now() - began_, test::kHang) << "a limit of time ended it";
    EXPECT_EQ(nccl_.counts().destroyed, 0);
    EXPECT_EQ(nccl_.counts().aborted, nccl_.counts().made);
    EXPECT_EQ(nccl_.counts().blocked, 0);
  }

  simt::ThreadNccl nccl_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

TEST_F(LostPeer, EndsTheLanesAndWaitsOfTheOthers) {
  const auto errors = errors_on_ranks(3, nccl_.links(), [](Backend& device, const Communicator& world) {
    const Tensor x = filled(device, 1);
    world.sum(x, Purpose::other);
    if (world.rank() == 1) fail(ExitCode::data, "leaves");
    world.sum(x, Purpose::other);
    test::values(x);
    fail(ExitCode::internal, "nobody was missed");
  });
  EXPECT_THAT(errors[1], StartsWith("4: leaves"));
  EXPECT_EQ(errors[0], "6: a peer was lost");
  EXPECT_EQ(errors[2], "6: a peer was lost");
}

// CUDA frees memory behind all that a GPU was asked for, and heeds no interrupt meanwhile.
TEST_F(LostPeer, EndsTheWaitToFreeMemory) {
  const Gpu described = simt::described_gpu();
  simt::described_gpu().memory = int64_t{100} << 20;
  std::latch asked(1);
  const auto errors = errors_on_ranks(2, nccl_.links(), [&](Backend& device, const Communicator& world) {
    if (world.rank() == 1) {
      asked.wait();
      fail(ExitCode::data, "leaves");
    }
    device.allocate(int64_t{60} << 20);
    const Tensor x = filled(device, 1);
    world.sum(x, Purpose::other);
    asked.count_down();
    device.allocate(int64_t{70} << 20);
    fail(ExitCode::internal, "nobody was missed");
  });
  simt::described_gpu() = described;
  EXPECT_EQ(errors[0], "6: a peer was lost");
}

// A kernel of one group waits for it, and the abort of another group would wait for that kernel.
TEST_F(LostPeer, EndsAllGroupsAtOnce) {
  const auto errors = errors_on_ranks(4, nccl_.links(), [](Backend& device, const Communicator& world) {
    const Communicator pairs = world.split(world.rank() / 2), others = world.split(world.rank() % 2);
    if (world.rank() == 3) fail(ExitCode::data, "leaves");
    for (const Communicator* each : {&world, &pairs, &others}) each->sum(filled(device, 1), Purpose::other);
    test::values(filled(device, 1));
    fail(ExitCode::internal, "nobody was missed");
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"6: a peer was lost", "6: a peer was lost", "6: a peer was lost", "4: leaves"}));
}

TEST_F(LostPeer, IsReportedWhileCommunicatorsEnd) {
  std::future<void> report;
  std::latch changed(1);
  const auto errors = errors_on_ranks(2, nccl_.links(), [&](Backend& device, const Communicator& world) {
    if (world.rank() == 1) {
      changed.wait();
      fail(ExitCode::data, "leaves");
    }
    nccl_.change({.while_ending = [&, self = std::this_thread::get_id()] {
      if (std::this_thread::get_id() != self) return;
      report = std::async(std::launch::async, [&] { world.latest_calls(); });
      EXPECT_EQ(report.wait_for(test::kHang), std::future_status::ready);
    }});
    changed.count_down();
    const Tensor x = filled(device, 1);
    world.sum(x, Purpose::other);
    test::values(x);
  });
  EXPECT_EQ(errors[0], "6: a peer was lost");
  EXPECT_TRUE(report.valid());
}

TEST_F(LostPeer, EndsTheMakingOfItsGroup) {
  const MakeDeviceLink links = nccl_.links();
  const auto maker = [&](const LinkRanks& of) {
    require(of.rank != 1, ExitCode::data, "leaves");
    return links(of);
  };
  const auto errors = errors_on_ranks(2, maker, [](Backend&, const Communicator&) {});
  EXPECT_EQ(errors[0], "6: a peer was lost");
  EXPECT_EQ(nccl_.counts().made, 1);
}

// A peer that is there, but does not come.
TEST_F(LostPeer, EndsTheMakingOfItsGroupInTime) {
  const MakeDeviceLink links = nccl_.links(0.2);
  const auto maker = [&](const LinkRanks& of) {
    while (of.rank == 1) of.look(), std::this_thread::yield();
    return links(of);
  };
  const auto errors = errors_on_ranks(2, maker, [](Backend&, const Communicator&) {});
  EXPECT_THAT(errors[0], AllOf(StartsWith("6: rank 0: NCCL has not connected 2 ranks"), HasSubstr("parallel.init_timeout_s")));
}

// A communicator is there, but not what it connects.
TEST_F(LostPeer, EndsTheWaitForItsFirstByteInTime) {
  for (const simt::NcclSettings& settings : {simt::NcclSettings{.stuck = true}, simt::NcclSettings{.mute = true}}) {
    nccl_.change(settings);
    const auto errors = errors_on_ranks(2, nccl_.links(0.2), [](Backend&, const Communicator&) {});
    EXPECT_THAT(errors, ::testing::Contains(AllOf(StartsWith("6: rank "), HasSubstr("has not connected 2 ranks in the 0.2 s"))));
  }
}

// NCCL finds this out by itself, while the host waits for the GPU. The other rank closes its link meanwhile.
TEST_F(LostPeer, IsNamedAsNcclNamesIt) {
  const auto errors = errors_on_ranks(2, nccl_.links(), [this](Backend& device, const Communicator& world) {
    if (world.rank() == 0) return;
    const Tensor x = filled(device, 1);
    world.sum(x, Purpose::other);
    nccl_.fail(1, NcclResult::remote_error, "socketProgress: Connection closed by remote peer");
    test::values(x);
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_EQ(errors[1],
            "6: rank 1: NCCL failed: remote process exited or there was a network error: socketProgress: Connection closed by remote peer");
}

TEST_F(LostPeer, EndsCallsBehindAnError) {
  const auto errors = errors_on_ranks(2, nccl_.links(), [this](Backend& device, const Communicator& world) {
    world.barrier();
    if (world.rank() == 1) {
      nccl_.fail(1, NcclResult::system_error, "a connection broke");
      world.sum(filled(device, 1), Purpose::other);
    }
    world.barrier();
  });
  EXPECT_THAT(errors[1], AllOf(StartsWith("6: rank 1: NCCL failed: unhandled system error"), HasSubstr("a connection broke")));
}

TEST_F(LostPeer, IsNotWaitedForByALinkThatAnErrorCloses) {
  const auto errors = errors_on_ranks(3, nccl_.links(), [](Backend&, const Communicator& world) {
    const Communicator again = world.split(world.rank() / 2);
    if (world.rank() == 1) fail(ExitCode::data, "leaves");
    world.barrier();
  });
  EXPECT_EQ(errors[0], "6: a peer was lost");
}

TEST_F(LostPeer, MayBeOneThatGivesUpTwiceOnAnyThread) {
  const auto errors = errors_on_ranks(2, nccl_.links(), [](Backend& device, const Communicator& world) {
    const Tensor x = filled(device, 1);
    if (world.rank() == 0) world.sum(x, Purpose::other);
    std::thread([&] { world.stop(), world.stop(); }).join();
    world.sum(x, Purpose::other);
  });
  EXPECT_THAT(errors, Each(AllOf(StartsWith("6: "), HasSubstr("aborted its communication"))));
}

// ---- a link by itself

// Runs body with both links of a group of ranks 5 and 7, each on a thread, and a message from the first to the second. Returns what they
// threw.
std::vector<std::string> errors_of_two(const MakeDeviceLink& links,
                                       const std::function<void(DeviceLink&, std::span<const DeviceMessage>)>& body) {
  std::vector<std::string> errors(2);
  const auto on_rank = [&](int rank) {
    const auto device = make_backend("cuda");
    const Tensor x = filled(*device, 1);
    const auto link = links({.ranks = {5, 7}, .rank = rank, .hash = 1, .look = [] {}});
    const DeviceMessage message{.peer = 1 - rank, .receives = rank == 1, .bytes = x};
    try {
      body(*link, {&message, 1});
    } catch (const Error& error) {
      errors[static_cast<size_t>(rank)] = text(static_cast<int>(error.code()), ": ", error.what());
    }
    link->give_up();
  };
  std::thread other([&] { on_rank(1); });
  on_rank(0);
  other.join();
  return errors;
}

TEST(NcclLinkAlone, FailsBehindGivingUp) {
  simt::ThreadNccl nccl;
  const auto errors = errors_of_two(nccl.links(), [](DeviceLink& link, std::span<const DeviceMessage> messages) {
    link.check();
    link.give_up();
    link.give_up();
    link.check();
    link.exchange({});
    link.exchange(messages);
  });
  EXPECT_THAT(errors, ::testing::ElementsAre("6: rank 5: NCCL was aborted", "6: rank 7: NCCL was aborted"));
}

TEST(NcclLinkAlone, TakesTheGpuOfItsRank) {
  simt::ThreadNccl nccl;
  set_default_gpu(1);
  try {
    nccl.links(0.1)({.ranks = {0, 1}, .rank = 0, .hash = 1, .look = [] {}});
    ADD_FAILURE() << "the executor has one";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::environment) << error.what();
  }
  set_default_gpu(0);
}

TEST(NcclLinkAlone, LeavesNoGroupOpenBehindAnError) {
  simt::ThreadNccl nccl;
  const auto errors = errors_of_two(nccl.links(), [&](DeviceLink& link, std::span<const DeviceMessage> messages) {
    nccl.change({.refused_send = NcclResult::system_error});
    if (messages.front().receives) return;
    EXPECT_THROW(link.exchange(messages), Error);
    link.exchange(messages);
  });
  EXPECT_THAT(errors[0], StartsWith("6: rank 5: NCCL failed: unhandled system error"));
}

TEST(NcclLinkAlone, ReportsTheFirstErrorOfAGroup) {
  for (const int second : {0, 1}) {  // the peer of a second message: rank 0 itself, which is refused otherwise, or the other one
    simt::ThreadNccl nccl;
    const auto errors = errors_of_two(nccl.links(), [&](DeviceLink& link, std::span<const DeviceMessage> messages) {
      nccl.change({.refused_send = NcclResult::system_error});
      const DeviceMessage& message = messages.front();
      if (message.receives) return;
      const std::array all{message, DeviceMessage{.peer = second, .receives = true, .bytes = message.bytes}};
      link.exchange(all);
    });
    EXPECT_THAT(errors[0], StartsWith("6: rank 5: NCCL failed: unhandled system error")) << second;
  }
}

// A call that ends a communicator may take long; a thread that looks at the links of the process meanwhile does not wait for it.
TEST(NcclLinkAlone, IsLookedAtWhileOthersEnd) {
  simt::ThreadNccl nccl;
  const MakeDeviceLink links = nccl.links();
  const auto other = [](uint64_t group) { return LinkRanks{.ranks = {5, 7}, .rank = 1, .hash = group, .look = [] {}}; };
  std::thread peer([&] {
    auto a = links(other(1));
    const auto b = links(other(2));
    a.reset();
    b->give_up();
  });
  LinkRanks of = other(1);
  of.rank = 0;
  auto ended = links(of);
  of.hash = 2;
  const auto left = links(of);
  std::vector<std::future<void>> looks;
  nccl.change({.while_ending = [&, self = std::this_thread::get_id()] {
    if (std::this_thread::get_id() != self) return;
    looks.push_back(std::async(std::launch::async, [&] { left->check(); }));
    EXPECT_EQ(looks.back().wait_for(test::kHang), std::future_status::ready);
  }});
  ended.reset();
  left->give_up();
  peer.join();
  EXPECT_EQ(looks.size(), 2);
  EXPECT_EQ(nccl.counts().destroyed, 2);
  EXPECT_EQ(nccl.counts().aborted, 2);
}

TEST(NcclLinkAlone, LogsWhyItWasNotClosed) {
  simt::ThreadNccl nccl;
  const test::TemporaryFolder folder;
  open_log({.console = false, .file = folder / "log.txt"});
  const auto failed = errors_on_ranks(2, nccl.links(), [&](Backend&, const Communicator& world) {
    world.barrier();
    nccl.fail(world.rank(), NcclResult::system_error, "a connection broke");
  });
  const auto slow = errors_on_ranks(2, nccl.links(test::kHangSeconds, 0.2), [&](Backend&, const Communicator& world) {
    while (world.rank() == 1 && nccl.counts().aborted < 3) std::this_thread::yield();
  });
  close_log();
  EXPECT_THAT(failed, Each(IsEmpty()));
  EXPECT_THAT(slow, Each(IsEmpty()));
  const std::string log = test::read_file(folder / "log.txt");
  for (const char* rank : {"rank 0", "rank 1"}) {
    EXPECT_THAT(log, HasSubstr(text(rank, ": NCCL is aborted, not closed: ", rank, ": NCCL failed: unhandled system error")));
  }
  EXPECT_THAT(log, HasSubstr("rank 0: NCCL is aborted, not closed: rank 0: NCCL has not ended its messages in 0.2 s"));
}

TEST(NcclLinkAlone, EndsWhileItsMessagesHaveNotBegun) {
  simt::ThreadNccl nccl;
  const auto errors = errors_on_ranks(2, nccl.links(), [&](Backend& device, const Communicator& world) {
    nccl.change({.stuck = true});
    world.barrier();
    if (world.rank() == 1) fail(ExitCode::data, "leaves");
    world.sum(filled(device, 1), Purpose::other);
  });
  EXPECT_EQ(errors[0], "6: a peer was lost");
}

// ---- a library that cannot be used

TEST(NcclLibrary, RefusedCommunicatorsAreOfTheEnvironment) {
  simt::ThreadNccl nccl({.refusal = NcclResult::invalid_usage});
  const auto errors = errors_on_ranks(2, nccl.links(), [](Backend&, const Communicator&) {});
  EXPECT_THAT(errors, Each(AllOf(StartsWith("3: rank "), HasSubstr("NCCL cannot connect: invalid usage"))));
}

TEST(NcclLibrary, EarlierOnesAndAnotherMajorVersionAreRefused) {
  const auto found = [](int version) {
    const simt::ThreadNccl nccl({.version = version});
    return find_nccl();
  };
  EXPECT_EQ(found(22809).text, "2.28.9 of NCCL over threads");
  EXPECT_TRUE(found(22809).usable);
  EXPECT_TRUE(found(22200).usable);
  const auto refusal = [](const char* version) {
    return text("NCCL over threads is version ", version, ", but 2.22 or a later 2.x is needed");
  };
  for (const auto& [version, name] : {std::pair(2804, "2.8.4"), std::pair(22105, "2.21.5"), std::pair(30102, "3.1.2")}) {
    EXPECT_FALSE(found(version).usable);
    EXPECT_EQ(found(version).text, refusal(name));
  }
}

TEST(NcclLibrary, WithoutItThereAreNoLinks) {
  EXPECT_FALSE(find_nccl().usable);
  try {
    nccl_links({.share_id = {}, .init_timeout_s = 1});
    FAIL() << "there are";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::environment);
    EXPECT_THAT(error.what(), HasSubstr("NCCL cannot be used: " + find_nccl().text));
  }
}

}  // namespace mantissa::nccl_test
