// The configuration of a run: one struct per section of the JSON file, which load_run_config() (train/load_config.h) fills.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/backend/attention_path.h"
#include "mantissa/base/log.h"
#include "mantissa/data/data_config.h"
#include "mantissa/json/config.h"
#include "mantissa/json/fields.h"
#include "mantissa/models/model_config.h"
#include "mantissa/precision/plan.h"

namespace mantissa {

// The device of a run (training.device) or of a command (--device). A checkpoint has none: what one device saved is used on any other.

enum class DeviceChoice { automatic, cpu, cuda, cpu_reference };

constexpr auto choices(DeviceChoice) {
  return std::array{Choice{"auto", DeviceChoice::automatic}, Choice{"cpu", DeviceChoice::cpu}, Choice{"cuda", DeviceChoice::cuda},
                    Choice{"cpu_reference", DeviceChoice::cpu_reference}};
}

inline constexpr const char* kDeviceChoices = "auto: a GPU where there is one, else cpu; cpu_reference: plain kernels, slow";

// Options of an export: those of `mantissa export`, and checkpoint.export of a run.

enum class ExportDtype { automatic, bf16, fp32 };  // automatic: the narrowest that is exact (ForwardWeights::dtype)
constexpr auto choices(ExportDtype) {
  return std::array{Choice{"auto", ExportDtype::automatic}, Choice{"bf16", ExportDtype::bf16}, Choice{"fp32", ExportDtype::fp32}};
}

// dequantized: values; packed: quantized weights as codes and scales, by a convention (packing.h).
enum class ExportWeights { dequantized, packed };
constexpr auto choices(ExportWeights) {
  return std::array{Choice{"dequantized", ExportWeights::dequantized}, Choice{"packed", ExportWeights::packed}};
}

// Names, layouts and keys of a folder: those of transformers, or of mlx-lm (hf/mlx.h). gguf: of a file that ggml reads (io/gguf_file.h).
enum class ExportFormat { hf, mlx, gguf };
constexpr auto choices(ExportFormat) { return std::array{Choice{"hf", ExportFormat::hf}, Choice{"mlx", ExportFormat::mlx}}; }

// Form in which a server expects codes and scales in a folder of transformers (hf/packing.h).
enum class Convention { compressed_tensors, sglang, modelopt, fp8 };
constexpr auto choices(Convention) {
  return std::array{Choice{"compressed-tensors", Convention::compressed_tensors}, Choice{"sglang", Convention::sglang},
                    Choice{"modelopt", Convention::modelopt}, Choice{"fp8", Convention::fp8}};
}

struct ExportOptions {
  ExportFormat format = ExportFormat::hf;
  ExportWeights weights = ExportWeights::dequantized;
  Convention convention = Convention::compressed_tensors;
  ExportDtype dtype = ExportDtype::automatic;  // dtype of values
  bool allow_different = false;                // else a model that programs of the format compute otherwise is refused

