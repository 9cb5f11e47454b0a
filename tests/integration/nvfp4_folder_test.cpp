// NVFP4 as other programs write it: values by the formula where a scale of a tensor is any number, and messages about such scales.
#include "exports.h"
#include "mantissa/formats/element.h"

namespace mantissa::nvfp4_folder_test {

using test::error_of;
using test::HfFolder;
using test::logits_of;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kDown = "model.layers.1.mlp.down_proj", kGate = "model.layers.1.mlp.gate_proj", kScale = ".weight_global_scale";

class Nvfp4Folders : public test::ExportTest {
 protected:
  void SetUp() override {
    test::ExportTest::SetUp();
    saved_ = trained("run", {"precision.recipe=nvfp4_qat_nvfp4_act"});
    pack_to(saved_, "packed");
    pack_to(saved_, "modelopt", Convention::modelopt);
  }
  static HfFolder put(const HfFolder& folder, const std::string& name, float scale) {
    return folder.put(name, FileDtype::f32, {1}, std::string(reinterpret_cast<const char*>(&scale), sizeof scale));
  }
  // The packed folder with another scale, as a folder of that name.
  HfWeights with_scale(const std::string& name, const std::string& tensor, float scale) const {
    std::filesystem::copy(path("packed"), path(name), std::filesystem::copy_options::recursive);
    put(HfFolder(path("packed")), tensor, scale).write(path(name));
    return HfWeights(path(name));
  }
  std::string saved_;
};

TEST_F(Nvfp4Folders, AScaleOfAnyNumberMakesValuesOfTheFormula) {
  HfWeights weights = with_scale("number", kDown + kScale, 300.0F);
  const WeightForm form = weights.form("layers.1.mlp.down.weight"), other = weights.form("layers.1.attn.out.weight");
  EXPECT_FALSE(form.codes);
  EXPECT_TRUE(form.products);
  EXPECT_EQ(other.codes.tensor_exponent, -8);
  const HfFolder folder(path("number"));
  const std::string &codes = folder.bytes(kDown + ".weight_packed"), &scales = folder.bytes(kDown + ".weight_scale");
  std::vector<float> found(2 * codes.size()), expected;
  weights.read_fp32("layers.1.mlp.down.weight", {.start = {0, 0}, .size = {64, 96}}, found);
  constexpr std::array<float, 8> kElements = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  for (size_t i = 0; i < found.size(); ++i) {
    const unsigned code = static_cast<uint8_t>(codes[i / 2]) >> (i % 2 == 0 ? 0U : 4U) & 15U;
    const float scale = std::bit_cast<float>(E4M3::decode(static_cast<uint8_t>(scales[i / 16]), 127)) / 300.0F;
    expected.push_back(code < 8 ? kElements[code] * scale : -kElements[code - 8] * scale);
  }
  EXPECT_TRUE(test::same_elements(found, expected));
  EXPECT_THAT(
      weights.server_findings(),
      ElementsAre(
          AllOf(HasSubstr("1 weight of NVFP4 whose scale of the tensor is no power of two, or another in a part"),
                HasSubstr("(first: " + kDown + kScale + " is 300): read as values")),
          HasSubstr("1 weight whose inputs servers quantize in blocks of 16, but which are values here (first: layers.1.mlp.down)")));
  export_to(path("number"), "values");
  EXPECT_EQ(difference("values", path("number")), std::nullopt);
  EXPECT_FALSE(with_scale("part", kGate + kScale, 512.0F).form("layers.1.mlp.gate_up.weight").codes) << "one scale in all parts";
  EXPECT_FALSE(with_scale("far", kDown + kScale, std::ldexp(1.0F, 61)).form("layers.1.mlp.down.weight").codes);
  EXPECT_EQ(with_scale("power", kDown + kScale, std::ldexp(1.0F, 60)).form("layers.1.mlp.down.weight").codes.tensor_exponent, -60);
}

// Exponent 6 leaves blocks of these weights scales of one or two digits.
TEST_F(Nvfp4Folders, KeepTheValuesThatEitherRuleGave) {
  for (const char* how : {R"("rule": "mse")", R"("tensor_exponent": 6)", R"("rule": "mse", "tensor_exponent": 3)"}) {
    const std::string name = text("of ", how),
                      own = text(R"(precision.recipes={"own": {"base": "nvfp4_qat", "weight_fake_quant": {)", how, "}}}");
    const std::string saved = trained(name, {"precision.recipe=own", own});
    pack_to(saved, name + " packed");
    EXPECT_EQ(logits_of(path(name + " packed")), logits_of(saved)) << how;
    pack_to(path(name + " packed"), name + " again");
    EXPECT_TRUE(all_bytes(name + " packed") == all_bytes(name + " again")) << how;
  }
}

TEST_F(Nvfp4Folders, TheScaleOfInputsIsAPartOfTheScheme) {
  ModelExport same(saved_, {}, make_backend("cpu"));
  EXPECT_THAT(export_scheme_differences(HfWeights(path("modelopt")), same.weights()), IsEmpty());
  for (const auto& [scale, text_of] : {std::pair{8.0F, "2^-3"}, {3.0F, "no power of two"}}) {
    const HfWeights weights = with_scale(text("inputs ", scale), kDown + ".input_global_scale", scale);
    ModelExport against(saved_, {}, make_backend("cpu"));
    EXPECT_THAT(
        export_scheme_differences(weights, against.weights()),
        ElementsAre(text("layers.1.mlp.down: inputs are nvfp4 1x16 nearest 2^-2 in the checkpoint, and servers quantize them under a "
                         "scale of ",
                         text_of, " here")));
    EXPECT_EQ(weights.server_findings().size(), scale == 3.0F ? 1U : 0U) << "whose inputs are not quantized here";
  }
}

// A folder that one program wrote by the names of another.
TEST_F(Nvfp4Folders, ScalesThatAreInversesAreTold) {
  for (const std::string name : {"packed", "modelopt"}) {
    EXPECT_EQ(HfWeights(path(name)).inverted_scales(), std::nullopt);
    HfFolder folder(path(name));
    int64_t count = 0;
    for (const std::string& tensor : folder.names()) {
      if (!tensor.ends_with("weight_global_scale") && !tensor.ends_with("weight_scale_2")) continue;
      folder = put(folder, tensor, 1.0F / folder.values(tensor).front());
      ++count;
    }
    folder.write(path(name));
    EXPECT_THAT(
        HfWeights(path(name)).inverted_scales().value_or(""),
        AllOf(HasSubstr(text(count, " of ", count, " scales of tensors of NVFP4 seem to be the inverse")),
              HasSubstr(name == "packed" ? "is 0.00390625, by which scales are divided" : "is 256, by which scales are multiplied")));
    EXPECT_THAT(HfWeights(path(name)).weights_as_values(), Contains(HasSubstr("seem to be the inverse")));
  }
}

TEST_F(Nvfp4Folders, WhatIsNoScaleIsRefusedByItsName) {
  const HfFolder folder(path("packed"));
  const std::string down = kDown + kScale, input = kDown + ".input_global_scale", blocks = kDown + ".weight_scale";
  const std::string two(8, '\0'), nan(folder.bytes(blocks).size(), '\x7F'), negative(nan.size(), '\xB8');
  const struct {
    HfFolder folder;
    std::string what;
  } refusals[] = {
      {folder.without(down), "but there is neither " + kDown + ".weight_global_scale nor " + kDown + ".weight_scale_2"},
      {folder.without(input), "lacks " + kDown + ".input_global_scale, or .input_scale"},
      {folder.put(down, FileDtype::f32, {2}, two), down + " is F32 [2], and the scale of a tensor is one number in F32"},
      {put(folder, down, -1.0F), down + " is -1: a scale must be positive and finite"},
      {put(folder, input, 0.0F), input + " is 0: a scale must be positive and finite"},
      {put(folder, kDown + ".weight_scale_2", 1.0F), "holds tensors that its model has no place for:\n  " + kDown + ".weight_scale_2"},
      {folder.as(blocks, FileDtype::f8_e4m3, {96, 4}), blocks + " is [96, 4], but config.json makes it [64, 6]"},
      {folder.as(blocks, FileDtype::u8, {64, 6}), "is [64, 6], but config.json makes it [64, 3]"},
      {folder.put(blocks, FileDtype::f8_e4m3, {64, 6}, negative), blocks + " has a negative scale"},
      {folder.put(blocks, FileDtype::f8_e4m3, {64, 6}, nan), kDown + ".weight[0, 0] is NaN or Inf"},
  };
  for (const auto& [changed, what] : refusals) {
    changed.write(path("packed"));
    const Error error = folder_error("packed");
    EXPECT_EQ(error.code(), ExitCode::data) << what;
    EXPECT_THAT(error.what(), HasSubstr(what));
  }
  EXPECT_THAT(error_of([&] { pack_to(path("packed"), "nan"); }).what(), HasSubstr("holds NaN or Inf: not exported"));
}

}  // namespace mantissa::nvfp4_folder_test
