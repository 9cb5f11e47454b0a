// Folders of Hugging Face's form that contradict themselves, each by the tensor or the key that has to change; and cases that are only
// told.
#include "block_fp8_folders.h"
#include "process.h"

namespace mantissa::test::folder_refusals_test {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kUp = "model.layers.0.mlp.up_proj.weight", kDown = kDownWeight, kNorm = "model.norm.weight",
                  kEmbed = "model.embed_tokens.weight", kExpert = "model.layers.1.mlp.experts.2.up_proj";

struct Damage {
  ExitCode code;
  std::string what;
  HfFolder folder;
};

class FolderRefusals : public BlockFp8 {
 protected:
  // Expects refusals from everything that begins with a folder; an export leaves nothing behind.
  void expect_refused(const std::vector<Damage>& damages) const {
    for (const auto& [code, what, folder] : damages) {
      folder.write(path("bad"));
      const Error error = folder_error("bad");
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(what));
    }
    EXPECT_EQ(error_of([&] { export_to(path("bad"), "refused"); }).code(), damages.back().code);
    EXPECT_FALSE(std::filesystem::exists(path("refused")));
  }
  // A byte of a tensor becomes another.
  static HfFolder set(const HfFolder& folder, const std::string& name, size_t byte, int value) {
    return folder.flip(name, byte, static_cast<char>(folder.bytes(name)[byte] ^ value));
  }
};

TEST_F(FolderRefusals, TensorsOfValues) {
  const HfFolder llama(path("llama"), "llama", "F32", {{"intermediate_size", 80}}), tied(path("tied"), "qwen3", "BF16"),
      gpt2(path("gpt2"), "gpt2", "BF16");
  const std::string k = "model.layers.0.self_attn.k_proj.weight", extra = "model.layers.0.self_attn.q_norm.weight";
  const std::string wte = "transformer.wte.weight";
  expect_refused({{ExitCode::data, "lacks tensors of its model:\n  " + kUp, llama.without(kUp)},
                  {ExitCode::data, "no place for:\n  " + extra, llama.with(extra, {32})},
                  {ExitCode::data, kNorm + " is [95], but config.json makes it [96]", llama.with(kNorm, {95})},
                  {ExitCode::usage, kNorm + " is I32; mantissa reads F32, BF16, F16 and", llama.as(kNorm, FileDtype::i32, {96})},
                  {ExitCode::data, kDown + " has 80 columns, which are not whole blocks of 32",
                   llama.with(kDown + "_scale", {96, 1}).as(kDown + "_scale", FileDtype::u8, {96, 2})},
                  {ExitCode::data, path("bad") + ": " + k + "[0, 5] is NaN or Inf", llama.poison(k, 5)}});
  expect_refused(
      {{ExitCode::data, "lm_head.weight does not have the shape and type of the embeddings", tied.with("lm_head.weight", {260, 96})},
       {ExitCode::data, "lm_head.weight differs from the embeddings", tied.with("lm_head.weight", {259, 96})}});
  expect_refused({{ExitCode::data, "holds " + wte + " twice, with and without its prefix", gpt2.copy(wte, wte.substr(12))}});
  tied.copy(kEmbed, "lm_head.weight").write(path("same"));
  EXPECT_NO_THROW(require_usable(path("same")));
}

TEST_F(FolderRefusals, TensorsOfCodesInBlocksOf32) {
  const HfFolder codes = mx_folder("codes", kMxfp8Config);
  const std::string scale = kDown + "_scale";  // [96, 160] in blocks [96, 5]
  expect_refused(
      {{ExitCode::usage, kDown + " is F8_E5M2 with scales in U8; mantissa reads", codes.as(kDown, FileDtype::f8_e5m2, {96, 160})},
       {ExitCode::usage, kDown + " is F8_E4M3 with scales in F8_E4M3;", codes.as(scale, FileDtype::f8_e4m3, {96, 5})},
       {ExitCode::usage, kDown + " is U8 with scales in U8;", codes.as(kDown, FileDtype::u8, {96, 160})},
       {ExitCode::data, scale + " is [5, 96], but config.json makes it [96, 5]", codes.as(scale, FileDtype::u8, {5, 96})},
       {ExitCode::data, kDown + "[5, 32] is NaN or Inf", set(codes, scale, 5 * 5 + 1, 0xFF)},
       {ExitCode::data, kDown + "[5, 40] is NaN or Inf", set(codes, kDown, 5 * 160 + 40, 0x7F)},
       {ExitCode::data, kDown + "[5, 40] is NaN or Inf", set(codes, kDown, 5 * 160 + 40, 0xFF)}});
}