  bool operator==(const ExportOptions&) const = default;
  void fields(auto& v) {
    v("format", format, "hf: a folder for transformers and its servers; mlx: one for mlx-lm");
    v("weights", weights, "dequantized: values; packed: codes and scales of what the plan quantizes");
    v("convention", convention, "layout of packed weights in the format hf, by the servers that read it; gpt-oss has its own");
    v("dtype", dtype, "type of dequantized values; auto: the narrowest that holds each tensor exactly");
    v("allow_different", allow_different, "export to mlx also what mlx-lm computes otherwise; README.md of the folder says what");
  }
};

enum class OptimizerType { adamw, muon };
enum class MuonScale { match_rms_adamw, original };
enum class ScheduleType { cosine, linear, constant, wsd };  // wsd: stable, then linear decay over decay_steps
enum class Accumulation { running, tree };
enum class CommBackend { automatic, ucx };
enum class ConsoleMode { automatic, progress, plain, off };

constexpr auto choices(OptimizerType) { return std::array{Choice{"adamw", OptimizerType::adamw}, Choice{"muon", OptimizerType::muon}}; }
constexpr auto choices(MuonScale) {
  return std::array{Choice{"match_rms_adamw", MuonScale::match_rms_adamw}, Choice{"original", MuonScale::original}};
}
constexpr auto choices(ScheduleType) {
  return std::array{Choice{"cosine", ScheduleType::cosine}, Choice{"linear", ScheduleType::linear},
                    Choice{"constant", ScheduleType::constant}, Choice{"wsd", ScheduleType::wsd}};
}
constexpr auto choices(Accumulation) { return std::array{Choice{"running", Accumulation::running}, Choice{"tree", Accumulation::tree}}; }
constexpr auto choices(AttentionBy) {
  return std::array{Choice{"auto", AttentionBy::automatic}, Choice{"own", AttentionBy::own}, Choice{"cudnn", AttentionBy::cudnn}};
}
constexpr auto choices(CommBackend) { return std::array{Choice{"auto", CommBackend::automatic}, Choice{"ucx", CommBackend::ucx}}; }
constexpr auto choices(ConsoleMode) {
  return std::array{Choice{"auto", ConsoleMode::automatic}, Choice{"progress", ConsoleMode::progress}, Choice{"plain", ConsoleMode::plain},
                    Choice{"off", ConsoleMode::off}};
}

constexpr auto choices(LogLevel) {
  return std::array{Choice{"debug", LogLevel::debug}, Choice{"info", LogLevel::info}, Choice{"warning", LogLevel::warning},
                    Choice{"error", LogLevel::error}, Choice{"off", LogLevel::off}};
}

// Limits that no run reaches keep sums and products of these values within 64 bits.
inline constexpr double kMostSteps = 1e12, kLargestCount = 1e9;
inline constexpr int kMostThreads = 4096;

struct OptimizerRule {
  std::string match;
  double lr_factor = 1.0;
  std::optional<double> weight_decay;
  std::optional<OptimizerType> type = {};

  bool operator==(const OptimizerRule&) const = default;
  void fields(auto& v) {
    v("match", match, "pattern of module paths, as in precision.rules; it reaches every kind of module");
    v("lr_factor", lr_factor, "factor of the learning rate; 0: frozen, without gradients, moments and exchange",
      limits::between(0, kLargestCount));
    v("weight_decay", weight_decay, "null: optimizer.weight_decay", limits::not_negative);
    v("type", type, "optimizer of the linears among these modules; null: optimizer.type");
  }
};

// Muon (Jordan et al. 2024), with the defaults of torch.optim.Muon but for the scale: match_rms_adamw, that of Moonlight (Liu et al. 2025),
// makes updates as large as those of AdamW, so one learning rate and one decay serve the matrices of both.
struct MuonConfig {
  double momentum = 0.95;
  bool nesterov = true;
  int64_t ns_steps = 5;
  MuonScale scale = MuonScale::match_rms_adamw;

  bool operator==(const MuonConfig&) const = default;
  void fields(auto& v) {
    v("momentum", momentum, "decay of the momentum", limits::fraction);
    v("nesterov", nesterov, "orthogonalize the gradient of this step and the momentum, and not the momentum alone");
    v("ns_steps", ns_steps, "steps of Newton-Schulz", limits::between(1, 99));
    v("scale", scale,
      "factor of the update of a matrix [out, in]; match_rms_adamw: 0.2 sqrt(max(out, in)), for learning rates of AdamW; original: "
      "sqrt(max(1, out / in))");
  }
};

struct OptimizerConfig {
  OptimizerType type = OptimizerType::adamw;
  double lr = 6e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, grad_clip = 1.0;
  MuonConfig muon = {};
  Dtype moments = Dtype::f32;
  std::vector<OptimizerRule> rules = {};

