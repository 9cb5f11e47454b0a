#include <algorithm>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "ops/linear.h"
#include "ops/ops.h"

namespace mantissa {
namespace {

// A chunk of rows, whose columns the ranks may share.
struct LossRows {
  Tensor logits, targets, losses;
  Tensor dlogits;            // undefined: no gradient is wanted
  Tensor cross_entropies{};  // undefined: those beside the teacher are not wanted
};

// Ranks announce the sums of their own columns, [ranks, rows, sums], with which all know the loss.
Tensor shared_sums(const LossRows& rows, int64_t sums, const TensorParallel& tp) {
  return empty(rows.logits.device(), rows.losses.dtype(), {shared(tp) ? tp.group.size() : 1, rows.logits.dim(0), sums});
}
Tensor own_sums(const Tensor& sums, const TensorParallel& tp) {
  const int64_t rank = shared(tp) ? tp.group.rank() : 0;
  return sums.slice(rank, rank + 1).view({sums.dim(1), sums.dim(2)});
}
int64_t first_column(const LossRows& rows, const TensorParallel& tp) { return shared(tp) ? rows.logits.dim(1) * tp.group.rank() : 0; }

void loss_of_rows(const LossRows& rows, const LossOptions& options, const TensorParallel& tp, double scale) {
  Backend& device = rows.logits.device();
  const auto& [logits, targets, losses, dlogits, unused] = rows;
  if (!shared(tp)) {
    return device.run(
        CrossEntropy{.logits = logits, .targets = targets, .loss = losses, .vocab = options.vocab, .scale = scale, .dlogits = dlogits});
  }
  const int64_t first = first_column(rows, tp);
  const Tensor sums = shared_sums(rows, 2, tp), own = own_sums(sums, tp);
  device.run(CrossEntropyShare{.logits = logits, .targets = targets, .sums = own, .first = first, .vocab = options.vocab});
  gather_parts(tp, sums, own.bytes());
  device.run(CrossEntropyOfShares{.logits = logits,
                                  .targets = targets,
                                  .sums = sums,
                                  .loss = losses,
                                  .first = first,
                                  .vocab = options.vocab,
                                  .scale = scale,
                                  .dlogits = dlogits});
}

// Likewise, with the teacher's logits of the same columns. The gradient may take the place of the logits, so cross entropies come first.
void loss_of_taught_rows(const LossRows& rows, const Tensor& teacher, const LossOptions& options, const TensorParallel& tp, double scale) {
  Backend& device = rows.logits.device();
  const auto& [logits, targets, losses, dlogits, cross_entropies] = rows;
  if (cross_entropies.defined())
    loss_of_rows({.logits = logits, .targets = targets, .losses = cross_entropies, .dlogits = {}}, options, tp, 1.0);
  const int64_t first = first_column(rows, tp);
  const double temperature = options.teacher->temperature;
  const Tensor sums = shared_sums(rows, DistillationShare::kSums, tp), own = own_sums(sums, tp);
  device.run(DistillationShare{.logits = logits,
                               .teacher = teacher,
                               .targets = targets,
                               .sums = own,
                               .first = first,
                               .vocab = options.vocab,
                               .temperature = temperature});
  if (shared(tp)) gather_parts(tp, sums, own.bytes());
  device.run(DistillationOfShares{.logits = logits,
                                  .teacher = teacher,
                                  .targets = targets,
                                  .sums = sums,
                                  .loss = losses,
                                  .first = first,
                                  .vocab = options.vocab,
                                  .temperature = temperature,
                                  .weight = options.teacher->share,
                                  .scale = scale,
                                  .dlogits = dlogits});
}

// Computes the teacher's logits of a chunk of rows.
class TeacherLogits {
 public:
  TeacherLogits(const LossTeacher& teacher, const TensorParallel& tp)
      : gemms_(teacher.weight, {}), x_(by_tokens(tp) ? gemms_.gathered_input(tp, teacher.x, false).high : teacher.x) {}

  Tensor of_rows(int64_t begin, int64_t end, const Tensor& like) const {
    const Tensor logits = empty_like(like);
    gemms_.fprop({.high = x_.slice(begin, end)}, {}, logits);
    return logits;
  }

