// The folder of a run's checkpoints.
//
//   LOCK                         who owns it (pending_folder.h)
//   latest                       "step-00001000 HEX": the newest one that was reported, and the hash of its manifest
//   best                         the same of the checkpoint with the lowest validation loss, under checkpoint.keep_best; while another
//                                state of its step takes its place, "step-00001000 HEX HEX" has the hashes of both
//   step-00001000/               shard-00000.safetensors, .. and manifest.json; complete if and only if that is there: it is written last
//   .tmp-00001000-<id>/          a save in progress, which no manifest makes a checkpoint
//   .bad-*                       damaged ones that were set aside; the newest two are kept
//   .old-step-00001000-<id>      replaced by another state of its step that is not published yet; only where names cannot be exchanged
//   .trash-*                     being deleted
//
// The promise is the order of a save: the temporary folder is written and synced, renamed, the parent synced, the result opened again,
// `latest` replaced in the same way; only then is the save reported, and only then is anything old deleted, unless the disk has no room for
// both: then the oldest of several goes first. `best` is replaced after that, and what it named until then is not deleted before. A kill at
// any point leaves the reported checkpoint before it, or the new one; where names cannot be exchanged (NFS), a state that is replaced by
// another of its step may be left as .old-*, and the next run puts it back. For a power cut this order of syncs and renames is what is
// tested, not the cut itself.
//
// xxh64 finds damage, not forgery. On NFS and Lustre rename is atomic and fsync is needed; for flock see pending_folder.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/file.h"
#include "checkpoint/checkpoint_manifest.h"
#include "checkpoint/checkpoint_search.h"
#include "io/pending_folder.h"
#include "mantissa/base/log.h"

namespace mantissa {

// Content of a checkpoint, and the files in its folder: one shard by each process that saves, and the manifest that names them all. In
// checkpoint_writer.cpp.

// A tensor, or what one process saves of it, that does not change while it is saved. The boxes are in global coordinates; their values
// follow each other in `data`, each row-major. Without boxes, data is the whole tensor as it stands. All shards together tile `shape`.
struct CheckpointTensor {
  std::string name;
  Shape shape;
  std::vector<Box> boxes;
  Tensor data;
};

struct CheckpointContent : CheckpointHead {
  std::vector<CheckpointTensor> tensors;
};

inline constexpr int64_t kCheckpointChunkBytes = 4 << 20;

// One shard as the manifest names it: the file, and of each tensor the pieces in it.
struct ShardEntry {
  Shard shard;
  std::vector<ManifestTensor> tensors;

  void fields(auto& v) {
    v("shard", shard);
    v("tensors", tensors);
  }
};

// Describes shard number `shard`, hashed from the memory and not from a file, so that damage on the way to the disk is found at load.
// Throws Error(numerical) naming tensor and index if a floating-point value is NaN or Inf: such a state is never saved; Error(internal) if
// boxes and data do not fit. `progressed` is called after each part of kCheckpointChunkBytes or less: a large shard takes minutes.
ShardEntry describe_shard(const std::vector<CheckpointTensor>& tensors, int64_t shard, int64_t step, const Progressed& progressed = {});

// Returns the complete manifest of the shards 0, 1, ... Throws Error(internal) if names or boxes do not fit together.
Manifest assemble_manifest(const CheckpointHead& head, const std::vector<ShardEntry>& shards);

// Write into an existing folder. The files are on the disk on return, except for the name of a shard: write_manifest, which comes last,
// syncs the folder. Throw Error(storage).
void write_shard(const std::vector<CheckpointTensor>& tensors, const ShardEntry& entry, const std::filesystem::path& folder,
                 const Progressed& progressed = {});
void write_manifest(const Manifest& manifest, const std::filesystem::path& folder);

// Lists the names in a folder of checkpoints, and reads the file `latest`.

// Returns the steps of the step-* folders, ascending, valid or not. Empty if the folder is not there.
std::vector<int64_t> steps_in(const std::filesystem::path& folder);

// Content of the files `latest` and `best`.
struct CheckpointPointer {
  std::string name = {};     // a valid checkpoint name
  std::string hash = {};     // hash of its manifest; of `best` maybe several, of which it has one
  std::string problem = {};  // why the file says neither: it is damaged or cannot be read
};
inline constexpr const char* kLatest = "latest";
inline constexpr const char* kBest = "best";
// Returns nullopt if there is no such file.
std::optional<CheckpointPointer> read_pointer(const std::filesystem::path& folder, const char* file = kLatest);

// Tries twice, because a failure to read, of a network file system for example, may be gone the second time.
template <class Failure, class Body>
auto with_second_try(Body&& body) {
  try {
    return body();
  } catch (const Failure& error) {
    log_warning(error.what(), "; trying once more");
  }
  return body();
}

struct KeepPolicy {
  int64_t latest = 3;  // this many valid ones, at least 2, as the newest may turn out to be damaged; 1 where AfterSave::run_ends needs room
  int64_t every = 0;   // and those whose step is a multiple of this; 0: no others
};

struct SavedCheckpoint {
  std::filesystem::path path;
  int64_t bytes = 0;
  bool already_there = false;  // this very state had been saved before
  std::string hash = {};       // hash of the manifest, as in `latest`
};

// Says what follows a save. A run that goes on has two valid checkpoints at any time once it has saved two; one that ends gives up all but
// one for its last state.
enum class AfterSave { run_goes_on, run_ends };

// For use by the one process that trains; not by several threads at once.
class CheckpointDirectory {
 public:
  // Makes the folder if it is missing, locks it and deletes what a killed process left, and old .bad-*. Throws Error(usage) for latest < 2
  // or every < 0 or if the path cannot be a folder, Error(environment) naming the owner if another process has the lock or if the folder
  // cannot be made.
  CheckpointDirectory(const std::filesystem::path& folder, KeepPolicy keep, const std::string& job);

