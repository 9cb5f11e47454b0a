#include "mantissa/config/run_config.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "config/open_device.h"
#include "data/tokenizer.h"
#include "mantissa/base/text.h"
#include "models/model_shape.h"

namespace mantissa {
namespace {

void resolve_parallel(ParallelConfig& parallel, int64_t world, ConfigReport& report) {
  if (parallel.data == 0) report.error("parallel.data", "must be -1 or at least 1, got 0");
  if (parallel.sequence_parallel && parallel.tensor == 1) {
    report.error("parallel.sequence_parallel", "needs parallel.tensor above 1, because it divides tokens among those ranks");
  }
  if (report.failed("parallel")) return;
  if (parallel.data == -1) {
    if (world % parallel.tensor != 0)
      report.error("parallel.tensor", text(parallel.tensor, " does not divide ", count_text(world, "rank")));
    parallel.data = std::max<int64_t>(world == 0 ? parallel.expert : 1, world / parallel.tensor);
    report.derive("parallel.data");
  } else if (world > 0 && parallel.world() != world) {
    report.error(
        "parallel.data",
        text("data ", parallel.data, " * tensor ", parallel.tensor, " needs ", count_text(parallel.world(), "rank"), ", but ",
             world == 1 ? "this is one process alone" : text("there are ", world), ": start it with mantissa launch --nproc-per-node ",
             parallel.world(), " -- train ..., or mpirun; parallel.data -1 takes as many as there are"));
  }
  if (!report.failed("parallel") && parallel.data % parallel.expert != 0)
    report.error("parallel.expert", text(parallel.expert, " does not divide parallel.data ", parallel.data));
}

std::string of_replicas(int64_t replicas) { return replicas > 1 ? text(" * ", replicas) : ""; }

// Derives the third of micro_batch_size * grad_accum * replicas = global_batch_size from any two; a stated value takes precedence over a
// default.
void resolve_batch(TrainingConfig& training, int64_t replicas, ConfigReport& report) {
  const bool global_stated = training.global_batch_size && (report.given("training.global_batch_size") ||
                                                            training.global_batch_size != TrainingConfig{}.global_batch_size);
  int64_t& micro = training.micro_batch_size;
  if (!training.grad_accum && !training.global_batch_size) training.grad_accum = 1;
  if (training.grad_accum && !global_stated) {
    training.global_batch_size = micro * *training.grad_accum * replicas;
    report.derive("training.global_batch_size");
    constexpr int64_t kLargest = int64_t{1} << 30;  // as for a given global_batch_size
    if (training.global_batch_size > kLargest) {
      report.error("training.grad_accum", text("micro_batch_size ", micro, " * grad_accum ", *training.grad_accum, of_replicas(replicas),
                                               " is more than ", kLargest));
    }
    return;
  }
  const int64_t global = *training.global_batch_size, share = global / replicas;
  if (global % replicas != 0) {
    report.error("training.global_batch_size", text(global, " is not a multiple of parallel.data ", replicas));
    return;
  }
  if (!training.grad_accum) {
    if (share % micro == 0) {
      training.grad_accum = share / micro;
      report.derive("training.grad_accum");
    } else {
      report.error("training.micro_batch_size", text("global_batch_size ", global, " is not a multiple of micro_batch_size ", micro,
                                                     of_replicas(replicas), "; give grad_accum, or another global_batch_size"));
    }
    return;
  }
  const int64_t accum = *training.grad_accum;
  if (!report.given("training.micro_batch_size") && micro == TrainingConfig{}.micro_batch_size && share % accum == 0) {
    micro = share / accum;
    report.derive("training.micro_batch_size");
  } else if (micro * accum != share) {
    report.error("training.global_batch_size",
                 text("micro_batch_size * grad_accum", replicas > 1 ? " * parallel.data" : "", " must be global_batch_size, but ", micro,
                      " * ", accum, of_replicas(replicas), " = ", micro * accum * replicas, ", not ", global));
  }
}

// The steps of epochs follow from the data: resolve_steps().
void resolve_length(TrainingConfig& training, ConfigReport& report) {
  if (!training.epochs) {
    if (!training.steps) report.error("training.steps", "must be given, because training.epochs is null");
    return;
  }
  if (training.steps && report.given("training.steps")) {
    report.error("training.epochs", text("is given beside training.steps ", *training.steps,
                                         ", but one of them says how long the run is: leave one out, or set it to null"));
    return;
  }
  training.steps.reset();
  report.derive("training.steps");
}

void check_accumulation(const TrainingConfig& training, int64_t replicas, ConfigReport& report) {
  if (training.accumulation != Accumulation::tree || !training.grad_accum) return;
  if (!std::has_single_bit(static_cast<uint64_t>(*training.grad_accum))) {
    report.error("training.accumulation",
                 text("tree needs a power-of-two number of micro batches per step, got grad_accum ", *training.grad_accum));
  }
  if (!std::has_single_bit(static_cast<uint64_t>(replicas))) {
    report.error("training.accumulation", text("tree needs a power-of-two number of replicas, got parallel.data ", replicas));
  }
}

// Ranks hold whole experts and whole row blocks of 32 rows, over which norms and hashes are summed.
void divide_experts(const RunConfig& config, ConfigReport& report) {
  const int64_t ranks = config.parallel.expert;
  if (ranks == 1) return;
  if (!config.model.moe) return report.error("parallel.expert", "divides experts among ranks, but model.moe is null");
  const MoeConfig& moe = *config.model.moe;
  if (moe.num_experts % ranks != 0)
    return report.error("parallel.expert", text(ranks, " does not divide model.moe.num_experts ", moe.num_experts));
  const auto check = [&](const char* what, int64_t rows) {
    const int64_t experts = moe.num_experts / ranks;
    if (experts * rows % 32 == 0) return;
    report.error("parallel.expert", text(count_text(experts, "expert"), " of a rank have ", experts * rows, " rows of experts.", what,
                                         ", which is not a multiple of 32; use fewer ranks"));
  };
  check("gate_up", 2 * moe.intermediate_size);
  check("down", config.model.hidden_size);
}

void resolve_model(RunConfig& config, ConfigReport& report) {
  ModelConfig& model = config.model;
  model.validate(report);
  if (report.failed("model")) return;
  if (!model.num_key_value_heads) report.derive("model.num_key_value_heads");
  model.num_key_value_heads = model.kv_heads();
  if (!model.head_dim) report.derive("model.head_dim");
  model.head_dim = model.head_size();
  if (config.data.uses_bytes() && !model.vocab_size) {
    model.vocab_size = Tokenizer::bytes().size();
    report.derive("model.vocab_size");
  }
  divide_model(model, config.parallel.tensor, report);
  divide_experts(config, report);
}

// Names modules that a rule takes, for errors: "final_norm and 3 more".
std::string and_more(const std::vector<std::string>& paths) {
  return paths.front() + (paths.size() > 1 ? text(" and ", paths.size() - 1, " more") : "");
}

// Reports a rule that chooses an optimizer for modules that have no choice. `chosen` are the rules of the modules.
void check_rule_type(const OptimizerConfig& config, size_t rule, const std::vector<std::optional<size_t>>& chosen, const ModelShape& model,
                     ConfigReport& report) {
  const OptimizerRule& of = config.rules[rule];
  const std::string key = text("optimizer.rules.", rule, ".type");
  if (!of.type) return;
  if (of.lr_factor == 0.0) return report.error(key, "does nothing, because lr_factor 0 freezes these modules");
  std::vector<std::string> others;
  for (size_t m = 0; m < chosen.size(); ++m) {
    if (chosen[m] != rule) continue;
    if (model.modules[m].kind == ModuleKind::linear) return;
    others.push_back(model.modules[m].path);
  }
  if (others.empty()) return;
  report.error(key, text("does nothing, because \"", shortened(of.match), "\" takes ", and_more(others),
                         ", and AdamW trains all that is no linear: embeddings, norms, sinks, routers and the output projection"));
}

// Returns how each module is trained. Reports rules that match nothing, and those that leave nothing to train.
std::vector<ModuleTraining> resolve_training(const OptimizerConfig& config, const ModelShape& model, ConfigReport& report) {
  constexpr size_t kMostRules = 1000;  // each is compared with each module
  std::vector<ModuleTraining> training(model.modules.size());
  if (config.rules.size() > kMostRules) {
    report.error("optimizer.rules", text("has ", config.rules.size(), " rules, at most ", kMostRules, " are accepted"));
    return training;
  }
  std::vector<RuledModule> modules;
  for (const ModuleShape& module : model.modules) modules.push_back({module.path, module.kind});
  std::vector<std::string> patterns;
  for (const OptimizerRule& rule : config.rules) patterns.push_back(rule.match);
  const auto chosen = assign_patterns(patterns, modules, "optimizer.rules", report);
  for (size_t i = 0; i < training.size(); ++i) {
    const OptimizerRule rule = chosen[i] ? config.rules[*chosen[i]] : OptimizerRule{};
    const bool muon = rule.type.value_or(config.type) == OptimizerType::muon && model.modules[i].kind == ModuleKind::linear;
    training[i] = {.lr_factor = rule.lr_factor, .weight_decay = rule.weight_decay, .muon = muon};
  }
  for (size_t i = 0; i < config.rules.size(); ++i) {
    check_rule_type(config, i, chosen, model, report);
    const OptimizerRule& rule = config.rules[i];
    const std::string key = text("optimizer.rules.", i, ".weight_decay");
    if (!rule.weight_decay) continue;
    if (rule.lr_factor == 0.0) {
      report.error(key, "does nothing, because lr_factor 0 freezes these modules");
      continue;
    }
    std::vector<std::string> without;  // modules of this rule that have no matrix
    bool decays = false;
    for (size_t m = 0; m < chosen.size(); ++m) {
      if (chosen[m] != i) continue;
      if (model.modules[m].in == 0) without.push_back(model.modules[m].path);
      decays = decays || model.modules[m].in > 0;
    }
    if (!decays && !without.empty()) {
      report.error(key, text("does nothing, because \"", shortened(rule.match), "\" takes ", and_more(without),
                             ", and norms, sinks and biases do not decay"));
    }
  }
  const bool any_by_muon = std::ranges::any_of(training, [](const ModuleTraining& one) { return one.muon && !one.frozen(); });
  if (config.muon != MuonConfig{} && !any_by_muon)
    report.error("optimizer.muon", "changes nothing, because Muon trains no module: set optimizer.type to muon, or the type of a rule");
  if (std::ranges::all_of(training, &ModuleTraining::frozen)) report.error("optimizer.rules", "freeze every module, so nothing is trained");
  return training;
}

// The plan is resolved for its errors only, which are reported with all others before data is opened. The vocabulary may follow from the
// data; and a plan that is kept beside the configuration would not follow a program that changes it.
void resolve_precision(RunConfig& config, ConfigReport& report) {
  complete_recipes(config.precision, report);
  if (report.failed("model")) {
    resolve_recipes(config.precision, report);
  } else {
    const PrecisionPlan plan = PrecisionPlan::resolve(config.precision, model_shape(config.model, config.parallel.tensor), report);
    const std::optional<RecipeProblem> problem = plan.needs_cpu();
    if (problem && config.training.device == DeviceChoice::cuda)
      report.error(problem->key, problem->message + ": set training.device to cpu");
  }
}

void check_vocabulary(const RunConfig& config, ConfigReport& report) {
  if (!config.model.vocab_size && !config.data.tokenizer && !report.failed("checkpoint.init_from")) {
    const bool model_known = report.given("model") || config.checkpoint.init_from;
    report.error("model.vocab_size",
                 text("must be given, because data.tokenizer is null; or set data.tokenizer to char or byte to train on texts",
                      model_known ? "" : "; or take the model and the tokenizer of a folder with checkpoint.init_from"));
  }
  if (!config.model.vocab_size) return;
  const int64_t vocab = *config.model.vocab_size;
  if (config.data.eod_id && *config.data.eod_id >= vocab) {
    report.error("data.eod_id", text("must be below model.vocab_size ", vocab, ", got ", *config.data.eod_id));
  }
  if (config.data.uses_bytes() && vocab < Tokenizer::bytes().size()) {
    const bool taken = config.checkpoint.init_from && !report.given("model.vocab_size");
    report.error("model.vocab_size", text("the byte tokenizer has ", Tokenizer::bytes().size(), " ids, got ", vocab,
                                          taken ? " from the model in checkpoint.init_from" : ""));
  }
}

void check_schedule(const RunConfig& config, ConfigReport& report) {
  const ScheduleConfig& schedule = config.schedule;
  const std::optional<int64_t>& steps = config.training.steps;
  if (schedule.type != ScheduleType::wsd || !schedule.decay_steps || !steps || schedule.warmup_steps + *schedule.decay_steps <= *steps)
    return;
  report.error("schedule.decay_steps", text("wsd: warmup_steps ", schedule.warmup_steps, " + decay_steps ", *schedule.decay_steps,
                                            " exceed training.steps ", *steps));
}

void check_traced_steps(const RunConfig& config, ConfigReport& report) {
  if (!config.training.trace || !config.training.steps || config.training.trace->steps.size() != 2) return;
  const std::vector<int64_t>& steps = config.training.trace->steps;
  if (steps[0] > *config.training.steps)
    report.error("training.trace.steps", text("the run ends with step ", *config.training.steps, ", got [", joined(steps), "]"));
}

// Library and GPU are looked at when the device is opened, so that a run can be planned elsewhere.
void check_attention(const RunConfig& config, ConfigReport& report) {
  if (config.training.attention != AttentionBy::cudnn || report.failed("model") || report.failed("precision.dtype")) return;
  const bool gpu = backend_name(config.training.device) == "cuda";
  const AttentionDevice device{.architecture = gpu ? 90 : 0, .library = kSupposedCudnn, .by = AttentionBy::cudnn};
  const AttentionObstacle why = obstacle_of_cudnn(config.attention_form(), device);
  if (why == AttentionObstacle::none) return;
  report.error("training.attention", text("cudnn cannot be had: ", obstacle_text(why, config.attention_form(), device), ": set it to own",
                                          why == AttentionObstacle::cpu ? ", or training.device to cuda if the run will have GPUs" : ""));
}

void check_sections(const RunConfig& config, ConfigReport& report) {
  if (config.training.trace) {
    const std::vector<int64_t>& steps = config.training.trace->steps;
    if (steps.size() != 2 || steps[0] < 1 || steps[1] < steps[0])
      report.error("training.trace.steps", text("must be [first, last] with 1 <= first <= last, got [", joined(steps), "]"));
  }
  check_traced_steps(config, report);
  const bool lengths_known = !report.failed("training.seq_len") && !report.failed("model.max_position_embeddings");
  if (lengths_known && config.training.seq_len > config.model.max_position_embeddings) {
    report.error("training.seq_len", text("must be at most model.max_position_embeddings ", config.model.max_position_embeddings, ", got ",
                                          config.training.seq_len));
  }
  check_schedule(config, report);
  check_attention(config, report);
  const bool validates = config.data.has_validation() || report.failed("data");
  const char* const needs = "needs validation data: data.valid, or with data.path a data.valid_fraction above 0";
  if (config.eval.first && !validates) report.error("eval.first", needs);
  if (config.checkpoint.keep_best && !validates) report.error("checkpoint.keep_best", needs);
  const TrainingConfig& training = config.training;
  if (training.teacher == "self" && !config.checkpoint.init_from)
    report.error(
        "training.teacher",
        "self is the model of checkpoint.init_from, which is not given; name the folder of the teacher, also to resume from a path");
  for (const auto& [key, value] :
       {std::pair{"training.teacher_weight", training.teacher_weight}, {"training.teacher_temperature", training.teacher_temperature}}) {
    if (!training.teacher && value != 1.0) report.error(key, "changes nothing without training.teacher");
  }
  if (config.eval.samples && !config.data.tokenizer) report.error("eval.samples", "needs data.tokenizer, to read prompts and write text");
  if (config.eval.samples && config.eval.samples->prompts.empty()) report.error("eval.samples.prompts", "must hold at least one text");
}

// Replaces the placeholders, from left to right: what stands for one holds none.
std::string replaced(const std::string& path, const std::vector<std::pair<std::string_view, std::string>>& placeholders) {
  std::string out;
  for (size_t at = 0; at < path.size();) {
    const auto found = std::ranges::find(placeholders, std::string_view(path).substr(at, 2), [](const auto& one) { return one.first; });
    out += found != placeholders.end() ? found->second : path.substr(at, 1);
    at += found != placeholders.end() ? size_t{2} : size_t{1};
  }
  return out;
}

// Refuses a name that is part of no folder: the run would be where another is, under a name that only looks like one of its own. A folder
// that is stated later, as on the command line, stands for itself.
void check_run_name(const RunConfig& config, const RunFolders& folders, ConfigReport& report) {
  const std::string& dir = config.logging.dir;
  const auto has_name = [&](const std::filesystem::path& path) {
    return std::any_of(path.begin(), path.end(), [&](const std::filesystem::path& component) { return component == folders.name; });
  };
  const bool placed = dir.find("%n") != std::string::npos || config.checkpoint.dir.find("%n") != std::string::npos ||
                      has_name(folders.run) || has_name(folders.checkpoints);
  const auto source_of = [](const ConfigPlace& place) {  // file or argument: "a.json" of "a.json:14:11"
    const bool is_argument = place.key_origin.empty();
    const size_t line = place.origin.rfind(':', place.origin.rfind(':') - 1);
    return is_argument ? place.origin : place.origin.substr(0, line);
  };
  const ConfigPlace of_name = report.place("logging.run_name"), of_dir = report.place("logging.dir");
  const bool stated_earlier = of_name.order < of_dir.order && source_of(of_name) != source_of(of_dir);
  if (!config.logging.run_name || !report.given("logging.run_name") || placed || stated_earlier) return;
  report.error("logging.run_name", text('"', shortened(folders.name), "\" is not used, because logging.dir \"", shortened(dir),
                                        "\" has no %n: put %n where the name belongs, or leave the name out"));
}

void resolve_folders(RunConfig& config, ConfigReport& report, const std::string& file) {
  const RunFolders folders = run_folders(config, file);
  const std::string& name = folders.name;
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos || name.find('\0') != std::string::npos) {
    report.error("logging.run_name", "must be a plain file name, got \"" + shortened(name) + "\"");
  }
  check_run_name(config, folders, report);
  if (!config.logging.run_name) report.derive("logging.run_name");
  config.logging.run_name = name;
  config.logging.dir = folders.run;
  config.checkpoint.dir = folders.checkpoints;
  if (config.logging.dir.empty()) report.error("logging.dir", "must name a folder, got an empty string");
  if (config.checkpoint.dir.empty()) report.error("checkpoint.dir", "must name a folder, got an empty string");
}

// Reports entries of checkpoint.allow_model_change that are no keys.
void check_model_changes(const std::vector<std::string>& keys, ConfigReport& report) {
  ModelConfig model;
  MoeConfig moe;
  RopeScalingConfig rope;
  std::vector<std::string> known;
  for (const Field& field : fields_of(model)) known.push_back("model." + field.name);
  for (const Field& field : fields_of(moe)) known.push_back("model.moe." + field.name);
  for (const Field& field : fields_of(rope)) known.push_back("model.rope_scaling." + field.name);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (std::ranges::find(known, keys[i]) != known.end()) continue;
    const bool lacks_section = std::ranges::find(known, "model." + keys[i]) != known.end();
    report.error(text("checkpoint.allow_model_change.", i),
                 text("\"", keys[i], "\" is not a key of section model",
                      lacks_section ? text("; write \"model.", keys[i], "\"") : did_you_mean(keys[i], known)));
  }
}

}  // namespace

