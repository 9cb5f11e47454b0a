// A run that stops and continues is the run that never stopped.
#include <gmock/gmock.h>

#include <set>

#include "hf/load_model.h"
#include "training.h"

namespace mantissa::resume_test {

using test::error_of;
using test::TrainedRun;
using ::testing::AllOf;
using ::testing::HasSubstr;

class ResumeTest : public test::TrainingTest {
 protected:
  // Stops after every step of a run of 6, goes on elsewhere, and compares losses and final state, bit by bit.
  void stop_everywhere(const std::string& name, std::vector<std::string> sets) {
    sets.insert(sets.end(), {"eval.interval=3", "training.steps=6"});
    std::vector<std::string> keeping = sets;
    keeping.insert(keeping.end(), {"checkpoint.interval=1", "checkpoint.keep_every=1"});
    const TrainedRun straight = run(name, keeping);
    ASSERT_EQ(straight.losses.size(), 6U);
    for (int64_t k = 1; k < 6; ++k) {
      std::vector<std::string> resuming = sets;
      resuming.push_back("checkpoint.resume=" + checkpoint(name, k));
      const TrainedRun rest = run(text(name, "-", k), resuming);
      EXPECT_TRUE(test::same_elements(rest.losses, std::vector<double>(straight.losses.begin() + k, straight.losses.end()))) << k;
      EXPECT_TRUE(test::same_elements(rest.norms, std::vector<double>(straight.norms.begin() + k, straight.norms.end()))) << k;
      EXPECT_TRUE(test::same_elements(state_of(text(name, "-", k), 6), state_of(name, 6))) << k;
    }
  }

  // Asks for this at one of the times at which the run asks for requests.
  static std::function<Request()> request_at(int64_t call, Request request = Request::save_and_stop) {
    return [=, calls = int64_t{0}]() mutable { return ++calls == call ? request : Request::none; };
  }

