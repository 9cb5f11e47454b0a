// train, eval and generate as a user runs them.
#include <gmock/gmock.h>

#include <cmath>
#include <sstream>

#include "mantissa/backend/functions.h"
#include "mantissa/base/utf8.h"
#include "mantissa/data/token_writer.h"
#include "process.h"
#include "training.h"

namespace mantissa::commands_test {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class CommandsTest : public test::TrainingTest {
 protected:
  CommandsTest() { test::write_file(folder_ / "run.json", effective_config(config("run", {"data.tokenizer=byte"}).config)); }

  test::ProcessResult mantissa(std::vector<std::string> arguments) const {
    return test::run_mantissa(std::move(arguments), folder_.path());
  }

  static double number_after(const std::string& text, const std::string& label) {
    const size_t at = text.find(label);
    EXPECT_NE(at, std::string::npos) << label << " in " << text;
    return at == std::string::npos ? 0.0 : std::stod(text.substr(at + label.size()));
  }
};

TEST_F(CommandsTest, TrainPrintsStepLinesAndWhereTheFilesAre) {
  const auto trained = mantissa({"train", "run.json", "--set", "eval.samples={\"prompts\":[\"ab\"]}", "--set", "training.threads=1"});
  EXPECT_EQ(trained.exit_code, 0) << trained.errors;
  EXPECT_THAT(trained.output, HasSubstr("step     1/20 | loss 5."));
  EXPECT_THAT(trained.output, HasSubstr("cpu, 1 thread | 20 steps\n"));
  EXPECT_THAT(trained.output, HasSubstr("step    20/20 | loss "));
  EXPECT_THAT(trained.output, HasSubstr("eval    20 | loss "));
  EXPECT_THAT(trained.output, HasSubstr("sample at step 20"));
  EXPECT_THAT(trained.output, HasSubstr(run_folder("run") + "/checkpoints/step-00000020"));
  EXPECT_EQ(trained.errors, "") << "no progress line without a terminal";
  EXPECT_THAT(test::read_file(run_folder("run") + "/run.json"), HasSubstr("run.json"));
}

TEST_F(CommandsTest, ArgumentsThatDoNotFitAreErrorsLikeAllOthers) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{}, {"train"}, {"trian"}, {"bench", "--foo"}, {"eval", "a", "b"}}) {
    const auto refused = mantissa(arguments);
    EXPECT_EQ(refused.exit_code, 2) << ::testing::PrintToString(arguments);
    EXPECT_EQ(refused.output, "");
    EXPECT_THAT(refused.errors, StartsWith("error: "));
  }
}

TEST_F(CommandsTest, WarningsOfTheResumeAreInTheLogOfTheRun) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  const auto resumed = mantissa({"train", "run.json", "--resume", "--set", "training.steps=21"});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
  const std::string change = "changed since the checkpoint: training.steps: 20 in the checkpoint, 21 here";
  EXPECT_THAT(resumed.errors, HasSubstr(change));
  EXPECT_THAT(test::read_file(run_folder("run") + "/log.txt"), HasSubstr(change));
}

TEST_F(CommandsTest, ConsoleProgressDrawsABarBesideThePlainLines) {
  const auto plain = mantissa({"train", "run.json", "--set", "logging.console=plain"});
  EXPECT_THAT(plain.output, HasSubstr("step    20/20 | loss "));
  EXPECT_EQ(plain.errors, "");
  std::filesystem::remove_all(run_folder("run"));
  const auto progress = mantissa({"train", "run.json", "--set", "logging.console=progress"});
  EXPECT_THAT(progress.output, HasSubstr("step    20/20 | loss "));
  EXPECT_THAT(progress.errors, HasSubstr("% 1/20 | eta "));
}

TEST_F(CommandsTest, LogLevelDecidesWhatTheLogHolds) {
  for (const std::string level : {"info", "warning"}) {
    ASSERT_EQ(mantissa({"train", "run.json", "--set", "logging.level=" + level}).exit_code, 0);
    const bool reported = test::read_file(run_folder("run") + "/log.txt").find("done | step 20") != std::string::npos;
    EXPECT_EQ(reported, level == "info");
    std::filesystem::remove_all(run_folder("run"));
  }
}

TEST_F(CommandsTest, ConsoleOffPrintsNothingAndRuns) {
  const auto trained = mantissa({"train", "run.json", "--set", "logging.console=off"});
  EXPECT_EQ(trained.exit_code, 0);
  EXPECT_EQ(trained.output + trained.errors, "");
}

