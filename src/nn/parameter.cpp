#include "nn/parameter.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <utility>

#include "mantissa/base/integers.h"

namespace mantissa {

namespace {

Shape matrix(const Shape& shape) { return {shape.rows(), shape[-1]}; }

enum class Holds { elements, scales };

// take(parameter) takes what the parameter has in this arena, or nothing.
template <class Take>
ArenaMap map_of(Arena& arena, std::deque<Parameter>& parameters, Holds what, const Take& take) {
  ArenaMap map{.memory = arena.memory(), .places = {}};
  for (Parameter& parameter : parameters) {
    const int64_t begin = arena.taken(), elements = take(parameter);
    map.places.push_back({.begin = begin, .elements = elements, .height = what == Holds::scales ? parameter.quantized.block_rows : 1});
  }
  return map;
}

int64_t divided_evenly(const std::string& whose, int64_t size, int ranks) {
  require(size % ranks == 0, whose, ": ", size, " cannot be divided among ", ranks, " ranks");
  return size / ranks;
}

}  // namespace

int64_t gradient_elements(int64_t elements) { return round_up(elements, 32); }

ParameterSpec sharded(ParameterSpec whole, const Sharding& by) {
  const int experts = by.ranks.expert, rows = by.row_ranks(), columns = by.column_ranks();
  whole.sharding = by;
  whole.matrices = divided_evenly(whole.name, whole.matrices, experts);
  whole.parts.resize(whole.parts.size() / static_cast<size_t>(experts));
  const int64_t stored = divided_evenly(whole.name, whole.shape[0], experts) - whole.padding;
  whole.shape = whole.shape.with_dim0(divided_evenly(whole.name, whole.shape[0] / experts, rows));
  if (columns > 1) whole.shape = {whole.shape[0], divided_evenly(whole.name, whole.shape[1], columns)};
  if (rows == 1) return whole;
  require(whole.padding == 0 || whole.parts.empty(), whole.name, ": a fused parameter cannot have padding");
  for (int64_t& part : whole.parts) part = divided_evenly(whole.name, part, rows);
  whole.stored_rows = stored;
  return as_of(std::move(whole), by.ranks.tensor_rank, by.ranks.expert_rank);
}

ParameterSpec as_of(ParameterSpec own, int tensor_rank, int expert_rank) {
  own.sharding.ranks.tensor_rank = tensor_rank;
  own.sharding.ranks.expert_rank = expert_rank;
  const int64_t rows = own.shape[0];
  if (own.sharding.row_ranks() > 1) own.padding = std::clamp<int64_t>(rows * (tensor_rank + 1) - own.stored_rows, 0, rows);
  return own;
}

Shape Parameter::stored_shape() const {
  const int64_t rows = (sharding.row_ranks() > 1 ? stored_rows : shape[0] - padding) * sharding.ranks.expert;
  return sharding.column_ranks() > 1 ? Shape{rows, shape[1] * sharding.column_ranks()} : shape.with_dim0(rows);
}

std::vector<ParameterShard::Chunk> ParameterShard::chunks() const {
  if (begin >= stored_end()) return {};
  const ModelRanks& ranks = of->sharding.ranks;
  const int64_t experts_before = of->stored_shape()[0] / ranks.expert * ranks.expert_rank;  // their rows
  if (of->sharding.row_ranks() == 1) {
    // Fused parts lie together.
    const int64_t column = of->sharding.column_ranks() > 1 ? ranks.tensor_rank * of->shape[1] : 0;
    return {Chunk{.begin = begin, .end = stored_end(), .row = experts_before + begin, .column = column}};
  }
  std::vector<Chunk> chunks;
  int64_t first = 0;  // row of a fused part in the parameter; in the whole every part before it has as many rows on each rank
  for (const int64_t rows : of->parts.empty() ? std::vector<int64_t>{of->shape[0]} : of->parts) {
    const int64_t from = std::max(begin, first), to = std::min(stored_end(), first + rows);
    const int64_t moved = experts_before + first * (ranks.tensor - 1) + ranks.tensor_rank * rows;
    if (from < to) chunks.push_back({.begin = from, .end = to, .row = from + moved, .column = 0});
    first += rows;
  }
  return chunks;
}

Parameter& ParameterSet::add(ParameterSpec spec) {
  require(!find(spec.name), "parameter ", spec.name, " exists already");
  require(!allocated(), "parameter ", spec.name, " was added after the allocation");
  offsets_.push_back(padded_elements_);
  if (spec.trained()) padded_elements_ += gradient_elements(spec.shape.elements() * spec.sources);
  Parameter& parameter = parameters_.emplace_back(std::move(spec));
  parameter.number_ = static_cast<uint32_t>(parameters_.size() - 1);
  by_name_.emplace(parameter.name, &parameter);
  return parameter;
}

Buffer& ParameterSet::add_buffer(Buffer buffer) {
  require(std::ranges::find(buffers_, buffer.name, &Buffer::name) == buffers_.end(), "buffer ", buffer.name, " exists already");
  require(!allocated(), "buffer ", buffer.name, " was added after the allocation");
  return buffers_.emplace_back(std::move(buffer));
}

const Parameter* ParameterSet::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

int64_t ParameterSet::elements() const {
  int64_t n = 0;
  for (const Parameter& parameter : parameters_) n += parameter.shape.elements();
  return n;
}

Tensor ParameterSet::view_of(const Tensor& arena, size_t index) const {
  const Shape shape = parameters_[index].shape.with_dim0(parameters_[index].gradient_rows());
  return arena.slice(offsets_[index], offsets_[index] + shape.elements()).view(shape);
}

// Sums pairs of sources, then pairs of pairs, into source 0. Works in place: the old content of a row was joined, or moved, before.
void ParameterSet::join_sources(const Tensor& buffer, size_t index) const {
  const Parameter& parameter = parameters_[index];
  if (parameter.sources == 1 || !parameter.trained()) return;
  const Tensor all = view_of(buffer, index);
  const int64_t rows = parameter.shape[0] / parameter.matrices;
  for (int64_t matrix = 0; matrix < parameter.matrices; ++matrix) {
    const auto of = [&](int64_t source) {
      const int64_t begin = (matrix * parameter.sources + source) * rows;
      return all.slice(begin, begin + rows);
    };
    for (int64_t distance = 1; distance < parameter.sources; distance *= 2) {
      for (int64_t source = 0; source + distance < parameter.sources; source += 2 * distance)
        device_->run(Add{.a = of(source), .b = of(source + distance), .out = of(source)});
    }
    if (matrix > 0) device_->run(Convert{.x = of(0), .out = all.slice(matrix * rows, (matrix + 1) * rows)});
  }
}

void ParameterSet::allocate(Backend& device, Dtype masters, bool gradients) {
  device_ = &device;
  master_dtype_ = masters;
  for (const Dtype dtype : {master_dtype_, Dtype::bf16}) {
    const auto here = [&](const Parameter& parameter) { return parameter.keeps_value && parameter.dtype == dtype; };
    Arena arena(dtype);
    for (const Parameter& parameter : parameters_) {
      if (here(parameter)) arena.reserve(parameter.shape);
    }
    arena.allocate(device);
    sources_.push_back(map_of(arena, parameters_, Holds::elements, [&](Parameter& parameter) {
      if (here(parameter)) parameter.value_ = arena.take(parameter.shape);
      return here(parameter) ? parameter.shape.elements() : 0;
    }));
  }
  allocate_codes(true);
  allocate_codes(false);
  for (Buffer& buffer : buffers_) buffer.value = zeros(device, masters, buffer.shape);
  nonfinite_ = zeros(device, Dtype::i32, {1});
  if (gradients) use_gradient_buffer(new_gradient_buffer());
}

// Allocates the codes of parameters without a value, or of those with one.
void ParameterSet::allocate_codes(bool are_weights) {
  const auto here = [&](const Parameter& parameter) { return parameter.quantized && parameter.keeps_value != are_weights; };
  Arena codes(Dtype::u8), scales(Dtype::u8);
  for (const Parameter& parameter : parameters_) {
    if (!here(parameter)) continue;
    codes.reserve(codes_shape(matrix(parameter.shape), parameter.quantized));
    scales.reserve(scales_shape(matrix(parameter.shape), parameter.quantized));
  }
  codes.allocate(*device_);
  scales.allocate(*device_);
  ArenaMap code_map = map_of(codes, parameters_, Holds::elements, [&](Parameter& parameter) {
    if (!here(parameter)) return int64_t{0};
    const Shape shape = matrix(parameter.shape);
    parameter.codes_ = {
        .codes = codes.take(codes_shape(shape, parameter.quantized)), .scales = {}, .shape = shape, .how = parameter.quantized};
    return parameter.codes_.codes.elements();
  });
  const auto take_scales = [&](Parameter& parameter) {
    if (!here(parameter)) return int64_t{0};
    parameter.codes_.scales = scales.take(scales_shape(parameter.codes_.shape, parameter.quantized));
    return parameter.codes_.scales.elements();
  };
  ArenaMap scale_map = map_of(scales, parameters_, Holds::scales, take_scales);
  if (!are_weights) return;
  sources_.push_back(std::move(code_map));
  sources_.push_back(std::move(scale_map));
}

std::vector<ParameterShard> ParameterSet::whole_shards() {
  std::vector<ParameterShard> parts;
  for (Parameter& parameter : parameters_) parts.push_back({.of = &parameter, .begin = 0, .end = parameter.shape[0]});
  return parts;
}

bool ParameterSet::value_is_master(const Parameter& parameter) const { return parameter.keeps_value && parameter.dtype == master_dtype_; }

Tensor ParameterSet::room_for_master(const ParameterShard& shard) const {
  return value_is_master(*shard.of) ? shard.of_rows(shard.of->value_) : empty(*device_, master_dtype_, shard.shape());
}

void ParameterSet::draw_initial(const ParameterShard& shard, uint64_t seed, const Tensor& master) const {
  const Init& init = shard.of->init;
  if (init.std == 0.0) return device_->run(Fill{.out = master, .value = init.constant});
  require(init.constant == 0.0, shard.of->name, ": noise around a constant is not supported");
  device_->run(Fill{.out = master.slice(shard.stored_end() - shard.begin, master.dim(0)), .value = 0.0});
  const int64_t columns = shard.of->stored_shape().with_dim0(1).elements();
  for (const ParameterShard::Chunk& chunk : shard.chunks()) {
    device_->run(RandomNormal{.out = master.slice(chunk.begin - shard.begin, chunk.end - shard.begin),
                              .key = {.seed = seed, .stream = RngStream::init},
                              .what = shard.of->number_,
                              .first_index = chunk.row * columns + chunk.column,
                              .std = init.std,
                              .row_stride = shard.of->sharding.column_ranks() > 1 ? columns : 0});
  }
}

void ParameterSet::store(const ParameterShard& shard, const Tensor& master) {
  const Tensor rounding = rounding_target(shard);
  if (!rounding.defined()) return;
  device_->run(Convert{.x = master, .out = rounding});
  quantize(shard, rounding);
}

Tensor ParameterSet::rounding_target(const ParameterShard& shard) const {
  if (shard.of->keeps_value && !value_is_master(*shard.of)) return shard.of_rows(shard.of->value_);
  if (!shard.of->quantized) return {};
  return empty(*device_, Dtype::bf16, shard.shape());
}

void ParameterSet::quantize(const ParameterShard& shard, const Tensor& rounding) {
  if (!shard.of->quantized) return;
  const QuantizedTensor codes = slice(shard.of->codes_, shard.begin, shard.end);
  device_->run(Quantize{.x = rounding.view(codes.shape), .out = codes, .nonfinite = nonfinite_});
}

void ParameterSet::quantize_value(const ParameterShard& shard) {
  if (shard.of->quantized && shard.of->keeps_value) quantize(shard, converted(shard.of_rows(shard.of->value_), Dtype::bf16));
}

void ParameterSet::clear_nonfinite() { device_->run(Fill{.out = nonfinite_, .value = 0.0}); }

Tensor ParameterSet::new_gradient_buffer() const { return zeros(*device_, master_dtype_, {padded_elements_}); }

void ParameterSet::use_gradient_buffer(const Tensor& buffer) {
  gradients_ = buffer;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].trained()) parameters_[i].leaf.grad = view_of(buffer, i);
  }
}

