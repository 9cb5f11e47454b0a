#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"

namespace mantissa {

Var linear(const Var& x, const Var& weight, const Var& bias) {
  const Tensor& w = weight.value();
  Tensor y = empty(w.device(), x.value().dtype(), {x.value().dim(0), w.dim(0)});
  w.device().run(Gemm{.a = {x.value()}, .b = {w, true}, .out = y, .accumulate = false, .bias = bias.value()});
  if (!recording({x, weight, bias})) return Var(y);
  const bool wants_dx = x.wants_gradient();
  return record("linear", y, {x, weight, bias},
                [saved = Saved(x), w, wants_dx, weight_leaf = weight.leaf(), bias_leaf = bias.leaf()](const Tensor& dy) {
                  Backend& device = dy.device();
                  const Tensor x_again = saved.get();
                  if (weight_leaf) {
                    const auto [dweight, accumulate] = weight_leaf->target();
                    device.run(Gemm{.a = {dy, true}, .b = {x_again}, .out = dweight, .accumulate = accumulate});
                  }
                  if (bias_leaf) {
                    const auto [dbias, accumulate] = bias_leaf->target();
                    device.run(SumRows{.x = dy, .out = dbias, .accumulate = accumulate});
                  }
                  Tensor dx;
                  if (wants_dx) {
                    dx = empty(device, dy.dtype(), {dy.dim(0), w.dim(1)});
                    device.run(Gemm{.a = {dy}, .b = {w}, .out = dx, .accumulate = false});
                  }
                  return std::vector<Tensor>{dx, {}, {}};
                });
}

}  // namespace mantissa
