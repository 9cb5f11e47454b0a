// NCCL between ranks that are threads of the test, in place of the library of this host (nccl_calls.cpp).
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "mantissa/base/error.h"
#include "mantissa/comm/nccl_link.h"

namespace mantissa::simt {

enum class NcclResult { success = 0, system_error = 2, invalid_usage = 5, remote_error = 6 };  // of nccl.h

struct NcclSettings {
  int version = 22809;                            // as the library reports it
  NcclResult refusal = NcclResult::success;       // of new communicators
  NcclResult refused_send = NcclResult::success;  // of messages
  bool stuck = false;                             // groups of messages never begin
};
struct NcclCounts {
  int made = 0, destroyed = 0, aborted = 0;  // communicators
  int groups = 0;                            // of messages
};

// As long as one is there, it is the library.
class ThreadNccl {
 public:
  explicit ThreadNccl(const NcclSettings& settings = {});
  ~ThreadNccl();
  ThreadNccl(const ThreadNccl&) = delete;
  ThreadNccl& operator=(const ThreadNccl&) = delete;

  // Of all ranks; outlives their groups.
  MakeDeviceLink links(double init_timeout_s = 60) {
    return nccl_links(
        {.share_id = [this](const std::string& name, const std::string& id) { return share(name, id); }, .init_timeout_s = init_timeout_s});
  }
  // The communicators of this rank of their groups have failed from now on.
  void fail(int rank, NcclResult result, const std::string& message);
  NcclCounts counts() const;

 private:
  std::string share(const std::string& name, const std::string& id) {
    std::unique_lock lock(mutex_);
    if (!id.empty()) {
      require(ids_.emplace(name, id).second, "a second id of the group ", name);
      shared_.notify_all();
    }
    require(shared_.wait_for(lock, std::chrono::seconds(10), [&] { return ids_.contains(name); }), "no id of the group ", name);
    return ids_.at(name);
  }

  std::mutex mutex_;
  std::condition_variable shared_;
  std::map<std::string, std::string> ids_;
};

}  // namespace mantissa::simt
