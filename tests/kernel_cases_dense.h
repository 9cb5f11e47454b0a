// Cases of the kernels on elements, matrices and rows of channels, and of activations, loss and optimizer.
#pragma once

#include <numeric>

#include "kernel_operands.h"

namespace mantissa::test {

inline void elementwise_cases(Cases& add) {
  for (const int64_t n : {1, 7, 33001}) {  // the last in two pieces, or many blocks
    const std::string size = named({n});
    add("Fill", size, [n](Operands& o) { o.device().run(Fill{.out = o.output("out", {n}, kExact), .value = 0.3}); });
    add("RandomNormal", size, [n](Operands& o) {
      o.device().run(RandomNormal{
          .out = o.output("out", {n}, kExact), .key = {.seed = 3}, .what = 5, .first_index = (int64_t{1} << 32) - 3, .std = 0.02});
    });
    for (const Dtype to : {Dtype::f32, Dtype::bf16}) {
      add("Convert", size + "_to_" + dtype_name(to), [n, to](Operands& o) {
        const Tensor x = o.input({n}, 1e3);
        o.device().run(Convert{.x = x, .out = o.output_of(to, "out", {n}, kExact)});
      });
    }
    add("Add", size, [n](Operands& o) {
      const Tensor a = o.input({n}), b = o.input({n});
      o.device().run(Add{.a = a, .b = b, .out = o.output("out", {n}, kExact)});
    });
    add("Add", size + "_in_place", [n](Operands& o) {
      const Tensor a = o.updated("a", o.input({n}), kExact), b = o.input({n});
      o.device().run(Add{.a = b, .b = a, .out = a});
    });
    for (const auto& [others, place] : {std::pair<int64_t, int64_t>{1, 0}, {3, 2}, {4, 4}, {7, 5}, {18, 16}}) {
      add("TreeSum", size + "_" + named({others, place}), [n, others = others, place = place](Operands& o) {
        const Tensor own = o.updated("own", o.input({n}), kExact), rows = o.input({others, n}, 10.0);
        o.device().run(TreeSum{.own = own, .others = rows, .place = place});
      });
    }
    add("AddBias", size, [n](Operands& o) {
      const Tensor x = o.input_of(Dtype::f32, {3, n}), bias = o.input({n});
      o.device().run(AddBias{.x = x, .bias = bias, .out = o.output("out", {3, n}, kExact)});
    });
    add("AddBias", size + "_in_place", [n](Operands& o) {
      const Tensor x = o.updated("out", o.input_of(Dtype::f32, {3, n}), kExact), bias = o.input_of(Dtype::f32, {n});
      o.device().run(AddBias{.x = x, .bias = bias, .out = x});
    });
    add("Sum", size, [n](Operands& o) {
      const Tensor x = o.input_of(Dtype::f32, {n});
      o.device().run(Sum{.x = x, .out = o.output_of(Dtype::f64, "out", {1}, {1e-14, 1e-14}), .factor = 0.25});
    });
  }
}

struct GemmShape {
  int64_t rows, inner, columns;
};

inline void gemm_case(Operands& o, GemmShape s, bool a_transposed, bool b_transposed, Dtype out, bool accumulate, bool with_bias) {
  const Tensor a = o.input(a_transposed ? Shape{s.inner, s.rows} : Shape{s.rows, s.inner});
  const Tensor b = o.input(b_transposed ? Shape{s.columns, s.inner} : Shape{s.inner, s.columns});
  const Tensor bias = with_bias ? o.input({s.columns}) : Tensor();
  const Tolerance tolerance = out == Dtype::f32 ? kStatSums : kSums;
  const Shape shape{s.rows, s.columns};
  const Tensor y = accumulate ? o.updated("out", o.input_of(out, shape), tolerance) : o.output_of(out, "out", shape, tolerance);
  o.device().run(Gemm{.a = {a, a_transposed}, .b = {b, b_transposed}, .out = y, .accumulate = accumulate, .bias = bias});
}

inline void gemms_cases(Cases& add) {
  for (const GemmShape s : {GemmShape{1, 1, 1}, {3, 5, 7}, {64, 64, 64}, {65, 100, 33}, {130, 48, 257}, {8, 1500, 64}}) {
    for (const int orientation : {0, 1, 2, 3}) {
      const bool at = orientation & 1, bt = orientation & 2;
      const std::string variant = named({s.rows, s.inner, s.columns}) + (at ? "_at" : "_a") + (bt ? "_bt" : "_b");
      add("Gemm", variant, [=](Operands& o) { gemm_case(o, s, at, bt, o.dtype(), false, false); });
      add("Gemm", variant + "_bias", [=](Operands& o) { gemm_case(o, s, at, bt, o.dtype(), false, true); });
      add("Gemm", variant + "_fp32_accumulate", [=](Operands& o) { gemm_case(o, s, at, bt, Dtype::f32, true, false); });
      add("Gemm", variant + "_fp32", [=](Operands& o) { gemm_case(o, s, at, bt, Dtype::f32, false, false); });
    }
  }
  for (const bool accumulate : {false, true}) {
    for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 5}, {7, 48}, {130, 257}, {1000, 33}}) {
      const std::string variant = named({rows, columns}) + (accumulate ? "_accumulate" : "");
      add("SumRows", variant, [=, r = rows, c = columns](Operands& o) {
        const Tensor x = o.input({r, c});
        o.device().run(SumRows{.x = x, .out = o.gradient("out", {c}, kStatSums, accumulate), .accumulate = accumulate});
      });
      add("EmbeddingBackward", variant, [=, r = rows, c = columns](Operands& o) {
        const Tensor ids = o.indices(r, 11), dy = o.input({r, c});
        const Tensor dweight = o.gradient("dweight", {11, c}, kExact, accumulate);
        o.device().run(EmbeddingBackward{.ids = ids, .dy = dy, .dweight = dweight, .accumulate = accumulate});
      });
      add("EmbeddingBackward", variant + "_part", [=, r = rows, c = columns](Operands& o) {
        const Tensor ids = o.indices(r, 11), dy = o.input({r, c});
        const Tensor dweight = o.gradient("dweight", {4, c}, kExact, accumulate);
        o.device().run(
            EmbeddingBackward{.ids = ids, .dy = dy, .dweight = dweight, .accumulate = accumulate, .part = {.first = 3, .rows = 11}});
      });
      if (accumulate) continue;
      add("EmbeddingForward", variant, [r = rows, c = columns](Operands& o) {
        const Tensor ids = o.indices(r, 11), weight = o.input({11, c});
        o.device().run(EmbeddingForward{.ids = ids, .weight = weight, .out = o.output("out", {r, c}, kExact)});
      });
      add("EmbeddingForward", variant + "_part", [r = rows, c = columns](Operands& o) {
        const Tensor ids = o.indices(r, 11), weight = o.input({4, c}), out = o.output("out", {r, c}, kExact);
        o.device().run(EmbeddingForward{.ids = ids, .weight = weight, .out = out, .part = {.first = 3, .rows = 11}});
      });
    }
  }
}

