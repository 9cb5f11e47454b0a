// Exports while files change under them, and the state of exports on the disk when they end.
#include "exports.h"
#include "reliability/fault_injection.h"

namespace mantissa::model_files_test {

namespace fs = std::filesystem;
using test::arm_fault;
using test::disarm_fault;
using test::Fault;
using test::HfFolder;
using test::kShape;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class ModelFiles : public test::ExportTest {
 protected:
  ~ModelFiles() override { disarm_fault(); }

  // Two models of one shape, each with files of its own beside the weights.
  void make_models() const {
    const HfFolder a(path("a"), "qwen3_moe", "BF16");
    HfFolder b = a;
    for (const std::string& name : a.names()) b = b.flip(name, 0, 1);
    b.write(path("b"));
    for (const std::string model : {"a", "b"}) {
      test::write_file(path(model + "/tokenizer.json"), R"({"of": ")" + model + "\"}");
      test::write_file(path(model + "/generation_config.json"), model == "a" ? R"({"eos_token_id": 1})" : R"({"eos_token_id": 2})");
    }
  }
  // Replaces file by file, like a download that goes on.
  void replace_with(const std::string& model, const std::string& folder) const {
    for (const auto& entry : fs::directory_iterator(path(model))) {
      const std::string name = entry.path().filename().string();
      fs::copy_file(entry.path(), path(folder + "/new"));
      fs::rename(path(folder + "/new"), path(folder + "/" + name));
    }
  }
  // The contents of an export, without the name of the folder that it was made from.
  std::string exported(const std::string& folder) const {
    std::string all;
    for (const char* const name : {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"})
      all += test::read_file(path(folder + "/" + name));
    return all;
  }
  // All values of a model that was loaded.
  static std::vector<float> weights_of(const LoadedModel& loaded) {
    std::vector<float> all;
    for (const Parameter& parameter : loaded.model->parameters().all()) {
      const std::vector<float> values = to_host<float>(converted(parameter.value(), Dtype::f32));
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
  // use() meets the replacement of a by b before each open and many other operations; check() sees what it made, unless it refused. Returns
  // how often it refused.
  int refusals(const std::vector<std::string>& operations, const std::function<void()>& use, const std::function<void()>& check) const {
    int refused = 0;
    for (const std::string& operation : operations) {
      bool reached = true;
      for (int at = 1; reached; at += operation == "open" ? 1 : 13) {
        SCOPED_TRACE(text(operation, ' ', at));
        fs::remove_all(path("model"));
        fs::copy(path("a"), path("model"));
        arm_fault({.kind = Fault::other, .at = at, .only = operation, .action = [&] {
                     at % 2 == 0 ? replace_with("b", "model") : write_over_with("b", "model");
                   }});
        std::optional<Error> failed;
        try {
          use();
        } catch (const Error& error) {
          failed = error;
        }
        reached = disarm_fault();
        if (!failed) {
          check();
          continue;
        }
        ++refused;
        EXPECT_EQ(failed->code(), ExitCode::data) << failed->what();
        EXPECT_THAT(failed->what(), HasSubstr("was changed or replaced while the model was read"));
      }
    }
    return refused;
  }
  // Copies over the files, so that a file that is open changes while it is read, at a time that is a tick of the clock of files later: up
  // to 10 ms.
  void write_over_with(const std::string& model, const std::string& folder) const {
    fs::copy(path(model), path(folder), fs::copy_options::overwrite_existing);
    for (const auto& entry : fs::directory_iterator(path(folder)))
      fs::last_write_time(entry.path(), entry.last_write_time() + std::chrono::milliseconds(10));
  }
};

// The files change at every open, and whenever something is written: what comes out is one of the two models, or nothing.
TEST_F(ModelFiles, AnExportNeverMixesTwoModels) {
  make_models();
  export_to(path("a"), "of a");
  export_to(path("b"), "of b");
  const auto use = [&] {
    EXPECT_FALSE(fs::exists(path("out")));  // remains of one that was refused before
    export_to(path("model"), "out");
  };
  const int refused = refusals({"open", "pwrite", "pread"}, use, [&] {
    EXPECT_THAT(exported("out"), AnyOf(exported("of a"), exported("of b")));
    fs::remove_all(path("out"));
  });
  EXPECT_GT(refused, 10);
}

TEST_F(ModelFiles, ALoadedModelIsNeverOfTwoModels) {
  make_models();
  const std::vector<float> of_a = weights_of(load_model(path("a"), make_backend("cpu"))),
                           of_b = weights_of(load_model(path("b"), make_backend("cpu")));
  ASSERT_NE(of_a, of_b);
  std::optional<LoadedModel> loaded;
  const int refused = refusals(
      {"open", "pread"}, [&] { loaded = load_model(path("model"), make_backend("cpu")); },
      [&] {
        const std::vector<float> found = weights_of(*loaded);
        EXPECT_TRUE(found == of_a || found == of_b);
      });
  EXPECT_GT(refused, 5);
}

// The model changes while its last tensor is read: nothing opens a file after that.
TEST_F(ModelFiles, AModelThatIsWrittenInPlaceIsNotLoaded) {
  make_models();
  arm_fault({.only = "pread"});
  load_model(path("a"), make_backend("cpu"));
  disarm_fault();
  const int last = test::fault_state.operations;
  arm_fault({.kind = Fault::other, .at = last, .only = "pread", .action = [&] { write_over_with("b", "a"); }});
  const Error error = test::error_of([&] { load_model(path("a"), make_backend("cpu")); });
  EXPECT_TRUE(disarm_fault());
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("was changed or replaced"));
}

// The files are written in place, so that only the times tell; and a file appears that was not there before.
TEST_F(ModelFiles, ChangesThatKeepTheNameAreSeen) {
  make_models();
  for (const char* const name : {"config.json", "model.safetensors", "special_tokens_map.json"}) {
    HfWeights weights(path("a"));
    for (const char* const file : kTokenizerFiles) weights.file(file);
    EXPECT_NO_THROW(weights.require_unchanged());
    test::write_file(path(text("a/", name)), fs::exists(path(text("a/", name))) ? test::read_file(path(text("a/", name))) : "{}");
    const Error error = test::error_of([&] { weights.require_unchanged(); });
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_THAT(error.what(), StartsWith(path(text("a/", name)) + ": was changed"));
  }
}

// A power cut after the command returned takes nothing.
TEST_F(ModelFiles, EveryFileAndFolderIsOnTheDiskBeforeItHasItsName) {
  run("run", kShape);
  arm_fault({});
  export_to(checkpoint("run", 3), "export");
  disarm_fault();
  const std::vector<std::string> synced = test::fault_state.synced;
  for (const auto& entry : fs::directory_iterator(path("export"))) {
    const std::string name = entry.path().filename().string();
    EXPECT_THAT(synced, AnyOf(Contains(name), Contains(name + ".tmp"))) << name;
  }
  ASSERT_GT(synced.size(), 2U);
  EXPECT_THAT(synced[synced.size() - 2], ::testing::MatchesRegex("\\.tmp-export-[0-9a-f]+")) << "its entries, after the last of them";
  EXPECT_EQ(synced.back(), folder_.path().filename().string()) << "its name";
}

// The name is taken between the look at it and the writing: an error of usage to others, and here a save that failed.
TEST_F(ModelFiles, AnExportThatCannotBeMadeDoesNotEndTraining) {
  std::vector<std::string> sets = kShape;
  sets.insert(sets.end(), {"training.steps=4", "checkpoint.interval=2", "checkpoint.export={}"});
  const LoadedConfig config = this->config("run", sets);
  const std::string taken = run_folder("run") + "/exports/" + checkpoint_name(2);
  fs::create_directories(taken);
  test::write_file(taken + "/old", "");
  std::vector<ExportEvent> made;
  TrainEvents events;
  events.exported = [&](const ExportEvent& event) { made.push_back(event); };
  arm_fault({.kind = Fault::other, .at = 1, .only = "unlinkat", .action = [&] { fs::create_directories(taken); }});
  const TrainSummary summary = train(config, {"test"}, events);
  EXPECT_TRUE(disarm_fault());
  EXPECT_EQ(summary.steps, 4);
  ASSERT_EQ(made.size(), 2U);
  EXPECT_NE(made[0].problem, "");
  EXPECT_EQ(made[0].path, "");
  EXPECT_EQ(made[1].problem, "");
  EXPECT_NE(made[1].path, "");
}

}  // namespace mantissa::model_files_test
