#include "mantissa/train/generate.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>

#include "mantissa/base/log.h"
#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/hf/load_model.h"
#include "tools/command.h"
#include "tools/rank_session.h"
#include "tools/token_ids.h"

namespace mantissa::tools {
namespace {

struct GenerateArguments {
  std::string checkpoint;
  std::optional<std::string> prompt, prompt_ids, dtype;
  int threads = 0;
  int64_t tensor = 1;
  SamplingOptions sampling = {.max_new_tokens = 200, .temperature = 0.8, .top_k = 50, .top_p = 1.0, .seed = 1234};
};

void check_sampling(const SamplingOptions& sampling) {
  require(sampling.max_new_tokens > 0, ExitCode::usage, "--max-new-tokens: must be positive, got ", sampling.max_new_tokens);
  require(sampling.temperature >= 0.0 && std::isfinite(sampling.temperature), ExitCode::usage, "--temperature: must be at least 0, got ",
          sampling.temperature);
  require(sampling.top_k >= 0, ExitCode::usage, "--top-k: must be at least 0, got ", sampling.top_k);
  require(sampling.top_p > 0.0 && sampling.top_p <= 1.0, ExitCode::usage, "--top-p: must be in (0, 1], got ", sampling.top_p);
}

std::vector<int32_t> prompt_of(const GenerateArguments& arguments, const LoadedModel& loaded) {
  if (arguments.prompt_ids) return parse_token_ids("--prompt-ids", *arguments.prompt_ids, *loaded.config.model.vocab_size);
  require(loaded.tokenizer.has_value(), ExitCode::usage, loaded.path.string(),
          " has no tokenizer; give --prompt-ids");
  return loaded.tokenizer->encode_prompt(arguments.prompt.value_or("\n"), {.name = "--prompt", .code = ExitCode::usage});
}

// All ranks draw the same tokens; the first prints them.
void generate_on(const Mesh& mesh, const GenerateArguments& arguments) {
  const LoadedModel loaded = load_model(arguments.checkpoint, mesh, dtype_of(arguments.dtype));
  const std::vector<int32_t> prompt = prompt_of(arguments, loaded), end_tokens = loaded.end_tokens();
  const bool prints = mesh.tensor.rank() == 0, ids = arguments.prompt_ids.has_value();
  if (prints) std::cout << (ids ? joined(prompt, " ") : arguments.prompt.value_or("\n")) << std::flush;
  generate(*loaded.model, prompt, arguments.sampling, [&](int32_t id) {
    if (std::ranges::find(end_tokens, id) != end_tokens.end()) return false;
    if (prints) std::cout << (ids ? text(' ', id) : loaded.tokenizer->decode(std::span(&id, 1))) << std::flush;
    return mesh.tensor.sum(std::cout.good() ? 0 : 1) == 0;
  });
  if (prints) std::cout << '\n';
}

ExitCode run_generate(const GenerateArguments& arguments) {
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  check_sampling(arguments.sampling);
  require(!arguments.prompt || !arguments.prompt_ids, ExitCode::usage, "--prompt and --prompt-ids exclude each other");
  require(!arguments.prompt || !arguments.prompt->empty(), ExitCode::usage, "--prompt: must not be empty");
  use_threads(arguments.threads);
  on_tensor_ranks(arguments.tensor, arguments.checkpoint, [&](const Mesh& mesh) { generate_on(mesh, arguments); });
  return ExitCode::ok;
}

}  // namespace

Command generate_command() {
  const auto arguments = std::make_shared<GenerateArguments>();
  SamplingOptions& sampling = arguments->sampling;
  return {.name = "generate",
          .summary = "continue a text with a checkpoint",
          .example = "mantissa generate runs/quickstart --prompt \"The layers are\" --max-new-tokens 100 --temperature 0.7",
          .options = {{.name = "CHECKPOINT",
                       .target = &arguments->checkpoint,
                       .description = "a checkpoint, or a run folder: the one that `latest` names, else its newest valid one",
                       .required = true},
                      {.name = "--prompt", .target = &arguments->prompt, .description = "text to continue; default: \\n, a line end"},
                      {.name = "--prompt-ids",
                       .target = &arguments->prompt_ids,
                       .description = "token ids to continue, as in 1,2,3: all ids are printed, no text"},
                      dtype_option(arguments->dtype),
                      {.name = "--max-new-tokens",
                       .target = &sampling.max_new_tokens,
                       .description = "tokens to write; a model from Hugging Face ends at the end tokens of its generation_config.json"},
                      {.name = "--temperature", .target = &sampling.temperature, .description = "0: always the likeliest token"},
                      {.name = "--top-k", .target = &sampling.top_k, .description = "draw from the k likeliest tokens; 0: from all"},
                      {.name = "--top-p", .target = &sampling.top_p, .description = "draw from the likeliest tokens that together reach p"},
                      {.name = "--seed", .target = &sampling.seed, .description = "equal seeds give equal texts"},
                      threads_option(arguments->threads),
                      tensor_option(arguments->tensor)},
          .run = [arguments] { return run_generate(*arguments); },
          .many_ranks = true};
}

}  // namespace mantissa::tools
