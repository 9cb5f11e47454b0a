// `mantissa explain` as a user sees it. The expected texts are made by scripts/golden_explain.sh: look at the difference before committing.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "mantissa/base/printable.h"
#include "mantissa/base/text.h"
#include "process.h"

namespace mantissa::explain_test {

using nlohmann::json;
using test::ProcessResult;
using test::read_file;
using test::run_mantissa;
using test::TemporaryFolder;
using test::write_file;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::Not;

const std::filesystem::path kGolden = std::filesystem::path(MANTISSA_SOURCE_DIR) / "tests" / "golden" / "explain";

std::vector<std::string> configs() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kGolden)) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> lines_of(const std::string& output) {
  std::istringstream in(output);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The lines of the table, its head among them.
std::vector<std::string> table_of(const std::string& output) {
  const std::vector<std::string> lines = lines_of(output);
  const auto begin = std::find_if(lines.begin(), lines.end(), [](const std::string& line) { return line.starts_with("module "); });
  return {begin, std::find(begin, lines.end(), "")};
}

// What `explain` prints by default; no line is longer than 100 columns, and there are as many rows as in the wide table.
std::string narrow(const std::string& config, const std::filesystem::path& folder, const std::vector<std::string>& more = {}) {
  std::vector<std::string> command = {"explain", config};
  command.insert(command.end(), more.begin(), more.end());
  const ProcessResult result = run_mantissa(command, folder);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.errors, IsEmpty());
  for (const std::string& line : lines_of(result.output)) EXPECT_LE(line.size(), 100u) << line;
  command.emplace_back("--wide");
  EXPECT_EQ(table_of(result.output).size(), table_of(run_mantissa(command, folder).output).size());
  return result.output;
}

TEST(Explain, ThirteenConfigurationsGiveTheExpectedText) {
  EXPECT_EQ(configs().size(), 13u);
  for (const std::string& name : configs()) {
    EXPECT_EQ(narrow(name + ".json", kGolden), read_file((kGolden / (name + ".txt")).string())) << name;
    const ProcessResult wide = run_mantissa({"explain", "--wide", name + ".json"}, kGolden);
    EXPECT_EQ(wide.exit_code, 0) << wide.errors;
    EXPECT_EQ(wide.output, read_file((kGolden / (name + ".wide.txt")).string())) << name;
    EXPECT_THAT(wide.errors, IsEmpty());
  }
}

// A model of 1,000 layers, learned positions and GELU, every second layer under another recipe.
std::string deep_config(const std::string& recipe, const std::string& match) {
  return R"({"model": {"vocab_size": 1048576, "hidden_size": 1048576, "num_layers": 1000, "intermediate_size": 4194304, "position": "learned",
      "activation": "gelu_tanh", "norm": "layer", "norm_bias": true, "mlp_bias": true, "attention_bias": "all", "max_position_embeddings": 1024},
    "precision": {"recipe": ")" +
         recipe + R"(", "recipes": {")" + recipe + R"(": {"base": "mxfp8", "gemms": ["fprop"]}}, "rules": [{"match": ")" + match +
         R"(", "recipe": "mxfp4_qat_mxfp8_act"}]}, "training": {"seq_len": 512}, "data": {"path": "nowhere.txt"}})";
}

TEST(Explain, LongNamesAndManyLayersStayWithinAHundredColumns) {
  const TemporaryFolder folder;
  const std::string name = "from_" + std::string(120, 'n') + "_to";
  const std::string pattern = R"(re:layers\\.\\d*[02468]\\.()" + std::string(900, 'x') + "|mlp.*|.*out)";
  write_file(folder / "c.json", deep_config(name, pattern));
  const std::string output = narrow("c.json", folder.path());
  for (const char* const part :
       {"layers.{0,2,4,6,...,998}.mlp.up ", "layers.{1,3,5,...,999}.mlp.down ", "layers.{0,2,4,...,998}.attn.out ",
        "layers.{0..999}.mlp_norm ", "position ", "[4194304, 1048576]", "fro..._to ", "mxf...act ", " rules.0 ", "8.8 PiB"}) {
    EXPECT_THAT(output, HasSubstr(part));
  }
  const ProcessResult wide = run_mantissa({"explain", "--wide", "c.json"}, folder.path());
  EXPECT_THAT(wide.output, HasSubstr(name));
  EXPECT_THAT(wide.output, HasSubstr("994,996,998}.mlp.up "));
  EXPECT_THAT(wide.output, HasSubstr(std::string(900, 'x')));
  EXPECT_EQ(json::parse(run_mantissa({"explain", "--json", "c.json"}, folder.path()).output).at("modules").size(), 8004u);
}

