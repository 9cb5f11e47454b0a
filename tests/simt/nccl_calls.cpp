// NCCL without GPUs: ranks are threads, and a lane copies what it receives from the memory of the sender. Calls do not block, and what they
// begin is under way until their communicator was asked a few times; an abort alone waits for all kernels of its process, a process being
// the thread that made its communicators. What the real library leaves undefined is an error of a communicator or, where that is gone, of
// the process: calls outside of a group, groups of several streams, messages whose sizes differ, an id that was not made.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "comm/nccl/calls.h"
#include "gpu/runtime.h"
#include "mantissa/base/text.h"
#include "simt/thread_nccl.h"

namespace {

// A message that a lane has come to.
struct Offer {
  const std::byte* data;
  size_t size;
  bool taken = false;
};
struct Operation {
  std::byte* data;
  size_t size;
  int peer;
  bool receives;
};
// The communicators of one id.
struct Clique {
  int ranks, joined = 0, finalized = 0;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Offer>>> offers{};  // by sender and receiver
  std::set<std::pair<int, int>> connected{};
};

}  // namespace

struct ncclComm {
  std::shared_ptr<Clique> clique;
  int rank;
  ncclResult_t error = ncclSuccess;
  std::string message{};
  int polls = 2;  // until what was begun is done
  std::vector<Operation> begun{};
  mantissa::gpu::Stream* stream = nullptr;
  std::thread::id process = std::this_thread::get_id();
  int moving = 0;  // groups that its lanes have not moved
  bool finalized = false, aborted = false;
};

