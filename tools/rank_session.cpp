#include "tools/rank_session.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <execinfo.h>
#include <pthread.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <sstream>
#include <system_error>
#include <thread>
#include <vector>

#include "backend/ceilings.h"
#include "backend/gpus.h"
#include "base/file.h"
#include "base/generated_call.h"
#include "base/hash.h"
#include "base/host_name.h"
#include "base/limits.h"
#include "base/parallel.h"
#include "comm/nccl_link.h"
#include "config/open_device.h"
#include "job/launch.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "mantissa/base/version.h"
#include "mantissa/json/json.h"

namespace mantissa::tools {
namespace {

template <class T>
std::vector<T> read_array(std::ifstream& file, uint64_t offset, uint64_t bytes) {
  std::vector<T> out(bytes / sizeof(T));
  file.seekg(static_cast<std::streamoff>(offset));
  file.read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(out.size() * sizeof(T)));
  if (!file) out.clear();
  return out;
}

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> readable(abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return status == 0 ? readable.get() : name;
}

// Returns where the file that has the address is mapped, and what else the dynamic linker knows; all null: no file has it.
Dl_info object_of(const void* address) {
  Dl_info object{};
  return ::dladdr(address, &object) != 0 ? object : Dl_info{};
}

// The names of functions by address, for stacks that people read. The C library knows only what is exported, which a program's own
// functions are not.
class FunctionNames {
 public:
  // Reads the symbol table of this program. One that was stripped has none; then functions of libraries alone have names.
  FunctionNames() {
    std::ifstream file("/proc/self/exe", std::ios::binary);
    const std::vector<Elf64_Ehdr> header = read_array<Elf64_Ehdr>(file, 0, sizeof(Elf64_Ehdr));
    if (header.empty()) return;
    const auto sections = read_array<Elf64_Shdr>(file, header[0].e_shoff, header[0].e_shnum * sizeof(Elf64_Shdr));
    const auto table = std::ranges::find(sections, uint32_t{SHT_SYMTAB}, &Elf64_Shdr::sh_type);
    if (table == sections.end() || table->sh_link >= sections.size()) return;
    const Elf64_Shdr& strings = sections[table->sh_link];
    std::vector<char> names = read_array<char>(file, strings.sh_offset, strings.sh_size);
    names.push_back('\0');
    for (const Elf64_Sym& symbol : read_array<Elf64_Sym>(file, table->sh_offset, table->sh_size)) {
      if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_size == 0 || symbol.st_name >= names.size()) continue;
      functions_.push_back({.begin = symbol.st_value, .size = symbol.st_size, .name = names.data() + symbol.st_name});
    }
    std::ranges::sort(functions_, {}, &Function::begin);
  }

  // Returns "mantissa(+0x51c2) mantissa::Shards::arrive()", the file that has the address and where in it; "0x7f00" where no file has it.
  std::string describe(const void* address) const {
    static const char program = 0;
    std::ostringstream out;
    out << std::hex << std::showbase;
    const Dl_info object = object_of(address);
    if (object.dli_fbase == nullptr) {
      out << std::bit_cast<uint64_t>(address);
      return out.str();
    }
    const uint64_t offset = std::bit_cast<uint64_t>(address) - std::bit_cast<uint64_t>(object.dli_fbase);
    out << std::filesystem::path(object.dli_fname).filename().string() << "(+" << offset << ')';
    const bool ours = object.dli_fbase == object_of(&program).dli_fbase;
    const std::string name = ours ? name_in_program(offset) : object.dli_sname != nullptr ? demangled(object.dli_sname) : "";
    return name.empty() ? out.str() : out.str() + ' ' + name;
  }

 private:
  struct Function {
    uint64_t begin, size;
    std::string name;
  };

  std::string name_in_program(uint64_t offset) const {
    const auto after = std::ranges::upper_bound(functions_, offset, {}, &Function::begin);
    if (after == functions_.begin()) return "";
    const Function& found = *std::prev(after);
    return offset < found.begin + found.size ? demangled(found.name.c_str()) : "";
  }

  std::vector<Function> functions_;  // functions of this program, by address
};

pthread_t watched;