RunFolders run_folders(const RunConfig& config, const std::string& file) {
  const std::string stem = std::filesystem::path(file).stem().string(),
                    name = config.logging.run_name.value_or(stem.empty() ? "run" : stem),
                    run = replaced(config.logging.dir, {{"%n", name}, {"%%", "%"}});
  return {.name = name, .run = run, .checkpoints = replaced(config.checkpoint.dir, {{"%n", name}, {"%d", run}, {"%%", "%"}})};
}

void divide_model(ModelConfig& model, int64_t tensor, ConfigReport& report) {
  if (tensor == 1) return;
  const auto divide = [&](const char* what, int64_t size) {
    if (size % tensor == 0) return;
    report.error("parallel.tensor", text(what, " ", size, " cannot be divided among ", tensor, " ranks"));
  };
  divide("model.num_attention_heads", model.num_attention_heads);
  divide("model.num_key_value_heads", model.kv_heads());
  divide("model.intermediate_size", model.intermediate_size);
  if (model.moe) {
    divide("model.moe.intermediate_size", model.moe->intermediate_size);
    divide("model.moe.shared_intermediate_size", model.moe->shared_intermediate_size);
  }
  if (model.pad_vocab_to % tensor == 0) return;
  model.pad_vocab_to = std::lcm(model.pad_vocab_to, tensor);
  report.derive("model.pad_vocab_to");
}

