#include "mantissa/data/sampler.h"

#include <bit>
#include <numeric>

#include "mantissa/base/error.h"
#include "mantissa/base/rng.h"

namespace mantissa {
namespace {

constexpr uint32_t kRounds = 8;
constexpr int64_t kLargestSize = int64_t{1} << 62;

uint64_t low_bits(uint64_t value, int bits) { return value & ((uint64_t{1} << bits) - 1); }

}  // namespace

Permutation::Permutation(int64_t size, uint64_t seed, uint32_t dataset, uint64_t epoch)
    : size_(static_cast<uint64_t>(size)), seed_(seed), epoch_(epoch), dataset_(dataset) {
  require(size >= 1 && size <= kLargestSize, "permutation of ", size, " items");
  const int bits = static_cast<int>(std::bit_width(size_ - 1));
  left_bits_ = bits / 2;
  right_bits_ = bits - left_bits_;
}

uint64_t Permutation::shuffle(uint64_t value) const {
  uint64_t right = low_bits(value, right_bits_);
  uint64_t left = value >> right_bits_;
  for (uint32_t round = 0; round < kRounds; ++round) {
    // Each half is at most 31 bits, so the round and the dataset find room beside it; every (round, half) has a draw of its own.
    const uint64_t half = round % 2 == 0 ? right : left;
    const uint64_t index = half | (uint64_t{round} << 32) | (uint64_t{dataset_} << 36);
    const auto words = random_words({.seed = seed_ ^ (epoch_ >> 32), .stream = RngStream::data}, static_cast<uint32_t>(epoch_), index);
    if (round % 2 == 0) {
      left ^= low_bits(words[0], left_bits_);
    } else {
      right ^= low_bits(words[0], right_bits_);
    }
  }
  return (left << right_bits_) | right;
}

int64_t Permutation::operator()(int64_t index) const {
  auto value = static_cast<uint64_t>(index);
  require(index >= 0 && value < size_, "item ", index, " of a permutation of ", size_);
  do value = shuffle(value);
  while (value >= size_);
  return static_cast<int64_t>(value);
}

Sampler::Sampler(std::vector<int64_t> samples, std::vector<double> weights, uint64_t seed)
    : samples_(std::move(samples)), weights_(std::move(weights)), seed_(seed), taken_(samples_.size(), 0) {
  require(!samples_.empty() && samples_.size() == weights_.size(), "one weight for each dataset");
  const double sum = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  for (size_t i = 0; i < samples_.size(); ++i) {
    require(samples_[i] >= 1 && weights_[i] > 0, "dataset ", i, ": ", samples_[i], " samples with weight ", weights_[i]);
    weights_[i] /= sum;
  }
}

int32_t Sampler::next_dataset() const {
  const auto n = static_cast<double>(drawn_ > 1 ? drawn_ : 1);
  size_t best = 0;
  double most = weights_[0] * n - static_cast<double>(taken_[0]);
  for (size_t i = 1; i < weights_.size(); ++i) {
    const double missing = weights_[i] * n - static_cast<double>(taken_[i]);
    if (missing > most) {
      most = missing;
      best = i;
    }
  }
  return static_cast<int32_t>(best);
}

// Makes one more draw from the dataset; returns how many there were before.
int64_t Sampler::take(int32_t dataset) {
  ++drawn_;
  return taken_[static_cast<size_t>(dataset)]++;
}

SampleId Sampler::at(int64_t counter) {
  require(counter >= 0, "sample counter ", counter);
  SampleId id;
  int64_t draw = counter;
  if (samples_.size() > 1) {
    if (counter < drawn_) {
      drawn_ = 0;
      taken_.assign(taken_.size(), 0);
    }
    while (drawn_ < counter) take(next_dataset());
    id.dataset = next_dataset();
    draw = take(id.dataset);
  }
  const int64_t size = samples_[static_cast<size_t>(id.dataset)];
  id.epoch = draw / size;
  id.sample = Permutation(size, seed_, static_cast<uint32_t>(id.dataset), static_cast<uint64_t>(id.epoch))(draw % size);
  return id;
}

}  // namespace mantissa
