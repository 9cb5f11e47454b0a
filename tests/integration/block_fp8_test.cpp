// Block FP8, in and out.
#include "block_fp8_folders.h"
#include "mantissa/checkpoint/config_differences.h"
#include "mantissa/models/model_shape.h"
#include "process.h"

namespace mantissa::test::block_fp8_test {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST_F(BlockFp8, ValuesAreCodesTimesTheScaleOfTheirTileRoundedOnce) {
  for (const FileDtype dtype : {FileDtype::f32, FileDtype::bf16}) {
    for (const json& sizes : {kWhole, kRagged}) {
      const HfFolder folder = block_folder("numbers", sizes, dtype, any_number);
      expect_values_of_the_formula(folder, "numbers", any_number);
      const HfWeights weights(path("numbers"));
      EXPECT_FALSE(weights.form("layers.1.mlp.down.weight").codes);
      EXPECT_THAT(weights.run_config().precision.rules, IsEmpty());
      const std::vector<std::string> findings = weights.block_fp8_findings();
      ASSERT_EQ(findings.size(), 2U);
      EXPECT_EQ(weights.weights_as_values(), std::vector{findings[0]});
      EXPECT_THAT(findings[1], HasSubstr("8 weights whose inputs servers quantize in blocks of 128, and which are values here or no whole "
                                         "blocks, the first of layers.0.attn.out: their inputs are not quantized"));
      EXPECT_THAT(findings[0], AllOf(HasSubstr("numbers: 8 weights with scales that are no powers of two, the first model.layers.0."),
                                     HasSubstr("_proj.weight_scale_inv[0, 0] is "), HasSubstr("read as values")));
      export_to(path("numbers"), "values");
      EXPECT_EQ(difference("values", path("numbers")), std::nullopt);
      EXPECT_EQ(HfFolder(path("values")).dtype(kDownWeight), FileDtype::f32);
      EXPECT_NO_THROW(require_usable(path("numbers")));
      std::filesystem::remove_all(path("values"));
    }
  }
}

TEST_F(BlockFp8, PowersOfTwoAreTilesThatComeOutAsTheyCame) {
  for (const FileDtype dtype : {FileDtype::f32, FileDtype::bf16, FileDtype::f8_e8m0}) {
    const std::string name = file_dtype_name(dtype);
    const HfFolder folder = block_folder(name, kWhole, dtype, power_of_two);
    expect_values_of_the_formula(folder, name, power_of_two);
    const HfWeights weights(path(name));
    EXPECT_THAT(weights.block_fp8_findings(), IsEmpty());
    const Recipe recipe = resolve_plan(weights.run_config()).of("layers.1.attn.qkv").recipe;
    EXPECT_EQ(recipe.weight, (Quantization{.format = Format::e4m3, .block_rows = 128, .block_cols = 128}));
    EXPECT_EQ(recipe.input, (Quantization{.format = Format::e4m3, .block_cols = 128}));
    pack(path(name), name + " again");
    EXPECT_EQ(all_bytes(name + " again"), all_bytes(name));
    EXPECT_EQ(difference(name + " again", path(name)), std::nullopt);
    EXPECT_THAT(HfWeights(path(name + " again")).ignore_list_findings(), IsEmpty());
    EXPECT_EQ(logits_of(path(name + " again")), logits_of(path(name)));
    export_to(path(name), name + " values");
    EXPECT_EQ(HfFolder(path(name + " values")).dtype(kDownWeight), FileDtype::bf16);
    EXPECT_EQ(difference(name + " values", path(name)), std::nullopt);
    pack_to(path(name), name + " of 32");  // each scale for 128 rows and four blocks
    EXPECT_EQ(difference(name + " of 32", path(name)), std::nullopt);
  }
}

// The recipes of a folder are those of its files; what a server scales by any number is told.
TEST_F(BlockFp8, InputsThatServersScaleByAnyNumberAreTold) {
  json quantization = kBlockFp8Config;
  quantization.erase("scale_fmt");
  block_folder("float", kWhole, FileDtype::f32, power_of_two, quantization);
  EXPECT_THAT(HfWeights(path("float")).block_fp8_findings(),
              ElementsAre(HasSubstr("scale_fmt is not ue8m0, so servers scale inputs by any")));
  const ProcessResult result = run_mantissa({"export", "float", "--output", "out"}, folder_.path());
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.errors + result.output, HasSubstr("scale_fmt is not ue8m0"));
}

