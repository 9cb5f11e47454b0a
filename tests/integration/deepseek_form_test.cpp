// Routed experts of MXFP4 beside tiles of E4M3, as DeepSeek-V4 has them, and whether MXFP4 is E4M3 in tiles.
#include "block_fp8_folders.h"
#include "exports_of_runs.h"
#include "mantissa/hf/tile_fit.h"
#include "process.h"

namespace mantissa::test::deepseek_form_test {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// As configs/recipes/deepseek_v4.json has it.
const std::string kRoutedExperts =
    R"(precision.recipes={"routed": {"base": "fp8_block", "weight": null, "weight_fake_quant": {"format": "e2m1", "block": [1, 32]}}})";
const std::string kRoutedRule = R"(precision.rules=[{"match": "layers.*.moe.experts.*", "recipe": "routed"}])";

class DeepSeekV4 : public BlockFp8 {
 protected:
  std::vector<std::string> sets() const {
    return {"model.hidden_size=128",
            "model.intermediate_size=128",
            "model.num_attention_heads=2",
            "model.num_key_value_heads=2",
            "model.head_dim=64",
            "training.steps=3",
            "model.max_position_embeddings=16",
            "precision.dtype=bf16",
            "precision.recipe=fp8_block",
            R"(model.moe={"num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 128, "dense_layers": [0]})",
            kRoutedExperts,
            kRoutedRule};
  }
};
const std::string kExpert = "model.layers.1.mlp.experts.2.up_proj.weight";

TEST_F(DeepSeekV4, ARunIsExportedInItsForm) {
  run("run", sets());
  const std::string saved = checkpoint("run", 3);
  pack(saved, "packed");
  const HfFolder packed(path("packed"));
  EXPECT_EQ(packed.dtype(kExpert), FileDtype::i8);
  EXPECT_EQ(packed.shape(kExpert), (std::vector<int64_t>{128, 64}));
  EXPECT_EQ(packed.dtype(kExpert + kScaleInv), FileDtype::f8_e8m0);
  EXPECT_EQ(packed.shape(kExpert + kScaleInv), (std::vector<int64_t>{128, 4}));
  const std::string out = "model.layers.1.self_attn.o_proj.weight";
  EXPECT_EQ(packed.dtype(out), FileDtype::f8_e4m3);
  EXPECT_EQ(packed.dtype(out + kScaleInv), FileDtype::f8_e8m0);
  const json config = json::parse(read_file(path("packed/config.json")));
  EXPECT_EQ(config["expert_dtype"], "fp4");
  EXPECT_FALSE(config["quantization_config"].contains("expert_dtype"));
  EXPECT_EQ(difference("packed", saved), std::nullopt);
  EXPECT_EQ(logits_of(path("packed")), logits_of(saved));
  pack(path("packed"), "again");
  EXPECT_EQ(all_bytes("again"), all_bytes("packed"));
  EXPECT_EQ(read_file(path("again/config.json")), read_file(path("packed/config.json")));
  EXPECT_THAT(HfWeights(path("packed")).block_fp8_findings(), IsEmpty());
  EXPECT_THAT(HfWeights(path("packed")).ignore_list_findings(), IsEmpty());
  EXPECT_THAT(error_of([&] { pack_to(saved, "refused"); }).what(), HasSubstr("take the convention fp8, or dequantized weights"));
  export_model(path("packed"), path("narrow"), {.dtype = ExportDtype::bf16}, make_backend("cpu"));
  const HfFolder narrow(path("narrow"));
  for (const std::string& name : narrow.names())
    EXPECT_EQ(narrow.dtype(name), name.ends_with("mlp.gate.weight") ? FileDtype::f32 : FileDtype::bf16) << name;
  // 3 experts of three tensors of one tile.
  const ProcessResult verified = run_mantissa({"verify", "packed", "--against", run_folder("run")}, folder_.path());
  EXPECT_EQ(verified.exit_code, 0) << verified.errors;
  EXPECT_THAT(verified.output, HasSubstr("9 tiles of 128x128 in MXFP4: all are E4M3 without loss\n"));
}

