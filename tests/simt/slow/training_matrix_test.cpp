// Training with the kernels of CUDA: every preset, dense and with experts.
#include "simt/training_on_cuda.h"

namespace mantissa::training_matrix_test {

using TrainingOnCudaMatrix = test::TrainingOnCuda;

TEST_P(TrainingOnCudaMatrix, IsThatOfTheCpu) { expect_ranks_like_one(expect_the_course_of_the_cpu()); }

std::vector<test::CudaModel> models() {
  std::vector<test::CudaModel> out;
  for (const test::CudaPreset& preset : test::cuda_presets()) {
    for (const test::Experts experts : {test::Experts::none, test::Experts::softmax, test::Experts::sigmoid})
      out.push_back(test::cuda_model(preset, experts));
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(, TrainingOnCudaMatrix, ::testing::ValuesIn(models()), [](const auto& c) { return c.param.name; });

}  // namespace mantissa::training_matrix_test