  void fields(auto& v) {
    v("type", type, "muon: weights of linears by Muon, all else by AdamW");
    v("lr", lr, "peak learning rate", limits::positive);
    v("beta1", beta1, "first moment decay", limits::fraction);
    v("beta2", beta2, "second moment decay", limits::fraction);
    v("eps", eps, "added to the root of the second moment", limits::positive);
    v("weight_decay", weight_decay, "decoupled decay of parameters with two or more dimensions, embeddings included", limits::not_negative);
    v("grad_clip", grad_clip, "largest global gradient norm; 0: no clipping", limits::not_negative);
    v("muon", muon, "Muon");
    v("moments", moments, "type in which moments are kept; bf16: rounded at random, so that their mean is that of fp32");
    v("rules", rules, "modules that are trained otherwise, or not at all; the first rule that matches a module counts");
  }
};

struct ScheduleConfig {
  ScheduleType type = ScheduleType::cosine;
  int64_t warmup_steps = 100;
  std::optional<int64_t> decay_steps;
  double min_lr_ratio = 0.1;

  void fields(auto& v) {
    v("type", type, "shape of the learning rate after the warm-up; wsd: stable, then linear decay over decay_steps");
    v("warmup_steps", warmup_steps, "linear rise from 0", limits::between(0, kMostSteps));
    v("decay_steps", decay_steps, "length of the decay; null: to the end", limits::between(1, kMostSteps));
    v("min_lr_ratio", min_lr_ratio, "final learning rate / peak", limits::ratio);
  }
};

struct TraceConfig {
  std::vector<int64_t> steps = {2, 3};

  void fields(auto& v) { v("steps", steps, "first and last step to trace"); }
};

struct TrainingConfig {
  // One of both gives the length. Of epochs the steps follow once the data is open (resolve_steps()): then both are set.
  std::optional<int64_t> steps = 1000;
  std::optional<double> epochs;
  int64_t seq_len = 1024;
  // Any two of the three give the third: after load_run_config() all are set and micro_batch_size * grad_accum * parallel.data is
  // global_batch_size.
  int64_t micro_batch_size = 8;
  std::optional<int64_t> grad_accum;
  std::optional<int64_t> global_batch_size = 64;  // in sequences
  Accumulation accumulation = Accumulation::running;
  uint64_t seed = 1234;
  DeviceChoice device = DeviceChoice::automatic;
  int threads = 0;
  Recompute recompute = Recompute::none;
  AttentionBy attention = AttentionBy::automatic;
  int64_t nonfinite_limit = 3;
  int64_t replica_check_interval = 100;
  bool allow_memory_overcommit = false;
  std::optional<TraceConfig> trace;
  std::optional<std::string> teacher;
  double teacher_weight = 1.0, teacher_temperature = 1.0;

  int64_t tokens_per_step() const { return *global_batch_size * seq_len; }
  ExpertGradients expert_gradients() const {
    return accumulation == Accumulation::tree ? ExpertGradients::by_source : ExpertGradients::summed;
  }

