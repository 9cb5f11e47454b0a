// A model, exported in every form that its recipe has: the values of forward, and every byte when it is read and exported again.
#include "checkpoint/checkpoint_manifest.h"
#include "exports.h"
#include "exports_of_runs.h"

namespace mantissa::export_round_trip_test {

using test::error_of;
using test::HfFolder;
using test::logits_of;
using test::Sets;
using test::with;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Case {
  const char *name, *architecture;
  Sets sets;
  std::string conventions = "";  // conventions that have a form of it
  Sets tensors = {};             // tensors of the packed folder
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

const std::string kExperts = R"("num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 96)";

Sets sets_of(const std::string& architecture) {
  if (architecture == "llama") return {"model.qk_norm=false", "model.num_attention_heads=2"};
  if (architecture == "qwen2") return {"model.qk_norm=false", "model.attention_bias=qkv"};
  if (architecture == "qwen3_moe") return {"model.moe={" + kExperts + R"(, "dense_layers": [1]})"};
  if (architecture == "mixtral") return {"model.qk_norm=false", "model.num_attention_heads=2", "model.moe={" + kExperts + "}"};
  if (architecture == "gpt_oss")
    return {"model.qk_norm=false", "model.attention_bias=all", "model.attention_sinks=true", "model.activation=swiglu_clamped",
            "model.moe={" + kExperts + R"(, "router_bias": true, "expert_mlp_bias": true})"};
  if (architecture == "gpt2")
    return {"model.norm=layer",           "model.norm_bias=true",        "model.position=learned",
            "model.activation=gelu_tanh", "model.attention_bias=all",    "model.mlp_bias=true",
            "model.qk_norm=false",        "model.num_attention_heads=2", "model.num_key_value_heads=2"};
  return {};
}

const std::string kOfMxfp8 = "compressed-tensors sglang modelopt", kPlain = "compressed-tensors";
const std::string kTiles = "precision.recipe=fp8_block", kOwn = "precision.recipe=own";
const Sets kShapeOfTiles = {kTiles,
                            "model.hidden_size=128",
                            "model.intermediate_size=256",
                            "model.num_attention_heads=2",
                            "model.num_key_value_heads=2",
                            "model.head_dim=64"};
// The recipe of configs/recipes/deepseek_v4.json.
const Sets kDeepSeekV4 = {
    R"(precision.recipes={"routed": {"base": "fp8_block", "weight": null, "weight_fake_quant": {"format": "e2m1", "block": [1, 32]}}})",
    R"(precision.rules=[{"match": "layers.*.moe.experts.*", "recipe": "routed"}])",
    R"(model.moe={"num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 128, "dense_layers": [0]})"};

// Widths and ties that the case leaves open are drawn.
Sets drawn(const Case& one) {
  const auto words = random_words({.seed = 7, .stream = RngStream::test}, static_cast<uint32_t>(std::string(one.name).size()), 0);
  Sets sets = {text("model.intermediate_size=", 32 * (2 + words[0] % 4)),
               text("model.tie_word_embeddings=", words[1] % 2 == 0 ? "true" : "false")};
  return with(with(sets, sets_of(one.architecture)), one.sets);
}

class ExportRoundTrip : public test::ExportTest, public ::testing::WithParamInterface<Case> {
 protected:
  // Expects a folder to hold the values that forward multiplies by; a second export of it has every byte of the first.
  void expect_faithful(const std::string& name, const std::string& saved, const ExportOptions& options) const {
    EXPECT_EQ(difference(name, saved), std::nullopt);
    EXPECT_EQ(verify_export(path(name)), std::ssize(HfFolder(path(name)).names()));
    export_to(path(name), name + " again", options);
    EXPECT_TRUE(all_bytes(name) == all_bytes(name + " again")) << name;
    EXPECT_EQ(test::read_file(path(name + "/config.json")), test::read_file(path(name + " again/config.json")));
  }
  // Expects GEMMs of the run to read the values of a model that starts from the folder.
  void expect_forward_values(const std::string& saved, const std::string& name) const {
    const LoadedModel trained = load_model(saved, make_backend("cpu")), exported = load_model(path(name), make_backend("cpu"));
    for (Parameter& parameter : trained.model->parameters().all()) {
      if (!parameter.codes().defined() || parameter.name.starts_with("output")) continue;
      const Tensor here = empty(*trained.device, Dtype::f32, parameter.codes().shape);
      trained.device->run(Dequantize{.x = parameter.codes(), .out = here});
      const Tensor there = converted(exported.model->parameters().find(parameter.name)->value(), Dtype::f32);
      EXPECT_EQ(to_host<float>(here), to_host<float>(there)) << parameter.name;
    }
  }
  // A scale that differs is a difference with the name of its weight.
  void expect_difference_of_a_scale(const std::string& name, const std::string& saved) const {
    const HfFolder packed(path(name));
    const std::set<std::string> names = packed.names();
    const auto scale = std::ranges::find_if(
        names, [&](const std::string& tensor) { return tensor.find("_scale") != std::string::npos && packed.shape(tensor).size() > 1; });
    packed.flip(*scale, packed.bytes(*scale).size() - 1, 1).write(path(name));
    EXPECT_THAT(difference(name, saved).value_or(""), HasSubstr(scale->substr(0, scale->find("_scale")) + "["));
  }
  void expect_packed(const std::string& name, const std::string& saved, const ExportOptions& options);
};

