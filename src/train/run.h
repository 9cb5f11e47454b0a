// Holds what a run of train() owns, and starts it (train_start.cpp).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_search.h"
#include "checkpoint/saved_model.h"
#include "comm/mesh.h"
#include "data/open_data.h"
#include "hf/hf_weights.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"
#include "mantissa/metrics/events.h"
#include "mantissa/precision/plan.h"
#include "mantissa/train/train.h"
#include "metrics/run_metrics.h"
#include "metrics/run_trace.h"
#include "train/replicas.h"
#include "train/run_exports.h"
#include "train/training_step.h"

namespace mantissa {

// Opens the data of a run before it starts. Sets model.vocab_size if only the data can define it. Reports progress by events.set_phase at
// step 0 while it reads. Throws what open_data() does, and Error(usage) if a rank has other data than rank 0.
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

// Holds all that is known of a run before it has weights.
struct StartParts {
  const LoadedConfig& loaded;
  const Communicator& world;
  const Data& data;
  const PrecisionPlan& plan;
};

// Holds the steps that a run takes on the way, each of them on every rank.
struct StartSteps {
  std::function<void()> lock = [] {};                               // takes the folder of checkpoints, which is there
  std::function<bool()> share = [] { return true; };                // returns whether rank 0 has locked it
  std::function<void()> initialize = [] {};                         // draws weights
  std::function<void(HfWeights&)> load_folder = [](HfWeights&) {};  // once the folder was found to fit
  std::function<void()> after_folder = [] {};                       // once all ranks have loaded it
  std::function<void(CheckpointReader&)> load_weights = {};         // from a checkpoint to start from; agrees by itself
  std::function<void(CheckpointReader&)> restore = {};              // from one to go on from; agrees by itself
};

struct StartPoint {
  std::vector<TokenizerFile> files = {};         // files that go along with the model
  std::optional<LoadedCheckpoint> resumed = {};  // none: the run starts at step 0
  bool own = false;                              // it is of the run's folder, and others there may have been passed over for it
  bool needs_unused_folder = false;              // until it is locked another process may train there
  std::string model_path = {}, model_hash = {};  // the checkpoint or folder that checkpoint.init_from stood for; "": it was not read
};

// Finds what a run starts from and refuses what does not fit it: one way for the run and for a dry run, which takes none of its steps.
// Throws Error: usage for a folder in use and for a checkpoint, a folder or a tokenizer that does not fit the run, environment if another
// process trains there or the disk has no room for a single checkpoint, data for what is damaged, and what the steps throw.
StartPoint find_start(const StartParts& parts, const StartSteps& steps);

// The checkpoint or folder that was read, and a hash of its files.
struct FoundTeacher {
  std::string path, hash;
};

// Returns the share of the divergence in the loss; none: the run has no teacher.
inline std::optional<double> teacher_weight(const TrainingConfig& config) {
  return config.teacher ? std::optional(config.teacher_weight) : std::nullopt;
}

// Opens what training.teacher names, which must be given, and reads its weights into `teacher`; null: it only looks whether that could be
// done. `self` is what the run was found to start from, not what checkpoint.init_from would stand for now: a run may save there. All ranks
// call it together. Throws Error: usage for one with another tokenizer or of another shape than
// load_run_config() found, data for what is damaged or changes meanwhile.
FoundTeacher read_teacher(const StartParts& parts, const StartPoint& found, Gpt* teacher);

// Returns the size of a checkpoint as Manifest::bytes() has it.
int64_t checkpoint_bytes(const RunConfig& config, const PrecisionPlan& plan, const std::vector<TokenizerFile>& files);

// Returns how many checkpoints lie side by side at most beyond those that are there. step: that at which the run goes on; kept: the
// checkpoints there, which later ones replace.
int64_t most_new_checkpoints(const RunConfig& config, int64_t step, int64_t kept);

// Place where a run starts: 0, or the step of the checkpoint from which it goes on.
struct StartStep {
  int64_t step = 0;
  bool own = false;  // the checkpoint lies in the folder of the run, which may have others
};

// Says with both numbers that the disk of checkpoint.dir cannot take the last state of the run; "": it can. Warns if it cannot take all
// checkpoints that the run keeps side by side.
std::string find_room_for_saves(const RunConfig& config, const PrecisionPlan& plan, const std::vector<TokenizerFile>& files,
                                const StartStep& start);

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
  std::unique_ptr<Gpt> teacher;  // null: none
  Gpt model;
  Optimizer optimizer;
  GradientAccumulator accumulator;
  StepBatches batches;
  TrainState state;
  std::vector<TokenizerFile> files;  // files of the model that it started from
  std::string resumed, newest_checkpoint;
  int64_t first_step = 1;            // number of the first step that this process takes
  bool needs_unused_folder = false;  // until it is locked another process may train there
  std::optional<CheckpointDirectory> checkpoints;
  bool shared = false;  // the folder was found to be that of all ranks
  std::optional<Metrics> metrics;
  RunExports exports;
  Throughput throughput;
  std::optional<double> gemm_rate = {};  // FLOP/s of all ranks in GEMMs alone, measured at the start
  std::optional<double> gpu_peak = {};   // FLOP/s of their GPUs by the data sheets
  std::optional<double> last_valid_loss;
  std::optional<BestCheckpoint> best_before = {};  // the best until the latest evaluation
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
        teacher(make_teacher(config, *device, mesh)),
        model(config.model, *device, plan, training_options(config, mesh)),
        optimizer(model.parameters(), config.optimizer, mesh, {}, {.directions = plan.compute(), .seed = config.training.seed}),
        accumulator(model.parameters(), config.training.accumulation, *config.training.grad_accum),
        batches(
            *data.train, model,
            {.sequences = *config.training.global_batch_size / config.parallel.data, .micro_batch_size = config.training.micro_batch_size}),
        exports(config, mesh.world, [this](const ExportEvent& event) { publish(*this, this->events.exported, event); }),
        trace(config, *device, mesh.world) {}
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
