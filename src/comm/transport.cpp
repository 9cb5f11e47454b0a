#include "mantissa/comm/transport.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "backend/dry_backend.h"
#include "comm/collective.h"
#include "mantissa/base/error.h"

namespace mantissa {

void Transport::heed_interrupt() const {
  require(!stopped_, ExitCode::peer_lost, "rank ", rank(), " aborted its communication");
  if (interrupt_) interrupt_();
}

void Transport::wait(Request request) {
  constexpr int kSpins = 100;  // about 10 us over UCX; a wait that sleeps is woken after 4 to 5 us, and spinning takes a core from kernels
  for (int round = 0; !done(request); ++round) {
    heed_interrupt();
    if (round >= kSpins) sleep();
  }
}

void Transport::wait_all() {
  for (Request request = 0; request < begun(); ++request) wait(request);
  forget();
}

void Transport::keep(std::span<const std::byte> source, std::span<std::byte> target) { std::ranges::copy(source, target.begin()); }

namespace {

void copy_host_memory(std::span<const std::byte> source, std::span<std::byte> target) {
  if (!is_dry(source.data()) && !is_dry(target.data()) && source.size() == target.size()) std::ranges::copy(source, target.begin());
}

class DryTransport final : public Transport {
 public:
  DryTransport(int ranks, GroupTraffic& counted)
      : Transport({}), counted_(counted), sent_(static_cast<size_t>(ranks)), received_(static_cast<size_t>(ranks)) {}

  int rank() const override { return 0; }
  int size() const override { return static_cast<int>(sent_.size()); }

  Request send(int peer, uint64_t tag, std::span<const std::byte> bytes) override {
    if (tag == kHeaderTag) {
      Header header;
      std::memcpy(&header, bytes.data(), sizeof header);
      operation_ = header.operation;
      scatters_ = operation_ == Operation::sum || operation_ == Operation::sum_scatter;
    } else {
      sent_[static_cast<size_t>(peer)] += std::ssize(bytes);
    }
    messages_[tag == kHeaderTag].sent.push_back(bytes);
    return begun_++;
  }
  Request receive(int peer, uint64_t tag, std::span<std::byte> bytes) override {
    if (tag != kHeaderTag) received_[static_cast<size_t>(peer)] += std::ssize(bytes);
    messages_[tag == kHeaderTag].received.push_back(bytes);
    return begun_++;
  }
  void keep(std::span<const std::byte> source, std::span<std::byte> target) override { copy_host_memory(source, target); }
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
    std::ranges::fill(sent_, 0);
    std::ranges::fill(received_, 0);
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
    std::vector<int64_t>& shares = scatters_ ? sent_ : received_;
    shares.front() = (scatters_ ? received_ : sent_).back();
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
  std::vector<int64_t> sent_, received_;  // bytes of this phase of a collective, by peer
};

}  // namespace

std::unique_ptr<Transport> dry_transport(int ranks, GroupTraffic& counted) { return std::make_unique<DryTransport>(ranks, counted); }

}  // namespace mantissa
