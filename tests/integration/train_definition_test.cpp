// Results of train() with settings whose effect can be worked out beside it: the learning rate of each step, and the training and
// validation data under the document options, by plain_gpt.h.
#include <gtest/gtest.h>

#include "plain_gpt.h"
#include "training.h"

namespace mantissa::train_definition_test {

constexpr int32_t kEnd = 0;  // ends a document

class TrainDefinition : public test::TrainingTest {
 protected:
  // The letters as ids in nanoGPT's format; one in eight ends a document.
  std::string token_file() const {
    std::string ids;
    for (const char letter : test::second_order_text(4000)) ids += {static_cast<char>(letter - 'a'), '\0'};
    test::write_file(folder_ / "ids.bin", ids);
    return folder_ / "ids.bin";
  }
};

TEST_F(TrainDefinition, StepsTakeTheRatesOfTheSchedule) {
  const test::TrainedRun rising = run("rising", {"training.steps=7", "optimizer.lr=6e-3", "schedule.type=constant"});
  ASSERT_EQ(rising.steps.size(), 7U);
  for (size_t i = 0; i < 7; ++i) EXPECT_DOUBLE_EQ(rising.steps[i].lr, 1e-3 * static_cast<double>(std::min<size_t>(i + 1, 6))) << i;
  // The first sixth of the warmup, and a constant rate of that size.
  run("first", {"training.steps=1", "optimizer.lr=6e-3"});
  run("constant", {"training.steps=1", "optimizer.lr=1e-3", "schedule.warmup_steps=0", "schedule.type=constant"});
  EXPECT_TRUE(test::same_elements(state_of("first", 1), state_of("constant", 1)));
}

// Divides a batch into documents by the option.
Batch with_documents(Batch batch, const std::string& option) {
  int32_t start = 0;
  for (size_t i = 0; i < batch.tokens.size(); ++i) {
    const auto t = static_cast<int32_t>(i % static_cast<size_t>(batch.length));
    if (t == 0) start = 0;
    if (t > 0 && batch.tokens[i - 1] == kEnd) start = t;
    if (option == "mask_eod_loss" && batch.tokens[i] == kEnd) {
      batch.targets[i] = kNoTarget;
      --batch.target_count;
    }
    if (option == "reset_position_ids") batch.positions[i] = t - start;
    if (option == "document_mask") batch.segment_starts[i] = start;
  }
  return batch;
}

TEST_F(TrainDefinition, DocumentOptionsActOnTrainingAndValidation) {
  // Without an update both losses are those of the initial weights.
  const std::vector<std::string> common = {"training.steps=1",         "optimizer.lr=1e-60",  "model.init_std=0.3",
                                           "model.vocab_size=8",       "data.tokenizer=null", text("data.eod_id=", kEnd),
                                           "data.path=" + token_file()};
  const RunConfig plain = config("none", common).config;
  Data data = open_data(plain.data, {.seq_len = 16, .vocab_size = 8, .seed = plain.training.seed});
  const std::unique_ptr<Backend> device = make_backend("cpu_reference");
  Gpt model(plain.model, *device, test::high_plan(plain.model), {.gradients = false});
  test::initialize(model.parameters(), plain.training.seed);
  const test::PlainGpt definition(plain.model, model.parameters());
  const Batch train = data.train->batch(0, 8), valid = data.valid.batch(0, 0, 8);
  for (const std::string option : {"mask_eod_loss", "reset_position_ids", "document_mask"}) {
    SCOPED_TRACE(option);
    std::vector<std::string> sets = common;
    sets.push_back("data." + option + "=true");
    const test::TrainedRun trained = run(option, sets);
    const double loss = definition.loss(with_documents(train, option)), valid_loss = definition.loss(with_documents(valid, option));
    EXPECT_NEAR(trained.losses.at(0), loss, 2e-6 * loss);  // fp32
    EXPECT_NEAR(trained.valid_losses.at(0), valid_loss, 2e-6 * valid_loss);
    EXPECT_GT(std::abs(loss - definition.loss(train)), 1e-3) << "the option matters";
    EXPECT_GT(std::abs(valid_loss - definition.loss(valid)), 1e-3) << "the option matters";
  }
}

struct Line {
  std::vector<int32_t> ids;
  std::vector<int32_t> mask;
};

std::string json_of(const Line& line) { return text(R"({"tokens": [)", joined(line.ids), R"(], "mask": [)", joined(line.mask), "]}\n"); }

// A row of examples that fill it.
void append_row(const std::vector<Line>& lines, Batch& batch) {
  for (const Line& line : lines) {
    const auto start = static_cast<int32_t>(batch.tokens.size() % 16);
    for (size_t i = 0; i < line.ids.size(); ++i) {
      const bool counts = i + 1 < line.ids.size() && line.mask[i + 1] == 1;
      batch.tokens.push_back(line.ids[i]);
      batch.targets.push_back(counts ? line.ids[i + 1] : kNoTarget);
      batch.positions.push_back(static_cast<int32_t>(i));
      batch.segment_starts.push_back(start);
      batch.target_count += counts ? 1 : 0;
    }
  }
  ++batch.sequences;
}

TEST_F(TrainDefinition, ExamplesAreTrainedWhereTheirMasksSaySo) {
  const Line a{{3, 1, 4, 1, 5, 2, 6, 5, 3, 5}, {0, 0, 0, 0, 1, 1, 1, 0, 1, 1}}, b{{2, 7, 1, 0, 2, 0}, {1, 0, 0, 1, 1, 1}},
      c{{1, 4, 1, 4, 2, 1, 3, 5, 6, 2, 3, 7, 3, 0, 1, 5}, {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1}};
  test::write_file(folder_ / "a.jsonl", json_of(a) + json_of(c) + json_of(b));
  Batch both;
  both.length = 16;
  append_row({a, b}, both);
  append_row({c}, both);
  ASSERT_EQ(both.target_count, 5 + 3 + 8);
  const std::string sets = text(R"([{"path": ")", folder_ / "a.jsonl", R"("}])");
  const std::vector<std::string> settings = {
      "training.steps=1",    "optimizer.lr=1e-60", "model.init_std=0.3", "model.vocab_size=8",    "data.path=null",
      "data.tokenizer=null", "data.train=" + sets, "data.valid=" + sets, "training.grad_accum=2", "training.micro_batch_size=1"};
  const RunConfig plain = config("none", settings).config;
  const std::unique_ptr<Backend> device = make_backend("cpu_reference");
  Gpt model(plain.model, *device, test::high_plan(plain.model), {.gradients = false});
  test::initialize(model.parameters(), plain.training.seed);
  const double loss = test::PlainGpt(plain.model, model.parameters()).loss(both);
  const test::TrainedRun trained = run("examples", settings);
  EXPECT_NEAR(trained.losses.at(0), loss, 1e-6 * loss);
  EXPECT_NEAR(trained.valid_losses.at(0), loss, 1e-6 * loss);
}

}  // namespace mantissa::train_definition_test
