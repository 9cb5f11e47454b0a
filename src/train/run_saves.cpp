#include "train/run_saves.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "mantissa/base/file.h"
#include "mantissa/base/log.h"
#include "mantissa/checkpoint/checkpoint_names.h"
#include "mantissa/checkpoint/ranks_together.h"
#include "mantissa/hf/live_weights.h"
#include "mantissa/hf/write_export.h"
#include "mantissa/io/leftovers.h"
#include "mantissa/io/pending_folder.h"
#include "mantissa/models/model_shape.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

fs::path exports_of(const RunConfig& config) { return fs::path(config.logging.dir) / "exports"; }

// Whatever keeps an export from the disk is met as a save that failed: training goes on.
template <class Body>
void as_storage(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    fail(ExitCode::storage, error.what());
  }
}

// What a killed process left, and an export of another state of this step.
void make_room(const fs::path& output) {
  const fs::path folder = output.parent_path();
  make_folders(folder);
  sweep_pending_folders(folder);
  std::error_code error;
  std::vector<fs::path> left;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename().string().starts_with(".trash-")) left.push_back(entry->path());
  }
  for (const fs::path& path : left) remove_leftover(path);
  if (fs::exists(fs::symlink_status(output, error))) discard(output);
}

// Of rank 0 alone: nothing that happens here may end the run.
void delete_exports_without_checkpoint(const RunConfig& config, int64_t newest) {
  try {
    const std::vector<int64_t> saved = steps_in(config.checkpoint.dir);
    if (std::ranges::find(saved, newest) == saved.end()) return;  // the folder went away
    for (const int64_t step : steps_in(exports_of(config))) {
      if (std::ranges::find(saved, step) == saved.end()) discard(export_folder(config, step));
    }
  } catch (const Error& error) {
    log_warning("exports of checkpoints that are gone were not deleted: ", error.what());
  }
}

// The bytes that were written, tensor by tensor.
void verify_written(LiveWeights& weights, const fs::path& folder, int64_t tensors) {
  std::optional<ExportProof> proof;
  weights.at_writer([&] { as_storage([&] { proof.emplace(folder); }); });
  for (int64_t i = 0; i < tensors; ++i) weights.at_writer([&] { as_storage([&] { proof->verify(static_cast<size_t>(i)); }); });
}

fs::path write_beside(const TrainedParts& parts, const TrainState& state, const std::string& manifest, const Progressed& progressed) {
  const auto start = Clock::now();
  const ExportOptions& options = *parts.config.checkpoint.exported;
  const Shards& shards = parts.optimizer.shards();
  const fs::path output = export_folder(parts.config, state.step);
  LiveWeights weights(parts.parameters, parts.plan, shards.mesh(), progressed);
  weights.at_writer([&] { as_storage([&] { make_room(output); }); });
  const ExportedWeights exported(weights, parts.config.model, options);
  const std::vector<TokenizerFile> files(parts.files.begin(), parts.files.end());
  const ExportHead head{.model = parts.config.model,
                        .options = options,
                        .files = files,
                        .tokenizer = parts.data.tokenizer,
                        .step = state.step,
                        .manifest = manifest};
  const auto read_back = [&](const fs::path& folder) { verify_written(weights, folder, std::ssize(exported.tensors())); };
  const ExportedModel done = write_export(exported, weights, head, output, read_back);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (shards.mesh().world.rank() == 0) log_info("export ", output.string(), " written (", done.bytes, " bytes, ", seconds, " s)");
  return output;
}

// All ranks have the same error. Those of ranks that are lost, and of this program, are not of the export.
std::string exported_beside(const TrainedParts& parts, const TrainState& state, const std::string& manifest, const Progressed& progressed) {
  try {
    return write_beside(parts, state, manifest, progressed).string();
  } catch (const Error& error) {
    const bool of_export = error.code() == ExitCode::usage || error.code() == ExitCode::data || error.code() == ExitCode::environment;
    if (of_export) fail(ExitCode::storage, "export: ", error.what());
    throw;
  }
}

}  // namespace

void check_export(const RunConfig& config, ConfigReport& report) {
  if (!config.checkpoint.exported || report.failed("model") || report.failed("precision")) return;
  ModelConfig model = config.model;
  // Where only the data can tell the vocabulary, any size shows the same: here one without padding.
  if (!model.vocab_size) model.vocab_size = std::lcm(model.pad_vocab_to, int64_t{128});
  ConfigReport refused;
  const PrecisionPlan plan = PrecisionPlan::resolve(config.precision, model_shape(model), refused);
  if (!refused.ok()) return;
  try {
    const ForwardTypes types(plan);
    const ExportedWeights exported(types, model, *config.checkpoint.exported);
    if (config.checkpoint.exported->dtype != ExportDtype::bf16) return;
    for (const ModulePrecision& module : plan.modules()) {
      const bool values = !types.quantized(module.module.path + ".weight") || module.module.bias > 0;
      if (values && module.recipe.compute == Dtype::f32)
        return report.error("checkpoint.export.dtype",
                            text("bf16 does not hold ", module.module.path, ", which computes in fp32: take auto or fp32"));
    }
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    report.error("checkpoint.export", error.what());
  }
}

fs::path export_folder(const RunConfig& config, int64_t step) { return exports_of(config) / checkpoint_name(step); }

SaveEvent save_run(const TrainedParts& parts, const TrainState& state, std::optional<CheckpointDirectory>& directory, SaveFor purpose,
                   const Progressed& progressed) {
  const auto start = Clock::now();
  const Communicator& world = parts.optimizer.shards().mesh().world;
  SaveEvent event{.step = state.step};
  const char* what = "checkpoint";  // only rank 0 knows a path
  try {
    const SavedCheckpoint saved = save_together(world, directory, checkpoint_content(parts, state), progressed);
    event.path = saved.path.string();
    what = "export";
    if (parts.config.checkpoint.exported) {
      if (world.rank() == 0) delete_exports_without_checkpoint(parts.config, state.step);
      if (purpose == SaveFor::keeping) event.exported = exported_beside(parts, state, saved.hash, progressed);
    }
  } catch (const Error& error) {
    if (error.code() != ExitCode::storage) throw;
    event.problem = error.what();
    log_error(what, " of step ", state.step, " not saved: ", error.what());
  }
  event.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return event;
}

}  // namespace mantissa
