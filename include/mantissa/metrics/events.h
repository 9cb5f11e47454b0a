// Defines the events that train() reports, the lines that people read and, as fields(), those of metrics.jsonl. Nothing here prints.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/json/fields.h"

namespace mantissa {

// Loss on one set of validation data.
struct SetLoss {
  std::string name;
  double loss = 0.0;  // mean over its targets, in nats; NaN without any
  int64_t targets = 0;

  void fields(auto& v) {
    v("name", name);
    v("loss", loss);
    v("targets", targets);
  }
};

struct Evaluation {
  double loss = 0.0;                      // mean over the targets of all sets
  std::optional<double> divergence = {};  // KL(teacher || model) in nats, mean over the targets; none: no teacher
  int64_t targets = 0;
  std::vector<SetLoss> sets = {};
  bool stopped = false;  // by the caller, before the end: nothing else is set

  // Returns the figure by which evaluations of a run compare: the loss; with a teacher of this weight the shares of both, at temperature 1,
  // which is the loss of training only at that temperature.
  double objective(double teacher_weight) const { return divergence ? teacher_weight * *divergence + (1.0 - teacher_weight) * loss : loss; }
};

// Names the objective of a run: "loss"; with a teacher of this weight "kl", or "0.5 kl + 0.5 loss".
std::string objective_name(std::optional<double> teacher_weight);

// Summary of the errors of all that a step quantized.
struct PrecisionSummary {
  std::optional<double> sqnr_db = {};  // mean over modules and roles; none: all exact, or NaN or Inf
  std::string worst = {};              // the module with the least, and that
  double worst_db = 0.0;
  int64_t fp32_gemms = 0;  // GEMMs of this step that ran in fp32 because an operand held extreme scale codes

  void fields(auto& v) {
    v("q_sqnr_db", sqnr_db);
    v("fp32_gemms", fp32_gemms);
  }
};

// Figures of a layer's router in a step: assignments by expert, the largest load over the mean, the share of assignments that were dropped,
// and the auxiliary losses before their coefficients (RouteBackward), averaged over micro batches. Losses are empty for a step that is
// reported only because it was skipped.
struct LayerRouting {
  int64_t layer = 0;
  double imbalance = 0.0, dropped = 0.0;
  std::optional<double> balance_loss = {}, sequence_balance_loss = {}, z_loss = {};
  std::vector<int64_t> load = {};

  void fields(auto& v) {
    v("layer", layer);
    v("imbalance", imbalance);
    v("dropped", dropped);
    v("balance_loss", balance_loss);
    v("sequence_balance_loss", sequence_balance_loss);
    v("z_loss", z_loss);
    v("load", load);
  }
};

double mean_dropped(const std::vector<LayerRouting>& layers);
const LayerRouting& most_uneven(const std::vector<LayerRouting>& layers);  // the first with the largest imbalance

struct StepEvent {
  int64_t step = 0, steps = 0;       // step counts from 1
  std::optional<double> loss = 0.0;  // none: no target counted
  // Parts of the loss beside a teacher, before their weights: the divergence, and the cross entropy of the targets. None: no teacher.
  std::optional<double> divergence = {}, cross_entropy = {};
  double gradient_norm = 0.0, lr = 0.0;
  double milliseconds = 0.0;
  double tokens_per_second = 0.0;  // bias-corrected moving average (0.95) without the first step
  std::optional<double> mfu;       // over the dense bf16 peak in the data sheets of all GPUs; none: a CPU, or a GPU that is not known
  // Like mfu, over the rate of GEMMs that was measured in this run; none: it is too short for that.
  std::optional<double> mfu_measured = {};
  double memory_gib = 0.0;                    // peak resident, of the process of rank 0
  std::optional<double> gpu_memory_gib = {};  // peak of its tensors in the memory of its device; none: that is the host's
  double remaining_seconds = 0.0;
  int64_t tokens = 0;    // so far in the run, padding included, as in tokens_per_second
  double padding = 0.0;  // share of the tokens of this step that is padding
  bool skipped = false;
  bool other_gemms = false;                        // GEMMs of other types than bf16, whose peak mfu refers to
  std::optional<Traffic> comm_bytes = {};          // sent by all ranks since the gradients of the step before; none: one rank
  std::vector<LayerRouting> routing = {};          // layers with experts
  std::optional<PrecisionSummary> precision = {};  // on steps that measure it

