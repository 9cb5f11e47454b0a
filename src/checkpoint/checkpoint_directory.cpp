#include "checkpoint/checkpoint_directory.h"

#include <algorithm>

#include "base/hash.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr size_t kMinDigits = 8, kMaxDigits = 18;

}  // namespace

std::string checkpoint_name(int64_t step) {
  std::string digits = std::to_string(step);
  if (digits.size() < kMinDigits) digits.insert(0, kMinDigits - digits.size(), '0');
  return std::string(kPrefix) + digits;
}

std::optional<int64_t> checkpoint_step(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const std::string digits = name.substr(kPrefix.size());
  if (digits.size() < kMinDigits || digits.size() > kMaxDigits) return std::nullopt;
  if (!std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; })) return std::nullopt;
  const int64_t step = std::stoll(digits);
  return checkpoint_name(step) == name ? std::optional(step) : std::nullopt;
}

std::vector<int64_t> steps_in(const fs::path& folder) {
  std::vector<int64_t> steps;
  std::error_code error;
  if (!fs::exists(folder, error) && !error) return steps;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::optional<int64_t> step = checkpoint_step(entry->path().filename().string());
    std::error_code unknown;  // a name that cannot be examined is kept: opening it reports the error
    if (step && (entry->is_directory(unknown) || (unknown && path_failure(unknown.value()) != ExitCode::usage))) steps.push_back(*step);
  }
  require(!error, path_failure(error.value()), folder.string(), ": cannot be listed: ", error.message());
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<CheckpointPointer> read_pointer(const fs::path& folder, const char* file) {
  const fs::path path = folder / file;
  std::error_code error;
  if (!fs::exists(fs::symlink_status(path, error))) return std::nullopt;
  try {
    const std::string content = with_second_try<ReadError>([&] { return File::open(path).content(256); });
    const size_t space = content.find(' ');
    if (space != std::string::npos && content.back() == '\n') {
      CheckpointPointer pointer{.name = content.substr(0, space), .hash = content.substr(space + 1, content.size() - space - 2)};
      const auto is_hash = [](const std::string& word) { return Hash64::parse(word).has_value(); };
      if (checkpoint_step(pointer.name) && std::ranges::all_of(split(pointer.hash, ' '), is_hash)) return pointer;
    }
    return CheckpointPointer{.problem = path.string() + ": is damaged"};
  } catch (const Error& problem) {
    return CheckpointPointer{.problem = problem.what()};
  }
}

namespace {

// Renames what lies at `path` and was known as `known_as`.
void set_aside(const fs::path& path, const fs::path& known_as, const std::string& reason) {
  const fs::path target = known_as.parent_path() / (".bad-" + known_as.filename().string() + "-" + unique_id());
  rename_path(path, target);
  std::error_code ignored;
  fs::last_write_time(target, fs::file_time_type::clock::now(), ignored);  // the newest two are kept
  log_warning(known_as.string(), ": set aside as ", target.filename().string(), ": ", reason);
}

CheckpointReader open_step(const fs::path& path, int64_t step) {
  return with_second_try<CheckpointUnread>([&] { return open_candidate({.path = path, .step = step}); });
}

// Says what lies where a checkpoint is to be saved.
enum class There { nothing, same, other, damaged };

There what_lies(const fs::path& path, const Manifest& manifest) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(path, error))) return There::nothing;
  try {
    CheckpointReader reader = open_step(path, manifest.step);
    const Manifest& there = reader.manifest();
    const bool same = there.samples == manifest.samples && there.state == manifest.state && there.shards == manifest.shards &&
                      there.tensors == manifest.tensors;
    if (!same) return There::other;
    reader.verify();
    return There::same;
  } catch (const CheckpointDamage&) {
    return There::damaged;
  }
}

// Renames the folder `temporary` to `path`. Returns the new path of the folder that had the name.
fs::path replace(const fs::path& temporary, const fs::path& path) {
  if (exchange_paths(temporary, path)) return temporary;  // without a moment in which there is none
  const fs::path old = path.parent_path() / (".old-" + path.filename().string() + "-" + unique_id());
  rename_path(path, old);
  try {
    rename_path(temporary, path);
  } catch (const Error&) {
    rename_path(old, path);
    throw;
  }
  return old;
}