void ExportRoundTrip::expect_packed(const std::string& name, const std::string& saved, const ExportOptions& options) {
  const Case& one = GetParam();
  export_to(saved, name, options);
  expect_faithful(name, saved, options);
  export_to(path(name), name + " values");
  EXPECT_TRUE(all_bytes("values") == all_bytes(name + " values")) << name;
  // Other conventions than fp8 have inputs in blocks of 32.
  if (one.sets.front() != kTiles || options.convention == Convention::fp8) {
    EXPECT_EQ(logits_of(path(name)), logits_of(saved)) << name;
  }
  const bool head = std::string(one.name).starts_with("projection");
  EXPECT_EQ(test::read_file(path(name + "/config.json")).find("\"lm_head\"") == std::string::npos, head)
      << "named, tied or not, unless quantized";
  EXPECT_THAT(HfWeights(path(name)).ignore_list_findings(), IsEmpty());
  EXPECT_THAT(HfWeights(path(name)).server_findings(), IsEmpty());
  const HfFolder packed(path(name));
  Sets tensors;
  for (const std::string& tensor : packed.names())
    tensors.push_back(text(tensor, ' ', packed.dtype(tensor), ' ', shape_text(packed.shape(tensor))));
  if (options.convention == Convention::fp8 || one.conventions == kPlain) {
    EXPECT_THAT(tensors, ::testing::IsSupersetOf(one.tensors));
  }
  expect_difference_of_a_scale(name, saved);
}

