// Runs of train() on ranks that are threads of the test, and what must be equal between two runs.
#pragma once

#include <gmock/gmock.h>

#include <map>
#include <string>
#include <vector>

#include "process.h"
#include "thread_ranks.h"
#include "training.h"

namespace mantissa::test {

class TrainingOnRanks : public TrainingTest {
 protected:
  // What rank 0 was told.
  TrainedRun run_on(int ranks, const std::string& name, std::vector<std::string> sets) const {
    sets.push_back(text("parallel.data=", ranks));
    const LoadedConfig loaded = config(name, std::move(sets));
    if (ranks == 1) return run(loaded);
    TrainedRun out;
    const auto errors = run_ranks(ranks, [&](const Communicator& world) {
      TrainedRun own = run(loaded, {}, world);
      if (world.rank() == 0) {
        out = std::move(own);
      } else {
        EXPECT_THAT(own.losses, ::testing::IsEmpty()) << "only rank 0 is told";
      }
    });
    EXPECT_THAT(errors, ::testing::Each(::testing::IsEmpty()));
    return out;
  }

  // Every tensor of a checkpoint, whole, by name; the training state; the plan, and the hashes of codes.
  std::map<std::string, std::string> contents(const std::string& name, int64_t step) const {
    CheckpointReader reader(checkpoint(name, step));
    nlohmann::json plan = nlohmann::json::parse(reader.manifest().plan);
    std::map<std::string, std::string> out = {{"state", reader.manifest().state}, {"hashes of codes", plan["quantized"].dump()}};
    plan.erase("quantized");
    out["plan"] = plan.dump();
    for (const ManifestTensor& tensor : reader.manifest().tensors) {
      std::string bytes(static_cast<size_t>(whole_box(tensor.shape).elements() * dtype_bytes(tensor.dtype)), '\0');
      reader.read(tensor.name, std::as_writable_bytes(std::span(bytes)));
      out[tensor.name] = std::move(bytes);
    }
    return out;
  }
  void expect_same_checkpoints(const std::string& a, const std::string& b, int64_t step, const std::string& but = "") const {
    const auto expected = contents(a, step), found = contents(b, step);
    EXPECT_EQ(found.size(), expected.size());
    for (const auto& [name, bytes] : expected) {
      const auto other = found.find(name);
      EXPECT_TRUE(name == but || (other != found.end() && other->second == bytes)) << b << " and " << a << " differ in " << name;
    }
    const ProcessResult diff = run_mantissa({"inspect", checkpoint(a, step), "--diff", checkpoint(b, step)}, folder_.path());
    EXPECT_EQ(diff.exit_code, 0) << diff.output << diff.errors;
  }
  // Losses, norms, validation losses and samples, to the last digit.
  static void expect_same_course(const TrainedRun& a, const TrainedRun& b) {
    EXPECT_TRUE(same_elements(b.losses, a.losses));
    EXPECT_TRUE(same_elements(b.norms, a.norms));
    EXPECT_TRUE(same_elements(b.valid_losses, a.valid_losses));
    EXPECT_EQ(b.samples, a.samples);
  }
  size_t shards_of(const std::string& name, int64_t step) const {
    return CheckpointReader(checkpoint(name, step)).manifest().shards.size();
  }
};

}  // namespace mantissa::test
