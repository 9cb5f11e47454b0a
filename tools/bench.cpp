#include <cstdio>
#include <memory>

#include "bench_harness.h"
#include "command.h"
#include "mantissa/base/parallel.h"
#include "mantissa/base/printable.h"
#include "mantissa/train/checkpoint.h"
#include "mantissa/train/report.h"
#include "mantissa/train/training_step.h"

namespace mantissa::tools {
namespace {

struct Arguments {
  BenchOptions bench;
  int threads = 0;
  ConfigSources config;
};

// A batch of uniform random tokens: speed does not depend on what they say.
Batch random_batch(int64_t sequences, int64_t length, int64_t vocab, uint64_t seed) {
  const auto n = static_cast<size_t>(sequences * length);
  Batch batch{.sequences = sequences,
              .length = length,
              .tokens = std::vector<int32_t>(n),
              .targets = std::vector<int32_t>(n),
              .positions = std::vector<int32_t>(n),
              .segment_starts = std::vector<int32_t>(n, 0),
              .target_count = sequences * length,
              .samples = {}};
  for (size_t i = 0; i < n; ++i) {
    const auto words = random_words({.seed = seed, .stream = RngStream::test}, 0, i);
    batch.tokens[i] = static_cast<int32_t>(words[0] % static_cast<uint64_t>(vocab));
    batch.targets[i] = static_cast<int32_t>(words[1] % static_cast<uint64_t>(vocab));
    batch.positions[i] = static_cast<int32_t>(static_cast<int64_t>(i) % length);
  }
  return batch;
}

RunConfig configuration(const ConfigSources& sources) {
  RunConfig config = load_run_config(sources, Inputs::unchecked).config;
  require(config.model.vocab_size.has_value(), ExitCode::usage,
          "model.vocab_size: is not set, and no data is read here; add --set model.vocab_size=N");
  return config;
}

// Optimizer steps of the configured model on random tokens against the GEMM floor: the FLOPs of the model formula at the ceiling's rate.
ExitCode bench_train(const Arguments& arguments) {
  const RunConfig config = configuration(arguments.config);
  set_num_threads(config.training.threads);
  const auto device = open_device(config.training.device);
  Gpt model(config.model, *device, resolve_plan(config), {.recompute = config.training.recompute});
  model.parameters().initialise(config.training.seed);
  Optimizer optimizer(model.parameters(), config.optimizer);
  GradientAccumulator accumulator(model.parameters(), config.training.accumulation, *config.training.grad_accum);
  const int64_t tokens = config.training.tokens_per_step();
  const Batch batch =
      random_batch(*config.training.global_batch_size, config.training.seq_len, *config.model.vocab_size, config.training.seed);
  Harness harness(*device, arguments.bench);
  const Measurement result = harness.measure(
      {.bench = "train." + printable(*config.logging.run_name),
       .shape = text("B", config.training.micro_batch_size, " T", config.training.seq_len, " accum", *config.training.grad_accum),
       .dtype = config.precision.dtype,
       .flops = training_flops_per_token(model_shape(config.model), config.training.seq_len) * static_cast<double>(tokens),
       .run = [&] { training_step(model, optimizer, accumulator, batch, config.training.micro_batch_size, 1e-4); }});
  std::printf("%s: %.3f of the GEMM floor's speed, %.1f ms a step, %.0f tokens/s, %s, %s\n", printable(*config.logging.run_name).c_str(),
              result.ratio.median, result.seconds.median * 1e3, static_cast<double>(tokens) / result.seconds.median,
              gemm_instruction_set().c_str(), count_text(num_threads(), "thread").c_str());
  return ExitCode::ok;
}

std::vector<Option> bench_options(Arguments& arguments) {
  return {{.name = "--time-budget", .target = &arguments.bench.time_budget, .description = "seconds; the report is complete in any case"},
          {.name = "--json", .target = &arguments.bench.json, .description = "append one JSON object a line to this file"}};
}

using Bench = void (*)(Backend&, const BenchOptions&);

Command device_bench(const std::string& name, const std::string& summary, Bench run) {
  const auto arguments = std::make_shared<Arguments>();
  std::vector<Option> options = bench_options(*arguments);
  options.push_back({.name = "--filter", .target = &arguments->bench.filter, .description = "only benches whose name contains this"});
  options.push_back(threads_option(arguments->threads));
  return {.name = name,
          .summary = summary,
          .example = "mantissa bench " + name + " --time-budget 60 --json results.jsonl",
          .options = options,
          .run = [arguments, run] {
            use_threads(arguments->threads);
            const auto device = make_cpu_backend();
            run(*device, arguments->bench);
            return ExitCode::ok;
          }};
}

Command train_bench() {
  const auto arguments = std::make_shared<Arguments>();
  std::vector<Option> options = config_options(arguments->config);
  for (Option& option : bench_options(*arguments)) options.push_back(std::move(option));
  return {.name = "train",
          .summary = "training steps on random tokens against the GEMM floor",
          .example =
              "mantissa bench train configs/gpt2-124m.json --set training.micro_batch_size=4 --set training.seq_len=64 "
              "--set training.global_batch_size=4",
          .options = options,
          .run = [arguments] { return bench_train(*arguments); }};
}

}  // namespace

Command bench_command() {
  return {.name = "bench",
          .summary = "measure speed as a ratio to what this machine can do",
          .example =
              "mantissa bench kernels\nmantissa bench gemm --time-budget 20 --threads 2\n"
              "mantissa bench train configs/quickstart.json --time-budget 20",
          .subcommands = {device_bench("kernels", "row kernels against a parallel memory copy", bench_kernels),
                          device_bench("gemm", "matrix products of GPT-2 shapes against oneDNN's 2048^3", bench_gemm),
                          device_bench("attention", "attention against the GEMM ceiling", bench_attention), train_bench()}};
}

}  // namespace mantissa::tools
