// Runs of train() on the executor where it stands for a chip, so that GEMMs take the paths of that chip.
#pragma once

#include <cstdlib>

#include "gpu/runtime.h"
#include "simt/training_on_cuda.h"

namespace mantissa::test {

class TrainingOnChips : public TrainingOnCuda {
 protected:
  // Expects a run as near to the CPU's as a GPU's has to be, with products of codes where `native`.
  void expect_the_paths_of(int architecture, bool native, const TrainedRun& cpu) const {
    const std::string name = text("sm_", architecture);
    ::setenv("MANTISSA_SIMT_ARCHITECTURE", std::to_string(architecture).c_str(), 1);
    const simt::LibraryGemms before = simt::library_gemms();
    const TrainedRun chip = run_on_device("cuda", name, kWhole);
    const simt::LibraryGemms after = simt::library_gemms();
    ::unsetenv("MANTISSA_SIMT_ARCHITECTURE");
    expect_near("cpu", cpu, name, chip);
    expect_codes_of_masters(name);
    EXPECT_GT(after.of_values, before.of_values);  // the output projection, at least
    const bool nvfp4 = GetParam().name.starts_with("nvfp4");
    EXPECT_EQ(after.per_16 > before.per_16, native && nvfp4);
    EXPECT_EQ(after.per_32 > before.per_32, native && architecture >= 100 && !nvfp4);
    EXPECT_EQ(after.per_128 > before.per_128, native && architecture == 90);
  }

  TrainedRun run_on_cpu() const { return run_on_device("cpu", "cpu", kWhole); }

 private:
  // Rows in whole units of 16, a width of 128, and heads that tensor cores take.
  const Sets kWhole = {"training.seq_len=32",   "training.global_batch_size=2",
                       "eval.iters=1",          "model.max_position_embeddings=32",
                       "model.hidden_size=128", "model.head_dim=64"};
};

}  // namespace mantissa::test
