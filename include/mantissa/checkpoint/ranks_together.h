// Lets the ranks of a run save and read a checkpoint together. Every rank makes these calls; a group of one does the work alone.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/base/progressed.h"
#include "mantissa/checkpoint/checkpoint_directory.h"
#include "mantissa/checkpoint/checkpoint_search.h"
#include "mantissa/comm/agreement.h"

namespace mantissa {

// Returns true if rank 0 has this folder and locked it (`there` of rank 0). If then some rank cannot see the file that rank 0 writes into
// it, throws Error(environment) on all ranks, naming that rank: each host has a folder of its own under this name.
bool is_shared_folder(const Communicator& world, bool there, const std::filesystem::path& folder, const char* key = "checkpoint.dir");

// Like agree() (comm/mesh.h), for reading a checkpoint: CheckpointUnread or other CheckpointDamage met by one rank is thrown on all, so
// that all try again, or go on to the same next candidate. The body must not communicate.
void agree_on_reading(const Communicator& world, const std::function<void()>& body);

// Lets rank 0 choose the candidates; all ranks open the same one, in the same version.
class RanksTogether : public SearchTogether {
 public:
  explicit RanksTogether(const Communicator& world) : world_(world) {}
  std::vector<CheckpointCandidate> first_of(const std::vector<CheckpointCandidate>& own) const override;
  void read(const std::function<void()>& body) const override { agree_on_reading(world_, body); }
  void require_same(const std::string& what, const std::string& own) const override;

 private:
  const Communicator& world_;
};

// Saves a checkpoint: every rank writes its shard; rank 0, which alone has the directory, begins and commits. Throws on all ranks as
// CheckpointDirectory::save() does on one, and returns rank 0's result. `progressed` is called at each phase and, with several ranks,
// within phases.
SavedCheckpoint save_together(const Communicator& world, std::optional<CheckpointDirectory>& directory, const CheckpointContent& content,
                              const Progressed& progressed, AfterSave after = AfterSave::run_goes_on);

}  // namespace mantissa
