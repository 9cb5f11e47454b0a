// One call of a collective: whether it may run, its messages, and the comparison with what its neighbours call.
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

// What a rank tells about its call: equal on all ranks, but for the count of an all_to_all, which is that of the pair.
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
static_assert(sizeof(Header) == 32);

std::string describe(const Header& header);  // "sum of 64 fp32 (call 17 of group 0123456789abcdef)"

// What all groups of a process share.
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

// Until the end of the block the time of this thread counts as communication.
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
  // With counts of pairs, every peer is told its own and compares it; else only the right neighbour is told.
  struct Call {
    Header header;
    Purpose purpose;
    std::span<const int64_t> to{}, from{};
  };

  // Runs body and finish(). Throws Error(internal) if another collective of this process is under way, and what an earlier one has failed
  // with.
  static void run(RankGroup& group, const Call& call, const std::function<void(Collective&)>& body);

  // Ranks of the group. Nothing is sent for no bytes.
  void send(int to, std::span<const std::byte> bytes);
  void receive(int from, std::span<std::byte> bytes);
  // Memory of messages, made here or lent: it stays until no message can touch it any more.
  Tensor keep(Tensor scratch) { return kept_.emplace_back(std::move(scratch)); }
  // All messages so far have arrived. Throws Error(internal) that names both ranks if a neighbour calls something else.
  void finish();

 private:
  Collective(RankGroup& group, const Call& call);
  ~Collective();  // cancels what an exception left under way, while its memory is there
  void begin(const Call& call);
  void tell(int to, int64_t count);
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
  std::vector<Header> told_;
  std::vector<Expected> expected_;
};

}  // namespace mantissa