TEST_F(FolderRefusals, TensorsOfCodesInTiles) {
  const HfFolder tiles = block_folder("tiles", kWhole, FileDtype::f32, power_of_two),
                 numbers = block_folder("numbers", kWhole, FileDtype::f32, any_number);
  const std::string scales = kDown + kScaleInv, place = "model.layers.1.mlp.down_proj.scale";  // [256, 384] in [2, 3] tiles
  const auto code = [&](const HfFolder& folder, size_t at, int value) { return set(folder, kDown, at, value); };
  std::vector<Damage> damages = {
      {ExitCode::data, scales + " is [3, 2], but config.json makes it [2, 3]", tiles.as(scales, FileDtype::f32, {3, 2})},
      {ExitCode::data, scales + " is [6], but config.json makes it [2, 3]", tiles.as(scales, FileDtype::f32, {6})},
      {ExitCode::data, scales + " is [2, 4]", tiles.put(scales, FileDtype::f32, {2, 4}, std::string(32, '\x01'))},
      {ExitCode::usage, kDown + " is F8_E4M3 with scales in I32; under quant_method fp8 mantissa reads",
       tiles.as(scales, FileDtype::i32, {2, 3})},
      {ExitCode::usage, kDown + " is F8_E4M3 with scales in U8;", tiles.put(scales, FileDtype::u8, {2, 3}, std::string(6, '\x7f'))},
      {ExitCode::data, kDown + " is [384, 256], but config.json makes it [256, 384]", tiles.as(kDown, FileDtype::f8_e4m3, {384, 256})},
      {ExitCode::usage, kDown + " is F8_E5M2 with scales in F32; mantissa reads", tiles.as(kDown, FileDtype::f8_e5m2, {256, 384})},
      {ExitCode::usage, kDown + " is F8_E4M3; mantissa reads", tiles.without(scales)},
      {ExitCode::data, "no place for:\n  " + place, tiles.put(place, FileDtype::f32, {2, 3}, tiles.bytes(scales))},
      {ExitCode::usage, kDown + " is I8 with scales in F32; under quant_method fp8", tiles.as(kDown, FileDtype::i8, {256, 384})},
      {ExitCode::data, kDown + "[0, 7] is NaN or Inf", code(numbers, 7, 0x7F)}};
  for (const int nan : {0x7F, 0xFF}) damages.push_back({ExitCode::data, kDown + "[130, 5] is NaN or Inf", code(tiles, 130 * 384 + 5, nan)});
  for (const float bad : {0.0F, -0.25F, std::nanf(""), INFINITY}) {
    std::string bytes = tiles.bytes(scales);
    std::memcpy(bytes.data() + 4 * sizeof bad, &bad, sizeof bad);
    damages.push_back({ExitCode::data, scales + "[1, 1] is ", tiles.put(scales, FileDtype::f32, {2, 3}, bytes)});
  }
  expect_refused(damages);
}

