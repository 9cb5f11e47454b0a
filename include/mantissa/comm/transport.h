// Sends messages between the ranks of a job; collectives are built on it. UCX implements it between processes, and tests between threads.
//
// A message is matched by sender and tag; of several with the same two, the first sent is the first received. One thread at a time calls
// send, receive, wait and cancel. Every wait sleeps after a short spin and polls the interrupt, so that a lost peer ends it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace mantissa {

class Transport {
 public:
  // Called at least every 20 ms during a wait, which it ends by throwing, for example Error(peer_lost).
  using Interrupt = std::function<void()>;
  using Request = size_t;  // valid until wait_all() or cancel()

  explicit Transport(Interrupt interrupt) : interrupt_(std::move(interrupt)) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Begin to move bytes, which must stay in place until the request is done or canceled. tag < 2^48. If the length of a message is not that
  // of `bytes`, the wait for it throws Error(internal), naming both ranks.
  virtual Request send(int peer, uint64_t tag, std::span<const std::byte> bytes) = 0;
  virtual Request receive(int peer, uint64_t tag, std::span<std::byte> bytes) = 0;

  void wait(Request request);
  bool ready(Request request) { return done(request); }  // without waiting
  void heed_interrupt() const;                           // throws if waits are to end
  void wait_all();                                       // waits for everything begun since the last time

  // Moves what a rank sends to itself.
  virtual void keep(std::span<const std::byte> source, std::span<std::byte> target);

  // Gives up what has begun and makes the transport unusable. A canceled receive writes no more.
  virtual void cancel() noexcept = 0;
  // Makes every wait, now or later, throw Error(peer_lost). Any thread may call it.
  void stop() { stopped_ = true; }

 protected:
  virtual bool done(Request request) = 0;  // makes progress first; throws if the request failed
  virtual void sleep() = 0;                // sleeps until something may have happened since done(), at most kNap
  virtual size_t begun() const = 0;        // requests 0 .. begun() - 1 are valid
  virtual void forget() = 0;               // all of them
  static constexpr int kNapMilliseconds = 20;

 private:
  Interrupt interrupt_;
  std::atomic<bool> stopped_{false};
};

// Bytes that the ranks of a group send each other in collectives, as counted by one of them.
struct GroupTraffic {
  int64_t sent = 0;     // by all
  int64_t busiest = 0;  // by one rank: in each exchange the larger of what it sends and receives
};
// In transport.cpp. Makes the transport of rank 0 where there are no others, for a backend without data (dry_backend.h): messages are
// counted and go nowhere. What arrives in host memory is what this rank sends, as if all ranks did the same. An all_to_all is not counted.
std::unique_ptr<Transport> dry_transport(int ranks, GroupTraffic& counted);

// Publishes the address of this rank and returns those of all ranks, by rank.
using AddressExchange = std::function<std::vector<std::string>(const std::string& address)>;

// In ucx_transport.cpp, or no_ucx.cpp. Connects ranks that are processes by shared memory within a host and by TCP or RDMA between hosts,
// as UCX finds them (UCX_TLS and UCX_NET_DEVICES choose). Messages of UCX go to the log. Throws Error(environment) if this build has no UCX
// or /dev/shm is full.
std::unique_ptr<Transport> ucx_transport(int rank, const AddressExchange& exchange, Transport::Interrupt interrupt);

// Version of UCX, the file that the loader took it from, and the modules beside it (for network cards, copies between processes), or why
// this build has none.
std::string ucx_text();

// Restores the action for SIGHUP that the process was started with. UCX takes SIGHUP when it is loaded, to log all that it does from then
// on, by a handler that may run on any thread and its stack. UCX_DEBUG_SIGNO can name another signal.
void restore_hangup();

}  // namespace mantissa
