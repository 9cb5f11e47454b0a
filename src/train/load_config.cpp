#include "mantissa/train/load_config.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "base/file.h"
#include "checkpoint/checkpoint_search.h"
#include "checkpoint/saved_model.h"
#include "data/batch.h"
#include "hf/export.h"
#include "hf/gguf_reader.h"
#include "hf/load_model.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

constexpr const char* kZeroStage = "the ZeRO stage cannot be chosen: with several data ranks it is 1";

constexpr const char* kPacked =
    "fine-tuning examples are always packed into rows of training.seq_len tokens and do not attend to each other";
constexpr const char* kMasked = "in fine-tuning examples, only completions and messages of the assistant are trained on";

// Keys of Megatron, torchtitan, DeepSpeed, TRL and axolotl (and of Hugging Face where they differ), as written or with dashes.
const ForeignNames kForeignNames = {
    {"train_iters", "training.steps"},
    {"max_steps", "training.steps"},
    {"max_iters", "training.steps"},
    {"num_train_epochs", "training.epochs"},
    {"num_epochs", "training.epochs"},
    {"seq_length", "training.seq_len"},
    {"block_size", "training.seq_len"},
    {"max_seq_length", "training.seq_len"},
    {"sequence_len", "training.seq_len"},
    {"packing", kPacked},
    {"sample_packing", kPacked},
    {"train_on_inputs", kMasked},
    {"completion_only_loss", kMasked},
    {"assistant_only_loss", kMasked},
    {"batch_size", "training.micro_batch_size"},
    {"train_micro_batch_size_per_gpu", "training.micro_batch_size"},
    {"train_batch_size", "training.global_batch_size"},
    {"gradient_accumulation_steps", "training.grad_accum"},
    {"learning_rate", "optimizer.lr"},
    {"min_lr", "schedule.min_lr_ratio"},
    {"min_lr_factor", "schedule.min_lr_ratio"},
    {"lr_decay_style", "schedule.type"},
    {"decay_type", "schedule.type"},
    {"lr_warmup_iters", "schedule.warmup_steps"},
    {"warmup_iters", "schedule.warmup_steps"},
    {"lr_decay_iters", "schedule.decay_steps"},
    {"lr_scheduler", "schedule"},
    {"scheduler", "schedule"},
    {"adam_beta1", "optimizer.beta1"},
    {"adam_beta2", "optimizer.beta2"},
    {"adam_eps", "optimizer.eps"},
    {"clip_grad", "optimizer.grad_clip"},
    {"max_norm", "optimizer.grad_clip"},
    {"gradient_clipping", "optimizer.grad_clip"},
    {"save", "checkpoint.dir"},
    {"folder", "checkpoint.dir"},
    {"load", "checkpoint.resume"},
    {"save_interval", "checkpoint.interval"},
    {"keep_latest_k", "checkpoint.keep_latest"},
    {"data_path", "data.train"},
    {"eod_mask_loss", "data.mask_eod_loss"},
    {"reset_attention_mask", "data.document_mask"},
    {"eval_interval", "eval.interval"},
    {"eval_iters", "eval.iters"},
    {"log_interval", "logging.interval"},
    {"log_freq", "logging.interval"},
    {"steps_per_print", "logging.interval"},
    {"enable_tensorboard", "logging.tensorboard"},
    {"n_layer", "model.num_layers"},
    {"num_hidden_layers", "model.num_layers"},
    {"n_head", "model.num_attention_heads"},
    {"n_embd", "model.hidden_size"},
    {"ffn_hidden_size", "model.intermediate_size"},
    {"num_query_groups", "model.num_key_value_heads"},
    {"kv_channels", "model.head_dim"},
    {"rms_norm_eps", "model.norm_eps"},
    {"layer_norm_epsilon", "model.norm_eps"},
    {"hidden_act", "model.activation"},
    {"bf16", "precision.dtype"},
    {"fp8_recipe", "precision.recipe"},
    {"fp8_format", "precision.recipe"},
    {"matchers", "precision.rules"},
    {"first_last_layers_bf16", "precision.rules"},
    {"metrics", "logging"},
    {"parallelism", "parallel"},
    {"data_parallel_replicate_degree", "parallel.data"},
    {"zero_stage", kZeroStage},
    {"zero_optimization", kZeroStage},
    {"use_distributed_optimizer", kZeroStage},
    {"data_parallel_sharding_strategy", kZeroStage},
    {"data_parallel_shard_degree", kZeroStage},
    {"tensor_model_parallel_size", "parallel.tensor"},
    {"tensor_parallel_degree", "parallel.tensor"},
    {"expert_model_parallel_size", "parallel.expert"},
    {"expert_parallel_degree", "parallel.expert"},
    // Names of earlier versions.
    {"quantised_dispatch", "precision.quantized_dispatch"},
    {"score_after_choice", "model.moe.softmax_after_topk"},
};

