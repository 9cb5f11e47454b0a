// Verification of exports: reading back when they are written, and `mantissa verify`.
#include "block_fp8_folders.h"
#include "process.h"
#include "reliability/fault_injection.h"

namespace mantissa::test::verify_export_test {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

class Verify : public BlockFp8 {
 protected:
  ~Verify() override { disarm_fault(); }
  // A run under MXFP8, in layer 0 under MXFP4.
  std::string mixed(const std::string& name) const {
    return trained(name, {"precision.recipe=mxfp8", R"(precision.rules=[{"match": "layers.0.*", "recipe": "mxfp4_qat"}])"});
  }
  void expect_verdict(const std::vector<std::string>& arguments, int code, const std::string& what) const {
    std::vector<std::string> all = {"verify"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const ProcessResult result = run_mantissa(all, folder_.path());
    EXPECT_EQ(result.exit_code, code) << result.output << result.errors;
    EXPECT_THAT(result.output + result.errors, HasSubstr(what));
  }
};

// These are compared also where every byte is as it was.
TEST_F(Verify, KnowsNamesTypesAndShapes) {
  HfFolder(path("model"), "llama", "F32");
  export_to(path("model"), "out");
  const HfFolder folder(path("out"));
  const std::string proof = read_file(path("out/mantissa.json")), name = kDownWeight, norm = "model.norm.weight";
  const auto expect_problem = [&](const HfFolder& changed, const json& list, const std::string& what) {
    changed.write(path("out"));
    write_file(path("out/mantissa.json"), list.dump());
    const Error error = error_of([&] { verify_export(path("out")); });
    EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(what));
  };
  const json good = json::parse(proof);
  const auto with = [&](const char* pointer, const json& value) {
    json out = good;
    out[json::json_pointer(pointer)] = value;
    return out;
  };
  expect_problem(folder.as(name, FileDtype::f32, {160, 96}), good,
                 name + " is not what was exported: it is F32 [160, 96], and was F32 [96, 160]");
  expect_problem(folder.as(norm, FileDtype::i32, {96}), good, norm + " is not what was exported: it is I32 [96], and was F32");
  expect_problem(folder.without(norm), good, "lacks " + norm + ", which mantissa.json names");
  expect_problem(folder.copy(norm, "model.norm2.weight"), good, "holds model.norm2.weight, which mantissa.json does not name");
  json twice = good, less = good;
  twice["tensors"].push_back(good["tensors"][3]);
  less["tensors"].erase(0);
  expect_problem(folder, twice, " twice");
  expect_problem(folder, less, ", which mantissa.json does not name");
  for (const char* member : {"tensor", "dtype", "shape", "xxh64"}) {
    for (const json& value : {json(5), json({"64"}), json(nullptr)})
      expect_problem(folder, with((std::string("/tensors/1/") + member).c_str(), value), text("out/mantissa.json: tensors[1].", member));
  }
  for (const char* pointer : {"/tensors/1/module", "/tensors/1/format", "/tensors/1/block", "/tensors/1/rule"})
    expect_problem(folder, with(pointer, "other"), "its hash of itself differs");
  expect_problem(folder, with("/format_version", 3), "format_version: must be 2, got 3");
  expect_problem(folder, with("/files", nullptr), "out/mantissa.json: files: must be an object, got null");
  expect_problem(folder, with("/files", {{"../out/config.json", "0"}}), "files: \"../out/config.json\" is no name of a file");
  expect_problem(folder, with("/files", {{"config.json", 5}}), "files.config.json: must be a string, got 5");
  folder.write(path("out"));
  write_file(path("out/mantissa.json"), proof);
  EXPECT_EQ(verify_export(path("out")), static_cast<int64_t>(folder.names().size()));
  std::string weights = read_file(path("out/model.safetensors"));
  weights.replace(weights.find(R"("format":"pt")"), 13, R"("format":"tp")");
  write_file(path("out/model.safetensors"), weights);
  EXPECT_THAT(error_of([&] { verify_export(path("out")); }).what(), HasSubstr("its __metadata__ differs"));
}

// An export that is damaged has the same exit code with and without --against, whatever its bytes have become: another value, no number,
// another model, or no model at all.
TEST_F(Verify, OneDamageHasOneCode) {
  const std::string saved = mixed("run"), out = path("out"), run = run_folder("run");
  export_to(saved, "out");
  const HfFolder folder(out);
  const json config = json_in("out/config.json");
  const auto expect_damage = [&](const std::string& what, const std::string& difference = "") {
    expect_verdict({out}, 4, what);
    expect_verdict({out, "--against", run}, 4, what);
    expect_verdict({out, "--against", run}, 4, difference);
  };
  folder.flip(kDownWeight, 2 * 7, 0x40).write(out);
  expect_damage(kDownWeight + " is not what was exported: its hash differs", kDownWeight + "[0, 7] is ");
  folder.flip(kDownWeight, 2 * 7, 0x40).flip(kDownWeight, 2 * 7 + 1, 0x7F).write(out);
  expect_damage(" is not what was exported: its hash differs");
  folder.write(out);
  for (const json& change : {json{{"rope_theta", 77.0}}, {{"model_type", "unheard-of"}}, {{"hidden_size", 32}}}) {
    write_file(out + "/config.json", changed(config, change).dump());
    expect_damage("config.json is not what was exported: its hash differs");
  }
  // This one is as it was exported, of another run.
  export_to(trained("other", {"precision.recipe=mxfp8", "training.seed=5"}), "whole");
  expect_verdict({"whole"}, 0, "intact");
  expect_verdict({"whole", "--against", run}, 1, "[0, 0] is ");
}

// Without its mantissa.json, a folder is told by what it holds.
TEST_F(Verify, ATokenWithAnotherIdIsTold) {
  const std::string saved = mixed("run");
  export_to(saved, "out");
  const json tokenizer = json_in("out/tokenizer.json");
  std::filesystem::remove(path("out/mantissa.json"));
  expect_verdict({"out", "--against", run_folder("run")}, 0, "0 values differ");
  const auto expect_told = [&](const json& changed, const std::string& what) {
    write_file(path("out/tokenizer.json"), changed.dump());
    expect_verdict({"out", "--against", run_folder("run")}, 1, "out: tokenizer.json: " + what);
  };
  expect_told(changed(tokenizer, {{"normalizer", {{"type", "NFC"}}}}), "normalizer differs");
  json shifted = tokenizer;
  json& vocab = shifted["model"]["vocab"];
  const size_t size = vocab.size();
  for (json& id : vocab) id = (id.get<size_t>() + 1) % size;
  expect_told(shifted, "\"");
  json more = tokenizer;
  more["model"]["vocab"]["one two"] = size;
  expect_told(more, "model.vocab differs");
  json fused = tokenizer;
  fused["model"]["fuse_unk"] = true;
  expect_told(fused, "model differs");
  write_file(path("out/tokenizer.json"), tokenizer.dump(3));
  expect_verdict({"out", "--against", run_folder("run")}, 0, "0 values differ");
  // As other programs write the same tokenizer: merges as pairs, defaults stated, offsets, added tokens in the vocabulary.
  json again = tokenizer;
  for (json& merge : again["model"]["merges"]) {
    if (!merge.is_string()) continue;
    const std::string text = merge;
    merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
  }
  again["model"]["ignore_merges"] = false;
  again["post_processor"] = {{"type", "ByteLevel"}, {"trim_offsets", true}};
  for (const json& token : again["added_tokens"]) again["model"]["vocab"][token["content"].get<std::string>()] = token["id"];
  write_file(path("out/tokenizer.json"), again.dump());
  expect_verdict({"out", "--against", run_folder("run")}, 0, "0 values differ");
}

// Only linears outside of experts have the kernel.
TEST_F(Verify, InputsThatVllmRoundsToFourBitsAreTold) {
  const std::string told =
      "vLLM up to 0.32 rounds inputs of 2 MXFP4 modules to 4 bits on SM100, as forward here does not (vllm-project/vllm#56770): serve with "
      "--linear-backend marlin, or set VLLM_DISABLED_KERNELS=FlashInferMxFp4LinearKernel";
  const auto warnings_of = [&](const std::vector<std::string>& arguments) {
    const ProcessResult result = run_mantissa(arguments, folder_.path());
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return result.errors + result.output;
  };
  const auto exported = [&](const std::string& run, const std::string& out, const std::vector<std::string>& options) {
    std::vector<std::string> arguments = {"export", run, "--output", out};
    arguments.insert(arguments.end(), options.begin(), options.end());
    return warnings_of(arguments);
  };
  const std::string two = trained("two", {R"(precision.rules=[{"match": "layers.0.mlp.*", "recipe": "mxfp4_qat"}])"});
  EXPECT_THAT(exported(two, "codes", {"--weights", "packed"}), HasSubstr(told));
  EXPECT_THAT(warnings_of({"verify", "codes"}), HasSubstr(told));
  EXPECT_THAT(warnings_of({"verify", "codes", "--against", two}), HasSubstr(told));
  EXPECT_THAT(exported(two, "values", {}), Not(HasSubstr("vLLM")));
  EXPECT_THAT(exported(two, "mlx", {"--weights", "packed", "--format", "mlx"}), Not(HasSubstr("vLLM")));
  const std::string inputs = trained("inputs", {"precision.recipe=mxfp4_qat_mxfp8_act"});
  EXPECT_THAT(exported(inputs, "of inputs", {"--weights", "packed"}), Not(HasSubstr("vLLM")));
  const std::string narrow = trained("narrow", {"precision.recipe=mxfp4_qat_mxfp4_act"});
  EXPECT_THAT(exported(narrow, "of narrow inputs", {"--weights", "packed"}), Not(HasSubstr("vLLM")));
  EXPECT_THAT(warnings_of({"verify", "of narrow inputs", "--against", narrow}), Not(HasSubstr("inputs are")));
  ModelExport against(narrow, {}, make_backend("cpu"));
  HfWeights of_inputs(path("of inputs"));
  EXPECT_THAT(export_scheme_differences(of_inputs, against.weights()),
              ::testing::Contains(HasSubstr("inputs are e2m1 1x32 flashinfer in the checkpoint, and servers quantize them to e4m3 here")));
  const std::string experts = trained("experts", {R"(model.moe={"num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 96})",
                                                  R"(precision.rules=[{"match": "layers.*.moe.experts.*", "recipe": "mxfp4_qat"}])"});
  EXPECT_THAT(exported(experts, "of experts", {"--weights", "packed"}), Not(HasSubstr("vLLM")));
}

