// Trains a GPT: the loop over steps, evaluations, samples and checkpoints of one run.
//
// The order inside a step boundary is: update, event of the step, evaluation, samples, save, request. A request to stop that comes earlier
// cuts evaluation and samples short; the checkpoint records that they are pending, and a run that continues from it does them first. A save
// happens only there, so N steps equal k steps, a save, a load and N - k steps, bit for bit.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/backend/backend.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"
#include "mantissa/metrics/events.h"
#include "mantissa/plan/estimate.h"

namespace mantissa {

struct TrainSummary {
  ExitCode exit = ExitCode::ok;  // ok; stopped: a request was met, a checkpoint exists; storage: the last save failed, the export beside it
                                 // or, of a run that has finished, the export of any checkpoint that is there
  int64_t steps = 0;             // done in the run so far
  int64_t tokens = 0;
  int64_t skipped_steps = 0;
  std::optional<double> best_valid_loss = {};  // the lowest figure of an evaluation, by which checkpoint.keep_best goes
  std::string best_is = "loss";                // its name; with a teacher "kl", or "0.5 kl + 0.5 loss"
  std::optional<double> last_valid_loss = {};
  double seconds = 0.0;  // duration of this call
  double tokens_per_second = 0.0;
  int64_t failed_saves = 0;        // saves of a checkpoint, or of the export beside it
  int64_t dropped_lines = 0;       // lines of metrics and events
  std::string folder, checkpoint;  // the run folder; the newest checkpoint, "" if there is none
  std::string best_checkpoint;     // the file that names the best one, which checkpoint.keep_best keeps; "" if there is none
  std::optional<int64_t> best_step = {};
};

// Runs the config to its last step, or to a request to stop. `arguments` is the command line, for run.json. Everything is checked before
// the run folder is made. Throws Error: usage for configs that do not fit the data or the checkpoint and for a run folder in use,
// a path in checkpoint.resume to another run included, environment if another process trains there, data for damaged or changed files,
// numerical after training.nonfinite_limit steps in a row with NaN or Inf (nothing is saved then). After an Error in evaluation or samples
// the steps done are saved.
//
// With several ranks, as many as section parallel has in all, every one of them calls this. Rank 0 alone owns folder, lock and metrics and
// receives events. Under training.accumulation tree, results do not depend on the number of ranks, bit for bit.
//
// It computes on the device that training.device names, or on what `make_device` makes: a program can bring a backend of its own.
// The memory of the host must hold what a rank needs (require_free_memory), also with a device of its own; on the GPU of training.device,
// that of the GPU (require_free_gpu_memory).
using MakeBackend = std::function<std::unique_ptr<Backend>()>;
TrainSummary train(const LoadedConfig& loaded, const std::vector<std::string>& arguments, const TrainEvents& events,
                   const Communicator& world = {}, const MakeBackend& make_device = {});

// Sets what only the data define: training.steps where training.epochs is given, and model.vocab_size where it is null. Opens the data, and
// throws as train() does for what it finds there.
void resolve_by_data(LoadedConfig& loaded);

// Preview of what train() would do.
struct RunPreview {
  RunConfig config;  // with the vocabulary size
  PrecisionPlan precision;
  double flops_per_token = 0.0;
  MemoryEstimate memory;
  int64_t training_tokens = 0;
  int64_t validation_windows = 0;
  double evaluation_flops = 0.0;         // FLOPs of all evaluations together
  std::optional<double> gemm_rate = {};  // FLOP/s that GEMMs reach here; none: not measured, for several ranks and very short runs
};

// Opens the data and what the run starts from, writes nothing. Throws as train() does, also where this disk or the memory of this host is
// too small, but for what only reading all weights, a GPU or the other ranks show: those of a run of several may have other hosts.
RunPreview preview_run(const LoadedConfig& loaded);

}  // namespace mantissa