// The reference adds the squares of a row one after the other.
inline Tolerance sums_of_squares(int64_t channels) { return channels > 2048 ? kStatSums : kStats; }

inline void rms_norm_case(Operands& o, int64_t rows, int64_t channels, bool adds) {
  const Tensor x = o.input({rows, channels}, 3.0), weight = o.input({channels}, 0.3, 1.0);
  o.device().run(RmsNormForward{.x = x,
                                .weight = weight,
                                .y = o.output("y", {rows, channels}, kValues),
                                .rstd = o.output_of(Dtype::f32, "rstd", {rows}, sums_of_squares(channels)),
                                .eps = 1e-5,
                                .branch = adds ? o.input({rows, channels}) : Tensor(),
                                .sum = adds ? o.output("sum", {rows, channels}, kExact) : Tensor()});
}

inline void rms_norm_backward_case(Operands& o, int64_t rows, int64_t channels, bool accumulate) {
  const Tensor x = o.input({rows, channels}, 3.0), weight = o.input({channels}, 0.3, 1.0), dy = o.input({rows, channels});
  const Tensor rstd = o.input_of(Dtype::f32, {rows}, 0.02, 0.33);
  o.device().run(RmsNormBackward{.x = x,
                                 .weight = weight,
                                 .rstd = rstd,
                                 .dy = dy,
                                 .dx = o.output("dx", {rows, channels}, kSums),
                                 .dweight = o.gradient("dweight", {channels}, kStatSums, accumulate),
                                 .accumulate = accumulate});
}