TEST_F(CommandsTest, ResumingTheRunAndAPathExcludeEachOther) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  const std::string path = "checkpoint.resume=" + run_folder("run");
  const auto both = mantissa({"train", "run.json", "--resume", "--set", path});
  EXPECT_EQ(both.exit_code, 2);
  EXPECT_THAT(both.errors, HasSubstr("checkpoint.resume names " + run_folder("run")));
  EXPECT_EQ(mantissa({"train", "run.json", "--resume", "--set", path, "--set", "checkpoint.resume=never"}).exit_code, 0);
}

TEST_F(CommandsTest, RunWhoseLastSaveFailedDoesNotSayDone) {
  const auto unsaved = test::run_process({"bash", "-c", "ulimit -f 40; exec " MANTISSA_BINARY " train run.json"}, folder_.path());
  EXPECT_EQ(unsaved.exit_code, 7) << unsaved.errors;
  EXPECT_THAT(unsaved.output, HasSubstr("not saved | step 20"));
  EXPECT_THAT(unsaved.output, Not(HasSubstr("done")));
}

TEST_F(CommandsTest, DryRunPrintsMemoryAndFlopsAndWritesNothing) {
  const auto plan = mantissa({"train", "run.json", "--dry-run"});
  EXPECT_EQ(plan.exit_code, 0) << plan.errors;
  EXPECT_THAT(plan.output, HasSubstr("FLOP per token"));
  EXPECT_THAT(plan.output, HasSubstr("activations"));
  EXPECT_FALSE(std::filesystem::exists(run_folder("run")));
}

TEST_F(CommandsTest, DryRunSpeaksOfWeightsAndNotOfATypeThatCodesDoNotHave) {
  const auto plan = mantissa({"train", "run.json", "--dry-run", "--set", "precision.dtype=bf16"});
  EXPECT_EQ(plan.exit_code, 0) << plan.errors;
  EXPECT_FALSE(std::filesystem::exists(run_folder("run"))) << "nothing is written";
  EXPECT_THAT(plan.output, HasSubstr("  weights beside  "));
  EXPECT_THAT(plan.output, Not(HasSubstr("bf16")));
}

TEST_F(CommandsTest, TrainLogsWhatItsPrecisionPlanWarnsOf) {
  ASSERT_EQ(mantissa({"train", "run.json", "--set", "training.steps=1", "--set", "precision.report_interval=1"}).exit_code, 0);
  EXPECT_THAT(test::read_file(run_folder("run") + "/log.txt"), HasSubstr("precision.report_interval measures nothing"));
}

TEST_F(CommandsTest, BlockScalesAreHistogramsForTensorBoard) {
  const auto trained = mantissa({"train", "run.json", "--set", "training.steps=1", "--set", "precision.report_interval=1", "--set",
                                 "precision.recipe=mxfp8", "--set", "model.intermediate_size=64", "--set", "logging.tensorboard=true"});
  ASSERT_EQ(trained.exit_code, 0) << trained.errors;
  std::string events;
  for (const auto& entry : std::filesystem::directory_iterator(run_folder("run"))) {
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) events += test::read_file(entry.path());
  }
  for (const char* const role : {"weight", "input", "output_grad"}) {
    EXPECT_THAT(events, HasSubstr(text("precision/layers.1.mlp.down/", role, "/scale_exponent")));
  }
}

TEST_F(CommandsTest, EvalGivesLossPerplexityAndBitsPerByteOfTheRunsOwnData) {
  ASSERT_EQ(mantissa({"train", "run.json", "--set", "eval.iters=null"}).exit_code, 0);
  const auto result = mantissa({"eval", run_folder("run")});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  const double loss = number_after(result.output, "loss ");
  EXPECT_NEAR(number_after(result.output, "perplexity "), std::exp(loss), 1e-4 * std::exp(loss));
  EXPECT_NEAR(number_after(result.output, "bits per byte "), loss / std::log(2.0), 1e-5 * loss);
  EXPECT_THAT(result.output, HasSubstr("1999 targets"));
  const auto summary = test::read_file(run_folder("run") + "/log.txt");
  EXPECT_NEAR(number_after(summary, "best validation loss "), loss, 1e-5 * loss);
}

