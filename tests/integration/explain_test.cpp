// `mantissa explain` as a user sees it, and the widths of its tables, which the library makes. The expected texts are made by
// scripts/golden_explain.sh: look at the difference before committing.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "mantissa/base/text.h"
#include "mantissa/train/load_config.h"
#include "plan/plan_table.h"
#include "process.h"

namespace mantissa::explain_test {

using nlohmann::json;
using test::ProcessResult;
using test::read_file;
using test::TemporaryFolder;
using test::write_file;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::Not;

const std::filesystem::path kRoot = MANTISSA_SOURCE_DIR, kGolden = kRoot / "tests" / "golden" / "explain";

std::vector<std::filesystem::path> files_of(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".json" && entry.path().filename() != "config.schema.json") paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

ProcessResult explain(std::vector<std::string> words, const std::filesystem::path& folder = kRoot) {
  words.insert(words.begin(), "explain");
  return test::run_mantissa(words, folder);
}

std::string explained(const std::vector<std::string>& words, const std::filesystem::path& folder = kRoot) {
  const ProcessResult result = explain(words, folder);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.errors, IsEmpty());
  return result.output;
}

json explained_json(std::vector<std::string> words, const std::filesystem::path& folder = kRoot) {
  words.emplace_back("--json");
  return json::parse(explained(words, folder));
}