// Handles `.old-step-00001000-<id>`: a kill may have come after it gave up its name and before a whole new state had it.
void put_back_or_delete(const fs::path& old) {
  const std::string name = old.filename().string().substr(std::string_view(".old-").size());
  const size_t dash = std::min(name.rfind('-'), name.size());
  const std::optional<int64_t> step = checkpoint_step(name.substr(0, dash));
  if (!step || dash == name.size() || !Hash64::parse(name.substr(dash + 1))) return;  // not one of ours
  const fs::path path = old.parent_path() / checkpoint_name(*step);
  std::error_code error;
  try {
    if (!fs::exists(fs::symlink_status(path, error))) {
      rename_path(old, path);
      log_warning(path.string(), ": put back from ", old.filename().string());
      return sync_directory(path.parent_path());
    }
    open_step(path, *step);
    remove_leftover(old);
  } catch (const CheckpointDamage& damage) {
    set_aside(replace(old, path), path, damage.what());
  }
}

}  // namespace

CheckpointDirectory::CheckpointDirectory(const fs::path& folder, KeepPolicy keep, const std::string& job)
    : folder_(folder), keep_(keep), job_(job) {
  require(keep.latest >= 2, ExitCode::usage, "checkpoint.keep_latest: must be at least 2, got ", keep.latest);
  require(keep.every >= 0, ExitCode::usage, "checkpoint.keep_every: must not be negative, got ", keep.every);
  make_folders(folder);
  lock_.emplace(folder, job);
  sweep();
  const std::optional<CheckpointPointer> best = read_pointer(folder, kBest);
  if (best && best->problem.empty()) best_ = SavedCheckpoint{.path = folder / best->name, .hash = best->hash};
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
  std::vector<fs::path> entries;
  std::error_code listing;
  for (fs::directory_iterator entry(folder_, listing), end; !listing && entry != end; entry.increment(listing))
    entries.push_back(entry->path());
  require(!listing, ExitCode::environment, folder_.string(), ": cannot be listed: ", listing.message());
  std::vector<std::pair<fs::file_time_type, fs::path>> damaged;
  for (const fs::path& path : entries) {
    const std::string name = path.filename().string();
    if (name.starts_with(".tmp-") || name.starts_with(".trash-") || name == "latest.tmp" || name == "best.tmp") {
      log_info(path.string(), ": left by a process that was killed; deleted");
      remove_leftover(path);
    } else if (name.starts_with(".old-")) {
      try {
        put_back_or_delete(path);
      } catch (const Error& error) {
        log_warning(path.string(), ": could not be put back: ", error.what());
      }
    } else if (name.starts_with(".bad-")) {
      std::error_code unknown;
      damaged.emplace_back(fs::last_write_time(path, unknown), path);
    }
  }
  constexpr size_t kKept = 2;
  std::sort(damaged.rbegin(), damaged.rend());
  for (size_t i = kKept; i < damaged.size(); ++i) {
    log_info(damaged[i].second.string(), ": not among the newest ", kKept, " that were set aside; deleted");
    remove_leftover(damaged[i].second);
  }
}

void CheckpointDirectory::write_pointer(const char* file, const std::string& name, const std::string& hash) const {
  const fs::path path = folder_ / file;
  std::error_code error;
  // No file can take the name of a folder, so no checkpoint could be saved again.
  if (fs::is_directory(fs::symlink_status(path, error))) set_aside(path, path, "is a folder, but must be a file");
  write_file_atomically(path, name + " " + hash + "\n");
}

bool CheckpointDirectory::keeps(int64_t step) const {
  const auto is_step = [path = path_of(step)](const std::optional<SavedCheckpoint>& saved) { return saved && saved->path == path; };
  return (keep_.every > 0 && step % keep_.every == 0) || pinned_.contains(step) || is_step(best_) || is_step(unnamed_best_);
}

void CheckpointDirectory::name_best(SavedCheckpoint saved) {
  unnamed_best_ = saved;
  write_pointer(kBest, saved.path.filename().string(), saved.hash);
  best_ = std::move(saved);
  unnamed_best_.reset();
  delete_old();
}

