// Links between the devices of ranks that are threads of the test: the lane of a receiver copies from the memory of the sender, once the
// sender's lane has come to the message; the sender's lane goes on once that copy is made. Hosts do not wait, but where a device does
// everything when it is asked.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "closed_device.h"
#include "mantissa/comm/device_link.h"

namespace mantissa::test {

// Makes the links of all ranks of a test; outlives their devices.
class ThreadLinks {
 public:
  MakeDeviceLink maker() {
    return [this](const LinkRanks& of) { return std::make_unique<Link>(*this, of); };
  }

 private:
  // A message that a sender's lane has come to.
  struct Post {
    const std::byte* bytes;
    int64_t size;
    std::shared_ptr<const void> memory;
    enum { offered, taken, copied, withdrawn } state = offered;
  };
  using Posts = std::vector<std::shared_ptr<Post>>;
  using Pair = std::tuple<uint64_t, int, int>;  // group, from, to

  // The end of a link: that of one rank of a group. Lanes keep it.
  struct End {
    ThreadLinks& links;
    LinkRanks of;
    bool given_up = false;
  };

  class Link final : public DeviceLink {
   public:
    Link(ThreadLinks& links, LinkRanks of) : end_(std::make_shared<End>(End{.links = links, .of = std::move(of)})) {}
    void exchange(std::span<const DeviceMessage> messages) override {
      if (messages.empty()) return;
      auto& device = static_cast<ClosedDevice&>(*messages.front().bytes.device);
      const std::vector<DeviceMessage> all(messages.begin(), messages.end());
      device.in_lane([end = end_, all, memory = device.memory(), host = std::this_thread::get_id()] {
        // Only a host may look whether its peers are there.
        move(
            *end, all, memory, std::this_thread::get_id() == host ? end->of.look : [] {});
      });
    }
    void check() override {}
    void give_up() noexcept override {
      end_->links.change([&] { end_->given_up = true; });
    }

   private:
    using Look = std::function<void()>;

    static void move(End& end, const std::vector<DeviceMessage>& messages, const std::shared_ptr<const void>& memory, const Look& look) {
      ThreadLinks& links = end.links;
      const Withdrawal sent{.links = links, .posts = links.offer(end, messages, memory)};
      for (const DeviceMessage& message : messages) {
        if (message.receives && !receive(end, message, look)) return;
      }
      for (const auto& post : sent.posts) links.wait(look, [&] { return end.given_up || post->state == Post::copied; });
    }
    // Returns false if the link has given up.
    static bool receive(End& end, const DeviceMessage& message, const Look& look) {
      std::shared_ptr<Post> post;
      end.links.wait(look, [&] {
        auto& queue = end.links.posts_[{end.of.hash, message.peer, end.of.rank}];
        std::erase_if(queue, [](const auto& each) { return each->state == Post::withdrawn; });
        if (end.given_up || queue.empty()) return end.given_up;
        post = queue.front();
        queue.pop_front();
        post->state = Post::taken;
        return true;
      });
      if (!post) return false;
      const auto size = static_cast<size_t>(std::min(post->size, message.bytes.size));  // headers tell whose call differs
      std::memcpy(ClosedMemory::opened(message.bytes.data), post->bytes, size);
      end.links.change([&] { post->state = Post::copied; });
      return true;
    }

    std::shared_ptr<End> end_;
  };

  // Takes back what nobody has taken, and waits while it is copied.
  struct Withdrawal {
    ThreadLinks& links;
    Posts posts;

    ~Withdrawal() {
      for (const auto& post : posts) {
        links.wait([] {},
                   [&] {
                     if (post->state == Post::offered) post->state = Post::withdrawn;
                     return post->state != Post::taken;
                   });
      }
    }
  };

  Posts offer(const End& end, const std::vector<DeviceMessage>& messages, const std::shared_ptr<const void>& memory) {
    Posts out;
    change([&] {
      for (const auto& [peer, receives, bytes] : messages) {
        if (receives) continue;
        out.push_back(std::make_shared<Post>(Post{.bytes = ClosedMemory::opened(bytes.data), .size = bytes.size, .memory = memory}));
        posts_[{end.of.hash, end.of.rank, peer}].push_back(out.back());
      }
    });
    return out;
  }
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

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Pair, std::deque<std::shared_ptr<Post>>> posts_;
};

}  // namespace mantissa::test