void resolve_run_config(RunConfig& config, ConfigReport& report, const std::string& file, int64_t world) {
  if (!report.failed("parallel")) resolve_parallel(config.parallel, world, report);
  if (!report.failed("training") && !report.failed("parallel")) {
    resolve_length(config.training, report);
    resolve_batch(config.training, config.parallel.data, report);
    check_accumulation(config.training, config.parallel.data, report);
  }
  if (!report.failed("model")) resolve_model(config, report);
  if (!report.failed("data")) config.data.validate(report);
  if (!report.failed("model") && !report.failed("data")) check_vocabulary(config, report);
  if (!report.failed("precision")) resolve_precision(config, report);
  if (!report.failed("optimizer") && !report.failed("model")) resolve_training(config.optimizer, model_shape(config.model), report);
  check_sections(config, report);
  resolve_folders(config, report, file);
  resolve_input_paths(fields_of(config), report);
  std::string& resume = config.checkpoint.resume;
  std::optional<std::string>& tokenizer = config.data.tokenizer;
  if (tokenizer && tokenizer->empty()) report.error("data.tokenizer", "must be byte, char or a path, got an empty string");
  if (tokenizer && !tokenizer->empty() && !config.data.uses_bytes() && !config.data.uses_characters())
    tokenizer = absolute_input_path(*tokenizer, "data.tokenizer", report);
  if (resume.empty()) {
    report.error("checkpoint.resume", "must be never, auto or a path, got an empty string");
  } else if (config.checkpoint.resumes_named()) {
    resume = absolute_input_path(resume, "checkpoint.resume", report);
  }
  if (config.checkpoint.resumes_named() && config.checkpoint.init_from) {
    report.error("checkpoint.init_from", text("excludes checkpoint.resume ", resume, ", because it starts at step 0",
                                              config.training.teacher == "self" ? "; name the teacher itself in training.teacher" : ""));
  }
  std::optional<std::string>& teacher = config.training.teacher;
  if (teacher && teacher->empty()) report.error("training.teacher", "must be a path, self or null, got an empty string");
  if (teacher && !teacher->empty() && teacher != "self") teacher = absolute_input_path(*teacher, "training.teacher", report);
  check_model_changes(config.checkpoint.allow_model_change, report);
}

