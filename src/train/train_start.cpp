#include <algorithm>
#include <filesystem>
#include <iterator>

#include "mantissa/base/log.h"
#include "mantissa/base/parallel.h"
#include "mantissa/checkpoint/ranks_together.h"
#include "mantissa/checkpoint/saved_model.h"
#include "mantissa/data/data_warnings.h"
#include "mantissa/hf/export.h"
#include "mantissa/hf/export_files.h"
#include "mantissa/hf/load_model.h"
#include "mantissa/io/pending_folder.h"
#include "mantissa/metrics/run_folder.h"
#include "mantissa/plan/run_warnings.h"
#include "mantissa/train/equal_places.h"
#include "train/run.h"

namespace mantissa {
namespace {

// Keeps the tokenizer files of a model. Those of another tokenizer would give its ids other words in an export.
std::vector<TokenizerFile> kept_files(std::vector<TokenizerFile> files, const std::string& source, const Run& run) {
  if (!run.data.tokenizer || !has_other_tokenizer(files, *run.data.tokenizer)) return files;
  require(
      run.config.checkpoint.allow_tokenizer_change, ExitCode::usage, source, " came with another tokenizer than data.tokenizer ",
      *run.config.data.tokenizer,
      ": the same ids are other pieces of text\ntokenize the data with the model's own and train on token files with data.tokenizer=null, "
      "or set checkpoint.allow_tokenizer_change to true to teach the model these ids");
  log_warning("checkpoint.allow_tokenizer_change: tokenizer and generation files of ", source, " are left behind");
  return {};
}

void require_known_ids(const CheckpointReader& reader, const Run& run) {
  const std::string source = reader.directory().string();
  if (!has_other_tokenizer(reader, run.data)) return;
  require(
      run.config.checkpoint.allow_tokenizer_change, ExitCode::usage, source,
      " was trained with another tokenizer than data.tokenizer names; checkpoint.allow_tokenizer_change takes its weights all the same");
  log_warning("checkpoint.allow_tokenizer_change: ", source, " was trained with another tokenizer");
}

void log_reconciled(const TensorReader& weights, const Run& run) {
  if (!run.is_rank0()) return;
  for (const std::string& line : reconciled_weights(weights, run.plan)) log_info("reconciled: ", line);
}

void take_weights(HfWeights& weights, const std::string& folder, Run& run) {
  require_initial_model(weights.run_config(), run.config, folder);
  run.files = kept_files(tokenizer_files(weights), folder, run);
  load_hf_weights(weights, run.model.parameters(), &run.optimizer);
}

void warn_of_values(const HfWeights& weights, const Run& run) {
  if (!run.is_rank0()) return;
  for (const std::string& finding : weights.weights_as_values()) log_warning(finding);
}

void warn_of_missing_biases(Run& run, const std::string& folder) {
  if (run.model.parameters().buffers().empty()) return;
  log_warning(folder, ": has no expert biases, so those of model.moe.bias_update_rate start at 0");
}

// A folder of Hugging Face's form, of which each rank reads its shards.
void start_from_folder(Run& run, const std::string& folder) {
  run.model.parameters().clear_nonfinite();
  std::string fingerprint;
  agree_on_reading(run.mesh.world, [&] {
    HfWeights weights(folder);
    fingerprint = weights.fingerprint();
    take_weights(weights, folder, run);
    warn_of_values(weights, run);
    log_reconciled(weights, run);
  });
  require_same(run.mesh.world, "the folder of checkpoint.init_from", fingerprint);
  run.optimizer.shards().gather();
  warn_of_missing_biases(run, folder);
  log_info("weights from ", folder);
}

// A tokenizer.json goes along with what is trained on its ids, in the place of one that gives the same.
void keep_own_tokenizer(Run& run) {
  if (!run.data.tokenizer || run.data.tokenizer->files() == nullptr) return;
  for (TokenizerFile& own : files_of(*run.data.tokenizer)) {
    const bool made = own.name == "tokenizer_config.json" && run.data.tokenizer->files()->config.empty();
    const auto found = std::ranges::find(run.files, own.name, &TokenizerFile::name);
    if (found == run.files.end())
      run.files.push_back(std::move(own));
    else if (!made)
      *found = std::move(own);
  }
}

void take_initial_weights(Run& run) {
  const std::optional<std::string>& from = run.config.checkpoint.init_from;
  if (!from) return run.optimizer.initialize(run.config.training.seed);
  if (starts_from_folder(run.mesh.world, *from)) return start_from_folder(run, *from);
  const auto load = [&](CheckpointReader& reader) {
    agree_on_reading(run.mesh.world, [&] {
      require_initial_model(saved_config(reader), run.config, reader.directory().string());
      require_known_ids(reader, run);
      run.files = kept_files(tokenizer_files(reader), reader.directory().string(), run);
    });
    load_weights(reader, run.plan, LoadFor::use, run.model.parameters(), &run.optimizer);
  };
  log_info("weights from ", load_checkpoint(*from, load, RanksTogether(run.mesh.world)).path.string());
}

void initial_weights(Run& run) {
  take_initial_weights(run);
  keep_own_tokenizer(run);
}

void need_unused_folder(Run& run) {
  if (!run.is_rank0()) return;
  require_nobody_trains(run.config);
  require_unused_folder(run.loaded);
  run.needs_unused_folder = true;
}

void start_fresh(Run& run) {
  agree(run.mesh.world, [&run] { need_unused_folder(run); });
  initial_weights(run);
}

void take_checkpoints(Run& run) {
  const CheckpointConfig& keep = run.config.checkpoint;
  if (run.checkpoints || !run.is_rank0()) return;
  run.checkpoints.emplace(keep.dir, KeepPolicy{.latest = static_cast<int>(keep.keep_latest), .every = keep.keep_every},
                          *run.config.logging.run_name);
}

// Call it once rank 0 has the folder. Returns false if it has none yet.
bool share_folder(Run& run) {
  return run.shared = run.shared || is_shared_folder(run.mesh.world, run.checkpoints.has_value(), run.config.checkpoint.dir);
}

bool is_path(const std::string& resume) { return resume != "never" && resume != "auto"; }

void resume(Run& run) {
  const std::string& from = run.config.checkpoint.resume;
  NamedCheckpoint named{.folder = run.config.checkpoint.dir, .name = ""};
  bool own = true;
  agree(run.mesh.world, [&] {
    std::error_code missing;
    if (is_path(from)) {
      require(!is_hf_folder(from), ExitCode::usage, from,
              ": holds weights, and no state of a run to continue; checkpoint.init_from starts a new run with them");
      named = find_checkpoint(from);
      own = std::filesystem::equivalent(named.folder, run.config.checkpoint.dir, missing);
    }
    if (!own) need_unused_folder(run);
    // Lock before reading: another process that trains here could save between our load and our lock.
    if (std::filesystem::exists(run.config.checkpoint.dir, missing)) take_checkpoints(run);
  });
  if (!share_folder(run) && !is_path(from)) return initial_weights(run);
  const auto load = [&](CheckpointReader& reader) {
    agree_on_reading(run.mesh.world, [&] {
      require_same_batch(saved_config(reader), run.loaded, reader.directory().string());
      run.files = kept_files(tokenizer_files(reader), reader.directory().string(), run);
      keep_own_tokenizer(run);
    });
    run.state = restore(reader, run.parts());
  };
  const RanksTogether together(run.mesh.world);
  const std::optional<LoadedCheckpoint> loaded =
      is_path(from) ? load_checkpoint(from, load, together) : load_newest(named.folder, load, together);
  if (!loaded) return initial_weights(run);
  run.resumed = loaded->path.string();
  if (own && run.checkpoints && named.name.empty()) run.checkpoints->adopt(*loaded);  // others may have been passed over
}

// The folder is this run's from here on. What was seen of it before may be true no more: another process may have trained there meanwhile.
void lock_folder(Run& run) {
  const bool was_locked = run.checkpoints.has_value();
  take_checkpoints(run);
  sweep_pending_folders(std::filesystem::path(run.config.logging.dir) / "exports");  // this run may write no more of them
  if (run.needs_unused_folder) {
    require_unused_folder(run.loaded);
  } else if (!was_locked) {
    require_no_checkpoints(run.loaded);
  }
}

}  // namespace

void start(Run& run) {
  agree(run.mesh.world, [&run] { require_equal_places(run.config, *run.device); });
  run.config.checkpoint.resume == "never" ? start_fresh(run) : resume(run);
}

void open_folder(Run& run, const std::vector<std::string>& arguments) {
  agree(run.mesh.world, [&] {
    if (!run.is_rank0()) return;
    lock_folder(run);
  });
  share_folder(run);  // before anything is written that says a run is there
  agree(run.mesh.world, [&] {
    if (!run.is_rank0()) return;
    write_run_folder(run.loaded, arguments);
    run.metrics.emplace(run.config.logging);
  });
  if (run.config.checkpoint.exported)  // all ranks write into it
    is_shared_folder(run.mesh.world, run.is_rank0(), run.config.logging.dir, "logging.dir");
  run.newest_checkpoint = run.resumed;
  if (!run.metrics) return;
  const StartEvent event{.folder = run.config.logging.dir,
                         .resumed = run.resumed,
                         .step = run.state.step,
                         .steps = run.config.training.steps,
                         .parameters = run.plan.parameters(),
                         .training_tokens = run.data.train->tokens(),
                         .validation_sets = run.data.valid.sets(),
                         .precision = precision_text(run.config.precision),
                         .device = run.device->name(),
                         .threads = num_threads()};
  if (run.events.started) run.events.started(event);
  if (!run.loaded.report.given("model") && !run.config.checkpoint.init_from)
    log_warning("the configuration has no section model: this is the default, of ", event.parameters, " parameters");
  for (const std::string& warning : run_warnings(run.config, run.plan)) log_warning(warning);
  for (const std::string& warning : data_warnings(run.config.data, run.data)) log_warning(warning);
  if (run.config.checkpoint.exported) {
    const std::vector<std::string> warnings = export_warnings(run.config.model, own_tokenizer(run.files, run.data.tokenizer));
    for (const std::string& warning : warnings) log_warning("checkpoint.export: ", warning);
    if (const std::string rounded = simulated_weights(run.plan); !rounded.empty()) log_warning("checkpoint.export: ", rounded);
  }
  run.metrics->write(event);
}

}  // namespace mantissa
