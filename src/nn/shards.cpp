#include "nn/shards.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <string>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

constexpr int64_t kFp32Bytes = 4;

// Returns the prefix that parameters of one layer share: "layers.3" of "layers.3.mlp.down.weight", "embed" of "embed.weight".
std::string layer_of(const std::string& name) {
  const size_t dot = name.find('.');
  return name.substr(0, name.starts_with("layers.") ? name.find('.', dot + 1) : dot);
}

int64_t row_elements(const ParameterSpec& parameter) { return parameter.shape.with_dim0(1).elements(); }

}  // namespace

Layout::Layout(std::vector<ParameterSpec> parameters, int64_t bucket_bytes) : parameters_(std::move(parameters)) {
  Bytes end{}, resting{};
  size_t first = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterSpec& parameter = parameters_[i];
    const int64_t elements = parameter.shape.elements(), gap = arena_elements(elements) - elements;
    int64_t codes = 0, scales = 0;
    if (parameter.quantized) {
      const Shape matrix{parameter.shape.rows(), parameter.shape[-1]};
      codes = codes_shape(matrix, parameter.quantized).elements();
      scales = scales_shape(matrix, parameter.quantized).elements();
    }
    Bytes size{}, room{};
    const auto put = [&](Arena arena, int64_t own, int64_t with_gap) { size[arena] = own, room[arena] = with_gap; };
    const int64_t value = dtype_bytes(parameter.dtype);
    if (parameter.keeps_value) put(parameter.dtype == Dtype::f32 ? kFp32 : kBf16, elements * value, (elements + gap) * value);
    if (!parameter.keeps_value) put(kCodes, codes, arena_elements(codes)), put(kScales, scales, arena_elements(scales));
    put(kGradients, elements * kFp32Bytes, gradient_elements(elements * parameter.sources) * kFp32Bytes);
    if (parameter.keeps_value) totals_.copies += arena_elements(codes) + arena_elements(scales);
    if (!parameter.trained()) {  // it lies there, but nothing of it is exchanged
      std::ranges::transform(resting, room, resting.begin(), std::plus{});
      resting[kGradients] = 0;
      size = room = {};
    }
    begin_.push_back(end);
    size_.push_back(size);
    std::ranges::transform(end, room, end.begin(), std::plus{});

    bytes += elements * kFp32Bytes;
    if (i + 1 < parameters_.size()) {
      const ParameterSpec& next = parameters_[i + 1];
      const bool same_ranks = parameter.among_experts() == next.among_experts(),
                 same_layer = layer_of(parameter.name) == layer_of(next.name);
      if (same_ranks && (bytes < bucket_bytes || same_layer)) continue;
    }
    buckets_.push_back({.first = std::exchange(first, i + 1), .last = i + 1, .of_experts = parameter.among_experts()});
    bytes = 0;
  }
  begin_.push_back(end);
  totals_.fp32_values = end[kFp32] + resting[kFp32];
  totals_.other_values = end[kBf16] + resting[kBf16];
  totals_.codes = end[kCodes] + end[kScales] + resting[kCodes] + resting[kScales];
  totals_.gradients = end[kGradients];
}

int64_t Layout::gathered(size_t parameter) const {
  const Bytes &begin = begin_[parameter], &end = begin_[parameter + 1];
  int64_t bytes = 0;
  for (const Arena arena : {kFp32, kBf16, kCodes, kScales}) bytes += end[arena] - begin[arena];
  return bytes;
}

// Finds the boundaries without visiting each row block.
std::vector<Layout::Boundary> Layout::boundaries(const Bucket& bucket, int ranks) const {
  int64_t whole = 0;
  for (size_t i = bucket.first; i < bucket.last; ++i) whole += parameters_[i].shape.elements();
  std::vector<Boundary> boundaries = {{.parameter = bucket.first, .row = 0}};
  size_t at = bucket.first;
  int64_t before = 0;  // elements of the bucket before parameter `at`
  for (int r = 1; r < ranks; ++r) {
    const int64_t wanted = whole / ranks * r + ceil_div(whole % ranks * r, ranks);
    while (at < bucket.last && before + parameters_[at].shape.elements() <= wanted) before += parameters_[at++].shape.elements();
    Boundary boundary{.parameter = at, .row = 0};
    if (at < bucket.last) {
      const int64_t step = std::max<int64_t>(32, parameters_[at].quantized ? parameters_[at].quantized.block() : 1);
      boundary.row = ceil_div(wanted - before, step * row_elements(parameters_[at])) * step;
      if (boundary.row >= parameters_[at].shape[0]) boundary = {.parameter = at + 1, .row = 0};
    }
    boundaries.push_back(boundary);
  }
  boundaries.push_back({.parameter = bucket.last, .row = 0});
  return boundaries;
}

