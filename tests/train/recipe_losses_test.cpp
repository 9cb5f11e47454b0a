// Losses of models in other formats against one in high precision.
#include "train/recipe_losses.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "data/open_data.h"
#include "error_messages.h"
#include "files.h"
#include "mantissa/backend/functions.h"
#include "testing.h"
#include "train/evaluate.h"
#include "train/training_step.h"

namespace mantissa::recipe_losses_test {

TEST(TokenDifferences, AreTheDivergenceOfSoftmaxAndTheLikeliestToken) {
  const std::vector<float> p = {0.5F, 2.0F, -1.0F, 0.0F}, q = {1.5F, 1.0F, -2.0F, 0.25F};
  double sum_p = 0.0, sum_q = 0.0, expected = 0.0;
  for (size_t i = 0; i < p.size(); ++i) sum_p += std::exp(double{p[i]}), sum_q += std::exp(double{q[i]});
  for (size_t i = 0; i < p.size(); ++i)
    expected += std::exp(double{p[i]}) / sum_p * (std::log(std::exp(double{p[i]}) / sum_p) - std::log(std::exp(double{q[i]}) / sum_q));
  const TokenDifference found = token_difference(p, q);
  EXPECT_NEAR(found.kl, expected, 1e-14);
  EXPECT_FALSE(found.equal_greedy);
  EXPECT_EQ(token_difference(p, p).kl, 0.0);
  EXPECT_TRUE(token_difference(p, p).equal_greedy);
  EXPECT_NE(token_difference(q, p).kl, found.kl) << "it is not symmetric";
}

TEST(TokenDifferences, HoldForLargeLogitsAndForMovedOnes) {
  const std::vector<float> p = {3000.0F, 2999.0F, -3000.0F}, moved = {-2000.0F, -2001.0F, -8000.0F}, other = {2999.0F, 3000.0F, -3000.0F};
  EXPECT_EQ(token_difference(p, moved).kl, 0.0) << "softmax does not see a constant";
  EXPECT_NEAR(token_difference(p, other).kl, (std::exp(1.0) - 1.0) / (std::exp(1.0) + 1.0), 1e-12);
}

TEST(TokenDifferences, TiesGoToTheFirstAndNanShows) {
  EXPECT_TRUE(token_difference(std::vector<float>{1, 1, 0}, std::vector<float>{2, 1, 2}).equal_greedy);
  EXPECT_FALSE(token_difference(std::vector<float>{1, 1, 0}, std::vector<float>{1, 2, 2}).equal_greedy);
  EXPECT_TRUE(std::isnan(token_difference(std::vector<float>{1, 2}, std::vector<float>{1, std::nanf("")}).kl));
  EXPECT_TRUE(std::isnan(token_difference(std::vector<float>{std::nanf(""), 2}, std::vector<float>{1, 2}).kl));
}

constexpr int64_t kLength = 16;

class RecipeLossesTest : public test::BackendTest {
 protected:
  RecipeLossesTest() {
    std::string text;
    for (uint64_t i = 0; i < 600; ++i) text += static_cast<char>(random_words({.seed = 7}, 1, i)[0] % 100);
    test::write_file(folder_ / "long.txt", text);
    test::write_file(folder_ / "short.txt", text.substr(100, 150));
    config_.vocab_size = 250;
    config_.pad_vocab_to = 8;
    config_.hidden_size = 32;
    config_.num_layers = 2;
    config_.num_attention_heads = 2;
    config_.intermediate_size = 64;
    config_.max_position_embeddings = kLength;
    config_.init_std = 0.3;
    high_ = std::make_unique<Gpt>(config_, fast(), plan("high"), GptOptions{.gradients = false});
    test::initialize(high_->parameters(), 3);
  }

  PrecisionPlan plan(const std::string& recipe) const {
    PrecisionConfig precision;
    precision.recipe = recipe;
    ConfigReport report;
    PrecisionPlan out = PrecisionPlan::resolve(precision, model_shape(config_), report);
    report.throw_if_failed();
    return out;
  }
  // Losses by the definition, from whole logits of so many windows; the padding of the vocabulary does not take part.
  RecipeLoss defined(const Data& data, Gpt& other, int64_t windows) const {
    RecipeLoss sum{.equal_greedy = 0.0};
    const int64_t width = config_.padded_vocab_size();
    for (int64_t window = 0; window < windows; ++window) {
      const Batch batch = data.valid.batch(0, window, 1);
      const DeviceBatch rows = to_device(*high_, batch, 0, 1);
      const std::vector<float> p = to_host<float>(converted(high_->logits(rows.tokens), Dtype::f32)),
                               q = to_host<float>(converted(other.logits(rows.tokens), Dtype::f32));
      const auto row_of = [&](const std::vector<float>& logits, int64_t row) {
        return std::span(logits).subspan(static_cast<size_t>(row * width), static_cast<size_t>(*config_.vocab_size));
      };
      for (int64_t row = 0; row < kLength; ++row) {
        if (batch.targets[static_cast<size_t>(row)] == kNoTarget) continue;
        const TokenDifference token = token_difference(row_of(p, row), row_of(q, row));
        sum.kl += token.kl;
        sum.equal_greedy += token.equal_greedy ? 1.0 : 0.0;
        ++sum.targets;
      }
    }
    sum.kl /= static_cast<double>(sum.targets);
    sum.equal_greedy /= static_cast<double>(sum.targets);
    return sum;
  }
  // Ends of lines are no targets.
  Data open(std::vector<std::string> names) const {
    DataConfig config;
    config.tokenizer = "byte";
    config.eod_id = 10;
    config.mask_eod_loss = true;
    for (const std::string& name : names) config.valid.push_back({.path = folder_ / name});
    return open_validation_data(config, {.seq_len = kLength, .vocab_size = 256});
  }

