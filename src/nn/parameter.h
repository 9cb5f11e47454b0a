// The parameters of a model, by path. Modules add theirs to a ParameterSet when they are built; allocate() then lays them out in arenas,
// one allocation each for values by dtype, codes, scales and fp32 gradients. What forward reads follows from an fp32 master, which belongs
// to whoever updates the parameter: the value is the master (fp32) or its rounding to bf16, and the codes are those of that rounding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "mantissa/precision/plan.h"
#include "mantissa/tensor/sharding.h"
#include "ops/ops.h"

namespace mantissa {

// Allocates many tensors at once.

// Returns how many elements a tensor takes of an arena: each begins at a multiple of 64 bytes, whatever its dtype.
inline int64_t arena_elements(int64_t elements) { return round_up(elements, 64); }

// Reserves every tensor first; then allocates the memory, zeroes it, and cuts it in the same order.
class Arena {
 public:
  explicit Arena(Dtype dtype) : dtype_(dtype) {}
  void reserve(const Shape& shape) { size_ += arena_elements(shape.elements()); }
  void allocate(Backend& device) { memory_ = size_ > 0 ? zeros(device, dtype_, {size_}) : Tensor(); }
  Tensor take(const Shape& shape) {
    const int64_t begin = std::exchange(next_, next_ + arena_elements(shape.elements()));
    return memory_.slice(begin, begin + shape.elements()).view(shape);
  }
  const Tensor& memory() const { return memory_; }  // undefined if nothing was reserved
  int64_t taken() const { return next_; }           // elements, where the next tensor begins

 private:
  Dtype dtype_;
  int64_t size_ = 0, next_ = 0;
  Tensor memory_;
};

// Initial values: `constant` plus normal noise of standard deviation `std`.
struct Init {
  double constant = 0.0;
  double std = 0.0;
};

// Specifies a parameter that a module asks for.
struct ParameterSpec {
  std::string name;  // "layers.0.attn.qkv.weight"
  Shape shape;       // shape of this rank's share
  Init init{};
  Dtype dtype = Dtype::f32;       // dtype of the value
  Quantization quantized{};       // kept as codes of the bf16 rounding, too
  bool keeps_value = true;        // else the codes are all that is kept
  int64_t padding = 0;            // last rows that no gradient reaches: zero, and never stored
  Sharding sharding{};            // sharing of the tensor whose share this is; sharded() sets it
  int64_t stored_rows = 0;        // rows of all tensor ranks, without padding, where they share them
  std::vector<int64_t> parts{};   // rows of fused parts (q, k, v) of each matrix, which are divided; empty: one part
  bool partial_gradient = false;  // each tensor rank computes a part of the gradient, which is the sum
  int64_t matrices = 1;           // matrices of a grouped weight
  ModuleTraining training{};      // one that is frozen has no gradient
  int64_t sources = 1;            // ranks whose gradients are kept apart until join_sources(): [matrices, sources, ...]

  bool among_experts() const { return sharding.ranks.expert > 1; }
  bool trained() const { return !training.frozen(); }
  bool by_muon() const { return trained() && training.muon && shape.rank() == 2; }  // else by AdamW
  int64_t moments() const { return !trained() ? 0 : by_muon() ? 1 : 2; }            // each with as many elements
  int64_t gradient_rows() const { return shape[0] * sources; }
};

// Returns one rank's share of a tensor, whose shape, parts, matrices and padding are those of the whole: some of its matrices, and of these
// rows of each part or columns. Throws Error(internal) if the ranks do not get equal shares.
ParameterSpec sharded(ParameterSpec whole, const Sharding& by);

// Returns the spec of the same tensor on another of the ranks that share it.
ParameterSpec as_of(ParameterSpec own, int tensor_rank, int expert_rank);

// Guards the memory of parameters while a gather, not the optimizer, writes it.
struct ReadyEvent {
  bool ready = true;
  std::function<void()> wait;  // waits until it may be read, and opens
};

// A parameter as allocate() made it. Forward reads value and codes through these calls only.
class Parameter : public ParameterSpec {
 public:
  explicit Parameter(ParameterSpec spec) : ParameterSpec(std::move(spec)) {}

