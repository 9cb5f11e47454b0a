// The validation data on which a command evaluates a saved model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/open_data.h"
#include "hf/load_model.h"
#include "tools/command.h"

namespace mantissa::tools {

struct EvaluationArguments {
  std::optional<std::string> data, chat_template;
  std::optional<int64_t> iters, micro_batch_size, seq_len;
};

// Returns the options --data, --chat-template, --seq-len, --iters and --micro-batch-size.
std::vector<Option> evaluation_options(EvaluationArguments& arguments);
// Throws Error(usage) for numbers that are not positive.
void check_evaluation(const EvaluationArguments& arguments);

// Returns the tokens of a window, or of a row of examples: those of the option, else of the run; a folder of Hugging Face has none of its
// own, and its configuration 1,024 or the model's positions. Throws Error(usage) for more than the model has positions.
int64_t window_of(const EvaluationArguments& arguments, const LoadedModel& loaded);
int64_t rows_of(const EvaluationArguments& arguments, const LoadedModel& loaded);  // sequences at a time

// Opens the data of --data, else the validation data of the run; `config` gets what it is opened by. Throws Error(usage) if there are none,
// and for options that would fill rows of the run with examples that it was trained on.
Data validation_data(const EvaluationArguments& arguments, const LoadedModel& loaded, DataConfig& config);

// Returns the micro batches of all sets that an evaluation goes through.
int64_t micro_batches_of(const EvaluationArguments& arguments, const Data& data, int64_t rows);

}  // namespace mantissa::tools
