// Attention where hidden values are NaN or Inf, as in the reference, and the rows of generation.
#include <cmath>

#include "attention_runs.h"
#include "kernel_backends.h"

namespace mantissa::test::attention_test {

using SimtAttention = OnAllBackends;

// One element of a row that is not finite: of the packed row, or of dout.
struct Fault {
  int64_t column;
  bool of_dout;
  double value;
};

// Faults are at the edges of tiles, of windows and of documents. Columns 16 and 24 of a packed row begin its key and its value.
TEST_F(SimtAttention, WhatIsNotSeenMayBeNaN) {
  const AttentionCase usual{.length = 150, .layout = {.heads = 2, .kv_heads = 1, .head_dim = 8}};
  std::vector<AttentionCase> cases(5, usual);
  cases[1].window = 5, cases[2].window = 70, cases[4].window = 20;
  cases[2].sinks = cases[3].sinks = true;
  cases[3].documents = cases[4].documents = {0, 40, 70, 131};
  for (size_t i = 0; i < cases.size(); ++i) {
    const AttentionCase& c = cases[i];
    const Fault faults[] = {{19, false, std::nan("")}, {27, false, HUGE_VAL}, {9, true, std::nan("")}};
    const int64_t rows[] = {39, 64, 149};
    for (size_t at = 0; at < 9; ++at) {
      if ((at % 3 + at / 3 + i) % 3 == 0) continue;  // each of them in most of the cases
      const Fault& fault = faults[at % 3];
      const int64_t row = rows[at / 3];
      SCOPED_TRACE(text(c.name(), ": row ", row, ", column ", fault.column, fault.of_dout ? " of dout" : "", ", ", fault.value));
      std::vector<double> qkv = c.random_qkv(), dout = c.random_dout();
      (fault.of_dout ? dout : qkv)[static_cast<size_t>(row * (fault.of_dout ? c.width() : c.layout.row()) + fault.column)] = fault.value;
      const AttentionResults expected = run_attention(reference(), Dtype::f32, c, qkv, dout);
      for (Backend* device : tested()) expect_close_attention(run_attention(*device, Dtype::f32, c, qkv, dout), expected);
      if (HasFailure()) return;
    }
  }
}

// A value that a query sees counts, however small its weight is: 0 times Inf.
TEST_F(SimtAttention, WhatIsSeenIsMultipliedByAWeightOfZero) {
  for (Backend* device : devices()) {
    const HeadLayout layout{.heads = 1, .kv_heads = 1, .head_dim = 2};
    const Tensor qkv = tensor_of(*device, Dtype::f32, {2, 6}, {1, 0, -200, 0, HUGE_VAL, 1, 1, 0, 200, 0, 1, 1}),
                 out = empty(*device, Dtype::f32, {2, 2}), lse = empty(*device, Dtype::f32, {1, 1, 2});
    device->run(AttentionForward{.qkv = qkv, .out = out, .lse = lse, .batch = 1, .layout = layout, .scale = 1.0});
    const std::vector<double> mixed = values(out);
    EXPECT_TRUE(std::isnan(mixed[2])) << device->name();
    EXPECT_EQ(mixed[3], 1.0) << device->name();
  }
}

// Scores of -Inf come before the first finite one, in a tile and in a warp of their own.
TEST_F(SimtAttention, WeightsOfScoresThatOverflowAreZero) {
  for (Backend* device : devices()) {
    const HeadLayout layout{.heads = 1, .kv_heads = 1, .head_dim = 1};
    std::vector<double> x, keys(65, -3e38);
    for (int64_t i = 0; i < 65; ++i) x.insert(x.end(), {10.0, i < 64 ? -3e38 : 1.0, static_cast<double>(i)});
    const Tensor qkv = tensor_of(*device, Dtype::f32, {65, 3}, x), out = empty(*device, Dtype::f32, {65, 1}),
                 lse = empty(*device, Dtype::f32, {1, 1, 65}), row = empty(*device, Dtype::f32, {1, 1});
    device->run(AttentionForward{.qkv = qkv, .out = out, .lse = lse, .batch = 1, .layout = layout, .scale = 1.0});
    EXPECT_EQ(values(out).back(), 64.0) << device->name();
    device->run(CachedAttention{.qkv = qkv.slice(64, 65),
                                .keys = tensor_of(*device, Dtype::f32, {65, 1}, keys),
                                .values = random_tensor(*device, Dtype::f32, {65, 1}, 1),
                                .out = row,
                                .first = 64,
                                .layout = layout,
                                .scale = 1.0});
    EXPECT_EQ(values(row).back(), 64.0) << device->name();
  }
}

// Rows of generation, of which few have a kernel of their own.
struct Step {
  int64_t first, rows, window;
  HeadLayout layout;
  Dtype dtype;

