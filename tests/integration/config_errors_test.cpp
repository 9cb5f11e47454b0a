// Huge configurations, and those that are shipped: valid, and described by the committed schema. Messages about broken ones are in
// tests/golden/errors.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "mantissa/train/load_config.h"
#include "process.h"

namespace mantissa::config_errors_test {

using test::ProcessResult;
using test::read_file;
using test::repeated;
using test::run_mantissa;
using test::run_process;
using test::TemporaryFolder;
using test::write_file;
using ::testing::HasSubstr;

// The most memory that a process of this test has held so far, in bytes.
size_t most_resident() {
  rusage usage{};
  EXPECT_EQ(::getrusage(RUSAGE_CHILDREN, &usage), 0);
  return static_cast<size_t>(usage.ru_maxrss) * 1024;
}

TEST(HugeConfig, TakesMemoryInProportionToItsSizeAndPrintsFiftyErrors) {
  const TemporaryFolder folder;
  const auto many = [](const std::string& entry) { return "[" + repeated(entry + ",", 400'000 / (entry.size() + 1)) + entry + "]"; };
  std::string deep = many("1");
  for (int i = 0; i < 30; ++i) deep = "{\"" + std::string(10'000, 'k') + "\": " + deep + "}";
  for (const std::string& content :
       {deep, R"({"data": {"train": )" + many("{}") + "}}", R"({"data": {"train": )" + many("1") + "}}", R"({"x": )" + many("[]") + "}",
        R"({"eval": {"samples": {"prompts": )" + many("\"a\"") + "}}}", R"({"precision": {"rules": )" + many("{}") + "}}"}) {
    write_file(folder / "c.json", content);
    const ProcessResult result = run_mantissa({"config", "check", "c.json"}, folder.path());
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_LE(std::count(result.errors.begin(), result.errors.end(), '\n'), 52) << content.substr(0, 60);
    EXPECT_LE(most_resident(), 48 * content.size() + (64 << 20)) << content.substr(0, 60);
  }
}

std::filesystem::path source(const std::string& path) { return std::filesystem::path(MANTISSA_SOURCE_DIR) / path; }

std::vector<std::filesystem::path> shipped_configs() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(source("configs"))) {
    if (entry.path().extension() == ".json" && entry.path().filename() != "config.schema.json") files.push_back(entry.path());
  }
  return files;
}

TEST(ShippedConfigs, AreValidButForTheDataTheyName) {
  EXPECT_GE(shipped_configs().size(), 4u);
  for (const auto& file : shipped_configs()) {
    RunConfig config;
    ConfigReport report;
    read_config({.file = file.string()}, fields_of(config), report);
    const bool tunes = file.stem() == "qat" || file.stem() == "qad";
    if (tunes || file.stem() == "finetune") config.model.vocab_size = 300;      // its model is that of a folder
    if (tunes) config.data.path = "text.txt", config.training.teacher.reset();  // which the command line names
    resolve_run_config(config, report, file.string());
    EXPECT_NO_THROW(report.throw_if_failed()) << file;
  }
}

TEST(ShippedConfigs, QuickstartNeedsNothingButTheRepository) {
  const LoadedConfig loaded = load_run_config({.file = source("configs/quickstart.json")});
  EXPECT_THAT(effective_config(loaded.config, &loaded.report), HasSubstr("\"tokenizer\": \"byte\",  // "));
}

TEST(Schema, IsTheOneThatWasCommitted) {
  const ProcessResult result = run_mantissa({"config", "schema"}, "/");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output, read_file(source("configs/config.schema.json")))
      << "generate it again: mantissa config schema > configs/config.schema.json";
}

// Prints the file names of a folder whose contents the schema refuses.
constexpr const char* kRefused = R"(
import json, os, sys, jsonschema
schema = json.load(open(sys.argv[1]))
jsonschema.Draft202012Validator.check_schema(schema)
validator = jsonschema.Draft202012Validator(schema)
print(*sorted(name for name in os.listdir(sys.argv[2]) if not validator.is_valid(json.load(open(os.path.join(sys.argv[2], name))))))
)";

TEST(Schema, AcceptsWhatIsShippedAndRefusesWhatIsBroken) {
  const TemporaryFolder folder;
  if (run_process({"python3", "-c", "import jsonschema"}, folder.path()).exit_code != 0)
    GTEST_SKIP() << "python3-jsonschema is not installed";
  const auto add = [&](const std::string& name, const std::string& content) {
    write_file(folder / name, nlohmann::json::parse(content, nullptr, true, true).dump());  // without comments
  };
  for (const auto& file : shipped_configs()) add("good-" + file.stem().string(), read_file(file));
  add("good", effective_config(RunConfig{}));
  std::string bad;
  for (const char* const sections :
       {R"({"optimizer": {"lr": 0}})", R"({"model": {"norm": "rmsnorm"}})", R"({"optimizor": {}})", R"({"training": {"steps": 1.5}})",
        R"({"training": {"seed": -1}})", R"({"eval": {"samples": {"promts": []}}})", R"({"data": {"train": [{"path": 3}]}})"}) {
    const std::string name = std::string("bad-") + static_cast<char>('a' + (bad.size() + 1) / 6);
    bad += (bad.empty() ? "" : " ") + name;
    add(name, sections);
  }
  const ProcessResult found = run_process({"python3", "-c", kRefused, source("configs/config.schema.json"), folder.path()}, folder.path());
  EXPECT_EQ(found.output, bad + "\n") << found.errors;
}

}  // namespace mantissa::config_errors_test
