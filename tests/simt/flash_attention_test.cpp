// Attention on tensor cores against the reference: the edges of tiles, windows, documents and groups, and NaN and Inf.
#include <array>
#include <cmath>

#include "attention_runs.h"

namespace mantissa::test::flash_attention_test {

class FlashAttention : public ::testing::Test {
 protected:
  Backend& device() { return *device_; }
  Backend& reference() { return *reference_; }

  // Rounds to numbers that bf16 holds.
  static std::vector<double> rounded(std::vector<double> x) {
    for (double& value : x) value = static_cast<double>(to_float(to_bf16(static_cast<float>(value))));
    return x;
  }

  // Expects results that are not finite where those of the reference are not. Elsewhere the root mean square of the error is at most
  // `tolerance` of that of the values, and no error is larger than 16 times this: single sums cancel.
  static void expect_alike(const Tensor& actual, const Tensor& expected, double tolerance, const char* what) {
    const FiniteValues finite(actual, expected, what);
    double squares = 0.0, errors = 0.0;
    for (size_t i = 0; i < finite.expected.size(); ++i) {
      const double error = finite.found[i] - finite.expected[i];
      squares += finite.expected[i] * finite.expected[i], errors += error * error;
    }
    EXPECT_LE(std::sqrt(errors), tolerance * std::sqrt(squares)) << what;
    EXPECT_TRUE(close(finite.found, finite.expected, 16 * tolerance)) << what;
  }

  // Weights and their gradients are rounded to bf16 on tensor cores, and so are the results.
  void expect_as_reference(const AttentionCase& c, const std::vector<double>& qkv, const std::vector<double>& dout) {
    SCOPED_TRACE(c.name());
    const AttentionResults actual = run_attention(device(), Dtype::bf16, c, qkv, dout),
                           expected = run_attention(reference(), Dtype::f32, c, qkv, dout);
    expect_alike(actual.out, expected.out, 0x1p-8, "out");
    expect_alike(actual.lse, expected.lse, 1e-6, "lse");
    expect_alike(actual.dqkv, expected.dqkv, 0x1p-7, "dqkv");
  }
  void expect_as_reference(const AttentionCase& c) { expect_as_reference(c, rounded(c.random_qkv()), rounded(c.random_dout())); }

 private:
  std::unique_ptr<Backend> reference_ = make_backend("cpu_reference"), device_ = make_backend("cuda");
};

constexpr double kSharp = 1.5;

TEST_F(FlashAttention, OfAnyLengthIsThatOfTheReference) {
  for (const int64_t length : {1, 16, 17, 33, 63, 65, 128, 129, 161, 300})
    expect_as_reference({.length = length, .layout = {1, 1, length % 3 == 0 ? 128 : 64}, .sharpness = kSharp});
}

TEST_F(FlashAttention, SeesWindowsDocumentsAndSinks) {
  std::vector<AttentionCase> cases = {{.length = 290, .layout = {1, 1, 64}, .documents = {0, 128, 160, 272}, .sinks = true},
                                      {.length = 256, .layout = {1, 1, 64}, .documents = {0, 230}}};
  for (const HeadLayout layout : {HeadLayout{1, 1, 64}, {2, 1, 128}}) {
    for (const int64_t window : {0, 1, 2, 70, 129}) {
      cases.push_back({.length = 150, .layout = layout, .window = window, .sinks = window % 2 == 0});
      cases.push_back({.length = 135, .layout = layout, .window = window, .documents = {0, 40, 41, 70, 131}});
    }
  }
  for (AttentionCase& c : cases) c.sharpness = kSharp, expect_as_reference(c);
}

// Covers largest scores that change from tile to tile, also by more than exponents hold, where nearly all weights are zeros, and a largest
// score that is that of the least product.
TEST_F(FlashAttention, OfScoresThatDifferByFarIsThatOfTheReference) {
  for (const double sharpness : {0.01, 12.0, 60.0, 600.0, -kSharp})
    expect_as_reference({.length = 200, .layout = {1, 1, 64}, .sharpness = sharpness});
}

// Rows behind those of a cache, of which keys behind the last row and one before the window are NaN, and one value that all rows but the
// first see. The value of the last query of a warp is most of what it sees.
TEST_F(FlashAttention, OfACacheIsThatOfTheReference) {
  for (const auto& [first, rows, window, d] :
       std::vector<std::array<int64_t, 4>>{{0, 16, 0, 64}, {62, 20, 0, 64}, {300, 40, 0, 64}, {33, 150, 70, 128}}) {
    const HeadLayout layout{.heads = 2, .kv_heads = 1, .head_dim = d};
    const auto rows_of = [&](Backend& device, Dtype dtype) {
      const auto cache = [&](uint32_t what) {
        std::vector<double> x = rounded(random_values((first + rows + 3) * d, what));
        std::fill(x.end() - 3 * d, x.end(), std::nan(""));
        if (window > 0 && first >= window) std::fill_n(x.begin() + (first - window) * d, d, std::nan(""));
        return tensor_of(device, dtype, {first + rows + 3, d}, x);
      };
      std::vector<double> x = rounded(random_values(rows * layout.row(), 5));
      x[static_cast<size_t>(2 * layout.row() - 1)] = std::nan("");
      if (rows > 31) x[static_cast<size_t>(32 * layout.row() - d)] = 40.0;
      const Tensor out = empty(device, dtype, {rows, 2 * d});
      device.run(CachedAttention{.qkv = tensor_of(device, dtype, {rows, layout.row()}, x),
                                 .keys = cache(3),
                                 .values = cache(4),
                                 .out = out,
                                 .first = first,
                                 .layout = layout,
                                 .scale = 0.2,
                                 .window = window});
      return out;
    };
    SCOPED_TRACE(text(first, " + ", rows, ", window ", window));
    expect_alike(rows_of(device(), Dtype::bf16), rows_of(reference(), Dtype::f32), 0x1p-8, "out");
  }
}

TEST_F(FlashAttention, OfRandomShapesIsThatOfTheReference) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    auto draw = [&, n = uint64_t{0}](int64_t limit) mutable {
      return static_cast<int64_t>(random_words({.seed = 7}, seed, n++)[0] % static_cast<uint64_t>(limit));
    };
    const int64_t kv_heads = 1 + draw(2), length = 1 + draw(160);
    AttentionCase c{.length = length,
                    .layout = {.heads = kv_heads * (1 + draw(3)), .kv_heads = kv_heads, .head_dim = draw(2) == 0 ? 64 : 128},
                    .sharpness = kSharp};
    c.batch = 1 + draw(2);
    c.window = draw(2) == 0 ? 0 : 1 + draw(length);
    c.sinks = draw(2) == 0;
    for (int64_t at = 0; at < length && seed % 3 == 0; at += 1 + draw(60)) c.documents.push_back(at);
    expect_as_reference(c);
  }
}

