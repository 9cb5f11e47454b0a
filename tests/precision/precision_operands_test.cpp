// The copy of an operand that each GEMM takes, for every preset and for the subsets of GEMMs.
#include <gtest/gtest.h>

#include "mantissa/precision/config.h"
#include "mantissa/precision/operands.h"

namespace mantissa::precision_operands_test {

std::vector<std::string> texts(const Recipe& recipe) {
  return {gemm_text(recipe, GemmRole::fprop), gemm_text(recipe, GemmRole::dgrad), gemm_text(recipe, GemmRole::wgrad)};
}

using Texts = std::vector<std::string>;

TEST(Operands, PresetsReadTheDocumentedCopies) {
  EXPECT_EQ(texts(preset_recipe("high")), (Texts{"bf16 * bf16", "bf16 * bf16", "bf16 * bf16"}));
  EXPECT_EQ(texts(preset_recipe("fp32")), (Texts{"fp32 * fp32", "fp32 * fp32", "fp32 * fp32"}));
  EXPECT_EQ(texts(preset_recipe("mxfp8")), (Texts{"e4m3 1x32 * e4m3 32x32", "e4m3 1x32 * e4m3 32x32", "e4m3 32x1 * e4m3 32x1 from 1x32"}));
  EXPECT_EQ(texts(preset_recipe("mxfp8_weights")), (Texts{"bf16 * e4m3 32x32", "bf16 * e4m3 32x32", "bf16 * bf16"}));
  EXPECT_EQ(texts(preset_recipe("fp8_block")),
            (Texts{"e4m3 1x128 * e4m3 128x128", "e4m3 1x128 * e4m3 128x128", "e4m3 128x1 * e4m3 128x1 from 1x128"}));
  EXPECT_EQ(texts(preset_recipe("mxfp4_qat")), (Texts{"bf16 * bf16 of e2m1 1x32", "bf16 * bf16 of e2m1 1x32", "bf16 * bf16"}));
  EXPECT_EQ(texts(preset_recipe("mxfp4_qat_mxfp8_act")),
            (Texts{"e4m3 1x32 * e4m3 1x32 of e2m1 1x32", "e4m3 1x32 * bf16 of e2m1 1x32", "e4m3 32x1 * e4m3 32x1 from 1x32"}));
  EXPECT_EQ(texts(preset_recipe("mxfp4_qat_mxfp4_act")),
            (Texts{"e2m1 1x32 * e2m1 1x32", "bf16 * bf16 of e2m1 1x32", "bf16 * bf16 of e2m1 1x32"}));
  EXPECT_EQ(texts(preset_recipe("nvfp4_qat")), (Texts{"bf16 * bf16 of nvfp4 1x16 2^-8", "bf16 * bf16 of nvfp4 1x16 2^-8", "bf16 * bf16"}));
  EXPECT_EQ(texts(preset_recipe("nvfp4_qat_nvfp4_act")),
            (Texts{"nvfp4 1x16 2^-2 * nvfp4 1x16 2^-8", "bf16 * bf16 of nvfp4 1x16 2^-8", "bf16 * bf16 of nvfp4 1x16 2^-2"}));
}

TEST(Operands, SayARangeOfScales) {
  Recipe recipe = preset_recipe("mxfp8");
  recipe.input.range = {105, 254}, recipe.weight.rule = ScaleRule::floor, recipe.weight.range = {1, 252};
  EXPECT_EQ(texts(recipe)[0], "e4m3 1x32 2^-22..2^127 * e4m3 32x32 floor 2^-126..2^125");
  EXPECT_EQ(texts(recipe)[2], "e4m3 32x1 * e4m3 32x1 2^-22..2^127 from 1x32");
}

TEST(Operands, ColumnsComeFromRowsOrFromValues) {
  const Recipe te = preset_recipe("mxfp8_te");
  EXPECT_EQ(texts(te), (Texts{"e4m3 1x32 * e4m3 1x32", "e5m2 1x32 * e4m3 32x1", "e5m2 32x1 * e4m3 32x1"}));
  EXPECT_EQ(LinearOperands(te).saved_input, SavedAs::columns);
  Recipe rows = te;
  rows.columns = ColumnSource::rows;
  EXPECT_EQ(texts(rows), (Texts{"e4m3 1x32 * e4m3 1x32", "e5m2 1x32 * e4m3 32x1 from 1x32", "e5m2 32x1 * e4m3 32x1 from 1x32"}));
  EXPECT_EQ(LinearOperands(rows).saved_input, SavedAs::rows);
  EXPECT_TRUE(rows.reads_only_weight_codes());
  EXPECT_FALSE(te.reads_only_weight_codes());
  rows.gemms.fprop = false;
  EXPECT_TRUE(rows.reads_weight_codes());
  rows.columns = ColumnSource::values;
  EXPECT_FALSE(rows.reads_weight_codes());
  EXPECT_EQ(LinearOperands(rows).saved_input, SavedAs::values);
}

TEST(Operands, BackwardMayMultiplyValues) {
  Recipe recipe = preset_recipe("mxfp4_qat_mxfp8_act");
  recipe.output_grad = {}, recipe.gemms = {.fprop = true}, recipe.backward = BackwardOperands::dequantized;
  EXPECT_EQ(texts(recipe), (Texts{"e4m3 1x32 * e4m3 1x32 of e2m1 1x32", "bf16 * bf16 of e2m1 1x32", "bf16 * bf16 of e4m3 1x32"}));
  EXPECT_EQ(LinearOperands(recipe).saved_input, SavedAs::rows);
  EXPECT_EQ(codes_read(recipe, choose_operands(recipe, GemmRole::dgrad).second, GemmRole::dgrad), recipe.weight_fake_quant);
  EXPECT_FALSE(codes_read(recipe, choose_operands(recipe, GemmRole::wgrad).second, GemmRole::wgrad));
  recipe.backward = BackwardOperands::high_precision;
  EXPECT_EQ(texts(recipe), (Texts{"e4m3 1x32 * e4m3 1x32 of e2m1 1x32", "bf16 * bf16", "bf16 * bf16"}));
  EXPECT_EQ(LinearOperands(recipe).saved_input, SavedAs::values);
  recipe = preset_recipe("mxfp8_weights");
  recipe.gemms = {.fprop = true}, recipe.backward = BackwardOperands::dequantized;
  EXPECT_EQ(texts(recipe), (Texts{"bf16 * e4m3 32x32", "bf16 * bf16 of e4m3 32x32", "bf16 * bf16"}));
  EXPECT_TRUE(recipe.reads_only_weight_codes());
}

TEST(Operands, ARowwiseWeightIsShiftedForDgradAlsoWhereFpropDoesNotReadIt) {
  Recipe recipe = preset_recipe("mxfp8");
  recipe.weight = {Format::e4m3, 1, 32, ScaleRule::floor};
  EXPECT_EQ(texts(recipe)[0], "e4m3 1x32 * e4m3 1x32 floor");
  EXPECT_EQ(texts(recipe)[1], "e4m3 1x32 * e4m3 32x1 floor from 1x32");
  recipe.gemms.fprop = false;
  EXPECT_EQ(texts(recipe)[0], "bf16 * bf16");
  EXPECT_EQ(choose_operands(recipe, GemmRole::dgrad).second.source, OperandSource::requantized);
}

TEST(Operands, WithoutFpropTheInputIsQuantizedColumnwiseFromItsValues) {
  Recipe recipe = preset_recipe("mxfp8");
  recipe.gemms.fprop = false;
  const OperandChoice input = choose_operands(recipe, GemmRole::wgrad).second;
  EXPECT_EQ(input.source, OperandSource::codes);
  EXPECT_EQ(input.how, (Quantization{Format::e4m3, 32, 1, ScaleRule::rceil}));
}

TEST(Operands, InputCodesAreSavedOnlyIfFpropMakesThemAndWgradReadsThem) {
  for (int set = 0; set < 8; ++set) {
    Recipe recipe = preset_recipe("mxfp8");
    recipe.gemms = {.fprop = (set & 1) != 0, .dgrad = (set & 2) != 0, .wgrad = (set & 4) != 0};
    EXPECT_EQ(LinearOperands(recipe).saved_input, recipe.gemms.fprop && recipe.gemms.wgrad ? SavedAs::rows : SavedAs::values) << set;
    for (const GemmRole role : {GemmRole::fprop, GemmRole::dgrad, GemmRole::wgrad}) {
      const GemmOperands operands = choose_operands(recipe, role);
      EXPECT_EQ(operands.first.is_codes(), recipe.gemms.holds(role)) << set << gemm_name(role);
      EXPECT_EQ(operands.second.is_codes(), recipe.gemms.holds(role)) << set << gemm_name(role);
    }
  }
  EXPECT_EQ(LinearOperands(preset_recipe("mxfp8_weights")).saved_input, SavedAs::values);
}

TEST(Operands, FakeCodesAreTakenOnlyWhereTheyAreLossless) {
  Recipe recipe = preset_recipe("mxfp4_qat_mxfp8_act");
  const auto source = [&] { return choose_operands(recipe, GemmRole::fprop).second.source; };
  EXPECT_EQ(source(), OperandSource::fake_codes);
  recipe.weight_fake_quant.block_cols = 64;
  EXPECT_EQ(source(), OperandSource::fake_codes);
  for (const int64_t block : {16, 48}) {
    recipe.weight_fake_quant.block_cols = block;
    EXPECT_EQ(source(), OperandSource::dequantized) << block;
  }
  recipe.weight_fake_quant.block_cols = 32;
  recipe.input.block_cols = recipe.output_grad.block_cols = 128;
  EXPECT_EQ(source(), OperandSource::dequantized);
  recipe.input = {};
  EXPECT_EQ(source(), OperandSource::dequantized);
  recipe = preset_recipe("mxfp4_qat_mxfp8_act");
  recipe.gemms.fprop = false;
  EXPECT_EQ(source(), OperandSource::dequantized);
  recipe = preset_recipe("mxfp4_qat_mxfp8_act");
  recipe.weight_fake_quant = {Format::e5m2, 1, 32, ScaleRule::rceil};
  EXPECT_EQ(source(), OperandSource::dequantized);
}

TEST(Operands, CodesOfAWeightAreReadAsTheyAreStoredBesideAnInputInE2M1) {
  Recipe recipe = preset_recipe("mxfp4_qat_mxfp4_act");
  EXPECT_EQ(LinearOperands(recipe).saved_input, SavedAs::rows);
  const auto weight = [&] { return choose_operands(recipe, GemmRole::fprop).second; };
  recipe.weight_fake_quant.rule = ScaleRule::mse;
  EXPECT_EQ(weight().source, OperandSource::codes);
  EXPECT_EQ(weight().how, recipe.weight_fake_quant);
  recipe.weight_fake_quant.block_cols = 64;
  EXPECT_EQ(weight().source, OperandSource::fake_codes);
  recipe.weight_fake_quant.block_cols = 16;
  EXPECT_EQ(weight().source, OperandSource::dequantized);
  const Quantization nvfp4 = preset_recipe("nvfp4_qat").weight_fake_quant;
  recipe.input = nvfp4;
  EXPECT_EQ(weight().source, OperandSource::dequantized) << "MXFP4 beside inputs in NVFP4";
  recipe.weight_fake_quant = nvfp4, recipe.input.tensor_exponent = 3;
  EXPECT_EQ(weight().source, OperandSource::codes);
  EXPECT_EQ(weight().how, nvfp4);
}

}  // namespace mantissa::precision_operands_test
