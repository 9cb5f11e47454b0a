// Rank 0's end of the store: one thread that keeps the values, releases barriers, watches the ranks and reports the first failure to all of
// them. Unauthenticated connections get 64 bytes and 5 s to prove the secret; until then nothing that they sent is used.
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "job/rendezvous.h"

namespace mantissa {

class StoreServer {
 public:
  // `root` is the connection to rank 0 itself.
  StoreServer(const Launch& launch, const StoreOptions& options, Listener listener, Socket root);
  // Returns once all ranks have left, or, after a failure, have had it reported. If a rank failed before all were there, also waits some
  // seconds for later ones, which would wait for a rank 0 that is gone.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  struct Unauthenticated {
    Socket socket;
    double until;
    std::vector<std::byte> in;
    HelloBytes mine;
  };
  struct Peer {
    std::optional<Connection> connection;
    bool joined = false;
    bool gave_up = false;  // it has reported why it ends
    std::string host, section = "start";
    int64_t step = 0;
    uint32_t sequence = 0, operation = 0;
  };
  struct Barrier {
    std::map<int, uint32_t> requests;  // by rank
    double deadline, seconds;
  };

  void serve();
  bool finished(double now) const;
  bool expects_more_to_report(double now) const;
  std::vector<int> ranks_with_input(double tick);
  void accept_connections(double now);
  bool still_authenticating(Unauthenticated& waiting, double now);
  void admit(Unauthenticated& waiting);
  void listen_to(int rank);
  void handle(int rank, Frame& frame);
  void reply(int rank, uint32_t request, const std::string& value);
  void joined(int rank, Frame& frame);
  void arrive(int rank, Frame& frame);
  void heartbeat(int rank, Frame& frame);
  void expire(double now);
  void send_all(Message message, const Fields& fields);
  void fail_job(const Failure& failure);
  void take_abort(const Failure& failure);
  void lose(int rank, const std::string& how, bool silent = false);
  void log_dropped(double now, const std::string& why);
  std::string name_of(int rank) const;
  std::string slowest_rank() const;
  std::string missing(const Barrier& barrier) const;

  const Launch launch_;
  const StoreOptions options_;
  Listener listener_;
  std::vector<Peer> peers_;
  std::list<Unauthenticated> unauthenticated_;
  std::map<std::string, std::string> values_;
  std::multimap<std::string, std::pair<int, uint32_t>> readers_;
  std::map<std::string, Barrier> barriers_;
  std::optional<Failure> failure_;
  double failed_at_ = 0;
  std::optional<Failure> symptom_;  // a rank reported that another does not answer, and that other may be lost, which is the cause
  double symptom_at_ = 0;
  int64_t dropped_ = 0, dropped_reported_ = 0;
  double reported_at_ = -1e9, next_heartbeat_ = 0;
  Stops stops_{options_.heartbeat_timeout_s / 2};
  std::atomic<double> stop_at_{-1.0};  // when the owner asked to end
  std::thread thread_;
};

}  // namespace mantissa
