#include "train/evaluate.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "data/open_data.h"
#include "files.h"
#include "mantissa/backend/functions.h"
#include "testing.h"
#include "thread_ranks.h"
#include "train/training_step.h"

namespace mantissa::evaluate_test {

constexpr int64_t kLength = 16;

class EvaluateTest : public test::BackendTest {
 protected:
  EvaluateTest() {
    std::string text;
    for (uint64_t i = 0; i < 1000; ++i) text += static_cast<char>(random_words({.seed = 7}, 1, i)[0] % 100);
    test::write_file(folder_ / "long.txt", text);
    test::write_file(folder_ / "short.txt", text.substr(100, 150));
    ModelConfig config;
    config.vocab_size = 256;
    config.hidden_size = 16;
    config.num_layers = 1;
    config.num_attention_heads = 2;
    config.intermediate_size = 24;
    config.max_position_embeddings = kLength;
    config.init_std = 0.3;
    model_ = std::make_unique<Gpt>(config, fast(), test::high_plan(config), GptOptions{.gradients = false});
    test::initialize(model_->parameters(), 3);
  }

  // end: the byte that ends documents, whose targets do not count.
  Data open(std::vector<std::string> names, std::optional<int64_t> end = {}) const {
    DataConfig config;
    config.tokenizer = "byte";
    config.eod_id = end;
    config.mask_eod_loss = end.has_value();
    for (const std::string& name : names) config.valid.push_back({.path = folder_ / name});
    return open_validation_data(config, {.seq_len = kLength});
  }

