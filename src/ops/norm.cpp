#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"

namespace mantissa {
namespace {

Tensor row_stats(const Tensor& x) { return empty(x.device(), stats_dtype(x.dtype()), {x.shape().rows()}); }

}  // namespace

Var rms_norm(const Var& x, const Var& weight, double eps) {
  const Tensor& value = x.value();
  Tensor y = empty_like(value), rstd = row_stats(value);
  value.device().run(RmsNormForward{.x = value, .weight = weight.value(), .y = y, .rstd = rstd, .eps = eps});
  if (!recording({x, weight})) return Var(y);
  return record("rms_norm", y, {x, weight}, [value, w = weight.value(), leaf = &weight.trained_leaf("rms_norm"), rstd](const Tensor& dy) {
    Tensor dx = empty_like(dy);
    const auto [dweight, accumulate] = leaf->target();
    dy.device().run(
        RmsNormBackward{.x = value, .weight = w, .rstd = rstd, .dy = dy, .dx = dx, .dweight = dweight, .accumulate = accumulate});
    return std::vector<Tensor>{dx, {}};
  });
}

Var layer_norm(const Var& x, const Var& weight, const Var& bias, double eps) {
  const Tensor& value = x.value();
  Tensor y = empty_like(value), mean = row_stats(value), rstd = row_stats(value);
  value.device().run(
      LayerNormForward{.x = value, .weight = weight.value(), .y = y, .mean = mean, .rstd = rstd, .eps = eps, .bias = bias.value()});
  if (!recording({x, weight, bias})) return Var(y);
  return record(
      "layer_norm", y, {x, weight, bias},
      [value, w = weight.value(), leaf = &weight.trained_leaf("layer_norm"), bias_leaf = bias.leaf(), mean, rstd](const Tensor& dy) {
        Tensor dx = empty_like(dy);
        const auto [dweight, accumulate] = leaf->target();
        const Tensor dbias = bias_leaf ? bias_leaf->target().out : Tensor();
        dy.device().run(LayerNormBackward{.x = value,
                                          .weight = w,
                                          .mean = mean,
                                          .rstd = rstd,
                                          .dy = dy,
                                          .dx = dx,
                                          .dweight = dweight,
                                          .accumulate = accumulate,
                                          .dbias = dbias});
        return std::vector<Tensor>{dx, {}, {}};
      });
}

}  // namespace mantissa
