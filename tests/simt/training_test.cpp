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

// The kernels of a teacher, alone and with columns of the logits on two ranks: near the CPU, as TrainingOnCuda is.
class TaughtOnCuda : public test::TrainingOnRanks {
 protected:
  test::TrainedRun taught(const std::string& device, const test::TensorLayout& layout, const test::Sets& data = {}) const {
    const test::Sets sets = {"training.teacher=" + run_folder("teacher"),
                             "training.teacher_weight=0.75",
                             "training.teacher_temperature=2",
                             "precision.dtype=bf16",
                             "model.pad_vocab_to=12",
                             "training.steps=2",
                             "training.micro_batch_size=1",
                             "training.grad_accum=2",
                             "training.threads=1"};
    return run_on(layout, text(device, layout.name()), test::with(sets, data), [&](int) { return make_backend(device); });
  }
};

TEST_F(TaughtOnCuda, IsThatOfTheCpu) {
  run("teacher", {"training.steps=2", "training.seed=9"});
  const test::TrainedRun expected = taught("cpu", {1, 1, false});
  for (const test::TensorLayout& layout : {test::TensorLayout{1, 1, false}, {1, 2, false}}) {
    const test::TrainedRun found = taught("cuda", layout);
    ASSERT_EQ(found.losses.size(), 2U);
    EXPECT_NEAR(found.losses[0], expected.losses[0], 2e-3 * expected.losses[0]) << layout.name();
    EXPECT_NEAR(found.losses[1], expected.losses[1], 2e-2 * expected.losses[1]) << layout.name();
    EXPECT_NEAR(found.norms[0], expected.norms[0], 2e-2 * expected.norms[0]) << layout.name();
  }
}

TEST_F(TaughtOnCuda, LeavesOutTargetsThatDoNotCount) {
  const test::Sets data = test::with(examples(), {"training.micro_batch_size=4"});
  run("teacher", test::with(data, {"training.steps=2", "training.seed=9"}));
  const test::TrainedRun expected = taught("cpu", {1, 1, false}, data), found = taught("cuda", {1, 1, false}, data);
  EXPECT_NEAR(found.losses[0], expected.losses[0], 2e-3 * expected.losses[0]);
  EXPECT_NEAR(found.norms[0], expected.norms[0], 2e-2 * expected.norms[0]);
}

}  // namespace mantissa::training_test
