// A model, exported for mlx-lm in every form that its recipe has: the codes of a folder for other servers and the values of forward, which
// are read back; and models that mlx-lm computes otherwise.
#include "checkpoint/checkpoint_manifest.h"
#include "exports.h"
#include "model_options.h"
#include "process.h"

namespace mantissa::mlx_export_test {

using test::error_of;
using test::HfFolder;
using test::kEightBits;
using test::kEightBitTable;
using test::kExperts;
using test::kFourBitExperts;
using test::kFourBitTable;
using test::kGpt2;
using test::kGptOss;
using test::logits_of;
using test::Sets;
using test::with;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct Case {
  const char* name;
  Sets sets;
  Sets tensors = {};      // some of the packed folder; none: no recipe quantizes
  std::string keys = "";  // some of its "quantization"
  bool packed_hf = true;  // there is a packed folder for other servers with the same codes
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

const std::string kWeights = "precision.recipe=mxfp8_weights";
const Sets kMixtral = {"model.qk_norm=false", "model.num_attention_heads=2", "model.moe={" + kExperts + "}"},
           kQwenExperts = {"model.moe={" + kExperts + R"(, "dense_layers": [1]})"};

class MlxExport : public test::ExportTest {
 protected:
  static constexpr ExportOptions kPacked{.format = ExportFormat::mlx, .weights = ExportWeights::packed};
  static constexpr ExportOptions kValues{.format = ExportFormat::mlx};

  static ExportOptions allowed(ExportOptions options) {
    options.allow_different = true;
    return options;
  }
  void expect_faithful(const std::string& name, const std::string& saved, const ExportOptions& options) const {
    EXPECT_EQ(difference(name, saved), std::nullopt);
    EXPECT_EQ(verify_export(path(name)), std::ssize(HfFolder(path(name)).names()));
    EXPECT_EQ(SafetensorsFolder(std::filesystem::path(path(name))).metadata(), (SafetensorsMetadata{{"format", "mlx"}}));
    EXPECT_EQ(HfWeights(path(name)).format(), ExportFormat::mlx);
    EXPECT_EQ(json_in(name + "/mantissa.json")["options"]["format"], "mlx");
    EXPECT_FALSE(std::filesystem::exists(path(name + "/README.md")));
    export_to(path(name), name + " again", options);
    EXPECT_TRUE(all_bytes(name) == all_bytes(name + " again")) << name;
    EXPECT_EQ(test::read_file(path(name + "/config.json")), test::read_file(path(name + " again/config.json")));
  }
  // Every codes and scales of a folder for other servers stand, byte by byte, somewhere in one for mlx-lm: in a tensor of their own, or as
  // one of its experts.
  void expect_same_codes(const std::string& hf, const std::string& mlx) const {
    const std::map<std::string, std::string> here = all_bytes(mlx);
    int compared = 0;
    for (const auto& [name, bytes] : all_bytes(hf)) {
      const FileDtype dtype = HfFolder(path(hf)).dtype(name);
      const bool scales = (name.ends_with("_scale") || name.ends_with("_scales")) && dtype != FileDtype::f32;
      if ((!scales && dtype != FileDtype::u8 && dtype != FileDtype::f8_e4m3) || name.find("gate_up_proj") != std::string::npos) continue;
      const auto holds = [&part = bytes](const auto& tensor) { return tensor.second.find(part) != std::string::npos; };
      EXPECT_TRUE(std::ranges::any_of(here, holds)) << name;
      ++compared;
    }
    EXPECT_GT(compared, 0);
  }
  // A run is told before it starts.
  std::string run_refusal(const std::string& saved, const ExportOptions& options) const {
    RunConfig config = CheckpointReader(saved).config();
    config.checkpoint.exported = options;
    ConfigReport report;
    check_export(config, report);
    return report.failed("checkpoint") ? error_of([&] { report.throw_if_failed(); }).what() : "";
  }
};

const std::string kTwoLevels = "precision.recipe=own";
std::string own_exponent(int exponent) {
  return text(R"(precision.recipes={"own": {"base": "nvfp4_qat", "weight_fake_quant": {"tensor_exponent": )", exponent, "}}}");
}

class MlxForms : public MlxExport, public ::testing::WithParamInterface<Case> {};

TEST_P(MlxForms, HaveTheValuesOfForwardAndEveryByteAgain) {
  const Case& one = GetParam();
  const std::string saved = trained("run", one.sets);
  export_to(saved, "values", kValues);
  expect_faithful("values", saved, kValues);
  export_to(saved, "hf");
  EXPECT_EQ(difference("values", path("hf")), std::nullopt);
  export_to(path("values"), "hf again");
  EXPECT_TRUE(all_bytes("hf") == all_bytes("hf again")) << "by way of mlx-lm";
  export_to(path("hf"), "values of hf", kValues);
  EXPECT_TRUE(all_bytes("values") == all_bytes("values of hf")) << "of a folder of transformers";
  EXPECT_EQ(run_refusal(saved, kValues), "");
  if (one.tensors.empty()) {
    EXPECT_THAT(error_of([&] { export_to(saved, "packed", kPacked); }).what(), HasSubstr("nothing to pack"));
    return;
  }
  export_to(saved, "packed", kPacked);
  expect_faithful("packed", saved, kPacked);
  EXPECT_EQ(run_refusal(saved, kPacked), "");
  EXPECT_EQ(logits_of(path("packed")), logits_of(saved));
  const HfFolder packed(path("packed"));
  Sets tensors;
  for (const std::string& tensor : packed.names())
    tensors.push_back(text(tensor, ' ', packed.dtype(tensor), ' ', shape_text(packed.shape(tensor))));
  EXPECT_THAT(tensors, ::testing::IsSupersetOf(one.tensors));
  const nlohmann::json config = json_in("packed/config.json"), wanted = nlohmann::json::parse(one.keys);
  for (const auto& [key, value] : wanted.items()) EXPECT_EQ(config["quantization"].value(key, nlohmann::json()), value) << key;
  if (one.packed_hf) {
    pack_to(saved, "packed hf");
    expect_same_codes("packed hf", "packed");
    export_to(path("packed hf"), "packed again of hf", kPacked);
    EXPECT_TRUE(all_bytes("packed") == all_bytes("packed again of hf"));
  }
  // A scale that differs is a difference with the name of its weight.
  const std::set<std::string> names = packed.names();
  const auto scale = std::ranges::find_if(names, [](const std::string& tensor) { return tensor.ends_with(".scales"); });
  packed.flip(*scale, packed.bytes(*scale).size() - 1, 1).write(path("packed"));
  EXPECT_THAT(difference("packed", saved).value_or(""), HasSubstr(scale->substr(0, scale->rfind('.')) + ".weight["));
}

INSTANTIATE_TEST_SUITE_P(
    , MlxForms,
    ::testing::Values(
        Case{"high", {"precision.recipe=high"}},
        Case{"four_bits_tied",
             {"precision.recipe=mxfp4_qat", "model.tie_word_embeddings=true"},
             {"model.layers.0.mlp.down_proj.weight U32 [64, 12]", "model.layers.0.mlp.down_proj.scales U8 [64, 3]"},
             R"({"bits": 4, "group_size": 32, "mode": "mxfp4", "model.embed_tokens": false})"},
        Case{"tiles_of_32",
             {kWeights, "model.tie_word_embeddings=false"},
             {"model.layers.1.self_attn.q_proj.weight U32 [96, 16]", "model.layers.1.self_attn.q_proj.scales U8 [96, 2]"},
             R"({"bits": 8, "group_size": 32, "mode": "mxfp8", "lm_head": false})"},
        Case{"rows",
             {"precision.recipe=own", R"(precision.recipes={"own": {"base": "mxfp8_weights", "weight": {"block": [1, 32]}}})"},
             {"model.layers.1.self_attn.q_proj.weight U32 [96, 16]"},
             R"({"mode": "mxfp8"})"},
        Case{"mixed",
             {kWeights,
              R"(precision.rules=[{"match": "layers.0.mlp.*", "recipe": "mxfp4_qat"}, {"match": "layers.1.attn.*", "recipe": "high"}])"},
             {"model.layers.0.mlp.up_proj.weight U32 [96, 8]", "model.layers.1.self_attn.q_proj.weight BF16 [96, 64]"},
             R"({"mode": "mxfp8", "model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
                 "model.layers.1.self_attn.q_proj": false, "model.layers.1.mlp.up_proj": null})"},
        Case{"qwen2",
             {kWeights, "model.qk_norm=false", "model.attention_bias=qkv", "model.num_attention_heads=2"},
             {"model.layers.0.self_attn.k_proj.bias BF16 [32]"},
             R"({"mode": "mxfp8"})"},
        Case{"experts",
             with(kQwenExperts, {kWeights, kFourBitExperts}),
             {"model.layers.0.mlp.switch_mlp.gate_proj.weight U32 [3, 96, 8]",
              "model.layers.0.mlp.switch_mlp.gate_proj.scales U8 [3, 96, 2]",
              "model.layers.0.mlp.switch_mlp.down_proj.weight U32 [3, 64, 12]", "model.layers.1.mlp.down_proj.weight U32 [64, 24]"},
             R"({"model.layers.0.mlp.gate": false})"},
        Case{"mixtral",
             with(kMixtral, {kWeights}),
             {"model.layers.1.block_sparse_moe.switch_mlp.up_proj.weight U32 [3, 96, 16]"},
             R"({"model.layers.0.block_sparse_moe.gate": false})"},
        Case{"gpt_oss",
             with(kGptOss, {kFourBitExperts}),
             {"model.layers.1.mlp.experts.gate_proj.weight U32 [3, 96, 8]", "model.layers.1.mlp.experts.down_proj.scales U8 [3, 64, 3]",
              "model.layers.1.mlp.experts.up_proj.bias BF16 [3, 96]"},
             R"({"mode": "mxfp4", "model.layers.0.self_attn.q_proj": false, "model.layers.0.mlp.router": false})"},
        Case{"gpt_oss_all_linears",
             with(kGptOss, {kWeights}),
             {"model.layers.1.mlp.experts.gate_proj.weight U32 [3, 96, 16]", "model.layers.1.self_attn.o_proj.weight U32 [64, 24]"},
             R"({"mode": "mxfp8"})",
             false},
        Case{"gpt2",
             with(kGpt2, {kWeights}),
             {"model.h.1.attn.c_attn.weight U32 [192, 16]", "model.h.1.mlp.c_proj.scales U8 [64, 8]", "model.wpe.weight BF16 [16, 64]"},
             R"({"mode": "mxfp8", "model.wte": false})",
             false},
        Case{"inputs", {"precision.recipe=mxfp8"}, {"model.layers.1.self_attn.q_proj.weight U32 [96, 16]"}, R"({"mode": "mxfp8"})"},
        Case{"projection",
             {"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=32", "model.tie_word_embeddings=false"},
             {"lm_head.scales U8 [8, 2]"},
             R"({"mode": "mxfp8", "lm_head": null})"}),
    [](const auto& one) { return std::string(one.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Nvfp4, MlxForms,
    ::testing::Values(Case{
        "two_levels",
        {kTwoLevels, own_exponent(0), R"(precision.rules=[{"match": "layers.0.mlp.*", "recipe": "mxfp4_qat"}])"},
        {"model.layers.1.mlp.down_proj.weight U32 [64, 12]", "model.layers.1.mlp.down_proj.scales U8 [64, 6]"},
        R"({"bits": 4, "group_size": 16, "mode": "nvfp4", "model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 32, "mode": "mxfp4"}})",
        true}),
    [](const auto& one) { return std::string(one.param.name); });