// Reports a path under `key` that is not there. advice: for one of which not even the folder is there.
void check_checkpoint(const std::string& path, const std::string& key, const char* what, const char* advice, ConfigReport& report) {
  std::error_code error;
  if (report.failed(key) || std::filesystem::exists(path, error)) return;
  const bool alone = !std::filesystem::exists(std::filesystem::path(path).parent_path(), error);
  report.error(key, text("no such ", what, ": \"", path, "\"", steps_beside(path), alone ? advice : ""));
}

void check_initial_model(const std::string& path, ConfigReport& report) {
  check_checkpoint(path, "checkpoint.init_from", "checkpoint or folder of a model",
                   "; nothing is downloaded: fetch the model from Hugging Face first, and name its folder", report);
}

bool holds_checkpoints(const std::filesystem::path& folder) {
  std::error_code error;
  return std::filesystem::is_directory(folder, error) && !checkpoint_candidates({.folder = folder, .name = ""}).empty();
}

// Reports every input path that is needed and does not exist, with the pattern and what its folder holds.
void check_inputs_exist(const RunConfig& config, Start start, ConfigReport& report) {
  const auto check_data = [&report](const std::string& path, const std::string& key) {
    if (report.failed(key)) return;
    try {
      expand_paths(path, key);
    } catch (const Error& error) {
      report.error(key, error.what());
    }
  };
  if (config.data.path) check_data(*config.data.path, "data.path");
  const auto check_sets = [&](const std::vector<WeightedPath>& sets, const char* key) {
    for (size_t i = 0; i < sets.size(); ++i) check_data(sets[i].path, text(key, '.', i, ".path"));
  };
  check_sets(config.data.train, "data.train");
  check_sets(config.data.valid, "data.valid");
  const CheckpointConfig& checkpoint = config.checkpoint;
  if (checkpoint.resumes_named()) {
    check_checkpoint(checkpoint.resume, "checkpoint.resume", "checkpoint", "", report);
  } else if (start == Start::resumed && !report.failed("checkpoint") && !report.failed("logging") && !holds_checkpoints(checkpoint.dir)) {
    std::error_code unknown;
    report.error("checkpoint.resume", text("there is no checkpoint to resume from in ",
                                           std::filesystem::absolute(checkpoint.dir, unknown).lexically_normal().string(),
                                           "; give the folder of the run with logging.dir, or start the run without --resume"));
  }
  const bool continues = checkpoint.resume == "auto" && holds_checkpoints(checkpoint.dir);
  if (checkpoint.init_from && !continues) check_initial_model(*checkpoint.init_from, report);
}

// Names the configuration in a folder that was given in its place, and the key of a model or a text that was.
void refuse_what_is_no_config(const std::filesystem::path& file) {
  std::error_code none;
  const std::filesystem::path inside = file / "config.json";
  require(!std::filesystem::is_directory(file, none) || !std::filesystem::exists(inside, none), ExitCode::usage, file.string(),
          ": is a folder; its configuration is ", inside.string());
  if (!std::filesystem::is_regular_file(file, none)) return;
  const File content = File::open_input(file);
  std::array<char, 64> begin{};
  const auto read = std::min<int64_t>(content.size(), std::ssize(begin));
  content.read_at(0, std::as_writable_bytes(std::span(begin)).first(static_cast<size_t>(read)));
  const size_t first = std::string_view(begin.data(), static_cast<size_t>(read)).find_first_not_of(" \t\r\n");
  require(!is_gguf_file(file), ExitCode::usage, file.string(),
          ": is a model, not a configuration; name a configuration, and the model with --set checkpoint.init_from=", file.string());
  const bool json = first == std::string_view::npos || std::string_view("{[\"/\xEF").find(begin.at(first)) != std::string_view::npos;
  require(json, ExitCode::usage, file.string(),
          ": is not a configuration, which is JSON and begins with {; to train on a text, give it with --set data.path=", file.string());
}

constexpr const char* kResume = "checkpoint.resume";
constexpr const char* kInitFrom = "checkpoint.init_from";
constexpr const char* kTeacher = "training.teacher";
constexpr int64_t kLargestRecord = 64 << 20;  // bytes of run.json