// Rows of k begin within a tile of q, k and v together, or tiles are smaller than 128 at an edge.
TEST_F(BlockFp8, WhatIsNoWholeTilesIsReadAsValuesAndTold) {
  json sizes = kWhole;
  sizes["num_key_value_heads"] = 1;
  const HfFolder folder = block_folder("boundaries", sizes, FileDtype::f8_e8m0, power_of_two);
  expect_values_of_the_formula(folder, "boundaries", power_of_two);
  const HfWeights weights(path("boundaries"));
  EXPECT_THAT(weights.block_fp8_findings(),
              ElementsAre(AllOf(HasSubstr("2 weights whose tiles of 128x128 are not those of what they are a part of"),
                                HasSubstr("the first model.layers.0.self_attn.k_proj.weight in layers.0.attn.qkv.weight")),
                          HasSubstr("2 weights whose inputs servers quantize in blocks of 128")));
  EXPECT_FALSE(weights.form("layers.0.attn.qkv.weight").codes);
  EXPECT_TRUE(weights.form("layers.0.attn.out.weight").codes);
  pack(path("boundaries"), "packed");
  const HfFolder packed(path("packed"));
  EXPECT_EQ(packed.bytes(kDownWeight + kScaleInv), folder.bytes(kDownWeight + kScaleInv));
  EXPECT_EQ(packed.bytes(kDownWeight), folder.bytes(kDownWeight));
  EXPECT_EQ(packed.dtype("model.layers.0.self_attn.q_proj.weight"), FileDtype::f32);
  EXPECT_EQ(difference("packed", path("boundaries")), std::nullopt);
  const json config = json::parse(read_file(path("packed/config.json")));
  EXPECT_THAT(config["quantization_config"]["modules_to_not_convert"], Contains("model.layers.1.self_attn.v_proj"));
  EXPECT_THAT(HfWeights(path("packed")).block_fp8_findings(), IsEmpty());

  const HfFolder ragged = block_folder("ragged", kRagged, FileDtype::f8_e8m0, power_of_two);
  expect_values_of_the_formula(ragged, "ragged", power_of_two);
  const Error error = error_of([&] { pack(path("ragged"), "refused"); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("no recipe of the plan quantizes a weight, so there is nothing to pack"));
}

// As forward multiplies by them where config.json says bfloat16, and as large as the values that DeepSeek's own script makes.
TEST_F(BlockFp8, ValuesCanBeExportedInBf16) {
  block_folder("numbers", kWhole, FileDtype::f32, any_number);
  export_model(path("numbers"), path("narrow"), {.dtype = ExportDtype::bf16}, make_backend("cpu"));
  EXPECT_EQ(HfFolder(path("narrow")).dtype(kDownWeight), FileDtype::bf16);
  EXPECT_EQ(difference("narrow", path("numbers")), std::nullopt);
  EXPECT_EQ(logits_of(path("narrow")), logits_of(path("numbers")));
  HfFolder(path("plain"), "llama", "F32", json{{"torch_dtype", "bfloat16"}});  // what a file has in fp32 is not rounded
  EXPECT_THAT(error_of([&] { export_model(path("plain"), path("refused"), {.dtype = ExportDtype::bf16}, make_backend("cpu")); }).what(),
              HasSubstr("which bf16 does not hold exactly"));
  HfFolder(path("narrow")).flip(kDownWeight, 6, 1).write(path("narrow"));
  EXPECT_THAT(difference("narrow", path("numbers")).value_or(""), HasSubstr(kDownWeight + "[0, 3] is "));
}

// Nothing computes with an output projection of these tiles.
TEST_F(BlockFp8, AnOutputProjectionInTilesIsReadAsValuesAndTold) {
  json quantization = kBlockFp8Config;
  quantization["modules_to_not_convert"] = json::array();
  json sizes = kWhole;
  sizes["vocab_size"] = 256;
  HfFolder folder = block_folder("output", sizes, FileDtype::f32, power_of_two, quantization);
  folder.put("lm_head.weight", FileDtype::f8_e4m3, {256, 256}, code_bytes_of("lm_head.weight", 256 * 256))
      .put("lm_head.weight" + kScaleInv, FileDtype::f32, {2, 2}, scale_bytes(FileDtype::f32, "lm_head.weight", 4, power_of_two))
      .write(path("output"));
  EXPECT_THAT(HfWeights(path("output")).weights_as_values(),
              ElementsAre(HasSubstr("output: read as values, because output projections and routers have no block FP8 here")));
}

// Its experts lie in one tensor, [experts, in, out], and no scales are of tiles there.
TEST_F(BlockFp8, ExpertsInOneTensorHaveNone) {
  json change;
  change["quantization_config"] = kBlockFp8Config;
  HfFolder folder(path("stacked"), "gpt_oss", "BF16", change);
  const std::string experts = "model.layers.0.mlp.experts.gate_up_proj";
  const std::vector<int64_t> shape = folder.shape(experts);
  folder.put(experts, FileDtype::f8_e4m3, shape, code_bytes_of(experts, shape[0] * shape[1] * shape[2]))
      .put(experts + "_scales", FileDtype::f32, {tiles(shape[0] * shape[2]), tiles(shape[1])},
           std::string(4 * static_cast<size_t>(tiles(shape[0] * shape[2]) * tiles(shape[1])), '\x3f'))
      .write(path("stacked"));
  const Error error = folder_error("stacked");
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr(experts + " is the experts of a layer in one tensor, which have no block FP8"));
}

