// Which rank of a data-parallel group owns which part of the fp32 state (ZeRO-1, Rajbhandari et al. 2020), and the two exchanges that
// follow from it: gradients go to the owner of each part, and what forward reads of it comes back.
//
// A bucket is a run of parameters, contiguous in every arena. In each bucket every rank owns one contiguous run of whole bands of rows, of
// nearly equal size and possibly none, so a bucket is exchanged and gathered in place with one count per rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/nn/parameter.h"

namespace mantissa {

// Cuts consecutive bands into one run per rank: entry r is the first band of rank r, which begins at or after r / ranks of the whole; the
// last entry is the number of bands.
std::vector<int64_t> cut_bands(std::span<const int64_t> band_sizes, int ranks);

class Shards {
 public:
  // Gradients of a bucket, in bytes of fp32, at least, unless one layer has more; less than one layer never.
  static constexpr int64_t kBucketBytes = 25'000'000;

  // Of a set that is allocated and outlives this. A group of one owns everything and exchanges nothing.
  explicit Shards(ParameterSet& parameters, Communicator data = {}, int64_t bucket_bytes = kBucketBytes);

  const Communicator& data() const { return data_; }
  size_t buckets() const { return buckets_.size(); }
  // In the order of the parameters and of the rows.
  const std::vector<Part>& own() const { return own_; }

  // Adds the gradients of the own parts over the ranks, in the order of an aligned binary tree; those of other parts are then unspecified.
  void reduce_gradients() const;
  // Values, or codes that are the weight, of all parts from their owners; codes beside a value are made again from it.
  void gather() const;

  // fp64 [of all ranks] partial norms, in the order of the parameters, from what each rank computed for its own parts, in that order.
  // by_rank[r] is what rank r has.
  std::vector<double> in_order(const std::vector<std::vector<double>>& by_rank) const;
  // Partial norms of rank r: one for each 32 rows that it owns.
  int64_t norm_bands(int rank) const;

 private:
  struct Border {
    size_t parameter;
    int64_t row;
  };
  struct Bucket {
    std::vector<Border> borders;  // where the rows of each rank begin, and the end
  };
  void add_bucket(size_t first, size_t last);
  std::vector<Part> parts(const Border& begin, const Border& end) const;
  std::vector<int64_t> counts(const ArenaMap& arena, const Bucket& bucket) const;
  int64_t position(const ArenaMap& arena, const Border& border) const;

  ParameterSet& parameters_;
  Communicator data_;
  std::vector<Bucket> buckets_;
  std::vector<Part> own_, others_;
};

}  // namespace mantissa
