// train, eval, generate and bench as a user runs them. Their messages about wrong words are in tests/tools/command_errors_test.cpp.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "data/token_writer.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/text.h"
#include "process.h"
#include "shared_run.h"

namespace mantissa::commands_test {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;

class CommandsTest : public test::TrainingTest {
 protected:
  CommandsTest() {
    test::write_file(folder_ / "run.json",
                     effective_config(config("run", {"data.tokenizer=byte", "training.steps=3", "schedule.warmup_steps=1"}).config));
  }
  static void SetUpTestSuite() { shared_ = std::make_unique<test::SharedRun>(Words{"training.steps=1", "data.tokenizer=byte"}); }
  static void TearDownTestSuite() { shared_.reset(); }

  test::ProcessResult mantissa(const Words& words) const { return test::run_mantissa(words, folder_.path()); }
  // Returns the output of a command that succeeds.
  std::string output(const Words& words, const Words& more = {}) const {
    Words all = words;
    all.insert(all.end(), more.begin(), more.end());
    const auto result = mantissa(all);
    EXPECT_EQ(result.exit_code, 0) << ::testing::PrintToString(all) << result.errors;
    return result.output;
  }
  std::string log() const { return test::read_file(run_folder("run") + "/log.txt"); }
  // The words that generate from the shared run.
  static Words generate(const Words& more) {
    Words words = {"generate", shared_->path()};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  static double number_after(const std::string& text, const std::string& label) {
    const size_t at = text.find(label);
    EXPECT_NE(at, std::string::npos) << label << " in " << text;
    return at == std::string::npos ? 0.0 : std::stod(text.substr(at + label.size()));
  }

  static inline std::unique_ptr<test::SharedRun> shared_;
};

TEST_F(CommandsTest, TrainPrintsStepLinesAndWhereTheFilesAreAndEvalTheSameLoss) {
  const auto trained = mantissa(
      {"train", "run.json", "--set", "eval.samples={\"prompts\":[\"ab\"]}", "--set", "training.threads=1", "--set", "eval.iters=null"});
  EXPECT_EQ(trained.exit_code, 0) << trained.errors;
  for (const std::string& part :
       {std::string("step     1/3 | loss 5."), std::string("cpu, 1 thread | 3 steps | lr "), std::string("step     3/3 | loss "),
        std::string("eval     3 | loss "), std::string("sample at step 3"), run_folder("run") + "/checkpoints/step-00000003"})
    EXPECT_THAT(trained.output, HasSubstr(part));
  EXPECT_EQ(trained.errors, "") << "no progress line without a terminal";
  EXPECT_THAT(test::read_file(run_folder("run") + "/run.json"), HasSubstr("run.json"));
  EXPECT_THAT(log(), HasSubstr("done | step 3"));

  const std::string evaluated = output({"eval", run_folder("run")});
  const double loss = number_after(evaluated, "loss ");
  EXPECT_NEAR(number_after(evaluated, "perplexity "), std::exp(loss), 1e-4 * std::exp(loss));
  EXPECT_NEAR(number_after(evaluated, "bits per byte "), loss / std::log(2.0), 1e-5 * loss);
  EXPECT_THAT(evaluated, HasSubstr("| 1999 targets | seq_len 16\n"));
  EXPECT_NEAR(number_after(log(), "best validation loss "), loss, 1e-5 * loss);
}

TEST_F(CommandsTest, TrainTellsHowItLearnsAndWhatToExport) {
  const auto train = [&](const std::string& name, const Words& sets) {
    Words words = {"train", "run.json"};
    for (const std::string& set :
         test::with(sets, {"logging.dir=" + run_folder(name), "checkpoint.dir=%d/checkpoints", "checkpoint.keep_best=true"}))
      words.insert(words.end(), {"--set", set});
    return output(words);
  };
  EXPECT_THAT(train("best", {"optimizer.lr=0.002", "schedule.type=linear", "schedule.warmup_steps=1"}),
              AllOf(HasSubstr(" | 3 steps | lr 0.002, linear after 1 step of warmup"), Not(HasSubstr("learns from")),
                    HasSubstr("\nTo export the best one: mantissa export " + run_folder("best") + "/checkpoints/best --output FOLDER\n")));
  const Words taught{"schedule.warmup_steps=0", "training.teacher=" + run_folder("best"), "training.teacher_weight=0.5",
                     "checkpoint.export={}"};
  EXPECT_THAT(train("taught", taught), AllOf(HasSubstr(", cosine | learns from " + run_folder("best") + " by 0.5 kl + 0.5 loss"),
                                             Not(HasSubstr("To export the best one"))));
  EXPECT_THAT(mantissa({"export", run_folder("best") + "/best", "--output", "out"}).errors,
              HasSubstr("; the checkpoint of that run is " + run_folder("best") + "/checkpoints/best"));
}

TEST_F(CommandsTest, ConsoleAndLogHoldAsMuchAsTheirKeysSay) {
  const auto console = [&](const std::string& mode, const std::string& level, const char* reports = "1") {
    std::filesystem::remove_all(run_folder("run"));
    auto run = mantissa({"train", "run.json", "--set", "logging.console=" + mode, "--set", "logging.level=" + level, "--set",
                         std::string("precision.report_interval=") + reports});
    EXPECT_EQ(run.exit_code, 0);
    return run;
  };
  EXPECT_THAT(console("plain", "warning").output, HasSubstr("step     3/3 | loss "));
  EXPECT_THAT(log(), AllOf(Not(HasSubstr("done | step 3")), HasSubstr("precision.report_interval measures nothing")));
  const auto progress = console("progress", "info");
  EXPECT_THAT(progress.output, HasSubstr("step     3/3 | loss "));
  EXPECT_THAT(progress.errors, HasSubstr("% 1/3 | eta "));
  EXPECT_THAT(log(), HasSubstr("done | step 3"));
  const auto off = console("off", "info", "0");  // which says nothing beside the lines of the run
  EXPECT_EQ(off.output + off.errors, "");
  EXPECT_THAT(log(), HasSubstr("done | step 3"));
}

TEST_F(CommandsTest, WarningsOfTheResumeAreInTheLogOfTheRun) {
  run("run", {"training.steps=1", "data.tokenizer=byte", "schedule.warmup_steps=1"});
  const auto resumed =
      mantissa({"train", "run.json", "--resume", "--set", "checkpoint.resume=" + run_folder("run"), "--set", "checkpoint.resume=never"});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
  const std::string change = "changed since the checkpoint: training.steps: 1 in the checkpoint, 3 here";
  EXPECT_THAT(resumed.errors, HasSubstr(change));
  EXPECT_THAT(log(), HasSubstr(change));
}

TEST_F(CommandsTest, RunWhoseLastSaveFailedDoesNotSayDone) {
  const auto unsaved = test::run_process({"bash", "-c", "ulimit -f 40; exec " MANTISSA_BINARY " train run.json"}, folder_.path());
  EXPECT_EQ(unsaved.exit_code, 7) << unsaved.errors;
  EXPECT_THAT(unsaved.output, AllOf(HasSubstr("not saved | step 3"), Not(HasSubstr("done"))));
}

TEST_F(CommandsTest, DryRunPrintsMemoryAndFlopsAndWritesNothing) {
  const std::string plan = output({"train", "run.json", "--dry-run", "--set", "precision.dtype=bf16"});
  EXPECT_THAT(plan, AllOf(HasSubstr("FLOP per token"), HasSubstr("activations"), HasSubstr("  weights beside  ")));
  EXPECT_THAT(plan, Not(HasSubstr("bf16"))) << "a type that codes do not have";
  EXPECT_FALSE(std::filesystem::exists(run_folder("run")));
}

TEST_F(CommandsTest, TheWeightsOfATeacherAreCounted) {
  run("teacher", {"training.steps=1", "data.tokenizer=byte", "schedule.warmup_steps=1"});
  const std::string teacher = "training.teacher=" + run_folder("teacher");
  EXPECT_THAT(output({"train", "run.json", "--dry-run", "--set", teacher}), ContainsRegex("\n  teacher +[1-9][0-9.]* KiB"));
  EXPECT_THAT(output({"train", "run.json", "--dry-run"}), Not(HasSubstr("  teacher ")));
  const auto memory = nlohmann::json::parse(output({"explain", "run.json", "--json", "--set", teacher}))["memory"];
  EXPECT_GT(memory["teacher"], 4096);
  EXPECT_THAT(output({"explain", "run.json", "--set", teacher}), ContainsRegex(" [|] teacher [1-9]"));
}

TEST_F(CommandsTest, ARunSaysHowManyEpochsItsStepsAre) {
  const Words none = {"--set", "training.steps=null", "--set"};
  EXPECT_THAT(output({"train", "run.json", "--dry-run"}, test::with(none, {"training.epochs=1"})),
              ContainsRegex("; [0-9]+ steps [(]1 epoch[)]\n"));
  EXPECT_THAT(output({"train", "run.json"}, test::with(none, {"training.epochs=0.01"})),
              ContainsRegex(" [|] [0-9]+ steps [(]0.01 epochs[)] [|] lr "));
}

TEST_F(CommandsTest, BlockScalesAreHistogramsForTensorBoard) {
  run("run", {"training.steps=1", "precision.report_interval=1", "precision.recipe=mxfp8", "model.intermediate_size=64",
              "logging.tensorboard=true"});
  std::string events;
  for (const auto& entry : std::filesystem::directory_iterator(run_folder("run"))) {
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) events += test::read_file(entry.path());
  }
  for (const char* const role : {"weight", "input", "output_grad"})
    EXPECT_THAT(events, HasSubstr(text("precision/layers.1.mlp.down/", role, "/scale_exponent")));
}

TEST_F(CommandsTest, EvalTakesAsManyMicroBatchesAsItersSays) {
  const Words eval = {"eval", shared_->path(), "--iters", "3"};
  EXPECT_THAT(output(eval), HasSubstr("| 192 targets | seq_len 16\n")) << "3 micro batches of 4 sequences of 16";
  EXPECT_THAT(output(eval, {"--micro-batch-size", "5"}), HasSubstr("| 240 targets | seq_len 16\n"));
}

TEST_F(CommandsTest, EvalOfALossThatIsNotFiniteGivesCode5) {
  run("seed", {"training.steps=1"});
  save_changed("seed", 1, "overflow", [](Gpt& model, CheckpointContent&) {  // every logit overflows, and every weight is finite
    const Tensor& master = model.parameters().find("output.weight")->value();
    master.device().run(Fill{.out = master, .value = 3e38});
  });
  const auto result = mantissa({"eval", folder_ / "overflow"});
  EXPECT_EQ(result.exit_code, 5) << result.output;
  EXPECT_THAT(result.errors, HasSubstr("the loss is not finite"));
}

TEST_F(CommandsTest, EvalReadsAnotherFileAndWithoutTheTrainingData) {
  run("run", {"training.steps=1", "data.tokenizer=byte"});
  std::filesystem::remove(folder_ / "text.txt");
  test::write_file(folder_ / "other.txt", test::second_order_text(101));
  EXPECT_THAT(output({"eval", checkpoint("run", 1), "--data", "other.txt"}), HasSubstr("| 100 targets | seq_len 16\n"));
  const auto without = mantissa({"eval", run_folder("run")});
  EXPECT_EQ(without.exit_code, 2);
  EXPECT_THAT(without.errors, AllOf(HasSubstr("matches no file; "), HasSubstr("--data FILE"), Not(HasSubstr("--set"))));
}

TEST_F(CommandsTest, GenerateContinuesThePromptAlikeForEqualSeeds) {
  const auto text = [&](const std::string& seed, const std::string& count) {
    return output(generate({"--prompt=a=", "--max-new-tokens", count, "--seed", seed}));
  };
  const std::string first = text("0", "40");
  EXPECT_EQ(text("0", "040"), first) << "numbers are decimal";
  EXPECT_NE(text("18446744073709551615", "40"), first);
  EXPECT_EQ(first.substr(0, 2), "a=");
  EXPECT_GE(first.size(), 2U + 40U + 1U);
}

TEST_F(CommandsTest, GenerateContinuesSeveralPromptsAsEachAlone) {
  const Words few = generate({"--max-new-tokens", "12"});
  const std::string line = "---------------\n",
                    both = output(few, {"--prompt", "abc"}) + line + output(few, {"--prompt", "a longer one"}) + line;
  EXPECT_EQ(output(few, {"--prompt", "abc", "--prompt", "a longer one"}), both);
  for (const char* content : {"abc\na longer one\n", "abc\r\na longer one"}) {
    test::write_file(folder_ / "prompts.txt", content);
    EXPECT_EQ(output(few, {"--prompts", "prompts.txt"}), both);
  }
  const std::string ids = output(few, {"--prompt-ids", "1,2"});
  EXPECT_EQ(std::ranges::count(ids, ' '), 1 + 12) << ids;
  EXPECT_EQ(output(few, {"--prompt-ids", "1,2", "--prompt-ids", "3"}), ids + output(few, {"--prompt-ids", "3"}));
}

// A fresh model writes any bytes, so every third text or so ends within a character.
TEST_F(CommandsTest, GenerateNeverPrintsHalfACharacter) {
  const Words wild = generate({"--max-new-tokens", "40", "--temperature", "5", "--top-k", "0"});
  Words prompts;
  for (char letter = 'a'; letter <= 'z'; ++letter) prompts.insert(prompts.end(), {"--prompt", std::string("\xC3\xA9") + letter});
  const std::string all = output(wild, prompts), line = "\n---------------\n";
  std::string cut;
  size_t begin = 0, texts = 0;
  for (size_t end = 0; (end = all.find(line, begin)) != std::string::npos; begin = end + line.size(), ++texts) {
    const std::string text = all.substr(begin, end - begin);
    EXPECT_EQ(whole_characters(text), text.size());
    if (text.ends_with("\xEF\xBF\xBD")) cut = text;
  }
  EXPECT_EQ(texts, 26U);
  ASSERT_NE(cut, "");
  EXPECT_EQ(output(wild, {"--prompt", cut.substr(0, 3)}), cut + "\n");
}

TEST_F(CommandsTest, EvalAndGenerateTakeThreadsAndGiveTheSameBits) {
  for (const std::string command : {"eval", "generate"}) {
    const Words words = {command, shared_->path(), "--threads"};
    EXPECT_EQ(output(words, {"1"}), output(words, {"3"}));
  }
}

TEST_F(CommandsTest, DamagedCheckpointsGiveCode4) {
  shared_->copy_to(folder_ / "copy");
  const std::string saved = folder_ / "copy/checkpoints/step-00000001", shard = saved + "/shard-00000.safetensors";
  std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 1);
  for (const std::string& path : {saved, folder_ / "copy"}) EXPECT_EQ(mantissa({"generate", path}).exit_code, 4) << path;
}