// What is no number equals nothing, also itself.
TEST_F(BlockFp8, VerifyRefusesWeightsThatAreNoNumbers) {
  const HfFolder folder = block_folder("folder", kWhole, FileDtype::f32, power_of_two);
  const auto verified = [&](const HfFolder& bad) {
    bad.write(path("bad"));
    return run_mantissa({"verify", "bad", "--against", "bad"}, folder_.path());
  };
  const ProcessResult code = verified(folder.flip(kDownWeight, 7, static_cast<char>(folder.bytes(kDownWeight)[7] ^ 0x7F)));
  EXPECT_EQ(code.exit_code, 4);
  EXPECT_THAT(code.errors, HasSubstr("bad: " + kDownWeight + "[0, 7] is nan"));
  const std::string embedding = "model.embed_tokens.weight";
  HfFolder infinite = folder;
  for (const size_t byte : {size_t{10}, size_t{11}}) {
    const char wanted = byte == 10 ? '\x80' : '\x7f';
    infinite = infinite.flip(embedding, byte, static_cast<char>(infinite.bytes(embedding)[byte] ^ wanted));
  }
  const ProcessResult value = verified(infinite);
  EXPECT_EQ(value.exit_code, 4);
  EXPECT_THAT(value.errors, HasSubstr(embedding + "[0, 5] is inf"));
}

TEST_F(BlockFp8, TilesOfSeveralChunksAreThoseOfTheFile) {
  json sizes = kWhole;
  sizes.update({{"intermediate_size", 128 * 70}, {"num_hidden_layers", 1}});
  const HfFolder folder = block_folder("large", sizes, FileDtype::f32, power_of_two);
  ASSERT_GT(folder.bytes("model.layers.0.mlp.up_proj.weight").size(), size_t{2} << 20);
  pack(path("large"), "again");
  EXPECT_TRUE(all_bytes("again") == all_bytes("large"));
  expect_values_of_the_formula(folder, "large", power_of_two);
}

