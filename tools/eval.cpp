#include <algorithm>
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
#include "mantissa/base/integers.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "tools/command.h"
#include "tools/rank_session.h"
#include "tools/report/read_progress.h"
#include "train/evaluate.h"

namespace mantissa::tools {
namespace {

struct EvalArguments : ModelArguments {
  std::optional<std::string> data, chat_template, logprobs;
  std::vector<std::string> prompt_ids;
  std::optional<int64_t> iters, micro_batch_size, seq_len;
};

// Checked here, because the data's own message tells how to set a key, which eval does not take.
void require_files(const DataConfig& config) {
  std::vector<std::string> patterns;
  if (config.path) patterns.push_back(*config.path);
  for (const WeightedPath& set : config.valid) patterns.push_back(set.path);
  for (const std::string& pattern : patterns) {
    try {
      expand_paths(pattern);
    } catch (const Error& error) {
      fail(error.code(), error.what(), "; give other data with --data FILE");
    }
  }
}

// Returns the tokens of a window, or of a row of examples: those of the option, else of the run; a folder of Hugging Face has none of its
// own, and its configuration 1,024 or the model's positions.
int64_t window_of(const EvalArguments& arguments, const LoadedModel& loaded) {
  const int64_t positions = loaded.config.model.max_position_embeddings,
                length = arguments.seq_len.value_or(loaded.config.training.seq_len);
  require(length <= positions, ExitCode::usage, "--seq-len: must be at most the ", positions, " positions of ", loaded.path.string(),
          ", got ", length);
  return length;
}

// Throws if the validation data are rows of examples that other options would fill otherwise: the run was trained on the rest.
void require_held_out(const EvalArguments& arguments, const LoadedModel& loaded, const Data& data) {
  const RunConfig& run = loaded.config;
  if (arguments.data || !run.data.path || !data.files.front().has_examples()) return;
  const bool other_rows = window_of(arguments, loaded) != run.training.seq_len;
  const bool other_text = arguments.chat_template && choice_of<ChatTemplate>(*arguments.chat_template) != run.data.chat_template;
  require(!other_rows && !other_text, ExitCode::usage, other_rows ? "--seq-len" : "--chat-template",
          ": the run holds out the examples of the last rows of training.seq_len ", run.training.seq_len, " of data.path ", *run.data.path,
          ", but other rows would contain examples that it was trained on; name the data to evaluate with --data");
}

Data validation_data(const DataConfig& config, const EvalArguments& arguments, const LoadedModel& loaded) {
  require_files(config);
  Data data = open_validation_data(config, {.seq_len = window_of(arguments, loaded),
                                            .vocab_size = loaded.config.model.vocab_size,
                                            .seed = loaded.config.training.seed,
                                            .tokenizer = loaded.tokenizer});
  require(data.valid.sets() > 0, ExitCode::usage, "the configuration of ", loaded.path.string(),
          " has no validation data; give --data FILE");
  require_held_out(arguments, loaded, data);
  require(!arguments.chat_template || has_conversations(data), ExitCode::usage,
          "--chat-template: renders \"messages\", which the data does not have; leave it out, or name conversations with --data");
  return data;
}

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
  DataConfig config = loaded.config.data;
  if (arguments.data) {
    config.path.reset();
    config.train.clear();
    config.valid = {WeightedPath{.path = *arguments.data}};
  }
  if (arguments.chat_template) config.chat_template = choice_of<ChatTemplate>(*arguments.chat_template);
  const Data data = validation_data(config, arguments, loaded);
  const bool first_rank = mesh.tensor.rank() == 0;
  if (first_rank)
    for (const std::string& warning : data_warnings(config, data, "--seq-len")) log_warning(warning);
  int64_t micro_batches = 0;
  for (int set = 0; set < data.valid.sets() && first_rank; ++set)
    micro_batches += std::min(ceil_div(data.valid.windows(set), rows), arguments.iters.value_or(std::numeric_limits<int64_t>::max()));
  CountProgress progress("eval", micro_batches);
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
  const int64_t rows = arguments.micro_batch_size.value_or(loaded.config.training.micro_batch_size);
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
  for (const auto& [name, value] :
       {std::pair{"--micro-batch-size", arguments.micro_batch_size}, {"--iters", arguments.iters}, {"--seq-len", arguments.seq_len}})
    require(value.value_or(1) > 0, ExitCode::usage, name, ": must be positive, got ", value.value_or(1));
  require(arguments.prompt_ids.empty() || (!arguments.data && !arguments.iters && !arguments.chat_template && !arguments.seq_len),
          ExitCode::usage, "--prompt-ids replaces the data and excludes --data, --chat-template, --seq-len and --iters");
  if (arguments.logprobs) require_output_file(*arguments.logprobs);
  on_tensor_ranks(arguments, [&](const Mesh& mesh) { evaluate_on(mesh, arguments); });
  return ExitCode::ok;
}

}  // namespace

Command eval_command() {
  const auto arguments = std::make_shared<EvalArguments>();
  return {.name = "eval",
          .summary = "loss of a checkpoint on validation data",
          .example = "mantissa eval runs/quickstart\nmantissa eval runs/quickstart/checkpoints/step-00000350 --data README.md",
          .options = {checkpoint_option(arguments->checkpoint),
                      {"--data", &arguments->data, "file or glob to evaluate on; default: the validation data of the run"},
                      {"--chat-template", &arguments->chat_template,
                       "template of JSONL with messages, as data.chat_template; default: that of the run", choice_names<ChatTemplate>()},
                      {"--seq-len", &arguments->seq_len,
                       "tokens of a window; default: training.seq_len of the run; of a Hugging Face folder 1024, or its positions "
                       "if they are fewer"},
                      {"--iters", &arguments->iters, "micro batches; default: the whole validation data"},
                      {"--micro-batch-size", &arguments->micro_batch_size, "sequences at a time; default: as in training"},
                      {"--prompt-ids", &arguments->prompt_ids, "token ids to evaluate instead, as in 1,2,3; repeatable, a sequence each"},
                      {"--logprobs", &arguments->logprobs,
                       "file for the natural log-probability of each token: per sequence (or window of --seq-len "
                       "tokens) a line {\"tokens\": [ids], \"logprobs\": [null, ...]}"},
                      dtype_option(arguments->dtype),
                      precision_option(arguments->precision),
                      device_option(arguments->device),
                      threads_option(arguments->threads),
                      tensor_option(arguments->tensor)},
          .run = [arguments] { return run_eval(*arguments); },
          .many_ranks = true};
}

}  // namespace mantissa::tools
