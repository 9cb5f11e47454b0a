// What the ranks of a run do together at its borders. All are calls of every rank; a group of one does them alone.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/comm/mesh.h"
#include "mantissa/io/checkpoint_directory.h"
#include "mantissa/io/checkpoint_search.h"
#include "mantissa/train/events.h"

namespace mantissa {

std::vector<std::string> gather_texts(const Communicator& world, const std::string& own);    // by rank
std::vector<std::string> texts_at_first(const Communicator& world, const std::string& own);  // by rank on rank 0; on others its own alone
std::string text_of_first(const Communicator& world, const std::string& own);

// Once ranks have begun to communicate, what every rank refuses is thrown by agree() or fail_alike() too: the first rank to leave ends the
// waits of those that have not come as far, which would end with peer_lost instead.

// Throws Error(usage) unless the group has as many ranks as this key says.
void require_size(const Communicator& group, const char* key, int64_t size);

// Throws Error(code) where all ranks have come to the same conclusion, and nobody leaves before all have: a rank that is gone ends the
// waits of others.
[[noreturn]] void fail_alike(const Communicator& world, ExitCode code, const std::string& message);

// What make() returns on this rank; where it throws on any, as agree() (comm/mesh.h).
template <class Make>
auto agree_on(const Communicator& world, const Make& make) {
  std::optional<decltype(make())> out;
  agree(world, [&] { out.emplace(make()); });
  return std::move(*out);
}

// Throws Error(usage) on all ranks unless all have the same, naming the first that has another than most.
void require_same(const Communicator& world, const std::string& what, const std::string& own);

// Whether rank 0 has this folder (there, of rank 0) and locked it. Then throws Error(environment) on all ranks, naming one, unless all find
// in it what rank 0 writes there: else each host has a folder of its own under this name.
bool is_shared_folder(const Communicator& world, bool there, const std::filesystem::path& folder);

// The most urgent request of any rank.
Request agreed(const Communicator& world, Request own);

// As agree() (comm/mesh.h) for reading a checkpoint: CheckpointUnread or other CheckpointDamage that one rank met is that on all, so that
// all try again, or another one. The body must not communicate.
void agree_on_reading(const Communicator& world, const std::function<void()>& body);

// Rank 0 chooses the candidates; all open the same one, in the same version.
class RanksTogether : public SearchTogether {
 public:
  explicit RanksTogether(const Communicator& world) : world_(world) {}
  std::vector<CheckpointCandidate> first_of(const std::vector<CheckpointCandidate>& own) const override;
  void read(const std::function<void()>& body) const override { agree_on_reading(world_, body); }
  void require_same(const std::string& what, const std::string& own) const override;

 private:
  const Communicator& world_;
};

// Every rank writes its shard; rank 0, which alone has the directory, begins and commits. Throws on all ranks as
// CheckpointDirectory::save() does on one. What is returned is rank 0's. `progressed` is called at each phase and, of several ranks,
// within.
SavedCheckpoint save_together(const Communicator& world, std::optional<CheckpointDirectory>& directory, const CheckpointContent& content,
                              const Progressed& progressed);

}  // namespace mantissa
