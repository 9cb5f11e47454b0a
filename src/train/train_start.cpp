#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <utility>

#include "backend/gpus.h"
#include "base/file.h"
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
#include "io/gguf_file.h"
#include "io/pending_folder.h"
#include "json/json_fields.h"
#include "mantissa/base/log.h"
#include "mantissa/train/train.h"
#include "metrics/run_folder.h"
#include "models/model_shape.h"
#include "plan/cost.h"
#include "plan/memory.h"
#include "train/evaluate.h"
#include "train/gemm_rate.h"
#include "train/generate.h"
#include "train/replicas.h"
#include "train/run.h"

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
  agree(world, [&] {
    resolve_steps(config, data.train->samples(), loaded.report);
    loaded.report.throw_if_failed();
  });
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

namespace {

namespace fs = std::filesystem;

// Returns the folder, else the nearest above it that is there.
fs::path existing(const fs::path& folder) {
  std::error_code error;
  fs::path at = fs::absolute(folder, error).lexically_normal();
  while (at.has_relative_path() && !fs::is_directory(at, error)) at = at.parent_path();
  return at;
}

bool on_one_disk(const fs::path& a, const fs::path& b) {
  struct stat first {};
  struct stat second {};
  return ::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0 && first.st_dev == second.st_dev;
}

int64_t multiples(int64_t of, int64_t after, int64_t last) { return last / of - after / of; }

// Returns how many of the saves to come are at multiples of `every`, which are kept for good.
int64_t kept_for_good(const CheckpointConfig& config, int64_t step, int64_t steps) {
  const int64_t every = config.keep_every, interval = config.interval;
  if (every == 0) return 0;
  const bool last_alone = steps % every == 0 && (interval == 0 || steps % interval != 0);
  const int64_t factor = interval == 0 ? 0 : interval / std::gcd(interval, every);
  const bool any = interval > 0 && factor <= steps / every;  // else the product may be beyond 64 bits
  return (any ? multiples(factor * every, step, steps) : 0) + (last_alone ? 1 : 0);
}

bool stays(const CheckpointConfig& config, int64_t step) { return config.keep_every > 0 && step % config.keep_every == 0; }

}  // namespace

int64_t checkpoint_bytes(const RunConfig& config, const PrecisionPlan& plan, const std::vector<TokenizerFile>& files) {
  constexpr int64_t kValue = sizeof(float);
  const ModelConfig& model = config.model;
  int64_t bytes = 0;
  for (const ParameterShape& parameter : parameter_shapes(model_shape(model))) {
    const ModuleTraining& training = plan.module_of(parameter.name).training;
    const int64_t moments = training.frozen() ? 0 : training.muon && parameter.shape.rank() == 2 ? 1 : 2;
    bytes += (kValue + moments * dtype_bytes(config.optimizer.moments)) * parameter.shape.elements();
  }
  for (const ParameterShape& buffer : buffer_shapes(model_shape(model))) bytes += kValue * buffer.shape.elements();
  for (const TokenizerFile& file : files) bytes += std::ssize(file.bytes);
  return bytes;
}

int64_t most_new_checkpoints(const RunConfig& config, int64_t step, int64_t kept) {
  const int64_t steps = *config.training.steps, interval = config.checkpoint.interval, latest = config.checkpoint.keep_latest;
  const bool last_alone = interval == 0 || steps % interval != 0;
  const int64_t saves = (interval > 0 ? multiples(interval, step, steps) : 0) + (last_alone ? 1 : 0);
  const int64_t rotating = latest + 1 - std::min(kept, latest);  // a new one is written before the oldest goes
  const EvalConfig& eval = config.eval;
  const bool best = config.checkpoint.keep_best;  // which each evaluation may have
  const int64_t evaluations = (eval.first && step == 0 ? 1 : 0) + (eval.interval > 0 ? multiples(eval.interval, step, steps) : 0);
  return std::min(saves + (best ? evaluations : 0), rotating + kept_for_good(config.checkpoint, step, steps) + (best ? 1 : 0));
}

