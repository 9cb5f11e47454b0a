// Links between the devices of ranks that are threads of the test: a receiver copies from the memory of the sender, in its own lane, once
// the sender's lane has come to the message; the sender's lane goes on once that copy is made. The hosts only tell each other marks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "mantissa/backend/backend.h"
#include "mantissa/comm/device_link.h"

namespace mantissa::test {

// Of all ranks of a test.
class ThreadLinks {
 public:
  MakeDeviceLink maker() {
    return [this](const LinkRanks& of) { return std::make_unique<Link>(*this, of); };
  }

 private:
  struct Post {
    mantissa::Bytes bytes;
    Backend::Mark ready;  // the bytes may be read
    bool taken = false;
    Backend::Mark copied;  // the bytes may be written again
  };
  using Pair = std::tuple<uint64_t, int, int>;  // group, from, to

  class Link final : public DeviceLink {
   public:
    Link(ThreadLinks& links, LinkRanks of) : links_(links), of_(std::move(of)) {}
    void exchange(std::span<const DeviceMessage> messages) override {
      if (messages.empty()) return;
      Backend& device = *messages.front().bytes.device;
      const Backend::Mark ready = device.mark();
      std::vector<std::shared_ptr<Post>> sent;
      for (const DeviceMessage& message : messages) {
        if (message.receives) continue;
        sent.push_back(std::make_shared<Post>(Post{.bytes = message.bytes, .ready = ready, .copied = {}}));
        links_.post({of_.group, of_.rank, message.peer}, sent.back());
      }
      for (const DeviceMessage& message : messages) {
        if (message.receives) take(device, *links_.next(of_.look, {of_.group, message.peer, of_.rank}), message.bytes);
      }
      for (const auto& post : sent) {
        links_.wait(of_.look, [&] { return post->taken; });
        device.follow(post->copied);
      }
    }
    void check() override {}
    void give_up() noexcept override {}

   private:
    void take(Backend& device, Post& post, const mantissa::Bytes& to) {
      const int64_t size = std::min(post.bytes.size, to.size);  // headers tell whose call differs
      device.follow(post.ready);
      device.run(Convert{.x = post.bytes.slice(0, size).tensor(), .out = to.slice(0, size).tensor()});
      const Backend::Mark copied = device.mark();
      links_.change([&] {
        post.copied = copied;
        post.taken = true;
      });
    }

    ThreadLinks& links_;
    LinkRanks of_;
  };

  void change(const std::function<void()>& body) {
    const std::lock_guard lock(mutex_);
    body();
    changed_.notify_all();
  }
  void wait(const std::function<void()>& look, const std::function<bool()>& until) {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(20), until)) {
      lock.unlock();
      look();
      lock.lock();
    }
  }
  void post(const Pair& pair, const std::shared_ptr<Post>& what) {
    change([&] { posts_[pair].push_back(what); });
  }
  std::shared_ptr<Post> next(const std::function<void()>& look, const Pair& pair) {
    std::shared_ptr<Post> out;
    wait(look, [&] {
      auto& queue = posts_[pair];
      if (queue.empty()) return false;
      out = queue.front();
      queue.pop_front();
      return true;
    });
    return out;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Pair, std::deque<std::shared_ptr<Post>>> posts_;
};

}  // namespace mantissa::test
