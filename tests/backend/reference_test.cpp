// The reference against values from elsewhere: formulas in their textbook form, written again in double, and numbers worked out by hand.
// The gradients are checked by ops_gradient_test.
#include <numeric>

#include "testing.h"

namespace mantissa::test::reference_test {

class Reference : public ::testing::Test {
 protected:
  Tensor f64(Shape shape, const std::vector<double>& from) { return tensor_of(*device_, Dtype::f64, shape, from); }
  Tensor random(Shape shape, uint32_t what) { return random_tensor(*device_, Dtype::f64, shape, what); }
  Tensor out(Shape shape) { return random(shape, 900); }

  const std::unique_ptr<Backend> device_ = make_backend("cpu_reference");
};

TEST_F(Reference, GemmMultipliesInEveryOrientation) {
  const Tensor a = f64({2, 3}, {1, 2, 3, 4, 5, 6}), at = f64({3, 2}, {1, 4, 2, 5, 3, 6});
  const Tensor b = f64({3, 2}, {7, 8, 9, 10, 11, 12}), bt = f64({2, 3}, {7, 9, 11, 8, 10, 12});
  const std::vector<double> product{58, 64, 139, 154};
  for (const Operand& left : {Operand{a}, Operand{at, true}}) {
    for (const Operand& right : {Operand{b}, Operand{bt, true}}) {
      const Tensor y = out({2, 2});
      device_->run(Gemm{.a = left, .b = right, .out = y, .accumulate = false});
      EXPECT_EQ(values(y), product);
    }
  }
  const Tensor y = f64({2, 2}, {1, 1, 1, 1});
  device_->run(Gemm{.a = {a}, .b = {b}, .out = y, .accumulate = true, .bias = f64({2}, {100, 200})});
  EXPECT_EQ(values(y), (std::vector<double>{159, 265, 240, 355}));
}

TEST_F(Reference, SumsAndEmbeddings) {
  const Tensor x = f64({3, 2}, {1, 2, 3, 4, 5, 6}), sums = f64({2}, {10, 20});
  device_->run(SumRows{.x = x, .out = sums, .accumulate = true});
  EXPECT_EQ(values(sums), (std::vector<double>{19, 32}));
  const Tensor total = out({1});
  device_->run(Sum{.x = x, .out = total, .factor = 0.5});
  EXPECT_EQ(values(total), std::vector<double>{10.5});
  const Tensor ids = tensor_of(*device_, Dtype::i32, {3}, {2, 0, 2}), rows = out({3, 2}), dweight = out({4, 2});
  device_->run(EmbeddingForward{.ids = ids, .weight = x, .out = rows});
  EXPECT_EQ(values(rows), (std::vector<double>{5, 6, 1, 2, 5, 6}));
  device_->run(EmbeddingBackward{.ids = ids, .dy = x, .dweight = dweight, .accumulate = false});
  EXPECT_EQ(values(dweight), (std::vector<double>{3, 4, 0, 0, 6, 8, 0, 0}));
}

TEST_F(Reference, NormsOfRows) {
  const Tensor x = f64({1, 4}, {1, 2, 3, 6}), w = f64({4}, {1, 1, 2, 1}), y = out({1, 4}), mean = out({1}), rstd = out({1});
  device_->run(RmsNormForward{.x = x, .weight = w, .y = y, .rstd = rstd, .eps = 0.5});
  const double rms = std::sqrt(13.0);  // (1 + 4 + 9 + 36) / 4 + 0.5
  EXPECT_TRUE(close(values(y), {1 / rms, 2 / rms, 6 / rms, 6 / rms}, 1e-15));
  EXPECT_TRUE(close(values(rstd), {1 / rms}, 1e-15));
  device_->run(LayerNormForward{.x = x, .weight = w, .y = y, .mean = mean, .rstd = rstd, .eps = 0.5, .bias = f64({4}, {0, 0, 0, 1})});
  EXPECT_TRUE(close(values(y), {-1, -0.5, 0, 2.5}, 1e-15)) << "variance (4 + 1 + 0 + 9) / 4 = 3.5, with eps 4";
  EXPECT_EQ(values(mean), std::vector<double>{3});
}

TEST_F(Reference, QkNormTakesEachHeadAloneAndCopiesValues) {
  const HeadLayout layout{2, 1, 2};
  const Tensor x = f64({1, 8}, {3, 4, 6, 8, 1, -1, 9, 9}), y = out({1, 8}), rstd = out({1, 3});
  device_->run(QkNormForward{
      .x = x, .q_weight = f64({2}, {1, 1}), .k_weight = f64({2}, {5, 7}), .y = y, .rstd = rstd, .layout = layout, .eps = 0.0});
  const double root = std::sqrt(12.5);
  EXPECT_TRUE(close(values(y), {3 / root, 4 / root, 3 / root, 4 / root, 5, -7, 9, 9}, 1e-15));
}

TEST_F(Reference, RopeRotatesHalvesByTheAngleOfThePosition) {
  const HeadLayout layout{1, 1, 6};
  // cos, sin of no turn; of none, a quarter and half a turn for the pairs (0, 3), (1, 4), (2, 5).
  const Tensor table = tensor_of(*device_, Dtype::f32, {2, 6}, {1, 1, 1, 0, 0, 0, 1, 0, -1, 0, 1, 0});
  std::vector<double> counted(36);
  for (size_t i = 0; i < counted.size(); ++i) counted[i] = static_cast<double>(i % 18 + 1);
  const Tensor x = f64({2, 18}, counted), y = out({2, 18}), back = out({2, 18});
  const Tensor positions = tensor_of(*device_, Dtype::i32, {2}, {0, 1});
  device_->run(Rope{.x = x, .table = table, .positions = positions, .y = y, .layout = layout, .inverse = false});
  EXPECT_EQ(values(y.slice(0, 1)), values(x.slice(0, 1)));
  EXPECT_EQ(values(y.slice(1, 2)), (std::vector<double>{1, -5, -3, 4, 2, -6, 7, -11, -9, 10, 8, -12, 13, 14, 15, 16, 17, 18}));
  device_->run(Rope{.x = y, .table = table, .positions = positions, .y = back, .layout = layout, .inverse = true});
  EXPECT_EQ(values(back), values(x));
}

// Softmax attention with a mask, in the textbook form.
struct Attended {
  std::vector<double> out, lse;
};
Attended attended(const std::vector<double>& qkv, int64_t batch, int64_t length, HeadLayout l, double scale,
                  const std::vector<double>& starts, int64_t window, const std::vector<double>& sinks) {
  Attended result{std::vector<double>(static_cast<size_t>(batch * length * l.heads * l.head_dim)), {}};
  const auto at = [&](int64_t row, int64_t head, int64_t c) { return qkv[static_cast<size_t>(row * l.row() + head * l.head_dim + c)]; };
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < l.heads; ++h) {
      const int64_t key = l.heads + h / (l.heads / l.kv_heads), value = key + l.kv_heads;
      for (int64_t i = 0; i < length; ++i) {
        const int64_t row = b * length + i;
        double sum = sinks.empty() ? 0.0 : std::exp(sinks[static_cast<size_t>(h)]);
        int64_t first = starts.empty() ? 0 : static_cast<int64_t>(starts[static_cast<size_t>(row)]);
        if (window > 0) first = std::max(first, i - window + 1);
        std::vector<double> mixed(static_cast<size_t>(l.head_dim), 0.0);
        for (int64_t j = first; j <= i; ++j) {
          double score = 0.0;
          for (int64_t c = 0; c < l.head_dim; ++c) score += scale * at(row, h, c) * at(b * length + j, key, c);
          sum += std::exp(score);
          for (int64_t c = 0; c < l.head_dim; ++c) mixed[static_cast<size_t>(c)] += std::exp(score) * at(b * length + j, value, c);
        }
        result.lse.push_back(std::log(sum));
        for (int64_t c = 0; c < l.head_dim; ++c) {
          result.out[static_cast<size_t>((row * l.heads + h) * l.head_dim + c)] = mixed[static_cast<size_t>(c)] / sum;
        }
      }
    }
  }
  return result;
}