INSTANTIATE_TEST_SUITE_P(Tables, MlxForms,
                         ::testing::Values(Case{"table_of_four_bits",
                                                {"precision.recipe=mxfp4_qat", kFourBitTable, "model.tie_word_embeddings=true"},
                                                {"model.embed_tokens.weight U32 [8, 8]", "model.embed_tokens.scales U8 [8, 2]"},
                                                R"({"bits": 4, "mode": "mxfp4", "model.embed_tokens": null})",
                                                false},
                                           Case{"table_of_eight_bits",
                                                {kWeights, kEightBits, kEightBitTable, "model.tie_word_embeddings=false"},
                                                {"model.embed_tokens.weight U32 [8, 16]", "lm_head.weight BF16 [8, 64]"},
                                                R"({"mode": "mxfp8", "model.embed_tokens": null, "lm_head": false})",
                                                false},
                                           Case{
                                               "table_beside_inputs",
                                               {"precision.recipe=mxfp8", kFourBitTable, "model.tie_word_embeddings=true"},
                                               {"model.embed_tokens.weight U32 [8, 8]"},
                                               R"({"mode": "mxfp8", "model.embed_tokens": {"bits": 4, "group_size": 32, "mode": "mxfp4"}})",
                                               false},
                                           Case{"gpt2_table",
                                                with(kGpt2, {kEightBits, kEightBitTable}),
                                                {"model.wte.weight U32 [8, 16]", "model.wpe.weight BF16 [16, 64]"},
                                                R"({"mode": "mxfp8", "model.wte": null, "model.h.0.mlp.c_fc": false})",
                                                false}),
                         [](const auto& one) { return std::string(one.param.name); });