TEST_F(BlockFp8, FormsThatTensorsCannotHaveAreRefusedByName) {
  const HfFolder folder = block_folder("good", kWhole, FileDtype::f32, power_of_two);
  const auto refused = [&](const HfFolder& bad, ExitCode code, const std::string& what) {
    bad.write(path("bad"));
    const Error error = folder_error("bad");
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(what));
  };
  const std::string scales = kDownWeight + kScaleInv;  // [256, 384] in [2, 3] tiles
  refused(folder.as(scales, FileDtype::f32, {3, 2}), ExitCode::data, scales + " is [3, 2], config.json makes it [2, 3]");
  refused(folder.as(scales, FileDtype::f32, {6}), ExitCode::data, scales + " is [6], config.json makes it [2, 3]");
  refused(folder.put(scales, FileDtype::f32, {2, 4}, std::string(32, '\x01')), ExitCode::data, scales + " is [2, 4]");
  refused(folder.as(scales, FileDtype::i32, {2, 3}), ExitCode::usage,
          kDownWeight + " is F8_E4M3 with scales in I32; of quant_method fp8 mantissa reads");
  refused(folder.put(scales, FileDtype::u8, {2, 3}, std::string(6, '\x7f')), ExitCode::usage,
          kDownWeight + " is F8_E4M3 with scales in U8");
  refused(folder.as(kDownWeight, FileDtype::f8_e4m3, {384, 256}), ExitCode::data,
          kDownWeight + " is [384, 256], config.json makes it [256, 384]");
  refused(folder.as(kDownWeight, FileDtype::f8_e5m2, {256, 384}), ExitCode::usage,
          kDownWeight + " is F8_E5M2 with scales in F32; mantissa reads");
  refused(folder.without(scales), ExitCode::usage, kDownWeight + " is F8_E4M3; mantissa reads");
  refused(folder.put("model.layers.1.mlp.down_proj.scale", FileDtype::f32, {2, 3}, folder.bytes(scales)), ExitCode::data,
          "holds tensors that its model has no place for:\n  model.layers.1.mlp.down_proj.scale");
  refused(folder.as(kDownWeight, FileDtype::i8, {256, 384}), ExitCode::usage,
          kDownWeight + " is I8 with scales in F32; of quant_method fp8 mantissa reads");
  for (const float bad : {0.0F, -0.25F, std::nanf(""), INFINITY}) {
    std::string bytes = folder.bytes(scales);
    std::memcpy(bytes.data() + 4 * sizeof bad, &bad, sizeof bad);
    refused(folder.put(scales, FileDtype::f32, {2, 3}, bytes), ExitCode::data, scales + "[1, 1] is ");
  }
  for (const int nan : {0x7F, 0xFF}) {
    const size_t at = 130 * 384 + 5;
    refused(folder.flip(kDownWeight, at, static_cast<char>(folder.bytes(kDownWeight)[at] ^ nan)), ExitCode::data,
            kDownWeight + "[130, 5] is NaN or Inf");
  }
  const HfFolder numbers = block_folder("numbers", kWhole, FileDtype::f32, any_number);
  refused(numbers.flip(kDownWeight, 7, static_cast<char>(numbers.bytes(kDownWeight)[7] ^ 0x7F)), ExitCode::data,
          kDownWeight + "[0, 7] is NaN or Inf");
}

