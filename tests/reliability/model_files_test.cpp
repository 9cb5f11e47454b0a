// Import and export while files change under them.
#include "exports.h"
#include "reliability/fault_injection.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;
using test::arm_fault;
using test::disarm_fault;
using test::FamilyFolder;
using test::Fault;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class ModelFiles : public test::ExportTest {
 protected:
  ~ModelFiles() override { disarm_fault(); }

  // Two models of one shape, each with files of its own beside the weights.
  void make_models() const {
    const FamilyFolder a(path("a"), "qwen3_moe", "BF16");
    FamilyFolder b = a;
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
    FamilyWeights weights(path("a"));
    for (const char* const file : kCarriedFiles) weights.file(file);
    EXPECT_NO_THROW(weights.require_unchanged());
    test::write_file(path(text("a/", name)), fs::exists(path(text("a/", name))) ? test::read_file(path(text("a/", name))) : "{}");
    const Error error = test::error_of([&] { weights.require_unchanged(); });
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_THAT(error.what(), StartsWith(path(text("a/", name)) + ": was changed"));
  }
}

}  // namespace
}  // namespace mantissa
