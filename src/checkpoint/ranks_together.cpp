#include "mantissa/checkpoint/ranks_together.h"

#include <algorithm>
#include <sstream>

#include "mantissa/base/file.h"
#include "mantissa/base/hash.h"
#include "mantissa/checkpoint/checkpoint_reader.h"
#include "mantissa/comm/agreement.h"
#include "mantissa/job/store.h"
#include "mantissa/json/json_fields.h"

namespace mantissa {

bool is_shared_folder(const Communicator& world, bool there, const std::filesystem::path& folder, const char* key) {
  if (world.size() == 1) return there;
  if (world.all(uint8_t{there}).front() == 0) return false;
  // Uses a new name, which no cache of a network file system can hold; CheckpointDirectory deletes what a killed process leaves.
  const std::string nonce = all_gather_strings(world, world.rank() == 0 ? new_secret() : "").front();
  const std::filesystem::path file = folder / (".tmp-nonce-" + nonce);
  agree(world, [&] {
    if (world.rank() != 0) return;
    try {
      File::create(file).close();
    } catch (const Error& error) {
      fail(ExitCode::environment, error.what());  // no work was lost
    }
  });
  std::error_code error;
  const bool found = std::filesystem::exists(file, error);
  const std::vector<uint8_t> all = world.all(static_cast<uint8_t>(found));
  if (world.rank() == 0) std::filesystem::remove(file, error);
  const auto lost = std::ranges::find(all, 0);
  if (lost == all.end()) return true;
  fail_alike(world, ExitCode::environment,
             text(key, ": rank ", lost - all.begin(), " does not find in ", folder.string(),
                  " what rank 0 writes there: it is not shared between hosts"));
}

void agree_on_reading(const Communicator& world, const std::function<void()>& body) {
  if (world.size() == 1) return body();
  enum class Met { nothing, unread, damage } met = Met::nothing;
  try {
    agree(world, [&] {
      try {
        body();
      } catch (const CheckpointUnread&) {
        met = Met::unread;
        throw;
      } catch (const CheckpointDamage&) {
        met = Met::damage;
        throw;
      }
    });
  } catch (const Error& error) {
    if (error.code() != ExitCode::data) throw;
    const Met worst = std::ranges::max(world.all(met));
    await_all(world);
    if (worst == Met::unread) throw CheckpointUnread(error.what());
    if (worst == Met::damage) throw CheckpointDamage(error.what());
    throw;
  }
}

std::vector<CheckpointCandidate> RanksTogether::first_of(const std::vector<CheckpointCandidate>& own) const {
  std::string reported;
  for (const CheckpointCandidate& candidate : own) {
    for (const std::string& word :
         {candidate.path.string(), candidate.step ? text(*candidate.step) : "", candidate.hash, candidate.problem})
      reported += word + '\0';
  }
  std::istringstream words(broadcast_string(world_, reported));
  std::vector<CheckpointCandidate> candidates;
  for (std::string path, step, hash, problem; std::getline(words, path, '\0');) {
    std::getline(words, step, '\0');
    std::getline(words, hash, '\0');
    std::getline(words, problem, '\0');
    candidates.push_back(
        {.path = path, .step = step.empty() ? std::nullopt : std::optional<int64_t>(std::stoll(step)), .hash = hash, .problem = problem});
  }
  return candidates;
}

void RanksTogether::require_same(const std::string& what, const std::string& own) const {
  const std::vector<Hash64> all = world_.all(xxh64(own));
  const auto mismatching = std::ranges::find_if(all, [&](const Hash64& hash) { return hash != all.front(); });
  if (mismatching == all.end()) return;
  await_all(world_);
  throw CheckpointDamage(text("rank ", mismatching - all.begin(), " sees another ", what, " than rank 0"));
}

SavedCheckpoint save_together(const Communicator& world, std::optional<CheckpointDirectory>& directory, const CheckpointContent& content,
                              const Progressed& progressed, AfterSave after) {
  progressed();
  if (world.size() == 1) return directory->save(content, after);
  ShardEntry own;
  agree(world, [&] { own = describe_shard(content.tensors, world.rank(), content.step, progressed); });
  const std::vector<std::string> strings = gather_strings(world, json_text(own));
  CheckpointDirectory::Save save;
  progressed();
  agree(world, [&] {
    if (!directory) return;
    std::vector<ShardEntry> shards;
    for (size_t r = 0; r < strings.size(); ++r) shards.push_back(from_json<ShardEntry>(strings[r], text("the shard of rank ", r)));
    save = directory->begin(assemble_manifest(content, shards), after);
  });
  const std::string folder = broadcast_string(world, save.folder.string());
  progressed();
  try {
    agree(world, [&] {
      if (!folder.empty()) write_shard(content.tensors, own, folder, progressed);
    });
  } catch (...) {
    if (directory) CheckpointDirectory::abandon(save);
    throw;
  }
  SavedCheckpoint saved;
  progressed();
  agree(world, [&] {
    if (directory) saved = directory->commit(save);
  });
  return saved;
}

}  // namespace mantissa