bool CheckpointDirectory::adopt_best(std::optional<int64_t> step) {
  best_.reset();
  unnamed_best_.reset();
  const std::optional<CheckpointPointer> now = read_pointer(folder_, kBest);
  try {
    if (step) {
      try {
        const CheckpointReader reader = open_step(path_of(*step), *step);
        best_ = SavedCheckpoint{.path = path_of(*step), .bytes = reader.bytes(), .hash = reader.hash()};
      } catch (const CheckpointDamage& damage) {
        log_warning("the best checkpoint so far is lost: ", damage.what(), "; the next evaluation has the best one");
      }
    }
    const std::string name = best_ ? best_->path.filename().string() : "";
    if (now && now->problem.empty() && now->name == name && now->hash == (best_ ? best_->hash : "")) return best_.has_value();
    if (best_) {
      write_pointer(kBest, name, best_->hash);
    } else if (now) {
      log_info((folder_ / kBest).string(), ": deleted, because the run goes on from a state that has no best checkpoint here");
      remove_leftover(folder_ / kBest);
    }
  } catch (const Error& error) {
    fail(ExitCode::environment, error.what());  // no work was lost
  }
  return best_.has_value();
}

void CheckpointDirectory::adopt(const LoadedCheckpoint& loaded) const {
  const std::string name = loaded.path.filename().string();
  const std::optional<CheckpointPointer> latest = read_pointer(folder_);
  if (latest && latest->name == name && latest->hash == loaded.hash) return;
  try {
    write_pointer(kLatest, name, loaded.hash);
  } catch (const Error& error) {
    fail(ExitCode::environment, error.what());  // no work was lost
  }
}

std::string CheckpointDirectory::publish(const fs::path& path, int64_t step, const fs::path& superseded) {
  try {
    const CheckpointReader reader = open_step(path, step);
    write_pointer(kLatest, path.filename().string(), reader.hash());
    return reader.hash();
  } catch (const CheckpointDamage& damage) {
    fs::path unread = path;
    if (!superseded.empty()) {  // first the old one has its name again
      unread = replace(superseded, path);
      superseded_.pop_back();
    }
    set_aside(unread, path, damage.what());
    fail(ExitCode::storage, "the checkpoint just written cannot be read: ", damage.what());
  }
}

fs::path CheckpointDirectory::path_of(int64_t step) const { return folder_ / checkpoint_name(step); }

CheckpointDirectory::Save CheckpointDirectory::begin(Manifest manifest, AfterSave after) {
  make_sure_it_is_ours();
  Save save{.manifest = std::move(manifest), .folder = {}};
  const There there = what_lies(path_of(save.manifest.step), save.manifest);
  if (there == There::same) return save;
  save.over_damage = there == There::damaged;
  make_room(save.manifest, after);
  require_free_space(folder_, save.manifest.bytes());
  save.folder = folder_ / (".tmp-" + checkpoint_name(save.manifest.step).substr(5) + "-" + unique_id());
  make_directory(save.folder);
  return save;
}

void CheckpointDirectory::abandon(const Save& save) {
  std::error_code ignored;  // the first error is the one to report; a leftover is swept at the next start
  if (!save.folder.empty()) fs::remove_all(save.folder, ignored);
}

