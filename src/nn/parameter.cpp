#include "mantissa/nn/parameter.h"

#include <utility>

#include "mantissa/base/integers.h"
#include "mantissa/nn/arena.h"

namespace mantissa {

namespace {

int64_t padded(int64_t elements) { return round_up(elements, 32); }

Shape matrix(const Shape& shape) { return {shape.rows(), shape[-1]}; }

}  // namespace

Parameter& ParameterSet::add(ParameterSpec spec) {
  require(!find(spec.name), "parameter ", spec.name, " exists already");
  require(!allocated(), "parameter ", spec.name, " was added after the allocation");
  offsets_.push_back(padded_elements_);
  padded_elements_ += padded(spec.shape.elements());
  Parameter& parameter = parameters_.emplace_back(std::move(spec));
  parameter.number_ = static_cast<uint32_t>(parameters_.size() - 1);
  return parameter;
}

const Parameter* ParameterSet::find(const std::string& name) const {
  for (const Parameter& parameter : parameters_) {
    if (parameter.name == name) return &parameter;
  }
  return nullptr;
}

int64_t ParameterSet::elements() const {
  int64_t n = 0;
  for (const Parameter& parameter : parameters_) n += parameter.shape.elements();
  return n;
}

Tensor ParameterSet::view_of(const Tensor& arena, size_t index) const {
  const Shape& shape = parameters_[index].shape;
  return arena.slice(offsets_[index], offsets_[index] + shape.elements()).view(shape);
}

void ParameterSet::allocate(Backend& device, Dtype masters, bool gradients) {
  device_ = &device;
  master_dtype_ = masters;
  allocate_values();
  allocate_codes();
  nonfinite_ = zeros(device, Dtype::i32, {1});
  if (gradients) use_gradient_buffer(new_gradient_buffer());
}

void ParameterSet::allocate_values() {
  Arena masters(master_dtype_), roundings(Dtype::bf16);
  const auto arena_of = [&](const Parameter& parameter) -> Arena& { return parameter.dtype == master_dtype_ ? masters : roundings; };
  for (const Parameter& parameter : parameters_) {
    if (parameter.keeps_value) arena_of(parameter).reserve(parameter.shape);
  }
  masters.allocate(*device_);
  roundings.allocate(*device_);
  for (Parameter& parameter : parameters_) {
    if (parameter.keeps_value) parameter.value_ = arena_of(parameter).take(parameter.shape);
  }
}

void ParameterSet::allocate_codes() {
  Arena codes(Dtype::u8), scales(Dtype::u8);
  for (const Parameter& parameter : parameters_) {
    if (!parameter.quantised) continue;
    codes.reserve(codes_shape(matrix(parameter.shape), parameter.quantised));
    scales.reserve(scales_shape(matrix(parameter.shape), parameter.quantised));
  }
  codes.allocate(*device_);
  scales.allocate(*device_);
  for (Parameter& parameter : parameters_) {
    if (!parameter.quantised) continue;
    const Shape shape = matrix(parameter.shape);
    parameter.codes_ = {.codes = codes.take(codes_shape(shape, parameter.quantised)),
                        .scales = scales.take(scales_shape(shape, parameter.quantised)),
                        .shape = shape,
                        .how = parameter.quantised};
  }
}

std::vector<Part> ParameterSet::whole_parts() {
  std::vector<Part> parts;
  for (Parameter& parameter : parameters_) parts.push_back({.of = &parameter, .begin = 0, .end = parameter.shape[0]});
  return parts;
}

bool ParameterSet::value_is_master(const Parameter& parameter) const { return parameter.keeps_value && parameter.dtype == master_dtype_; }

Tensor ParameterSet::room_for_master(const Part& part) const {
  return value_is_master(*part.of) ? part.of_rows(part.of->value_) : empty(*device_, master_dtype_, part.shape());
}

void ParameterSet::draw_initial(const Part& part, uint64_t seed, const Tensor& master) const {
  const Init& init = part.of->init;
  if (init.std == 0.0) return device_->run(Fill{.out = master, .value = init.constant});
  require(init.constant == 0.0, part.of->name, ": noise around a constant is not supported");
  const int64_t rows = part.stored_end() - part.begin;
  device_->run(Fill{.out = master.slice(rows, master.dim(0)), .value = 0.0});
  device_->run(RandomNormal{.out = master.slice(0, rows),
                            .key = {.seed = seed, .stream = RngStream::init},
                            .what = part.of->number_,
                            .first_index = part.first_element(),
                            .std = init.std});
}

void ParameterSet::store(const Part& part, const Tensor& master) {
  const Tensor rounding = rounding_target(part);
  if (!rounding.defined()) return;
  device_->run(Convert{.x = master, .out = rounding});
  quantise(part, rounding);
}

Tensor ParameterSet::rounding_target(const Part& part) const {
  if (part.of->keeps_value && !value_is_master(*part.of)) return part.of_rows(part.of->value_);
  if (!part.of->quantised) return {};
  return empty(*device_, Dtype::bf16, part.shape());
}

void ParameterSet::quantise(const Part& part, const Tensor& rounding) {
  if (!part.of->quantised) return;
  const QuantizedTensor codes = slice(part.of->codes_, part.begin, part.end);
  device_->run(Quantize{.x = rounding.view(codes.shape), .out = codes, .nonfinite = nonfinite_});
}

void ParameterSet::clear_nonfinite() { device_->run(Fill{.out = nonfinite_, .value = 0.0}); }

Tensor ParameterSet::new_gradient_buffer() const { return zeros(*device_, master_dtype_, {padded_elements_}); }

void ParameterSet::use_gradient_buffer(const Tensor& buffer) {
  gradients_ = buffer;
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].leaf.grad = view_of(buffer, i);
}

void ParameterSet::reset_gradients() {
  for (Parameter& parameter : parameters_) parameter.leaf.reset();
}

std::string nonfinite_weight(const Part& part, const Tensor& master) {
  const Parameter& parameter = *part.of;
  const auto first = [&](const Tensor& x) { return nonfinite_text(parameter.name, x, part.first_element()); };
  const std::string found = parameter.keeps_value ? first(part.of_rows(parameter.value())) : "";
  const bool rounds_for_codes = parameter.quantised && !(parameter.keeps_value && parameter.dtype == Dtype::bf16);
  return found.empty() && rounds_for_codes ? first(converted(master, Dtype::bf16)) : found;
}

}  // namespace mantissa
