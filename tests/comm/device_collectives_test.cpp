// Collectives and the queue over devices whose memory the host cannot touch and whose kernels end later than they are asked for: the same
// bytes and sums as those of hosts, in the order of the lanes.
#include <gmock/gmock.h>

#include <future>

#include "async_device.h"
#include "comm/comm_queue.h"
#include "comm_cases.h"
#include "hang.h"
#include "thread_links.h"
#include "thread_ranks.h"

namespace mantissa::test::device_collectives_test {

using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

enum class Kind { closed, async, async_through_the_host };

const char* name_of(Kind kind) { return kind == Kind::closed ? "closed" : kind == Kind::async ? "async" : "staged"; }

struct Setting {
  Kind kind;
  int ranks;
};
void PrintTo(const Setting& setting, std::ostream* out) { *out << name_of(setting.kind) << '_' << setting.ranks; }

class DeviceCollectives : public ::testing::TestWithParam<Setting> {
 protected:
  using Body = std::function<void(Backend&, const Communicator&)>;
  static std::unique_ptr<Backend> device_of(int seed) {
    if (GetParam().kind == Kind::closed) return std::make_unique<ClosedDevice>();
    return std::make_unique<AsyncDevice>(static_cast<uint32_t>(seed));
  }
  static std::vector<std::string> errors_on_ranks(const Body& body) {
    ThreadLinks links;
    const auto on_rank = [&](const Communicator& world) {
      const Threads one(1);
      const std::unique_ptr<Backend> device = device_of(world.rank() + 1);
      try {
        body(*device, world);
      } catch (...) {
        world.stop();  // lanes of the device would wait for peers
        throw;
      }
    };
    return run_ranks(GetParam().ranks, on_rank, {}, GetParam().kind == Kind::async ? links.maker() : MakeDeviceLink());
  }
  static void on_ranks(const Body& body) { EXPECT_THAT(errors_on_ranks(body), Each(IsEmpty())); }
};

Tensor filled(Backend& device, double value, int64_t count = 1000) {
  Tensor out = empty(device, Dtype::f32, {count});
  device.run(Fill{.out = out, .value = value});
  return out;
}
void require_all(const Tensor& tensor, double value, const char* what) {
  for (const float each : to_host<float>(tensor)) require(double{each} == value, what, ": ", each, " where ", value, " belongs");
}

TEST_P(DeviceCollectives, HaveTheBytesAndSumsOfThoseOfHosts) {
  on_ranks([](Backend& device, const Communicator& world) {
    for (uint32_t seed = 0; seed < 10; ++seed) {
      check_all_gather(world, seed, 2000, &device);
      check_all_to_all(world, seed, 700, &device);
      check_sum_scatter(device, world, seed, 300);
    }
    for (const int64_t count : {0, 1, 15, 16, 17, 129, 1000, 4097}) check_sum<float>(device, world, count, 1);
    for (int root = 0; root < world.size(); ++root) {
      const Tensor bytes = uploaded(device, Bytes(77, pattern(world.rank(), 1, 5)));
      world.broadcast(bytes, root, Purpose::other);
      require(downloaded(bytes) == Bytes(77, pattern(root, 1, 5)), "broadcast from ", root);
    }
  });
}

// Groups of groups have links of their own, and calls for the host may come between.
TEST_P(DeviceCollectives, GroupsAndHostsTakeTurns) {
  on_ranks([](Backend& device, const Communicator& world) {
    const Communicator pairs = world.split(world.rank() / 2), others = world.split(world.rank() % 2);
    for (int round = 0; round < 10; ++round) {
      const Tensor x = filled(device, 1);
      pairs.sum(x, Purpose::activations);
      check_small(world);
      others.sum(x, Purpose::activations);
      require_all(x, world.size() == 3 ? (world.rank() == 2 ? 3 : world.rank() == 0 ? 3 : 2) : world.size(), "sum of sums");
    }
  });
}

// Kernels of the compute lane around a call keep their places, and so does the memory that the host frees at once.
TEST_P(DeviceCollectives, ACallStandsBetweenTheKernelsAroundIt) {
  on_ranks([](Backend& device, const Communicator& world) {
    for (int round = 1; round <= 40; ++round) {
      const Tensor x = filled(device, round), doubled = empty_like(x);
      world.sum(x, Purpose::activations);
      device.run(Add{.a = x, .b = x, .out = doubled});
      device.run(Fill{.out = x, .value = -1});
      filled(device, 1e6);  // memory of others
      require_all(doubled, 2.0 * round * world.size(), "behind the call");
      require_all(x, -1, "written behind the call");
    }
  });
}

// The queue leaves the sum over the ranks in `out` and keeps what it needs for that: memory that is freed here goes to others.
Work sum_into(const Tensor& out, double addend, CommQueue& queue, const Communicator& world) {
  Work work = queue.submit([&world, out, sums = filled(out.device(), addend)] {
    world.sum(sums, Purpose::gradients);
    out.device().run(Convert{.x = sums, .out = out});
  });
  for (int i = 0; i < 5; ++i) filled(out.device(), 1e6);
  return work;
}

TEST_P(DeviceCollectives, AQueueRunsBesideTheComputeLane) {
  on_ranks([](Backend& device, const Communicator& world) {
    CommQueue queue(world, &device);
    for (int round = 1; round <= 20; ++round) {
      std::vector<Work> work;
      std::vector<Tensor> made;
      for (int i = 0; i < 3; ++i) {
        made.push_back(filled(device, 0));
        work.push_back(sum_into(made.back(), round + i, queue, world));
      }
      const Tensor beside = filled(device, 1);
      world.sum(beside, Purpose::activations);  // stands behind what was submitted
      for (int i = 2; i >= 0; --i) {
        work[static_cast<size_t>(i)].wait();
        require_all(made[static_cast<size_t>(i)], static_cast<double>((round + i) * world.size()), "what the queue made");
      }
      require_all(beside, world.size(), "beside the queue");
    }
  });
}

// The queue keeps the operands, whether anybody waits for the work or not.
TEST_P(DeviceCollectives, AQueueKeepsWhatNobodyWaitsFor) {
  on_ranks([](Backend& device, const Communicator& world) {
    const Tensor last = filled(device, 0);
    {
      CommQueue queue(world, &device);
      for (int round = 1; round <= 20; ++round) sum_into(last, round, queue, world);
    }
    require_all(last, 20.0 * world.size(), "the last of the queue");
  });
}

// A gather into memory that kernels asked for before still read.
TEST_P(DeviceCollectives, AGatherComesBehindTheReadersOfItsMemory) {
  on_ranks([](Backend& device, const Communicator& world) {
    CommQueue queue(world, &device);
    const Tensor weights = filled(device, 0, 64 * world.size()), own = weights.slice(64 * world.rank(), 64 * (world.rank() + 1));
    const std::vector<int64_t> counts(static_cast<size_t>(world.size()), 64 * 4);
    Work arrived;
    for (int round = 1; round <= 30; ++round) {
      arrived.wait();
      const Tensor read = filled(device, 0, weights.elements());
      for (int i = 0; i < 10; ++i) device.run(Add{.a = read, .b = weights, .out = read});
      device.run(Fill{.out = own, .value = static_cast<double>(round)});
      arrived = queue.submit([&world, &counts, weights] { world.all_gather(weights, counts, Purpose::parameters); });
      require_all(read, 10.0 * (round - 1), "what was there before");
    }
  });
}

TEST_P(DeviceCollectives, WhatABodyThrowsReachesEveryWait) {
  on_ranks([](Backend& device, const Communicator& world) {
    CommQueue queue(world, &device);
    const Work fails = queue.submit([] { fail(ExitCode::data, "no such thing"); });
    bool ran = false;
    const Work after = queue.submit([&] { ran = true; });
    for (int i = 0; i < 2; ++i) {
      EXPECT_THROW(fails.wait(), Error);
      EXPECT_THROW(after.wait(), Error);
    }
    EXPECT_FALSE(ran);
    world.barrier();
  });
}

TEST_P(DeviceCollectives, CallsThatDifferAreNamedAtTheNextWait) {
  const auto with = [](const std::function<void(Backend&, const Communicator&, const Tensor&)>& call) {
    return errors_on_ranks([&](Backend& device, const Communicator& world) {
      const Tensor x = filled(device, 1);
      call(device, world, x);
      to_host<float>(x);
      world.barrier();
    });
  };
  EXPECT_THAT(with([](Backend&, const Communicator& world, const Tensor& x) {
                world.rank() == 0 ? world.sum(x, Purpose::other) : world.broadcast(x, 1, Purpose::other);
              }),
              Contains(HasSubstr("make different calls")));
  // Bytes of a host and of a device.
  EXPECT_THAT(with([](Backend&, const Communicator& world, const Tensor& x) {
                const std::unique_ptr<Backend> host = make_backend("cpu");
                world.sum(world.rank() == 0 ? x : filled(*host, 1), Purpose::other);
              }),
              Contains(::testing::AllOf(HasSubstr("make different calls"), HasSubstr("sum of 1000 fp32 on a device"))));
}

TEST_P(DeviceCollectives, TimeOfTheComputeLaneIsCounted) {
  on_ranks([](Backend& device, const Communicator& world) {
    const double late = 0.1;
    const Tensor x = filled(device, 1);
    CommunicationMeter meter;
    const Moment began(device);
    if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::duration<double>(late));
    world.sum(x, Purpose::other);
    const Moment ended(device);
    meter.stop();
    world.sum(x, Purpose::other);  // counts no more
    to_host<float>(x);
    EXPECT_LE(meter.seconds(), began.seconds_until(ended) + 1e-3);
    if (world.rank() == 0 && GetParam().kind != Kind::closed) {
      EXPECT_GT(meter.seconds(), 0.5 * late);
    }
  });
}

