// Parameters of a model, by path. Modules add theirs to a ParameterSet when they are built; allocate() then lays them out in arenas: one
// allocation each for values by dtype, codes, scales and fp32 gradients. What forward reads follows from an fp32 master, which whoever
// updates the parameter owns: the value is the master (fp32) or its rounding to bf16, and the codes are those of that rounding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "mantissa/ops/ops.h"
#include "mantissa/tensor/split.h"

namespace mantissa {

// Initial values: `constant` plus normal noise of standard deviation `std`.
struct Init {
  double constant = 0.0;
  double std = 0.0;
};

// What a module asks for.
struct ParameterSpec {
  std::string name;  // "layers.0.attn.qkv.weight"
  Shape shape;       // of this rank's share
  Init init{};
  Dtype dtype = Dtype::f32;  // of the value
  Quantization quantised{};  // kept as codes of the bf16 rounding, too
  bool keeps_value = true;   // else the codes are all that is kept
  int64_t padding = 0;       // last rows that no gradient reaches: zero, and never stored
  // Of a tensor that several tensor ranks share; share_of() sets them.
  Split split = Split::none;
  ShareOf share{};
  int64_t stored_rows = 0;        // of all these ranks, without padding, where they share its rows
  std::vector<int64_t> parts{};   // rows of fused parts (q, k, v), each of which is divided; empty: one part
  bool partial_gradient = false;  // each rank that shares the tensor computes a part of its gradient, which is the sum
  // Of a stack of experts' weights.
  ShareOf experts{};     // each of these ranks has whole matrices of it, which tensor ranks may share
  int64_t matrices = 1;  // of this rank
  int64_t sources = 1;   // ranks whose gradients are kept apart until join_sources(): [matrices, sources, ...]

  bool among_experts() const { return experts.ranks > 1; }
  bool is_copy() const { return split == Split::none && share.rank > 0; }  // of what the first tensor rank has
  int64_t gradient_rows() const { return shape[0] * sources; }
};

// Divides a tensor, whose shape, parts and padding are those of the whole, by rows of each part or by columns. Throws Error(internal) if
// the ranks do not get equal shares.
ParameterSpec share_of(ParameterSpec whole, Split split, ShareOf share);

// The same tensor as another of the ranks that share it has it.
ParameterSpec as_of(ParameterSpec own, int tensor_rank, int expert_rank);

// Stands before the memory of parameters while something else than the optimizer, a gather, writes it.
struct Gate {
  bool open = true;
  std::function<void()> pass;  // waits until it may be read, and opens
};

// What allocate() made of it. Forward reads value and codes through the calls here and in no other way.
class Parameter : public ParameterSpec {
 public:
  explicit Parameter(ParameterSpec spec) : ParameterSpec(std::move(spec)) {}

  const Tensor& value() const { return behind_gate(value_); }           // undefined if only codes are kept
  const QuantizedTensor& codes() const { return behind_gate(codes_); }  // of the shape as a matrix; undefined in high precision
  Leaf leaf{};                                                          // its gradient, if training
  void stand_behind(Gate* gate) { gate_ = gate; }                       // nullptr: behind none

  uint32_t number() const { return number_; }  // in its set
  bool decays() const { return shape.rank() >= 2; }
  // Of the tensor that all ranks together hold, as it is stored: without padding.
  Shape stored_shape() const;
  Var var() { return leaf.grad.defined() ? Var(value(), leaf) : Var(value()); }
  LinearWeight weight() { return {value(), codes(), leaf.grad.defined() ? &leaf : nullptr}; }

 private:
  friend class ParameterSet;
  template <class Memory>
  const Memory& behind_gate(const Memory& memory) const {
    if (gate_ && !gate_->open) gate_->pass();
    return memory;
  }

  uint32_t number_ = 0;
  Gate* gate_ = nullptr;
  Tensor value_;
  QuantizedTensor codes_;
};

// Consecutive rows of a parameter (elements of a vector): what is initialised, updated, measured and saved as one. Whole bands of 32 rows,
// or of a block where that is longer; only the last band of a parameter may be short. So no block and no partial norm is cut.
struct Part {
  Parameter* of;
  int64_t begin, end;  // rows

  // Runs of its rows without padding, [begin, end) of the parameter, that lie together in the stored tensor: where, [row, column].
  struct Slab {
    int64_t begin, end, row, column;
  };
  std::vector<Slab> slabs() const;