// An error of the other side is told before the export is read, and is none of the export.
TEST_F(Verify, AnErrorOfTheCheckpointIsToldWhateverTheExportIs) {
  const std::string saved = mixed("run"), out = path("out");
  export_to(saved, "out");
  HfFolder(out).flip(kDownWeight, 2 * 7, 0x40).write(out);
  expect_verdict({out, "--against", path("rum")}, 2, "rum");
  std::filesystem::resize_file(saved + "/manifest.json", 100);
  expect_verdict({out, "--against", saved}, 4, "manifest.json");
  expect_verdict({out}, 4, kDownWeight + " is not what was exported");
}

TEST_F(Verify, TheCommandTellsDamageFromAnotherModel) {
  const std::string saved = mixed("run"), out = path("out"), run = run_folder("run");
  export_to(saved, "out");
  expect_verdict({out}, 0, out + ": intact: 25 tensors as exported");
  expect_verdict({out, "--against", run}, 0, out + ": 0 values differ in 25 tensors from what forward multiplies by in " + saved);
  expect_verdict({run, "--against", run}, 2, "is not an export");
  expect_verdict({"nowhere", "--against", run}, 2, "nowhere: there is no such file or folder");
  for (const char* const name : {"config.json", "model.safetensors"}) {
    std::filesystem::rename(path(text("out/", name)), path("away"));
    expect_verdict({out, "--against", run}, 4, text(out, ": lacks ", name));
    std::filesystem::rename(path("away"), path(text("out/", name)));
  }
  const HfFolder folder(out);
  std::filesystem::remove(out + "/tokenizer.json");
  expect_verdict({out}, 4, "lacks tokenizer.json, which mantissa.json names");
  write_file(out + "/config.json", changed(json_in("out/config.json"), {{"rope_theta", 77.0}}).dump());
  expect_verdict({out}, 4, "config.json is not what was exported: its hash differs");
  std::filesystem::remove(out + "/mantissa.json");
  expect_verdict({out}, 2, "mantissa.json: there is none");
  expect_verdict({out, "--against", run}, 1, "model.rope_theta: 10000 in the checkpoint, 77 here");
  folder.flip(kDownWeight, 2 * 7, 0x40).write(out);
  write_file(out + "/config.json", changed(json_in("out/config.json"), {{"rope_theta", 10000.0}}).dump());
  expect_verdict({out, "--against", run}, 1, kDownWeight + "[0, 7] is ");
}

