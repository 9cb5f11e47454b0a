// optimizer.type muon and optimizer.moments bf16 in whole runs: what is trained by which, resumes, ranks, memory, and refusals.
#include <gmock/gmock.h>

#include "mantissa/plan/estimate.h"
#include "training_on_ranks.h"

namespace mantissa::muon_runs_test {

using test::error_of;
using test::Sets;
using test::TensorLayout;
using test::TrainedRun;
using test::with;
using ::testing::HasSubstr;

const TensorLayout kAlone{1, 1, false};

class MuonRuns : public test::TrainingOnRanks {
 protected:
  Dtype saved_as(const std::string& name, int64_t step, const std::string& of) const {
    return CheckpointReader(checkpoint(name, step)).tensor(of).dtype;
  }
  bool has(const std::string& name, int64_t step, const std::string& of) const { return CheckpointReader(checkpoint(name, step)).has(of); }
  std::string refusal(const Sets& sets) const {
    const Error error = error_of([&] { config("refused", sets); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    return error.what();
  }
};

bool is_linear(const std::string& p) { return p.ends_with(".weight") && (p.find(".attn.") != p.npos || p.find(".mlp.") != p.npos); }

const Sets kMuon = {"optimizer.type=muon", "optimizer.lr=3e-3", "model.qk_norm=false"};

TEST_F(MuonRuns, TrainLinearsByMuonAndTheRestByAdamWAndLearn) {
  const TrainedRun muon = run("muon", with(kMuon, {"training.steps=60", "optimizer.lr=1e-2"}));
  EXPECT_LT(muon.losses.back(), muon.losses.front() - 0.3);
  for (const std::string& parameter : parameters("muon", 60)) {
    EXPECT_TRUE(has("muon", 60, "m." + parameter)) << parameter;
    EXPECT_EQ(has("muon", 60, "v." + parameter), !is_linear(parameter)) << parameter;
  }
  run("some", {"training.steps=1", R"(optimizer.rules=[{"match": "layers.1.*", "type": "muon"}])"});
  EXPECT_FALSE(has("some", 1, "v.layers.1.attn.qkv.weight"));
  EXPECT_TRUE(has("some", 1, "v.layers.0.attn.qkv.weight"));
}

TEST_F(MuonRuns, AreResumedBitwise) {
  for (const Sets& of : {Sets{"optimizer.moments=fp32"}, Sets{"optimizer.moments=bf16"}}) {
    const std::string name = of[0].substr(18);
    const Sets sets = with(with(kMuon, of), {"schedule.decay_steps=1", "precision.dtype=bf16"});
    run(name, with(sets, {"training.steps=6"}));
    run(name + "cut", with(sets, {"training.steps=3"}));
    run(name + "cut", with(sets, {"training.steps=6", "checkpoint.resume=auto"}));
    expect_same_checkpoints(name, name + "cut", 6, "state");
  }
}

TEST_F(MuonRuns, AreTheSameOnDataRanksBitForBit) {
  const Sets sets = with(with(tree_of(4), kMuon), {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true",
                                                   "model.hidden_size=128", "model.intermediate_size=128", "model.num_attention_heads=4",
                                                   "training.steps=3", "optimizer.moments=bf16", "training.replica_check_interval=1"});
  const TrainedRun alone = run_on(kAlone, "alone", sets);
  for (const int ranks : {2, 4}) {
    const TrainedRun found = run_on(ranks, text(ranks), sets);
    expect_same_course(alone, found);
    expect_same_checkpoints("alone", text(ranks), 3);
  }
}

TEST_F(MuonRuns, AgreeOnTensorAndExpertRanksUpToTheOrderOfSums) {
  const Sets sets = with(with(tree_of(4), kMuon), {"model.hidden_size=64", "model.intermediate_size=64", "model.num_attention_heads=4",
                                                   "training.steps=2", "training.replica_check_interval=1"});
  const Sets experts = {"model.moe.num_experts=4", "model.moe.num_experts_per_tok=2", "model.moe.intermediate_size=64"};
  const TrainedRun alone = run_on(kAlone, "alone", sets), mixture = run_on(kAlone, "mixture", with(sets, experts));
  for (const TensorLayout& layout :
       {TensorLayout{2, 1, false}, TensorLayout{1, 2, true}, TensorLayout{2, 2, false}, TensorLayout{2, 1, false, 2}}) {
    SCOPED_TRACE(layout.name());
    const Sets own = layout.expert > 1 ? with(sets, experts) : sets;
    const TrainedRun found = run_on(layout, layout.name(), own);
    for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(found.losses[i], (layout.expert > 1 ? mixture : alone).losses[i], 1e-4);
  }
}

TEST_F(MuonRuns, TakeTheMemoryOfTheirMoments) {
  const auto moments = [&](const Sets& sets) {
    RunConfig of = config("memory", with({"model.vocab_size=8"}, sets)).config;
    return estimate_memory(of, resolve_plan(of)).optimizer;
  };
  const int64_t adamw = moments({}), muon = moments(kMuon);
  EXPECT_EQ(moments({"optimizer.moments=bf16"}) * 2, adamw);
  EXPECT_EQ(moments(with(kMuon, {"optimizer.moments=bf16"})) * 2, muon);
  EXPECT_LT(muon, adamw * 3 / 4);
  run("bf16", with(kMuon, {"training.steps=1", "optimizer.moments=bf16"}));
  EXPECT_EQ(saved_as("bf16", 1, "m.layers.0.mlp.down.weight"), Dtype::bf16);
  EXPECT_EQ(saved_as("bf16", 1, "v.embed.weight"), Dtype::bf16);
  EXPECT_EQ(saved_as("bf16", 1, "master.embed.weight"), Dtype::f32);
}

TEST_F(MuonRuns, ThatCannotGoOnOrDoNothingAreRefused) {
  run("run", {"training.steps=2"});
  const auto resume = [&](const Sets& sets) {
    const Error error = error_of([&] { run("run", with(sets, {"training.steps=3", "checkpoint.resume=auto"})); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    return std::string(error.what());
  };
  EXPECT_THAT(resume({"optimizer.type=muon"}), HasSubstr("optimizer.type: layers.0.attn.qkv is trained by Muon here, but by AdamW in "));
  EXPECT_THAT(resume({"optimizer.moments=bf16"}), HasSubstr("optimizer.moments: bf16, but those in "));
  EXPECT_THAT(refusal({"optimizer.type=moun"}), HasSubstr("optimizer.type: "));
  EXPECT_THAT(refusal({"optimizer.moments=fp16"}), HasSubstr("optimizer.moments: "));
  EXPECT_THAT(refusal({"optimizer.muon.momentum=0.9"}), HasSubstr("optimizer.muon: changes nothing, because Muon trains no module"));
  EXPECT_THAT(refusal({"optimizer.type=muon", "optimizer.muon.momentum=1"}), HasSubstr("optimizer.muon.momentum: must be "));
  EXPECT_THAT(refusal({"optimizer.type=muon", "optimizer.muon.ns_steps=0"}), HasSubstr("optimizer.muon.ns_steps: must be "));
  EXPECT_THAT(refusal({"optimizer.type=muon", "optimizer.muon.scale=spectral"}), HasSubstr("optimizer.muon.scale: "));
  EXPECT_THAT(refusal({R"(optimizer.rules=[{"match": "output", "type": "muon"}])"}),
              HasSubstr("optimizer.rules.0.type: does nothing, because \"output\" takes output, and AdamW trains all that is no linear"));
  EXPECT_THAT(refusal({R"(optimizer.rules=[{"match": "layers.*.mlp.*", "type": "muon", "lr_factor": 0}])"}),
              HasSubstr("optimizer.rules.0.type: does nothing, because lr_factor 0 freezes these modules"));
  EXPECT_NO_THROW(config("accepted", {R"(optimizer.rules=[{"match": "*", "type": "muon"}])", "optimizer.muon.nesterov=false"}));
}

}  // namespace mantissa::muon_runs_test
