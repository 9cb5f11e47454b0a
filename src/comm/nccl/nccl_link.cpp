// Calls of NCCL do not block, except for those that end a communicator: waits poll the state of the communicator, and between two polls
// look at the other ranks. A lock keeps communicators alive while a thread uses them; no thread waits while it holds the lock.
#include "comm/nccl_link.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "backend/gpus.h"
#include "base/hash.h"
#include "comm/nccl/calls.h"
#include "comm/progress.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

constexpr int kOldestMinor = 22;  // earlier ones do not abort communicators as a group

bool is_error(ncclResult_t result) { return result != ncclSuccess && result != ncclInProgress; }

// While a communicator is made, an error is this host's unless a peer reported it. Later a connection ends because its other side has.
ExitCode code_of(ncclResult_t error, bool connected) {
  if (error == ncclRemoteError || (connected && error == ncclSystemError)) return ExitCode::peer_lost;
  const bool ours = error == ncclInternalError || error == ncclInvalidArgument || (connected && error == ncclInvalidUsage);
  return ours ? ExitCode::internal : ExitCode::environment;
}

// The communicators of one maker, and so of a process. They are given up together: to abort one waits for the kernels of the GPU, and one
// of another communicator may wait for the lost peer (NVIDIA/nccl#1013).
struct Communicators {
  explicit Communicators(const NcclCalls& library) : calls(library) {}

  const NcclCalls calls;
  std::mutex mutex;  // guards the following, and calls for communicators but those that end them
  bool given_up = false;
  std::vector<ncclComm_t> open;
  std::mutex ending;  // makes a second give_up() return only after the first has aborted all

  void give_up() noexcept {
    const std::lock_guard alone(ending);
    std::vector<ncclComm_t> aborted;
    {
      const std::lock_guard lock(mutex);
      given_up = true;
      aborted.swap(open);
    }
    if (aborted.empty()) return;
    calls.GroupStart();
    for (ncclComm_t each : aborted) calls.CommAbort(each);
    calls.GroupEnd();
  }
};

class NcclLink final : public DeviceLink {
 public:
  NcclLink(std::shared_ptr<Communicators> all, LinkRanks group, const NcclOptions& options)
      : all_(std::move(all)), calls_(all_->calls), group_(std::move(group)), close_timeout_s_(options.close_timeout_s) {}
  ~NcclLink() override { close(); }
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  // Returns when all ranks of the group have called it and a byte of every peer is here: connections and their memory are made by the first
  // message, and steps are not to wait for that.
  void connect(const ncclUniqueId& id, double timeout_s) {
    const Limit limit = limit_of(timeout_s, text("has not connected ", group_.ranks.size(), " ranks in the ", timeout_s,
                                                 " s of parallel.init_timeout_s; NCCL_DEBUG=INFO shows what it waits for"));
    CudaScratch bytes(2 * std::ssize(group_.ranks));  // stays until nobody writes it
    try {
      join(id);
      wait(limit);
      // The values of the bytes do not matter: they make connections. Two bytes of the memory belong to each rank.
      const auto byte = [&](int index) { return Bytes(std::span(bytes.memory() + index, 1)); };
      std::vector<DeviceMessage> messages;
      for (int peer = 0; peer < static_cast<int>(group_.ranks.size()); ++peer) {
        if (peer == group_.rank) continue;
        messages.push_back({.peer = peer, .receives = true, .bytes = byte(2 * peer)});
        messages.push_back({.peer = peer, .receives = false, .bytes = byte(2 * peer + 1)});
      }
      ask_for(messages, bytes.stream());
      wait_until(limit, [&] { return settled() && bytes.finished(); });
    } catch (...) {
      give_up();
      throw;
    }
    connected_ = true;
  }

  void exchange(std::span<const DeviceMessage> messages) override {
    if (messages.empty()) return;
    ask_for(messages, cuda_stream(*messages.front().bytes.device));
    wait({});  // until then the stream may be without them
  }
  void check() override {
    const std::lock_guard lock(all_->mutex);
    if (!all_->given_up) refuse(state());
  }
  void give_up() noexcept override { all_->give_up(); }

 private:
  // End of a wait: a time of monotonic_now(), and a text that says what has not happened until then.
  struct Limit {
    double time = std::numeric_limits<double>::infinity();
    std::string text{};
  };
  static Limit limit_of(double seconds, std::string text) { return {.time = monotonic_now() + seconds, .text = std::move(text)}; }

  std::string who() const { return text("rank ", group_.ranks[static_cast<size_t>(group_.rank)], ": NCCL "); }

