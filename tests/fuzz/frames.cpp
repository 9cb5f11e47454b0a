// The frames of an authenticated rank, as the store reads them. Accepted: all that came, in frames whose fields are those that it sent;
// what ranks give to be compared is refused or described.
#include "job/frames.h"

#include <sys/socket.h>

#include "targets.h"

namespace mantissa::fuzz {
namespace {

// Reads the fields of StoreServer::handle(). Returns the frame written again from them.
Fields read_fields(Frame& frame) {
  Fields again;
  switch (frame.message()) {
    case Message::join: {
      again.text(frame.text());
      again.number(frame.number<uint32_t>());
      return again.number(frame.number<uint32_t>());
    }
    case Message::set: {
      again.text(frame.text());
      const std::string value = frame.text();
      if (!value.empty()) mismatching_items({read_inputs(value), read_inputs(inputs_text({}))});
      return again.text(value);
    }
    case Message::get: return again.number(frame.number<uint32_t>()).text(frame.text());
    case Message::barrier: {
      again.number(frame.number<uint32_t>()).number(frame.number<double>());
      return again.text(frame.text());
    }
    case Message::heartbeat: {
      again.number(frame.number<int64_t>());
      again.number(frame.number<uint32_t>());
      again.number(frame.number<uint32_t>());
      return again.text(frame.text());
    }
    case Message::abort: {
      again.number(frame.number<uint8_t>());
      again.number(frame.number<uint8_t>());
      return again.text(frame.text());
    }
    default: return again;
  }
}

}  // namespace

bool store_frames(std::string_view input) {
  int ends[2] = {-1, -1};
  promise(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "a pair of sockets");
  Connection reader{Socket(ends[0])};
  const Socket writer(ends[1]);
  promise(::send(writer.fd(), input.data(), input.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(input.size()), "the input fits a socket");
  bool any = false;
  try {
    promise(reader.receive(), "the connection is open");
    size_t at = 0;
    while (std::optional<Frame> frame = reader.next()) {
      const std::string fields = read_fields(*frame).bytes();
      promise(input.substr(at + 5).starts_with(fields), "fields are read as they were written");
      uint32_t length = 0;
      std::memcpy(&length, input.data() + at, sizeof length);
      at += sizeof length + length;
      any = true;
    }
  } catch (const Error& error) {
    promise(error.code() == ExitCode::peer_lost && std::string_view(error.what()).size() > 8, error.what());
    return false;
  }
  return any;
}

}  // namespace mantissa::fuzz
