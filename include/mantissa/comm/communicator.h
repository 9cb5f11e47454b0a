// Collectives over the ranks of a group, written once over Transport. Every rank of the group makes the same calls in the same order; a
// group of one returns at once and has no transport.
//
// Bytes in place, with counts per rank that may be 0 (no message then): what ZeRO-1, a gather of codes and scales and a dispatch of experts
// need, and what NCCL offers as grouped calls. Memory is the host's. Sums have the order of an aligned binary tree over the ranks:
// neighbours, then pairs of neighbours, and so on, whoever computes them.
//
// One collective of a process runs at a time, on whatever thread, because all its groups share one transport: a second one that begins
// meanwhile throws, but one of the thread that submits to a CommQueue waits for what it submitted. A collective that fails leaves the
// process without communication: every later one throws what the first did.
//
// Each call sends its right neighbour 32 bytes, operation, group, sequence, dtype and counts (an all_to_all: every peer, whose count it
// is), beside the payload, and compares what comes from the left: if calls differ within a group, somewhere two neighbours differ, and that
// rank throws. Ranks that wait for each other in different groups are a matter of the watchdog.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "mantissa/comm/transport.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {

struct RankGroup;

// What bytes were sent for.
enum class Purpose { gradients, parameters, activations, control, other };
struct Traffic {  // bytes sent
  int64_t gradients = 0, parameters = 0, activations = 0, control = 0, other = 0;

  void fields(auto& v) {
    v("gradients", gradients);
    v("parameters", parameters);
    v("activations", activations);
    v("control", control);
    v("other", other);
  }
};
inline Traffic operator-(const Traffic& a, const Traffic& b) {
  return {a.gradients - b.gradients, a.parameters - b.parameters, a.activations - b.activations, a.control - b.control, a.other - b.other};
}

class Communicator {
 public:
  Communicator() = default;                                     // a group of one
  explicit Communicator(std::unique_ptr<Transport> transport);  // of all ranks

  int rank() const;  // within the group
  int size() const;
  // What this process sent so far, in all groups, and its latest calls, oldest first, for reports. From any thread.
  Traffic traffic() const;
  std::vector<std::string> latest_calls() const;
  int64_t calls() const;  // begun so far, in all groups
  // From any thread: the call under way and all later ones of this process throw Error(peer_lost).
  void stop() const;

  // counts[r] bytes of rank r lie behind those of rank r - 1 in `bytes`, everywhere; each rank brings its own.
  struct Gather {
    std::span<std::byte> bytes;
    std::span<const int64_t> counts;
  };
  void all_gather(std::span<std::byte> bytes, std::span<const int64_t> counts, Purpose purpose) const;
  void all_gather(std::span<const Gather> parts, Purpose purpose) const;  // as one call

  // in_counts[r] bytes go to rank r, out_counts[r] come from it, each behind those of the rank before. in and out are apart.
  struct Exchange {
    std::span<const std::byte> in;
    std::span<const int64_t> in_counts;
    std::span<std::byte> out;
    std::span<const int64_t> out_counts;
  };
  void all_to_all(std::span<const Exchange> parts, Purpose purpose) const;  // as one call
  void all_to_all(std::span<const std::byte> in, std::span<const int64_t> in_counts, std::span<std::byte> out,
                  std::span<const int64_t> out_counts, Purpose purpose) const {
    const Exchange part{.in = in, .in_counts = in_counts, .out = out, .out_counts = out_counts};
    all_to_all({&part, 1}, purpose);
  }

  // Sums fp32 or fp64 elements over the ranks, in place; bf16 ones where all but one of a sum are zero, because every addition of more
  // would be rounded. sum_scatter: only own elements are summed, rank r owning counts[r] behind those of
  // rank r - 1; the others are as before. Both need scratch for as much as the own share from each other rank; a caller with shares of
  // many sizes lends sum_scatter memory of the tensor's device and dtype that holds the largest, so that not each size has scratch of its
  // own.
  void sum(const Tensor& tensor, Purpose purpose) const;
  void sum_scatter(const Tensor& tensor, std::span<const int64_t> counts, Purpose purpose, const Tensor& scratch = {}) const;

  void broadcast(std::span<std::byte> bytes, int root, Purpose purpose) const;
  void barrier() const;

  // Small things of the host.
  template <class T>
  std::vector<T> all(const T& own) const {  // of every rank, by rank
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> out(static_cast<size_t>(size()), own);
    const std::vector<int64_t> counts(out.size(), sizeof(T));
    all_gather(std::as_writable_bytes(std::span(out)), counts, Purpose::control);
    return out;
  }
  int64_t sum(int64_t own) const;  // modulo 2^64

  // The ranks that give the same color, in their order.
  Communicator split(int color) const;

 private:
  friend class CommQueue;
  explicit Communicator(std::shared_ptr<RankGroup> group) : group_(std::move(group)) {}

  std::shared_ptr<RankGroup> group_;  // null: a group of one
};

// Seconds that the calling thread has spent so far in collectives, and waiting for work of a CommQueue.
double communication_seconds();

}  // namespace mantissa