  void join(const ncclUniqueId& id) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const std::lock_guard lock(all_->mutex);
    require_open();
    all_->open.reserve(all_->open.size() + 1);
    const ncclResult_t result = calls_.CommInitRankConfig(&communicator_, static_cast<int>(group_.ranks.size()), id, group_.rank, &config);
    if (communicator_) all_->open.push_back(communicator_);
    refuse(result);
  }
  void ask_for(std::span<const DeviceMessage> messages, void* handle) {
    const auto stream = static_cast<cudaStream_t>(handle);
    const std::lock_guard lock(all_->mutex);
    require_open();
    ncclResult_t error = calls_.GroupStart();
    for (const DeviceMessage& m : messages) {
      const auto size = static_cast<size_t>(m.bytes.size);
      const ncclResult_t result = m.receives ? calls_.Recv(m.bytes.data, size, ncclUint8, m.peer, communicator_, stream)
                                             : calls_.Send(m.bytes.data, size, ncclUint8, m.peer, communicator_, stream);
      if (!is_error(error)) error = result;
    }
    const ncclResult_t end = calls_.GroupEnd();  // also after an error: the group is this thread's
    refuse(is_error(error) ? error : end);
  }

  // Waits until NCCL has begun what it was asked for: a moment, but where it connects ranks.
  void wait(const Limit& limit) {
    wait_until(limit, [this] { return settled(); });
  }
  template <class Done>
  void wait_until(const Limit& limit, Done done) {
    constexpr double kSpin = 200e-6;
    const double began = monotonic_now();
    while (!done()) {
      group_.look();
      const double now = monotonic_now();
      require(now < limit.time, ExitCode::peer_lost, who(), limit.text);
      if (now - began > kSpin) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  bool settled() {
    const std::lock_guard lock(all_->mutex);
    require_open();
    const ncclResult_t found = state();
    refuse(found);
    return found == ncclSuccess;
  }
  // The rest is called under the lock.
  ncclResult_t state() {
    ncclResult_t found = ncclSuccess;
    const ncclResult_t result = calls_.CommGetAsyncError(communicator_, &found);
    return is_error(result) ? result : found;
  }
  void refuse(ncclResult_t result) {
    if (!is_error(result)) return;
    const char* const latest = calls_.GetLastError(communicator_);
    const std::string more = latest && *latest ? text(": ", latest) : "";
    fail(code_of(result, connected_), who(), connected_ ? "failed: " : "cannot connect: ", calls_.GetErrorString(result), more);
  }
  void require_open() const { require(!all_->given_up, ExitCode::peer_lost, who(), "was aborted"); }

  // Waits for messages that have left a lane but may still be on their way: until all ranks have come here. After an error nobody comes.
  void close() noexcept {
    {
      const std::lock_guard lock(all_->mutex);
      if (all_->given_up) return;
    }
    if (std::uncaught_exceptions() > unwinding_) return give_up();
    try {
      const Limit limit = limit_of(close_timeout_s_, text("has not ended its messages in ", close_timeout_s_, " s"));
      wait(limit);
      {
        const std::lock_guard lock(all_->mutex);
        require_open();
        refuse(calls_.CommFinalize(communicator_));
      }
      wait(limit);
      {
        const std::lock_guard lock(all_->mutex);
        require_open();
        std::erase(all_->open, communicator_);
      }
      calls_.CommDestroy(communicator_);
    } catch (const std::exception& error) {
      log_warning(who(), "is aborted, not closed: ", error.what());
      give_up();
    }
  }
  const std::shared_ptr<Communicators> all_;
  const NcclCalls& calls_;
  const LinkRanks group_;
  const double close_timeout_s_;
  const int unwinding_ = std::uncaught_exceptions();
  ncclComm_t communicator_ = nullptr;  // one of all that are open, until it is closed or they are given up
  bool connected_ = false;
};

// The library, where it is one that can be used; text: its version and its file, or why not.
NcclLibrary usable_library() {
  NcclLibrary library = load_nccl();
  if (!library.calls) return library;
  int version = 0;
  library.calls->GetVersion(&version);
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const std::string number = text(major, '.', version / 100 % (version < 10000 ? 10 : 100), '.', version % 100);
  if (major == NCCL_MAJOR && version >= NCCL_MAJOR * 10000 + kOldestMinor * 100)
    return {.calls = library.calls, .text = text(number, " of ", library.text)};
  return {.calls = std::nullopt,
          .text = text(library.text, " is version ", number, ", but ", NCCL_MAJOR, '.', kOldestMinor, " or a later ", NCCL_MAJOR,
                       ".x is needed")};
}

ncclUniqueId id_of_group(const NcclCalls& calls, const NcclOptions& options, const LinkRanks& group) {
  ncclUniqueId id{};
  std::string bytes;
  if (group.rank == 0) {
    const ncclResult_t result = calls.GetUniqueId(&id);
    require(!is_error(result), ExitCode::environment, "NCCL cannot make an id: ", calls.GetErrorString(result), ": ",
            calls.GetLastError(nullptr));
    bytes.assign(std::begin(id.internal), std::end(id.internal));
  }
  bytes = options.share_id(text("NCCL ", Hash64{group.hash}), bytes);
  require(bytes.size() == sizeof id.internal, "an id of NCCL must have ", sizeof id.internal, " bytes, got ", bytes.size());
  std::ranges::copy(bytes, std::begin(id.internal));
  return id;
}

}  // namespace

Nccl find_nccl() {
  const NcclLibrary library = usable_library();
  return {.usable = library.calls.has_value(), .text = library.text};
}

MakeDeviceLink nccl_links(NcclOptions options) {
  const NcclLibrary library = usable_library();
  require(library.calls.has_value(), ExitCode::environment, "NCCL cannot be used: ", library.text);
  const auto all = std::make_shared<Communicators>(*library.calls);
  return [all, options = std::move(options)](const LinkRanks& group) {
    auto link = std::make_unique<NcclLink>(all, group, options);
    link->connect(id_of_group(all->calls, options, group), options.init_timeout_s);
    return link;
  };
}

}  // namespace mantissa