class MlxRefusals : public MlxExport {
 protected:
  // The folder that is made all the same holds the values of forward, and says what is different.
  void expect_refused(const std::string& name, const Sets& sets, const ExportOptions& options, const std::string& what) const {
    SCOPED_TRACE(name);
    const std::string saved = trained(name, sets);
    const Error error = error_of([&] { export_to(saved, name + " mlx", options); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), AllOf(HasSubstr(what), HasSubstr("--allow-different")));
    EXPECT_FALSE(std::filesystem::exists(path(name + " mlx")));
    EXPECT_THAT(run_refusal(saved, options), HasSubstr(what));
    EXPECT_EQ(run_refusal(saved, allowed(options)), "");
    export_to(saved, name + " mlx", allowed(options));
    EXPECT_EQ(difference(name + " mlx", saved), std::nullopt);
    EXPECT_GT(verify_export(path(name + " mlx")), 0);
    EXPECT_THAT(test::read_file(path(name + " mlx/README.md")), HasSubstr("\n- " + what));
  }
};

TEST_F(MlxRefusals, AModelThatMlxComputesOtherwiseIsExportedWhereThatIsAllowed) {
  expect_refused("windows", {"model.sliding_window=8"}, kValues, "model.sliding_window: ");
  expect_refused("heads", with(kMixtral, {"model.num_attention_heads=3"}), kValues, "model.head_dim: ");
  expect_refused("biases", {"model.attention_bias=all", "precision.recipe=mxfp4_qat"}, kPacked, "model.attention_bias: ");
  expect_refused("clamp", with(kGptOss, {"model.swiglu_limit=1.5"}), kValues, "model.swiglu_limit: mlx-lm clamps at 7");
}

