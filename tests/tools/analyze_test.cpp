// Recipes on a saved model: figures of its weights are those that a run reports of its first step.
#include "train/analyze.h"

#include "checkpoint_shards.h"
#include "exports.h"
#include "hf/gguf_export.h"
#include "metrics/run_metrics.h"
#include "tool_commands.h"

namespace mantissa::test::analyze_test {

using test::command_result;
using test::CommandResult;
using test::error_of;
using test::logits_of;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Sets = std::vector<std::string>;

constexpr const char* kEven =
    R"(precision.recipes={"mine": {"base": "mxfp4_qat", "weight_fake_quant": {"format": "e2m1", "rule": "even"}}})";

std::string described(const PrecisionEvent& event) {
  std::ostringstream out;
  out.precision(17);
  out << event.module << ' ' << event.sqnr_db.value_or(0) << ' ' << event.clipped << ' ' << event.flushed << ' ' << event.amax.value_or(0);
  for (const auto& [code, blocks] : event.scales) out << ' ' << code << ':' << blocks;
  if (event.worst_expert) out << " worst " << event.worst_expert->expert << ' ' << event.worst_expert->sqnr_db;
  return std::move(out).str();
}

class AnalyzeTest : public test::ExportTest {
 protected:
  static std::vector<ExaminedRecipe> recipes_of(const ExportSource& source, const std::vector<std::string>& names, const Sets& sets = {}) {
    return examined_recipes(source.model->config, source.folder != nullptr, names, {.precision = sets});
  }
  // The figures of all weights, by recipe.
  static std::vector<std::vector<std::string>> figures(const std::string& from, const std::vector<std::string>& names,
                                                       const Sets& sets = {}) {
    const ExportSource source(from, make_backend("cpu"));
    const std::vector<ExaminedRecipe> recipes = recipes_of(source, names, sets);
    std::vector<std::vector<std::string>> out(names.size());
    for (const ExaminedWeight& weight : weight_errors(*source.reader, recipes, *make_backend("cpu"))) {
      for (size_t i = 0; i < names.size(); ++i)
        if (weight.errors[i]) out[i].push_back(described(weight.errors[i]->figures));
    }
    return out;
  }
  // The report of a run that starts from a model on its weights, before its first step.
  std::vector<std::string> reported(const std::string& from, const std::string& name, Sets sets) const {
    sets.insert(sets.end(), {"checkpoint.init_from=" + from, "precision.report_interval=1"});
    trained(name, sets);
    std::vector<std::string> out;
    for (const PrecisionEvent& event : read_run_metrics(run_folder(name)).precision)
      if (event.role == "weight") out.push_back(described(event));
    return out;
  }
  CommandResult analyze(std::vector<std::string> words) const {
    words.insert(words.begin(), "analyze");
    return command_result(words);
  }
  nlohmann::json analyzed(std::vector<std::string> words) const {
    words.emplace_back("--json");
    const CommandResult result = analyze(words);
    EXPECT_EQ(result.exit_code, 0) << result.error;
    return nlohmann::json::parse(result.output);
  }
};

TEST_F(AnalyzeTest, HasTheFiguresOfTheFirstReportOfARun) {
  const std::string saved = trained("saved", {});
  export_to(saved, "folder");
  export_gguf(saved, path("model.gguf"), {.allow_different = true}, make_backend("cpu"));
  int runs = 0;
  for (const std::string& from : {saved, path("folder"), path("model.gguf")}) {
    SCOPED_TRACE(from);
    const std::vector<std::string> names = {"mxfp8", "mxfp4_qat", "mxfp8_te", "mine"};
    const auto found = figures(from, names, {kEven});
    for (size_t i = 0; i < names.size(); ++i) {
      Sets sets = {"precision.recipe=" + names[i]};
      if (names[i] == "mine") sets.emplace_back(kEven);
      EXPECT_EQ(found[i].size(), 8U);
      EXPECT_EQ(found[i], reported(from, text(names[i], ' ', runs++), sets)) << names[i];
    }
    EXPECT_NE(found[1], found[3]);
  }
}

TEST_F(AnalyzeTest, HasTheFiguresOfExpertsAndOfAnOutputProjection) {
  const Sets experts = {"model.moe.num_experts=5", "model.moe.intermediate_size=96", "model.moe.num_experts_per_tok=2"};
  const std::string saved = trained("experts", experts);
  const auto found = figures(saved, {"mxfp8", "mxfp4_qat"});
  EXPECT_EQ(found[0], reported(saved, "experts mxfp8", test::with(experts, {"precision.recipe=mxfp8"})));
  EXPECT_EQ(found[1], reported(saved, "experts mxfp4", test::with(experts, {"precision.recipe=mxfp4_qat"})));
  EXPECT_THAT(found[1], ::testing::Contains(HasSubstr(" worst ")));
  const Sets output = {R"(precision.fp8_output_proj={"enabled": true})"};
  const Sets untied = {"model.tie_word_embeddings=false", "model.pad_vocab_to=32"};
  const std::string other = trained("untied", untied);
  const auto of_output = figures(other, {"mxfp8"}, output);
  EXPECT_THAT(of_output[0].back(), HasSubstr("output "));
  EXPECT_EQ(of_output[0], reported(other, "output mxfp8", test::with(untied, test::with(output, {"precision.recipe=mxfp8"}))));
}

// A run reports simulated weights of each GEMM that reads them, with as many blocks.
TEST_F(AnalyzeTest, HasTheFiguresOfATableOfTokensThatARuleNames) {
  const std::string saved = trained("saved", {}), rule = R"(precision.rules=[{"match": "embed", "recipe": "mxfp4_qat"}])";
  const auto found = figures(saved, {"mxfp4_qat"}, {rule});
  EXPECT_THAT(found[0].front(), ::testing::StartsWith("embed "));
  EXPECT_THAT(reported(saved, "reported", {"precision.recipe=mxfp4_qat", rule}), ::testing::UnorderedElementsAreArray(found[0]));
  const nlohmann::json all = analyzed({saved, "--recipes", "mxfp4_qat", "--set", rule}), high = analyzed({saved, "--recipes", "mxfp4_qat"});
  EXPECT_EQ(all["recipes"][0]["weights"].size(), high["recipes"][0]["weights"].size() + 1);
  EXPECT_EQ(high["recipes"][0]["model"]["bytes"].get<int64_t>() - all["recipes"][0]["model"]["bytes"].get<int64_t>(),
            8 * 64 * 2 - 8 * 64 / 2 - 8 * 64 / 32);
  EXPECT_EQ(all["recipes"][0]["linears"], high["recipes"][0]["linears"]);
}

TEST_F(AnalyzeTest, MeasuresSimulatedWeights) {
  const std::string simulated = R"(precision.recipes={"e3m2": {"simulate": {"weight": {"format": "e3m2"}}, "gemms": ["fprop"]}})";
  const std::string saved = trained("saved", {});
  const auto without_scales = [](std::vector<std::string> lines) {
    for (std::string& line : lines) line.resize(std::min(line.size(), line.find(" 1", line.rfind("0."))));
    return lines;
  };
  const std::vector<std::string> found = figures(saved, {"e3m2"}, {simulated})[0];
  EXPECT_EQ(found.size(), 8U);
  EXPECT_EQ(without_scales(found), without_scales(reported(saved, "run", {simulated, "precision.recipe=e3m2"})));
}

TEST_F(AnalyzeTest, TellsSimulatedFormatsApart) {
  const std::string both = R"(precision.recipes={"e3m2": {"simulate": {"weight": {"format": "e3m2"}}, "gemms": ["fprop"]},
                                                 "e2m3": {"simulate": {"weight": {"format": "e2m3"}}, "gemms": ["fprop"]}})";
  const std::string saved = trained("saved", {});
  const auto found = figures(saved, {"e3m2", "e2m3"}, {both});
  EXPECT_EQ(found[0], figures(saved, {"e3m2"}, {both})[0]);
  EXPECT_EQ(found[1], figures(saved, {"e2m3"}, {both})[0]);
  EXPECT_NE(found[0], found[1]);
}