TEST(Explain, RoomGoesToWhatIsLongestAndARuleKeepsItsKey) {
  const TemporaryFolder folder;
  const auto table = [&](const std::string& recipe, const std::string& match) {
    write_file(folder / "c.json",
               R"({"model": {"vocab_size": 50304, "num_layers": 12, "intermediate_size": 2048}, "data": {"path": "nowhere.txt"},
      "precision": {"recipe": ")" +
                   recipe + R"(", "recipes": {")" + recipe + R"(": {"base": "mxfp8"}}, "rules": [{"match": ")" + match +
                   R"(", "recipe": "high"}]}})");
    return narrow("c.json", folder.path());
  };
  const std::string both = table(std::string(40, 'r') + "_end", "layers.{0,1,2,3,4,5,6,7,8,9,10,11}.mlp.down");
  EXPECT_THAT(both, HasSubstr("layers.{0..11}.mlp.gate_up "));
  EXPECT_THAT(both, HasSubstr("rrrrrr...rr_end "));
  EXPECT_THAT(both, HasSubstr(R"(rules.0 "la...n" )"));
  const std::string layers = table("own", "layers.{0,2,4,6,8,10}.mlp.gate_up");
  EXPECT_THAT(layers, HasSubstr("layers.{0,2,4,6,8,10}.mlp.gate_up "));
  EXPECT_THAT(layers, HasSubstr("layers.{1,3,5,7,9,11}.mlp.gate_up "));
}

// A pattern may hold what a terminal obeys or several bytes a character.
TEST(Explain, PatternsAreCutBetweenCharacters) {
  const TemporaryFolder folder;
  std::string accents, controls;
  for (int i = 0; i < 60; ++i) accents += "\u00eb\u65e5\U0001f600", controls += "\\u0007";
  for (const std::string& text : {accents, "a" + accents, "ab" + accents, "abc" + accents, controls}) {
    write_file(folder / "c.json", R"({"model": {"vocab_size": 256}, "data": {"path": "nowhere.txt"},
      "precision": {"rules": [{"match": "re:.*out|)" +
                                      text + R"(", "recipe": "mxfp8"}]}})");
    const std::string output = narrow("c.json", folder.path());
    EXPECT_THAT(output, HasSubstr("rules.0 \"re:"));
    for (const std::string& line : lines_of(output)) EXPECT_EQ(printable(line), line);
  }
}

std::vector<std::filesystem::path> shipped_configs() {
  std::vector<std::filesystem::path> paths;
  for (const auto& config : std::filesystem::directory_iterator(std::filesystem::path(MANTISSA_SOURCE_DIR) / "configs")) {
    if (config.path().extension() == ".json" && config.path().filename() != "config.schema.json") paths.push_back(config.path());
  }
  return paths;
}

TEST(Explain, EveryPresetWithEveryShippedConfigurationStaysWithinAHundredColumns) {
  for (const std::filesystem::path& path : shipped_configs()) {
    for (const char* const recipe : {"high", "mxfp8", "mxfp8_weights", "mxfp4_qat", "mxfp4_qat_mxfp8_act"}) {
      const std::vector<std::string> sets = {
          "--set", "model.vocab_size=50304", "--set", "model.intermediate_size=12288", "--set", std::string("precision.recipe=") + recipe};
      EXPECT_THAT(narrow("configs/" + path.filename().string(), MANTISSA_SOURCE_DIR, sets), HasSubstr(recipe));
    }
  }
}