// Then verify tells it, too, as of all folders.
TEST_F(MlxRefusals, InputsThatMlxReadsInHighPrecisionAreToldByModule) {
  expect_refused("four bits", {"precision.recipe=mxfp4_qat_mxfp8_act"}, kPacked,
                 "precision: inputs of 8 modules, the first of layers.0.attn.qkv, are quantized in forward");
  expect_refused("experts", with(kMixtral, {"precision.recipe=mxfp8"}), kPacked, "precision: inputs of ");
  expect_refused("with biases",
                 {"model.qk_norm=false", "model.attention_bias=qkv", "model.num_attention_heads=2", "precision.recipe=mxfp8"}, kPacked,
                 "precision: inputs of ");
  expect_refused("blocks of 128",
                 {"model.hidden_size=128", "model.intermediate_size=128", "model.num_attention_heads=2", "model.num_key_value_heads=2",
                  "model.head_dim=64", "precision.recipe=fp8_block"},
                 kPacked, "precision: inputs of 8 modules");
  EXPECT_FALSE(json_in("experts mlx/config.json").contains("quantize_activations"));
  ModelExport against(checkpoint("experts", 1), {}, make_backend("cpu"));
  EXPECT_THAT(export_scheme_differences(HfWeights(path("experts mlx")), against.weights()), Not(IsEmpty()));
  export_to(trained("plain", {"precision.recipe=mxfp8"}), "plain mlx", kPacked);
  EXPECT_EQ(json_in("plain mlx/config.json")["quantize_activations"], true);
  // Experts whose inputs training reads in high precision are as mlx-lm computes them.
  const std::string both = trained("both", with(kQwenExperts, {"precision.recipe=mxfp8", kFourBitExperts}));
  export_to(both, "both mlx", kPacked);
  EXPECT_EQ(json_in("both mlx/config.json")["quantize_activations"], true);
  EXPECT_THAT(export_scheme_differences(HfWeights(path("both mlx")), ModelExport(both, {}, make_backend("cpu")).weights()), IsEmpty());
}