// DeepSeek-V4 says "scale" for all scales.
TEST_F(DeepSeekV4, ScalesMayHaveItsNames) {
  run("run", sets());
  pack(checkpoint("run", 3), "packed");
  HfFolder named(path("packed"));
  for (const std::string& name : named.names()) {
    if (!name.ends_with(kScaleInv)) continue;
    named = named.copy(name, name.substr(0, name.size() - std::string("weight_scale_inv").size()) + "scale").without(name);
  }
  named.write(path("named"));
  pack(path("named"), "again");
  EXPECT_EQ(all_bytes("again"), all_bytes("packed"));
  named.as("model.layers.1.mlp.experts.2.up_proj.scale", FileDtype::u8, {128, 4}).write(path("bad"));
  EXPECT_THAT(folder_error("bad").what(), HasSubstr(kExpert + " is I8 with scales in U8; of quant_method fp8 mantissa reads"));
  named.as("model.layers.1.mlp.experts.2.up_proj.scale", FileDtype::f8_e8m0, {4, 128}).write(path("bad"));
  EXPECT_THAT(folder_error("bad").what(), HasSubstr("up_proj.scale is [4, 128], config.json makes it [128, 4]"));
  named.as(kExpert, FileDtype::i8, {64, 128}).write(path("bad"));
  EXPECT_THAT(folder_error("bad").what(), HasSubstr(kExpert + " is [64, 128], config.json makes it [128, 64]"));
  json config = json::parse(read_file(path("packed/config.json")));
  config.erase("expert_dtype");
  named.write(path("named"));
  write_file(path("named/config.json"), config.dump());
  EXPECT_THAT(folder_error("named").what(), HasSubstr("is e4m3 with quantized inputs in blocks of 128, but model.layers.1.mlp.experts.0."));
}

// Experts whose width is no whole blocks of 128 have inputs in high precision here.
TEST_F(DeepSeekV4, NarrowExpertsHaveInputsInHighPrecisionWhichIsTold) {
  json change = {
      {"hidden_size", 128}, {"intermediate_size", 128}, {"head_dim", 64}, {"num_key_value_heads", 2}, {"moe_intermediate_size", 64}};
  change["quantization_config"] = kBlockFp8Config;
  change["quantization_config"]["modules_to_not_convert"] = {"lm_head", R"(model\.layers\.\d+\.self_attn)"};
  change["expert_dtype"] = "fp4";
  HfFolder folder(path("narrow"), "qwen3_moe", "BF16", change);
  for (const std::string& weight : folder.names()) {
    if (weight.find(".experts.") == std::string::npos) continue;
    const int64_t rows = folder.shape(weight)[0], columns = folder.shape(weight)[1];
    folder = folder.put(weight, FileDtype::i8, {rows, columns / 2}, code_bytes_of(weight, rows * columns / 2))
                 .put(weight + kScaleInv, FileDtype::f8_e8m0, {rows, columns / 32},
                      scale_bytes(FileDtype::f8_e8m0, weight, rows * columns / 32, power_of_two));
  }
  folder.write(path("narrow"));
  const HfWeights weights(path("narrow"));
  EXPECT_THAT(weights.block_fp8_findings(),
              ElementsAre(AllOf(HasSubstr("4 weights whose inputs servers quantize in blocks of 128"),
                                HasSubstr("no whole blocks, the first of layers.0.moe.experts.down: their inputs are not quantized"))));
  EXPECT_THAT(weights.weights_as_values(), IsEmpty());
  const Recipe recipe = resolve_plan(weights.run_config()).of("layers.0.moe.experts.down").recipe;
  EXPECT_EQ(recipe.weight_fake_quant, packed_form(Format::e2m1));
  EXPECT_FALSE(recipe.input);
  EXPECT_NO_THROW(require_usable(path("narrow")));
}

// Some programs write names without the prefix of the base model.
TEST_F(DeepSeekV4, TensorsMayHaveNoPrefix) {
  run("run", sets());
  pack(checkpoint("run", 3), "packed");
  HfFolder bare(path("packed"));
  for (const std::string& name : bare.names())
    if (name.starts_with("model.")) bare = bare.copy(name, name.substr(6)).without(name);
  bare.write(path("bare"));
  EXPECT_EQ(difference("bare", path("packed")), std::nullopt);
}

TEST_F(DeepSeekV4, ExpertDtypeIsOfQuantMethodFp8) {
  json change = {{"expert_dtype", "fp4"}};
  change["quantization_config"] = {{"quant_method", "mxfp4"}};
  write_file(path("config.json"), [&] {
    json config = architecture_json("qwen3_moe");
    config.update(change);
    return config.dump();
  }());
  EXPECT_THAT(error_of([&] { read_architecture_config(read_file(path("config.json")), "config.json"); }).what(),
              AllOf(HasSubstr("config.json: expert_dtype"), HasSubstr("it is of quant_method fp8")));
}

