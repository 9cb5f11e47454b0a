#include "train/replicas.h"

#include <functional>

#include "mantissa/backend/functions.h"
#include "mantissa/base/hash.h"

namespace mantissa {
namespace {

uint64_t hash_of(const Part& part) {
  StreamHash hash;
  if (part.of->value().defined()) hash.update(host_memory(part.of_rows(part.of->value())));
  if (part.of->quantised) {
    const QuantizedTensor codes = slice(part.of->codes(), part.begin, part.end);
    hash.update(host_memory(codes.codes));
    hash.update(host_memory(codes.scales));
  }
  return hash.finish().value;
}

// A part, and which rank of a group has its true bytes.
struct Owned {
  Part part;
  int owner;
};

// "" if all ranks of the group have the bytes of the owners. world_rank: of a rank of the group.
std::string difference(const Communicator& group, const std::vector<Owned>& parts, const std::function<int(int)>& world_rank) {
  const size_t count = parts.size(), ranks = static_cast<size_t>(group.size());
  std::vector<uint64_t> hashes(count * ranks);  // [rank, part]
  for (size_t i = 0; i < count; ++i) hashes[static_cast<size_t>(group.rank()) * count + i] = hash_of(parts[i].part);
  const std::vector<int64_t> bytes(ranks, static_cast<int64_t>(count * sizeof(uint64_t)));
  group.all_gather(std::as_writable_bytes(std::span(hashes)), bytes, Purpose::control);
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t i = 0; i < count; ++i) {
      const auto& [part, owner] = parts[i];
      if (hashes[rank * count + i] == hashes[static_cast<size_t>(owner) * count + i]) continue;
      return text("rank ", world_rank(static_cast<int>(rank)), " has other bytes of ", part.of->name, ", rows ", part.begin, " to ",
                  part.end - 1, ", than rank ", world_rank(owner),
                  ", which owns them (training.replica_check_interval): its memory or the network changed them");
    }
  }
  return "";
}

std::string among_data_ranks(const Shards& shards) {
  const Mesh& mesh = shards.mesh();
  std::vector<Owned> parts;
  for (int rank = 0; rank < mesh.data.size(); ++rank) {
    for (const Part& part : shards.of_rank(rank)) parts.push_back({part, rank});
  }
  return difference(mesh.data, parts, [&](int rank) { return rank * mesh.tensor.size() + mesh.tensor.rank(); });
}

// What they hold alike is the first one's; each looks at its own parts.
std::string among_tensor_ranks(const Shards& shards) {
  const Mesh& mesh = shards.mesh();
  std::vector<Owned> parts;
  for (const Part& part : shards.own()) {
    if (part.of->split == Split::none) parts.push_back({part, 0});
  }
  return difference(mesh.tensor, parts, [&](int rank) { return mesh.data.rank() * mesh.tensor.size() + rank; });
}

}  // namespace

void require_same_replicas(const Shards& shards) {
  const Mesh& mesh = shards.mesh();
  if (mesh.world.size() == 1) return;
  const std::string data = among_data_ranks(shards), tensor = among_tensor_ranks(shards);
  agree(mesh.world, [&] { require(data.empty() && tensor.empty(), ExitCode::numerical, data.empty() ? tensor : data); });
}

}  // namespace mantissa