TEST_F(CommandsTest, EvalTakesAsManyMicroBatchesAsItersSays) {
  ASSERT_EQ(mantissa({"train", "run.json", "--set", "training.steps=1"}).exit_code, 0);
  const auto output = [&](std::vector<std::string> options) {
    options.insert(options.begin(), {"eval", run_folder("run")});
    const auto result = mantissa(options);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return result.output;
  };
  EXPECT_THAT(output({}), HasSubstr("| 1999 targets\n"));
  EXPECT_THAT(output({"--iters", "3"}), HasSubstr("| 192 targets\n")) << "3 micro batches of 4 sequences of 16";
  EXPECT_THAT(output({"--iters", "3", "--micro-batch-size", "5"}), HasSubstr("| 240 targets\n"));
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
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  std::filesystem::remove(folder_ / "text.txt");
  test::write_file(folder_ / "other.txt", test::second_order_text(101));
  const auto result = mantissa({"eval", run_folder("run") + "/checkpoints/step-00000020", "--data", "other.txt"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("100 targets"));
}

TEST_F(CommandsTest, GenerateContinuesThePromptAlikeForEqualSeeds) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  const auto text = [&](const std::string& seed) {
    const auto result = mantissa({"generate", run_folder("run"), "--prompt", "abc", "--max-new-tokens", "40", "--seed", seed});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return result.output;
  };
  EXPECT_EQ(text("1"), text("1"));
  EXPECT_NE(text("1"), text("2"));
  EXPECT_EQ(text("1").substr(0, 3), "abc");
  EXPECT_EQ(text("1").size(), 3U + 40U + 1U);
}

TEST_F(CommandsTest, GenerateContinuesSeveralPromptsAsEachAlone) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  const auto output = [&](std::vector<std::string> prompts) {
    std::vector<std::string> command = {"generate", run_folder("run"), "--max-new-tokens", "12"};
    command.insert(command.end(), prompts.begin(), prompts.end());
    const auto result = mantissa(command);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return result.output;
  };
  const std::string line = "---------------\n", both = output({"--prompt", "abc"}) + line + output({"--prompt", "a longer one"}) + line;
  EXPECT_EQ(output({"--prompt", "abc", "--prompt", "a longer one"}), both);
  for (const char* content : {"abc\na longer one\n", "abc\r\na longer one"}) {
    test::write_file(folder_ / "prompts.txt", content);
    EXPECT_EQ(output({"--prompts", "prompts.txt"}), both);
  }
  EXPECT_EQ(output({"--prompt-ids", "1,2", "--prompt-ids", "3"}), output({"--prompt-ids", "1,2"}) + output({"--prompt-ids", "3"}));
  const auto refused = [&](const std::vector<std::string>& options) {
    std::vector<std::string> command = {"generate", run_folder("run")};
    command.insert(command.end(), options.begin(), options.end());
    const auto result = mantissa(command);
    EXPECT_EQ(result.exit_code, 2);
    return result.errors;
  };
  EXPECT_THAT(refused({"--prompts", "prompts.txt", "--prompt", "a"}), HasSubstr("--prompts and --prompt exclude each other"));
  EXPECT_THAT(refused({"--prompts", "prompts.txt", "--prompt-ids", "1"}), HasSubstr("--prompts and --prompt-ids exclude each other"));
  EXPECT_THAT(refused({"--prompts", "nothing.txt"}), HasSubstr("nothing.txt"));
  test::write_file(folder_ / "prompts.txt", "abc\n\nd\n");
  EXPECT_THAT(refused({"--prompts", "prompts.txt"}), HasSubstr("prompts.txt:2: is empty; each line is a prompt"));
  test::write_file(folder_ / "prompts.txt", "");
  EXPECT_THAT(refused({"--prompts", "prompts.txt"}), HasSubstr("prompts.txt: is empty; each line is a prompt"));
}

// A fresh model writes any bytes, so every third text or so ends within a character.
TEST_F(CommandsTest, GenerateNeverPrintsHalfACharacter) {
  ASSERT_EQ(mantissa({"train", "run.json", "--set", "training.steps=1"}).exit_code, 0);
  bool cut = false;
  for (int seed = 1; seed <= 30 && !cut; ++seed) {
    const auto result = mantissa({"generate", run_folder("run"), "--max-new-tokens", "40", "--temperature", "5", "--top-k", "0", "--seed",
                                  std::to_string(seed), "--prompt", "\xC3\xA9"});
    ASSERT_EQ(result.exit_code, 0) << result.errors;
    const std::string text = result.output.substr(0, result.output.size() - 1);
    EXPECT_EQ(whole_characters(text), text.size());
    cut = text.ends_with("\xEF\xBF\xBD");
  }
  EXPECT_TRUE(cut);
}

