// Uses UCX (ucp, version 1.13) with one worker, driven by the thread that waits. Endpoints have no error handling, which would exclude
// shared memory; the interrupt of every wait detects a lost peer.
#include <dlfcn.h>
#include <poll.h>
#include <sys/statvfs.h>
#include <ucp/api/ucp.h>
#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <thread>

#include "mantissa/base/error.h"
#include "mantissa/base/log.h"
#include "mantissa/comm/transport.h"

namespace mantissa {
namespace {

constexpr int kSenderShift = 48;                     // bits of a UCX tag: the sender above, the tag of the message below
constexpr int64_t kSharedMemory = int64_t{5} << 20;  // a worker takes 4.3 MB of /dev/shm
constexpr const char* kSharedMemoryHint = " (a container: --shm-size; without shared memory of POSIX: UCX_TLS=sysv,tcp,self)";

constexpr std::chrono::seconds kMoment{2};

ucs_log_func_rc_t write_ucx_log(const char*, unsigned, const char*, ucs_log_level_t level, const ucs_log_component_config_t*,
                                const char* format, va_list arguments) {
  std::array<char, 512> line{};
  std::vsnprintf(line.data(), line.size(), format, arguments);
  write_log(level <= UCS_LOG_LEVEL_WARN ? LogLevel::warning : LogLevel::debug, text("UCX: ", line.data()));
  return UCS_LOG_FUNC_RC_STOP;
}

void check(ucs_status_t status, const char* what, const char* hint = "") {
  require(status == UCS_OK, ExitCode::environment, "UCX: ", what, " failed: ", ucs_status_string(status), hint);
}

// UCX creates a worker without a check for space in /dev/shm, and crashes if there is none.
void require_shared_memory() {
  const char* const transports = std::getenv("UCX_TLS");
  const std::string chosen = transports != nullptr ? transports : "all";
  bool uses = chosen.starts_with('^');
  for (const char* name : {"all", "posix", "sm", "shm"})
    uses = uses || ("," + chosen + ",").find(text(",", name, ",")) != std::string::npos;
  struct statvfs room {};
  if (!uses || ::statvfs("/dev/shm", &room) != 0) return;
  const int64_t free = static_cast<int64_t>(room.f_bavail) * static_cast<int64_t>(room.f_frsize);
  require(free >= kSharedMemory, ExitCode::environment, "/dev/shm has ", free >> 10, " KiB free; every rank needs ", kSharedMemory >> 10,
          " KiB", kSharedMemoryHint);
}

ucp_context_h make_context() {
  static const bool logging = (ucs_log_push_handler(write_ucx_log), true);
  require(logging, "UCX did not take a log handler");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
  ucp_config_t* config = nullptr;
  check(ucp_config_read(nullptr, nullptr, &config), "reading UCX_* variables");
  ucp_context_h context = nullptr;
  const ucs_status_t status = ucp_init(&params, config, &context);
  ucp_config_release(config);
  check(status, "start", " (see UCX_TLS and UCX_NET_DEVICES)");
  return context;
}

ucp_worker_h make_worker(ucp_context_h context) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucp_worker_h worker = nullptr;
  check(ucp_worker_create(context, &params, &worker), "making a worker", kSharedMemoryHint);
  return worker;
}

class UcxTransport final : public Transport {
 public:
  UcxTransport(int rank, const AddressExchange& exchange, Interrupt interrupt)
      : Transport(std::move(interrupt)),
        rank_(rank),
        context_(make_context(), ucp_cleanup),
        worker_(make_worker(context_.get()), ucp_worker_destroy) {
    check(ucp_worker_get_efd(worker_.get(), &wakeup_), "sleeping");
    ucp_address_t* found = nullptr;
    size_t length = 0;
    check(ucp_worker_get_address(worker_.get(), &found, &length), "finding the address of this rank");
    const std::string address(reinterpret_cast<const char*>(found), length);
    ucp_worker_release_address(worker_.get(), found);
    addresses_ = exchange(address);
    const bool listed = rank_ >= 0 && rank_ < size() && addresses_[static_cast<size_t>(rank_)] == address;
    require(listed && size() <= 1 << 16, "rank ", rank_, ": its address is not at its place in the ", size(), " gathered addresses");
    endpoints_.resize(addresses_.size());
  }

  // A worker cannot be destroyed while messages are under way: the process is about to exit, which frees everything.
  //
  // A send may be done although its bytes lie in a buffer of ours: over TCP, when the kernel takes no more. Peers may have left, so the
  // wait has an end. With several network devices even what the kernel has may be lost: the receiver's UCX sees that an idle connection
  // ended and writes on the busy one, and the kernel of a process that is gone answers with a reset. Ranks leave after a barrier of a few
  // bytes.
  ~UcxTransport() override {
    if (canceled_) {
      worker_.release();
      context_.release();
      return;
    }
    const ucp_request_param_t none{};
    void* const request = ucp_worker_flush_nbx(worker_.get(), &none);
    if (!UCS_PTR_IS_PTR(request)) return;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (ucp_request_check_status(request) == UCS_INPROGRESS && std::chrono::steady_clock::now() < end)
      ucp_worker_progress(worker_.get());
    ucp_request_free(request);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(addresses_.size()); }

  Request send(int peer, uint64_t tag, std::span<const std::byte> bytes) override {
    const ucp_request_param_t none{};
    void* const request = ucp_tag_send_nbx(endpoint(peer), bytes.data(), bytes.size(), tag_of(rank_, tag), &none);
    return begin({.request = request, .peer = peer, .bytes = bytes.size()});
  }

