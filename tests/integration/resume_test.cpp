// A run that stops and continues is the run that never stopped.
#include <gmock/gmock.h>

#include <set>

#include "mantissa/hf/load_model.h"
#include "training.h"

namespace mantissa::resume_test {

using test::error_of;
using test::TrainedRun;
using ::testing::HasSubstr;

class ResumeTest : public test::TrainingTest {
 protected:
  // Stops after every step of a run of 20, goes on elsewhere, and compares losses and final state, bit by bit.
  void stop_everywhere(const std::string& name, std::vector<std::string> sets) {
    sets.emplace_back("eval.interval=7");
    std::vector<std::string> keeping = sets;
    keeping.insert(keeping.end(), {"checkpoint.interval=1", "checkpoint.keep_every=1"});
    const TrainedRun straight = run(name, keeping);
    ASSERT_EQ(straight.losses.size(), 20U);
    const std::string expected = state_of(name, 20);
    for (int64_t k = 1; k < 20; ++k) {
      const std::string again = text(name, "-", k);
      std::vector<std::string> resuming = sets;
      resuming.push_back("checkpoint.resume=" + checkpoint(name, k));
      const TrainedRun rest = run(again, resuming);
      EXPECT_TRUE(test::same_elements(rest.losses, std::vector<double>(straight.losses.begin() + k, straight.losses.end()))) << k;
      EXPECT_TRUE(test::same_elements(rest.norms, std::vector<double>(straight.norms.begin() + k, straight.norms.end()))) << k;
      EXPECT_TRUE(test::same_elements(state_of(again, 20), expected)) << k;
    }
  }
};

TEST_F(ResumeTest, EveryStepOfAnFp32RunWithAccumulation) { stop_everywhere("fp32", {"training.grad_accum=2"}); }

TEST_F(ResumeTest, EveryStepOfABf16RunWithTheTreeAndRecomputation) {
  stop_everywhere("bf16", {"precision.dtype=bf16", "training.accumulation=tree", "training.recompute=selective"});
}

TEST_F(ResumeTest, EveryStepOfABf16RunWithFullRecomputation) {
  stop_everywhere("full", {"precision.dtype=bf16", "training.recompute=full"});
}

TEST_F(ResumeTest, EveryStepOfARunOnExamples) {
  std::string lines;
  for (int i = 0; i < 30; ++i) {
    std::string ids, mask;
    for (int t = 0; t <= i * 5 % 17; ++t) {
      ids += (t > 0 ? "," : "") + std::to_string((i + t * t) % 8);
      mask += (t > 0 ? "," : "") + std::to_string(t > i % 7);
    }
    lines += R"({"tokens": [)" + ids + R"(], "mask": [)" + mask + "]}\n";
  }
  test::write_file(folder_ / "examples.jsonl", lines);
  stop_everywhere("examples", {"data.path=" + (folder_ / "examples.jsonl"), "data.tokenizer=null", "model.vocab_size=8"});
  const auto error = [&](const std::string& set) {
    return error_of([&] {
      run("other", {"data.path=" + (folder_ / "examples.jsonl"), "data.tokenizer=null", "model.vocab_size=8", "eval.interval=7", set,
                    "checkpoint.resume=" + checkpoint("examples", 3)});
    });
  };
  EXPECT_THAT(error("data.chat_template=chatml").what(), HasSubstr("data.chat_template"));
}

TEST_F(ResumeTest, AutoTakesTheNewestAndContinuesTheMetrics) {
  run("auto", {"training.steps=20", "checkpoint.interval=6"});
  std::filesystem::remove_all(checkpoint("auto", 20));
  const TrainedRun rest = run("auto", {"checkpoint.resume=auto"});
  ASSERT_EQ(rest.steps.size(), 2U) << "the newest was step 18";
  EXPECT_EQ(rest.steps[0].step, 19);
  const std::string metrics = test::read_file(run_folder("auto") + "/metrics.jsonl");
  EXPECT_THAT(metrics, HasSubstr("step-00000018"));
}

TEST_F(ResumeTest, AutoStartsFreshIfThereIsNothing) { EXPECT_EQ(run("fresh", {"checkpoint.resume=auto"}).steps.size(), 20U); }

TEST_F(ResumeTest, AutoHonorsInitFromAtTheStartAndLeavesItAloneAfterwards) {
  run("first");
  const std::string init = "checkpoint.init_from=" + run_folder("first");
  run("straight", {init});
  int calls = 0;
  const std::vector<std::string> sets = {init, "checkpoint.resume=auto"};
  const TrainedRun part = run(config("again", sets), [&calls] { return ++calls == 8 ? Request::save_and_stop : Request::none; });
  ASSERT_EQ(part.summary.exit, ExitCode::stopped);
  std::filesystem::remove_all(run_folder("first"));
  EXPECT_EQ(run("again", sets).steps.size(), 13U);
  EXPECT_THAT(error_of([&] { run("new", sets); }).what(), HasSubstr("checkpoint.init_from: no such checkpoint"));
  EXPECT_TRUE(test::same_elements(state_of("again", 20), state_of("straight", 20)));
}

TEST_F(ResumeTest, StopBeforeTheFirstStepAfterAPathSavesInTheFolderOfTheRun) {
  run("straight", {"checkpoint.interval=6", "checkpoint.keep_every=6"});
  const std::string resume = "checkpoint.resume=" + checkpoint("straight", 6);
  const TrainedRun stopped = run(config("other", {resume}), [] { return Request::save_and_stop; });
  EXPECT_EQ(stopped.summary.exit, ExitCode::stopped);
  EXPECT_EQ(stopped.summary.checkpoint, checkpoint("other", 6));
  EXPECT_EQ(run("other", {"checkpoint.resume=auto"}).steps.size(), 14U);
  EXPECT_TRUE(test::same_elements(state_of("other", 20), state_of("straight", 20)));
}

TEST_F(ResumeTest, FinishedRunTakenByPathIsSavedInTheFolderOfTheRun) {
  run("straight");
  const TrainedRun copy = run("copy", {"checkpoint.resume=" + checkpoint("straight", 20)});
  EXPECT_TRUE(copy.steps.empty());
  EXPECT_EQ(copy.summary.exit, ExitCode::ok);
  EXPECT_TRUE(test::same_elements(state_of("copy", 20), state_of("straight", 20)));
}

TEST_F(ResumeTest, PathToAnotherRunIsRefusedInAFolderThatHoldsARun) {
  run("used", {"checkpoint.interval=10"});
  run("other", {"training.steps=10"});
  for (const std::string& path : {checkpoint("other", 10), run_folder("other"), run_folder("other") + "/checkpoints/"}) {
    const Error error = error_of([&] { run("used", {"checkpoint.resume=" + path}); });
    EXPECT_EQ(error.code(), ExitCode::usage) << path;
    EXPECT_THAT(error.what(), HasSubstr(run_folder("used") + ": holds metrics or checkpoints"));
  }
  EXPECT_EQ(list_checkpoints(run_folder("used") + "/checkpoints").size(), 2U);
  EXPECT_EQ(run("used", {"checkpoint.resume=" + checkpoint("used", 10)}).steps.size(), 10U) << "its own may be named";
}

TEST_F(ResumeTest, CheckpointBeyondTheLastStepIsRefused) {
  run("long");
  const Error error = error_of([&] { run("long", {"training.steps=10", "checkpoint.resume=auto"}); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("training.steps: 10 is less than the 20 steps"));
}

TEST_F(ResumeTest, FinishedRunHasNothingLeftToDo) {
  run("finished");
  const TrainedRun again = run("finished", {"checkpoint.resume=auto"});
  EXPECT_TRUE(again.steps.empty());
  EXPECT_EQ(again.summary.exit, ExitCode::ok);
  EXPECT_EQ(again.summary.steps, 20);
}

TEST_F(ResumeTest, MoreStepsContinueWithTheLearningRateOfTheLongerRun) {
  const TrainedRun whole = run("whole", {"training.steps=30"});
  run("part", {"training.steps=10"});
  const TrainedRun rest = run("part", {"training.steps=30", "checkpoint.resume=auto"});
  EXPECT_EQ(rest.steps[0].lr, whole.steps[10].lr);
}

TEST_F(ResumeTest, RequestToStopSavesAndTheRestFollows) {
  const TrainedRun straight = run("straight");
  int calls = 0;
  const TrainedRun first = run(config("stopped"), [&calls] { return ++calls == 8 ? Request::save_and_stop : Request::none; });
  EXPECT_EQ(first.summary.exit, ExitCode::stopped);
  EXPECT_EQ(first.summary.steps, 7);
  EXPECT_EQ(first.summary.checkpoint, checkpoint("stopped", 7));
  run("stopped", {"checkpoint.resume=auto"});
  EXPECT_TRUE(test::same_elements(state_of("stopped", 20), state_of("straight", 20)));
}

TEST_F(ResumeTest, RequestBeforeTheFirstStepSavesStepZero) {
  const TrainedRun first = run(config("zero"), [] { return Request::save_and_stop; });
  EXPECT_EQ(first.summary.exit, ExitCode::stopped);
  EXPECT_TRUE(first.steps.empty());
  run("zero", {"checkpoint.resume=auto"});
  run("straight");
  EXPECT_TRUE(test::same_elements(state_of("zero", 20), state_of("straight", 20)));
}

TEST_F(ResumeTest, RequestToStopCutsTheEvaluationOfItsStepShortAndTheRestFollows) {
  const std::vector<std::string> sets = {"eval.interval=3", "eval.iters=4"};
  const TrainedRun straight = run("straight", sets);
  for (const int64_t calls_before : {4, 5, 7}) {  // 3 steps, then: before, at the first and at the third of four micro batches
    const std::string name = text("cut-", calls_before);
    int64_t calls = 0;
    const TrainedRun cut = run(config(name, sets), [&] { return ++calls == calls_before ? Request::save_and_stop : Request::none; });
    EXPECT_EQ(cut.summary.exit, ExitCode::stopped);
    EXPECT_EQ(cut.summary.steps, 3);
    EXPECT_EQ(cut.summary.checkpoint, checkpoint(name, 3));
    EXPECT_TRUE(cut.valid_losses.empty());
    EXPECT_FALSE(cut.summary.best_valid_loss.has_value());
    std::vector<std::string> resuming = sets;
    resuming.emplace_back("checkpoint.resume=auto");
    EXPECT_TRUE(test::same_elements(run(name, resuming).valid_losses, straight.valid_losses));
    EXPECT_TRUE(test::same_elements(state_of(name, 20), state_of("straight", 20)));
  }
}

// Step 3 is saved twice: with the evaluation owed, and after it.
TEST_F(ResumeTest, StopInTheEvaluationOfACheckpointStepLeavesOneCheckpointOfIt) {
  const std::vector<std::string> sets = {"eval.interval=3", "checkpoint.interval=3", "training.steps=3"};
  int calls = 0;
  const TrainedRun cut = run(config("cut", sets), [&] { return ++calls == 5 ? Request::save_and_stop : Request::none; });
  ASSERT_EQ(cut.summary.checkpoint, checkpoint("cut", 3));
  const std::string owing = state_of("cut", 3);
  std::vector<std::string> resuming = sets;
  resuming.emplace_back("checkpoint.resume=auto");
  EXPECT_EQ(run("cut", resuming).summary.exit, ExitCode::ok);
  EXPECT_NE(state_of("cut", 3), owing);
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(run_folder("cut") + "/checkpoints"))
    names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"LOCK", "latest", "step-00000003"}));
}

