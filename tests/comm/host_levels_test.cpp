// Collectives of ranks on several hosts: the bytes and sums of one host, and each byte crosses between two hosts once.
#include "comm/host_levels.h"

#include <gmock/gmock.h>

#include <numeric>
#include <set>

#include "async_device.h"
#include "comm_cases.h"
#include "thread_links.h"

namespace mantissa::test::host_levels_test {

using ::testing::Each;
using ::testing::IsEmpty;

using Hosts = std::vector<int>;

Hosts equal_hosts(int hosts, int ranks) {
  Hosts out;
  for (int r = 0; r < hosts * ranks; ++r) out.push_back(r / ranks);
  return out;
}

Hosts random_hosts(std::mt19937& random, size_t ranks) {
  Hosts out;
  const auto hosts = 1 + random() % 4, run = 1 + random() % 4;  // neighbors come together, mostly
  for (size_t r = 0; r < ranks; ++r)
    out.push_back(static_cast<int>(r > 0 && r % run != 0 ? static_cast<uint32_t>(out.back()) : random() % hosts));
  return out;
}

void expect_on_hosts(const Hosts& hosts, const std::function<void(const Communicator&)>& body, const MakeDeviceLink& links = {}) {
  RanksOnHosts where{.hosts = hosts};
  EXPECT_THAT(run_ranks(static_cast<int>(hosts.size()), body, {}, links, &where), Each(IsEmpty())) << ::testing::PrintToString(hosts);
}

TEST(HostLevels, BlocksAreTheMostNeighborsThatEveryHostHas) {
  for (const auto& [hosts, block] : {std::pair(Hosts{0, 0, 0, 0}, 1),
                                     {{0, 1}, 1},
                                     {{0, 0, 1, 1}, 2},
                                     {{5, 5, 3, 3}, 2},
                                     {{0, 1, 0, 1}, 1},
                                     {{0, 0, 0, 1, 1, 1}, 1},
                                     {{0, 0, 0, 0, 1, 1}, 2},
                                     {{0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0}, 4},
                                     {{0, 0, 0, 1, 1, 1, 1, 0}, 1},
                                     {equal_hosts(2, 6), 2},
                                     {equal_hosts(3, 8), 8}})
    EXPECT_EQ(HostLevels(hosts).block(), block) << ::testing::PrintToString(hosts);
}

TEST(HostLevels, EveryHostHoldsEachShareOnce) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const Hosts hosts = random_hosts(random, 1 + random() % 20);
    const HostLevels levels(hosts);
    std::set<std::pair<int, int>> held;  // host and share
    for (size_t r = 0; r < hosts.size(); ++r) {
      const std::vector<int> own = levels.held(static_cast<int>(r));
      EXPECT_THAT(own, ::testing::Contains(static_cast<int>(r)));
      for (const int root : own) EXPECT_TRUE(held.emplace(hosts[r], root).second) << ::testing::PrintToString(hosts);
    }
    EXPECT_EQ(held.size(), hosts.size() * std::set(hosts.begin(), hosts.end()).size());
  }
  for (int rank = 0; rank < 12; ++rank) EXPECT_EQ(HostLevels(equal_hosts(3, 4)).held(rank).size(), 3U) << "ranks take turns";
}

void check_collectives(Backend& device, const Communicator& world, uint32_t seed, Backend* memory) {
  check_all_gather(world, seed, 600, memory);
  check_sum_scatter(device, world, seed, 200);
  check_sum<float>(device, world, 1 + 70 * (seed % 7), seed);
}

TEST(HostLevels, ChangeNoBitOfAnyLayout) {
  const Threads one(1);
  std::mt19937 random(2);
  for (uint32_t seed = 0; seed < 40; ++seed) {
    const Hosts hosts = seed < 6 ? std::array{equal_hosts(2, 2), equal_hosts(2, 4), equal_hosts(3, 2),
                                              equal_hosts(4, 2), equal_hosts(2, 3), equal_hosts(3, 4)}[seed]
                                 : random_hosts(random, 2 + random() % 9);
    expect_on_hosts(hosts, [&](const Communicator& world) {
      const auto device = make_backend(seed % 2 == 0 ? "cpu" : "cpu_reference");
      check_collectives(*device, world, seed, nullptr);
      check_sum<double>(*make_backend("cpu_reference"), world, 65, seed);
      check_split(world, seed);
      check_collectives(*device, world.split(world.rank() % 2), seed, nullptr);
    });
  }
}