 private:
  LinearGemms gemms_;
  Tensor x_;
};

}  // namespace

Var cross_entropy(const Var& x, const LinearWeight& weight, const Tensor& targets, const LossOptions& options,
                  const LinearOperands& operands, const TensorParallel& tp) {
  require(options.target_count > 0, "cross_entropy: no targets to average over");
  require(tp.split != Split::row_parallel, "cross_entropy: the weight must not be row-parallel");
  require_own_rows("cross_entropy", tp, x.value());
  const Tensor& value = x.value();
  std::optional<TeacherLogits> teacher;
  if (options.teacher) {
    require_own_rows("cross_entropy: teacher", tp, options.teacher->x);
    require(options.teacher->weight.shape()[0] == weight.shape()[0], "cross_entropy: the teacher has another vocabulary");
    teacher.emplace(*options.teacher, tp);
  }
  const int64_t rows = targets.dim(0), columns = weight.shape()[0], grain = std::max<int64_t>(64, operands.block);
  const int64_t step = std::max(grain, options.chunk_elements / (teacher ? 2 * columns : columns) / grain * grain);
  const double scale = 1.0 / static_cast<double>(options.target_count);
  const bool training = recording({x, weight.var()}), wants_dx = training && x.wants_gradient();
  const bool wgrad = training && weight.leaf != nullptr;  // which reads x
  const LinearGemms gemms(weight, operands);
  const LinearInput input = by_tokens(tp) ? gemms.gathered_input(tp, value, wgrad) : LinearInput{.high = value};
  require(!input.columns.defined() || !input.columns.how.rowwise(), "cross_entropy: a chunk of rows cannot be cut from transposed columns");
  const Tensor& entropies = options.row_cross_entropies;
  Tensor losses = options.row_losses;
  if (!losses.defined()) losses = empty(value.device(), stats_dtype(value.dtype()), {rows});
  Tensor dx;
  if (wants_dx) dx = empty(value.device(), shared(tp) ? losses.dtype() : value.dtype(), {rows, value.dim(1)});
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t end = std::min(rows, begin + step);
    const LinearGemms part = gemms.from_token(begin);
    // Rows of what fprop reads. Without a gather they are quantized here, where only a chunk of them exists. fprop reads x and, if
    // gradients are wanted, wgrad once more; it is quantized once.
    LinearInput chunk;
    if (input.codes.defined()) {
      const int64_t whole = std::min(input.codes.dim(0), round_up(end, input.codes.how.block()));
      chunk.codes = slice(input.codes, begin, whole);
      if (input.columns.defined()) chunk.columns = slice(input.columns, begin, whole);
      if (input.high.defined()) chunk.high = input.high.slice(begin, end);
    } else {
      chunk = part.input(input.high.slice(begin, end), wgrad);
    }
    const Tensor logits = empty(value.device(), options.logits_dtype, {end - begin, columns});
    part.fprop(chunk, {}, logits);
    const LossRows of_chunk{.logits = logits,
                            .targets = targets.slice(begin, end),
                            .losses = losses.slice(begin, end),
                            .dlogits = training ? logits : Tensor(),
                            .cross_entropies = entropies.defined() ? entropies.slice(begin, end) : Tensor()};
    teacher ? loss_of_taught_rows(of_chunk, teacher->of_rows(begin, end, logits), options, tp, scale)
            : loss_of_rows(of_chunk, options, tp, scale);
    if (!training) continue;
    part.backward(part.kept(chunk), converted(logits, value.dtype()), wants_dx ? dx.slice(begin, end) : Tensor());
  }
  if (wants_dx && shared(tp)) dx = summed(tp, dx, {}, value.dtype());
  const Tensor loss = empty(losses.device(), Dtype::f64, {1});
  losses.device().run(Sum{.x = losses, .out = loss, .factor = scale});
  return record("cross_entropy", loss, {x, weight.var()}, [dx](const Tensor& dy) {
    require(!dy.defined(), "cross_entropy: backward must start at the loss");
    return std::vector<Tensor>{dx, {}};
  });
}

}  // namespace mantissa