std::string find_room_for_saves(const RunConfig& config, const PrecisionPlan& plan, const std::vector<TokenizerFile>& files,
                                const StartStep& start) {
  const CheckpointConfig& checkpoint = config.checkpoint;
  const bool finished = start.step == config.training.steps;
  if (finished && start.own) return "";  // all is saved
  const fs::path disk = existing(checkpoint.dir);
  const std::optional<int64_t> free = free_bytes(disk);
  if (!free) return "";
  std::vector<CheckpointStatus> own;  // checkpoints in the folder of the run up to its step, oldest first
  if (start.own) own = list_checkpoints(checkpoint.dir);
  std::erase_if(own, [&](const CheckpointStatus& saved) { return !saved.problem.empty() || saved.step > start.step; });
  const int64_t one = checkpoint_bytes(config, plan, files);
  int64_t reclaimable = 0;  // for the last state: all but the newest
  for (size_t i = 0; i + 1 < own.size(); ++i)
    if (!stays(checkpoint, own[i].step) && !own[i].best) reclaimable += own[i].bytes;
  if (*free + reclaimable < room_for(one)) {
    return text("checkpoint.dir: a checkpoint of this run needs ", room_for(one), " bytes, but ", *free, " are free in ", disk.string(),
                ": free some, or set checkpoint.dir to a larger disk");
  }
  const bool exports = checkpoint.exported && on_one_disk(disk, existing(config.logging.dir));
  const int64_t with_export = one + (exports ? export_bytes(config.model, plan, *checkpoint.exported) : 0);
  const auto kept = std::ranges::count_if(own, [&](const CheckpointStatus& saved) { return !stays(checkpoint, saved.step); });
  const int64_t most = finished ? 1 : most_new_checkpoints(config, start.step, kept);
  const double wanted = static_cast<double>(most) * static_cast<double>(with_export) + 0.1 * static_cast<double>(one);
  if (static_cast<double>(*free) >= wanted) return "";
  log_warning(
      "checkpoint.dir: this run keeps up to ", count_text(most, "checkpoint"), " of ", with_export, " bytes",
      exports ? " with their exports" : "", " at a time, but ", *free, " bytes are free in ", disk.string(),
      ": saves will fail or delete older ones first; free some, lower checkpoint.keep_latest, or set checkpoint.dir to a larger disk");
  return "";
}

