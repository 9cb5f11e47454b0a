// Cases of blocked attention beside kernels_test.cpp: many blocks, one key head cut into parts, heads of every size, prompts over a cache.
#include <algorithm>

#include "attention_runs.h"
#include "kernel_backends.h"

namespace mantissa::test::attention_blocks_test {

class AttentionBlocks : public OnEachBackend {
 protected:
  void expect_close_to_fp64(const AttentionCase& c, const std::vector<double>& qkv) {
    SCOPED_TRACE(c.name());
    const Threads three(3);
    const AttentionResults actual = run_attention(device(), Dtype::f32, c, qkv, c.random_dout());
    expect_close_attention(actual, run_attention(reference(), Dtype::f64, c, qkv, c.random_dout()));
    const Threads one(1);
    expect_same_attention(run_attention(device(), Dtype::f32, c, qkv, c.random_dout()), actual);
  }
};
INSTANTIATE_TEST_SUITE_P(, AttentionBlocks, ::testing::ValuesIn(tested_backends()), backend_of);

TEST_P(AttentionBlocks, AgreeWithFp64AndDoNotDependOnThreads) {
  std::vector<AttentionCase> cases{{.length = 700, .layout = {1, 1, 16}}, {.length = 700, .layout = {4, 1, 33}}};
  for (const int64_t d : {1, 15, 16, 80, 128, 256, 264}) cases.push_back({.batch = 2, .length = 72, .layout = {2, 1, d}});
  for (const int64_t window : {1, 5, 63, 64, 65, 128, 299, 300, 1000}) {
    cases.push_back({.length = 300, .layout = {6, 2, 24}, .window = window});
    if (window % 5 != 0) cases.push_back({.length = 300, .layout = {6, 2, 24}, .window = window, .documents = {0, 170}});
  }
  for (const int64_t window : {0, 70})
    cases.push_back({.batch = 2, .length = 150, .layout = {6, 2, 24}, .window = window, .sinks = true, .sharpness = 2.0});
  for (const AttentionCase& c : cases) expect_close_to_fp64(c, c.random_qkv());
}

// Scores of a head are multiples of 1/2 down to -99.5, exact in fp32, and each row has an exact 0.
std::vector<double> spiky_qkv(const AttentionCase& c) {
  std::vector<double> x = c.random_qkv();
  for (int64_t i = 0; i < c.rows(); ++i) {
    const auto q = x.begin() + i * c.layout.row(), k = q + c.layout.head_dim;
    std::fill(q, k + c.layout.head_dim, 0.0);
    q[0] = 1.0;
    k[0] = -0.5 * static_cast<double>(i * 37 % 200) / c.scale();
  }
  return x;
}

// Probabilities go down to e^-99.5, and so do their products with gradients and values; those that are subnormal count nowhere.
TEST_P(AttentionBlocks, TinyProbabilitiesAgreeWithFp64) {
  for (const int64_t d : {16, 64}) {
    const AttentionCase c{.length = 300, .layout = {1, 1, d}};
    const std::vector<double> dqkv = values(run_attention(reference(), Dtype::f64, c, spiky_qkv(c), c.random_dout()).dqkv);
    EXPECT_GT(std::ranges::count_if(dqkv, [](double x) { return x != 0.0 && std::abs(x) < 0x1p-126; }), 100);
    expect_close_to_fp64(c, spiky_qkv(c));
  }
}

// Blocks that no query sees are skipped, so nothing of the arithmetic differs.
TEST_P(AttentionBlocks, SegmentsOfWholeBlocksAreSequencesOfTheirOwn) {
  const AttentionCase together{.length = 256, .layout = {8, 8, 16}, .documents = {0, 128}},
      apart{.batch = 2, .length = 128, .layout = together.layout};
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const AttentionResults one = run_attention(device(), dtype, together), two = run_attention(device(), dtype, apart);
    EXPECT_TRUE(same_bits(one.out, two.out));
    EXPECT_TRUE(same_bits(one.dqkv, two.dqkv));
  }
}

// Blocks of keys that no query of a block sees cost nothing: they are not even multiplied by 0.
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

TEST_P(AttentionBlocks, NaNOfAQueryReachesItsOutputOnly) {
  const HeadLayout layout{1, 1, 16};
  const Tensor qkv = random_tensor(device(), Dtype::f32, {100, layout.row()}, 1);
  set_value(qkv, 70 * layout.row(), std::nan(""));
  const Tensor out = empty(device(), Dtype::f32, {100, 16}), lse = empty(device(), Dtype::f32, {1, 1, 100});
  device().run(AttentionForward{.qkv = qkv, .out = out, .lse = lse, .batch = 1, .layout = layout, .scale = 0.25});
  const std::vector<double> o = values(out);
  for (size_t i = 0; i < o.size(); ++i) EXPECT_EQ(std::isnan(o[i]), i / 16 == 70) << i;
}

// Runs a prompt after `first` positions, then one row more: blocks and single rows against the reference.
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