TEST_F(Reference, AttentionIsMaskedSoftmaxOverTheKeysOfTheGroup) {
  const HeadLayout layout{6, 2, 5};
  const int64_t batch = 2, length = 7;
  const Tensor qkv = random({batch * length, layout.row()}, 1), y = out({batch * length, 30}), lse = out({batch, 6, length});
  const std::vector<double> segments{0, 0, 2, 2, 4, 4, 4, 0, 1, 1, 1, 1, 1, 6};
  for (const std::vector<double>& starts : {std::vector<double>{}, segments}) {
    const Tensor segment_starts = starts.empty() ? Tensor() : tensor_of(*device_, Dtype::i32, {batch * length}, starts);
    for (const int64_t window : {0, 1, 3}) {
      for (const std::vector<double>& sinks : {std::vector<double>{}, {2.0, -80.0, 0.5, 0.0, -1.0, 1.0}}) {
        device_->run(AttentionForward{.qkv = qkv,
                                      .out = y,
                                      .lse = lse,
                                      .batch = batch,
                                      .layout = layout,
                                      .scale = 0.4,
                                      .segment_starts = segment_starts,
                                      .window = window,
                                      .sinks = sinks.empty() ? Tensor() : f64({6}, sinks)});
        const Attended expected = attended(values(qkv), batch, length, layout, 0.4, starts, window, sinks);
        EXPECT_TRUE(close(values(y), expected.out, 1e-13)) << window;
        EXPECT_TRUE(close(values(lse), expected.lse, 1e-13)) << window;
      }
    }
  }
}

