// Where the ranks of a job meet: a key-value store with a barrier on rank 0, over TCP. It carries what is small and rare (addresses,
// hashes, decisions) and watches everybody: each rank says what it is doing five times within the heartbeat timeout, a connection that
// closes is a rank that died, and the first failure of any rank becomes everybody's.
//
// Only who proves the job's token gets in (reliability.md, rendezvous): handshake.h has the exchange. It keeps strangers out; what follows
// is not encrypted. A world of one needs no store.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mantissa/comm/launch.h"

namespace mantissa {

// The secret of a job: MANTISSA_TOKEN, or the content of the file that MANTISSA_TOKEN_FILE names, which nobody but its owner may read.
// nullopt without both. Throws Error(usage).
std::optional<std::string> job_token(const Environment& environment = process_environment());

std::string new_token();  // 32 random bytes as hex digits

struct StoreOptions {
  double init_timeout_s = 300;      // parallel.init_timeout_s: until all ranks are there; also the limit of get() and barrier()
  double heartbeat_timeout_s = 10;  // parallel.heartbeat_timeout_s
  std::optional<std::string> token = job_token();
  // Where a token or a port that rank 0 chose is published to the ranks on this host; "": $XDG_RUNTIME_DIR, else the temporary folder.
  std::string folder = {};
  // Looked at by whatever waits; once it is true, the job ends with ExitCode::stopped.
  std::function<bool()> stop_asked = {};
};

// Who failed first, and how.
struct Failure {
  ExitCode code = ExitCode::peer_lost;
  int rank = -1;  // -1: no single one
  std::string message;
};

struct NamedHash {
  std::string name, value;  // "config", its hash
};

// What a rank says of itself with each heartbeat. Written by its main thread without a lock.
class Progress {
 public:
  // `section` is a literal: "forward", "save".
  void at(int64_t step, const char* section) {
    step_.store(step, std::memory_order_relaxed);
    section_.store(section, std::memory_order_relaxed);
  }
  // The collective that begins now: its number in the program order that all ranks share, and a hash of what all of them must agree on
  // (operation, dtype, ...), or 0 for none. Two ranks at one number with two hashes end the job with code 70.
  void collective(uint32_t sequence, uint32_t operation) {
    collective_.store(uint64_t{operation} << 32 | sequence, std::memory_order_relaxed);
  }

  int64_t step() const { return step_.load(std::memory_order_relaxed); }
  const char* section() const { return section_.load(std::memory_order_relaxed); }
  uint32_t sequence() const { return static_cast<uint32_t>(collective_.load(std::memory_order_relaxed)); }
  uint32_t operation() const { return static_cast<uint32_t>(collective_.load(std::memory_order_relaxed) >> 32); }

 private:
  std::atomic<int64_t> step_{0};
  std::atomic<const char*> section_{"start"};
  std::atomic<uint64_t> collective_{0};  // both in one word: a pair that never was would end a job
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

  Progress& progress();
  // The end of a job that went well; every rank calls it. Rank 0 stays until all have.
  void leave();

 private:
  class Client;
  std::unique_ptr<Client> client_;
  int compared_ = 0;
};

}  // namespace mantissa