ArenaMap ParameterSet::gradient_map() const {
  ArenaMap map{.memory = gradients_, .places = {}};
  for (size_t i = 0; i < parameters_.size(); ++i)
    map.places.push_back({.begin = offsets_[i], .elements = parameters_[i].trained() ? parameters_[i].shape.elements() : 0});
  return map;
}

void ParameterSet::reset_gradients() {
  for (Parameter& parameter : parameters_) parameter.leaf.reset();
}

namespace {

std::string element_text(const ParameterShard& shard, int64_t index, double value) {
  const int64_t columns = shard.shape().with_dim0(1).elements(), own_row = shard.begin + index / columns;
  // Padding lies in no chunk.
  const Sharding& by = shard.of->sharding;
  ParameterShard::Chunk at{.begin = 0, .end = 0, .row = by.row_ranks() > 1 ? by.ranks.tensor_rank * shard.of->shape[0] : 0, .column = 0};
  for (const ParameterShard::Chunk& chunk : shard.chunks()) {
    if (own_row >= chunk.begin && own_row < chunk.end) at = chunk;
  }
  const int64_t row = at.row + own_row - at.begin, column = at.column + index % columns;
  return text(shard.of->name, "[", row, shard.shape().rank() > 1 ? text(", ", column) : "", "] = ", value);
}

}  // namespace

