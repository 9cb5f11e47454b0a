// precision.fp8_param_gather changes the form in which weights are kept and sent, and no bit of a run: with it the codes are the weight,
// without it they are made again from a bf16 value on every rank.
#include "mantissa/backend/functions.h"
#include "training_on_ranks.h"

namespace mantissa::param_gather_test {

using test::Sets;
using test::TrainedRun;
using test::with;

struct Case {
  const char* name;
  int ranks;
  Sets sets;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class ParamGather : public test::TrainingOnRanks, public ::testing::WithParamInterface<Case> {
 protected:
  static constexpr int64_t kSteps = 12, kSkipped = 5;

  // Step kSkipped has a z among its targets, whose logit is -Inf: the output projection sees ones and more.
  ParamGather() {
    std::string content = test::second_order_text(20000);
    content[0] = 'z';  // known to the tokenizer, and no target
    test::write_file(folder_ / "text.txt", content);
    const RunConfig order = config("order", sets("false")).config;
    Data data = open_data(order.data, {.seq_len = 16, .seed = order.training.seed});
    content[static_cast<size_t>(16 * data.train->batch(8 * (kSkipped - 1), 1).samples[0].sample) + 8] = 'z';
    test::write_file(folder_ / "text.txt", content);
    run("seed", with(kShape, {"training.steps=1"}));
    save_changed("seed", 1, "steep", [](Gpt& model, CheckpointContent&) {
      const auto fill = [](const Tensor& tensor, double value) { tensor.device().run(Fill{.out = tensor, .value = value}); };
      fill(model.parameters().find("final_norm.weight")->value(), 0);
      fill(model.parameters().find("final_norm.bias")->value(), 1);
      fill(model.parameters().find("output.weight")->value().slice(8, 9), -3e38);
    });
  }

  static Sets sets(const char* gather) {
    return with(with(with(tree_of(8), kShape), {text("training.steps=", kSteps), "eval.interval=4", "checkpoint.interval=6",
                                                R"(eval.samples={"interval":4,"max_new_tokens":6,"prompts":["ab","c"]})",
                                                text("precision.fp8_param_gather=", gather)}),
                GetParam().sets);
  }

  inline static const Sets kShape = {"model.intermediate_size=96", "model.norm=layer", "model.norm_bias=true", "model.attention_bias=all",
                                     "precision.dtype=bf16"};
};

TEST_P(ParamGather, ChangesNoBitAndMayBeSwitchedWhereARunResumes) {
  const Sets steep = {"checkpoint.init_from=" + (folder_ / "steep")};
  const int ranks = GetParam().ranks;
  const TrainedRun off = run_on(1, "off", with(sets("false"), steep)), on = run_on(ranks, "on", with(sets("true"), steep));
  ASSERT_EQ(off.steps.size(), size_t{kSteps});
  EXPECT_EQ(off.summary.skipped_steps, 1);
  EXPECT_TRUE(off.steps[kSkipped - 1].skipped);
  EXPECT_EQ(off.valid_losses.size(), 3U);
  EXPECT_EQ(off.samples.size(), 6U);
  expect_same_course(off, on);
  expect_same_checkpoints("off", "on", kSteps, "plan");
  for (const auto& [from, then] : {std::pair{"off", "true"}, {"on", "false"}}) {
    const std::string name = std::string(from) + "-switched";
    EXPECT_EQ(run_on(ranks, name, with(sets(then), {"checkpoint.resume=" + checkpoint(from, 6)})).losses.size(), 6U);
    expect_same_checkpoints("off", name, kSteps, "plan");
  }
}

const std::string kRows = R"(precision.recipes={"rows":{"base":"mxfp8","weight":{"block":[1,32]}}})";
const std::string kMixed = R"(precision.rules=[{"match":"layers.0.mlp.*","recipe":"high"},{"match":"layers.*.attn.qkv","recipe":"rows"},)"
                           R"({"match":"layers.1.mlp.down","recipe":"mxfp8_weights"}])";

INSTANTIATE_TEST_SUITE_P(, ParamGather,
                         ::testing::Values(Case{"tiles_1", 1, {"precision.recipe=mxfp8"}}, Case{"tiles_2", 2, {"precision.recipe=mxfp8"}},
                                           Case{"rows_4", 4, {kRows, "precision.recipe=rows"}},
                                           Case{"mixed_4", 4, {kRows, kMixed, "precision.recipe=mxfp8"}}),
                         [](const auto& c) { return std::string(c.param.name); });

}  // namespace mantissa::param_gather_test