  const Tensor& value() const { return when_ready(value_); }           // undefined if only codes are kept
  const QuantizedTensor& codes() const { return when_ready(codes_); }  // shaped as a matrix; undefined in high precision
  Leaf leaf{};                                                         // its gradient, if it is trained
  void wait_for(ReadyEvent* event) { ready_ = event; }                 // nullptr: behind none

  uint32_t number() const { return number_; }  // index in its set
  bool decays() const { return shape.rank() >= 2; }
  // Returns the shape of the tensor that all ranks hold together, as it is stored: without padding.
  Shape stored_shape() const;
  Var var() { return leaf.grad.defined() ? Var(value(), leaf) : Var(value()); }
  LinearWeight weight() { return {value(), codes(), leaf.grad.defined() ? &leaf : nullptr, {number_, sharding, parts}}; }

 private:
  friend class ParameterSet;
  template <class Memory>
  const Memory& when_ready(const Memory& memory) const {
    if (ready_ && !ready_->ready) ready_->wait();
    return memory;
  }

  uint32_t number_ = 0;
  ReadyEvent* ready_ = nullptr;
  Tensor value_;
  QuantizedTensor codes_;
};

// Consecutive rows of a parameter (elements of a vector) that are initialized, updated, measured and saved as one. A shard has whole row
// blocks of 32 rows, or of a block where that is longer; only the last row block of a parameter may be short. So no block and no partial
// norm is cut.
struct ParameterShard {
  Parameter* of;
  int64_t begin, end;  // rows

  // A run of its rows without padding, [begin, end) of the parameter, that is contiguous in the stored tensor, where it begins at [row,
  // column].
  struct Chunk {
    int64_t begin, end, row, column;
  };
  std::vector<Chunk> chunks() const;

  Shape shape() const { return of->shape.with_dim0(end - begin); }
  // Returns how many partial norms it has: one for each 32 rows of a gradient.
  int64_t norms() const { return of->trained() ? ceil_div(end - begin, 32) : 0; }
  int64_t stored_end() const { return std::clamp(of->shape[0] - of->padding, begin, end); }  // where its rows of padding begin
  int64_t first_element() const { return begin * of->shape.with_dim0(1).elements(); }
  Tensor of_rows(const Tensor& tensor) const { return tensor.slice(begin, end); }  // rows of a tensor that has the parameter's shape
  Tensor gradient() const { return of_rows(of->leaf.grad); }
};

// State of a model that no gradient trains. It is whole on every rank, starts at 0, is changed alike by all ranks, and is saved beside the
// parameters.
struct Buffer {
  std::string name;  // "layers.0.moe.expert_bias"
  Shape shape;
  Tensor value{};  // in the dtype of masters
};

// Maps the parameters in one arena, in their order. A parameter without memory there has no elements.
struct ArenaMap {
  struct Place {
    int64_t begin, elements;
    int64_t height = 1;  // rows of the parameter that a row here is of: those of a block for scales
  };
  Tensor memory;
  std::vector<Place> places;  // by parameter

  // Returns where row `row` of `rows` of a parameter begins, or its end; the row must begin a row block.
  int64_t position(size_t parameter, int64_t row, int64_t rows) const {
    const auto& [begin, elements, height] = places[parameter];
    return begin + elements / ceil_div(rows, height) * ceil_div(row, height);
  }
};

// Returns how many elements a parameter takes of a gradient buffer, so that every view of fp32 begins at a multiple of 64 bytes.
int64_t gradient_elements(int64_t elements);

class ParameterSet {
 public:
  // Adds a parameter; the reference stays valid. Throws Error(internal) on a name that exists.
  Parameter& add(ParameterSpec spec);

  std::deque<Parameter>& all() { return parameters_; }
  const std::deque<Parameter>& all() const { return parameters_; }
  const Parameter* find(const std::string& name) const;
  Buffer& add_buffer(Buffer buffer);  // like add()
  std::deque<Buffer>& buffers() { return buffers_; }
  const std::deque<Buffer>& buffers() const { return buffers_; }
  int64_t elements() const;  // without padding between parameters

