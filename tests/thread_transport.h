// Moves messages between ranks that are threads of the test.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "mantissa/base/error.h"
#include "mantissa/comm/transport.h"

namespace mantissa::test {

// Sends lie in a mailbox: the receiver takes the bytes straight from the sender's memory, under the lock. So a canceled send is gone for
// good, and a sender that changes its bytes too early is a data race that ThreadSanitizer sees.
class ThreadTransport final : public Transport {
 public:
  struct Mailbox {
    // Hosts of the ranks, if there are several, and the bytes that each has sent to others, without headers.
    std::vector<int> hosts;
    std::vector<int64_t> left_host;
    struct Post {
      int sender, receiver;
      uint64_t tag;
      std::span<const std::byte> bytes;
    };

    std::mutex mutex;
    std::condition_variable changed;
    std::map<uint64_t, Post> posts;  // by number: in the order of sending
    uint64_t next = 0, version = 0;

    void change() {
      ++version;
      changed.notify_all();
    }
  };

  ThreadTransport(std::shared_ptr<Mailbox> mailbox, int rank, int size, Interrupt interrupt)
      : Transport(std::move(interrupt)), mailbox_(std::move(mailbox)), rank_(rank), size_(size) {}
  ~ThreadTransport() override { cancel(); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Request send(int peer, uint64_t tag, std::span<const std::byte> bytes) override {
    const std::lock_guard lock(mailbox_->mutex);
    const uint64_t number = mailbox_->next++;
    mailbox_->posts.emplace(number, Mailbox::Post{rank_, peer, tag, bytes});
    const auto from = static_cast<size_t>(rank_), to = static_cast<size_t>(peer);
    if (!mailbox_->hosts.empty() && mailbox_->hosts[from] != mailbox_->hosts[to] && tag >> 47 == 0)
      mailbox_->left_host[from] += std::ssize(bytes);
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

// Makes one transport per rank, all over one mailbox.
inline std::vector<std::unique_ptr<Transport>> thread_transports(int ranks, const Transport::Interrupt& interrupt = {},
                                                                 std::shared_ptr<ThreadTransport::Mailbox> mailbox = {}) {
  if (!mailbox) mailbox = std::make_shared<ThreadTransport::Mailbox>();
  std::vector<std::unique_ptr<Transport>> out;
  for (int rank = 0; rank < ranks; ++rank) out.push_back(std::make_unique<ThreadTransport>(mailbox, rank, ranks, interrupt));
  return out;
}

}  // namespace mantissa::test