TEST_F(ResumeTest, RunThatIsStoppedInItsLastEvaluationIsNotFinished) {
  const TrainedRun straight = run("straight", {"training.steps=3"});
  int calls = 0;  // three steps and the first micro batch of the evaluation come before
  const TrainedRun cut = run(config("cut", {"training.steps=3"}), [&] { return ++calls == 5 ? Request::save_and_stop : Request::none; });
  EXPECT_EQ(cut.summary.exit, ExitCode::stopped);
  EXPECT_TRUE(cut.valid_losses.empty());
  const TrainedRun rest = run("cut", {"training.steps=3", "checkpoint.resume=auto"});
  EXPECT_EQ(rest.summary.exit, ExitCode::ok);
  EXPECT_TRUE(rest.steps.empty());
  EXPECT_TRUE(test::same_elements(rest.valid_losses, straight.valid_losses));
  EXPECT_TRUE(test::same_elements(state_of("cut", 3), state_of("straight", 3)));
}

TEST_F(ResumeTest, RequestToStopCutsASampleShortAndTheRestFollows) {
  const std::vector<std::string> sets = {"training.steps=3", R"(eval.samples={"prompts": ["ab", "cd"], "max_new_tokens": 60})"};
  const TrainedRun straight = run("straight", sets);
  int calls = 0;  // three steps, two micro batches of the evaluation and the first sample come before
  const TrainedRun cut = run(config("cut", sets), [&] { return ++calls == 80 ? Request::save_and_stop : Request::none; });
  EXPECT_EQ(cut.summary.exit, ExitCode::stopped);
  EXPECT_TRUE(test::same_elements(cut.valid_losses, straight.valid_losses));
  EXPECT_EQ(cut.samples.size(), 1U) << "half a sample is none";
  EXPECT_LT(calls, 85) << "the second sample was cut at once";
  std::vector<std::string> resuming = sets;
  resuming.emplace_back("checkpoint.resume=auto");
  const TrainedRun rest = run("cut", resuming);
  EXPECT_EQ(rest.summary.exit, ExitCode::ok);
  EXPECT_TRUE(rest.valid_losses.empty()) << "it is not owed";
  EXPECT_EQ(rest.samples, straight.samples);
  EXPECT_TRUE(test::same_elements(state_of("cut", 3), state_of("straight", 3)));
}

