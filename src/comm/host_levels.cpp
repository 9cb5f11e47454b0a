#include "comm/host_levels.h"

#include <algorithm>
#include <map>

namespace mantissa {
namespace {

// Returns true if each `block` neighbors are on one host.
bool are_blocks(std::span<const size_t> hosts, size_t block) {
  for (size_t r = 0; r < hosts.size(); ++r) {
    if (hosts[r] != hosts[r / block * block]) return false;
  }
  return hosts.size() % block == 0;
}

}  // namespace

HostLevels::HostLevels(std::span<const int> hosts) {
  std::map<int, size_t> index;
  for (const int host : hosts) {
    host_.push_back(index.try_emplace(host, index.size()).first->second);
    members_.resize(index.size());
    std::vector<int>& there = members_[host_.back()];
    place_.push_back(there.size());
    there.push_back(static_cast<int>(host_.size()) - 1);
  }
  while (several() && are_blocks(host_, static_cast<size_t>(2 * block_))) block_ *= 2;
}

bool HostLevels::receives(int rank, int root) const {
  const std::vector<int>& there = members_[host_[static_cast<size_t>(rank)]];
  return !together(rank, root) && there[place_[static_cast<size_t>(root)] % there.size()] == rank;
}

std::vector<int> HostLevels::held(int rank) const {
  std::vector<int> out;
  for (int root = 0; root < static_cast<int>(host_.size()); ++root) {
    if (root == rank || receives(rank, root)) out.push_back(root);
  }
  return out;
}

}  // namespace mantissa
