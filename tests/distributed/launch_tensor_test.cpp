// Models whose layers are divided among processes: training, evaluation, generation and checkpoints as a user starts them.
#include "launched_training.h"

namespace mantissa::launch_tensor_test {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class LaunchedTensorRanks : public test::LaunchedTraining {
 protected:
  // A model in fp32 with four heads; 19 tokens are no multiple of the ranks.
  static std::vector<std::string> model(std::vector<std::string> more) {
    std::vector<std::string> words;
    for (const char* set :
         {"precision.dtype=fp32", "precision.recipe=high", "precision.fp8_param_gather=false", "model.hidden_size=64",
          "model.num_attention_heads=4", "model.num_layers=2", "model.max_position_embeddings=96", "training.seq_len=19"}) {
      words.emplace_back("--set");
      words.emplace_back(set);
    }
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  // Reads X from the line "... | loss X | ...".
  static double loss_of(const test::ProcessResult& result) {
    const size_t at = result.output.find("| loss ");
    EXPECT_NE(at, std::string::npos) << result.output << result.errors;
    return at == std::string::npos ? 0.0 : std::stod(result.output.substr(at + 7));
  }
  // The output of rank 0, without the mark of its launcher.
  static std::string text_of(std::string output) {
    for (size_t at; (at = output.find("[rank0]:")) != std::string::npos;) output.erase(at, 8);
    return output;
  }

  // Compares the outputs of eval and generate for the run `run`, alone and on ranks.
  void expect_alike_alone_and_on(int ranks) const {
    const double alone = loss_of(mantissa({"eval", "run"}));
    std::vector<std::string> write = {"generate", "run", "--prompt", "abcd", "--temperature", "0", "--max-new-tokens", "64"};
    const std::string text = mantissa(write).output, tensor = std::to_string(ranks);
    EXPECT_GT(text.size(), 60U);
    const auto evaluated = launch(ranks, {"eval", "run", "--tensor", tensor});
    EXPECT_EQ(evaluated.exit_code, 0) << evaluated.errors;
    EXPECT_NEAR(loss_of(evaluated), alone, 2e-6 * alone);
    EXPECT_EQ(evaluated.output.find("[rank1]:"), std::string::npos) << "only rank 0 prints";
    write.insert(write.end(), {"--tensor", tensor});
    const auto written = launch(ranks, write);
    EXPECT_EQ(text_of(written.output), text) << written.errors;
  }
};

TEST_F(LaunchedTensorRanks, EvaluateAndWriteWhatOneProcessDoes) {
  ASSERT_EQ(mantissa(train("run", model({}))).exit_code, 0);
  expect_alike_alone_and_on(4);
}

// The run was saved by ranks that share the experts.
TEST_F(LaunchedTensorRanks, EvaluateAndWriteWithExpertsWhatOneProcessDoes) {
  const auto run = launch(2, train("run", model({"--set", "model.moe.num_experts=4", "--set", "model.moe.num_experts_per_tok=2", "--set",
                                                 "model.moe.intermediate_size=32", "--set", "parallel.expert=2"})));
  ASSERT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.output, HasSubstr("run run | 2 ranks: data 2, experts over 2 data ranks | "));
  expect_alike_alone_and_on(2);
}

TEST_F(LaunchedTensorRanks, NeedAsManyRanksAsTheyAskForAndOneKindOfDevice) {
  ASSERT_EQ(mantissa(train("run", model({"--set", "training.steps=1", "--set", "training.device=cpu_reference"}))).exit_code, 0);
  const auto alone = mantissa({"eval", "run", "--tensor", "2"});
  EXPECT_EQ(alone.exit_code, 2);
  EXPECT_THAT(alone.errors,
              HasSubstr("--tensor 2 needs 2 ranks, and this is one process; start them with mantissa launch --nproc-per-node 2"));
  EXPECT_EQ(launch(2, {"eval", "run"}).exit_code, 2);
  const auto heads = launch(3, {"eval", "run", "--tensor", "3"});
  EXPECT_EQ(heads.exit_code, 2);
  EXPECT_THAT(heads.errors, HasSubstr("model.num_attention_heads 4 cannot be divided among 3 ranks"));
  for (const std::string command : {"eval", "generate"}) {
    const auto alike = launch(2, {command, "run", "--prompt-ids", "1,2", "--tensor", "2", "--device", "cpu_reference"});
    EXPECT_EQ(alike.exit_code, 0) << alike.errors;
    const std::string devices = "set cpu cpu_reference; shift $RANK; exec " MANTISSA_BINARY " " + command;
    const auto mixed = launch(2, {"sh", "-c", devices + " run --prompt-ids 1,2 --tensor 2 --device $1"});
    EXPECT_EQ(mixed.exit_code, 2) << command;
    EXPECT_THAT(mixed.errors, ::testing::ContainsRegex("different inputs: .*config training.device of rank ")) << command;
  }
}

// Blocks that two ranks would have to cut: the number of ranks is wrong, not the checkpoint.
TEST_F(LaunchedTensorRanks, CannotCutBlocksOfAWeight) {
  const std::vector<std::string> blocks = {"--set", "training.steps=1",          "--set", "precision.recipe=mxfp8",
                                           "--set", "model.intermediate_size=96"};
  const auto trained = mantissa(train("run", model(blocks)));
  ASSERT_EQ(trained.exit_code, 0) << trained.errors;
  const auto cut = launch(2, {"eval", "run", "--tensor", "2"});
  EXPECT_EQ(cut.exit_code, 2) << cut.errors;
  EXPECT_THAT(cut.errors, Not(HasSubstr("manifest.json (config)")));
}

// Data ranks, then both, then one process; a rank is killed on the way.
TEST_F(LaunchedTensorRanks, GoOnFromAnyLayoutAtAnyOther) {
  const std::string more = " --set parallel.tensor=2 --set parallel.sequence_parallel=true --set training.steps=1000000";
  std::string sets;
  for (const std::string& word : model({})) sets += " " + word;
  ASSERT_EQ(launch(2, train("run", model({"--set", "training.steps=10"}))).exit_code, 0);
  const std::string script =
      std::string("echo $$ > pid.$RANK; exec ") + MANTISSA_BINARY + " train run.json --resume --set logging.dir=run" + sets + more;
  test::ProcessResult killed;
  std::thread launcher([&] { killed = launch(4, {"sh", "-c", script}); });
  const bool saved = appears("run/checkpoints/step-00000020");
  ::kill(std::stoi(test::read_file(folder_ / "pid.3")), SIGKILL);
  launcher.join();
  ASSERT_TRUE(saved) << killed.errors;
  EXPECT_EQ(killed.exit_code, 137) << killed.errors;
  for (const auto& entry : fs::directory_iterator(folder_ / "run/checkpoints"))
    if (entry.path().filename().string() > "step-00000020") fs::remove_all(entry.path());
  const auto alone = mantissa(train("run", model({"--resume"})));
  EXPECT_EQ(alone.exit_code, 0) << alone.errors;
  EXPECT_THAT(alone.output, HasSubstr("done | step 40"));
  EXPECT_THAT(mantissa({"verify", "run"}).output, HasSubstr("intact: step 40"));
}

TEST_F(LaunchedTensorRanks, TrainTheConfigurationThatIsShipped) {
  const std::string config = std::string(MANTISSA_SOURCE_DIR) + "/configs/tp2-dp2.json";
  const auto run = launch(4, {"train", config, "--set", "logging.dir=shipped", "--set", "training.steps=2", "--set", "eval.iters=1",
                              "--set", "training.threads=1"});
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.output, HasSubstr("run shipped | 4 ranks: data 2 x tensor 2 | "));
  EXPECT_THAT(run.output, HasSubstr("done | step 2"));
  EXPECT_THAT(mantissa({"verify", "shipped"}).output, HasSubstr("; the codes of 16 weights follow from their masters"));
}

}  // namespace mantissa::launch_tensor_test