// Notes of the watched thread: no names, because they take memory, which a handler may not.
struct Noted {
  std::array<void*, 64> frames{};
  int count = 0;
  bool in_kernel = false;  // in a kernel of oneDNN's; the frames are those of its callers
};
Noted noted;
std::atomic<bool> answered{false};
static_assert(std::atomic<bool>::is_always_lock_free);

// Returns a signal that is none of the system's or of a scheduler's.
int stack_signal() { return SIGRTMIN; }

void note_frames() { noted.count = ::backtrace(noted.frames.data(), static_cast<int>(noted.frames.size())); }

void note_stack(int, siginfo_t*, void* context) {
  const int error = errno;
  mcontext_t& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
  const GeneratedCall* const call = GeneratedCall::current();
  Dl_info object{};
  noted.in_kernel = call != nullptr && ::dladdr(std::bit_cast<const void*>(registers.gregs[REG_RIP]), &object) == 0;
  if (noted.in_kernel) {
    // From inside generated code there is no way back, but unwinding takes the registers of the interrupted code from `context`: for a
    // moment they are those of the call.
    const mcontext_t interrupted = registers;
    registers.gregs[REG_RIP] = static_cast<greg_t>(call->instruction);
    registers.gregs[REG_RSP] = static_cast<greg_t>(call->stack);
    registers.gregs[REG_RBP] = static_cast<greg_t>(call->frame);
    note_frames();
    registers = interrupted;
  } else {
    note_frames();
  }
  answered = true;
  errno = error;
}

}  // namespace

void watch_main_stack() {
  require_unwinding();  // a handler may not load it
  watched = ::pthread_self();
  struct sigaction action {};
  action.sa_sigaction = note_stack;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(stack_signal(), &action, nullptr);
  sigset_t stacks;
  sigemptyset(&stacks);
  sigaddset(&stacks, stack_signal());
  ::pthread_sigmask(SIG_UNBLOCK, &stacks, nullptr);
}

bool print_main_stack() {
  answered = false;
  if (::pthread_kill(watched, stack_signal()) != 0) return false;
  for (int i = 0; i < 100 && !answered; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (!answered) return false;
  const FunctionNames names;
  std::string lines = noted.in_kernel ? "in a kernel that oneDNN generated, called by:\n" : "";
  for (int i = 0; i < noted.count; ++i) {
    // Calls end where the next instruction begins, which may be another function's.
    const void* const call = static_cast<const char*>(noted.frames[static_cast<size_t>(i)]) - 1;
    lines += names.describe(call) + '\n';
  }
  UnblockedOutput(STDERR_FILENO).write(lines);
  return true;
}

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
  if (!print_main_stack()) write_error(text(rank, ": no stack: the main thread does not answer, because it is stopped\n"));
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
    log_error("the launcher of this rank has ended");
    ::_exit(static_cast<int>(ExitCode::peer_lost));
  };
  try {
    std::thread(wait).detach();
  } catch (const std::system_error& refused) {
    fail(ExitCode::environment, "the thread that watches the launcher cannot be started: ", refused.what(), memory_limits());
  }
}

// Without NCCL there is no maker, and messages go through the memory of hosts.
MakeDeviceLink links_between_gpus(const Launch& launch, const RunConfig& config, const Nccl& nccl, Store* store) {
  if (launch.rank == 0 && nccl.usable) log_info("messages between GPUs go over NCCL ", nccl.text);
  if (launch.rank == 0 && !nccl.usable)
    log_warning("messages between GPUs go through host memory, which is many times slower, because NCCL cannot be used: ", nccl.text);
  if (!nccl.usable) return {};
  const auto share_id = [store](const std::string& name, const std::string& id) {
    if (id.empty()) return store->get(name);
    store->set(name, id);
    return id;
  };
  return nccl_links({.share_id = share_id, .init_timeout_s = config.parallel.init_timeout_s});
}

// Returns a number for the host of each rank.
std::vector<int> hosts_of_ranks(Store& store) {
  const std::vector<std::string> names = store.gather("host", host_name());
  std::vector<int> hosts;
  for (const std::string& name : names) hosts.push_back(static_cast<int>(std::ranges::find(names, name) - names.begin()));
  return hosts;
}

}  // namespace

