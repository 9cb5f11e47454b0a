#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "comm/collective.h"
#include "mantissa/backend/dry_backend.h"

namespace mantissa {
namespace {

void copy_host_memory(std::span<const std::byte> from, std::span<std::byte> to) {
  if (!is_dry(from.data()) && !is_dry(to.data()) && from.size() == to.size()) std::ranges::copy(from, to.begin());
}

class DryTransport final : public Transport {
 public:
  DryTransport(int ranks, GroupTraffic& counted)
      : Transport({}), counted_(counted), to_(static_cast<size_t>(ranks)), from_(static_cast<size_t>(ranks)) {}

  int rank() const override { return 0; }
  int size() const override { return static_cast<int>(to_.size()); }

  Request send(int to, uint64_t tag, std::span<const std::byte> bytes) override {
    if (tag == kHeaderTag) {
      Header header;
      std::memcpy(&header, bytes.data(), sizeof header);
      operation_ = header.operation;
      scatters_ = operation_ == Operation::sum || operation_ == Operation::sum_scatter;
    } else {
      to_[static_cast<size_t>(to)] += std::ssize(bytes);
    }
    messages_[tag == kHeaderTag].sent.push_back(bytes);
    return begun_++;
  }
  Request receive(int from, uint64_t tag, std::span<std::byte> bytes) override {
    if (tag != kHeaderTag) from_[static_cast<size_t>(from)] += std::ssize(bytes);
    messages_[tag == kHeaderTag].received.push_back(bytes);
    return begun_++;
  }
  void keep(std::span<const std::byte> from, std::span<std::byte> to) override { copy_host_memory(from, to); }
  void cancel() noexcept override {
    messages_ = {};
    begun_ = 0;
  }

 protected:
  bool done(Request) override {
    for (Messages& messages : messages_) {
      const size_t pairs = std::min(messages.sent.size(), messages.received.size());
      for (size_t i = 0; i < pairs; ++i) copy_host_memory(messages.sent[i], messages.received[i]);
      messages = {};
    }
    return true;
  }
  void sleep() override {}
  size_t begun() const override { return begun_; }
  void forget() override {
    if (operation_ != Operation::all_to_all) count();
    std::ranges::fill(to_, 0);
    std::ranges::fill(from_, 0);
    begun_ = 0;
  }

 private:
  struct Messages {
    std::vector<std::span<const std::byte>> sent;
    std::vector<std::span<std::byte>> received;
  };

  // Counts the bytes of a phase. In a scatter each rank sends every other one's share, otherwise its own, so that one rank knows the shares
  // of all. A sum scatters first and gathers then.
  void count() {
    std::vector<int64_t>& shares = scatters_ ? to_ : from_;
    shares.front() = (scatters_ ? from_ : to_).back();
    const int64_t all = std::accumulate(shares.begin(), shares.end(), int64_t{0}), others = std::ssize(shares) - 1;
    const auto [least, most] = std::ranges::minmax(shares);
    counted_.sent += others * all;
    counted_.busiest += std::max(all - least, others * most);
    scatters_ = false;
  }

  GroupTraffic& counted_;
  std::array<Messages, 2> messages_;  // payloads, headers
  size_t begun_ = 0;
  Operation operation_{};
  bool scatters_ = false;
  std::vector<int64_t> to_, from_;  // bytes of this phase of a collective, by peer
};

}  // namespace

std::unique_ptr<Transport> dry_transport(int ranks, GroupTraffic& counted) { return std::make_unique<DryTransport>(ranks, counted); }

}  // namespace mantissa
