// Cases of the kernels of a mixture of experts.
#pragma once

#include <limits>

#include "kernel_cases_quantized.h"

namespace mantissa::test {

// An i32 tensor, to be written.
inline Tensor index_output(Operands& o, const char* name, Shape shape) {
  const std::vector<double> before(static_cast<size_t>(shape.elements()), -7.0);
  return o.updated(name, o.given(Dtype::i32, shape, before), kExact);
}

struct RouteShape {
  int64_t sequences, length, experts;
  RoutingRule rule;
  bool bias;
  bool padded = false;  // the end of each sequence: another share of it, all of the last one
  int64_t tokens() const { return sequences * length; }
};

// Random logits; those of padding are -Inf.
inline std::vector<double> router_logits(const RouteShape& s, uint32_t what, double scale = 2.0) {
  std::vector<double> out = random_values(s.tokens() * s.experts, what, scale);
  for (int64_t n = 0; s.padded && n < s.tokens(); ++n) {
    const int64_t sequence = n / s.length, kept = s.length * (s.sequences - sequence - 1) / s.sequences;
    if (n % s.length >= kept) std::fill_n(out.begin() + n * s.experts, s.experts, -std::numeric_limits<double>::infinity());
  }
  return out;
}
inline Tensor router_logits(Operands& o, const RouteShape& s) {
  if (!s.padded) return o.input_of(Dtype::f32, {s.tokens(), s.experts}, 2.0);
  return o.given(Dtype::f32, {s.tokens(), s.experts}, router_logits(s, 3));
}

inline RoutingRule softmax_rule(int64_t assignments, bool after_choice, bool renormalize) {
  return {
      .top_k = assignments, .score = RouterScore::softmax, .softmax_after_topk = after_choice, .renormalize = renormalize, .scale = 1.5};
}

inline RoutingRule sigmoid_rule(int64_t assignments, bool renormalize, int64_t groups = 1, int64_t groups_kept = 1) {
  RoutingRule rule = softmax_rule(assignments, false, renormalize);
  rule.score = RouterScore::sigmoid, rule.groups = groups, rule.groups_kept = groups_kept;
  return rule;
}

inline RoutingRule forced(RoutingRule rule) {
  rule.forced = true;
  return rule;
}

inline std::vector<std::pair<std::string, RouteShape>> route_shapes() {
  return {{"one", {1, 1, 1, softmax_rule(1, false, false), false}},
          {"softmax", {2, 7, 8, softmax_rule(2, false, false), false}},
          {"softmax_renormalized", {3, 11, 16, softmax_rule(4, false, true), true}},
          {"after_choice", {1, 33, 8, softmax_rule(2, true, false), false}},
          {"all_chosen", {1, 5, 4, softmax_rule(4, false, true), false}},
          {"sigmoid", {4, 300, 8, sigmoid_rule(1, false), true}},
          {"sigmoid_groups", {2, 70, 128, sigmoid_rule(8, true, 8, 4), true}},
          {"forced", {2, 7, 5, forced(sigmoid_rule(3, true)), false}},
          {"softmax_padded", {3, 9, 8, softmax_rule(2, false, true), true, true}},
          {"after_choice_padded", {2, 8, 5, softmax_rule(3, true, false), false, true}},
          {"sigmoid_groups_padded", {4, 70, 64, sigmoid_rule(8, true, 8, 4), true, true}},
          {"forced_padded", {2, 6, 5, forced(softmax_rule(2, false, false)), false, true}},
          {"all_padding", {1, 4, 40, sigmoid_rule(2, true), false, true}}};
}

inline RouteForward routed(Operands& o, const RouteShape& s) {
  const int64_t tokens = s.tokens(), assignments = s.rule.top_k;
  const Tensor logits = router_logits(o, s);
  const RouteForward k{.logits = logits,
                       .experts = o.given(Dtype::i32, {tokens, assignments}, {}),
                       .weights = o.given(Dtype::f32, {tokens, assignments}, {}),
                       .scores = o.given(Dtype::f32, {tokens, s.experts}, {}),
                       .counts = o.given(Dtype::i32, {s.sequences, s.experts}, {}),
                       .rule = s.rule,
                       .bias = s.bias ? o.input_of(Dtype::f32, {s.experts}, 0.1) : Tensor()};
  o.device().run(k);
  return k;
}

// Exponentials of devices differ in the last bit, and 1 - score keeps few bits where a score is near one.
inline constexpr Tolerance kScoreGradients{1e-5, 1e-5};

inline void route_cases(Cases& add) {
  for (const auto& [name, shape] : route_shapes()) {
    const RouteShape s = shape;
    add("RouteForward", name, [=](Operands& o) {
      const Tensor logits = router_logits(o, s);
      o.device().run(RouteForward{.logits = logits,
                                  .experts = index_output(o, "experts", {s.tokens(), s.rule.top_k}),
                                  .weights = o.output_of(Dtype::f32, "weights", {s.tokens(), s.rule.top_k}, kStats),
                                  .scores = o.output_of(Dtype::f32, "scores", {s.tokens(), s.experts}, kStats),
                                  .counts = index_output(o, "counts", {s.sequences, s.experts}),
                                  .rule = s.rule,
                                  .bias = s.bias ? o.input_of(Dtype::f32, {s.experts}, 0.1) : Tensor()});
    });
    add("RouteBackward", name, [=](Operands& o) {
      const RouteForward forward = routed(o, s);
      const Tensor dweights = o.input_of(Dtype::f32, {s.tokens(), s.rule.top_k});
      o.device().run(RouteBackward{.logits = forward.logits,
                                   .scores = forward.scores,
                                   .experts = forward.experts,
                                   .counts = forward.counts,
                                   .dweights = dweights,
                                   .dlogits = o.output_of(Dtype::f32, "dlogits", {s.tokens(), s.experts}, kScoreGradients),
                                   .rule = s.rule,
                                   .balance = 0.3,
                                   .sequence_balance = 0.2,
                                   .z = 0.1});
    });
    add("RouterLosses", name, [=](Operands& o) {
      const RouteForward forward = routed(o, s);
      o.device().run(RouterLosses{.logits = forward.logits,
                                  .scores = forward.scores,
                                  .counts = forward.counts,
                                  .out = o.output_of(Dtype::f64, "out", {3}, kStats),
                                  .rule = s.rule});
    });
  }
}

// Rows of an unpermuted matrix of `limit` rows: any of them, every fifth is dropped.
inline std::vector<double> some_dropped(Operands& o, int64_t count, int64_t limit) {
  std::vector<double> out = values(o.indices(count, limit));
  for (size_t i = 2; i < out.size(); i += 5) out[i] = -1.0;
  return out;
}

// `table`: x holds rows of a table of three times as many.
inline void permute_case(Operands& o, int64_t tokens, int64_t rows, int64_t columns, const Quantization& how, bool table = false) {
  const Value x = how ? Value(quantized_input(o, tokens, columns, how, 8)) : Value(o.input({tokens, columns}));
  const Value out =
      how ? Value(quantized_output(o, "codes", "scales", {rows, columns}, how)) : Value(o.output("out", {rows, columns}, kExact));
  if (table) {
    const Tensor ids = o.indices(rows, 3 * tokens);
    return o.device().run(Permute{.x = x, .out = out, .assignments = ids, .per_row = 1, .part = {.first = tokens, .rows = 3 * tokens}});
  }
  const Tensor assignments = o.given(Dtype::i32, {rows}, some_dropped(o, rows, tokens * 2));
  o.device().run(Permute{.x = x, .out = out, .assignments = assignments, .per_row = 2});
}

inline void permute_cases(Cases& add) {
  for (const auto& [tokens, rows, columns] : {std::array<int64_t, 3>{1, 1, 1}, {5, 64, 7}, {40, 96, 384}, {300, 1100, 128}}) {
    for (const Quantization how : {Quantization{}, {Format::e4m3, 1, 32}, {Format::e5m2, 1, 128}, {Format::e2m1, 1, 32}}) {
      if (how && columns % 128 != 0) continue;
      for (const bool table : {true, false}) {
        if (table && rows == 1) continue;  // so that the second case, which one_case_test.cpp takes, is a table of several rows
        const std::string variant = text(named({tokens, rows, columns}), how ? text('_', how) : "", table ? "_table" : "");
        add("Permute", variant, [=, n = tokens, r = rows, c = columns](Operands& o) { permute_case(o, n, r, c, how, table); });
      }
    }
  }
}

// Rows that arrive by rank and expert.
inline void arrival_case(Operands& o, std::vector<double> counts, int64_t ranks, int64_t multiple) {
  counts.front() += 1.0;  // something arrives
  const int64_t experts = std::ssize(counts) / ranks;
  int64_t arrivals = 0, rows = 0;
  for (const double count : counts) {
    arrivals += static_cast<int64_t>(count);
    rows += (static_cast<int64_t>(count) + multiple - 1) / multiple * multiple;
  }
  o.device().run(ArrivalTable{.counts = o.given(Dtype::i32, {ranks, experts}, counts),
                              .offsets = index_output(o, "offsets", {experts + 1}),
                              .rows = index_output(o, "rows", {arrivals}),
                              .assignments = index_output(o, "assignments", {rows}),
                              .multiple = multiple,
                              .source_offsets = index_output(o, "source_offsets", {experts * ranks + 1})});
}

inline void dispatch_cases(Cases& add) {
  for (const auto& [tokens, assignments, experts, multiple, capacity] : {std::array<int64_t, 5>{1, 1, 1, 1, 0},
                                                                         {7, 2, 3, 32, 0},
                                                                         {300, 2, 8, 32, 40},
                                                                         {16, 8, 128, 128, 0},
                                                                         {600, 4, 16, 64, 0},
                                                                         {33, 3, 5, 1, 7}}) {
    add("DispatchTable", named({tokens, assignments, experts, multiple, capacity}),
        [=, n = tokens, k = assignments, e = experts, m = multiple, most = capacity](Operands& o) {
          const Tensor ids = o.given(Dtype::i32, {n, k}, values(o.indices(n * k, e)));
          o.device().run(DispatchTable{.experts = ids,
                                       .offsets = index_output(o, "offsets", {e + 1}),
                                       .rows = index_output(o, "rows", {n, k}),
                                       .assignments = index_output(o, "assignments", {dispatch_rows(n * k, e, m)}),
                                       .multiple = m,
                                       .capacity = most});
        });
  }
  for (const int64_t capacity : {0, 9}) {
    add("DispatchTable", named({90, 3, 5, 32, capacity}) + "_padded", [=](Operands& o) {
      o.device().run(DispatchTable{.experts = o.given(Dtype::i32, {90, 3}, some_dropped(o, 90 * 3, 5)),
                                   .offsets = index_output(o, "offsets", {6}),
                                   .rows = index_output(o, "rows", {90, 3}),
                                   .assignments = index_output(o, "assignments", {dispatch_rows(90 * 3, 5, 32)}),
                                   .multiple = 32,
                                   .capacity = capacity});
    });
  }
  for (const auto& [ranks, experts, most, multiple] :
       {std::array<int64_t, 4>{1, 1, 5, 1}, {2, 3, 2, 32}, {4, 2, 40, 32}, {3, 16, 9, 64}, {8, 1, 300, 128}}) {
    add("ArrivalTable", named({ranks, experts, most, multiple}),
        [=, r = ranks, e = experts, m = multiple, most = most](Operands& o) { arrival_case(o, values(o.indices(r * e, most)), r, m); });
  }
  for (const auto& [rows, columns] : {std::array<int64_t, 2>{1, 1}, {1, 128}, {7, 33}, {300, 5}}) {
    add("SumCounts", named({rows, columns}), [=, r = rows, c = columns](Operands& o) {
      const Tensor counts = o.given(Dtype::i32, {r, c}, values(o.indices(r * c, 1 << 30)));
      o.device().run(SumCounts{.counts = counts, .out = o.output_of(Dtype::f64, "out", {c}, kExact)});
    });
  }
  permute_cases(add);
  for (const auto& [tokens, assignments, columns] :
       {std::array<int64_t, 3>{1, 1, 1}, {9, 1, 33}, {40, 2, 384}, {70, 8, 257}, {3, 4, 5000}}) {
    add("Unpermute", named({tokens, assignments, columns}), [=, n = tokens, k = assignments, c = columns](Operands& o) {
      const Tensor x = o.input({2 * n, c}), rows = o.given(Dtype::i32, {n, k}, some_dropped(o, n * k, 2 * n));
      o.device().run(Unpermute{.x = x, .rows = rows, .out = o.output("out", {n, c}, kExact)});
    });
  }
}

struct GroupedShape {
  std::vector<double> offsets;
  int64_t rows, in, out;  // rows: those of no group included
  int64_t groups() const { return std::ssize(offsets) - 1; }
  std::string name() const { return named({groups(), rows, in, out}); }
};

inline std::vector<GroupedShape> grouped_shapes() {
  return {{{0, 1}, 1, 1, 1},
          {{0, 0, 3, 3, 10, 10}, 12, 5, 7},
          {{0, 32, 64, 64, 192, 256}, 288, 64, 96},
          {{0, 0, 32, 32, 32}, 32, 128, 128},
          {{0, 0, 1, 32, 64, 97, 297, 300}, 310, 33, 400},
          {{0, 0, 0}, 64, 32, 64},
          {{0, 320}, 320, 100, 65}};
}

inline void grouped_gemm_case(Operands& o, const GroupedShape& s, const Value& a, const Operand& b, Dtype out) {
  const Tensor offsets = o.given(Dtype::i32, {s.groups() + 1}, s.offsets);
  const double tolerance = out == Dtype::f32 ? kGemmSums : kSums.bf16;  // sums may round to other bf16 values, whatever they are sums of
  const Tensor y = o.output_of(out, "out", {s.rows, s.out}, {tolerance, tolerance});
  o.device().run(GroupedGemm{.a = {a}, .b = b, .out = y, .offsets = offsets});
}

inline void weight_gradient_case(Operands& o, const GroupedShape& s, const Value& a, const Value& b, bool accumulate) {
  const Tensor offsets = o.given(Dtype::i32, {s.groups() + 1}, s.offsets);
  const Tensor out = o.gradient("out", {s.groups() * s.out, s.in}, kStatSums, accumulate);
  o.device().run(GroupedWeightGradient{.a = a, .b = b, .out = out, .offsets = offsets, .accumulate = accumulate});
}

inline void grouped_bias_cases(Cases& add, const GroupedShape& s) {
  for (const bool flag : {false, true}) {
    const std::string variant = s.name() + (flag ? "_weighted" : "");
    add("AddGroupedBias", variant, [=](Operands& o) {
      const Tensor x = o.input_of(Dtype::f32, {s.rows, s.out}), bias = o.input({s.groups() * s.out});
      const Tensor offsets = o.given(Dtype::i32, {s.groups() + 1}, s.offsets), weights = flag ? o.input_of(Dtype::f32, {s.rows}) : Tensor();
      o.device().run(
          AddGroupedBias{.x = x, .bias = bias, .out = o.output("out", x.shape(), kValues), .offsets = offsets, .row_weights = weights});
    });
    for (const bool accumulate : {false, true}) {
      add("GroupedBiasGradient", variant + (accumulate ? "_accumulate" : ""), [=](Operands& o) {
        const Tensor dy = o.input({s.rows, s.out}), offsets = o.given(Dtype::i32, {s.groups() + 1}, s.offsets);
        const Tensor weights = flag ? o.input_of(Dtype::f32, {s.rows}) : Tensor();
        const Tensor dbias = o.gradient("dbias", {s.groups() * s.out}, kStatSums, accumulate);
        o.device().run(GroupedBiasGradient{.dy = dy, .dbias = dbias, .offsets = offsets, .accumulate = accumulate, .row_weights = weights});
      });
    }
  }
  add("GroupedBiasDot", s.name(), [=](Operands& o) {
    const Tensor dy = o.input({s.rows, s.out}), bias = o.input({s.groups() * s.out});
    const Tensor offsets = o.given(Dtype::i32, {s.groups() + 1}, s.offsets);
    o.device().run(GroupedBiasDot{.dy = dy, .bias = bias, .out = o.output_of(Dtype::f32, "out", {s.rows}, kStatSums), .offsets = offsets});
  });
}

inline void quantized_grouped_cases(Cases& add, const GroupedShape& s, int64_t block) {
  for (const Format format : {Format::e4m3, Format::e2m1}) {
    const Quantization rows{format, 1, block}, columns = rows.transposed(), tiles{format, block, block};
    const std::string variant = s.name() + '_' + format_name(format) + '_' + named({block});
    add("GroupedGemm", variant + "_tiles", [=](Operands& o) {  // fprop, and dgrad with values
      const QuantizedTensor w = quantized_input(o, s.groups() * s.out, s.in, tiles, 2);
      grouped_gemm_case(o, s, quantized_input(o, s.rows, s.in, rows, 2), {w, true}, Dtype::bf16);
    });
    add("GroupedGemm", variant + "_columns", [=](Operands& o) {
      const QuantizedTensor w = quantized_input(o, s.groups() * s.in, s.out, columns, 2);
      grouped_gemm_case(o, s, o.input({s.rows, s.in}), {w}, o.dtype());
    });
    add("GroupedGemm", variant + "_rows", [=](Operands& o) {
      const QuantizedTensor w = quantized_input(o, s.groups() * s.out, s.in, rows, 2);
      grouped_gemm_case(o, s, o.input({s.rows, s.in}), {w, true}, Dtype::f32);
    });
    add("GroupedGemm", variant + "_extreme", [=](Operands& o) {  // where bf16 cannot follow
      const QuantizedTensor w = quantized_input(o, s.groups() * s.out, s.in, rows, 120);
      grouped_gemm_case(o, s, quantized_input(o, s.rows, s.in, rows, 2), {w, true}, Dtype::f32);
    });
    for (const bool accumulate : {false, true}) {
      if (s.offsets.back() != 0 && s.offsets[1] == 1) continue;
      add("GroupedWeightGradient", variant + (accumulate ? "_columns_accumulate" : "_columns"), [=](Operands& o) {
        const QuantizedTensor dy = quantized_input(o, s.rows, s.out, columns, 2), x = quantized_input(o, s.rows, s.in, columns, 2);
        weight_gradient_case(o, s, dy, x, accumulate);
      });
    }
  }
}

inline void grouped_cases(Cases& add) {
  for (const GroupedShape& s : grouped_shapes()) {
    grouped_bias_cases(add, s);
    for (const bool transposed : {false, true}) {
      for (const bool fp32 : {false, true}) {
        add("GroupedGemm", s.name() + (transposed ? "_bt" : "_b") + (fp32 ? "_fp32" : ""), [=](Operands& o) {
          const Tensor a = o.input({s.rows, s.in});
          const Tensor b = o.input(transposed ? Shape{s.groups() * s.out, s.in} : Shape{s.groups() * s.in, s.out});
          grouped_gemm_case(o, s, a, {b, transposed}, fp32 ? Dtype::f32 : o.dtype());
        });
      }
    }
    for (const bool accumulate : {false, true}) {
      add("GroupedWeightGradient", s.name() + (accumulate ? "_accumulate" : ""), [=](Operands& o) {
        const Tensor dy = o.input({s.rows, s.out}), x = o.input({s.rows, s.in});
        weight_gradient_case(o, s, dy, x, accumulate);
      });
    }
  }
  quantized_grouped_cases(add, {{0, 32, 64, 64, 192, 256}, 288, 64, 96}, 32);
  quantized_grouped_cases(add, {{0, 0, 128, 128, 256}, 384, 128, 128}, 128);
}

}  // namespace mantissa::test