SavedCheckpoint CheckpointDirectory::commit(const Save& save) {
  const int64_t step = save.manifest.step;
  SavedCheckpoint saved{.path = path_of(step), .bytes = save.manifest.bytes(), .already_there = save.folder.empty()};
  const bool is_best = best_ && best_->path == saved.path;
  fs::path superseded;
  if (!saved.already_there) {
    try {
      write_manifest(save.manifest, save.folder);
      if (is_best)  // a kill may leave either
        write_pointer(kBest, saved.path.filename().string(), manifest_hash(format_manifest(save.manifest)) + ' ' + best_->hash);
    } catch (...) {
      abandon(save);
      throw;
    }
    std::error_code error;
    try {
      if (fs::exists(fs::symlink_status(saved.path, error))) {
        superseded = replace(save.folder, saved.path);
      } else {
        rename_path(save.folder, saved.path);
      }
    } catch (const Error&) {
      remove_leftover(save.folder);
      throw;
    }
    if (save.over_damage && !superseded.empty()) {
      set_aside(superseded, saved.path, "it is damaged");
      superseded.clear();
    }
    if (!superseded.empty()) superseded_.push_back(superseded);  // the valid one that had the name
    sync_directory(folder_);
  }
  saved.hash = publish(saved.path, step, superseded);
  log_info("checkpoint ", saved.path.string(), saved.already_there ? " was saved before" : " saved", " (", saved.bytes, " bytes)");
  try {
    for (; !superseded_.empty(); superseded_.pop_back()) discard(superseded_.back());
  } catch (const Error& error) {
    log_warning("an old checkpoint was not deleted: ", error.what());
  }
  newest_step_ = step;
  if (unnamed_best_ ? unnamed_best_->path == saved.path : is_best && best_->hash != saved.hash) unnamed_best_ = saved;
  try {
    unnamed_best_ ? name_best(*unnamed_best_) : delete_old();
  } catch (const Error& error) {  // the step is saved, whatever `best` says
    log_warning("the best checkpoint, ", unnamed_best_->path.string(), ", is not named yet: ", error.what(), "; the next save tries again");
    delete_old();
  }
  return saved;
}

SavedCheckpoint CheckpointDirectory::save(const CheckpointContent& content, AfterSave after) {
  const ShardEntry shard = describe_shard(content.tensors, 0, content.step);
  const Save save = begin(assemble_manifest(content, {shard}), after);
  try {
    if (!save.folder.empty()) write_shard(content.tensors, shard, save.folder);
  } catch (...) {
    abandon(save);
    throw;
  }
  return commit(save);
}

void CheckpointDirectory::unpin(int64_t step) {
  if (const auto pin = pinned_.find(step); pin != pinned_.end()) pinned_.erase(pin);
  delete_old();
}

// Does not throw: the save checks the room again and reports how much is missing.
void CheckpointDirectory::make_room(const Manifest& manifest, AfterSave after) const {
  const int64_t needed = room_for(manifest.bytes()), missing = needed - free_bytes(folder_).value_or(needed);
  if (missing <= 0) return;
  try {
    int64_t freed = 0;
    std::vector<fs::path> old;
    for (const CheckpointStatus& one : expendable(manifest.step, after)) {
      if (freed >= missing) break;
      freed += one.bytes;
      old.push_back(one.path);
    }
    if (freed < missing) return;
    for (const fs::path& path : old) {
      log_warning(path.string(), ": deleted, because the disk does not have room for it beside the checkpoint of step ", manifest.step);
      discard(path);
    }
  } catch (const Error& error) {
    log_warning("an old checkpoint was not deleted: ", error.what());
  }
}

std::vector<CheckpointStatus> CheckpointDirectory::expendable(int64_t step, AfterSave after) const {
  std::vector<CheckpointStatus> valid = list_checkpoints(folder_);
  std::erase_if(valid, [&](const CheckpointStatus& one) { return !one.problem.empty() || one.step > step; });
  const size_t stay = after == AfterSave::run_ends ? 1 : 2;
  valid.resize(valid.size() - std::min(valid.size(), stay));  // the newest stay
  std::erase_if(valid, [&](const CheckpointStatus& one) { return keeps(one.step); });
  return valid;
}

// Checkpoints that cannot be deleted now are tried again after the next save.
void CheckpointDirectory::delete_old() const {
  int64_t valid = 0;
  try {
    const std::vector<int64_t> steps = steps_in(folder_);
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
      if (*step > newest_step_) continue;  // left from a run that went back to an older checkpoint: not ours to delete
      const fs::path path = folder_ / checkpoint_name(*step);
      try {
        open_step(path, *step);
        const bool kept = ++valid <= keep_.latest || keeps(*step);
        if (!kept) discard(path);
      } catch (const CheckpointDamage& damage) {
        log_warning("checkpoint.keep_latest does not count a damaged checkpoint: ", damage.what());
      }
    }
  } catch (const Error& error) {
    log_warning("an old checkpoint was not deleted: ", error.what());
  }
}

}  // namespace mantissa