// Scales whose powers of two differ by 14 fit whatever the codes are; beyond it depends on the codes.
TEST_F(DeepSeekV4, VerifyCountsTilesThatAreNoE4M3) {
  run("run", sets());
  pack(checkpoint("run", 3), "packed");
  HfFolder folder(path("packed"));
  const auto fit_with = [&](const std::string& codes, const std::string& scales) {
    folder.put(kExpert, FileDtype::i8, {128, 64}, codes)
        .put(kExpert + kScaleInv, FileDtype::f8_e8m0, {128, 4}, scales)
        .write(path("packed"));
    HfWeights weights(path("packed"));
    return fit_of_tiles(weights);
  };
  const auto scales_of = [](int last) {
    std::string scales(512, '\x70');
    scales.back() = static_cast<char>(last);
    return scales;
  };
  const std::string least(size_t{128} * 64, '\x11'), largest(size_t{128} * 64, '\x77');  // 0.5 and 6
  std::string both = largest;
  both.back() = '\x11';
  EXPECT_EQ(fit_with(both, scales_of('\x70' - 14)).lossy, 0);
  const TileFit lost = fit_with(both, scales_of('\x70' - 15));  // 6 is 1.5 * 2^2, and the other 2^-16 of its scale
  EXPECT_EQ(lost.tiles, 9);
  EXPECT_EQ(lost.lossy, 1);
  EXPECT_EQ(lost.first, kExpert + ", rows 0 to 127, columns 0 to 127");
  both.back() = '\x33';  // 1.5, of which the last bit is that of 0.5
  EXPECT_EQ(fit_with(both, scales_of('\x70' - 14)).lossy, 0);
  EXPECT_EQ(fit_with(both, scales_of('\x70' - 15)).lossy, 1);
  both.back() = '\x22';  // 1
  EXPECT_EQ(fit_with(both, scales_of('\x70' - 15)).lossy, 0);
  EXPECT_EQ(fit_with(both, scales_of('\x70' - 16)).lossy, 1);
  EXPECT_EQ(fit_with(least, scales_of('\x70' - 17)).lossy, 0);
  EXPECT_EQ(fit_with(least, scales_of('\x70' - 18)).lossy, 1);
  std::string zeros = largest;  // but for the last block, whose scale then does not matter
  for (size_t i = zeros.size() - 16; i < zeros.size(); ++i) zeros[i] = static_cast<char>(i % 2 == 0 ? 0x80 : 0x08);
  EXPECT_EQ(fit_with(zeros, scales_of('\x10')).lossy, 0);
  zeros.back() = static_cast<char>(0x18);
  EXPECT_EQ(fit_with(zeros, scales_of('\x10')).lossy, 1);
  EXPECT_THAT(error_of([&] { fit_with(zeros, scales_of('\xff')); }).what(), HasSubstr(kExpert + ": a scale of row 127 is NaN"));
  fit_with(both, scales_of('\x10'));
  EXPECT_THAT(run_mantissa({"verify", "packed", "--against", "packed"}, folder_.path()).output,
              HasSubstr("1 of 9 tiles of 128x128 in MXFP4 lose an element as E4M3, the first of " + kExpert));
}

// Each of two ranks writes its experts beside the training.
using OnRanks = ExportsOfRuns;
TEST_F(OnRanks, ExpertsOfTwoRanksAreExportedAsByOneProcess) {
  const TensorLayout layout{2, 1, false, 2};
  run_on(layout, "run",
         {"model.num_attention_heads=2", "model.head_dim=64", "precision.recipe=fp8_block",
          R"(model.moe={"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128})", kRoutedExperts, kRoutedRule,
          R"(checkpoint.export={"weights": "packed", "convention": "fp8"})"});
  const auto during = files_of(exported("run", 2));
  expect_same_files(during, files_from(checkpoint("run", 2), "after", {.weights = ExportWeights::packed, .convention = Convention::fp8}));
  EXPECT_NE(during.at("config.json").find("\"expert_dtype\": \"fp4\""), std::string::npos);
}

}  // namespace mantissa::test::deepseek_form_test