TEST_F(Reference, CachedAttentionInPiecesEqualsAttentionAtOnce) {
  const HeadLayout layout{4, 2, 6};
  const int64_t length = 9;
  const Tensor qkv = random({length, layout.row()}, 1), all = out({length, 24}), lse = out({1, 4, length}), pieces = out({length, 24});
  device_->run(AttentionForward{.qkv = qkv, .out = all, .lse = lse, .batch = 1, .layout = layout, .scale = 0.4});
  const Tensor keys = out({12, 12}), cached_values = out({12, 12});
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 5}, {5, 6}, {6, 9}}) {
    device_->run(CachedAttention{.qkv = qkv.slice(begin, end),
                                 .keys = keys,
                                 .values = cached_values,
                                 .out = pieces.slice(begin, end),
                                 .first = begin,
                                 .layout = layout,
                                 .scale = 0.4});
  }
  EXPECT_TRUE(same_bits(pieces, all));
}

// Values are from math.erf, math.tanh and math.exp of Python.
TEST_F(Reference, ActivationsHaveTheirKnownValues) {
  const Tensor x = f64({4}, {-1.0, 0.0, 1.0, 3.0}), y = out({4});
  device_->run(GeluForward{.x = x, .out = y, .form = GeluForm::erf});
  EXPECT_TRUE(close(values(y), {-0.15865525393145705, 0.0, 0.8413447460685429, 2.99595030590511}, 1e-14));
  device_->run(GeluForward{.x = x, .out = y, .form = GeluForm::tanh});
  EXPECT_TRUE(close(values(y), {-0.15880800939172324, 0.0, 0.8411919906082768, 2.996362607918227}, 1e-12));
  const Tensor gated = out({1, 2});
  device_->run(SwiGluForward{.x = f64({1, 4}, {1.0, -2.0, 3.0, 5.0}), .out = gated});
  EXPECT_TRUE(close(values(gated), {3.0 * 0.7310585786300049, 5.0 * -2.0 * 0.11920292202211755}, 1e-14));
}