// A zero has a sign, except where forward has none.
TEST_F(Verify, SignsOfZerosAreComparedWhereForwardHasThem) {
  const std::string saved = mixed("run"), up = "model.layers.0.mlp.up_proj.weight";  // layer 0 is of MXFP4
  export_to(saved, "out");
  const HfFolder out(path("out"));
  const std::vector<float> values = out.values(up);
  const auto zero = static_cast<size_t>(std::ranges::find(values, 0.0F) - values.begin());
  ASSERT_LT(zero, values.size());
  out.flip(up, zero * 2 + 1, static_cast<char>(0x80)).write(path("flipped"));
  EXPECT_EQ(difference("flipped", saved), std::nullopt);

  const HfFolder random(path("random"), "llama", "BF16");
  const HfFolder zeros = random.flip(up, 6, random.bytes(up)[6]).flip(up, 7, random.bytes(up)[7]);
  zeros.write(path("zeros"));
  zeros.flip(up, 7, static_cast<char>(0x80)).write(path("other"));
  EXPECT_EQ(difference("zeros", path("zeros")), std::nullopt);
  EXPECT_THAT(difference("other", path("zeros")).value_or(""), HasSubstr(up + "[0, 3] is -0, forward multiplies by 0"));
}

// Codes have signs of zeros, too. No file names the rule that made them: readers decode -0 as it is, and forward does by all rules but one.
TEST_F(Verify, ZerosOfCodesHaveTheSignsThatForwardReads) {
  const std::string down = kDownWeight + "_packed";
  for (const std::string rule : {"rceil", "floor", "even", "ceil", "mse", "flashinfer"}) {
    const std::string saved = trained(rule, {"precision.recipe=own", R"(precision.recipes={"own": {"base": "mxfp4_qat",
        "weight_fake_quant": {"rule": ")" + rule + R"("}}})"});
    pack_to(saved, rule + " packed");
    const HfFolder packed(path(rule + " packed"));
    const auto zero = std::ranges::find_if(packed.bytes(down), [](char both) { return (both & 7) == 0; });
    ASSERT_NE(zero, packed.bytes(down).end());
    packed.flip(down, static_cast<size_t>(zero - packed.bytes(down).begin()), 8).write(path(rule + " packed"));
    const std::string difference = this->difference(rule + " packed", saved).value_or("none");
    EXPECT_THAT(difference, rule == "flashinfer" ? HasSubstr("none") : HasSubstr("0, forward multiplies by ")) << rule;
  }
}

