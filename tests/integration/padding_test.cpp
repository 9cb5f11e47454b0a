// The padding of the vocabulary changes nothing that a run computes or keeps.
#include <gmock/gmock.h>

#include "base/limits.h"
#include "hf/load_model.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"
#include "train/training_step.h"
#include "training.h"

namespace mantissa::padding_test {

using test::read_file;
using ::testing::Each;
using ::testing::HasSubstr;

struct Case {
  const char* name;
  int64_t least;  // least multiple that the recipe asks the vocabulary to be padded to
  std::vector<std::string> sets;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class Padding : public test::TrainingTest, public ::testing::WithParamInterface<Case> {
 protected:
  std::vector<std::string> sets(int64_t padding, std::vector<std::string> more = {}) const {
    std::vector<std::string> out = GetParam().sets;
    out.push_back(text("model.pad_vocab_to=", padding));
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
};

using OtherRows = test::TrainingTest;

TEST_P(Padding, ChangesNoBitAlsoFromOneRunToItsResume) {
  const int64_t least = GetParam().least, more = 2 * least + 32;
  const std::vector<std::string> common = {"training.steps=6", "eval.interval=3"};
  const auto with = [&](const std::string& set) { return std::vector<std::string>{common[0], common[1], set}; };
  const test::TrainedRun one = run("one", sets(least, with("checkpoint.interval=3"))), many = run("many", sets(more, common));
  EXPECT_TRUE(test::same_elements(one.losses, many.losses));
  EXPECT_TRUE(test::same_elements(one.norms, many.norms));
  EXPECT_TRUE(test::same_elements(one.valid_losses, many.valid_losses));
  run("resumed", sets(more, with("checkpoint.resume=" + checkpoint("one", 3))));
  for (const char* other : {"many", "resumed"}) EXPECT_TRUE(test::same_elements(state_of("one", 6), state_of(other, 6))) << other;
}

// Padding is refused where it is stored all the same, whatever is in its rows.
TEST_P(Padding, IsNeverStored) {
  run("run", sets(GetParam().least + 32, {"training.steps=1"}));
  const Manifest manifest = CheckpointReader(checkpoint("run", 1)).manifest();
  for (const ManifestTensor& tensor : manifest.tensors) {
    EXPECT_LT(tensor.shape.front(), 129) << tensor.name;
    EXPECT_TRUE(!tensor.name.ends_with("embed.weight") || tensor.shape.front() == 8) << "letters";
  }
  save_changed("run", 1, "old", [&](Gpt& model, CheckpointContent& content) {
    content.plan = manifest.plan;
    for (CheckpointTensor& tensor : content.tensors) {
      if (!tensor.name.ends_with("embed.weight") && !tensor.name.ends_with("output.weight")) continue;
      const Tensor padded = zeros(model.device(), Dtype::f32, {model.config().padded_vocab_size(), 32});
      model.device().run(Fill{.out = padded, .value = 3.0});
      model.device().run(Convert{.x = tensor.data, .out = padded.slice(0, tensor.data.dim(0))});
      tensor.shape = padded.shape();
      tensor.boxes.clear();
      tensor.data = padded;
    }
  });
  const Error error = test::error_of([&] { run("next", sets(GetParam().least, {"checkpoint.init_from=" + (folder_ / "old")})); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr(", but the model needs fp32 [8, 32]"));
}

// Other tensors that have as many rows as the vocabulary and its padding.
TEST_F(OtherRows, AreNotTakenForPadding) {
  const std::vector<std::string> learned = {"model.position=learned", "model.qk_norm=false"};
  std::vector<std::string> sets = learned;
  sets.insert(sets.end(), {"model.max_position_embeddings=16", "model.pad_vocab_to=16", "training.steps=1"});
  run("positions", sets);
  sets = learned;
  sets.insert(sets.end(), {"model.max_position_embeddings=8", "training.seq_len=8", "checkpoint.init_from=" + run_folder("positions"),
                           R"(checkpoint.allow_model_change=["model.max_position_embeddings"])"});
  EXPECT_THAT(test::error_of([&] { run("fewer", sets); }).what(),
              HasSubstr("master.position.weight is fp32 [16, 32], but the model needs fp32 [8, 32]"));
}

TEST_F(OtherRows, TheWidestPaddingIsNoReasonToRefuseACheckpoint) {
  run("wide", {"model.pad_vocab_to=65536", "training.steps=1"});
  const int64_t before = peak_resident_bytes();
  EXPECT_EQ(load_model(checkpoint("wide", 1), make_backend("cpu")).model->parameters().find("embed.weight")->shape, (Shape{8, 32}));
  EXPECT_LT(peak_resident_bytes() - before, 4 << 20);
}

TEST_F(OtherRows, AnotherPaddingIsALineInTheLog) {
  run("run", {"model.pad_vocab_to=16", "training.steps=1"});
  open_log({.console = false, .file = folder_ / "log.txt"});
  run("resumed", {"model.pad_vocab_to=32", "training.steps=2", "checkpoint.resume=" + checkpoint("run", 1)});
  close_log();
  run("same", {"model.pad_vocab_to=16", "training.steps=2", "checkpoint.resume=" + checkpoint("run", 1)});
  EXPECT_TRUE(state_of("resumed", 2) == state_of("same", 2)) << "and changes nothing";
  EXPECT_THAT(read_file(folder_ / "log.txt"), HasSubstr("model.pad_vocab_to: 16 in the checkpoint, 32 here"));
}

TEST_P(Padding, IsZeroAtTheStartAndStaysZero) {
  const LoadedConfig loaded = config("zero", sets(GetParam().least + 32));
  RunConfig run = loaded.config;
  Data data = open_data(run.data, {.seq_len = run.training.seq_len, .seed = 1});
  run.model.vocab_size = data.vocab_size;
  const std::unique_ptr<Backend> device = make_backend("cpu");
  Gpt model(run.model, *device, resolve_plan(run), {});
  Optimizer optimizer(model.parameters(), run.optimizer);
  GradientAccumulator accumulator(model.parameters(), Accumulation::running, 1);
  optimizer.initialize(1);
  const auto padding = [&] {
    std::vector<float> all;
    for (const Optimizer::State& state : optimizer.states()) {
      for (const Tensor& rows : {state.master, state.first_moment, state.second_moment}) {
        const Tensor stored = rows.slice(state.shard.stored_end() - state.shard.begin, rows.dim(0));
        if (stored.dim(0) > 0) std::ranges::copy(to_host<float>(stored), std::back_inserter(all));
      }
    }
    return all;
  };
  EXPECT_EQ(padding().size() % (3 * 32), 0U);
  EXPECT_FALSE(padding().empty());
  EXPECT_THAT(padding(), Each(0.0F));
  for (int64_t step = 0; step < 3; ++step) training_step(model, optimizer, accumulator, data.train->batch(8 * step, 8), 8, 1e-2);
  EXPECT_THAT(padding(), Each(0.0F));
}

INSTANTIATE_TEST_SUITE_P(, Padding,
                         ::testing::Values(Case{"fp32", 1, {}},
                                           Case{"tied_bf16", 1, {"precision.dtype=bf16", "model.tie_word_embeddings=true"}},
                                           Case{"mxfp8_output",
                                                32,
                                                {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_output_proj=true",
                                                 "model.intermediate_size=64"}}),
                         [](const auto& c) { return std::string(c.param.name); });

}  // namespace mantissa::padding_test
