#include "mantissa/nn/parameter.h"

#include <algorithm>
#include <utility>

#include "mantissa/backend/functions.h"
#include "mantissa/tensor/nonfinite.h"

namespace mantissa {

namespace {

constexpr int64_t kAlignment = 32;  // elements: 64 bytes in bf16

int64_t padded(int64_t elements) { return (elements + kAlignment - 1) / kAlignment * kAlignment; }

Shape matrix(const Shape& shape) { return {shape.rows(), shape[-1]}; }

// Cuts one allocation into parts that start at multiples of 64 bytes.
class Arena {
 public:
  void reserve(int64_t elements) { size_ += aligned(elements); }
  void allocate(Backend& device, Dtype dtype) { memory_ = size_ > 0 ? zeros(device, dtype, {size_}) : Tensor(); }
  Tensor take(const Shape& shape) {
    const int64_t begin = std::exchange(next_, next_ + aligned(shape.elements()));
    return memory_.slice(begin, begin + shape.elements()).view(shape);
  }

 private:
  static int64_t aligned(int64_t elements) { return (elements + 63) / 64 * 64; }
  int64_t size_ = 0, next_ = 0;
  Tensor memory_;
};

}  // namespace

int64_t Parameter::resident_bytes() const {
  const bool owns_value = value.defined() && !value.shares_memory_with(master);
  return (owns_value ? value.bytes() : 0) + (codes.defined() ? codes.bytes() : 0);
}

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
  masters_ = zeros(device, masters, {padded_elements_});
  Arena values;
  const auto keeps_rounding = [&](const Parameter& p) { return p.keeps_value && p.dtype != masters; };
  for (const Parameter& parameter : parameters_) {
    if (keeps_rounding(parameter)) values.reserve(parameter.shape.elements());
  }
  values.allocate(device, Dtype::bf16);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.master = view_of(masters_, i);
    if (keeps_rounding(parameter)) {
      parameter.value = values.take(parameter.shape);
    } else if (parameter.keeps_value) {
      parameter.value = parameter.master;
    }
  }
  allocate_codes(device);
  if (gradients) use_gradient_buffer(new_gradient_buffer());
}

void ParameterSet::allocate_codes(Backend& device) {
  Arena codes, scales;
  for (const Parameter& parameter : parameters_) {
    if (!parameter.quantised) continue;
    codes.reserve(codes_shape(matrix(parameter.shape), parameter.quantised).elements());
    scales.reserve(scales_shape(matrix(parameter.shape), parameter.quantised).elements());
  }
  codes.allocate(device, Dtype::u8);
  scales.allocate(device, Dtype::u8);
  for (Parameter& parameter : parameters_) {
    if (!parameter.quantised) continue;
    const Shape shape = matrix(parameter.shape);
    parameter.codes = {.codes = codes.take(codes_shape(shape, parameter.quantised)),
                       .scales = scales.take(scales_shape(shape, parameter.quantised)),
                       .shape = shape,
                       .how = parameter.quantised};
  }
  nonfinite_ = zeros(device, Dtype::i32, {1});
}

void ParameterSet::initialise(uint64_t seed) {
  uint32_t what = 0;
  for (Parameter& parameter : parameters_) {
    Backend& device = parameter.master.device();
    if (parameter.init.std > 0.0) {
      require(parameter.init.constant == 0.0, parameter.name, ": noise around a constant is not supported");
      device.run(RandomNormal{.out = parameter.master,
                              .key = {.seed = seed, .stream = RngStream::init},
                              .what = what,
                              .first_index = 0,
                              .std = parameter.init.std});
    } else {
      device.run(Fill{.out = parameter.master, .value = parameter.init.constant});
    }
    ++what;
  }
  update_values();
}

Tensor ParameterSet::rounding_target(const Parameter& parameter) const {
  if (parameter.value.defined() && !parameter.value.shares_memory_with(parameter.master)) return parameter.value;
  if (!parameter.codes.defined()) return {};
  return empty(parameter.codes.device(), Dtype::bf16, parameter.shape);
}

void ParameterSet::quantise(const Parameter& parameter, const Tensor& rounding) {
  if (!parameter.codes.defined()) return;
  rounding.device().run(Quantize{.x = rounding.view(parameter.codes.shape), .out = parameter.codes, .nonfinite = nonfinite_});
}

void ParameterSet::update_values() {
  *nonfinite_.data<int32_t>() = 0;
  for (const Parameter& parameter : parameters_) {
    const Tensor rounding = rounding_target(parameter);
    if (!rounding.defined()) continue;
    rounding.device().run(Convert{.x = parameter.master, .out = rounding});
    quantise(parameter, rounding);
  }
}

std::string ParameterSet::first_nonfinite() const {
  for (const Parameter& parameter : parameters_) {
    const Tensor& value = parameter.value;
    std::string found = value.defined() ? nonfinite_text(parameter.name, value) : "";
    const bool rounds_for_codes = parameter.codes.defined() && !(value.defined() && value.dtype() == Dtype::bf16);
    if (found.empty() && rounds_for_codes) found = nonfinite_text(parameter.name, converted(parameter.master, Dtype::bf16));
    if (!found.empty()) return found;
  }
  return "";
}

Tensor ParameterSet::new_gradient_buffer() const { return zeros(masters_.device(), masters_.dtype(), {padded_elements_}); }

void ParameterSet::use_gradient_buffer(const Tensor& buffer) {
  gradients_ = buffer;
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].leaf.grad = view_of(buffer, i);
}

void ParameterSet::reset_gradients() {
  for (Parameter& parameter : parameters_) parameter.leaf.reset();
}

}  // namespace mantissa