TEST_F(CommandsTest, DamagedTokenFilesAreErrorsAndLeaveNoRunFolder) {
  MegatronWriter megatron(folder_ / "m", {.vocab_size = 256, .eod_id = 9});
  LlmcWriter llmc(folder_ / "c.bin", {.vocab_size = 256, .eod_id = 9});
  for (int32_t document = 0; document < 100; ++document) {
    const std::vector<int32_t> ids(19, 100 + document);
    megatron.add_document(ids);
    llmc.add_document(ids);
  }
  megatron.finish();
  llmc.finish();
  const auto train = [&](const std::string& name, const std::string& data) {
    run(name, {"data.tokenizer=null", "data.path=" + folder_ / data, "model.vocab_size=256", "training.steps=1"});
  };
  for (const char* data : {"m", "c.bin"}) EXPECT_NO_THROW(train(std::string("whole-") + data, data));
  std::string index = test::read_file(folder_ / "m.idx");
  index[34] = static_cast<char>(index[34] ^ 1);  // the length of the first sequence
  test::write_file(folder_ / "m.idx", index);
  std::filesystem::resize_file(folder_ / "c.bin", std::filesystem::file_size(folder_ / "c.bin") - 1);
  for (const char* data : {"m", "c.bin"}) {
    const Error error = test::error_of([&] { train("damaged", data); });
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_THAT(error.what(), HasSubstr(folder_ / data));
    EXPECT_FALSE(std::filesystem::exists(run_folder("damaged"))) << data;
  }
}