// Blocks of 64 divide the input of attn.qkv and mlp.gate_up, 64, and not those of attn.out and mlp.down, 96.
TEST_F(AnalyzeTest, LinearsThatARecipeDoesNotFitStayInHighPrecision) {
  const std::string saved = trained("saved", {});
  const Sets wide = {
      R"(precision.recipes={"wide": {"simulate": {"weight": {"format": "e2m1", "block": [1, 64]}}, "gemms": ["fprop"]},
                            "widest": {"simulate": {"weight": {"format": "e2m1", "block": [1, 128]}}, "gemms": ["fprop"]}})"};
  const ExportSource source(saved, make_backend("cpu"));
  const ExaminedRecipe recipe = recipes_of(source, {"wide"}, wide).front();
  EXPECT_THAT(recipe.misfits, ElementsAre("layers.0.attn.out", "layers.0.mlp.down", "layers.1.attn.out", "layers.1.mlp.down"));
  EXPECT_THAT(recipe.problem, HasSubstr("is not a multiple of 64"));
  EXPECT_FALSE(recipe.plan.of("layers.1.mlp.down").recipe.quantizes());
  EXPECT_TRUE(recipe.plan.of("layers.1.mlp.gate_up").recipe.quantizes());
  EXPECT_FALSE(logits_of(saved, {.precision = recipe.values}) == logits_of(saved)) << "the values make the model so";
  const Error none = error_of([&] { recipes_of(source, {"widest"}, wide); });
  EXPECT_EQ(none.code(), ExitCode::usage) << "there is nothing else to show";
  EXPECT_THAT(none.what(), HasSubstr("is not a multiple of 128"));
  const Sets ruled = test::with(wide, {R"(precision.rules=[{"match": "layers.0.*", "recipe": "high"}])"});
  EXPECT_THAT(recipes_of(source, {"wide"}, ruled).front().misfits, ElementsAre("layers.1.attn.out", "layers.1.mlp.down"));
  const std::vector<std::string> beside = {saved, "--set", wide.front(), "--recipes", "widest,mxfp4_qat"};
  const std::vector<std::string> losses = {"--data", folder_ / "text.txt", "--iters", "2", "--modules", "4"};
  const CommandResult shown = analyze(test::with(beside, losses));
  EXPECT_EQ(shown.exit_code, 0) << shown.error;
  EXPECT_THAT(shown.output, AllOf(HasSubstr("\nwidest | fits no linear of this model: "), HasSubstr("is not a multiple of 128"),
                                  HasSubstr("\nmxfp4_qat | 8 weights"), HasSubstr("\nmxfp4_qat  "), Not(HasSubstr("\nwidest  "))));
  const nlohmann::json whole = analyzed(test::with(beside, losses)), unfit = whole["recipes"];
  test::write_file(path("unfit.json"), whole.dump());
  EXPECT_EQ(command_result({"report", path("unfit.json"), "--output", path("unfit.html")}).exit_code, 0);
  EXPECT_EQ(unfit[0]["fits"], false);
  EXPECT_EQ(unfit[0]["misfits"].size(), 8U);
  EXPECT_FALSE(unfit[0].contains("loss"));
  EXPECT_EQ(unfit[1]["fits"], true);
  EXPECT_EQ(unfit[1]["weights"].size(), 8U);
  EXPECT_EQ(unfit[1]["loss"], analyzed(test::with({saved, "--recipes", "mxfp4_qat"}, losses))["recipes"][0]["loss"]);
  const std::vector<std::string> sets = {saved, "--set", wide.front(), "--recipes", "wide,mxfp4_qat"};
  EXPECT_THAT(analyze(sets).output, AllOf(HasSubstr("wide | 4 linears in high precision: "), HasSubstr("mxfp4_qat | 8 weights")));
  const nlohmann::json both = analyzed(sets);
  EXPECT_EQ(both["recipes"][0]["misfits"].size(), 4U);
  EXPECT_EQ(both["recipes"][0]["weights"].size(), 4U);
  EXPECT_EQ(both["recipes"][1]["weights"].size(), 8U);
}

