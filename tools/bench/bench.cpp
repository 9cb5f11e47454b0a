#include <cmath>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "checkpoint/checkpoint.h"
#include "config/open_device.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/text.h"
#include "mantissa/plan/estimate.h"
#include "mantissa/train/load_config.h"
#include "plan/cost.h"
#include "tools/bench/bench_harness.h"
#include "tools/command.h"
#include "tools/rank_session.h"
#include "train/training_step.h"

namespace mantissa::tools {
namespace {

struct BenchArguments {
  BenchOptions bench;
  int threads = 0;
  std::string device = choice_name(DeviceChoice::automatic);
  ConfigSources config;
  std::vector<std::string> against;
  bool alone = false, without_update = false, subnormal = false;
  GenerationShape generation;
};

// Makes a batch of uniform random tokens: speed does not depend on their values.
Batch random_batch(int64_t sequences, int64_t length, int64_t vocab, uint64_t seed) {
  const auto n = static_cast<size_t>(sequences * length);
  Batch batch{.sequences = sequences,
              .length = length,
              .tokens = std::vector<int32_t>(n),
              .targets = std::vector<int32_t>(n),
              .positions = std::vector<int32_t>(n),
              .segment_starts = std::vector<int32_t>(n, 0),
              .target_count = sequences * length,
              .all_count = true,
              .samples = {}};
  for (size_t i = 0; i < n; ++i) {
    const auto words = random_words({.seed = seed, .stream = RngStream::test}, 0, i);
    batch.tokens[i] = static_cast<int32_t>(words[0] % static_cast<uint64_t>(vocab));
    batch.targets[i] = static_cast<int32_t>(words[1] % static_cast<uint64_t>(vocab));
    batch.positions[i] = static_cast<int32_t>(static_cast<int64_t>(i) % length);
  }
  return batch;
}

RunConfig configuration(const ConfigSources& sources, const Launch& launch) {
  RunConfig config = load_run_config(sources, Inputs::unchecked, launch.world).config;
  set_vocabulary(config);
  share_host(launch);
  return config;
}

// Returns the configuration of --against, if given.
std::optional<RunConfig> opponent(ConfigSources sources, const std::vector<std::string>& against, const Launch& launch) {
  if (against.empty()) return std::nullopt;
  sources.sets.insert(sources.sets.end(), against.begin(), against.end());
  try {
    return configuration(sources, launch);
  } catch (const Error& error) {
    fail(error.code(), "with --against: ", error.what());
  }
}

// Runs optimizer steps of a configured model on random tokens, of which each rank has its share.
class TrainingRun {
 public:
  TrainingRun(const RunConfig& config, const Mesh& mesh)
      : config_(config),
        device_(opened(config.training)),
        teacher_(make_teacher(config, *device_, mesh)),
        model_(config.model, *device_, resolve_plan(config), training_options(config, mesh)),
        optimizer_(model_.parameters(), config.optimizer, mesh, {}, {.directions = model_.compute(), .seed = config.training.seed}),
        accumulator_(model_.parameters(), config.training.accumulation, *config.training.grad_accum),
        batch_(random_batch(*config.training.global_batch_size / mesh.data.size(), config.training.seq_len, *config.model.vocab_size,
                            config.training.seed + static_cast<uint64_t>(mesh.data.rank()))) {
    optimizer_.initialize(config.training.seed);
    if (!teacher_) return;
    for (const ParameterShard& shard : teacher_->parameters().whole_shards()) {  // random weights, like the student's
      const Tensor master = teacher_->parameters().room_for_master(shard);
      teacher_->parameters().draw_initial(shard, config.training.seed + 1, master);
      teacher_->parameters().store(shard, master);
    }
  }

  Backend& device() { return *device_; }