std::vector<std::string> lines_of(const std::string& output) {
  std::istringstream in(output);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

void expect_hundred_columns(const std::string& output) {
  for (const std::string& line : lines_of(output)) EXPECT_LE(line.size(), 100U) << line;
}

TEST(Explain, ThirteenConfigurationsGiveTheExpectedTextAndTheSameAsJson) {
  EXPECT_EQ(files_of(kGolden).size(), 13U);
  for (const std::filesystem::path& path : files_of(kGolden)) {
    const std::string name = path.stem(), text = read_file((kGolden / (name + ".wide.txt")).string());
    const std::string narrow = explained({name + ".json"}, kGolden);
    EXPECT_EQ(narrow, read_file((kGolden / (name + ".txt")).string())) << name;
    expect_hundred_columns(narrow);
    EXPECT_EQ(explained({"--wide", name + ".json"}, kGolden), text) << name;
    const json all = explained_json({name + ".json"}, kGolden);
    EXPECT_THAT(text, HasSubstr("plan " + all.at("hash").get<std::string>()));
    EXPECT_THAT(text, HasSubstr("resident weights " + all.at("bytes").dump() + " B"));
    for (const json& warning : all.at("warnings")) EXPECT_THAT(text, HasSubstr("warning: " + warning.get<std::string>()));
    EXPECT_EQ(all.at("quantized_gemms").is_null(), text.find("emulated") == std::string::npos) << name;
    for (const json& entry : all.at("modules")) {
      EXPECT_THAT(text, HasSubstr(entry.at("recipe").get<std::string>()));
      for (const auto& [role, operands] : entry.at("gemms").items()) EXPECT_THAT(text, HasSubstr(operands.get<std::string>())) << role;
    }
  }
}

// ---- tables of the library

RunConfig config_of(const ConfigSources& sources, int64_t ranks = 0) {
  RunConfig config = load_run_config(sources, Inputs::unchecked, ranks).config;
  if (!config.model.vocab_size) config.model.vocab_size = 256;
  return config;
}

std::string table_of(const RunConfig& config, PlanTable form) {
  return printable(plan_table(resolve_plan(config), form, config.parallel.ranks()), "\n");
}

// The table of the plan; no line is longer than 100 columns, and there are as many rows as in the wide table.
std::string narrow(const RunConfig& config) {
  const std::string table = table_of(config, PlanTable::narrow);
  expect_hundred_columns(table);
  EXPECT_EQ(lines_of(table).size(), lines_of(table_of(config, PlanTable::wide)).size());
  return table;
}

RunConfig config_of_text(const std::string& model, const std::string& precision, const std::string& more = "") {
  return config_of({.file = "c.json",
                    .text = text(R"({"model": {"vocab_size": 50304, )", model, R"(}, "precision": {)", precision,
                                 R"(}, "data": {"path": "nowhere.txt"})", more, "}")});
}

// 1,000 layers, learned positions and GELU, every second layer under another recipe.
TEST(Explain, LongNamesAndManyLayersStayWithinAHundredColumns) {
  const std::string name = "from_" + std::string(120, 'n') + "_to", long_part(900, 'x');
  const std::string precision = text(R"("recipe": ")", name, R"(", "recipes": {")", name, R"(": {"base": "mxfp8", "gemms": ["fprop"]}},
      "rules": [{"match": "re:layers\\.\\d*[02468]\\.()",
                                     long_part, R"_(|mlp.*|.*out)", "recipe": "mxfp4_qat_mxfp8_act"}])_");
  const auto model = [](int layers) {
    return text(R"("hidden_size": 1048576, "num_layers": )", layers, R"(, "intermediate_size": 4194304, "position": "learned",
      "activation": "gelu_tanh", "norm": "layer", "norm_bias": true, "mlp_bias": true, "attention_bias": "all")");
  };
  const RunConfig config = config_of_text(model(1000), precision);
  const std::string output = narrow(config);
  for (const char* const part : {"layers.{0,2,4,6,...,998}.mlp.up ", "layers.{1,3,5,...,999}.mlp.down ", "layers.{0,2,4,...,998}.attn.out ",
                                 "layers.{0..999}.mlp_norm ", "position ", "[4194304, 1048576]", "fro..._to ", "mxf...act ", " rules.0 "}) {
    EXPECT_THAT(output, HasSubstr(part));
  }
  EXPECT_THAT(table_of(config, PlanTable::wide), AllOf(HasSubstr(name), HasSubstr("994,996,998}.mlp.up "), HasSubstr(long_part)));
  // The whole output, and what it is made of, of a model whose weights would not fit into any memory.
  const TemporaryFolder folder;
  write_file(folder / "c.json", text(R"({"model": {"vocab_size": 1048576, )", model(4), R"(}, "precision": {)", precision,
                                     R"(}, "data": {"path": "nowhere.txt"}})"));
  expect_hundred_columns(explained({"c.json"}, folder.path()));
}

TEST(Explain, RoomGoesToWhatIsLongestAndARuleKeepsItsKey) {
  const auto table = [&](const std::string& recipe, const std::string& match) {
    return narrow(config_of_text(R"("num_layers": 12, "intermediate_size": 2048)",
                                 text(R"("recipe": ")", recipe, R"(", "recipes": {")", recipe,
                                      R"(": {"base": "mxfp8"}}, "rules": [{"match": ")", match, R"(", "recipe": "high"}])")));
  };
  EXPECT_THAT(table(std::string(40, 'r') + "_end", "layers.{0,1,2,3,4,5,6,7,8,9,10,11}.mlp.down"),
              AllOf(HasSubstr("layers.{0..11}.mlp.gate_up "), HasSubstr("rrrrrr...rr_end "), HasSubstr(R"(rules.0 "la...n" )")));
  EXPECT_THAT(table("own", "layers.{0,2,4,6,8,10}.mlp.gate_up"),
              AllOf(HasSubstr("layers.{0,2,4,6,8,10}.mlp.gate_up "), HasSubstr("layers.{1,3,5,7,9,11}.mlp.gate_up ")));
}

// A pattern may hold what a terminal obeys or several bytes a character.
TEST(Explain, PatternsAreCutBetweenCharacters) {
  std::string accents, controls;
  for (int i = 0; i < 60; ++i) accents += "\u00eb\u65e5\U0001f600", controls += "\\u0007";
  for (const std::string& pattern : {accents, "a" + accents, "ab" + accents, "abc" + accents, controls}) {
    const std::string output =
        narrow(config_of_text(R"("num_layers": 2)", R"("rules": [{"match": "re:.*out|)" + pattern + R"(", "recipe": "mxfp8"}])"));
    EXPECT_THAT(output, HasSubstr("rules.0 \"re:"));
    for (const std::string& line : lines_of(output)) EXPECT_EQ(printable(line), line);
  }
}

// Shapes beyond all models take room from the module alone.
TEST(Explain, HugeShapesOnManyRanksStayWithinAHundredColumns) {
  const std::string output = narrow(config_of_text(
      R"("hidden_size": 1048576, "num_layers": 1000, "num_attention_heads": 4096, "intermediate_size": 4194304,
         "moe": {"num_experts": 4096, "num_experts_per_tok": 2, "intermediate_size": 4194304})",
      R"("recipe": "mxfp4_qat_mxfp8_act")", R"(, "parallel": {"data": 1024, "tensor": 64, "expert": 1024},
    "training": {"seq_len": 512, "micro_batch_size": 1, "global_batch_size": 1024})"));
  EXPECT_THAT(output, AllOf(HasSubstr(" [4096/1024, 8388608/64, 1048576] "), HasSubstr(" mxf...ct ")));
}

// The cells of a column of the narrow table.
std::vector<std::string> column_of(const std::string& output, const std::string& head) {
  const std::vector<std::string> table = lines_of(output);
  const size_t begin = table.at(0).find("  " + head + "  ");
  std::vector<std::string> cells;
  for (const std::string& line : table) cells.push_back(line.substr(begin + 2, line.find(' ', begin + 2) - begin - 2));
  return cells;
}

// Nothing is cut to nothing in a table whose ranks share weights: the ends of a recipe are left, and the key of a rule.
void expect_recipes_and_rules(const std::string& output) {
  EXPECT_THAT(column_of(output, "recipe"), Contains("high"));
  for (const std::string& recipe : column_of(output, "recipe")) {
    EXPECT_THAT(recipe, MatchesRegex("recipe|high|mxfp8|mxfp4_qat_mxfp8_act|mxf[^ ]*\\.\\.\\.[^ ]*ct"));
  }
  for (const std::string& rule : column_of(output, "rule")) EXPECT_THAT(rule, MatchesRegex("rule|recipe|-|rules\\.[01]"));
}

TEST(Explain, EveryShippedConfigurationStaysWithinAHundredColumns) {
  const std::string rules =
      R"(precision.rules=[{"match": "layers.0.*", "recipe": "high"}, {"match": "layers.*.down", "recipe": "mxfp4_qat_mxfp8_act"}])";
  for (const std::filesystem::path& path : files_of(kRoot / "configs")) {
    const bool experts = read_file(path.string()).find("num_experts") != std::string::npos;
    const auto config = [&](std::vector<std::string> sets, int64_t ranks = 0) {
      sets.insert(sets.end(), {"model.vocab_size=50304", "model.intermediate_size=12288"});
      const bool tunes = path.stem() == "qat" || path.stem() == "qad";  // model and data of these are on the command line
      if (tunes) sets.insert(sets.end(), {"data.path=text.txt", "training.teacher=null", "checkpoint.export=null"});
      return config_of({.file = path.string(), .sets = std::move(sets)}, ranks);
    };
    for (const std::string recipe : {"high", "mxfp8", "mxfp8_weights", "mxfp4_qat", "mxfp4_qat_mxfp8_act"})
      EXPECT_THAT(narrow(config({"precision.recipe=" + recipe})), HasSubstr(recipe.substr(0, 3)));
    for (const char* const name : {"cpu", "sm_90", "sm_120"}) {
      const GemmDevice device = gemm_device(name);
      const RunConfig mxfp8 = config({"precision.recipe=mxfp8"});
      const std::string gemms = gemm_table(planned_gemms(mxfp8, resolve_plan(mxfp8), device), device, PlanTable::narrow);
      EXPECT_THAT(gemms, HasSubstr("wgrad"));
      expect_hundred_columns(gemms);
    }
    for (const auto& [tensor, expert] : {std::pair{2, 1}, {1, 4}, {2, 2}, {4, 8}}) {
      if (expert > 1 && !experts) continue;
      SCOPED_TRACE(text(path, " tensor ", tensor, " expert ", expert));
      expect_recipes_and_rules(
          narrow(config({"precision.recipe=mxfp8", rules, text("parallel.data=", expert), text("parallel.tensor=", tensor),
                         text("parallel.expert=", expert), "training.global_batch_size=null", "training.grad_accum=1",
                         "model.num_attention_heads=16", "model.num_key_value_heads=16"},
                        tensor * expert)));
    }
  }
}

// A rounded table has a row like a linear, and a line of its own; tied, its GEMMs are those of the output projection.
TEST(Explain, ShowsATableOfTokensThatARuleRounds) {
  for (const bool tied : {true, false}) {
    const RunConfig config = config_of_text(text(R"("tie_word_embeddings": )", tied ? "true" : "false"),
                                            R"("recipe": "mxfp4_qat", "rules": [{"match": "embed", "recipe": "mxfp4_qat"}])");
    const PrecisionPlan plan = resolve_plan(config);
    const std::string gemms = " | fprop bf16 * bf16 of e2m1 1x32 | dgrad bf16 * bf16 of e2m1 1x32 | wgrad bf16 * bf16";
    EXPECT_THAT(recipe_lines(plan), ::testing::ElementsAre("recipe mxfp4_qat of embed | lookup bf16 of e2m1 1x32" + (tied ? gemms : ""),
                                                           "recipe mxfp4_qat" + gemms));
    EXPECT_THAT(table_of(config, PlanTable::wide),
                HasSubstr(tied ? "mxfp4_qat  bf16 * bf16 of e2m1 1x32  bf16 * bf16 of e2m1 1x32" : "mxfp4_qat  -  "));
    std::vector<std::string> of_table;
    for (const PlannedGemm& gemm : planned_gemms(config, plan, gemm_device("cpu")))
      if (gemm.module == "embed") of_table.push_back(gemm.operands);
    EXPECT_EQ(of_table.size(), tied ? 3U : 0U);
    EXPECT_TRUE(!tied || of_table.front() == "bf16 * bf16 of e2m1 1x32");
  }
}

// ---- the program

// "experts / ranks" of the shape, whole where nothing is divided; the wide table has the shape and what a rank holds, in full.
TEST(Explain, TheNarrowTableDividesTheShapeByTheRanks) {
  std::vector<std::string> words = {"configs/qwen3-moe-30b-a3b.json",
                                    "--world",
                                    "16",
                                    "--set",
                                    "parallel.tensor=2",
                                    "--set",
                                    "parallel.expert=8",
                                    "--set",
                                    "parallel.data=8"};
  const std::string output = explained(words);
  expect_hundred_columns(output);
  for (const char* const part :
       {"shape/ranks", " [128/8, 1536/2, 2048] ", " [128/8, 2048, 768/2] ", " [128, 2048] ", " [2048] ", " [151936/2, 2048] ",
        "16 ranks: data 8 x tensor 2, experts over 8 data ranks", "36.0 GiB", "memory of a rank | total "}) {
    EXPECT_THAT(output, HasSubstr(part));
  }
  EXPECT_THAT(output, Not(HasSubstr("on a rank  ")));
  words.emplace_back("--wide");
  const std::string all = explained(words);
  for (const char* const part : {" [128, 1536, 2048] ", " experts rows [16, 768, 2048] ", " experts columns [16, 2048, 384] ", " whole ",
                                 "38654705664\n", "layers.{0..47}.moe.experts.gate_up "}) {
    EXPECT_THAT(all, HasSubstr(part));
  }
}

// The shares are those of a module that ranks divide by rows of each part, by columns, or not at all.
TEST(Explain, SaysWhatATensorRankHolds) {
  std::map<std::string, json> held;
  int64_t bytes = 0, of_all = 0;
  const json all = explained_json({"tensor.json"}, kGolden);
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

TEST(Explain, TakesTheVocabularyFromTheTokenizerAndTheDeviceFromTheRun) {
  const TemporaryFolder folder;
  write_file(folder / "text.txt", "abcabcabc");
  write_file(folder / "c.json", R"({"data": {"path": "text.txt", "tokenizer": "char"}})");
  EXPECT_THAT(explained({"c.json", "--set", "training.device=cpu_reference"}, folder.path()),
              AllOf(HasSubstr("[3, 512]"), HasSubstr("device cpu_reference |")));
  EXPECT_EQ(explained_json({"high.json", "--set", "training.device=cpu_reference"}, kGolden).at("device"), "cpu_reference");
  EXPECT_THAT(explained({"high.json", "--set", "training.device=cuda"}, kGolden), HasSubstr("device cuda |")) << "where there is none";
  const ProcessResult refused =
      explain({"c.json", "--set", "precision.recipe=mxfp8", "--set", "precision.fp8_output_proj=true", "--set", "parallel.tensor=2"},
              folder.path());
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.errors, HasSubstr("needs a padded vocabulary in multiples of 64, 32 for each rank of parallel.tensor, got 4: set "
                                        "model.pad_vocab_to to 64"));
}

TEST(Explain, ShowsHowADeviceMultiplies) {
  const auto words = [](const char* device, const std::vector<std::string>& more) {
    std::vector<std::string> out = {"configs/gpt2-124m.json", "--device", device, "--set"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  };
  const std::string blocks = "precision.recipe=fp8_block", mxfp8 = "precision.recipe=mxfp8";
  EXPECT_THAT(explained(words("sm_90", {blocks})), HasSubstr("layers.{0..11}.mlp.up    wgrad  3072 x 768 x 4096   fp8_block  scales"));
  EXPECT_THAT(explained(words("sm_90", {blocks, "--set", "precision.native_products=never"})),
              AllOf(Not(HasSubstr("fp8_block")), HasSubstr("(1) precision.native_products is never")));
  EXPECT_THAT(explained(words("sm_89", {blocks})), HasSubstr("(1) sm_89 has no FP8 GEMMs with scales per 128"));
  EXPECT_THAT(explained(words("cpu", {blocks})), HasSubstr("GEMMs on cpu"));
  EXPECT_THAT(explained(words("here", {blocks})), HasSubstr("GEMMs on "));
  EXPECT_EQ(explain(words("sm_91", {blocks})).exit_code, 2);
  const ProcessResult simulated = explain({"configs/gpt2-124m.json", "--device", "sm_90", "--set-file", "configs/recipes/nvfp4.json"});
  EXPECT_EQ(simulated.exit_code, 2);
  EXPECT_THAT(simulated.errors, HasSubstr("simulates formats, which only the CPU backend supports: use --device cpu"));
  EXPECT_EQ(explained_json(words("sm_100", {mxfp8})).at("quantized_gemms"), "native");
  EXPECT_THAT(explained(words("sm_120", {mxfp8})), HasSubstr("wgrad  3072 x 768 x 4096   mxfp8  2 transposed, scales"));
  EXPECT_THAT(explained(words("sm_100", {"precision.recipe=mxfp4_qat_mxfp8_act"})),
              HasSubstr("fprop  4096 x 3072 x 768   mxfp8     1 widened, scales"));
  const std::vector<std::string> experts = {"configs/moe-8x1b.json", "--device", "sm_90", "--set", "precision.grouped_gemms=auto"};
  EXPECT_THAT(explained(experts), HasSubstr("grouped"));
  const std::vector<std::string> cudnn = {"training.attention=cudnn", "--set", "training.device=cuda"};
  EXPECT_THAT(explained(words("sm_90", cudnn)), HasSubstr("\nattention of all layers: cudnn\n"));
  EXPECT_THAT(explained(words("sm_100", cudnn)), HasSubstr("attention of all layers: refused, because cuDNN's backward pass has"));
  EXPECT_THAT(explained(words("sm_90", {blocks})), HasSubstr("attention of all layers: own, because training.attention is not cudnn"));
  EXPECT_EQ(explained_json(words("sm_90", cudnn)).at("attention").at("by"), "cudnn");
  const json emulated = explained_json(words("sm_90", {mxfp8}));
  EXPECT_EQ(emulated.at("quantized_gemms"), "emulated");
  const json& first = emulated.at("gemms").at("of").at(0);
  EXPECT_EQ(first.at("path"), "bf16");
  EXPECT_EQ(first.at("dequantized"), 2);
  EXPECT_EQ(first.at("because"), "sm_90 has no FP8 GEMMs with scales per 32");
}

TEST(Explain, ARuleWithATypoExitsWith2AndNamesTheRightOne) {
  const TemporaryFolder folder;
  write_file(folder / "text.txt", std::string(5000, 'a'));
  write_file(folder / "c.json",
             "{\"data\": {\"path\": \"text.txt\", \"tokenizer\": \"byte\"},\n\"precision\": {\"recipe\": \"mxfp8\",\n"
             "\"rules\": [{\"match\": \"layers.*.mpl.*\", \"recipe\": \"high\"}]}}");
  for (const std::vector<std::string>& command : {std::vector<std::string>{"explain", "c.json"},
                                                  {"explain", "c.json", "--json"},
                                                  {"config", "check", "c.json"},
                                                  {"train", "c.json"}}) {
    const ProcessResult result = test::run_mantissa(command, folder.path());
    EXPECT_EQ(result.exit_code, 2) << command.front();
    EXPECT_THAT(result.errors, HasSubstr("precision.rules.0.match: \"layers.*.mpl.*\" matches no module; nearest: \"layers.*.mlp.*\""));
    EXPECT_THAT(result.errors, HasSubstr("c.json:3:21")) << command.front();
    EXPECT_THAT(result.output, IsEmpty());
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "runs"));
}

// ---- shipped recipes

TEST(Explain, ShippedRecipesFitTheShippedConfigurations) {
  for (const std::filesystem::path& path : files_of(kRoot / "configs" / "recipes")) {
    if (path.stem() == "kimi_k3" || path.stem() == "deepseek_v4") continue;  // for experts
    EXPECT_THAT(explained({"configs/quickstart.json", "--set-file", path.string()}), HasSubstr("precision.recipe " + path.stem().string()));
  }
}

// The modules of moe-tiny.json under a recipe for experts.
std::vector<json> modules_under(const std::string& recipe, const std::vector<std::string>& sets) {
  const RunConfig config = config_of(
      {.file = (kRoot / "configs/moe-tiny.json").string(), .set_files = {(kRoot / "configs/recipes" / recipe).string()}, .sets = sets});
  return json::parse(resolve_plan(config).to_json().dump()).at("modules");
}

bool is_routed(const json& module) { return module["module"].get<std::string>().find(".moe.experts.") != std::string::npos; }

TEST(Explain, DeepSeekV4HasTilesOf128AndRoutedExpertsInFourBits) {
  const std::string shared = "model.moe.shared_intermediate_size=128";
  EXPECT_NO_THROW(modules_under("deepseek_v4.json", {shared, "model.num_key_value_heads=2"})) << "a tile lies across k and v";
  size_t routed = 0, others = 0;
  for (const json& module : modules_under("deepseek_v4.json", {shared, "model.num_key_value_heads=4"})) {
    const std::string name = module["module"];
    if (!::testing::Value(name, MatchesRegex(".*(\\.attn\\.qkv|\\.attn\\.out|\\.gate_up|\\.down)"))) continue;
    const bool expert = is_routed(module);
    ++(expert ? routed : others);
    EXPECT_EQ(module["export"], expert ? "e2m1" : "e4m3") << module;
    EXPECT_EQ(module["input"]["block"], json({1, 128})) << module;
    EXPECT_EQ(module[expert ? "weight_fake_quant" : "weight"]["block"], expert ? json({1, 32}) : json({128, 128})) << module;
  }
  EXPECT_EQ(routed, 6U);
  EXPECT_EQ(others, 16U);  // six of these are shared experts
}

TEST(Explain, KimiK3QuantizesRoutedExpertsAlone) {
  size_t experts = 0;
  for (const json& module : modules_under("kimi_k3.json", {"model.moe.shared_intermediate_size=64"})) {
    EXPECT_EQ(module["recipe"], is_routed(module) ? "mxfp4_qat_mxfp8_act" : "high") << module;
    if (is_routed(module)) ++experts;
  }
  EXPECT_EQ(experts, 6U) << "two modules of three layers";
}

TEST(Explain, JsonHasARangeOfScalesThatIsNotWhole) {
  size_t inputs = 0;
  const json plan = explained_json({"configs/quickstart.json", "--set", "precision.recipe=own", "--set",
                                    R"(precision.recipes={"own": {"base": "mxfp8", "input": {"scale_range": [-22, 127]}}})"});
  for (const json& module : plan["modules"]) {
    if (module["input"].is_null()) continue;
    EXPECT_EQ(module["input"]["scale_range"], json({-22, 127}));
    EXPECT_FALSE(module["weight"].contains("scale_range"));
    ++inputs;
  }
  EXPECT_GT(inputs, 0U);
}

}  // namespace mantissa::explain_test
