#include "mantissa/nn/layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "mantissa/base/integers.h"
#include "mantissa/nn/arena.h"

namespace mantissa {
namespace {

constexpr int64_t kFp32Bytes = 4;

// Returns the prefix that parameters of one layer share: "layers.3" of "layers.3.mlp.down.weight", "embed" of "embed.weight".
std::string layer_of(const std::string& name) {
  const size_t dot = name.find('.');
  return name.substr(0, name.starts_with("layers.") ? name.find('.', dot + 1) : dot);
}

int64_t row_elements(const ParameterSpec& parameter) { return parameter.shape.with_dim0(1).elements(); }

int64_t block_rows_of(const ParameterSpec& parameter) {
  return std::max<int64_t>(32, parameter.quantized ? parameter.quantized.block() : 1);
}

// Returns whole * part / of, rounded down; the product need not be representable. part <= of < 2^31.
int64_t fraction(int64_t whole, int64_t part, int64_t of) { return whole / of * part + whole % of * part / of; }

struct CodeBytes {
  int64_t codes = 0, scales = 0;
};

CodeBytes code_bytes(const ParameterSpec& parameter) {
  if (!parameter.quantized) return {};
  const Shape matrix{parameter.shape.rows(), parameter.shape[-1]};
  return {codes_shape(matrix, parameter.quantized).elements(), scales_shape(matrix, parameter.quantized).elements()};
}

}  // namespace

Layout::Layout(std::vector<ParameterSpec> parameters, int64_t bucket_bytes) : parameters_(std::move(parameters)) {
  Bytes end{};
  size_t first = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterSpec& parameter = parameters_[i];
    const int64_t elements = parameter.shape.elements(), gap = arena_elements(elements) - elements;
    const auto [codes, scales] = code_bytes(parameter);
    Bytes size{}, room{};
    const auto put = [&](Arena arena, int64_t own, int64_t with_gap) { size[arena] = own, room[arena] = with_gap; };
    const int64_t value = dtype_bytes(parameter.dtype);
    if (parameter.keeps_value) put(parameter.dtype == Dtype::f32 ? kFp32 : kBf16, elements * value, (elements + gap) * value);
    if (!parameter.keeps_value) put(kCodes, codes, arena_elements(codes)), put(kScales, scales, arena_elements(scales));
    put(kGradients, elements * kFp32Bytes, gradient_elements(elements * parameter.sources) * kFp32Bytes);
    if (parameter.keeps_value) totals_.copies += arena_elements(codes) + arena_elements(scales);
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
  totals_.fp32_values = end[kFp32];
  totals_.other_values = end[kBf16];
  totals_.codes = end[kCodes] + end[kScales];
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
      const int64_t step = block_rows_of(parameters_[at]);
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
  const int64_t rows = parameters_[boundary.parameter].shape[0];
  for (size_t arena = 0; arena < kArenas; ++arena) out[arena] += fraction(size_[boundary.parameter][arena], boundary.row, rows);
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
    if (size_[i][kFp32] == 0) share.masters += room;
    share.moments += 2 * room;
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

}  // namespace mantissa