// The largest weight is mlp.gate_up [192, 64]: in bf16, with its codes by one recipe and their values in fp32, it takes less than 8 bytes
// an element. More layers take no more.
TEST_F(AnalyzeTest, MemoryIsThatOfOneWeight) {
  const auto peak = [&](const std::string& name, const std::string& layers) {
    const std::string saved = trained(name, {"model.num_layers=" + layers});
    const ExportSource source(saved, make_backend("cpu"));
    const auto device = make_backend("cpu");
    weight_errors(*source.reader, recipes_of(source, {"mxfp8", "mxfp4_qat"}), *device);
    return device->allocator_stats().peak_in_use;
  };
  const int64_t two = peak("two", "2"), eight = peak("eight", "8");
  EXPECT_EQ(two, eight);
  EXPECT_LT(two, 192 * 64 * 8 + 8192);
}

// Values of 1 in bf16 but for one of 1.0625, which is no code beside them.
class OnesButOne : public TensorReader {
 public:
  OnesButOne(std::string name, int64_t row, int64_t column) : name_(std::move(name)), row_(row), column_(column) {}

  std::string where() const override { return "here"; }
  bool has(const std::string&) const override { return true; }
  WeightForm form(const std::string&) const override { return {.dtype = Dtype::bf16}; }
  void read(const std::string& name, const Box& box, std::span<std::byte> out) override {
    const bf16 one = to_bf16(1.0F), other = to_bf16(1.0625F);
    const int64_t row = row_ - box.start[0], column = column_ - box.start[1];
    const bool inside = name == name_ && row >= 0 && row < box.size[0] && column >= 0 && column < box.size[1];
    for (int64_t i = 0; i < box.elements(); ++i)
      std::memcpy(out.data() + 2 * i, inside && i == row * box.size[1] + column ? &other : &one, sizeof one);
  }
  void read_codes(const std::string&, int64_t, int64_t, std::span<std::byte>, std::span<std::byte>) override { FAIL() << "no codes"; }
  void require_unchanged() override { ++looks; }