TEST_F(ResumeTest, RequestToSaveGoesOn) {
  int calls = 0;
  const TrainedRun trained = run(config("saved"), [&calls] { return ++calls == 8 ? Request::save : Request::none; });
  EXPECT_EQ(trained.summary.exit, ExitCode::ok);
  EXPECT_EQ(trained.steps.size(), 20U);
  EXPECT_EQ(list_checkpoints(run_folder("saved") + "/checkpoints").size(), 2U);
}

TEST_F(ResumeTest, ChangedDataIsRefused) {
  run("data");
  std::string content = test::second_order_text(20000);
  content[100] = content[100] == 'a' ? 'b' : 'a';
  test::write_file(folder_ / "text.txt", content);
  const Error error = error_of([&] { run("data", {"training.steps=30", "checkpoint.resume=auto"}); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("text.txt"));
}

TEST_F(ResumeTest, ChangedValidationDataIsRefused) {
  test::write_file(folder_ / "valid.txt", test::second_order_text(500));
  const auto sets = [this](int64_t steps) {
    return std::vector<std::string>{"data.path=null", R"(data.train=[{"path": ")" + (folder_ / "text.txt") + R"("}])",
                                    R"(data.valid=[{"path": ")" + (folder_ / "valid.txt") + R"("}])", text("training.steps=", steps),
                                    "checkpoint.resume=auto"};
  };
  run("valid", sets(10));
  run("valid", sets(11));
  test::write_file(folder_ / "valid.txt", test::second_order_text(501));
  const Error error = error_of([&] { run("valid", sets(12)); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("valid.txt: the validation data changed since the checkpoint"));
}

TEST_F(ResumeTest, AnotherModelIsRefused) {
  const std::vector<std::string> scaled{R"(model.rope_scaling={"type": "yarn", "factor": 4})"};
  run("plain"), run("scaled", scaled);
  const auto refused = [&](const std::string& name, std::vector<std::string> sets) {
    sets.insert(sets.end(), {"training.steps=30", "checkpoint.resume=auto"});
    const Error error = error_of([&] { run(name, sets); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    return std::string(error.what());
  };
  EXPECT_THAT(refused("plain", scaled), HasSubstr("model.rope_scaling: null in the checkpoint, not here"));
  EXPECT_THAT(refused("plain", {"model.sliding_window=9"}), HasSubstr("model.sliding_window: 0, 0 by layer in the checkpoint, 9, 9 here"));
  EXPECT_THAT(refused("plain", {"model.sliding_window=9", "model.sliding_layers=[0]"}),
              HasSubstr("model.sliding_window: 0, 0 by layer in the checkpoint, 9, 0 here"));
  EXPECT_THAT(refused("scaled", {}), HasSubstr("model.rope_scaling: in the checkpoint, null here"));
  EXPECT_THAT(refused("scaled", {R"(model.rope_scaling={"type": "yarn", "factor": 5})"}),
              HasSubstr("model.rope_scaling.factor: 4 in the checkpoint, 5 here"));
}

TEST_F(ResumeTest, AnotherDataOrderIsRefused) {
  const auto refused = [&](const std::string& name, std::vector<std::string> sets) {
    sets.insert(sets.end(), {"training.steps=30", "checkpoint.resume=auto"});
    const Error error = error_of([&] { run(name, sets); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    return std::string(error.what());
  };
  run("fraction");
  EXPECT_THAT(refused("fraction", {"data.valid_fraction=0.2"}), HasSubstr("data.valid_fraction: 0.1 in the checkpoint, 0.2 here"));
  run("tokenizer", {"model.vocab_size=256"});
  EXPECT_THAT(refused("tokenizer", {"model.vocab_size=256", "data.tokenizer=byte"}), HasSubstr("another tokenizer"));
  test::write_file(folder_ / "more.txt", test::second_order_text(5000));
  const auto mix = [&](int weight) {
    return text(R"(data.train=[{"path": ")", folder_ / "text.txt", R"("}, {"path": ")", folder_ / "more.txt", R"(", "weight": )", weight,
                "}]");
  };
  run("mix", {"data.path=null", mix(2)});
  EXPECT_THAT(refused("mix", {"data.path=null", mix(3)}), HasSubstr("data.train: weights [1, 2] in the checkpoint, [1, 3] here"));
  EXPECT_EQ(
      run("mix", {"data.path=null", mix(2), "data.train.0.weight=0.5", "data.train.1.weight=1", "checkpoint.resume=auto"}).summary.exit,
      ExitCode::ok)
      << "the same shares";
  run("order", {"data.eod_id=1"});
  const std::vector<std::pair<std::string, std::string>> changes = {
      {"data.format=text", "data.format: auto in the checkpoint, text here"},
      {"data.dtype=u32", "data.dtype: u16 in the checkpoint, u32 here"},
      {"data.append_eod=true", "data.append_eod: false in the checkpoint"},
      {"data.eod_id=2", "data.eod_id: 1 in the checkpoint, 2 here"},
      {"training.seed=5", "training.seed: 1234 in the checkpoint, 5 here"},
      {"training.seq_len=8", "training.seq_len: 16 in the checkpoint, 8 here"}};
  for (const auto& [set, message] : changes) EXPECT_THAT(refused("order", {"data.eod_id=1", set}), HasSubstr(message));
}

TEST_F(ResumeTest, AnotherModelIsRefusedByTheNamesOfTheDifferences) {
  run("model");
  const Error error = error_of([&] {
    run("model", {"model.intermediate_size=64", "model.qk_norm=false", "training.steps=30", "checkpoint.resume=auto"});
  });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("model.intermediate_size: 48 in the checkpoint, 64 here"));
  EXPECT_THAT(error.what(), HasSubstr("model.qk_norm: true in the checkpoint, false here"));
}

TEST_F(ResumeTest, DamagedCheckpointIsPassedOverByAutoAndRefusedByPath) {
  run("damaged", {"checkpoint.interval=10"});
  const std::string shard = checkpoint("damaged", 20) + "/shard-00000.safetensors";
  std::string bytes = test::read_file(shard);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
  test::write_file(shard, bytes);
  EXPECT_EQ(error_of([&] { run("other", {"checkpoint.resume=" + checkpoint("damaged", 20)}); }).code(), ExitCode::data);
  const TrainedRun rest = run("damaged", {"checkpoint.resume=auto"});
  ASSERT_EQ(rest.steps.size(), 10U);
  EXPECT_EQ(rest.steps[0].step, 11);
}

// Stopped before the first step, so that nothing is saved but what the resume itself publishes.
TEST_F(ResumeTest, OnlyAResumeOfTheRunPublishesWhatItFellBackTo) {
  run("fell", {"checkpoint.interval=10"});
  const std::string latest = run_folder("fell") + "/checkpoints/latest", published = test::read_file(latest);
  std::filesystem::resize_file(checkpoint("fell", 20) + "/shard-00000.safetensors", 100);
  const auto stopped = [&](const std::string& name, const std::string& from) {
    return run(config(name, {"checkpoint.resume=" + from}), [] { return Request::save_and_stop; }).summary.exit;
  };
  EXPECT_EQ(load_model(run_folder("fell"), make_backend("cpu")).step, 10);
  EXPECT_EQ(stopped("other", run_folder("fell")), ExitCode::stopped);
  EXPECT_EQ(test::read_file(latest), published) << "neither an evaluation nor another run changes it";
  EXPECT_EQ(error_of([&] { open_checkpoint(run_folder("fell")); }).code(), ExitCode::data);
  for (const std::string& from : {std::string("auto"), run_folder("fell")}) {
    test::write_file(latest, published);
    EXPECT_EQ(stopped("fell", from), ExitCode::stopped);
    EXPECT_EQ(open_checkpoint(run_folder("fell")).directory(), checkpoint("fell", 10)) << from;
  }
  EXPECT_EQ(run("fell", {"checkpoint.resume=auto"}).steps.size(), 10U);
  EXPECT_EQ(open_checkpoint(run_folder("fell")).directory(), checkpoint("fell", 20));
}

TEST_F(ResumeTest, AnotherProcessInTheFolderIsRefusedBeforeAnythingChanges) {
  run("locked");
  const std::string record = test::read_file(run_folder("locked") + "/run.json");
  const FolderLock lock(run_folder("locked") + "/checkpoints", "other");
  for (const char* resume : {"auto", "never"}) {
    EXPECT_EQ(error_of([&] { run("locked", {"training.steps=30", text("checkpoint.resume=", resume)}); }).code(), ExitCode::environment);
  }
  EXPECT_EQ(test::read_file(run_folder("locked") + "/run.json"), record);
}

}  // namespace mantissa::resume_test