// Over links, and through the memory of hosts.
TEST(HostLevels, AreThoseOfDevicesToo) {
  for (const Hosts& hosts : {equal_hosts(2, 4), equal_hosts(3, 2), equal_hosts(2, 3), Hosts{0, 0, 1, 1, 1, 1, 2, 2}}) {
    ThreadLinks links;
    for (const MakeDeviceLink& maker : {links.maker(), MakeDeviceLink()}) {
      expect_on_hosts(
          hosts,
          [](const Communicator& world) {
            const Threads one(1);
            AsyncDevice device(static_cast<uint32_t>(world.rank() + 1));
            try {
              for (uint32_t seed = 0; seed < 6; ++seed) check_collectives(device, world, seed, &device);
            } catch (...) {
              world.stop();
              throw;
            }
          },
          maker);
    }
  }
}

// Bytes that each rank sends to other hosts for a call on shares of `each` elements.
template <class Call>
std::vector<int64_t> leaving(const Hosts& hosts, int64_t each, bool on_devices, const Call& call) {
  const Threads one(1);
  RanksOnHosts where{.hosts = hosts};
  ThreadLinks links;
  const auto body = [&](const Communicator& world) {
    const std::unique_ptr<Backend> device = on_devices ? std::make_unique<ClosedDevice>() : make_backend("cpu");
    const std::vector<int64_t> counts(hosts.size(), each);
    call(world, zeros(*device, Dtype::f32, {each * world.size()}), counts);
    device->synchronize();
    require(!on_devices || world.traffic().other > 0, "nothing was sent");
  };
  EXPECT_THAT(run_ranks(static_cast<int>(hosts.size()), body, {}, on_devices ? links.maker() : MakeDeviceLink(), &where), Each(IsEmpty()));
  return where.left;
}

void sum_scatter(const Communicator& world, const Tensor& x, const std::vector<int64_t>& counts) {
  world.sum_scatter(x, counts, Purpose::other);
}
void all_gather(const Communicator& world, const Tensor& x, const std::vector<int64_t>& counts) {
  std::vector<int64_t> bytes;
  for (const int64_t count : counts) bytes.push_back(4 * count);
  world.all_gather(x, bytes, Purpose::other);
}

// G / 8 of the G bytes of a tensor, but for the own host's part of it: a flat exchange sends 4 and 7 times as much.
TEST(HostLevels, SendAnEighthOfATensorFromEachOfEightRanks) {
  for (const int hosts : {2, 8}) {
    for (const bool on_devices : {false, true}) {
      if (on_devices && hosts > 2) continue;
      const int64_t each = 6, all = 4 * each * 8 * hosts, expected = all / 8 * (hosts - 1) / hosts;
      EXPECT_THAT(leaving(equal_hosts(hosts, 8), each, on_devices, sum_scatter), Each(expected)) << hosts << " hosts";
      EXPECT_THAT(leaving(equal_hosts(hosts, 8), each, on_devices, all_gather), Each(expected)) << hosts << " hosts";
    }
  }
}

// Gathers need no blocks; a sum without them goes to every rank of the other hosts.
TEST(HostLevels, SendAShareOfAGatherToEveryOtherHostOnce) {
  for (const Hosts& hosts : {equal_hosts(2, 3), Hosts{0, 1, 1, 1, 2, 0, 2}, equal_hosts(4, 1)}) {
    const auto others = static_cast<int64_t>(std::set(hosts.begin(), hosts.end()).size()) - 1;
    EXPECT_THAT(leaving(hosts, 5, false, all_gather), Each(4 * 5 * others)) << ::testing::PrintToString(hosts);
  }
  EXPECT_THAT(leaving(equal_hosts(2, 3), 5, false, sum_scatter), Each(4 * 5 * 3));
}

TEST(HostLevels, ScratchHoldsWhatArrivesAtOnce) {
  const std::vector<int64_t> counts = {5, 0, 7, 100};
  for (const auto& [hosts, elements] : {std::pair(Hosts{0, 0, 0, 0}, std::vector<int64_t>{15, 0, 21, 300}),
                                        {{0, 0, 1, 1}, {12, 100, 12, 100}},
                                        {{0, 1, 2, 3}, {15, 0, 21, 300}}}) {
    expect_on_hosts(hosts, [&counts, elements = elements](const Communicator& world) {
      const int64_t needed = elements[static_cast<size_t>(world.rank())];
      EXPECT_EQ(world.scratch_elements(counts), needed);
      const auto device = make_backend("cpu");
      const Tensor x = zeros(*device, Dtype::f32, {112});
      if (needed > 0) {
        EXPECT_THROW(world.sum_scatter(x, counts, Purpose::other, empty(*device, Dtype::f32, {needed - 1})), Error);
      }
      world.barrier();
    });
  }
  EXPECT_EQ(Communicator().scratch_elements(counts), 0);
  EXPECT_THROW(Communicator(std::move(thread_transports(2)[0]), {}, {0}), Error);
}

}  // namespace mantissa::test::host_levels_test
