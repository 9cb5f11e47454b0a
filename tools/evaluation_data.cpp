#include "tools/evaluation_data.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "data/batch.h"
#include "mantissa/base/integers.h"

namespace mantissa::tools {
namespace {

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

// Throws if the validation data are rows of examples that other options would fill otherwise: the run was trained on the rest.
void require_held_out(const EvaluationArguments& arguments, const LoadedModel& loaded, const Data& data) {
  const RunConfig& run = loaded.config;
  if (arguments.data || !run.data.path || !data.files.front().has_examples()) return;
  const bool other_rows = window_of(arguments, loaded) != run.training.seq_len;
  const bool other_text = arguments.chat_template && choice_of<ChatTemplate>(*arguments.chat_template) != run.data.chat_template;
  require(!other_rows && !other_text, ExitCode::usage, other_rows ? "--seq-len" : "--chat-template",
          ": the run holds out the examples of the last rows of training.seq_len ", run.training.seq_len, " of data.path ", *run.data.path,
          ", but other rows would contain examples that it was trained on; name the data to evaluate with --data");
}

}  // namespace

std::vector<Option> evaluation_options(EvaluationArguments& arguments) {
  return {{"--data", &arguments.data, "file or glob to evaluate on; default: the validation data of the run"},
          {"--chat-template", &arguments.chat_template, "template of JSONL with messages, as data.chat_template; default: that of the run",
           choice_names<ChatTemplate>()},
          {"--seq-len", &arguments.seq_len,
           "tokens of a window; default: training.seq_len of the run; of a Hugging Face folder 1024, or its positions "
           "if they are fewer"},
          {"--iters", &arguments.iters, "micro batches; default: the whole validation data"},
          {"--micro-batch-size", &arguments.micro_batch_size, "sequences at a time; default: as in training"}};
}

void check_evaluation(const EvaluationArguments& arguments) {
  for (const auto& [name, value] :
       {std::pair{"--micro-batch-size", arguments.micro_batch_size}, {"--iters", arguments.iters}, {"--seq-len", arguments.seq_len}})
    require(value.value_or(1) > 0, ExitCode::usage, name, ": must be positive, got ", value.value_or(1));
}

int64_t window_of(const EvaluationArguments& arguments, const LoadedModel& loaded) {
  const int64_t positions = loaded.config.model.max_position_embeddings,
                length = arguments.seq_len.value_or(loaded.config.training.seq_len);
  require(length <= positions, ExitCode::usage, "--seq-len: must be at most the ", positions, " positions of ", loaded.path.string(),
          ", got ", length);
  return length;
}

int64_t rows_of(const EvaluationArguments& arguments, const LoadedModel& loaded) {
  return arguments.micro_batch_size.value_or(loaded.config.training.micro_batch_size);
}

Data validation_data(const EvaluationArguments& arguments, const LoadedModel& loaded, DataConfig& config) {
  config = loaded.config.data;
  if (arguments.data) {
    config.path.reset();
    config.train.clear();
    config.valid = {WeightedPath{.path = *arguments.data}};
  }
  if (arguments.chat_template) config.chat_template = choice_of<ChatTemplate>(*arguments.chat_template);
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

int64_t micro_batches_of(const EvaluationArguments& arguments, const Data& data, int64_t rows) {
  int64_t count = 0;
  for (int set = 0; set < data.valid.sets(); ++set)
    count += std::min(ceil_div(data.valid.windows(set), rows), arguments.iters.value_or(std::numeric_limits<int64_t>::max()));
  return count;
}

}  // namespace mantissa::tools