  // Larger weights of q and k and in front of the logits: those then have a standard deviation of 22, attention scores without qk_norm one
  // of 31, and several percent of the gradients of logits are subnormal, as after some steps at a learning rate that is far too high.
  void spread_softmax() {
    const double usual = config_.model.init_std * std::sqrt(static_cast<double>(config_.model.hidden_size));
    for (const Optimizer::State& state : optimizer_.states()) {
      const std::string& name = state.shard.of->name;
      const double factor = name.ends_with(".attn.qkv.weight") ? 5.6 / usual : name == "final_norm.weight" ? 22 / usual : 1.0;
      std::vector<float> weights = to_host<float>(state.master);
      for (float& weight : weights) weight *= static_cast<float>(factor);
      device_->upload(weights.data(), state.master);
    }
    optimizer_.store_masters();
  }

  // `name` names the workload. without_update: only forward and backward of a step.
  Workload workload(const std::string& name, bool without_update = false) {
    const auto& training = config_.training;
    const auto tokens = static_cast<double>(training.tokens_per_step());
    return {.bench = name,
            .shape = text("B", training.micro_batch_size, " T", training.seq_len, " accum", *training.grad_accum),
            .dtype = config_.precision.dtype,
            .flops = step_flops_per_token(config_) * tokens,
            .run = [this, without_update] { without_update ? gradients() : step(); },
            .tokens = tokens};
  }

 private:
  static std::unique_ptr<Backend> opened(const TrainingConfig& training) {
    set_num_threads(training.threads);
    return make_backend(training.device);
  }

  void step() {
    set_num_threads(config_.training.threads);
    training_step(model_, optimizer_, accumulator_, batch_, config_.training.micro_batch_size, 1e-4,
                  {.routers = RouterFigures::counts, .teaching = teaching(config_, teacher_.get())});
    device_->synchronize();
  }

  void gradients() {
    set_num_threads(config_.training.threads);
    RouterStatistics routing(RouterFigures::counts, config_.model.expert_layers() * accumulator_.losses().elements());
    model_.parameters().reset_gradients();
    const int64_t rows = config_.training.micro_batch_size;
    for (int64_t i = 0; i < batch_.sequences; i += rows)
      forward_and_backward(model_, to_device(model_, batch_, i, rows), batch_.target_count, routing, teaching(config_, teacher_.get()));
    device_->synchronize();
  }

