// Attention on tensor cores against the reference: the edges of tiles, windows, documents and groups, and what is no number.
#include <array>
#include <cmath>

#include "kernel_backends.h"
#include "testing.h"

namespace mantissa::test::flash_attention_test {

struct Case {
  int64_t length;
  HeadLayout layout;
  int64_t batch = 1, window = 0;
  std::vector<int64_t> documents{};  // where they begin, in each sequence
  bool sinks = false;
  double sharpness = 1.5;

  int64_t rows() const { return batch * length; }
  int64_t width() const { return layout.heads * layout.head_dim; }
  double scale() const { return sharpness / std::sqrt(static_cast<double>(layout.head_dim)); }
  std::string name() const {
    return text(batch, " x ", length, ", heads ", layout.heads, '/', layout.kv_heads, " of ", layout.head_dim, ", window ", window, ", ",
                documents.size(), " documents", sinks ? ", sinks" : "", ", sharpness ", sharpness);
  }
};

struct Results {
  Tensor out, lse, dqkv;
};

class FlashAttention : public ::testing::Test {
 protected:
  Backend& device() { return *device_; }
  Backend& reference() { return *reference_; }

  static std::vector<double> rounded(std::vector<double> x) {
    for (double& value : x) value = static_cast<double>(to_float(to_bf16(static_cast<float>(value))));
    return x;
  }
  // Packed rows as bf16 holds them.
  static std::vector<double> packed(const Case& c) { return rounded(random_values(c.rows() * c.layout.row(), 1)); }
  static std::vector<double> gradient(const Case& c) { return rounded(random_values(c.rows() * c.width(), 2)); }

  // The values begin `ahead` elements behind an aligned address.
  static Results run(Backend& device, Dtype dtype, const Case& c, const std::vector<double>& rows, const std::vector<double>& dout,
                     int64_t ahead = 0) {
    const auto behind = [&](const std::vector<double>& x, const Shape& shape) {
      const Tensor out = empty(device, dtype, {shape.elements() + ahead}).slice(ahead, shape.elements() + ahead).view(shape);
      if (!x.empty()) assign(out, x);
      return out;
    };
    std::vector<double> starts;
    for (int64_t i = 0; i < c.rows(); ++i) {
      double start = 0.0;
      for (const int64_t each : c.documents) start = each <= i % c.length ? static_cast<double>(each) : start;
      starts.push_back(start);
    }
    const Tensor qkv = behind(rows, {c.rows(), c.layout.row()}), out = behind({}, {c.rows(), c.width()}),
                 lse = empty(device, Dtype::f32, {c.batch, c.layout.heads, c.length}), dqkv = behind({}, qkv.shape()),
                 of = c.documents.empty() ? Tensor() : tensor_of(device, Dtype::i32, {c.rows()}, starts);
    std::vector<double> sinks;
    for (int64_t h = 0; h < c.layout.heads; ++h) sinks.push_back(0.5 - static_cast<double>(h));
    device.run(AttentionForward{.qkv = qkv,
                                .out = out,
                                .lse = lse,
                                .batch = c.batch,
                                .layout = c.layout,
                                .scale = c.scale(),
                                .segment_starts = of,
                                .window = c.window,
                                .sinks = c.sinks ? tensor_of(device, dtype, {c.layout.heads}, sinks) : Tensor()});
    device.run(AttentionBackward{.qkv = qkv,
                                 .out = out,
                                 .lse = lse,
                                 .dout = behind(dout, {c.rows(), c.width()}),
                                 .dqkv = dqkv,
                                 .batch = c.batch,
                                 .layout = c.layout,
                                 .scale = c.scale(),
                                 .segment_starts = of,
                                 .window = c.window});
    return {out, lse, dqkv};
  }

  // Not finite where the reference is not. Elsewhere the root mean square of the error is at most `tolerance` of that of the values, and no
  // error is larger than 16 times this: single sums cancel.
  static void expect_alike(const Tensor& actual, const Tensor& expected, double tolerance, const char* what) {
    const std::vector<double> a = values(actual), e = values(expected);
    ASSERT_EQ(a.size(), e.size());
    std::vector<double> found, finite;
    double squares = 0.0, errors = 0.0;
    for (size_t i = 0; i < e.size(); ++i) {
      ASSERT_EQ(std::isfinite(a[i]), std::isfinite(e[i])) << what << ' ' << i << ": " << a[i] << ", not " << e[i];
      if (!std::isfinite(e[i])) continue;
      finite.push_back(e[i]), found.push_back(a[i]);
      squares += e[i] * e[i], errors += (a[i] - e[i]) * (a[i] - e[i]);
    }
    EXPECT_LE(std::sqrt(errors), tolerance * std::sqrt(squares)) << what;
    EXPECT_TRUE(close(found, finite, 16 * tolerance)) << what;
  }
  static void expect_alike(const Results& actual, const Results& expected) {
    expect_alike(actual.out, expected.out, 0x1p-8, "out");
    expect_alike(actual.lse, expected.lse, 1e-6, "lse");
    expect_alike(actual.dqkv, expected.dqkv, 0x1p-7, "dqkv");
  }

