#include "train/generate.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "files.h"
#include "testing.h"

namespace mantissa::generate_test {

using ::testing::ElementsAre;

const std::vector<float> kLogits = {1.0F, 3.0F, 2.0F, 3.0F};

TEST(PickToken, TemperatureZeroTakesTheLikeliestAndTheLowestAmongEquals) {
  for (const double uniform : {0.0, 0.5, 0.999}) EXPECT_EQ(pick_token(kLogits, {.temperature = 0.0}, uniform), 1);
}

// The share of picks of each id when `uniform` runs evenly through [0, 1).
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

TEST(PickToken, SharesAreTheSoftmaxOfWhatIsKept) {
  const auto all = softmax({1, 3, 2, 3}, 1.0);
  const double both = all[1] + all[3];
  const std::pair<SamplingOptions, std::vector<double>> cases[] = {
      {{.temperature = 0.5, .top_k = 0}, softmax({1, 3, 2, 3}, 0.5)},
      {{.temperature = 1.0, .top_k = 0}, all},
      {{.temperature = 2.0, .top_k = 0}, softmax({1, 3, 2, 3}, 2.0)},
      {{.temperature = 1.0, .top_k = 1}, {0, 1, 0, 0}},
      {{.temperature = 1.0, .top_k = 2}, {0, 0.5, 0, 0.5}},
      {{.temperature = 1.0, .top_k = 0, .top_p = 0.0}, {0, 1, 0, 0}},
      {{.temperature = 1.0, .top_k = 0, .top_p = 0.3}, {0, 1, 0, 0}},
      {{.temperature = 1.0, .top_k = 0, .top_p = both - 1e-9}, {0, 0.5, 0, 0.5}},
      {{.temperature = 1.0, .top_k = 0, .top_p = both + 0.01}, {0, all[1] / (1 - all[0]), all[2] / (1 - all[0]), all[3] / (1 - all[0])}}};
  for (const auto& [options, expected] : cases)
    EXPECT_TRUE(test::close(shares(options), expected, 1e-3)) << options.temperature << ' ' << options.top_k << ' ' << options.top_p;
}

TEST(PickToken, AnInfiniteLogitIsTakenAndNotANumberIsAnError) {
  const std::vector<float> infinite = {1.0F, std::numeric_limits<float>::infinity(), 2.0F},
                           bad = {1.0F, std::numeric_limits<float>::quiet_NaN()};
  for (const double uniform : {0.0, 0.5, 0.999}) EXPECT_EQ(pick_token(infinite, {.temperature = 1.0}, uniform), 1);
  EXPECT_EQ(test::error_of([&] { pick_token(bad, {}, 0.5); }).code(), ExitCode::numerical);
}

// The logits of each position, by a whole forward pass.
Tensor whole_forward(Gpt& model, Backend& device, const std::vector<int32_t>& tokens) {
  std::vector<int32_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), 0);
  const auto n = std::ssize(tokens);
  return model.logits({.batch = 1,
                       .tokens = from_host(device, Dtype::i32, {n}, tokens.data()),
                       .positions = from_host(device, Dtype::i32, {n}, positions.data()),
                       .segment_starts = {}});
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

  std::unique_ptr<Gpt> model_;
};

TEST_F(GenerateTest, CacheGivesTheTokensOfWholeForwardPassesAlsoWhenItStartsAgain) {
  std::vector<int32_t> window = {1, 2, 3}, expected;
  for (int i = 0; i < 30; ++i) {
    if (window.size() > 12) window.erase(window.begin(), window.end() - 6);
    const auto n = std::ssize(window);
    const std::vector<double> logits = test::values(whole_forward(*model_, fast(), window).slice(n - 1, n));
    expected.push_back(static_cast<int32_t>(std::max_element(logits.begin(), logits.begin() + 11) - logits.begin()));
    window.push_back(expected.back());
  }
  EXPECT_EQ(generate(*model_, {1, 2, 3}, {.max_new_tokens = 30, .temperature = 0.0}), expected);
}