  Request receive(int peer, uint64_t tag, std::span<std::byte> bytes) override {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL;  // only a request tells the length
    void* const request = ucp_tag_recv_nbx(worker_.get(), bytes.data(), bytes.size(), tag_of(peer, tag), ~uint64_t{0}, &param);
    return begin({.request = request, .receives = true, .peer = peer, .bytes = bytes.size()});
  }

  void cancel() noexcept override {
    for (Began& r : requests_) {
      if (r.request == nullptr) continue;
      ucp_request_cancel(worker_.get(), r.request);
      ucp_request_free(r.request);
    }
    requests_.clear();
    canceled_ = true;
  }

 protected:
  bool done(Request request) override {
    Began& r = requests_.at(request);
    if (r.request == nullptr) return true;
    ucp_worker_progress(worker_.get());
    ucp_tag_recv_info_t info{};
    const ucs_status_t status = r.receives ? ucp_tag_recv_request_test(r.request, &info) : ucp_request_check_status(r.request);
    if (status == UCS_INPROGRESS) return false;
    ucp_request_free(r.request);
    r.request = nullptr;
    const bool fits = status != UCS_ERR_MESSAGE_TRUNCATED && (status != UCS_OK || !r.receives || info.length == r.bytes);
    require(fits, "rank ", r.peer, " did not send the ", r.bytes, " bytes that rank ", rank_, " expected");
    require(status == UCS_OK, ExitCode::peer_lost, "rank ", rank_, ", ", r.receives ? "receiving from" : "sending to", " rank ", r.peer,
            ": ", ucs_status_string(status));
    return true;
  }

  void sleep() override {
    if (ucp_worker_arm(worker_.get()) != UCS_OK) return;  // something has happened already
    pollfd wakeup{.fd = wakeup_, .events = POLLIN, .revents = 0};
    ::poll(&wakeup, 1, kNapMilliseconds);
  }

  size_t begun() const override { return requests_.size(); }
  void forget() override { requests_.clear(); }

 private:
  struct Began {
    void* request;  // null: done
    bool receives = false;
    int peer;
    size_t bytes;
  };

  static uint64_t tag_of(int sender, uint64_t tag) { return static_cast<uint64_t>(sender) << kSenderShift | tag; }

  Request begin(const Began& r) {
    const bool failed = UCS_PTR_IS_ERR(r.request);
    require(!failed, ExitCode::peer_lost, "rank ", rank_, ", starting a message with rank ", r.peer, ": ",
            failed ? ucs_status_string(UCS_PTR_STATUS(r.request)) : "");
    requests_.push_back(r);
    return requests_.size() - 1;
  }

  ucp_ep_h endpoint(int peer) {
    ucp_ep_h& found = endpoints_.at(static_cast<size_t>(peer));
    if (found != nullptr) return found;
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params.address = reinterpret_cast<const ucp_address_t*>(addresses_[static_cast<size_t>(peer)].data());
    params.err_mode = UCP_ERR_HANDLING_MODE_NONE;
    const ucs_status_t status = ucp_ep_create(worker_.get(), &params, &found);
    if (status != UCS_OK) {  // a dead peer cannot be reached, either, and is known to have died a moment later
      const auto end = std::chrono::steady_clock::now() + kMoment;
      for (heed_interrupt(); std::chrono::steady_clock::now() < end; heed_interrupt())
        std::this_thread::sleep_for(std::chrono::milliseconds(kNapMilliseconds));
    }
    check(status, text("connecting to rank ", peer).c_str());
    return found;
  }

  int rank_;
  std::unique_ptr<ucp_context, void (*)(ucp_context_h)> context_;
  std::unique_ptr<ucp_worker, void (*)(ucp_worker_h)> worker_;
  int wakeup_ = -1;
  bool canceled_ = false;
  std::vector<std::string> addresses_;
  std::vector<ucp_ep_h> endpoints_;  // made when first sent to
  std::vector<Began> requests_;
};

}  // namespace

std::string ucx_text() {
  Dl_info where{};
  require(::dladdr(reinterpret_cast<void*>(&ucp_get_version_string), &where) != 0, "UCX is not a shared library");
  std::error_code error;  // no modules are no error
  std::set<std::string> modules;
  const std::filesystem::path file = std::filesystem::canonical(where.dli_fname, error);
  for (const auto& entry : std::filesystem::directory_iterator(file.parent_path() / "ucx", error)) {
    const std::string name = entry.path().filename().string();
    if (const size_t end = name.find(".so"); name.starts_with("libuc") && end != std::string::npos) modules.insert(name.substr(3, end - 3));
  }
  std::string out = text(ucp_get_version_string(), " of ", where.dli_fname, modules.empty() ? ", no modules" : ", modules");
  for (const std::string& module : modules) out += ' ' + module;
  return out;
}

std::unique_ptr<Transport> ucx_transport(int rank, const AddressExchange& exchange, Transport::Interrupt interrupt) {
  require_shared_memory();
  return std::make_unique<UcxTransport>(rank, exchange, std::move(interrupt));
}

void restore_hangup() {
  struct sigaction action {};
  ::sigaction(SIGHUP, nullptr, &action);
  if (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN) ucs_debug_disable_signal(SIGHUP);
}

}  // namespace mantissa