std::string nonfinite_text(const ParameterShard& shard, const Tensor& values) {
  const std::optional<NonfiniteElement> found = nonfinite_element(values);
  return found ? element_text(shard, found->index, found->value) : "";
}

std::string nonfinite_read(const ParameterShard& shard, int64_t first, std::span<const float> values) {
  const Parameter& parameter = *shard.of;
  const bool rounded = parameter.quantized || (parameter.keeps_value && parameter.dtype == Dtype::bf16);
  const uint32_t least = rounded ? 0x7f7f8000U : 0x7f800000U;  // magnitude that is Inf, or is rounded to it
  const auto magnitude = [](float value) { return std::bit_cast<uint32_t>(value) & 0x7fffffffU; };
  uint32_t largest = 0;
  for (const float value : values) largest = std::max(largest, magnitude(value));
  if (largest < least) return "";
  const auto bad = std::ranges::find_if(values, [&](float value) { return magnitude(value) >= least; });
  const float read = rounded ? to_float(to_bf16(*bad)) : *bad;
  return element_text(shard, first + (bad - values.begin()), double{read});
}

std::string nonfinite_weight(const ParameterShard& shard, const Tensor& master) {
  const Parameter& parameter = *shard.of;
  const auto first = [&](const Tensor& x) { return nonfinite_text(shard, x); };
  const std::string found = parameter.keeps_value ? first(shard.of_rows(parameter.value())) : "";
  const bool rounds_for_codes = parameter.quantized && !(parameter.keeps_value && parameter.dtype == Dtype::bf16);
  return found.empty() && rounds_for_codes ? first(converted(master, Dtype::bf16)) : found;
}

}  // namespace mantissa
