// Which rank of a data-parallel group owns which part of the fp32 state (ZeRO-1, Rajbhandari et al. 2020), and the two exchanges that
// follow from it: gradients go to the owner of each part, and what forward reads of it comes back.
//
// A bucket is a run of parameters, contiguous in every arena. In each bucket every rank owns one contiguous run of whole bands of rows, of
// nearly equal size and possibly none, so a bucket is exchanged and gathered in place with one count per rank. Where ranks share experts,
// the buckets of these belong to the ranks that hold the same experts; gradients that are kept apart by source are joined first.
//
// Both exchanges run beside the computation. The gradients of a bucket go while backward computes those of others, and what is gathered
// arrives while forward already reads other buckets: parameters wait for theirs (Gate).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "mantissa/comm/comm_queue.h"
#include "mantissa/comm/mesh.h"
#include "mantissa/nn/layout.h"

namespace mantissa {

class Shards {
 public:
  // Gradients of a bucket, in bytes of fp32, at least, unless one layer has more; less than one layer never.
  static constexpr int64_t kBucketBytes = 25'000'000;

  // Of a set that is allocated and outlives this. A group of one owns everything and exchanges nothing.
  explicit Shards(ParameterSet& parameters, Mesh mesh = {}, int64_t bucket_bytes = kBucketBytes);
  ~Shards();
  Shards(const Shards&) = delete;
  Shards& operator=(const Shards&) = delete;

  const Mesh& mesh() const { return mesh_; }
  size_t buckets() const { return buckets_.size(); }
  // In the order of the buckets, the parameters and the rows. own_end(b): how many lie in buckets 0 .. b.
  const std::vector<Part>& own() const { return own_; }
  size_t own_end(size_t bucket) const { return buckets_[bucket].own_end; }
  // What the data ranks hold alike, or those that hold the same experts, and which parts of it a rank of this group owns.
  const Communicator& group(bool of_experts) const { return of_experts ? mesh_.expert_data : mesh_.data; }
  std::vector<Part> of_rank(bool of_experts, int rank) const;

  // Before the last backward pass of a step: as soon as the gradients of a bucket have their last contribution, `finish` is called for
  // where they lie, elements [begin, end) of a gradient buffer; then they are in `sums` and go to their owners. send_rest() does so for
  // buckets that have not gone, and forgets `finish`.
  using Finish = std::function<void(int64_t begin, int64_t end)>;
  void send_when_ready(const Tensor& sums, Finish finish);
  void send_rest();
  // Returns when the gradients of the own parts are summed over the data ranks, in the order of an aligned binary tree that goes on from
  // micro batches, and partial ones then over the tensor ranks, so that the number of data ranks changes no bit; those of other parts are
  // then unspecified. Sends the gradients in use if nothing was sent.
  void reduce_gradients();

  // Begins to bring values, or codes that are the weight, of a bucket from their owners; codes beside a value are made again from it. All
  // ranks, bucket by bucket in the same order. Nobody writes to the bucket's parameters before it has arrived, as it has when
  // gradients that were sent later are reduced.
  void gather(size_t bucket);
  void gather();
  void arrive();  // returns when all of it is there

  // fp64 [of all ranks] partial norms, in the order of the parameters, from what each rank of the world computed for its own parts, in that
  // order: of the first tensor rank all, of the others those of parameters that are divided; of experts in their order, whichever rank
  // has them. by_rank[r] is what rank r has.
  std::vector<double> in_order(const std::vector<std::vector<double>>& by_rank) const;
  // Partial norms of a rank of the world: one for each 32 rows that it owns.
  int64_t norm_bands(int rank) const;

 private:
  using Border = Layout::Border;
  struct Range {  // of an arena
    Tensor memory;
    std::vector<int64_t> counts;  // bytes, by rank of the group
  };
  struct Gradients {  // of a gradient buffer
    int64_t begin, end;
    std::vector<int64_t> counts;  // elements, by rank of the group
  };
  struct Bucket {
    bool of_experts = false;      // that ranks share
    std::vector<Border> borders;  // where the rows of each rank of the group begin, and the end
    size_t own_end = 0, others_begin = 0, others_end = 0;
    int64_t begin = 0, end = 0;  // of a gradient buffer
    std::vector<Gradients> exchanged;
    std::vector<std::pair<int64_t, int64_t>> partial;  // own ranges of a gradient buffer that are summed over the tensor ranks
    std::vector<Range> sources;                        // what is gathered
    std::unique_ptr<Gate> gate = {};
    size_t waiting = 0;  // parameters whose gradients are not complete
    bool sent = false;
    Work gradients = {}, values = {};
  };
  void add_bucket(const Layout& layout, const Layout::Bucket& of);
  void plan_exchanges(Bucket& bucket) const;
  void plan_gradients(Bucket& bucket) const;
  int64_t scratch_elements() const;
  const Communicator& group(const Bucket& bucket) const { return group(bucket.of_experts); }
  // Where the borders of a data rank lie: it and its neighbours may share experts.
  size_t place(const Bucket& bucket, int data_rank) const;
  void listen(size_t bucket);
  void count_ready(size_t bucket, size_t parameter);
  void send(Bucket& bucket);
  void sum_partial(const Bucket& bucket, const Tensor& sums) const;
  void arrive(Bucket& bucket);
  std::vector<Part> parts(const Border& begin, const Border& end) const;
  std::vector<int64_t> counts(const ArenaMap& arena, const Bucket& bucket) const;
  int64_t position(const ArenaMap& arena, const Border& border) const;

  ParameterSet& parameters_;
  Mesh mesh_;
  std::vector<Bucket> buckets_;
  std::vector<Part> own_, others_;
  std::vector<bool> ready_;  // by parameter: its gradient is complete
  bool sending_ = false;     // between send_when_ready() and send_rest()
  Tensor sums_;
  Tensor scratch_;  // of the exchange of gradients, one bucket at a time; undefined where nothing is exchanged
  Finish finish_;
  CommQueue queue_;  // last: its work uses all others
};

}  // namespace mantissa
