// Ends of the store's connections whose every byte a test decides, among ranks that are real.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "job/rendezvous.h"
#include "raw_connection.h"
#include "store_ranks.h"

namespace mantissa::test {

inline const std::string kSecret = StoreJob::kSecret;

// The port that rank 0 publishes.
inline int port(const StoreJob& job, const Launch& of) {
  for (;; pause_ms(1)) {
    const std::vector<RendezvousFile> files = rendezvous_files(job.folder.path(), of);
    if (!files.empty()) return files.front().port;
  }
}

// Rank 1 as a raw connection that has proved itself and joined.
inline Connection joined_rank(const StoreJob& job, int world, const std::string& name = "job") {
  RawConnection raw(port(job, job.launch(0, world, name)));
  raw.authenticate({.rank = 1, .world = static_cast<uint32_t>(world)}, kSecret, name);
  EXPECT_EQ(raw.receive(kMacBytes).size(), kMacBytes);
  Connection out = std::move(raw).take();
  out.send(Message::join, Fields().text("raw").number(1).number(world));
  out.send(Message::barrier, Fields().number(uint32_t{1}).number(60.0).text(".start"));
  out.flush();
  return out;
}

// The next connection; none if nobody has come.
inline Socket accepted(const Listener& listener) { return Socket(::accept4(listener.socket.fd(), nullptr, nullptr, SOCK_CLOEXEC)); }

// Rank 0 as a raw connection of a rank that has got its MAC.
inline RawConnection proved_root(const Listener& listener) {
  Socket socket;
  for (; !socket; pause_ms(1)) socket = accepted(listener);
  RawConnection raw(std::move(socket));
  HelloBytes theirs{};
  const std::string hello = raw.receive(theirs.size());
  std::memcpy(theirs.data(), hello.data(), hello.size());
  const HelloBytes mine = new_hello({.world = 2});
  raw.send(mine);
  raw.receive(kMacBytes);
  raw.send(mac_of(MacSender::root, kSecret, theirs, mine, "job"));
  return raw;
}

}  // namespace mantissa::test
