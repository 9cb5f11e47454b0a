#include "mantissa/nn/shards.h"

#include <algorithm>
#include <string>
#include <utility>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

int64_t partial_norms(const Part& part) { return ceil_div(part.end - part.begin, 32); }

}  // namespace

Shards::Shards(ParameterSet& parameters, Mesh mesh, int64_t bucket_bytes)
    : parameters_(parameters), mesh_(std::move(mesh)), ready_(parameters.all().size()), queue_(mesh_.world) {
  const Layout layout({parameters.all().begin(), parameters.all().end()}, bucket_bytes);
  for (const Layout::Bucket& bucket : layout.buckets()) add_bucket(layout.borders(bucket, mesh_.data.size()));
}

Shards::~Shards() {
  for (Parameter& parameter : parameters_.all()) {
    parameter.stand_behind(nullptr);
    parameter.leaf.ready = nullptr;
  }
}

void Shards::add_bucket(std::vector<Border> borders) {
  Bucket bucket;
  bucket.borders = std::move(borders);
  bucket.others_begin = others_.size();
  for (int r = 0; r < mesh_.data.size(); ++r) {
    const auto at = static_cast<size_t>(r);
    std::ranges::move(parts(bucket.borders[at], bucket.borders[at + 1]), std::back_inserter(r == mesh_.data.rank() ? own_ : others_));
  }
  bucket.own_end = own_.size(), bucket.others_end = others_.size();
  plan_exchanges(bucket);
  buckets_.push_back(std::move(bucket));
  if (mesh_.world.size() > 1) listen(buckets_.size() - 1);
}

void Shards::plan_exchanges(Bucket& bucket) const {
  const ArenaMap gradients = parameters_.gradient_map();
  bucket.begin = position(gradients, bucket.borders.front()), bucket.end = position(gradients, bucket.borders.back());
  bucket.gradient_counts = counts(gradients, bucket);
  for (size_t i = bucket.borders.front().parameter; i < bucket.borders.back().parameter; ++i) {
    const ArenaMap::Place& place = gradients.places[i];
    if (parameters_.all()[i].partial_gradient) bucket.partial.emplace_back(place.begin, place.begin + place.elements);
  }
  for (const ArenaMap& arena : parameters_.sources()) {
    const int64_t begin = position(arena, bucket.borders.front()), end = position(arena, bucket.borders.back());
    if (begin == end) continue;
    Range range{.memory = arena.memory.slice(begin, end), .counts = counts(arena, bucket)};
    for (int64_t& count : range.counts) count *= dtype_bytes(arena.memory.dtype());
    bucket.sources.push_back(std::move(range));
  }
}

// The parameters of a bucket wait for what is gathered of them, and tell when their gradients are complete.
void Shards::listen(size_t bucket) {
  const std::vector<Border>& borders = buckets_[bucket].borders;
  Gate& gate = *(buckets_[bucket].gate = std::make_unique<Gate>());
  gate.pass = [this, bucket] { arrive(buckets_[bucket]); };
  for (size_t i = borders.front().parameter; i < borders.back().parameter; ++i) {
    Parameter& parameter = parameters_.all()[i];
    parameter.stand_behind(&gate);
    parameter.leaf.ready = [this, bucket, i] { count_ready(bucket, i); };
  }
}

std::vector<Part> Shards::parts(const Border& begin, const Border& end) const {
  std::vector<Part> parts;
  for (size_t i = begin.parameter; i < parameters_.all().size() && i <= end.parameter; ++i) {
    Parameter& parameter = parameters_.all()[i];
    const Part part{
        .of = &parameter, .begin = i == begin.parameter ? begin.row : 0, .end = i < end.parameter ? parameter.shape[0] : end.row};
    if (part.begin < part.end) parts.push_back(part);
  }
  return parts;
}