TEST_F(BlockFp8, WhatAFolderHoldsAndWhatItsConfigSaysMustAgree) {
  const HfFolder folder = block_folder("good", kWhole, FileDtype::f32, power_of_two);
  const json written = json::parse(read_file(path("good/config.json")));
  const auto error_with = [&](const json& quantization) {
    json config = written;
    config["quantization_config"] = quantization;
    write_file(path("good/config.json"), config.dump());
    return std::string(folder_error("good").what());
  };
  const auto change = [](const char* key, const json& value) {
    json config = kBlockFp8Config;
    config[key] = value;
    return config;
  };
  EXPECT_THAT(error_with(nullptr), HasSubstr("is F8_E4M3 with scales in F32; mantissa reads F8_E4M3 and packed E2M1 with E8M0 scales"));
  EXPECT_THAT(error_with({{"quant_method", "mxfp8"}, {"weight_block_size", {1, 32}}, {"scale_fmt", "ue8m0"}}),
              HasSubstr("where quantization_config has quant_method fp8"));
  EXPECT_THAT(error_with(change("modules_to_not_convert", {"lm_head", "model.layers.1.mlp.down_proj"})),
              HasSubstr("model.layers.1.mlp.down_proj is not quantized, but " + kDownWeight + " is F8_E4M3 with scales"));
  EXPECT_THAT(error_with(change("modules_to_not_convert", {"lm_head", "model.layers.1.mlp.up_proj"})),
              HasSubstr("up_proj is not quantized, but both are parts of layers.1.mlp.gate_up.weight"));
  EXPECT_THAT(error_with(change("weight_block_size", {64, 64})), HasSubstr("quantization_config.weight_block_size = [64,64]"));
  // A list that servers read in other ways is told of, as in every convention.
  json config = written;
  config["quantization_config"] = change("modules_to_not_convert", {"lm_head", "mlp.down", "no.module"});
  write_file(path("good/config.json"), config.dump());
  EXPECT_THAT(HfWeights(path("good")).ignore_list_findings(),
              AllOf(Contains(HasSubstr("\"mlp.down\" also names")), Contains(HasSubstr("\"no.module\" names nothing in the file"))));
  // What holds values must be listed.
  folder.put(kDownWeight, FileDtype::bf16, {256, 384}, std::string(size_t{2} * 256 * 384, '\x3c'))
      .without(kDownWeight + kScaleInv)
      .write(path("good"));
  EXPECT_THAT(folder_error("good").what(), HasSubstr(kDownWeight + " is BF16 without scales"));
}

// What training multiplied by, and what a run makes of it again.
TEST_F(BlockFp8, ARunIsExportedAsTheTilesOfItsForward) {
  const std::vector<std::string> sets = {"model.hidden_size=128",
                                         "model.intermediate_size=256",
                                         "model.num_attention_heads=2",
                                         "model.num_key_value_heads=2",
                                         "model.head_dim=64",
                                         "training.steps=3",
                                         "model.max_position_embeddings=16",
                                         "precision.dtype=bf16"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), sets.begin(), sets.end());
    return more;
  };
  run("run", with({"precision.recipe=fp8_block"}));
  const std::string saved = checkpoint("run", 3);
  pack(saved, "packed");
  export_to(saved, "values");
  EXPECT_EQ(difference("packed", saved), std::nullopt);
  EXPECT_EQ(logits_of(path("packed")), logits_of(saved));
  const HfFolder packed(path("packed"));
  EXPECT_EQ(packed.dtype(kDownWeight), FileDtype::f8_e4m3);
  EXPECT_EQ(packed.dtype(kDownWeight + kScaleInv), FileDtype::f32);
  EXPECT_EQ(packed.shape(kDownWeight + kScaleInv), (std::vector<int64_t>{1, 2}));
  export_to(path("packed"), "values again");
  EXPECT_EQ(all_bytes("values again"), all_bytes("values"));
  const HfWeights codes(path("packed"));
  const auto lines = [&](const std::string& recipe) {
    return reconciled_weights(codes, resolve_plan(config_named(recipe, with({"precision.recipe=" + recipe}))));
  };
  EXPECT_THAT(lines("fp8_block"), IsEmpty());
  EXPECT_THAT(lines("mxfp8"), Contains("layers.{0..1}.mlp.down: e4m3 128x128 in the file, e4m3 32x32 here"));
  const ProcessResult verified = run_mantissa({"verify", "packed", "--against", run_folder("run")}, folder_.path());
  EXPECT_EQ(verified.exit_code, 0) << verified.errors;
  EXPECT_THAT(verified.output, AllOf(HasSubstr("0 values differ"), Not(HasSubstr("MXFP4"))));
  const auto first_loss = [&](const std::string& name, const std::string& from) {
    return run(name, with({"precision.recipe=fp8_block", "training.steps=1", "checkpoint.init_from=" + from})).losses.at(0);
  };
  EXPECT_EQ(first_loss("from codes", path("packed")), first_loss("from masters", saved));
  // A scale that differs is a difference that verify names.
  packed.flip(kDownWeight + kScaleInv, 4 + 2, static_cast<char>(0x80)).write(path("packed"));
  EXPECT_THAT(difference("packed", saved).value_or(""), HasSubstr(kDownWeight + "[0, 1"));
}