inline void layer_norm_case(Operands& o, int64_t rows, int64_t channels, bool with_bias, bool adds) {
  const Tensor x = o.input({rows, channels}, 3.0, 10.0), weight = o.input({channels}, 0.3, 1.0);
  o.device().run(LayerNormForward{.x = x,
                                  .weight = weight,
                                  .y = o.output("y", {rows, channels}, {1e-5, 0x1p-7}),
                                  .mean = o.output_of(Dtype::f32, "mean", {rows}, kStats),
                                  .rstd = o.output_of(Dtype::f32, "rstd", {rows}, kStatSums),
                                  .eps = 1e-5,
                                  .bias = with_bias ? o.input({channels}) : Tensor(),
                                  .branch = adds ? o.input({rows, channels}) : Tensor(),
                                  .sum = adds ? o.output("sum", {rows, channels}, kExact) : Tensor()});
}

inline void layer_norm_backward_case(Operands& o, int64_t rows, int64_t channels, bool with_bias, bool accumulate) {
  const Tensor x = o.input({rows, channels}, 3.0, 1.0), weight = o.input({channels}, 0.3, 1.0), dy = o.input({rows, channels});
  const Tensor mean = o.input_of(Dtype::f32, {rows}, 0.1, 1.0), rstd = o.input_of(Dtype::f32, {rows}, 0.02, 0.33);
  o.device().run(LayerNormBackward{.x = x,
                                   .weight = weight,
                                   .mean = mean,
                                   .rstd = rstd,
                                   .dy = dy,
                                   .dx = o.output("dx", {rows, channels}, kSums),
                                   .dweight = o.gradient("dweight", {channels}, kStatSums, accumulate),
                                   .accumulate = accumulate,
                                   .dbias = with_bias ? o.gradient("dbias", {channels}, kStatSums, accumulate) : Tensor()});
}

inline void norms_cases(Cases& add) {
  for (const auto& [rows, channels] : {std::pair<int64_t, int64_t>{1, 1}, {3, 5}, {33, 48}, {130, 257}, {70, 768}}) {
    const std::string size = named({rows, channels});
    const int64_t r = rows, c = channels;
    for (const bool flag : {false, true}) {
      const std::string accumulate = size + (flag ? "_accumulate" : ""), branch = flag ? "_branch" : "";
      add("RmsNormForward", size + branch, [=](Operands& o) { rms_norm_case(o, r, c, flag); });
      if (c > 1) add("LayerNormForward", size + branch + "_bias", [=](Operands& o) { layer_norm_case(o, r, c, true, flag); });
      add("RmsNormBackward", accumulate, [=](Operands& o) { rms_norm_backward_case(o, r, c, flag); });
      if (c > 1 && !flag) add("LayerNormForward", size, [=](Operands& o) { layer_norm_case(o, r, c, false, false); });
      add("LayerNormBackward", accumulate, [=](Operands& o) { layer_norm_backward_case(o, r, c, false, flag); });
      add("LayerNormBackward", accumulate + "_bias", [=](Operands& o) { layer_norm_backward_case(o, r, c, true, flag); });
    }
  }
}

// Where tanh nears 1, its rounding error is multiplied by 0.5 x du/dx, up to 6 before 1 - tanh^2 vanishes.
inline constexpr Tolerance kGeluSlope{5e-6, 0x1p-7};

