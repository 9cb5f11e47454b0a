// Exchanges strings among ranks, and makes all ranks throw alike. Every rank makes these calls; a group of one does the work alone.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mantissa/comm/mesh.h"

namespace mantissa {

std::vector<std::string> all_gather_strings(const Communicator& world, const std::string& own);  // by rank
std::vector<std::string> gather_strings(const Communicator& world, const std::string& own);  // by rank on rank 0; on others its own alone
std::string broadcast_string(const Communicator& world, const std::string& own);

// Once ranks communicate, an error that every rank meets is thrown by agree() or fail_alike(), too: the first rank to leave would end the
// waits of ranks that have not come as far, and these would end with peer_lost instead.

// Throws Error(usage) unless the group has `size` ranks, the value of this key.
void require_size(const Communicator& group, const char* key, int64_t size);

// Throws Error(code) where all ranks have come to the same conclusion. Nobody leaves before all have called it: a rank that is gone ends
// the waits of others.
[[noreturn]] void fail_alike(const Communicator& world, ExitCode code, const std::string& message);

// Returns what make() returns on this rank. If it throws on any rank, all throw, like agree() (comm/mesh.h).
template <class Make>
auto agree_on(const Communicator& world, const Make& make) {
  std::optional<decltype(make())> out;
  agree(world, [&] { out.emplace(make()); });
  return std::move(*out);
}

// Throws Error(usage) on all ranks unless `own` is the same on all, naming the first rank that differs from the majority.
void require_same(const Communicator& world, const std::string& what, const std::string& own);

}  // namespace mantissa
