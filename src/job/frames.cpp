#include "job/frames.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "base/host_name.h"

namespace mantissa {

void configure(const Socket& socket, double timeout_s) {
  const int on = 1;
  const auto milliseconds = static_cast<unsigned>(timeout_s * 1e3);
  ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
  ::fcntl(socket.fd(), F_SETFL, O_NONBLOCK);
}

std::string_view Frame::take(size_t bytes) {
  require(bytes <= fields_.size() - at_, ExitCode::peer_lost, "a frame of the store is too short");
  return std::string_view(fields_).substr(std::exchange(at_, at_ + bytes), bytes);
}

bool Connection::receive() {
  std::array<char, 1 << 16> block;
  const ssize_t got = ::recv(fd(), block.data(), block.size(), 0);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  in_.append(block.data(), static_cast<size_t>(got));
  heard_ = monotonic_now();
  return got > 0;
}

std::optional<Frame> Connection::next() {
  uint32_t length = 0;
  if (in_.size() < sizeof length) return {};
  std::memcpy(&length, in_.data(), sizeof length);
  require(length > 0 && length <= kMostFrameBytes, ExitCode::peer_lost, "a frame of the store claims ", length, " bytes");
  if (in_.size() < sizeof length + length) return {};
  Frame frame(static_cast<Message>(in_[sizeof length]), in_.substr(sizeof length + 1, length - 1));
  in_.erase(0, sizeof length + length);
  return frame;
}

void Connection::send(Message message, const Fields& fields) {
  require(fields.bytes().size() < kMostFrameBytes, "a frame of the store would have ", fields.bytes().size(), " bytes");
  out_.append(Fields().number(static_cast<uint32_t>(fields.bytes().size() + 1)).number(message).bytes());
  out_.append(fields.bytes());
}

bool Connection::flush() {
  while (waiting()) {
    const ssize_t sent = ::send(fd(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN;
    sent_ += static_cast<size_t>(sent);
  }
  out_.clear();
  sent_ = 0;
  return true;
}

std::string inputs_text(const std::vector<NamedHash>& items) {
  Fields fields;
  fields.text(host_name()).number(static_cast<uint32_t>(items.size()));
  for (const NamedHash& item : items) fields.text(item.name).text(item.value);
  return fields.bytes();
}

RankInputs read_inputs(const std::string& bytes) {
  Frame frame(Message::set, bytes);
  RankInputs out{.host = frame.text(), .items = {}};
  for (auto left = frame.number<uint32_t>(); left > 0; --left) {
    const std::string name = frame.text();
    out.items[name] = frame.text();
  }
  return out;
}

std::string mismatching_items(const std::vector<RankInputs>& ranks) {
  constexpr size_t kMostMismatches = 8;  // named by one message
  const auto value_of = [](const RankInputs& rank, const std::string& name) {
    const auto item = rank.items.find(name);
    return item == rank.items.end() ? std::string("none") : item->second;
  };
  std::map<std::string, std::string> majority;  // the value of most ranks; of the lowest rank if several are as frequent
  for (const RankInputs& rank : ranks) {
    for (const auto& [name, value] : rank.items) majority.try_emplace(name, "");
  }
  for (auto& [name, value] : majority) {
    std::map<std::string, size_t> counts;
    for (const RankInputs& rank : ranks) ++counts[value_of(rank, name)];
    size_t most = 0;
    for (const RankInputs& rank : ranks) {
      const std::string each = value_of(rank, name);
      if (counts[each] > most) most = counts[each], value = each;
    }
  }
  std::string out;
  size_t found = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& [name, value] : majority) {
      const std::string each = value_of(ranks[rank], name);
      if (each == value || ++found > kMostMismatches) continue;
      out += text(out.empty() ? "" : "; ", name, " of rank ", rank, " (", ranks[rank].host, ") is ", each, ", of most ranks ", value);
    }
  }
  return found > kMostMismatches ? text(out, "; and ", found - kMostMismatches, " more") : out;
}

}  // namespace mantissa
