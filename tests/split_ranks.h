// An operation on ranks that share its weight, as threads: inputs of a rank are cut from whole tensors, and its results are put together
// again.
#pragma once

#include <gmock/gmock.h>

#include <deque>
#include <map>
#include <optional>

#include "mantissa/backend/functions.h"
#include "ops/ops.h"
#include "ops/quantization_observer.h"
#include "testing.h"
#include "thread_ranks.h"

namespace mantissa::test {

// The part of a tensor that a rank has: all; an equal share of its rows or columns; its share of tokens.
enum class Cut { none, rows, columns, tokens };

inline RowRange range_of(Cut cut, Shape shape, int rank, int ranks) {
  if (cut == Cut::none) return {0, shape[0]};
  return share_of(cut == Cut::columns ? shape[-1] : shape[0], rank, ranks);
}

// Elements of a matrix or a vector; columns of a vector are its elements.
inline std::vector<double> cut_of(const std::vector<double>& whole, Shape shape, Cut cut, int rank, int ranks) {
  const RowRange own = range_of(cut, shape, rank, ranks);
  const int64_t columns = shape[-1];
  if (cut != Cut::columns) {
    const int64_t width = shape.with_dim0(1).elements();
    return {whole.begin() + own.begin * width, whole.begin() + own.end * width};
  }
  std::vector<double> out;
  for (int64_t row = 0; row < shape.elements() / columns; ++row) {
    out.insert(out.end(), whole.begin() + row * columns + own.begin, whole.begin() + row * columns + own.end);
  }
  return out;
}

inline Tensor cut_of(Backend& device, const Tensor& whole, Cut cut, int rank, int ranks) {
  const RowRange own = range_of(cut, whole.shape(), rank, ranks);
  const Shape shape =
      cut == Cut::columns && whole.shape().rank() == 2 ? Shape{whole.dim(0), own.size()} : whole.shape().with_dim0(own.size());
  return tensor_of(device, whole.dtype(), shape, cut_of(values(whole), whole.shape(), cut, rank, ranks));
}

struct SplitInput {
  Tensor whole;
  Cut cut = Cut::none;
  bool parameter = false;
  bool partial = false;  // its gradient is to be summed over the ranks; else that of an uncut one is the same on all of them
  int64_t parts = 1;     // with Cut::rows: of each of so many equal parts

  // Rows of each part lie together, as columns of a matrix with a row for each part do.
  Cut cut_of_parts() const { return parts > 1 ? Cut::columns : cut; }
  Shape shape_of_parts() const { return parts > 1 ? Shape{parts, whole.elements() / parts} : whole.shape(); }
};

struct SplitOperation {
  std::vector<SplitInput> inputs;
  Cut output;
  std::function<Var(const std::vector<Var>&, const TensorParallel&)> run;
  TensorParallel tp;  // without the group
};

// Codes and scales of the operands that a run quantizes.
using SeenCodes = std::map<OperandRole, std::pair<std::vector<uint8_t>, std::vector<uint8_t>>>;

// Results that are whole again.
struct SplitResult {
  Tensor y;
  std::vector<Tensor> gradients;
  std::vector<Traffic> sent;     // by rank
  std::vector<SeenCodes> codes;  // by rank, if asked for
};

// Puts together what the ranks bring, one after the other.
class Joined {
 public:
  Joined(Shape shape, Dtype dtype, Cut cut, bool partial = false)
      : shape_(shape), dtype_(dtype), cut_(cut), partial_(partial), values_(static_cast<size_t>(shape.elements())) {}

  void add(const Tensor& piece, int rank, int ranks) {
    const std::vector<double> from = values(piece);
    if (cut_ == Cut::none && !partial_) {
      if (rank == 0) values_ = from;
      EXPECT_EQ(from, values_) << "rank " << rank << " has other bits than rank 0";
      return;
    }
    std::vector<double> at(values_.size());  // where each element belongs
    for (size_t i = 0; i < at.size(); ++i) at[i] = static_cast<double>(i);
    at = cut_of(at, shape_, cut_, rank, ranks);
    ASSERT_EQ(at.size(), from.size()) << "rank " << rank << " has " << piece.shape() << " of " << shape_;
    for (size_t i = 0; i < at.size(); ++i) values_[static_cast<size_t>(at[i])] += from[i];
  }
  Tensor tensor(Backend& device) const { return tensor_of(device, dtype_, shape_, values_); }