// The cells of a column of the narrow table.
std::vector<std::string> column_of(const std::string& output, const std::string& head) {
  const std::vector<std::string> table = table_of(output);
  if (table.empty()) return {};
  const size_t begin = table.front().find("  " + head + "  ");
  std::vector<std::string> cells;
  for (const std::string& line : table) cells.push_back(line.substr(begin + 2, line.find(' ', begin + 2) - begin - 2));
  return cells;
}

// Of a table whose ranks share weights nothing is cut to nothing: of a recipe its ends are left, of a rule its key.
void expect_recipes_and_rules(const std::string& output) {
  EXPECT_THAT(column_of(output, "recipe"), Contains("high"));
  for (const std::string& recipe : column_of(output, "recipe")) {
    EXPECT_THAT(recipe, MatchesRegex("recipe|high|mxfp8|mxfp4_qat_mxfp8_act|mxf[^ ]*\\.\\.\\.[^ ]*ct"));
  }
  for (const std::string& rule : column_of(output, "rule")) EXPECT_THAT(rule, MatchesRegex("rule|recipe|-|rules\\.[01]"));
}

TEST(Explain, EveryShippedConfigurationOnRanksThatShareWeightsStaysWithinAHundredColumns) {
  const std::string rules =
      R"(precision.rules=[{"match": "layers.0.*", "recipe": "high"}, {"match": "layers.*.down", "recipe": "mxfp4_qat_mxfp8_act"}])";
  for (const std::filesystem::path& path : shipped_configs()) {
    const bool experts = read_file(path.string()).find("num_experts") != std::string::npos;
    for (const auto& [tensor, expert] : {std::pair{2, 1}, {1, 4}, {2, 2}, {4, 8}}) {
      if (expert > 1 && !experts) continue;
      std::vector<std::string> words = {"--world", std::to_string(tensor * expert), "--set", "precision.recipe=mxfp8", "--set", rules};
      for (const std::string& set :
           {text("parallel.data=", expert), text("parallel.tensor=", tensor), text("parallel.expert=", expert),
            text("training.global_batch_size=null"), text("training.grad_accum=1"), text("model.vocab_size=50304"),
            text("model.num_attention_heads=16"), text("model.num_key_value_heads=16"), text("model.intermediate_size=12288")}) {
        words.insert(words.end(), {"--set", set});
      }
      SCOPED_TRACE(text(path, " tensor ", tensor, " expert ", expert));
      const std::string output = narrow("configs/" + path.filename().string(), MANTISSA_SOURCE_DIR, words);
      EXPECT_THAT(output, HasSubstr(text(tensor * expert, " ranks: data ", expert)));
      expect_recipes_and_rules(output);
    }
  }
}

// "experts / ranks" of the shape, whole where nothing is divided; the wide table has the shape and what a rank holds, in full.
TEST(Explain, TheNarrowTableDividesTheShapeByTheRanks) {
  const std::vector<std::string> words = {"--world",           "16",    "--set",          "parallel.tensor=2", "--set",
                                          "parallel.expert=8", "--set", "parallel.data=8"};
  const std::string output = narrow("configs/qwen3-moe-30b-a3b.json", MANTISSA_SOURCE_DIR, words);
  for (const char* const part :
       {"shape/ranks", " [128/8, 1536/2, 2048] ", " [128/8, 2048, 768/2] ", " [128, 2048] ", " [2048] ", " [151936/2, 2048] ",
        "16 ranks: data 8 x tensor 2, experts over 8 data ranks", "36.0 GiB", "memory of a rank | total "}) {
    EXPECT_THAT(output, HasSubstr(part));
  }
  EXPECT_THAT(output, Not(HasSubstr("on a rank  ")));
  std::vector<std::string> wide = {"explain", "--wide", "configs/qwen3-moe-30b-a3b.json"};
  wide.insert(wide.end(), words.begin(), words.end());
  const std::string all = run_mantissa(wide, MANTISSA_SOURCE_DIR).output;
  for (const char* const part : {" [128, 1536, 2048] ", " experts rows [16, 768, 2048] ", " experts columns [16, 2048, 384] ", " whole ",
                                 "38654705664\n", "layers.{0..47}.moe.experts.gate_up "}) {
    EXPECT_THAT(all, HasSubstr(part));
  }
}