TEST_F(CommandsTest, BenchGenerateReportsBytesAndTheRatioOfSpeeds) {
  const auto result = mantissa({"bench", "generate", "run.json", "--set", "model.vocab_size=256", "--batch", "2", "--new-tokens", "3",
                                "--time-budget", "0.1", "--json", "bench.jsonl", "--against", "precision.dtype=bf16"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  for (const char* part :
       {"ms a step of 2 tokens", "MB of weights a step", "of the copy rate", "of the speed with precision.dtype=bf16, which reads 0.5"})
    EXPECT_THAT(result.output, HasSubstr(part));
  EXPECT_THAT(test::read_file(folder_ / "bench.jsonl"), HasSubstr("\"bench\":\"generate.run\""));
  const auto wrong = mantissa({"bench", "generate", "run.json", "--batch", "0"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.errors, HasSubstr("--batch: must be positive, got 0"));
}

TEST_F(CommandsTest, EvalAndGenerateTakeThreadsAndGiveTheSameBits) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  for (const std::string command : {"eval", "generate"}) {
    const auto one = mantissa({command, run_folder("run"), "--threads", "1"}),
               three = mantissa({command, run_folder("run"), "--threads", "3"});
    EXPECT_EQ(one.exit_code, 0) << one.errors;
    EXPECT_EQ(one.output, three.output);
    const auto wrong = mantissa({command, run_folder("run"), "--threads", "-1"});
    EXPECT_EQ(wrong.exit_code, 2);
    EXPECT_THAT(wrong.errors, HasSubstr("--threads: must be 0 to 4096, got -1"));
    EXPECT_THAT(mantissa({command, "--help"}).output, HasSubstr("--threads"));
  }
}

TEST_F(CommandsTest, MistakesGiveTheirCodes) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  const std::string run = run_folder("run"), shard = run + "/checkpoints/step-00000020/shard-00000.safetensors";
  EXPECT_EQ(mantissa({"eval", folder_ / "nothing"}).exit_code, 2);
  EXPECT_EQ(mantissa({"eval", folder_.path()}).exit_code, 2);
  EXPECT_EQ(mantissa({"eval", run, "--data", "nothing.txt"}).exit_code, 2);
  EXPECT_EQ(mantissa({"eval", run, "--iters", "0"}).exit_code, 2);
  EXPECT_EQ(mantissa({"generate", run, "--temperature", "-1"}).exit_code, 2);
  EXPECT_EQ(mantissa({"generate", run, "--top-p", "0"}).exit_code, 2);
  EXPECT_EQ(mantissa({"generate", run, "--prompt", ""}).exit_code, 2);
  EXPECT_EQ(mantissa({"train", "run.json"}).exit_code, 2) << "the folder is in use";
  for (const char* convention : {"compressed-tensors", "sglang"}) {
    const auto ignored = mantissa({"export", run, "--output", "out", "--convention", convention});
    EXPECT_EQ(ignored.exit_code, 2);
    EXPECT_THAT(ignored.errors,
                HasSubstr("--convention is of packed weights, and these are dequantized: drop it, or add --weights packed"));
  }
  std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 1);
  EXPECT_EQ(mantissa({"generate", run + "/checkpoints/step-00000020"}).exit_code, 4);
  EXPECT_EQ(mantissa({"generate", run}).exit_code, 4) << "no valid one is left";
}

TEST_F(CommandsTest, DamagedTokenFilesGiveCode4AndLeaveNoRunFolder) {
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
    const std::vector<std::string> sets = {"data.tokenizer=null", "data.path=" + folder_ / data, "model.vocab_size=256"};
    test::write_file(folder_ / "tokens.json", effective_config(config(name, sets).config));
    return mantissa({"train", "tokens.json"});
  };
  for (const char* data : {"m", "c.bin"}) {
    const auto whole = train(std::string("whole-") + data, data);
    EXPECT_EQ(whole.exit_code, 0) << whole.errors;
  }
  std::string index = test::read_file(folder_ / "m.idx");
  index[34] = static_cast<char>(index[34] ^ 1);  // the length of the first sequence
  test::write_file(folder_ / "m.idx", index);
  std::filesystem::resize_file(folder_ / "c.bin", std::filesystem::file_size(folder_ / "c.bin") - 1);
  for (const char* data : {"m", "c.bin"}) {
    const auto damaged = train("damaged", data);
    EXPECT_EQ(damaged.exit_code, 4);
    EXPECT_THAT(damaged.errors, HasSubstr(folder_ / data));
    EXPECT_FALSE(std::filesystem::exists(run_folder("damaged"))) << data;
  }
}