  void fields(auto& v) {
    v("step", step);
    v("loss", loss);
    v("lr", lr);
    v("grad_norm", gradient_norm);
    v("tokens", tokens);
    v("dt_ms", milliseconds, limits::later);
    v("tok_s", tokens_per_second);
    v("mfu", mfu, limits::later);
    v("mfu_meas", mfu_measured, limits::later);
    v("mem_gib", memory_gib, limits::later);
    v("eta_s", remaining_seconds, limits::later);
    v("skipped", skipped, limits::later);
  }
  void last_fields(auto& v) {
    if (divergence) v("kl", *divergence);
    if (cross_entropy) v("ce", *cross_entropy);
    if (padding > 0.0) v("padding", padding);
    if (gpu_memory_gib) v("gpu_mem_gib", *gpu_memory_gib);
    if (comm_bytes) v("comm_bytes", *comm_bytes);
    if (!routing.empty()) v("moe", routing);
    if (precision) precision->fields(v);
  }
};

struct EvaluationEvent {
  int64_t step = 0;
  Evaluation result = {};
  double seconds = 0.0;
  bool best = false;

  void fields(auto& v) {
    v("step", step);
    v("loss", result.loss);
    v("targets", result.targets, limits::later);
    v("sets", result.sets, limits::later);
    v("seconds", seconds, limits::later);
  }
  void last_fields(auto& v) {
    if (result.divergence) v("kl", *result.divergence);
  }
};

struct SampleEvent {
  int64_t step = 0;
  std::string prompt, text;

  void fields(auto& v) {
    v("step", step);
    v("prompt", prompt);
    v("text", text);
  }
};

// The expert of a grouped weight whose codes have the largest error.
struct WorstExpert {
  int64_t expert = 0;
  double sqnr_db = 0.0;

  void fields(auto& v) {
    v("expert", expert);
    v("sqnr_db", sqnr_db);
  }
};

// Measures how far codes are from what they stand for. `role` is "weight", "input" or "output_grad".
struct PrecisionEvent {
  int64_t step = 0;
  std::string module = {}, role = {};
  std::optional<double> sqnr_db = {};            // 10 log10(sum x^2 / sum (x - code)^2); none: without error, or NaN or Inf among x
  double clipped = 0.0, flushed = 0.0;           // shares of all elements: beyond the largest code; not zero and coded as zero
  std::optional<double> amax = {};               // none: NaN or Inf among x
  std::map<uint16_t, int64_t> scales = {};       // how many blocks have each scale code
  std::optional<WorstExpert> worst_expert = {};  // only for weights of experts; none: none has a finite error

  void fields(auto& v) {
    v("step", step);
    v("module", module);
    v("role", role);
    v("sqnr_db", sqnr_db);
    v("clipped", clipped);
    v("flushed", flushed);
    v("amax", amax);
    v("scales", scales, limits::not_negative);
  }
  void last_fields(auto& v) {
    if (worst_expert) v("worst_expert", *worst_expert);
  }

  // Returns `scales` by the exponent of the scale, without blocks that hold a NaN, which have none.
  std::map<int, int64_t> scale_exponents() const;
};

struct SaveEvent {
  int64_t step = 0;
  std::string path = {};     // empty: it failed
  std::string problem = {};  // why
  double seconds = 0.0;

