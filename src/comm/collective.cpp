#include "comm/collective.h"

#include <algorithm>

#include "mantissa/base/hash.h"
#include "mantissa/base/trace.h"
#include "mantissa/comm/progress.h"

namespace mantissa {
namespace {

constexpr size_t kLatest = 16;
constexpr std::array kPurposes{"gradients", "parameters", "activations", "control", "other"};

uint64_t tag_of(const RankGroup& group) { return (group.hash & 0x7fffff) << 24 | (group.sequence & 0xffffff); }

thread_local double communicated = 0;

// Keeps other collectives of this process from running until the end of the block.
class Busy {
 public:
  explicit Busy(Session& session) : session_(session) {
    require(!session.busy.exchange(true, std::memory_order_acquire),
            "a collective begins while another one of this process is under way: both belong into its CommQueue");
  }
  ~Busy() { session_.busy.store(false, std::memory_order_release); }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  Session& session_;
};

void remember(Session& session, const Header& header) {
  const std::lock_guard lock(session.mutex);
  if (session.latest.size() == kLatest) session.latest.pop_front();
  session.latest.push_back(header);
}

}  // namespace

CommunicationTime::CommunicationTime() : begin_(monotonic_now()) {}
CommunicationTime::~CommunicationTime() { communicated += monotonic_now() - begin_; }
double communication_seconds() { return communicated; }

std::string describe(const Header& header) {
  static constexpr const char* kNames[] = {"all_gather", "all_to_all", "sum", "sum_scatter", "broadcast"};
  const auto operation = static_cast<size_t>(header.operation);
  std::string out = text(operation < std::size(kNames) ? kNames[operation] : "an unknown call", " of ", header.count, " ",
                         header.dtype == Dtype::u8 ? "bytes" : dtype_name(header.dtype));
  if (header.operation == Operation::broadcast) out += text(" from ", header.root);
  return out + text(" (call ", header.sequence, " of group ", Hash64{header.group}, ", counts ", Hash64{header.counts}, ")");
}

void Collective::run(RankGroup& group, const Call& call, const std::function<void(Collective&)>& body) {
  Session& session = *group.session;
  const CommunicationTime time;
  if (session.before_call) session.before_call();
  const Busy busy(session);
  const TraceSpan span(Track::communication, kPurposes[static_cast<size_t>(call.purpose)],
                       call.header.count * dtype_bytes(call.header.dtype));
  if (session.failure) std::rethrow_exception(session.failure);
  try {
    Collective collective(group, call);
    collective.begin(call);
    body(collective);
    collective.finish();
    collective.over_ = true;
  } catch (...) {
    session.failure = std::current_exception();
    throw;
  }
}

Collective::Collective(RankGroup& group, const Call& call)
    : group_(group), transport_(*group.session->transport), header_(call.header), purpose_(call.purpose), tag_(tag_of(group)) {
  header_.group = group.hash;
  header_.sequence = group.sequence++;
  ++group.session->calls;
  remember(*group.session, header_);
}

Collective::~Collective() {
  if (!over_) transport_.cancel();
}

void Collective::begin(const Call& call) {
  const int size = group_.size();
  const int peers = call.to.empty() ? 1 : size - 1;
  announced_.reserve(static_cast<size_t>(peers));  // messages hold addresses of elements
  expected_.reserve(static_cast<size_t>(peers));
  for (int distance = 1; distance <= peers; ++distance) {
    const int right = (group_.rank + distance) % size, left = (group_.rank + size - distance) % size;
    expect(left, call.from.empty() ? header_.count : call.from[static_cast<size_t>(left)]);
    announce(right, call.to.empty() ? header_.count : call.to[static_cast<size_t>(right)]);
  }
}

void Collective::announce(int to, int64_t count) {
  Header& header = announced_.emplace_back(header_);
  header.count = count;
  transport_.send(group_.ranks[static_cast<size_t>(to)], kHeaderTag, std::as_bytes(std::span(&header, 1)));
  group_.session->sent[static_cast<size_t>(Purpose::control)] += sizeof(Header);
}

void Collective::expect(int from, int64_t count) {
  Expected& expected = expected_.emplace_back(Expected{.from = group_.ranks[static_cast<size_t>(from)], .count = count});
  expected.request = transport_.receive(expected.from, kHeaderTag, std::as_writable_bytes(std::span(&expected.header, 1)));
}

void Collective::send(int to, std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  transport_.send(group_.ranks[static_cast<size_t>(to)], tag_, bytes);
  group_.session->sent[static_cast<size_t>(purpose_)] += static_cast<int64_t>(bytes.size());
}

void Collective::receive(int from, std::span<std::byte> bytes) {
  if (!bytes.empty()) transport_.receive(group_.ranks[static_cast<size_t>(from)], tag_, bytes);
}

void Collective::finish() {
  for (const Expected& expected : expected_) {
    transport_.wait(expected.request);
    Header own = header_;
    own.count = expected.count;
    if (expected.header == own) continue;
    fail(ExitCode::internal, "ranks ", expected.from, " and ", transport_.rank(), " make different calls: rank ", expected.from, " ",
         describe(expected.header), ", rank ", transport_.rank(), " ", describe(own));
  }
  expected_.clear();
  transport_.wait_all();
}

}  // namespace mantissa
