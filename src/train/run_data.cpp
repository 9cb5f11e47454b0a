#include "train/run_data.h"

#include "mantissa/base/json_fields.h"
#include "mantissa/train/evaluate.h"
#include "train/ranks.h"

namespace mantissa {

Data open_run_data(LoadedConfig& loaded, const Communicator& world) {
  RunConfig& config = loaded.config;
  Data data =
      open_data(config.data, {.seq_len = config.training.seq_len, .vocab_size = config.model.vocab_size, .seed = config.training.seed});
  if (!config.model.vocab_size) loaded.report.derive("model.vocab_size");
  config.model.vocab_size = data.vocab_size;
  require_same(world, "data", json_text(data.fingerprints));
  return data;
}

PrecisionPlan plan_with_data(const RunConfig& config, const Data& data) {
  PrecisionPlan plan = resolve_plan(config);
  if (data.valid.sets() > 0) require_targets(data.valid, config.training.micro_batch_size, config.eval.iters);
  return plan;
}

std::vector<std::vector<int32_t>> encode_prompts(const EvalConfig& config, const Data& data) {
  std::vector<std::vector<int32_t>> prompts;
  if (!config.texts) return prompts;
  require(data.tokenizer.has_value(), ExitCode::usage, "eval.samples: needs data.tokenizer");
  for (size_t i = 0; i < config.texts->prompts.size(); ++i) {
    const std::string name = text("eval.samples.prompts.", i);
    prompts.push_back(data.tokenizer->encode(config.texts->prompts[i], {.name = name, .code = ExitCode::usage}));
    require(!prompts.back().empty(), ExitCode::usage, name, ": must not be empty");
  }
  return prompts;
}

}  // namespace mantissa
