// Cases of the kernels on packed q|k|v rows.
#pragma once

#include "kernel_operands.h"

namespace mantissa::test {

inline constexpr HeadLayout kLayouts[] = {{1, 1, 2}, {3, 3, 8}, {6, 2, 20}, {4, 1, 64}};

inline std::string named(const HeadLayout& layout) { return named({layout.heads, layout.kv_heads, layout.head_dim}); }

inline void qk_norm_case(Operands& o, int64_t rows, HeadLayout layout) {
  const Tensor x = o.input({rows, layout.row()}), q = o.input({layout.head_dim}, 0.3, 1.0), k = o.input({layout.head_dim}, 0.3, 1.0);
  const Tensor y = o.output("y", x.shape(), kValues);
  const Tensor rstd = o.output_of(Dtype::f32, "rstd", {rows, layout.heads + layout.kv_heads}, kStats);
  o.device().run(QkNormForward{.x = x, .q_weight = q, .k_weight = k, .y = y, .rstd = rstd, .layout = layout, .eps = 1e-6});
}

inline void qk_norm_backward_case(Operands& o, int64_t rows, HeadLayout layout, bool accumulate) {
  const Tensor x = o.input({rows, layout.row()}), dy = o.input({rows, layout.row()});
  const Tensor q_weight = o.input({layout.head_dim}, 0.3, 1.0), k_weight = o.input({layout.head_dim}, 0.3, 1.0);
  const Tensor rstd = o.input_of(Dtype::f32, {rows, layout.heads + layout.kv_heads}, 0.1, 1.0);
  o.device().run(QkNormBackward{.x = x,
                                .q_weight = q_weight,
                                .k_weight = k_weight,
                                .rstd = rstd,
                                .dy = dy,
                                .dx = o.output("dx", x.shape(), kSums),
                                .dq_weight = o.gradient("dq_weight", {layout.head_dim}, kStatSums, accumulate),
                                .dk_weight = o.gradient("dk_weight", {layout.head_dim}, kStatSums, accumulate),
                                .layout = layout,
                                .accumulate = accumulate});
}

// The inverse is in place.
inline void rope_case(Operands& o, int64_t rows, HeadLayout layout, bool inverse) {
  const Tensor x = o.input({rows, layout.row()}), positions = o.indices(rows, 50);
  const Tensor table = o.input_of(Dtype::f32, {50, layout.head_dim});
  const Tensor y = inverse ? o.updated("y", x, kValues) : o.output("y", x.shape(), kValues);
  o.device().run(Rope{.x = x, .table = table, .positions = positions, .y = y, .layout = layout, .inverse = inverse});
}

inline void heads_cases(Cases& add) {
  for (const HeadLayout& layout : kLayouts) {
    for (const int64_t rows : {1, 7, 130}) {
      const std::string size = named({rows}) + "_" + named(layout);
      add("QkNormForward", size, [=](Operands& o) { qk_norm_case(o, rows, layout); });
      for (const bool flag : {false, true}) {
        add("QkNormBackward", size + (flag ? "_accumulate" : ""), [=](Operands& o) { qk_norm_backward_case(o, rows, layout, flag); });
        add("Rope", size + (flag ? "_inverse_in_place" : ""), [=](Operands& o) { rope_case(o, rows, layout, flag); });
      }
    }
  }
}

// Documents of random lengths: each position starts where its document does.
inline Tensor random_segments(Operands& o, int64_t batch, int64_t length) {
  const std::vector<double> cuts = values(o.indices(batch * length, 6));
  std::vector<double> starts(cuts.size());
  for (size_t i = 0; i < cuts.size(); ++i) {
    const auto position = static_cast<int64_t>(i) % length;
    const bool first = position == 0 || cuts[i] == 0.0;
    starts[i] = first ? static_cast<double>(position) : starts[i - 1];
  }
  return o.given(Dtype::i32, {batch * length}, starts);
}

// The masks beside the order of positions, and other terms of the softmax.
struct Hidden {
  bool segments;
  int64_t window;
  bool sinks = false;
};

inline Tensor sinks_of(Operands& o, HeadLayout layout, bool given) { return given ? o.input({layout.heads}, 2.0) : Tensor(); }

inline void attention_case(Operands& o, int64_t batch, int64_t length, HeadLayout layout, Hidden hidden) {
  const int64_t rows = batch * length;
  const Tensor qkv = o.input({rows, layout.row()}), starts = hidden.segments ? random_segments(o, batch, length) : Tensor();
  o.device().run(AttentionForward{.qkv = qkv,
                                  .out = o.output("out", {rows, layout.heads * layout.head_dim}, kAttention),
                                  .lse = o.output_of(Dtype::f32, "lse", {batch, layout.heads, length}, kStatSums),
                                  .batch = batch,
                                  .layout = layout,
                                  .scale = 1.0 / std::sqrt(static_cast<double>(layout.head_dim)),
                                  .segment_starts = starts,
                                  .window = hidden.window,
                                  .sinks = sinks_of(o, layout, hidden.sinks)});
}

// out and lse come from the reference, so that only the backward kernel is compared.
inline void attention_backward_case(Operands& o, int64_t batch, int64_t length, HeadLayout layout, Hidden hidden) {
  const int64_t rows = batch * length;
  const double scale = 1.0 / std::sqrt(static_cast<double>(layout.head_dim));
  const Tensor qkv = o.input({rows, layout.row()}), starts = hidden.segments ? random_segments(o, batch, length) : Tensor();
  const auto reference = make_backend("cpu_reference");
  const Shape out_shape{rows, layout.heads * layout.head_dim}, lse_shape{batch, layout.heads, length};
  const Tensor out = empty(*reference, o.dtype(), out_shape), lse = empty(*reference, Dtype::f32, lse_shape);
  reference->run(AttentionForward{.qkv = copied(*reference, qkv),
                                  .out = out,
                                  .lse = lse,
                                  .batch = batch,
                                  .layout = layout,
                                  .scale = scale,
                                  .segment_starts = copied(*reference, starts),
                                  .window = hidden.window});
  o.device().run(AttentionBackward{.qkv = qkv,
                                   .out = o.given(o.dtype(), out_shape, values(out)),
                                   .lse = o.given(Dtype::f32, lse_shape, values(lse)),
                                   .dout = o.input(out_shape),
                                   .dqkv = o.output("dqkv", qkv.shape(), kAttentionGradient),
                                   .batch = batch,
                                   .layout = layout,
                                   .scale = scale,
                                   .segment_starts = starts,
                                   .window = hidden.window});
}

inline void sink_gradient_case(Operands& o, int64_t batch, int64_t length, HeadLayout layout, bool accumulate) {
  const Shape shape{batch * length, layout.heads * layout.head_dim};
  const Tensor sinks = o.input({layout.heads}), out = o.input(shape), dout = o.input(shape);
  o.device().run(AttentionSinkGradient{.sinks = sinks,
                                       .out = out,
                                       .lse = o.input_of(Dtype::f32, {batch, layout.heads, length}, 0.5, 1.0),
                                       .dout = dout,
                                       .dsinks = o.gradient("dsinks", {layout.heads}, kStatSums, accumulate),
                                       .batch = batch,
                                       .layout = layout,
                                       .accumulate = accumulate});
}

inline void cached_attention_case(Operands& o, int64_t first, int64_t rows, HeadLayout layout, Hidden hidden) {
  const int64_t channels = layout.kv_heads * layout.head_dim;
  const Tensor qkv = o.input({rows, layout.row()});
  const Tensor keys = o.updated("keys", o.input({first + rows + 3, channels}), kExact);
  const Tensor kept_values = o.updated("values", o.input({first + rows + 3, channels}), kExact);
  o.device().run(CachedAttention{.qkv = qkv,
                                 .keys = keys,
                                 .values = kept_values,
                                 .out = o.output("out", {rows, layout.heads * layout.head_dim}, kAttention),
                                 .first = first,
                                 .layout = layout,
                                 .scale = 0.3,
                                 .window = hidden.window,
                                 .sinks = sinks_of(o, layout, hidden.sinks)});
}

inline void attention_cases(Cases& add) {
  for (const HeadLayout& layout : kLayouts) {
    for (const auto& [batch, length] : {std::pair<int64_t, int64_t>{1, 1}, {3, 5}, {2, 64}, {1, 150}}) {
      for (const Hidden hidden : {Hidden{false, 0}, {true, 0}, {false, 3}, {false, 70}, {true, 4}, {false, 0, true}, {true, 5, true}}) {
        if (layout.head_dim != 20 && hidden.segments == (hidden.window == 0))
          continue;  // which heads share keys does not matter to what is hidden
        const int64_t b = batch, t = length;
        const std::string window = hidden.window > 0 ? "_window" + named({hidden.window}) : "";
        const std::string variant =
            named({b, t}) + "_" + named(layout) + (hidden.segments ? "_segments" : "") + window + (hidden.sinks ? "_sinks" : "");
        add("AttentionForward", variant, [=](Operands& o) { attention_case(o, b, t, layout, hidden); });
        if (!hidden.sinks) add("AttentionBackward", variant, [=](Operands& o) { attention_backward_case(o, b, t, layout, hidden); });
      }
      for (const bool accumulate : {false, true}) {
        add("AttentionSinkGradient", named({batch, length}) + "_" + named(layout) + (accumulate ? "_accumulate" : ""),
            [=, b = batch, t = length](Operands& o) { sink_gradient_case(o, b, t, layout, accumulate); });
      }
    }
    for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{0, 1}, {0, 9}, {100, 1}, {37, 5}}) {
      for (const Hidden hidden : {Hidden{false, 0}, {false, 4}, {false, 0, true}}) {
        add("CachedAttention",
            named({first, rows}) + "_" + named(layout) + (hidden.window > 0 ? "_window" : "") + (hidden.sinks ? "_sinks" : ""),
            [=, f = first, r = rows](Operands& o) { cached_attention_case(o, f, r, layout, hidden); });
      }
    }
  }
}

}  // namespace mantissa::test