std::vector<Part> Shards::of_rank(int rank) const {
  std::vector<Part> out;
  for (const Bucket& bucket : buckets_) {
    const auto r = static_cast<size_t>(rank);
    std::ranges::move(parts(bucket.borders[r], bucket.borders[r + 1]), std::back_inserter(out));
  }
  return out;
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

void Shards::send_when_ready(const Tensor& sums, Finish finish) {
  sums_ = sums;
  finish_ = std::move(finish);
  sending_ = true;
  ready_.assign(ready_.size(), false);
  for (Bucket& bucket : buckets_) {
    require(!bucket.sent, "gradients are sent again before they are reduced");
    bucket.waiting = bucket.borders.back().parameter - bucket.borders.front().parameter;
  }
}

void Shards::count_ready(size_t bucket, size_t parameter) {
  if (!sending_) return;
  require(!ready_[parameter], parameters_.all()[parameter].name, ": its gradient was complete, and then used again");
  ready_[parameter] = true;
  if (--buckets_[bucket].waiting == 0) send(buckets_[bucket]);
}

void Shards::send(Bucket& bucket) {
  bucket.sent = true;
  if (finish_) finish_(bucket.begin, bucket.end);
  if (mesh_.world.size() == 1) return;
  bucket.gradients = queue_.submit([this, sums = sums_, &bucket] {
    sum_partial(bucket, sums);
    mesh_.data.sum_scatter(sums.slice(bucket.begin, bucket.end), bucket.gradient_counts, Purpose::gradients);
  });
}

// In one exchange.
void Shards::sum_partial(const Bucket& bucket, const Tensor& sums) const {
  if (mesh_.tensor.size() == 1 || bucket.partial.empty()) return;
  int64_t elements = 0;
  for (const auto& [begin, end] : bucket.partial) elements += end - begin;
  const Tensor together = empty(sums.device(), sums.dtype(), {elements});
  const auto each = [&](const auto& body) {
    int64_t at = 0;
    for (const auto& [begin, end] : bucket.partial) {
      body(sums.slice(begin, end), together.slice(at, at + end - begin));
      at += end - begin;
    }
  };
  each([](const Tensor& gradient, const Tensor& copy) { copy.device().run(Convert{.x = gradient, .out = copy}); });
  mesh_.tensor.sum(together, Purpose::gradients);
  each([](const Tensor& gradient, const Tensor& copy) { copy.device().run(Convert{.x = copy, .out = gradient}); });
}

void Shards::send_rest() {
  for (Bucket& bucket : buckets_) {
    if (!bucket.sent) send(bucket);
  }
  finish_ = nullptr;
  sending_ = false;
}

void Shards::reduce_gradients() {
  if (!buckets_.front().sent) {
    sums_ = parameters_.gradients();
    send_rest();
  }
  for (Bucket& bucket : buckets_) {
    bucket.gradients.wait();
    bucket.gradients = {};
    bucket.sent = false;
  }
}

void Shards::gather(size_t bucket) {
  if (mesh_.data.size() == 1) return;
  Bucket& gathered = buckets_[bucket];
  gathered.gate->open = false;
  gathered.values = queue_.submit([this, &sources = gathered.sources] {
    std::vector<Communicator::Gather> gathers;
    for (const Range& range : sources) gathers.push_back({.bytes = host_memory(range.memory), .counts = range.counts});
    mesh_.data.all_gather(gathers, Purpose::parameters);
  });
}

void Shards::gather() {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) gather(bucket);
}

void Shards::arrive() {
  for (Bucket& bucket : buckets_) arrive(bucket);
}

void Shards::arrive(Bucket& bucket) {
  if (!bucket.gate || bucket.gate->open) return;
  bucket.values.wait();
  bucket.values = {};
  bucket.gate->open = true;
  for (size_t i = bucket.others_begin; i < bucket.others_end; ++i) parameters_.quantise_value(others_[i]);
}

int64_t Shards::norm_bands(int rank) const {
  int64_t bands = 0;
  for (const Bucket& bucket : buckets_) {
    const auto r = static_cast<size_t>(rank / mesh_.tensor.size());
    for (const Part& part : parts(bucket.borders[r], bucket.borders[r + 1])) bands += partial_norms(part);
  }
  return bands;
}

std::vector<double> Shards::in_order(const std::vector<std::vector<double>>& by_rank) const {
  std::vector<double> all;
  const auto tensor_ranks = static_cast<size_t>(mesh_.tensor.size());
  std::vector<size_t> next(by_rank.size());
  for (size_t tensor = 0; tensor < tensor_ranks; ++tensor) {
    for (const Bucket& bucket : buckets_) {
      for (size_t data = 0; data + 1 < bucket.borders.size(); ++data) {
        const size_t rank = data * tensor_ranks + tensor;
        for (const Part& part : parts(bucket.borders[data], bucket.borders[data + 1])) {
          const auto from = by_rank[rank].begin() + static_cast<int64_t>(next[rank]);
          if (tensor == 0 || part.of->split != Split::none) all.insert(all.end(), from, from + partial_norms(part));
          next[rank] += static_cast<size_t>(partial_norms(part));
        }
      }
    }
  }
  return all;
}

}  // namespace mantissa