inline void activations_cases(Cases& add) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {7, 5}, {33, 257}, {130, 64}, {3, 255}, {2, 1026}}) {
    const Shape shape{rows, columns}, twice{rows, 2 * columns};
    const std::string size = named({rows, columns});
    for (const double scale : {1.0, 50.0, 4096.0}) {  // 50: where exp and tanh saturate
      if (scale > 1.0 && columns != 257) continue;
      const std::string variant = size + (scale > 1.0 ? "_times" + named({static_cast<int64_t>(scale)}) : "");
      for (const double limit : {0.0, scale > 1.0 ? 7.0 : 1.0}) {
        const std::string limited = variant + (limit > 0.0 ? "_limit" + named({static_cast<int64_t>(limit)}) : "");
        add("SwiGluForward", limited, [=](Operands& o) {
          const Tensor x = o.input(twice, scale);
          o.device().run(SwiGluForward{.x = x, .out = o.output("out", shape, kValues), .limit = limit});
        });
        add("SwiGluBackward", limited, [=](Operands& o) {
          const Tensor x = o.input(twice, scale), dy = o.input(shape);
          o.device().run(SwiGluBackward{.x = x, .dy = dy, .dx = o.output("dx", twice, kValues), .limit = limit});
        });
        add("SwiGluForward", limited + "_weighted", [=](Operands& o) {
          const Tensor x = o.input(twice, scale), weights = o.input_of(Dtype::f32, {rows});
          o.device().run(SwiGluForward{.x = x, .out = o.output("out", shape, kValues), .row_weights = weights, .limit = limit});
        });
        add("SwiGluBackward", limited + "_weighted", [=](Operands& o) {
          const Tensor x = o.input(twice, scale), dy = o.input(shape), weights = o.input_of(Dtype::f32, {rows});
          o.device().run(SwiGluBackward{.x = x,
                                        .dy = dy,
                                        .dx = o.output("dx", twice, kValues),
                                        .row_weights = weights,
                                        .drow_weights = o.output_of(Dtype::f32, "drow_weights", {rows}, kStatSums),
                                        .limit = limit});
        });
      }
      for (const GeluForm form : {GeluForm::tanh, GeluForm::erf}) {
        const std::string formed = variant + (form == GeluForm::tanh ? "_tanh" : "_erf");
        add("GeluForward", formed, [=](Operands& o) {
          const Tensor x = o.input(shape, scale);
          o.device().run(GeluForward{.x = x, .out = o.output("out", shape, kValues), .form = form});
        });
        add("GeluBackward", formed, [=](Operands& o) {
          const Tensor x = o.input(shape, scale), dy = o.input(shape);
          o.device().run(GeluBackward{.x = x, .dy = dy, .dx = o.output("dx", shape, kGeluSlope), .form = form});
        });
      }
    }
  }
}

enum class Gradient { none, apart, in_place };

inline void cross_entropy_case(Operands& o, int64_t rows, int64_t vocab, int64_t columns, double scale, Gradient gradient) {
  Tensor logits = o.input({rows, columns}, scale);
  std::vector<double> targets = values(o.indices(rows, vocab));
  for (size_t i = 1; i < targets.size(); i += 4) targets[i] = -100.0;
  const Tensor dlogits = gradient == Gradient::apart      ? o.output("dlogits", {rows, columns}, kSums)
                         : gradient == Gradient::in_place ? o.updated("dlogits", logits, kSums)
                                                          : Tensor();
  o.device().run(CrossEntropy{.logits = logits,
                              .targets = o.given(Dtype::i32, {rows}, targets),
                              .loss = o.output_of(Dtype::f32, "loss", {rows}, kStatSums),
                              .vocab = vocab,
                              .scale = 0.125,
                              .dlogits = dlogits});
}

// Columns in the middle of the whole; the last ones are padding or, where none is, those of the next rank, of which the first is a target.
inline void cross_entropy_share_case(Operands& o, int64_t rows, int64_t own, int64_t columns, double scale) {
  const Tensor logits = o.input({rows, columns}, scale);
  const int64_t vocab = columns + own + (own == columns ? columns : 0);
  std::vector<double> targets = values(o.indices(rows, vocab));
  for (size_t i = 1; i < targets.size(); i += 4) targets[i] = -100.0;
  if (own == columns) targets[0] = static_cast<double>(columns + own);
  o.device().run(CrossEntropyShare{.logits = logits,
                                   .targets = o.given(Dtype::i32, {rows}, targets),
                                   .sums = o.output_of(Dtype::f32, "sums", {rows, 2}, kStatSums),
                                   .first = columns,
                                   .vocab = vocab});
}

