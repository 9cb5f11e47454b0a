// Runs one call of a collective: checks that it may run, sends its messages, and compares it with the calls of its neighbors.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>

#include "mantissa/comm/communicator.h"

namespace mantissa {

enum class Operation : uint8_t { all_gather, all_to_all, sum, sum_scatter, broadcast };

// Tags have the top bit (of 48) for headers, else 23 bits of the group and 24 of the sequence. Calls of a process run one after the other
// and messages of a pair with equal tags stay in order, so a tag may be reused.
inline constexpr uint64_t kHeaderTag = uint64_t{1} << 47;

// What a rank announces about its call. It is equal on all ranks, except for the count of an all_to_all, which is that of the pair.
struct Header {
  uint64_t group = 0;
  int64_t count = 0;    // elements
  uint64_t counts = 0;  // hash of the counts by rank
  uint32_t sequence = 0;
  uint16_t root = 0;
  Operation operation{};
  Dtype dtype = Dtype::u8;  // u8: bytes

  bool operator==(const Header&) const = default;
};
static_assert(sizeof(Header) == kHeaderBytes);

std::string describe(const Header& header);  // "sum of 64 fp32 (call 17 of group 0123456789abcdef)"

// State that all groups of a process share.
struct Session {
  std::unique_ptr<Transport> transport;
  std::array<std::atomic<int64_t>, 5> sent{};  // by Purpose
  std::function<void()> before_call;           // waits for the work of the process's CommQueue, if there is one
  std::atomic<int64_t> calls{0};
  std::atomic<bool> busy{false};
  std::exception_ptr failure;  // of the first collective that failed; belongs to whoever is busy
  std::mutex mutex;            // of latest
  std::deque<Header> latest;
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

struct RankGroup {
  std::shared_ptr<Session> session;
  std::vector<int> ranks;  // in the world, by rank within the group
  int rank = 0;            // within the group
  uint64_t hash = 0;
  uint32_t sequence = 0;  // calls so far; belongs to whoever is busy

  int size() const { return static_cast<int>(ranks.size()); }
};

class Collective {
 public:
  // With counts of pairs, every peer gets its own count and compares it; else only the right neighbor gets it.
  struct Call {
    Header header;
    Purpose purpose;
    std::span<const int64_t> to{}, from{};
  };

  // Runs body and finish(). Throws Error(internal) if another collective of this process is under way, and the error of an earlier one that
  // failed.
  static void run(RankGroup& group, const Call& call, const std::function<void(Collective&)>& body);

  // Peers are ranks of the group. Messages without bytes are not sent.
  void send(int to, std::span<const std::byte> bytes);
  void receive(int from, std::span<std::byte> bytes);
  // Memory of messages, made here or lent; it stays until no message can touch it any more.
  Tensor keep(Tensor scratch) { return kept_.emplace_back(std::move(scratch)); }
  // Waits for all messages so far. Throws Error(internal) that names both ranks if a neighbor made another call.
  void finish();

 private:
  Collective(RankGroup& group, const Call& call);
  ~Collective();  // cancels what an exception left under way, while its memory is there
  void begin(const Call& call);
  void announce(int to, int64_t count);
  void expect(int from, int64_t count);

  struct Expected {
    int from;
    int64_t count;
    Header header{};
    Transport::Request request = 0;
  };

  RankGroup& group_;
  Transport& transport_;
  Header header_;
  Purpose purpose_;
  uint64_t tag_;
  bool over_ = false;
  std::vector<Tensor> kept_;
  std::vector<Header> announced_;
  std::vector<Expected> expected_;
};

}  // namespace mantissa
