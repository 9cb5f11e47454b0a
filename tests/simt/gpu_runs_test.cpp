// Runs with training.device cuda on the executor, which may stand for any GPU: the reports about it, and the needs of a run there.
#include <gmock/gmock.h>

#include "gpu/runtime.h"
#include "models/model_shape.h"
#include "plan/memory.h"
#include "training_on_ranks.h"

namespace mantissa::gpu_runs_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Sets = std::vector<std::string>;

class GpuRuns : public test::TrainingOnRanks {
 protected:
  ~GpuRuns() override { simt::described_gpu() = described_; }

  LoadedConfig cuda_config(const std::string& name, const Sets& more = {}) const {
    Sets sets = {"training.device=cuda",  "training.steps=2",   "training.seq_len=8", "training.micro_batch_size=1",
                 "training.grad_accum=1", "model.num_layers=1", "model.vocab_size=8", "schedule.warmup_steps=0"};
    sets.insert(sets.end(), more.begin(), more.end());
    return config(name, std::move(sets));
  }
  // Returns the estimate without the context.
  static int64_t needed(const LoadedConfig& loaded) {
    const MemoryEstimate memory = estimate_memory(loaded.config, resolve_plan(loaded.config));
    return memory.total() - memory.cuda_context - memory.nccl;  // which are there already
  }

 private:
  const Gpu described_ = simt::described_gpu();
};

TEST_F(GpuRuns, UtilizationIsThatOfTheDataSheet) {
  simt::described_gpu().name = "NVIDIA H100 80GB HBM3";
  const LoadedConfig loaded = cuda_config("known");
  const double flops = training_flops_per_token(model_shape(loaded.config.model), 8);
  const test::TrainedRun known = run(loaded);
  ASSERT_EQ(known.steps.size(), 2U);
  for (const StepEvent& event : known.steps) {
    ASSERT_TRUE(event.mfu);
    EXPECT_NEAR(*event.mfu, flops * event.tokens_per_second / 989e12, 1e-9 * *event.mfu);
    EXPECT_GT(event.gpu_memory_gib.value_or(0), 0);
  }
  simt::described_gpu().name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb";
  EXPECT_FALSE(run(cuda_config("unknown")).steps.at(0).mfu);
}

TEST_F(GpuRuns, TwoRanksOfOneGpuHaveItsPeakOnce) {
  simt::described_gpu().name = "NVIDIA H100 PCIe";
  const LoadedConfig loaded = cuda_config("two", {"parallel.data=2"});
  const double flops = training_flops_per_token(model_shape(loaded.config.model), 8);
  const auto errors = test::run_ranks(2, [&](const Communicator& world) {
    const test::TrainedRun own = run(loaded, {}, world);
    if (world.rank() > 0) return;
    require(own.steps.at(1).mfu.has_value(), "no utilization");
    EXPECT_NEAR(*own.steps[1].mfu, flops * own.steps[1].tokens_per_second / 756e12, 1e-9 * *own.steps[1].mfu);
  });
  EXPECT_THAT(errors, ::testing::Each(::testing::IsEmpty()));
}

TEST_F(GpuRuns, ARunThatTheGpuHasNoMemoryForIsRefusedBeforeAnythingIsThere) {
  const LoadedConfig loaded = cuda_config("large");
  simt::described_gpu() = {.name = "NVIDIA H200", .memory = int64_t{3} << 30, .free = needed(loaded) - 1, .place = 7};
  const Error error = test::error_of([&] { run(loaded); });
  EXPECT_EQ(error.code(), ExitCode::environment);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("not enough memory: training needs "), HasSubstr(" of GPU 0, NVIDIA H200 of 3.0 GiB, are free"),
                                  HasSubstr("what makes them smaller:\n")));
  EXPECT_FALSE(std::filesystem::exists(run_folder("large")));
  simt::described_gpu().free = needed(loaded);
  EXPECT_EQ(run(loaded).losses.size(), 2U);
}

TEST_F(GpuRuns, TheMemoryOfTheHostIsNotAskedFor) {
  const LoadedConfig loaded = cuda_config("wide", {"model.hidden_size=4096", "model.intermediate_size=4194304", "model.num_layers=200",
                                                   "model.num_attention_heads=32"});  // 150 TB
  simt::described_gpu().free = int64_t{1} << 60;
  EXPECT_NO_THROW(require_free_gpu_memory(loaded.config, resolve_plan(loaded.config), {}, free_gpu_memory({})));
  EXPECT_EQ(test::error_of([&] { require_free_memory(loaded.config, resolve_plan(loaded.config), {}); }).code(), ExitCode::environment);
}

TEST_F(GpuRuns, RanksThatShareAGpuNeedItTogether) {
  const LoadedConfig loaded = cuda_config("shared", {"parallel.data=2"});
  const auto errors_with = [&](int64_t free) {
    simt::described_gpu().free = free;
    return test::run_ranks(2, [&](const Communicator& world) { run(loaded, {}, world); });
  };
  EXPECT_THAT(errors_with(2 * needed(loaded) - 1),
              ::testing::Each(AllOf(::testing::StartsWith("3: "), HasSubstr("on each of 2 ranks here"))));
  EXPECT_THAT(errors_with(2 * needed(loaded)), ::testing::Each(::testing::IsEmpty()));
}

}  // namespace mantissa::gpu_runs_test
