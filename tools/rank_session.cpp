#include "tools/rank_session.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>

#include "mantissa/backend/ceilings.h"
#include "mantissa/backend/cuda_stream.h"
#include "mantissa/backend/gpus.h"
#include "mantissa/base/bytes_text.h"
#include "mantissa/base/file.h"
#include "mantissa/base/hash.h"
#include "mantissa/base/host_name.h"
#include "mantissa/base/limits.h"
#include "mantissa/base/log.h"
#include "mantissa/base/parallel.h"
#include "mantissa/base/printable.h"
#include "mantissa/base/unblocked_output.h"
#include "mantissa/base/version.h"
#include "mantissa/comm/nccl_link.h"
#include "mantissa/config/open_device.h"
#include "mantissa/job/orphaned_segments.h"
#include "mantissa/json/json.h"
#include "tools/main_stack.h"

namespace mantissa::tools {
namespace {

constexpr size_t kReportedCalls = 4;
constexpr size_t kShownValueBytes = 200;
constexpr int64_t kMostExecutableBytes = int64_t{1} << 32;

// Returns every key and its value, a long one by its hash, and the hash of all. Hosts may have different numbers of cores.
std::vector<NamedHash> compared(RunConfig config) {
  config.training.threads = 0;
  std::vector<NamedHash> out;
  const Json values = parse_json(effective_config(config), "config");
  for (const auto& [key, value] : leaves_of(values)) {
    const std::string written = value->dump();
    out.push_back({.name = "config " + key, .value = written.size() > kShownValueBytes ? xxh64(written).text() : written});
  }
  out.push_back({.name = "config", .value = xxh64(effective_config(config)).text()});
  return out;
}

// Hashes the running program, not the file that now has its name.
std::string executable() { return xxh64(File::open_input("/proc/self/exe").content(kMostExecutableBytes)).text(); }

// Does not use std::cerr, which waits for a reader, and flushes std::cout first, where the main thread may be stuck.
void write_error(const std::string& lines) { UnblockedOutput(STDERR_FILENO).write(lines); }

void report(Store& store, const Communicator& world, const std::string& why) {
  const Progress& progress = store.progress();
  std::vector<std::string> calls = world.latest_calls();
  calls.erase(calls.begin(), calls.end() - static_cast<int64_t>(std::min(calls.size(), kReportedCalls)));
  const std::vector<std::string> kernels = world.latest_kernels();
  const std::string rank = text("rank ", world.rank());
  write_error(text(rank, ": ", printable(why, " "), "\n", rank, " is at step ", progress.step(), " (", progress.section(),
                   "); its latest collectives: ", calls.empty() ? "none" : joined(calls, ", "),
                   kernels.empty() ? "" : text("; the latest kernels of its device: ", joined(kernels, ", ")),
                   "; the stack of its main thread:\n"));
  if (!print_main_stack()) write_error(text(rank, ": the main thread does not say; it is stopped\n"));
}

// Runs when the main thread cannot.
[[noreturn]] void end_process(int rank, const Failure& failure) {
  if (failure.rank >= 0 && failure.rank != rank) report_cause(failure.rank);
  write_error(text("error: ", printable(failure.message, "\n  "), '\n'));
  ::_exit(static_cast<int>(failure.code));
}

// The kernel kills the child of a dead launcher, but not what a wrapper started: that would train on, unobserved, and hold the run folder.
void end_with_launcher() {
  if (!has_launcher()) return;
  const auto wait = [] {
    if (!outlive_launcher()) return;
    log_error("the launcher of this rank is gone");
    ::_exit(static_cast<int>(ExitCode::peer_lost));
  };
  try {
    std::thread(wait).detach();
  } catch (const std::system_error& refused) {
    fail(ExitCode::environment, "the thread that watches the launcher cannot be started: ", refused.what(), memory_limits());
  }
}

// One rank of a host is enough, and all wait for it before they make segments of their own.
void free_shared_memory(const Launch& launch) {
  if (launch.local_rank != 0) return;
  const OrphanedSegments removed = remove_orphaned_segments();
  if (removed.count > 0)
    log_info("/dev/shm: removed ", count_text(removed.count, "segment"), " of UCX (", bytes_text(removed.bytes),
             ") that killed processes left");
}

// Ranks take a GPU each. Where there is none to take, the device reports what was found instead.
void require_gpus(const Launch& launch) {
  const int gpus = count_gpus();
  require(gpus == 0 || launch.local_size <= gpus, ExitCode::environment, count_text(launch.local_size, "rank"), " on this host for the ",
          count_text(gpus, "GPU"), " that they see, and each needs one of its own: start at most ", gpus,
          " here, let every rank see all GPUs of its host (CUDA_VISIBLE_DEVICES), or train with training.device cpu");
}

// Returns the host of every rank as a number.
std::vector<int> hosts_of_ranks(Store& store) {
  const std::vector<std::string> names = store.gather("host", host_name());
  std::vector<int> out;
  for (const std::string& name : names) out.push_back(static_cast<int>(std::ranges::find(names, name) - names.begin()));
  return out;
}

// Without NCCL there is no maker, and messages go through the memory of hosts.
MakeDeviceLink links_between_gpus(const Launch& launch, const RunConfig& config, const Nccl& nccl, Store* store) {
  if (launch.rank == 0 && nccl.usable) log_info("messages between GPUs go over NCCL ", nccl.text);
  if (launch.rank == 0 && !nccl.usable)
    log_warning("messages between GPUs go through the memory of hosts, which is many times slower: NCCL cannot be used: ", nccl.text);
  if (!nccl.usable) return {};
  const auto share_id = [store](const std::string& name, const std::string& id) {
    if (id.empty()) return store->get(name);
    store->set(name, id);
    return id;
  };
  return nccl_links({.share_id = share_id, .init_timeout_s = config.parallel.init_timeout_s, .hosts = hosts_of_ranks(*store)});
}

std::vector<NamedHash> hashes_of_program(const std::string& kernels, const std::string& device, const Nccl& nccl) {
  return {{"build", build_fingerprint()},
          {"executable", executable()},
          {"instruction set", kernels},
          {"device", device},
          {"NCCL", nccl.usable ? nccl.text : "none"}};
}

std::unique_ptr<Transport> transport_of(int rank, Store* store) {
  return ucx_transport(
      rank, [store](const std::string& own) { return store->gather("address", own); }, [store] { store->check(); });
}

void require_one_process(const Launch& launch) {
  require(launch.world == 1, ExitCode::usage, "without --tensor it runs as one process, and this is ", describe(launch), "; --tensor ",
          launch.world, " lets these ranks share the model");
}

void require_tensor_ranks(int64_t tensor, const Launch& launch) {
  require(tensor == launch.world, ExitCode::usage, "--tensor ", tensor, " needs ", count_text(tensor, "rank"), ", and ",
          launch.world > 1 ? text("this is ", describe(launch)) : "this is one process",
          "; start them with mantissa launch --nproc-per-node ", tensor, " -- ...");
}

}  // namespace

RankSession::RankSession(const Launch& launch, const RunConfig& config, const std::function<bool()>& stop_asked) : rank_(launch.rank) {
  end_with_launcher();
  if (launch.world == 1) return;
  log_info(describe(launch));
  free_shared_memory(launch);
  store_ = std::make_unique<Store>(launch, StoreOptions{.init_timeout_s = config.parallel.init_timeout_s,
                                                        .heartbeat_timeout_s = config.parallel.heartbeat_timeout_s,
                                                        .stop_asked = stop_asked});
  reported_to_all([&] { meet(launch, config); });
}

void RankSession::meet(const Launch& launch, const RunConfig& config) {
  // Tensor ranks compute some gradients alike, so they need the same kernels.
  const std::string kernels = config.parallel.tensor > 1 ? gemm_instruction_set() : "any";
  const std::string device = backend_name(config.training.device);
  const bool on_gpus = device == "cuda";
  if (on_gpus) require_gpus(launch);
  const Nccl nccl = on_gpus ? find_nccl() : Nccl{};
  std::vector<NamedHash> inputs = compared(config);
  const std::vector<NamedHash> program = hashes_of_program(kernels, device, nccl);
  inputs.insert(inputs.end(), program.begin(), program.end());
  store_->compare(inputs);
  Store* const store = store_.get();
  auto transport = transport_of(launch.rank, store);
  world_ = Communicator(std::move(transport), on_gpus ? links_between_gpus(launch, config, nccl, store) : MakeDeviceLink());
}

// An error of one rank ends all, with its code. A message may fail before the store knows which rank was lost; the error is then that of
// the lost rank, on the rank that missed its message too.
void RankSession::reported_to_all(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    store_->fail_all(error.code(), error.what());
    if (error.code() == ExitCode::peer_lost) throw_cause(error);
    throw;
  } catch (const std::bad_alloc&) {
    store_->fail_all(ExitCode::environment, "out of memory" + memory_limits());
    throw;
  } catch (const std::exception& error) {
    store_->fail_all(ExitCode::internal, error.what());
    throw;
  }
}

