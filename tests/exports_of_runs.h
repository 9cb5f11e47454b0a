// Runs on ranks of any layout whose exports a test looks at.
#pragma once

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/checkpoint_directory.h"
#include "checkpoint_shards.h"
#include "hf/export.h"
#include "tensor_runs.h"

namespace mantissa::test {

inline const TensorLayout kAlone{1, 1, false};

class ExportsOfRuns : public TrainingTest {
 protected:
  // Settings with 8 letters, padded to 12 rows: the second of two tensor ranks has two of the letters and the padding.
  static std::vector<std::string> sets(const TensorLayout& layout, const std::vector<std::string>& more) {
    std::vector<std::string> out = {"model.hidden_size=128",
                                    "model.intermediate_size=128",
                                    "model.num_attention_heads=4",
                                    "model.num_key_value_heads=2",
                                    "model.pad_vocab_to=12",
                                    "training.micro_batch_size=1",
                                    "training.grad_accum=null",
                                    "training.global_batch_size=4",
                                    "training.threads=1",
                                    "training.steps=2",
                                    "precision.dtype=bf16",
                                    "eval.iters=1",
                                    text("parallel.data=", layout.data),
                                    text("parallel.tensor=", layout.tensor),
                                    text("parallel.expert=", layout.expert)};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  TrainedRun run_on(const TensorLayout& layout, const std::string& name, const std::vector<std::string>& more,
                    const std::function<Request()>& request = {}) const {
    const LoadedConfig loaded = config(name, sets(layout, more));
    if (layout.ranks() == 1) return run(loaded, request);
    TrainedRun out;
    const auto errors = run_ranks(layout.ranks(), [&](const Communicator& world) {
      TrainedRun own = run(loaded, world.rank() == 0 ? request : nullptr, world);
      if (world.rank() == 0) out = std::move(own);
    });
    EXPECT_THAT(errors, ::testing::Each(::testing::IsEmpty())) << name;
    return out;
  }

  std::string exported(const std::string& name, int64_t step) const { return run_folder(name) + "/exports/" + checkpoint_name(step); }
  static std::set<std::string> exports_of(const std::string& run) {
    std::set<std::string> names;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(run + "/exports", none)) names.insert(entry.path().filename());
    return names;
  }
  static std::map<std::string, std::string> files_of(const std::string& folder) {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) files[entry.path().filename()] = read_file(entry.path());
    return files;
  }
  std::map<std::string, std::string> files_from(const std::string& checkpoint, const std::string& name,
                                                const ExportOptions& options) const {
    export_model(checkpoint, folder_ / name, options, make_backend("cpu"));
    return files_of(folder_ / name);
  }
  static void expect_same_files(const std::map<std::string, std::string>& found, const std::map<std::string, std::string>& expected) {
    EXPECT_EQ(found.size(), expected.size());
    for (const auto& [name, bytes] : expected) {
      const auto other = found.find(name);
      EXPECT_TRUE(other != found.end() && other->second == bytes) << name;
    }
  }
};

}  // namespace mantissa::test