// Equal seeds therefore give equal tokens, and texts and moments are independent.
TEST_F(GenerateTest, DrawsAreNumberedBySeedTextMomentAndToken) {
  for (const auto& [seed, what, moment] :
       {std::tuple<uint64_t, uint32_t, uint64_t>(5, 2, 0), {6, 2, 0}, {5, 0, 0}, {5, 2, 1}, {5, 2, 1000}}) {
    auto cache = model_->new_cache();
    std::vector<int32_t> pending = {1}, expected;
    for (uint64_t i = 0; i < 4; ++i) {
      const uint32_t word = random_words({.seed = seed, .stream = RngStream::sample}, what, (moment << 24) + i)[0];
      const std::vector<float> logits = to_host<float>(model_->next_logits(pending, cache));
      expected.push_back(pick_token({logits.data(), 11}, {.temperature = 1.0, .top_k = 0}, word * 0x1p-32));
      pending.assign(1, expected.back());
    }
    const SamplingOptions options{.max_new_tokens = 4, .temperature = 1.0, .top_k = 0, .seed = seed, .what = what, .moment = moment};
    EXPECT_EQ(generate(*model_, {1}, options), expected) << seed << ' ' << what << ' ' << moment;
  }
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

TEST_F(GenerateTest, WhatCannotBeWrittenIsRefused) {
  const auto stop = [](int32_t) { return false; };
  const auto code = [](const auto& body) { return test::error_of(body).code(); };
  EXPECT_EQ(generate(*model_, {1}, {.max_new_tokens = 1 << 24}, stop).size(), 1U);
  EXPECT_EQ(code([&] { generate(*model_, {1}, {.max_new_tokens = (1 << 24) + 1}, stop); }), ExitCode::usage) << "more than there are draws";
  EXPECT_EQ(code([&] { generate(*model_, {}, {}); }), ExitCode::usage);
  EXPECT_EQ(code([&] { generate(*model_, {11}, {}); }), ExitCode::usage);
  EXPECT_TRUE(generate_batch(*model_, {}, {.max_new_tokens = 3}).empty());
  EXPECT_EQ(code([&] { generate_batch(*model_, {{1}, {}}, {}); }), ExitCode::usage);
}

// A model that can be quantized, in one recipe, with experts in its second layer or without.
struct Batched {
  std::string recipe;
  Dtype dtype;
  bool experts;
};
void PrintTo(const Batched& b, std::ostream* out) { *out << b.recipe << '_' << b.dtype << (b.experts ? "_experts" : ""); }

class BatchTest : public test::BackendTest, public ::testing::WithParamInterface<Batched> {
 protected:
  static ModelConfig config() {
    ModelConfig out;
    out.vocab_size = 50;
    out.pad_vocab_to = 64;
    out.hidden_size = 64;
    out.num_layers = 2;
    out.num_attention_heads = 4;
    out.num_key_value_heads = 2;
    out.intermediate_size = 96;
    out.max_position_embeddings = 40;
    out.init_std = 0.3;
    if (GetParam().experts) out.moe = MoeConfig{.num_experts = 6, .num_experts_per_tok = 2, .intermediate_size = 64, .dense_layers = {0}};
    return out;
  }
  static PrecisionPlan plan() {
    PrecisionConfig precision;
    precision.dtype = GetParam().dtype;
    precision.recipe = GetParam().recipe;
    ConfigReport report;
    return PrecisionPlan::resolve(precision, model_shape(config()), report);
  }
  static std::unique_ptr<Gpt> model_on(Backend& device) {
    auto out = std::make_unique<Gpt>(config(), device, plan(), GptOptions{.gradients = false});
    test::initialize(out->parameters(), 11);
    return out;
  }

  std::unique_ptr<Gpt> model_ = model_on(fast());
  // Prompts of ragged lengths, on both sides of the limit for tiles; the last one begins anew after few tokens.
  const std::vector<std::vector<int32_t>> prompts_ = {
      {1}, {2, 3, 4}, std::vector<int32_t>(20, 5), {9, 8, 7, 6}, std::vector<int32_t>(36, 2)};
};

TEST_P(BatchTest, EachPromptHasTheTokensThatItHasAlone) {
  for (const double temperature : {0.0, 1.0}) {
    const SamplingOptions options{.max_new_tokens = 30, .temperature = temperature, .seed = 3};
    const auto together = generate_batch(*model_, prompts_, options);
    ASSERT_EQ(together.size(), prompts_.size());
    for (size_t i = 0; i < prompts_.size(); ++i) EXPECT_EQ(together[i], generate(*model_, prompts_[i], options)) << i;
  }
}

TEST_P(BatchTest, AnySequenceHasTheBitsThatItHasAlone) {
  std::vector<std::vector<KeyValueCache>> caches, alone;
  std::vector<std::vector<KeyValueCache>*> together;
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 21; ++i) {  // more than few rows
    for (auto* all : {&caches, &alone}) {
      all->push_back(model_->new_cache());
      model_->next_logits(std::vector<int32_t>(static_cast<size_t>(1 + i % 4), i), all->back());
    }
    tokens.push_back(i + 7);
  }
  for (auto& cache : caches) together.push_back(&cache);
  const Tensor logits = model_->next_logits(tokens, together);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    EXPECT_EQ(to_host<float>(logits.slice(row, row + 1)), to_host<float>(model_->next_logits({tokens[i]}, alone[i]))) << i;
    EXPECT_EQ(caches[i][1].length, alone[i][1].length);
  }
}