// Nobody looks at all ids before the run: an id beyond the vocabulary is met when it is read.
TEST_F(CommandsTest, IdsBeyondTheVocabularyAreErrorsOfTheData) {
  const auto shard = [&](const std::string& name, int32_t late_id) {
    LlmcWriter writer(folder_ / name, {.vocab_size = 1000});
    std::vector<int32_t> ids(200, 'a');
    ids[80] = late_id;
    writer.add_document(ids);
    writer.finish();
    return R"([{"path": ")" + folder_ / name + R"("}])";
  };
  const std::string good = shard("good.bin", 'b'), bad = shard("bad.bin", 300);
  for (const auto& [name, training, validation] : {std::tuple{"training", bad, good}, {"valid", good, bad}}) {
    const Words sets = {"data.path=null", "data.tokenizer=byte", "data.train=" + training, "data.valid=" + validation};
    const Error error = test::error_of([&, name = name] { run(name, sets); });
    EXPECT_EQ(error.code(), ExitCode::data) << name;
    EXPECT_THAT(error.what(), AllOf(HasSubstr(folder_ / "bad.bin"), HasSubstr("but the vocabulary has 256 ids"))) << name;
  }
  EXPECT_TRUE(std::filesystem::exists(checkpoint("valid", 20)));
}

TEST_F(CommandsTest, OutputThatCannotBeWrittenIsAnError) {
  for (const std::string& command : {"eval " + shared_->path(), "generate " + shared_->path(), std::string("doctor"),
                                     std::string("config schema"), std::string("train run.json --dry-run"), std::string("--help"),
                                     "verify " + shared_->path(), "inspect " + shared_->path(), std::string("config check run.json")}) {
    const auto full = test::run_process({"sh", "-c", MANTISSA_BINARY " " + command + " > /dev/full"}, folder_.path());
    EXPECT_EQ(full.exit_code, 7) << command;
    EXPECT_THAT(full.errors, HasSubstr("standard output")) << command;
  }
}

