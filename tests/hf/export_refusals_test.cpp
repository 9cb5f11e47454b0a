// Plans that cannot be exported, by module and rule: a table of options of a run and the words of the refusal. All others can: every rule,
// format and block in every convention.
#include <gmock/gmock.h>

#include "checkpoint_shards.h"
#include "exports.h"
#include "hf/export_weights.h"
#include "mantissa/config/run_config.h"

namespace mantissa::export_refusals_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Sets = std::vector<std::string>;

struct Refused {
  std::string what;
  Sets sets;
  Convention convention = Convention::compressed_tensors;
};

const std::string kOwn = "precision.recipe=own";
std::string own(const std::string& recipe) { return R"(precision.recipes={"own": )" + recipe + "}"; }
std::string moe(int64_t width, const std::string& more = "") {
  return text(R"(model.moe={"num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": )", width, more, "}");
}
std::string rule(const std::string& modules, const std::string& recipe) {
  return R"(precision.rules=[{"match": ")" + modules + R"(", "recipe": ")" + recipe + R"("}])";
}

class ExportRefusals : public test::TrainingTest {
 protected:
  void expect_refused(const Sets& shape, const std::vector<Refused>& refusals) const {
    for (const auto& [what, more, convention] : refusals) {
      SCOPED_TRACE(what);
      Sets sets = shape;
      sets.insert(sets.end(), more.begin(), more.end());
      RunConfig config = this->config("run", sets).config;
      config.model.vocab_size = 8;
      const PrecisionPlan plan = resolve_plan(config);
      const ForwardWeights types(plan);
      const ExportOptions options{.weights = ExportWeights::packed, .convention = convention};
      const Error error = test::error_of([&] { ExportedWeights(types, config.model, options); });
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_THAT(error.what(), HasSubstr(what));
      EXPECT_NO_THROW(ExportedWeights(types, config.model, {})) << "dequantized";
    }
  }
};

TEST_F(ExportRefusals, OfBlocksOf32) {
  expect_refused(
      {"model.hidden_size=64", "model.intermediate_size=128", "model.num_attention_heads=2", "model.head_dim=32", "precision.dtype=bf16"},
      {{"layers.0.attn.qkv (recipe own, e5m2 1x32 rceil): no server reads E5M2 weights",
        {kOwn, own(R"({"base": "mxfp8_weights", "weight": {"format": "e5m2", "block": [1, 32]}})")}},
       {"its input is e4m3 1x32 rceil 2^-22..2^127, and servers quantize inputs to E4M3 only, by rceil with any scale",
        {kOwn, own(R"({"base": "mxfp8", "input": {"scale_range": [-22, 127]}})")}},
       {"its input is e4m3 1x32 floor,", {kOwn, own(R"({"base": "mxfp8", "input": {"rule": "floor"}})")}},
       {"its input is e5m2 1x32 rceil,", {kOwn, own(R"({"base": "mxfp8", "input": {"format": "e5m2"}})")}},
       {"packed weights have blocks of 32", {kOwn, own(R"({"base": "mxfp4_qat", "weight_fake_quant": {"block": [1, 16]}})")}},
       {"packed weights have blocks of 32", {kOwn, own(R"({"base": "mxfp4_qat", "weight_fake_quant": {"block": [1, 64]}})")}},
       {"layers.0.attn.qkv (recipe own) is trained on simulated operands, which have no codes",
        {kOwn, own(R"({"simulate": {"weight": {"format": "e3m2"}}, "gemms": ["fprop", "dgrad"]})")}},
       {"no recipe of the plan quantizes a weight, so there is nothing to pack", {}},
       {"GPT-2 keeps its weights [in, out], where no server reads blocks",
        {"precision.recipe=mxfp8_weights", "model.norm=layer", "model.norm_bias=true", "model.position=learned",
         "model.activation=gelu_tanh", "model.attention_bias=all", "model.mlp_bias=true", "model.qk_norm=false"}},
       {"layers.0.moe.experts.gate_up has recipe mxfp8 (precision.rules.0) and layers.0.moe.experts.down has mxfp4_qat (precision.rules.1)",
        {moe(96), R"(precision.rules=[{"match": "layers.*.moe.experts.gate_up", "recipe": "mxfp8"},
                                      {"match": "layers.*.moe.experts.down", "recipe": "mxfp4_qat"}])"}},
       {"use the convention compressed-tensors", {"precision.recipe=mxfp8_weights"}, Convention::sglang},
       {"use the convention compressed-tensors", {"precision.recipe=mxfp4_qat"}, Convention::modelopt}});
}