namespace {

// Keeps the tokenizer files of a model. Those of another tokenizer would give its ids other words in an export.
std::vector<TokenizerFile> kept_files(std::vector<TokenizerFile> files, const std::string& source, const StartParts& parts) {
  const RunConfig& config = parts.loaded.config;
  if (!parts.data.tokenizer || !has_other_tokenizer(files, *parts.data.tokenizer)) return files;
  require(config.checkpoint.allow_tokenizer_change, ExitCode::usage, source, " has a tokenizer that differs from data.tokenizer ",
          *config.data.tokenizer,
          ": the same ids stand for other texts\ntokenize the data with the model's own tokenizer and train on token files with "
          "data.tokenizer=null, or set checkpoint.allow_tokenizer_change to true to teach the model these ids");
  log_warning("checkpoint.allow_tokenizer_change: tokenizer and generation files of ", source, " are dropped");
  return {};
}

// Keeps the run's own tokenizer.json with the model, in place of an equivalent one that the model came with.
void keep_own_tokenizer(const std::optional<Tokenizer>& tokenizer, std::vector<TokenizerFile>& files) {
  if (!tokenizer || tokenizer->files() == nullptr) return;
  for (TokenizerFile& own : files_of(*tokenizer)) {
    const bool made = own.name == "tokenizer_config.json" && tokenizer->files()->config.empty();
    const auto found = std::ranges::find(files, own.name, &TokenizerFile::name);
    if (found == files.end())
      files.push_back(std::move(own));
    else if (!made)
      *found = std::move(own);
  }
}

// A model that knows conversations in another form than this run renders has to learn that first.
void warn_of_template(const std::string& source, const std::optional<ChatTemplate>& trained, const StartParts& parts,
                      const std::vector<TokenizerFile>& files) {
  const DataConfig& data = parts.loaded.config.data;
  if (parts.world.rank() > 0 || !data.chat_template || trained == data.chat_template) return;
  if (trained)
    return log_warning(source, ": was trained with data.chat_template ", choice_name(*trained), ", but this run has ",
                       choice_name(*data.chat_template));
  const std::string difference = chat_template_difference(files, *data.chat_template, data.chat_date);
  if (!difference.empty()) log_warning(source, ": ", difference);
}

// A folder of Hugging Face's form, of which each rank reads its shards.
void start_from_folder(const StartParts& parts, const StartSteps& steps, const std::string& folder, StartPoint& found) {
  const RunConfig& config = parts.loaded.config;
  std::string fingerprint;
  agree_on_reading(parts.world, [&] {
    HfWeights weights(folder);
    fingerprint = weights.fingerprint();
    require_initial_model(weights.run_config(), config, folder);
    require_weights_fit(weights, config.model);
    found.files = kept_files(tokenizer_files(weights), folder, parts);
    const bool is_rank0 = parts.world.rank() == 0;
    if (is_rank0) {
      for (const std::string& finding : weights.weights_as_values()) log_warning(finding);
    }
    warn_of_template(folder, {}, parts, found.files);
    if (is_rank0) {  // keys of training that are not taken, or as what, and the coefficient that a run has instead
      for (const std::string& line : weights.config().training_keys) log_warning(weights.config_source(), ": ", line);
      const std::optional<MoeConfig>&there = weights.config().model.moe, &here = config.model.moe;
      if (there && here && there->aux_loss_coef != here->aux_loss_coef)
        log_info("model.moe.aux_loss_coef: ", there->aux_loss_coef, " in ", weights.where(), ", ", here->aux_loss_coef, " here");
    }
    steps.load_folder(weights);
  });
  require_same(parts.world, "the folder of checkpoint.init_from", fingerprint);
  found.model_path = folder, found.model_hash = fingerprint;
  steps.after_folder();
  log_info("weights from ", folder);
}

void start_from_checkpoint(const StartParts& parts, const StartSteps& steps, const std::string& path, StartPoint& found) {
  const RunConfig& config = parts.loaded.config;
  std::optional<ChatTemplate> trained;
  const auto load = [&](CheckpointReader& reader) {
    agree_on_reading(parts.world, [&] {
      const RunConfig& saved = reader.config();
      const std::string source = reader.directory().string();
      trained = saved.data.chat_template;
      require_initial_model(saved, config, source);
      require_weights_fit(reader, config.model);
      if (has_other_tokenizer(reader, parts.data)) {
        require(config.checkpoint.allow_tokenizer_change, ExitCode::usage, source,
                " was trained with a tokenizer that differs from data.tokenizer; to use its weights anyway, set "
                "checkpoint.allow_tokenizer_change to true");
        log_warning("checkpoint.allow_tokenizer_change: ", source, " was trained with another tokenizer");
      }
      found.files = kept_files(tokenizer_files(reader), source, parts);
    });
    if (steps.load_weights) steps.load_weights(reader);
  };
  const LoadedCheckpoint loaded = load_checkpoint(path, load, RanksTogether(parts.world));
  const std::string source = loaded.path.string();
  found.model_path = source, found.model_hash = loaded.hash;
  warn_of_template(source, trained, parts, found.files);
  log_info("weights from ", source);
}

void need_unused_folder(const StartParts& parts, StartPoint& found) {
  if (parts.world.rank() > 0) return;
  require_nobody_trains(parts.loaded.config);
  if (parts.loaded.restarted) return require_no_checkpoints(parts.loaded);  // it has the metrics of the attempt before
  require_unused_folder(parts.loaded);
  found.needs_unused_folder = true;
}

// Returns false if there is no checkpoint.
bool resume(const StartParts& parts, const StartSteps& steps, StartPoint& found) {
  const CheckpointConfig& config = parts.loaded.config.checkpoint;
  NamedCheckpoint named{.folder = config.dir, .name = ""};
  bool own = true;  // they are those of this run's folder
  agree(parts.world, [&] {
    std::error_code missing;
    if (config.resumes_named()) {
      require(!is_published_model(config.resume), ExitCode::usage, config.resume,
              ": holds weights, but no state of a run to resume; to start a new run with them, use checkpoint.init_from");
      named = find_checkpoint(config.resume);
      own = std::filesystem::equivalent(named.folder, config.dir, missing);
    }
    if (!own) need_unused_folder(parts, found);
    // Lock before reading: another process that trains here could save between our load and our lock.
    if (std::filesystem::exists(config.dir, missing)) steps.lock();
  });
  if (!steps.share() && !config.resumes_named()) return false;
  const auto load = [&](CheckpointReader& reader) {
    agree_on_reading(parts.world, [&] {
      require_same_batch(reader.config(), parts.loaded, reader.directory().string());
      found.files = kept_files(tokenizer_files(reader), reader.directory().string(), parts);
      keep_own_tokenizer(parts.data.tokenizer, found.files);
    });
    steps.restore ? steps.restore(reader) : require_resumable(reader, parts.loaded.config, parts.plan, parts.data);
  };
  const RanksTogether together(parts.world);
  if (config.resumes_named())
    found.resumed = load_checkpoint(config.resume, load, together);
  else
    found.resumed = load_newest(named.folder, load, together);
  found.own = found.resumed && own;
  return found.resumed.has_value();
}

}  // namespace