// A rank that asks late computes; one whose lane waits for it does not.
TEST_P(DeviceCollectives, AQueueDoesNotHideWhoIsLate) {
  std::array<double, 8> computed{};
  on_ranks([&](Backend& device, const Communicator& world) {
    CommQueue queue(world, &device);
    const Tensor x = filled(device, 1);
    world.barrier();
    CommunicationMeter meter;
    const Moment began(device);
    if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const Work work = queue.submit([&] { world.sum(x, Purpose::gradients); });
    const Moment ended(device);
    meter.stop();
    work.wait();
    to_host<float>(x);
    computed[static_cast<size_t>(world.rank())] = began.seconds_until(ended) - meter.seconds();
  });
  EXPECT_LT(computed[0], computed[1] / 2);
}

TEST_P(DeviceCollectives, AWaitForTheDeviceEndsWithALostPeer) {
  const auto errors = errors_on_ranks([](Backend& device, const Communicator& world) {
    const Tensor x = filled(device, 1);
    world.sum(x, Purpose::other);
    if (world.rank() == 1) fail(ExitCode::data, "leaves");
    CommQueue queue(world, &device);
    world.sum(x, Purpose::other);
    to_host<float>(x);
    fail(ExitCode::internal, "nobody was missed");
  });
  for (int r = 0; r < GetParam().ranks; ++r) EXPECT_THAT(errors[static_cast<size_t>(r)], HasSubstr(r == 1 ? "leaves" : "a peer was lost"));
}

