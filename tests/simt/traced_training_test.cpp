// The trace of a run on the kernels of CUDA: spans have the times of the device's lanes.
#include <nlohmann/json.hpp>

#include "metrics/run_trace.h"
#include "plan/cost.h"
#include "traced_steps.h"
#include "training.h"

namespace mantissa::traced_training_test {

using nlohmann::json;

class TracedOnCuda : public test::TrainingTest {};

TEST_F(TracedOnCuda, HasTheKernelsOfItsStepsAndTheBitsOfOneThatIsNotTraced) {
  const test::Sets sets = {"training.device=cuda",  "training.steps=3",     "training.seq_len=8", "training.micro_batch_size=1",
                           "training.grad_accum=1", "precision.dtype=bf16", "eval.interval=0",    "logging.interval=1"};
  const test::TrainedRun plain = run("plain", sets), traced = run("traced", test::with(sets, {R"(training.trace={"steps":[2,3]})"}));
  EXPECT_EQ(plain.losses, traced.losses);
  EXPECT_TRUE(test::same_elements(state_of("plain", 3), state_of("traced", 3)));
  RunConfig config = this->config("planned", sets).config;
  config.model.vocab_size = 8;
  std::map<int64_t, double> flops;  // by step
  std::vector<json> steps, behind, kernels;
  for (const json& event : json::parse(test::read_file(joined_trace(run_folder("traced"))))) {
    if (event["ph"] != "X") continue;
    EXPECT_EQ(event["tid"], static_cast<int>(Lane::compute)) << event;
    if (event["cat"] == "step") (event["name"] == "step" ? steps : behind).push_back(event);
    if (event["cat"] == "kernel") kernels.push_back(event);
  }
  ASSERT_EQ(steps.size(), 2U);
  ASSERT_EQ(behind.size(), 2U) << "the evaluation and the save at the end";
  EXPECT_EQ(behind.back()["name"], "save");
  const auto begin = [](const json& span) { return span["ts"].get<double>(); };
  const auto end = [&](const json& span) { return begin(span) + span["dur"].get<double>(); };
  for (const json& kernel : kernels) {
    if (begin(kernel) >= end(steps.back()) - 0.01) continue;  // in the evaluation at the end of the run
    const auto around = std::ranges::find_if(
        steps, [&](const json& step) { return begin(step) <= begin(kernel) + 0.01 && end(kernel) <= end(step) + 0.01; });
    ASSERT_NE(around, steps.end()) << kernel;
    flops[(*around)["args"]["number"]] += kernel["args"].value("flops", 0.0);
  }
  const double planned = *step_time(config, resolve_plan(config), {.flops = 1.0, .link = {}}).compute;
  EXPECT_EQ(flops, (std::map<int64_t, double>{{2, planned}, {3, planned}}));
}

TEST_F(TracedOnCuda, HasKernelsOfBothLanes) {
  test::trace_steps(*make_backend("cuda"), folder_.path());
  test::expect_traced_steps(folder_.path(), true);
}

}  // namespace mantissa::traced_training_test
