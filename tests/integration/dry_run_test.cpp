// A dry run refuses what the run refuses, in the same words, and takes what the run takes.
#include <gmock/gmock.h>

#include "checkpoint_testing.h"
#include "exports.h"
#include "io/pending_folder.h"

namespace mantissa::dry_run_test {

using nlohmann::json;
using test::error_of;
using ::testing::HasSubstr;

class DryRun : public test::ExportTest {
 protected:
  // Returns the error that the dry run throws.
  Error refusal(const std::function<LoadedConfig()>& load) const {
    const std::vector<std::string> before = all_files();
    const Error error = error_of([&] { preview_run(load()); });
    EXPECT_EQ(all_files(), before) << "nothing is written";
    return error;
  }
  void expect_refused(const std::string& name, const std::vector<std::string>& sets, ExitCode code, const std::string& what) const {
    SCOPED_TRACE(::testing::PrintToString(sets));
    const auto load = [&] { return config(name, sets); };
    const Error dry = refusal(load), real = error_of([&] { run(load()); });
    EXPECT_EQ(dry.code(), code);
    EXPECT_EQ(real.code(), code);
    EXPECT_STREQ(dry.what(), real.what());
    EXPECT_THAT(dry.what(), HasSubstr(what));
  }
  std::vector<std::string> all_files() const {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_.path())) files.push_back(entry.path().string());
    std::ranges::sort(files);
    return files;
  }
};

TEST_F(DryRun, RefusesAFolderOrACheckpointToStartFromThatDoesNotFit) {
  const std::string from = "checkpoint.init_from=", first = trained("first", {});
  std::vector<std::string> shape = test::kShape;
  shape.emplace_back("precision.dtype=bf16");
  export_to(first, "hf");
  for (const std::string& path : {first, path("hf")}) {
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.begin(), from + path);
      more.insert(more.begin(), shape.begin(), shape.end());
      return more;
    };
    expect_refused("next", with({"model.rope_theta=500"}), ExitCode::usage, "has another model:\n  model.rope_theta");
    const auto change = [&](const std::string& key, const std::string& value) {
      return with({"model." + key + "=" + value, R"(checkpoint.allow_model_change=["model.)" + key + "\"]"});
    };
    expect_refused("next", change("intermediate_size", "64"), ExitCode::usage, "the model needs ");
    expect_refused("next", change("num_layers", "3"), ExitCode::usage, "layers.2.");
    expect_refused("next", with({"data.tokenizer=byte", "model.vocab_size=256", R"(checkpoint.allow_model_change=["model.vocab_size"])"}),
                   ExitCode::usage, path == first ? "master.embed.weight is " : "embed.weight is ");
    std::string shifted = test::second_order_text(20000);
    for (char& letter : shifted) ++letter;
    test::write_file(folder_ / "shifted.txt", shifted);
    expect_refused("next", with({"data.path=" + (folder_ / "shifted.txt")}), ExitCode::usage, "checkpoint.allow_tokenizer_change");
    EXPECT_NO_THROW(preview_run(config("next", with({})))) << path;
    EXPECT_EQ(run(config("next", with({"training.steps=1"}))).steps.size(), 1U);
    std::filesystem::remove_all(run_folder("next"));
  }
  std::filesystem::resize_file(first + "/manifest.json", 50);
  expect_refused("next", {from + first}, ExitCode::data, "manifest.json");
}

TEST_F(DryRun, RefusesACheckpointToGoOnFromThatIsOfAnotherRun) {
  run("first", {"training.steps=2"});
  for (const std::string& resume : {std::string("auto"), checkpoint("first", 2)}) {
    const auto with = [&](const std::string& set) {
      return std::vector<std::string>{"checkpoint.resume=" + resume, "training.steps=3", set};
    };
    expect_refused("first", with("training.steps=1"), ExitCode::usage, "training.steps: 1 is less than the 2 steps");
    expect_refused("first", with("model.intermediate_size=64"), ExitCode::usage, "is a checkpoint of another model");
    expect_refused("first", with("data.valid_fraction=0.2"), ExitCode::usage, "data.valid_fraction: 0.1 in the checkpoint, 0.2 here");
    expect_refused("first", with("precision.dtype=bf16"), ExitCode::usage, "checkpoint.allow_recipe_change");
    EXPECT_NO_THROW(preview_run(config("first", with("training.seed=1234"))));
  }
}

TEST_F(DryRun, RefusesWhatTheMemoryCannotHold) {
  const std::vector<std::string> sets = {"training.micro_batch_size=16777216", "model.num_layers=12"};
  const auto begin = [](const Error& error) {  // free memory changes
    const std::string what = error.what();
    return what.substr(0, what.find(", and "));
  };
  const Error dry = refusal([&] { return config("first", sets); }), real = error_of([&] { run("first", sets); });
  EXPECT_EQ(dry.code(), ExitCode::environment) << dry.what();
  EXPECT_EQ(begin(dry), begin(real));
  EXPECT_THAT(dry.what(), HasSubstr("not enough memory: training needs "));
  std::vector<std::string> allowed = sets;
  allowed.emplace_back("training.allow_memory_overcommit=true");
  EXPECT_NO_THROW(preview_run(config("first", allowed)));
}

TEST_F(DryRun, KnowsTheWorkOfStepsAndEvaluationsAndMeasuresForLongRuns) {
  const std::vector<std::string> sets = {"eval.interval=5", "eval.first=true", "training.steps=20"};
  const RunPreview brief = preview_run(config("brief", sets));
  const double windows = 2 * 4, evaluations = 5;  // 0, 5, 10, 15, 20
  EXPECT_DOUBLE_EQ(brief.evaluation_flops, brief.flops_per_token / 3.0 * 16 * windows * evaluations);
  EXPECT_EQ(brief.gemm_rate, std::nullopt) << "it would take longer than the run";
  const RunPreview last = preview_run(config("last", {"eval.interval=0", "training.steps=20"}));
  EXPECT_DOUBLE_EQ(last.evaluation_flops, brief.evaluation_flops / evaluations);
  const RunPreview whole = preview_run(config("whole", {"eval.interval=7", "eval.iters=null", "training.steps=7"}));
  EXPECT_DOUBLE_EQ(whole.evaluation_flops, whole.flops_per_token / 3.0 * 16 * static_cast<double>(whole.validation_windows));
  EXPECT_GT(preview_run(config("long", {"training.steps=1000000000"})).gemm_rate.value_or(0.0), 1e8);
}

TEST_F(DryRun, RefusesAFolderThatIsInUse) {
  run("first", {"training.steps=2"});
  expect_refused("first", {}, ExitCode::usage, "first: holds metrics or checkpoints of an earlier run");
  expect_refused("first", {"checkpoint.resume=" + checkpoint("first", 2), "checkpoint.dir=%d/others"}, ExitCode::usage,
                 "first: holds metrics or checkpoints of an earlier run");
  const FolderLock lock(run_folder("first") + "/checkpoints", "other");
  for (const char* const resume : {"never", "auto"})
    expect_refused("first", {text("checkpoint.resume=", resume), "training.steps=3"}, ExitCode::environment, "is in use by ");
}

}  // namespace mantissa::dry_run_test