TEST_P(DeviceCollectives, ReportsNameTheLatestKernels) {
  on_ranks([](Backend& device, const Communicator& world) {
    EXPECT_THAT(world.latest_kernels(), IsEmpty());
    world.sum(filled(device, 1), Purpose::other);
    device.run(Fill{.out = filled(device, 1), .value = 2});
    EXPECT_EQ(world.latest_kernels().back(), "fill");
    EXPECT_THAT(world.latest_kernels(), Contains("tree_sum"));
  });
}

// The watchdog reports the device of the latest call.
TEST_P(DeviceCollectives, ReportsNameTheKernelsOfTheLatestDevice) {
  on_ranks([](Backend& device, const Communicator& world) {
    const std::unique_ptr<Backend> other = device_of(world.rank() + 10);
    const Tensor first = filled(device, 1), x = filled(*other, 1), y = empty_like(x);
    world.sum(first, Purpose::other);
    require_all(first, world.size(), "the sum of the first device");
    world.barrier();
    world.sum(x, Purpose::other);
    device.run(Fill{.out = first, .value = 2});
    other->run(Add{.a = x, .b = x, .out = y});
    EXPECT_EQ(world.latest_kernels().back(), "add");
    require_all(y, 2.0 * world.size(), "the sum of the other device");
    world.barrier();
  });
}