// Holds what config.json of a run stands for.
struct RunPlace {
  std::filesystem::path folder;     // holds the file
  std::filesystem::path directory;  // working directory of the run
};

// Returns the place of the run that wrote this file as its config.json, which run.json beside it tells; none for any other file.
std::optional<RunPlace> run_place_of(const ConfigSources& sources) {
  const std::filesystem::path file = sources.file;
  std::filesystem::path folder = file.parent_path();
  const std::filesystem::path record = folder / "run.json";
  std::error_code error;
  if (sources.text || file.filename() != "config.json" || !std::filesystem::is_regular_file(record, error)) return {};
  const Json run = parse_json_or_null(File::open_input(record).content(kLargestRecord));
  if (!run.contains("git_revision")) return {};
  const std::filesystem::path name = folder.filename();
  if (name.empty() || name == "." || name == "..") folder = std::filesystem::canonical(folder.empty() ? "." : folder, error);
  if (!folder.has_filename()) return {};
  return RunPlace{.folder = folder, .directory = run.get("directory").string()};
}

// Gives a member of a section another text, at the place where it stands.
void set_text(Json& section, const char* name, std::string value) {
  Json& member = section[name];
  Json next(std::move(value));
  next.key = member.key, next.place = member.place;
  member = std::move(next);
}

// Returns the path as logging.dir and checkpoint.dir spell it.
std::string spelled(const std::filesystem::path& path) {
  std::string out;
  for (const char c : path.string()) out += c == '%' ? std::string("%%") : std::string(1, c);
  return out;
}

// Makes config.json of a run name its folders as they are called now: it has them as they were called when the run started, seen from the
// working directory of then.
void name_folders(const RunPlace& run, Json& file) {
  const std::string folder = file.get("logging").get("dir").string(), checkpoints = file.get("checkpoint").get("dir").string();
  if (!checkpoints.empty()) {
    const std::filesystem::path there = (run.directory / checkpoints).lexically_normal(),
                                inside = there.lexically_relative((run.directory / folder).lexically_normal());
    const bool is_inside = !folder.empty() && !inside.empty() && *inside.begin() != "..";
    set_text(file["checkpoint"], "dir", is_inside ? "%d/" + spelled(inside) : spelled(there));
  }
  if (folder.empty()) return;
  const bool named = file["logging"].get("run_name").is_string();
  if (named) set_text(file["logging"], "run_name", run.folder.filename().string());
  set_text(file["logging"], "dir", named ? spelled(run.folder.parent_path() / "") + "%n" : spelled(run.folder));
}

// config.json of a run has the steps that followed from its epochs, which follow anew.
void forget_steps_of_epochs(Json& file) {
  if (!file.get("training").get("epochs").is_number()) return;
  Json& steps = file["training"]["steps"];
  Json none;
  none.key = steps.key, none.place = steps.place;
  steps = std::move(none);
}

bool is_stated_in(const std::string& file, const char* key, const ConfigReport& report) {
  return report.given(key) && report.place(key).origin.starts_with(printable(file) + ":");
}

// Applies what the command says to checkpoint.resume. A path that own_file, the config.json of a run, names there has served its purpose,
// and so has any path once the attempt before a restart has saved. file: that which names a run without a name.
void take_start(Start start, const std::string& own_file, const std::string& file, LoadedConfig& loaded) {
  std::string& resume = loaded.config.checkpoint.resume;
  ConfigReport& report = loaded.report;
  loaded.restarted = start == Start::restarted;
  if (start == Start::as_configured || report.failed(kResume)) return;
  const bool named = loaded.config.checkpoint.resumes_named();
  if (loaded.restarted && (resume == "auto" || (named && !holds_checkpoints(run_folders(loaded.config, file).checkpoints)))) return;
  if (start == Start::resumed && named && !is_stated_in(own_file, kResume, report)) {
    report.error(kResume, text("names ", resume, ", but --resume continues this run: leave out one of them (--set ", kResume, "=never)"));
    return;
  }
  resume = "auto";
  report.set_place(kResume, {.origin = start == Start::resumed ? "--resume" : "a restart by the launcher"});
}

// Says where a run takes its model and its tokenizer from, and by which key. What is there is read when it is asked for, and once: it takes
// time, and a search for a checkpoint logs those that it passes over.
struct Origin {
  std::string key = {}, path = {};  // "": nowhere
  bool continues = false;           // else the run starts there
  std::optional<RunConfig> read_config = {};
  std::optional<std::optional<Tokenizer>> read_tokenizer = {};

