#include "mantissa/backend/functions.h"
#include "ops/exchange.h"
#include "ops/ops.h"

namespace mantissa {

namespace {

Var record_sum(const Tensor& sum, const Var& a, const Var& b) {
  return record("add", sum, {a, b}, [](const Tensor& dy) { return std::vector<Tensor>{dy, dy}; });
}

}  // namespace

Var add(const Var& a, const Var& b) {
  const Tensor out = empty_like(a.value());
  out.device().run(Add{.a = a.value(), .b = b.value(), .out = out});
  return record_sum(out, a, b);
}

Var convert(const Var& x, Dtype dtype) {
  const Dtype before = x.value().dtype();
  if (before == dtype) return x;
  return record("convert", converted(x.value(), dtype), {x},
                [before](const Tensor& dy) { return std::vector<Tensor>{converted(dy, before)}; });
}

namespace {

// Returns zeros for rows that another rank has.
Tensor rows_of_table(const Tensor& ids, const LinearWeight& weight, const TableRows& part) {
  const int64_t channels = weight.shape()[1];
  if (weight.codes.defined()) {
    const QuantizedTensor rows = empty_quantized(weight.device(), {ids.elements(), channels}, weight.codes.how);
    weight.device().run(Permute{.x = weight.codes, .out = rows, .assignments = ids, .per_row = 1, .part = part});
    return decoded(rows, weight.high.dtype());
  }
  const Tensor out = empty(weight.device(), weight.high.dtype(), {ids.elements(), channels});
  weight.device().run(EmbeddingForward{.ids = ids, .weight = weight.high, .out = out, .part = part});
  return out;
}

}  // namespace

Var embedding(const Tensor& ids, const LinearWeight& weight, const TensorParallel& tp) {
  require(tp.split != Split::row_parallel, "embedding: the weight must not be row-parallel");
  require(!by_tokens(tp) || ids.elements() == tp.tokens, "embedding: ", ids.elements(), " ids of ", tp.tokens, " tokens");
  require(weight.high.defined(), "embedding: the table has no values, whose dtype the rows have");
  const int64_t held = weight.shape()[0];
  TableRows part{.first = 0, .rows = held};
  if (shared(tp)) part = {.first = held * tp.group.rank(), .rows = held * tp.group.size()};
  Tensor out = rows_of_table(ids, weight, part);
  if (shared(tp)) out = summed(tp, out, {}, out.dtype());  // all ranks but one add zeros
  if (!recording({weight.var()})) return Var(out);
  return record("embedding", out, {weight.var()}, [ids, part, tp, leaf = weight.leaf](const Tensor& dy) {
    const Tensor rows = gathered_rows(tp, dy);
    const auto [dweight, accumulate] = leaf->target();
    dy.device().run(EmbeddingBackward{.ids = ids, .dy = rows, .dweight = dweight, .accumulate = accumulate, .part = part});
    return std::vector<Tensor>(1);
  });
}

namespace {

Tensor row_stats(const Tensor& x) { return empty(x.device(), stats_dtype(x.dtype()), {x.shape().rows()}); }

}  // namespace

NormedSum rms_norm(const Residual& x, const Var& weight, double eps) {
  const Tensor &given = x.x.value(), &branch = x.branch.value();
  const Tensor y = empty_like(given), rstd = row_stats(given), sum = branch.defined() ? empty_like(given) : Tensor();
  given.device().run(RmsNormForward{.x = given, .weight = weight.value(), .y = y, .rstd = rstd, .eps = eps, .branch = branch, .sum = sum});
  const Var in = branch.defined() ? record_sum(sum, x.x, x.branch) : x.x;
  if (!recording({in, weight})) return {in, Var(y)};
  const auto backward = [value = in.value(), w = weight.value(), leaf = weight.leaf(), rstd](const Tensor& dy, const Tensor& other) {
    Tensor dx = empty_like(dy);
    const auto [dweight, accumulate] = target_of(leaf, w);
    dy.device().run(RmsNormBackward{
        .x = value, .weight = w, .rstd = rstd, .dy = dy, .dx = dx, .dweight = dweight, .accumulate = accumulate, .other = other});
    return std::vector<Tensor>{dx, {}};
  };
  return {in, record("rms_norm", y, {in, weight}, Tape::AddingBackward(backward))};
}

NormedSum layer_norm(const Residual& x, const Var& weight, const Var& bias, double eps) {
  const Tensor &given = x.x.value(), &branch = x.branch.value();
  const Tensor y = empty_like(given), mean = row_stats(given), rstd = row_stats(given),
               sum = branch.defined() ? empty_like(given) : Tensor();
  given.device().run(LayerNormForward{.x = given,
                                      .weight = weight.value(),
                                      .y = y,
                                      .mean = mean,
                                      .rstd = rstd,
                                      .eps = eps,
                                      .bias = bias.value(),
                                      .branch = branch,
                                      .sum = sum});
  const Var in = branch.defined() ? record_sum(sum, x.x, x.branch) : x.x;
  if (!recording({in, weight, bias})) return {in, Var(y)};
  const auto backward = [value = in.value(), w = weight.value(), leaf = weight.leaf(), bias_leaf = bias.leaf(), mean, rstd](
                            const Tensor& dy, const Tensor& other) {
    Tensor dx = empty_like(dy);
    const auto [dweight, accumulate] = target_of(leaf, w);
    const Tensor dbias = bias_leaf ? bias_leaf->target().out : Tensor();
    dy.device().run(LayerNormBackward{.x = value,
                                      .weight = w,
                                      .mean = mean,
                                      .rstd = rstd,
                                      .dy = dy,
                                      .dx = dx,
                                      .dweight = dweight,
                                      .accumulate = accumulate,
                                      .dbias = dbias,
                                      .other = other});
    return std::vector<Tensor>{dx, {}, {}};
  };
  return {in, record("layer_norm", y, {in, weight, bias}, Tape::AddingBackward(backward))};
}

Var swiglu(const Var& x, Keep keep, double limit) {
  const auto forward = [value = x.value(), limit] {
    Tensor out = empty(value.device(), value.dtype(), {value.dim(0), value.dim(1) / 2});
    value.device().run(SwiGluForward{.x = value, .out = out, .limit = limit});
    return out;
  };
  const Var out = record("swiglu", forward(), {x}, [value = x.value(), limit](const Tensor& dy) {
    Tensor dx = empty_like(value);
    dy.device().run(SwiGluBackward{.x = value, .dy = dy, .dx = dx, .limit = limit});
    return std::vector<Tensor>{dx};
  });
  return keep == Keep::value ? out : rebuilt_on_demand(out, forward);
}

Var gelu(const Var& x, GeluForm form, Keep keep) {
  const auto forward = [value = x.value(), form] {
    Tensor out = empty_like(value);
    value.device().run(GeluForward{.x = value, .out = out, .form = form});
    return out;
  };
  const Var out = record("gelu", forward(), {x}, [value = x.value(), form](const Tensor& dy) {
    Tensor dx = empty_like(value);
    dy.device().run(GeluBackward{.x = value, .dy = dy, .dx = dx, .form = form});
    return std::vector<Tensor>{dx};
  });
  return keep == Keep::value ? out : rebuilt_on_demand(out, forward);
}

}  // namespace mantissa
