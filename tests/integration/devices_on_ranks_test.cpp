// Runs of train() on devices behind every layout of ranks: steps, statistics, evaluation, samples, saves and resumes have the bits of the
// CPU, although the host cannot touch the memory and the kernels end later than they are asked for.
#include "async_device.h"
#include "mantissa/checkpoint/checkpoint_directory.h"
#include "thread_links.h"
#include "training_on_ranks.h"

namespace mantissa::devices_on_ranks_test {

using test::AsyncDevice;
using test::ClosedDevice;
using test::TrainedRun;
using ::testing::Each;
using ::testing::IsEmpty;

using Sets = std::vector<std::string>;

Sets operator+(Sets a, const Sets& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Layout {
  std::string name;
  int ranks;
  Sets sets;
};

struct Model {
  std::string name;
  Sets sets;
};

enum class Kind { cpu, closed, async, async_through_the_host };

std::unique_ptr<Backend> make_device(Kind kind, int rank) {
  if (kind == Kind::cpu) return make_backend("cpu");
  if (kind == Kind::closed) return std::make_unique<ClosedDevice>();
  return std::make_unique<AsyncDevice>(static_cast<uint32_t>(7 + rank));
}

const Layout kAlone{"alone", 1, {"parallel.data=1"}};
const Layout kDp2{"dp2", 2, {"parallel.data=2"}};
const Layout kDp4{"dp4", 4, {"parallel.data=4"}};
const Layout kTp2{"tp2", 2, {"parallel.tensor=2"}};
const Layout kTp2Sp{"tp2_sp", 2, {"parallel.tensor=2", "parallel.sequence_parallel=true"}};
const Layout kEp2{"ep2", 2, {"parallel.data=2", "parallel.expert=2"}};
const Layout kDp2Ep2{"dp2_ep2", 4, {"parallel.data=4", "parallel.expert=2"}};
const Layout kTp2Dp2{"tp2_dp2", 4, {"parallel.data=2", "parallel.tensor=2", "parallel.sequence_parallel=true"}};
const Layout kTp2Ep2{"tp2_ep2", 4, {"parallel.data=2", "parallel.tensor=2", "parallel.expert=2"}};

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
const Model kSoftmax{"softmax", kMoe + Sets{"precision.recipe=mxfp8", "model.moe.seq_aux_loss_coef=0.01"}};
const Model kSigmoid{"sigmoid", kMoe + Sets{"precision.recipe=mxfp4_qat_mxfp8_act", "model.moe.score=sigmoid",
                                            "model.moe.bias_update_rate=0.01", "model.moe.capacity_factor=1.1", "training.recompute=full"}};
const Model kBiases{"biases",
                    kMoe + Sets{"model.moe.expert_mlp_bias=true", "model.moe.dense_layers=[0]", "precision.fp8_param_gather=true",
                                "precision.recipe=mxfp8", "training.recompute=selective", "model.moe.shared_intermediate_size=0"}};

struct Case {
  Layout layout;
  Model model;
};

class DevicesOnRanks : public test::TrainingOnRanks, public ::testing::WithParamInterface<Case> {
 protected:
  // Four steps with statistics of each, an evaluation, a sample, two saves.
  TrainedRun run_with(Kind kind, const std::string& name, const Sets& more = {}) const {
    const Sets base = {"model.hidden_size=64",
                       "model.intermediate_size=128",
                       "model.vocab_size=8",
                       "precision.dtype=bf16",
                       "precision.report_interval=1",
                       "training.steps=4",
                       "training.micro_batch_size=1",
                       "training.grad_accum=null",
                       "training.global_batch_size=8",
                       "training.accumulation=tree",
                       "training.threads=1",
                       "training.replica_check_interval=1",
                       "logging.interval=1",
                       "eval.interval=3",
                       "eval.iters=3",
                       R"(eval.samples={"prompts":["ab"],"max_new_tokens":6,"interval":3})",
                       "checkpoint.interval=3"};
    const LoadedConfig loaded = config(name, base + GetParam().layout.sets + GetParam().model.sets + more);
    TrainedRun out;
    test::ThreadLinks links;
    const auto errors = test::run_ranks(
        GetParam().layout.ranks,
        [&](const Communicator& world) {
          TrainedRun own = run(loaded, {}, world, [&] { return make_device(kind, world.rank()); });
          if (world.rank() == 0) out = std::move(own);
        },
        {}, kind == Kind::async ? links.maker() : MakeDeviceLink());
    EXPECT_THAT(errors, Each(IsEmpty()));
    return out;
  }

  void expect_the_same(const std::string& name, const TrainedRun& expected, const TrainedRun& found, int64_t step) const {
    SCOPED_TRACE(name);
    expect_same_course(expected, found);
    EXPECT_EQ(reports(name), reports("cpu"));
    expect_same_checkpoints("cpu", name, step);
  }

  // What the run says of precision and routing.
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

TEST_P(DevicesOnRanks, HaveTheBitsOfTheCpu) {
  const TrainedRun expected = run_with(Kind::cpu, "cpu");
  ASSERT_EQ(expected.losses.size(), 4U);
  expect_the_same("closed", expected, run_with(Kind::closed, "closed"), 4);
  expect_the_same("async", expected, run_with(Kind::async, "async"), 4);
}

// A rate like that leaves weights of 1e38, so that the losses and norms of the other two steps are not finite.
TEST_P(DevicesOnRanks, SkipTheStepsThatTheCpuSkips) {
  const Sets sets = {"optimizer.lr=1e38", "schedule.warmup_steps=0", "optimizer.grad_clip=0",
                     "training.steps=3",  "eval.samples=null",       "eval.interval=0"};
  const TrainedRun expected = run_with(Kind::cpu, "cpu", sets), found = run_with(Kind::async, "async", sets);
  EXPECT_EQ(expected.summary.skipped_steps, 2);
  EXPECT_EQ(found.summary.skipped_steps, 2);
  expect_same_checkpoints("cpu", "async", 3);
}

// Saved on one kind of device, resumed on the other.
TEST_P(DevicesOnRanks, ResumeOnAnotherDevice) {
  run_with(Kind::cpu, "cpu");
  run_with(Kind::async_through_the_host, "device");
  for (const auto& [name, saved, kind] : {std::tuple("there", "cpu", Kind::async), std::tuple("back", "device", Kind::cpu)}) {
    const TrainedRun rest = run_with(kind, name, {"checkpoint.resume=" + checkpoint(saved, 3)});
    EXPECT_EQ(rest.losses.size(), 1U);
    expect_same_checkpoints("cpu", name, 4);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, DevicesOnRanks,
                         ::testing::Values(Case{kAlone, kHigh}, Case{kAlone, kQat}, Case{kAlone, kBlocks}, Case{kAlone, kSoftmax},
                                           Case{kAlone, kSigmoid}, Case{kAlone, kBiases}, Case{kDp2, kFp32}, Case{kDp2, kWeights},
                                           Case{kTp2, kQatAlone}, Case{kDp2, kMxfp8}, Case{kDp2, kGather}, Case{kDp2, kSigmoid},
                                           Case{kDp4, kQat}, Case{kDp4, kGather}, Case{kTp2, kHigh}, Case{kTp2, kMxfp8},
                                           Case{kTp2, kBlocks}, Case{kTp2Sp, kHigh}, Case{kTp2Sp, kGather}, Case{kTp2Sp, kSoftmax},
                                           Case{kEp2, kSoftmax}, Case{kEp2, kSigmoid}, Case{kEp2, kBiases}, Case{kDp2Ep2, kSigmoid},
                                           Case{kDp2Ep2, kBiases}, Case{kTp2Dp2, kMxfp8}, Case{kTp2Dp2, kGather}, Case{kTp2Ep2, kSoftmax}),
                         [](const auto& c) { return c.param.layout.name + "_" + c.param.model.name; });

}  // namespace mantissa::devices_on_ranks_test