RankSession::RankSession(const Launch& launch, const RunConfig& config, const std::function<bool()>& stop_asked) : rank_(launch.rank) {
  end_with_launcher();
  if (launch.world == 1) return;
  log_info(describe(launch));
  if (launch.local_rank == 0) {  // one rank of a host is enough, and all wait for it before they make segments of their own
    const OrphanedSegments removed = remove_orphaned_segments();
    if (removed.count > 0)
      log_info("/dev/shm: removed ", count_text(removed.count, "segment"), " of UCX (", bytes_text(removed.bytes),
               ") that killed processes left");
  }
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
  if (on_gpus) {  // ranks take a GPU each; where there is none to take, the device reports what was found instead
    const int gpus = count_gpus();
    require(gpus == 0 || launch.local_size <= gpus, ExitCode::environment, count_text(launch.local_size, "rank"), " on this host for the ",
            count_text(gpus, "GPU"), " that they see, and each needs one of its own: start at most ", gpus,
            " here, let every rank see all GPUs of its host (CUDA_VISIBLE_DEVICES), or train with training.device cpu");
  }
  const Nccl nccl = on_gpus ? find_nccl() : Nccl{};
  std::vector<NamedHash> inputs = compared(config);
  // The running program, not the file that now has its name.
  const std::string executable = xxh64(File::open_input("/proc/self/exe").content(kMostExecutableBytes)).text();
  inputs.insert(inputs.end(), {{"build", build_fingerprint()},
                               {"executable", executable},
                               {"instruction set", kernels},
                               {"device", device},
                               {"NCCL", nccl.usable ? nccl.text : "none"}});
  store_->compare(inputs);
  Store* const store = store_.get();
  auto transport = ucx_transport(
      launch.rank, [store](const std::string& address) { return store->gather("address", address); }, [store] { store->check(); });
  world_ = Communicator(std::move(transport), on_gpus ? links_between_gpus(launch, config, nccl, store) : MakeDeviceLink(),
                        hosts_of_ranks(*store_));
}

// An error of one rank ends all, with its code. A message may fail before the store knows which rank was lost; the error is then that of
// the lost rank, on the rank that missed its message too.
void RankSession::reported_to_all(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    store_->fail_all(error.code(), error.what());
    const std::optional<Failure> cause = store_->failure();
    if (error.code() != ExitCode::peer_lost || !cause || cause->message == error.what()) throw;
    log_warning(error.what());
    throw Error(cause->code, cause->message);
  } catch (const std::bad_alloc&) {
    store_->fail_all(ExitCode::environment, "out of memory" + memory_limits());
    throw;
  } catch (const std::exception& error) {
    store_->fail_all(ExitCode::internal, error.what());
    throw;
  }
}

RankSession::~RankSession() {
  if (!store_) return;
  const std::optional<Failure> failure = store_->failure();
  if (failure && failure->rank >= 0 && failure->rank != rank_) report_cause(failure->rank);
  watch_the_end();
}

void RankSession::watch(const ParallelConfig& config) {
  if (!store_) return;
  store_->progress().set_phase(0, "start");  // the wait for the others was none of it
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

void RankSession::set_phase(int64_t step, const char* section) {
  if (store_) store_->progress().set_phase(step, section);
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

Option checkpoint_option(std::string& checkpoint) {
  return {"CHECKPOINT", &checkpoint, "a checkpoint, or a run folder: the one that `latest` names, else its newest valid one"};
}

Option tensor_option(int64_t& tensor) {
  return {"--tensor", &tensor, "ranks that share the model, each started by a launcher; default: 1"};
}

void on_tensor_ranks(const ModelArguments& model, const std::function<void(const Mesh&)>& body) {
  use_threads(model.threads);
  const int64_t tensor = model.tensor;
  const Launch launch = launch_from_environment();
  require(tensor > 1 || launch.world == 1, ExitCode::usage, "without --tensor this command runs as one process, and this is ",
          describe(launch), "; --tensor ", launch.world, " lets these ranks share the model");
  require(tensor == launch.world, ExitCode::usage, "--tensor ", tensor, " needs ", count_text(tensor, "rank"), ", and ",
          launch.world > 1 ? text("this is ", describe(launch)) : "this is one process",
          "; start them with mantissa launch --nproc-per-node ", tensor, " -- ...");
  RunConfig config;  // config that ranks compare
  config.parallel = {.data = 1, .tensor = tensor};
  config.training.device = device_choice(model.device);
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