// Runs with the sums of two other ranks, one of which has no column, and the largest logit of this one.
inline void cross_entropy_of_shares_case(Operands& o, int64_t rows, int64_t own, int64_t columns, double scale, Gradient gradient) {
  const Tensor logits = o.input({rows, columns}, scale);
  std::vector<double> targets = values(o.indices(rows, columns + own)), sums;
  for (size_t i = 1; i < targets.size(); i += 4) targets[i] = -100.0;
  const std::vector<double> all = values(logits);
  for (int64_t i = 0; i < 3 * rows; ++i) {
    const auto row = all.begin() + i % rows * columns;
    const double largest = std::accumulate(row, row + own, -HUGE_VAL, [](double a, double b) { return std::fmax(a, b); }) + 0.5;
    sums.push_back(i < rows ? largest - 0.25 : i < 2 * rows ? largest : -HUGE_VAL);
    sums.push_back(i < rows ? largest - 3.0 : 0.0);
  }
  const Tensor dlogits = gradient == Gradient::apart      ? o.output("dlogits", {rows, columns}, kSums)
                         : gradient == Gradient::in_place ? o.updated("dlogits", logits, kSums)
                                                          : Tensor();
  o.device().run(CrossEntropyOfShares{.logits = logits,
                                      .targets = o.given(Dtype::i32, {rows}, targets),
                                      .sums = o.given(Dtype::f32, {3, rows, 2}, sums),
                                      .loss = o.output_of(Dtype::f32, "loss", {rows}, kStatSums),
                                      .first = columns,
                                      .vocab = columns + own,
                                      .scale = 0.125,
                                      .dlogits = dlogits});
}

inline std::vector<double> some_targets(Operands& o, int64_t rows, int64_t vocab) {
  std::vector<double> targets = values(o.indices(rows, vocab));
  for (size_t i = 1; i < targets.size(); i += 4) targets[i] = -100.0;
  return targets;
}

// Columns as in cross_entropy_share_case().
inline void distillation_share_case(Operands& o, int64_t rows, int64_t own, int64_t columns, double scale, double temperature) {
  const Tensor logits = o.input({rows, columns}, scale), teacher = o.input({rows, columns}, scale);
  const int64_t vocab = columns + own + (own == columns ? columns : 0);
  o.device().run(DistillationShare{.logits = logits,
                                   .teacher = teacher,
                                   .targets = o.given(Dtype::i32, {rows}, some_targets(o, rows, vocab)),
                                   .sums = o.output_of(Dtype::f32, "sums", {rows, DistillationShare::kSums}, kStatSums),
                                   .first = columns,
                                   .vocab = vocab,
                                   .temperature = temperature});
}

struct Taught {
  double temperature, weight;
};

// Runs with the sums of two other ranks, one of which has no column, and the largest logits of this one.
inline void distillation_of_shares_case(Operands& o, int64_t rows, int64_t own, int64_t columns, double scale, const Taught& how,
                                        Gradient gradient) {
  const Tensor logits = o.input({rows, columns}, scale), teacher = o.input({rows, columns}, scale);
  const std::vector<double> student = values(logits), taught = values(teacher);
  std::vector<double> sums;
  for (int64_t i = 0; i < 3 * rows; ++i) {
    const auto largest = [&](const std::vector<double>& of) {
      const auto row = of.begin() + i % rows * columns;
      return std::accumulate(row, row + own, -HUGE_VAL, [](double a, double b) { return std::fmax(a, b); }) + 0.5;
    };
    const bool first = i < rows, none = i >= 2 * rows;
    const double less = first ? 0.25 : 0.0;
    const auto log_sum = [&](double of, double divided) { return none ? -HUGE_VAL : of / divided - less; };
    sums.insert(sums.end(), {log_sum(largest(student), how.temperature), log_sum(largest(taught), how.temperature),
                             none ? 0.0 : 0.75 - less, log_sum(largest(student), 1.0), first ? largest(student) - 3.0 : 0.0});
  }
  const Tensor dlogits = gradient == Gradient::apart      ? o.output("dlogits", {rows, columns}, kSums)
                         : gradient == Gradient::in_place ? o.updated("dlogits", logits, kSums)
                                                          : Tensor();
  o.device().run(DistillationOfShares{.logits = logits,
                                      .teacher = teacher,
                                      .targets = o.given(Dtype::i32, {rows}, some_targets(o, rows, columns + own)),
                                      .sums = o.given(Dtype::f32, {3, rows, DistillationShare::kSums}, sums),
                                      .loss = o.output_of(Dtype::f32, "loss", {rows}, kStatSums),
                                      .first = columns,
                                      .vocab = columns + own,
                                      .temperature = how.temperature,
                                      .weight = how.weight,
                                      .scale = 0.125,
                                      .dlogits = dlogits});
}

