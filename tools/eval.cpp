#include <array>
#include <charconv>
#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <numbers>
#include <utility>

#include "base/file.h"
#include "checkpoint/checkpoint.h"
#include "data/batch.h"
#include "data/open_data.h"
#include "hf/load_model.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "tools/command.h"
#include "tools/evaluation_data.h"
#include "tools/rank_session.h"
#include "tools/report/read_progress.h"
#include "train/evaluate.h"

namespace mantissa::tools {
namespace {

struct EvalArguments : ModelArguments, EvaluationArguments {
  std::optional<std::string> logprobs;
  std::vector<std::string> prompt_ids;
};

// window: none for token ids, which are sequences of their own.
void print_loss(const std::string& name, const SetLoss& sum, bool bytes, std::optional<int64_t> window) {
  if (sum.targets == 0) return void(std::cout << printable(name) << " | no targets\n");
  std::cout << printable(name) << " | loss " << sum.loss << " | perplexity " << std::exp(sum.loss);
  if (bytes) std::cout << " | bits per byte " << sum.loss / std::numbers::ln2;
  std::cout << " | " << sum.targets << " targets" << (window ? text(" | seq_len ", *window) : "") << '\n';
}

// Digits give back the same fp32.
std::string fp32_text(float value) {
  std::array<char, 32> digits{};
  char* const stop = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  return {digits.data(), stop};
}

// Appends the sequences of a batch as lines of JSON: its tokens up to the last one that is a target, and their log-probabilities, null
// where a token is none.
void append_lines(PendingFile& file, const Batch& batch, const std::vector<float>& logprobs) {
  for (int64_t row = 0; row < batch.sequences; ++row) {
    const auto begin = static_cast<size_t>(row * batch.length);
    size_t end = begin + static_cast<size_t>(batch.length);
    while (end > begin && batch.targets[end - 1] == kNoTarget) --end;
    if (end == begin) continue;
    std::string tokens = std::to_string(batch.tokens[begin]), values = "null";
    for (size_t i = begin; i < end; ++i) {
      const bool is_target = batch.targets[i] != kNoTarget;
      tokens += ',' + std::to_string(is_target ? batch.targets[i] : batch.tokens[i + 1]);
      values += ',' + (is_target ? fp32_text(logprobs[i]) : "null");
    }
    const std::string line = R"({"tokens":[)" + tokens + R"(],"logprobs":[)" + values + "]}\n";
    file.append(std::as_bytes(std::span(line)));
  }
}

void score(Gpt& model, const Batch& batch, PendingFile* file, SetLoss& sum) {
  const std::vector<float> logprobs = target_logprobs(model, batch);
  for (const float logprob : logprobs) sum.loss -= double{logprob};
  sum.targets += batch.target_count;
  if (file != nullptr) append_lines(*file, batch, logprobs);
}

// Returns the result of evaluate(), summed over the probabilities of single tokens, which go to `file`, if there is one.
Evaluation score_data(Gpt& model, const ValidationData& data, int64_t rows, std::optional<int64_t> iters, PendingFile* file,
                      CountProgress& progress) {
  require_targets(data, rows, iters);
  Evaluation result;
  for (int set = 0; set < data.sets(); ++set) {
    SetLoss sum{.name = data.name(set)};
    int64_t left = iters.value_or(std::numeric_limits<int64_t>::max());
    for (int64_t first = 0; first < data.windows(set) && left > 0; first += rows, --left) {
      progress.begin_next();
      score(model, data.batch(set, first, rows), file, sum);
    }
    result.sets.push_back(std::move(sum));
  }
  return result;
}

Evaluation with_means(Evaluation sums) {
  for (SetLoss& set : sums.sets) {
    sums.loss += set.loss;
    sums.targets += set.targets;
    set.loss /= static_cast<double>(set.targets);  // NaN without any
  }
  sums.loss /= static_cast<double>(sums.targets);
  return sums;
}

// Evaluates by --logprobs or not. All ranks compute the same; the first one writes, and says how far it is.
Evaluation evaluate_data(const Mesh& mesh, const EvalArguments& arguments, const LoadedModel& loaded, int64_t rows, PendingFile* file) {
  DataConfig config;
  const Data data = validation_data(arguments, loaded, config);
  const bool first_rank = mesh.tensor.rank() == 0;
  if (first_rank)
    for (const std::string& warning : data_warnings(config, data, "--seq-len")) log_warning(warning);
  CountProgress progress("eval", first_rank ? micro_batches_of(arguments, data, rows) : 0);
  if (arguments.logprobs) return with_means(score_data(*loaded.model, data.valid, rows, arguments.iters, file, progress));
  return evaluate(*loaded.model, data.valid, rows, arguments.iters, [&progress] {
    progress.begin_next();
    return false;
  });
}

Evaluation evaluate_prompts(const EvalArguments& arguments, const LoadedModel& loaded, PendingFile* file) {
  const ModelConfig& model = loaded.config.model;
  std::vector<Batch> batches;
  for (const std::string& ids : arguments.prompt_ids) {
    const std::vector<int32_t> sequence = parse_token_ids("--prompt-ids", ids, *model.vocab_size);
    require(sequence.size() >= 2, ExitCode::usage, "--prompt-ids: must have at least two tokens, because the first predicts the second");
    require(std::cmp_less_equal(sequence.size(), model.max_position_embeddings + 1), ExitCode::usage, "--prompt-ids: must have at most ",
            model.max_position_embeddings + 1, " tokens for the ", model.max_position_embeddings, " positions of the model, got ",
            sequence.size());
    batches.push_back(batch_of(sequence));
  }
  Evaluation sums;
  SetLoss& sum = sums.sets.emplace_back();
  for (const Batch& batch : batches) score(*loaded.model, batch, file, sum);
  return with_means(std::move(sums));
}

void evaluate_on(const Mesh& mesh, const EvalArguments& arguments) {
  const LoadedModel loaded = load_model(arguments.checkpoint, device_of(arguments.device), mesh,
                                        {.dtype = dtype_of(arguments.dtype), .precision = arguments.precision});
  const int64_t rows = rows_of(arguments, loaded);
  const bool first_rank = mesh.tensor.rank() == 0;
  if (arguments.chat_template && first_rank) {
    const std::string warning =
        chat_template_warning(loaded, choice_of<ChatTemplate>(*arguments.chat_template).value(), loaded.config.data.chat_date);
    if (!warning.empty()) log_warning(warning);
  }
  std::optional<PendingFile> file;
  if (arguments.logprobs && first_rank) file.emplace(*arguments.logprobs);
  PendingFile* const out = file ? &*file : nullptr;
  const Evaluation result =
      arguments.prompt_ids.empty() ? evaluate_data(mesh, arguments, loaded, rows, out) : evaluate_prompts(arguments, loaded, out);
  if (file) {
    file->sync();
    file->publish();
  }
  const bool bytes = loaded.tokenizer && loaded.tokenizer->kind() == TokenizerKind::byte;
  if (first_rank) {
    std::cout.precision(6);
    const std::optional<int64_t> window = arguments.prompt_ids.empty() ? std::optional(window_of(arguments, loaded)) : std::nullopt;
    if (result.sets.size() > 1)
      for (const SetLoss& set : result.sets) print_loss(set.name, set, bytes, window);
    print_loss(loaded.path.string() + precision_text(arguments.precision), {.name = "", .loss = result.loss, .targets = result.targets},
               bytes, window);
  }
  require(std::isfinite(result.loss), ExitCode::numerical, "the loss is not finite");
}

ExitCode run_eval(const EvalArguments& arguments) {
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  check_evaluation(arguments);
  require(arguments.prompt_ids.empty() || (!arguments.data && !arguments.iters && !arguments.chat_template && !arguments.seq_len),
          ExitCode::usage, "--prompt-ids replaces the data and excludes --data, --chat-template, --seq-len and --iters");
  if (arguments.logprobs) require_output_file(*arguments.logprobs);
  on_tensor_ranks(arguments, [&](const Mesh& mesh) { evaluate_on(mesh, arguments); });
  return ExitCode::ok;
}

}  // namespace

Command eval_command() {
  const auto arguments = std::make_shared<EvalArguments>();
  std::vector<Option> options = {checkpoint_option(arguments->checkpoint)};
  for (const Option& option : evaluation_options(*arguments)) options.push_back(option);
  const std::vector<Option> more = {
      {"--prompt-ids", &arguments->prompt_ids, "token ids to evaluate instead, as in 1,2,3; repeatable, a sequence each"},
      {"--logprobs", &arguments->logprobs,
       "file for the natural log-probability of each token: per sequence (or window of --seq-len "
       "tokens) a line {\"tokens\": [ids], \"logprobs\": [null, ...]}"},
      dtype_option(arguments->dtype),
      precision_option(arguments->precision),
      precision_file_option(arguments->precision_files),
      device_option(arguments->device),
      threads_option(arguments->threads),
      tensor_option(arguments->tensor)};
  options.insert(options.end(), more.begin(), more.end());
  return {.name = "eval",
          .summary = "loss of a checkpoint on validation data",
          .example = "mantissa eval runs/quickstart\nmantissa eval runs/quickstart/checkpoints/step-00000350 --data README.md",
          .options = options,
          .run =
              [arguments] {
                add_precision_files(arguments->precision_files, arguments->precision);
                return run_eval(*arguments);
              },
          .many_ranks = true};
}

}  // namespace mantissa::tools
