// Decides which sample comes when. The whole state is one counter (the number of samples drawn before), so a restart, another number of
// ranks or another global batch loses and repeats nothing: sample c of a run depends on (seed, sizes, weights, c) only.
#pragma once

#include <cstdint>
#include <vector>

namespace mantissa {

// A keyed bijection of [0, size): an 8-round Feistel network over the next power of two, its round function Philox; a value outside is
// walked along its cycle until it is inside (Black and Rogaway 2002: fewer than two steps on average). O(1) memory.
class Permutation {
 public:
  Permutation(int64_t size, uint64_t seed, uint32_t dataset, uint64_t epoch);
  int64_t operator()(int64_t index) const;  // index in [0, size)

 private:
  uint64_t shuffle(uint64_t value) const;

  uint64_t size_, seed_, epoch_;
  uint32_t dataset_;
  int left_bits_, right_bits_;
};

// One sample of one dataset, in one pass over it.
struct SampleId {
  int32_t dataset = 0;
  int64_t epoch = 0;
  int64_t sample = 0;
  bool operator==(const SampleId&) const = default;
};

class Sampler {
 public:
  // samples[i] >= 1 of dataset i, weights[i] > 0 (normalized here).
  Sampler(std::vector<int64_t> samples, std::vector<double> weights, uint64_t seed);

  // Datasets are blended greedily, as Megatron does: draw n takes the dataset with the largest weight * max(n, 1) - taken, ties the lowest.
  // Going forward costs O(datasets) per draw, going back starts over: after a restart 10^8 draws are replayed in about a second. One
  // dataset: O(1).
  SampleId at(int64_t counter);

 private:
  int64_t take(int32_t dataset);
  int32_t next_dataset() const;

  std::vector<int64_t> samples_;
  std::vector<double> weights_;
  uint64_t seed_;
  int64_t drawn_ = 0;
  std::vector<int64_t> taken_;  // by dataset, after drawn_ draws
};

}  // namespace mantissa