inline void distillation_cases(Cases& add) {
  for (const auto& [rows, own, columns] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1}, {5, 3, 8}, {33, 257, 257}, {3, 1536, 1540}}) {
    for (const double scale : {1.0, 200.0}) {
      if (scale > 1.0 && own != 257) continue;
      const int64_t r = rows, v = own, c = columns;
      const std::string size = named({r, v, c}) + (scale > 1.0 ? "_times200" : "");
      add("DistillationShare", size, [=](Operands& o) { distillation_share_case(o, r, v, c, scale, 1.0); });
      add("DistillationShare", size + "_warm", [=](Operands& o) { distillation_share_case(o, r, v, c, scale, 2.5); });
      add("DistillationOfShares", size, [=](Operands& o) { distillation_of_shares_case(o, r, v, c, scale, {1, 1}, Gradient::none); });
      for (const auto& [how, name] :
           {std::pair{Taught{1.0, 1.0}, ""}, {{1.0, 0.75}, "_labels"}, {{2.5, 1.0}, "_warm"}, {{0.5, 0.25}, "_both"}}) {
        add("DistillationOfShares", text(size, "_gradient", name),
            [=, h = how](Operands& o) { distillation_of_shares_case(o, r, v, c, scale, h, Gradient::apart); });
      }
      add("DistillationOfShares", size + "_in_place", [=](Operands& o) {
        distillation_of_shares_case(o, r, v, c, scale, {2.5, 0.5}, Gradient::in_place);
      });
    }
  }
}

inline AdamW adamw_of(Operands& o, Shape shape, bool with_value, double skip) {
  const Tensor master = o.updated("master", o.input_of(Dtype::f32, shape), kExact);
  const Tensor m = o.updated("m", o.input_of(Dtype::f32, shape, 0.1), kExact), grad = o.input_of(Dtype::f32, shape);
  std::vector<double> squares = random_values(shape.elements(), 77, 0.1);
  for (double& s : squares) s *= s;
  const Tensor v = o.updated("v", o.given(Dtype::f32, shape, squares), kExact);
  const Tensor step = o.given(Dtype::f32, {5}, {3e-3, 1.7, 9.3, 0.81, skip});
  const Tensor value = with_value ? o.updated("value", o.input(shape), kExact) : Tensor();
  return {.master = master,
          .m = m,
          .v = v,
          .grad = grad,
          .step = step,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .value = value};
}
inline void adamw_case(Operands& o, Shape shape, bool with_value, double skip) { o.device().run(adamw_of(o, shape, with_value, skip)); }

// Tensors of one call: some of several blocks, one that is skipped, more than a warp has lanes.
inline void adamw_of_many(Operands& o) {
  std::vector<AdamW> all;
  for (const int64_t size : {5, 20001, 8192, 1, 8193}) all.push_back(adamw_of(o, {size}, size != 1, size == 8192 ? 1.0 : 0.0));
  for (int64_t size = 1; size < 40; ++size) all.push_back(adamw_of(o, {size}, size % 2 == 0, 0.0));
  o.device().run_all(std::span<const AdamW>(all));
}
inline void squared_norms_of_many(Operands& o) {
  std::vector<SquaredNorm> all;
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{33, 7}, {100, 257}, {1, 1}, {64, 3}})
    all.push_back({.x = o.input({rows, columns}), .partials = o.output_of(Dtype::f64, "partials", {(rows + 31) / 32}, {1e-13, 1e-13})});
  o.device().run_all(std::span<const SquaredNorm>(all));
}

