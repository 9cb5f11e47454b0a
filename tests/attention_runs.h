// Attention forward and backward on a backend, of given rows.
#pragma once

#include "testing.h"

namespace mantissa::test {

struct AttentionCase {
  int64_t batch = 1, length;
  HeadLayout layout;
  int64_t window = 0;
  std::vector<int64_t> documents = {};  // where they begin, in each sequence
  bool sinks = false;
  double sharpness = 1.0;

  int64_t rows() const { return batch * length; }
  int64_t width() const { return layout.heads * layout.head_dim; }
  double scale() const { return sharpness / std::sqrt(static_cast<double>(layout.head_dim)); }
  std::string name() const {
    return text(batch, " x ", length, ", heads ", layout.heads, '/', layout.kv_heads, " of ", layout.head_dim, ", window ", window, ", ",
                documents.size(), " documents", sinks ? ", sinks" : "", ", sharpness ", sharpness);
  }
  std::vector<double> random_qkv() const { return random_values(rows() * layout.row(), 1); }
  std::vector<double> random_dout() const { return random_values(rows() * width(), 2); }
};

struct AttentionResults {
  Tensor out, lse, dqkv;
};

// Runs forward and backward on values that begin `ahead` elements behind an aligned address.
inline AttentionResults run_attention(Backend& device, Dtype dtype, const AttentionCase& c, const std::vector<double>& qkv,
                                      const std::vector<double>& dout, int64_t ahead = 0) {
  const auto behind = [&](const std::vector<double>& x, const Shape& shape) {
    const Tensor out = empty(device, dtype, {shape.elements() + ahead}).slice(ahead, shape.elements() + ahead).view(shape);
    if (!x.empty()) assign(out, x);
    return out;
  };
  std::vector<double> starts, sinks;
  for (int64_t i = 0; i < c.rows(); ++i) {
    double start = 0.0;
    for (const int64_t each : c.documents) start = each <= i % c.length ? static_cast<double>(each) : start;
    starts.push_back(start);
  }
  for (int64_t h = 0; h < c.layout.heads; ++h) sinks.push_back(0.5 - static_cast<double>(h));
  const AttentionForward forward{.qkv = behind(qkv, {c.rows(), c.layout.row()}),
                                 .out = behind({}, {c.rows(), c.width()}),
                                 .lse = empty(device, stats_dtype(dtype), {c.batch, c.layout.heads, c.length}),
                                 .batch = c.batch,
                                 .layout = c.layout,
                                 .scale = c.scale(),
                                 .segment_starts = c.documents.empty() ? Tensor() : tensor_of(device, Dtype::i32, {c.rows()}, starts),
                                 .window = c.window,
                                 .sinks = c.sinks ? tensor_of(device, dtype, {c.layout.heads}, sinks) : Tensor()};
  const AttentionBackward backward{.qkv = forward.qkv,
                                   .out = forward.out,
                                   .lse = forward.lse,
                                   .dout = behind(dout, {c.rows(), c.width()}),
                                   .dqkv = behind({}, forward.qkv.shape()),
                                   .batch = c.batch,
                                   .layout = c.layout,
                                   .scale = c.scale(),
                                   .segment_starts = forward.segment_starts,
                                   .window = c.window};
  device.run(forward);
  device.run(backward);
  return {forward.out, forward.lse, backward.dqkv};
}
inline AttentionResults run_attention(Backend& device, Dtype dtype, const AttentionCase& c) {
  return run_attention(device, dtype, c, c.random_qkv(), c.random_dout());
}

// Finite values, which are to be where they are expected.
struct FiniteValues {
  std::vector<double> found, expected;

  FiniteValues(const Tensor& actual, const Tensor& wanted, const char* what) {
    const std::vector<double> a = values(actual), e = values(wanted);
    EXPECT_EQ(a.size(), e.size());
    for (size_t i = 0; i < std::min(a.size(), e.size()); ++i) {
      EXPECT_EQ(std::isfinite(a[i]), std::isfinite(e[i])) << what << ' ' << i << ": " << a[i] << ", not " << e[i];
      if (std::isfinite(a[i]) != std::isfinite(e[i])) return;
      if (std::isfinite(e[i])) expected.push_back(e[i]), found.push_back(a[i]);
    }
  }
};

// Tolerances: fp32 sums of up to 700 terms may have another order, so they get 1e-5, which is 100 ulp. Gradients cancel in dp - delta, and
// those of early rows are far above the root mean square, so they get 5e-5.
inline void expect_close_attention(const AttentionResults& actual, const AttentionResults& expected) {
  for (const auto& [a, e, tolerance, what] : {std::tuple{&actual.out, &expected.out, 1e-5, "out"},
                                              {&actual.lse, &expected.lse, 1e-5, "lse"},
                                              {&actual.dqkv, &expected.dqkv, 5e-5, "dqkv"}}) {
    const FiniteValues finite(*a, *e, what);
    EXPECT_TRUE(close(finite.found, finite.expected, tolerance)) << what;
  }
}

inline void expect_same_attention(const AttentionResults& actual, const AttentionResults& expected) {
  EXPECT_TRUE(same_bits(actual.out, expected.out));
  EXPECT_TRUE(same_bits(actual.lse, expected.lse));
  EXPECT_TRUE(same_bits(actual.dqkv, expected.dqkv));
}

}  // namespace mantissa::test
