#include "job/store_server.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "base/file.h"
#include "job/rendezvous.h"
#include "mantissa/base/log.h"

namespace mantissa {
namespace {

constexpr double kDroppedLogSeconds = 60;
constexpr double kLateSeconds = 5;  // between the first and the last rank of a start
constexpr double kCauseTickSeconds = 0.05;
constexpr char kStartBarrier[] = ".start";

Fields failure_fields(const Failure& failure) {
  return Fields()
      .number(static_cast<uint8_t>(failure.code))
      .number(uint8_t{failure.stuck})
      .number(static_cast<int32_t>(failure.rank))
      .text(failure.message);
}

}  // namespace

StoreServer::StoreServer(const Launch& launch, const StoreOptions& options, Listener listener, Socket root)
    : launch_(launch), options_(options), listener_(std::move(listener)), peers_(static_cast<size_t>(launch.world)) {
  configure(root, options.heartbeat_timeout_s);
  peers_[0].connection.emplace(std::move(root));
  peers_[0].connection->send(Message::welcome);
  thread_ = std::thread([this] { serve(); });
}

StoreServer::~StoreServer() {
  stop_at_ = monotonic_now();
  thread_.join();
  if (dropped_ > dropped_reported_) log_warning("rendezvous: dropped ", dropped_, " unauthenticated connections in all");
}

void StoreServer::serve() {
  const double tick = std::clamp(options_.heartbeat_timeout_s / 10, 0.01, 0.5);
  try {
    // Take the time before reading: what arrived while this thread did not run counts as heard.
    for (double now = monotonic_now(); !finished(now); now = monotonic_now()) {
      for (const int rank : ranks_with_input(symptom_ && !failure_ ? kCauseTickSeconds : tick)) listen_to(rank);
      accept_connections(now);
      unauthenticated_.remove_if([&](Unauthenticated& waiting) { return !still_authenticating(waiting, now); });
      expire(now);
      for (Peer& peer : peers_) {
        if (peer.connection) peer.connection->flush();  // a connection that broke is seen when it is read
      }
    }
  } catch (const std::exception& error) {
    log_error("the store of rank 0 failed: ", error.what());
  }
  for (Peer& peer : peers_) peer.connection.reset();  // ranks that are still connected report rank 0 as lost
  listener_.socket = Socket();
}

bool StoreServer::finished(double now) const {
  const double asked = stop_at_;
  if (asked < 0 || expects_more_to_report(now)) return false;
  if (failure_ && now > asked + kFailureReportSeconds) return true;
  return std::all_of(peers_.begin(), peers_.end(),
                     [&](const Peer& peer) { return !peer.connection || (failure_ && !peer.connection->waiting()); });
}

bool StoreServer::expects_more_to_report(double now) const {
  const bool of_one = failure_ && failure_->rank >= 0, asked_to_stop = options_.stop_asked && options_.stop_asked();
  return of_one && !asked_to_stop && now < failed_at_ + kLateSeconds &&
         std::any_of(peers_.begin() + 1, peers_.end(), [](const Peer& peer) { return !peer.joined; });
}

std::vector<int> StoreServer::ranks_with_input(double tick) {
  std::vector<pollfd> waits;
  std::vector<int> ranks, out;
  for (int rank = 0; rank < launch_.world; ++rank) {
    const std::optional<Connection>& connection = peers_[static_cast<size_t>(rank)].connection;
    if (!connection) continue;
    ranks.push_back(rank);
    waits.push_back(
        {.fd = connection->fd(), .events = static_cast<short>(connection->waiting() ? POLLIN | POLLOUT : POLLIN), .revents = 0});
  }
  waits.push_back({.fd = listener_.socket.fd(), .events = POLLIN, .revents = 0});
  for (const Unauthenticated& waiting : unauthenticated_) waits.push_back({.fd = waiting.socket.fd(), .events = POLLIN, .revents = 0});
  ::poll(waits.data(), waits.size(), static_cast<int>(tick * 1e3));
  for (size_t i = 0; i < ranks.size(); ++i) {
    if ((waits[i].revents & ~POLLOUT) != 0) out.push_back(ranks[i]);
  }
  return out;
}

void StoreServer::accept_connections(double now) {
  for (int i = 0; i < kMostUnauthenticated; ++i) {
    Socket socket(::accept4(listener_.socket.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    const bool full = !socket && (errno == EMFILE || errno == ENFILE);
    if (!socket && !full) return;
    if ((full || unauthenticated_.size() >= size_t{kMostUnauthenticated}) && !unauthenticated_.empty()) {  // the oldest makes room
      unauthenticated_.pop_front();
      log_dropped(now, "too many at once");
    } else if (full) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // it stays in the queue until a descriptor is free
    }
    if (full) return;
    configure(socket, options_.heartbeat_timeout_s);
    unauthenticated_.push_back({.socket = std::move(socket), .until = now + kHandshakeSeconds, .in = {}, .mine = {}});
  }
}

bool StoreServer::still_authenticating(Unauthenticated& waiting, double now) {
  constexpr size_t kHello = sizeof(HelloBytes), kAll = kHello + kMacBytes;
  const size_t before = waiting.in.size();
  waiting.in.resize(kAll);
  const ssize_t got = ::recv(waiting.socket.fd(), waiting.in.data() + before, kAll - before, 0);
  const bool closed = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
  waiting.in.resize(before + static_cast<size_t>(std::max<ssize_t>(got, 0)));
  const size_t size = waiting.in.size();
  bool answered = true;
  if (before < kHello && size >= kHello) {
    waiting.mine = new_hello({.attempt = static_cast<uint32_t>(launch_.restart), .rank = 0, .world = static_cast<uint32_t>(launch_.world)});
    answered = ::send(waiting.socket.fd(), waiting.mine.data(), kHello, MSG_NOSIGNAL) == static_cast<ssize_t>(kHello);
  }
  if (size == kAll && answered) {
    HelloBytes theirs{};
    std::copy_n(waiting.in.begin(), kHello, theirs.begin());
    const Mac expected = mac_of(MacSender::rank, listener_.secret, theirs, waiting.mine, launch_.job);
    if (same_mac(std::span(waiting.in).subspan(kHello), expected)) {
      admit(waiting);
      return false;
    }
  }
  if (size < kAll && answered && !closed && now < waiting.until) return true;
  log_dropped(now, size == kAll ? "a wrong MAC" : closed ? "closed before its MAC" : "no MAC in time");
  return false;
}

// Admits a connection that has proved the secret.
void StoreServer::admit(Unauthenticated& waiting) {
  HelloBytes bytes{};
  std::copy_n(waiting.in.begin(), bytes.size(), bytes.begin());
  const Hello hello = std::bit_cast<Hello>(bytes);
  const Mac mac = mac_of(MacSender::root, listener_.secret, bytes, waiting.mine, launch_.job);
  const bool sent = ::send(waiting.socket.fd(), mac.data(), mac.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(mac.size());
  Connection connection(std::move(waiting.socket));
  std::string problem;
  if (hello.protocol != kStoreProtocol) {
    problem = text("it has version ", hello.protocol, " of the protocol, but rank 0 has version ", kStoreProtocol);
  } else if (hello.attempt != static_cast<uint32_t>(launch_.restart)) {
    problem = text("it belongs to restart ", hello.attempt, ", but rank 0 to restart ", launch_.restart);
  } else if (hello.world != static_cast<uint32_t>(launch_.world)) {
    problem = text("its world has ", hello.world, " ranks, but that of rank 0 has ", launch_.world);
  } else if (hello.rank >= hello.world) {
    problem = text("there is no rank ", hello.rank, " among ", hello.world);
  } else if (hello.rank == 0 || peers_[hello.rank].joined) {
    problem = text("rank ", hello.rank, " has joined already");
  }
  if (!problem.empty()) {
    log_dropped(monotonic_now(), "it has the secret, but " + problem);
    const bool later = hello.attempt > static_cast<uint32_t>(launch_.restart);  // this attempt is about to end
    connection.send(Message::refused,
                    Fields().number(static_cast<uint8_t>(ExitCode::usage)).number(static_cast<uint8_t>(later)).text(problem));
    connection.flush();
  } else if (sent) {
    Peer& peer = peers_[hello.rank];
    peer.joined = true;
    connection.send(Message::welcome);
    if (failure_) connection.send(Message::abort, failure_fields(*failure_));
    peer.connection.emplace(std::move(connection));
  }
}

void StoreServer::listen_to(int rank) {
  std::optional<Connection>& connection = peers_[static_cast<size_t>(rank)].connection;
  if (!connection) return;
  const bool open = connection->receive();
  try {
    while (connection) {
      std::optional<Frame> frame = connection->next();
      if (!frame) break;
      handle(rank, *frame);
    }
  } catch (const Error& error) {
    lose(rank, text("sent an unreadable message: ", error.what()));
  }
  if (!open && connection) lose(rank, "closed its connection");
}

void StoreServer::handle(int rank, Frame& frame) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  switch (frame.message()) {
    case Message::join: return joined(rank, frame);
    case Message::heartbeat: return heartbeat(rank, frame);
    case Message::barrier: return arrive(rank, frame);
    case Message::leave: return peer.connection.reset();
    case Message::set: {
      const std::string key = frame.text();
      const std::string& value = values_[key] = frame.text();
      const auto [first, last] = readers_.equal_range(key);
      for (auto reader = first; reader != last; ++reader) reply(reader->second.first, reader->second.second, value);
      readers_.erase(first, last);
      return;
    }
    case Message::get: {
      const auto request = frame.number<uint32_t>();
      const std::string key = frame.text();
      const auto found = values_.find(key);
      if (found == values_.end())
        readers_.emplace(key, std::pair(rank, request));
      else
        reply(rank, request, found->second);
      return;
    }
    case Message::abort: {
      const auto code = static_cast<ExitCode>(frame.number<uint8_t>());
      const bool stuck = frame.number<uint8_t>() != 0;
      const std::string message = frame.text();
      return take_abort({.code = code,
                         .rank = rank,
                         .message = text(name_of(rank), ": ", message, code == ExitCode::peer_lost ? slowest_rank() : ""),
                         .stuck = stuck});
    }
    default: fail(ExitCode::peer_lost, "message ", static_cast<int>(frame.message()));
  }
}

void StoreServer::reply(int rank, uint32_t request, const std::string& value) {
  std::optional<Connection>& connection = peers_[static_cast<size_t>(rank)].connection;
  if (connection) connection->send(Message::reply, Fields().number(request).text(value));
}

void StoreServer::joined(int rank, Frame& frame) {
  const std::string host = frame.text();
  const int local_rank = frame.number<int32_t>(), local_size = frame.number<int32_t>();
  peers_[static_cast<size_t>(rank)].host = host;
  if (!launch_.in_order) return;  // others may place ranks in any order
  const int first = std::max(0, rank - local_rank), end = static_cast<int>(std::min<int64_t>(launch_.world, int64_t{first} + local_size));
  for (int other = first; other < end; ++other) {
    std::string& neighbor = peers_[static_cast<size_t>(other)].host;
    if (neighbor.empty()) neighbor = host;
  }
}

void StoreServer::arrive(int rank, Frame& frame) {
  const auto request = frame.number<uint32_t>();
  const auto seconds = frame.number<double>();
  const std::string name = frame.text();
  Barrier& barrier =
      barriers_.try_emplace(name, Barrier{.requests = {}, .deadline = monotonic_now() + seconds, .seconds = seconds}).first->second;
  barrier.requests[rank] = request;
  if (barrier.requests.size() < peers_.size()) return;
  for (const auto& [member, number] : barrier.requests) reply(member, number, "");
  barriers_.erase(name);
}

void StoreServer::heartbeat(int rank, Frame& frame) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.step = frame.number<int64_t>();
  peer.sequence = frame.number<uint32_t>();
  peer.operation = frame.number<uint32_t>();
  peer.section = frame.text();
  for (size_t other = 0; other < peers_.size(); ++other) {
    const Peer& known = peers_[other];
    if (!known.connection || known.sequence != peer.sequence || known.operation == peer.operation || known.operation == 0 ||
        peer.operation == 0)
      continue;
    return fail_job(
        {.code = ExitCode::internal,
         .rank = rank,
         .message = text("collective ", peer.sequence, " is one operation on ", name_of(rank), " (step ", peer.step, ", ", peer.section,
                         ") and another on ", name_of(static_cast<int>(other)), " (step ", known.step, ", ", known.section, ")")});
  }
}

void StoreServer::expire(double now) {
  if (now >= next_heartbeat_) {
    send_all(Message::heartbeat, {});
    next_heartbeat_ = now + options_.heartbeat_timeout_s / 5;
  }
  if (symptom_ && now > symptom_at_ + options_.cause_timeout_s) fail_job(*symptom_);
  const double running_since = stops_.running_since(now);
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    const std::optional<Connection>& connection = peers_[rank].connection;
    if (connection && now > std::max(connection->heard(), running_since) + options_.heartbeat_timeout_s)
      lose(static_cast<int>(rank), text("sent no heartbeat for ", options_.heartbeat_timeout_s, " s (parallel.heartbeat_timeout_s)"), true);
  }
  for (const auto& [name, barrier] : barriers_) {
    if (failure_ || now < barrier.deadline) continue;
    const bool start = name == kStartBarrier;
    fail_job({.code = ExitCode::peer_lost,
              .rank = -1,
              .message = text(start ? "not all ranks joined" : "not all ranks reached '" + name + "'", " within ", barrier.seconds, " s",
                              start ? " (parallel.init_timeout_s)" : "", "; missing: ", missing(barrier))});
  }
}