// A wait inside a body orders the lane of communication alone.
TEST_P(DeviceCollectives, ABodyMayWaitForOtherWork) {
  on_ranks([](Backend& device, const Communicator& world) {
    CommQueue queue(world, &device);
    for (int round = 1; round <= 20; ++round) {
      const Tensor copy = filled(device, 0);
      const Work first = sum_into(copy, round, queue, world), second = queue.submit([&] { first.wait(); });
      for (int j = 0; j < 5; ++j) filled(device, 1e6);
      first.wait();
      require_all(copy, round * world.size(), "what the first made");
      second.wait();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceCollectives,
                         ::testing::Values(Setting{Kind::closed, 2}, Setting{Kind::closed, 3}, Setting{Kind::async, 2},
                                           Setting{Kind::async, 3}, Setting{Kind::async, 4}, Setting{Kind::async_through_the_host, 2},
                                           Setting{Kind::async_through_the_host, 3}),
                         ::testing::PrintToStringParamName());

// ---- links whose exchanges fail later than they are asked for

// Moves nothing. Its exchanges have failed once `failed` is set.
struct LateState {
  std::atomic<bool> failed{false};
  std::atomic<int> made{0}, given_up{0};
  std::function<void()> while_giving_up;
};
class LateLink final : public DeviceLink {
 public:
  explicit LateLink(LateState& state) : state_(state) {}
  void exchange(std::span<const DeviceMessage>) override {}
  void check() override { require(!state_.failed, ExitCode::peer_lost, "the link lost a peer"); }
  void give_up() noexcept override {
    ++state_.given_up;
    if (state_.while_giving_up) state_.while_giving_up();
  }

 private:
  LateState& state_;
};

class LateLinks : public ::testing::Test {
 protected:
  // Runs body as ranks over late links, all of which share one state.
  std::vector<std::string> errors(const std::function<void(Backend&, const Communicator&)>& body, int ranks = 2) {
    auto transports = thread_transports(ranks, [this] { require(!lost_, ExitCode::peer_lost, "a peer was lost"); });
    std::vector<std::string> out(transports.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < out.size(); ++r) {
      threads.emplace_back([&, r] {
        const Threads one(1);
        AsyncDevice device;
        const Communicator world(std::move(transports[r]), [this](const LinkRanks&) {
          ++link_state_.made;
          return std::make_unique<LateLink>(link_state_);
        });
        try {
          body(device, world);
        } catch (const std::exception& error) {
          out[r] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return out;
  }

  LateState link_state_;
  std::atomic<bool> lost_{false};
};

// Links are of the world and of a pair within it: two on each of four ranks.
TEST_F(LateLinks, AnErrorFoundByAWaitEndsAllOfThem) {
  const auto body = [&](Backend& device, const Communicator& world) {
    const Communicator pairs = world.split(world.rank() / 2);
    const Tensor x = filled(device, 1);
    pairs.sum(x, Purpose::other);
    world.barrier();
    link_state_.failed = true;
    EXPECT_THROW(
        {
          device.follow(AsyncDevice::never());
          to_host<float>(x);
        },
        Error);
    EXPECT_THROW(world.sum(filled(device, 1), Purpose::other), Error);
    pairs.barrier();
  };
  EXPECT_THAT(errors(body, 4), Each(HasSubstr("the link lost a peer")));
  EXPECT_EQ(link_state_.made, 8);
  EXPECT_GE(link_state_.given_up, 8);
}

// A rank that gives up waits for them, but holds nothing that a report needs.
TEST_F(LateLinks, AreGivenUpWhileReportsAreMade) {
  const auto found = errors([&](Backend&, const Communicator& world) {
    if (world.rank() == 1) return;
    std::future<void> report;
    link_state_.while_giving_up = [&] {
      report = std::async(std::launch::async, [&] { world.latest_calls(), world.latest_kernels(); });
      EXPECT_EQ(report.wait_for(kHang), std::future_status::ready);
    };
    world.stop();
  });
  EXPECT_THAT(found, Each(IsEmpty()));
}

TEST_F(LateLinks, GroupsOfTheSameRanksShareOne) {
  const auto body = [&](Backend&, const Communicator& world) {
    const Communicator same = world.split(0), pairs = same.split(world.rank() / 2), again = pairs.split(0);
    world.barrier();
    EXPECT_EQ(link_state_.made, 8);
    EXPECT_EQ(again.size(), 2);
  };
  EXPECT_THAT(errors(body, 4), Each(IsEmpty()));
}

TEST_F(LateLinks, APeerThatAWaitMissesEndsThem) {
  const auto found = errors([&](Backend& device, const Communicator& world) {
    world.sum(filled(device, 1), Purpose::other);
    world.barrier();
    lost_ = true;
    EXPECT_THROW(
        {
          device.follow(AsyncDevice::never());
          to_host<float>(filled(device, 1));
        },
        Error);
    EXPECT_GE(link_state_.given_up, 1);
    world.sum(filled(device, 1), Purpose::other);
  });
  EXPECT_THAT(found, Each(HasSubstr("a peer was lost")));
}

// Their queue watches the device before the first collective.
TEST_F(LateLinks, AStopAndAWaitBesideAQueueEndThem) {
  const auto stopped = errors([&](Backend& device, const Communicator& world) {
    world.barrier();
    world.stop();
    EXPECT_GE(link_state_.given_up, 1);
    world.sum(filled(device, 1), Purpose::other);
  });
  EXPECT_THAT(stopped, Each(HasSubstr("aborted its communication")));
  const auto missed = errors([&](Backend& device, const Communicator& world) {
    const CommQueue queue(world, &device);
    lost_ = true;
    device.follow(AsyncDevice::never());
    to_host<float>(filled(device, 1));
  });
  EXPECT_THAT(missed, Each(HasSubstr("a peer was lost")));
}

// A transport moves messages once more at its end, as UCX does; the headers of calls that no wait has compared are still there.
TEST_F(LateLinks, HeadersOutliveTheTransport) {
  class Late final : public Transport {
   public:
    explicit Late(std::unique_ptr<Transport> of) : Transport({}), of_(std::move(of)) {}
    ~Late() override {
      for (Request i = 0; i < count_; ++i) of_->ready(i);
    }
    int rank() const override { return of_->rank(); }
    int size() const override { return of_->size(); }
    Request send(int to, uint64_t tag, std::span<const std::byte> bytes) override { return ++count_, of_->send(to, tag, bytes); }
    Request receive(int from, uint64_t tag, std::span<std::byte> bytes) override { return ++count_, of_->receive(from, tag, bytes); }
    void cancel() noexcept override {}

   protected:
    bool done(Request request) override { return of_->ready(request); }
    void sleep() override {}
    size_t begun() const override { return count_; }
    void forget() override {}

   private:
    std::unique_ptr<Transport> of_;
    size_t count_ = 0;
  };
  auto transports = thread_transports(2);
  ClosedDevice a, b;
  const auto link = [&](const LinkRanks&) { return std::make_unique<LateLink>(link_state_); };
  auto first = std::make_unique<Communicator>(std::make_unique<Late>(std::move(transports[0])), link);
  const Communicator second(std::move(transports[1]), link);
  first->sum(filled(a, 1), Purpose::other);
  second.sum(filled(b, 1), Purpose::other);
  first.reset();  // AddressSanitizer sees a header that is gone
}

// ---- a device alone

TEST(LaneScope, GivesTheLaneBack) {
  EXPECT_EQ(current_lane(), Lane::compute);
  {
    const LaneScope outer(Lane::communication);
    {
      const LaneScope inner(Lane::compute);
      EXPECT_EQ(current_lane(), Lane::compute);
    }
    EXPECT_EQ(current_lane(), Lane::communication);
    std::thread([] { EXPECT_EQ(current_lane(), Lane::compute) << "of another thread"; }).join();
  }
  EXPECT_EQ(current_lane(), Lane::compute);
}

TEST(AsyncDevice, MarksOrderItsLanes) {
  AsyncDevice device;
  for (int round = 1; round <= 50; ++round) {
    const Tensor x = filled(device, round);
    const Backend::Mark written = device.mark();
    {
      const LaneScope lane(Lane::communication);
      device.follow(written);
      device.run(Add{.a = x, .b = x, .out = x});
    }
    Backend::Mark added;
    {
      const LaneScope lane(Lane::communication);
      added = device.mark();
    }
    device.follow(added);
    require_all(x, 2 * round, "both lanes");
    EXPECT_TRUE(device.reached(added));
    EXPECT_GE(device.seconds(written, added), 0);
  }
}

TEST(AsyncDevice, FreedMemoryIsPoisonInTheOrderOfItsLane) {
  AsyncDevice device;
  Tensor copy = empty(device, Dtype::f32, {4});
  std::byte* address = nullptr;
  {
    const Tensor x = filled(device, 5, 4);
    address = x.device_bytes();
    device.run(Convert{.x = x, .out = copy});
  }
  EXPECT_EQ(to_host<float>(copy), std::vector<float>(4, 5.0F));
  {
    const Tensor again = empty(device, Dtype::f32, {4});
    ASSERT_EQ(again.device_bytes(), address);
    EXPECT_TRUE(std::isnan(to_host<float>(again)[0]));
  }
  const LaneScope lane(Lane::communication);
  EXPECT_NE(empty(device, Dtype::f32, {4}).device_bytes(), address) << "each lane has memory of its own";
}

TEST(AsyncDevice, AnUploadTakesItsBytesAtOnce) {
  AsyncDevice device;
  for (int round = 0; round < 50; ++round) {
    std::vector<float> values(100, static_cast<float>(round));
    const Tensor x = from_host(device, Dtype::f32, {100}, values.data());
    std::ranges::fill(values, -1.0F);
    require_all(x, round, "uploaded");
  }
}

TEST(AsyncDevice, AnErrorOfAKernelReachesTheNextWait) {
  AsyncDevice device;
  const std::vector<int32_t> ids{7};
  const Tensor out = empty(device, Dtype::f32, {1, 2}), table = zeros(device, Dtype::f32, {3, 2});
  device.run(EmbeddingForward{.ids = from_host(device, Dtype::i32, {1}, ids.data()), .weight = table, .out = out});
  EXPECT_THROW(device.synchronize(), Error);
}

// A lane that stands behind a mark that never comes.
TEST(AsyncDevice, AnInterruptEndsAWait) {
  AsyncDevice device;
  device.set_interrupt([] { fail(ExitCode::peer_lost, "gone"); });
  const Tensor x = filled(device, 1);
  device.follow(AsyncDevice::never());
  EXPECT_THROW(to_host<float>(x), Error);
  EXPECT_THROW(device.synchronize(), Error);
}

TEST(ClosedDevice, EndsWhoTouchesItsMemory) {
  ClosedDevice device;
  const Tensor tensor = zeros(device, Dtype::f32, {3});
  EXPECT_EQ(to_host<float>(tensor), (std::vector<float>{0, 0, 0}));
  EXPECT_DEATH(std::fprintf(stderr, "%d", static_cast<int>(*tensor.device_bytes())), "");
}

}  // namespace mantissa::test::device_collectives_test