 private:
  Shape shape_;
  Dtype dtype_;
  Cut cut_;
  bool partial_;
  std::vector<double> values_;
};

struct RankResult {
  std::unique_ptr<Backend> device;
  Tensor y;
  std::vector<Tensor> gradients;
  Traffic sent;
  SeenCodes codes;
};

enum class Watch { results, gradients, codes };  // each with those before

// dy is the whole one; where it is undefined, backward starts from the loss.
inline RankResult run_rank(const SplitOperation& operation, const Communicator& group, const char* backend, Watch watch, const Tensor& dy) {
  RankResult out{make_backend(backend), {}, {}, {}, {}};
  const bool gradients = watch != Watch::results;
  std::optional<ObserverScope> observer;
  if (watch == Watch::codes) {
    observer.emplace([&](const QuantizedOperand& operand) {
      const QuantizedTensor codes = slice(operand.codes, 0, operand.x.dim(0));
      out.codes[operand.role] = {to_host<uint8_t>(codes.codes), to_host<uint8_t>(codes.scales)};
    });
  }
  TensorParallel tp = operation.tp;
  tp.group = group;
  std::deque<Leaf> leaves;
  std::vector<Var> vars;
  Tape tape;
  const Tape::Scope scope(gradients ? &tape : nullptr);
  for (const SplitInput& input : operation.inputs) {
    const Tensor cut = cut_of(*out.device, input.whole.view(input.shape_of_parts()), input.cut_of_parts(), group.rank(), group.size());
    const Tensor own = input.parts > 1 ? cut.view(input.whole.shape().with_dim0(input.whole.dim(0) / group.size())) : cut;
    Leaf& leaf = leaves.emplace_back();
    if (input.parameter) leaf.grad = empty(*out.device, stats_dtype(own.dtype()), own.shape());
    vars.push_back(!gradients ? Var(own) : input.parameter ? Var(own, leaf) : tape.input(own));
  }
  const Var y = operation.run(vars, tp);
  out.y = y.value();
  if (gradients) tape.backward(y, dy.defined() ? cut_of(*out.device, dy, operation.output, group.rank(), group.size()) : Tensor());
  for (size_t i = 0; gradients && i < vars.size(); ++i) {
    out.gradients.push_back(operation.inputs[i].parameter ? leaves[i].grad : tape.take_gradient(vars[i]));
  }
  out.sent = group.traffic();
  return out;
}

inline SplitResult run_split(const SplitOperation& operation, int ranks, Backend& device, Shape y_shape, Watch watch = Watch::results,
                             const Tensor& dy = {}) {
  std::vector<RankResult> of(static_cast<size_t>(ranks));
  EXPECT_THAT(run_ranks(ranks,
                        [&](const Communicator& group) {
                          of[static_cast<size_t>(group.rank())] = run_rank(operation, group, device.name(), watch, dy);
                        }),
              ::testing::Each(::testing::IsEmpty()));
  SplitResult out;
  if (::testing::Test::HasFailure()) return out;
  Joined y(y_shape, of[0].y.dtype(), operation.output);
  for (int r = 0; r < ranks; ++r) y.add(of[static_cast<size_t>(r)].y, r, ranks);
  out.y = y.tensor(device);
  for (size_t i = 0; watch != Watch::results && i < operation.inputs.size(); ++i) {
    const SplitInput& input = operation.inputs[i];
    Joined gradient(input.shape_of_parts(), of[0].gradients[i].dtype(), input.cut_of_parts(), input.partial);
    for (int r = 0; r < ranks; ++r) gradient.add(of[static_cast<size_t>(r)].gradients[i], r, ranks);
    out.gradients.push_back(gradient.tensor(device).view(input.whole.shape()));
  }
  for (RankResult& rank : of) out.sent.push_back(rank.sent), out.codes.push_back(std::move(rank.codes));
  return out;
}

}  // namespace mantissa::test
