// Arranges the ranks of a job as a grid, data x tensor. Ranks are ordered tensor-fastest: rank = data * tensor size + tensor. Neighboring
// data ranks share experts: data rank = expert data * expert size + expert.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/tensor/sharding.h"

namespace mantissa {

struct Mesh {
  Communicator world = {};         // all ranks
  Communicator tensor = {};        // ranks that share the matrices of one replica
  Communicator data = {};          // ranks that hold the same part of each replica
  Communicator expert = {};        // data ranks that share the experts of one replica
  Communicator expert_data = {};   // data ranks that hold the same experts
  bool sequence_parallel = false;  // ModelRanks

  ModelRanks ranks() const;
};

// Makes the mesh in which so many tensor and expert ranks hold a model together. All ranks of the world call it together. Throws
// Error(usage) unless the tensor ranks divide the world and the expert ranks the data ranks.
Mesh make_mesh(Communicator world, const ModelRanks& ranks);

// Runs body on every rank. If it throws on any, all throw the error of the lowest such rank, which the others name. The body must not
// communicate. An Error(peer_lost) is rethrown as it is: there is nobody to agree with.
void agree(const Communicator& world, const std::function<void()>& body);

// Returns when all ranks have called it; call it before throwing an error that all ranks throw. A rank that leaves early would end the
// waits of others and turn their error into peer_lost. Also returns if ranks that already left end the wait.
void await_all(const Communicator& world);

// Exchanges strings among ranks, and makes all ranks throw alike. Every rank makes these calls; a group of one does the work alone.

std::vector<std::string> all_gather_strings(const Communicator& world, const std::string& value);  // by rank
std::vector<std::string> gather_strings(const Communicator& world, const std::string& value);  // by rank on rank 0; on others its own alone
std::string broadcast_string(const Communicator& world, const std::string& value);

// Once ranks communicate, an error that every rank meets is thrown by agree() or fail_alike(), too: the first rank to leave would end the
// waits of ranks that have not come as far, and these would end with peer_lost instead.

// Throws Error(usage) unless the group has `size` ranks, the value of this key.
void require_size(const Communicator& group, const char* key, int64_t size);

// Throws Error(code) where all ranks have come to the same conclusion. Nobody leaves before all have called it: a rank that is gone ends
// the waits of others.
[[noreturn]] void fail_alike(const Communicator& world, ExitCode code, const std::string& message);

// Returns what make() returns on this rank. If it throws on any rank, all throw, like agree().
template <class Make>
auto agree_on(const Communicator& world, const Make& make) {
  std::optional<decltype(make())> out;
  agree(world, [&] { out.emplace(make()); });
  return std::move(*out);
}

// Throws Error(usage) on all ranks unless `value` is the same on all, naming the first rank that differs from the majority.
void require_same(const Communicator& world, const std::string& what, const std::string& value);

}  // namespace mantissa