  bool is_checkpoint() const { return !path.empty() && !is_published_model(path); }
  const RunConfig& config() {
    if (!read_config) read_config = config_of_model(path);
    return *read_config;
  }
  const std::optional<Tokenizer>& saved_tokenizer() {  // that of a checkpoint
    if (!read_tokenizer) read_tokenizer.emplace(tokenizer_saved_at(path));
    return *read_tokenizer;
  }
};

Origin origin_of(const LoadedConfig& loaded, const std::string& file) {
  const CheckpointConfig& checkpoint = loaded.config.checkpoint;
  for (const char* const key : {kResume, kInitFrom, "checkpoint.dir", "logging.dir", "logging.run_name"})
    if (loaded.report.failed(key)) return {};
  if (checkpoint.resumes_named())
    return {.key = kResume, .path = absolute_input_path(checkpoint.resume, kResume, loaded.report), .continues = true};
  const std::string own = run_folders(loaded.config, file).checkpoints;
  if (checkpoint.resume == "auto" && holds_checkpoints(own)) return {.key = kResume, .path = own, .continues = true};
  if (!checkpoint.init_from) return {};
  return {.key = kInitFrom, .path = absolute_input_path(*checkpoint.init_from, kInitFrom, loaded.report)};
}

// Marks as derived what no source gives.
void derive_rest(const std::string& section, const std::vector<Field>& fields, ConfigReport& report) {
  for (const Field& field : fields) {
    const std::string key = section + "." + field.name;
    const bool is_section = field.kind() == FieldKind::object && !std::holds_alternative<std::monostate>(field.get());
    if (is_section) derive_rest(key, field.members(), report);
    if (!report.given(key)) report.derive(key);
  }
}

// Takes the model of the origin if the config has no section model, and over it the keys of the model that --set gives. Reports mistakes
// that the user can mend. Throws Error(data) for files that are damaged, Error(environment) for those that the system cannot read.
void take_saved_model(Origin& origin, LoadedConfig& loaded) {
  const bool has_section = loaded.report.given("model") && !loaded.report.made_of_members("model");
  if (origin.path.empty() || has_section || loaded.report.failed("model")) return;
  std::error_code missing;
  if (!std::filesystem::exists(origin.path, missing)) {
    if (!origin.continues) check_initial_model(origin.path, loaded.report);
    return;
  }
  try {
    loaded.config.model = origin.config().model;
    if (!origin.continues) loaded.config.model.pad_vocab_to = 1;
    read_section("model", fields_of(loaded.config.model), loaded.report);
    derive_rest("model", fields_of(loaded.config.model), loaded.report);
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    loaded.report.error(origin.key, error.what());
  }
}

// Returns whether Tokenizer::from_path() finds a file there that is one.
bool has_tokenizer_file(const std::filesystem::path& path) {
  std::error_code missing;
  if (is_gguf_file(path)) return false;
  return (std::filesystem::is_regular_file(path, missing) && !is_pointer(path)) ||
         std::filesystem::is_regular_file(path / "tokenizer.json", missing);
}

// Takes the tokenizer of the origin, if the config does not name one or null.
void take_saved_tokenizer(Origin& origin, LoadedConfig& loaded) {
  std::optional<std::string>& tokenizer = loaded.config.data.tokenizer;
  std::error_code missing;
  if (!std::filesystem::exists(origin.path, missing) || loaded.report.given("data.tokenizer")) return;
  if (loaded.report.failed("model") || loaded.report.failed(origin.key)) return;
  try {
    std::optional<std::string> name;
    std::optional<Tokenizer> found;  // none if a folder or a checkpoint to start from has none
    if (origin.continues) {
      name = origin.config().data.tokenizer;
    } else if (origin.is_checkpoint()) {
      found = origin.saved_tokenizer();
    } else if (has_tokenizer_file(origin.path) || (is_gguf_file(origin.path) && has_gguf_tokenizer(GgufFile(origin.path).header()))) {
      found = tokenizer_at(origin.path);
    }
    if (found) {
      const int64_t ids = found->size(), most = loaded.config.model.vocab_size.value_or(ids);
      require(ids <= most, ExitCode::data, origin.path, is_gguf_file(origin.path) ? ": its tokenizer" : "/tokenizer.json:", " has ", ids,
              " ids, but the model has ", most);
      name = found->kind() == TokenizerKind::byte ? choice_name(TokenizerKind::byte) : origin.path;
    }
    tokenizer = std::move(name);
    if (tokenizer) loaded.report.derive("data.tokenizer");
  } catch (const Error& error) {
    const std::string problem = text("the tokenizer of ", origin.key, " cannot be used: ", error.what(),
                                     "; name another, or set it to null to train on token files only");
    if (origin.is_checkpoint() && error.code() != ExitCode::usage) fail(error.code(), "data.tokenizer: ", problem);
    loaded.report.error("data.tokenizer", problem);
  }
}

