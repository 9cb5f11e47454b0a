// Training of every preset, dense and with experts, where the executor stands for each chip.
#include "simt/training_on_chips.h"

namespace mantissa::chips_matrix_test {

class TrainingOnChipsMatrix : public test::TrainingOnChips {};

TEST_P(TrainingOnChipsMatrix, TakesThePathsOfTheTable) {
  const std::string& name = GetParam().name;
  const auto starts = [&](const char* preset) {
    return name.starts_with(std::string(preset) + "_dense") || name.starts_with(std::string(preset) + "_softmax");
  };
  const bool mx = starts("mxfp8") || starts("mxfp8_te") || starts("gather") || starts("mxfp4_qat_mxfp8_act") ||
                  starts("mxfp4_qat_mxfp4_act") || starts("nvfp4_qat_nvfp4_act");
  const test::TrainedRun cpu = run_on_cpu();
  for (const int architecture : {80, 90, 100, 120}) {
    SCOPED_TRACE(architecture);
    expect_the_paths_of(architecture, (mx && architecture >= 100) || (starts("fp8_block") && architecture == 90), cpu);
  }
}

std::vector<test::CudaModel> models() {
  std::vector<test::CudaModel> out;
  for (const test::CudaPreset& preset : test::cuda_presets()) {
    for (const test::Experts experts : {test::Experts::none, test::Experts::softmax}) out.push_back(test::cuda_model(preset, experts));
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(, TrainingOnChipsMatrix, ::testing::ValuesIn(models()), [](const auto& c) { return c.param.name; });

}  // namespace mantissa::chips_matrix_test