// Scales of blocks take over that of the tensor where E4M3 has the products.
TEST_F(MlxRefusals, AScaleOfATensorThatIsNotOneIsFoldedWhereThatIsExact) {
  for (const int exponent : {2, -8}) {
    const std::string name = text("of ", exponent), saved = trained(name, {kTwoLevels, own_exponent(exponent)});
    if (exponent > 0) {  // weights are so small that all scales are the least
      export_to(saved, name + " mlx", kPacked);
      EXPECT_EQ(difference(name + " mlx", saved), std::nullopt);
      HfWeights folder(path(name + " mlx"));
      EXPECT_EQ(compare_codes(folder, ModelExport(saved, {}, make_backend("cpu")).weights()).tensors, 0) << "by other scales";
      continue;
    }
    EXPECT_THAT(error_of([&] { export_to(saved, name + " mlx", kPacked); }).what(),
                AllOf(HasSubstr("model.layers."), HasSubstr("times 2^-8 is no number of E4M3: train with \"tensor_exponent\": 0")));
    EXPECT_FALSE(std::filesystem::exists(path(name + " mlx")));
  }
}

TEST_F(MlxRefusals, OptionsOfOneFormatAreNoneOfTheOther) {
  const std::string saved = trained("run", {"precision.recipe=mxfp8"});
  ExportOptions convention = kPacked;
  convention.convention = Convention::sglang;
  EXPECT_THAT(error_of([&] { export_to(saved, "out", convention); }).what(), HasSubstr("convention sglang needs the format hf"));
  EXPECT_THAT(error_of([&] { export_to(saved, "out", {.allow_different = true}); }).what(),
              HasSubstr("allow_different needs the format mlx"));
}

// Codes of mlx-lm in other types and shapes are told by tensor.
TEST_F(MlxRefusals, AFolderWhoseCodesAreNoneOfMlxIsRefused) {
  export_to(trained("run", {kWeights}), "out", kPacked);
  const HfFolder good(path("out"));
  const std::string weight = "model.layers.0.mlp.down_proj.weight", scales = "model.layers.0.mlp.down_proj.scales";
  const auto expect_problem = [&](const HfFolder& changed, const std::string& what) {
    changed.write(path("out"));
    EXPECT_THAT(folder_error("out").what(), HasSubstr(what));
  };
  expect_problem(good.as(weight, FileDtype::f8_e4m3, {64, 96}), weight + " is F8_E4M3 with scales in U8; of mlx-lm mantissa reads U32");
  expect_problem(good.as(weight, FileDtype::u32, {96, 16}), weight + " is [96, 16], but config.json makes it [64, 12]");
  expect_problem(good.as(scales, FileDtype::u8, {96, 2}), scales + " is [96, 2], but config.json makes it [64, 3]");
  expect_problem(good.without(scales), weight + " is U32");
}

using Tensors = std::map<std::string, std::string>;  // bytes by name

void swap_rows(std::string& tensor, size_t rows, size_t a, size_t b) {
  const auto width = static_cast<std::ptrdiff_t>(tensor.size() / rows);
  const auto row = [&](size_t r) { return tensor.begin() + static_cast<std::ptrdiff_t>(r) * width; };
  std::swap_ranges(row(a), row(a) + width, row(b));
}

