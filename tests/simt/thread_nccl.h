// NCCL between ranks that are threads of the test, in place of the library of this host (nccl_calls.cpp).
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/nccl_link.h"
#include "hang.h"
#include "mantissa/base/error.h"

namespace mantissa::simt {

enum class NcclResult { success = 0, system_error = 2, invalid_usage = 5, remote_error = 6 };  // values of nccl.h

struct NcclSettings {
  int version = 22809;                            // as the library reports it
  NcclResult refusal = NcclResult::success;       // result for new communicators
  NcclResult refused_send = NcclResult::success;  // result for messages
  bool stuck = false;                             // groups of messages never begin
  bool mute = false;                              // lanes never come to their messages
  std::function<void()> while_ending = {};        // runs in calls that destroy or abort communicators, before they do
};
struct NcclCounts {
  int made = 0, destroyed = 0, aborted = 0;  // communicators
  int groups = 0;                            // groups of messages
  int connections = 0;                       // from a rank to a peer in a communicator, made by the first message
  int blocked = 0;                           // aborts that a kernel of the same process has not let return
};

// While one exists, it is the library.
class ThreadNccl {
 public:
  explicit ThreadNccl(const NcclSettings& settings = {});
  ~ThreadNccl();
  ThreadNccl(const ThreadNccl&) = delete;
  ThreadNccl& operator=(const ThreadNccl&) = delete;

  void change(const NcclSettings& settings);
  // Makes links for all ranks of a new job, with a maker for each, as processes have; outlives their groups.
  MakeDeviceLink links(double init_timeout_s = test::kHangSeconds, double close_timeout_s = test::kHangSeconds) {
    {
      const std::lock_guard lock(mutex_);
      ids_.clear();
    }
    struct Makers {
      std::mutex mutex;
      std::map<int, MakeDeviceLink> of_rank;
    };
    return [this, init_timeout_s, close_timeout_s, makers = std::make_shared<Makers>()](const LinkRanks& of) {
      std::unique_lock lock(makers->mutex);
      MakeDeviceLink& maker = makers->of_rank[of.ranks[static_cast<size_t>(of.rank)]];
      if (!maker)
        maker = nccl_links({.share_id = [this](const std::string& name, const std::string& id) { return share(name, id); },
                            .init_timeout_s = init_timeout_s,
                            .close_timeout_s = close_timeout_s});
      lock.unlock();
      return maker(of);
    };
  }
  // Makes communicators fail from now on: those of this rank of their groups.
  void fail(int rank, NcclResult result, const std::string& message);
  NcclCounts counts() const;

 private:
  std::string share(const std::string& name, const std::string& id) {
    std::unique_lock lock(mutex_);
    if (!id.empty()) {
      require(ids_.emplace(name, id).second, "a second id of the group ", name);
      shared_.notify_all();
    }
    require(shared_.wait_for(lock, test::kHang, [&] { return ids_.contains(name); }), "no id of the group ", name);
    return ids_.at(name);
  }

  std::mutex mutex_;
  std::condition_variable shared_;
  std::map<std::string, std::string> ids_;
};

}  // namespace mantissa::simt