  // Saves in three steps. begin() makes a temporary folder; there each process writes its shard (write_shard), in any order; commit()
  // writes the manifest and publishes. On return the checkpoint is on the disk and named by `latest`. A valid checkpoint of this step with
  // the same content is not written again; one that holds another state is deleted in the end, and a damaged one is set aside. All throw
  // Error(storage) on failure: nothing old was deleted but for want of room, and training may go on and save again later. Call abandon() if
  // a shard could not be written.
  //
  // Where the disk has no room, begin() deletes the oldest checkpoints that only `latest` of the policy keeps, as few as are enough and as
  // many as `after` allows; none if that is not enough. They are gone also if the new one cannot be written then: what is left has its
  // manifest and its sizes, but its bytes were not read again, for which a run that is stopped has no time.
  struct Save {
    Manifest manifest;
    std::filesystem::path folder;  // empty: this very state is there, no shard is to be written
    bool over_damage = false;
  };
  Save begin(Manifest manifest, AfterSave after = AfterSave::run_goes_on);
  SavedCheckpoint commit(const Save& save);
  static void abandon(const Save& save);

  // Saves in one process. Also throws Error(numerical) if a value is NaN or Inf (nothing is written).
  SavedCheckpoint save(const CheckpointContent& content, AfterSave after = AfterSave::run_goes_on);

  // Keeps the checkpoint of a step, whatever the policy says, until unpin() was called as often; that deletes what the policy does not
  // keep.
  void pin(int64_t step) { pinned_.insert(step); }
  void unpin(int64_t step);

  // Makes `best` name a checkpoint that was saved here, then deletes the one that it named before unless the policy keeps it. Throws
  // Error(storage): `best` then names either, neither is deleted, and each commit() tries once more, which a warning tells if it fails.
  void name_best(SavedCheckpoint saved);
  // Returns the best checkpoint, which is never deleted: the one that `best` names, or is to name.
  std::optional<SavedCheckpoint> best() const { return unnamed_best_ ? unnamed_best_ : best_; }
  // Makes `best` name the checkpoint of this step, the best one of the run that goes on, as a kill or a way back to an older checkpoint may
  // have left another; deletes `best` if there is no such checkpoint, and returns false. Throws Error(environment).
  bool adopt_best(std::optional<int64_t> step);

  // Makes `latest` name the checkpoint of this folder that a run continues from. Throws Error(environment).
  void adopt(const LoadedCheckpoint& loaded) const;

  const std::filesystem::path& folder() const { return folder_; }

 private:
  void make_sure_it_is_ours();
  void sweep() const;
  std::filesystem::path path_of(int64_t step) const;
  void write_pointer(const char* file, const std::string& name, const std::string& hash) const;
  bool keeps(int64_t step) const;  // whatever newer ones there are
  std::string publish(const std::filesystem::path& path, int64_t step, const std::filesystem::path& superseded);  // the hash
  void make_room(const Manifest& manifest, AfterSave after) const;
  std::vector<CheckpointStatus> expendable(int64_t step, AfterSave after) const;  // before a save of this step, oldest first
  void delete_old() const;

  std::filesystem::path folder_;
  KeepPolicy keep_;
  std::string job_;
  std::optional<FolderLock> lock_;
  int64_t newest_step_ = -1;  // the newest step saved here
  std::multiset<int64_t> pinned_;
  std::optional<SavedCheckpoint> best_;            // the one that `best` names
  std::optional<SavedCheckpoint> unnamed_best_;    // the one that it is to name, as far as it could not be written
  std::vector<std::filesystem::path> superseded_;  // replaced, and to be deleted once what replaced them is published
};

}  // namespace mantissa
