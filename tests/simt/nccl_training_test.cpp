// Training whose ranks send each other by NCCL what a GPU holds: the bits of messages through the host.
#include "simt/thread_nccl.h"
#include "simt/training_on_cuda.h"

namespace mantissa::nccl_training_test {

class TrainingOverNccl : public test::TrainingOnCuda {};

TEST_P(TrainingOverNccl, HasTheBitsOfMessagesThroughTheHost) {
  const bool four = GetParam().name == "dp4";
  const int64_t steps = four ? 1 : 2;
  const Sets sets = {text("training.steps=", steps), text("training.global_batch_size=", four ? 4 : 2), text("eval.interval=", steps),
                     "eval.iters=1", text("checkpoint.interval=", steps)};
  const test::TrainedRun staged = run_on_device("cuda", "staged", sets);
  simt::ThreadNccl nccl;
  const test::TrainedRun direct = run_on_device("cuda", "direct", sets, nccl.links());
  expect_same_course(staged, direct);
  expect_same_checkpoints("staged", "direct", steps);
  const simt::NcclCounts counts = nccl.counts();
  EXPECT_GT(counts.groups, counts.made);  // the first connects
  EXPECT_EQ(counts.made, counts.destroyed);
  EXPECT_EQ(counts.aborted, 0);
}

std::vector<test::CudaModel> models() {
  const std::vector<test::CudaPreset> presets = test::cuda_presets();
  const auto model = [&](const char* name, const char* preset, test::Experts experts, const std::vector<std::string>& parallel) {
    test::CudaModel out = test::cuda_model(*std::ranges::find(presets, preset, &test::CudaPreset::name), experts);
    out.name = name;
    out.sets.insert(out.sets.end(), parallel.begin(), parallel.end());
    return out;
  };
  return {model("dp4", "gather", test::Experts::none, {"parallel.data=4"}),
          model("tp2", "high", test::Experts::none, {"parallel.tensor=2"}),
          model("ep2", "gather", test::Experts::sigmoid, {"parallel.data=2", "parallel.expert=2"})};
}

INSTANTIATE_TEST_SUITE_P(, TrainingOverNccl, ::testing::ValuesIn(models()), [](const auto& c) { return c.param.name; });

}  // namespace mantissa::nccl_training_test
