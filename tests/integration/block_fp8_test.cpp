// Block FP8 as other programs wrote it: values by the definition of the format, codes where they can be, and messages about the rest.
#include "block_fp8_folders.h"
#include "checkpoint/saved_model.h"
#include "hf/tile_scales.h"
#include "models/model_shape.h"
#include "process.h"
#include "thread_ranks.h"

namespace mantissa::test::block_fp8_test {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(BlockFp8, ValuesAreCodesTimesTheScaleOfTheirTileRoundedOnce) {
  for (const FileDtype dtype : {FileDtype::f32, FileDtype::bf16}) {
    for (const json& sizes : {kWhole, kRagged}) {
      const HfFolder folder = block_folder("numbers", sizes, dtype, any_number);
      expect_values_of_the_formula(folder, "numbers", any_number);
      const HfWeights weights(path("numbers"));
      EXPECT_FALSE(weights.form("layers.1.mlp.down.weight").codes);
      EXPECT_THAT(weights.run_config().precision.rules, IsEmpty());
      const std::vector<std::string> findings = weights.server_findings();
      ASSERT_EQ(findings.size(), 2U);
      EXPECT_EQ(weights.weights_as_values(), std::vector{findings[0]});
      EXPECT_THAT(findings[1], HasSubstr("8 weights whose inputs servers quantize in blocks of 128, but which are values here (first: "
                                         "layers.0.attn.out): their inputs are not quantized"));
      EXPECT_THAT(findings[0], AllOf(HasSubstr("numbers: 8 weights with scales that are not powers of two (first: model.layers.0."),
                                     HasSubstr("_proj.weight_scale_inv[0, 0] is "), HasSubstr("read as values")));
    }
  }
  export_to(path("numbers"), "values");
  EXPECT_EQ(difference("values", path("numbers")), std::nullopt);
  EXPECT_EQ(HfFolder(path("values")).dtype(kDownWeight), FileDtype::f32);
  // This export has the values that forward multiplies by where config.json says bfloat16, and is as large as that of DeepSeek's own
  // script.
  export_to(path("numbers"), "narrow", {.dtype = ExportDtype::bf16});
  EXPECT_EQ(HfFolder(path("narrow")).dtype(kDownWeight), FileDtype::bf16);
  EXPECT_EQ(difference("narrow", path("numbers")), std::nullopt);
  EXPECT_EQ(logits_of(path("narrow")), logits_of(path("numbers")));
  HfFolder(path("narrow")).flip(kDownWeight, 6, 1).write(path("narrow"));
  EXPECT_THAT(difference("narrow", path("numbers")).value_or(""), HasSubstr(kDownWeight + "[0, 3] is "));
  HfFolder(path("plain"), "llama", "F32", json{{"torch_dtype", "bfloat16"}});  // values that a file has in fp32 are not rounded
  EXPECT_EQ(error_of([&] { export_to(path("plain"), "refused", {.dtype = ExportDtype::bf16}); }).code(), ExitCode::usage);
}

TEST_F(BlockFp8, PowersOfTwoAreTilesThatComeOutAsTheyCame) {
  for (const FileDtype dtype : {FileDtype::f32, FileDtype::bf16, FileDtype::f8_e8m0}) {
    const std::string name = file_dtype_name(dtype);
    const HfFolder folder = block_folder(name, kWhole, dtype, power_of_two);
    expect_values_of_the_formula(folder, name, power_of_two);
    const HfWeights weights(path(name));
    EXPECT_THAT(weights.server_findings(), IsEmpty());
    const Recipe recipe = resolve_plan(weights.run_config()).of("layers.1.attn.qkv").recipe;
    EXPECT_EQ(recipe.weight, (Quantization{.format = Format::e4m3, .block_rows = 128, .block_cols = 128}));
    EXPECT_EQ(recipe.input, (Quantization{.format = Format::e4m3, .block_cols = 128}));
    pack(path(name), name + " again");
    EXPECT_TRUE(all_bytes(name + " again") == all_bytes(name));
    EXPECT_EQ(difference(name + " again", path(name)), std::nullopt);
    EXPECT_THAT(HfWeights(path(name + " again")).ignore_list_findings(), IsEmpty());
    export_to(path(name), name + " values");
    EXPECT_EQ(HfFolder(path(name + " values")).dtype(kDownWeight), FileDtype::bf16);
    EXPECT_EQ(difference(name + " values", path(name)), std::nullopt);
    pack_to(path(name), name + " of 32");  // each scale for 128 rows and four blocks
    EXPECT_EQ(difference(name + " of 32", path(name)), std::nullopt);
  }
  // A run of other blocks says what changes.
  const HfWeights codes(path("F32"));
  EXPECT_THAT(reconciled_weights(codes, resolve_plan(codes.run_config())), IsEmpty());
  RunConfig config = codes.run_config();
  config.precision = {};
  config.precision.recipe = "mxfp8";
  EXPECT_THAT(reconciled_weights(codes, resolve_plan(config)),
              Contains("layers.{0..1}.mlp.down: e4m3 128x128 in the file, e4m3 32x32 here"));
}

// E4M3 with the least scales of E8M0 has numbers that bf16 has not.
TEST_F(BlockFp8, TheTypeOfValuesIsTheNarrowestThatHoldsEachTensor) {
  constexpr Scale least = [](const std::string& name, uint64_t tile) {
    const bool down = name.find("down_proj") != std::string::npos;
    const int above = name.find("layers.0.") != std::string::npos ? 2 : static_cast<int>(tile % 3);
    return std::ldexp(1.0F, down ? -127 + above : -124);
  };
  const auto has_types = [&](const std::string& name) {  // down_proj is fp32, and all else bf16
    const HfFolder values(path(name));
    return std::ranges::all_of(values.names(), [&](const std::string& tensor) {
      return (values.dtype(tensor) == FileDtype::f32) == (tensor.find("down_proj") != std::string::npos);
    });
  };
  const auto expect_narrowest = [&](const std::string& name) {
    export_to(path(name), name + " values");
    EXPECT_TRUE(has_types(name + " values")) << name;
    EXPECT_EQ(difference(name + " values", path(name)), std::nullopt);
    const Error error = error_of([&] { export_to(path(name), "refused", {.dtype = ExportDtype::bf16}); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("down_proj.weight["), HasSubstr("take dtype auto or fp32")));
  };
  for (const FileDtype dtype : {FileDtype::f32, FileDtype::bf16, FileDtype::f8_e8m0}) {
    const std::string name = file_dtype_name(dtype);
    expect_values_of_the_formula(block_folder(name, kWhole, dtype, least), name, least);
    expect_narrowest(name);
  }
  folder_of("of 32", {{"quantization_config", kMxfp8Config}}, "_proj.weight", {.scale = least});
  expect_narrowest("of 32");
  // Values in place of codes are looked at, too.
  block_folder("ragged", kRagged, FileDtype::f8_e8m0, least);
  export_to(path("ragged"), "ragged values");
  EXPECT_TRUE(has_types("ragged values"));
  EXPECT_EQ(difference("ragged values", path("ragged")), std::nullopt);
  // These codes are numbers that bf16 has with any scale.
  HfFolder ones = block_folder("ones", kWhole, FileDtype::f32, least);
  for (const std::string& tensor : ones.names())
    if (tensor.ends_with("down_proj.weight"))
      ones = ones.put(tensor, FileDtype::f8_e4m3, ones.shape(tensor), std::string(ones.bytes(tensor).size(), '\x38'));
  ones.write(path("ones"));
  export_to(path("ones"), "ones values");
  EXPECT_EQ(HfFolder(path("ones values")).dtype(kDownWeight), FileDtype::bf16);
  EXPECT_EQ(difference("ones values", path("ones")), std::nullopt);
}

// A weight of several tensors is codes only where all of these are.
TEST_F(BlockFp8, AScaleOfAnyNumberInOnePartMakesValuesOfTheWholeWeight) {
  const auto expect_values = [&](const std::string& part, Scale scale) {
    const HfFolder folder = block_folder(part, kWhole, FileDtype::f32, scale);
    expect_values_of_the_formula(folder, part, scale);
    const HfWeights weights(path(part));
    EXPECT_FALSE(weights.form("layers.1.attn.qkv.weight").codes) << part;
    EXPECT_TRUE(weights.form("layers.1.attn.out.weight").codes) << part;
    EXPECT_THAT(weights.weights_as_values(), ElementsAre(HasSubstr(part + "_proj.weight_scale_inv[0, 0] is ")));
  };
  expect_values("q", [](const std::string& name, uint64_t tile) {
    return name.find("q_proj") != std::string::npos ? any_number(name, tile) : power_of_two(name, tile);
  });
  expect_values("k", [](const std::string& name, uint64_t tile) {
    return name.find("k_proj") != std::string::npos ? any_number(name, tile) : power_of_two(name, tile);
  });
  expect_values("v", [](const std::string& name, uint64_t tile) {
    return name.find("v_proj") != std::string::npos ? any_number(name, tile) : power_of_two(name, tile);
  });
}

// Rows of v begin within a tile of q, k and v together.
TEST_F(BlockFp8, TilesThatAreNoneOfTheWholeParameterAreReadAsValuesAndTold) {
  const HfFolder folder = block_folder("boundaries", changed(kWhole, {{"num_key_value_heads", 1}}), FileDtype::f8_e8m0, power_of_two);
  expect_values_of_the_formula(folder, "boundaries", power_of_two);
  const HfWeights weights(path("boundaries"));
  EXPECT_THAT(weights.server_findings(),
              ElementsAre(AllOf(HasSubstr("2 weights whose tiles of 128x128 are not tiles of the parameter that they are a part of"),
                                HasSubstr("(first: model.layers.0.self_attn.k_proj.weight in layers.0.attn.qkv.weight)")),
                          HasSubstr("2 weights whose inputs servers quantize in blocks of 128")));
  EXPECT_FALSE(weights.form("layers.0.attn.qkv.weight").codes);
  EXPECT_TRUE(weights.form("layers.0.attn.out.weight").codes);
  pack(path("boundaries"), "packed");
  const HfFolder packed(path("packed"));
  EXPECT_EQ(packed.bytes(kDownWeight + kScaleInv), folder.bytes(kDownWeight + kScaleInv));
  EXPECT_EQ(packed.bytes(kDownWeight), folder.bytes(kDownWeight));
  EXPECT_EQ(packed.dtype("model.layers.0.self_attn.q_proj.weight"), FileDtype::bf16) << "which holds them";
  EXPECT_EQ(difference("packed", path("boundaries")), std::nullopt);
  EXPECT_THAT(json_in("packed/config.json")["quantization_config"]["modules_to_not_convert"], Contains("model.layers.1.self_attn.v_proj"));
  EXPECT_THAT(HfWeights(path("packed")).server_findings(), IsEmpty());
}

// Tiles at the edges hold what is there. No server quantizes inputs that end within a block of 128; those of blocks of 32 do.
TEST_F(BlockFp8, TilesThatEndWithTheWeightAreCodes) {
  const HfFolder ragged = block_folder("ragged", kRagged, FileDtype::f8_e8m0, power_of_two);
  expect_values_of_the_formula(ragged, "ragged", power_of_two);
  const HfWeights weights(path("ragged"));
  for (const std::string module : {"attn.out", "mlp.down"}) EXPECT_TRUE(weights.form("layers.1." + module + ".weight").codes) << module;
  for (const std::string module : {"attn.qkv", "mlp.gate_up"}) EXPECT_FALSE(weights.form("layers.1." + module + ".weight").codes) << module;
  const Recipe recipe = resolve_plan(weights.run_config()).of("layers.1.mlp.down").recipe;
  EXPECT_EQ(recipe.weight, (Quantization{.format = Format::e4m3, .block_rows = 128, .block_cols = 128}));
  EXPECT_EQ(recipe.input, (Quantization{.format = Format::e4m3, .block_cols = 128}));
  EXPECT_THAT(
      error_of([&] { pack(path("ragged"), "refused"); }).what(),
      AllOf(HasSubstr("layers.0.attn.out (recipe packed_e4m3_inputs_128, e4m3 128x128 rceil): its inputs of "),
            HasSubstr("end within a block of 128, and servers of the convention fp8 quantize whole blocks only: take the convention "
                      "compressed-tensors")));
  pack_to(path("ragged"), "of 32");
  EXPECT_EQ(difference("of 32", path("ragged")), std::nullopt);
  EXPECT_EQ(HfFolder(path("of 32")).bytes(kDownWeight), ragged.bytes(kDownWeight));

  // Blocks belong to one rank each.
  const auto on_two = [&](const ModelUse& use) {
    return run_ranks(
        2, [&](const Communicator& world) { load_model(path("ragged"), make_backend("cpu"), make_mesh(world, {.tensor = 2}), use); });
  };
  EXPECT_THAT(on_two({}), Each(AllOf(StartsWith("2: "), HasSubstr("cannot be divided among the 2 ranks"),
                                     HasSubstr("--set precision.recipe=high reads the codes of the folder as numbers"))));
  EXPECT_THAT(on_two({.precision = {"precision.recipe=high"}}), Each(""));
  EXPECT_THAT(on_two({.precision = {"precision.recipe=mxfp8"}}), Each(Not(HasSubstr("as numbers")))) << "as the user has it";

  // Rows alone end within a tile: of down_proj and o_proj, and of v_proj, the last of its parameter.
  const json rows = changed(kWhole, {{"hidden_size", 256 + 64}, {"num_attention_heads", 4}, {"num_key_value_heads", 2}});
  const auto only =
      changed(kBlockFp8Config, {{"modules_to_not_convert", {"lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}}});
  const CodesForm form{.scales = FileDtype::f32, .suffix = kScaleInv, .rows = 128, .columns = 128, .scale = power_of_two};
  HfFolder edge(path("edge"), "qwen3", "BF16", changed(rows, {{"quantization_config", only}}));
  for (const std::string& weight : edge.names())
    if (weight.ends_with("o_proj.weight") || weight.ends_with("down_proj.weight")) edge = with_codes(edge, weight, form);
  edge.write(path("edge"));
  expect_values_of_the_formula(edge, "edge", power_of_two);
  pack(path("edge"), "edge again");
  EXPECT_EQ(HfFolder(path("edge again")).shape(kDownWeight + kScaleInv), (std::vector<int64_t>{3, 3}));
  EXPECT_TRUE(all_bytes("edge again") == all_bytes("edge"));
  EXPECT_EQ(difference("edge again", path("edge")), std::nullopt);
  EXPECT_EQ(logits_of(path("edge again")), logits_of(path("edge")));
}

// The recipes of a folder are those of its files; scales by any number, which servers use, are told, and so is what nothing computes with.
TEST_F(BlockFp8, WhatServersComputeOtherwiseIsTold) {
  block_folder("float", kWhole, FileDtype::f32, power_of_two, changed(kBlockFp8Config, {{"scale_fmt", "absent"}}));
  EXPECT_THAT(HfWeights(path("float")).server_findings(),
              ElementsAre(HasSubstr("scale_fmt is not ue8m0, so servers scale inputs by arbitrary")));
  const ProcessResult result = run_mantissa({"export", "float", "--output", "out"}, folder_.path());
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.errors + result.output, HasSubstr("scale_fmt is not ue8m0"));

  const HfFolder output = block_folder("output", changed(kWhole, {{"vocab_size", 256}}), FileDtype::f32, power_of_two,
                                       changed(kBlockFp8Config, {{"modules_to_not_convert", json::array()}}));
  with_codes(output, "lm_head.weight", {.scales = FileDtype::f32, .suffix = kScaleInv, .rows = 128, .columns = 128}).write(path("output"));
  EXPECT_THAT(HfWeights(path("output")).weights_as_values(),
              ElementsAre(HasSubstr("output: read as values, because output projections and routers have no block FP8 here")));

  deepseek_folder("narrow", 64);  // whose inputs are less than a block of 128
  const HfWeights weights(path("narrow"));
  EXPECT_THAT(weights.server_findings(), IsEmpty());
  const Recipe recipe = resolve_plan(weights.run_config()).of("layers.0.moe.experts.down").recipe;
  EXPECT_EQ(recipe.weight_fake_quant, packed_form(Format::e2m1));
  EXPECT_EQ(recipe.input, (Quantization{.format = Format::e4m3, .block_cols = 128}));
  EXPECT_NO_THROW(require_usable(path("narrow")));
}

TEST_F(BlockFp8, TilesOfSeveralChunksAreThoseOfTheFile) {
  const json sizes = changed(kWhole, {{"intermediate_size", 128 * 70}, {"num_hidden_layers", 1}});
  const HfFolder folder = block_folder("large", sizes, FileDtype::f32, power_of_two);
  ASSERT_GT(folder.bytes("model.layers.0.mlp.up_proj.weight").size(), size_t{2} << 20);
  pack(path("large"), "again");
  EXPECT_TRUE(all_bytes("again") == all_bytes("large"));
  HfWeights weights(path("large"));
  const std::string up = "model.layers.0.mlp.up_proj.weight";
  constexpr int64_t kFirst = 128 * 69 - 3, kRows = 6, kColumns = 256;
  std::vector<float> values(kRows * kColumns);
  weights.read_fp32("layers.0.mlp.gate_up.weight", {.start = {128 * 70 + kFirst, 0}, .size = {kRows, kColumns}}, values);
  for (int64_t i = 0; i < kRows * kColumns; ++i)
    ASSERT_EQ(values[static_cast<size_t>(i)], element(folder, up, kFirst + i / kColumns, i % kColumns, power_of_two)) << i;
}

// The names of scales are DeepSeek-V4's; other programs write names without the prefix of the base model.
TEST_F(BlockFp8, ExpertsOfFourBitsMayHaveOtherNames) {
  const HfFolder folder = deepseek_folder("named", 128);
  pack(path("named"), "packed");
  EXPECT_EQ(difference("packed", path("named")), std::nullopt);
  EXPECT_EQ(logits_of(path("packed")), logits_of(path("named")));
  const HfFolder packed(path("packed"));
  HfFolder bare = packed;
  for (const std::string& name : packed.names()) {
    if (name.ends_with(kScaleInv)) {
      EXPECT_EQ(packed.bytes(name), folder.bytes(name.substr(0, name.find("weight_scale_inv")) + "scale")) << name;
    }
    if (name.ends_with("_proj.weight")) {
      EXPECT_EQ(packed.bytes(name), folder.bytes(name)) << name;
    }
    if (name.starts_with("model.")) bare = bare.copy(name, name.substr(6)).without(name);
  }
  bare.write(path("bare"));
  EXPECT_EQ(difference("bare", path("packed")), std::nullopt);
}

// Scales whose powers of two differ by 14 fit whatever the codes are; beyond it depends on the codes.
TEST_F(BlockFp8, VerifyCountsTilesOfMxfp4ThatAreNoE4M3) {
  const std::string expert = "model.layers.1.mlp.experts.2.up_proj.weight", scale = "model.layers.1.mlp.experts.2.up_proj.scale";
  const HfFolder folder = deepseek_folder("folder", 128);  // three experts of three tensors of one tile, in two layers
  const auto fit_with = [&](const std::string& codes, int last) {
    std::string scales(512, '\x70');
    scales.back() = static_cast<char>(last);
    folder.put(expert, FileDtype::i8, {128, 64}, codes).put(scale, FileDtype::f8_e8m0, {128, 4}, scales).write(path("folder"));
    HfWeights weights(path("folder"));
    return fit_of_tiles(weights);
  };
  const auto with_last = [](char byte) {
    std::string codes(size_t{128} * 64, '\x77');  // 6 is 1.5 * 2^2
    codes.back() = byte;
    return codes;
  };
  struct Fit {
    std::string codes;
    int below;  // the power of two by which the last scale may be less
  };
  for (const auto& [codes, below] : std::vector<Fit>{{with_last('\x11'), 14},  // 0.5
                                                     {with_last('\x33'), 14},  // 1.5, of which the last bit is that of 0.5
                                                     {with_last('\x22'), 15},  // 1
                                                     {std::string(size_t{128} * 64, '\x11'), 17}}) {
    EXPECT_EQ(fit_with(codes, '\x70' - below).lossy, 0) << below;
    const TileFit lost = fit_with(codes, '\x70' - below - 1);
    EXPECT_EQ(lost.tiles, 18);
    EXPECT_EQ(lost.lossy, 1) << below;
    EXPECT_EQ(lost.first, expert + ", rows 0 to 127, columns 0 to 127");
  }
  std::string zeros = with_last('\x77');  // but for the last block, whose scale then does not matter
  for (size_t i = zeros.size() - 16; i < zeros.size(); ++i) zeros[i] = static_cast<char>(i % 2 == 0 ? 0x80 : 0x08);
  EXPECT_EQ(fit_with(zeros, '\x10').lossy, 0);
  EXPECT_THAT(run_mantissa({"verify", "folder", "--against", "folder"}, folder_.path()).output,
              HasSubstr("18 tiles of 128x128 in MXFP4: all are E4M3 without loss\n"));
  zeros.back() = static_cast<char>(0x18);
  EXPECT_EQ(fit_with(zeros, '\x10').lossy, 1);
  EXPECT_THAT(run_mantissa({"verify", "folder", "--against", "folder"}, folder_.path()).output,
              HasSubstr("1 of 18 tiles of 128x128 in MXFP4 lose an element as E4M3, the first of " + expert));
  EXPECT_THAT(error_of([&] { fit_with(zeros, '\xff'); }).what(), HasSubstr(expert + ": a scale of row 127 is NaN"));
}

// gpt-oss has the rows of gate and up in turn: those of each are the rows of tiles.
TEST_F(BlockFp8, VerifyCountsTilesOfRowsThatLieApart) {
  const std::string saved = trained("run", {"model.qk_norm=false", "model.attention_bias=all", "model.attention_sinks=true",
                                            "model.activation=swiglu_clamped", R"(precision.rules=[{"match": "layers.*.moe.experts.*",
                                            "recipe": "mxfp4_qat"}])",
                                            R"(model.moe={"num_experts": 3, "num_experts_per_tok": 2,
                                            "intermediate_size": 160, "router_bias": true, "expert_mlp_bias": true})"});
  pack_to(saved, "packed");
  const std::string gate_up = "model.layers.1.mlp.experts.gate_up_proj", blocks = gate_up + "_blocks", scales = gate_up + "_scales";
  const HfFolder packed(path("packed"));
  ASSERT_EQ(packed.shape(blocks), (std::vector<int64_t>{3, 320, 2, 16}));
  std::string last(packed.bytes(scales).size(), '\x70');
  last.back() = '\x40';  // scale of the last row of up
  packed.put(blocks, FileDtype::u8, packed.shape(blocks), std::string(packed.bytes(blocks).size(), '\x77'))
      .put(scales, FileDtype::u8, packed.shape(scales), last)
      .write(path("packed"));
  HfWeights weights(path("packed"));
  const TileFit fit = fit_of_tiles(weights);
  EXPECT_EQ(fit.tiles, 2 * 3 * (2 * 2 + 2)) << "each expert has 160 rows of gate and of up, and 64 rows of down in 160 columns";
  EXPECT_EQ(fit.lossy, 1);
  EXPECT_EQ(fit.first, gate_up + ", rows 897 to 959, columns 0 to 63");
}

}  // namespace mantissa::test::block_fp8_test
