// Parameters of a model, by path. Modules add theirs to a ParameterSet when they are built; allocate() then lays them out in arenas: one
// allocation each for fp32 masters, bf16 values, codes, scales and fp32 gradients. What forward reads follows from the masters: the master
// itself (fp32), its rounding to bf16, and codes of that rounding.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "mantissa/ops/ops.h"

namespace mantissa {

// Initial values: `constant` plus normal noise of standard deviation `std`.
struct Init {
  double constant = 0.0;
  double std = 0.0;
};

// The first group says what a parameter is; allocate() makes the second.
struct Parameter {
  std::string name;  // "layers.0.attn.qkv.weight"
  Shape shape;
  Init init{};
  Dtype dtype = Dtype::f32;  // of the value; that of the masters: the value is the master
  Quantization quantised{};  // kept as codes of the bf16 rounding, too
  bool keeps_value = true;   // else the codes are all that is kept beside the master

  Tensor master{};          // fp32 (fp64 on the reference backend in tests)
  Tensor value{};           // high precision; undefined if only codes are kept
  QuantizedTensor codes{};  // of the shape as a matrix; undefined in high precision
  Leaf leaf{};              // its gradient, if training

  bool decays() const { return shape.rank() >= 2; }
  Var var() { return leaf.grad.defined() ? Var(value, leaf) : Var(value); }
  LinearWeight weight() { return {value, codes, leaf.grad.defined() ? &leaf : nullptr}; }
  int64_t resident_bytes() const;  // of value and codes, without a master that is the value
};

class ParameterSet {
 public:
  // The reference stays valid. Throws Error(internal) on a name that exists.
  Parameter& add(Parameter parameter);

  std::deque<Parameter>& all() { return parameters_; }
  const std::deque<Parameter>& all() const { return parameters_; }
  const Parameter* find(const std::string& name) const;
  int64_t elements() const;  // without padding between parameters

  // Memory for all parameters, masters in fp32 or fp64; gradients only if asked for. Values are not initialised.
  void allocate(Backend& device, Dtype masters, bool gradients);
  bool allocated() const { return masters_.defined(); }
  // Draws the initial masters; parameter i uses stream `init`, what = i, element index = counter. Values are rounded from them.
  void initialise(uint64_t seed);
  void update_values();  // values and codes of all parameters from their masters

  // For whoever writes masters and their bf16 roundings in one pass: where the rounding of `parameter` goes (undefined: the value is the
  // master), and then its codes from it. Where no rounding is kept it goes to a buffer that lives as long as the handle.
  Tensor rounding_target(const Parameter& parameter) const;
  void quantise(const Parameter& parameter, const Tensor& rounding);
  // A quantised weight holds NaN or Inf; some formats would hide it. Until the next update_values().
  bool nonfinite() const { return *nonfinite_.data<int32_t>() != 0; }
  // "layers.0.mlp.down.weight[5] = nan": the first weight that is NaN or Inf as forward reads it, or in the rounding that its codes were
  // made from; "" if there is none.
  std::string first_nonfinite() const;

  // Gradient buffers. A buffer is one flat tensor with every parameter's gradient in it.
  Tensor gradients() const { return gradients_; }
  Tensor new_gradient_buffer() const;
  void use_gradient_buffer(const Tensor& buffer);  // later backward passes write there
  void reset_gradients();                          // the next contribution overwrites
  // Parameter `index`'s part of a tensor laid out as a gradient buffer, in its shape.
  Tensor view_of(const Tensor& arena, size_t index) const;

 private:
  std::deque<Parameter> parameters_;
  std::vector<int64_t> offsets_;  // in elements, multiples of 32 so that every view is 64-byte aligned
  int64_t padded_elements_ = 0;
  void allocate_codes(Backend& device);

  Tensor masters_, gradients_;
  Tensor nonfinite_;  // [1] i32
};

}  // namespace mantissa
