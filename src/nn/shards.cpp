#include "mantissa/nn/shards.h"

#include <algorithm>
#include <string>
#include <utility>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

// Parameters of one layer have one; "layers.3" of "layers.3.mlp.down.weight", "embed" of "embed.weight".
std::string layer_of(const std::string& name) {
  const size_t dot = name.find('.');
  return name.substr(0, name.starts_with("layers.") ? name.find('.', dot + 1) : dot);
}

int64_t band_rows(const Parameter& parameter) { return std::max<int64_t>(32, parameter.quantised ? parameter.quantised.block() : 1); }

int64_t row_elements(const Parameter& parameter) { return parameter.shape.with_dim0(1).elements(); }

int64_t partial_norms(const Part& part) { return ceil_div(part.end - part.begin, 32); }

}  // namespace

std::vector<int64_t> cut_bands(std::span<const int64_t> band_sizes, int ranks) {
  int64_t whole = 0;
  for (const int64_t size : band_sizes) whole += size;
  std::vector<int64_t> first = {0};
  int64_t band = 0, before = 0;
  for (int r = 1; r < ranks; ++r) {
    while (std::cmp_less(band, band_sizes.size()) && before * ranks < whole * r) before += band_sizes[static_cast<size_t>(band++)];
    first.push_back(band);
  }
  first.push_back(static_cast<int64_t>(band_sizes.size()));
  return first;
}

Shards::Shards(ParameterSet& parameters, Communicator data, int64_t bucket_bytes) : parameters_(parameters), data_(std::move(data)) {
  const std::deque<Parameter>& all = parameters.all();
  size_t first = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    bytes += all[i].shape.elements() * dtype_bytes(Dtype::f32);
    const bool last = i + 1 == all.size();
    if (!last && (bytes < bucket_bytes || layer_of(all[i].name) == layer_of(all[i + 1].name))) continue;
    add_bucket(std::exchange(first, i + 1), i + 1);
    bytes = 0;
  }
  const auto rank = static_cast<size_t>(data_.rank());
  for (const Bucket& bucket : buckets_) {
    for (size_t r = 0; r + 1 < bucket.borders.size(); ++r) {
      std::ranges::move(parts(bucket.borders[r], bucket.borders[r + 1]), std::back_inserter(r == rank ? own_ : others_));
    }
  }
}

void Shards::add_bucket(size_t first, size_t last) {
  std::vector<int64_t> sizes;
  std::vector<Border> bands;
  for (size_t i = first; i < last; ++i) {
    const Parameter& parameter = parameters_.all()[i];
    const int64_t rows = parameter.shape[0], step = band_rows(parameter);
    for (int64_t row = 0; row < rows; row += step) {
      sizes.push_back(std::min(step, rows - row) * row_elements(parameter));
      bands.push_back({.parameter = i, .row = row});
    }
  }
  bands.push_back({.parameter = last, .row = 0});
  Bucket bucket;
  for (const int64_t band : cut_bands(sizes, data_.size())) bucket.borders.push_back(bands[static_cast<size_t>(band)]);
  buckets_.push_back(std::move(bucket));
}

std::vector<Part> Shards::parts(const Border& begin, const Border& end) const {
  std::vector<Part> parts;
  for (size_t i = begin.parameter; i < parameters_.all().size(); ++i) {
    Parameter& parameter = parameters_.all()[i];
    const Part part{.of = &parameter,
                    .begin = i == begin.parameter ? begin.row : 0,
                    .end = i < end.parameter    ? parameter.shape[0]
                           : i == end.parameter ? end.row
                                                : 0};
    if (part.begin < part.end) parts.push_back(part);
  }
  return parts;
}

int64_t Shards::position(const ArenaMap& arena, const Border& border) const {
  if (border.parameter == parameters_.all().size()) return arena.memory.defined() ? arena.memory.elements() : 0;
  return arena.position(border.parameter, border.row, parameters_.all()[border.parameter].shape[0]);
}

// Elements in the arena of each rank.
std::vector<int64_t> Shards::counts(const ArenaMap& arena, const Bucket& bucket) const {
  std::vector<int64_t> counts;
  for (size_t r = 0; r + 1 < bucket.borders.size(); ++r) {
    counts.push_back(position(arena, bucket.borders[r + 1]) - position(arena, bucket.borders[r]));
  }
  return counts;
}

void Shards::reduce_gradients() const {
  if (data_.size() == 1) return;
  const ArenaMap arena = parameters_.gradient_map();
  for (const Bucket& bucket : buckets_) {
    const Tensor range = arena.memory.slice(position(arena, bucket.borders.front()), position(arena, bucket.borders.back()));
    data_.sum_scatter(range, counts(arena, bucket), Purpose::gradients);
  }
}

void Shards::gather() const {
  if (data_.size() == 1) return;
  for (const Bucket& bucket : buckets_) {
    std::vector<std::vector<int64_t>> bytes;
    std::vector<std::span<std::byte>> memory;
    for (const ArenaMap& arena : parameters_.sources()) {
      const int64_t begin = position(arena, bucket.borders.front()), end = position(arena, bucket.borders.back());
      if (begin == end) continue;
      memory.push_back(host_memory(arena.memory.slice(begin, end)));
      bytes.push_back(counts(arena, bucket));
      for (int64_t& count : bytes.back()) count *= dtype_bytes(arena.memory.dtype());
    }
    std::vector<Communicator::Gather> gathers;
    for (size_t i = 0; i < memory.size(); ++i) gathers.push_back({.bytes = memory[i], .counts = bytes[i]});
    data_.all_gather(gathers, Purpose::parameters);
  }
  for (const Part& part : others_) parameters_.quantise_value(part);
}

int64_t Shards::norm_bands(int rank) const {
  int64_t bands = 0;
  for (const Bucket& bucket : buckets_) {
    const auto r = static_cast<size_t>(rank);
    for (const Part& part : parts(bucket.borders[r], bucket.borders[r + 1])) bands += partial_norms(part);
  }
  return bands;
}

std::vector<double> Shards::in_order(const std::vector<std::vector<double>>& by_rank) const {
  std::vector<double> all;
  std::vector<size_t> next(by_rank.size());
  for (const Bucket& bucket : buckets_) {
    for (size_t r = 0; r < by_rank.size(); ++r) {
      for (const Part& part : parts(bucket.borders[r], bucket.borders[r + 1])) {
        const auto from = by_rank[r].begin() + static_cast<int64_t>(next[r]);
        all.insert(all.end(), from, from + partial_norms(part));
        next[r] += static_cast<size_t>(partial_norms(part));
      }
    }
  }
  return all;
}

}  // namespace mantissa