void RankSession::throw_cause(const Error& symptom) const {
  const std::optional<Failure> cause = store_->failure();
  if (!cause || cause->message == symptom.what()) return;
  log_warning(symptom.what());
  throw Error(cause->code, cause->message);
}

RankSession::~RankSession() {
  if (!store_) return;
  const std::optional<Failure> failure = store_->failure();
  if (failure && failure->rank >= 0 && failure->rank != rank_) report_cause(failure->rank);
  watch_the_end();
}

void RankSession::watch(const ParallelConfig& config) {
  if (!store_) return;
  store_->progress().at(0, "start");  // the wait for the others was none of it
  watch_main_stack();
  const auto tell = [store = store_.get(), world = world_](const std::string& why) { report(*store, world, why); };
  const auto give_up = [tell, world = world_](const Failure& failure) {
    tell(failure.message);
    end_process(world.rank(), failure);
  };
  store_->watch({.timeouts = {.step_timeout_s = config.step_timeout_s, .section_timeout_s = config.section_timeout_s},
                 .collectives = [world = world_] { return world.calls(); },
                 .report = tell,
                 .leave = give_up});
}

// The watchdog must not use the transport, which ends before the store does.
void RankSession::watch_the_end() {
  store_->watch({.leave = [rank = rank_](const Failure& failure) { end_process(rank, failure); }});
}