TEST_F(FlashAttention, HasBitsThatDoNotDependOnTheAddress) {
  const AttentionCase c{.length = 70, .layout = {2, 1, 64}};
  expect_same_attention(run_attention(device(), Dtype::bf16, c, c.random_qkv(), c.random_dout(), 1),
                        run_attention(device(), Dtype::bf16, c));
}

TEST_F(FlashAttention, HasBitsThatDoNotDependOnOtherSequences) {
  const AttentionCase both{.batch = 2, .length = 150, .layout = {2, 1, 64}, .window = 60},
      one{.length = 150, .layout = both.layout, .window = 60};
  const auto second = [](const std::vector<double>& x) { return std::vector<double>(x.begin() + std::ssize(x) / 2, x.end()); };
  const AttentionResults all = run_attention(device(), Dtype::bf16, both);
  expect_same_attention({all.out.slice(150, 300), all.lse.slice(1, 2), all.dqkv.slice(150, 300)},
                        run_attention(device(), Dtype::bf16, one, second(both.random_qkv()), second(both.random_dout())));
}

// One element of a row is not finite, of its query, key, value or dout: every result that sees it is not finite, and no other.
TEST_F(FlashAttention, WhatIsNotSeenMayBeNaN) {
  std::vector<AttentionCase> cases = {{.length = 131, .layout = {2, 1, 64}},
                                      {.length = 150, .layout = {1, 1, 64}, .window = 5, .sinks = true},
                                      {.length = 150, .layout = {1, 1, 128}, .window = 70},
                                      {.length = 150, .layout = {1, 1, 64}, .documents = {0, 40, 70, 131}}};
  for (size_t i = 0; i < cases.size(); ++i) {
    AttentionCase& c = cases[i];
    c.sharpness = kSharp;
    const int64_t d = c.layout.head_dim, key = c.layout.heads * d, value = key + c.layout.kv_heads * d;
    const int64_t rows[] = {39, 128, c.length - 1}, columns[] = {3, key + 17, value + d - 1, 9};
    for (size_t at = 0; at < 12; ++at) {
      if ((at / 4 + at % 4 + i) % 2 == 0) continue;  // each of them in two of the cases
      const int64_t row = rows[at / 4], column = columns[at % 4];
      const double bad = row == 128 ? HUGE_VAL : std::nan("");
      SCOPED_TRACE(text("row ", row, ", column ", column, at % 4 == 3 ? " of dout" : "", ", ", bad));
      std::vector<double> qkv = rounded(c.random_qkv()), dout = rounded(c.random_dout());
      (at % 4 == 3 ? dout[static_cast<size_t>(row * c.width() + column)] : qkv[static_cast<size_t>(row * c.layout.row() + column)]) = bad;
      expect_as_reference(c, qkv, dout);
      if (HasFailure()) return;
    }
  }
}

}  // namespace mantissa::test::flash_attention_test