TEST_F(BlockFp8, WhatTheConventionHasNoFormForIsRefusedByModuleAndRule) {
  const std::vector<std::string> sets = {"model.hidden_size=128",       "model.intermediate_size=128", "model.num_attention_heads=2",
                                         "model.num_key_value_heads=2", "model.head_dim=64",           "training.steps=1",
                                         "precision.dtype=bf16"};
  const std::string moe = R"(model.moe={"num_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 128})";
  const auto own = [](const char* recipe) { return text(R"(precision.recipes={"own": )", recipe, "}"); };
  struct Refused {
    std::string why;
    std::vector<std::string> more;
  };
  const std::vector<Refused> refusals = {
      {"(recipe mxfp8, e4m3 32x32 rceil): the convention fp8 has E4M3 in tiles of 128x128", {"precision.recipe=mxfp8"}},
      {"layers.0.attn.qkv (recipe mxfp4_qat, e2m1 1x32 flashinfer): the convention fp8 has E4M3 in tiles", {"precision.recipe=mxfp4_qat"}},
      {"its input is in high precision, and servers quantize inputs of the convention fp8",
       {"precision.recipe=own", own(R"({"base": "mxfp8_weights", "weight": {"block": [128, 128]}})")}},
      {"its input is e4m3 1x128 floor, and servers quantize inputs of the convention fp8",
       {"precision.recipe=own", own(R"({"base": "fp8_block", "input": {"rule": "floor"}})")}},
      {"layers.0.moe.experts.gate_up (recipe mxfp4_qat_mxfp8_act, e2m1 1x32 flashinfer): its input is e4m3 1x32 rceil",
       {"precision.recipe=fp8_block", moe, R"(precision.rules=[{"match": "layers.*.moe.experts.*", "recipe": "mxfp4_qat_mxfp8_act"}])"}}};
  for (const Refused& refused : refusals) {
    std::vector<std::string> all = sets;
    all.insert(all.end(), refused.more.begin(), refused.more.end());
    const std::string name = text("run ", ++runs_);
    run(name, all);
    const Error error = error_of([&] { pack(checkpoint(name, 1), "refused"); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr(refused.why));
    EXPECT_FALSE(std::filesystem::exists(path("refused")));
  }
  // The least scale of inputs that DeepSeek's kernels have is one that servers of this convention may have.
  std::vector<std::string> all = sets;
  all.insert(all.end(), {"precision.recipe=own", own(R"({"base": "fp8_block", "input": {"scale_range": [-22, 127]}})")});
  run("range", all);
  pack(checkpoint("range", 1), "range");
  EXPECT_EQ(run_mantissa({"verify", "range", "--against", run_folder("range")}, folder_.path()).exit_code, 0);
  // verify compares blocks of inputs where they are those of this convention.
  run("of 32", [&] {
    std::vector<std::string> other = sets;
    other.insert(other.end(), {"precision.recipe=mxfp8", "checkpoint.init_from=" + path("range")});
    return other;
  }());
  ModelExport against(checkpoint("of 32", 1), {}, make_backend("cpu"));
  EXPECT_THAT(export_scheme_differences(HfWeights(path("range")), against.weights()),
              Contains("layers.0.attn.out: inputs are e4m3 1x32 rceil in the checkpoint, and servers quantize them in blocks of 128 here"));
}

}  // namespace mantissa::test::block_fp8_test
