#include "train/run_data.h"

#include "mantissa/base/hash.h"
#include "mantissa/base/log.h"
#include "mantissa/comm/agreement.h"
#include "mantissa/config/open_device.h"
#include "mantissa/data/data_warnings.h"
#include "mantissa/json/json_fields.h"
#include "mantissa/metrics/run_folder.h"
#include "mantissa/models/model_shape.h"
#include "mantissa/plan/memory_check.h"
#include "mantissa/train/evaluate.h"
#include "mantissa/train/generate.h"
#include "mantissa/train/train.h"
#include "train/start_point.h"

namespace mantissa {

Data open_run_data(LoadedConfig& loaded, const Communicator& world, const TrainEvents& events) {
  RunConfig& config = loaded.config;
  const auto progressed = [&events] {
    if (events.set_phase) events.set_phase(0, "start");
  };
  const DataOptions options{.seq_len = config.training.seq_len,
                            .vocab_size = config.model.vocab_size,
                            .seed = config.training.seed,
                            .tokenizer = loaded.tokenizer ? std::optional(loaded.tokenizer->tokenizer) : std::nullopt,
                            .progressed = progressed};
  Data data = agree_on(world, [&] { return open_data(config.data, options); });
  if (!config.model.vocab_size) loaded.report.derive("model.vocab_size");
  config.model.vocab_size = data.vocab_size;
  require_same(world, "the data", json_text(data.fingerprints));
  return data;
}

PrecisionPlan plan_with_data(const RunConfig& config, const Data& data, const Communicator& world) {
  const PrecisionPlan plan = agree_on(world, [&] {
    if (data.valid.sets() > 0) require_targets(data.valid, config.training.micro_batch_size, config.eval.iters);
    return resolve_plan(config);
  });
  require_same(world, "the precision plan", Hash64{plan.hash()}.text());
  return plan;
}

std::unique_ptr<Backend> open_run_device(const RunConfig& config, const PrecisionPlan& plan, const Communicator& world,
                                         const MakeBackend& own) {
  if (!own && backend_name(config.training.device) == "cuda") {
    require_free_gpu_memory(config, plan, world, free_gpu_memory(world));
  } else {
    require_free_memory(config, plan, world);
  }
  if (own) return own();
  try {
    return make_backend(config.training.device);
  } catch (const Error& error) {
    fail(error.code(), "training.device: ", error.what());
  }
}

std::vector<std::vector<int32_t>> encode_prompts(const EvalConfig& config, const Data& data) {
  std::vector<std::vector<int32_t>> prompts;
  if (!config.samples) return prompts;
  require(data.tokenizer.has_value(), ExitCode::usage, "eval.samples: needs data.tokenizer");
  for (size_t i = 0; i < config.samples->prompts.size(); ++i) {
    const std::string name = text("eval.samples.prompts.", i);
    prompts.push_back(data.tokenizer->encode_prompt(config.samples->prompts[i], {.name = name, .code = ExitCode::usage}));
    require(!prompts.back().empty(), ExitCode::usage, name, ": must not be empty");
  }
  return prompts;
}

std::vector<std::string> prompt_warnings(const RunConfig& config, const Data& data, std::span<const std::vector<int32_t>> prompts) {
  std::vector<std::string> warnings;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::string name = text("eval.samples.prompts.", i);
    for (std::string& warning : repetition_warnings(name, {.begins = data.tokenizer->begins_twice(prompts[i]) ? 1 : 0}))
      warnings.push_back(std::move(warning));
    if (auto warning = context_warning(name, prompts[i], config.model.max_position_embeddings)) warnings.push_back(std::move(*warning));
  }
  return warnings;
}

RunPreview preview_run(const LoadedConfig& loaded) {
  LoadedConfig copy = loaded;
  const Data data = open_run_data(copy, {});
  const PrecisionPlan precision = plan_with_data(copy.config, data);
  const std::vector<std::vector<int32_t>> prompts = encode_prompts(copy.config.eval, data);
  const Communicator alone{};
  if (copy.config.parallel.world() == 1 && backend_name(copy.config.training.device) != "cuda")
    require_free_memory(copy.config, precision, alone);
  find_start({.loaded = copy, .world = alone, .data = data, .plan = precision}, {.lock = [&copy] { require_nobody_trains(copy.config); }});
  for (const std::string& warning : data_warnings(copy.config.data, data)) log_warning(warning);
  for (const std::string& warning : prompt_warnings(copy.config, data, prompts)) log_warning(warning);
  RunPreview preview{.config = copy.config,
                     .precision = precision,
                     .flops_per_token = training_flops_per_token(model_shape(copy.config.model), copy.config.training.seq_len),
                     .memory = estimate_memory(copy.config, precision),
                     .training_tokens = data.train->tokens(),
                     .validation_windows = 0};
  for (int set = 0; set < data.valid.sets(); ++set) preview.validation_windows += data.valid.windows(set);
  return preview;
}

}  // namespace mantissa
