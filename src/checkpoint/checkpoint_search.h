// Resolves a path to a checkpoint, and searches for a good one.
//
// A path names a checkpoint, or a folder of checkpoints: the folder itself, the run folder that holds it, or the file `latest` in it. A
// checkpoint stands for itself alone, and so does the file `best` for the one that it names, in the version whose hash is there. A folder
// stands for its candidates, best first: what `latest` names, in the version whose hash is there; the same folder in any version, since a
// kill may fall between replacing a checkpoint and writing `latest`; then the step-* folders from the newest to the oldest. Commands that
// look for damage take the first (verify, inspect --diff); those that go on take the first that is intact (resume, eval, generate).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_reader.h"

namespace mantissa {

// Convert a step to "step-00001000" and back; nullopt for any other name. In checkpoint_directory.cpp.
std::string checkpoint_name(int64_t step);
std::optional<int64_t> checkpoint_step(const std::string& name);

// Returns "; there are step-00000350, step-00000700", the newest checkpoints in the folder of one that is missing; "" if there are none.
std::string steps_beside(const std::filesystem::path& path);

struct NamedCheckpoint {
  std::filesystem::path folder;  // the folder of checkpoints
  std::string name;              // a checkpoint in it; "": no certain one
  bool best = false;             // the one that the file `best` names at the time
};

// Returns true for the files `latest` and `best` of a folder of checkpoints.
bool is_pointer(const std::filesystem::path& path);

// Resolves a path given by a user without opening anything. Throws Error(usage) if there is no such path.
NamedCheckpoint find_checkpoint(const std::filesystem::path& path);

struct CheckpointCandidate {
  std::filesystem::path path;
  std::optional<int64_t> step = {};  // its manifest must hold this step
  std::string hash = {};             // hash of its manifest, or several with spaces between them; "": any
  std::string problem = {};          // fault of the file `latest`, which then is the path
};

// Returns nothing if there is no checkpoint.
std::vector<CheckpointCandidate> checkpoint_candidates(const NamedCheckpoint& named);

// Throws CheckpointDamage if the candidate is gone, damaged, of another step or of another hash.
CheckpointReader open_candidate(const CheckpointCandidate& candidate);

// Opens the first candidate of a path. Throws Error(usage) if there is none, CheckpointDamage as open_candidate().
CheckpointReader open_checkpoint(const std::filesystem::path& path);

struct LoadedCheckpoint {
  std::filesystem::path path;
  int64_t step = 0;
  std::string hash = {};  // hash of its manifest
  int passed_over = 0;    // candidates that were tried before
};

// Coordinates processes that look for one checkpoint together; each makes the same calls. A process alone needs none of it.
class SearchTogether {
 public:
  SearchTogether() = default;
  virtual ~SearchTogether() = default;
  SearchTogether(const SearchTogether&) = delete;
  SearchTogether& operator=(const SearchTogether&) = delete;

  // Returns the candidates of the first process, on all.
  virtual std::vector<CheckpointCandidate> first_of(const std::vector<CheckpointCandidate>& own) const { return own; }
  // Runs body on each. An error of one is thrown on all: CheckpointUnread, CheckpointDamage, or another Error.
  virtual void read(const std::function<void()>& body) const { body(); }
  // Throws CheckpointDamage on all unless the text is the same on all.
  virtual void require_same(const std::string& what, const std::string& own) const;
};

// Calls `load` with one candidate after the other until a call returns without CheckpointDamage. Each skipped candidate is logged, and so
// is the step that is taken instead. One that the system fails to read is tried twice. `load` must overwrite whatever an earlier call left.
// Throws Error(data) if there are candidates and all are damaged; other errors of `load` pass through.
//
// Searches a folder of checkpoints; nullopt: there is no checkpoint at all.
std::optional<LoadedCheckpoint> load_newest(const std::filesystem::path& folder, const std::function<void(CheckpointReader&)>& load,
                                            const SearchTogether& together = {});
// Searches a path given by a user. A checkpoint that it names is not replaced by another: its damage is thrown. Throws Error(usage) if
// there is none.
LoadedCheckpoint load_checkpoint(const std::filesystem::path& path, const std::function<void(CheckpointReader&)>& load,
                                 const SearchTogether& together = {});

struct CheckpointStatus {
  std::filesystem::path path;
  int64_t step = 0, samples = 0, bytes = 0;
  size_t tensors = 0;
  bool latest = false;  // named by the file `latest`
  bool best = false;    // named by the file `best`
  std::string hash;     // hash of its manifest
  std::string problem;  // empty: manifest and sizes are right; contents were not read
};

// Lists all step-* folders, oldest first. Throws Error(usage) if there is no such folder.
std::vector<CheckpointStatus> list_checkpoints(const std::filesystem::path& folder);

}  // namespace mantissa
