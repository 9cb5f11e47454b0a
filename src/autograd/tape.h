// Reverse-mode differentiation. A tape is a vector of nodes in execution order; backward is a reverse loop that frees saved tensors as it
// goes. The current tape is an explicit, nestable, thread-local scope: recompute opens one inside backward, and without one operations only
// compute.
//
// Two kinds of inputs get gradients. A parameter is a Leaf: operations add into its buffer themselves, so a GEMM accumulates in place.
// Everything else is an activation: backward functions return its gradient, and the tape sums out of place, because an operation may hand
// one tensor to several inputs.
#pragma once

#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#include "mantissa/backend/backend.h"
#include "mantissa/base/trace.h"

namespace mantissa {

// Collects a parameter's gradient. The first contribution after reset() overwrites, so buffers are never zeroed.
struct Leaf {
  Tensor grad;  // stats dtype, shape of the parameter
  bool written = false;
  int uses = 0;                   // operations on a tape that still may contribute
  std::function<void()> ready{};  // if set, backward calls it when the last operation of its tape has added

  struct Target {
    Tensor out;
    bool accumulate;
  };
  Target target() { return {grad, std::exchange(written, true)}; }
  void reset() { written = false, uses = 0; }
};

// Returns where the gradient of a weight is added by a kernel that computes it in any case. Without a leaf, for a weight that is not
// trained, it goes nowhere.
Leaf::Target target_of(Leaf* leaf, const Tensor& weight);

// A tensor on the tape.
class Var {
 public:
  Var() = default;
  explicit Var(Tensor value) : value_(std::move(value)) {}                   // a constant
  Var(Tensor value, Leaf& leaf) : value_(std::move(value)), leaf_(&leaf) {}  // a parameter

  const Tensor& value() const { return value_; }
  Leaf* leaf() const { return leaf_; }
  // Returns the leaf of a weight that an operation can only train. Throws Error(internal) for a constant.
  Leaf& trained_leaf(const char* op) const {
    require(leaf_ != nullptr, op, ": the weight must be a parameter when gradients are recorded");
    return *leaf_;
  }
  bool rebuilt() const { return rebuild_ != nullptr; }  // see rebuilt_on_demand()
  bool wants_gradient() const { return leaf_ != nullptr || slot_ >= 0; }

 private:
  friend class Tape;
  friend class Saved;
  friend Var rebuilt_on_demand(Var var, std::function<Tensor()> rebuild);
  Tensor value_;
  Leaf* leaf_ = nullptr;
  int64_t slot_ = -1;                // activation gradient index on the tape that recorded it
  std::function<Tensor()> rebuild_;  // set: save() keeps this instead of the value
};

// Keeps what backward needs of a forward value: the tensor, or the means to compute it again (selective recompute).
class Saved {
 public:
  explicit Saved(const Var& var) : tensor_(var.rebuild_ ? Tensor() : var.value_), rebuild_(var.rebuild_) {}
  Tensor get() const { return rebuild_ ? rebuild_() : tensor_; }

 private:
  Tensor tensor_;
  std::function<Tensor()> rebuild_;
};

// Names the module whose operations this thread runs until the end of the block, on time lines (base/trace.h). Operations that are recorded
// keep the name, which must outlive their tape, and backward names it again.
class ModuleScope {
 public:
  explicit ModuleScope(const std::string& path) : ModuleScope(path.c_str()) {}
  explicit ModuleScope(const char* path);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  const char* outer_;
  TraceSpan span_;
};

class Tape {
 public:
  // Returns one gradient per input of the node: undefined for leaves and for inputs that want none. dy is undefined for the output that
  // backward() started from without a gradient of its own, and stands for 1.
  using Backward = std::function<std::vector<Tensor>(const Tensor& dy)>;
  // Backward of an operation whose kernel adds to `other`, the gradient of its first input that those give that were recorded later, if
  // any: the first gradient that it returns is the sum.
  using AddingBackward = std::function<std::vector<Tensor>(const Tensor& dy, const Tensor& other)>;

  class Scope {  // makes a tape the current one of this thread until the end of the block; nullptr pauses recording
   public:
    explicit Scope(Tape* tape);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Tape* previous_;
  };
  static Tape* current();

  Var input(Tensor value);                 // an activation whose gradient is wanted after backward
  Tensor take_gradient(const Var& input);  // moves it out; undefined if nothing reached it
  void backward(const Var& output, Tensor dy = {});
  static bool in_backward();  // some backward() runs on this thread, so forward code that runs now is repeated
  size_t nodes() const { return nodes_.size(); }

  // See the free function record().
  Var record(const char* op, Tensor value, std::initializer_list<Var> inputs, Backward backward, AddingBackward adding = {});

 private:
  struct Node {
    const char* op;
    std::vector<int64_t> inputs;  // slots, -1: wants none
    int64_t output;
    Backward backward;  // null: adding is there
    AddingBackward adding;
    std::vector<Leaf*> leaves;
    const char* module;  // that recorded it; null: none
  };
  std::vector<Tensor> run_backward(const Node& node, const Tensor& dy);
  void add_gradient(int64_t slot, const Tensor& gradient);

  std::vector<Node> nodes_;
  std::vector<Tensor> gradients_;  // by slot; only what is still to be used
};

// Returns true if an operation on these inputs must save what its backward needs.
bool recording(std::initializer_list<Var> inputs);

// Returns the result of an operation as a Var: on the current tape if recording(inputs), else as a constant.
Var record(const char* op, Tensor value, std::initializer_list<Var> inputs, Tape::Backward backward);
Var record(const char* op, Tensor value, std::initializer_list<Var> inputs, Tape::AddingBackward adding);

// Returns the same value; an operation that saves it keeps `rebuild` in its place and calls it in backward.
Var rebuilt_on_demand(Var var, std::function<Tensor()> rebuild);

// Runs `segment` without recording and keeps only x; backward records it again on a tape of its own (Chen et al. 2016).
Var recompute(const Var& x, std::function<Var(const Var&)> segment);

}  // namespace mantissa
