#include "train/replicas.h"

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

// "" if all are equal.
std::string difference(const Shards& shards) {
  const Mesh& mesh = shards.mesh();
  const Communicator& data = mesh.data;
  std::vector<Part> parts;  // of all data ranks, by rank
  std::vector<size_t> owners;
  for (int rank = 0; rank < data.size(); ++rank) {
    for (const Part& part : shards.of_rank(rank)) {
      parts.push_back(part);
      owners.push_back(static_cast<size_t>(rank));
    }
  }
  const size_t count = parts.size(), ranks = static_cast<size_t>(data.size());
  std::vector<uint64_t> hashes(count * ranks);  // [rank, part]
  for (size_t i = 0; i < count; ++i) hashes[static_cast<size_t>(data.rank()) * count + i] = hash_of(parts[i]);
  const std::vector<int64_t> bytes(ranks, static_cast<int64_t>(count * sizeof(uint64_t)));
  data.all_gather(std::as_writable_bytes(std::span(hashes)), bytes, Purpose::control);
  const auto in_world = [&](size_t rank) {
    return rank * static_cast<size_t>(mesh.tensor.size()) + static_cast<size_t>(mesh.tensor.rank());
  };
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t i = 0; i < count; ++i) {
      if (hashes[rank * count + i] == hashes[owners[i] * count + i]) continue;
      return text("rank ", in_world(rank), " has other bytes of ", parts[i].of->name, ", rows ", parts[i].begin, " to ", parts[i].end - 1,
                  ", than rank ", in_world(owners[i]),
                  ", which owns them (training.replica_check_interval): its memory or the network changed them");
    }
  }
  return "";
}

}  // namespace

void require_same_replicas(const Shards& shards) {
  if (shards.mesh().data.size() == 1) return;
  const std::string found = difference(shards);
  agree(shards.mesh().world, [&] { require(found.empty(), ExitCode::numerical, found); });
}

}  // namespace mantissa