TEST_P(ExportRoundTrip, HasTheValuesOfForwardAndEveryByteAgain) {
  const Case& one = GetParam();
  const std::string saved = trained("run", drawn(one));
  export_to(saved, "values");
  expect_faithful("values", saved, {});
  expect_forward_values(saved, "values");
  EXPECT_THAT(forward_differences(CheckpointReader(saved).config().model, HfWeights(path("values")).config().model), IsEmpty());
  for (const ExportDtype dtype : {ExportDtype::bf16, ExportDtype::fp32}) {
    const std::string name = choice_name(dtype);
    if (dtype == ExportDtype::bf16 && one.name == std::string("fp32")) {
      const Error error = error_of([&] { export_to(saved, name, {.dtype = dtype}); });
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_THAT(error.what(), HasSubstr("which bf16 does not hold exactly: take dtype auto or fp32"));
      EXPECT_FALSE(std::filesystem::exists(path(name)));
      continue;
    }
    export_to(saved, name, {.dtype = dtype});
    const HfFolder folder(path(name));
    for (const std::string& tensor : folder.names()) {
      const bool router = tensor.find(".router.") != std::string::npos || tensor.ends_with(".gate.weight");  // which computes in fp32
      EXPECT_EQ(folder.dtype(tensor), dtype == ExportDtype::bf16 && !router ? FileDtype::bf16 : FileDtype::f32) << tensor;
    }
  }
  for (const auto& [name, convention] : choices(Convention::fp8)) {
    SCOPED_TRACE(name);
    const ExportOptions options{.weights = ExportWeights::packed, .convention = convention};
    const Sets forms = split(one.conventions, ' ');
    if (std::ranges::find(forms, name) != forms.end()) {
      expect_packed(name, saved, options);
      const bool own_form = one.name == std::string("gpt_oss");
      EXPECT_EQ(json_in(text(name, "/mantissa.json"))["options"]["convention"], own_form ? nlohmann::json() : nlohmann::json(name));
    } else {
      EXPECT_EQ(error_of([&] { export_to(saved, name, options); }).code(), ExitCode::usage);
      EXPECT_FALSE(std::filesystem::exists(path(name)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    , ExportRoundTrip,
    ::testing::Values(
        Case{"fp32", "qwen3", {"precision.dtype=fp32"}}, Case{"high", "llama", {"precision.recipe=high"}},
        Case{"gpt2", "gpt2", {"precision.recipe=mxfp8"}}, Case{"mxfp8", "llama", {"precision.recipe=mxfp8"}, kOfMxfp8},
        Case{"te", "qwen2", {"precision.recipe=mxfp8_te"}, kOfMxfp8}, Case{"mixtral", "mixtral", {"precision.recipe=mxfp8"}, kOfMxfp8},
        Case{"weights", "qwen3", {"precision.recipe=mxfp8_weights"}, kPlain},
        Case{"weights_of_one_layer",
             "qwen3",
             {"precision.recipe=mxfp8_weights", R"(precision.rules=[{"match": "layers.0.*", "recipe": "high"}])"},
             kPlain},
        Case{"qat", "qwen3", {"precision.recipe=mxfp4_qat", "model.tie_word_embeddings=true"}, kPlain},
        Case{"qat_inputs", "qwen3", {"precision.recipe=mxfp4_qat_mxfp8_act"}, kPlain},
        Case{"narrow_inputs",
             "qwen3",
             {"precision.recipe=mxfp4_qat_mxfp4_act", R"(precision.rules=[{"match": "layers.0.*", "recipe": "mxfp4_qat_mxfp8_act"}])"},
             kPlain},
        Case{"mixed", "qwen3", {"precision.recipe=mxfp8", R"(precision.rules=[{"match": "layers.0.*", "recipe": "mxfp4_qat"}])"}, kPlain},
        Case{"experts",
             "qwen3_moe",
             {"precision.recipe=mxfp8", R"(precision.rules=[{"match": "layers.*.moe.experts.*", "recipe": "mxfp4_qat_mxfp8_act"}])"},
             kPlain},
        Case{"projection",
             "qwen3",
             {"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=32", "model.tie_word_embeddings=false"},
             kOfMxfp8},
        Case{"projection_and_one_layer",
             "qwen3",
             {"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=32", "model.tie_word_embeddings=false",
              R"(precision.rules=[{"match": "layers.0.*", "recipe": "high"}])"},
             kOfMxfp8},
        Case{"gpt_oss",
             "gpt_oss",
             {R"(precision.rules=[{"match": "layers.*.moe.experts.*", "recipe": "mxfp4_qat"}])"},
             kPlain,
             {"model.layers.1.mlp.experts.gate_up_proj_blocks U8 [3, 192, 2, 16]",
              "model.layers.1.mlp.experts.gate_up_proj_scales U8 [3, 192, 2]",
              "model.layers.1.mlp.experts.down_proj_blocks U8 [3, 64, 3, 16]"}},
        Case{"range", "qwen3", {kOwn, R"(precision.recipes={"own": {"base": "mxfp8", "weight": {"scale_range": [-20, 125]}}})"}, kOfMxfp8},
        Case{
            "simulated_gradients",
            "qwen3",
            {kOwn, R"(precision.recipes={"own": {"base": "mxfp8", "output_grad": null, "simulate": {"output_grad": {"format": "e5m2"}}}})"},
            kOfMxfp8},
        Case{"tiles",
             "qwen3",
             kShapeOfTiles,
             kOfMxfp8 + " fp8",
             {"model.layers.1.mlp.down_proj.weight F8_E4M3 [128, 256]", "model.layers.1.mlp.down_proj.weight_scale_inv F32 [1, 2]"}},
        Case{"deepseek_v4",
             "qwen3_moe",
             with(with(kShapeOfTiles, {"model.intermediate_size=128"}), kDeepSeekV4),
             "fp8",
             {"model.layers.1.mlp.experts.2.up_proj.weight I8 [128, 64]",
              "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv F8_E8M0 [128, 4]",
              "model.layers.1.self_attn.o_proj.weight F8_E4M3 [128, 128]",
              "model.layers.1.self_attn.o_proj.weight_scale_inv F8_E8M0 [1, 1]"}}),
    [](const auto& one) { return std::string(one.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Nvfp4, ExportRoundTrip,
    ::testing::Values(
        Case{"nvfp4", "qwen3", {"precision.recipe=nvfp4_qat", "model.tie_word_embeddings=true"}, "compressed-tensors modelopt"},
        Case{"nvfp4_experts", "qwen3_moe", {"precision.recipe=nvfp4_qat_nvfp4_act"}, "compressed-tensors modelopt"},
        Case{"nvfp4_inputs",
             "llama",
             {"precision.recipe=nvfp4_qat_nvfp4_act", "model.intermediate_size=80",
              R"(precision.rules=[{"match": "layers.0.attn.qkv", "recipe": "mxfp8"}, {"match": "layers.0.attn.out", "recipe": "nvfp4_qat"},
                  {"match": "layers.0.mlp.*", "recipe": "own"}])",
              R"(precision.recipes={"own": {"base": "nvfp4_qat", "weight_fake_quant": {"tensor_exponent": -3}}})"},
             kPlain,
             {"model.layers.1.mlp.down_proj.weight_packed U8 [64, 40]", "model.layers.1.mlp.down_proj.weight_scale F8_E4M3 [64, 5]",
              "model.layers.1.mlp.down_proj.weight_global_scale F32 [1]", "model.layers.1.mlp.down_proj.input_global_scale F32 [1]"}}),
    [](const auto& one) { return std::string(one.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Edges, ExportRoundTrip,
    ::testing::Values(Case{"blocks_that_end_with_the_row",
                           "qwen3",
                           {"precision.recipe=mxfp8", "model.hidden_size=72", "model.intermediate_size=100", "model.head_dim=36",
                            R"(precision.rules=[{"match": "layers.0.*", "recipe": "mxfp4_qat"}])"}},
                      Case{"rows_of_blocks_that_end_with_the_column",
                           "qwen3",
                           {"precision.recipe=mxfp8", "model.intermediate_size=100", "model.head_dim=36", "model.num_attention_heads=8",
                            R"(precision.rules=[{"match": "*.down", "recipe": "high"}])"},
                           kOfMxfp8},
                      Case{"tiles_that_end_with_the_weight", "qwen3",
                           with(kShapeOfTiles, {"model.hidden_size=192", "model.intermediate_size=320", "model.num_attention_heads=3",
                                                "model.num_key_value_heads=1"}),
                           kOfMxfp8},
                      Case{"rows_that_end_within_a_tile",
                           "qwen3",
                           with(kShapeOfTiles, {"model.hidden_size=192",
                                                R"(precision.rules=[{"match": "layers.*.{attn.qkv,mlp.gate_up}", "recipe": "high"}])"}),
                           kOfMxfp8 + " fp8",
                           {"model.layers.1.mlp.down_proj.weight F8_E4M3 [192, 256]",
                            "model.layers.1.mlp.down_proj.weight_scale_inv F32 [2, 2]",
                            "model.layers.1.self_attn.o_proj.weight_scale_inv F32 [2, 1]"}}),
    [](const auto& one) { return std::string(one.param.name); });

class FoldersRoundTrip : public test::ExportTest {};

TEST_F(FoldersRoundTrip, EveryByteOfWhatWasNeverTrainedComesBack) {
  for (const char* architecture : test::kArchitectureTypes) {
    for (const std::string types : {"F32", "BF16", "F32 BF16", "F16"}) {
      const std::string name = architecture + types;
      SCOPED_TRACE(name);
      const HfFolder original(path(name), architecture, types);
      export_to(path(name), name + " out");
      const HfFolder back(path(name + " out"));
      ASSERT_EQ(back.names(), original.names());
      for (const std::string& tensor : original.names()) {
        if (types == "F16") {
          EXPECT_TRUE(test::same_elements(back.values(tensor), original.values(tensor))) << tensor;
        } else {
          EXPECT_EQ(back.dtype(tensor), original.dtype(tensor)) << tensor;
          EXPECT_TRUE(test::same_elements(back.bytes(tensor), original.bytes(tensor))) << tensor;
        }
      }
      EXPECT_EQ(test::read_file(path(name + " out/tokenizer.json")), test::read_file(path(name + "/tokenizer.json")));
      EXPECT_EQ(json_in(name + " out/config.json")["model_type"], architecture);
    }
  }
}

// The tensor has more elements than are read and converted at once, and more bytes than are hashed at once.
TEST_F(FoldersRoundTrip, ALargeTensorIsWholeAndHashedToTheEnd) {
  const HfFolder original(path("large"), "qwen3", "BF16", {{"vocab_size", 70000}, {"hidden_size", 32}, {"num_hidden_layers", 1}});
  export_to(path("large"), "out");
  EXPECT_TRUE(all_bytes("out") == all_bytes("large"));
  EXPECT_GT(verify_export(path("out")), 0);
  const HfFolder out(path("out"));
  const std::string embed = "model.embed_tokens.weight";
  out.flip(embed, out.bytes(embed).size() - 1, 1).write(path("out"));
  EXPECT_THAT(error_of([&] { verify_export(path("out")); }).what(), HasSubstr(embed + " is not what was exported"));
  EXPECT_THAT(difference("out", path("large")).value_or(""), HasSubstr(embed + "[69999, 31] is "));
}

// The table is read and compared in pieces of 8 MiB.
TEST_F(FoldersRoundTrip, AWideTableIsThatOfTheFileInEveryRow) {
  const HfFolder folder(path("wide"), "qwen3", "F32", {{"vocab_size", 22000}, {"num_hidden_layers", 1}});
  const std::string table = "model.embed_tokens.weight", output = "lm_head.weight";
  const HfFolder tied = folder.copy(table, output);
  ASSERT_GT(folder.bytes(table).size(), size_t{8} << 20);
  tied.write(path("wide"));
  HfWeights weights(path("wide"));
  std::string found(folder.bytes(table).size(), '\0');
  weights.read("embed.weight", whole_box(folder.shape(table)), std::as_writable_bytes(std::span(found)));
  EXPECT_TRUE(found == folder.bytes(table));
  tied.flip(output, found.size() - 1, 1).write(path("wide"));
  EXPECT_THAT(folder_error("wide").what(), HasSubstr("lm_head.weight differs from the embeddings"));
}

// Chunks of an export begin and end inside of tiles, of which each has another scale here.
TEST_F(FoldersRoundTrip, RowsInsideOfTilesAreThoseOfTheWhole) {
  const HfFolder random(path("random"), "llama", "BF16");
  HfWeights source(path("random"));
  RunConfig config = source.run_config();
  config.precision.recipe = "mxfp8";
  const PrecisionPlan plan = resolve_plan(config);
  ForwardWeights weights(source, plan, make_backend("cpu"));
  const std::string name = "layers.0.mlp.gate_up.weight";
  constexpr int64_t kRows = 320, kColumns = 96, kBegin = 5, kEnd = 45;
  std::vector<float> all(kRows * kColumns), some((kEnd - kBegin) * kColumns);
  weights.read(name, 0, kRows, all);
  weights.read(name, kBegin, kEnd, some);
  EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin() + kBegin * kColumns));
  for (const bool codes : {true, false}) {
    const auto read = [&](int64_t first, int64_t last) {
      return codes ? weights.codes(name, first, last) : weights.scales(name, first, last);
    };
    const std::vector<std::byte> whole = read(0, kRows), part = read(kBegin, kEnd);
    const auto width = static_cast<int64_t>(whole.size()) / kRows;
    ASSERT_EQ(std::ssize(part), (kEnd - kBegin) * width);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + kBegin * width)) << codes;
  }
}

// Each of two ranks writes its experts beside the training.
using OnRanks = test::ExportsOfRuns;
TEST_F(OnRanks, ExpertsOfTwoRanksAreExportedAsByOneProcess) {
  Sets sets = with({"model.num_attention_heads=2", "model.head_dim=64", kTiles}, kDeepSeekV4);
  sets.insert(sets.end(), {R"(model.moe={"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128})",
                           R"(checkpoint.export={"weights": "packed", "convention": "fp8"})"});
  run_on({2, 1, false, 2}, "run", sets);
  const auto during = files_of(exported("run", 2));
  expect_same_files(during, files_from(checkpoint("run", 2), "after", {.weights = ExportWeights::packed, .convention = Convention::fp8}));
  EXPECT_NE(during.at("config.json").find("\"expert_dtype\": \"fp4\""), std::string::npos);
}

}  // namespace mantissa::export_round_trip_test
