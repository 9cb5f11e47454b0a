// Decides which rank of a data-parallel group owns which shards of the fp32 state (ZeRO-1, Rajbhandari et al. 2020), and runs the two
// exchanges that follow: gradients are reduced to the owner of each shard, and what forward reads is gathered from it.
//
// A bucket is a run of parameters, contiguous in every arena. In each bucket every rank owns one contiguous run of whole row blocks, of
// nearly equal size and possibly none, so a bucket is exchanged in place with one count per rank. Where ranks share experts, their buckets
// belong to the ranks that hold the same experts; gradients that are kept apart by source are joined first.
//
// Both exchanges overlap with the computation. The gradients of a bucket are sent while backward computes those of others, and gathered
// parameters arrive while forward already reads other buckets; each waits for its bucket's ReadyEvent.
//
// Parameters that are frozen are owned like others, for their masters, but take no part in either: they are gathered once, when all are.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "comm/comm_queue.h"
#include "comm/mesh.h"
#include "nn/parameter.h"

namespace mantissa {

// Computes from specs alone where the parameters of a model lie in arenas and buckets and which rank owns which rows. Shards follow it; a
// plan uses it to predict ParameterSet and Optimizer for runs that need more memory or ranks than there are.
class Layout {
 public:
  // Takes parameters in the order of their set, with fp32 masters; bucket_bytes is that of Shards.
  Layout(std::vector<ParameterSpec> parameters, int64_t bucket_bytes);

  // All totals are bytes, including the gaps that keep parameters aligned. Shares and what is gathered count trained parameters alone.
  struct Totals {
    int64_t fp32_values = 0;  // these are their own masters
    int64_t other_values = 0;
    int64_t codes = 0;   // with their scales, of weights that have no value
    int64_t copies = 0;  // codes with their scales beside a value
    int64_t gradients = 0;
    int64_t gathered() const { return fp32_values + other_values + codes; }
  };
  const Totals& totals() const { return totals_; }
  const std::vector<ParameterSpec>& parameters() const { return parameters_; }
  int64_t gathered(size_t parameter) const;  // bytes of one parameter

  // A run of whole layers with at least bucket_bytes of fp32 gradients, except the last. A bucket also ends where parameters of shared
  // experts begin or end.
  struct Bucket {
    size_t first, last;       // parameters [first, last)
    bool of_experts = false;  // holds experts that ranks share: the same ones are held by 1 / expert_ranks() of the data ranks
  };
  const std::vector<Bucket>& buckets() const { return buckets_; }

  int expert_ranks(const Bucket& bucket) const { return bucket.of_experts ? parameters_[bucket.first].sharding.ranks.expert : 1; }

  // The boundaries between the rows of the ranks that hold the bucket, and its end. Each rank has one run of whole row blocks, 32 rows or a
  // block where that is longer. That of rank r begins with the first row block at or after r / ranks of the bucket's elements.
  struct Boundary {
    size_t parameter;
    int64_t row;
  };
  std::vector<Boundary> boundaries(const Bucket& bucket, int ranks) const;

  // Share of a bucket that a rank owns.
  struct Share {
    int64_t gradients = 0, gathered = 0;
    int64_t partial = 0;  // part of the gradients, without gaps, that tensor ranks sum
    int64_t masters = 0;  // masters kept apart from the values
    int64_t moments = 0;  // all, in fp32
    int64_t norm_blocks = 0;
  };
  std::vector<Share> shares(const Bucket& bucket, int ranks) const;

 private:
  enum Arena : size_t { kFp32, kBf16, kCodes, kScales, kGradients, kArenas };
  using Bytes = std::array<int64_t, kArenas>;
  Bytes position(const Boundary& boundary) const;
  Share share(const Boundary& begin, const Boundary& end) const;

  std::vector<ParameterSpec> parameters_;
  std::vector<Bytes> begin_;  // where each parameter begins, and the end
  std::vector<Bytes> size_;   // size of each parameter, without the gap behind it
  std::vector<Bucket> buckets_;
  Totals totals_;
};

class Shards {
 public:
  // Returns the least fp32 gradients of a bucket among so many data ranks, in bytes; a bucket has whole layers, so one layer may exceed it.
  // A message should be so large that its start is a small part of its time: 20 MB to each rank of a host, of which eight are usual, and 4
  // MB to each rank of others. Megatron's buckets of 40M elements, or 1M for each rank, are as large.
  static int64_t bucket_bytes(int64_t data_ranks) {
    return std::max(20'000'000 * std::clamp<int64_t>(data_ranks, 1, 8), 4'000'000 * data_ranks);
  }

  // The set must be allocated and outlive this. A group of one owns everything and exchanges nothing. Tests choose the least of a bucket.
  explicit Shards(ParameterSet& parameters, Mesh mesh = {}, std::optional<int64_t> least_bucket = {});
  ~Shards();
  Shards(const Shards&) = delete;
  Shards& operator=(const Shards&) = delete;