  std::string refused(const std::string& name, std::vector<std::string> sets) const {
    sets.insert(sets.end(), {"training.steps=5", "checkpoint.resume=auto"});
    const Error error = error_of([&] { run(name, sets); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    return error.what();
  }
};

TEST_F(ResumeTest, EveryStepOfARunIsAPlaceToStop) {
  stop_everywhere("fp32", {"training.grad_accum=2"});
  stop_everywhere("bf16", {"precision.dtype=bf16", "training.accumulation=tree", "training.recompute=selective"});
  stop_everywhere("full", {"precision.dtype=bf16", "training.recompute=full"});
}

TEST_F(ResumeTest, EveryStepOfARunOnExamplesIsAPlaceToStop) {
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
  const std::vector<std::string> sets = {"data.path=" + (folder_ / "examples.jsonl"), "data.tokenizer=null", "model.vocab_size=8"};
  stop_everywhere("examples", sets);
  std::vector<std::string> other = sets;
  other.insert(other.end(), {"data.chat_template=chatml", "checkpoint.resume=" + checkpoint("examples", 3)});
  EXPECT_THAT(error_of([&] { run("other", other); }).what(), HasSubstr("data.chat_template"));
}

TEST_F(ResumeTest, AutoTakesTheNewestAndContinuesTheMetrics) {
  EXPECT_EQ(run("auto", {"training.steps=5", "checkpoint.interval=2", "checkpoint.resume=auto"}).steps.size(), 5U) << "there was nothing";
  std::filesystem::remove_all(checkpoint("auto", 5));
  const TrainedRun rest = run("auto", {"training.steps=5", "checkpoint.resume=auto"});
  ASSERT_EQ(rest.steps.size(), 1U) << "the newest was step 4";
  EXPECT_EQ(rest.steps[0].step, 5);
  EXPECT_THAT(test::read_file(run_folder("auto") + "/metrics.jsonl"), HasSubstr("step-00000004"));
}

TEST_F(ResumeTest, AutoHonorsInitFromAtTheStartAndLeavesItAloneAfterwards) {
  run("first", {"training.steps=1"});
  const std::vector<std::string> sets = {"checkpoint.init_from=" + run_folder("first"), "training.steps=5", "checkpoint.resume=auto"};
  run("straight", sets);
  ASSERT_EQ(run(config("again", sets), request_at(3)).summary.exit, ExitCode::stopped);
  std::filesystem::remove_all(run_folder("first"));
  EXPECT_EQ(run("again", sets).steps.size(), 3U);
  EXPECT_THAT(error_of([&] { run("new", sets); }).what(), HasSubstr("checkpoint.init_from: no such checkpoint"));
  EXPECT_TRUE(test::same_elements(state_of("again", 5), state_of("straight", 5)));
}

TEST_F(ResumeTest, ARunTakenByPathIsSavedInTheFolderOfTheRun) {
  run("straight", {"training.steps=6", "checkpoint.interval=3", "checkpoint.keep_every=3"});
  const std::string at_3 = "checkpoint.resume=" + checkpoint("straight", 3), at_end = "checkpoint.resume=" + checkpoint("straight", 6);
  const TrainedRun stopped = run(config("other", {"training.steps=6", at_3}), request_at(1)),
                   copy = run("copy", {"training.steps=6", at_end});
  EXPECT_EQ(stopped.summary.exit, ExitCode::stopped) << "before the first step";
  EXPECT_EQ(stopped.summary.checkpoint, checkpoint("other", 3));
  EXPECT_EQ(run("other", {"training.steps=6", "checkpoint.resume=auto"}).steps.size(), 3U);
  EXPECT_EQ(copy.summary.exit, ExitCode::ok) << "it was finished";
  EXPECT_TRUE(copy.steps.empty());
  for (const char* name : {"other", "copy"}) EXPECT_TRUE(test::same_elements(state_of(name, 6), state_of("straight", 6))) << name;
}

TEST_F(ResumeTest, PathToAnotherRunIsRefusedInAFolderThatHoldsARun) {
  run("used", {"training.steps=4", "checkpoint.interval=2"});
  run("other", {"training.steps=2"});
  for (const std::string& path : {checkpoint("other", 2), run_folder("other"), run_folder("other") + "/checkpoints/"}) {
    const Error error = error_of([&] { run("used", {"checkpoint.resume=" + path}); });
    EXPECT_EQ(error.code(), ExitCode::usage) << path;
    EXPECT_THAT(error.what(), HasSubstr(run_folder("used") + ": holds metrics or checkpoints"));
  }
  EXPECT_EQ(list_checkpoints(run_folder("used") + "/checkpoints").size(), 2U);
  EXPECT_EQ(run("used", {"training.steps=4", "checkpoint.resume=" + checkpoint("used", 2)}).steps.size(), 2U) << "its own may be named";
}

TEST_F(ResumeTest, TheModelOfTheCheckpointHasTheSizesOfItsTensors) {
  run("padded", {"training.steps=1", "model.pad_vocab_to=64"});
  nlohmann::json json = nlohmann::json::parse(effective_config(config("padded").config));
  json.erase("model");
  for (const std::string& resume : {std::string("auto"), checkpoint("padded", 1)}) {
    const LoadedConfig rest =
        load_run_config({.file = folder_ / "run.json", .text = json.dump(), .sets = {"checkpoint.resume=" + resume, "training.steps=2"}});
    EXPECT_EQ(rest.config.model.pad_vocab_to, 64);
    EXPECT_EQ(run(rest).steps.size(), 1U);
    std::filesystem::remove_all(checkpoint("padded", 2));
  }
}

// The launcher starts a run once more that a path began.
TEST_F(ResumeTest, ARestartGoesOnFromTheNewestOfTheRunElseFromThePath) {
  run("other", {"training.steps=2"});
  const auto dies = [](const LoadedConfig& loaded, int64_t step) {
    TrainEvents events;
    events.step = [step](const StepEvent& event) { require(event.step < step, ExitCode::environment, "dies"); };
    EXPECT_EQ(error_of([&] { train(loaded, {"test"}, events); }).code(), ExitCode::environment);
  };
  const auto steps_of = [](const TrainedRun& taken) {
    return joined(taken.steps, " ", [](const StepEvent& event) { return std::to_string(event.step); });
  };
  const auto sets = [](const std::string& path) {
    return std::vector<std::string>{"training.steps=6", "checkpoint.interval=2", "checkpoint.resume=" + path};
  };
  const std::vector<std::string> by_path = sets(checkpoint("other", 2));
  dies(config("mine", by_path), 3);
  EXPECT_EQ(error_of([&] { run("mine", by_path); }).code(), ExitCode::usage) << "it is no restart";
  dies(config("mine", by_path, Start::restarted), 5);
  const LoadedConfig again = config("mine", by_path, Start::restarted);
  EXPECT_EQ(again.config.checkpoint.resume, "auto");
  EXPECT_EQ(again.report.origin("checkpoint.resume"), "a restart by the launcher");
  std::filesystem::remove_all(run_folder("other"));
  EXPECT_EQ(steps_of(run(config("mine", by_path, Start::restarted))), "5 6") << "from step 4, and the path is needed no more";

  run("own", {"training.steps=4", "checkpoint.interval=1", "checkpoint.keep_latest=4"});
  const std::vector<std::string> back = sets(checkpoint("own", 1));
  dies(config("own", back), 2);
  EXPECT_EQ(steps_of(run(config("own", back, Start::restarted))), "2 3 4 5 6") << "nothing was saved since it went back";
  run("same", {"training.steps=4", "checkpoint.interval=1", "checkpoint.keep_latest=4"});
  const std::vector<std::string> saved = sets(checkpoint("same", 1));
  dies(config("same", saved), 3);
  EXPECT_EQ(steps_of(run(config("same", saved, Start::restarted))), "3 4 5 6");
}

TEST_F(ResumeTest, AFinishedRunHasNothingLeftToDoButMoreSteps) {
  const auto run_to = [&](const char* name, int64_t steps) {
    return run(name, {text("training.steps=", steps), "schedule.warmup_steps=1", "checkpoint.resume=auto"});
  };
  const TrainedRun whole = run_to("whole", 5);
  run_to("part", 3);
  const TrainedRun again = run_to("part", 3);
  EXPECT_TRUE(again.steps.empty());
  EXPECT_EQ(again.summary.exit, ExitCode::ok);
  EXPECT_EQ(again.summary.steps, 3);
  const Error error = error_of([&] { run_to("part", 2); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("training.steps: 2 is less than the 3 steps"));
  const TrainedRun rest = run_to("part", 5);
  EXPECT_EQ(rest.steps[0].lr, whole.steps[3].lr) << "of the longer run";
  EXPECT_GT(rest.steps[0].lr, rest.steps[1].lr) << "three steps would have decayed before";
}

TEST_F(ResumeTest, RequestsToStopAndToSaveAreHeededAndTheRestFollows) {
  run("straight", {"training.steps=5"});
  for (const int64_t steps : {0, 3}) {
    const std::string name = text("stopped", steps);
    const TrainedRun first = run(config(name, {"training.steps=5"}), request_at(steps + 1));
    EXPECT_EQ(first.summary.exit, ExitCode::stopped);
    EXPECT_EQ(first.summary.steps, steps);
    EXPECT_EQ(first.summary.checkpoint, checkpoint(name, steps));
    run(name, {"training.steps=5", "checkpoint.resume=auto"});
    EXPECT_TRUE(test::same_elements(state_of(name, 5), state_of("straight", 5))) << steps;
  }
  const TrainedRun saved = run(config("saved", {"training.steps=5"}), request_at(3, Request::save));
  EXPECT_EQ(saved.summary.exit, ExitCode::ok);
  EXPECT_EQ(saved.steps.size(), 5U);
  EXPECT_EQ(list_checkpoints(run_folder("saved") + "/checkpoints").size(), 2U);
}

TEST_F(ResumeTest, RequestToStopCutsTheEvaluationOfItsStepShortAndTheRestFollows) {
  const std::vector<std::string> sets = {"eval.interval=3", "eval.iters=4", "training.steps=4"};
  const TrainedRun straight = run("straight", sets);
  for (const int64_t call : {4, 5, 7}) {  // 3 steps, then: before, at the first and at the third of four micro batches
    const std::string name = text("cut-", call);
    const TrainedRun cut = run(config(name, sets), request_at(call));
    EXPECT_EQ(cut.summary.exit, ExitCode::stopped);
    EXPECT_EQ(cut.summary.steps, 3);
    EXPECT_EQ(cut.summary.checkpoint, checkpoint(name, 3));
    EXPECT_TRUE(cut.valid_losses.empty());
    EXPECT_FALSE(cut.summary.best_valid_loss.has_value());
    std::vector<std::string> resuming = sets;
    resuming.emplace_back("checkpoint.resume=auto");
    EXPECT_TRUE(test::same_elements(run(name, resuming).valid_losses, straight.valid_losses));
    EXPECT_TRUE(test::same_elements(state_of(name, 4), state_of("straight", 4)));
  }
}

// The last step, which is one of a checkpoint, is saved twice: with the evaluation owed, and after it.
TEST_F(ResumeTest, StopInTheLastEvaluationIsNotTheEndAndLeavesOneCheckpoint) {
  const std::vector<std::string> sets = {"eval.interval=3", "checkpoint.interval=3", "training.steps=3"};
  const TrainedRun straight = run("straight", sets), cut = run(config("cut", sets), request_at(5));
  EXPECT_EQ(cut.summary.exit, ExitCode::stopped);
  EXPECT_TRUE(cut.valid_losses.empty());
  ASSERT_EQ(cut.summary.checkpoint, checkpoint("cut", 3));
  const std::string owing = state_of("cut", 3);
  std::vector<std::string> resuming = sets;
  resuming.emplace_back("checkpoint.resume=auto");
  const TrainedRun rest = run("cut", resuming);
  EXPECT_EQ(rest.summary.exit, ExitCode::ok);
  EXPECT_TRUE(rest.steps.empty());
  EXPECT_TRUE(test::same_elements(rest.valid_losses, straight.valid_losses));
  EXPECT_TRUE(test::same_elements(state_of("cut", 3), state_of("straight", 3)));
  EXPECT_NE(state_of("cut", 3), owing);
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(run_folder("cut") + "/checkpoints"))
    names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"LOCK", "latest", "step-00000003"}));
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

TEST_F(ResumeTest, ChangedDataIsRefused) {
  test::write_file(folder_ / "valid.txt", test::second_order_text(500));
  const auto resume = [&](int64_t steps) {
    return run("data", {"data.path=null", R"(data.train=[{"path": ")" + (folder_ / "text.txt") + R"("}])",
                        R"(data.valid=[{"path": ")" + (folder_ / "valid.txt") + R"("}])", text("training.steps=", steps),
                        "checkpoint.resume=auto"});
  };
  const auto expect_refused = [&](const char* message) {
    const Error error = error_of([&] { resume(3); });
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_THAT(error.what(), HasSubstr(message));
  };
  resume(1);
  resume(2);
  test::write_file(folder_ / "valid.txt", test::second_order_text(501));
  expect_refused("valid.txt: the validation data changed since the checkpoint");
  test::write_file(folder_ / "valid.txt", test::second_order_text(500));
  std::string content = test::second_order_text(20000);
  content[100] = content[100] == 'a' ? 'b' : 'a';
  test::write_file(folder_ / "text.txt", content);
  expect_refused("text.txt");
}

TEST_F(ResumeTest, AnotherModelIsRefusedByTheNamesOfTheDifferences) {
  const std::vector<std::string> scaled{R"(model.rope_scaling={"type": "yarn", "factor": 4})", "training.steps=1"};
  run("plain", {"training.steps=1"}), run("scaled", scaled);
  EXPECT_THAT(refused("plain", scaled), HasSubstr("model.rope_scaling: null in the checkpoint, not here"));
  EXPECT_THAT(refused("plain", {"model.sliding_window=9"}), HasSubstr("model.sliding_window: 0, 0 by layer in the checkpoint, 9, 9 here"));
  EXPECT_THAT(refused("plain", {"model.sliding_window=9", "model.sliding_layers=[0]"}),
              HasSubstr("model.sliding_window: 0, 0 by layer in the checkpoint, 9, 0 here"));
  EXPECT_THAT(refused("scaled", {}), HasSubstr("model.rope_scaling: in the checkpoint, null here"));
  EXPECT_THAT(refused("scaled", {R"(model.rope_scaling={"type": "yarn", "factor": 5})"}),
              HasSubstr("model.rope_scaling.factor: 4 in the checkpoint, 5 here"));
  EXPECT_THAT(refused("plain", {"model.intermediate_size=64", "model.qk_norm=false"}),
              AllOf(HasSubstr("model.intermediate_size: 48 in the checkpoint, 64 here"),
                    HasSubstr("model.qk_norm: true in the checkpoint, false here")));
}

TEST_F(ResumeTest, AnotherDataOrderIsRefused) {
  run("fraction", {"training.steps=1"});
  EXPECT_THAT(refused("fraction", {"data.valid_fraction=0.2"}), HasSubstr("data.valid_fraction: 0.1 in the checkpoint, 0.2 here"));
  run("tokenizer", {"model.vocab_size=256", "training.steps=1"});
  EXPECT_THAT(refused("tokenizer", {"model.vocab_size=256", "data.tokenizer=byte"}), HasSubstr("a tokenizer that differs"));
  test::write_file(folder_ / "more.txt", test::second_order_text(5000));
  const auto mix = [&](double first, double weight) {
    return text(R"(data.train=[{"path": ")", folder_ / "text.txt", R"(", "weight": )", first, R"(}, {"path": ")", folder_ / "more.txt",
                R"(", "weight": )", weight, "}]");
  };
  run("mix", {"data.path=null", mix(1, 2), "training.steps=1"});
  EXPECT_THAT(refused("mix", {"data.path=null", mix(1, 3)}), HasSubstr("data.train: weights [1, 2] in the checkpoint, [1, 3] here"));
  EXPECT_EQ(run("mix", {"data.path=null", mix(0.5, 1), "training.steps=2", "checkpoint.resume=auto"}).summary.exit, ExitCode::ok)
      << "the same shares";
  run("order", {"data.eod_id=1", "training.steps=1"});
  const std::pair<std::string, std::string> changes[] = {{"data.format=text", "data.format: auto in the checkpoint, text here"},
                                                         {"data.dtype=u32", "data.dtype: u16 in the checkpoint, u32 here"},
                                                         {"data.append_eod=true", "data.append_eod: false in the checkpoint"},
                                                         {"data.eod_id=2", "data.eod_id: 1 in the checkpoint, 2 here"},
                                                         {"training.seed=5", "training.seed: 1234 in the checkpoint, 5 here"},
                                                         {"training.seq_len=8", "training.seq_len: 16 in the checkpoint, 8 here"}};
  for (const auto& [set, message] : changes) EXPECT_THAT(refused("order", {"data.eod_id=1", set}), HasSubstr(message));
}