double steps_of(double sequences, int64_t global_batch) {
  constexpr double kRounding = 1e-12;
  return std::ceil(sequences / static_cast<double>(global_batch) * (1.0 - kRounding));
}

void resolve_steps(RunConfig& config, int64_t sequences, ConfigReport& report) {
  TrainingConfig& training = config.training;
  if (!training.epochs) return;
  const double steps = std::max(1.0, steps_of(*training.epochs * static_cast<double>(sequences), *training.global_batch_size));
  if (steps > kMostSteps) {
    report.error("training.epochs", text(*training.epochs, " are more than ", kMostSteps, " steps of ", *training.global_batch_size, " of ",
                                         count_text(sequences, "sequence")));
    return;
  }
  training.steps = static_cast<int64_t>(steps);
  check_schedule(config, report);
  check_traced_steps(config, report);
}

RunConfig teacher_config(const RunConfig& config) {
  require(config.teacher.has_value(), "a run without a teacher");
  RunConfig out = config;
  out.model = *config.teacher;
  out.precision = {};
  out.precision.dtype = config.precision.dtype;
  out.precision.native_products = config.precision.native_products;
  out.precision.grouped_gemms = config.precision.grouped_gemms;
  out.optimizer = {};  // it is not trained
  out.teacher.reset();
  ConfigReport report;
  divide_model(out.model, out.parallel.tensor, report);
  if (out.model.moe) divide_experts(out, report);
  const std::string where = "training.teacher: the model of " + *config.teacher_path();
  const int64_t wanted = config.model.vocab_size.value_or(out.model.vocab_size.value_or(0)), ids = out.model.vocab_size.value_or(wanted),
                positions = out.model.max_position_embeddings;
  require(ids == wanted, ExitCode::usage, where, " has ", ids, " ids, but model.vocab_size is ", wanted,
          ": a model learns only from one of the same vocabulary");
  require(config.training.seq_len <= positions, ExitCode::usage, where, " takes at most ", positions, " tokens, but training.seq_len is ",
          config.training.seq_len);
  try {
    report.throw_if_failed();
  } catch (const Error& error) {
    fail(error.code(), where, ": ", error.what());
  }
  if (!out.model.vocab_size) out.model.vocab_size = config.model.vocab_size;
  out.model.pad_vocab_to = config.model.pad_vocab_to;  // as many columns of logits
  return out;
}