TEST_P(BatchTest, AnEndOfOneIsNotThatOfOthers) {
  std::vector<std::vector<int32_t>> seen(prompts_.size());
  const auto texts = generate_batch(*model_, prompts_, {.max_new_tokens = 9}, [&](size_t i, int32_t id) {
    seen[i].push_back(id);
    return seen[i].size() < 2 * i + 1;
  });
  for (size_t i = 0; i < prompts_.size(); ++i) EXPECT_EQ(texts[i].size(), std::min<size_t>(9, 2 * i + 1));
  EXPECT_EQ(texts, seen);
}

// Other kernels multiply the same values. They round bf16 activations elsewhere, so their likeliest token may be another one where the lead
// is less than a few times 2^-9 of the values of two layers and the logits.
class Likeliest {
 public:
  explicit Likeliest(Dtype dtype) : bf16_(dtype == Dtype::bf16) {}
  ~Likeliest() { EXPECT_GE(equal_, bf16_ ? all_ * 9 / 10 : all_); }
  Likeliest(const Likeliest&) = delete;
  Likeliest& operator=(const Likeliest&) = delete;

  void expect(std::vector<double> logits, int32_t id) {
    logits.resize(50);
    const double most = std::ranges::max(logits), largest = std::max(most, -std::ranges::min(logits)),
                 own = logits[static_cast<size_t>(id)];
    EXPECT_GE(own, most - (bf16_ ? 0.03 : 1e-4) * largest) << "token " << all_;
    equal_ += own == most ? 1 : 0, ++all_;
  }

 private:
  bool bf16_;
  int equal_ = 0, all_ = 0;
};

TEST_P(BatchTest, LikeliestTokensAreThoseOfTheReference) {
  const std::unique_ptr<Gpt> slow = model_on(reference());
  const auto texts = generate_batch(*model_, prompts_, {.max_new_tokens = 10, .temperature = 0.0});
  Likeliest likeliest(GetParam().dtype);
  for (size_t i = 0; i + 1 < texts.size(); ++i) {
    auto cache = slow->new_cache();
    std::vector<int32_t> pending = prompts_[i];
    for (const int32_t id : texts[i]) {
      likeliest.expect(test::values(slow->next_logits(pending, cache)), id);
      pending.assign(1, id);
    }
  }
}

// Training's forward pass over the whole text goes through tiles.
TEST_P(BatchTest, LikeliestTokensAreThoseOfTrainingsForward) {
  std::vector<int32_t> tokens{3, 1, 4};
  Likeliest likeliest(GetParam().dtype);
  for (const int32_t id : generate(*model_, tokens, {.max_new_tokens = 20, .temperature = 0.0})) {
    const auto count = std::ssize(tokens);
    likeliest.expect(test::values(whole_forward(*model_, fast(), tokens).slice(count - 1, count)), id);
    tokens.push_back(id);
  }
}

INSTANTIATE_TEST_SUITE_P(, BatchTest,
                         ::testing::Values(Batched{"high", Dtype::f32, false}, Batched{"high", Dtype::bf16, false},
                                           Batched{"mxfp8", Dtype::bf16, false}, Batched{"mxfp8_weights", Dtype::f32, false},
                                           Batched{"mxfp4_qat", Dtype::bf16, false}, Batched{"mxfp4_qat_mxfp8_act", Dtype::bf16, true},
                                           Batched{"high", Dtype::bf16, true}, Batched{"mxfp8", Dtype::bf16, true}),
                         ::testing::PrintToStringParamName());

}  // namespace mantissa::generate_test
