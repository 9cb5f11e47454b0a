// Training where the executor stands for a chip; slow/chips_matrix_test.cpp has all presets on all of them.
#include "simt/training_on_chips.h"

namespace mantissa::chips_test {

class TrainingOnChips : public test::TrainingOnChips {
 protected:
  bool is(const char* name) const { return GetParam().name == name; }
};

TEST_P(TrainingOnChips, TakesThePathsOfTheTable) {
  const int architecture = is("high_dense") ? 80 : is("fp8_block_dense") ? 90 : 100;
  expect_the_paths_of(architecture, !is("high_dense"), run_on_cpu());
}

std::vector<test::CudaModel> models() {
  std::vector<test::CudaModel> out;
  for (const test::CudaPreset& preset : test::cuda_presets()) {
    if (preset.name == "high" || preset.name == "fp8_block") out.push_back(test::cuda_model(preset, test::Experts::none));
    if (preset.name == "gather") out.push_back(test::cuda_model(preset, test::Experts::softmax));
  }
  return out;
}

TEST(NativeGemms, AreAllowedByThePlan) {
  ::setenv("MANTISSA_SIMT_ARCHITECTURE", "90", 1);
  const auto device = make_backend("cuda");
  ::unsetenv("MANTISSA_SIMT_ARCHITECTURE");
  ModelConfig model;
  model.vocab_size = model.hidden_size = model.intermediate_size = 32;
  model.num_layers = model.num_attention_heads = 1;
  PrecisionConfig precision;
  for (const NativeProducts products : {NativeProducts::never, NativeProducts::automatic}) {
    precision.native_products = products;
    precision.grouped_gemms = products == NativeProducts::never ? GroupedGemms::automatic : GroupedGemms::never;
    ConfigReport report;
    const Gpt gpt(model, *device, PrecisionPlan::resolve(precision, model_shape(model), report), {});
    EXPECT_EQ(device->gemm_device().native, products == NativeProducts::automatic);
    EXPECT_EQ(device->gemm_device().grouped, precision.grouped_gemms == GroupedGemms::automatic);
  }
}

INSTANTIATE_TEST_SUITE_P(, TrainingOnChips, ::testing::ValuesIn(models()), [](const auto& c) { return c.param.name; });

}  // namespace mantissa::chips_test