// Nobody looks at all ids before the run, so one beyond the vocabulary is met when it is read.
TEST_F(CommandsTest, IdsBeyondTheVocabularyGiveCode4) {
  const auto shard = [&](const std::string& name, int32_t late_id) {
    LlmcWriter writer(folder_ / name, {.vocab_size = 1000});
    std::vector<int32_t> ids(200, 'a');
    ids[80] = late_id;
    writer.add_document(ids);
    writer.finish();
    return R"([{"path": ")" + folder_ / name + R"("}])";
  };
  const std::string good = shard("good.bin", 'b'), bad = shard("bad.bin", 300);
  const auto train = [&](const std::string& name, const std::string& training, const std::string& validation) {
    const LoadedConfig beyond =
        config(name, {"data.path=null", "data.tokenizer=byte", "data.train=" + training, "data.valid=" + validation});
    test::write_file(folder_ / "tokens.json", effective_config(beyond.config));
    return mantissa({"train", "tokens.json"});
  };
  for (const auto& [name, result] : {std::pair{"training", train("training", bad, good)}, std::pair{"valid", train("valid", good, bad)}}) {
    EXPECT_EQ(result.exit_code, 4) << name;
    EXPECT_THAT(result.errors, HasSubstr(folder_ / "bad.bin")) << name;
    EXPECT_THAT(result.errors, HasSubstr("but the vocabulary has 256 ids")) << name;
  }
  EXPECT_TRUE(std::filesystem::exists(checkpoint("valid", 20)));
}

TEST_F(CommandsTest, OutputThatCannotBeWrittenIsAnError) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  for (const std::string command : {"eval runs/run", "generate runs/run", "inspect runs/run", "verify runs/run", "doctor", "config schema",
                                    "config check run.json", "train run.json --dry-run", "tokenize text.txt --output tokens", "--help"}) {
    const auto full = test::run_process({"sh", "-c", MANTISSA_BINARY " " + command + " > /dev/full"}, folder_.path());
    EXPECT_EQ(full.exit_code, 7) << command;
    EXPECT_THAT(full.errors, HasSubstr("standard output")) << command;
  }
}

TEST_F(CommandsTest, BenchOfTrainingMeasuresStepsWithoutReadingData) {
  std::filesystem::remove(folder_ / "text.txt");
  const auto bench = mantissa({"bench", "train", "run.json", "--time-budget", "1", "--json", "results.jsonl"});
  EXPECT_EQ(bench.exit_code, 0) << bench.errors;
  EXPECT_THAT(bench.output, HasSubstr("run: "));
  const auto result = nlohmann::json::parse(test::read_file(folder_ / "results.jsonl"));
  EXPECT_EQ(result["bench"], "train.run");
  EXPECT_GT(result["us"]["med"], 0.0);
  EXPECT_GT(result["ratio_gemm"]["med"], 0.0);
  EXPECT_THAT(mantissa({"bench", "train", "run.json", "--set", "training.max_steps=5"}).errors, HasSubstr("training.steps"));
  EXPECT_EQ(mantissa({"bench", "train", "run.json", "--filter", "x"}).exit_code, 2) << "there is one";
  EXPECT_EQ(mantissa({"bench", "train", "run.json", "--time-budget", "1", "--json", "/dev/full"}).exit_code, 7);
}

// As train does; without the text the message says what to set.
TEST_F(CommandsTest, BenchOfTrainingTakesTheVocabularyFromTheTokenizer) {
  const std::vector<std::string> command = {
      "bench", "train", "run.json", "--time-budget", "0", "--set", "model.vocab_size=null", "--set", "data.tokenizer=char"};
  const auto bench = mantissa(command);
  EXPECT_EQ(bench.exit_code, 0) << bench.errors;
  std::filesystem::remove(folder_ / "text.txt");
  const auto refused = mantissa(command);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.errors, HasSubstr("name yours with --set data.path=FILE"));
}

