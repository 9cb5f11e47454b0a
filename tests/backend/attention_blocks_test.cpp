// What blocked attention adds to kernels_test.cpp: many blocks, one key head cut into parts, heads of every size, prompts over a cache.
#include <algorithm>
#include <limits>

#include "kernel_backends.h"
#include "testing.h"

namespace mantissa::test::attention_blocks_test {

struct Attention {
  int64_t batch, length;
  HeadLayout layout;
  std::vector<double> segment_starts = {};  // of one sequence
  int64_t window = 0;
  bool sinks = false;
  bool spiky = false;

  double scale() const { return 1.0 / std::sqrt(static_cast<double>(layout.head_dim)); }
};

// Of one head: scores are multiples of 1/2 down to -99.5, exact in fp32, and each row has an exact 0.
Tensor spiky_qkv(Backend& device, Dtype dtype, const Attention& a) {
  const int64_t rows = a.batch * a.length, d = a.layout.head_dim, row = a.layout.row();
  std::vector<double> x = random_values(rows * row, 1);
  for (int64_t i = 0; i < rows; ++i) {
    const auto q = x.begin() + i * row, k = q + d;
    std::fill(q, k + d, 0.0);
    q[0] = 1.0;
    k[0] = -0.5 * static_cast<double>(i * 37 % 200) / a.scale();
  }
  return tensor_of(device, dtype, {rows, row}, x);
}

struct Results {
  Tensor out, lse, dqkv;
};

Results run(Backend& device, Dtype dtype, const Attention& a) {
  const int64_t rows = a.batch * a.length, channels = a.layout.heads * a.layout.head_dim;
  const Tensor qkv = a.spiky ? spiky_qkv(device, dtype, a) : random_tensor(device, dtype, {rows, a.layout.row()}, 1);
  const Tensor dout = random_tensor(device, dtype, {rows, channels}, 2);
  const Tensor starts = a.segment_starts.empty() ? Tensor() : tensor_of(device, Dtype::i32, {rows}, a.segment_starts);
  const Tensor sinks = a.sinks ? random_tensor(device, dtype, {a.layout.heads}, 6, 3.0) : Tensor();
  const Results r{empty(device, dtype, {rows, channels}), empty(device, stats_dtype(dtype), {a.batch, a.layout.heads, a.length}),
                  empty_like(qkv)};
  device.run(AttentionForward{.qkv = qkv,
                              .out = r.out,
                              .lse = r.lse,
                              .batch = a.batch,
                              .layout = a.layout,
                              .scale = a.scale(),
                              .segment_starts = starts,
                              .window = a.window,
                              .sinks = sinks});
  device.run(AttentionBackward{.qkv = qkv,
                               .out = r.out,
                               .lse = r.lse,
                               .dout = dout,
                               .dqkv = r.dqkv,
                               .batch = a.batch,
                               .layout = a.layout,
                               .scale = a.scale(),
                               .segment_starts = starts,
                               .window = a.window});
  return r;
}

class AttentionBlocks : public OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(, AttentionBlocks, ::testing::ValuesIn(tested_backends()), backend_of);

// fp32 sums of up to 700 terms in another order; 1e-5 is 100 ulp. Gradients cancel in dp - delta, and those of early rows are far above the
// root mean square, so they get 5e-5.
TEST_P(AttentionBlocks, ManyBlocksAgreeWithFp64AndDoNotDependOnThreads) {
  for (const HeadLayout layout : {HeadLayout{1, 1, 16}, HeadLayout{6, 2, 24}, HeadLayout{4, 1, 33}}) {
    const Attention a{1, 700, layout};
    const Results expected = run(reference(), Dtype::f64, a), actual = run(device(), Dtype::f32, a);
    EXPECT_TRUE(close(values(actual.out), values(expected.out), 1e-5)) << layout.heads;
    EXPECT_TRUE(close(values(actual.lse), values(expected.lse), 1e-5)) << layout.heads;
    EXPECT_TRUE(close(values(actual.dqkv), values(expected.dqkv), 5e-5)) << layout.heads;
    for (const int threads : {1, 3}) {
      const Threads scope(threads);
      const Results again = run(device(), Dtype::f32, a);
      EXPECT_TRUE(same_bits(again.out, actual.out)) << threads << " threads";
      EXPECT_TRUE(same_bits(again.dqkv, actual.dqkv)) << threads << " threads";
    }
  }
}

TEST_P(AttentionBlocks, HeadsOfEverySizeAgreeWithFp64) {
  for (const int64_t d : {1, 15, 16, 80, 128, 256, 264}) {
    const Attention a{2, 72, {2, 1, d}};
    const Results expected = run(reference(), Dtype::f64, a), actual = run(device(), Dtype::f32, a);
    EXPECT_TRUE(close(values(actual.out), values(expected.out), 1e-5)) << d;
    EXPECT_TRUE(close(values(actual.dqkv), values(expected.dqkv), 5e-5)) << d;
  }
}

// Probabilities down to e^-99.5, and their products with gradients and values: what of it is subnormal counts nowhere.
TEST_P(AttentionBlocks, TinyProbabilitiesAgreeWithFp64) {
  for (const int64_t d : {16, 64}) {
    const Attention a{.batch = 1, .length = 300, .layout = {1, 1, d}, .spiky = true};
    const Results expected = run(reference(), Dtype::f64, a), actual = run(device(), Dtype::f32, a);
    const std::vector<double> dqkv = values(expected.dqkv);
    EXPECT_GT(std::ranges::count_if(dqkv, [](double x) { return x != 0.0 && std::abs(x) < 0x1p-126; }), 100);
    EXPECT_TRUE(close(values(actual.out), values(expected.out), 1e-5)) << d;
    EXPECT_TRUE(close(values(actual.lse), values(expected.lse), 1e-5)) << d;
    EXPECT_TRUE(close(values(actual.dqkv), values(expected.dqkv), 5e-5)) << d;
  }
}

// Blocks that no query sees are skipped, so nothing of the arithmetic differs.
TEST_P(AttentionBlocks, SegmentsOfWholeBlocksAreSequencesOfTheirOwn) {
  const HeadLayout layout{8, 8, 16};
  Attention together{1, 256, layout};
  for (int64_t i = 0; i < 256; ++i) together.segment_starts.push_back(i < 128 ? 0.0 : 128.0);
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const Results one = run(device(), dtype, together), two = run(device(), dtype, {2, 128, layout});
    EXPECT_TRUE(same_bits(one.out, two.out));
    EXPECT_TRUE(same_bits(one.dqkv, two.dqkv));
  }
}

