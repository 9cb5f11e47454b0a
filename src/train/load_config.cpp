#include "mantissa/train/load_config.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "mantissa/base/file.h"
#include "mantissa/checkpoint/checkpoint_search.h"
#include "mantissa/data/dataset.h"
#include "mantissa/hf/export.h"
#include "mantissa/hf/load_model.h"

namespace mantissa {
namespace {

constexpr const char* kZeroStage = "there is no stage of ZeRO to choose: with several data ranks it is 1";

constexpr const char* kPacked = "examples to fine-tune on are always packed into rows of training.seq_len tokens, and none sees another";
constexpr const char* kMasked = "of examples to fine-tune on only completions are trained, and what the assistant says";

// Keys of Megatron, torchtitan, DeepSpeed, TRL and axolotl (and of Hugging Face where they differ), as written or with dashes.
const ForeignNames kForeignNames = {
    {"train_iters", "training.steps"},
    {"max_steps", "training.steps"},
    {"max_iters", "training.steps"},
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

void check_data(const std::string& path, const std::string& key, ConfigReport& report) {
  if (report.failed(key)) return;
  try {
    expand_paths(path, key);
  } catch (const Error& error) {
    report.error(key, error.what());
  }
}

struct Wanted {
  const char* what;
  const char* advice = "";  // where not even its folder is there
};

void check_checkpoint(const std::string& path, const std::string& key, const Wanted& wanted, ConfigReport& report) {
  std::error_code error;
  if (report.failed(key) || std::filesystem::exists(path, error)) return;
  const bool alone = !std::filesystem::exists(std::filesystem::path(path).parent_path(), error);
  report.error(key, text("no such ", wanted.what, ": \"", path, "\"", steps_beside(path), alone ? wanted.advice : ""));
}

void check_initial_model(const std::string& path, ConfigReport& report) {
  check_checkpoint(path, "checkpoint.init_from",
                   {"checkpoint or folder of a model", "; nothing is downloaded: fetch a model of Hugging Face first, and name its folder"},
                   report);
}

bool continues(const CheckpointConfig& config) {
  std::error_code error;
  return config.resume == "auto" && std::filesystem::is_directory(config.dir, error) && !list_checkpoints(config.dir).empty();
}

void check_sets(const std::vector<WeightedPath>& sets, const std::string& key, ConfigReport& report) {
  for (size_t i = 0; i < sets.size(); ++i) check_data(sets[i].path, text(key, '.', i, ".path"), report);
}

// Every input path that is needed and does not exist, with the pattern and what its folder holds.
void check_inputs_exist(const RunConfig& config, ConfigReport& report) {
  if (config.data.path) check_data(*config.data.path, "data.path", report);
  check_sets(config.data.train, "data.train", report);
  check_sets(config.data.valid, "data.valid", report);
  const std::string& resume = config.checkpoint.resume;
  if (resume != "never" && resume != "auto") check_checkpoint(resume, "checkpoint.resume", {"checkpoint"}, report);
  if (config.checkpoint.init_from && !continues(config.checkpoint)) check_initial_model(*config.checkpoint.init_from, report);
}

// Names the configuration in a folder that was given in its place, and the key of a text that was.
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
  const bool json = first == std::string_view::npos || std::string_view("{[\"/\xEF").find(begin.at(first)) != std::string_view::npos;
  require(json, ExitCode::usage, file.string(),
          ": is no configuration, which is JSON and begins with {; a text to train on is --set data.path=", file.string());
}

// Takes the model of checkpoint.init_from if the config has no section model. What the user can mend is reported. Throws Error(data) for
// files that are damaged, Error(environment) for those that the system cannot read.
void take_saved_model(LoadedConfig& loaded) {
  const std::optional<std::string>& from = loaded.config.checkpoint.init_from;
  if (!from || loaded.report.given("model") || loaded.report.failed("checkpoint")) return;
  const std::string key = "checkpoint.init_from", path = absolute_input_path(*from, key, loaded.report);
  std::error_code missing;
  if (!std::filesystem::exists(path, missing)) return check_initial_model(path, loaded.report);
  try {
    loaded.config.model = config_of_model(path).model;
    loaded.config.model.pad_vocab_to = 1;
    for (const Field& field : fields_of(loaded.config.model)) loaded.report.derive("model." + field.name);
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    loaded.report.error(key, error.what());
  }
}

bool is_hf_folder_with_tokenizer(const std::string& folder) {
  std::error_code missing;
  return is_hf_folder(folder) && std::filesystem::exists(std::filesystem::path(folder) / "tokenizer.json", missing);
}

void require_ids_of_model(const std::string& folder, const ModelConfig& model) {
  const int64_t ids = Tokenizer::from_path(folder).size(), most = model.vocab_size.value_or(ids);
  require(ids <= most, ExitCode::data, folder, "/tokenizer.json: has ", ids, " ids, and the model has ", most);
}

// Takes the tokenizer of a folder of Hugging Face's form that the run starts from, if the config does not name one or null.
void take_saved_tokenizer(LoadedConfig& loaded) {
  RunConfig& config = loaded.config;
  const std::optional<std::string>& from = config.checkpoint.init_from;
  if (!from || loaded.report.given("data.tokenizer") || loaded.report.failed("checkpoint") || loaded.report.failed("model")) return;
  const std::string path = absolute_input_path(*from, "checkpoint.init_from", loaded.report);
  if (!is_hf_folder_with_tokenizer(path)) return;
  try {
    require_ids_of_model(path, config.model);
    config.data.tokenizer = path;
    loaded.report.derive("data.tokenizer");
  } catch (const Error& error) {
    loaded.report.error("data.tokenizer", text("that of checkpoint.init_from cannot be used: ", error.what(),
                                               "; name another, or set it to null to train on token files alone"));
  }
}

}  // namespace

LoadedConfig load_run_config(const ConfigSources& sources, Inputs inputs, int64_t world) {
  if (!sources.text) refuse_what_is_no_config(sources.file);
  LoadedConfig loaded;
  if (read_config(sources, fields_of(loaded.config), loaded.report, kForeignNames)) {
    take_saved_model(loaded);
    take_saved_tokenizer(loaded);
    resolve_run_config(loaded.config, loaded.report, sources.file, world);
    check_export(loaded.config, loaded.report);
    if (inputs == Inputs::must_exist) check_inputs_exist(loaded.config, loaded.report);
  }
  loaded.report.throw_if_failed();
  return loaded;
}

}  // namespace mantissa