class MlxVerify : public MlxExport {
 protected:
  void expect_verdict(const std::string& name, int code, const std::vector<std::string>& lines, bool against = true) const {
    std::vector<std::string> arguments = {"verify", path(name)};
    if (against) arguments.insert(arguments.end(), {"--against", run_folder("run")});
    const test::ProcessResult result = test::run_mantissa(arguments, folder_.path());
    EXPECT_EQ(result.exit_code, code) << result.output << result.errors;
    for (const std::string& line : lines) EXPECT_THAT(result.output + result.errors, HasSubstr(line));
  }
  // Changes bytes in a copy of the folder "out". It is damaged by its hashes, and without them another model than the run.
  void plant(const std::string& fault, const std::function<void(Tensors&)>& change) const {
    SCOPED_TRACE(fault);
    std::filesystem::copy(path("out"), path(fault));
    const std::string file = path(fault + "/model.safetensors");
    Tensors tensors = all_bytes(fault);
    change(tensors);
    std::string whole = test::read_file(file);
    const std::string before = whole;
    const SafetensorsFile layout(file);
    for (const SafetensorsEntry& entry : layout.entries()) std::ranges::copy(tensors.at(entry.name), whole.begin() + entry.begin);
    ASSERT_NE(whole, before);
    test::write_file(file, whole);
    expect_verdict(fault, 4, {" is not what was exported: its hash differs"}, false);
    expect_verdict(fault, 4, {" is not what was exported: its hash differs"});
    std::filesystem::remove(path(fault + "/mantissa.json"));
  }
  void expect_noticed(const std::string& fault, const std::string& tensor, const std::function<void(Tensors&)>& change) const {
    plant(fault, change);
    expect_verdict(fault, 1, {tensor + "[", ", forward multiplies by "});
  }
};

TEST_F(MlxVerify, NoticesCodesScalesAndExpertsOutOfPlace) {
  export_to(trained("run", with(kQwenExperts, {kWeights, kFourBitExperts})), "out", kPacked);
  expect_verdict("out", 0,
                 {": 0 values differ in ", ": codes and scales of 14 tensors are those of forward, bit for bit\n",
                  "mlx-lm computes in bf16 as forward here does, and rounds everywhere to bf16 what that keeps in fp32"});
  const std::string experts = "model.layers.0.mlp.switch_mlp.", attention = "model.layers.1.self_attn.";
  expect_noticed("nibbles", experts + "up_proj.weight", [&](Tensors& tensors) {
    for (char& both : tensors.at(experts + "up_proj.weight"))
      both = static_cast<char>((static_cast<uint8_t>(both) << 4U) | (static_cast<uint8_t>(both) >> 4U));
  });
  expect_noticed("words", attention + "q_proj.weight", [&](Tensors& tensors) {
    std::string& codes = tensors.at(attention + "q_proj.weight");
    for (auto word = codes.begin(); word != codes.end(); word += 4) std::reverse(word, word + 4);
  });
  expect_noticed("neighbors", experts + "down_proj.weight", [&](Tensors& tensors) {
    std::string& scales = tensors.at(experts + "down_proj.scales");
    std::ranges::rotate(scales, scales.begin() + 1);
  });
  expect_noticed("experts", experts + "gate_proj.weight", [&](Tensors& tensors) {
    for (const char* const part : {"weight", "scales"}) swap_rows(tensors.at(experts + "gate_proj." + part), 3, 0, 2);
  });
  expect_noticed("gate and up", experts + "gate_proj.weight", [&](Tensors& tensors) {
    for (const char* const part : {"weight", "scales"})
      tensors.at(experts + "gate_proj." + part).swap(tensors.at(experts + "up_proj." + part));
  });
  // As llama.cpp has them: halves of a head become neighbors.
  expect_noticed("permutation", attention + "k_proj.weight", [&](Tensors& tensors) {
    for (const char* const part : {"weight", "scales"}) {
      std::string& rows = tensors.at(attention + "k_proj." + part);
      const std::string halves = rows;
      const size_t width = rows.size() / 32;
      for (size_t row = 0; row < 32; ++row) rows.replace(row * width, width, halves, (row % 2 * 16 + row / 2) * width, width);
    }
  });
}