TEST_F(CommandsTest, BenchGenerateReportsBytesAndTheRatioOfSpeeds) {
  EXPECT_THAT(output({"bench", "generate", "run.json", "--set", "model.vocab_size=256", "--batch", "2", "--new-tokens", "3",
                      "--time-budget", "0.1", "--json", "bench.jsonl", "--against", "precision.dtype=bf16"}),
              AllOf(HasSubstr("ms a step of 2 tokens"), HasSubstr("MB of weights a step"), HasSubstr("of the copy rate"),
                    HasSubstr("of the speed with precision.dtype=bf16, which reads 0.5")));
  EXPECT_THAT(test::read_file(folder_ / "bench.jsonl"), HasSubstr("\"bench\":\"generate.run\""));
}

// Measures with settings of the command line, for as long as one measurement of each kind takes.
class BenchTrain : public CommandsTest {
 protected:
  json measure(const Words& more, const std::string& line) const {
    std::filesystem::remove(folder_ / "results.jsonl");
    EXPECT_THAT(output({"bench", "train", "run.json", "--time-budget", "0", "--json", "results.jsonl"}, more), ContainsRegex(line));
    return json::parse(test::read_file(folder_ / "results.jsonl"));
  }
};

TEST_F(BenchTrain, MeasuresStepsWithoutReadingDataAndTakesTheVocabularyFromTheTokenizer) {
  const Words tokenizer = {"--set", "model.vocab_size=null", "--set", "data.tokenizer=char", "--against", "training.threads=1"};
  measure(tokenizer, "run: ");
  std::filesystem::remove(folder_ / "text.txt");
  const json result = measure({}, "run: ");
  EXPECT_EQ(result["bench"], "train.run");
  EXPECT_GT(result["us"]["med"], 0.0);
  EXPECT_GT(result["ratio_gemm"]["med"], 0.0);
  Words command = {"bench", "train", "run.json", "--time-budget", "0", "--json", "/dev/full", "--against", "training.threads=1"};
  EXPECT_EQ(mantissa(command).exit_code, 7);
  command.insert(command.end(), tokenizer.begin(), tokenizer.end());
  const auto refused = mantissa(command);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.errors, HasSubstr("name yours with --set data.path=FILE"));
}

