#include "train/run_exports.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "base/file.h"
#include "base/parallel.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_directory.h"
#include "comm/mesh.h"
#include "hf/export.h"
#include "io/pending_folder.h"
#include "json/json_fields.h"
#include "mantissa/base/log.h"

namespace mantissa {

enum class ShardState : uint8_t { working, done, failed };

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

fs::path exports_of(const RunConfig& config) { return fs::path(config.logging.dir) / "exports"; }

// Deletes what a killed process left, and an export of another state of this step.
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

// This function and the next run on rank 0 only, so that nothing that happens in them may end the run.
bool is_made(const RunConfig& config, int64_t step, const std::string& manifest) {
  const fs::path folder = export_folder(config, step);
  try {
    return is_export_of(folder, manifest, *config.checkpoint.exported);
  } catch (const Error& error) {
    log_warning(folder.string(), ": is exported again: ", error.what());
    return false;
  }
}

void delete_exports_without_checkpoint(const RunConfig& config) {
  try {
    const std::vector<int64_t> saved = steps_in(config.checkpoint.dir);
    if (saved.empty()) return;  // the folder went away
    for (const int64_t step : steps_in(exports_of(config))) {
      if (std::ranges::find(saved, step) == saved.end()) discard(export_folder(config, step));
    }
  } catch (const Error& error) {
    log_warning("exports of deleted checkpoints were not deleted: ", error.what());
  }
}

// Returns whether a checkpoint was saved only because it was the best of its run until then.
bool is_best_alone(const fs::path& path) {
  try {
    const CheckpointReader reader = open_checkpoint(path);
    const Manifest& manifest = reader.manifest();
    const RunConfig& config = reader.config();
    const auto state = from_json<TrainState>(manifest.state, path.string());
    const std::optional<BestCheckpoint>& best = state.best_checkpoint;
    return config.checkpoint.keep_best && best && best->step == manifest.step && !is_due(config, config.checkpoint.interval, manifest.step);
  } catch (const Error& error) {
    log_warning(path.string(), ": is exported, as nothing says why it was saved: ", error.what());
    return false;
  }
}

// Makes it on the CPU, as the run has its device for itself.
std::unique_ptr<ModelExport> opened(const std::string& checkpoint, const ExportOptions& options) {
  return std::make_unique<ModelExport>(checkpoint, options, make_backend("cpu"));
}

// Thrown to leave an export that nobody waits for.
struct Canceled {};

}  // namespace

// Does what one rank does for the export at hand.
class RunExports::Shard {
 public:
  Shard(const Communicator& world, std::atomic<int64_t>& progress) : rank_(world.rank()), ranks_(world.size()), progress_(progress) {}

  // Makes the folder and its files, on rank 0.
  void make_folder(const Order& order, const fs::path& output, const ExportOptions& options) {
    make_room(output);
    pending_.emplace(output);
    model_ = opened(order.checkpoint, options);
    model_->begin(pending_->path());
  }
  std::string folder() const { return pending_ ? pending_->path().string() : ""; }

  // Writes the part of this rank into the folder.
  void write(const Order& order, const std::string& folder, const ExportOptions& options) {
    folder_ = folder;
    start([=, this](const Progressed& progressed) {
      if (!model_) model_ = opened(order.checkpoint, options);
      require(model_->manifest() == order.manifest, ExitCode::data, order.checkpoint, ": was replaced before it was exported");
      hashes_ = model_->write(folder_, rank_, ranks_, progressed);
    });
  }
  // Compares a part of what all have written with what forward multiplies by, as `mantissa export` does.
  void compare() {
    compared_ = true;
    start([this](const Progressed& progressed) {
      HfWeights written(folder_);
      const std::optional<std::string> difference = model_->difference(written, rank_, ranks_, progressed);
      require(!difference, ExitCode::storage, difference.value_or(""));
    });
  }
  // Takes a step of the export; what it throws is why the shard failed.
  void attempt(const auto& step) {
    try {
      step();
    } catch (const std::exception& error) {
      fail_with(error.what());
    }
  }
  void fail_with(const std::string& problem) {
    problem_ = problem;
    state_ = ShardState::failed;
  }

  ShardState state() const { return state_; }
  bool compared() const { return compared_; }              // or about to be
  const std::string& problem() const { return problem_; }  // the problem of one that failed
  std::string hashes() const {
    return joined(hashes_, "", [](const Hash64& hash) { return hash.text(); });
  }

  // Completes the folder with the hashes of all shards, on rank 0, which publishes it when it was compared.
  void finish(const std::vector<std::string>& shards) {
    std::vector<Hash64> hashes;
    for (const std::string& shard : shards) {
      for (size_t i = 0; i < shard.size(); i += 16) hashes.push_back(Hash64::parse(shard.substr(i, 16)).value());
    }
    model_->finish(pending_->path(), hashes);
  }
  void publish() { pending_->publish(); }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - began_).count(); }

 private:
  // Runs a stage of the export in a thread. Its body calls its argument after each chunk, which throws Canceled once the thread is to stop.
  void start(std::function<void(const Progressed&)> body) {
    state_ = ShardState::working;
    thread_ = std::jthread([this, body = std::move(body)](const std::stop_token& stop) {
      const SingleThreadedLoops beside_training;
      try {
        body([&] {
          if (stop.stop_requested()) throw Canceled();
          ++progress_;
        });
        state_ = ShardState::done;
      } catch (const Canceled&) {
        fail_with("interrupted");
      } catch (const std::exception& error) {
        fail_with(error.what());
      }
    });
  }

  const int rank_, ranks_;
  std::atomic<int64_t>& progress_;
  Clock::time_point began_ = Clock::now();
  std::optional<PendingFolder> pending_;  // only on rank 0
  std::string folder_;
  bool compared_ = false;
  std::unique_ptr<ModelExport> model_;
  std::vector<Hash64> hashes_;
  std::string problem_;
  std::atomic<ShardState> state_{ShardState::working};
  std::jthread thread_;  // the last member: it is stopped before the others go
};