TEST_F(FolderRefusals, TensorsOfExperts) {
  const HfFolder experts = deepseek_folder("experts", 128);  // [128, 64] with scales [128, 4]
  expect_refused({{ExitCode::usage, kExpert + ".weight is I8 with scales in U8; under quant_method fp8",
                   experts.as(kExpert + ".scale", FileDtype::u8, {128, 4})},
                  {ExitCode::data, kExpert + ".scale is [4, 128], but config.json makes it [128, 4]",
                   experts.as(kExpert + ".scale", FileDtype::f8_e8m0, {4, 128})},
                  {ExitCode::data, kExpert + ".weight is [64, 128], but config.json makes it [128, 64]",
                   experts.as(kExpert + ".weight", FileDtype::i8, {64, 128})}});
  // Experts of gpt-oss lie in one tensor, [experts, in, out], and no scales are of tiles there.
  const HfFolder stacked(path("stacked"), "gpt_oss", "BF16", {{"quantization_config", kBlockFp8Config}});
  const std::string all = "model.layers.0.mlp.experts.gate_up_proj";
  const std::vector<int64_t> shape = stacked.shape(all), scales = {test::tiles(shape[0] * shape[2]), test::tiles(shape[1])};
  expect_refused(
      {{ExitCode::usage, all + " holds the experts of a layer in one tensor, which mantissa reads as blocks and scales of MXFP4",
        stacked.put(all, FileDtype::f8_e4m3, shape, code_bytes_of(all, shape[0] * shape[1] * shape[2]))
            .put(all + "_scales", FileDtype::f32, scales, std::string(4 * static_cast<size_t>(scales[0] * scales[1]), '\x3f'))}});
}

TEST_F(FolderRefusals, OfMillionsOfTensorsTheFirstThatAreMissingAreNamed) {
  for (const std::string type : {"qwen3_moe", "gpt_oss", "gpt2"}) {
    const HfFolder folder(path(type), type, "F32");
    const json written = json_in(type + "/config.json");
    const auto expect_error = [&](const char* key, int64_t value, const std::string& what) {
      write_file(path(type + "/config.json"), changed(written, {{key, value}}).dump());
      EXPECT_EQ(folder_error(type).code(), ExitCode::data);
      EXPECT_THAT(folder_error(type).what(), HasSubstr(what));
    };
    const bool gpt2 = type == "gpt2";
    expect_error(gpt2 ? "n_layer" : "num_hidden_layers", 10000,
                 "lacks tensors of its model:\n  " + std::string(gpt2 ? "transformer.h.2." : "model.layers.2."));
    EXPECT_THAT(folder_error(type).what(), HasSubstr("\n  and at least "));
    if (!gpt2)
      expect_error(written.contains("num_experts") ? "num_experts" : "num_local_experts", 65536,
                   "is [3, 96], but config.json makes it [65536, 96]");
  }
}

// A merge patch of quantization_config, whose words and the tensors must agree, for all parts of one weight.
struct Said {
  std::string folder;
  const char* patch;
  std::string what;
};