TEST_F(ExportRefusals, OfBlocksOf128) {
  const std::string routed = R"(precision.recipes={"routed": {"base": "fp8_block", "weight": null,
      "weight_fake_quant": {"format": "e2m1", "block": [1, 32]}}})";
  const Convention fp8 = Convention::fp8;
  expect_refused(
      {"model.hidden_size=128", "model.intermediate_size=128", "model.num_attention_heads=2", "model.head_dim=64", "precision.dtype=bf16"},
      {{"(recipe mxfp8, e4m3 32x32 rceil): the convention fp8 has E4M3 in tiles of 128x128", {"precision.recipe=mxfp8"}, fp8},
       {"layers.0.attn.qkv (recipe mxfp4_qat, e2m1 1x32 flashinfer): the convention fp8", {"precision.recipe=mxfp4_qat"}, fp8},
       {"its input is in high precision, and servers quantize inputs of the convention fp8",
        {kOwn, own(R"({"base": "mxfp8_weights", "weight": {"block": [128, 128]}})")},
        fp8},
       {"its input is e4m3 1x128 floor,", {kOwn, own(R"({"base": "fp8_block", "input": {"rule": "floor"}})")}, fp8},
       {"layers.0.moe.experts.gate_up (recipe mxfp4_qat_mxfp8_act, e2m1 1x32 flashinfer): its input is e4m3 1x32 rceil",
        {"precision.recipe=fp8_block", moe(128), rule("layers.*.moe.experts.*", "mxfp4_qat_mxfp8_act")},
        fp8},
       {"input is e2m1 1x32 flashinfer",
        {"precision.recipe=fp8_block", moe(128), rule("layers.*.moe.experts.*", "mxfp4_qat_mxfp4_act")},
        fp8},
       {"take the convention fp8, or dequantized weights",
        {"precision.recipe=fp8_block", moe(128), routed, rule("layers.*.moe.experts.*", "routed")}}});
}

// A width of 192 is 1.5 blocks of 128, and one of 80 is 2.5 of 32.
TEST_F(ExportRefusals, OfBlocksThatEndWithTheWeight) {
  const Sets heads = {"model.num_attention_heads=2", "model.head_dim=64", "precision.dtype=bf16", "precision.recipe=fp8_block"};
  const auto with = [&](Sets sets) { return sets.insert(sets.end(), heads.begin(), heads.end()), sets; };
  expect_refused(
      with({"model.hidden_size=192", "model.intermediate_size=256"}),
      {{"layers.0.attn.qkv (recipe fp8_block, e4m3 128x128 rceil): its inputs of 192 elements end within a block of 128, and servers of "
        "the convention fp8 quantize whole blocks only: take the convention compressed-tensors",
        {},
        Convention::fp8}});
  const std::string across = "tiles of 128x128 lie across the rows of model.layers.0.", fused = " and of what it is fused with";
  expect_refused(with({"model.hidden_size=128", "model.intermediate_size=192"}),
                 {{across + "self_attn.k_proj.weight" + fused, {"model.num_key_value_heads=1"}, Convention::fp8},
                  {across + "mlp.gate_proj.weight" + fused, {"model.num_key_value_heads=2", rule("*.down", "high")}, Convention::fp8}});
  const Sets narrow = with({"model.hidden_size=80", "model.intermediate_size=128"});
  const std::string within =
      "layers.0.attn.qkv (recipe fp8_block, e4m3 128x128 rceil): its rows of 80 elements end within a block of 32, and the ";
  const std::string only = " has whole blocks only: take dequantized weights, or leave it in high precision by a rule";
  for (const Convention convention : {Convention::compressed_tensors, Convention::sglang, Convention::modelopt, Convention::fp8})
    expect_refused(narrow, {{text(within, "convention ", choice_name(convention), only), {}, convention}});
  for (const auto& [recipe, how] : {std::pair("mxfp8", "e4m3 32x32 rceil"), {"mxfp4_qat", "e2m1 1x32 flashinfer"}})
    expect_refused(narrow, {{text("layers.0.attn.qkv (recipe ", recipe, ", ", how,
                                  "): its rows of 80 elements end within a block of 32, "
                                  "and the convention compressed-tensors",
                                  only),
                             {text("precision.recipe=", recipe)}}});
  RunConfig config = this->config("run", narrow).config;
  config.model.vocab_size = 8;
  const PrecisionPlan plan = resolve_plan(config);
  const ExportOptions mlx{.format = ExportFormat::mlx, .weights = ExportWeights::packed};
  EXPECT_THAT(test::error_of([&] { ExportedWeights(ForwardWeights(plan), config.model, mlx); }).what(),
              HasSubstr(within + "format mlx" + only));
}

