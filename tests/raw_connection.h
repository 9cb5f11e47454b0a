// An unauthenticated connection at the port of a store.
#pragma once

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <span>
#include <string>

#include "hang.h"
#include "job/frames.h"
#include "job/rendezvous.h"

namespace mantissa::test {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A connection to a port of this host whose every byte the test decides.
class RawConnection {
 public:
  explicit RawConnection(int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    name.sin_port = htons(static_cast<uint16_t>(port));
    require(::connect(socket_.fd(), reinterpret_cast<sockaddr*>(&name), sizeof name) == 0, "connect");
  }
  explicit RawConnection(Socket socket) : socket_(std::move(socket)) {}

  void send(std::span<const std::byte> bytes) { ::send(socket_.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  void send(const std::string& bytes) { send(std::as_bytes(std::span(bytes))); }

  // Receives up to so many bytes; fewer if the other end closes.
  std::string receive(size_t bytes) {
    const auto start = std::chrono::steady_clock::now();
    std::string out;
    while (out.size() < bytes && seconds_since(start) < kHangSeconds) {
      pollfd wait{.fd = socket_.fd(), .events = POLLIN, .revents = 0};
      if (::poll(&wait, 1, 100) == 0) continue;
      char block[256];
      const ssize_t got = ::recv(socket_.fd(), block, std::min(sizeof block, bytes - out.size()), 0);
      if (got <= 0) break;
      out.append(block, static_cast<size_t>(got));
    }
    return out;
  }
  // True if the other end closes, without a byte more.
  bool is_closed() {
    const auto start = std::chrono::steady_clock::now();
    return receive(1).empty() && seconds_since(start) < kHangSeconds;
  }

  // Authenticates as a rank with the secret; returns the bytes that were sent.
  std::string authenticate(const Hello& hello, const std::string& secret, const std::string& job = "job") {
    const HelloBytes mine = new_hello(hello);
    send(mine);
    HelloBytes root{};
    const std::string answer = receive(root.size());
    std::memcpy(root.data(), answer.data(), std::min(answer.size(), root.size()));
    const Mac mac = mac_of(MacSender::rank, secret, mine, root, job);
    send(mac);
    return std::string(reinterpret_cast<const char*>(mine.data()), mine.size()) +
           std::string(reinterpret_cast<const char*>(mac.data()), mac.size());
  }
  Connection take() && { return Connection(std::move(socket_)); }

 private:
  Socket socket_;
};

}  // namespace mantissa::test
