// Calls of NCCL do not block: what a call has begun is under way until its communicator says otherwise, which is asked for between looks at
// the other ranks. A lock keeps the communicator from going while another thread uses it; nobody waits under it.
#include "mantissa/comm/nccl_link.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/nccl/calls.h"
#include "mantissa/backend/cuda_stream.h"
#include "mantissa/base/hash.h"
#include "mantissa/base/text.h"
#include "mantissa/comm/progress.h"

namespace mantissa {
namespace {

constexpr double kCloseTimeout = 60;  // seconds: then the messages of others are lost

bool is_error(ncclResult_t result) { return result != ncclSuccess && result != ncclInProgress; }

// While a communicator is made, what fails is this host, but for what a peer reports. Later a connection ends because its other side has.
ExitCode code_of(ncclResult_t error, bool connected) {
  if (error == ncclRemoteError || (connected && error == ncclSystemError)) return ExitCode::peer_lost;
  const bool ours = error == ncclInternalError || error == ncclInvalidArgument || (connected && error == ncclInvalidUsage);
  return ours ? ExitCode::internal : ExitCode::environment;
}

class NcclLink final : public DeviceLink {
 public:
  NcclLink(const NcclCalls& calls, LinkRanks of) : calls_(calls), of_(std::move(of)) {}
  ~NcclLink() override { close(); }
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  // Returns when all ranks of the group have called it.
  void connect(const ncclUniqueId& id, double timeout_s) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    {
      const std::lock_guard lock(mutex_);
      refuse(calls_.CommInitRankConfig(&communicator_, static_cast<int>(of_.ranks.size()), id, of_.rank, &config));
    }
    wait(timeout_s);
    connected_ = true;
  }

  void exchange(std::span<const DeviceMessage> messages) override {
    if (messages.empty()) return;
    ask_for(messages);
    wait();  // until then the stream may be without them
  }
  void check() override {
    const std::lock_guard lock(mutex_);
    if (communicator_) refuse(state());
  }
  void give_up() noexcept override {
    const std::lock_guard lock(mutex_);
    if (communicator_) calls_.CommAbort(std::exchange(communicator_, nullptr));
  }

 private:
  std::string who() const { return text("rank ", of_.ranks[static_cast<size_t>(of_.rank)], ": NCCL "); }

  void ask_for(std::span<const DeviceMessage> messages) {
    auto* const stream = static_cast<cudaStream_t>(cuda_stream(*messages.front().bytes.device));
    const std::lock_guard lock(mutex_);
    require_open();
    ncclResult_t error = calls_.GroupStart();
    for (const auto& [peer, receives, bytes] : messages) {
      const auto size = static_cast<size_t>(bytes.size);
      const ncclResult_t result = receives ? calls_.Recv(bytes.data, size, ncclUint8, peer, communicator_, stream)
                                           : calls_.Send(bytes.data, size, ncclUint8, peer, communicator_, stream);
      if (!is_error(error)) error = result;
    }
    const ncclResult_t end = calls_.GroupEnd();  // also after an error: the group is this thread's
    refuse(is_error(error) ? error : end);
  }

  // Waits until NCCL has begun what it was asked for: a moment, but where it connects ranks.
  void wait(double timeout_s = std::numeric_limits<double>::infinity()) {
    constexpr double kSpin = 200e-6;
    const double began = monotonic_now();
    while (!settled()) {
      of_.look();
      const double waited = monotonic_now() - began;
      require(waited < timeout_s, ExitCode::peer_lost, who(), "has not connected ", of_.ranks.size(), " ranks in the ", timeout_s,
              " s of parallel.init_timeout_s; NCCL_DEBUG=INFO shows what it waits for");
      if (waited > kSpin) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  bool settled() {
    const std::lock_guard lock(mutex_);
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
    fail(code_of(result, connected_), who(), connected_ ? "fails: " : "makes no communicator: ", calls_.GetErrorString(result), more);
  }
  void require_open() const { require(communicator_ != nullptr, ExitCode::peer_lost, who(), "was given up"); }

  // Messages that have left a lane may still be on their way, which is over when all ranks have come here; behind an error nobody does.
  void close() noexcept {
    try {
      if (std::uncaught_exceptions() > unwinding_ || !communicator_ || !settled()) return give_up();
      {
        const std::lock_guard lock(mutex_);
        refuse(calls_.CommFinalize(communicator_));
      }
      wait(kCloseTimeout);
      const std::lock_guard lock(mutex_);
      calls_.CommDestroy(std::exchange(communicator_, nullptr));
    } catch (...) {
      give_up();
    }
  }

  const NcclCalls calls_;
  const LinkRanks of_;
  const int unwinding_ = std::uncaught_exceptions();
  std::mutex mutex_;                   // of the communicator
  ncclComm_t communicator_ = nullptr;  // null: given up
  bool connected_ = false;
};

// The library, where it is one that can be used; text: its version, or why not.
NcclLibrary usable_library() {
  NcclLibrary library = load_nccl();
  if (!library.calls) return library;
  int version = 0;
  library.calls->GetVersion(&version);
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const std::string number = text(major, '.', version / 100 % (version < 10000 ? 10 : 100), '.', version % 100);
  if (major == NCCL_MAJOR) return {.calls = library.calls, .text = number};
  return {.calls = std::nullopt, .text = text(library.text, " is version ", number, ", and this build is for ", NCCL_MAJOR, ".x")};
}

ncclUniqueId id_of_group(const NcclCalls& calls, const NcclOptions& options, const LinkRanks& of) {
  ncclUniqueId id{};
  std::string bytes;
  if (of.rank == 0) {
    const ncclResult_t result = calls.GetUniqueId(&id);
    require(!is_error(result), ExitCode::environment, "NCCL makes no id: ", calls.GetErrorString(result), ": ",
            calls.GetLastError(nullptr));
    bytes.assign(std::begin(id.internal), std::end(id.internal));
  }
  bytes = options.share_id(text("NCCL ", Hash64{of.group}), bytes);
  require(bytes.size() == sizeof id.internal, "an id of NCCL with ", bytes.size(), " bytes");
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
  return [calls = *library.calls, options = std::move(options)](const LinkRanks& of) {
    use_default_gpu();
    auto link = std::make_unique<NcclLink>(calls, of);
    link->connect(id_of_group(calls, options, of), options.init_timeout_s);
    return link;
  };
}

}  // namespace mantissa
