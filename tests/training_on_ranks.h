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

// Data ranks, and the ranks that share layers, the tokens between them, or experts.
struct TensorLayout {
  int data, tensor;
  bool sequence;
  int expert = 1;

  int ranks() const { return data * tensor; }
  std::string name() const { return text("dp", data, "tp", tensor, sequence ? "sp" : "", expert > 1 ? text("ep", expert) : ""); }
};

class TrainingOnRanks : public TrainingTest {
 protected:
  // Settings by which the sequences of a step are taken one by one, in the order of sums that any number of data ranks has.
  static Sets tree_of(int64_t sequences) {
    return {"training.micro_batch_size=1", "training.grad_accum=null", text("training.global_batch_size=", sequences),
            "training.accumulation=tree", "training.threads=1"};
  }

  // Returns what rank 0 was told. make_device(rank) makes the device of a rank, make_link links between those; without them it is the CPU.
  // ranks_per_host 0: all.
  TrainedRun run_on(const TensorLayout& layout, const std::string& name, const Sets& sets,
                    const std::function<std::unique_ptr<Backend>(int)>& make_device = {}, const MakeDeviceLink& make_link = {},
                    int ranks_per_host = 0) const {
    const Sets of_layout = {text("parallel.data=", layout.data), text("parallel.tensor=", layout.tensor),
                            text("parallel.expert=", layout.expert),
                            text("parallel.sequence_parallel=", layout.sequence ? "true" : "false")};
    const LoadedConfig loaded = config(name, with(of_layout, sets));
    TrainedRun out;
    const auto body = [&](const Communicator& world) {
      const MakeBackend own_device = make_device ? MakeBackend([&] { return make_device(world.rank()); }) : MakeBackend();
      TrainedRun own = run(loaded, {}, world, own_device);
      if (world.rank() == 0) {
        out = std::move(own);
      } else {
        EXPECT_THAT(own.losses, ::testing::IsEmpty()) << "only rank 0 is told";
      }
    };
    if (layout.ranks() == 1) {
      body({});
      return out;
    }
    RanksOnHosts where;
    for (int r = 0; ranks_per_host > 0 && r < layout.ranks(); ++r) where.hosts.push_back(r / ranks_per_host);
    EXPECT_THAT(run_ranks(layout.ranks(), body, {}, make_link, &where), ::testing::Each(::testing::IsEmpty())) << name;
    return out;
  }
  TrainedRun run_on(int ranks, const std::string& name, const Sets& sets) const {
    return run_on(TensorLayout{ranks, 1, false}, name, sets);
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
  }
  // Losses, norms, shares of padding, validation losses and samples, to the last digit.
  static void expect_same_course(const TrainedRun& a, const TrainedRun& b) {
    const auto padding = [](const TrainedRun& of) {
      std::vector<double> shares;
      for (const StepEvent& step : of.steps) shares.push_back(step.padding);
      return shares;
    };
    EXPECT_TRUE(same_elements(b.losses, a.losses));
    EXPECT_TRUE(same_elements(b.norms, a.norms));
    EXPECT_EQ(padding(b), padding(a));
    EXPECT_TRUE(same_elements(b.valid_losses, a.valid_losses));
    EXPECT_EQ(b.samples, a.samples);
  }
  size_t shards_of(const std::string& name, int64_t step) const {
    return CheckpointReader(checkpoint(name, step)).manifest().shards.size();
  }
};

}  // namespace mantissa::test