// A NaN equals nothing, not even itself.
TEST_F(Verify, WeightsThatAreNoNumbersAreRefused) {
  const HfFolder folder = block_folder("folder", kWhole, FileDtype::f32, power_of_two);
  folder.flip(kDownWeight, 7, static_cast<char>(folder.bytes(kDownWeight)[7] ^ 0x7F)).write(path("bad"));
  expect_verdict({"bad", "--against", "bad"}, 4, "bad: " + kDownWeight + "[0, 7] is nan");
  const std::string embedding = "model.embed_tokens.weight";
  HfFolder infinite = folder;
  for (const size_t byte : {size_t{10}, size_t{11}})
    infinite = infinite.flip(embedding, byte, static_cast<char>(infinite.bytes(embedding)[byte] ^ (byte == 10 ? 0x80 : 0x7F)));
  infinite.write(path("bad"));
  const Error error = error_of([&] { difference("bad", path("bad")); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr(embedding + "[0, 5] is inf"));
}

// Equal codes are not enough: the inputs that they are multiplied by are part of the answer.
TEST_F(Verify, CodesOfAnotherSchemeDiffer) {
  const std::string saved = mixed("run"), run = run_folder("run");
  pack_to(saved, "packed");
  expect_verdict({"packed", "--against", run}, 0, "0 values differ");
  std::filesystem::remove(path("packed/mantissa.json"));
  const json config = json_in("packed/config.json");
  json quantized;  // inputs of a server
  for (const json& group : config["quantization_config"]["config_groups"])
    if (group["format"] == "mxfp8-quantized") quantized = group["input_activations"];
  const auto differences_with = [&](const std::string& format, const json& inputs) {
    json changed = config;
    for (json& group : changed["quantization_config"]["config_groups"])
      if (group["format"] == format) group["input_activations"] = inputs;
    write_file(path("packed/config.json"), changed.dump());
    ModelExport against(saved, {}, make_backend("cpu"));
    HfWeights written(path("packed"));
    const std::vector<std::string> differences = export_scheme_differences(written, against.weights());
    EXPECT_EQ(against.difference(written, 0, 2), "what was written is not what was to be: " + differences.at(0))
        << "before it is published";
    EXPECT_EQ(against.difference(written, 1, 2), std::nullopt) << "one rank says so";
    return differences;
  };
  const std::string high = "inputs are in high precision in the checkpoint, quantized here",
                    low = "inputs are quantized in the checkpoint, in high precision here";
  EXPECT_THAT(differences_with("mxfp4-pack-quantized", quantized), AllOf(SizeIs(4), ::testing::Contains("layers.0.mlp.down: " + high)));
  EXPECT_THAT(differences_with("mxfp8-quantized", nullptr), AllOf(SizeIs(4), ::testing::Contains("layers.1.attn.out: " + low)));
  expect_verdict({"packed", "--against", run}, 1,
                 "packed has codes that a server multiplies differently than " + saved + ":\n  layers.1.attn.out: " + low + "\n");
  // An output projection, whatever recipes compute with.
  const std::string output = trained("output", {"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=32",
                                                R"(precision.rules=[{"match": "layers.*", "recipe": "high"}])"});
  pack_to(output, "head");
  std::filesystem::remove(path("head/mantissa.json"));
  json head = json_in("head/config.json");
  head["quantization_config"]["config_groups"]["group_0"]["input_activations"] = nullptr;
  write_file(path("head/config.json"), head.dump());
  expect_verdict({"head", "--against", run_folder("output")}, 1, "output: inputs are quantized in the checkpoint, in high");
  expect_verdict({"head", "--against", "head"}, 0, "0 values differ");  // no recipe has these inputs: as values
}

// Blocks of inputs are compared where they are those of the convention fp8, whose servers may have DeepSeek's least scale of inputs.
TEST_F(Verify, BlocksOfInputsAreAPartOfTheScheme) {
  const std::vector<std::string> shape = {"model.hidden_size=128", "model.intermediate_size=128", "model.num_attention_heads=2",
                                          "model.num_key_value_heads=2", "model.head_dim=64"};
  const auto run_of = [&](const std::string& name, std::vector<std::string> sets) {
    sets.insert(sets.begin(), shape.begin(), shape.end());
    return trained(name, sets);
  };
  const std::string range = run_of("range", {"precision.recipe=own", R"(precision.recipes={"own": {"base": "fp8_block",
      "input": {"scale_range": [-22, 127]}}})"});
  pack(range, "packed");
  EXPECT_EQ(HfFolder(path("packed")).dtype(kDownWeight + kScaleInv), FileDtype::f32);
  expect_verdict({"packed", "--against", run_folder("range")}, 0, "0 values differ");
  ModelExport against(run_of("of 32", {"precision.recipe=mxfp8", "checkpoint.init_from=" + path("packed")}), {}, make_backend("cpu"));
  EXPECT_THAT(export_scheme_differences(HfWeights(path("packed")), against.weights()),
              ::testing::Contains("layers.0.attn.out: inputs are e4m3 1x32 rceil in the checkpoint, and servers quantize them in blocks of "
                                  "128 here"));
}