void StoreServer::send_all(Message message, const Fields& fields) {
  for (Peer& peer : peers_) {
    if (peer.connection) peer.connection->send(message, fields);
  }
}

void StoreServer::fail_job(const Failure& failure) {
  if (failure_) return;
  failure_ = failure;
  failed_at_ = monotonic_now();
  send_all(Message::abort, failure_fields(failure));
}

// A killed rank closes its connections to other ranks and to the store in any order, so the report of a rank that lost it may arrive first.
void StoreServer::take_abort(const Failure& failure) {
  peers_[static_cast<size_t>(failure.rank)].gave_up = true;
  if (failure.code != ExitCode::peer_lost || failure.stuck) return fail_job(failure);
  if (symptom_) return;
  symptom_ = failure;
  symptom_at_ = monotonic_now();
}

void StoreServer::lose(int rank, const std::string& how, bool silent) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.gave_up) return peer.connection.reset();
  fail_job({.code = ExitCode::peer_lost,
            .rank = rank,
            .message = text(name_of(rank), " ", how, "; last seen at step ", peer.step, " (", peer.section, ")"),
            .stuck = silent});
  peer.connection.reset();
}

void StoreServer::log_dropped(double now, const std::string& why) {
  ++dropped_;
  if (now < reported_at_ + kDroppedLogSeconds) return;
  log_warning("rendezvous: dropped ", dropped_ - dropped_reported_, " unauthenticated connections; the last: ", why);
  dropped_reported_ = dropped_;
  reported_at_ = now;
}

std::string StoreServer::name_of(int rank) const {
  const std::string& host = peers_[static_cast<size_t>(rank)].host;
  return host.empty() ? text("rank ", rank) : text("rank ", rank, " (", host, ")");
}

// Names the rank that is behind in the collectives, if known.
std::string StoreServer::slowest_rank() const {
  const auto [least, most] =
      std::minmax_element(peers_.begin(), peers_.end(), [](const Peer& a, const Peer& b) { return a.sequence < b.sequence; });
  if (least->sequence == most->sequence) return "";
  return text("; ", name_of(static_cast<int>(least - peers_.begin())), " is behind: at collective ", least->sequence, " (step ",
              least->step, ", ", least->section, "), others at ", most->sequence);
}

std::string StoreServer::missing(const Barrier& barrier) const {
  constexpr int kMostNamed = 16;
  std::string out;
  int count = 0;
  for (int rank = 0; rank < launch_.world; ++rank) {
    if (barrier.requests.contains(rank) || ++count > kMostNamed) continue;
    out += (out.empty() ? "" : ", ") + name_of(rank);
  }
  return count > kMostNamed ? text(out, " and ", count - kMostNamed, " more") : out;
}

}  // namespace mantissa