Layout::Bytes Layout::position(const Boundary& boundary) const {
  Bytes out = begin_[boundary.parameter];
  if (boundary.row == 0) return out;
  const ParameterSpec& parameter = parameters_[boundary.parameter];
  for (size_t arena = 0; arena < kArenas; ++arena) {
    const int64_t height = arena == kScales ? parameter.quantized.block_rows : 1;  // rows that share a row here
    out[arena] += size_[boundary.parameter][arena] / ceil_div(parameter.shape[0], height) * ceil_div(boundary.row, height);
  }
  return out;
}

Layout::Share Layout::share(const Boundary& begin, const Boundary& end) const {
  const Bytes from = position(begin), to = position(end);
  Share share{.gradients = to[kGradients] - from[kGradients]};
  int64_t of_experts = 0;
  for (const Arena arena : {kFp32, kBf16, kCodes, kScales}) share.gathered += to[arena] - from[arena];
  for (size_t i = begin.parameter; i <= end.parameter && i < parameters_.size(); ++i) {
    const ParameterSpec& parameter = parameters_[i];
    const int64_t first = i == begin.parameter ? begin.row : 0, last = i == end.parameter ? end.row : parameter.shape[0];
    if (first >= last) continue;
    const int64_t room = arena_elements((last - first) * row_elements(parameter)) * kFp32Bytes;
    if (!(parameter.keeps_value && parameter.dtype == Dtype::f32)) share.masters += room;
    if (!parameter.trained()) continue;
    share.moments += parameter.moments() * room;
    share.norm_blocks += ceil_div(last - first, 32);
    if (parameter.partial_gradient) share.partial += (last - first) * row_elements(parameter) * kFp32Bytes;
    if (parameter.among_experts()) of_experts += (last - first) * row_elements(parameter) * kFp32Bytes;
  }
  if (of_experts > 0) share.gradients = of_experts;  // each parameter by itself, without gaps
  return share;
}

std::vector<Layout::Share> Layout::shares(const Bucket& bucket, int ranks) const {
  const std::vector<Boundary> cuts = boundaries(bucket, ranks);
  std::vector<Share> out;
  for (size_t r = 0; r + 1 < cuts.size(); ++r) out.push_back(share(cuts[r], cuts[r + 1]));
  return out;
}

Shards::Shards(ParameterSet& parameters, Mesh mesh, std::optional<int64_t> least_bucket)
    : parameters_(parameters),
      mesh_(std::move(mesh)),
      layout_({parameters.all().begin(), parameters.all().end()}, least_bucket.value_or(bucket_bytes(mesh_.data.size()))),
      ready_(parameters.all().size()),
      queue_(mesh_.world, &parameters.device()) {
  for (const Layout::Bucket& bucket : layout_.buckets()) add_bucket(bucket);
  int64_t scratch = 0;  // for the shares of other ranks in the largest range that is summed
  for (const Bucket& bucket : buckets_) {
    for (const Gradients& range : bucket.exchanged) scratch = std::max(scratch, group(bucket).scratch_elements(range.counts));
  }
  if (scratch > 0) scratch_ = empty(parameters_.gradients().device(), parameters_.gradients().dtype(), {scratch});
}

Shards::~Shards() {
  for (Parameter& parameter : parameters_.all()) {
    parameter.wait_for(nullptr);
    parameter.leaf.ready = nullptr;
  }
}

void Shards::add_bucket(const Layout::Bucket& of) {
  Bucket bucket;
  bucket.of_experts = of.of_experts;
  bucket.boundaries = layout_.boundaries(of, group(bucket).size());
  bucket.others_begin = others_.size();
  for (int r = 0; r < group(bucket).size(); ++r) {
    const auto at = static_cast<size_t>(r);
    std::ranges::move(shards_between(bucket.boundaries[at], bucket.boundaries[at + 1]),
                      std::back_inserter(r == group(bucket).rank() ? own_ : others_));
  }
  bucket.own_end = own_.size(), bucket.others_end = others_.size();
  plan_gradients(bucket);
  bucket.sources = ranges(bucket, of.first, of.last);
  for (const auto& [first, last] : trained_runs(bucket)) std::ranges::move(ranges(bucket, first, last), std::back_inserter(bucket.trained));
  buckets_.push_back(std::move(bucket));
  if (mesh_.world.size() > 1) listen(buckets_.size() - 1);
}