StartPoint find_start(const StartParts& parts, const StartSteps& steps) {
  StartPoint found;
  const CheckpointConfig& config = parts.loaded.config.checkpoint;
  const bool never = config.resume == "never";
  if (never) agree(parts.world, [&] { need_unused_folder(parts, found); });
  if (never || !resume(parts, steps, found)) {
    if (!config.init_from) {
      steps.initialize();
    } else if (starts_from_folder(parts.world, *config.init_from)) {
      start_from_folder(parts, steps, *config.init_from, found);
    } else {
      start_from_checkpoint(parts, steps, *config.init_from, found);
    }
    keep_own_tokenizer(parts.data.tokenizer, found.files);
  }
  agree(parts.world, [&] {
    if (parts.world.rank() > 0) return;
    const StartStep start{.step = found.resumed ? found.resumed->step : 0, .own = found.own};
    const std::string lack = find_room_for_saves(parts.loaded.config, parts.plan, found.files, start);
    require(lack.empty(), ExitCode::environment, lack);
  });
  return found;
}

namespace {

// Compares the tokenizer of a teacher with that of the data. described: by the manifest of a checkpoint, whose files are those of the model
// that it started from.
void require_tokenizer_of_teacher(const StartParts& parts, const std::string& teacher, bool described, bool other,
                                  const std::vector<TokenizerFile>& files) {
  const DataConfig& data = parts.loaded.config.data;
  const std::optional<Tokenizer>& own = parts.data.tokenizer;
  require(!other && (described || !own || !has_other_tokenizer(files, *own)), ExitCode::usage, "training.teacher: ", teacher,
          " has a tokenizer that differs from data.tokenizer ", data.tokenizer.value_or("null"), ": the same ids stand for other texts");
  const bool has_one = described || std::ranges::find(files, "tokenizer.json", &TokenizerFile::name) != files.end();
  if (parts.world.rank() > 0 || parts.loaded.config.training.teacher == "self" || (own && has_one)) return;
  log_warning("training.teacher: ", own ? text(teacher, " has no tokenizer") : "data.tokenizer is null",
              ", so nothing shows that the same ids stand for the same texts in the teacher");
}

}  // namespace

