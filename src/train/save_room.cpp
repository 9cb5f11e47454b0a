#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <numeric>

#include "mantissa/base/file.h"
#include "mantissa/base/log.h"
#include "mantissa/checkpoint/checkpoint_search.h"
#include "mantissa/hf/export.h"
#include "mantissa/models/model_shape.h"
#include "train/start_point.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

// Returns the folder, else the nearest above it that is there.
fs::path existing(const fs::path& folder) {
  std::error_code error;
  fs::path at = fs::absolute(folder, error).lexically_normal();
  while (at.has_relative_path() && !fs::is_directory(at, error)) at = at.parent_path();
  return at;
}

bool on_one_disk(const fs::path& a, const fs::path& b) {
  struct stat first {};
  struct stat second {};
  return ::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0 && first.st_dev == second.st_dev;
}

int64_t multiples(int64_t of, int64_t after, int64_t last) { return last / of - after / of; }

// Returns how many of the saves to come are at multiples of `every`, which are kept for good.
int64_t kept_for_good(const CheckpointConfig& config, int64_t step, int64_t steps) {
  const int64_t every = config.keep_every, interval = config.interval;
  if (every == 0) return 0;
  const bool last_alone = steps % every == 0 && (interval == 0 || steps % interval != 0);
  const int64_t factor = interval == 0 ? 0 : interval / std::gcd(interval, every);
  const bool any = interval > 0 && factor <= steps / every;  // else the product may be beyond 64 bits
  return (any ? multiples(factor * every, step, steps) : 0) + (last_alone ? 1 : 0);
}

// Lists the checkpoints that a run which goes on in its folder has there up to its step, oldest first.
std::vector<CheckpointStatus> own_checkpoints(const RunConfig& config, const StartStep& start) {
  std::vector<CheckpointStatus> own;
  if (start.own) own = list_checkpoints(config.checkpoint.dir);
  std::erase_if(own, [&](const CheckpointStatus& one) { return !one.problem.empty() || one.step > start.step; });
  return own;
}

bool stays(const CheckpointConfig& config, int64_t step) { return config.keep_every > 0 && step % config.keep_every == 0; }

}  // namespace

int64_t checkpoint_bytes(const ModelConfig& model, const std::vector<TokenizerFile>& files) {
  constexpr int64_t kValue = sizeof(float), kMasterAndMoments = 3 * kValue;
  int64_t bytes = 0;
  for (const ParameterShape& parameter : parameter_shapes(model_shape(model))) bytes += kMasterAndMoments * parameter.shape.elements();
  for (const ParameterShape& buffer : buffer_shapes(model_shape(model))) bytes += kValue * buffer.shape.elements();
  for (const TokenizerFile& file : files) bytes += std::ssize(file.bytes);
  return bytes;
}

int64_t most_new_checkpoints(const RunConfig& config, int64_t step, int64_t kept) {
  const int64_t steps = config.training.steps, interval = config.checkpoint.interval, latest = config.checkpoint.keep_latest;
  const bool last_alone = interval == 0 || steps % interval != 0;
  const int64_t saves = (interval > 0 ? multiples(interval, step, steps) : 0) + (last_alone ? 1 : 0);
  const int64_t rotating = latest + 1 - std::min(kept, latest);  // a new one is written before the oldest goes
  return std::min(saves, rotating + kept_for_good(config.checkpoint, step, steps));
}

std::string find_room_for_saves(const RunConfig& config, const PrecisionPlan& plan, const std::vector<TokenizerFile>& files,
                                const StartStep& start) {
  const CheckpointConfig& checkpoint = config.checkpoint;
  const bool finished = start.step == config.training.steps;
  if (finished && start.own) return "";  // all is saved
  const fs::path disk = existing(checkpoint.dir);
  const std::optional<int64_t> free = free_bytes(disk);
  if (!free) return "";
  const std::vector<CheckpointStatus> own = own_checkpoints(config, start);
  const int64_t one = checkpoint_bytes(config.model, files);
  int64_t reclaimable = 0;  // for the last state: all but the newest
  for (size_t i = 0; i + 1 < own.size(); ++i)
    if (!stays(checkpoint, own[i].step)) reclaimable += own[i].bytes;
  if (*free + reclaimable < room_for(one)) {
    return text("checkpoint.dir: a checkpoint of this run needs ", room_for(one), " bytes, and ", *free, " are free in ", disk.string(),
                ": free some, or set checkpoint.dir to a larger disk");
  }
  const bool exports = checkpoint.exported && on_one_disk(disk, existing(config.logging.dir));
  const int64_t with_export = one + (exports ? export_bytes(config.model, plan, *checkpoint.exported) : 0);
  const auto kept = std::ranges::count_if(own, [&](const CheckpointStatus& saved) { return !stays(checkpoint, saved.step); });
  const int64_t most = finished ? 1 : most_new_checkpoints(config, start.step, kept);
  const double wanted = static_cast<double>(most) * static_cast<double>(with_export) + 0.1 * static_cast<double>(one);
  if (static_cast<double>(*free) >= wanted) return "";
  log_warning(
      "checkpoint.dir: ", count_text(most, "checkpoint"), " of ", with_export, " bytes", exports ? " with their exports" : "",
      " lie side by side in this run, and ", *free, " bytes are free in ", disk.string(),
      ": saves will fail or delete older ones first; free some, lower checkpoint.keep_latest, or set checkpoint.dir to a larger disk");
  return "";
}

}  // namespace mantissa
