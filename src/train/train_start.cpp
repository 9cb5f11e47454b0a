#include <filesystem>
#include <utility>

#include "base/hash.h"
#include "base/parallel.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/saved_model.h"
#include "comm/mesh.h"
#include "config/open_device.h"
#include "data/open_data.h"
#include "hf/export.h"
#include "hf/export_files.h"
#include "hf/load_model.h"
#include "io/pending_folder.h"
#include "json/json_fields.h"
#include "mantissa/base/log.h"
#include "mantissa/train/train.h"
#include "metrics/run_folder.h"
#include "models/model_shape.h"
#include "plan/cost.h"
#include "plan/memory.h"
#include "train/evaluate.h"
#include "train/generate.h"
#include "train/replicas.h"
#include "train/run.h"
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

namespace {

void take_checkpoints(Run& run) {
  const CheckpointConfig& keep = run.config.checkpoint;
  if (run.checkpoints || !run.is_rank0()) return;
  run.checkpoints.emplace(keep.dir, KeepPolicy{.latest = static_cast<int>(keep.keep_latest), .every = keep.keep_every},
                          *run.config.logging.run_name);
}

// Call it once rank 0 has the folder. Returns false if it has none yet.
bool share_folder(Run& run) {
  return run.shared = run.shared || is_shared_folder(run.mesh.world, run.checkpoints.has_value(), run.config.checkpoint.dir);
}

}  // namespace

void start(Run& run) {
  agree(run.mesh.world, [&run] { require_equal_places(run.config, *run.device); });
  ParameterSet& parameters = run.model.parameters();
  const StartSteps steps{
      .lock = [&run] { take_checkpoints(run); },
      .share = [&run] { return share_folder(run); },
      .initialize = [&run] { run.optimizer.initialize(run.config.training.seed); },
      .load_folder =
          [&](HfWeights& weights) {
            parameters.clear_nonfinite();
            load_hf_weights(weights, parameters, &run.optimizer);
            if (!run.is_rank0()) return;
            for (const std::string& line : reconciled_weights(weights, run.plan)) log_info("reconciled: ", line);
          },
      .after_folder =
          [&] {
            run.optimizer.shards().gather();
            if (!parameters.buffers().empty())
              log_warning(*run.config.checkpoint.init_from, ": has no expert biases, so those of model.moe.bias_update_rate start at 0");
          },
      .load_weights = [&](CheckpointReader& reader) { load_weights(reader, run.plan, LoadFor::use, parameters, &run.optimizer); },
      .restore = [&run](CheckpointReader& reader) { run.state = restore(reader, run.parts()); }};
  StartPoint found = find_start({.loaded = run.loaded, .world = run.mesh.world, .data = run.data, .plan = run.plan}, steps);
  run.files = std::move(found.files);
  run.needs_unused_folder = found.needs_unused_folder;
  if (found.resumed) run.resumed = found.resumed->path.string();
  if (found.own && run.checkpoints) run.checkpoints->adopt(*found.resumed);
}

void open_folder(Run& run, const std::vector<std::string>& arguments) {
  agree(run.mesh.world, [&] {
    if (!run.is_rank0()) return;
    // The folder is this run's from here on. What was seen of it before may be true no more: another process may have trained there
    // meanwhile.
    const bool was_locked = run.checkpoints.has_value();
    take_checkpoints(run);
    sweep_pending_folders(std::filesystem::path(run.config.logging.dir) / "exports");  // this run may write no more of them
    if (run.needs_unused_folder) {
      require_unused_folder(run.loaded);
    } else if (!was_locked) {
      require_no_checkpoints(run.loaded);
    }
  });
  share_folder(run);  // before anything is written that says a run is there
  agree(run.mesh.world, [&] {
    if (!run.is_rank0()) return;
    write_run_folder(run.loaded, arguments);
    run.metrics.emplace(run.config.logging);
  });
  if (run.config.checkpoint.exported)  // all ranks write into it
    is_shared_folder(run.mesh.world, run.is_rank0(), run.config.logging.dir, "logging.dir");
  run.newest_checkpoint = run.resumed;
  if (!run.metrics) return;
  const StartEvent event{.folder = run.config.logging.dir,
                         .resumed = run.resumed,
                         .step = run.state.step,
                         .steps = run.config.training.steps,
                         .parameters = run.plan.parameters(),
                         .training_tokens = run.data.train->tokens(),
                         .validation_sets = run.data.valid.sets(),
                         .precision = precision_text(run.config.precision),
                         .device = run.device->name(),
                         .threads = num_threads()};
  if (run.events.started) run.events.started(event);
  if (run.loaded.tokenizer) log_info("data.tokenizer: that of the checkpoint in ", run.loaded.tokenizer->from);
  if (!run.loaded.report.given("model") && run.loaded.report.origin("model.hidden_size") == "default")
    log_warning("the configuration has no section model: this is the default, of ", event.parameters, " parameters");
  for (const std::string& warning : run_warnings(run.config, run.plan)) log_warning(warning);
  for (const std::string& warning : data_warnings(run.config.data, run.data)) log_warning(warning);
  for (const std::string& warning : prompt_warnings(run.config, run.data, run.prompts)) log_warning(warning);
  if (run.config.checkpoint.exported) {
    const std::vector<std::string> warnings = export_warnings(run.config.model, own_tokenizer(run.files, run.data.tokenizer));
    for (const std::string& warning : warnings) log_warning("checkpoint.export: ", warning);
    std::vector<TokenizerFile> files = run.files;
    if (const std::string taken = take_chat_template(run.config.data, files); !taken.empty()) log_info("checkpoint.export: ", taken);
    if (const std::string rounded = simulated_weights(run.plan); !rounded.empty()) log_warning("checkpoint.export: ", rounded);
  }
  run.metrics->write(event);
}

}  // namespace mantissa