  double scale() const { return 1.0 / std::sqrt(static_cast<double>(layout.head_dim)); }
};

// Keys behind the last row are NaN, and so is one before those that the window shows.
Tensor generate(Backend& device, const Step& s, int64_t begin, int64_t end) {
  const int64_t channels = s.layout.kv_heads * s.layout.head_dim, last = s.first + s.rows;
  const auto cache = [&](uint32_t what) {
    std::vector<double> x = random_values((last + 3) * channels, what);
    std::fill(x.end() - 3 * channels, x.end(), std::nan(""));
    if (s.window > 0 && s.first >= s.window) std::fill_n(x.begin() + (s.first - s.window) * channels, channels, std::nan(""));
    return tensor_of(device, s.dtype, {last + 3, channels}, x);
  };
  const Tensor qkv = random_tensor(device, s.dtype, {s.rows, s.layout.row()}, 5),
               out = empty(device, s.dtype, {end - begin, s.layout.heads * s.layout.head_dim}), keys = cache(3), kept = cache(4);
  for (int64_t row = 0; row < begin; ++row) {
    device.run(CachedAttention{.qkv = qkv.slice(row, row + 1),
                               .keys = keys,
                               .values = kept,
                               .out = out.slice(0, 1),
                               .first = s.first + row,
                               .layout = s.layout,
                               .scale = s.scale(),
                               .window = s.window});
  }
  device.run(CachedAttention{.qkv = qkv.slice(begin, end),
                             .keys = keys,
                             .values = kept,
                             .out = out,
                             .first = s.first + begin,
                             .layout = s.layout,
                             .scale = s.scale(),
                             .window = s.window,
                             .sinks = s.window == 40 ? random_tensor(device, s.dtype, {s.layout.heads}, 6, 3.0) : Tensor()});
  return out;
}

TEST_F(SimtAttention, RowsOfGenerationAreThoseOfTheReference) {
  for (const HeadLayout layout : {HeadLayout{2, 1, 1}, {1, 1, 33}, {4, 2, 64}, {1, 1, 80}, {2, 2, 256}, {1, 1, 264}}) {
    for (const auto& [first, rows] :
         {std::pair<int64_t, int64_t>{0, 1}, {0, 3}, {31, 1}, {32, 2}, {255, 1}, {256, 1}, {300, 2}, {20, 15}, {300, 16}, {10, 70}}) {
      for (const int64_t window : {0, 40}) {
        if (window > first + rows) continue;
        for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
          if (dtype == Dtype::bf16 && layout.head_dim != 80) continue;
          const Step s{first, rows, window, layout, dtype};
          const Tensor expected = generate(reference(), s, 0, rows);
          for (Backend* device : tested()) {
            EXPECT_TRUE(close(generate(*device, s, 0, rows), expected, dtype == Dtype::f32 ? 1e-5 : 0x1p-7))
                << layout.head_dim << " channels, " << first << " + " << rows << ", window " << window << ", " << dtype;
          }
        }
      }
    }
  }
}

TEST_F(SimtAttention, ARowOfGenerationHasTheBitsThatItHasAlone) {
  const Step s{.first = 290, .rows = 9, .window = 0, .layout = {4, 2, 40}, .dtype = Dtype::f32};
  for (Backend* device : tested()) {
    EXPECT_TRUE(same_bits(generate(*device, s, 7, 8), generate(*device, s, 0, 9).slice(7, 8)));
  }
}

}  // namespace mantissa::test::attention_test
