// Computes from specs alone where the parameters of a model lie in arenas and buckets and which rank owns which rows. Shards follow it; a
// plan uses it to predict ParameterSet and Optimizer for runs that need more memory or ranks than there are.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "mantissa/nn/parameter.h"

namespace mantissa {

class Layout {
 public:
  // Takes parameters in the order of their set, with fp32 masters; bucket_bytes is that of Shards.
  Layout(std::vector<ParameterSpec> parameters, int64_t bucket_bytes);

  // All totals are bytes, including the gaps that keep parameters aligned.
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
    int64_t masters = 0;  // masters that are no values
    int64_t moments = 0;  // both
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

}  // namespace mantissa
