// checkpoint.keep_best: the checkpoint with the lowest validation loss, by name, over resumes and ways back.
#include <gmock/gmock.h>

#include <map>
#include <mutex>

#include "checkpoint/checkpoint_search.h"
#include "checkpoint_shards.h"
#include "checkpoint_testing.h"
#include "hf/load_model.h"
#include "mantissa/base/log.h"
#include "thread_ranks.h"
#include "training.h"

namespace mantissa::best_checkpoint_test {

namespace fs = std::filesystem;
using test::error_of;
using test::Sets;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class BestOfARun : public test::TrainingTest {
 protected:
  struct Evaluated {
    TrainSummary summary;
    std::map<int64_t, double> losses;  // by step
    int64_t best() const {
      return std::ranges::min_element(losses, {}, [](const auto& one) { return one.second; })->first;
    }
  };
  Evaluated evaluated(const LoadedConfig& loaded, const std::function<Request()>& request = {}, const Communicator& world = {}) const {
    Evaluated out;
    TrainEvents events;
    events.evaluated = [&out](const EvaluationEvent& event) { out.losses[event.step] = event.result.loss; };
    events.request = request;
    out.summary = train(loaded, {}, events, world);
    return out;
  }
  std::string folder(const std::string& name) const { return run_folder(name) + "/checkpoints"; }
  std::vector<int64_t> steps(const std::string& name) const { return steps_in(folder(name)); }
  // The step that `best` names, read as any command reads it.
  int64_t best(const std::string& name) const {
    return load_checkpoint(folder(name) + "/best", [](CheckpointReader& reader) { reader.verify(); }).step;
  }
  // Stops after so many evaluations.
  Evaluated until(const LoadedConfig& loaded, size_t evaluations) const {
    auto seen = std::make_shared<size_t>(0);
    Evaluated out;
    TrainEvents events;
    events.evaluated = [&, seen](const EvaluationEvent& event) { ++*seen, out.losses[event.step] = event.result.loss; };
    events.request = [seen, evaluations] { return *seen == evaluations ? Request::save_and_stop : Request::none; };
    out.summary = train(loaded, {}, events);
    return out;
  }
  // The loss falls; at this rate it rises.
  const Sets sets_{"checkpoint.keep_best=true", "eval.interval=1", "training.steps=12", "checkpoint.keep_latest=2"};
  const Sets rising_{"optimizer.lr=2", "checkpoint.resume=auto"};
};

TEST_F(BestOfARun, IsSavedWhereItIsEvaluatedAndStaysWhenOthersAreDeleted) {
  const Evaluated first = until(config("run", sets_), 6);
  EXPECT_EQ(first.summary.exit, ExitCode::stopped);
  EXPECT_EQ(best("run"), first.best());
  const Evaluated rest = evaluated(config("run", test::with(sets_, test::with(rising_, {"checkpoint.interval=1"}))));
  std::map<int64_t, double> all = first.losses;
  all.insert(rest.losses.begin(), rest.losses.end());
  const int64_t least = Evaluated{.summary = {}, .losses = all}.best();
  ASSERT_LT(least, 10) << "else this shows nothing";
  EXPECT_EQ(best("run"), least);
  EXPECT_THAT(steps("run"), ElementsAre(least, 11, 12));
  EXPECT_EQ(rest.summary.best_checkpoint, folder("run") + "/best");
  EXPECT_EQ(rest.summary.checkpoint, checkpoint("run", 12));
  for (const CheckpointStatus& status : list_checkpoints(folder("run"))) {
    EXPECT_EQ(status.best, status.step == least);
    EXPECT_EQ(status.latest, status.step == 12);
  }
  EXPECT_EQ(load_model(folder("run") + "/best", make_backend("cpu")).step, least);
}

// Evaluations that are not the best save nothing, and a run without the switch keeps none.
TEST_F(BestOfARun, AloneMakesASaveThatIsNotDue) {
  const Evaluated run = evaluated(config("run", test::with(sets_, {"optimizer.lr=2", "eval.first=true", "schedule.warmup_steps=0"})));
  const int64_t least = run.best();
  ASSERT_LT(least, 10);
  EXPECT_EQ(best("run"), least);
  EXPECT_THAT(steps("run"), Contains(12));
  for (const int64_t step : steps("run")) {
    for (const auto& [earlier, loss] : run.losses) {
      if (earlier >= step || step == 12) continue;
      EXPECT_LT(run.losses.at(step), loss) << step;
    }
  }
  evaluated(config("without", {"eval.interval=1", "training.steps=3"}));
  EXPECT_FALSE(fs::exists(folder("without") + "/best"));
  const Error error = error_of([&] { load_checkpoint(folder("without") + "/best", [](CheckpointReader&) {}); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("there is no such checkpoint; a run keeps its best one under checkpoint.keep_best"));
}

TEST_F(BestOfARun, MayBeTheModelThatTheRunStartsFrom) {
  evaluated(config("base", {"training.steps=20"}));
  const Evaluated run =
      evaluated(config("tuned", {"checkpoint.keep_best=true", "eval.first=true", "eval.interval=1", "training.steps=3", "optimizer.lr=3",
                                 "schedule.warmup_steps=0", "checkpoint.init_from=" + run_folder("base")}));
  ASSERT_EQ(run.best(), 0);
  EXPECT_EQ(best("tuned"), 0);
  EXPECT_THAT(steps("tuned"), ElementsAre(0, 3));
  for (const std::string& name : parameters("base", 20))
    EXPECT_EQ(tensor("tuned", 0, "master." + name), tensor("base", 20, "master." + name)) << name;
}

TEST_F(BestOfARun, IsTakenByNameToStartFromAndToGoBackTo) {
  until(config("run", sets_), 4);
  evaluated(config("run", test::with(sets_, test::with(rising_, {"training.steps=6"}))));
  const int64_t least = best("run");
  ASSERT_LT(least, 6);
  const std::string name = folder("run") + "/best";
  run("next", {"checkpoint.init_from=" + name, "data.tokenizer=" + name, "training.steps=1", "optimizer.lr=1e-30"});
  for (const std::string& parameter : parameters("run", least))
    EXPECT_EQ(tensor("next", 1, "master." + parameter), tensor("run", least, "master." + parameter)) << parameter;
  const test::TrainedRun back = run("run", {"checkpoint.resume=" + name, text("training.steps=", least + 1)});
  ASSERT_EQ(back.steps.size(), 1U);
  EXPECT_EQ(back.steps[0].step, least + 1);
}

// The state says which checkpoint is the best; a kill may have come before the file `best`, and a way back leaves a future behind.
TEST_F(BestOfARun, FollowsTheStateThatARunGoesOnFrom) {
  const Sets sets = test::with(sets_, {"checkpoint.interval=1", "checkpoint.keep_latest=20"});
  const Evaluated run = evaluated(config("run", sets));
  const int64_t last = run.best();
  ASSERT_GT(last, 6);
  std::map<int64_t, double> early(run.losses.begin(), run.losses.find(6));
  const int64_t early_best = Evaluated{.summary = {}, .losses = early}.best();
  const std::string file = folder("run") + "/best", content = test::read_file(file);
  const Sets again = test::with(sets, {"checkpoint.resume=auto", "eval.interval=0"});
  for (const std::string& lost : {std::string(), std::string("nonsense"), checkpoint_name(3) + " 0123456789abcdef\n"}) {
    lost.empty() ? fs::remove(file) : (test::write_file(file, lost), true);
    evaluated(config("run", again));  // nothing is left to do
    EXPECT_EQ(best("run"), last) << lost;
    EXPECT_EQ(test::read_file(file), content) << lost;
  }
  const Sets back = test::with(sets, {"training.steps=6", "eval.interval=0", "optimizer.lr=2"});
  evaluated(config("run", test::with(back, {"checkpoint.resume=" + checkpoint("run", 5)})));
  EXPECT_EQ(best("run"), early_best) << "the best of the way back, not of the future that it leaves";
}

TEST_F(BestOfARun, ThatIsLostGivesItsPlaceToTheNextEvaluation) {
  until(config("run", sets_), 4);
  evaluated(config("run", test::with(sets_, test::with(rising_, {"training.steps=6"}))));
  const int64_t least = best("run");
  ASSERT_LT(least, 6);
  fs::remove_all(checkpoint("run", least));
  const Error error = error_of([&] { best("run"); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr(checkpoint_name(least) + ": there is no such checkpoint folder"));
  const Evaluated rest = evaluated(config("run", test::with(sets_, test::with(rising_, {"training.steps=8"}))));
  EXPECT_EQ(best("run"), rest.best());
}

TEST_F(BestOfARun, IsExportedAtTheEndBesideTheLast) {
  until(config("run", sets_), 4);
  const TrainSummary summary = evaluated(config("run", test::with(sets_, test::with(rising_, {"checkpoint.export={}"})))).summary;
  EXPECT_EQ(summary.exit, ExitCode::ok);
  const int64_t least = best("run");
  ASSERT_LT(least, 12);
  for (const int64_t step : {least, int64_t{12}})
    EXPECT_TRUE(fs::exists(run_folder("run") + "/exports/" + checkpoint_name(step) + "/model.safetensors")) << step;
}

// Weights so large that no loss is a number, by which steps are skipped.
TEST_F(BestOfARun, HasALossThatIsANumber) {
  evaluated(config("base", {"training.steps=1"}));
  test::set_element(checkpoint("base", 1), "master.final_norm.weight", 3, 3e38F);
  test::set_element(checkpoint("base", 1), "master.output.weight", 3, 1e3F);
  const Evaluated run = evaluated(
      config("run", {"checkpoint.keep_best=true", "eval.first=true", "training.steps=1", "checkpoint.init_from=" + checkpoint("base", 1)}));
  ASSERT_EQ(run.losses.size(), 2U);
  for (const auto& [step, loss] : run.losses) EXPECT_FALSE(std::isfinite(loss)) << step;
  EXPECT_EQ(run.summary.best_checkpoint, "");
  EXPECT_FALSE(fs::exists(folder("run") + "/best"));
  EXPECT_THAT(steps("run"), ElementsAre(1)) << "the state at the end";
}

TEST_F(BestOfARun, OfARunThatStopsIsExportedByItsResume) {
  const Sets sets = test::with(sets_, {"checkpoint.export={}", "training.steps=6"});
  EXPECT_EQ(until(config("run", sets), 3).summary.exit, ExitCode::stopped);
  EXPECT_TRUE(fs::exists(folder("run") + "/best"));
  EXPECT_FALSE(fs::exists(run_folder("run") + "/exports"));
  evaluated(config("run", test::with(sets, {"checkpoint.resume=auto"})));
  EXPECT_TRUE(fs::exists(run_folder("run") + "/exports/" + checkpoint_name(best("run"))));
}

// The first evaluation, before step 1, has the best one, too. A resume looks for exports that are missing.
TEST_F(BestOfARun, IsNotExportedBeforeTheEnd) {
  std::vector<int64_t> saved, exported;
  TrainEvents events;
  events.saved = [&](const SaveEvent& event) { saved.push_back(event.step); };
  events.exported = [&](const ExportEvent& event) { exported.push_back(event.step); };
  const Sets sets = test::with(sets_, {"checkpoint.export={}", "eval.first=true"});
  for (const bool resumed : {false, true}) {
    const std::string name = resumed ? "resumed" : "straight";
    if (resumed) {
      EXPECT_EQ(until(config(name, sets), 3).summary.exit, ExitCode::stopped);
      ASSERT_EQ(best(name), 2);
      EXPECT_FALSE(fs::exists(run_folder(name) + "/exports"));
    }
    saved.clear(), exported.clear();
    train(config(name, test::with(sets, {"checkpoint.resume=auto"})), {}, events);
    EXPECT_GT(saved.size(), 3U) << "the loss falls";
    std::vector<int64_t> expected = {12};
    if (best(name) != 12) expected.push_back(best(name));
    EXPECT_EQ(exported, expected) << name;
  }
}

// Its save was asked for, after it had been saved for being the best.
TEST_F(BestOfARun, IsExportedAtOnceIfItIsSavedByRequest) {
  std::vector<int64_t> exported;
  int64_t step = 0;
  TrainEvents events;
  events.step = [&](const StepEvent& event) { step = event.step; };
  events.exported = [&](const ExportEvent& event) { exported.push_back(event.step); };
  events.request = [&] { return step == 1 ? Request::save : Request::none; };
  train(config("run", test::with(sets_, {"checkpoint.export={}", "checkpoint.keep_latest=20"})), {}, events);
  EXPECT_EQ(exported.front(), 1) << "the first evaluation has the best one";
}

// Every export that was promised decides how the run ends: a byte of the best checkpoint is damaged when the last one is saved.
TEST_F(BestOfARun, EndsTheRunWithCodeSevenIfItCannotBeExported) {
  until(config("run", sets_), 4);
  const Sets rest = test::with(sets_, test::with(rising_, {"checkpoint.export={}"}));
  int64_t damaged = 0;
  TrainEvents events;
  events.saved = [&](const SaveEvent& event) {
    if (event.step != 12) return;
    damaged = best("run");
    test::flip_byte(checkpoint("run", damaged) + "/shard-00000.safetensors", 8000);
  };
  open_log({.console = false, .file = folder_ / "log.txt"});
  const TrainSummary summary = train(config("run", rest), {}, events);
  close_log();
  ASSERT_LT(damaged, 12);
  EXPECT_EQ(summary.exit, ExitCode::storage);
  EXPECT_EQ(summary.failed_saves, 1);
  EXPECT_TRUE(fs::exists(run_folder("run") + "/exports/" + checkpoint_name(12)));
  EXPECT_THAT(test::read_file(folder_ / "log.txt"),
              AllOf(HasSubstr(text("the export of step ", damaged, " is missing at the end of the run: ")),
                    HasSubstr("make it with mantissa export " + checkpoint("run", damaged) + "\n")));
}

TEST_F(BestOfARun, IsTheSameOnSeveralRanks) {
  const Sets sets = test::with(sets_, {"training.accumulation=tree", "training.threads=1", "checkpoint.interval=1"});
  const Evaluated alone = evaluated(config("alone", sets));
  std::mutex guard;
  std::map<int64_t, double> losses;
  const auto failures = test::run_ranks(2, [&](const Communicator& world) {
    const Evaluated run = evaluated(config("ranks", test::with(sets, {"parallel.data=2", "training.grad_accum=1"})), {}, world);
    const std::scoped_lock lock(guard);
    if (world.rank() == 0) losses = run.losses;
  });
  EXPECT_THAT(failures, ::testing::Each(::testing::IsEmpty()));
  EXPECT_EQ(losses, alone.losses);
  EXPECT_EQ(best("ranks"), best("alone"));
  EXPECT_EQ(steps("ranks"), steps("alone"));
}

TEST_F(BestOfARun, ThatIsSavedButNotNamedIsTheBestOfEveryRank) {
  const Sets sets = test::with(sets_, {"eval.first=true", "optimizer.lr=2", "schedule.warmup_steps=0", "parallel.data=2",
                                       "training.grad_accum=1", "training.accumulation=tree", "training.threads=1"});
  const fs::path in_the_way = folder("ranks") + "/best.tmp";
  const auto failures = test::run_ranks(2, [&](const Communicator& world) {
    TrainEvents events;  // rank 0 alone is told
    events.evaluated = [&](const EvaluationEvent& event) { event.step == 0 ? fs::create_directory(in_the_way) : fs::remove(in_the_way); };
    EXPECT_EQ(train(config("ranks", sets), {}, events, world).failed_saves, 1);
  });
  EXPECT_THAT(failures, ::testing::Each(::testing::IsEmpty()));
  EXPECT_EQ(best("ranks"), 0);
}

}  // namespace mantissa::best_checkpoint_test