void RankSession::at(int64_t step, const char* section) {
  if (store_) store_->progress().at(step, section);
}

void RankSession::run(const std::function<void()>& body) {
  if (!store_) return body();
  reported_to_all([&] {
    body();
    world_.barrier();
  });
  watch_the_end();
  world_ = {};
  store_->leave();
}

Option tensor_option(int64_t& tensor) {
  return {.name = "--tensor", .target = &tensor, .description = "ranks that share the model, each started by a launcher; default: 1"};
}

void on_tensor_ranks(const SharedModel& model, const std::function<void(const Mesh&)>& body) {
  const int64_t tensor = model.tensor;
  const Launch launch = launch_from_environment();
  if (tensor <= 1) require_one_process(launch);
  require_tensor_ranks(tensor, launch);
  RunConfig config;  // config that ranks compare
  config.parallel = {.data = 1, .tensor = tensor};
  config.training.device = model.device;
  config.checkpoint.init_from = model.checkpoint;
  share_host(launch);
  RankSession session(launch, config);
  session.run([&] { body(make_mesh(session.world(), config.parallel.ranks())); });
}

void share_host(const Launch& launch) {
  const auto online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  if (launch.local_size > 1) set_default_threads(threads_of_rank(launch, num_threads(), online));
  set_default_gpu(launch.local_rank);
}

}  // namespace mantissa::tools
