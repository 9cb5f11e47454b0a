// Attention by cuDNN, but for its results: which attention goes to it, plans, memory, failures, and a run that asks for it.
// cudnn_attention_test.cpp has its results.
#include <cstdlib>

#include "attention_runs.h"
#include "config/training_options.h"
#include "models/gpt.h"
#include "models/model_shape.h"
#include "simt/cudnn_library.h"
#include "simt/training_on_cuda.h"

namespace mantissa::cudnn_test {

using test::AttentionCase;
using test::error_of;
using test::run_attention;
using ::testing::HasSubstr;

class Cudnn : public ::testing::Test {
 protected:
  Cudnn() { ::setenv("MANTISSA_SIMT_ARCHITECTURE", "90", 1); }
  ~Cudnn() override {
    ::unsetenv("MANTISSA_SIMT_ARCHITECTURE");
    simt::cudnn() = {};
  }
  std::unique_ptr<Backend> device(int architecture = 90, AttentionBy by = AttentionBy::cudnn) const {
    ::setenv("MANTISSA_SIMT_ARCHITECTURE", std::to_string(architecture).c_str(), 1);
    auto out = make_backend("cuda");
    out->choose_attention(by);
    return out;
  }
  static int64_t executions(Backend& device, const AttentionCase& c, Dtype dtype = Dtype::bf16) {
    const int64_t before = simt::cudnn().executions;
    run_attention(device, dtype, c);
    device.synchronize();
    return simt::cudnn().executions - before;
  }
};

const AttentionCase kCase{.batch = 2, .length = 20, .layout = {2, 1, 64}, .window = 7, .sinks = true};

TEST_F(Cudnn, HasWhatTheTableLeavesToIt) {
  const AttentionCase odd{.length = 20, .layout = {2, 1, 20}}, one{.batch = 2, .length = 1, .layout = {2, 1, 64}};
  EXPECT_EQ(executions(*device(), kCase), 2);
  EXPECT_EQ(executions(*device(), kCase, Dtype::f32), 0);
  EXPECT_EQ(executions(*device(), odd), 0);
  EXPECT_EQ(executions(*device(), one), 0);
  for (const int architecture : {80, 100}) EXPECT_EQ(executions(*device(architecture), kCase), 0);
  for (const AttentionBy by : {AttentionBy::automatic, AttentionBy::own}) EXPECT_EQ(executions(*device(90, by), kCase), 0);
  const auto asked = device();
  asked->choose_attention(AttentionBy::own);
  EXPECT_EQ(executions(*asked, kCase), 0);
  simt::cudnn().version = 91800;
  EXPECT_EQ(executions(*device(), kCase), 0);
}

TEST_F(Cudnn, MakesAPlanOnceForEachFormAndThenTakesNoMemory) {
  const auto gpu = device();
  executions(*gpu, kCase);
  const int64_t plans = simt::cudnn().plans, calls = gpu->allocator_stats().system_calls;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(executions(*gpu, kCase), 2);
  AttentionCase wider = kCase;
  wider.window = 8;
  EXPECT_EQ(executions(*gpu, wider), 2);
  EXPECT_EQ(simt::cudnn().plans, plans);
  EXPECT_EQ(gpu->allocator_stats().system_calls, calls);
  std::vector<AttentionCase> others(7, kCase);
  others[0].batch = 1, others[1].length = 21, others[2].layout = {2, 2, 64}, others[3].layout = {4, 1, 64};
  others[4].layout = {2, 1, 72}, others[5].window = 0, others[6].documents = {0, 3};
  for (const AttentionCase& c : others) {
    const int64_t before = simt::cudnn().plans;
    executions(*gpu, c);
    EXPECT_EQ(simt::cudnn().plans, before + 2) << c.name();
  }
}

// The bytes that the real library takes, too (tests/interop/cudnn.sh).
TEST_F(Cudnn, TakesTheMemoryThatIsEstimated) {
  const auto gpu = device();
  for (const AttentionCase& c : {kCase, AttentionCase{.batch = 3, .length = 130, .layout = {4, 2, 128}},
                                 AttentionCase{.length = 65, .layout = {3, 3, 40}}, AttentionCase{.length = 70, .layout = {4, 1, 256}}}) {
    executions(*gpu, c);
    const AttentionForm form{
        .batch = c.batch, .length = c.length, .heads = c.layout.heads, .kv_heads = c.layout.kv_heads, .head_dim = c.layout.head_dim};
    EXPECT_LE(static_cast<double>(simt::cudnn().workspace + 4 * c.rows() * c.layout.heads), attention_workspace(form)) << c.name();
    // Less than the gradients of all scores would mean that blocks add to dq in any order.
    EXPECT_GE(simt::cudnn().workspace, 2 * c.layout.heads * c.rows() * c.length) << c.name();
  }
}

TEST_F(Cudnn, TakesTheFirstEngineThatCanBeMadeReady) {
  simt::cudnn().refused_plans = 1;
  EXPECT_EQ(executions(*device(), kCase), 2);
  simt::cudnn().refused_plans = 2;
  const auto gpu = device();
  const Error error = error_of([&] { run_attention(*gpu, Dtype::bf16, kCase); });
  EXPECT_EQ(error.code(), ExitCode::environment);
  EXPECT_THAT(error.what(),
              HasSubstr("cuDNN 9.19 has no attention of 2 x 20 tokens, 2 heads of 64 channels, 1 of keys, window 7, sinks: "));
  EXPECT_THAT(error.what(), HasSubstr("set training.attention to own"));
}

TEST_F(Cudnn, TakesNoEngineThatAddsInAnyOrder) {
  simt::cudnn().unordered_plans = 1;
  EXPECT_EQ(executions(*device(), kCase), 2);
  simt::cudnn().unordered_plans = 2;
  const auto gpu = device();
  const Error error = error_of([&] { run_attention(*gpu, Dtype::bf16, kCase); });
  EXPECT_EQ(error.code(), ExitCode::environment);
  EXPECT_THAT(error.what(), HasSubstr("its engines add gradients of queries in no fixed order; set training.attention to own"));
}

TEST_F(Cudnn, ThatFailsSaysWhereAndWhetherThatIsOfTheEnvironment) {
  for (const char* const call : {"Create", "SetStream", "BackendCreateDescriptor", "BackendFinalize", "BackendSetAttribute",
                                 "BackendGetAttribute", "BackendExecute"}) {
    for (const int status : {1001, 2000, 3000, 4000, 4004, 5000, 5001, 5003}) {
      simt::cudnn() = {.failing_call = call, .status = status};
      const Error error = error_of([&] { run_attention(*device(), Dtype::bf16, kCase); });
      const bool of_environment = status == 1001 || status == 3000 || status == 4004 || status > 5000;
      EXPECT_EQ(error.code(), of_environment ? ExitCode::environment : ExitCode::internal) << call << ' ' << status;
      EXPECT_THAT(error.what(), HasSubstr("cuDNN: ")) << call;
      EXPECT_THAT(error.what(), HasSubstr(text("status ", status))) << call;
    }
  }
  EXPECT_THAT(error_of([&] { run_attention(*device(), Dtype::bf16, kCase); }).what(),
              HasSubstr("cuDNN: attention of 2 x 20 tokens, 2 heads of 64 channels, 1 of keys, window 7, sinks failed: status 5003"));
}

TEST_F(Cudnn, IsRefusedWhereItCannotBeHad) {
  ModelConfig model;
  model.vocab_size = model.hidden_size = model.intermediate_size = 32;
  model.num_layers = model.num_attention_heads = 1;
  const auto error_on = [&](Backend& device) {
    ConfigReport report;
    return error_of(
        [&] { const Gpt gpt(model, device, PrecisionPlan::resolve({}, model_shape(model), report), {.attention = AttentionBy::cudnn}); });
  };
  const auto on_chip = [&](int architecture) { return error_on(*device(architecture, AttentionBy::own)); };
  const auto cpu = make_backend("cpu");
  EXPECT_STREQ(error_on(*cpu).what(), "training.attention is cudnn, but cuDNN is for GPUs, and the device is a CPU: set it to own");
  EXPECT_THAT(on_chip(80).what(), HasSubstr("on sm_90 alone, and the device is sm_80: set it to own"));
  simt::cudnn().version = 91501;
  EXPECT_THAT(on_chip(90).what(), HasSubstr("cuDNN 9.15 is older than cuDNN 9.19"));
  simt::cudnn() = {};
  model.head_dim = 20;
  EXPECT_THAT(on_chip(90).what(), HasSubstr("a multiple of 8, and head_dim is 20"));
  ::unsetenv("MANTISSA_SIMT_ARCHITECTURE");
  EXPECT_NO_THROW(make_backend("cuda")->choose_attention(AttentionBy::cudnn));  // 8.0 needs none, because the table has none for it
}

// A device computes attention for both in one way, which the model that is made last decides.
TEST_F(Cudnn, IsForTheTeacherAsForTheRun) {
  RunConfig config;
  config.model.vocab_size = config.model.hidden_size = config.model.intermediate_size = 32;
  config.model.num_layers = config.model.num_attention_heads = 1;
  config.training.teacher = "teacher", config.training.attention = AttentionBy::cudnn;
  config.training.seq_len = 32;
  config.teacher = config.model;
  const auto gpu = device(90, AttentionBy::own);
  const auto teacher = make_teacher(config, *gpu, {});
  EXPECT_EQ(gpu->attention_device().by, AttentionBy::cudnn);
}

class TrainingByCudnn : public test::TrainingOnCuda {};

TEST_P(TrainingByCudnn, IsNearTheCpuAndHasTheSameBitsAfterAStop) {
  const test::TrainedRun cpu = run_on_device("cpu", "cpu");
  ::setenv("MANTISSA_SIMT_ARCHITECTURE", "90", 1);
  const Sets by_cudnn = {"training.device=cuda", "training.attention=cudnn"};
  const int64_t before = simt::cudnn().executions;
  const test::TrainedRun chip = run_on_device("cuda", "chip", by_cudnn);
  EXPECT_GT(simt::cudnn().executions, before);
  Sets rest = by_cudnn;
  rest.push_back("checkpoint.resume=" + checkpoint("chip", kMiddle));
  run_on_device("cuda", "rest", rest);
  ::unsetenv("MANTISSA_SIMT_ARCHITECTURE");
  expect_near("cpu", cpu, "chip", chip);
  expect_same_checkpoints("chip", "rest", kSteps);
}

INSTANTIATE_TEST_SUITE_P(
    , TrainingByCudnn,
    ::testing::Values(test::CudaModel{
        .name = "windows_and_sinks", .loss = 1e-3, .gradient = 0.05, .sets = {"model.attention_sinks=true", "model.sliding_window=9"}}),
    [](const auto& c) { return c.param.name; });

}  // namespace mantissa::cudnn_test
