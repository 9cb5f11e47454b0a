// Moves messages between the devices of the ranks of a group, below the collectives. Bytes of the host go over the Transport.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "mantissa/backend/functions.h"
#include "mantissa/base/error.h"

namespace mantissa {

// A message to or from a rank of the group.
struct DeviceMessage {
  int peer;
  bool receives;
  Bytes bytes;
};

class DeviceLink {
 public:
  virtual ~DeviceLink() = default;
  // Moves the messages of one call as one group, in this thread's lane of the device, which is the same one for all of them; may return
  // before they have moved. Messages of a pair of ranks arrive in the order in which they are sent.
  virtual void exchange(std::span<const DeviceMessage> messages) = 0;
  // Throws what failed after exchange() had returned. Every wait for the device calls it.
  virtual void check() = 0;
  // Makes the exchange under way and all later ones fail, and returns when lanes do not wait for peers any more. Other links of the same
  // maker may go with it. Any thread may call it, more than once; it may take long and is called under no lock.
  virtual void give_up() noexcept = 0;
};

// The group that a link connects: world ranks by group rank, and this process's group rank.
struct LinkRanks {
  std::vector<int> ranks;
  int rank = 0;
  uint64_t hash = 0;  // equal on all ranks of the group, and no other group's
  // Called at least every 20 ms while the host waits; throws to end the wait: a lost peer, other calls of a neighbor.
  std::function<void()> look = {};
};
// Makes the link of a group; all its ranks make theirs together.
using MakeDeviceLink = std::function<std::unique_ptr<DeviceLink>(const LinkRanks&)>;

}  // namespace mantissa
