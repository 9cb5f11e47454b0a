// precision.fp8_param_gather changes what is kept and sent, and no bit of a run: with it the codes are the weight, without it they are made
// again from a bf16 value on every rank.
#include <algorithm>

#include "mantissa/backend/functions.h"
#include "training_on_ranks.h"

namespace mantissa::param_gather_test {

using test::TrainedRun;

struct Case {
  const char* name;
  int ranks;
  std::vector<std::string> sets;
};

class ParamGather : public test::TrainingOnRanks, public ::testing::WithParamInterface<Case> {
 protected:
  static constexpr int64_t kSteps = 50, kSkipped = 17;

  // As step kSkipped has a z among its targets, whose logit is -Inf: the output projection sees ones and more.
  ParamGather() {
    std::string content = test::second_order_text(20000);
    content[0] = 'z';  // known to the tokenizer, and no target
    test::write_file(folder_ / "text.txt", content);
    const RunConfig order = config("order", sets("false")).config;
    Data data = open_data(order.data, {.seq_len = 16, .seed = order.training.seed});
    content[static_cast<size_t>(16 * data.train->batch(8 * (kSkipped - 1), 1).samples[0].sample) + 8] = 'z';
    test::write_file(folder_ / "text.txt", content);
    std::vector<std::string> seed = shape();
    seed.emplace_back("training.steps=1");
    run("seed", seed);
    save_changed("seed", 1, "steep", [](Gpt& model, CheckpointContent&) {
      const auto fill = [](const Tensor& tensor, double value) { tensor.device().run(Fill{.out = tensor, .value = value}); };
      fill(model.parameters().find("final_norm.weight")->value(), 0);
      fill(model.parameters().find("final_norm.bias")->value(), 1);
      fill(model.parameters().find("output.weight")->value().slice(8, 9), -3e38);
    });
  }

  static std::vector<std::string> shape() {
    return {"model.intermediate_size=96", "model.norm=layer", "model.norm_bias=true", "model.attention_bias=all", "precision.dtype=bf16"};
  }
  static std::vector<std::string> sets(const std::string& gather) {
    std::vector<std::string> out = shape();
    const std::vector<std::string> of_run = {"training.steps=50",
                                             "training.micro_batch_size=1",
                                             "training.grad_accum=null",
                                             "training.global_batch_size=8",
                                             "training.accumulation=tree",
                                             "training.threads=1",
                                             R"(eval.samples={"interval":7,"max_new_tokens":6,"prompts":["ab","c"]})",
                                             "eval.interval=7",
                                             "checkpoint.interval=25",
                                             "precision.fp8_param_gather=" + gather};
    for (const auto& more : {of_run, GetParam().sets}) out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  TrainedRun run_with(const std::string& gather, const std::string& name, const std::string& from) const {
    std::vector<std::string> all = sets(gather);
    all.push_back(from);
    return run_on(GetParam().ranks, name, all);
  }
  std::string steep() {
    std::filesystem::create_directories(folder_ / "steep");
    return "checkpoint.init_from=" + (folder_ / "steep");
  }
};

TEST_P(ParamGather, ChangesNoBitOfFiftySteps) {
  const TrainedRun off = run_with("false", "off", steep()), on = run_with("true", "on", steep());
  ASSERT_EQ(off.steps.size(), size_t{kSteps});
  EXPECT_EQ(off.summary.skipped_steps, 1);
  EXPECT_TRUE(off.steps[kSkipped - 1].skipped);
  EXPECT_EQ(off.valid_losses.size(), 8U);
  EXPECT_EQ(off.samples.size(), 16U);
  expect_same_course(off, on);
  expect_same_checkpoints("off", "on", kSteps, "plan");
}

TEST_P(ParamGather, MayBeSwitchedWhereARunResumes) {
  run_with("false", "off", steep());
  run_with("true", "on", steep());
  for (const auto& [from, then] : {std::pair{"off", "true"}, {"on", "false"}}) {
    const std::string name = std::string(from) + "-switched";
    const TrainedRun rest = run_with(then, name, "checkpoint.resume=" + checkpoint(from, 25));
    EXPECT_EQ(rest.losses.size(), 25U);
    expect_same_checkpoints("off", name, kSteps, "plan");
  }
}

const std::string kRows = R"(precision.recipes={"rows":{"base":"mxfp8","weight":{"block":[1,32]}}})";
const std::string kMixed = R"(precision.rules=[{"match":"layers.0.mlp.*","recipe":"high"},{"match":"layers.*.attn.qkv","recipe":"rows"},)"
                           R"({"match":"layers.1.mlp.down","recipe":"mxfp8_weights"}])";

INSTANTIATE_TEST_SUITE_P(, ParamGather,
                         ::testing::Values(Case{"tiles_1", 1, {"precision.recipe=mxfp8"}}, Case{"tiles_2", 2, {"precision.recipe=mxfp8"}},
                                           Case{"tiles_4", 4, {"precision.recipe=mxfp8"}},
                                           Case{"rows_4", 4, {kRows, "precision.recipe=rows"}},
                                           Case{"mixed_4", 4, {kRows, kMixed, "precision.recipe=mxfp8"}}),
                         [](const auto& c) { return std::string(c.param.name); });

}  // namespace mantissa::param_gather_test
