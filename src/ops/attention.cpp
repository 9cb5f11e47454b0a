#include <cmath>
#include <utility>

#include "mantissa/backend/functions.h"
#include "ops/ops.h"

namespace mantissa {

Var qk_norm(const Var& qkv, const Var& q_weight, const Var& k_weight, HeadLayout layout, double eps) {
  const Tensor& x = qkv.value();
  Tensor y = empty_like(x), rstd = empty(x.device(), stats_dtype(x.dtype()), {x.dim(0), layout.heads + layout.kv_heads});
  x.device().run(QkNormForward{
      .x = x, .q_weight = q_weight.value(), .k_weight = k_weight.value(), .y = y, .rstd = rstd, .layout = layout, .eps = eps});
  if (!recording({qkv, q_weight, k_weight})) return Var(y);
  return record(
      "qk_norm", y, {qkv, q_weight, k_weight},
      [x, q = q_weight.value(), k = k_weight.value(), q_leaf = q_weight.leaf(), k_leaf = k_weight.leaf(), rstd, layout](const Tensor& dy) {
        Tensor dx = empty_like(dy);
        const auto [dq_weight, accumulate_q] = target_of(q_leaf, q);
        const auto [dk_weight, accumulate_k] = target_of(k_leaf, k);
        const bool accumulate = q_leaf ? accumulate_q : accumulate_k;
        require(!q_leaf || !k_leaf || accumulate_q == accumulate_k, "qk_norm: query and key weights must be updated together");
        for (const auto& [leaf, unused] : {std::pair{q_leaf, dq_weight}, {k_leaf, dk_weight}}) {
          if (!leaf && accumulate) unused.device().run(Fill{.out = unused, .value = 0.0});
        }
        dy.device().run(QkNormBackward{.x = x,
                                       .q_weight = q,
                                       .k_weight = k,
                                       .rstd = rstd,
                                       .dy = dy,
                                       .dx = dx,
                                       .dq_weight = dq_weight,
                                       .dk_weight = dk_weight,
                                       .layout = layout,
                                       .accumulate = accumulate});
        return std::vector<Tensor>{dx, {}, {}};
      });
}

Var rope(Var qkv, const Tensor& table, const Tensor& positions, HeadLayout layout) {
  const auto rotated = [=](const Tensor& x, bool inverse) {
    Tensor y = x.is_last_handle() ? x : empty_like(x);
    x.device().run(Rope{.x = x, .table = table, .positions = positions, .y = y, .layout = layout, .inverse = inverse});
    return y;
  };
  Tensor y = rotated(qkv.value(), false);
  return record("rope", std::move(y), {qkv}, [rotated](const Tensor& dy) { return std::vector<Tensor>{rotated(dy, true)}; });
}

Var attention(const Var& qkv, int64_t batch, HeadLayout layout, const Tensor& segment_starts, int64_t window, const Var& sinks) {
  const Tensor& x = qkv.value();
  const double scale = 1.0 / std::sqrt(static_cast<double>(layout.head_dim));
  Tensor out = empty(x.device(), x.dtype(), {x.dim(0), layout.heads * layout.head_dim});
  Tensor lse = empty(x.device(), stats_dtype(x.dtype()), {batch, layout.heads, x.dim(0) / batch});
  x.device().run(AttentionForward{.qkv = x,
                                  .out = out,
                                  .lse = lse,
                                  .batch = batch,
                                  .layout = layout,
                                  .scale = scale,
                                  .segment_starts = segment_starts,
                                  .window = window,
                                  .sinks = sinks.value()});
  return record("attention", out, {qkv, sinks},
                [x, out, lse, batch, layout, scale, segment_starts, window, sink = sinks.value(), leaf = sinks.leaf()](const Tensor& dy) {
                  Tensor dqkv = empty_like(x);
                  dy.device().run(AttentionBackward{.qkv = x,
                                                    .out = out,
                                                    .lse = lse,
                                                    .dout = dy,
                                                    .dqkv = dqkv,
                                                    .batch = batch,
                                                    .layout = layout,
                                                    .scale = scale,
                                                    .segment_starts = segment_starts,
                                                    .window = window});
                  if (leaf) {
                    const auto [dsinks, accumulate] = leaf->target();
                    dy.device().run(AttentionSinkGradient{.sinks = sink,
                                                          .out = out,
                                                          .lse = lse,
                                                          .dout = dy,
                                                          .dsinks = dsinks,
                                                          .batch = batch,
                                                          .layout = layout,
                                                          .accumulate = accumulate});
                  }
                  return std::vector<Tensor>{dqkv, {}};
                });
}

}  // namespace mantissa
