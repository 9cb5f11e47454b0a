// One rank alone counts what all ranks would send each other.
#include <gtest/gtest.h>

#include "backend/dry_backend.h"
#include "comm_cases.h"
#include "mantissa/backend/functions.h"

namespace mantissa::test::dry_transport_test {

void exchange(const Communicator& group, Backend& device, const std::vector<int64_t>& shares) {
  group.all_gather(zeros(device, Dtype::u8, {total(shares)}), shares, Purpose::other);
  group.sum_scatter(zeros(device, Dtype::f32, {total(shares)}), shares, Purpose::other);
  group.sum(zeros(device, Dtype::f32, {group.size() * 160}), Purpose::other);
}

// Each share goes to all others, once as bytes and once as fp32; a sum scatters equal shares and gathers them.
TEST(DryTransport, CountsWhatAllRanksSendAndWhatTheBusiestOneMoves) {
  for (const int ranks : {2, 3, 5}) {
    std::vector<int64_t> shares;  // unequal, one of them empty
    for (int64_t r = 0; r < ranks; ++r) shares.push_back(r % 3 * 40 + r);
    GroupTraffic counted;
    exchange(Communicator(dry_transport(ranks, counted)), *dry_backend(), shares);
    std::atomic<int64_t> sent{0};
    expect_on_ranks(ranks, [&](const Communicator& world) {
      exchange(world, *make_backend("cpu"), shares);
      sent += world.traffic().other;
    });
    const auto [least, most] = std::ranges::minmax(shares);
    const int64_t unequal = std::max(total(shares) - least, (ranks - 1) * most), equal = (ranks - 1) * 160;
    EXPECT_EQ(counted.sent, sent) << ranks;
    EXPECT_EQ(counted.busiest, unequal + 4 * unequal + 2 * 4 * equal) << ranks;
  }
}

TEST(DryTransport, GivesHostMemoryWhatThisRankSends) {
  GroupTraffic counted;
  EXPECT_EQ(Communicator(dry_transport(4, counted)).all(7), (std::vector<int>{7, 7, 7, 7}));
}

}  // namespace mantissa::test::dry_transport_test