// Reads a tokenizer that lies in no file of its own: that of the checkpoint from which the run goes on, if data.tokenizer is what that was
// trained with, which may be gone; else of the run, or of the GGUF file, that data.tokenizer names, which the checkpoint must fit.
void read_saved_tokenizer(Origin& origin, LoadedConfig& loaded) {
  RunConfig& config = loaded.config;
  const std::optional<std::string>& path = config.data.tokenizer;
  if (!path || config.data.uses_bytes() || config.data.uses_characters() || !loaded.report.ok() || has_tokenizer_file(*path)) return;
  const std::string from = origin.continues && origin.config().data.tokenizer == path ? origin.path : *path;
  std::error_code missing;
  std::optional<Tokenizer> tokenizer;
  if (is_gguf_file(from)) {
    tokenizer = tokenizer_at(from);
  } else {
    if (!std::filesystem::exists(from, missing) || checkpoint_candidates(find_checkpoint(from)).empty()) return;
    tokenizer = from == origin.path ? origin.saved_tokenizer() : tokenizer_saved_at(from);
  }
  if (!tokenizer) return;
  if (!config.model.vocab_size) loaded.report.derive("model.vocab_size");
  config.model.vocab_size = config.model.vocab_size.value_or(tokenizer->size());
  loaded.tokenizer = std::make_shared<SavedTokenizer>(SavedTokenizer{.tokenizer = std::move(*tokenizer), .from = from});
}

// Reads the model of training.teacher, which a run needs to its end, also one that goes on. Where inputs may be missing, one that is not
// there is left out, but `self`: that has the shape of the run's own model. Throws Error(data) for a damaged one.
void take_teacher(LoadedConfig& loaded, Inputs inputs) {
  RunConfig& config = loaded.config;
  ConfigReport& report = loaded.report;
  for (const char* const section : {"training", "checkpoint", "model", "parallel"})
    if (report.failed(section)) return;
  const std::optional<std::string> path = config.teacher_path();
  if (!path) return;
  std::error_code missing;
  if (inputs == Inputs::unchecked && !std::filesystem::exists(*path, missing)) {
    if (config.training.teacher == "self") config.teacher = config.model;
    return;
  }
  check_checkpoint(*path, kTeacher, "checkpoint or folder of a model, from which this run learns to its end", "", report);
  if (report.failed(kTeacher)) return;
  try {
    config.teacher = config_of_model(*path).model;
    teacher_config(config);
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    const std::string_view message = error.what(), key = "training.teacher: ";
    report.error(kTeacher, std::string(message.starts_with(key) ? message.substr(key.size()) : message));
  }
}

}  // namespace

LoadedConfig load_run_config(const ConfigSources& sources, Inputs inputs, int64_t world, Start start) {
  if (!sources.text) refuse_what_is_no_config(sources.file);
  LoadedConfig loaded;
  const std::optional<RunPlace> run = run_place_of(sources);
  ConfigSources adapted = sources;
  if (run) {
    adapted.adapt = [&run](Json& file) {
      name_folders(*run, file);
      forget_steps_of_epochs(file);
    };
  }
  if (read_config(adapted, fields_of(loaded.config), loaded.report, kForeignNames)) {
    for (const char* const key : {"logging.dir", "logging.run_name", "checkpoint.dir"}) {  // these follow the folder of a run
      const bool elsewhere = std::string_view(key) == "checkpoint.dir" && !loaded.config.checkpoint.dir.starts_with("%d");
      if (run && !elsewhere && is_stated_in(sources.file, key, loaded.report)) loaded.report.derive(key);
    }
    take_start(start, run ? sources.file : "", sources.file, loaded);
    Origin origin = origin_of(loaded, sources.file);
    take_saved_model(origin, loaded);
    take_saved_tokenizer(origin, loaded);
    resolve_run_config(loaded.config, loaded.report, sources.file, world);
    check_export(loaded.config, loaded.report);
    if (inputs == Inputs::must_exist) check_inputs_exist(loaded.config, start, loaded.report);
    read_saved_tokenizer(origin, loaded);
    take_teacher(loaded, inputs);
  }
  loaded.report.throw_if_failed();
  return loaded;
}

}  // namespace mantissa