RunExports::RunExports(const RunConfig& config, const Communicator& world, std::function<void(const ExportEvent&)> made)
    : config_(config), world_(world), made_(std::move(made)) {}

RunExports::~RunExports() {
  if (pending() > 0) log_warning("the export of step ", orders_.front().step, " was interrupted; the run makes it when it is resumed");
}

void RunExports::add(const SavedCheckpoint& saved, std::optional<CheckpointDirectory>& checkpoints) {
  const int64_t own = checkpoint_step(saved.path.filename()).value_or(0);
  const bool made = checkpoints && is_made(config_, own, saved.hash);
  const Order order{.step = world_.all(own).front(),
                    .checkpoint = broadcast_string(world_, made ? "" : saved.path.string()),
                    .manifest = broadcast_string(world_, saved.hash)};
  const bool asked = std::ranges::any_of(orders_, [&](const Order& other) { return other.manifest == order.manifest; });
  if (order.checkpoint.empty() || asked) return;
  orders_.push_back(order);
  if (checkpoints) {
    checkpoints->pin(order.step);
    delete_exports_without_checkpoint(config_);
  }
  if (!shard_) begin(orders_.front());
}

void RunExports::add_missing(std::optional<CheckpointDirectory>& checkpoints) {
  std::vector<SavedCheckpoint> kept;
  agree(world_, [&] {
    for (const CheckpointStatus& status : checkpoints ? list_checkpoints(checkpoints->folder()) : std::vector<CheckpointStatus>()) {
      if (status.problem.empty()) kept.push_back({.path = status.path, .hash = status.hash});
    }
    const size_t most = static_cast<size_t>(config_.checkpoint.keep_latest);
    kept.erase(kept.begin(), kept.end() - static_cast<std::ptrdiff_t>(std::min(kept.size(), most)));
    std::erase_if(kept, [](const SavedCheckpoint& saved) { return is_best_alone(saved.path); });
  });
  kept.resize(static_cast<size_t>(world_.all(static_cast<int64_t>(kept.size())).front()));
  for (const SavedCheckpoint& saved : kept) add(saved, checkpoints);
}

// Rank 0 makes the files, then each rank begins to write its shard of them.
void RunExports::begin(const Order& order) {
  shard_ = std::make_unique<Shard>(world_, progress_);
  const ExportOptions& options = *config_.checkpoint.exported;
  if (world_.rank() == 0) shard_->attempt([&] { shard_->make_folder(order, export_folder(config_, order.step), options); });
  const bool made = world_.all(shard_->state()).front() != ShardState::failed;
  const std::string folder = broadcast_string(world_, shard_->folder());
  if (!made && world_.rank() > 0) shard_->fail_with("");
  if (!made) return;
  shard_->attempt([&] { shard_->write(order, folder, options); });  // it throws where no thread is left
}

void RunExports::advance(std::optional<CheckpointDirectory>& checkpoints) {
  while (pending() > 0) {
    const std::vector<ShardState> states = world_.all(shard_->state());
    if (std::ranges::find(states, ShardState::working) != states.end()) return;
    const bool failed = std::ranges::find(states, ShardState::failed) != states.end(), written = !failed && !shard_->compared();
    const std::vector<std::string> hashes = written ? gather_strings(world_, shard_->hashes()) : std::vector<std::string>();
    if (world_.rank() == 0 && !failed) shard_->attempt([&] { written ? shard_->finish(hashes) : shard_->publish(); });
    const std::vector<std::string> problems = gather_strings(world_, shard_->problem());
    const auto first = std::ranges::find_if(problems, [](const std::string& text) { return !text.empty(); });
    const std::string problem = broadcast_string(world_, first == problems.end() ? "" : *first);  // the first rank's that has one
    if (written && problem.empty()) {
      shard_->attempt([&] { shard_->compare(); });
      continue;
    }
    end(orders_.front(), problem, checkpoints);
    orders_.pop_front();
    ++progress_;
    if (pending() > 0) begin(orders_.front());
  }
}

void RunExports::end(const Order& order, const std::string& problem, std::optional<CheckpointDirectory>& checkpoints) {
  const std::string path = problem.empty() ? export_folder(config_, order.step).string() : "";
  const ExportEvent event{{.step = order.step, .path = path, .problem = problem, .seconds = shard_->seconds()}};
  shard_.reset();
  failures_ += problem.empty() ? 0 : 1;
  failed_.erase(order.step);
  if (!problem.empty()) failed_[order.step] = problem;
  if (!problem.empty()) log_error("the export of step ", order.step, " was not made: ", problem);
  if (checkpoints) {
    checkpoints->unpin(order.step);
    delete_exports_without_checkpoint(config_);
  }
  made_(event);
}

std::map<int64_t, std::string> RunExports::failed(const std::optional<CheckpointDirectory>& checkpoints) const {
  std::map<int64_t, std::string> out;
  for (const auto& [step, problem] : failed_) {
    std::error_code unknown;
    const bool there = checkpoints && fs::is_directory(checkpoints->folder() / checkpoint_name(step), unknown);
    if (world_.all(uint8_t{there}).front() != 0) out[step] = problem;
  }
  return out;
}

fs::path export_folder(const RunConfig& config, int64_t step) { return exports_of(config) / checkpoint_name(step); }

}  // namespace mantissa