// Forty times the layers are slower on any machine.
TEST_F(CommandsTest, BenchOfTrainingComparesTwoSettingsByTurns) {
  const std::vector<std::string> deeper = {"--against", "model.num_layers=80", "--against", "training.threads=1"};
  std::vector<std::string> command = {"bench",  "train",  "run.json", "--time-budget",     "0",
                                      "--json", "r.json", "--set",    "training.threads=2"};
  command.insert(command.end(), deeper.begin(), deeper.end());
  const auto bench = mantissa(command);
  EXPECT_EQ(bench.exit_code, 0) << bench.errors;
  EXPECT_THAT(bench.output, ContainsRegex("train.run +B.* tokens/s  [0-9.]+ of model.num_layers=80 training.threads=1 \\([0-9]+\\) \\["));
  EXPECT_THAT(bench.output,
              ContainsRegex("\nrun: [0-9.]+ of the speed with model.num_layers=80 training.threads=1 in 9 slices, .*2 threads"));
  const auto result = nlohmann::json::parse(test::read_file(folder_ / "r.json"));
  EXPECT_EQ(result["bench"], "train.run");
  EXPECT_EQ(result["ceiling"]["name"], "model.num_layers=80 training.threads=1");
  EXPECT_EQ(result["slices"], 9);
  EXPECT_EQ(result["device"]["threads"], 2);
  EXPECT_EQ(result["tokens"], config("run").config.training.tokens_per_step());
  EXPECT_GT(result["ceiling"]["rate"], 0.0);
  EXPECT_GT(result["ratio_against"]["p10"], 1.0);
  EXPECT_LE(result["ratio_against"]["p10"], result["ratio_against"]["med"]);
  EXPECT_LE(result["ratio_against"]["med"], result["ratio_against"]["p90"]);
}

TEST_F(CommandsTest, BenchOfTrainingMeasuresForwardAndBackwardAlone) {
  const auto bench = mantissa({"bench", "train", "run.json", "--time-budget", "0", "--without-update", "--against", "training.threads=1",
                               "--set", "training.grad_accum=2"});
  EXPECT_EQ(bench.exit_code, 0) << bench.errors;
  EXPECT_THAT(bench.output, ContainsRegex("\nrun: [0-9.]+ of the speed with training.threads=1 in 9 slices, [0-9.]+ ms for forward and "
                                          "backward, "));
}

TEST_F(CommandsTest, BenchOfTrainingComparesSubnormalsWithFreshWeights) {
  const auto bench = mantissa({"bench", "train", "run.json", "--time-budget", "0", "--json", "s.jsonl", "--subnormal"});
  EXPECT_EQ(bench.exit_code, 0) << bench.errors;
  EXPECT_THAT(bench.output, ContainsRegex("\nsubnormal: [0-9.]+ of the speed with fresh weights in 9 slices, "));
  EXPECT_EQ(nlohmann::json::parse(test::read_file(folder_ / "s.jsonl"))["bench"], "train.subnormal");
  EXPECT_THAT(mantissa({"bench", "train", "run.json", "--subnormal", "--alone"}).errors, HasSubstr("--subnormal is for one process, with"));
}

TEST_F(CommandsTest, BenchOfTrainingRefusesSettingsBeforeItMeasures) {
  const auto against = [&](const std::string& set) { return mantissa({"bench", "train", "run.json", "--against", set}); };
  const std::vector<std::pair<std::string, std::string>> wrong = {{"precision.recip=high", "did you mean"},
                                                                  {"precision.recipe=none", "no recipe \"none\""},
                                                                  {"precision.recipe", "expected KEY=VALUE"},
                                                                  {"training.threads=-1", "training.threads"},
                                                                  {"precision.recipe=fp8_block", "is not a multiple of 128"}};
  for (const auto& [set, message] : wrong) {
    const auto refused = against(set);
    EXPECT_EQ(refused.exit_code, 2) << set;
    EXPECT_THAT(refused.errors, HasSubstr("with --against: ")) << set;
    EXPECT_THAT(refused.errors, HasSubstr(message)) << set;
    EXPECT_EQ(refused.output, "") << set;
  }
}

TEST_F(CommandsTest, HelpShowsExamplesInLinesOfTheirOwn) {
  for (const std::string command : {"train", "eval", "generate", "bench", "tokenize", "inspect"}) {
    const auto help = mantissa({command, "--help"});
    EXPECT_EQ(help.exit_code, 0);
    const size_t at = help.output.find("Example:\n");
    ASSERT_NE(at, std::string::npos) << command;
    std::istringstream lines(help.output.substr(at + 9));
    for (std::string line; std::getline(lines, line);) {
      EXPECT_TRUE(line.empty() || line.starts_with("  mantissa " + command + " ")) << line;
    }
  }
  const std::string help = mantissa({"generate", "--help"}).output;
  const size_t option = help.find("--prompt TEXT");
  EXPECT_THAT(help.substr(option, help.find('\n', option) - option), HasSubstr("\\n")) << "the default, in its line";
}

}  // namespace mantissa::commands_test