// Forty times the layers are slower on any machine.
TEST_F(BenchTrain, ComparesTwoSettingsByTurns) {
  const json result = measure({"--set", "training.threads=2", "--against", "model.num_layers=80", "--against", "training.threads=1"},
                              "train.run +B.* tokens/s  [0-9.]+ of model.num_layers=80 training.threads=1 \\([0-9]+\\) \\[.*"
                              "\nrun: [0-9.]+ of the speed with model.num_layers=80 training.threads=1 in 9 slices, .*2 threads");
  EXPECT_EQ(result["bench"], "train.run");
  EXPECT_EQ(result["ceiling"]["name"], "model.num_layers=80 training.threads=1");
  EXPECT_EQ(result["slices"], 9);
  EXPECT_EQ(result["device"]["threads"], 2);
  EXPECT_EQ(result["tokens"], config("run").config.training.tokens_per_step());
  EXPECT_GT(result["ceiling"]["rate"], 0.0);
  const double low = result["ratio_against"]["p10"], middle = result["ratio_against"]["med"], high = result["ratio_against"]["p90"];
  EXPECT_TRUE(1.0 < low && low <= middle && middle <= high) << result;
}

TEST_F(BenchTrain, MeasuresForwardAndBackwardAloneAndSubnormalWeights) {
  measure({"--without-update", "--against", "training.threads=1", "--set", "training.grad_accum=2"},
          "\nrun: [0-9.]+ of the speed with training.threads=1 in 9 slices, [0-9.]+ ms for forward and backward, ");
  EXPECT_EQ(measure({"--subnormal"}, "\nsubnormal: [0-9.]+ of the speed with fresh weights in 9 slices, ")["bench"], "train.subnormal");
}

}  // namespace mantissa::commands_test