TEST_F(Reference, CrossEntropyLeavesOutPaddingAndIgnoredTargets) {
  const double big = 1e6;  // padding must not count whatever it holds
  const Tensor logits = f64({3, 4}, {0, std::log(3.0), 0, big, 5, 5, 5, big, 1000, 0, 0, big}), loss = out({3}), d = out({3, 4});
  const Tensor targets = tensor_of(*device_, Dtype::i32, {3}, {1, -1, 0});
  device_->run(CrossEntropy{.logits = logits, .targets = targets, .loss = loss, .vocab = 3, .scale = 2.0, .dlogits = d});
  EXPECT_TRUE(close(values(loss), {std::log(5.0 / 3.0), 0, 0}, 1e-15));
  EXPECT_TRUE(close(values(d), {0.4, -0.8, 0.4, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 1e-15));
}

TEST_F(Reference, AdamWTakesTheDocumentedStep) {
  const Tensor master = f64({2}, {1.0, -2.0}), m = f64({2}, {0.1, 0.2}), v = f64({2}, {0.04, 0.09}), grad = f64({2}, {0.5, -1.0});
  // Powers of two: exact in fp32. lr, 1 / (1 - beta1^t), 1 / (1 - beta2^t), clip factor, skip.
  const Tensor step = tensor_of(*device_, Dtype::f32, {5}, {0.25, 2.0, 4.0, 0.5, 0.0});
  const Tensor value = random_tensor(*device_, Dtype::bf16, {2}, 1);
  const AdamW k{.master = master,
                .m = m,
                .v = v,
                .grad = grad,
                .step = step,
                .beta1 = 0.9,
                .beta2 = 0.95,
                .eps = 1e-3,
                .weight_decay = 0.1,
                .value = value};
  device_->run(k);
  const double m0 = 0.9 * 0.1 + 0.1 * 0.25, m1 = 0.9 * 0.2 - 0.1 * 0.5, v0 = 0.95 * 0.04 + 0.05 * 0.0625, v1 = 0.95 * 0.09 + 0.05 * 0.25;
  const std::vector<double> expected{1.0 - 0.25 * (2 * m0 / (std::sqrt(4 * v0) + 1e-3) + 0.1 * 1.0),
                                     -2.0 - 0.25 * (2 * m1 / (std::sqrt(4 * v1) + 1e-3) + 0.1 * -2.0)};
  EXPECT_TRUE(close(values(m), {m0, m1}, 1e-15));
  EXPECT_TRUE(close(values(v), {v0, v1}, 1e-15));
  EXPECT_TRUE(close(values(master), expected, 1e-15));
  EXPECT_EQ(to_host<bf16>(value)[0].bits, to_bf16(static_cast<float>(expected[0])).bits);
  assign(step, {0.25, 2.0, 4.0, std::nan(""), 1.0});
  device_->run(k);
  EXPECT_TRUE(close(values(master), expected, 1e-15)) << "a skipped step leaves the master";
}

TEST_F(Reference, SquaredNormIsFiniteIfAndOnlyIfTheRowsAre) {
  const Tensor x = random_tensor(*device_, Dtype::f32, {70, 3}, 1, 1e30), partials = out({3});
  set_value(x, 40 * 3, HUGE_VAL);
  set_value(x, 69 * 3 + 2, std::nan(""));
  device_->run(SquaredNorm{.x = x, .partials = partials});
  const std::vector<double> sums = values(partials), elements = values(x);
  const double first = std::inner_product(elements.begin(), elements.begin() + 32 * 3, elements.begin(), 0.0);
  EXPECT_TRUE(close({sums[0]}, {first}, 1e-14));
  EXPECT_FALSE(std::isfinite(sums[1]));
  EXPECT_FALSE(std::isfinite(sums[2]));
}

TEST_F(Reference, ConversionsRoundToNearestEven) {
  const Tensor x = f64({4}, {1.0 + 0x1p-8, 1.0 + 0x1.8p-7, -1.0 - 0x1p-24, 1e-50}), narrow = random_tensor(*device_, Dtype::bf16, {4}, 1);
  const Tensor single = random_tensor(*device_, Dtype::f32, {4}, 1);
  device_->run(Convert{.x = x, .out = narrow});
  EXPECT_EQ(values(narrow), (std::vector<double>{1.0, 1.0 + 0x1p-6, -1.0, 0.0}));
  device_->run(Convert{.x = x, .out = single});
  EXPECT_EQ(values(single), (std::vector<double>{1.0 + 0x1p-8, 1.0 + 0x1.8p-7, -1.0, 0.0}));
}

// Results of a step with these norms, losses and flags: loss, norm, bad weights, skip, and from the step tensor the clip factor and skip.
struct Finished {
  std::vector<double> outcome, step;
};

Finished finish(Backend& device, const std::vector<double>& partials, const std::vector<double>& losses, const std::vector<int32_t>& flags,
                double clip, bool pairwise) {
  const auto upload = [&](Dtype dtype, const auto& values) {
    return from_host(device, dtype, {static_cast<int64_t>(values.size())}, values.data());
  };
  const Tensor step = zeros(device, Dtype::f32, {5}), outcome = zeros(device, Dtype::f64, {4});
  device.run(FinishGradients{.partials = upload(Dtype::f64, partials),
                             .losses = upload(Dtype::f64, losses),
                             .flags = upload(Dtype::i32, flags),
                             .step = step,
                             .outcome = outcome,
                             .clip = clip,
                             .pairwise = pairwise});
  const std::vector<double> written = values(step);
  return {values(outcome), {written[3], written[4]}};
}

TEST_F(Reference, FinishGradientsTakesTheRootOfTheSumAndClips) {
  const Finished clipped = finish(*device_, {9.0, 16.0}, {2.0}, {0, 0}, 1.0, false);
  EXPECT_EQ(clipped.outcome, (std::vector<double>{2.0, 5.0, 0.0, 0.0}));
  EXPECT_EQ(clipped.step, (std::vector<double>{static_cast<double>(static_cast<float>(1.0 / (5.0 + 1e-6))), 0.0}));
  EXPECT_EQ(finish(*device_, {9.0, 16.0}, {2.0}, {0}, 0.0, false).step, (std::vector<double>{1.0, 0.0}));
  EXPECT_EQ(finish(*device_, {0.25}, {2.0}, {0}, 1.0, false).step, (std::vector<double>{1.0, 0.0}));
}

TEST_F(Reference, FinishGradientsSumsLossesInOrderOrInPairs) {
  const std::vector<double> losses = {1.0, 0x1p53, 1.0, -0x1p53};  // 1 + 2^53 is 2^53, and 1 - 2^53 is exact
  EXPECT_EQ(finish(*device_, {1.0}, losses, {0}, 1.0, false).outcome[0], 0.0);
  EXPECT_EQ(finish(*device_, {1.0}, losses, {0}, 1.0, true).outcome[0], 1.0);
}

TEST_F(Reference, FinishGradientsSkipsForANormALossOrAFlag) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(finish(*device_, {inf}, {2.0}, {0}, 1.0, false).step, (std::vector<double>{1.0, 1.0}));
  EXPECT_EQ(finish(*device_, {1.0}, {2.0, nan}, {0}, 1.0, false).step[1], 1.0);
  const Finished flagged = finish(*device_, {1.0}, {2.0}, {0, 7}, 1.0, false);
  EXPECT_EQ(flagged.outcome, (std::vector<double>{2.0, 1.0, 1.0, 1.0}));
  EXPECT_EQ(flagged.step[1], 1.0);
}