// Its experts have a form of their own.
TEST_F(ExportRefusals, OfGptOss) {
  expect_refused({"model.hidden_size=64", "model.num_attention_heads=2", "model.head_dim=32", "model.qk_norm=false",
                  "model.attention_bias=all", "model.attention_sinks=true", "model.activation=swiglu_clamped",
                  moe(96, R"(, "router_bias": true, "expert_mlp_bias": true)"), "model.intermediate_size=96", "precision.dtype=bf16"},
                 {{"layers.0.moe.experts.down (recipe mxfp4_qat, e2m1 1x32 flashinfer): its rows of 80 elements end within a block of 32, "
                   "and gpt-oss has whole blocks only",
                   {rule("layers.*.moe.experts.*", "mxfp4_qat"), "model.moe.intermediate_size=80"}},
                  {"convention sglang: gpt-oss has a form of its own, blocks and scales: drop the convention",
                   {rule("layers.*.moe.experts.*", "mxfp4_qat")},
                   Convention::sglang},
                  {"gpt-oss has MXFP4 in all layers or none", {rule("layers.1.moe.experts.*", "mxfp4_qat")}},
                  {"of gpt-oss only experts are packed", {"precision.recipe=mxfp8"}},
                  {"of gpt-oss only experts are packed", {"precision.recipe=mxfp4_qat"}},
                  {"of gpt-oss only experts are packed", {rule("layers.*.moe.experts.*", "mxfp4_qat_mxfp8_act")}}});
}

// The way in which a recipe quantizes weights: as an operand beside inputs in the same blocks, or fake-quantized beside inputs in high
// precision.
struct WeightCodes {
  bool operand;
  Quantization how;

  std::string recipe() const {
    const std::string weight = text(R"({"format": ")", format_name(how.format), R"(", "rule": ")", scale_rule_name(how.rule),
                                    R"(", "block": [)", how.block_rows, ", ", how.block_cols, "]}");
    if (!operand) return R"({"base": "mxfp4_qat", "weight_fake_quant": )" + weight + "}";
    const std::string rows = text(R"({"block": [1, )", how.block(), "]}");
    return R"({"base": "mxfp8", "weight": )" + weight + R"(, "input": )" + rows + R"(, "output_grad": )" + rows + "}";
  }
  bool has_form(Convention convention) const {
    const bool whole = how.block_cols % 32 == 0 && (how.format != Format::e2m1 || how.block_cols == 32);
    if (convention == Convention::compressed_tensors) return whole && how.format != Format::e5m2;
    if (convention == Convention::fp8) return operand && how.format == Format::e4m3 && how.block_rows == 128;
    return operand && whole && how.format == Format::e4m3;
  }
};

std::vector<WeightCodes> all_weight_codes() {
  std::vector<WeightCodes> all;
  for (const auto& choice : choices(ScaleRule())) {
    if (choice.value == ScaleRule::nearest) continue;  // which NVFP4 alone has
    const bool flashinfer = choice.value == ScaleRule::flashinfer;
    for (const Format format : {Format::e4m3, Format::e5m2, Format::e2m1}) {
      for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 32}, {32, 32}, {1, 128}, {128, 128}})
        if (format != Format::e2m1 && !flashinfer) all.push_back({true, {format, rows, columns, choice.value}});
      for (const int64_t columns : {16, 32, 64, 128})
        if (format == Format::e2m1 || !flashinfer) all.push_back({false, {format, 1, columns, choice.value}});
    }
  }
  return all;
}

class PackedForms : public test::ExportTest {
 protected:
  const Sets shape_ = {"precision.dtype=bf16", "model.hidden_size=128",       "model.intermediate_size=128",
                       "model.num_layers=1",   "model.num_attention_heads=2", "model.num_key_value_heads=2",
                       "model.head_dim=64"};