// Shapes beyond all models take room from the module alone.
TEST(Explain, HugeShapesOnManyRanksStayWithinAHundredColumns) {
  const TemporaryFolder folder;
  write_file(folder / "c.json",
             R"({"model": {"vocab_size": 1048576, "hidden_size": 1048576, "num_layers": 1000, "num_attention_heads": 4096,
      "intermediate_size": 4194304, "moe": {"num_experts": 4096, "num_experts_per_tok": 2, "intermediate_size": 4194304}},
    "precision": {"recipe": "mxfp4_qat_mxfp8_act"}, "parallel": {"data": 1024, "tensor": 64, "expert": 1024},
    "training": {"seq_len": 512, "micro_batch_size": 1, "global_batch_size": 1024}, "data": {"path": "nowhere.txt"}})");
  const std::string output = narrow("c.json", folder.path());
  EXPECT_THAT(output, HasSubstr(" [4096/1024, 8388608/64, 1048576] "));
  EXPECT_THAT(output, HasSubstr(" mxf...ct "));
  EXPECT_THAT(output, HasSubstr("EiB"));
}

TEST(Explain, JsonAndTextAgree) {
  for (const std::string& name : configs()) {
    const ProcessResult result = run_mantissa({"explain", "--json", name + ".json"}, kGolden);
    ASSERT_EQ(result.exit_code, 0) << result.errors;
    const json all = json::parse(result.output);
    const std::string text = read_file((kGolden / (name + ".wide.txt")).string());
    EXPECT_THAT(text, HasSubstr("plan " + all.at("hash").get<std::string>()));
    EXPECT_THAT(text, HasSubstr("resident weights " + all.at("bytes").dump() + " B"));
    for (const json& warning : all.at("warnings")) EXPECT_THAT(text, HasSubstr("warning: " + warning.get<std::string>()));
    EXPECT_EQ(all.at("quantized_gemms").is_null(), text.find("emulated") == std::string::npos) << name;
    for (const json& entry : all.at("modules")) {
      EXPECT_THAT(text, HasSubstr(entry.at("recipe").get<std::string>()));
      const json& gemms = entry.at("gemms");
      for (const auto& [role, operands] : gemms.items()) EXPECT_THAT(text, HasSubstr(operands.get<std::string>())) << role;
    }
  }
}

