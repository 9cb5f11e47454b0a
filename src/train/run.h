// Holds what a run of train() owns, and starts it (train_start.cpp).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/saved_model.h"
#include "comm/mesh.h"
#include "data/open_data.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"
#include "mantissa/metrics/events.h"
#include "mantissa/train/train.h"
#include "metrics/run_metrics.h"
#include "metrics/run_trace.h"
#include "train/replicas.h"
#include "train/run_exports.h"
#include "train/training_step.h"

namespace mantissa {

// Checks and prepares the data of a run before it starts.

// Sets model.vocab_size if only the data can define it. Reports progress by events.set_phase at step 0 while it reads. Throws what
// open_data() does, and Error(usage) if a rank has other data than rank 0.
Data open_run_data(LoadedConfig& loaded, const Communicator& world, const TrainEvents& events = {});

// Refuses what only the data shows: a vocabulary that does not fit the plan, validation without targets, and a rank with another plan.
PrecisionPlan plan_with_data(const RunConfig& config, const Data& data, const Communicator& world = {});

// Opens the device that the run computes on: what `own` makes, or that of training.device. All ranks call it together; throws what
// require_free_gpu_memory() does if the memory of the GPU of training.device is too small, and for all other devices what
// require_free_memory() does if that of the host is, whatever `own` has.
std::unique_ptr<Backend> open_run_device(const RunConfig& config, const PrecisionPlan& plan, const Communicator& world,
                                         const MakeBackend& own);

// Encodes the prompts before the run starts, so that an invalid one is an error then.
std::vector<std::vector<int32_t>> encode_prompts(const EvalConfig& config, const Data& data);

// Returns a warning for each of these prompts that begins twice, or is longer than the model has positions.
std::vector<std::string> prompt_warnings(const RunConfig& config, const Data& data, std::span<const std::vector<int32_t>> prompts);

struct Run;
template <class Event>
void publish(Run& run, const std::function<void(const Event&)>& callback, const Event& event);

// Everything that one run owns. The members are in the order in which they depend on each other.
struct Run {
  LoadedConfig loaded;
  const RunConfig& config = loaded.config;
  const Mesh& mesh;
  const TrainEvents events;  // only rank 0 is told what happens
  Data data;
  PrecisionPlan plan;
  std::vector<std::vector<int32_t>> prompts;
  std::unique_ptr<Backend> device;
  Gpt model;
  Optimizer optimizer;
  GradientAccumulator accumulator;
  StepBatches batches;
  TrainState state;
  std::vector<TokenizerFile> files;  // files of the model that it started from
  std::string resumed, newest_checkpoint;
  bool needs_unused_folder = false;  // until it is locked another process may train there
  std::optional<CheckpointDirectory> checkpoints;
  bool shared = false;  // the folder was found to be that of all ranks
  std::optional<Metrics> metrics;
  RunExports exports;
  Throughput throughput;
  std::optional<double> gemm_rate = {};  // FLOP/s of all ranks in GEMMs alone, measured at the start
  std::optional<double> gpu_peak = {};   // FLOP/s of their GPUs by the data sheets
  std::optional<double> last_valid_loss;
  int64_t failed_saves = 0;
  Request pending = Request::none;                                 // asked for by any rank, and not yet met
  std::optional<std::chrono::steady_clock::time_point> stop_seen;  // when the first rank was asked to stop
  Traffic sent;                                                    // by all ranks up to the latest step
  RunTrace trace;
  Stragglers stragglers{mesh.world.size()};

  Run(const LoadedConfig& given, const TrainEvents& observers, const Mesh& ranks, const MakeBackend& own_device)
      : loaded(given),
        mesh(ranks),
        events(ranks.world.rank() == 0 ? observers : TrainEvents{.request = observers.request, .set_phase = observers.set_phase}),
        data(open_run_data(loaded, mesh.world, events)),
        plan(plan_with_data(config, data, mesh.world)),
        prompts(agree_on(mesh.world, [this] { return encode_prompts(config.eval, data); })),
        device(open_run_device(config, plan, mesh.world, own_device)),
        model(config.model, *device, plan, training_options(config, mesh)),
        optimizer(model.parameters(), config.optimizer, mesh),
        accumulator(model.parameters(), config.training.accumulation, *config.training.grad_accum),
        batches(
            *data.train, model,
            {.sequences = *config.training.global_batch_size / config.parallel.data, .micro_batch_size = config.training.micro_batch_size}),
        exports(config, mesh.world, [this](const ExportEvent& event) { publish(*this, this->events.exported, event); }),
        trace(config, mesh.world.rank()) {}
  TrainedParts parts() { return {config, plan, data, model.parameters(), optimizer, files}; }
  void set_phase(const char* section) const {
    if (events.set_phase) events.set_phase(state.step, section);
  }
  bool is_rank0() const { return mesh.world.rank() == 0; }  // owns folder, lock, metrics and output
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
};

template <class Event>
void publish(Run& run, const std::function<void(const Event&)>& callback, const Event& event) {
  if (run.metrics) run.metrics->write(event);
  if (callback) callback(event);
}

// Makes the weights and the state to start from, fresh or of a checkpoint. All ranks call this and the next together.
void start(Run& run);
// Creates the run folder; nothing is written before.
void open_folder(Run& run, const std::vector<std::string>& arguments);

}  // namespace mantissa
