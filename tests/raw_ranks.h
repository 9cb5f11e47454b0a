// Ends of the store's connections whose every byte a test decides, among ranks that are real.
#pragma once

#include <gmock/gmock.h>

#include <string>
#include <utility>
#include <vector>

#include "job/rendezvous.h"
#include "raw_connection.h"
#include "store_ranks.h"

namespace mantissa::test {

inline const std::string kSecret = "0123456789abcdef0123456789abcdef";  // of StoreTest::options()

class RawRanksTest : public StoreTest {
 protected:
  int port(const Launch& of) const {
    for (;;) {
      const std::vector<RendezvousFile> files = rendezvous_files(folder_.path(), of);
      if (!files.empty()) return files.front().port;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // Rank 1 as a raw connection that has proved itself and joined.
  Connection joined_rank(int world) const {
    RawConnection raw(port(launch(0, world)));
    raw.authenticate({.rank = 1, .world = static_cast<uint32_t>(world)}, kSecret);
    EXPECT_EQ(raw.receive(kMacBytes).size(), kMacBytes);
    Connection out = std::move(raw).take();
    out.send(Message::join, Fields().text("raw").number(1).number(world));
    out.send(Message::barrier, Fields().number(uint32_t{1}).number(60.0).text(".start"));
    out.flush();
    return out;
  }

  // Rank 0 as a raw connection of a rank that has got its MAC.
  static RawConnection proved_root(const Listener& listener, const std::string& secret = kSecret) {
    Socket socket;
    while (!socket) socket = Socket(::accept4(listener.socket.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    RawConnection raw(std::move(socket));
    HelloBytes theirs{};
    const std::string hello = raw.receive(theirs.size());
    std::memcpy(theirs.data(), hello.data(), hello.size());
    const HelloBytes mine = new_hello({.world = 2});
    raw.send(mine);
    raw.receive(kMacBytes);
    raw.send(mac_of(MacSender::root, secret, theirs, mine, "job"));
    return raw;
  }
};

}  // namespace mantissa::test
