#include "mantissa/train/generate.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "files.h"
#include "testing.h"

namespace mantissa::generate_test {

using ::testing::ElementsAre;

const std::vector<float> kLogits = {1.0F, 3.0F, 2.0F, 3.0F};

TEST(PickToken, TemperatureZeroTakesTheLikeliestAndTheLowestAmongEquals) {
  for (const double uniform : {0.0, 0.5, 0.999}) EXPECT_EQ(pick_token(kLogits, {.temperature = 0.0}, uniform), 1);
}

// How often each id is picked when `uniform` runs evenly through [0, 1).
std::vector<double> shares(const SamplingOptions& options) {
  std::vector<double> out(kLogits.size());
  constexpr int kDraws = 10000;
  for (int i = 0; i < kDraws; ++i) out[static_cast<size_t>(pick_token(kLogits, options, (i + 0.5) / kDraws))] += 1.0 / kDraws;
  return out;
}

std::vector<double> softmax(std::vector<double> logits, double temperature) {
  double total = 0.0;
  for (double& logit : logits) total += logit = std::exp(logit / temperature);
  for (double& logit : logits) logit /= total;
  return logits;
}

TEST(PickToken, SharesAreTheSoftmaxAtTheTemperature) {
  for (const double temperature : {0.5, 1.0, 2.0}) {
    EXPECT_TRUE(test::close(shares({.temperature = temperature, .top_k = 0}), softmax({1, 3, 2, 3}, temperature), 1e-3));
  }
}

TEST(PickToken, TopKKeepsTheLikeliestOnly) {
  EXPECT_TRUE(test::close(shares({.temperature = 1.0, .top_k = 1}), {0, 1, 0, 0}, 1e-9));
  EXPECT_TRUE(test::close(shares({.temperature = 1.0, .top_k = 2}), {0, 0.5, 0, 0.5}, 1e-3));
}

TEST(PickToken, TopPKeepsTheFewestThatReachIt) {
  const auto all = softmax({1, 3, 2, 3}, 1.0);
  EXPECT_TRUE(test::close(shares({.temperature = 1.0, .top_k = 0, .top_p = 0.3}), {0, 1, 0, 0}, 1e-9));
  EXPECT_TRUE(test::close(shares({.temperature = 1.0, .top_k = 0, .top_p = all[1] + all[3] - 1e-9}), {0, 0.5, 0, 0.5}, 1e-3));
  EXPECT_GT(shares({.temperature = 1.0, .top_k = 0, .top_p = all[1] + all[3] + 0.01})[2], 0.1);
}

TEST(PickToken, NotANumberIsAnError) {
  const std::vector<float> logits = {1.0F, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_EQ(test::error_of([&] { pick_token(logits, {}, 0.5); }).code(), ExitCode::numerical);
}

class GenerateTest : public test::BackendTest {
 protected:
  // Padded to 16 ids, of which 11 exist.
  GenerateTest() {
    ModelConfig config;
    config.vocab_size = 11;
    config.pad_vocab_to = 16;
    config.hidden_size = 16;
    config.num_layers = 2;
    config.num_attention_heads = 2;
    config.num_key_value_heads = 1;
    config.intermediate_size = 24;
    config.max_position_embeddings = 12;
    config.init_std = 0.5;
    model_ = std::make_unique<Gpt>(config, fast(), test::high_plan(config), GptOptions{.gradients = false});
    test::initialize(model_->parameters(), 3);
  }

  // The likeliest next token by a whole forward pass.
  int32_t next_by_forward(const std::vector<int32_t>& tokens) {
    const auto n = static_cast<int64_t>(tokens.size());
    std::vector<int32_t> positions(tokens.size());
    for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i);
    const TokenBatch batch{.batch = 1,
                           .tokens = from_host(fast(), Dtype::i32, {n}, tokens.data()),
                           .positions = from_host(fast(), Dtype::i32, {n}, positions.data()),
                           .segment_starts = {}};
    const std::vector<double> logits = test::values(model_->logits(batch).slice(n - 1, n));
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.begin() + 11) - logits.begin());
  }

  std::unique_ptr<Gpt> model_;
};

TEST_F(GenerateTest, CacheGivesTheTokensOfWholeForwardPassesAlsoWhenItStartsAgain) {
  std::vector<int32_t> sequence = {1, 2, 3}, window = sequence;
  for (int i = 0; i < 30; ++i) {
    if (window.size() > 12) window.erase(window.begin(), window.end() - 6);
    sequence.push_back(next_by_forward(window));
    window.push_back(sequence.back());
  }
  const auto generated = generate(*model_, {1, 2, 3}, {.max_new_tokens = 30, .temperature = 0.0});
  EXPECT_EQ(generated, std::vector<int32_t>(sequence.begin() + 3, sequence.end()));
}

TEST_F(GenerateTest, EqualSeedsGiveEqualTokensAndSamplesAreIndependent) {
  const SamplingOptions options{.max_new_tokens = 40, .temperature = 1.0, .seed = 5};
  const auto tokens = [&](SamplingOptions changed) { return generate(*model_, {1}, changed); };
  EXPECT_EQ(tokens(options), tokens(options));
  SamplingOptions other = options;
  other.seed = 6;
  EXPECT_NE(tokens(other), tokens(options));
  other = options, other.what = 1;
  EXPECT_NE(tokens(other), tokens(options));
  other = options, other.moment = 1;
  EXPECT_NE(tokens(other), tokens(options));
}

TEST_F(GenerateTest, PaddedIdsAreNeverWritten) {
  for (const int32_t id : generate(*model_, {1}, {.max_new_tokens = 300, .temperature = 50.0, .top_k = 0})) EXPECT_LT(id, 11);
}

TEST_F(GenerateTest, LongPromptKeepsItsEnd) {
  const std::vector<int32_t> long_prompt = {9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 1, 2, 3, 4, 5, 6};
  const SamplingOptions options{.max_new_tokens = 3, .temperature = 0.0};
  EXPECT_EQ(generate(*model_, long_prompt, options), generate(*model_, {1, 2, 3, 4, 5, 6}, options));
}

TEST_F(GenerateTest, CallbackSeesEachTokenAndMayStop) {
  std::vector<int32_t> seen;
  const auto generated = generate(*model_, {1}, {.max_new_tokens = 20}, [&](int32_t id) {
    seen.push_back(id);
    return seen.size() < 4;
  });
  EXPECT_EQ(generated.size(), 4U);
  EXPECT_EQ(seen, generated);
}

TEST_F(GenerateTest, MoreTokensThanThereAreDrawsAreRefused) {
  const auto stop = [](int32_t) { return false; };
  EXPECT_EQ(generate(*model_, {1}, {.max_new_tokens = 1 << 24}, stop).size(), 1U);
  EXPECT_EQ(test::error_of([&] { generate(*model_, {1}, {.max_new_tokens = (1 << 24) + 1}, stop); }).code(), ExitCode::usage);
}

TEST_F(GenerateTest, EmptyPromptAndForeignTokensAreRefused) {
  EXPECT_EQ(test::error_of([&] { generate(*model_, {}, {}); }).code(), ExitCode::usage);
  EXPECT_EQ(test::error_of([&] { generate(*model_, {11}, {}); }).code(), ExitCode::usage);
}

}  // namespace mantissa::generate_test