TEST_P(AttentionBlocks, WindowsAgreeWithFp64AndDoNotDependOnThreads) {
  std::vector<double> starts;
  for (int64_t i = 0; i < 300; ++i) starts.push_back(i < 170 ? 0.0 : 170.0);
  for (const int64_t window : {1, 5, 63, 64, 65, 128, 250, 299, 300, 1000}) {
    for (const bool segments : {false, true}) {
      const Attention a{1, 300, {6, 2, 24}, segments ? starts : std::vector<double>(), window};
      const Results expected = run(reference(), Dtype::f64, a), actual = run(device(), Dtype::f32, a);
      EXPECT_TRUE(close(values(actual.out), values(expected.out), 1e-5)) << window;
      EXPECT_TRUE(close(values(actual.lse), values(expected.lse), 1e-5)) << window;
      EXPECT_TRUE(close(values(actual.dqkv), values(expected.dqkv), 5e-5)) << window;
      const Threads scope(1);
      const Results again = run(device(), Dtype::f32, a);
      EXPECT_TRUE(same_bits(again.out, actual.out)) << window;
      EXPECT_TRUE(same_bits(again.dqkv, actual.dqkv)) << window;
    }
  }
}

// Every row attends to itself and so many before it: each number of keys is seen in out, and a window that hides nothing changes no bit.
TEST_P(AttentionBlocks, AWindowIsTheLatestKeys) {
  const HeadLayout layout{1, 1, 16};
  const auto means = [&](int64_t window) {  // queries and keys 0, so that out is the mean of the values seen, which are the positions
    const Tensor qkv = zeros(device(), Dtype::f32, {200, layout.row()});
    for (int64_t i = 0; i < 200; ++i) set_value(qkv, i * layout.row() + 32, static_cast<double>(i));
    const Tensor out = empty(device(), Dtype::f32, {200, 16}), lse = empty(device(), Dtype::f32, {1, 1, 200});
    device().run(AttentionForward{.qkv = qkv, .out = out, .lse = lse, .batch = 1, .layout = layout, .scale = 0.25, .window = window});
    return values(out);
  };
  for (const int64_t window : {1, 2, 64, 65, 130}) {
    const std::vector<double> mean = means(window);
    for (int64_t i = 0; i < 200; ++i) {
      const int64_t first = std::max<int64_t>(0, i - window + 1);
      EXPECT_NEAR(mean[static_cast<size_t>(i * 16)], static_cast<double>(first + i) / 2, 1e-4) << window << " at " << i;
    }
  }
  EXPECT_EQ(means(200), means(0));
}

// What lies in blocks of keys that no query of a block sees costs nothing: it is not even multiplied by 0.
TEST_P(AttentionBlocks, BlocksThatAWindowOrASegmentHidesAreNotRead) {
  const HeadLayout layout{1, 1, 16};
  const std::vector<double> segments = [] {
    std::vector<double> starts(256, 0.0);
    std::fill(starts.begin() + 128, starts.end(), 128.0);
    return starts;
  }();
  for (const int64_t window : {5, 250}) {
    const Tensor qkv = zeros(device(), Dtype::f32, {256, layout.row()}), dout = zeros(device(), Dtype::f32, {256, 16});
    for (int64_t i = 0; i < 64; ++i) set_value(qkv, i * layout.row() + 32, std::nan(""));
    const Tensor starts = window == 250 ? tensor_of(device(), Dtype::i32, {256}, segments) : Tensor();
    const Tensor out = empty(device(), Dtype::f32, {256, 16}), lse = empty(device(), Dtype::f32, {1, 1, 256});
    device().run(AttentionForward{
        .qkv = qkv, .out = out, .lse = lse, .batch = 1, .layout = layout, .scale = 0.25, .segment_starts = starts, .window = window});
    const std::vector<double> mean = values(out);
    for (size_t i = 128; i < 256; ++i) EXPECT_EQ(mean[i * 16], 0.0) << window << " at " << i;
  }
}