  int looks = 0;  // at the files: are they those that were read?

 private:
  std::string name_;
  int64_t row_, column_;
};

// A weight of 2,240 x 2,048 elements is read in chunks of 2,048 rows, and compared with its codes in such pieces.
TEST_F(AnalyzeTest, ReadsEveryChunkOfALargeWeight) {
  const Sets large = {"model.hidden_size=2048", "model.intermediate_size=1120", "model.num_layers=1"};
  OnesButOne source("layers.0.mlp.gate_up.weight", 2100, 1000);
  const std::vector<ExaminedWeight> weights =
      weight_errors(source, {{.name = "mxfp8", .values = {}, .plan = plan_of("mxfp8", large)}}, *make_backend("cpu"));
  ASSERT_EQ(weights.size(), 4U);
  for (const ExaminedWeight& weight : weights) {
    const WeightError& error = weight.errors[0].value();
    EXPECT_EQ(error.noise, weight.module == "layers.0.mlp.gate_up" ? 0.0625 * 0.0625 : 0.0) << weight.module;
    if (weight.module != "layers.0.mlp.gate_up") continue;
    ASSERT_TRUE(error.worst_block);
    EXPECT_EQ(error.worst_block->row, 2080);
    EXPECT_EQ(error.worst_block->column, 992);
  }
  EXPECT_EQ(source.looks, 1) << "after all was read";
}

// 80 rows of an expert are no whole tiles. The output projection keeps its switch.
TEST_F(AnalyzeTest, LinearsThatDoNotFitStayInHighPrecisionBesideAnOutputProjection) {
  const std::string saved = trained("saved", {R"(model.moe={"num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 40})",
                                              "model.tie_word_embeddings=false", "model.pad_vocab_to=32"});
  const ExportSource source(saved, make_backend("cpu"));
  const ExaminedRecipe recipe = recipes_of(source, {"mxfp8"}, {R"(precision.fp8_output_proj={"enabled": true})"}).front();
  EXPECT_THAT(recipe.misfits, ElementsAre("layers.0.moe.experts.gate_up", "layers.1.moe.experts.gate_up"));
  EXPECT_TRUE(recipe.plan.of("output").recipe.quantizes());
}

TEST_F(AnalyzeTest, PatternsMatchTheChosenPathsAlone) {
  std::vector<std::string> all;
  for (int layer = 0; layer < 12; ++layer)
    for (const char* const name : {"attn.out", "mlp.down"}) all.push_back(text("layers.", layer, ".", name));
  EXPECT_THAT(patterns_of({"layers.1.mlp.down", "layers.11.mlp.down", "layers.3.attn.out"}, all),
              ElementsAre("layers.3.attn.out", "layers.{1,11}.mlp.down"));
  EXPECT_THAT(patterns_of(all, all), ElementsAre("layers.*.attn.out", "layers.*.mlp.down"));
}

TEST_F(AnalyzeTest, RulesAreThoseGivenAndNotThoseOfTheRun) {
  const std::string rules = R"(precision.rules=[{"match": "layers.0.*", "recipe": "high"}])";
  const std::string saved = trained("saved", {"precision.recipe=mxfp8", rules, "precision.fp8_param_gather=true"});
  EXPECT_EQ(figures(saved, {"mxfp4_qat"})[0].size(), 8U);
  EXPECT_EQ(figures(saved, {"mxfp4_qat"}, {rules})[0].size(), 4U);
  EXPECT_FALSE(logits_of(saved, {.precision = {"precision.recipe=high", "precision.rules=[]"}}).empty()) << "there are no codes to gather";
}

TEST_F(AnalyzeTest, PrintsATableAndAllFiguresAsJson) {
  const std::string saved = trained("saved", {});
  const CommandResult narrow = analyze({saved}), wide = analyze({saved, "--wide", "--recipes", "mxfp4_qat"});
  EXPECT_THAT(narrow.output,
              AllOf(HasSubstr(" of step 1 | "), HasSubstr("\nmxfp8 | 8 weights | SQNR "), HasSubstr("\nmxfp4_qat | 8 weights"),
                    HasSubstr("4.250 bits per weight of the linears"), HasSubstr("\nlayers.{0..1}.mlp.down ")));
  EXPECT_THAT(wide.output, AllOf(HasSubstr("\nlayers.1.mlp.down "), Not(HasSubstr("{0..1}")), Not(HasSubstr("mxfp8 |"))));
  const nlohmann::json all = analyzed({saved, "--recipes", "mxfp4_qat,high"});
  const nlohmann::json recipe = all["recipes"][0];
  EXPECT_EQ(recipe["recipe"], "mxfp4_qat");
  EXPECT_EQ(recipe["linears"]["bits_per_weight"], 4.25);
  EXPECT_EQ(all["recipes"][1]["linears"]["bits_per_weight"], 16);
  EXPECT_TRUE(all["recipes"][1]["weights"].empty());
  int64_t bytes = 0;
  for (const nlohmann::json& weight : recipe["weights"]) {
    bytes += weight["bytes"].get<int64_t>();
    const nlohmann::json& parts = weight["parts"];
    const double noise = weight["noise"];
    EXPECT_NEAR(parts["scale"].get<double>() + parts["dead_zone"].get<double>() + parts["grid"].get<double>(), noise, 1e-12 * noise);
    EXPECT_LT(weight["worst_block"]["sqnr_db"], weight["sqnr_db"]);
  }
  EXPECT_EQ(recipe["linears"]["bytes"], bytes);
  EXPECT_EQ(recipe["model"]["bytes"].get<int64_t>() - all["high"]["bytes"].get<int64_t>(),
            bytes - 2 * recipe["linears"]["elements"].get<int64_t>());
}