TEST_F(MlxVerify, NoticesAMatrixThatIsTransposed) {
  export_to(trained("run", with(kGpt2, {kWeights})), "out", kValues);
  expect_noticed("transposed", "model.h.1.attn.c_proj.weight", [&](Tensors& tensors) {
    std::string& values = tensors.at("model.h.1.attn.c_proj.weight");
    const std::string rows = values;
    transpose(std::as_bytes(std::span(rows)), 64, 64, std::as_writable_bytes(std::span(values)));
  });
}

// Half the code under twice the scale is the same value.
TEST_F(MlxVerify, TellsOtherCodesOfTheSameValues) {
  export_to(trained("run", {kWeights}), "out", kPacked);
  const std::string module = "model.layers.0.self_attn.q_proj";
  plant("halves", [&](Tensors& tensors) {
    for (size_t i = 0; i < 32; ++i) {
      char& code = tensors.at(module + ".weight")[i];
      const int magnitude = static_cast<uint8_t>(code) & 0x7F;
      ASSERT_TRUE(magnitude == 0 || magnitude >= 16);
      if (magnitude > 0) code = static_cast<char>(code - 8);  // one less in the exponent
    }
    ++tensors.at(module + ".scales")[0];
  });
  expect_verdict("halves", 0,
                 {": 0 values differ in ",
                  " are not all those of forward, although the values are; the first that differs is " + module + ".weight[0, 0]\n"});
}

// MLX promotes bf16 by F32: one norm in F32, as every GGUF file has them, makes what follows fp32.
TEST_F(MlxVerify, TheTypeInWhichMlxComputesIsThatOfNormsToo) {
  const std::string norm = "model.layers.0.input_layernorm.weight", last = "model.norm.weight";
  const std::string saved = trained("run", {"precision.recipe=mxfp4_qat"});
  export_to(saved, "out", kPacked);
  const HfFolder good(path("out"));
  ASSERT_EQ(good.dtype(norm), FileDtype::bf16);
  const auto wide = [&](const std::string& name) {
    const std::vector<float> values = good.values(name);
    const std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    return good.put(name, FileDtype::f32, good.shape(name), bytes);
  };
  const auto widened = [&](const std::string& name) {
    std::filesystem::copy(path("out"), path("wide " + name));
    std::filesystem::remove(path("wide " + name + "/mantissa.json"));
    wide(name).write(path("wide " + name));
    return "wide " + name;
  };
  expect_verdict("out", 0, {"mlx-lm computes in bf16 as forward here does"});
  expect_verdict(
      widened(norm), 0,
      {"mlx-lm computes in fp32 and rounds nothing that forward here does not, which computes in bf16, because " + norm + " is F32"});
  expect_verdict(widened(last), 0, {"mlx-lm computes in bf16 up to " + last + " and in fp32 from there on"});
  // Norms that hold bf16 values are BF16 in a folder for mlx-lm, and nowhere else.
  export_to(path("wide " + norm), "narrow", kPacked);
  EXPECT_EQ(HfFolder(path("narrow")).dtype(norm), FileDtype::bf16);
  expect_verdict("narrow", 0, {"mlx-lm computes in bf16 as forward here does"});
  export_to(path("wide " + norm), "hf");
  EXPECT_EQ(HfFolder(path("hf")).dtype(norm), FileDtype::f32);
  wide(norm).flip(norm, 0, 1).write(path("wide " + norm));
  export_to(path("wide " + norm), "not narrow", kPacked);
  EXPECT_EQ(HfFolder(path("not narrow")).dtype(norm), FileDtype::f32);
  const test::ProcessResult told = test::run_mantissa({"verify", path("not narrow"), "--against", path("wide " + norm)}, folder_.path());
  EXPECT_THAT(told.output, HasSubstr("which computes in bf16, because " + norm + " is F32"));
}

TEST_F(MlxVerify, ATableOfCodesBeginsInBf16) {
  export_to(trained("run", {"precision.recipe=mxfp4_qat", kFourBitTable, "model.tie_word_embeddings=true"}), "out", kPacked);
  expect_verdict("out", 0, {"mlx-lm computes in bf16 as forward here does"});
}

