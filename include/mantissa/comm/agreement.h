// What ranks tell each other in strings, and errors that all throw alike. All are calls of every rank; a group of one does them alone.
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

}  // namespace mantissa