  void fields(auto& v) {
    v("step", step);
    v("path", path);
    v("seconds", seconds);
  }
  void last_fields(auto& v) {
    if (!problem.empty()) v("problem", problem);
  }
};

// The export of a checkpoint was made beside training, or failed.
struct ExportEvent : SaveEvent {};

struct StartEvent {
  std::string folder;   // the run's; it exists by now
  std::string resumed;  // the checkpoint; "": a fresh start
  int64_t step = 0, steps = 0;
  std::optional<double> epochs = {};  // training.epochs, from which the steps follow
  int64_t parameters = 0, trained_parameters = 0;
  int64_t training_tokens = 0, validation_sets = 0;
  std::string precision;  // "bf16, mxfp8, 2 rules"
  std::string device;
  int threads = 0;

  void fields(auto& v) {
    v("step", step);
    v("steps", steps);
    v("resumed", resumed);
    v("parameters", parameters);
    v("precision", precision);
    v("device", device);
    v("threads", threads);
  }
};

// A rank that the others wait for, in `section` of a step.
struct StragglerEvent {
  int64_t step = 0;
  int rank = 0;
  std::string section = {};
  double ratio = 0.0;  // its speed / the median of all ranks

  void fields(auto& v) {
    v("step", step);
    v("rank", rank);
    v("section", section);
    v("ratio", ratio);
  }
};

// Requests of a signal or another outside source, in rising urgency.
enum class Request { none, save, save_and_stop };

// All callbacks are optional. They are called from the thread that trains, between steps.
struct TrainEvents {
  std::function<void(const StartEvent&)> started = {};
  std::function<void(const StepEvent&)> step = {};
  std::function<void(const EvaluationEvent&)> evaluated = {};
  std::function<void(const SampleEvent&)> wrote = {};
  std::function<void(const SaveEvent&)> saved = {};
  std::function<void(const ExportEvent&)> exported = {};
  std::function<Request()> request = {};  // asked at least once a step, and during evaluation and samples; save is handed out once
  // Called on every rank with the phase that it begins or continues, a literal ("start", "step", "evaluation", "samples", "save"), after so
  // many steps.
  std::function<void(int64_t step, const char* section)> set_phase = {};
};

// Returns "step   120/2000 | loss 3.2826 | norm 1.234 | lr 6.00e-04 | 1709 ms | 38347 tok/s | mfu 46.9% | mem 4.5 GiB | eta 53m33s"
// Where the peak is a measured rate it is "mfu_meas 46.9%", and with quantized GEMMs "mfu(bf16) 46.9%". A GPU has " | gpu 34.5 GiB" behind
// mem, a step with padding ", 12.3% padding" behind tok/s, and one with a teacher " | kl 0.1234 | ce 3.2500" behind the loss. A step
// without targets has "no targets" in place of the loss. With precision also " | q-sqnr 31.2 dB (worst layers.3.mlp.down 24.8)", and " |
// fp32 GEMMs 12" unless there are none.
std::string step_line(const StepEvent& event);
// Returns "eval   120 | loss 1.9012 | ppl 6.694 | 111539 targets | 2.1 s | best", then each set if there are several. With a teacher
// " | kl 0.1234" stands behind ppl.
std::string evaluation_line(const EvaluationEvent& event);
// Returns the text in a box under a title, control characters escaped.
std::string sample_box(const SampleEvent& event);

std::string duration_text(double seconds);  // "53m33s", "2h05m", "12s"

// Measures the speed of a run: tokens over seconds, both as moving averages (0.95, corrected for the start), so that a stall counts by its
// length.
class Throughput {
 public:
  void add(int64_t tokens, double seconds);
  double tokens_per_second() const;
  double mean_tokens_per_second() const;
  double seconds_per_step() const;

 private:
  static constexpr double kDecay = 0.95;
  struct Sums {
    double tokens = 0.0, seconds = 0.0, weight = 0.0;
  };
  int64_t steps_ = 0;
  Sums average_, mean_;
};

}  // namespace mantissa