  const Mesh& mesh() const { return mesh_; }
  const Layout& layout() const { return layout_; }
  size_t buckets() const { return buckets_.size(); }
  // Returns the own shards in the order of the buckets, the parameters and the rows. own_end(b): how many of them lie in buckets 0 .. b.
  const std::vector<ParameterShard>& own() const { return own_; }
  size_t own_end(size_t bucket) const { return buckets_[bucket].own_end; }
  // group() returns the ranks that hold the same parameters, or the same experts; of_rank() the shards that a rank of this group owns.
  const Communicator& group(bool of_experts) const { return of_experts ? mesh_.expert_data : mesh_.data; }
  std::vector<ParameterShard> of_rank(bool of_experts, int rank) const;

  // Call it before the last backward pass of a step. As soon as the gradients of a bucket have their last contribution, `finish` is called
  // for their elements [begin, end) of a gradient buffer; then they are in `sums` and are sent to their owners. send_rest() does so for the
  // remaining buckets, and forgets `finish`.
  using Finish = std::function<void(int64_t begin, int64_t end)>;
  void send_when_ready(const Tensor& sums, Finish finish);
  void send_rest();
  // Returns when the gradients of the own shards are summed over the data ranks, and partial ones then over the tensor ranks. The order is
  // an aligned binary tree that continues that of the micro batches, so the number of data ranks changes no bit. Gradients of other shards
  // are then unspecified. Sends the gradients in use if nothing was sent.
  void reduce_gradients();

  // Begins to gather a bucket's values, or codes that are the weight, from their owners; codes beside a value are made again from it. One
  // bucket is gathered without its frozen parameters, all are gathered with them. All ranks call it bucket by bucket in the same order. The
  // bucket's parameters must not be written until its gather has ended. Because the queue is in order, a gather has ended by
  // the time that any gradients submitted after it are reduced.
  void gather(size_t bucket);
  void gather();
  void arrive();  // returns when all of it is there

  // Returns the fp64 partial norms of all ranks in the order of the parameters. by_rank[r] are those that world rank r computed for its own
  // shards: the first tensor rank for all, the others for divided parameters only. Experts are in their order, whichever rank has them.
  std::vector<double> in_order(const std::vector<std::vector<double>>& by_rank) const;
  // Returns how many partial norms a rank of the world has: one for each 32 rows that it owns.
  int64_t norm_blocks(int rank) const;

 private:
  using Boundary = Layout::Boundary;
  struct Range {  // a bucket's part of an arena
    Tensor memory;
    std::vector<int64_t> counts;  // bytes, by rank of the group
  };
  struct Gradients {  // a bucket's part of a gradient buffer
    int64_t begin, end;
    std::vector<int64_t> counts;  // elements, by rank of the group
  };
  struct Bucket {
    bool of_experts = false;           // holds experts that ranks share
    std::vector<Boundary> boundaries;  // where the rows of each rank of the group begin, and the end
    size_t own_end = 0, others_begin = 0, others_end = 0;
    int64_t begin = 0, end = 0;  // elements of a gradient buffer
    std::vector<Gradients> exchanged;
    std::vector<std::pair<int64_t, int64_t>> partial;  // own ranges of a gradient buffer that are summed over the tensor ranks
    std::vector<Range> sources, trained;               // ranges of all parameters, and of those that are trained
    bool all_come = false;                             // frozen ones are among what is being gathered
    std::unique_ptr<ReadyEvent> ready = {};
    size_t waiting = 0;  // parameters whose gradients are not complete
    bool sent = false;
    Work gradients = {}, values = {};
  };
  void add_bucket(const Layout::Bucket& of);
  void plan_gradients(Bucket& bucket) const;
  // Returns the ranges of parameters [first, last) of the bucket in each arena where they have any.
  std::vector<Range> ranges(const Bucket& bucket, size_t first, size_t last) const;
  std::vector<std::pair<size_t, size_t>> trained_runs(const Bucket& bucket) const;  // parameters [first, last)
  void gather(Bucket& bucket, bool all);
  const Communicator& group(const Bucket& bucket) const { return group(bucket.of_experts); }
  // Returns the index of a data rank's boundaries: it and its neighbors may share experts.
  size_t place(const Bucket& bucket, int data_rank) const;
  void listen(size_t bucket);
  void send(Bucket& bucket);
  void arrive(Bucket& bucket);
  std::vector<ParameterShard> shards_between(const Boundary& begin, const Boundary& end) const;
  std::vector<int64_t> counts(const ArenaMap& arena, const std::vector<Boundary>& boundaries) const;
  int64_t position(const ArenaMap& arena, const Boundary& boundary) const;

  ParameterSet& parameters_;
  Mesh mesh_;
  Layout layout_;
  std::vector<Bucket> buckets_;
  std::vector<ParameterShard> own_, others_;
  std::vector<bool> ready_;  // by parameter: its gradient is complete
  bool sending_ = false;     // between send_when_ready() and send_rest()
  Tensor sums_;
  Tensor scratch_;  // for the exchange of gradients, one bucket at a time; undefined where nothing is exchanged
  Finish finish_;
  CommQueue queue_;  // last: its work uses all others
};

}  // namespace mantissa
