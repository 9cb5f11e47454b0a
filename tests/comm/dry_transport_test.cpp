// One rank alone counts what all ranks would send each other.
#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "comm/collective.h"
#include "mantissa/backend/dry_backend.h"
#include "mantissa/backend/functions.h"

namespace mantissa::dry_transport_test {

// Of unequal shares, some of them empty.
std::vector<int64_t> shares_of(int ranks) {
  std::vector<int64_t> shares;
  for (int64_t r = 0; r < ranks; ++r) shares.push_back(r % 3 * 40 + r);
  return shares;
}

struct Bytes {
  int64_t sent = 0, received = 0;
};

// Counts what its rank sends and receives in each phase of a collective.
class CountedTransport final : public Transport {
 public:
  CountedTransport(std::unique_ptr<Transport> counted, std::vector<Bytes>& phases)
      : Transport({}), counted_(std::move(counted)), phases_(phases) {}

  int rank() const override { return counted_->rank(); }
  int size() const override { return counted_->size(); }
  Request send(int to, uint64_t tag, std::span<const std::byte> bytes) override {
    if (tag != kHeaderTag) phase_.sent += std::ssize(bytes);
    ++begun_;
    return counted_->send(to, tag, bytes);
  }
  Request receive(int from, uint64_t tag, std::span<std::byte> bytes) override {
    if (tag != kHeaderTag) phase_.received += std::ssize(bytes);
    ++begun_;
    return counted_->receive(from, tag, bytes);
  }
  void cancel() noexcept override { counted_->cancel(); }

 protected:
  bool done(Request request) override {
    counted_->wait(request);
    return true;
  }
  void sleep() override {}
  size_t begun() const override { return begun_; }
  void forget() override {
    counted_->wait_all();
    phases_.push_back(std::exchange(phase_, {}));
    begun_ = 0;
  }

 private:
  std::unique_ptr<Transport> counted_;
  std::vector<Bytes>& phases_;
  Bytes phase_;
  size_t begun_ = 0;
};

void exchange(const Communicator& group, Backend& device) {
  const std::vector<int64_t> shares = shares_of(group.size());
  const int64_t all = std::accumulate(shares.begin(), shares.end(), int64_t{0});
  const Tensor bytes = zeros(device, Dtype::u8, {all}), numbers = zeros(device, Dtype::f32, {all});
  group.all_gather(bytes, shares, Purpose::other);
  group.sum_scatter(numbers, shares, Purpose::other);
  group.sum(numbers, Purpose::other);
}

// Of ranks that are threads, by rank.
std::vector<std::vector<Bytes>> phases_of(int ranks) {
  auto transports = thread_transports(ranks);
  std::vector<std::vector<Bytes>> phases(transports.size());
  std::vector<std::jthread> threads;
  for (size_t r = 0; r < transports.size(); ++r) {
    threads.emplace_back(
        [&, r] { exchange(Communicator(std::make_unique<CountedTransport>(std::move(transports[r]), phases[r])), *make_backend("cpu")); });
  }
  threads.clear();  // joins
  return phases;
}

TEST(DryTransport, CountsWhatAllRanksSendAndWhatTheBusiestOneMoves) {
  for (const int ranks : {2, 3, 5}) {
    const std::vector<std::vector<Bytes>> found = phases_of(ranks);
    GroupTraffic counted, expected;
    const Communicator alone(dry_transport(ranks, counted));
    exchange(alone, *dry_backend());
    for (size_t phase = 0; phase < found.front().size(); ++phase) {
      int64_t busiest = 0;
      for (const std::vector<Bytes>& rank : found) {
        expected.sent += rank.at(phase).sent;
        busiest = std::max({busiest, rank[phase].sent, rank[phase].received});
      }
      expected.busiest += busiest;
    }
    EXPECT_EQ(counted.sent, expected.sent) << ranks;
    EXPECT_EQ(counted.busiest, expected.busiest) << ranks;
  }
}

TEST(DryTransport, GivesHostMemoryWhatThisRankSends) {
  GroupTraffic counted;
  const Communicator alone(dry_transport(4, counted));
  EXPECT_EQ(alone.all(7), (std::vector<int>{7, 7, 7, 7}));
}

}  // namespace mantissa::dry_transport_test
