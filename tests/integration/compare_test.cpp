// `mantissa compare`: paired runs as child processes, what a second start repeats, failures and signals.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "base/parallel.h"
#include "metrics/run_metrics.h"
#include "process.h"
#include "training.h"

namespace mantissa::compare_test {

using nlohmann::json;
using test::ProcessResult;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kBlocks = "model.intermediate_size=64";  // a whole number of blocks

class Compare : public test::TrainingTest {
 protected:
  Compare() { test::write_file(folder_ / "c.json", effective_config(config("c", {kBlocks}).config)); }

  std::vector<std::string> words(const std::vector<std::string>& more) const {
    std::vector<std::string> all = {"compare", folder_ / "c.json", "--output", folder_ / "all"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  ProcessResult compare(const std::vector<std::string>& more) const { return test::run_mantissa(words(more), folder_.path()); }
  json result(const std::vector<std::string>& more) const {
    const ProcessResult done = compare(test::with(more, {"--json"}));
    EXPECT_EQ(done.exit_code, 0) << done.errors;
    return done.exit_code == 0 ? json::parse(done.output) : json();
  }
  std::string run_of(const std::string& name) const { return folder_ / ("all/" + name); }
  // Starts it in the background, and waits until the log of a run holds this.
  std::unique_ptr<test::BackgroundProcess> started(const std::vector<std::string>& more, const std::string& run, const std::string& what) {
    std::vector<std::string> all = words(more);
    all.insert(all.begin(), MANTISSA_BINARY);
    auto process = std::make_unique<test::BackgroundProcess>(all, folder_.path(), folder_ / "output");
    const std::string log = run_of(run + ".log");
    EXPECT_TRUE(test::eventually([&] { return std::filesystem::exists(log) && test::read_file(log).find(what) != std::string::npos; }));
    return process;
  }
};

TEST_F(Compare, GivesTheLossesOfSingleRunsFromTheSameSeeds) {
  const json all = result({"--recipes", "high,mxfp4_qat", "--seeds", "2"});
  for (size_t r = 0; r < 2; ++r) {
    for (int seed = 1; seed <= 2; ++seed) {
      const std::string recipe = r == 0 ? "high" : "mxfp4_qat";
      const test::TrainedRun alone = run(text(recipe, seed), {kBlocks, "precision.recipe=" + recipe, text("training.seed=", seed)});
      EXPECT_EQ(all["recipes"][r]["losses"][static_cast<size_t>(seed) - 1].get<double>(), alone.valid_losses.back()) << recipe << seed;
    }
  }
  const json& second = all["recipes"][1];
  EXPECT_GT(second["cosines"].size(), 0U);
  EXPECT_NE(second["difference"]["mean"], 0.0);
  EXPECT_GT(second["bytes_per_weight"], all["recipes"][0]["bytes_per_weight"]) << "codes beside the values";
  EXPECT_TRUE(second["difference"]["half_width"].is_number());
  EXPECT_TRUE(std::filesystem::exists(run_of("report.html")));
  EXPECT_EQ(json::parse(test::read_file(run_of("compare.json"))), all);
  EXPECT_THAT(test::read_file(run_of("report.html")), HasSubstr("\"comparison\":{\"title\":\""));
  EXPECT_FALSE(std::filesystem::exists(run_of("high-seed1/checkpoints"))) << "a finished run needs none";
}

TEST_F(Compare, RepeatsNothingAndTakesMoreSeedsAndRecipes) {
  const json first = result({"--recipes", "high,mxfp8", "--seeds", "1"});
  const std::string metrics = test::read_file(run_of("high-seed1/metrics.jsonl"));
  const ProcessResult again = compare({"--recipes", "mxfp8,high,mxfp4_qat", "--seeds", "2", "--jobs", "1"});
  EXPECT_EQ(again.exit_code, 0) << again.errors;
  EXPECT_EQ(test::read_file(run_of("high-seed1/metrics.jsonl")), metrics);
  EXPECT_THAT(again.errors, HasSubstr("compare: 2 of 6 runs have finished before\n"));
  EXPECT_THAT(again.output, HasSubstr("\nmxfp8 ")) << "the first one is the baseline";
  EXPECT_EQ(first["recipes"][0]["losses"][0], json::parse(test::read_file(run_of("compare.json")))["recipes"][1]["losses"][0]);
  EXPECT_FALSE(std::filesystem::exists(run_of("compare-part.json")));
  const ProcessResult fewer = compare({"--recipes", "mxfp8,high,mxfp4_qat", "--seeds", "1", "--set", "training.threads=1"});
  EXPECT_THAT(fewer.output, HasSubstr("all/compare-part.json, " + run_of("report-part.html; compare.json is kept, which has more runs")));
  EXPECT_EQ(json::parse(test::read_file(run_of("compare.json")))["seeds"], 2);
}

TEST_F(Compare, RefusesMoreRunsAtATimeThanCores) {
  for (const char* const jobs : {"0", "100000"}) {
    const ProcessResult refused = compare({"--recipes", "high,mxfp8", "--jobs", jobs});
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_THAT(refused.errors, HasSubstr("--jobs: must be 1 to "));
  }
  EXPECT_FALSE(std::filesystem::exists(run_of("")));
}

TEST_F(Compare, RefusesAFolderOfAnotherConfiguration) {
  ASSERT_EQ(compare({"--recipes", "high,mxfp8", "--seeds", "1"}).exit_code, 0);
  const ProcessResult other = compare({"--recipes", "high,mxfp8", "--seeds", "1", "--set", "optimizer.lr=0.02"});
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_THAT(other.errors, HasSubstr("all/high-seed1: is of another configuration: optimizer.lr is 0.01 there and 0.02 here"));
  std::filesystem::create_directories(run_of("mxfp4_qat-seed1"));
  test::write_file(run_of("mxfp4_qat-seed1/mine.txt"), "keep");
  const ProcessResult foreign = compare({"--recipes", "high,mxfp4_qat", "--seeds", "1"});
  EXPECT_EQ(foreign.exit_code, 2);
  EXPECT_THAT(foreign.errors, HasSubstr("mxfp4_qat-seed1: is no folder of a run of this comparison"));
  EXPECT_EQ(test::read_file(run_of("mxfp4_qat-seed1/mine.txt")), "keep");
}

// A finished run stays as long as what it read: the file of the data, a model to start from, a teacher.
TEST_F(Compare, RefusesAFinishedRunWhoseInputsChanged) {
  const std::string data = folder_ / "text.txt", content = test::read_file(data);
  run("base", {kBlocks, "training.steps=2"});
  run("teacher", {kBlocks, "training.steps=2"});
  const std::vector<std::string> words = {"--recipes", "high,mxfp8",
                                          "--seeds",   "1",
                                          "--set",     "training.steps=2",
                                          "--set",     "checkpoint.init_from=" + run_folder("base"),
                                          "--set",     "training.teacher=" + run_folder("teacher")};
  const json first = result(words);
  const auto refused = [&](const std::string& run) {
    const ProcessResult again = compare(words);
    EXPECT_EQ(again.exit_code, 2) << again.output;
    EXPECT_THAT(again.errors, HasSubstr(run_of(run) + ": "));
    EXPECT_THAT(again.errors, HasSubstr("; choose another --output, or delete the folder"));
    return again.errors;
  };
  std::string other = content;
  std::swap(other[100], other[101]);
  other[102] = other[102] == 'a' ? 'b' : 'a';
  test::write_file(data, other);
  EXPECT_THAT(refused("high-seed1"), HasSubstr("did not read what there is now: " + data + " was 20000 bytes with xxh64 "));
  std::vector<std::string> more = words;
  more[1] += ",mxfp4_qat";
  EXPECT_EQ(compare(more).exit_code, 2);
  EXPECT_FALSE(std::filesystem::exists(run_of("mxfp4_qat-seed1"))) << "nothing is trained beside it";
  test::write_file(data, content);
  for (const std::string name : {"base", "teacher"}) {
    std::filesystem::copy(run_folder(name), folder_ / "kept", std::filesystem::copy_options::recursive);
    run(name, {kBlocks, "training.steps=3", "checkpoint.resume=auto"});
    const std::string key = name == "base" ? "checkpoint.init_from" : "training.teacher";
    EXPECT_THAT(refused("high-seed1"), HasSubstr("did not read what there is now: " + key + " was "));
    std::filesystem::remove_all(run_folder(name));
    std::filesystem::rename(folder_ / "kept", run_folder(name));
  }
  EXPECT_EQ(result(words)["recipes"][0]["losses"], first["recipes"][0]["losses"]) << "all is as it was";
  std::filesystem::remove(run_of("mxfp8-seed1.inputs.json"));
  EXPECT_THAT(refused("mxfp8-seed1"), HasSubstr("there is no mxfp8-seed1.inputs.json beside it, which would say what it read"));
  std::filesystem::remove_all(run_of("mxfp8-seed1"));
  EXPECT_EQ(result(words)["recipes"][1]["losses"], first["recipes"][1]["losses"]) << "the folder alone is begun again";
}

// A run that goes on has begun with what there was then, and runs of one comparison must not differ in what they read.
TEST_F(Compare, RefusesInputsThatChangeBetweenItsRuns) {
  run("base", {kBlocks, "training.steps=2"});
  const std::vector<std::string> sets = {"--recipes", "high,mxfp8",         "--seeds", "1",
                                         "--set",     "training.steps=300", "--set",   "checkpoint.init_from=" + run_folder("base")};
  std::vector<std::string> all = words(sets);
  all.insert(all.begin(), MANTISSA_BINARY);
  test::BackgroundProcess process(all, folder_.path(), folder_ / "output");
  ASSERT_TRUE(test::eventually([&] { return std::filesystem::exists(run_of("mxfp8-seed1.log")); }));
  run("base", {kBlocks, "training.steps=3", "checkpoint.resume=auto"});
  EXPECT_EQ(process.wait(), 2);
  EXPECT_THAT(process.output(), HasSubstr(run_of("high-seed1") + ": did not read what there is now: checkpoint.init_from was "));
  EXPECT_FALSE(std::filesystem::exists(run_of("compare.json")));
}

TEST_F(Compare, SaysWhatALayoutOfRanksIsToBe) {
  const std::vector<std::pair<std::string, std::string>> layouts = {{"parallel.data=2", "data 2, tensor 1, expert 1"},
                                                                    {"parallel.tensor=2", "data 1, tensor 2, expert 1"},
                                                                    {"parallel.expert=2", "data 1, tensor 1, expert 2"}};
  for (const auto& [layout, shown] : layouts) {
    const ProcessResult refused = compare({"--recipes", "high,mxfp8", "--set", layout});
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_THAT(refused.errors, HasSubstr("parallel asks for several ranks (" + shown + "), but compare trains each run as one process"));
    EXPECT_THAT(refused.errors, Not(HasSubstr("launch")));
  }
  test::write_file(folder_ / "ranks.json", R"({"parallel": {"data": 2}})");
  EXPECT_THAT(compare({"--recipes", "high," + (folder_ / "ranks.json")}).errors,
              HasSubstr("with the recipe ranks: parallel asks for several ranks (data 2"));
}

// A run that diverges is a figure of its recipe: the others go on, and it is not repeated.
TEST_F(Compare, CountsARunThatDiverged) {
  // A file of a recipe may change anything: here it is a rate that no run survives.
  const std::string hot = R"({"optimizer": {"lr": 1e30, "grad_clip": 0}, "training": {"nonfinite_limit": 1}})";
  test::write_file(folder_ / "hot.json", hot);
  const std::vector<std::string> recipes = {"--recipes", "high," + (folder_ / "hot.json") + ",mxfp8", "--seeds", "1"};
  const ProcessResult done = compare(recipes);
  EXPECT_EQ(done.exit_code, 0) << done.errors;
  EXPECT_THAT(done.errors, HasSubstr("compare: 2 of 3 | hot-seed1 | diverged | "));
  EXPECT_THAT(done.errors, HasSubstr("compare: 3 of 3 | mxfp8-seed1 | loss "));
  EXPECT_THAT(done.output, HasSubstr("\ndiverged: hot-seed1; "));
  const json found = json::parse(test::read_file(run_of("compare.json")));
  EXPECT_EQ(found["recipes"][1]["diverged_seeds"], json({1}));
  EXPECT_TRUE(found["recipes"][1]["loss"].is_null());
  EXPECT_TRUE(found["recipes"][2]["difference"]["mean"].is_number());
  const ProcessResult again = compare(recipes);
  EXPECT_EQ(again.output, done.output);
  EXPECT_EQ(again.errors, "");
  std::filesystem::remove_all(run_of("hot-seed1"));
  EXPECT_THAT(compare(recipes).errors, HasSubstr("compare: 3 of 3 | hot-seed1 | diverged")) << "without its folder it begins again";
}

TEST_F(Compare, SavesWhatASignalStopsAndGoesOn) {
  // Evaluations before the end make no run a finished one.
  const std::vector<std::string> long_runs = {"--recipes", "high,mxfp8",       "--seeds",           "1", "--set", "training.steps=1000",
                                              "--set",     "eval.interval=20", "--keep-checkpoints"};
  {
    const auto process = started(long_runs, "high-seed1", "step    50/");
    process->send(SIGUSR2);
    EXPECT_TRUE(test::eventually([&] { return std::filesystem::exists(run_of("high-seed1/checkpoints/latest")); }))
        << "runs are asked to save";
    const ProcessResult second = compare(long_runs);
    EXPECT_EQ(second.exit_code, 3);
    EXPECT_THAT(second.errors, HasSubstr("mantissa compare")) << "the folder is taken";
    process->send(SIGINT);
    EXPECT_EQ(process->wait(), 75);
    EXPECT_THAT(process->output(), HasSubstr("compare: stopped | 0 of 2 runs have finished; the same command continues"));
  }
  EXPECT_TRUE(std::filesystem::exists(run_of("high-seed1/checkpoints/latest")));
  EXPECT_FALSE(std::filesystem::exists(run_of("mxfp8-seed1"))) << "it had not begun";
  const json found = result(long_runs);
  EXPECT_THAT(test::read_file(run_of("high-seed1.log")), AllOf(HasSubstr("step    50/"), HasSubstr("continues at "))) << "it is kept";
  EXPECT_EQ(found["recipes"][0]["losses"][0].get<double>(),
            run("alone", {kBlocks, "training.steps=1000", "training.seed=1", "eval.interval=20"}).valid_losses.back());
  EXPECT_TRUE(std::filesystem::exists(run_of("high-seed1/checkpoints/latest"))) << "--keep-checkpoints";
}

const std::vector<std::string> kEndless = {"--recipes", "high,mxfp8", "--seeds", "1", "--set", "training.steps=100000000"};

TEST_F(Compare, NamesTheRunThatFailedAndItsLog) {
  const auto process = started(kEndless, "high-seed1", "step    10/");
  const std::vector<std::string> runs = test::children_of(process->pid());
  ASSERT_EQ(runs.size(), 1U);
  ASSERT_EQ(::kill(std::stoi(runs[0]), SIGKILL), 0);
  EXPECT_EQ(process->wait(), 128 + SIGKILL);
  EXPECT_THAT(process->output(), HasSubstr("high-seed1: training ended with exit code 137; it printed " + run_of("high-seed1.log") +
                                           "; once that is mended, the same command goes on where the runs were"));
  EXPECT_FALSE(std::filesystem::exists(run_of("mxfp8-seed1"))) << "nothing is begun after a failure";
}

TEST_F(Compare, ASecondInterruptKillsRuns) {
  const auto process = started(kEndless, "high-seed1", "step    10/");
  // A run that does not react: it is stopped, as one that waits for a disk would be.
  const std::vector<std::string> runs = test::children_of(process->pid());
  ASSERT_EQ(runs.size(), 1U);
  ASSERT_EQ(::kill(std::stoi(runs[0]), SIGSTOP), 0);
  process->send(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  process->send(SIGINT);
  EXPECT_EQ(process->wait(), 128 + SIGINT);
  EXPECT_TRUE(test::ends(std::stoi(runs[0])));
  EXPECT_FALSE(std::filesystem::exists(run_of("mxfp8-seed1")));
}

TEST_F(Compare, EndsWithARunThatSomebodyStops) {
  const auto process = started(kEndless, "high-seed1", "step    10/");
  const std::vector<std::string> runs = test::children_of(process->pid());
  ASSERT_EQ(runs.size(), 1U);
  ASSERT_EQ(::kill(std::stoi(runs[0]), SIGTERM), 0);
  EXPECT_EQ(process->wait(), 75);
  EXPECT_THAT(process->output(), HasSubstr("compare: stopped | 0 of 2 runs have finished"));
  EXPECT_FALSE(std::filesystem::exists(run_of("mxfp8-seed1")));
}

TEST_F(Compare, LeavesNoRunBehindWhenItIsKilled) {
  const auto process = started(kEndless, "high-seed1", "step    10/");
  const std::vector<std::string> runs = test::children_of(process->pid());
  ASSERT_EQ(runs.size(), 1U);
  process->send(SIGKILL);
  EXPECT_EQ(process->wait(), 128 + SIGKILL);
  EXPECT_TRUE(test::ends(std::stoi(runs[0])));
  EXPECT_TRUE(std::filesystem::exists(run_of("high-seed1/checkpoints/latest"))) << "it saved first";
}

// The current call says nothing about times of runs that finished before it.
TEST_F(Compare, RemembersHowTimesWereMeasured) {
  const auto state = [&](const std::string& run) { return json::parse(test::read_file(run_of(run + ".state.json"))); };
  ASSERT_EQ(compare({"--recipes", "high,mxfp8", "--seeds", "1", "--set", "training.threads=1"}).exit_code, 0);
  EXPECT_EQ(state("high-seed1")["starts"], (json::parse(R"([{"at_a_time": 1, "threads": 1}])")));
  const ProcessResult more = compare({"--recipes", "high,mxfp8,mxfp4_qat", "--seeds", "1", "--set", "training.threads=2"});
  EXPECT_EQ(more.exit_code, 0) << more.errors;
  EXPECT_THAT(more.output, AllOf(HasSubstr("c.json | 20 steps | 1 seed\n"),
                                 HasSubstr("\ntimes were not measured alike (high 1 at a time with "
                                           "1 thread, mxfp8 1 at a time with 1 thread, mxfp4_qat 1 at a time with 2 threads), so ")));
  const json found = json::parse(test::read_file(run_of("compare.json")));
  EXPECT_TRUE(found["recipes"][1]["time"].is_number());
  EXPECT_TRUE(found["recipes"][2]["time"].is_null());
  std::filesystem::remove_all(run_of("mxfp4_qat-seed1"));
  EXPECT_THAT(compare({"--recipes", "high,mxfp8,mxfp4_qat", "--seeds", "1", "--set", "training.threads=1"}).output,
              HasSubstr("| 1 seed | 1 run at a time, 1 thread each\n"))
      << "a run that begins again is measured again";
  if (num_threads() < 2) return;
  ASSERT_EQ(compare({"--recipes", "bf16,fp32,mxfp8_te", "--seeds", "1", "--jobs", "2"}).exit_code, 0);
  EXPECT_TRUE(state("bf16-seed1")["starts"][0]["at_a_time"] == 2 || state("fp32-seed1")["starts"][0]["at_a_time"] == 2);
  EXPECT_EQ(state("mxfp8_te-seed1")["starts"][0]["at_a_time"], 1) << "once the first two had ended nothing ran beside it";
  ASSERT_EQ(compare({"--recipes", "bf16,fp8_block", "--seeds", "1", "--jobs", "2", "--match", "*.qkv"}).exit_code, 2);
  ASSERT_EQ(compare({"--recipes", "bf16,mxfp8_weights", "--seeds", "1", "--jobs", "2"}).exit_code, 0);
  EXPECT_EQ(state("mxfp8_weights-seed1")["starts"][0]["at_a_time"], 1) << "it was alone";
}

// A comparison reports every step, of which it takes the median.
TEST_F(Compare, MeasuresEveryStep) {
  test::write_file(folder_ / "rare.json", R"({"logging": {"interval": 100}})");
  ASSERT_EQ(compare({"--recipes", "high,mxfp8", "--seeds", "1", "--set-file", folder_ / "rare.json"}).exit_code, 0);
  EXPECT_EQ(read_run_metrics(run_of("high-seed1")).milliseconds.size(), 20U);
}

// Gradients of different shapes have no cosine, and the rest of the table is there.
TEST_F(Compare, TakesRecipesThatChangeTheModelOrItsLength) {
  test::write_file(folder_ / "wide.json", R"({"model": {"hidden_size": 64}})");
  test::write_file(folder_ / "short.json", R"({"training": {"steps": 10}})");
  const json found = result({"--recipes", "high, " + (folder_ / "wide.json") + " ," + (folder_ / "short.json"), "--seeds", "1"});
  const json& wide = found["recipes"][1];
  EXPECT_EQ(wide["cosines"], json::object());
  EXPECT_EQ(wide["no_cosines"], "the models differ: layers.0.attn.out is [64, 32], and [32, 32] in the baseline");
  EXPECT_TRUE(wide["loss"].is_number());
  EXPECT_TRUE(found["recipes"][0]["no_cosines"].is_null());
  const json& small = found["recipes"][2];
  EXPECT_EQ(small["steps"], 10);
  EXPECT_EQ(small["tokens_per_step"], 128);
  EXPECT_GT(small["cosines"].size(), 0U);
  EXPECT_TRUE(found["steps"].is_null());
}

TEST_F(Compare, SaysWhyAModelThatIsItsOwnTeacherHasNoCosine) {
  run("base", {kBlocks, "training.steps=2"});
  const json found =
      result({"--recipes", "high,mxfp8", "--seeds", "1", "--set", "training.steps=2", "--set", "checkpoint.init_from=" + run_folder("base"),
              "--set", "training.teacher=self", "--set", "optimizer.weight_decay=0"});
  EXPECT_EQ(found["recipes"][0]["no_cosines"], "the gradients of its first step are all 0, as where a model is its own teacher");
  EXPECT_EQ(found["recipes"][1]["no_cosines"], "the gradients of the baseline's first step are all 0, as where a model is its own teacher");
}

TEST_F(Compare, RefusesAFolderThatNoComparisonMade) {
  std::filesystem::create_directories(run_of(""));
  test::write_file(run_of("mine.txt"), "keep");
  const ProcessResult refused = compare({"--recipes", "high,mxfp8", "--seeds", "1"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.errors, HasSubstr("all: is not empty, and no comparison made it; choose another --output"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(run_of("")), {}), 1);
  std::filesystem::remove(run_of("mine.txt"));
  test::write_file(run_of("LOCK"), "");
  EXPECT_EQ(compare({"--recipes", "high,mxfp8", "--seeds", "1", "--set", "training.steps=1"}).exit_code, 0) << "one that ended at once";
}

// Any folder, threads of the configuration, and others by the next start.
TEST_F(Compare, TakesFoldersAndThreadsAsTheyAreGiven) {
  const std::string folder = folder_ / "100%n";
  const auto compared = [&](const std::string& recipes, const std::vector<std::string>& more) {
    const ProcessResult done = test::run_mantissa(
        test::with({"compare", folder_ / "c.json", "--recipes", recipes, "--seeds", "1", "--output", folder, "--json"}, more),
        folder_.path());
    EXPECT_EQ(done.exit_code, 0) << done.errors;
    return json::parse(done.output);
  };
  const json first = compared("high,mxfp8,mxfp8_te", {"--set", "training.threads=1", "--keep-checkpoints"});
  const ProcessResult wider = test::run_mantissa({"compare", folder_ / "c.json", "--recipes", "high,mxfp8,mxfp8_te", "--seeds", "1",
                                                  "--output", folder, "--set", "training.threads=2", "--keep-checkpoints"},
                                                 folder_.path());
  EXPECT_EQ(wider.exit_code, 0) << wider.errors;
  EXPECT_EQ(first["threads"], 1);
  EXPECT_TRUE(std::filesystem::exists(folder + "/high-seed1/checkpoints"));
  const json again = compared("high,mxfp8,mxfp8_te", {}), two = compared("high,mxfp8_te", {});
  EXPECT_EQ(json::parse(test::read_file(folder + "/compare.json")), again) << "which a part of its runs does not replace";
  EXPECT_EQ(json::parse(test::read_file(folder + "/compare-part.json")), two);
  EXPECT_TRUE(std::filesystem::exists(folder + "/report-part.html"));
  EXPECT_FALSE(std::filesystem::exists(folder + "/high-seed1/checkpoints")) << "those of runs that have finished go";
  EXPECT_EQ(again["recipes"][2]["losses"], first["recipes"][2]["losses"]);
  EXPECT_EQ(two["recipes"][1]["cosines"], again["recipes"][2]["cosines"]) << "all have the same baseline";
  EXPECT_NE(again["recipes"][1]["cosines"], again["recipes"][2]["cosines"]);
}

// A run that was killed before its first save has metrics and nothing to go on from.
TEST_F(Compare, BeginsAgainWhereNothingWasSaved) {
  const json first = result({"--recipes", "high,mxfp8", "--seeds", "1"});
  const std::string metrics = test::read_file(run_of("high-seed1/metrics.jsonl"));
  test::write_file(run_of("high-seed1/metrics.jsonl"), metrics.substr(0, metrics.find("\"type\":\"eval\"") - 1));
  const json again = result({"--recipes", "high,mxfp8", "--seeds", "1"});
  EXPECT_EQ(again["recipes"][0]["losses"], first["recipes"][0]["losses"]);
}

TEST_F(Compare, GivesRecipesToModulesThatMatch) {
  ASSERT_EQ(compare({"--recipes", "high,mxfp4_qat", "--seeds", "1", "--match", "layers.1.*", "--set",
                     R"(precision.rules=[{"match": "layers.*", "recipe": "bf16"}])"})
                .exit_code,
            0);
  const json there = json::parse(test::read_file(run_of("mxfp4_qat-seed1/config.json")));
  EXPECT_EQ(there["precision"]["rules"],
            json::parse(R"([{"match": "layers.1.*", "recipe": "mxfp4_qat"}, {"match": "layers.*", "recipe": "bf16"}])"));
  EXPECT_EQ(there["precision"]["recipe"], "high");
  const ProcessResult other = compare({"--recipes", "high,mxfp4_qat", "--seeds", "1"});
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_THAT(other.errors,
              HasSubstr(": precision.rules.0.match is \"layers.1.*\" there and absent here, where --match gives a rule, too; "));
}

}  // namespace mantissa::compare_test