TEST_F(Verify, MantissaJsonSaysWhatEachTensorWasMadeFrom) {
  const std::string saved = mixed("run");
  export_to(saved, "out");
  const json proof = json_in("out/mantissa.json");
  EXPECT_EQ(proof["checkpoint"], json({{"step", 1}, {"manifest", CheckpointReader(saved).hash()}}));
  EXPECT_THAT(proof["tensors"], SizeIs(25));
  EXPECT_EQ(proof["options"], json({{"weights", "dequantized"}, {"convention", nullptr}, {"dtype", "auto"}})) << "values have none";
  pack_to(saved, "packed");
  EXPECT_EQ(json_in("packed/mantissa.json")["options"],
            json({{"weights", "packed"}, {"convention", "compressed-tensors"}, {"dtype", "auto"}}));
  const std::vector<json> expected = {
      json::parse(R"({"tensor": "model.layers.0.self_attn.k_proj.weight", "module": "layers.0.attn.qkv", "dtype": "BF16",
                      "shape": [32, 64], "format": "e2m1", "block": [1, 32], "rule": "flashinfer"})"),
      json::parse(R"({"tensor": "model.layers.1.mlp.down_proj.weight", "module": "layers.1.mlp.down", "dtype": "BF16",
                      "shape": [64, 96], "format": "e4m3", "block": [32, 32], "rule": "rceil"})"),
      json::parse(R"({"tensor": "model.norm.weight", "module": "final_norm", "dtype": "BF16", "shape": [64], "format": null})")};
  for (const json& one : expected) {
    const auto found = std::ranges::find_if(proof["tensors"], [&](const json& tensor) { return tensor["tensor"] == one["tensor"]; });
    EXPECT_EQ(changed(*found, {{"xxh64", "absent"}}), one);
  }
  export_to(trained("range", {R"(precision.recipes={"own": {"base": "mxfp8", "weight": {"scale_range": [-20, 125]}}})",
                              "precision.recipe=own", R"(precision.rules=[{"match": "layers.0.*", "recipe": "mxfp4_qat"}])"}),
            "range out");
  const json ranged = json_in("range out/mantissa.json")["tensors"];
  for (const json& tensor : ranged)
    EXPECT_EQ(tensor.value("scale_range", json()), tensor["format"] == "e4m3" ? json({-20, 125}) : json()) << tensor;
}

// The byte changes between the writing of the folder and its reading back.
TEST_F(Verify, AByteThatChangesOnTheDiskIsFoundBeforeTheFolderHasItsName) {
  const std::string saved = mixed("run");
  bool flipped = false;
  const auto flip = [&] {
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      const std::string file = entry.path() / "model.safetensors";
      if (!std::filesystem::exists(file)) continue;
      std::string bytes = read_file(file);
      bytes.back() = static_cast<char>(bytes.back() ^ 1);
      write_file(file, bytes);
      flipped = true;
    }
  };
  arm_fault({.kind = Fault::other, .at = 1, .only = "open", .path = "mantissa.json", .action = flip});
  const Error error = error_of([&] { export_to(saved, "out"); });
  EXPECT_TRUE(disarm_fault() && flipped);
  EXPECT_EQ(error.code(), ExitCode::storage);
  EXPECT_THAT(error.what(), HasSubstr("what was written is not what was to be: "));
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
    EXPECT_THAT(entry.path().filename().string(), ::testing::AnyOf("runs", "text.txt"));
}

}  // namespace mantissa::test::verify_export_test
