#include "comm/collective.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/hash.h"
#include "comm/progress.h"
#include "mantissa/base/trace.h"

namespace mantissa {
namespace {

constexpr size_t kLatest = 16;
constexpr std::array kPurposes{"gradients", "parameters", "activations", "control", "other"};

thread_local CommunicationMeter* meter = nullptr;  // that counts on this thread

// Keeps other collectives of this process from running until the end of the block.
class Busy {
 public:
  explicit Busy(Session& session) : session_(session) {
    require(!session.busy.exchange(true, std::memory_order_acquire),
            "a collective begins while another one of this process is running: submit both to its CommQueue");
  }
  ~Busy() { session_.busy.store(false, std::memory_order_release); }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  Session& session_;
};

}  // namespace

CommunicationMeter::CommunicationMeter() {
  require(!meter, "this thread has a CommunicationMeter already");
  meter = this;
}
void CommunicationMeter::stop() {
  if (meter == this) meter = nullptr;
}
double CommunicationMeter::seconds() const {
  double sum = host_;
  for (const auto& [begin, end] : on_devices_) sum += begin.seconds_until(end);
  return sum;
}

CommunicationTime::CommunicationTime() : begin_(monotonic_now()) {}
CommunicationTime::~CommunicationTime() {
  if (meter) meter->host_ += monotonic_now() - begin_;
}

DeviceWait::DeviceWait(Backend& device) : device_(device) {
  if (meter) began_.emplace(device);
}
void DeviceWait::end() {
  if (meter && began_) meter->on_devices_.emplace_back(*began_, Moment(device_));
}

std::string describe(const Header& header) {
  static constexpr const char* kNames[] = {"all_gather", "all_to_all", "sum", "sum_scatter", "broadcast"};
  const auto operation = static_cast<size_t>(header.operation);
  std::string out = text(operation < std::size(kNames) ? kNames[operation] : "an unknown call", " of ", header.count, " ",
                         header.dtype == Dtype::u8 ? "bytes" : dtype_name(header.dtype), header.on_device ? " on a device" : "");
  if (header.operation == Operation::broadcast) out += text(" from ", header.root);
  return out + text(" (call ", header.sequence, " of group ", Hash64{header.group}, ", counts ", Hash64{header.counts}, ")");
}

void Session::settle(bool wait) {
  while (!deferred.empty()) {
    for (Headers::Expected& expected : deferred.front().expected) {
      if (wait) {
        transport->wait(expected.request);
      } else if (!transport->ready(expected.request)) {
        return;
      }
      if (expected.arrived == expected.header) continue;  // describing calls takes longer than many of them
      fail(ExitCode::internal, "ranks ", expected.sender, " and ", transport->rank(), " make different calls: rank ", expected.sender, " ",
           describe(expected.arrived), ", rank ", transport->rank(), " ", describe(expected.header));
    }
    // Headers stay until the transport forgets their messages.
    deferred.front().expected.clear();
    settled.push_back(std::move(deferred.front()));
    deferred.pop_front();
  }
}

void Session::look() {
  transport->heed_interrupt();
  settle(false);
}

void Session::check() {
  rethrow();
  std::vector<std::weak_ptr<DeviceLink>> all;
  {
    const std::lock_guard lock(mutex);
    all = links;
  }
  try {
    look();
    for (const std::weak_ptr<DeviceLink>& each : all) {
      if (const auto link = each.lock()) link->check();
    }
  } catch (...) {
    transport->cancel();
    end(std::current_exception());
    throw;
  }
}

void Session::end(std::exception_ptr why) noexcept {
  std::vector<std::weak_ptr<DeviceLink>> all;
  {
    const std::lock_guard lock(mutex);
    if (!failure) failure = std::move(why);
    all = links;
  }
  for (const std::weak_ptr<DeviceLink>& each : all) {
    if (const auto link = each.lock()) link->give_up();
  }
}

void Session::rethrow() {
  const std::lock_guard lock(mutex);
  if (failure) std::rethrow_exception(failure);
}

void Session::watch(const std::shared_ptr<Session>& session, Backend& device) {
  const std::lock_guard lock(session->mutex);
  if (session->kernels.lock() == device.kernel_log()) return;
  session->kernels = device.kernel_log();
  device.set_interrupt([watched = std::weak_ptr(session)] {
    if (const auto alive = watched.lock()) alive->check();
  });
}

void RankGroup::make_link() {
  look = [all = session.get()] { all->look(); };
  std::vector<int> hosts;
  for (const int each : ranks) hosts.push_back(session->hosts.empty() ? 0 : session->hosts[static_cast<size_t>(each)]);
  levels = HostLevels(hosts);
  link = session->make_link ? session->make_link(*this) : staged_link(*session, *this);
  const std::lock_guard lock(session->mutex);
  std::erase_if(session->links, [](const auto& each) { return each.expired(); });
  session->links.push_back(link);
}

void Collective::run(RankGroup& group, const Call& call, const std::function<void(Collective&)>& body) {
  if (!call.device || current_lane() == Lane::communication) return run_in_lane(group, call, body);
  DeviceWait wait(*call.device);
  const Backend::Mark asked = call.device->mark();
  Backend::Mark done;
  std::exception_ptr error;
  {
    const LaneScope lane(Lane::communication);
    call.device->follow(asked);
    try {
      run_in_lane(group, call, body);
    } catch (...) {
      error = std::current_exception();
    }
    done = call.device->mark();
  }
  call.device->follow(done);  // also after a failure: the lane may still write what the caller frees
  wait.end();
  if (error) std::rethrow_exception(error);
}

void Collective::run_in_lane(RankGroup& group, const Call& call, const std::function<void(Collective&)>& body) {
  Session& session = *group.session;
  if (call.device) Session::watch(group.session, *call.device);
  const std::optional<CommunicationTime> time = call.device ? std::nullopt : std::optional<CommunicationTime>(std::in_place);
  if (session.before_call) session.before_call();
  const Busy busy(session);
  const auto purpose = static_cast<size_t>(call.purpose);
  const TraceSpan span(Track::exchange, kPurposes[purpose]);
  const int64_t sent = session.sent[purpose];
  session.rethrow();
  Collective collective(group, call);
  try {
    collective.begin(call);
    body(collective);
    collective.finish();
    if (RecordedSpan* const traced = span.ended()) traced->bytes = session.sent[purpose] - sent;
  } catch (...) {
    session.transport->cancel();  // while the memory of its messages is there
    session.end(std::current_exception());
    session.deferred.clear();  // the transport has given up their messages
    session.settled.clear();
    throw;
  }
}

Collective::Collective(RankGroup& group, const Call& call)
    : group_(group),
      transport_(*group.session->transport),
      header_(call.header),
      purpose_(call.purpose),
      device_(call.device),
      tag_((group.hash & 0x7fffff) << 24 | (group.sequence & 0xffffff)) {
  header_.group = group.hash;
  header_.sequence = group.sequence++;
  header_.on_device = device_ != nullptr;
}

void Collective::begin(const Call& call) {
  ++group_.session->calls;
  {
    const std::lock_guard lock(group_.session->mutex);
    std::deque<Header>& latest = group_.session->latest;
    if (latest.size() == kLatest) latest.pop_front();
    latest.push_back(header_);
  }
  const int size = group_.size();
  const int peers = call.sent.empty() ? 1 : size - 1;
  headers_.announced.reserve(static_cast<size_t>(peers));  // messages hold addresses of elements
  headers_.expected.reserve(static_cast<size_t>(peers));
  for (int distance = 1; distance <= peers; ++distance) {
    const int right = (group_.rank + distance) % size, left = (group_.rank + size - distance) % size;
    Headers::Expected& expected =
        headers_.expected.emplace_back(Headers::Expected{.sender = group_.ranks[static_cast<size_t>(left)], .header = header_});
    if (!call.received.empty()) expected.header.count = call.received[static_cast<size_t>(left)];
    expected.request = transport_.receive(expected.sender, kHeaderTag, std::as_writable_bytes(std::span(&expected.arrived, 1)));
    Header& announced = headers_.announced.emplace_back(header_);
    if (!call.sent.empty()) announced.count = call.sent[static_cast<size_t>(right)];
    transport_.send(group_.ranks[static_cast<size_t>(right)], kHeaderTag, std::as_bytes(std::span(&announced, 1)));
    group_.session->sent[static_cast<size_t>(Purpose::control)] += sizeof(Header);
  }
}

void Collective::send(int peer, const Bytes& bytes) {
  if (bytes.size == 0) return;
  if (device_) {
    messages_.push_back({.peer = peer, .receives = false, .bytes = bytes});
  } else {
    transport_.send(group_.ranks[static_cast<size_t>(peer)], tag_, bytes.host());
  }
  group_.session->sent[static_cast<size_t>(purpose_)] += bytes.size;
}

void Collective::receive(int peer, const Bytes& bytes) {
  if (bytes.size == 0) return;
  if (device_) return messages_.push_back({.peer = peer, .receives = true, .bytes = bytes});
  transport_.receive(group_.ranks[static_cast<size_t>(peer)], tag_, bytes.host());
}

void Collective::keep(const Bytes& source, const Bytes& target) {
  if (source.size == 0) return;
  if (device_) return device_->run(Convert{.x = source.tensor(), .out = target.tensor()});
  transport_.keep(source.host(), target.host());
}

void Collective::finish() {
  Session& session = *group_.session;
  if (!headers_.expected.empty()) session.deferred.push_back(std::exchange(headers_, {}));
  if (!device_) {
    session.settle(true);
    transport_.wait_all();
    session.settled.clear();
    return;
  }
  // A link through host memory settles what it waits for.
  group_.link->exchange(std::exchange(messages_, {}));
}

}  // namespace mantissa
