// A run on several ranks, here threads of one process, has the losses, weights and files of a run alone.
#include <gmock/gmock.h>

#include "mantissa/base/hash.h"
#include "mantissa/train/run_metrics.h"
#include "thread_ranks.h"
#include "training.h"

namespace mantissa {
namespace {

using test::TrainedRun;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Case {
  const char* name;
  std::vector<std::string> sets;
};

class TrainRanks : public test::TrainingTest, public ::testing::WithParamInterface<Case> {
 protected:
  std::vector<std::string> sets(int ranks, std::vector<std::string> more = {}) const {
    std::vector<std::string> out = {"training.micro_batch_size=1",
                                    "training.grad_accum=null",
                                    "training.global_batch_size=8",
                                    "training.accumulation=tree",
                                    "training.threads=1",
                                    "checkpoint.interval=6",
                                    "eval.interval=10",
                                    "training.steps=12",
                                    text("parallel.data=", ranks)};
    out.insert(out.end(), GetParam().sets.begin(), GetParam().sets.end());
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  // What rank 0 was told.
  TrainedRun run_on(int ranks, const std::string& name, const std::vector<std::string>& more = {}) const {
    const LoadedConfig loaded = config(name, sets(ranks, more));
    if (ranks == 1) return run(loaded);
    TrainedRun out;
    const auto errors = test::run_ranks(ranks, [&](const Communicator& world) {
      TrainedRun own = run(loaded, {}, make_mesh(world, 1));
      if (world.rank() == 0) {
        out = std::move(own);
      } else {
        EXPECT_THAT(own.losses, IsEmpty()) << "only rank 0 is told";
      }
    });
    EXPECT_THAT(errors, Each(IsEmpty()));
    return out;
  }

  // Every tensor of a checkpoint, whole, by name; and the training state.
  std::map<std::string, std::string> contents(const std::string& name, int64_t step) const {
    CheckpointReader reader(checkpoint(name, step));
    std::map<std::string, std::string> out = {{"state", reader.manifest().state}, {"plan", reader.manifest().plan}};
    for (const ManifestTensor& tensor : reader.manifest().tensors) {
      std::string bytes(static_cast<size_t>(whole_box(tensor.shape).elements() * dtype_bytes(tensor.dtype)), '\0');
      reader.read(tensor.name, std::as_writable_bytes(std::span(bytes)));
      out[tensor.name] = std::move(bytes);
    }
    return out;
  }
};

TEST_P(TrainRanks, HaveTheBitsOfOne) {
  const TrainedRun alone = run_on(1, "alone");
  ASSERT_EQ(alone.losses.size(), 12U);
  for (const int ranks : {2, 4, 8}) {
    const std::string name = text("ranks", ranks);
    const TrainedRun together = run_on(ranks, name);
    EXPECT_EQ(together.losses, alone.losses) << ranks;
    EXPECT_EQ(together.norms, alone.norms) << ranks;
    EXPECT_EQ(together.valid_losses, alone.valid_losses) << ranks;
    EXPECT_EQ(contents(name, 12), contents("alone", 12)) << ranks;
    EXPECT_EQ(CheckpointReader(checkpoint(name, 12)).manifest().shards.size(), static_cast<size_t>(ranks));
  }
}

TEST_P(TrainRanks, ResumeOnAnyOtherNumber) {
  run_on(1, "alone");
  const auto expected = contents("alone", 12);
  for (const auto& [first, second] : {std::pair{4, 2}, {2, 8}, {8, 1}, {1, 4}}) {
    const std::string name = text("from", first, "to", second);
    run_on(first, name, {"training.steps=12"});
    std::filesystem::remove_all(checkpoint(name, 12));
    run_on(second, name, {"checkpoint.resume=auto"});
    EXPECT_EQ(contents(name, 12), expected) << first << " to " << second;
  }
}

INSTANTIATE_TEST_SUITE_P(, TrainRanks,
                         ::testing::Values(Case{"fp32", {}},
                                           Case{"mxfp8_gather_tied",
                                                {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true",
                                                 "model.tie_word_embeddings=true", "model.intermediate_size=64"}},
                                           Case{"qat_recompute",
                                                {"precision.dtype=bf16", "precision.recipe=mxfp4_qat_mxfp8_act", "training.recompute=full",
                                                 "model.intermediate_size=64"}}),
                         [](const auto& c) { return std::string(c.param.name); });

using RanksTogether = test::TrainingTest;

TEST_F(RanksTogether, MeasureThePrecisionOfTheWholeBatchAndOfEveryPart) {
  const auto precision = [&](int ranks) {
    const std::string name = text("ranks", ranks);
    const LoadedConfig loaded =
        config(name, {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.report_interval=2", "training.steps=2",
                      "training.micro_batch_size=1", "training.grad_accum=null", "training.global_batch_size=8",
                      "training.accumulation=tree", "training.threads=1", "model.intermediate_size=64", text("parallel.data=", ranks)});
    if (ranks == 1) {
      run(loaded);
    } else {
      EXPECT_THAT(test::run_ranks(ranks, [&](const Communicator& world) { run(loaded, {}, make_mesh(world, 1)); }), Each(IsEmpty()));
    }
    return read_run_metrics(run_folder(name)).precision;
  };
  const std::vector<PrecisionEvent> alone = precision(1), together = precision(4);
  ASSERT_EQ(alone.size(), 24U) << "three roles of eight linears";
  ASSERT_EQ(together.size(), alone.size());
  for (size_t i = 0; i < alone.size(); ++i) {
    EXPECT_EQ(together[i].module, alone[i].module);
    EXPECT_EQ(together[i].role, alone[i].role);
    EXPECT_NEAR(*together[i].sqnr_db, *alone[i].sqnr_db, 1e-9) << alone[i].module;
    EXPECT_EQ(together[i].amax, alone[i].amax);
    EXPECT_EQ(together[i].scales, alone[i].scales);
    EXPECT_NEAR(together[i].flushed, alone[i].flushed, 1e-12);
  }
}

TEST_F(RanksTogether, WriteTextsAndStopAtTheSameStep) {
  std::vector<std::string> texts;
  const LoadedConfig loaded =
      config("texts", {"parallel.data=2", "training.micro_batch_size=2", "training.grad_accum=2", "training.global_batch_size=null",
                       "training.threads=1", "eval.samples={\"interval\":3,\"max_new_tokens\":5,\"prompts\":[\"ab\"]}"});
  std::atomic<int> finished{0};
  const auto errors = test::run_ranks(2, [&](const Communicator& world) {
    int asked = 0;
    // Only the second rank is asked to stop.
    const TrainedRun own = run(
        loaded, [&] { return world.rank() == 1 && ++asked > 12 ? Request::save_and_stop : Request::none; }, make_mesh(world, 1));
    EXPECT_EQ(own.summary.exit, ExitCode::stopped);
    EXPECT_LT(own.summary.steps, 20);
    finished += static_cast<int>(own.summary.steps);
    if (world.rank() == 0) texts = own.samples;
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_EQ(finished % 2, 0) << "both at one step";
  EXPECT_FALSE(texts.empty());
}

TEST_F(RanksTogether, RefuseAJobOfAnotherSizeThanTheConfigAsksFor) {
  const nlohmann::json json = {{"parallel", {{"data", 4}}}};
  const Error error = test::error_of(
      [&] { load_run_config({.file = "run.json", .text = json.dump(), .set_files = {}, .sets = {}}, Inputs::unchecked, 1); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("parallel.data: data 4 * tensor 1 needs 4 ranks, but this is one process alone: start it with "
                                      "mantissa launch --nproc-per-node 4"));
}

}  // namespace
}  // namespace mantissa
