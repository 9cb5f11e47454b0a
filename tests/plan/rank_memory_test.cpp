// Memory of ranks, against its estimate: between steps, and from forward to backward; and a run begins only where it fits.
#include <gmock/gmock.h>

#include <algorithm>

#include "backend/gpus.h"
#include "mantissa/plan/estimate.h"
#include "mantissa/train/load_config.h"
#include "nn/shards.h"
#include "plan/memory.h"
#include "process.h"
#include "thread_ranks.h"
#include "train/training_step.h"
#include "training.h"

namespace mantissa::rank_memory_test {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

struct Layout {
  int data, tensor;
  bool sequence = false;
  int expert = 1;

  int ranks() const { return data * tensor; }
  std::string name() const { return text("dp", data, "tp", tensor, sequence ? "sp" : "", "ep", expert); }
};

// Models in the shapes of GPT-2 and of Qwen3.
nlohmann::json gpt2() {
  return {{"norm", "layer"},  {"norm_bias", true},       {"position", "learned"}, {"activation", "gelu_tanh"},
          {"mlp_bias", true}, {"attention_bias", "all"}, {"qk_norm", false},      {"tie_word_embeddings", true}};
}
nlohmann::json qwen3() { return {{"num_key_value_heads", 4}, {"tie_word_embeddings", false}}; }

RunConfig config_of(nlohmann::json model, const Layout& layout, std::vector<std::string> sets = {}) {
  model.update({{"vocab_size", 300},
                {"hidden_size", 256},
                {"num_layers", 2},
                {"num_attention_heads", 8},
                {"intermediate_size", 1024},
                {"max_position_embeddings", 64}});
  const nlohmann::json json = {
      {"model", model}, {"training", {{"seq_len", 64}, {"micro_batch_size", 4}, {"grad_accum", 1}}}, {"data", {{"path", "none"}}}};
  sets.insert(sets.end(),
              {text("parallel.data=", layout.data), text("parallel.tensor=", layout.tensor),
               text("parallel.sequence_parallel=", layout.sequence ? "true" : "false"), text("parallel.expert=", layout.expert)});
  return load_run_config({.file = "c.json", .text = json.dump(), .set_files = {}, .sets = sets}, Inputs::unchecked, layout.ranks()).config;
}

Batch batch_of(const RunConfig& config) {
  Batch batch;
  batch.sequences = config.training.micro_batch_size * *config.training.grad_accum;
  batch.length = config.training.seq_len;
  for (int64_t i = 0; i < batch.sequences * batch.length; ++i) {
    batch.tokens.push_back(static_cast<int32_t>(i % 293));
    batch.positions.push_back(static_cast<int32_t>(i % batch.length));
  }
  batch.targets = batch.tokens;
  batch.segment_starts.assign(batch.tokens.size(), 0);
  batch.target_count = static_cast<int64_t>(batch.tokens.size());
  batch.all_count = true;
  return batch;
}

// Bytes in use of the rank that has most.
struct Held {
  int64_t between = 0;      // steps
  int64_t activations = 0;  // more after forward than before
  int64_t peak = 0;
};

// Measures after a step, which makes tables of rotations, too.
Held held(const RunConfig& config, const Mesh& mesh) {
  const auto device = make_backend("cpu");
  const auto in_use = [&] { return device->allocator_stats().in_use; };
  const std::unique_ptr<Gpt> teacher = make_teacher(config, *device, mesh);
  Gpt model(config.model, *device, resolve_plan(config), training_options(config, mesh));
  Optimizer optimizer(model.parameters(), config.optimizer, mesh, {}, {.directions = config.precision.dtype});
  GradientAccumulator accumulator(model.parameters(), config.training.accumulation, *config.training.grad_accum);
  optimizer.initialize(1);
  const Batch batch = batch_of(config);
  const Teaching teaching = mantissa::teaching(config, teacher.get());
  training_step(model, optimizer, accumulator, batch, config.training.micro_batch_size, 1e-3, {.teaching = teaching});
  optimizer.shards().arrive();
  Held out{.between = in_use(), .activations = 0, .peak = device->allocator_stats().peak_in_use};
  const DeviceBatch rows = to_device(model, batch, 0, config.training.micro_batch_size);
  const int64_t before = in_use();
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var loss = model.loss(rows.tokens, rows.targets, batch.target_count, nullptr, teaching);
  out.activations = in_use() - before;
  return out;
}

Held most_held(const RunConfig& config) {
  std::vector<Held> all(static_cast<size_t>(config.parallel.world()));
  const auto errors = test::run_ranks(static_cast<int>(config.parallel.world()), [&](const Communicator& world) {
    all[static_cast<size_t>(world.rank())] = held(config, make_mesh(world, config.parallel.ranks()));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  const auto most = [&](int64_t Held::*of) { return (*std::ranges::max_element(all, {}, of)).*of; };
  return {.between = most(&Held::between), .activations = most(&Held::activations), .peak = most(&Held::peak)};
}

double between_steps(const MemoryEstimate& memory) {
  return static_cast<double>(memory.masters + memory.values + memory.gradients + memory.optimizer + memory.exchange + memory.teacher);
}

double ratio(int64_t estimated, int64_t found) { return static_cast<double>(estimated) / static_cast<double>(found); }

void expect_as_predicted(const RunConfig& config) {
  const PrecisionPlan plan = resolve_plan(config);
  const MemoryEstimate memory = estimate_memory(config, plan);
  const Held found = most_held(config);
  EXPECT_NEAR(between_steps(memory) / static_cast<double>(found.between), 1.0, 0.005);
  EXPECT_EQ(memory.activations, found.activations);
  if (config.model.moe) return;
  // The workspace is the largest of parts that are not in use at one time.
  EXPECT_GT(ratio(memory.tensors(), found.peak), 0.98);
  EXPECT_LT(ratio(memory.tensors(), found.peak), 1.25);
  if (config.parallel.tensor > 1) return;
  // Masters and moments: 12 bytes of each own parameter, and at most a row block of each bucket more than that.
  const size_t buckets = mantissa::Layout(parameter_specs(plan), Shards::bucket_bytes(config.parallel.data)).buckets().size();
  const bool fp32 = config.precision.dtype == Dtype::f32;
  const double whole = (fp32 ? 8.0 : 12.0) * static_cast<double>(plan.parameters()), row_block = 12.0 * 32 * 1024;
  EXPECT_LE(static_cast<double>(memory.optimizer + (fp32 ? 0 : memory.masters)),
            whole / static_cast<double>(config.parallel.data) * 1.01 + row_block * static_cast<double>(buckets));
}
void expect_as_predicted(const nlohmann::json& model, const Layout& layout, const std::vector<std::string>& sets) {
  SCOPED_TRACE(text(model.dump(), ' ', layout.name(), ' ', ::testing::PrintToString(sets)));
  expect_as_predicted(config_of(model, layout, sets));
}

// A teacher of another width and depth, whose logits stand beside those of the student.
TEST(RankMemory, CountsTheTeacher) {
  for (const Layout& layout : {Layout{1, 1}, {1, 2, true}, {2, 2}}) {
    for (const char* const dtype : {"precision.dtype=bf16", "precision.dtype=fp32"}) {
      SCOPED_TRACE(layout.name() + dtype);
      RunConfig config = config_of(qwen3(), layout, {dtype});
      const MemoryEstimate alone = estimate_memory(config, resolve_plan(config));
      config.training.teacher = "teacher";
      config.teacher = config.model;
      config.teacher->hidden_size = 512, config.teacher->num_layers = 3, config.teacher->head_dim.reset();
      expect_as_predicted(config);
      const MemoryEstimate taught = estimate_memory(config, resolve_plan(config));
      EXPECT_EQ(alone.teacher, 0);
      EXPECT_GT(taught.teacher, layout.tensor > 1 ? 3'000'000 : 6'000'000);
      EXPECT_EQ(taught.masters + taught.values + taught.gradients + taught.optimizer + taught.activations,
                alone.masters + alone.values + alone.gradients + alone.optimizer + alone.activations)
          << "nothing of the teacher is trained, or kept for backward";
    }
  }
}

// Layouts take turns.
TEST(RankMemory, IsWhatIsPredicted) {
  const Layout layouts[] = {{1, 1}, {1, 2}, {1, 2, true}, {1, 4}, {1, 4, true}, {2, 2}, {2, 2, true}, {2, 1}, {4, 1}};
  size_t turn = 0;
  for (const nlohmann::json& model : {gpt2(), qwen3()}) {
    for (const std::vector<std::string>& sets : {std::vector<std::string>{"precision.dtype=fp32"},
                                                 {"precision.dtype=bf16"},
                                                 {"precision.dtype=bf16", "training.recompute=full"},
                                                 {"precision.dtype=bf16", "optimizer.type=muon"},
                                                 {"precision.dtype=bf16", "optimizer.moments=bf16"},
                                                 {"precision.recipe=mxfp8", "precision.dtype=fp32"},
                                                 {"precision.recipe=mxfp8", "precision.fp8_param_gather=true"},
                                                 {"precision.recipe=mxfp8", "training.recompute=selective"},
                                                 {"precision.recipe=mxfp4_qat", "training.accumulation=tree", "training.grad_accum=4"}}) {
      expect_as_predicted(model, layouts[turn++ % std::size(layouts)], sets);
    }
  }
}

// Models have as many rows for each expert. Tensor ranks have their share of the experts' sizes and of those of the expert that all tokens
// go to.
TEST(RankMemory, OfExpertsIsWhatIsPredicted) {
  nlohmann::json model = qwen3();
  model["moe"] = {{"num_experts", 8},
                  {"num_experts_per_tok", 2},
                  {"intermediate_size", 256},
                  {"force_balance", true},
                  {"shared_intermediate_size", 1024}};
  expect_as_predicted(model, {2, 1, false, 2}, {"precision.dtype=fp32"});
  expect_as_predicted(model, {4, 1, false, 2}, {"precision.dtype=bf16", "training.accumulation=tree", "training.grad_accum=2"});
  expect_as_predicted(model, {4, 1, false, 4}, {"precision.recipe=mxfp8", "precision.fp8_param_gather=true"});
  expect_as_predicted(model, {2, 1, false, 2}, {"precision.dtype=bf16", "model.moe.expert_mlp_bias=true", "model.attention_sinks=true"});
  expect_as_predicted(model, {1, 2}, {"precision.dtype=fp32"});
  expect_as_predicted(model, {1, 2, true}, {"precision.dtype=bf16"});
  expect_as_predicted(model, {1, 4}, {"precision.dtype=bf16"});
}

// Position table, norms and biases of what is divided by columns are whole on each rank; the inputs of norms without sequence parallelism.
TEST(RankMemory, OfTwoTensorRanksIsHalf) {
  for (const char* const recipe : {"precision.recipe=high", "precision.recipe=mxfp8"}) {
    const auto memory = [&](const Layout& layout) {
      const RunConfig config = config_of(gpt2(), layout, {recipe, "model.vocab_size=4000"});
      return estimate_memory(config, resolve_plan(config));
    };
    const MemoryEstimate alone = memory({1, 1}), shared = memory({1, 2}), sequence = memory({1, 2, true});
    EXPECT_LE(between_steps(shared), 0.55 * between_steps(alone)) << recipe;
    EXPECT_EQ(between_steps(sequence), between_steps(shared)) << recipe;
    EXPECT_LE(ratio(sequence.activations, alone.activations), 0.60) << recipe;
    EXPECT_LT(sequence.activations, shared.activations) << recipe;
  }
}

// Sizes that are not run are on the line through those that were.
TEST(RankMemory, OfMoreTokensThanAreRunIsInProportion) {
  const auto memory = [](int64_t sequences) {
    const RunConfig config = config_of(qwen3(), {1, 1, false}, {text("training.micro_batch_size=", sequences)});
    return estimate_memory(config, resolve_plan(config));
  };
  const MemoryEstimate run = memory(512), doubled = memory(1024), huge = memory(int64_t{1} << 24);
  const int64_t more = doubled.activations - run.activations;  // by as many sequences; what does not grow is the loss
  EXPECT_NEAR(static_cast<double>(run.activations - more), 0.0, 64.0);
  EXPECT_EQ(doubled.workspace, 2 * run.workspace);
  EXPECT_EQ(huge.activations, run.activations + ((1 << 15) - 1) * more);
}

// ---- what there must be before a run begins

struct RankOfHost {
  uint64_t host;
  int64_t free;
  std::vector<FreeMemory> groups = {};  // from its own upwards
};

// The refusal of each rank, "" for none.
std::vector<std::string> refusals(const RunConfig& config, const std::vector<RankOfHost>& ranks) {
  return test::run_ranks(static_cast<int>(ranks.size()), [&](const Communicator& world) {
    const RankOfHost& own = ranks[static_cast<size_t>(world.rank())];
    std::vector<FreeMemory> free = {{.bytes = own.free, .of = text("host h", own.host), .place = own.host}};
    free.insert(free.end(), own.groups.begin(), own.groups.end());
    require_free_memory(config, resolve_plan(config), world, free);
  });
}

// Ranks of one host, of one control group, and, as under a scheduler that limits each task and the job, of the group above theirs.
TEST(MemoryCheck, RanksNeedTogetherWhatTheyShare) {
  const RunConfig config = config_of(gpt2(), {2, 1});
  const int64_t each = estimate_memory(config, resolve_plan(config)).tensors(), much = 100 * each;
  const auto group = [](const char* name, int64_t bytes, uint64_t place) {
    return FreeMemory{.bytes = bytes, .of = text("control group ", name), .place = place};
  };
  const auto tasks = [&](int64_t of_task, int64_t of_job) {
    return std::vector<RankOfHost>{{1, much, {group("task0", of_task, 3), group("job", of_job, 9)}},
                                   {1, much, {group("task1", of_task, 4), group("job", of_job, 9)}}};
  };
  for (const std::vector<RankOfHost>& enough : {std::vector<RankOfHost>{{1, 2 * each}, {1, 2 * each}},
                                                {{1, each}, {2, each}},
                                                {{1, much, {group("g", each, 3)}}, {1, much, {group("g", each, 4)}}},
                                                tasks(each, 2 * each)}) {
    EXPECT_THAT(refusals(config, enough), Each(IsEmpty()));
  }
  const std::pair<std::vector<RankOfHost>, const char*> little[] = {
      {{{1, 2 * each - 1}, {1, 2 * each - 1}}, "of host h1 are free"},
      {{{1, each}, {2, each - 1}}, "of host h2 are free"},
      {{{1, much, {group("g", each, 3)}}, {1, much, {group("g", each, 3)}}}, "of control group g are free"},
      {tasks(each, 2 * each - 1), "of control group job are free"},
      {tasks(each / 4, each), "of control group task0 are free"},  // which leaves a rank least
      {tasks(each - 1, each), "of control group job are free"}};
  for (const auto& [ranks, whose] : little)
    EXPECT_THAT(refusals(config, ranks), Each(AllOf(StartsWith("3: "), HasSubstr(whose)))) << "all leave alike";
  EXPECT_THAT(refusals(config, little[0].first).front(), HasSubstr("on each of 2 ranks here"));
}

TEST(MemoryCheck, NamesALargeTeacher) {
  RunConfig config = config_of(gpt2(), {1, 1});
  config.training.teacher = "teacher";
  config.teacher = config.model;
  config.teacher->num_layers = 100;
  const std::string taught = refusals(config, {{1, 1000}}).front();
  EXPECT_THAT(taught, HasSubstr("\nteacher "));
  EXPECT_THAT(taught, HasSubstr(": training.teacher, parallel.tensor\n"));
}

// ---- on a GPU

// The refusal of each rank for a run on GPUs, "" for none.
std::vector<std::string> gpu_refusals(const RunConfig& config, const std::vector<FreeMemory>& gpus) {
  return test::run_ranks(static_cast<int>(gpus.size()), [&](const Communicator& world) {
    require_free_gpu_memory(config, resolve_plan(config), world, {gpus[static_cast<size_t>(world.rank())]});
  });
}

FreeMemory gpu(int64_t free, uint64_t place) { return {.bytes = free, .of = text("GPU ", place, ", H100,"), .place = place}; }

TEST(GpuMemory, HoldsWhatCudaTakesBesideTensorsAndTheHostNothing) {
  const auto estimate = [](const Layout& layout, const std::string& device) {
    const RunConfig config = config_of(qwen3(), layout, {"training.device=" + device, "training.grad_accum=2"});
    return estimate_memory(config, resolve_plan(config));
  };
  const MemoryEstimate host = estimate({1, 1, false}, "cpu"), alone = estimate({1, 1, false}, "cuda");
  EXPECT_FALSE(host.on_gpu());
  EXPECT_TRUE(alone.on_gpu());
  EXPECT_GT(host.program, 0);
  EXPECT_EQ(host.total(), host.tensors() + host.program);
  EXPECT_EQ(alone.program, 0);
  EXPECT_EQ(alone.inputs, 2 * 4 * 64 * 16) << "two micro batches of 4 sequences of 64, four i32 each";
  EXPECT_EQ(alone.tensors(), host.tensors() + alone.inputs);
  EXPECT_EQ(alone.cublaslt, 64 << 20);
  EXPECT_EQ(alone.nccl, 0);
  EXPECT_EQ(alone.total(), alone.tensors() + kCudaContext + alone.cublaslt);
  const MemoryEstimate shared = estimate({2, 2, false}, "cuda");
  EXPECT_EQ(shared.inputs, alone.inputs) << "of a rank";
  EXPECT_EQ(shared.nccl, 3 * kNcclGroup) << "all, tensor and data ranks";
  EXPECT_EQ(shared.total(), shared.tensors() + kCudaContext + shared.cublaslt + shared.nccl);
}

// A micro batch of 4 sequences of 64 tokens.
TEST(GpuMemory, HoldsTheGradientsOfScoresWhereCudnnComputesThem) {
  const auto workspace = [](const char* attention) {
    const RunConfig config = config_of(qwen3(), {1, 1, false}, {"training.device=cuda", attention});
    return estimate_memory(config, resolve_plan(config)).workspace;
  };
  // 8 heads of 32 channels, which share 4 of keys
  const int64_t of_all = 4 * 8 * (2 * 64 * 128 + 2 * 2 * 64 * 32 + 4 * 64) + 1024;
  EXPECT_EQ(workspace("training.attention=cudnn") - workspace("training.attention=own"), of_all);
}

// 2,400 tokens of 50,304 logits are two chunks on a CPU.
TEST(GpuMemory, HoldsLargerChunksOfLogits) {
  const auto workspace = [](const std::string& device) {
    const RunConfig config =
        config_of(gpt2(), {1, 1}, {"training.device=" + device, "model.vocab_size=50304", "training.micro_batch_size=37"});
    return static_cast<double>(dry_pass(config, resolve_plan(config)).workspace);
  };
  EXPECT_NEAR(workspace("cuda") / workspace("cpu"), 37.0 * 64 / 1280, 0.3);
}

TEST(GpuMemory, HoldsBuffersOfEachGroupOfExpertRanks) {
  nlohmann::json model = qwen3();
  model["moe"] = {{"num_experts", 8}, {"num_experts_per_tok", 2}, {"intermediate_size", 256}};
  const auto groups = [&](const Layout& layout) {
    const RunConfig config = config_of(model, layout, {"training.device=cuda"});
    return estimate_memory(config, resolve_plan(config)).nccl / kNcclGroup;
  };
  EXPECT_EQ(groups({2, 1, false, 1}), 1) << "all, which are the data ranks";
  EXPECT_EQ(groups({2, 1, false, 2}), 1) << "all, which are the expert ranks, too";
  EXPECT_EQ(groups({4, 1, false, 2}), 3) << "all, expert, and those that hold the same experts";
}

// Contexts and groups are there already when free memory is asked for.
TEST(GpuMemory, OfRanksThatShareAGpuIsNeededTogether) {
  const RunConfig config = config_of(gpt2(), {2, 1, false}, {"training.device=cuda"});
  const int64_t each = estimate_memory(config, resolve_plan(config)).total() - kCudaContext - kNcclGroup;
  EXPECT_THAT(gpu_refusals(config, {gpu(2 * each, 1), gpu(2 * each, 1)}), Each(IsEmpty()));
  EXPECT_THAT(gpu_refusals(config, {gpu(each, 1), gpu(each, 2)}), Each(IsEmpty())) << "a GPU each";
  const std::vector<std::string> errors = gpu_refusals(config, {gpu(2 * each - 1, 1), gpu(2 * each - 1, 1)});
  EXPECT_THAT(errors, Each(StartsWith("3: "))) << "all leave alike";
  EXPECT_THAT(errors.front(), AllOf(HasSubstr("on each of 2 ranks here"), HasSubstr(" of GPU 1, H100, are free"),
                                    HasSubstr("\nor fewer ranks on one GPU\n")));
  EXPECT_THAT(gpu_refusals(config, {gpu(each, 1), gpu(each - 1, 2)}), Each(AllOf(StartsWith("3: "), HasSubstr("GPU 2"))));
  RunConfig overcommits = config;
  overcommits.training.allow_memory_overcommit = true;
  EXPECT_THAT(gpu_refusals(overcommits, {gpu(1000, 1), gpu(1000, 2)}), Each(IsEmpty()));
}

TEST(GpuMemory, IsWhatExplainPrints) {
  const auto explained = [](const std::vector<std::string>& more) {
    std::vector<std::string> words{"explain", MANTISSA_SOURCE_DIR "/configs/quickstart.json", "--set", "training.device=cuda"};
    words.insert(words.end(), more.begin(), more.end());
    return test::run_mantissa(words, MANTISSA_SOURCE_DIR).output;
  };
  const nlohmann::json memory = nlohmann::json::parse(explained({"--json", "--world", "2"})).at("memory");
  int64_t sum = 0;
  for (const auto& [name, bytes] : memory.items()) sum += name == "total" ? 0 : bytes.get<int64_t>();
  EXPECT_EQ(memory.at("total"), sum);
  EXPECT_EQ(memory.at("program"), 0);
  EXPECT_EQ(memory.at("cuda_context"), kCudaContext);
  EXPECT_EQ(memory.at("nccl"), kNcclGroup);
  const std::string alone = explained({"--wide"});
  EXPECT_THAT(alone, AllOf(HasSubstr("\nGPU memory | total "), HasSubstr(" | CUDA context 536870912 B | cuBLASLt 67108864 B\n")));
  EXPECT_THAT(explained({"--wide", "--world", "2"}),
              AllOf(HasSubstr("\nGPU memory of a rank | total "), HasSubstr(" | cuBLASLt 67108864 B | NCCL 268435456 B\n")));
  const bool supposed = alone.find("warning: there is no GPU here: GEMMs are shown as on sm_80") != std::string::npos;
  EXPECT_EQ(supposed, find_gpus().architecture == 0) << alone;
}

TEST(GpuMemory, OfLibrariesIsNotNeededOnAHost) {
  const RunConfig config = config_of(gpt2(), {1, 1, false}, {"training.device=cuda"});
  const MemoryEstimate memory = estimate_memory(config, resolve_plan(config));
  EXPECT_THAT(refusals(config, {{1, memory.tensors()}}), Each(IsEmpty())) << "a device of the caller, which may be the host";
  EXPECT_THAT(gpu_refusals(config, {gpu(memory.tensors(), 1)}), Each(StartsWith("3: "))) << "cuBLASLt takes some";
}

TEST(MemoryCheck, NamesTheLargestPartsAndTheKeysThatHelp) {
  const auto refusal = [](const std::vector<std::string>& sets) { return refusals(config_of(gpt2(), {1, 1}, sets), {{1, 1000}}).front(); };
  EXPECT_THAT(
      refusal({"training.micro_batch_size=4096"}),
      AllOf(HasSubstr("what makes them smaller:\nactivations "), HasSubstr("training.allow_memory_overcommit=true starts the run anyway"),
            HasSubstr(": training.recompute=full, training.micro_batch_size, training.seq_len\n")));
  EXPECT_THAT(refusal({"training.micro_batch_size=4096", "training.recompute=full"}), Not(HasSubstr("training.recompute=full,")));
  EXPECT_THAT(refusal({"model.hidden_size=4096"}),
              AllOf(HasSubstr("\noptimizer "), HasSubstr(": model.num_layers, model.hidden_size, model.intermediate_size\n")));
  EXPECT_THAT(refusal({"model.hidden_size=4096", "training.accumulation=tree", "training.grad_accum=8"}),
              HasSubstr("smaller:\ngradients "));
  EXPECT_EQ(refusal({"training.allow_memory_overcommit=true"}), "");
}

}  // namespace mantissa::rank_memory_test
