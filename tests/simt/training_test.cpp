// Training with the kernels of CUDA, for a preset of values and one of codes; slow/training_matrix_test.cpp has all.
#include "simt/training_on_cuda.h"

namespace mantissa::training_test {

using TrainingOnCuda = test::TrainingOnCuda;

TEST_P(TrainingOnCuda, IsThatOfTheCpu) { expect_ranks_like_one(expect_the_course_of_the_cpu()); }

std::vector<test::CudaModel> models() {
  const std::vector<test::CudaPreset> presets = test::cuda_presets();
  const auto preset = [&](const char* name) { return *std::ranges::find(presets, name, &test::CudaPreset::name); };
  test::CudaModel dense = test::cuda_model(preset("high"), test::Experts::none);
  dense.layouts = {};
  dense.sets.insert(dense.sets.end(), {"model.mlp_bias=true", "training.accumulation=running"});
  return {dense, test::cuda_model(preset("gather"), test::Experts::sigmoid)};
}

INSTANTIATE_TEST_SUITE_P(, TrainingOnCuda, ::testing::ValuesIn(models()), [](const auto& c) { return c.param.name; });

}  // namespace mantissa::training_test