TEST_F(FolderRefusals, WhatQuantizationConfigSaysOfThem) {
  mx_folder("codes", kCompressedConfig);
  block_folder("tiles", kWhole, FileDtype::f32, power_of_two);
  deepseek_folder("experts", 128);
  HfFolder(path("values"), "llama", "BF16", {{"quantization_config", kCompressedConfig}});
  HfFolder(path("unknown"), "llama", "BF16", {{"quantization_config", {{"quant_method", "gptq"}, {"bits", 4}}}})
      .without(kUp)
      .write(path("unknown"));
  const std::string group = R"({"config_groups": {"group_1": {"targets": [")",
                    eight = R"("weights": {"num_bits": 8, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"})";
  const std::string by_name = group + R"(model.layers.1.self_attn.k_proj"], )" + eight + "}}}",
                    four = group + R"(re:.*down_proj"], "weights": {"num_bits": 4, "type": "float", "group_size": 32,
                        "scale_dtype": "torch.uint8"}, "input_activations": {"num_bits": 8, "type": "float", "group_size": 32,
                        "scale_dtype": "torch.uint8", "dynamic": true}}}})";
  const std::string q = "model.layers.1.self_attn.q_proj is e4m3 with quantized inputs and model.layers.1.self_attn.k_proj",
                    down = "mlp.down_proj is ", coded = kDown + " is F8_E4M3 with scales";
  const std::vector<Said> all = {
      {"unknown", "{}", "config.json: quantization_config.quant_method \"gptq\": mantissa knows"},  // before tensors are missed
      {"codes", by_name.c_str(), q + " is e4m3 with inputs in high precision, but both are parts of layers.1.attn.qkv.weight"},
      {"codes", R"({"ignore": ["lm_head", "re:.*up_proj"]})", "mlp.up_proj is not quantized, but both are parts of layers.0.mlp.gate_up"},
      {"codes", R"({"ignore": ["lm_head", "re:.*down_proj"]})", down + "not quantized, but model.layers.0.mlp.down_proj.weight is F8_E4M3"},
      {"codes", four.c_str(), down + "e2m1 with quantized inputs, but model.layers.0.mlp.down_proj.weight is F8_E4M3"},
      {"values", "{}", "self_attn.q_proj is e4m3 with quantized inputs, but model.layers.0.self_attn.q_proj.weight is BF16 without scales"},
      {"tiles", "null", "is F8_E4M3 with scales in F32; mantissa reads F8_E4M3 and packed E2M1 with E8M0 scales"},
      {"tiles", R"({"quant_method": "mxfp8", "weight_block_size": [1, 32]})", "where quantization_config has quant_method fp8"},
      {"tiles", R"({"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"]})", down + "not quantized, but " + coded},
      {"tiles", R"({"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.up_proj"]})",
       "up_proj is not quantized, but both are parts of layers.1.mlp.gate_up.weight"},
      {"tiles", R"({"weight_block_size": [64, 64]})", "quantization_config.weight_block_size = [64,64]"}};
  for (const auto& [folder, patch, what] : all) {
    SCOPED_TRACE(folder + ' ' + patch);
    const std::string file = path(folder + "/config.json"), before = read_file(file);
    json config = json::parse(before);
    config["quantization_config"].merge_patch(json::parse(patch));
    write_file(file, config.dump());
    EXPECT_EQ(folder_error(folder).code(), ExitCode::usage) << folder_error(folder).what();
    EXPECT_THAT(folder_error(folder).what(), HasSubstr(what));
    write_file(file, before);
  }
  write_file(path("experts/config.json"), changed(json_in("experts/config.json"), {{"expert_dtype", "absent"}}).dump());
  EXPECT_THAT(folder_error("experts").what(),
              HasSubstr("is e4m3 with quantized inputs in blocks of 128, but model.layers.0.mlp.experts.0."));
}

// The quantization of inputs stands nowhere else.
TEST_F(FolderRefusals, CodesNeedWhatSaysHowTheyAreMultiplied) {
  mx_folder("codes", kMxfp8Config, {}, "layers.0.");
  write_file(path("codes/config.json"), changed(json_in("codes/config.json"), {{"quantization_config", "absent"}}).dump());
  EXPECT_THAT(folder_error("codes").what(),
              HasSubstr(".weight is F8_E4M3 with scales, but there is neither a quantization_config in config.json"));
  EXPECT_EQ(folder_error("codes").code(), ExitCode::usage);
  const std::string side = path("codes/hf_quant_config.json");
  json said = json::parse(R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MXFP8", "group_size": 32,
      "exclude_modules": ["lm_head", "model.layers.0.*"]}})");
  write_file(side, said.dump());
  EXPECT_NO_THROW(require_usable(path("codes")));
  EXPECT_TRUE(resolve_plan(HfWeights(path("codes")).run_config()).of("layers.1.mlp.down").recipe.input);
  said["quantization"]["exclude_modules"].push_back("*.down_proj");
  write_file(side, said.dump());
  EXPECT_THAT(folder_error("codes").what(), HasSubstr(side + ": quantization: model.layers.1.mlp.down_proj is not quantized, but "));
}

