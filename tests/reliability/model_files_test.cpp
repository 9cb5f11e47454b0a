// Import and export while files change under them, and what of them is on the disk when they end.
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
  // File by file, as a download that goes on.
  void replace_with(const std::string& model, const std::string& folder) const {
    for (const auto& entry : fs::directory_iterator(path(model))) {
      const std::string name = entry.path().filename().string();
      fs::copy_file(entry.path(), path(folder + "/new"));
      fs::rename(path(folder + "/new"), path(folder + "/" + name));
    }
  }
  std::string shard(const std::string& checkpoint) const { return test::read_file(path(checkpoint + "/shard-00000.bin")); }
};

// At every file that is opened, and whenever something is written: what comes out is one of the two models, or nothing.
TEST_F(ModelFiles, AnImportNeverMixesTwoModels) {
  make_models();
  import_model(path("a"), path("of a"));
  import_model(path("b"), path("of b"));
  int refused = 0;
  for (const char* const operation : {"open", "pwrite", "pread"}) {
    for (int at = 1;; at += operation == std::string("open") ? 1 : 7) {
      fs::remove_all(path("model"));
      fs::copy(path("a"), path("model"));
      arm_fault({.kind = Fault::other, .at = at, .only = operation, .action = [&] { replace_with("b", "model"); }});
      const auto failed = [&]() -> std::optional<Error> {
        try {
          import_model(path("model"), path("out"));
        } catch (const Error& error) {
          return error;
        }
        return {};
      }();
      const bool reached = disarm_fault();
      if (failed) {
        ++refused;
        EXPECT_EQ(failed->code(), ExitCode::data) << operation << ' ' << at << ": " << failed->what();
        EXPECT_THAT(failed->what(), HasSubstr("was changed or replaced while the model was read")) << operation << ' ' << at;
        EXPECT_FALSE(fs::exists(path("out")));
      } else {
        EXPECT_THAT(shard("out"), AnyOf(shard("of a"), shard("of b"))) << operation << ' ' << at;
        fs::remove_all(path("out"));
      }
      if (!reached) break;
    }
  }
  EXPECT_GT(refused, 10);
}

TEST_F(ModelFiles, AModelIsNotLoadedWhileItIsReplaced) {
  make_models();
  arm_fault({.kind = Fault::other, .at = 4, .only = "pread", .action = [&] { replace_with("b", "a"); }});
  const Error error = test::error_of([&] { load_model(path("a")); });
  EXPECT_TRUE(disarm_fault());
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("was changed or replaced"));
}

// Written in place, so that only the times tell; and a file that was not there before.
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

// Damage on the way to the disk, before the checkpoint has its name.
TEST_F(ModelFiles, AnImportIsReadBack) {
  make_models();
  const auto damage = [&] {
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      const fs::path file = entry.path() / "shard-00000.bin";
      if (!entry.path().filename().string().starts_with(".tmp-") || !fs::exists(file)) continue;
      std::string bytes = test::read_file(file);
      bytes[bytes.size() / 2] ^= 1;
      test::write_file(file, bytes);
    }
  };
  arm_fault({.kind = Fault::other, .at = 2, .only = "open", .path = "manifest.json", .action = damage});
  const Error error = test::error_of([&] { import_model(path("a"), path("out")); });
  EXPECT_TRUE(disarm_fault());
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_FALSE(fs::exists(path("out")));
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
  std::vector<SaveEvent> saves;
  TrainEvents events;
  events.saved = [&](const SaveEvent& event) { saves.push_back(event); };
  arm_fault({.kind = Fault::other, .at = 1, .only = "unlinkat", .action = [&] { fs::create_directories(taken); }});
  const TrainSummary summary = train(config, {"test"}, events);
  EXPECT_TRUE(disarm_fault());
  EXPECT_EQ(summary.steps, 4);
  ASSERT_EQ(saves.size(), 2U);
  EXPECT_THAT(saves[0].problem, StartsWith("export: "));
  EXPECT_NE(saves[0].path, "");
  EXPECT_EQ(saves[1].problem, "");
  EXPECT_NE(saves[1].exported, "");
}

}  // namespace mantissa::model_files_test
