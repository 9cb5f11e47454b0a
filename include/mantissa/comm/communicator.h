// Collectives over the ranks of a group, written once over Transport. Every rank of the group makes the same calls in the same order; a
// group of one returns at once and has no transport.
//
// Calls work in place on bytes of the host or of one device, with counts per rank that may be 0 (no message then): what ZeRO-1, a gather of
// codes and scales and the dispatch of experts need, and what NCCL offers as grouped calls. Sums have the order of an aligned binary tree
// over the ranks, neighbors first, then pairs of neighbors, whichever rank computes them.
//
// Sums and gathers of tensors have two levels where ranks are on several hosts, the same bits as on one: what all ranks of a host have or
// want crosses between two hosts once. comm/host_levels.h has the rule.
//
// A process runs one collective at a time, on any thread, because all its groups share one transport. A second one that begins meanwhile
// throws, except on the thread that submits to a CommQueue, where it waits for what was submitted. A collective that fails, or a wait for a
// device that finds communication at its end, leaves the process without communication: every later one throws the same error.
//
// A device moves its bytes in its communication lane, which first comes to where the compute lane is; what the compute lane is asked for
// after the call comes after it. The call itself may return before.
//
// Each call sends its right neighbor kHeaderBytes beside the payload: operation, group, sequence, dtype, counts and whether the bytes are a
// device's (an all_to_all sends every peer its count). It compares them with those from the left: if calls differ within a group, two
// neighbors differ somewhere, and that rank throws. For bytes of a device that happens at the next wait of the host. Ranks that wait for
// each other in different groups are found by the watchdog.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "mantissa/backend/functions.h"
#include "mantissa/comm/device_link.h"
#include "mantissa/comm/transport.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {

struct RankGroup;

inline constexpr int64_t kHeaderBytes = 32;  // sent by a call to its right neighbor, in an all_to_all to every peer

// Says what bytes were sent for.
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
  Communicator() = default;  // a group of one
  // A group of all ranks. Without a maker of links, bytes of devices go through host memory and the transport. hosts[r] is equal for ranks
  // of one host, and the same list on all ranks; an empty list says that all are on one.
  explicit Communicator(std::unique_ptr<Transport> transport, MakeDeviceLink make_link = {}, std::vector<int> hosts = {});

  int rank() const;  // within the group
  int size() const;
  // Return what this process sent so far in all groups, and its latest calls, oldest first, for reports. Any thread may call them.
  Traffic traffic() const;
  std::vector<std::string> latest_calls() const;
  int64_t calls() const;  // begun so far, in all groups
  // Returns the kernels that a device was last asked for, that of the latest call with bytes of one. Any thread may call it.
  std::vector<std::string> latest_kernels() const;
  // Makes the call under way and all later ones of this process throw Error(peer_lost), and lanes of devices go on without what they were
  // to receive. Any thread may call it.
  void stop() const;

  // In `bytes`, counts[r] bytes of rank r follow those of rank r - 1, on all ranks; each rank brings its own.
  struct Gather {
    Bytes bytes;
    std::span<const int64_t> counts;
  };
  void all_gather(const Bytes& bytes, std::span<const int64_t> counts, Purpose purpose) const;
  void all_gather(std::span<const Gather> parts, Purpose purpose) const;  // as one call

  // in_counts[r] bytes go to rank r and out_counts[r] come from it, each behind those of the rank before. in and out do not overlap.
  struct Exchange {
    Bytes in;  // to read
    std::span<const int64_t> in_counts;
    Bytes out;
    std::span<const int64_t> out_counts;
  };
  void all_to_all(std::span<const Exchange> parts, Purpose purpose) const;  // as one call
  void all_to_all(std::span<const std::byte> in, std::span<const int64_t> in_counts, std::span<std::byte> out,
                  std::span<const int64_t> out_counts, Purpose purpose) const {
    const Exchange part{.in = Bytes::to_read(in), .in_counts = in_counts, .out = out, .out_counts = out_counts};
    all_to_all({&part, 1}, purpose);
  }

  // sum() adds fp32 or fp64 elements over the ranks, in place. It takes bf16 elements only where all but one of a sum are zero, because
  // every further addition would be rounded. sum_scatter() sums only the own elements, of which rank r has counts[r] behind those of rank r
  // - 1; the others are then unspecified. Both need scratch for what arrives, sum_scatter() scratch_elements(). A caller with shares of
  // many sizes can lend sum_scatter() memory of the tensor's device and dtype that holds the largest.
  void sum(const Tensor& tensor, Purpose purpose) const;
  int64_t scratch_elements(std::span<const int64_t> counts) const;
  void sum_scatter(const Tensor& tensor, std::span<const int64_t> counts, Purpose purpose, const Tensor& scratch = {}) const;

  void broadcast(const Bytes& bytes, int root, Purpose purpose) const;
  void barrier() const;

  // Exchange small host values.
  template <class T>
  std::vector<T> all(const T& value) const {  // values of all ranks, by rank
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> out(static_cast<size_t>(size()), value);
    const std::vector<int64_t> counts(out.size(), sizeof(T));
    all_gather(Bytes(std::as_writable_bytes(std::span(out))), counts, Purpose::control);
    return out;
  }
  // Adds each of the values over the ranks, in place and modulo 2^64. Received values go to memory that the group keeps.
  void sum(std::span<int64_t> values) const;
  int64_t sum(int64_t value) const {
    sum(std::span(&value, 1));
    return value;
  }

  // Returns the group of ranks that give the same color, in their order.
  Communicator split(int color) const;

 private:
  friend class CommQueue;
  explicit Communicator(std::shared_ptr<RankGroup> group) : group_(std::move(group)) {}

  std::shared_ptr<RankGroup> group_;  // null: a group of one
};

// Counts, until stop(), the time that this thread spends in collectives and in waiting for work of a CommQueue; for bytes of a device, the
// time that its compute lane waits for those. One at a time counts on a thread.
class CommunicationMeter {
 public:
  CommunicationMeter();
  ~CommunicationMeter() { stop(); }
  CommunicationMeter(const CommunicationMeter&) = delete;
  CommunicationMeter& operator=(const CommunicationMeter&) = delete;
  void stop();
  double seconds() const;  // the device must have come to where it stopped

 private:
  friend class CommunicationTime;
  friend class DeviceWait;
  double host_ = 0;
  std::vector<std::pair<Moment, Moment>> on_devices_;
};

}  // namespace mantissa