// Of a module that ranks share, by rows of each part, by columns, or whole.
TEST(Explain, SaysWhatATensorRankHolds) {
  const json all = json::parse(run_mantissa({"explain", "--json", "tensor.json"}, kGolden).output);
  std::map<std::string, json> held;
  int64_t bytes = 0, of_all = 0;
  for (const json& entry : all.at("modules")) {
    held[entry.at("module")] = entry.at("on_rank");
    const bool divided = entry.at("on_rank").at("split") != "none";
    bytes += entry.at("on_rank").at("bytes").get<int64_t>();
    of_all += entry.at("bytes").get<int64_t>() / (divided ? 2 : 1);
  }
  EXPECT_EQ(held["layers.0.attn.qkv"], (json{{"split", "column_parallel"}, {"shape", {128, 128}}, {"bytes", 16400}}));
  EXPECT_EQ(held["layers.1.mlp.down"].at("shape"), (json{128, 96}));
  EXPECT_EQ(held["layers.1.mlp.down"].at("split"), "row_parallel");
  EXPECT_EQ(held["final_norm"].at("split"), "none");
  EXPECT_EQ(bytes, of_all);
  EXPECT_THAT(read_file((kGolden / "tensor.wide.txt").string()), HasSubstr("a rank holds " + std::to_string(bytes) + " B of the weights"));
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

TEST(Explain, ShowsHowADeviceMultiplies) {
  const auto table = [](const char* device, const std::vector<std::string>& sets) {
    std::vector<std::string> more = {"--device", device, "--set", "precision.recipe=fp8_block"};
    for (const std::string& set : sets) more.insert(more.end(), {"--set", set});
    return narrow("configs/gpt2-124m.json", MANTISSA_SOURCE_DIR, more);
  };
  EXPECT_THAT(table("sm_90", {}), HasSubstr("layers.{0..11}.mlp.up    wgrad  3072 x 768 x 4096   fp8_block  2 transposed, 2 of scales"));
  EXPECT_THAT(table("sm_90", {"precision.native_products=never"}),
              ::testing::AllOf(Not(HasSubstr("fp8_block")), HasSubstr("(1) precision.native_products is never")));
  EXPECT_THAT(table("sm_89", {}), HasSubstr("(1) sm_89 has no FP8 GEMMs with scales per 128"));
  EXPECT_THAT(table("cpu", {}), HasSubstr("GEMMs on cpu"));
  EXPECT_THAT(table("here", {}), HasSubstr("GEMMs on "));
  // A run on GPUs is explained where there is none.
  EXPECT_THAT(narrow("configs/gpt2-124m.json", MANTISSA_SOURCE_DIR, {"--set", "training.device=cuda"}), HasSubstr("device cuda |"));
  const ProcessResult refused = run_mantissa({"explain", "configs/gpt2-124m.json", "--device", "sm_91"}, MANTISSA_SOURCE_DIR);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.errors, HasSubstr("there is no device \"sm_91\""));
  const ProcessResult simulated = run_mantissa(
      {"explain", "configs/gpt2-124m.json", "--device", "sm_90", "--set-file", "configs/recipes/nvfp4.json"}, MANTISSA_SOURCE_DIR);
  EXPECT_EQ(simulated.exit_code, 2);
  EXPECT_THAT(simulated.errors, HasSubstr("simulates formats, which only CPUs do: take --device cpu"));
}

TEST(Explain, ReportsHowADeviceMultipliesAsJson) {
  const auto explained = [](const char* device) {
    return json::parse(run_mantissa({"explain", "configs/gpt2-124m.json", "--json", "--device", device, "--set", "precision.recipe=mxfp8"},
                                    MANTISSA_SOURCE_DIR)
                           .output);
  };
  EXPECT_EQ(explained("sm_100").at("quantized_gemms"), "native");
  EXPECT_EQ(explained("sm_90").at("quantized_gemms"), "emulated");
  const json first = explained("sm_90").at("gemms").at("of").at(0);
  EXPECT_EQ(first.at("path"), "bf16");
  EXPECT_EQ(first.at("dequantized"), 2);
  EXPECT_EQ(first.at("because"), "sm_90 has no FP8 GEMMs with scales per 32");
}

TEST(Explain, EveryShippedConfigurationOnEveryDeviceStaysWithinAHundredColumns) {
  for (const std::filesystem::path& path : shipped_configs()) {
    for (const char* const device : {"cpu", "sm_90", "sm_120"}) {
      const std::vector<std::string> more = {"--device", device, "--set", "model.vocab_size=50304", "--set", "precision.recipe=mxfp8"};
      EXPECT_THAT(narrow("configs/" + path.filename().string(), MANTISSA_SOURCE_DIR, more), HasSubstr("wgrad"));
    }
  }
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
    if (recipe.path().stem() == "kimi_k3" || recipe.path().stem() == "deepseek_v4") continue;  // for experts
    const ProcessResult result = run_mantissa({"explain", "configs/quickstart.json", "--set-file", recipe.path().string()}, root);
    EXPECT_EQ(result.exit_code, 0) << recipe.path() << result.errors;
    EXPECT_THAT(result.output, HasSubstr("precision.recipe " + recipe.path().stem().string()));
  }
}