std::vector<Shards::Range> Shards::ranges(const Bucket& bucket, size_t first, size_t last) const {
  std::vector<Boundary> boundaries = bucket.boundaries;  // within these parameters
  for (Boundary& boundary : boundaries) {
    if (boundary.parameter < first) boundary = {.parameter = first, .row = 0};
    if (boundary.parameter >= last) boundary = {.parameter = last, .row = 0};
  }
  std::vector<Range> out;
  for (const ArenaMap& arena : parameters_.sources()) {
    const int64_t begin = position(arena, {.parameter = first, .row = 0}), end = position(arena, {.parameter = last, .row = 0});
    if (begin == end) continue;
    Range range{.memory = arena.memory.slice(begin, end), .counts = counts(arena, boundaries)};
    for (int64_t& count : range.counts) count *= dtype_bytes(arena.memory.dtype());
    out.push_back(std::move(range));
  }
  return out;
}

std::vector<std::pair<size_t, size_t>> Shards::trained_runs(const Bucket& bucket) const {
  std::vector<std::pair<size_t, size_t>> runs;
  for (size_t i = bucket.boundaries.front().parameter; i < bucket.boundaries.back().parameter; ++i) {
    if (!parameters_.all()[i].trained()) continue;
    if (runs.empty() || runs.back().second < i) runs.emplace_back(i, i);
    runs.back().second = i + 1;
  }
  return runs;
}

void Shards::plan_gradients(Bucket& bucket) const {
  const ArenaMap gradients = parameters_.gradient_map();
  bucket.begin = position(gradients, bucket.boundaries.front()), bucket.end = position(gradients, bucket.boundaries.back());
  if (!bucket.of_experts && bucket.begin < bucket.end)
    bucket.exchanged.push_back({.begin = bucket.begin, .end = bucket.end, .counts = counts(gradients, bucket.boundaries)});
  for (size_t i = bucket.boundaries.front().parameter; i < bucket.boundaries.back().parameter; ++i) {
    if (!parameters_.all()[i].trained()) continue;
    const ArenaMap::Place& place = gradients.places[i];
    const int64_t rows = parameters_.all()[i].shape[0];
    const auto at = [&](const Boundary& boundary) {
      return place.begin + (boundary.parameter < i ? 0 : boundary.parameter > i ? rows : boundary.row) * (place.elements / rows);
    };
    if (parameters_.all()[i].partial_gradient) {
      const auto rank = static_cast<size_t>(group(bucket).rank());
      bucket.partial.emplace_back(at(bucket.boundaries[rank]), at(bucket.boundaries[rank + 1]));
    }
    if (!bucket.of_experts) continue;
    // Each is exchanged by itself, because the gradients by source lie behind the sum.
    Gradients own{.begin = place.begin, .end = place.begin + place.elements, .counts = {}};
    for (size_t r = 0; r + 1 < bucket.boundaries.size(); ++r) own.counts.push_back(at(bucket.boundaries[r + 1]) - at(bucket.boundaries[r]));
    bucket.exchanged.push_back(std::move(own));
  }
}

// Makes the parameters of a bucket wait for what is gathered of them, and count when their gradients are complete.
void Shards::listen(size_t bucket) {
  const std::vector<Boundary>& boundaries = buckets_[bucket].boundaries;
  ReadyEvent& event = *(buckets_[bucket].ready = std::make_unique<ReadyEvent>());
  event.wait = [this, bucket] { arrive(buckets_[bucket]); };
  for (size_t i = boundaries.front().parameter; i < boundaries.back().parameter; ++i) {
    Parameter& parameter = parameters_.all()[i];
    parameter.wait_for(&event);
    parameter.leaf.ready = [this, bucket, i] {
      if (!sending_) return;
      require(!ready_[i], parameters_.all()[i].name, ": its gradient was complete, and then used again");
      ready_[i] = true;
      if (--buckets_[bucket].waiting == 0) send(buckets_[bucket]);
    };
  }
}

std::vector<ParameterShard> Shards::shards_between(const Boundary& begin, const Boundary& end) const {
  std::vector<ParameterShard> parts;
  for (size_t i = begin.parameter; i < parameters_.all().size() && i <= end.parameter; ++i) {
    Parameter& parameter = parameters_.all()[i];
    const ParameterShard shard{
        .of = &parameter, .begin = i == begin.parameter ? begin.row : 0, .end = i < end.parameter ? parameter.shape[0] : end.row};
    if (shard.begin < shard.end) parts.push_back(shard);
  }
  return parts;
}

std::vector<ParameterShard> Shards::of_rank(bool of_experts, int rank) const {
  std::vector<ParameterShard> out;
  for (const Bucket& bucket : buckets_) {
    if (bucket.of_experts != of_experts) continue;
    const auto r = static_cast<size_t>(rank);
    std::ranges::move(shards_between(bucket.boundaries[r], bucket.boundaries[r + 1]), std::back_inserter(out));
  }
  return out;
}