  Shape shape() const { return of->shape.with_dim0(end - begin); }
  int64_t stored_end() const { return std::clamp(of->shape[0] - of->padding, begin, end); }  // where its rows of padding begin
  int64_t first_element() const { return begin * of->shape.with_dim0(1).elements(); }
  Tensor of_rows(const Tensor& tensor) const { return tensor.slice(begin, end); }  // of one that has the parameter's shape
  Tensor gradient() const { return of_rows(of->leaf.grad); }
};

// State of a model that no gradient trains: whole on every rank, which all change it alike, 0 at first, and saved beside the parameters.
struct Buffer {
  std::string name;  // "layers.0.moe.expert_bias"
  Shape shape;
  Tensor value{};  // of the dtype of masters
};

// Where the parameters lie in one arena, in their order. One that has nothing there has no elements.
struct ArenaMap {
  struct Place {
    int64_t begin, elements;
  };
  Tensor memory;
  std::vector<Place> places;  // by parameter

  // Where row `row` of `rows` of a parameter begins; a row that begins a band.
  int64_t position(size_t parameter, int64_t row, int64_t rows) const {
    return places[parameter].begin + places[parameter].elements * row / rows;
  }
};

// How many elements a parameter takes of a gradient buffer, so that every view of fp32 begins at a multiple of 64 bytes.
int64_t gradient_elements(int64_t elements);

class ParameterSet {
 public:
  // The reference stays valid. Throws Error(internal) on a name that exists.
  Parameter& add(ParameterSpec spec);

  std::deque<Parameter>& all() { return parameters_; }
  const std::deque<Parameter>& all() const { return parameters_; }
  const Parameter* find(const std::string& name) const;
  Buffer& add_buffer(Buffer buffer);  // as add()
  std::deque<Buffer>& buffers() { return buffers_; }
  const std::deque<Buffer>& buffers() const { return buffers_; }
  int64_t elements() const;  // without padding between parameters

  // Memory for all parameters, masters and gradients being fp32 or fp64; gradients only if asked for. Values are not initialised.
  void allocate(Backend& device, Dtype masters, bool gradients);
  bool allocated() const { return device_ != nullptr; }
  Backend& device() const {
    require(allocated(), "the parameters are not allocated");
    return *device_;
  }
  Dtype master_dtype() const { return master_dtype_; }

  // One part for each parameter.
  std::vector<Part> whole_parts();

  // Masters. Some parameters have their value for one; for others there is a new tensor, which the caller keeps or drops.
  bool value_is_master(const Parameter& parameter) const;
  Tensor room_for_master(const Part& part) const;
  // Draws the initial master of a part: stream `init`, what = index of the parameter, counter = element index in the parameter.
  void draw_initial(const Part& part, uint64_t seed, const Tensor& master) const;
  // Value and codes from the master. For whoever writes a master and its rounding in one pass: where the rounding goes (undefined: the
  // value is the master; where no rounding is kept, a buffer that lives as long as the handle), and then the codes from it.
  void store(const Part& part, const Tensor& master);
  Tensor rounding_target(const Part& part) const;
  void quantise(const Part& part, const Tensor& rounding);
  void quantise_value(const Part& part);  // codes beside a value, from it

  // [1] i32: not 0 if a weight that was quantised held NaN or Inf, which some formats would hide. Until it is cleared.
  const Tensor& nonfinite() const { return nonfinite_; }
  void clear_nonfinite();

  // The arenas from which everything else about a weight follows: values, and codes that are the weight. Not copies that are codes.
  const std::vector<ArenaMap>& sources() const { return sources_; }

  // Gradient buffers. A buffer is one flat tensor with every parameter's gradient in it.
  Tensor gradients() const { return gradients_; }
  Tensor new_gradient_buffer() const;
  void use_gradient_buffer(const Tensor& buffer);  // later backward passes write there
  void reset_gradients();                          // the next contribution overwrites
  // Parameter `index`'s part of a tensor laid out as a gradient buffer, in its shape; with several sources it has all of their rows.
  Tensor view_of(const Tensor& arena, size_t index) const;
  ArenaMap gradient_map() const;  // of the buffer in use
  // Sums the gradients of a parameter in a buffer over their sources, in the order of an aligned binary tree: the first rows of its part.
  void join_sources(const Tensor& buffer, size_t index) const;

 private:
  void allocate_values();
  void allocate_codes(bool are_weights);

  Backend* device_ = nullptr;
  Dtype master_dtype_ = Dtype::f32;
  std::deque<Parameter> parameters_;
  std::deque<Buffer> buffers_;
  std::vector<int64_t> offsets_;  // in elements of a gradient buffer
  int64_t padded_elements_ = 0;
  std::vector<ArenaMap> sources_;
  Tensor gradients_;
  Tensor nonfinite_;  // [1] i32
};

// "layers.0.mlp.down.weight[3, 5] = nan": the first element that is NaN or Inf in something of the part's shape, by its row and column in
// the tensor as it is stored, which ranks may share; "" if there is none.
std::string nonfinite_text(const Part& part, const Tensor& values);
// The same of the value stored from this master, or of the rounding that codes are made from.
std::string nonfinite_weight(const Part& part, const Tensor& master);

}  // namespace mantissa
