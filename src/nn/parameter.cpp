#include "mantissa/nn/parameter.h"

#include <utility>

#include "mantissa/base/integers.h"
#include "mantissa/nn/arena.h"

namespace mantissa {

namespace {

int64_t padded(int64_t elements) { return round_up(elements, 32); }

Shape matrix(const Shape& shape) { return {shape.rows(), shape[-1]}; }

}  // namespace

Parameter& ParameterSet::add(Parameter parameter) {
  require(!find(parameter.name), "parameter ", parameter.name, " exists already");
  require(!allocated(), "parameter ", parameter.name, " was added after the allocation");
  offsets_.push_back(padded_elements_);
  padded_elements_ += padded(parameter.shape.elements());
  return parameters_.emplace_back(std::move(parameter));
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
    if (parameter.keeps_value) parameter.value = arena_of(parameter).take(parameter.shape);
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
    parameter.codes = {.codes = codes.take(codes_shape(shape, parameter.quantised)),
                       .scales = scales.take(scales_shape(shape, parameter.quantised)),
                       .shape = shape,
                       .how = parameter.quantised};
  }
}

bool ParameterSet::value_is_master(const Parameter& parameter) const {
  return parameter.value.defined() && parameter.value.dtype() == master_dtype_;
}

Tensor ParameterSet::room_for_master(const Parameter& parameter) const {
  return value_is_master(parameter) ? parameter.value : empty(*device_, master_dtype_, parameter.shape);
}

void ParameterSet::draw_initial(size_t index, uint64_t seed, const Tensor& master) const {
  const Parameter& parameter = parameters_[index];
  const Init& init = parameter.init;
  if (init.std == 0.0) return device_->run(Fill{.out = master, .value = init.constant});
  require(init.constant == 0.0, parameter.name, ": noise around a constant is not supported");
  device_->run(RandomNormal{.out = master,
                            .key = {.seed = seed, .stream = RngStream::init},
                            .what = static_cast<uint32_t>(index),
                            .first_index = 0,
                            .std = init.std});
}

void ParameterSet::store(const Parameter& parameter, const Tensor& master) {
  const Tensor rounding = rounding_target(parameter);
  if (!rounding.defined()) return;
  device_->run(Convert{.x = master, .out = rounding});
  quantise(parameter, rounding);
}

Tensor ParameterSet::rounding_target(const Parameter& parameter) const {
  if (parameter.value.defined() && !value_is_master(parameter)) return parameter.value;
  if (!parameter.codes.defined()) return {};
  return empty(*device_, Dtype::bf16, parameter.shape);
}

void ParameterSet::quantise(const Parameter& parameter, const Tensor& rounding) {
  if (!parameter.codes.defined()) return;
  device_->run(Quantize{.x = rounding.view(parameter.codes.shape), .out = parameter.codes, .nonfinite = nonfinite_});
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

std::string nonfinite_weight(const Parameter& parameter, const Tensor& master) {
  const Tensor& value = parameter.value;
  const std::string found = value.defined() ? nonfinite_text(parameter.name, value) : "";
  const bool rounds_for_codes = parameter.quantised && !(value.defined() && value.dtype() == Dtype::bf16);
  return found.empty() && rounds_for_codes ? nonfinite_text(parameter.name, converted(master, Dtype::bf16)) : found;
}

}  // namespace mantissa
