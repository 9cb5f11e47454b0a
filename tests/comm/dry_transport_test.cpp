// One rank alone counts what all ranks would send each other.
#include <gmock/gmock.h>

#include <numeric>

#include "mantissa/backend/dry_backend.h"
#include "mantissa/backend/functions.h"
#include "thread_ranks.h"

namespace mantissa::dry_transport_test {

using ::testing::Each;
using ::testing::IsEmpty;

// Of unequal shares, some of them empty.
std::vector<int64_t> shares_of(int ranks) {
  std::vector<int64_t> shares;
  for (int64_t r = 0; r < ranks; ++r) shares.push_back(r % 3 * 40 + r);
  return shares;
}

void exchange(const Communicator& group, Backend& device) {
  const std::vector<int64_t> shares = shares_of(group.size());
  const int64_t all = std::accumulate(shares.begin(), shares.end(), int64_t{0});
  const Tensor bytes = zeros(device, Dtype::u8, {all}), numbers = zeros(device, Dtype::f32, {all});
  group.all_gather(host_memory(bytes), shares, Purpose::other);
  group.sum_scatter(numbers, shares, Purpose::other);
  group.sum(numbers, Purpose::other);
}

TEST(DryTransport, CountsWhatAllRanksSend) {
  for (const int ranks : {2, 3, 5}) {
    std::vector<int64_t> sent(static_cast<size_t>(ranks));
    const auto errors = test::run_ranks(ranks, [&](const Communicator& world) {
      exchange(world, *make_backend("cpu"));
      sent[static_cast<size_t>(world.rank())] = world.traffic().other;
    });
    EXPECT_THAT(errors, Each(IsEmpty()));
    GroupTraffic counted;
    const Communicator alone(dry_transport(ranks, counted));
    exchange(alone, *dry_backend());
    EXPECT_EQ(counted.sent, std::accumulate(sent.begin(), sent.end(), int64_t{0})) << ranks;
    EXPECT_GE(counted.busiest, std::ranges::max(sent)) << ranks;
  }
}

TEST(DryTransport, GivesHostMemoryWhatThisRankSends) {
  GroupTraffic counted;
  const Communicator alone(dry_transport(4, counted));
  EXPECT_EQ(alone.all(7), (std::vector<int>{7, 7, 7, 7}));
}

}  // namespace mantissa::dry_transport_test