// Moments of bf16: of an operand that is `stride` wide in the whole tensor.
inline AdamW rounded_adamw_of(Operands& o, Shape shape, int64_t stride, bool with_value, double skip) {
  const Tensor master = o.updated("master", o.input_of(Dtype::f32, shape), kExact), grad = o.input_of(Dtype::f32, shape);
  const Tensor m = o.updated("m", o.input_of(Dtype::bf16, shape, 0.1), kExact);
  const Tensor v = o.updated("v", o.given(Dtype::bf16, shape, std::vector<double>(static_cast<size_t>(shape.elements()), 0.01)), kExact);
  return {.master = master,
          .m = m,
          .v = v,
          .grad = grad,
          .step = o.given(Dtype::f32, {5}, {3e-3, 1.7, 9.3, 0.81, skip}),
          .beta1 = 0.9,
          .beta2 = 0.95,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .value = with_value ? o.updated("value", o.input(shape), kExact) : Tensor(),
          .rounding = {.seed = 77, .what = 5, .first = (uint64_t{1} << 34) + 3, .row_stride = stride}};
}
inline void rounded_adamw_case(Operands& o, Shape shape, int64_t stride, bool with_value, double skip) {
  o.device().run(rounded_adamw_of(o, shape, stride, with_value, skip));
}
inline void rounded_adamw_of_many(Operands& o) {
  std::vector<AdamW> all;
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{33, 257}, {1, 1}, {64, 3}})
    all.push_back(rounded_adamw_of(o, {rows, columns}, rows == 1 ? 0 : columns + 9, rows == 64, 0.0));
  o.device().run_all(std::span<const AdamW>(all));
}

// A momentum of bf16 where `stride` is that of a wider tensor.
inline void muon_momentum_case(Operands& o, Shape shape, int64_t stride, bool nesterov, double skip) {
  o.device().run(MuonMomentum{.m = o.updated("m", o.input_of(stride > 0 ? Dtype::bf16 : Dtype::f32, shape, 0.1), kExact),
                              .grad = o.input_of(Dtype::f32, shape),
                              .step = o.given(Dtype::f32, {5}, {3e-3, 1.7, 9.3, 0.81, skip}),
                              .out = o.output("out", shape, kExact),
                              .momentum = 0.95,
                              .nesterov = nesterov,
                              .rounding = {.seed = 77, .what = 5, .first = 6, .row_stride = stride}});
}

inline void muon_update_case(Operands& o, Shape shape, bool with_value, double skip) {
  const Tensor master = o.updated("master", o.input_of(Dtype::f32, shape), kExact);
  o.device().run(MuonUpdate{.master = master,
                            .direction = o.input(shape),
                            .step = o.given(Dtype::f32, {5}, {3e-3, 1.7, 9.3, 0.81, skip}),
                            .scale = 1.3,
                            .weight_decay = 0.1,
                            .value = with_value ? o.output("value", shape, kExact) : Tensor()});
}

inline void muon_cases(Cases& add) {
  add("AdamW", "of_many_rounded", rounded_adamw_of_many);
  for (const Shape shape : {Shape{1, 1}, Shape{7, 5}, Shape{33, 257}}) {
    for (const double skip : {0.0, 1.0}) {
      const std::string size = named({shape[0], shape[1]}) + (skip > 0.0 ? "_skipped" : "");
      const int64_t wide = shape[1] + 9;
      add("AdamW", size + "_rounded", [=](Operands& o) { rounded_adamw_case(o, shape, 0, false, skip); });
      add("AdamW", size + "_rounded_part", [=](Operands& o) { rounded_adamw_case(o, shape, wide, true, skip); });
      add("MuonMomentum", size, [=](Operands& o) { muon_momentum_case(o, shape, 0, false, skip); });
      add("MuonMomentum", size + "_nesterov", [=](Operands& o) { muon_momentum_case(o, shape, 0, true, skip); });
      add("MuonMomentum", size + "_rounded", [=](Operands& o) { muon_momentum_case(o, shape, shape[1], true, skip); });
      add("MuonMomentum", size + "_rounded_part", [=](Operands& o) { muon_momentum_case(o, shape, wide, true, skip); });
      add("MuonUpdate", size, [=](Operands& o) { muon_update_case(o, shape, false, skip); });
      add("MuonUpdate", size + "_value", [=](Operands& o) { muon_update_case(o, shape, true, skip); });
    }
    add("DivideByNorm", named({shape[0], shape[1]}), [=](Operands& o) {
      const std::vector<double> squares((static_cast<size_t>(shape[0]) + 31) / 32, 1.25);
      const Tensor x = o.input(shape), partials = o.given(Dtype::f64, {std::ssize(squares)}, squares);
      o.device().run(DivideByNorm{.x = x, .partials = partials, .out = o.output("out", shape, kExact)});
    });
  }
  add("DivideByNorm", "of_zeros", [=](Operands& o) {
    const Tensor x = o.updated("out", o.input({3, 5}), kExact);
    o.device().run(DivideByNorm{.x = x, .partials = o.given(Dtype::f64, {1}, {0.0}), .out = x});
  });
  for (const int64_t n : {1, 7, 33, 300}) {
    add("NewtonSchulzPolynomial", named({n}), [=](Operands& o) {
      const Tensor gram = o.updated("gram", o.input({n, n}), kExact);
      o.device().run(NewtonSchulzPolynomial{.gram = gram, .square = o.input_of(Dtype::f32, {n, n}), .a = 3.4445, .b = -4.775, .c = 2.0315});
    });
  }
}