// Tiles of MXFP8 have a scale for 32 rows; biases are values.
TEST_F(AnalyzeTest, CountsTheBytesOfTilesAndOfBiases) {
  const std::string saved = trained("saved", {"model.attention_bias=all"});
  const nlohmann::json all = analyzed({saved, "--recipes", "mxfp8"});
  const nlohmann::json& recipe = all["recipes"][0];
  int64_t bytes = 0;
  for (const nlohmann::json& weight : recipe["weights"]) bytes += weight["bytes"].get<int64_t>();
  EXPECT_EQ(recipe["linears"]["bytes"], bytes);
  const int64_t parameters = plan_of("high", {"model.attention_bias=all"}).parameters();
  EXPECT_EQ(all["high"]["elements"], parameters);
  EXPECT_EQ(all["high"]["bytes"], 2 * parameters);
}

// A line of the table, and its cells.
std::vector<std::string> cells_of(const std::string& table, const std::string& module) {
  std::istringstream in(table.substr(table.find("\n" + module + " ")));
  std::vector<std::string> cells;
  for (std::string cell; cells.size() < 10 && in >> cell;) cells.push_back(cell);
  return cells;
}
std::string two_digits(double value, const char* unit) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2) << value << unit;
  return std::move(out).str();
}

// The figures of each weight are those of the library, and a line of several layers has what follows from them.
TEST_F(AnalyzeTest, HasTheFiguresOfEachWeightAndOfItsLine) {
  const std::string saved = trained("saved", {"model.num_layers=3"});
  test::set_element(saved, "master.layers.1.mlp.down.weight", 5, 0.49375F);  // in a block whose scale clips it and flushes the rest
  const std::string clips = R"(precision.recipes={"floor": {"weight_fake_quant": {"format": "e2m1", "rule": "floor"}}})";
  const ExportSource source(saved, make_backend("cpu"));
  const std::vector<ExaminedWeight> weights = weight_errors(*source.reader, recipes_of(source, {"floor"}, {clips}), *make_backend("cpu"));
  const std::vector<std::string> words = {saved, "--set", clips, "--recipes", "floor"};
  const nlohmann::json all = analyzed(words)["recipes"][0]["weights"];
  ASSERT_EQ(all.size(), weights.size());
  double signal = 0.0, noise = 0.0, all_signal = 0.0, all_noise = 0.0, clipped = 0.0, flushed = 0.0, elements = 0.0;
  std::vector<double> ratios, blocks;
  int apart = 0;  // weights whose worst block lies off the diagonal
  for (size_t i = 0; i < all.size(); ++i) {
    const WeightError& error = weights[i].errors[0].value();
    EXPECT_EQ(all[i]["module"], weights[i].module);
    EXPECT_EQ(all[i]["clipped"], error.figures.clipped);
    EXPECT_EQ(all[i]["flushed"], error.figures.flushed);
    EXPECT_NE(error.figures.clipped, error.figures.flushed);
    EXPECT_EQ(all[i]["worst_block"]["row"], error.worst_block->row);
    EXPECT_EQ(all[i]["worst_block"]["column"], error.worst_block->column);
    apart += error.worst_block->row != error.worst_block->column ? 1 : 0;
    all_signal += error.signal, all_noise += error.noise;
    if (!weights[i].module.ends_with("mlp.down")) continue;
    signal += error.signal, noise += error.noise;
    clipped += error.figures.clipped * static_cast<double>(error.elements);
    flushed += error.figures.flushed * static_cast<double>(error.elements);
    elements += static_cast<double>(error.elements);
    ratios.push_back(10 * std::log10(error.signal / error.noise));
    blocks.push_back(error.worst_block->sqnr_db);
  }
  EXPECT_GT(apart, 0);
  ASSERT_LT(blocks[1], blocks[0] - 0.01) << "else this shows nothing";
  const std::string table = analyze(words).output;
  EXPECT_THAT(table, HasSubstr("SQNR " + two_digits(10 * std::log10(all_signal / all_noise), " dB")));
  const std::vector<std::string> cells = cells_of(table, "layers.{0..2}.mlp.down");
  ASSERT_EQ(cells.size(), 10U) << table;
  EXPECT_THAT(std::vector(cells.begin() + 1, cells.begin() + 6),
              ElementsAre(two_digits(10 * std::log10(signal / noise), ""), two_digits(std::ranges::min(ratios), ""),
                          two_digits(std::ranges::min(blocks), ""), two_digits(100 * clipped / elements, "%"),
                          two_digits(100 * flushed / elements, "%")));
}

