// `mantissa explain` as a user sees it. The expected texts are made by scripts/golden_explain.sh: look at the difference before committing.
#include <gmock/gmock.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "process.h"

namespace mantissa {
namespace {

using nlohmann::json;
using test::ProcessResult;
using test::read_file;
using test::run_mantissa;
using test::TemporaryFolder;
using test::write_file;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::filesystem::path kGolden = std::filesystem::path(MANTISSA_SOURCE_DIR) / "tests" / "golden" / "explain";

std::vector<std::string> configs() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kGolden)) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

TEST(Explain, TenConfigurationsGiveTheExpectedText) {
  EXPECT_EQ(configs().size(), 10u);
  for (const std::string& name : configs()) {
    const ProcessResult result = run_mantissa({"explain", name + ".json"}, kGolden);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_EQ(result.output, read_file((kGolden / (name + ".txt")).string())) << name;
    EXPECT_THAT(result.errors, IsEmpty());
  }
}

TEST(Explain, JsonAndTextAgree) {
  for (const std::string& name : configs()) {
    const ProcessResult result = run_mantissa({"explain", "--json", name + ".json"}, kGolden);
    ASSERT_EQ(result.exit_code, 0) << result.errors;
    const json all = json::parse(result.output);
    const std::string text = read_file((kGolden / (name + ".txt")).string());
    EXPECT_THAT(text, HasSubstr("plan " + all.at("hash").get<std::string>()));
    EXPECT_THAT(text, HasSubstr("resident weights " + all.at("bytes").dump() + " B"));
    for (const json& warning : all.at("warnings")) EXPECT_THAT(text, HasSubstr("warning: " + warning.get<std::string>()));
    EXPECT_EQ(all.at("quantised_gemms").is_null(), text.find("emulated") == std::string::npos) << name;
    for (const json& entry : all.at("modules")) {
      EXPECT_THAT(text, HasSubstr(entry.at("recipe").get<std::string>()));
      const json& gemms = entry.at("gemms");
      for (const auto& [role, operands] : gemms.items()) EXPECT_THAT(text, HasSubstr(operands.get<std::string>())) << role;
    }
  }
}

// A model whose weights would not fit into any memory: 3e14 parameters.
TEST(Explain, NeedsNoMemoryForWeightsAndNoData) {
  const TemporaryFolder folder;
  write_file(folder / "c.json",
             R"({"model": {"vocab_size": 1048576, "hidden_size": 1048576, "num_layers": 20, "intermediate_size": 4194304},
    "precision": {"recipe": "mxfp8"}, "data": {"path": "nowhere.txt"}})");
  const ProcessResult result = run_mantissa({"explain", "c.json"}, folder.path());
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("layers.{0..19}.mlp.gate_up"));
}

TEST(Explain, TakesTheVocabularyFromTheTokenizer) {
  const TemporaryFolder folder;
  write_file(folder / "text.txt", "abcabcabc");
  write_file(folder / "c.json", R"({"data": {"path": "text.txt", "tokenizer": "char"}})");
  EXPECT_THAT(run_mantissa({"explain", "c.json"}, folder.path()).output, HasSubstr("[3, 512]"));
  const ProcessResult refused =
      run_mantissa({"explain", "c.json", "--set", "precision.recipe=mxfp8", "--set", "precision.fp8_output_proj=true"}, folder.path());
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.errors, HasSubstr("needs a padded vocabulary in multiples of 32, got 3: set model.pad_vocab_to to 32"));
}

TEST(Explain, NamesTheDeviceThatTheRunAsksFor) {
  const std::vector<std::string> command = {"explain", "high.json", "--set", "training.device=cpu_reference"};
  EXPECT_THAT(run_mantissa(command, kGolden).output, HasSubstr("device cpu_reference |"));
  std::vector<std::string> as_json = command;
  as_json.emplace_back("--json");
  EXPECT_EQ(json::parse(run_mantissa(as_json, kGolden).output).at("device"), "cpu_reference");
}

TEST(Explain, ARuleWithATypoExitsWith2AndNamesTheRightOne) {
  const TemporaryFolder folder;
  write_file(folder / "text.txt", std::string(5000, 'a'));
  write_file(folder / "c.json",
             "{\"data\": {\"path\": \"text.txt\", \"tokenizer\": \"byte\"},\n\"precision\": {\"recipe\": \"mxfp8\",\n"
             "\"rules\": [{\"match\": \"layers.*.mpl.*\", \"recipe\": \"high\"}]}}");
  const std::vector<std::vector<std::string>> commands = {{"explain", "c.json"},
                                                          {"explain", "c.json", "--json"},
                                                          {"config", "check", "c.json"},
                                                          {"train", "c.json", "--dry-run"},
                                                          {"train", "c.json"}};
  for (const auto& command : commands) {
    const ProcessResult result = run_mantissa(command, folder.path());
    EXPECT_EQ(result.exit_code, 2) << command.front();
    EXPECT_THAT(result.errors, HasSubstr("precision.rules.0.match: \"layers.*.mpl.*\" matches no module; nearest: \"layers.*.mlp.*\""));
    EXPECT_THAT(result.errors, HasSubstr("c.json:3:21")) << command.front();
    EXPECT_THAT(result.output, IsEmpty());
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "runs"));
}

TEST(Explain, ShippedRecipesFitTheShippedConfigurations) {
  const std::filesystem::path root = MANTISSA_SOURCE_DIR;
  for (const auto& recipe : std::filesystem::directory_iterator(root / "configs" / "recipes")) {
    const ProcessResult result = run_mantissa({"explain", "configs/quickstart.json", "--set-file", recipe.path().string()}, root);
    EXPECT_EQ(result.exit_code, 0) << recipe.path() << result.errors;
    EXPECT_THAT(result.output, HasSubstr("precision.recipe " + recipe.path().stem().string()));
  }
}

}  // namespace
}  // namespace mantissa
