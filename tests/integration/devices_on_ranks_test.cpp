// Runs of train() on devices behind every layout of ranks: steps, statistics, evaluation, samples, saves and resumes have the bits of the
// CPU, although the host cannot touch the memory, the kernels end later than they are asked for, and two ranks are on a host.
#include "async_device.h"
#include "thread_links.h"
#include "training_on_ranks.h"

namespace mantissa::devices_on_ranks_test {

using test::Sets;
using test::TensorLayout;
using test::TrainedRun;
using test::with;

struct Model {
  std::string name;
  Sets sets;
};

const TensorLayout kAlone{1, 1, false}, kDp2{2, 1, false}, kDp4{4, 1, false}, kTp2{1, 2, false}, kTp2Sp{1, 2, true}, kEp2{2, 1, false, 2},
    kDp2Ep2{4, 1, false, 2}, kTp2Dp2{2, 2, true}, kTp2Ep2{2, 2, false, 2};

const Sets kMoe{"model.moe.num_experts=4",      "model.moe.num_experts_per_tok=2",       "model.moe.intermediate_size=64",
                "model.moe.aux_loss_coef=0.01", "model.moe.shared_intermediate_size=64", "model.moe.z_loss_coef=0.001"};
const Model kHigh{"high", {"model.norm=layer", "model.norm_bias=true", "model.attention_bias=all", "model.mlp_bias=true"}};
const Model kFp32{"fp32", {"precision.dtype=fp32"}};
const Model kMxfp8{"mxfp8", {"precision.recipe=mxfp8", "training.recompute=selective"}};
const Model kGather{"gather", {"precision.recipe=mxfp8", "precision.fp8_param_gather=true", "training.recompute=full"}};
const Model kQat{"qat", {"precision.recipe=mxfp4_qat_mxfp8_act", "training.recompute=full"}};
const Model kWeights{"mxfp8_weights", {"precision.recipe=mxfp8_weights", "model.tie_word_embeddings=true"}};
const Model kQatAlone{"mxfp4_qat", {"precision.recipe=mxfp4_qat", "precision.dtype=bf16"}};
const Model kBlocks{"fp8_block", {"precision.recipe=fp8_block", "model.hidden_size=256", "model.intermediate_size=256"}};
const Model kSoftmax{"softmax", with(kMoe, {"precision.recipe=mxfp8", "model.moe.seq_aux_loss_coef=0.01"})};
const Model kSigmoid{"sigmoid",
                     with(kMoe, {"precision.recipe=mxfp4_qat_mxfp8_act", "model.moe.score=sigmoid", "model.moe.bias_update_rate=0.01",
                                 "model.moe.capacity_factor=1.1", "training.recompute=full"})};
const Model kBiases{"biases",
                    with(kMoe, {"model.moe.expert_mlp_bias=true", "model.moe.dense_layers=[0]", "precision.fp8_param_gather=true",
                                "precision.recipe=mxfp8", "training.recompute=selective", "model.moe.shared_intermediate_size=0"})};

enum class Kind { cpu, async, async_through_the_host };

struct Case {
  TensorLayout layout;
  Model model;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.layout.name() << '_' << c.model.name; }

class DevicesOnRanks : public test::TrainingOnRanks, public ::testing::WithParamInterface<Case> {
 protected:
  // Three steps with statistics of each, an evaluation, a sample, two saves.
  TrainedRun run_with(Kind kind, const std::string& name, const Sets& more = {}) const {
    const Sets base = {"model.hidden_size=64",
                       "model.intermediate_size=128",
                       "model.vocab_size=8",
                       "precision.dtype=bf16",
                       "precision.report_interval=1",
                       "training.steps=3",
                       "training.replica_check_interval=1",
                       "logging.interval=1",
                       "eval.interval=2",
                       "eval.iters=3",
                       R"(eval.samples={"prompts":["ab"],"max_new_tokens":6,"interval":2})",
                       "checkpoint.interval=2"};
    test::ThreadLinks links;
    const auto async = [](int rank) { return std::make_unique<test::AsyncDevice>(static_cast<uint32_t>(7 + rank)); };
    const Sets sets = with(with(with(base, tree_of(8)), GetParam().model.sets), more);
    if (kind == Kind::cpu) return run_on(GetParam().layout, name, sets);
    return run_on(GetParam().layout, name, sets, async, kind == Kind::async ? links.maker() : MakeDeviceLink(), 2);
  }