  // Weights and their gradients are rounded to bf16 on tensor cores, and so are the results.
  void expect_as_reference(const Case& c) {
    SCOPED_TRACE(c.name());
    const std::vector<double> rows = packed(c), dout = gradient(c);
    expect_alike(run(device(), Dtype::bf16, c, rows, dout), run(reference(), Dtype::f32, c, rows, dout));
  }

 private:
  std::unique_ptr<Backend> reference_ = make_backend("cpu_reference"), device_ = make_backend("cuda");
};

TEST_F(FlashAttention, OfAnyLengthIsThatOfTheReference) {
  for (const int64_t length : {1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 128, 129, 161, 256, 300}) {
    expect_as_reference({.length = length, .layout = {1, 1, length % 3 == 0 ? 128 : 64}});
  }
}

TEST_F(FlashAttention, SeesWindowsDocumentsAndSinks) {
  for (const HeadLayout layout : {HeadLayout{1, 1, 64}, {2, 1, 128}}) {
    for (const int64_t window : {0, 1, 2, 70, 129}) {
      expect_as_reference({.length = 150, .layout = layout, .window = window, .sinks = window % 2 == 0});
      expect_as_reference({.length = 135, .layout = layout, .window = window, .documents = {0, 40, 41, 70, 131}});
    }
  }
  expect_as_reference({.length = 290, .layout = {1, 1, 64}, .documents = {0, 128, 160, 272}, .sinks = true});
  expect_as_reference({.length = 256, .layout = {1, 1, 64}, .documents = {0, 230}});
}

// Where the largest score changes from tile to tile, by more than exponents hold, too, where nearly all weights are zeros, and where the
// largest score is that of the least product.
TEST_F(FlashAttention, OfScoresThatDifferByFarIsThatOfTheReference) {
  for (const double sharpness : {0.01, 12.0, 60.0, 600.0, -1.5})
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
    Case c{.length = length,
           .layout = {.heads = kv_heads * (1 + draw(3)), .kv_heads = kv_heads, .head_dim = draw(2) == 0 ? 64 : 128},
           .batch = 1 + draw(2),
           .window = draw(2) == 0 ? 0 : 1 + draw(length),
           .documents = {},
           .sinks = draw(2) == 0};
    for (int64_t at = 0; at < length && seed % 3 == 0; at += 1 + draw(60)) c.documents.push_back(at);
    expect_as_reference(c);
  }
}

TEST_F(FlashAttention, HasBitsThatDoNotDependOnTheAddress) {
  const Case c{.length = 70, .layout = {2, 1, 64}};
  const std::vector<double> rows = packed(c), dout = gradient(c);
  const Results aligned = run(device(), Dtype::bf16, c, rows, dout), other = run(device(), Dtype::bf16, c, rows, dout, 1);
  EXPECT_TRUE(same_bits(other.out, aligned.out));
  EXPECT_TRUE(same_bits(other.lse, aligned.lse));
  EXPECT_TRUE(same_bits(other.dqkv, aligned.dqkv));
}

TEST_F(FlashAttention, HasBitsThatDoNotDependOnOtherSequences) {
  const Case both{.length = 150, .layout = {2, 1, 64}, .batch = 2, .window = 60}, one{.length = 150, .layout = both.layout, .window = 60};
  const std::vector<double> rows = packed(both), dout = gradient(both);
  const Results of_both = run(device(), Dtype::bf16, both, rows, dout);
  const auto second = [](const std::vector<double>& x) { return std::vector<double>(x.begin() + std::ssize(x) / 2, x.end()); };
  const Results alone = run(device(), Dtype::bf16, one, second(rows), second(dout));
  EXPECT_TRUE(same_bits(of_both.out.slice(150, 300), alone.out));
  EXPECT_TRUE(same_bits(of_both.lse.slice(1, 2), alone.lse));
  EXPECT_TRUE(same_bits(of_both.dqkv.slice(150, 300), alone.dqkv));
}

// One element of a row that is not finite, of its query, key, value or dout: what sees it is not finite, and nothing else.
TEST_F(FlashAttention, WhatIsNotSeenMayBeNaN) {
  const std::vector<Case> cases = {{.length = 131, .layout = {2, 1, 64}},
                                   {.length = 150, .layout = {1, 1, 64}, .window = 5, .sinks = true},
                                   {.length = 150, .layout = {1, 1, 128}, .window = 70},
                                   {.length = 150, .layout = {1, 1, 64}, .documents = {0, 40, 70, 131}}};
  for (const Case& c : cases) {
    const int64_t d = c.layout.head_dim, key = c.layout.heads * d, value = key + c.layout.kv_heads * d;
    for (const int64_t row : {int64_t{39}, int64_t{128}, c.length - 1}) {
      for (const int64_t column : {int64_t{3}, key + 17, value + d - 1, c.layout.row() + 9}) {
        const double bad = row == 128 ? HUGE_VAL : std::nan("");
        SCOPED_TRACE(text(c.name(), ": row ", row, ", column ", column, ", ", bad));
        std::vector<double> rows = packed(c), dout = gradient(c);
        const bool of_dout = column >= c.layout.row();
        (of_dout ? dout[static_cast<size_t>(row * c.width() + 9)] : rows[static_cast<size_t>(row * c.layout.row() + column)]) = bad;
        expect_alike(run(device(), Dtype::bf16, c, rows, dout), run(reference(), Dtype::f32, c, rows, dout));
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace mantissa::test::flash_attention_test