// Lists as they were published: for this folder they are true in the way that transformers reads them.
TEST_F(FolderRefusals, AListThatServersReadOtherwiseIsTold) {
  mx_folder("codes", kMxfp8Config, {{"num_hidden_layers", 11}}, "layers.1.");
  json names = {"lm_head"};
  for (const char* part :
       {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"})
    names.push_back(text("model.layers.1.", part));
  const json written = json_in("codes/config.json");
  const auto findings_with = [&](const std::string& method, const std::vector<std::pair<const char*, json>>& lists) {
    json config = written;
    json& quantization = config["quantization_config"];
    if (method == "modelopt") quantization = {{"quant_method", "modelopt"}, {"quant_algo", "MXFP8"}};
    for (const auto& [key, list] : lists) quantization[key] = list;
    write_file(path("codes/config.json"), config.dump());
    return HfWeights(path("codes")).ignore_list_findings();
  };
  const std::string key = "modules_to_not_convert";
  const auto and_also = [&](const char* entry) {
    json list = names;
    list.push_back(entry);
    return findings_with("mxfp8", {{key.c_str(), list}});
  };
  EXPECT_THAT(findings_with("mxfp8", {{key.c_str(), names}}), IsEmpty());
  EXPECT_THAT(and_also("mlp.gate"), ElementsAre(HasSubstr("modules_to_not_convert: \"mlp.gate\" also names")));
  EXPECT_THAT(and_also("model.layers.1"), ElementsAre(HasSubstr("codes: model.layers.10.")));
  EXPECT_THAT(and_also("model.layers.0.self_attn.qkv_proj"), ElementsAre(HasSubstr("codes: model.layers.0.self_attn.q_proj, ")));
  EXPECT_THAT(and_also("model.language_model.layers.1"), ElementsAre(HasSubstr("layers.1\" names nothing in the file")));
  json both = names;
  both.push_back("no.module");
  EXPECT_THAT(findings_with("modelopt", {{"ignore", both}, {"exclude_modules", both}}),
              ElementsAre(HasSubstr("ignore: \"no.module\" names nothing"), HasSubstr("exclude_modules: \"no.module\" names nothing")));
  EXPECT_THAT(findings_with("mxfp8", {{key.c_str(), {"lm_head", "model\\.layers\\.1\\..*"}}}),
              ElementsAre(HasSubstr("whole names no entry names what holds no codes: model.layers.1.")));
  const ProcessResult result = run_mantissa({"verify", "codes", "--against", "codes"}, folder_.path());
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.errors + result.output, HasSubstr("no entry names what holds no codes"));
}

// Better before training than when its export, or the first text from it, needs them. Evaluation does not.
TEST_F(FolderRefusals, FilesOfTokensThatCannotBeRead) {
  const HfFolder folder(path("model"), "llama", "F32");
  EXPECT_TRUE(is_published_model(path("model")));
  for (const char* const bad : {R"({"eos_token_id": "x"})", R"({"eos_token_id": [1, 2.5]})", R"({"eos_token_id")"}) {
    write_file(path("model/generation_config.json"), bad);
    EXPECT_EQ(folder_error("model").code(), ExitCode::data) << bad;
    EXPECT_THAT(folder_error("model").what(), HasSubstr(path("model/generation_config.json") + ":")) << bad;
    const LoadedModel loaded = load_model(path("model"), make_backend("cpu"));
    EXPECT_EQ(error_of([&] { loaded.end_tokens(); }).code(), ExitCode::data) << bad;
  }
  std::filesystem::remove(path("model/generation_config.json"));
  const auto end_tokens = [&] { return load_model(path("model"), make_backend("cpu")).end_tokens(); };
  EXPECT_THAT(end_tokens(), IsEmpty());
  const json config = json_in("model/config.json");
  write_file(path("model/config.json"), changed(config, {{"eos_token_id", 7}}).dump());
  EXPECT_THAT(end_tokens(), ElementsAre(7));
  write_file(path("model/generation_config.json"), R"({"eos_token_id": []})");
  EXPECT_THAT(end_tokens(), ElementsAre(7));
  write_file(path("model/generation_config.json"), R"({"eos_token_id": [3, 258, 9999, -1]})");
  EXPECT_THAT(end_tokens(), ElementsAre(3, 258));
  write_file(path("model/config.json"), changed(config, {{"bos_token_id", "x"}}).dump());
  EXPECT_EQ(folder_error("model").code(), ExitCode::data);
  EXPECT_THAT(folder_error("model").what(), HasSubstr(path("model/config.json") + ": bos_token_id: must be a token id"));
  write_file(path("model/manifest.json"), "{}");  // config.json lies beside the weights of other programs as well
  EXPECT_FALSE(is_published_model(path("model")));
}

}  // namespace mantissa::test::folder_refusals_test