  void fields(auto& v) {
    v("steps", steps, "optimizer steps; null: training.epochs says how many", limits::between(1, kMostSteps));
    v("epochs", epochs,
      "passes over the training data, also parts of one, in place of steps: epochs * sequences / global_batch_size, rounded up",
      Limits{.min = 0, .max = kLargestCount, .above_min = true});
    v("seq_len", seq_len, "tokens per sequence", limits::between(1, 1 << 24));
    v("micro_batch_size", micro_batch_size, "sequences per forward pass", limits::between(1, 1 << 24));
    v("grad_accum", grad_accum, "micro batches per step; null: derived", limits::between(1, 1 << 24));
    v("global_batch_size", global_batch_size, "sequences per step = micro_batch_size * grad_accum * parallel.data; null: derived",
      limits::between(1, 1 << 30));
    v("accumulation", accumulation, "order of the gradient sum over micro batches");
    v("seed", seed, "random seed of initialization, data order and samples");
    v("device", device, kDeviceChoices);
    v("threads", threads, "CPU threads; 0: the cores this process may use", limits::between(0, kMostThreads));
    v("recompute", recompute, "what backward recomputes: none, selective (attention and activation), full (all but layer inputs)");
    v("attention", attention,
      "kernels of attention: own, or cudnn, NVIDIA's library, on GPUs of compute capability 9.0; auto: own, until a GPU has confirmed "
      "cudnn");
    v("nonfinite_limit", nonfinite_limit, "stop after this many steps in a row with NaN or Inf", limits::between(1, kLargestCount));
    v("replica_check_interval", replica_check_interval, "steps between comparisons of the weights of all ranks; 0: never",
      limits::between(0, kMostSteps));
    v("allow_memory_overcommit", allow_memory_overcommit, "start even if the ranks on a host need more memory than it has free");
    v("trace", trace,
      "time line of modules, kernels, exchanges and waits of all ranks, for mantissa trace: trace.json in the run folder; null: none");
    v("teacher", teacher,
      "checkpoint, Hugging Face folder or GGUF file of a model that this one learns from: the loss is the divergence from its "
      "distribution; "
      "self: that of checkpoint.init_from; null: none");
    v("teacher_weight", teacher_weight, "share of the divergence in the loss; the rest is the cross entropy of the targets",
      Limits{.min = 0, .max = 1, .above_min = true});
    v("teacher_temperature", teacher_temperature,
      "divides the logits of both models before the divergence, which is multiplied by its square", limits::positive);
  }
};

// Timeouts in seconds stay within what clocks and sockets count in integers.
inline constexpr Limits kTimeout{.min = 0, .max = 1e6, .above_min = true};

// Configures several ranks. There is no stage of ZeRO to choose: with several data ranks masters and moments are sharded (ZeRO-1).
struct ParallelConfig {
  CommBackend backend = CommBackend::automatic;
  int64_t data = -1;  // after load_run_config() at least 1
  int64_t tensor = 1;
  int64_t expert = 1;
  bool sequence_parallel = false;
  double init_timeout_s = 300.0, heartbeat_timeout_s = 10.0;
  std::optional<double> step_timeout_s = {};
  double section_timeout_s = 420.0;

  int64_t world() const { return data * tensor; }
  // Returns the ranks that hold a model together, as the first one sees them.
  ModelRanks ranks() const {
    return {.tensor = static_cast<int>(tensor), .expert = static_cast<int>(expert), .sequence_parallel = sequence_parallel};
  }

  void fields(auto& v) {
    v("backend", backend, "transport between ranks on CPUs: ucx (auto)");
    v("data", data, "data-parallel replicas, each with its share of the batch; -1: the started ranks / tensor",
      limits::between(-1, 1 << 16));
    v("tensor", tensor, "tensor-parallel ranks that divide the linears, embedding, output projection and heads of each replica",
      limits::between(1, 1 << 16));
    v("expert", expert, "neighboring data ranks that divide the experts of each layer equally; must divide data",
      limits::between(1, 1 << 16));
    v("sequence_parallel", sequence_parallel, "tensor ranks also divide the tokens of norms and residuals");
    v("init_timeout_s", init_timeout_s, "how long ranks wait for each other at the start", kTimeout);
    v("heartbeat_timeout_s", heartbeat_timeout_s, "a rank without a heartbeat for this long is lost", kTimeout);
    v("step_timeout_s", step_timeout_s, "longest step; null: 5 times the mean, but at least 30, and 600 until 5 steps are measured",
      kTimeout);
    v("section_timeout_s", section_timeout_s, "longest time without progress in start, evaluation, samples or a save", kTimeout);
  }
};

struct SamplesConfig {  // "samples"
  int64_t interval = 200;
  std::vector<std::string> prompts = {"Once"};
  int64_t max_new_tokens = 64;
  double temperature = 0.8;
  int64_t top_k = 50;
  double top_p = 1.0;

