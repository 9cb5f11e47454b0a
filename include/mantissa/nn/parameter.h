// Parameters of a model, by path. Modules add theirs to a ParameterSet when they are built; allocate() then lays them out in arenas: one
// allocation each for fp32 masters, values in the compute dtype (the masters themselves if that is fp32) and fp32 gradients.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "mantissa/autograd/tape.h"

namespace mantissa {

// Initial values: `constant` plus normal noise of standard deviation `std`.
struct Init {
  double constant = 0.0;
  double std = 0.0;
};

struct Parameter {
  std::string name;  // "layers.0.attn.qkv.weight"
  Shape shape;
  Init init;
  Tensor master;  // fp32 (fp64 on the reference backend in tests)
  Tensor value;   // compute dtype: what the forward pass reads
  Leaf leaf;      // its gradient, if training

  bool decays() const { return shape.rank() >= 2; }
  Var var() { return leaf.grad.defined() ? Var(value, leaf) : Var(value); }
};

class ParameterSet {
 public:
  // The reference stays valid. Throws Error(internal) on a name that exists.
  Parameter& add(const std::string& name, Shape shape, Init init);

  std::deque<Parameter>& all() { return parameters_; }
  const std::deque<Parameter>& all() const { return parameters_; }
  const Parameter* find(const std::string& name) const;
  int64_t elements() const;  // without padding between parameters

  // Memory for all parameters; gradients only if asked for. Values are not initialised.
  void allocate(Backend& device, Dtype compute, bool gradients);
  bool allocated() const { return masters_.defined(); }
  // Draws the initial masters; parameter i uses stream `init`, what = i, element index = counter. Values are rounded from them.
  void initialise(uint64_t seed);
  void update_values();  // values = masters rounded to the compute dtype

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
  Tensor masters_, values_, gradients_;
};

}  // namespace mantissa
