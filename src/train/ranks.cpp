#include "train/ranks.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "mantissa/base/hash.h"
#include "mantissa/base/json_fields.h"
#include "mantissa/comm/mesh.h"
#include "mantissa/io/checkpoint_reader.h"

namespace mantissa {

std::vector<std::string> gather_texts(const Communicator& world, const std::string& own) {
  const std::vector<int64_t> sizes = world.all(static_cast<int64_t>(own.size()));
  std::string all(static_cast<size_t>(std::accumulate(sizes.begin(), sizes.end(), int64_t{0})), '\0');
  const int64_t place = std::accumulate(sizes.begin(), sizes.begin() + world.rank(), int64_t{0});
  std::ranges::copy(own, all.begin() + place);
  world.all_gather(std::as_writable_bytes(std::span(all)), sizes, Purpose::control);
  std::vector<std::string> texts;
  size_t begin = 0;
  for (const int64_t size : sizes) {
    texts.push_back(all.substr(begin, static_cast<size_t>(size)));
    begin += static_cast<size_t>(size);
  }
  return texts;
}

void require_size(const Communicator& group, const char* key, int64_t size) {
  require(group.size() == size, ExitCode::usage, key, ": ", size, ", but this runs on ", count_text(group.size(), "rank"));
}

void require_same(const Communicator& world, const std::string& what, const std::string& own) {
  if (world.size() == 1) return;
  const std::vector<Hash64> all = world.all(xxh64(own));
  for (size_t r = 1; r < all.size(); ++r) {
    require(all[r] == all[0], ExitCode::usage, "rank ", r, " has another ", what, " than rank 0");
  }
}

Request agreed(const Communicator& world, Request own) {
  if (world.size() == 1) return own;
  return std::ranges::max(world.all(own));
}

void agree_on_reading(const Communicator& world, const std::function<void()>& body) {
  bool damaged = false;
  try {
    agree(world, [&] {
      try {
        body();
      } catch (const CheckpointDamage&) {
        damaged = true;
        throw;
      }
    });
  } catch (const Error& error) {
    if (error.code() == ExitCode::data && world.sum(int64_t{damaged}) > 0) throw CheckpointDamage(error.what());
    throw;
  }
}

SavedCheckpoint save_together(const Communicator& world, std::optional<CheckpointDirectory>& directory, const CheckpointContent& content) {
  if (world.size() == 1) return directory->save(content);
  ShardEntry own;
  agree(world, [&] { own = describe_shard(content.tensors, world.rank(), content.step); });
  const std::vector<std::string> texts = gather_texts(world, json_text(own));
  CheckpointDirectory::Save save;
  agree(world, [&] {
    if (!directory) return;
    std::vector<ShardEntry> shards;
    for (size_t r = 0; r < texts.size(); ++r) shards.push_back(from_json<ShardEntry>(texts[r], text("the shard of rank ", r)));
    save = directory->begin(assemble_manifest(content, shards));
  });
  const std::string folder = gather_texts(world, save.folder.string()).front();
  try {
    agree(world, [&] {
      if (!folder.empty()) write_shard(content.tensors, own.shard, folder);
    });
  } catch (...) {
    if (directory) CheckpointDirectory::abandon(save);
    throw;
  }
  SavedCheckpoint saved;
  agree(world, [&] {
    if (directory) saved = directory->commit(save);
  });
  return saved;
}

}  // namespace mantissa