  // A checkpoint is that of any recipe: it holds masters.
  RunConfig take_recipe(const std::string& saved, const WeightCodes& codes) const {
    Sets sets = shape_;
    sets.insert(sets.end(), {kOwn, own(codes.recipe())});
    RunConfig changed = CheckpointReader(saved).config();
    changed.precision = config("run", sets).config.precision;
    test::change_manifest(saved, [&](Manifest& manifest) { manifest.config = effective_config(changed); });
    return changed;
  }
  // The run that would export them is refused, too, before it starts.
  void expect_refused(const std::string& saved, RunConfig config, const ExportOptions& options) const {
    const Error error = test::error_of([&] { export_to(saved, "refused", options); });
    EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("layers.0."));
    EXPECT_FALSE(std::filesystem::exists(path("refused")));
    config.checkpoint.exported = options;
    ConfigReport report;
    check_export(config, report);
    EXPECT_TRUE(report.failed("checkpoint"));
  }
  // A folder of values has the same bytes whether it is made of the checkpoint or of its codes.
  void expect_packed(const std::string& saved, RunConfig config, const ExportOptions& options, const std::string& name) const {
    export_to(saved, name, options);
    EXPECT_EQ(difference(name, saved), std::nullopt);
    EXPECT_GT(verify_export(path(name)), 0);
    EXPECT_THAT(export_scheme_differences(HfWeights(path(name)), ModelExport(saved, {}, make_backend("cpu")).weights()), IsEmpty());
    export_to(path(name), name + " again", options);
    EXPECT_TRUE(all_bytes(name) == all_bytes(name + " again"));
    config.checkpoint.exported = options;
    ConfigReport report;
    check_export(config, report);
    EXPECT_FALSE(report.failed("checkpoint"));
    if (options.convention != Convention::compressed_tensors) return;
    export_to(saved, name + " values");
    export_to(path(name), name + " decoded");
    EXPECT_TRUE(all_bytes(name + " values") == all_bytes(name + " decoded"));
  }
  // Counts codes of E2M1 that are -0.
  int64_t negative_zeros(const std::string& folder) const {
    int64_t count = 0;
    for (const auto& [name, bytes] : all_bytes(folder)) {
      if (!name.ends_with("_packed")) continue;
      for (const char byte : bytes) count += ((byte & 0xF) == 8 ? 1 : 0) + ((byte >> 4 & 0xF) == 8 ? 1 : 0);
    }
    return count;
  }
};

TEST_F(PackedForms, OfEveryRuleFormatAndBlockVerifyOrAreRefusedByModule) {
  const std::string saved = trained("run", shape_);
  int packed = 0;
  for (const WeightCodes& codes : all_weight_codes()) {
    const RunConfig config = take_recipe(saved, codes);
    for (const auto& [convention_name, convention] : choices(Convention())) {
      const std::string name = text(codes.how, codes.operand ? " operand " : " fake ", convention_name);
      SCOPED_TRACE(name);
      const ExportOptions options{.weights = ExportWeights::packed, .convention = convention};
      if (!codes.has_form(convention)) {
        expect_refused(saved, config, options);
        continue;
      }
      expect_packed(saved, config, options, name);
      ++packed;
      if (codes.how.format != Format::e2m1) continue;
      // Readers of the file decode -0, and the forward of flashinfer has none.
      EXPECT_EQ(negative_zeros(name) == 0, codes.how.rule == ScaleRule::flashinfer);
    }
  }
  EXPECT_EQ(packed, 5 * (4 * 3 + 1) + 5 * 3 + 6) << "operands of E4M3, fake-quantized E4M3 and E2M1";
}

TEST(ExportWarnings, NameRotationsThatAServerLacks) {
  ModelConfig model;
  model.max_position_embeddings = 256;
  model.rope_scaling = {.type = RopeScaling::yarn, .factor = 4, .original_max_position_embeddings = 64};
  EXPECT_THAT(export_warnings(model, ExportFormat::hf), IsEmpty());
  model.rope_scaling->original_max_position_embeddings = 32;
  EXPECT_THAT(export_warnings(model, ExportFormat::hf), testing::ElementsAre(HasSubstr("model.rope_scaling: vLLM has rotations for")));
}

// mlx-lm alone reads the format mlx, and llama.cpp GGUF.
TEST(ExportWarnings, NameProgramsThatReadTheFormat) {
  ModelConfig model;
  model.moe.emplace();
  model.moe->capacity_factor = 1.5;
  model.moe->dense_layers = {0};
  model.rope_scaling = {.type = RopeScaling::yarn, .factor = 4, .original_max_position_embeddings = 32};
  model.max_position_embeddings = 256;
  const std::string drops = "model.moe.capacity_factor: training drops";
  EXPECT_THAT(
      export_warnings(model, ExportFormat::hf, Tokenizer::bytes()),
      testing::ElementsAre(HasSubstr(drops), HasSubstr("not by llama.cpp"), HasSubstr("vLLM"), HasSubstr("llama.cpp knows tokenizers")));
  for (const ExportFormat format : {ExportFormat::mlx, ExportFormat::gguf})
    EXPECT_THAT(export_warnings(model, format, Tokenizer::bytes()), testing::ElementsAre(HasSubstr(drops)));
}

}  // namespace mantissa::export_refusals_test
