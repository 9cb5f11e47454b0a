// Where the ranks of a job meet: a key-value store with a barrier on rank 0, over TCP. It carries what is small and rare (addresses,
// hashes, decisions) and watches everybody: each rank says what it is doing five times within the heartbeat timeout, a connection that
// closes is a rank that died, and the first failure of any rank becomes everybody's.
//
// Only who proves the job's token gets in (reliability.md, rendezvous): handshake.h has the exchange. It keeps strangers out; what follows
// is not encrypted. A world of one needs no store.
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

#include "mantissa/comm/progress.h"
#include "mantissa/job/launch.h"

namespace mantissa {

// The secret of a job: MANTISSA_TOKEN, or the content of the file that MANTISSA_TOKEN_FILE names, which nobody but its owner may read.
// nullopt without both. Throws Error(usage).
std::optional<std::string> job_token(const Environment& environment = process_environment());

std::string new_token();  // 32 random bytes as hex digits

// When this binary was loaded, or a little later.
std::chrono::system_clock::time_point process_began();

struct StoreOptions {
  double init_timeout_s = 300;      // parallel.init_timeout_s: until all ranks are there; also the limit of get() and barrier()
  double heartbeat_timeout_s = 10;  // parallel.heartbeat_timeout_s
  double cause_timeout_s = 0.5;     // from the report that a rank does not answer until it is the cause, unless a rank is lost meanwhile
  std::optional<std::string> token = job_token();
  // Where a token or a port that rank 0 chose is published to the ranks on this host; "": $XDG_RUNTIME_DIR, else the temporary folder.
  std::string folder = {};
  // Looked at by whatever waits; once it is true, the job ends with ExitCode::stopped.
  std::function<bool()> stop_asked = {};
  // When this rank began: rank 0 of its job has published where it listens since then, that of an earlier job before.
  std::chrono::system_clock::time_point began = process_began();
};

// Who failed first, and how.
struct Failure {
  ExitCode code = ExitCode::peer_lost;
  int rank = -1;  // -1: no single one
  std::string message;
  bool stuck = false;  // silence or no progress: every rank says where it is
};

struct NamedHash {
  std::string name, value;  // "config", its hash
};

// How a rank is watched, and what is done about it. The functions are called by the thread of the store and must not call it.
struct Watch {
  Patience patience = {};
  std::function<int64_t()> collectives = {};  // how many this rank has begun: tells who is behind
  // Nobody knows why the job does not go on, and the main thread is still where it was: the time to say where.
  std::function<void(const std::string& why)> report = {};
  // The job failed some seconds ago, and the main thread has not come back: the process has to end without it.
  std::function<void(const Failure&)> leave = {};
};

class Store {
 public:
  // Returns once all ranks are there. Throws Error: usage where a secret is needed and missing or this rank does not belong, environment
  // where rank 0 cannot listen, peer_lost after init_timeout_s, with the missing ranks and their hosts.
  Store(const Launch& launch, const StoreOptions& options);
  ~Store();  // without leave(): the others take this rank for lost
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Any thread. What waits returns when it can and throws Error with the first failure's code if there is one; after `timeout_s`
  // (init_timeout_s if 0) the job has failed with peer_lost.
  void set(const std::string& key, const std::string& value);     // at most kMostValueBytes together
  std::string get(const std::string& key, double timeout_s = 0);  // waits for the key
  void barrier(const std::string& name, double timeout_s = 0);
  static constexpr size_t kMostValueBytes = size_t{1} << 20;

  // What every rank gives under this name, good for one call, by rank: rank 0 collects, others wait once for each MiB. Limit: 1 KiB less.
  std::vector<std::string> gather(const std::string& name, const std::string& own);

  // Throws Error(usage) on all ranks that names the odd rank and the odd item unless every rank gives the same.
  void compare(const std::vector<NamedHash>& items);

  // Ends the job: every rank's flag is raised, and waits throw this. The first call of all ranks counts. Returns once it is told.
  void fail_all(ExitCode code, const std::string& message);
  // What every loop that waits for another rank looks at.
  const std::atomic<bool>& aborted() const;
  std::optional<Failure> failure() const;
  void check() const;  // throws Error of the failure, if there is one

  // What this rank says of itself with each heartbeat.
  Progress& progress();
  // From now on a main thread without progress ends the job with peer_lost.
  void watch(Watch watch);
  // The end of a job that went well; every rank calls it. Rank 0 stays until all have.
  void leave();

 private:
  class Client;
  std::unique_ptr<Client> client_;
  int compared_ = 0;
};

}  // namespace mantissa