TEST(Explain, JsonHasARangeOfScalesThatIsNotWhole) {
  const std::filesystem::path root = MANTISSA_SOURCE_DIR;
  const ProcessResult result = run_mantissa({"explain", "configs/quickstart.json", "--json", "--set", "precision.recipe=own", "--set",
                                             R"(precision.recipes={"own": {"base": "mxfp8", "input": {"scale_range": [-22, 127]}}})"},
                                            root);
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  size_t inputs = 0;
  const json plan = json::parse(result.output);
  for (const json& module : plan["modules"]) {
    if (module["input"].is_null()) continue;
    EXPECT_EQ(module["input"]["scale_range"], json({-22, 127}));
    EXPECT_FALSE(module["weight"].contains("scale_range"));
    ++inputs;
  }
  EXPECT_GT(inputs, 0U);
}

TEST(Explain, DeepSeekV4HasTilesOf128AndRoutedExpertsInFourBits) {
  const std::filesystem::path root = MANTISSA_SOURCE_DIR;
  const TemporaryFolder folder;
  write_file(folder / "text.txt", std::string(2000, 'a') + "bcd");
  const auto explain = [&](const char* heads) {
    return run_mantissa({"explain", "configs/moe-tiny.json", "--set-file", "configs/recipes/deepseek_v4.json", "--json", "--set",
                         "data.path=" + (folder / "text.txt"), "--set", "model.moe.shared_intermediate_size=128", "--set", heads},
                        root);
  };
  const ProcessResult narrow = explain("model.num_key_value_heads=2");
  EXPECT_EQ(narrow.exit_code, 2);
  EXPECT_THAT(narrow.errors, HasSubstr("out 64 of part k is not a multiple of 128, the block of recipe fp8_block; change the size"));
  const ProcessResult result = explain("model.num_key_value_heads=4");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  size_t routed = 0, others = 0;
  const json plan = json::parse(result.output);
  for (const json& module : plan["modules"]) {
    const std::string name = module["module"];
    if (name.find(".attn.qkv") == std::string::npos && name.find(".attn.out") == std::string::npos &&
        name.find(".gate_up") == std::string::npos && name.find(".down") == std::string::npos)
      continue;
    const bool expert = name.find(".moe.experts.") != std::string::npos;
    ++(expert ? routed : others);
    EXPECT_EQ(module["export"], expert ? "e2m1" : "e4m3") << module;
    EXPECT_EQ(module["input"]["block"], json({1, 128})) << module;
    EXPECT_EQ(module[expert ? "weight_fake_quant" : "weight"]["block"], expert ? json({1, 32}) : json({128, 128})) << module;
  }
  EXPECT_EQ(routed, 6U);
  EXPECT_EQ(others, 16U);  // of which six are shared experts
}

TEST(Explain, KimiK3QuantizesRoutedExpertsAlone) {
  const std::filesystem::path root = MANTISSA_SOURCE_DIR;
  const TemporaryFolder folder;
  write_file(folder / "text.txt", std::string(2000, 'a') + "bcd");
  const ProcessResult result =
      run_mantissa({"explain", "configs/moe-tiny.json", "--set-file", "configs/recipes/kimi_k3.json", "--json", "--set",
                    "data.path=" + (folder / "text.txt"), "--set", "model.moe.shared_intermediate_size=64"},
                   root);
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto plan = nlohmann::json::parse(result.output);
  size_t experts = 0;
  for (const auto& module : plan["modules"]) {
    const bool routed = module["module"].get<std::string>().find(".moe.experts.") != std::string::npos;
    EXPECT_EQ(module["recipe"], routed ? "mxfp4_qat_mxfp8_act" : "high") << module;
    experts += routed ? 1 : 0;
  }
  EXPECT_EQ(experts, 6U) << "two modules of three layers";
}

}  // namespace mantissa::explain_test