  void fields(auto& v) {
    v("interval", interval, "steps between samples; the last step writes some in any case", limits::between(1, kMostSteps));
    v("prompts", prompts, "texts to continue");
    v("max_new_tokens", max_new_tokens, "tokens to write", limits::between(1, 1 << 24));
    v("temperature", temperature, "0: always the likeliest token", limits::not_negative);
    v("top_k", top_k, "draw from the k likeliest tokens; 0: from all", limits::between(0, kLargestCount));
    v("top_p", top_p, "draw from the likeliest tokens that together reach p", Limits{.min = 0, .max = 1, .above_min = true});
  }
};

struct EvalConfig {
  int64_t interval = 100;
  bool first = false;
  std::optional<int64_t> iters = 20;
  std::optional<SamplesConfig> samples;

  void fields(auto& v) {
    v("interval", interval, "steps between evaluations; 0: only at the end", limits::between(0, kMostSteps));
    v("first", first, "also evaluate what the run starts from, as step 0");
    v("iters", iters, "micro batches per evaluation; null: the whole validation part", limits::between(1, kLargestCount));
    v("samples", samples, "samples written during training; null: none");
  }
};

struct CheckpointConfig {
  std::string dir = "%d/checkpoints";
  int64_t interval = 500;
  int64_t keep_latest = 3;
  int64_t keep_every = 0;
  bool keep_best = false;
  std::string resume = "never";
  std::optional<std::string> init_from;
  bool allow_recipe_change = false;
  std::vector<std::string> allow_model_change = {};
  bool allow_tokenizer_change = false;
  std::optional<ExportOptions> exported = {};  // "export"

  bool resumes_named() const { return resume != "never" && resume != "auto"; }  // from a path

  void fields(auto& v) {
    v("dir", dir, "folder of the checkpoints; %d: logging.dir, %n: run name, %%: %");
    v("interval", interval, "steps between checkpoints; 0: only at the end", limits::between(0, kMostSteps));
    v("keep_latest", keep_latest, "newest checkpoints to keep; at least 2, so that one survives a fault during a save",
      limits::between(2, kLargestCount));
    v("keep_every", keep_every, "also keep every checkpoint whose step is a multiple of this; 0: none", limits::between(0, kMostSteps));
    v("keep_best", keep_best,
      "save where an evaluation has the lowest loss so far, and keep that checkpoint beside the others; the file `best` names it");
    v("resume", resume,
      "never: refuse a run folder that is in use; auto: the checkpoint that `latest` names, else the newest valid one, else a fresh start; "
      "or a path");
    v("init_from", init_from,
      "checkpoint, Hugging Face folder or GGUF file whose weights this run starts from, at step 0 with a new optimizer; its model and "
      "tokenizer are used unless others are given; excludes a path in resume",
      limits::input_path);
    v("allow_recipe_change", allow_recipe_change, "resume even if modules compute in other formats than in the checkpoint");
    v("allow_model_change", allow_model_change,
      "keys of section model, such as model.rope_theta, that may differ from init_from although they change what the model computes");
    v("allow_tokenizer_change", allow_tokenizer_change,
      "start from a model whose tokenizer is not data.tokenizer; its tokenizer and generation files are dropped");
    v("export", exported,
      "export a Hugging Face folder, exports/step-* in the run folder, with every checkpoint that interval, the end of the run or "
      "SIGUSR2 causes; null: no exports");
  }
};

struct LoggingConfig {
  std::optional<std::string> run_name;  // set after load_run_config()
  std::string dir = "runs/%n";
  int64_t interval = 1;
  ConsoleMode console = ConsoleMode::automatic;
  bool jsonl = true;
  bool tensorboard = true;
  LogLevel level = LogLevel::info;

  void fields(auto& v) {
    v("run_name", run_name, "null: the config's file name without extension");
    v("dir", dir, "run folder; %n: run name, %%: %");
    v("interval", interval, "steps between step lines", limits::between(1, kMostSteps));
    v("console", console, "auto: progress on a terminal, plain lines elsewhere");
    v("jsonl", jsonl, "write metrics.jsonl");
    v("tensorboard", tensorboard, "write TensorBoard events");
    v("level", level, "least severe message that is logged");
  }
};

struct RunConfig {
  ModelConfig model;
  PrecisionConfig precision;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  TrainingConfig training;
  ParallelConfig parallel;
  DataConfig data;
  EvalConfig eval;
  CheckpointConfig checkpoint;
  LoggingConfig logging;
  std::optional<ModelConfig> teacher = {};  // model of training.teacher, which load_run_config() reads; no key

