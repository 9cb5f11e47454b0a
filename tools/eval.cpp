#include <cmath>
#include <iostream>
#include <memory>
#include <numbers>

#include "command.h"
#include "mantissa/base/log.h"
#include "mantissa/base/printable.h"
#include "mantissa/train/checkpoint.h"
#include "mantissa/train/evaluate.h"
#include "rank_session.h"

namespace mantissa::tools {
namespace {

struct EvalArguments {
  std::string checkpoint;
  std::optional<std::string> data;
  std::optional<int64_t> iters, micro_batch_size;
  int threads = 0;
  int64_t tensor = 1;
};

Data validation_data(const EvalArguments& arguments, const LoadedModel& loaded) {
  DataConfig config = loaded.config.data;
  if (arguments.data) {
    config.path.reset();
    config.train.clear();
    config.valid = {WeightedPath{.path = *arguments.data}};
  }
  Data data = open_validation_data(config, {.seq_len = loaded.config.training.seq_len,
                                            .vocab_size = loaded.config.model.vocab_size,
                                            .seed = loaded.config.training.seed,
                                            .tokenizer = loaded.tokenizer});
  require(data.valid.sets() > 0, ExitCode::usage, "the configuration of ", loaded.path.string(),
          " has no validation data; give --data FILE");
  return data;
}

void print_loss(const std::string& name, double loss, int64_t targets, bool bytes) {
  std::cout << printable(name) << " | loss " << loss << " | perplexity " << std::exp(loss);
  if (bytes) std::cout << " | bits per byte " << loss / std::numbers::ln2;
  std::cout << " | " << targets << " targets\n";
}

void evaluate_on(const TensorRanks& ranks, const EvalArguments& arguments) {
  const LoadedModel loaded = load_model(arguments.checkpoint, ranks);
  const Data data = validation_data(arguments, loaded);
  const int64_t rows = arguments.micro_batch_size.value_or(loaded.config.training.micro_batch_size);
  const Evaluation result = evaluate(*loaded.model, data.valid, rows, arguments.iters);
  const bool bytes = loaded.tokenizer && loaded.tokenizer->kind() == TokenizerKind::byte;
  if (ranks.group.rank() == 0) {
    std::cout.precision(6);
    if (result.sets.size() > 1) {
      for (const SetLoss& set : result.sets) print_loss(set.name, set.loss, set.targets, bytes);
    }
    print_loss(loaded.path.string(), result.loss, result.targets, bytes);
  }
  require(std::isfinite(result.loss), ExitCode::numerical, "the loss is not finite");
}

ExitCode run_eval(const EvalArguments& arguments) {
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  const int64_t micro_batch_size = arguments.micro_batch_size.value_or(0);
  require(!arguments.micro_batch_size || micro_batch_size > 0, ExitCode::usage, "--micro-batch-size: must be positive, got ",
          micro_batch_size);
  require(!arguments.iters || *arguments.iters > 0, ExitCode::usage, "--iters: must be positive, got ", arguments.iters.value_or(0));
  use_threads(arguments.threads);
  on_tensor_ranks(arguments.tensor, arguments.checkpoint, [&](const TensorRanks& ranks) { evaluate_on(ranks, arguments); });
  return ExitCode::ok;
}

}  // namespace

Command eval_command() {
  const auto arguments = std::make_shared<EvalArguments>();
  return {.name = "eval",
          .summary = "loss of a checkpoint on validation data",
          .example = "mantissa eval runs/quickstart\nmantissa eval runs/quickstart/checkpoints/step-00000200 --data README.md",
          .options = {{.name = "CHECKPOINT",
                       .target = &arguments->checkpoint,
                       .description = "a checkpoint, or a run folder: the one that `latest` names, else its newest valid one",
                       .required = true},
                      {.name = "--data",
                       .target = &arguments->data,
                       .description = "file or glob to evaluate on; default: the validation data of the run"},
                      {.name = "--iters", .target = &arguments->iters, .description = "micro batches; default: the whole validation data"},
                      {.name = "--micro-batch-size",
                       .target = &arguments->micro_batch_size,
                       .description = "sequences at a time; default: as in training"},
                      threads_option(arguments->threads),
                      tensor_option(arguments->tensor)},
          .run = [arguments] { return run_eval(*arguments); },
          .many_ranks = true};
}

}  // namespace mantissa::tools