TEST_P(AttentionBlocks, SinksAgreeWithFp64) {
  for (const int64_t window : {0, 70}) {
    const Attention a{2, 150, {6, 2, 24}, {}, window, true};
    const Results expected = run(reference(), Dtype::f64, a), actual = run(device(), Dtype::f32, a);
    EXPECT_TRUE(close(values(actual.out), values(expected.out), 1e-5)) << window;
    EXPECT_TRUE(close(values(actual.lse), values(expected.lse), 1e-5)) << window;
    EXPECT_TRUE(close(values(actual.dqkv), values(expected.dqkv), 5e-5)) << window;
  }
}

// Without values a sink leaves a share of them: with scores of 0 out is the sum of the values seen over their number + exp(sink).
TEST_P(AttentionBlocks, ASinkTakesItsShareOfTheSoftmax) {
  const HeadLayout layout{2, 1, 16};
  for (Backend* backend : {&reference(), &device()}) {
    const Tensor qkv = zeros(*backend, Dtype::f32, {70, layout.row()});
    for (int64_t i = 0; i < 70; ++i) set_value(qkv, i * layout.row() + 48, 1.0);
    const Tensor sinks = tensor_of(*backend, Dtype::f32, {2}, {2.0, -80.0}), out = empty(*backend, Dtype::f32, {70, 32});
    const Tensor lse = empty(*backend, Dtype::f32, {1, 2, 70});
    backend->run(AttentionForward{.qkv = qkv, .out = out, .lse = lse, .batch = 1, .layout = layout, .scale = 0.25, .sinks = sinks});
    const std::vector<double> share = values(out), sums = values(lse);
    for (size_t i = 0; i < 70; ++i) {
      const double keys = static_cast<double>(i + 1), all = keys + std::exp(2.0);
      EXPECT_NEAR(share[i * 32], keys / all, 1e-5) << backend->name() << i;
      EXPECT_NEAR(sums[i], std::log(all), 1e-5) << backend->name() << i;
      EXPECT_NEAR(share[i * 32 + 16], 1.0, 1e-5) << backend->name() << i;
    }
  }
}

TEST_P(AttentionBlocks, NaNOfAQueryReachesItsOutputOnly) {
  const HeadLayout layout{1, 1, 16};
  const Tensor qkv = random_tensor(device(), Dtype::f32, {100, layout.row()}, 1);
  set_value(qkv, 70 * layout.row(), std::nan(""));
  const Tensor out = empty(device(), Dtype::f32, {100, 16}), lse = empty(device(), Dtype::f32, {1, 1, 100});
  device().run(AttentionForward{.qkv = qkv, .out = out, .lse = lse, .batch = 1, .layout = layout, .scale = 0.25});
  const std::vector<double> o = values(out);
  for (size_t i = 0; i < o.size(); ++i) EXPECT_EQ(std::isnan(o[i]), i / 16 == 70) << i;
}

// A prompt after `first` positions, then one row more: blocks and single rows against the reference.
TEST_P(AttentionBlocks, PromptsOverACacheAgreeWithTheReference) {
  const HeadLayout layout{4, 2, 24};
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const int64_t first : {0, 33, 64, 200}) {
      for (const auto& [rows, window] : std::vector<std::pair<int64_t, int64_t>>{{16, 0}, {70, 0}, {16, 5}, {70, 64}, {70, 90}}) {
        const bool sunk = rows == 70 && window != 90;
        std::vector<Tensor> out;
        for (Backend* backend : {&reference(), &device()}) {
          const Tensor keys = random_tensor(*backend, dtype, {300, 48}, 3), kept = random_tensor(*backend, dtype, {300, 48}, 4);
          const Tensor qkv = random_tensor(*backend, dtype, {rows + 1, layout.row()}, 5);
          const Tensor sinks = sunk ? random_tensor(*backend, dtype, {4}, 6, 3.0) : Tensor();
          out.push_back(empty(*backend, dtype, {rows + 1, 96}));
          for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, rows}, {rows, rows + 1}}) {
            backend->run(CachedAttention{.qkv = qkv.slice(begin, end),
                                         .keys = keys,
                                         .values = kept,
                                         .out = out.back().slice(begin, end),
                                         .first = first + begin,
                                         .layout = layout,
                                         .scale = 0.2,
                                         .window = window,
                                         .sinks = sinks});
          }
        }
        EXPECT_TRUE(close(out[1], out[0], dtype == Dtype::f32 ? 1e-5 : 0x1p-7)) << first << " + " << rows << ", window " << window;
      }
    }
  }
}

}  // namespace mantissa::test::attention_blocks_test