  // Returns the path of the teacher, if there is one.
  std::optional<std::string> teacher_path() const { return training.teacher == "self" ? checkpoint.init_from : training.teacher; }

  // Returns the attention of a micro batch on a tensor rank.
  AttentionForm attention_form() const {
    return {.dtype = precision.dtype,
            .batch = training.micro_batch_size,
            .length = training.seq_len,
            .heads = model.num_attention_heads / parallel.tensor,
            .kv_heads = model.kv_heads() / parallel.tensor,
            .head_dim = model.head_size()};
  }

  void fields(auto& v) {
    v("model", model, "shape and options of the GPT");
    v("precision", precision, "number formats per module");
    v("optimizer", optimizer, "AdamW and Muon");
    v("schedule", schedule, "learning rate over time");
    v("training", training, "length, batch, device");
    v("parallel", parallel, "several ranks");
    v("data", data, "what to read");
    v("eval", eval, "validation, and samples written during training");
    v("checkpoint", checkpoint, "saving and resuming");
    v("logging", logging, "run folder and output");
  }
};
extern template const FieldType& detail::field_type<RunConfig>();

struct SavedTokenizer;  // data/tokenizer.h

struct LoadedConfig {
  RunConfig config;
  ConfigReport report;                                   // origins; no errors
  std::shared_ptr<const SavedTokenizer> tokenizer = {};  // where data.tokenizer names no file of its own
  bool restarted = false;  // the launcher starts the run once more: its folder may hold metrics of the attempt before
};

// The name of a run and its folders, with the placeholders replaced: %n, %d, and %% by %.
struct RunFolders {
  std::string name, run, checkpoints;
};
// `file` names a run that has no name.
RunFolders run_folders(const RunConfig& config, const std::string& file);

// Refuses a model that so many tensor ranks cannot share equally, heads whole, and pads its vocabulary for them.
void divide_model(ModelConfig& model, int64_t tensor, ConfigReport& report);

// Returns how many steps of a global batch pass so many sequences: the quotient rounded up, but for the rounding of its own division and of
// the product that gave the sequences.
double steps_of(double sequences, int64_t global_batch);

// Sets training.steps where training.epochs is given: epochs * sequences / global_batch_size, rounded up. `sequences` are those of all
// training data, of training.seq_len tokens each; with several sets their weights say how often each is seen meanwhile. Reports more steps
// than a run can have, and a schedule that is longer.
void resolve_steps(RunConfig& config, int64_t sequences, ConfigReport& report);

// Resolves the precision of every module, and how it is trained. model.vocab_size must be set. Throws Error(usage) for what only the
// resolved plan can show.
PrecisionPlan resolve_plan(const RunConfig& config);

// Returns the configuration by which the teacher of a run computes, on the ranks of the run: in high precision, in the run's dtype. There
// must be one. Throws Error(usage) for a teacher that these ranks cannot hold or this model cannot learn from, because of another
// vocabulary or shorter sequences.
RunConfig teacher_config(const RunConfig& config);

// Returns a configuration with other values in section "precision", each as --set takes it: "precision.recipe=mxfp4_qat". Throws
// Error(usage) that lists what is wrong, also for a key of another section and for precision.dtype, which is the --dtype of a command.
RunConfig with_precision(RunConfig config, const std::vector<std::string>& sets);

// Runs the part that needs no file on disk: checks across sections and everything that can be derived. `file` gives the run its name.
void resolve_run_config(RunConfig& config, ConfigReport& report, const std::string& file, int64_t world = 0);

}  // namespace mantissa