  // Allocates memory for all parameters, with fp32 or fp64 masters and gradients, the latter only if asked for. Values are not initialized.
  void allocate(Backend& device, Dtype masters, bool gradients);
  bool allocated() const { return device_ != nullptr; }
  Backend& device() const {
    require(allocated(), "the parameters are not allocated");
    return *device_;
  }
  Dtype master_dtype() const { return master_dtype_; }

  // Returns one shard for each parameter.
  std::vector<ParameterShard> whole_shards();

  // Some parameters use their value as master; room_for_master() returns a new tensor for others, which the caller keeps or drops.
  bool value_is_master(const Parameter& parameter) const;
  Tensor room_for_master(const ParameterShard& shard) const;
  // Draws the initial master of a shard: stream `init`, what = index of the parameter, counter = element index in the parameter.
  void draw_initial(const ParameterShard& shard, uint64_t seed, const Tensor& master) const;
  // store() makes value and codes from the master. A caller that writes a master and its rounding in one pass asks rounding_target() where
  // the rounding goes (undefined: the value is the master; a buffer that lives as long as the handle where no rounding is kept), then
  // quantize() makes the codes from it.
  void store(const ParameterShard& shard, const Tensor& master);
  Tensor rounding_target(const ParameterShard& shard) const;
  void quantize(const ParameterShard& shard, const Tensor& rounding);
  void quantize_value(const ParameterShard& shard);  // codes beside a value, from it

  // [1] i32, not 0 if a quantized weight held NaN or Inf, which some formats would hide. Stays set until it is cleared.
  const Tensor& nonfinite() const { return nonfinite_; }
  void clear_nonfinite();

  // Returns the arenas that define each weight: values, and codes that are the weight. Codes that are copies are not among them.
  const std::vector<ArenaMap>& sources() const { return sources_; }

  // A gradient buffer is one flat tensor with the gradient of every trained parameter in it.
  Tensor gradients() const { return gradients_; }
  Tensor new_gradient_buffer() const;
  void use_gradient_buffer(const Tensor& buffer);  // later backward passes write there
  void reset_gradients();                          // the next contribution overwrites
  // Returns the gradient of parameter `index` in a tensor laid out as a gradient buffer, in the parameter's shape; with several sources it
  // has the rows of all.
  Tensor view_of(const Tensor& arena, size_t index) const;
  ArenaMap gradient_map() const;  // map of the buffer in use
  // Sums the gradients of a parameter in a buffer over their sources, in the order of an aligned binary tree, into the rows of the first
  // source.
  void join_sources(const Tensor& buffer, size_t index) const;

 private:
  void allocate_codes(bool are_weights);

  Backend* device_ = nullptr;
  Dtype master_dtype_ = Dtype::f32;
  std::deque<Parameter> parameters_;
  std::unordered_map<std::string, const Parameter*> by_name_;
  std::deque<Buffer> buffers_;
  std::vector<int64_t> offsets_;  // in elements of a gradient buffer
  int64_t padded_elements_ = 0;
  std::vector<ArenaMap> sources_;
  Tensor gradients_;
  Tensor nonfinite_;  // [1] i32
};

// Returns "layers.0.mlp.down.weight[3, 5] = nan" for the first element of `values`, of the shard's shape, that is NaN or Inf, by row and
// column in the stored tensor, which ranks may share; "" if there is none.
std::string nonfinite_text(const ParameterShard& shard, const Tensor& values);
// Like nonfinite_text(), for values of a master that were read for elements of the shard from `first` on, as forward will read them:
// rounded to bf16 where it does.
std::string nonfinite_read(const ParameterShard& shard, int64_t first, std::span<const float> values);
// Checks the value stored from this master, or the rounding that codes are made from.
std::string nonfinite_weight(const ParameterShard& shard, const Tensor& master);

}  // namespace mantissa