int64_t Shards::position(const ArenaMap& arena, const Boundary& boundary) const {
  if (boundary.parameter == parameters_.all().size()) return arena.memory.defined() ? arena.memory.elements() : 0;
  return arena.position(boundary.parameter, boundary.row, parameters_.all()[boundary.parameter].shape[0]);
}

// Returns the elements of each rank in the arena.
std::vector<int64_t> Shards::counts(const ArenaMap& arena, const std::vector<Boundary>& boundaries) const {
  std::vector<int64_t> counts;
  for (size_t r = 0; r + 1 < boundaries.size(); ++r) {
    counts.push_back(position(arena, boundaries[r + 1]) - position(arena, boundaries[r]));
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
    bucket.waiting = 0;
    for (const auto& [first, last] : trained_runs(bucket)) bucket.waiting += last - first;
  }
}

void Shards::send(Bucket& bucket) {
  bucket.sent = true;
  if (finish_) finish_(bucket.begin, bucket.end);
  if (mesh_.world.size() == 1) return;
  for (size_t i = bucket.boundaries.front().parameter; i < bucket.boundaries.back().parameter; ++i) parameters_.join_sources(sums_, i);
  bucket.gradients = queue_.submit([this, sums = sums_, &bucket] {
    for (const Gradients& range : bucket.exchanged)
      group(bucket).sum_scatter(sums.slice(range.begin, range.end), range.counts, Purpose::gradients, scratch_);
    if (mesh_.tensor.size() == 1 || bucket.partial.empty()) return;
    // Tensor ranks sum partial gradients of their shards in one exchange, which all of them make, also those without a share.
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
  });
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

void Shards::gather(Bucket& bucket, bool all) {
  const std::vector<Range>& ranges = all ? bucket.sources : bucket.trained;
  if (group(bucket).size() == 1 || ranges.empty()) return;
  bucket.ready->ready = false;
  bucket.all_come = all;
  bucket.values = queue_.submit([this, &bucket, &ranges] {
    std::vector<Communicator::Gather> gathers;
    for (const Range& range : ranges) gathers.push_back({.bytes = range.memory, .counts = range.counts});
    group(bucket).all_gather(gathers, Purpose::parameters);
  });
}

void Shards::gather(size_t bucket) { gather(buckets_[bucket], false); }

void Shards::gather() {
  for (Bucket& bucket : buckets_) gather(bucket, true);
}

void Shards::arrive() {
  for (Bucket& bucket : buckets_) arrive(bucket);
}

void Shards::arrive(Bucket& bucket) {
  if (!bucket.ready || bucket.ready->ready) return;
  bucket.values.wait();
  bucket.values = {};
  bucket.ready->ready = true;
  for (size_t i = bucket.others_begin; i < bucket.others_end; ++i) {
    if (bucket.all_come || others_[i].of->trained()) parameters_.quantize_value(others_[i]);
  }
}

size_t Shards::place(const Bucket& bucket, int data_rank) const {
  return static_cast<size_t>(bucket.of_experts ? data_rank / mesh_.expert.size() : data_rank);
}

int64_t Shards::norm_blocks(int rank) const {
  int64_t row_blocks = 0;
  for (const Bucket& bucket : buckets_) {
    const size_t at = place(bucket, rank / mesh_.tensor.size());
    for (const ParameterShard& shard : shards_between(bucket.boundaries[at], bucket.boundaries[at + 1])) row_blocks += shard.norms();
  }
  return row_blocks;
}

std::vector<double> Shards::in_order(const std::vector<std::vector<double>>& by_rank) const {
  struct Norms {
    std::array<int64_t, 4> order;  // tensor rank, parameter, which of those that share experts, row
    std::span<const double> values;
  };
  std::vector<Norms> found;
  const int tensor_ranks = mesh_.tensor.size();
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const int tensor = static_cast<int>(rank) % tensor_ranks, data = static_cast<int>(rank) / tensor_ranks;
    std::span<const double> left = by_rank[rank];
    for (const Bucket& bucket : buckets_) {
      const size_t at = place(bucket, data);
      for (const ParameterShard& shard : shards_between(bucket.boundaries[at], bucket.boundaries[at + 1])) {
        const auto count = static_cast<size_t>(shard.norms());
        const int share = bucket.of_experts ? data % mesh_.expert.size() : 0;
        if (tensor == 0 || shard.of->sharding.split != Split::none)
          found.push_back({.order = {tensor, shard.of->number(), share, shard.begin}, .values = left.first(count)});
        left = left.subspan(count);
      }
    }
  }
  std::ranges::sort(found, {}, &Norms::order);
  std::vector<double> all;
  for (const Norms& norms : found) all.insert(all.end(), norms.values.begin(), norms.values.end());
  return all;
}

}  // namespace mantissa