FoundTeacher read_teacher(const StartParts& parts, const StartPoint& found, Gpt* teacher) {
  const RunConfig &config = parts.loaded.config, use = teacher_config(config);
  const bool is_start = config.training.teacher == "self" && !found.model_path.empty();
  std::string path = is_start ? found.model_path : *config.teacher_path(), hash;
  if (starts_from_folder(parts.world, path)) {
    agree_on_reading(parts.world, [&] {
      HfWeights weights(path);
      hash = weights.fingerprint();
      require_weights_fit(weights, use.model);
      require_tokenizer_of_teacher(parts, path, false, false, tokenizer_files(weights));
      if (teacher) load_hf_weights(weights, teacher->parameters());
    });
    require_same(parts.world, "the folder of training.teacher", hash);
  } else {
    const auto load = [&](CheckpointReader& reader) {
      agree_on_reading(parts.world, [&] {
        require_weights_fit(reader, use.model);
        const bool described = reader.manifest().tokenizer != "null";
        require_tokenizer_of_teacher(parts, path, described, has_other_tokenizer(reader, parts.data), tokenizer_files(reader));
      });
      if (teacher) load_weights(reader, resolve_plan(use), LoadFor::use, teacher->parameters(), nullptr, parts.world);
    };
    const LoadedCheckpoint loaded = load_checkpoint(path, load, RanksTogether(parts.world));
    path = loaded.path.string(), hash = loaded.hash;
  }
  agree(parts.world, [&] {
    require(!is_start || hash == found.model_hash, ExitCode::data, path,
            ": changed between its two uses in this run, as the model to start from and as its teacher: start the run again");
  });
  return {.path = std::move(path), .hash = std::move(hash)};
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

void resolve_by_data(LoadedConfig& loaded) { open_run_data(loaded, {}); }

RunPreview preview_run(const LoadedConfig& loaded) {
  LoadedConfig copy = loaded;
  const Data data = open_run_data(copy, {});
  const PrecisionPlan precision = plan_with_data(copy.config, data);
  const std::vector<std::vector<int32_t>> prompts = encode_prompts(copy.config.eval, data);
  const Communicator alone{};
  if (copy.config.parallel.world() == 1 && backend_name(copy.config.training.device) != "cuda")
    require_free_memory(copy.config, precision, alone);
  const StartParts parts{.loaded = copy, .world = alone, .data = data, .plan = precision};
  const StartPoint found = find_start(parts, {.lock = [&copy] { require_nobody_trains(copy.config); }});
  if (copy.config.teacher) read_teacher(parts, found, nullptr);
  for (const std::string& warning : data_warnings(copy.config.data, data)) log_warning(warning);
  for (const std::string& warning : prompt_warnings(copy.config, data, prompts)) log_warning(warning);
  RunPreview preview{.config = copy.config,
                     .precision = precision,
                     .flops_per_token = step_flops_per_token(copy.config),
                     .memory = estimate_memory(copy.config, precision),
                     .training_tokens = data.train->tokens(),
                     .validation_windows = 0};
  for (int set = 0; set < data.valid.sets(); ++set) preview.validation_windows += data.valid.windows(set);
  const TrainingConfig& training = copy.config.training;
  const EvalConfig& eval = copy.config.eval;
  const int64_t steps = *training.steps, windows = evaluated_windows(data.valid, training.micro_batch_size, eval.iters);
  const int64_t of_last = 1, evaluations = (eval.first ? 1 : 0) + (eval.interval > 0 ? (steps - 1) / eval.interval : 0) + of_last;
  preview.evaluation_flops = evaluation_flops_per_token(copy.config) * static_cast<double>(training.seq_len) *
                             static_cast<double>(windows) * static_cast<double>(evaluations);
  const bool is_here = backend_name(training.device) != "cuda" || find_gpus().architecture > 0;
  if (copy.config.parallel.world() == 1 && is_here)
    preview.gemm_rate = measured_gemm_rate(copy.config, *make_backend(training.device), alone);
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

// A run learns from the teacher that it began with, or from none, to its end.
void start_teacher(Run& run, const StartParts& parts, const StartPoint& found) {
  std::optional<FoundTeacher> teacher;
  if (run.teacher) teacher = read_teacher(parts, found, run.teacher.get());
  const std::optional<std::string> hash = teacher ? std::optional(teacher->hash) : std::nullopt;
  agree(run.mesh.world, [&] {
    if (!found.resumed || run.state.teacher == hash) return;
    const std::string saved = !run.state.teacher ? "without training.teacher"
                              : teacher          ? text("with another training.teacher than ", teacher->path)
                                                 : "with a training.teacher";
    // The folder of a run stands for its newest checkpoint.
    const std::string advice = run.state.teacher && teacher && teacher->path != *run.config.teacher_path()
                                   ? text("; if ", *run.config.teacher_path(),
                                          " is the run that it learns from, and has saved since, name the checkpoint from then")
                                   : "";
    fail(ExitCode::usage, found.resumed->path.string(), " was trained ", saved, ": a run learns from the same to its end", advice,
         "; to start a new run from its weights, use checkpoint.init_from");
  });
  run.state.teacher = hash;
  if (teacher && run.is_rank0()) log_info("learns from ", teacher->path);
}

// Figures of evaluations under another objective say nothing about those to come.
void drop_other_best(Run& run, const TrainingConfig& saved) {
  const std::optional<double> before = teacher_weight(saved), now = teacher_weight(run.config.training);
  if (before == now || !run.state.best_valid_loss) return;
  if (run.is_rank0())
    log_warning("training.teacher_weight: the best evaluation so far went by ", objective_name(before), ", this run goes by ",
                objective_name(now), ": it looks for the best one afresh");
  run.state.best_valid_loss.reset();
  run.state.best_checkpoint.reset();
}

// Makes `best` name what the state calls the best checkpoint, if that is there.
void adopt_best(Run& run) {
  std::optional<BestCheckpoint>& best = run.state.best_checkpoint;
  bool found = false;
  agree(run.mesh.world, [&] {
    if (run.checkpoints) found = run.checkpoints->adopt_best(best ? std::optional(best->step) : std::nullopt);
  });
  if (run.mesh.world.all(uint8_t{found}).front() == 0) best.reset();
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
      .restore =
          [&run](CheckpointReader& reader) {
            run.state = restore(reader, run.parts());
            drop_other_best(run, reader.config().training);
          }};
  const StartParts parts{.loaded = run.loaded, .world = run.mesh.world, .data = run.data, .plan = run.plan};
  StartPoint found = find_start(parts, steps);
  start_teacher(run, parts, found);
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
  adopt_best(run);
  agree(run.mesh.world, [&] {
    if (!run.is_rank0()) return;
    write_run_folder(run.loaded, arguments);
    run.metrics.emplace(run.config.logging);
  });
  if (run.config.checkpoint.exported)  // all ranks write into it
    is_shared_folder(run.mesh.world, run.is_rank0(), run.config.logging.dir, "logging.dir");
  run.newest_checkpoint = run.resumed;
  run.first_step = run.state.step + 1;
  if (!run.metrics) return;
  const StartEvent event{.folder = run.config.logging.dir,
                         .resumed = run.resumed,
                         .step = run.state.step,
                         .steps = *run.config.training.steps,
                         .epochs = run.config.training.epochs,
                         .parameters = run.plan.parameters(),
                         .trained_parameters = run.plan.trained_parameters(),
                         .training_tokens = run.data.train->tokens(),
                         .validation_sets = run.data.valid.sets(),
                         .precision = precision_text(run.config.precision),
                         .device = run.device->name(),
                         .threads = num_threads()};
  if (run.events.started) run.events.started(event);
  if (const auto& own = run.loaded.tokenizer)
    log_info("data.tokenizer: that of ", is_gguf_file(own->from) ? "" : "the checkpoint in ", own->from);
  if (!run.loaded.report.given("model") && run.loaded.report.origin("model.hidden_size") == "default")
    log_warning("the configuration has no section model: this run trains the default model, of ", event.parameters, " parameters");
  for (const std::string& warning : run_warnings(run.config, run.plan)) log_warning(warning);
  for (const std::string& warning : data_warnings(run.config.data, run.data)) log_warning(warning);
  for (const std::string& warning : prompt_warnings(run.config, run.data, run.prompts)) log_warning(warning);
  if (run.config.checkpoint.exported) {
    const std::vector<std::string> warnings =
        export_warnings(run.config.model, run.config.checkpoint.exported->format, own_tokenizer(run.files, run.data.tokenizer));
    for (const std::string& warning : warnings) log_warning("checkpoint.export: ", warning);
    std::vector<TokenizerFile> files = run.files;
    if (const std::string taken = take_chat_template(run.config.data, files); !taken.empty()) log_info("checkpoint.export: ", taken);
    if (const std::string rounded = simulated_weights(run.plan); !rounded.empty()) log_warning("checkpoint.export: ", rounded);
  }
  run.metrics->write(event);
}

}  // namespace mantissa
