// Finds by which ranks bytes cross between the hosts of a group, so that none crosses between two hosts more than once.
//
// gather: every rank sends its share to one rank of each other host, its receiver there; then the ranks of a host exchange what they hold.
// The i-th rank of a host sends to the i-th of the other, counted around, so that all of them receive as much.
//
// sum: a block is 2^k neighbors of the group on one host, where the group consists of such blocks; k is as large as it can be. Ranks at one
// place of their blocks want shares that every block has addends of: each sums those of its own block for all of them, and then its own
// share over the blocks. The sums of a block are a subtree of that over all ranks, so they have the same bits.
//
// A group on one host has blocks of one rank: its ranks exchange their addends directly. So do ranks that are on several hosts without
// such blocks: three on each, or neighbors apart.
#pragma once

#include <span>
#include <vector>

namespace mantissa {

class HostLevels {
 public:
  HostLevels() = default;
  // hosts[r] is equal for ranks r of the group that are on one host.
  explicit HostLevels(std::span<const int> hosts);

  bool several() const { return members_.size() > 1; }
  bool together(int a, int b) const { return host_[static_cast<size_t>(a)] == host_[static_cast<size_t>(b)]; }
  // Returns true if `rank` is the receiver of the share of `root` on its host, which is not the root's.
  bool receives(int rank, int root) const;
  std::vector<int> held(int rank) const;  // the ranks whose shares it holds after the first level of a gather, ascending
  int block() const { return block_; }

 private:
  std::vector<size_t> host_, place_;       // by rank: the index of its host, and the number of ranks before it there
  std::vector<std::vector<int>> members_;  // by host: its ranks
  int block_ = 1;
};

}  // namespace mantissa
