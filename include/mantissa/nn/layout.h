// Where the parameters of a model lie in arenas and buckets and which rank owns which rows, from their specs alone: what Shards go by, and
// what ParameterSet and Optimizer will do, for a plan of a run that needs more memory or ranks than there are.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "mantissa/nn/parameter.h"

namespace mantissa {

class Layout {
 public:
  // Parameters in the order of their set, fp32 masters; bucket_bytes as for Shards.
  Layout(std::vector<ParameterSpec> parameters, int64_t bucket_bytes);

  // All of this is in bytes, with the gaps that keep parameters aligned.
  struct Totals {
    int64_t fp32_values = 0;  // which are their own masters
    int64_t other_values = 0;
    int64_t codes = 0;   // with their scales, of weights that have no value
    int64_t copies = 0;  // codes with their scales beside a value
    int64_t gradients = 0;
    int64_t gathered() const { return fp32_values + other_values + codes; }
  };
  const Totals& totals() const { return totals_; }
  const std::vector<ParameterSpec>& parameters() const { return parameters_; }
  int64_t gathered(size_t parameter) const;  // of one

  // A run of whole layers, of at least bucket_bytes of fp32 gradients but for the last; it ends, too, where parameters of experts that
  // ranks share begin or end.
  struct Bucket {
    size_t first, last;       // parameters [first, last)
    bool of_experts = false;  // that ranks share: the data ranks which hold the same are 1 / expert_ranks() of all
  };
  const std::vector<Bucket>& buckets() const { return buckets_; }

  int expert_ranks(const Bucket& bucket) const { return bucket.of_experts ? parameters_[bucket.first].experts.ranks : 1; }

  // Where the rows of each of the ranks that hold the bucket begin, and the end: each has one run of whole bands, 32 rows or a block where
  // that is longer. That of rank r begins with the first band at or after r / ranks of the bucket's elements.
  struct Border {
    size_t parameter;
    int64_t row;
  };
  std::vector<Border> borders(const Bucket& bucket, int ranks) const;

  // What a rank owns of a bucket.
  struct Share {
    int64_t gradients = 0, gathered = 0;
    int64_t partial = 0;  // of the gradients, without gaps: what tensor ranks sum
    int64_t masters = 0;  // that are no values
    int64_t moments = 0;  // both
    int64_t norm_bands = 0;
  };
  std::vector<Share> shares(const Bucket& bucket, int ranks) const;

 private:
  enum Arena : size_t { kFp32, kBf16, kCodes, kScales, kGradients, kArenas };
  using Bytes = std::array<int64_t, kArenas>;
  Bytes position(const Border& border) const;
  Share share(const Border& begin, const Border& end) const;

  std::vector<ParameterSpec> parameters_;
  std::vector<Bytes> begin_;  // of each parameter, and the end
  std::vector<Bytes> size_;   // of each parameter, without the gap behind it
  std::vector<Bucket> buckets_;
  Totals totals_;
};

}  // namespace mantissa