TEST_F(MlxVerify, ATableOfCodesIsWidenedByNormsOfAnFp32Model) {
  export_to(trained("run", {"precision.dtype=fp32", "precision.recipe=mxfp4_qat", kFourBitTable, "model.tie_word_embeddings=true"}), "out",
            kPacked);
  expect_verdict("out", 0, {"mlx-lm computes in fp32 and rounds nothing that forward here does not, because model.layers.0."});
}

TEST_F(MlxVerify, SaysWhichInputsOnlyForwardQuantizes) {
  const auto printed = [&](std::vector<std::string> words) {
    const test::ProcessResult result = test::run_mantissa(words, folder_.path());
    EXPECT_EQ(result.exit_code, 0) << result.output << result.errors;
    return result.output;
  };
  const auto exported = [&](const std::string& run, const std::string& name, const std::string& format, const std::string& weights) {
    return printed({"export", run_folder(run), "--output", path(name), "--format", format, "--weights", weights});
  };
  trained("run", {"precision.recipe=mxfp8"});
  const std::string told = " quantize inputs of 8 modules, the first of layers.0.attn.qkv; forward here does, to e4m3 1x32 rceil";
  for (const std::string format : {"mlx", "hf"}) {
    const auto said =
        AllOf(HasSubstr((format == "mlx" ? "mlx-lm does not" : "servers do not") + told), Not(HasSubstr("as forward here does")));
    EXPECT_THAT(exported("run", format + " values", format, "dequantized"), said);
    EXPECT_THAT(printed({"verify", path(format + " values"), "--against", run_folder("run")}), said);
  }
  EXPECT_THAT(exported("run", "hf packed", "hf", "packed"), Not(HasSubstr("quantize inputs")));
  // With quantize_activations, a GPU is needed.
  const std::string need =
      "mlx-lm quantizes inputs of 8 modules to MXFP8 (quantize_activations), which MLX computes on GPUs (Metal) and not "
      "on CPUs";
  const auto of_gpu =
      AllOf(HasSubstr(need), HasSubstr("mlx-lm computes in bf16 with inputs of packed linears in MXFP8 as forward here does"),
            Not(HasSubstr("does not quantize")));
  EXPECT_THAT(exported("run", "packed", "mlx", "packed"), of_gpu);
  EXPECT_THAT(printed({"verify", path("packed"), "--against", run_folder("run")}), of_gpu);
  EXPECT_THAT(printed({"verify", path("packed")}), HasSubstr(need));
  trained("weights", {kWeights});
  EXPECT_THAT(exported("weights", "weights packed", "mlx", "packed"), Not(HasSubstr("inputs")));
}

TEST_F(MlxVerify, RepeatsWhatWasAllowed) {
  const std::string saved = trained("run", {"model.sliding_window=8"});
  export_to(saved, "out", allowed(kValues));
  const std::string told =
      "out: mlx-lm computes it otherwise than forward, or cannot load it: model.sliding_window: mlx-lm has no windows in this architecture";
  expect_verdict("out", 0, {told, "0 values differ", "mlx-lm computes in bf16, and rounds everywhere"});
  expect_verdict("out", 0, {told, "intact"}, false);
  EXPECT_THAT(json_in("out/mantissa.json")["differences"].dump(), HasSubstr("model.sliding_window: "));
  nlohmann::json other = json_in("out/mantissa.json");
  other["differences"][0] = "model.other: ";
  test::write_file(path("out/mantissa.json"), other.dump());
  expect_verdict("out", 4, {"its hash of itself differs"}, false);
  std::filesystem::remove(path("out/mantissa.json"));
  expect_verdict("out", 0, {told, "0 values differ"});
}

TEST_F(MlxVerify, CodesWithoutTheKeyAreToldByIt) {
  export_to(trained("run", {kWeights}), "out", kPacked);
  nlohmann::json config = json_in("out/config.json");
  config.erase("quantization");
  test::write_file(path("out/config.json"), config.dump());
  EXPECT_THAT(folder_error("out").what(), HasSubstr("with scales, but there is no quantization in config.json, which would say"));
}

}  // namespace mantissa::mlx_export_test
