// training.trace and mantissa trace: a trace has the steps, modules, kernels, FLOPs and bytes of its run, which it does not change.
#include <gmock/gmock.h>

#include "metrics/run_trace.h"
#include "plan/cost.h"
#include "process.h"
#include "training.h"

namespace mantissa::traced_run_test {

using nlohmann::json;
using test::read_file;
using test::Sets;
using test::TrainedRun;
using test::with;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

const char* const kTrace = R"(training.trace={"steps":[2,3]})";

class TracedRun : public test::TrainingTest {
 protected:
  json events(const std::string& name) const { return json::parse(read_file(joined_trace(run_folder(name)))); }
  test::ProcessResult trace(const std::string& name, std::vector<std::string> more = {}) const {
    std::vector<std::string> words = {"trace", run_folder(name)};
    words.insert(words.end(), more.begin(), more.end());
    return test::run_mantissa(std::move(words), folder_.path());
  }
  // FLOPs of a step by the plan, what is computed again included.
  double planned(const Sets& sets) const {
    RunConfig config = this->config("planned", sets).config;
    if (!config.model.vocab_size) config.model.vocab_size = 8;
    return *step_time(config, resolve_plan(config), {.flops = 1.0, .link = {}}).compute;
  }
  json shares_of(const std::string& name) const {
    const test::ProcessResult shown = trace(name, {"--json"});
    EXPECT_EQ(shown.exit_code, 0) << shown.errors;
    return json::parse(shown.output);
  }
};

TEST_F(TracedRun, HasTheFlopsOfThePlanToTheDigit) {
  const Sets experts = {"model.moe.num_experts=4", "model.moe.intermediate_size=32", "model.moe.num_experts_per_tok=2",
                        "model.moe.force_balance=true"};  // 32 rows of each: no padding
  int number = 0;
  for (const Sets& sets : std::vector<Sets>{{},
                                            {"training.recompute=full"},
                                            {"training.recompute=selective"},
                                            {"precision.recipe=mxfp8", "precision.dtype=bf16", "model.intermediate_size=64"},
                                            {"model.tie_word_embeddings=true", "training.accumulation=tree"},
                                            {"model.sliding_window=4", "model.num_key_value_heads=1"},
                                            {R"(optimizer.rules=[{"match":"layers.0.*","lr_factor":0}])"},
                                            experts}) {
    const std::string name = text("run", ++number);
    run(name, with(sets, {kTrace, "training.steps=3"}));
    EXPECT_EQ(shares_of(name)["flops"].get<double>(), planned(sets)) << testing::PrintToString(sets);
  }
}

TEST_F(TracedRun, NamesModulesGemmsAndOperands) {
  run("run", {kTrace, "training.steps=4"});
  int fprops = 0;
  std::map<std::string, int> modules, passes;
  for (const json& event : events("run")) {
    if (event["ph"] != "X") continue;
    if (event["cat"] == "module") ++modules[event["name"]];
    if (event["cat"] == "pass") ++passes[event["name"]];
    const json args = event.value("args", json::object());
    if (event["name"] != "gemm" || args["operands"] != "a fp32 [64, 48], b fp32 [32, 48], out fp32 [64, 32]") continue;
    ++fprops;  // in the second projection of an MLP
    EXPECT_EQ(args["bytes"], 4 * (64 * 48 + 32 * 48 + 64 * 32));
    EXPECT_EQ(args["flops"], 2 * 64 * 48 * 32);
  }
  EXPECT_EQ(fprops, 2 * 2 * 2) << "two steps, micro batches and layers";
  EXPECT_EQ(passes["micro batch"], 4);
  EXPECT_EQ(passes["forward"], 4);
  EXPECT_EQ(passes["backward"], 4);
  EXPECT_EQ(passes["optimizer"], 2);
  for (const char* name : {"embed", "layers.0", "layers.0.attn", "layers.0.attn.qkv", "layers.1.mlp.down", "layers.1.mlp_norm",
                           "final_norm", "layers.1.mlp.down.weight"})
    EXPECT_GE(modules[name], 2) << name;
  EXPECT_EQ(modules["layers.1.mlp.down"], 2 * 2 * 2) << "forward and backward";
  EXPECT_EQ(modules["output"], 2 * 2 * 2);
  EXPECT_EQ(modules["layers.1"], 2 * 2) << "forward; its sums and their gradients are in the norms";
}

TEST_F(TracedRun, AddsUpToItsSteps) {
  run("run", {kTrace, "training.steps=4", "model.hidden_size=128", "model.intermediate_size=512", "training.micro_batch_size=8"});
  const json shares = shares_of("run");
  const auto sum = [](const json& of, const char* key) {
    double out = 0.0;
    for (const json& each : of) out += each[key].get<double>();
    return out;
  };
  const json& mean = shares["mean"];
  const double seconds = mean["seconds"],
               covered = mean["kernels"].get<double>() + mean["exchanges"].get<double>() + mean["waits"].get<double>();
  EXPECT_NEAR(sum(shares["passes"], "seconds"), seconds, 1e-9 * seconds);
  EXPECT_NEAR(sum(shares["modules"], "seconds"), seconds, 1e-9 * seconds);
  EXPECT_NEAR(sum(shares["kernels"], "seconds"), seconds, 1e-9 * seconds);
  EXPECT_NEAR(sum(shares["modules"], "flops"), shares["flops"].get<double>(), 0.5);
  EXPECT_NEAR(sum(shares["kernels"], "bytes"), sum(shares["modules"], "bytes"), 0.5) << "one rank exchanges nothing";
  EXPECT_GE(covered, 0.4 * seconds) << "kernels take most of a step";
  EXPECT_LE(covered, seconds);
}

TEST_F(TracedRun, HasTheBitsOfOneThatIsNotTraced) {
  const Sets sets = {"precision.recipe=mxfp8", "precision.dtype=bf16", "model.intermediate_size=64", "training.steps=6",
                     "training.recompute=full"};
  const TrainedRun plain = run("plain", sets), traced = run("traced", with(sets, {R"(training.trace={"steps":[1,6]})"}));
  EXPECT_EQ(plain.losses, traced.losses);
  EXPECT_EQ(plain.norms, traced.norms);
  EXPECT_TRUE(test::same_elements(state_of("plain", 6), state_of("traced", 6)));
  EXPECT_FALSE(std::filesystem::exists(joined_trace(run_folder("plain"))));
  EXPECT_TRUE(std::filesystem::exists(joined_trace(run_folder("traced"))));
  EXPECT_EQ(shares_of("traced")["steps"].size(), 6U) << "also the last step of the run";
}

TEST_F(TracedRun, ThatIsKilledLeavesWhatCanBeRead) {
  const LoadedConfig loaded = config("killed", {R"(training.trace={"steps":[2,100000]})", "training.steps=100000"});
  test::write_file(folder_ / "run.json", effective_config(loaded.config));
  test::BackgroundProcess running({MANTISSA_BINARY, "train", "run.json"}, folder_.path(), folder_ / "output");
  const std::string part = trace_part(run_folder("killed"), 0).string();
  ASSERT_TRUE(test::eventually([&] {
    return std::filesystem::exists(part) && read_file(part).find(R"("args":{"number":3}})") != std::string::npos;
  })) << running.output();
  running.send(SIGKILL);
  running.wait();
  const test::ProcessResult shown = trace("killed");
  EXPECT_EQ(shown.exit_code, 0) << shown.errors;
  EXPECT_THAT(shown.output, AllOf(HasSubstr(" | steps 2 to "), HasSubstr("the trace of rank 0 has no end: its run was killed")));
  EXPECT_THAT(trace("killed", {"--step", "3"}).output, HasSubstr(" | step 3 | 1 rank on cpu"));
}

TEST_F(TracedRun, IsRefusedWhereItHasNoStep) {
  const Error error = test::error_of([&] { config("late", {"training.steps=4", R"(training.trace={"steps":[5,9]})"}); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("training.trace.steps: the run ends with step 4, got [5, 9]"));
  run("cut", {"training.steps=4", R"(training.trace={"steps":[3,9]})"});
  EXPECT_EQ(shares_of("cut")["steps"], (json{3, 4}));
  run("plain", {"training.steps=1"});
  const test::ProcessResult none = trace("plain");
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_THAT(none.errors, HasSubstr("has no trace; train with --set 'training.trace="));
  EXPECT_EQ(trace("cut", {"--step", "1"}).exit_code, 2);
  EXPECT_EQ(trace("cut", {"--top", "0"}).exit_code, 2);
}

}  // namespace mantissa::traced_run_test