  // Reports of the run about precision and routing.
  std::vector<std::string> reports(const std::string& name) const {
    std::vector<std::string> out;
    std::istringstream lines(test::read_file(run_folder(name) + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      nlohmann::json event = nlohmann::json::parse(line);
      event.erase("time");
      if (event.at("type") == "precision") out.push_back(event.dump());
      if (event.at("type") == "step" && event.contains("moe")) out.push_back(event.at("moe").dump());
    }
    EXPECT_FALSE(out.empty() && GetParam().model.name != "high" && GetParam().model.name != "fp32");
    return out;
  }
};

// One kind of device resumes the saves of another.
TEST_P(DevicesOnRanks, HaveTheBitsOfTheCpuAndResumeWhatItSaved) {
  const TrainedRun expected = run_with(Kind::cpu, "cpu");
  ASSERT_EQ(expected.losses.size(), 3U);
  expect_same_course(expected, run_with(Kind::async, "async"));
  EXPECT_EQ(reports("async"), reports("cpu"));
  for (const int64_t step : {2, 3}) expect_same_checkpoints("cpu", "async", step);
  const TrainedRun rest = run_with(Kind::async_through_the_host, "rest", {"checkpoint.resume=" + checkpoint("cpu", 2)});
  EXPECT_EQ(rest.losses.size(), 1U);
  expect_same_checkpoints("cpu", "rest", 3);
}

INSTANTIATE_TEST_SUITE_P(Layouts, DevicesOnRanks,
                         ::testing::Values(Case{kAlone, kBiases}, Case{kDp2, kFp32}, Case{kDp2, kWeights}, Case{kDp4, kQat},
                                           Case{kTp2, kQatAlone}, Case{kTp2, kBlocks}, Case{kTp2Sp, kHigh}, Case{kTp2Sp, kGather},
                                           Case{kEp2, kSigmoid}, Case{kDp2Ep2, kBiases}, Case{kTp2Dp2, kMxfp8}, Case{kTp2Ep2, kSoftmax},
                                           // slow:
                                           Case{kAlone, kBlocks}, Case{kDp2, kSigmoid}, Case{kDp4, kGather}, Case{kTp2, kHigh},
                                           Case{kTp2Sp, kSoftmax}, Case{kEp2, kBiases}, Case{kDp2Ep2, kSigmoid}, Case{kTp2Dp2, kGather}),
                         ::testing::PrintToStringParamName());

using SkippedStepsOnDevices = DevicesOnRanks;

// A rate like that leaves weights of 1e38, so that the losses and norms of the other two steps are not finite.
TEST_P(SkippedStepsOnDevices, AreThoseOfTheCpu) {
  const Sets sets = {"optimizer.lr=1e38", "schedule.warmup_steps=0", "optimizer.grad_clip=0", "eval.samples=null", "eval.interval=0"};
  const TrainedRun expected = run_with(Kind::cpu, "cpu", sets), found = run_with(Kind::async, "async", sets);
  EXPECT_EQ(expected.summary.skipped_steps, 2);
  EXPECT_EQ(found.summary.skipped_steps, 2);
  expect_same_checkpoints("cpu", "async", 3);
}

INSTANTIATE_TEST_SUITE_P(, SkippedStepsOnDevices,
                         ::testing::Values(Case{kAlone, kHigh}, Case{kDp2, kGather}, Case{kTp2Sp, kQat}, Case{kEp2, kBiases}),
                         ::testing::PrintToStringParamName());

}  // namespace mantissa::devices_on_ranks_test
