#include "mantissa/io/checkpoint_directory.h"

#include <sys/random.h>

#include <cerrno>

#include "io/checkpoint_steps.h"
#include "mantissa/base/log.h"
#include "mantissa/base/pending_file.h"
#include "mantissa/io/hash.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

// No two saves, of this or another process, use the same name for what is temporary.
std::string unique_id() {
  uint64_t value = 0;
  require(::getrandom(&value, sizeof value, 0) == sizeof value, ExitCode::environment, "getrandom failed: ", system_message(errno));
  return hex64(value);
}

void remove_leftover(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) log_warning(path.string(), ": could not be deleted: ", error.message());
}

// Renames what lies at `path` and was known as `known_as`.
void set_aside(const fs::path& path, const fs::path& known_as, const std::string& reason) {
  const fs::path target = known_as.parent_path() / (".bad-" + known_as.filename().string() + "-" + unique_id());
  rename_path(path, target);
  log_warning(known_as.string(), ": set aside as ", target.filename().string(), ": ", reason);
}

}  // namespace

CheckpointDirectory::CheckpointDirectory(const fs::path& folder, KeepPolicy keep, const std::string& job)
    : folder_(folder), keep_(keep), job_(job) {
  require(keep.latest >= 2, ExitCode::usage, "checkpoint.keep_latest: must be at least 2, got ", keep.latest);
  require(keep.every >= 0, ExitCode::usage, "checkpoint.keep_every: must not be negative, got ", keep.every);
  std::error_code error;
  fs::create_directories(folder, error);
  require(!error, ExitCode::environment, folder.string(), ": cannot be made: ", error.message());
  lock_.emplace(folder, job);
  sweep();
}

void CheckpointDirectory::make_sure_it_is_ours() {
  if (lock_ && lock_->still_ours()) return;
  // Somebody removed or replaced the folder. Saving goes on if it is there and free, as when the disk had been full.
  log_warning(folder_.string(), ": the lock was removed; taking it again");
  lock_.reset();
  try {
    lock_.emplace(folder_, job_);
  } catch (const Error& error) {
    fail(ExitCode::storage, error.what());
  }
}

void CheckpointDirectory::sweep() const {
  std::vector<fs::path> leftovers;
  std::error_code error;
  for (fs::directory_iterator entry(folder_, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with(".tmp-") || name.starts_with(".trash-") || name == "latest.tmp") leftovers.push_back(entry->path());
  }
  require(!error, ExitCode::environment, folder_.string(), ": cannot be listed: ", error.message());
  for (const fs::path& path : leftovers) {
    log_info(path.string(), ": left by a process that was killed; deleted");
    remove_leftover(path);
  }
}

bool CheckpointDirectory::holds(const fs::path& path, const Manifest& manifest) const {
  std::error_code error;
  if (!fs::is_directory(path, error)) return false;
  try {
    CheckpointReader reader(path);
    const Manifest& there = reader.manifest();
    const bool same = there.samples == manifest.samples && there.state == manifest.state && there.shards == manifest.shards &&
                      there.tensors == manifest.tensors;
    if (same) reader.verify();
    return same;
  } catch (const CheckpointDamage&) {
    return false;
  }
}

void CheckpointDirectory::put_in_place(const fs::path& temporary, const fs::path& path) const {
  const char* const reason = "it is damaged or holds another state of this step";
  std::error_code error;
  if (!fs::exists(fs::symlink_status(path, error))) {
    rename_path(temporary, path);
  } else if (exchange_paths(temporary, path)) {  // a reported checkpoint is replaced without a moment in which there is none
    set_aside(temporary, path, reason);
  } else {
    set_aside(path, path, reason);
    rename_path(temporary, path);
  }
  sync_directory(folder_);
}

void CheckpointDirectory::name_latest(const std::string& name, const std::string& hash) const {
  write_file_atomically(folder_ / "latest", name + " " + hash + "\n");
}

void CheckpointDirectory::adopt(const LoadedCheckpoint& loaded) const {
  const std::string name = loaded.path.filename().string();
  const std::optional<LatestPointer> latest = read_latest(folder_);
  if (!latest || latest->name != name || latest->hash != loaded.hash) name_latest(name, loaded.hash);
}

void CheckpointDirectory::publish(const fs::path& path) const {
  try {
    const CheckpointReader reader(path);
    name_latest(path.filename().string(), reader.hash());
  } catch (const CheckpointDamage& damage) {
    set_aside(path, path, damage.what());
    fail(ExitCode::storage, "the checkpoint just written cannot be read: ", damage.what());
  }
}

SavedCheckpoint CheckpointDirectory::save(const CheckpointContent& content) {
  require_finite(content);
  const Manifest manifest = describe_checkpoint(content);
  const fs::path path = folder_ / checkpoint_name(content.step);
  make_sure_it_is_ours();
  SavedCheckpoint saved{.path = path, .bytes = manifest.shards.front().bytes, .already_there = false};
  if (holds(path, manifest)) {
    saved.already_there = true;
  } else {
    require_free_space(folder_, saved.bytes);
    const fs::path temporary = folder_ / (".tmp-" + checkpoint_name(content.step).substr(5) + "-" + unique_id());
    write_checkpoint(content, manifest, temporary);
    try {
      put_in_place(temporary, path);
    } catch (const Error&) {
      remove_leftover(temporary);
      throw;
    }
  }
  publish(path);
  log_info("checkpoint ", path.string(), saved.already_there ? " was saved before" : " saved", " (", saved.bytes, " bytes)");
  try {
    delete_old(content.step);
  } catch (const Error& error) {
    log_warning("an old checkpoint was not deleted: ", error.what());
  }
  return saved;
}

void CheckpointDirectory::delete_old(int64_t newest_step) const {
  int64_t valid = 0;
  const std::vector<int64_t> steps = steps_in(folder_);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (*step > newest_step) continue;  // of a run that was left for an older checkpoint: not ours to delete
    const fs::path path = folder_ / checkpoint_name(*step);
    try {
      open_candidate({.path = path, .step = *step});
      if (++valid <= keep_.latest || (keep_.every > 0 && *step % keep_.every == 0)) continue;
      const fs::path trash = folder_ / (".trash-" + path.filename().string() + "-" + unique_id());
      rename_path(path, trash);
      remove_leftover(trash);
    } catch (const CheckpointDamage& damage) {
      log_warning("a damaged checkpoint is not counted: ", damage.what());
    }
  }
}

}  // namespace mantissa