PrecisionPlan resolve_plan(const RunConfig& config) {
  ConfigReport report;
  const ModelShape model = model_shape(config.model, config.parallel.tensor);
  PrecisionPlan plan = PrecisionPlan::resolve(config.precision, model, report);
  plan.set_training(resolve_training(config.optimizer, model, report));
  report.throw_if_failed();
  return plan;
}

namespace {

struct PrecisionSection {
  PrecisionConfig precision;

  void fields(auto& v) { v("precision", precision, "number formats per module"); }
};

}  // namespace

RunConfig with_precision(RunConfig config, const std::vector<std::string>& sets) {
  for (const std::string& set : sets) {
    require(set.starts_with("precision."), ExitCode::usage, "--set ", printable(shortened(set)),
            ": a model is used with other values of section precision only");
    require(!set.starts_with("precision.dtype"), ExitCode::usage, "--set ", printable(shortened(set)),
            ": the model computes in its own type, or in that of --dtype");
    require(!set.starts_with("precision.report_interval") && !set.starts_with("precision.fp8_param_gather"), ExitCode::usage, "--set ",
            printable(shortened(set)), ": is of training alone, and changes nothing here");
    require(!(set.starts_with("precision.recipes.") && set.substr(0, set.find('=')).ends_with(".base")), ExitCode::usage, "--set ",
            printable(shortened(set)),
            ": the recipe of the model is complete, so nothing would follow from another base: give a whole recipe");
  }
  PrecisionSection section{config.precision};
  ConfigReport report;
  read_config({.file = "the model's configuration", .text = effective_config(section), .sets = sets}, fields_of(section), report);
  complete_recipes(section.precision, report);
  report.throw_if_failed();
  config.precision = std::move(section.precision);
  config.precision.fp8_param_gather = false;  // it stores what training sends, and other recipes may have no such weights
  config.precision.report_interval = 0;
  return config;
}

template const FieldType& detail::field_type<RunConfig>();

}  // namespace mantissa
