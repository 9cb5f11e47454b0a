// The rendezvous of a job: a key-value store with a barrier on rank 0, over TCP. It carries what is small and rare (addresses, hashes,
// decisions) and watches all ranks. Each rank reports its phase five times within the heartbeat timeout, a closed connection means a dead
// rank, and the first failure of any rank becomes the failure of all.
//
// A connection must prove that it knows the job's secret; rendezvous.h has the exchange. All that follows is authenticated but not
// encrypted. A world of one needs no store.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/progress.h"
#include "job/launch.h"

namespace mantissa {

// Returns the secret of a job: MANTISSA_SECRET, or the content of the file that MANTISSA_SECRET_FILE names, which only its owner may read;
// nullopt without both. Throws Error(usage).
std::optional<std::string> job_secret(const Environment& environment = process_environment());

std::string new_secret();  // 32 random bytes as hex digits

// Returns when this binary was loaded, or a little later.
std::chrono::system_clock::time_point process_began();

struct StoreOptions {
  double init_timeout_s = 300;      // parallel.init_timeout_s: until all ranks are there; also the limit of get() and barrier()
  double heartbeat_timeout_s = 10;  // parallel.heartbeat_timeout_s
  double cause_timeout_s = 5;       // from the report that a rank does not answer until it is the cause, unless a rank is lost meanwhile
  std::optional<std::string> secret = job_secret();
  // Folder in which rank 0 publishes a secret or a port that it chose, to the ranks on this host; "": $XDG_RUNTIME_DIR, else the temporary
  // folder.
  std::string folder = {};
  // Every wait polls it; once it is true, the job ends with ExitCode::stopped.
  std::function<bool()> stop_asked = {};
  // Start of this rank. Rank 0 of its job has published where it listens since then; an older file is from an earlier job.
  std::chrono::system_clock::time_point began = process_began();
};

// Tells who failed first, and how.
struct Failure {
  ExitCode code = ExitCode::peer_lost;
  int rank = -1;  // -1: no single one
  std::string message;
  bool stuck = false;  // silence or no progress: every rank says where it is
};

struct NamedHash {
  std::string name, value;  // "config", its hash
};

// Configures how a rank is watched. The thread of the store calls the functions, which must not call the store.
struct Watch {
  WatchdogTimeouts timeouts = {};
  std::function<int64_t()> collectives = {};  // how many this rank has begun: shows who is behind
  // Called while the main thread is still where it was and the cause is unknown, to report the position of each rank.
  std::function<void(const std::string& why)> report = {};
  // Called when the job failed some seconds ago and the main thread has not come back: ends the process without it.
  std::function<void(const Failure&)> leave = {};
};

class Store {
 public:
  // Returns once all ranks are there. Throws Error: usage if a required secret is missing or this rank does not belong, environment if rank
  // 0 cannot listen, peer_lost after init_timeout_s, with the missing ranks and their hosts.
  Store(const Launch& launch, const StoreOptions& options);
  ~Store();  // without leave(): the others take this rank for lost
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Any thread may call these. A wait returns when it can and throws Error with the first failure's code if there is one; after `timeout_s`
  // (init_timeout_s if 0) the job fails with peer_lost.
  void set(const std::string& key, const std::string& value);     // at most kMostValueBytes together
  std::string get(const std::string& key, double timeout_s = 0);  // waits for the key
  void barrier(const std::string& name, double timeout_s = 0);
  static constexpr size_t kMostValueBytes = size_t{1} << 20;

  // Gathers one string per rank under this name, once per name, ordered by rank: rank 0 collects, others wait once for each MiB. A string
  // may have 1 KiB less than kMostValueBytes.
  std::vector<std::string> gather(const std::string& name, const std::string& value);

  // Throws Error(usage) on all ranks, naming the mismatching rank and item, unless every rank gives the same.
  void compare(const std::vector<NamedHash>& items);

  // Ends the job: raises the flag of every rank and makes waits throw this error. Only the first call of all ranks counts. Returns once it
  // is reported.
  void fail_all(ExitCode code, const std::string& message);
  // Every loop that waits for another rank polls this flag.
  const std::atomic<bool>& aborted() const;
  std::optional<Failure> failure() const;
  void check() const;  // throws Error of the failure, if there is one

  // Returns the progress that each heartbeat reports.
  Progress& progress();
  // Starts the watchdog: a main thread without progress ends the job with peer_lost.
  void watch(Watch watch);
  // Ends a job that succeeded; every rank calls it. Rank 0 stays until all have.
  void leave();

 private:
  class Client;
  std::unique_ptr<Client> client_;
  int compared_ = 0;
};

}  // namespace mantissa
