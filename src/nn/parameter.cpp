#include "mantissa/nn/parameter.h"

#include "mantissa/backend/functions.h"

namespace mantissa {

Parameter& ParameterSet::add(const std::string& name, Shape shape, Init init) {
  require(!find(name), "parameter ", name, " exists already");
  require(!allocated(), "parameter ", name, " was added after the allocation");
  constexpr int64_t kAlignment = 32;  // elements: 64 bytes in bf16
  offsets_.push_back(padded_elements_);
  padded_elements_ += (shape.elements() + kAlignment - 1) / kAlignment * kAlignment;
  return parameters_.emplace_back(Parameter{name, shape, init, {}, {}, {}});
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

void ParameterSet::allocate(Backend& device, Dtype compute, bool gradients) {
  const Dtype master = stats_dtype(compute);
  masters_ = zeros(device, master, {padded_elements_});
  values_ = compute == master ? masters_ : zeros(device, compute, {padded_elements_});
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].master = view_of(masters_, i);
    parameters_[i].value = view_of(values_, i);
  }
  if (gradients) use_gradient_buffer(new_gradient_buffer());
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

void ParameterSet::update_values() {
  if (!values_.shares_memory_with(masters_)) masters_.device().run(Convert{.x = masters_, .out = values_});
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
