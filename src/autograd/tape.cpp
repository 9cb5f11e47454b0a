#include "autograd/tape.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

thread_local Tape* current_tape = nullptr;
thread_local int running_backwards = 0;
thread_local const char* current_module = nullptr;

class RunningBackward {
 public:
  RunningBackward() { ++running_backwards; }
  ~RunningBackward() { --running_backwards; }
  RunningBackward(const RunningBackward&) = delete;
  RunningBackward& operator=(const RunningBackward&) = delete;
};

}  // namespace

ModuleScope::ModuleScope(const char* path) : outer_(std::exchange(current_module, path)), span_(Track::module, path) {}
ModuleScope::~ModuleScope() { current_module = outer_; }

Leaf::Target target_of(Leaf* leaf, const Tensor& weight) {
  if (leaf != nullptr) return leaf->target();
  return {.out = empty(weight.device(), stats_dtype(weight.dtype()), weight.shape()), .accumulate = false};
}

Tape::Scope::Scope(Tape* tape) : previous_(std::exchange(current_tape, tape)) {}
Tape::Scope::~Scope() { current_tape = previous_; }
Tape* Tape::current() { return current_tape; }
bool Tape::in_backward() { return running_backwards > 0; }

Var Tape::input(Tensor value) {
  Var var(std::move(value));
  var.slot_ = static_cast<int64_t>(gradients_.size());
  gradients_.emplace_back();
  return var;
}

Tensor Tape::take_gradient(const Var& input) {
  require(input.slot_ >= 0, "take_gradient: the variable is not an input of this tape");
  return std::exchange(gradients_[static_cast<size_t>(input.slot_)], {});
}

Var Tape::record(const char* op, Tensor value, std::initializer_list<Var> inputs, Backward backward, AddingBackward adding) {
  Node node{op, {}, 0, std::move(backward), std::move(adding), {}, current_module};
  for (const Var& input : inputs) {
    node.inputs.push_back(input.slot_);
    if (input.leaf_ == nullptr) continue;
    node.leaves.push_back(input.leaf_);
    ++input.leaf_->uses;
  }
  Var out = this->input(std::move(value));
  node.output = out.slot_;
  nodes_.push_back(std::move(node));
  return out;
}

void Tape::add_gradient(int64_t slot, const Tensor& gradient) {
  Tensor& sum = gradients_[static_cast<size_t>(slot)];
  if (!sum.defined()) {
    sum = gradient;
    return;
  }
  Tensor next = empty_like(sum);
  gradient.device().run(Add{.a = sum, .b = gradient, .out = next});
  sum = next;
}

std::vector<Tensor> Tape::run_backward(const Node& node, const Tensor& dy) {
  std::optional<ModuleScope> module;
  if (node.module != nullptr) module.emplace(node.module);
  if (node.backward) return node.backward(dy);
  const int64_t first = node.inputs[0];
  return node.adding(dy, first < 0 ? Tensor() : std::exchange(gradients_[static_cast<size_t>(first)], {}));
}

void Tape::backward(const Var& output, Tensor dy) {
  require(output.slot_ >= 0, "backward: the output does not depend on anything that wants a gradient");
  const Scope paused(nullptr);
  const RunningBackward running;
  const bool from_one = !dy.defined();
  if (!from_one) gradients_[static_cast<size_t>(output.slot_)] = std::move(dy);
  for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
    if (const Tensor gradient = std::exchange(gradients_[static_cast<size_t>(node->output)], {});
        gradient.defined() || (from_one && node->output == output.slot_)) {
      const std::vector<Tensor> contributions = run_backward(*node, gradient);
      require(contributions.size() == node->inputs.size(), node->op, ": backward returned ", contributions.size(), " gradients for ",
              node->inputs.size(), " inputs");
      for (size_t i = 0; i < contributions.size(); ++i) {
        if (node->inputs[i] >= 0 && contributions[i].defined()) add_gradient(node->inputs[i], contributions[i]);
      }
    }
    node->backward = nullptr, node->adding = nullptr;
    for (Leaf* leaf : node->leaves) {  // a node that no gradient reaches has contributed, too
      if (--leaf->uses == 0 && leaf->ready) leaf->ready();
    }
  }
  nodes_.clear();
}

bool recording(std::initializer_list<Var> inputs) {
  return current_tape != nullptr && std::any_of(inputs.begin(), inputs.end(), [](const Var& input) { return input.wants_gradient(); });
}

Var record(const char* op, Tensor value, std::initializer_list<Var> inputs, Tape::Backward backward) {
  if (!recording(inputs)) return Var(std::move(value));
  return current_tape->record(op, std::move(value), inputs, std::move(backward));
}

Var record(const char* op, Tensor value, std::initializer_list<Var> inputs, Tape::AddingBackward adding) {
  if (!recording(inputs)) return Var(std::move(value));
  return current_tape->record(op, std::move(value), inputs, {}, std::move(adding));
}

Var rebuilt_on_demand(Var var, std::function<Tensor()> rebuild) {
  var.rebuild_ = std::move(rebuild);
  return var;
}

Var recompute(const Var& x, std::function<Var(const Var&)> segment) {
  require(current_tape == nullptr || x.wants_gradient(),
          "recompute: the input of a segment must want a gradient, otherwise its parameters would get none");
  Tensor value;
  {
    const Tape::Scope paused(nullptr);
    value = segment(Var(x.value())).value();
  }
  return record("recompute", value, {x}, [input = x.value(), segment = std::move(segment)](const Tensor& dy) {
    Tape tape;
    const Tape::Scope scope(&tape);
    const Var again = tape.input(input), out = [&] {
      const TraceSpan span(Track::pass, "recompute");
      return segment(again);
    }();
    tape.backward(out, dy);
    return std::vector<Tensor>{tape.take_gradient(again)};
  });
}

}  // namespace mantissa