  test::TemporaryFolder folder_;
  std::unique_ptr<Gpt> model_;
};

TEST_F(EvaluateTest, EveryTargetCountsOnceWhateverTheBatch) {
  const Data data = open({"long.txt"});
  const Evaluation one = evaluate(*model_, data.valid, 1, {});
  for (const int64_t rows : {1, 3, 64, 1000}) {
    const Evaluation other = evaluate(*model_, data.valid, rows, {});
    EXPECT_EQ(other.targets, 999);
    EXPECT_NEAR(other.loss, one.loss, 1e-6 * one.loss) << rows;
  }
  for (const int64_t iters : {int64_t{16}, int64_t{1} << 62, std::numeric_limits<int64_t>::max()})
    EXPECT_EQ(evaluate(*model_, data.valid, 4, iters).targets, 999) << iters << ", more than there are";
  EXPECT_EQ(evaluate(*model_, data.valid, 4, 15).targets, 15 * 4 * kLength);
}

// The order is that of the windows. Some of these losses are about 5 and others about 1e12, so that sums of doubles are rounded.
TEST_F(EvaluateTest, RanksAddWindowsInTheirOrder) {
  const test::Threads one(1);
  const Data data = open({"long.txt"});
  const auto loss_on = [&](const Communicator& group) {
    const auto device = make_backend("cpu");
    Gpt model(model_->config(), *device, test::high_plan(model_->config()), GptOptions{.gradients = false});
    test::initialize(model.parameters(), 3);
    const Tensor row = model.parameters().find("output.weight")->value().slice(9, 10);
    device->run(Fill{.out = row, .value = 1e12});
    return evaluate(model, data.valid, 1, {}, {}, group).loss;
  };
  const double alone = loss_on({});
  for (const int ranks : {2, 4}) {
    const auto errors = test::run_ranks(ranks, [&](const Communicator& group) { EXPECT_EQ(loss_on(group), alone) << ranks; });
    EXPECT_THAT(errors, ::testing::Each(::testing::IsEmpty()));
  }
}

// Two sequences of which some tokens have no target.
Batch two_sequences() {
  Batch batch = batch_of({3, 255, 0, 17, 17, 90});
  const Batch other = batch_of({7, 8, 9, 10, 11, 12});
  batch.sequences = 2;
  for (auto member : {&Batch::tokens, &Batch::targets, &Batch::positions, &Batch::segment_starts})
    (batch.*member).insert((batch.*member).end(), (other.*member).begin(), (other.*member).end());
  batch.targets[2] = batch.targets[9] = kNoTarget;
  batch.target_count = 8;
  return batch;
}

TEST_F(EvaluateTest, LogProbabilitiesAreThoseOfTheSoftmaxOfTheLogitsOfEachToken) {
  const Batch batch = two_sequences();
  const std::vector<double> logits = test::values(model_->logits(to_device(*model_, batch, 0, 2).tokens));
  const std::vector<float> logprobs = target_logprobs(*model_, batch);
  ASSERT_EQ(logprobs.size(), 10U);
  for (size_t t = 0; t < 10; ++t) {
    double total = 0.0;
    for (size_t v = 0; v < 256; ++v) total += std::exp(logits[t * 256 + v]);
    const int32_t target = batch.targets[t];
    const double expected = target < 0 ? 0.0 : logits[t * 256 + static_cast<size_t>(target)] - std::log(total);
    EXPECT_NEAR(double{logprobs[t]}, expected, 1e-5) << t;
    EXPECT_EQ(logprobs[t] == 0.0F, target < 0) << t;
  }
}

TEST_F(EvaluateTest, LossIsTheMeanOfTheNegativeLogProbabilities) {
  const Data data = open({"short.txt"});
  double sum = 0.0;
  for (int64_t window = 0; window < data.valid.windows(0); window += 3) {
    for (const float logprob : target_logprobs(*model_, data.valid.batch(0, window, 3))) sum -= double{logprob};
  }
  EXPECT_NEAR(sum / 149.0, evaluate(*model_, data.valid, 4, {}).loss, 1e-6);
}

TEST_F(EvaluateTest, AProbabilityThatIsNotANumberIsAnErrorThatNamesItsToken) {
  const Tensor& weight = model_->parameters().find("embed.weight")->value();
  const Tensor row = weight.slice(9, 10);
  row.device().run(Fill{.out = row, .value = std::numeric_limits<double>::quiet_NaN()});
  const Error error = test::error_of([&] { target_logprobs(*model_, two_sequences()); });
  EXPECT_EQ(error.code(), ExitCode::numerical);
  EXPECT_THAT(error.what(), ::testing::HasSubstr("the target [1, "));
}

TEST_F(EvaluateTest, OneTokenHasNothingToPredict) {
  EXPECT_EQ(test::error_of([] { batch_of({5}); }).code(), ExitCode::internal);
}

TEST_F(EvaluateTest, SeveralSetsAreReportedApartAndAveragedByTargets) {
  const Data data = open({"long.txt", "short.txt"});
  const Evaluation both = evaluate(*model_, data.valid, 4, {});
  ASSERT_EQ(both.sets.size(), 2U);
  EXPECT_NEAR(both.sets[0].loss, evaluate(*model_, open({"long.txt"}).valid, 4, {}).loss, 1e-12);
  EXPECT_NEAR(both.sets[1].loss, evaluate(*model_, open({"short.txt"}).valid, 4, {}).loss, 1e-12);
  EXPECT_NEAR(both.loss, (999 * both.sets[0].loss + 149 * both.sets[1].loss) / 1148, 1e-12);
  const Evaluation some = evaluate(*model_, data.valid, 4, 3);
  EXPECT_EQ(some.sets[0].targets, 12 * kLength);
  EXPECT_EQ(some.sets[1].targets, 149) << "a short set is taken whole";
  test::write_file(folder_ / "ends.txt", std::string(50, 'e'));
  const Evaluation ends = evaluate(*model_, open({"long.txt", "ends.txt"}, 'e').valid, 4, {});
  EXPECT_EQ(ends.sets[1].targets, 0);
  EXPECT_TRUE(std::isnan(ends.sets[1].loss)) << "it has none";
  EXPECT_EQ(ends.loss, ends.sets[0].loss);
}

}  // namespace mantissa::evaluate_test