TEST_F(AnalyzeTest, RefusesWhatItCannotMeasure) {
  const std::string saved = trained("saved", {});
  const auto refused = [&](std::vector<std::string> words, int exit_code = 2) {
    words.insert(words.begin(), saved);
    const CommandResult result = analyze(words);
    EXPECT_EQ(result.exit_code, exit_code) << result.output;
    return result.error;
  };
  EXPECT_THAT(refused({"--recipes", "mxfp8,mxfp5"}),
              AllOf(HasSubstr("no recipe \"mxfp5\""), HasSubstr("mxfp8"), Not(HasSubstr("default)"))));
  EXPECT_THAT(refused({"--recipes", "mxfp8,mxfp8"}), HasSubstr("--recipes: names mxfp8 twice"));
  EXPECT_THAT(refused({"--recipes", "mxfp8,"}), HasSubstr("--recipes: the name of a recipe is missing"));
  EXPECT_THAT(refused({"--recipes", "high,bf16"}), HasSubstr("--recipes high,bf16: they quantize no weight"));
  EXPECT_THAT(refused({"--set", "precision.recipe=mxfp8", "--recipes", "mxfp8"}), HasSubstr("precision.recipe mxfp8: excludes --recipes"));
  for (const char* const value : {"=null", "=[\"mxfp8\"]", ".x=mxfp8"})
    EXPECT_THAT(refused({"--set", text("precision.recipe", value)}), HasSubstr("precision.recipe: must be a string, got "));
  EXPECT_THAT(refused({"--set", "precision.recipe=mxfp5"}), AllOf(HasSubstr("no recipe \"mxfp5\""), Not(HasSubstr("default)"))));
  EXPECT_THAT(refused({"--set", "precision.recipe=\"mxfp5\" // a recipe"}), HasSubstr("no recipe \"mxfp5\""));
  EXPECT_THAT(refused({"--set", "precision.recipe=mxfp8", "--set", "precision.recipe=mxfp5"}), HasSubstr("no recipe \"mxfp5\""));
  EXPECT_THAT(refused({"--set", "model.rope_theta=1"}), HasSubstr("section precision"));
  EXPECT_THAT(refused({"--set", "precision.fp8_output_proj=true"}), HasSubstr("precision.fp8_output_proj"));
  test::set_element(saved, "master.layers.1.mlp.down.weight", 96 * 3 + 5, std::numeric_limits<float>::infinity());
  EXPECT_THAT(refused({}, 4), HasSubstr("layers.1.mlp.down.weight[3, 5] is inf"));
}

// Numbers after " | NAME " in a line.
std::string number_after(const std::string& text, const std::string& name) {
  const size_t at = text.find(name) + name.size();
  return text.substr(at, text.find_first_of(" \n", at) - at);
}

