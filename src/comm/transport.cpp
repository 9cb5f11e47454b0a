#include "mantissa/comm/transport.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

#include "backend/dry_backend.h"
#include "comm/collective.h"
#include "mantissa/base/error.h"

namespace mantissa {

void Transport::heed_interrupt() const {
  require(!stopped_, ExitCode::peer_lost, "rank ", rank(), " gave up its communication");
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

// A mailbox of sends: the receiver takes the bytes straight from the sender's memory, under the lock. So a canceled send is gone for good,
// and a sender that changes its bytes too early is a data race that ThreadSanitizer sees.

struct Post {
  int sender, receiver;
  uint64_t tag;
  std::span<const std::byte> bytes;
};

struct Mailbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<uint64_t, Post> posts;  // by number: in the order of sending
  uint64_t next = 0, version = 0;

  void change() {
    ++version;
    changed.notify_all();
  }
};

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Mailbox> mailbox, int rank, int size, Interrupt interrupt)
      : Transport(std::move(interrupt)), mailbox_(std::move(mailbox)), rank_(rank), size_(size) {}
  ~ThreadTransport() override { cancel(); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Request send(int peer, uint64_t tag, std::span<const std::byte> bytes) override {
    const std::lock_guard lock(mailbox_->mutex);
    const uint64_t number = mailbox_->next++;
    mailbox_->posts.emplace(number, Post{rank_, peer, tag, bytes});
    mailbox_->change();
    requests_.push_back({.post = number});
    return requests_.size() - 1;
  }

  Request receive(int peer, uint64_t tag, std::span<std::byte> bytes) override {
    requests_.push_back({.receives = true, .sender = peer, .tag = tag, .bytes = bytes});
    return requests_.size() - 1;
  }

  void cancel() noexcept override {
    const std::lock_guard lock(mailbox_->mutex);
    std::erase_if(mailbox_->posts, [&](const auto& entry) { return entry.second.sender == rank_; });
    requests_.clear();
  }

 protected:
  bool done(Request request) override {
    const std::lock_guard lock(mailbox_->mutex);
    seen_ = mailbox_->version;
    // In order, or a later receive of the same sender and tag would take the message of an earlier one.
    for (Request earlier = 0; earlier <= request; ++earlier) take(requests_.at(earlier));
    const Began& r = requests_[request];
    return r.receives ? r.taken : !mailbox_->posts.contains(r.post);
  }

  void sleep() override {
    std::unique_lock lock(mailbox_->mutex);
    mailbox_->changed.wait_for(lock, std::chrono::milliseconds(kNapMilliseconds), [&] { return mailbox_->version != seen_; });
  }

  size_t begun() const override { return requests_.size(); }
  void forget() override { requests_.clear(); }

 private:
  struct Began {
    bool receives = false, taken = false;
    uint64_t post = 0;  // the post of a send
    int sender = 0;
    uint64_t tag = 0;
    std::span<std::byte> bytes{};
  };

  void take(Began& r) {
    if (!r.receives || r.taken) return;
    auto& posts = mailbox_->posts;
    const auto found = std::find_if(posts.begin(), posts.end(), [&](const auto& entry) {
      return entry.second.sender == r.sender && entry.second.receiver == rank_ && entry.second.tag == r.tag;
    });
    if (found == posts.end()) return;
    const std::span<const std::byte> bytes = found->second.bytes;
    require(bytes.size() == r.bytes.size(), "rank ", r.sender, " sent ", bytes.size(), " bytes where rank ", rank_, " expected ",
            r.bytes.size());
    if (!bytes.empty()) std::memcpy(r.bytes.data(), bytes.data(), bytes.size());
    posts.erase(found);
    r.taken = true;
    mailbox_->change();
  }

  std::shared_ptr<Mailbox> mailbox_;
  int rank_, size_;
  std::vector<Began> requests_;
  uint64_t seen_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> thread_transports(int ranks, const Transport::Interrupt& interrupt) {
  const auto mailbox = std::make_shared<Mailbox>();
  std::vector<std::unique_ptr<Transport>> out;
  for (int rank = 0; rank < ranks; ++rank) out.push_back(std::make_unique<ThreadTransport>(mailbox, rank, ranks, interrupt));
  return out;
}

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
