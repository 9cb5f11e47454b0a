#include "mantissa/train/train.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <span>
#include <thread>

#include "base/limits.h"
#include "base/parallel.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/precision_setup.h"
#include "comm/mesh.h"
#include "mantissa/base/log.h"
#include "mantissa/base/trace.h"
#include "metrics/precision_statistics.h"
#include "metrics/routing_summary.h"
#include "train/evaluate.h"
#include "train/gemm_rate.h"
#include "train/generate.h"
#include "train/replicas.h"
#include "train/run.h"

namespace mantissa {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// ---- one step

// Returns true for steps whose line is written in any case. The first shows early that a run learns, and how fast.
bool reports(const Run& run, int64_t step) {
  return step == run.first_step || step == *run.config.training.steps || step % run.config.logging.interval == 0;
}

// Divides the loss of a step into the divergence from the teacher and the cross entropy of the targets, which the micro batches of all data
// ranks add up to, in the order of one process.
void divide_loss(const Run& run, const StepResult& result, StepEvent& event) {
  if (result.cross_entropies.empty() || !event.loss) return;
  const Communicator& data = run.mesh.data;
  const size_t own = result.cross_entropies.size();
  std::vector<double> all(own * static_cast<size_t>(data.size()));
  std::ranges::copy(result.cross_entropies, all.begin() + static_cast<ptrdiff_t>(own) * data.rank());
  if (data.size() > 1) {
    const std::vector<int64_t> bytes(static_cast<size_t>(data.size()), static_cast<int64_t>(own * sizeof(double)));
    data.all_gather(std::as_writable_bytes(std::span(all)), bytes, Purpose::control);
  }
  const double entropy = std::accumulate(all.begin(), all.end(), 0.0), share = run.config.training.teacher_weight;
  event.cross_entropy = entropy;
  const double rest = (1.0 - share) * entropy, divergence = (*event.loss - rest) / share;
  const bool rounding = std::abs(*event.loss - rest) <= 1e-6 * rest;  // losses of rows are fp32
  event.divergence = rounding ? 0.0 : divergence;
}

void report_step(Run& run, const StepResult& result, const std::optional<PrecisionSummary>& precision, double lr, double seconds) {
  const TrainingConfig& training = run.config.training;
  run.throughput.add(training.tokens_per_step(), seconds);
  const Traffic sent = result.sent - std::exchange(run.sent, result.sent);  // by all ranks since the step before
  if (!reports(run, run.state.step) && !result.skipped && !precision) return;
  const double gpu_memory = static_cast<double>(run.device->allocator_stats().peak_in_use) * 0x1p-30;
  const auto utilization = [&run](const std::optional<double>& peak) -> std::optional<double> {  // peak: FLOP/s of all ranks
    if (!peak) return {};
    return step_flops_per_token(run.config) * run.throughput.tokens_per_second() / *peak;
  };
  StepEvent event{.step = run.state.step,
                  .steps = *training.steps,
                  .loss = result.targets > 0 ? std::optional(result.loss) : std::nullopt,
                  .gradient_norm = result.gradient_norm,
                  .lr = lr,
                  .milliseconds = 1e3 * seconds,
                  .tokens_per_second = run.throughput.tokens_per_second(),
                  .mfu = utilization(run.gpu_peak),
                  .mfu_measured = utilization(run.gemm_rate),
                  .memory_gib = static_cast<double>(peak_resident_bytes()) * 0x1p-30,
                  .gpu_memory_gib = run.device->host_memory() ? std::nullopt : std::optional(gpu_memory),
                  .remaining_seconds = run.throughput.seconds_per_step() * static_cast<double>(*training.steps - run.state.step),
                  .tokens = run.state.tokens,
                  .padding = static_cast<double>(result.padding) / static_cast<double>(training.tokens_per_step()),
                  .skipped = result.skipped,
                  .other_gemms = run.plan.quantizes_operands() || run.config.precision.dtype != Dtype::bf16,
                  .comm_bytes = run.mesh.world.size() == 1 ? std::nullopt : std::optional(sent),
                  .routing = routing_summary(result.figures, result.routers, run.config, run.mesh.data),
                  .precision = precision};
  divide_loss(run, result, event);
  if (run.state.step == 1 && event.divergence == 0.0)
    log_warning(
        "training.teacher: before its first update the model predicts what its teacher does, to the bit, so there is nothing to learn "
        "from it; weights that are rounded already stay as they are when they are rounded again");
  publish(run, run.events.step, event);
}

bool due(const Run& run, int64_t interval) { return is_due(run.config, interval, run.state.step); }

// Keeps the most urgent request until it is met.
void take_request(Run& run, Request request) {
  run.pending = std::max(run.pending, request);
  if (run.pending == Request::save_and_stop && !run.stop_seen) run.stop_seen = Clock::now();
}

Request own_request(const Run& run) { return run.events.request ? run.events.request() : Request::none; }

void take_step(Run& run) {
  const TrainingConfig& training = run.config.training;
  TrainState& state = run.state;
  const int64_t number = state.step + 1, interval = run.config.precision.report_interval;
  run.set_phase("step");
  run.trace.begin_step(number, [&run] { run.optimizer.shards().arrive(); });  // it writes spans, which the time of a step is without
  const auto start = Clock::now();
  const TraceSpan span(Track::step, "step", number);
  const int64_t first = state.samples + run.mesh.data.rank() * run.batches.sequences();  // number of this rank's first sequence
  StepBatch batch = run.batches.take(first);
  const double lr = learning_rate(run.config.schedule, run.config.optimizer.lr, *training.steps, state.step);
  const bool measures = interval > 0 && number % interval == 0;
  StepOptions options{.vote = [&run] { return run.mesh.world.size() > 1 ? static_cast<int>(own_request(run)) : 0; },
                      .routers = measures || reports(run, number) ? RouterFigures::counts_and_losses : RouterFigures::counts,
                      .uploaded = std::move(batch.uploaded),
                      .rounding = {.seed = training.seed, .step = state.step, .token = first * batch.rows.length},
                      .teaching = teaching(run.config, run.teacher.get()),
                      .cross_entropies = measures || reports(run, number)};
  if (!run.device->host_memory() && number < *training.steps) {  // a CPU has no time to spare for the batch of the next step
    options.meanwhile = [&run, next = first + *training.global_batch_size] { run.batches.prefetch(next); };
  }
  StepResult result{};
  std::optional<PrecisionSummary> precision;
  const auto step = [&] {
    result = training_step(run.model, run.optimizer, run.accumulator, batch.rows, training.micro_batch_size, lr, std::move(options));
  };
  if (measures) {
    const int64_t before = run.device->fp32_gemms();
    const auto events = measure_precision(run.model.parameters(), run.plan, run.optimizer, number, step);
    for (const PrecisionEvent& event : events) {
      if (run.metrics) run.metrics->write(event);
    }
    precision = summary_of(events);
    if (precision) precision->fp32_gemms = run.device->fp32_gemms() - before;
  } else {
    step();
  }
  state.step = number;
  take_request(run, static_cast<Request>(result.vote));
  state.samples += *training.global_batch_size;
  state.tokens += training.tokens_per_step();
  state.pending_evaluation = run.data.valid.sets() > 0 && due(run, run.config.eval.interval);
  state.pending_samples = run.config.eval.samples && due(run, run.config.eval.samples->interval);
  state.nonfinite_in_a_row = result.skipped ? state.nonfinite_in_a_row + 1 : 0;
  if (result.skipped) {
    ++state.skipped_steps;
    log_warning("step ", state.step, " skipped: ", result.bad, " is not finite (", state.nonfinite_in_a_row,
                " in a row, training.nonfinite_limit ", training.nonfinite_limit, ")");
  }
  report_step(run, result, precision, lr, seconds_since(start));
  report_stragglers(run.stragglers, result.seconds, state.step, run.metrics);
  const int64_t check = training.replica_check_interval;
  if (check > 0 && state.step % check == 0) require_same_replicas(run.optimizer, run.model.parameters());
  if (state.nonfinite_in_a_row < training.nonfinite_limit) return;
  fail_alike(run.mesh.world, ExitCode::numerical,
             text("stopped at step ", state.step, ": ", state.nonfinite_in_a_row, " steps in a row were not finite, the last because of ",
                  result.bad, "; lower optimizer.lr, or check the data"));
}

// ---- between steps

// Returns the most urgent request of any rank.
Request poll(Run& run) {
  const Request own = std::max(run.pending, own_request(run));
  take_request(run, run.mesh.world.size() == 1 ? own : std::ranges::max(run.mesh.world.all(own)));
  return run.pending;
}

// Polls for requests; called often in a long section, so it reports progress, too.
bool stopping(Run& run, const char* section) {
  run.set_phase(section);
  return poll(run) == Request::save_and_stop;
}

// Returns false if a request to stop cut the evaluation short.
bool run_evaluation(Run& run) {
  run.set_phase("evaluation");
  const TraceSpan span(Track::step, "evaluation", run.state.step);
  const auto start = Clock::now();
  EvaluationEvent event{.step = run.state.step};
  const auto stop = [&run] { return stopping(run, "evaluation"); };
  event.result = evaluate(run.model, run.data.valid, run.config.training.micro_batch_size, run.config.eval.iters, stop, run.mesh.data,
                          run.teacher.get());
  if (event.result.stopped) return false;
  event.seconds = seconds_since(start);
  run.last_valid_loss = event.result.loss;
  const double reached = event.result.objective(run.config.training.teacher_weight);
  event.best = std::isfinite(reached) && (!run.state.best_valid_loss || reached < *run.state.best_valid_loss);
  if (event.best) run.state.best_valid_loss = reached;
  std::optional<BestCheckpoint>& best = run.state.best_checkpoint;
  if (run.config.checkpoint.keep_best && std::isfinite(reached) && (!best || reached < best->loss))
    run.best_before = std::exchange(best, BestCheckpoint{.step = run.state.step, .loss = reached});
  publish(run, run.events.evaluated, event);
  return true;
}

// Returns false if a request to stop cut the samples short; an incomplete sample is not written.
bool write_samples(Run& run) {
  run.set_phase("samples");
  const TraceSpan span(Track::step, "samples", run.state.step);
  const SamplesConfig& samples = *run.config.eval.samples;
  const auto go_on = [&run](int32_t) { return !stopping(run, "samples"); };
  for (size_t i = 0; i < run.prompts.size(); ++i) {
    const SamplingOptions options{.max_new_tokens = samples.max_new_tokens,
                                  .temperature = samples.temperature,
                                  .top_k = samples.top_k,
                                  .top_p = samples.top_p,
                                  .seed = run.config.training.seed,
                                  .what = static_cast<uint32_t>(i),
                                  .moment = static_cast<uint64_t>(run.state.step)};
    if (stopping(run, "samples")) return false;
    const std::vector<int32_t> ids = generate(run.model, run.prompts[i], options, go_on);
    if (stopping(run, "samples")) return false;
    const SampleEvent event{
        .step = run.state.step, .prompt = samples.prompts[i], .text = continuation(*run.data.tokenizer, run.prompts[i], ids)};
    publish(run, run.events.wrote, event);
  }
  return true;
}

// Returns once at most so many exports are pending. A stop leaves them most of the 30 s that a launcher gives, counted from its request;
// what it cuts is made by a resume. The watchdog sees the work of all ranks.
void await_exports(Run& run, size_t most) {
  constexpr double kGraceSeconds = 20;
  std::vector<int64_t> progress;
  while (run.exports.pending() > most) {
    run.exports.advance(run.checkpoints);
    poll(run);
    const bool over = run.stop_seen && seconds_since(*run.stop_seen) > kGraceSeconds;
    std::vector<int64_t> now = run.mesh.world.all(run.exports.progress());
    if (now != progress) run.set_phase("save");
    progress = std::move(now);
    if (run.mesh.world.all(uint8_t{over}).front() != 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

// Returns whether all steps were taken, and what is due after the last one.
bool has_finished(const Run& run) { return run.state.step >= *run.config.training.steps && !run.state.has_pending(); }

AfterSave after_save(const Run& run) {
  return run.stop_seen || run.state.step >= *run.config.training.steps ? AfterSave::run_ends : AfterSave::run_goes_on;
}

// Returns true if the state is the one that `best` is to name.
bool is_best(const Run& run) {
  const std::optional<BestCheckpoint>& best = run.state.best_checkpoint;
  return run.config.checkpoint.keep_best && best && best->step == run.state.step;
}

// Saves the state. A checkpoint whose export is pending is never deleted to make room. If the disk does not take the save that ends a run,
// the run waits for pending exports, after which their checkpoints may be deleted, and saves once more.
SavedCheckpoint save_state(Run& run, AfterSave after) {
  const auto set_phase = [&run] { run.set_phase("save"); };
  const auto save = [&] {
    return save_together(run.mesh.world, run.checkpoints, checkpoint_content(run.parts(), run.state), set_phase, after);
  };
  try {
    return save();
  } catch (const Error& error) {
    if (error.code() != ExitCode::storage || after != AfterSave::run_ends || run.exports.pending() == 0) throw;
    log_warning("the checkpoint of step ", run.state.step, " is not saved yet: ", error.what(),
                "; the save is tried again after pending exports");
  }
  await_exports(run, 0);
  return save();
}

enum class SavedFor { interval_or_request, best_alone };

// Returns false if the disk did not take the save; training goes on and tries again at the next interval. Before a stop, which may have
// seconds left, no export is begun but that of the end, after which nobody may resume the run. A checkpoint that is saved for being the
// best is exported at the end, as a better one may follow.
bool save(Run& run, AfterSave after, SavedFor cause = SavedFor::interval_or_request) {
  const TraceSpan span(Track::step, "save", run.state.step);
  const auto start = Clock::now();
  SaveEvent event{.step = run.state.step};
  SavedCheckpoint saved;
  bool complete = false;  // on every rank, though only one knows the path
  try {
    saved = save_state(run, after);
    complete = true;
    event.path = saved.path.string();
    if (is_best(run)) {
      agree(run.mesh.world, [&] {
        if (run.checkpoints) run.checkpoints->name_best(saved);
      });
    }
  } catch (const Error& error) {
    if (error.code() != ExitCode::storage) throw;
    event.problem = error.what();
    log_error("the checkpoint of step ", run.state.step,
              complete ? " was saved, but not named as the best: " : " was not saved: ", error.what());
    if (is_best(run) && !complete) run.state.best_checkpoint = run.best_before;  // `best` still names that
    ++run.failed_saves;
  }
  event.seconds = seconds_since(start);
  if (!event.path.empty()) run.newest_checkpoint = event.path;
  publish(run, run.events.saved, event);
  if (!event.problem.empty()) return false;
  if (run.config.checkpoint.exported && cause != SavedFor::best_alone && (!run.stop_seen || has_finished(run))) {
    await_exports(run, 1);
    run.exports.add(saved, run.checkpoints);
  }
  return true;
}

// Runs evaluation, samples and the save that are due after the step. Returns true if the state is on the disk. An error in evaluation or
// samples must not cost the finished steps, so the state is saved in any case. Both yield to a stop, which may have seconds left; what is
// cut stays pending, in the checkpoint too.
bool after_step(Run& run) {
  TrainState& state = run.state;
  try {
    state.pending_evaluation = state.pending_evaluation && run.data.valid.sets() > 0 && !run_evaluation(run);
    state.pending_samples = state.pending_samples && run.config.eval.samples && !write_samples(run);
    if (state.has_pending()) log_warning("evaluation or samples of step ", state.step, " were interrupted; --resume does them first");
  } catch (const Error& error) {
    // Ranks save together, which they can only if all have thrown the same error.
    if (run.mesh.world.size() == 1 || error.code() == ExitCode::data) save(run, AfterSave::run_ends);
    throw;
  }
  if (due(run, run.config.checkpoint.interval)) return save(run, after_save(run));
  return is_best(run) && save(run, after_save(run), SavedFor::best_alone);
}

// Queues the export of the best checkpoint. One that was saved only for being the best has not been exported yet.
void export_best(Run& run) {
  SavedCheckpoint best;
  agree(run.mesh.world, [&] {
    if (run.checkpoints) best = run.checkpoints->best().value_or(best);
  });
  const bool found = run.mesh.world.all(uint8_t{!best.path.empty()}).front() != 0;
  if (found) run.exports.add(best, run.checkpoints);
}

// Ends a run that has finished, or that was asked to stop.
ExitCode finish(Run& run, bool saved) {
  run.trace.end([&run] { run.optimizer.shards().arrive(); });
  const std::string counts = gemm_counts_text(run.device->gemm_counts());
  const int64_t again = run.device->fp32_gemms();
  if (!counts.empty())
    log_info("GEMMs by path: ", counts, again > 0 ? text("; ", again, " of them in fp32 because of extreme scales") : "");
  if (run.config.checkpoint.exported && run.state.best_checkpoint && has_finished(run)) export_best(run);
  await_exports(run, 0);
  const std::map<int64_t, std::string> failed = run.exports.failed(run.checkpoints);
  for (const auto& [step, problem] : failed)
    log_error("the export of step ", step, " is missing at the end of the run: ", problem, "; mend that, and make it with mantissa export ",
              (std::filesystem::path(run.config.checkpoint.dir) / checkpoint_name(step)).string());
  // Nobody resumes a run that has finished; a resume of one that was stopped makes the others.
  const bool lacks_export = has_finished(run) ? !failed.empty() : failed.contains(run.state.step);
  if (!saved || lacks_export) return ExitCode::storage;
  return has_finished(run) && run.exports.pending() == 0 ? ExitCode::ok : ExitCode::stopped;
}

ExitCode loop(Run& run) {
  // Says whether this state is on the disk, in this run's folder: a path may have named a checkpoint of another run.
  bool saved = !run.resumed.empty() && run.config.checkpoint.resume == "auto";
  if (run.resumed.empty()) run.state.pending_evaluation = run.config.eval.first;
  if (run.state.has_pending() || (has_finished(run) && !saved)) saved = after_step(run);
  if (run.config.checkpoint.exported) run.exports.add_missing(run.checkpoints);
  for (bool stepped = false;; stepped = true) {
    // After a step, the ranks have agreed already.
    const Request request = stepped && run.mesh.world.size() > 1 ? run.pending : poll(run);
    run.pending = Request::none;
    const bool ends = has_finished(run) || request == Request::save_and_stop;
    if (request != Request::none && !saved) {
      saved = save(run, after_save(run));
    } else if (request == Request::save && run.config.checkpoint.exported && is_best(run)) {  // it was saved, but for being the best
      await_exports(run, 1);
      export_best(run);
    }
    if (ends) return finish(run, saved);
    take_step(run);
    if (run.exports.pending() > 0 && run.state.step % run.config.logging.interval == 0) {
      run.set_phase("save");
      run.exports.advance(run.checkpoints);
    }
    saved = after_step(run);
  }
}

}  // namespace

TrainSummary train(const LoadedConfig& loaded, const std::vector<std::string>& arguments, const TrainEvents& events,
                   const Communicator& world, const MakeBackend& make_device) {
  const auto began = Clock::now();
  set_num_threads(loaded.config.training.threads);
  const Mesh mesh = make_mesh(world, loaded.config.parallel.ranks());
  agree(mesh.world, [&] { require_size(mesh.data, "parallel.data", loaded.config.parallel.data); });
  Run run(loaded, events, mesh, make_device);
  start(run);
  run.gemm_rate = measured_gemm_rate(run.config, *run.device, run.mesh.world);
  run.gpu_peak = data_sheet_peak(*run.device, run.mesh.world);
  open_folder(run, arguments);
  return {.exit = loop(run),
          .steps = run.state.step,
          .tokens = run.state.tokens,
          .skipped_steps = run.state.skipped_steps,
          .best_valid_loss = run.state.best_valid_loss,
          .best_is = objective_name(teacher_weight(run.config.training)),
          .last_valid_loss = run.last_valid_loss,
          .seconds = seconds_since(began),
          .tokens_per_second = run.throughput.mean_tokens_per_second(),
          .failed_saves = run.failed_saves + run.exports.failures(),
          .dropped_lines = run.metrics ? run.metrics->dropped() : 0,
          .folder = run.config.logging.dir,
          .checkpoint = run.newest_checkpoint,
          .best_checkpoint = run.state.best_checkpoint ? (std::filesystem::path(run.config.checkpoint.dir) / "best").string() : "",
          .best_step = run.state.best_checkpoint ? std::optional(run.state.best_checkpoint->step) : std::nullopt};
}

}  // namespace mantissa