TEST_F(ResumeTest, DamagedCheckpointIsPassedOverByAutoAndRefusedByPath) {
  run("damaged", {"training.steps=4", "checkpoint.interval=2"});
  const std::string shard = checkpoint("damaged", 4) + "/shard-00000.safetensors";
  std::string bytes = test::read_file(shard);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
  test::write_file(shard, bytes);
  EXPECT_EQ(error_of([&] { run("other", {"checkpoint.resume=" + checkpoint("damaged", 4)}); }).code(), ExitCode::data);
  const TrainedRun rest = run("damaged", {"training.steps=4", "checkpoint.resume=auto"});
  ASSERT_EQ(rest.steps.size(), 2U);
  EXPECT_EQ(rest.steps[0].step, 3);
}

// Stopped before the first step, so that nothing is saved but what the resume itself publishes.
TEST_F(ResumeTest, OnlyAResumeOfTheRunPublishesWhatItFellBackTo) {
  run("fell", {"training.steps=4", "checkpoint.interval=2"});
  const std::string latest = run_folder("fell") + "/checkpoints/latest", published = test::read_file(latest);
  std::filesystem::resize_file(checkpoint("fell", 4) + "/shard-00000.safetensors", 100);
  const auto stopped = [&](const std::string& name, const std::string& from) {
    return run(config(name, {"training.steps=4", "checkpoint.resume=" + from}), request_at(1)).summary.exit;
  };
  EXPECT_EQ(load_model(run_folder("fell"), make_backend("cpu")).step, 2);
  EXPECT_EQ(stopped("other", run_folder("fell")), ExitCode::stopped);
  EXPECT_EQ(test::read_file(latest), published) << "neither an evaluation nor another run changes it";
  EXPECT_EQ(error_of([&] { open_checkpoint(run_folder("fell")); }).code(), ExitCode::data);
  for (const std::string& from : {std::string("auto"), run_folder("fell")}) {
    test::write_file(latest, published);
    EXPECT_EQ(stopped("fell", from), ExitCode::stopped);
    EXPECT_EQ(open_checkpoint(run_folder("fell")).directory(), checkpoint("fell", 2)) << from;
  }
  EXPECT_EQ(run("fell", {"training.steps=4", "checkpoint.resume=auto"}).steps.size(), 2U);
  EXPECT_EQ(open_checkpoint(run_folder("fell")).directory(), checkpoint("fell", 4));
}

TEST_F(ResumeTest, AnotherProcessInTheFolderIsRefusedBeforeAnythingChanges) {
  run("locked", {"training.steps=1"});
  const std::string record = test::read_file(run_folder("locked") + "/run.json");
  const FolderLock lock(run_folder("locked") + "/checkpoints", "other");
  for (const char* resume : {"auto", "never"}) {
    EXPECT_EQ(error_of([&] { run("locked", {"training.steps=30", text("checkpoint.resume=", resume)}); }).code(), ExitCode::environment);
  }
  EXPECT_EQ(test::read_file(run_folder("locked") + "/run.json"), record);
}

}  // namespace mantissa::resume_test
