// Runs one call of a collective: checks that it may run, sends its messages, and compares it with the calls of its neighbors.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>

#include "comm/host_levels.h"
#include "mantissa/backend/backend.h"
#include "mantissa/comm/communicator.h"

namespace mantissa {

enum class Operation : uint8_t { all_gather, all_to_all, sum, sum_scatter, broadcast };

// Tags have the top bit (of 48) for headers, else 23 bits of the group and 24 of the sequence. Calls of a process run one after the other
// and messages of a pair with equal tags stay in order, so a tag may be reused.
inline constexpr uint64_t kHeaderTag = uint64_t{1} << 47;

// Announcement of a rank's call. It is equal on all ranks, except for the count of an all_to_all, which is that of the pair.
struct Header {
  uint64_t group = 0;
  int64_t count = 0;    // elements
  uint64_t counts = 0;  // hash of the counts by rank
  uint32_t sequence = 0;
  uint16_t root = 0;
  Operation operation : 7 {};
  bool on_device : 1 = false;  // where the bytes lie
  Dtype dtype = Dtype::u8;     // u8: bytes

  bool operator==(const Header&) const = default;
};
static_assert(sizeof(Header) == kHeaderBytes);

std::string describe(const Header& header);  // "sum of 64 fp32 (call 17 of group 0123456789abcdef)"

// The headers of one call, sent and expected. They stay in place while they travel.
struct Headers {
  struct Expected {
    int sender;
    Header header;  // with the count of the pair
    Header arrived{};
    Transport::Request request = 0;
  };
  std::vector<Header> announced;
  std::vector<Expected> expected;
};

// State that all groups of a process share.
struct Session {
  // Headers of calls. Those in `deferred` were not compared yet, for a device until the next wait of the host; those in `settled` were, and
  // stay until the transport forgets their messages, because it may write to them until its end.
  std::deque<Headers> deferred;
  std::vector<Headers> settled;
  std::unique_ptr<Transport> transport;
  MakeDeviceLink make_link;
  std::vector<int> hosts;                      // by rank of the world; empty: all are on one
  std::array<std::atomic<int64_t>, 5> sent{};  // by Purpose
  std::function<void()> before_call;           // waits for the work of the process's CommQueue, if there is one
  std::atomic<int64_t> calls{0};
  std::atomic<bool> busy{false};
  std::mutex mutex;                              // guards the following
  std::exception_ptr failure;                    // the error that ended communication
  std::vector<std::weak_ptr<DeviceLink>> links;  // links of all groups
  std::deque<Header> latest;
  std::weak_ptr<const KernelLog> kernels;  // kernels of the device of the latest call that had one

  // Compares headers that were deferred: all of them, or those that have arrived. Throws Error(internal) that names both ranks if a
  // neighbor made another call.
  void settle(bool wait);
  void look();  // LinkRanks::look
  // Throws what ended communication meanwhile: a lost peer, other calls of a neighbor, a message that failed. Waits for a device call it.
  void check();
  // Ends communication: all links are aborted, and later calls throw. The first reason stays. Aborts may take long, so call it without the
  // lock, for which other threads would wait.
  void end(std::exception_ptr why) noexcept;
  void rethrow();  // the error that ended communication, if any
  // Makes waits for the device call check().
  static void watch(const std::shared_ptr<Session>& session, Backend& device);
};

// Counts the time of this thread's lane of a device as communication until end(), if a meter counts on this thread.
class DeviceWait {
 public:
  explicit DeviceWait(Backend& device);
  void end();

 private:
  Backend& device_;
  std::optional<Moment> began_;
};

// Counts the time of this thread as communication until the end of the block.
class CommunicationTime {
 public:
  CommunicationTime();
  ~CommunicationTime();
  CommunicationTime(const CommunicationTime&) = delete;
  CommunicationTime& operator=(const CommunicationTime&) = delete;

 private:
  double begin_;
};

struct RankGroup : LinkRanks {
  std::shared_ptr<Session> session;
  std::shared_ptr<DeviceLink> link;  // groups of the same ranks share one: their calls have an order
  uint32_t sequence = 0;             // calls so far; belongs to whoever is busy
  std::vector<int64_t> received;     // addends of a sum of integers; belongs to whoever is busy
  HostLevels levels;

  int size() const { return static_cast<int>(ranks.size()); }
  void make_link();  // when the other members are set; finds the levels, too
};

// In staged_link.cpp. Makes a link through host memory and the transport.
std::unique_ptr<DeviceLink> staged_link(Session& session, const LinkRanks& ranks);

class Collective {
 public:
  // With counts of pairs, every peer gets its own count and compares it; else only the right neighbor gets it.
  struct Call {
    Header header;
    Purpose purpose;
    Backend* device = nullptr;                    // device of the bytes; null: the host
    std::span<const int64_t> sent{}, received{};  // counts by peer
  };

  // Runs body and finish(), for a device in its communication lane. Throws Error(internal) if another collective of this process is under
  // way, and the error of an earlier one that failed.
  static void run(RankGroup& group, const Call& call, const std::function<void(Collective&)>& body);

  // Peers are ranks of the group. Messages without bytes are not sent.
  void send(int peer, const Bytes& bytes);
  void receive(int peer, const Bytes& bytes);
  void keep(const Bytes& source, const Bytes& target);  // moves bytes that this rank sends to itself
  // Memory of messages, made here or lent; it stays until no message can touch it any more.
  Tensor keep(Tensor scratch) { return kept_.emplace_back(std::move(scratch)); }
  // Waits for all messages so far, and compares headers; on a device, the lane does so, and headers are deferred.
  void finish();

 private:
  static void run_in_lane(RankGroup& group, const Call& call, const std::function<void(Collective&)>& body);
  Collective(RankGroup& group, const Call& call);
  void begin(const Call& call);

  RankGroup& group_;
  Transport& transport_;
  Header header_;
  Purpose purpose_;
  Backend* device_;
  uint64_t tag_;
  std::vector<Tensor> kept_;
  std::vector<DeviceMessage> messages_;
  Headers headers_;
};

}  // namespace mantissa