inline void loss_and_optimizer_cases(Cases& add) {
  for (const auto& [rows, vocab, columns] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1},
                                             {5, 3, 8},
                                             {33, 257, 257},
                                             {35, 1000, 1024},
                                             {9, 511, 512},
                                             {5, 1025, 1025},
                                             {3, 1536, 1540}}) {
    // Beyond 1 exponentials underflow, and overflow unless the largest logit is taken out.
    for (const double scale : {1.0, 40.0, 200.0, 4096.0}) {
      if (scale > 1.0 && vocab != 257 && vocab != 1536) continue;
      const int64_t r = rows, v = vocab, c = columns;
      const std::string size = named({r, v, c}) + (scale > 1.0 ? "_times" + named({static_cast<int64_t>(scale)}) : "");
      add("CrossEntropy", size, [=](Operands& o) { cross_entropy_case(o, r, v, c, scale, Gradient::none); });
      add("CrossEntropy", size + "_gradient", [=](Operands& o) { cross_entropy_case(o, r, v, c, scale, Gradient::apart); });
      add("CrossEntropy", size + "_in_place", [=](Operands& o) { cross_entropy_case(o, r, v, c, scale, Gradient::in_place); });
      add("CrossEntropyShare", size, [=](Operands& o) { cross_entropy_share_case(o, r, v, c, scale); });
      for (const auto& [of, name] : {std::pair{Gradient::none, ""}, {Gradient::apart, "_gradient"}, {Gradient::in_place, "_in_place"}}) {
        add("CrossEntropyOfShares", size + name, [=, g = of](Operands& o) { cross_entropy_of_shares_case(o, r, v, c, scale, g); });
      }
    }
  }
  for (const Shape shape : {Shape{1}, Shape{7, 5}, Shape{20001}}) {
    const std::string size = named({shape.elements()});
    add("AdamW", size, [=](Operands& o) { adamw_case(o, shape, false, 0.0); });
    add("AdamW", size + "_value", [=](Operands& o) { adamw_case(o, shape, true, 0.0); });
    add("AdamW", size + "_skipped", [=](Operands& o) { adamw_case(o, shape, true, 1.0); });
  }
  add("AdamW", "many", adamw_of_many);
  add("SquaredNorm", "many", squared_norms_of_many);
  for (const bool flag : {false, true}) {
    add("FinishGradients", flag ? "skipped" : "taken", [=](Operands& o) {
      o.device().run(FinishGradients{.partials = o.given(Dtype::f64, {3}, {1.5, 0.25, 7.0}),
                                     .losses = o.given(Dtype::f64, {4}, {1.0, 2.0, 3.5, 0.1}),
                                     .flags = o.given(Dtype::i32, {2}, {0.0, flag ? 1.0 : 0.0}),
                                     .step = o.updated("step", o.given(Dtype::f32, {5}, {3e-3, 1.7, 9.3, 0.0, 0.0}), kExact),
                                     .outcome = o.output_of(Dtype::f64, "outcome", {4}, kExact),
                                     .clip = 1.0,
                                     .pairwise = true});
    });
  }
  for (const Shape shape : {Shape{1}, Shape{33, 7}, Shape{100, 257}, Shape{64, 3, 5}}) {
    add("SquaredNorm", named({shape.elements()}), [=](Operands& o) {
      const Tensor x = o.input(shape, 1e25);  // squares overflow fp32
      o.device().run(SquaredNorm{.x = x, .partials = o.output_of(Dtype::f64, "partials", {(shape[0] + 31) / 32}, {1e-13, 1e-13})});
    });
  }
}

}  // namespace mantissa::test
