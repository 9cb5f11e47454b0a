// Links between GPUs by NCCL: one communicator for each group of ranks, made together with the group. A group of one has none.
// nccl/nccl_link.cpp has them where CMake finds the header of NCCL, else nccl/no_nccl.cpp; the library is opened at run time.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mantissa/comm/device_link.h"

namespace mantissa {

struct Nccl {
  bool usable;
  std::string text;  // its version and file, or why it cannot be used
};
Nccl find_nccl();

struct NcclOptions {
  // Gives the id of a group, which lets whoever knows it join, to all its ranks: rank 0 brings it, the others bring "". Names of groups
  // differ.
  std::function<std::string(const std::string& name, const std::string& id)> share_id;
  double init_timeout_s;        // parallel.init_timeout_s, for each group: from its id until a byte has come from every peer
  double close_timeout_s = 60;  // for each link: until the messages that are under way at its end have arrived; then it is aborted
};
// Makes links between the default GPUs of the ranks (default_gpu()), of which no two are the same one. Throws Error(environment) where NCCL
// cannot be used. The maker belongs to one rank: a link that gives up, or that cannot be closed, ends all that it has made. It returns when
// all connections of the group and their memory are there; exchanges have no limit of time of their own.
//
// Errors name the rank and what NCCL says. The maker throws Error(environment) where NCCL does not connect the ranks, but Error(peer_lost)
// where a peer reports that or init_timeout_s is over. Links throw Error(peer_lost) where a connection ended, a peer reported an error or
// they were given up, else Error(environment), as for an error of CUDA, or Error(internal) where NCCL calls it ours. A link that is not
// closed in order logs a warning.
MakeDeviceLink nccl_links(NcclOptions options);

}  // namespace mantissa