  RunConfig config_;
  std::unique_ptr<Backend> device_;
  std::unique_ptr<Gpt> teacher_;
  Gpt model_;
  Optimizer optimizer_;
  GradientAccumulator accumulator_;
  Batch batch_;
};

void check(const BenchArguments& arguments, const Launch& launch) {
  require(!arguments.without_update || launch.world == 1, ExitCode::usage, "--without-update is for one process, and this is ",
          describe(launch));
  require(!arguments.subnormal || (launch.world == 1 && arguments.against.empty() && !arguments.alone), ExitCode::usage,
          "--subnormal is for one process, without --against and --alone");
  require(arguments.against.empty() || launch.world == 1, ExitCode::usage, "--against is for one process, and this is ", describe(launch),
          "; --alone compares ranks with one process");
  if (!arguments.alone) return;
  require(launch.world > 1 && launch.local_size == launch.world, ExitCode::usage,
          "--alone compares several ranks on one host with one process, and this is ", describe(launch));
}

// The FLOPs of the model formula at the GEMM ceiling's rate are the floor; --against and --alone name another opponent.
void measure_training(const BenchArguments& arguments, const RunConfig& config, const std::optional<RunConfig>& other_config,
                      const Communicator& world) {
  const std::string name = arguments.subnormal ? "subnormal" : printable(*config.logging.run_name);
  TrainingRun run(config, make_mesh(world, config.parallel.ranks()));
  Harness harness(run.device(), arguments.bench, world);
  std::optional<TrainingRun> other;
  Workload workload = run.workload("train." + name, arguments.without_update), against;
  if (arguments.alone) {
    RunConfig alone = config;  // one process with the threads of all ranks runs the same step, in as many micro batches
    const int threads = config.training.threads > 0 ? config.training.threads : num_threads();
    alone.training.threads = threads * static_cast<int>(config.parallel.world());
    alone.training.micro_batch_size *= config.parallel.data;
    alone.parallel = {.data = 1};
    against = {.bench = "one process", .shape = {}, .run = [] {}, .tokens = workload.tokens};  // for which the other ranks wait
    if (world.rank() == 0) against.run = other.emplace(alone, Mesh()).workload(against.bench).run;
  } else if (arguments.subnormal) {
    run.spread_softmax();
    against = other.emplace(config, Mesh()).workload("fresh weights", arguments.without_update);
  } else if (other_config) {
    against = other.emplace(*other_config, Mesh()).workload(printable(joined(arguments.against, " ")), arguments.without_update);
  }
  if (against.run) workload.against = &against;
  const Measurement result = harness.measure(workload);
  if (world.rank() > 0) return;
  set_num_threads(config.training.threads);
  const std::string reference =
      workload.against ? text("the speed with ", against.bench, " in ", result.slices, " slices") : "the GEMM floor's speed";
  const double flops = *step_time(config, resolve_plan(config), {.flops = 1.0, .link = {}}).compute / result.seconds.median;
  std::printf("%s: %.3f of %s, %.1f ms %s, %.0f tokens/s, %.3g FLOP/s of each rank, %s, %s%s\n", name.c_str(), result.ratio.median,
              reference.c_str(), result.seconds.median * 1e3, arguments.without_update ? "for forward and backward" : "a step",
              workload.tokens / result.seconds.median, flops, machine_text(run.device()).c_str(),
              world.size() > 1 ? text(world.size(), " ranks x ").c_str() : "", count_text(num_threads(), "thread").c_str());
}

ExitCode bench_train(const BenchArguments& arguments) {
  const Launch launch = launch_from_environment();
  check(arguments, launch);
  const RunConfig config = configuration(arguments.config, launch);
  const std::optional<RunConfig> other = opponent(arguments.config, arguments.against, launch);
  RankSession session(launch, config);
  session.run([&] { measure_training(arguments, config, other, session.world()); });
  return ExitCode::ok;
}

Option time_budget_option(BenchOptions& bench) {
  return {"--time-budget", &bench.time_budget, "seconds; the report is complete in any case"};
}

Option json_option(BenchOptions& bench) { return {"--json", &bench.json, "append one JSON object a line to this file"}; }

Option against_option(std::vector<std::string>& against, const std::string& instead) {
  return {"--against", &against,
          "KEY=VALUE as for --set: compare with the same run with this setting" + instead +
              "; both take turns until the time budget is used up; repeatable: all are settings of that one run"};
}

Option filter_option(std::string& filter) {
  return {"--filter", &filter, "only benches whose name, dtype and shape contain this, as in 'gemm.fprop bf16 256x768->2304'"};
}

Command device_bench(const std::string& name, const std::string& summary, void (*run)(Backend&, const BenchOptions&)) {
  const auto arguments = std::make_shared<BenchArguments>();
  return {.name = name,
          .summary = summary,
          .example = "mantissa bench " + name + " --time-budget 60 --json results.jsonl",
          .options = {time_budget_option(arguments->bench), json_option(arguments->bench), filter_option(arguments->bench.filter),
                      device_option(arguments->device), threads_option(arguments->threads)},
          .run = [arguments, run] {
            use_threads(arguments->threads);
            const auto device = device_of(arguments->device);
            run(*device, arguments->bench);
            return ExitCode::ok;
          }};
}

Command comm_bench() {
  const auto arguments = std::make_shared<BenchArguments>();
  return {.name = "comm",
          .summary = "collectives of several ranks against a copy within each",
          .example = "mantissa launch --nproc-per-node 2 -- bench comm --json results.jsonl",
          .options = {filter_option(arguments->bench.filter), json_option(arguments->bench), threads_option(arguments->threads)},
          .run =
              [arguments] {
                const Launch launch = launch_from_environment();
                RunConfig config;
                config.training.threads = arguments->threads;
                config.training.device = DeviceChoice::cpu;
                share_host(launch);
                use_threads(config.training.threads);
                const auto device = make_backend("cpu");
                RankSession session(launch, config);
                session.run([&] { bench_comm(session.world(), *device, arguments->bench); });
                return ExitCode::ok;
              },
          .many_ranks = true};
}

Command train_bench() {
  const auto arguments = std::make_shared<BenchArguments>();
  return {.name = "train",
          .summary = "training steps on random tokens against the GEMM floor or other settings",
          .example =
              "mantissa bench train configs/gpt2-124m.json --set training.micro_batch_size=4 --set training.seq_len=64 "
              "--set training.global_batch_size=4\n"
              "mantissa bench train configs/quickstart.json --set precision.recipe=mxfp8 --against precision.recipe=high\n"
              "mantissa launch --nproc-per-node 2 -- bench train configs/quickstart.json --alone",
          .options = config_options(
              arguments->config,
              {time_budget_option(arguments->bench),
               json_option(arguments->bench),
               against_option(arguments->against, ", instead of the GEMM floor"),
               {"--alone", &arguments->alone, "compare several ranks on one host with one process that has the threads of all"},
               {"--without-update", &arguments->without_update, "only forward and backward of a step; for one process"},
               {"--subnormal", &arguments->subnormal,
                "train.subnormal: compare a run from weights that cause many subnormals with one from fresh weights"}}),
          .run = [arguments] { return bench_train(*arguments); },
          .many_ranks = true};
}

ExitCode run_generate_bench(const BenchArguments& arguments) {
  const GenerationShape& shape = arguments.generation;
  require(shape.batch > 0, ExitCode::usage, "--batch: must be positive, got ", shape.batch);
  require(shape.new_tokens > 0, ExitCode::usage, "--new-tokens: must be positive, got ", shape.new_tokens);
  const RunConfig config = configuration(arguments.config, {});
  set_num_threads(config.training.threads);
  const Opponent other{printable(joined(arguments.against, " ")), opponent(arguments.config, arguments.against, {})};
  bench_generate(config, shape, other, arguments.bench);
  return ExitCode::ok;
}

Command generate_bench() {
  const auto arguments = std::make_shared<BenchArguments>();
  return {.name = "generate",
          .summary = "generation from random weights against a parallel memory copy",
          .example =
              "mantissa bench generate configs/gpt2-124m.json\n"
              "mantissa bench generate configs/qwen3-0.6b.json --set precision.recipe=mxfp8 --against precision.recipe=high",
          .options = config_options(arguments->config, {time_budget_option(arguments->bench),
                                                        json_option(arguments->bench),
                                                        against_option(arguments->against, ""),
                                                        {"--batch", &arguments->generation.batch, "prompts that are continued at once"},
                                                        {"--new-tokens", &arguments->generation.new_tokens, "tokens of each"}}),
          .run = [arguments] { return run_generate_bench(*arguments); }};
}

}  // namespace

Command bench_command() {
  return {.name = "bench",
          .summary = "measure speed as a ratio to what this machine can do",
          .example =
              "mantissa bench kernels\nmantissa bench gemm --time-budget 20 --threads 2\n"
              "mantissa bench train configs/quickstart.json --time-budget 20",
          .subcommands = {device_bench("kernels", "row kernels against a memory copy", bench_kernels),
                          device_bench("gemm", "matmuls of models' shapes against a large square one", bench_gemm),
                          device_bench("attention", "attention against the GEMM ceiling", bench_attention),
                          device_bench("moe", "GEMMs of groups of rows against one as large, and what moves the rows", bench_moe),
                          train_bench(), generate_bench(), comm_bench()}};
}

}  // namespace mantissa::tools