  test::TemporaryFolder folder_;
  ModelConfig config_;
  std::unique_ptr<Gpt> high_;
};

TEST_F(RecipeLossesTest, HaveTheBitsOfAnEvaluation) {
  const Data data = open({"long.txt", "short.txt"});
  const auto quantized = with_plan(*high_, plan("mxfp4_qat"));
  for (const std::optional<int64_t> iters : {std::optional<int64_t>(), std::optional<int64_t>(2)}) {
    int64_t calls = 0;
    const RecipeLosses losses(*high_, data.valid, 3, iters, [&calls] { ++calls; });
    EXPECT_EQ(calls, iters ? 4 : 13 + 4);
    const Evaluation high = evaluate(*high_, data.valid, 3, iters), other = evaluate(*quantized, data.valid, 3, iters);
    EXPECT_EQ(losses.high().loss, high.loss);
    EXPECT_EQ(losses.high().targets, high.targets);
    EXPECT_EQ(losses.high().kl, 0.0);
    EXPECT_EQ(losses.high().equal_greedy, 1.0);
    const RecipeLoss found = losses.of(*quantized), same = losses.of(*with_plan(*high_, plan("high")));
    EXPECT_EQ(found.loss, other.loss);
    EXPECT_EQ(found.targets, other.targets);
    EXPECT_EQ(same.loss, high.loss);
    EXPECT_EQ(same.kl, 0.0);
    EXPECT_EQ(same.equal_greedy, 1.0);
  }
}

TEST_F(RecipeLossesTest, CompareThePredictionsOfTargetsThatCount) {
  const Data data = open({"long.txt"});
  const auto quantized = with_plan(*high_, plan("mxfp4_qat"));
  const RecipeLosses losses(*high_, data.valid, 4, {}, {});
  const RecipeLoss found = losses.of(*quantized), expected = defined(data, *quantized, data.valid.windows(0));
  ASSERT_GT(config_.padded_vocab_size(), 250);
  EXPECT_LT(expected.targets, 599) << "ends of lines do not count";
  EXPECT_EQ(found.targets, expected.targets);
  EXPECT_NEAR(found.kl, expected.kl, 1e-12);
  EXPECT_EQ(found.equal_greedy, expected.equal_greedy);
  EXPECT_GT(found.kl, 0.0);
  EXPECT_LT(found.equal_greedy, 1.0);
}

// A micro batch has 8 windows of 16 tokens: 128 rows of logits in two parts, of which the second begins behind the first.
TEST_F(RecipeLossesTest, HaveTheSameBitsInSeveralParts) {
  const Data data = open({"long.txt"});
  const auto quantized = with_plan(*high_, plan("mxfp4_qat"));
  const RecipeLosses whole(*high_, data.valid, 8, {}, {}), parts(*high_, data.valid, 8, {}, {}, 64 * config_.padded_vocab_size());
  EXPECT_EQ(parts.high().loss, whole.high().loss);
  const RecipeLoss a = whole.of(*quantized), b = parts.of(*quantized);
  EXPECT_EQ(b.loss, a.loss);
  EXPECT_EQ(b.targets, a.targets);
  EXPECT_EQ(b.kl, a.kl);
  EXPECT_EQ(b.equal_greedy, a.equal_greedy);
  EXPECT_GT(a.kl, 1e-6);
}

// The first of three windows has ends of lines alone.
TEST_F(RecipeLossesTest, LeaveOutMicroBatchesWithoutTargets) {
  std::string text;
  for (uint64_t i = 0; i < 3 * kLength + 1; ++i)
    text += i <= kLength ? '\n' : static_cast<char>('a' + random_words({.seed = 9}, 1, i)[0] % 20);
  test::write_file(folder_ / "gap.txt", text);
  const Data data = open({"gap.txt"});
  ASSERT_EQ(data.valid.windows(0), 3);
  ASSERT_EQ(data.valid.batch(0, 0, 1).target_count, 0);
  const auto quantized = with_plan(*high_, plan("mxfp4_qat"));
  const RecipeLosses losses(*high_, data.valid, 1, {}, {});
  const RecipeLoss found = losses.of(*quantized), expected = defined(data, *quantized, 3);
  EXPECT_EQ(found.targets, expected.targets);
  EXPECT_NEAR(found.kl, expected.kl, 1e-12);
  EXPECT_EQ(found.equal_greedy, expected.equal_greedy);
}

TEST_F(RecipeLossesTest, APlanNeedsValuesOfItsType) {
  EXPECT_EQ(with_plan(*high_, plan("fp32")), nullptr);
  EXPECT_NE(with_plan(*high_, plan("bf16")), nullptr);
}

TEST_F(RecipeLossesTest, APlanTakesTheExpertBiases) {
  config_.moe = MoeConfig{.num_experts = 4, .num_experts_per_tok = 2, .intermediate_size = 32};
  config_.moe->score = RouterScore::sigmoid;
  config_.moe->bias_update_rate = 1e-3;
  high_ = std::make_unique<Gpt>(config_, fast(), plan("high"), GptOptions{.gradients = false});
  test::initialize(high_->parameters(), 3);
  const std::deque<Buffer>& biases = high_->parameters().buffers();
  ASSERT_EQ(biases.size(), 2U);
  test::set_value(biases[1].value, 2, 0.5);
  const auto made = with_plan(*high_, plan("mxfp4_qat"));
  for (size_t i = 0; i < biases.size(); ++i)
    EXPECT_EQ(to_host<float>(made->parameters().buffers()[i].value), to_host<float>(biases[i].value)) << i;
}

}  // namespace mantissa::recipe_losses_test