TEST_F(AnalyzeTest, LossesAreThoseOfEval) {
  trained("saved", {"training.steps=3"});
  export_to(checkpoint("saved", 3), "folder");
  const std::string data = folder_ / "text.txt";
  for (const std::string& from : {checkpoint("saved", 3), path("folder")}) {
    SCOPED_TRACE(from);
    const std::vector<std::string> on = {"--data", data, "--iters", "3", "--seq-len", "12", "--micro-batch-size", "2"};
    std::vector<std::string> words = test::with({from, "--set", kEven, "--recipes", "mxfp8,mxfp4_qat_mxfp8_act,mine,fp32"}, on);
    const nlohmann::json all = analyzed(words);
    EXPECT_EQ(all["targets"], 3 * 2 * 12);
    EXPECT_EQ(all["seq_len"], 12);
    const auto eval_loss = [&](const std::string& recipe) {
      const CommandResult result = command_result(test::with({"eval", from, "--set", kEven, "--set", "precision.recipe=" + recipe}, on));
      EXPECT_EQ(result.exit_code, 0) << result.error;
      return number_after(result.output, " | loss ");
    };
    const auto six_digits = [](double value) {
      std::ostringstream out;
      out.precision(6);
      out << value;
      return std::move(out).str();
    };
    EXPECT_EQ(six_digits(all["high"]["loss"]), eval_loss("high"));
    for (const nlohmann::json& recipe : all["recipes"]) {
      EXPECT_EQ(six_digits(recipe["loss"]), eval_loss(recipe["recipe"])) << recipe["recipe"];
      EXPECT_TRUE(recipe["kl"] > 0.0 || recipe["recipe"] == "fp32") << recipe["recipe"];
      EXPECT_LT(recipe["kl"], 0.1) << recipe["recipe"];
      EXPECT_GT(recipe["equal_greedy"], 0.8) << recipe["recipe"];
    }
    EXPECT_EQ(analyzed(test::with({from, "--recipes", "high"}, on))["recipes"][0]["kl"], 0.0);
    const std::string table = analyze(words).output;
    EXPECT_THAT(table, AllOf(HasSubstr(text(data, " | 72 targets | seq_len 12")), HasSubstr("\nhigh "), HasSubstr("equal greedy")));
    const double change = std::exp(all["recipes"][1]["loss"].get<double>() - all["high"]["loss"].get<double>()) - 1.0;
    const std::string line = table.substr(table.rfind("\nmxfp4_qat_mxfp8_act "));
    EXPECT_THAT(line.substr(0, line.find('\n', 1)), HasSubstr((change < 0.0 ? "" : "+") + two_digits(100 * change, "%"))) << table;
  }
}

TEST_F(AnalyzeTest, MeasuresPartsAloneAndProposesRules) {
  const std::string saved = trained("saved", {"training.steps=3", "model.num_layers=3"}), from = checkpoint("saved", 3);
  const std::vector<std::string> on = {"--data", folder_ / "text.txt", "--iters", "3"};
  const nlohmann::json all = analyzed(test::with({from, "--modules", "1000"}, on));
  ASSERT_EQ(all["parts"].size(), 2U * 12 + 1) << "two recipes, of which one can round the embedding";
  const auto table = std::ranges::find_if(all["parts"], [](const nlohmann::json& part) { return part["modules"][0] == "embed"; });
  ASSERT_NE(table, all["parts"].end());
  EXPECT_EQ((*table)["recipe"], "mxfp4_qat");
  EXPECT_EQ((*table)["bytes"], 8 * 64 / 2 + 8 * 64 / 32);
  EXPECT_GT((*table)["kl"], 0.0);
  EXPECT_THAT(all["embed_not_measured"]["mxfp8"].get<std::string>(), HasSubstr("embed"));
  EXPECT_EQ(all["embed_not_measured"].size(), 1U);
  EXPECT_THAT(analyze(test::with({from, "--modules", "1"}, on)).output, HasSubstr("\nembed is not measured in mxfp8: "));
  for (size_t i = 1; i < all["parts"].size(); ++i) EXPECT_LE(all["parts"][i]["kl"], all["parts"][i - 1]["kl"]);
  const nlohmann::json& worst = all["parts"][0];
  ASSERT_EQ(worst["modules"].size(), 1U);
  const std::string rule = text(R"(precision.rules=[{"match": ")", worst["modules"][0].get<std::string>(), R"(", "recipe": ")",
                                worst["recipe"].get<std::string>(), "\"}]");
  const CommandResult alone = command_result(test::with({"eval", from, "--set", rule}, on));
  EXPECT_NEAR(worst["loss"].get<double>(), std::stod(number_after(alone.output, " | loss ")), 1e-5) << alone.output << alone.error;
  EXPECT_EQ(analyzed(test::with({from, "--modules", "4"}, on))["parts"].size(), 2U * 4 + 1) << "all layers of a linear together";
  EXPECT_THAT(analyze(test::with({from, "--modules", "4"}, on)).output, HasSubstr("5 parts of 12 linears and the embedding, each alone"));
  EXPECT_THAT(analyze(test::with({from, "--modules", "4", "--recipes", "mxfp8"}, on)).output, HasSubstr("4 parts of 12 linears, each"));

  const std::string file = path("rules.json");
  const CommandResult proposed = analyze(test::with({from, "--budget", "6", "--output", file}, on));
  ASSERT_EQ(proposed.exit_code, 0) << proposed.error;
  EXPECT_THAT(proposed.output, AllOf(HasSubstr("\nproposal | "), HasSubstr("rules.json: written")));
  EXPECT_LE(std::stod(number_after(proposed.output, "proposal | ")), 6.0);
  const CommandResult used = command_result(test::with({"eval", from, "--set-file", file}, on));
  EXPECT_NEAR(std::stod(number_after(used.output, " | loss ")),
              std::stod(number_after(proposed.output.substr(proposed.output.find("proposal | ")), " | loss ")), 2e-5)
      << used.error;
  EXPECT_FALSE(std::filesystem::exists(file + ".tmp"));
  const nlohmann::json again = analyzed(test::with({from, "--set-file", file}, on));
  EXPECT_EQ(again["recipes"].size(), 1U);
  EXPECT_EQ(again["recipes"][0]["recipe"], json_in("rules.json")["precision"]["recipe"]);
  const nlohmann::json printed = analyzed(test::with({from, "--budget", "6"}, on));
  EXPECT_EQ(printed["proposal"]["file"], json_in("rules.json"));
  for (const char* const figure : {"loss", "kl", "equal_greedy"}) EXPECT_EQ(again["recipes"][0][figure], printed["proposal"][figure]);
  EXPECT_EQ(again["recipes"][0]["linears"]["bits_per_weight"], printed["proposal"]["bits_per_weight"]);
  test::write_file(path("analysis.json"), printed.dump());
  const CommandResult page = command_result({"report", path("analysis.json"), "--output", path("page.html")});
  EXPECT_EQ(page.output, path("page.html") + ": 0 runs, 1 analysis\n") << page.error;
  // In mxfp8 a part saves about 8 of its 16 bits, and none of the proposal takes more.
  const nlohmann::json eight = analyzed(test::with({from, "--recipes", "mxfp8", "--budget", "8.1"}, on));
  double sum = 0.0;
  for (const nlohmann::json& part : eight["parts"]) sum += part["kl"].get<double>();
  EXPECT_NEAR(eight["proposal"]["predicted_kl"], sum, 1e-12) << "all parts are taken";
  const CommandResult shown = analyze(test::with({from, "--recipes", "mxfp4_qat", "--modules", "4"}, on));
  const int64_t elements = 3 * 64 * 96;
  EXPECT_THAT(shown.output,
              ContainsRegex("layers.\\{0..2\\}.mlp.down .* " + bytes_text(elements * 2 - (elements / 2 + elements / 32)) + "\n"));
  EXPECT_THAT(analyze(test::with({from, "--budget", "4.2"}, on)).error, HasSubstr("the recipes reach no fewer than 4.25 bits per weight"));
}