TEST_F(Reference, RandomNormalsDependOnTheElementAlone) {
  const RngKey key{.seed = 5, .stream = RngStream::init};
  const Tensor all = out({10}), part = out({4});
  device_->run(RandomNormal{.out = all, .key = key, .what = 2, .first_index = 100, .std = 3.0});
  device_->run(RandomNormal{.out = part, .key = key, .what = 2, .first_index = 103, .std = 3.0});
  EXPECT_TRUE(same_bits(part, all.slice(3, 7)));
  EXPECT_EQ(values(all)[0], 3.0 * static_cast<double>(random_normal(key, 2, 100)));
}

TEST_F(Reference, RandomNormalsOfABoxAreThoseOfTheWhole) {
  const RngKey key{.seed = 5, .stream = RngStream::init};
  const Tensor all = out({6, 7}), box = out({3, 2});
  device_->run(RandomNormal{.out = all, .key = key, .what = 2, .first_index = 0, .std = 3.0});
  device_->run(RandomNormal{.out = box, .key = key, .what = 2, .first_index = 2 * 7 + 4, .std = 3.0, .row_stride = 7});
  const std::vector<double> whole = values(all);
  EXPECT_EQ(values(box), (std::vector<double>{whole[18], whole[19], whole[25], whole[26], whole[32], whole[33]}));
}

}  // namespace mantissa::test::reference_test