namespace mantissa::simt {
namespace {

constexpr int kPolls = 2;

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  bool found = false;
  NcclSettings settings;
  NcclCounts counts;
  int next_id = 1;
  std::map<std::string, std::shared_ptr<Clique>> cliques;  // by id; null: nobody has joined
  std::map<ncclComm_t, std::shared_ptr<ncclComm>> communicators;
  std::map<std::thread::id, int> kernels;  // kernels that lanes of a process have not moved
};
State& state() {
  static State one;
  return one;
}

struct Group {
  bool open = false;
  ncclComm_t communicator = nullptr;
  cudaStream_t stream = nullptr;
  std::vector<Operation> operations{};
  std::vector<ncclComm_t> aborted{};
};
thread_local Group group;

ncclResult_t result_of(NcclResult result) { return static_cast<ncclResult_t>(result); }

std::shared_ptr<ncclComm> alive(ncclComm_t communicator) {
  const auto found = state().communicators.find(communicator);
  require(found != state().communicators.end(), "NCCL: a communicator that is gone");
  return found->second;
}
ncclResult_t complain(ncclComm& communicator, const std::string& message) {
  if (communicator.error == ncclSuccess) communicator.error = ncclInvalidUsage, communicator.message = message;
  return ncclInvalidUsage;
}

void receive(ncclComm& self, const Operation& operation, std::unique_lock<std::mutex>& lock) {
  auto& queue = self.clique->offers[{operation.peer, self.rank}];
  state().changed.wait(lock, [&] { return self.aborted || !queue.empty(); });
  if (self.aborted) return;
  Offer& offer = *queue.front();
  if (offer.size != operation.size) complain(self, text(offer.size, " bytes are sent where ", operation.size, " are received"));
  std::memcpy(operation.data, offer.data, std::min(offer.size, operation.size));
  offer.taken = true;
  queue.pop_front();
  state().changed.notify_all();
}

// Runs in a lane.
void move(ncclComm& self, const std::vector<Operation>& operations) {
  std::unique_lock lock(state().mutex);
  std::vector<std::shared_ptr<Offer>> sent;
  state().changed.wait(lock, [&] { return self.aborted || !state().settings.mute; });
  for (const Operation& each : operations) {
    if (each.receives) continue;
    if (self.clique->connected.emplace(self.rank, each.peer).second) ++state().counts.connections;
    sent.push_back(std::make_shared<Offer>(Offer{.data = each.data, .size = each.size}));
    self.clique->offers[{self.rank, each.peer}].push_back(sent.back());
  }
  state().changed.notify_all();
  for (const Operation& each : operations) {
    if (each.receives) receive(self, each, lock);
  }
  state().changed.wait(lock, [&] { return self.aborted || std::ranges::all_of(sent, &Offer::taken); });
  for (auto& [pair, queue] : self.clique->offers) {
    if (pair.first == self.rank) std::erase_if(queue, [&](const auto& offer) { return std::ranges::find(sent, offer) != sent.end(); });
  }
  --self.moving;
  --state().kernels[self.process];
  state().changed.notify_all();
}

// Returns whether what was begun is done, and hands messages to their lane when it is.
bool settled(const std::shared_ptr<ncclComm>& self) {
  const bool joined = self->clique->joined == self->clique->ranks;
  if (!joined || (!self->begun.empty() && state().settings.stuck) || --self->polls > 0) return false;
  if (!self->begun.empty()) {
    ++self->moving;
    ++state().kernels[self->process];
    gpu::submit(*self->stream, [self, operations = std::exchange(self->begun, {})] { move(*self, operations); });
  }
  return !self->finalized || (self->moving == 0 && self->clique->finalized == self->clique->ranks);
}

ncclResult_t get_version(int* version) {
  *version = state().settings.version;
  return ncclSuccess;
}
ncclResult_t get_id(ncclUniqueId* id) {
  const std::lock_guard lock(state().mutex);
  std::ranges::fill(id->internal, 'x');
  id->internal[0] = '\0';
  std::memcpy(id->internal + 1, &state().next_id, sizeof(int));
  ++state().next_id;
  state().cliques[std::string(id->internal, sizeof id->internal)] = nullptr;
  return ncclSuccess;
}
ncclResult_t join(ncclComm_t* out, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  const std::lock_guard lock(state().mutex);
  if (state().settings.refusal != NcclResult::success) return result_of(state().settings.refusal);
  const auto found = state().cliques.find(std::string(id.internal, sizeof id.internal));
  if (config->magic != 0xcafebeef || config->blocking != 0 || config->maxCTAs != NCCL_CONFIG_UNDEF_INT || rank < 0 || rank >= ranks ||
      found == state().cliques.end())
    return ncclInvalidArgument;
  if (!found->second) found->second = std::make_shared<Clique>(Clique{.ranks = ranks});
  if (found->second->ranks != ranks || ++found->second->joined > ranks) return ncclInvalidArgument;
  auto made = std::make_shared<ncclComm>(ncclComm{.clique = found->second, .rank = rank});
  *out = made.get();
  state().communicators[*out] = std::move(made);
  ++state().counts.made;
  return ncclInProgress;
}
ncclResult_t finalize(ncclComm_t communicator) {
  const std::lock_guard lock(state().mutex);
  const auto self = alive(communicator);
  if (!self->begun.empty() || self->finalized) return complain(*self, "finalized too early or twice");
  self->finalized = true;
  ++self->clique->finalized;
  self->polls = kPolls;
  return ncclInProgress;
}
void run_what_ends_wait_for() {
  std::function<void()> body;
  {
    const std::lock_guard lock(state().mutex);
    body = state().settings.while_ending;
  }
  if (body) body();
}
ncclResult_t destroy(ncclComm_t communicator) {
  run_what_ends_wait_for();
  const std::lock_guard lock(state().mutex);
  const auto self = alive(communicator);
  require(self->finalized && self->moving == 0 && self->clique->finalized == self->clique->ranks, "NCCL: destroyed too early");
  ++state().counts.destroyed;
  state().communicators.erase(communicator);
  return ncclSuccess;
}
ncclResult_t abort_all(const std::vector<ncclComm_t>& communicators) {
  run_what_ends_wait_for();
  std::unique_lock lock(state().mutex);
  const std::thread::id process = alive(communicators.front())->process;
  for (ncclComm_t each : communicators) {
    alive(each)->aborted = true;
    ++state().counts.aborted;
    state().communicators.erase(each);
  }
  state().changed.notify_all();
  const auto idle = [&] { return state().kernels[process] == 0; };
  if (!state().changed.wait_for(lock, test::kHang, idle)) ++state().counts.blocked;
  return ncclSuccess;
}
ncclResult_t abort_communicator(ncclComm_t communicator) {
  if (!group.open) return abort_all({communicator});
  group.aborted.push_back(communicator);
  return ncclSuccess;
}
ncclResult_t get_state(ncclComm_t communicator, ncclResult_t* out) {
  const std::lock_guard lock(state().mutex);
  const auto self = alive(communicator);
  const bool done = settled(self);
  *out = self->error != ncclSuccess ? self->error : done ? ncclSuccess : ncclInProgress;
  return ncclSuccess;
}

ncclResult_t group_start() {
  if (group.open) return ncclInvalidUsage;
  group = {.open = true};
  return ncclSuccess;
}
ncclResult_t add(void* data, size_t size, ncclDataType_t type, int peer, ncclComm_t communicator, cudaStream_t stream, bool receives) {
  const std::lock_guard lock(state().mutex);
  const auto self = alive(communicator);
  if (state().settings.refused_send != NcclResult::success && !receives) return result_of(state().settings.refused_send);
  if (!group.open) return complain(*self, "a message outside of a group");
  if (!group.operations.empty() && (group.stream != stream || group.communicator != communicator))
    return complain(*self, "a group of several streams or communicators");
  if (type != ncclUint8 || size == 0 || peer == self->rank || peer < 0 || peer >= self->clique->ranks)
    return complain(*self, text("a message of ", size, " elements of type ", static_cast<int>(type), " to rank ", peer));
  if (!self->begun.empty()) return complain(*self, "a group while another one has not begun");
  group.communicator = communicator, group.stream = stream;
  group.operations.push_back({.data = static_cast<std::byte*>(data), .size = size, .peer = peer, .receives = receives});
  return ncclSuccess;
}
ncclResult_t send(const void* data, size_t size, ncclDataType_t type, int peer, ncclComm_t communicator, cudaStream_t stream) {
  return add(const_cast<void*>(data), size, type, peer, communicator, stream, false);
}
ncclResult_t receive_later(void* data, size_t size, ncclDataType_t type, int peer, ncclComm_t communicator, cudaStream_t stream) {
  return add(data, size, type, peer, communicator, stream, true);
}
ncclResult_t group_end() {
  const Group ended = std::exchange(group, {});
  if (!ended.open) return ncclInvalidUsage;
  if (!ended.aborted.empty()) return abort_all(ended.aborted);
  if (ended.operations.empty()) return ncclSuccess;
  const std::lock_guard lock(state().mutex);
  const auto self = alive(ended.communicator);
  self->begun = ended.operations;
  self->stream = reinterpret_cast<gpu::Stream*>(ended.stream);
  self->polls = kPolls;
  ++state().counts.groups;
  return ncclInProgress;
}

// Words of the library.
const char* error_string(ncclResult_t result) {
  switch (result) {
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "unknown result code";
  }
}
const char* last_error(ncclComm_t communicator) {
  const std::lock_guard lock(state().mutex);
  return communicator ? alive(communicator)->message.c_str() : "";
}

}  // namespace