TEST_F(AnalyzeTest, RefusesALossThatIsNotFinite) {
  const std::string saved = trained("saved", {});
  test::set_element(saved, "master.final_norm.weight", 3, 3e38F);
  const CommandResult result = analyze({saved, "--data", folder_ / "text.txt", "--iters", "1"});
  EXPECT_EQ(result.exit_code, 5) << result.output;
  EXPECT_THAT(result.error, HasSubstr("high: the loss is not finite"));
  const CommandResult unreachable = analyze({saved, "--data", folder_ / "text.txt", "--iters", "1", "--budget", "4.2"});
  EXPECT_EQ(unreachable.exit_code, 2) << "before losses are measured: " << unreachable.error;
}

TEST_F(AnalyzeTest, OptionsOfLossesNeedData) {
  const std::string saved = trained("saved", {}), data = folder_ / "text.txt";
  const auto refused = [&](std::vector<std::string> words) {
    words.insert(words.begin(), saved);
    const CommandResult result = analyze(words);
    EXPECT_EQ(result.exit_code, 2) << result.output;
    return result.error;
  };
  for (const std::string option : {"--iters", "--seq-len", "--micro-batch-size", "--modules", "--budget"})
    EXPECT_THAT(refused({option, "4"}), HasSubstr(option + ": needs data")) << option;
  EXPECT_THAT(refused({"--dtype", "fp32"}), HasSubstr("--dtype: needs data"));
  EXPECT_THAT(refused({"--data", data, "--output", path("out")}), HasSubstr("--output: is the file of the rules that --budget proposes"));
  EXPECT_THAT(refused({"--data", data, "--budget", "0"}), HasSubstr("--budget: must be positive"));
  EXPECT_THAT(refused({"--data", data, "--modules", "0"}), HasSubstr("--modules: must be positive"));
  EXPECT_THAT(refused({"--data", data, "--budget", "5", "--set", "precision.rules=[]"}), HasSubstr("excludes --modules and --budget"));
  EXPECT_THAT(refused({"--data", path("absent.txt")}), HasSubstr("absent.txt"));
  EXPECT_THAT(refused({"--data", data, "--modules", "4", "--recipes", "bf16"}), HasSubstr("quantize no part of the model"));
  EXPECT_THAT(refused({"--data", data, "--budget", "5", "--output", "/nowhere/at/all"}), HasSubstr("/nowhere"));
}

}  // namespace mantissa::test::analyze_test