ThreadNccl::ThreadNccl(const NcclSettings& settings) {
  const std::lock_guard lock(state().mutex);
  require(!std::exchange(state().found, true), "a second NCCL over threads");
  state().settings = settings;
  state().counts = {};
  state().kernels.clear();
}
ThreadNccl::~ThreadNccl() {
  const std::lock_guard lock(state().mutex);
  state().found = false;
  state().cliques.clear();
}

void ThreadNccl::change(const NcclSettings& settings) {
  const std::lock_guard lock(state().mutex);
  state().settings = settings;
  state().changed.notify_all();
}

void ThreadNccl::fail(int rank, NcclResult result, const std::string& message) {
  const std::lock_guard lock(state().mutex);
  for (const auto& [handle, communicator] : state().communicators) {
    if (communicator->rank == rank) communicator->error = result_of(result), communicator->message = message;
  }
}

NcclCounts ThreadNccl::counts() const {
  const std::lock_guard lock(state().mutex);
  return state().counts;
}

}  // namespace mantissa::simt

namespace mantissa {

NcclLibrary load_nccl() {
  if (!simt::state().found) return {.calls = std::nullopt, .text = "the executor has it for ranks that are threads of a test"};
  return {.calls = NcclCalls{.GetVersion = simt::get_version,
                             .GetUniqueId = simt::get_id,
                             .CommInitRankConfig = simt::join,
                             .CommFinalize = simt::finalize,
                             .CommDestroy = simt::destroy,
                             .CommAbort = simt::abort_communicator,
                             .CommGetAsyncError = simt::get_state,
                             .GroupStart = simt::group_start,
                             .GroupEnd = simt::group_end,
                             .Send = simt::send,
                             .Recv = simt::receive_later,
                             .GetErrorString = simt::error_string,
                             .GetLastError = simt::last_error},
          .text = "NCCL over threads"};
}

}  // namespace mantissa
