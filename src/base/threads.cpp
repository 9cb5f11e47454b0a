#include <emmintrin.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <xmmintrin.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/file.h"
#include "base/limits.h"
#include "base/parallel.h"
#include "mantissa/base/error.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

std::atomic<int> configured{0}, chosen_default{0};  // 0: not

}  // namespace

int num_threads() {
  static const int cores = [] {
    cpu_set_t usable;
    return sched_getaffinity(0, sizeof usable, &usable) == 0 ? std::max(1, CPU_COUNT(&usable)) : 1;
  }();
  for (const std::atomic<int>* wanted : {&configured, &chosen_default}) {
    if (const int threads = wanted->load(std::memory_order_relaxed); threads > 0) return threads;
  }
  return cores;
}

void set_num_threads(int threads) { configured.store(threads, std::memory_order_relaxed); }
void set_default_threads(int threads) { chosen_default.store(threads, std::memory_order_relaxed); }

sigset_t sent_signals() {
  sigset_t sent;
  sigfillset(&sent);
  for (const int signal : {SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS, SIGPIPE, SIGXFSZ}) sigdelset(&sent, signal);
  for (const int signal : {SIGTSTP, SIGTTIN, SIGTTOU, SIGCONT}) sigdelset(&sent, signal);
  return sent;
}

AlternateStack::AlternateStack() {
  stack_t own{};
  own.ss_sp = memory_;
  own.ss_size = kBytes;
  ::sigaltstack(&own, &previous_);
}

AlternateStack::~AlternateStack() { ::sigaltstack(&previous_, nullptr); }

namespace {

// Flush-to-zero and denormals-are-zero of MXCSR.
constexpr unsigned kFlushBits = 0x8040U;

unsigned with_subnormals(unsigned mxcsr, Subnormals subnormals) {
  return subnormals == Subnormals::flushed ? mxcsr | kFlushBits : mxcsr & ~kFlushBits;
}

// While it lives, libraries called on this thread see OpenMP at one thread, and subnormals are treated as asked. Restores the thread's
// settings.
class SingleThreadedLibrary {
 public:
  explicit SingleThreadedLibrary(Subnormals subnormals) : threads_(omp_get_max_threads()), mxcsr_(_mm_getcsr()) {
    if (threads_ != 1) omp_set_num_threads(1);
    _mm_setcsr(with_subnormals(mxcsr_, subnormals));
  }
  ~SingleThreadedLibrary() {
    if (threads_ != 1) omp_set_num_threads(threads_);
    _mm_setcsr(mxcsr_);
  }
  SingleThreadedLibrary(const SingleThreadedLibrary&) = delete;
  SingleThreadedLibrary& operator=(const SingleThreadedLibrary&) = delete;

 private:
  int threads_;
  unsigned mxcsr_;
};

// parallel_for on a lasting pool of std::threads. A loop waits only for workers that are inside it, never for one that has not been
// scheduled: on a machine shared with other processes that keeps short loops short, where a barrier of all threads would wait for the
// slowest.

// About 50 microseconds: longer than the gap between the loops of a training step, shorter than a scheduler's time slice.
constexpr int kSpins = 2000;

// The system keeps thread-local data in it, and signal handlers run there.
constexpr size_t kThreadStackBytes = size_t{2} * kStackBytes;

struct Job {
  detail::ChunkBody body;
  void* context;
  int64_t count, chunk, pieces;
  Subnormals subnormals;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error{};  // written by the one that set `failed`

  // Takes pieces in order until none is left, so a slow core delays one piece and not half of them. After a failure none is left.
  void work() {
    try {
      for (int64_t i = next.fetch_add(1); i < pieces; i = next.fetch_add(1)) body(context, i * chunk, std::min(count, (i + 1) * chunk));
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
      next = pieces;
    }
  }
};

class Pool {
 public:
  // Runs one job at a time. Returns false, with nothing done, while a job runs: another thread's, or the one whose body calls this.
  bool run(Job& job, int workers) {
    start(workers);
    if (taken_.exchange(true)) return false;
    job_ = &job;
    places_.store(static_cast<uint64_t>(workers) << 32U);
    if (sleepers_.load() > 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    job.work();
    places_.fetch_and(0xFFFFFFFFU);  // nobody may join any more
    for (int spins = 0; places_.load() != 0; ++spins) spins < kSpins ? _mm_pause() : std::this_thread::yield();
    taken_ = false;
    return true;
  }

  // On return so many threads have begun to serve. Throws Error(environment) if one cannot be started.
  void start(int workers) {
    if (ready_.load() >= workers) return;
    const std::lock_guard<std::mutex> lock(starting_);
    while (started_ < workers) {
      start_one(text("thread ", started_ + 2, " of ", workers + 1));
      ++started_;
      // Memory that it allocates as it begins must not be that which the next one was found to have.
      for (int ready = ready_.load(); ready < started_; ready = ready_.load()) ready_.wait(ready);
    }
  }

 private:
  // Sets the stack size, which by default is what `ulimit -s` says.
  void start_one(const std::string& which) {
    require_memory(2 * kThreadStackBytes, which);  // beside the stack what libraries allocate as the thread begins: they end the process
    pthread_attr_t attributes;
    ::pthread_attr_init(&attributes);
    ::pthread_attr_setstacksize(&attributes, kThreadStackBytes);
    ::pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    // The thread inherits this mask, so that a signal goes to a thread that has a handler or waits for it.
    const sigset_t sent = sent_signals();
    sigset_t before;
    ::pthread_sigmask(SIG_BLOCK, &sent, &before);
    pthread_t thread;
    const int error = ::pthread_create(
        &thread, &attributes, [](void* self) -> void* { static_cast<Pool*>(self)->serve(); }, this);
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::pthread_attr_destroy(&attributes);
    if (error != 0) fail(ExitCode::environment, which, " cannot be started: ", system_message(error), process_limit());
  }

  bool join() {
    uint64_t places = places_.load();
    while (places >> 32U != 0) {
      if (places_.compare_exchange_weak(places, places - (uint64_t{1} << 32U) + 1)) return true;
    }
    return false;
  }

  void sleep_until_called() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++sleepers_;
    wake_.wait(lock, [this] { return places_.load() >> 32U != 0; });
    --sleepers_;
  }

  [[noreturn]] void serve() {
    const AlternateStack handlers;
    const SingleThreadedLibrary guard(Subnormals::honored);
    ready_.fetch_add(1);
    ready_.notify_one();
    for (int spins = 0;; ++spins) {
      if (join()) {
        Job& job = *job_.load();
        _mm_setcsr(with_subnormals(_mm_getcsr(), job.subnormals));
        job.work();
        places_.fetch_sub(1);
        spins = 0;
      } else if (spins < kSpins) {
        _mm_pause();
      } else {
        sleep_until_called();
        spins = 0;
      }
    }
  }

  std::atomic<bool> taken_{false};
  std::atomic<Job*> job_{nullptr};
  std::atomic<uint64_t> places_{0};  // upper half: workers that may still join the job; lower half: workers in it
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::mutex starting_;
  int started_ = 0;
  std::atomic<int> ready_{0};
};

thread_local bool single_threaded_loops = false;

// Never destroyed: its threads sleep until the process ends, and destructors of statics may still use it.
Pool& pool() {
  static Pool& instance = *new Pool;
  return instance;
}

}  // namespace

void start_threads() {
  require_stack();
  require_unwinding();
  pool().start(num_threads() - 1);
}

SingleThreadedLoops::SingleThreadedLoops() { single_threaded_loops = true; }
SingleThreadedLoops::~SingleThreadedLoops() { single_threaded_loops = false; }

void detail::parallel_chunks(int64_t count, int64_t chunk, Subnormals subnormals, ChunkBody body, void* context) {
  if (count <= 0) return;
  Job job{.body = body, .context = context, .count = count, .chunk = chunk, .pieces = ceil_div(count, chunk), .subnormals = subnormals};
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), job.pieces));
  const SingleThreadedLibrary guard(subnormals);
  if (threads <= 1 || single_threaded_loops || !pool().run(job, threads - 1)) job.work();
  if (job.error) std::rethrow_exception(job.error);
}

namespace {

// Check first: the library ends the process if it cannot start a thread.
void require_startable(int threads) {
  std::atomic<bool> over{false};
  std::string refusal;
  std::vector<std::jthread> started;
  try {
    while (static_cast<int>(started.size()) < threads) started.emplace_back([&over] { over.wait(false); });
  } catch (const std::exception& refused) {  // no thread, or no memory for one
    refusal = refused.what();
  }
  over = true;
  over.notify_all();
  require(refusal.empty(), ExitCode::environment, "thread ", started.size() + 2, " of ", threads + 1,
          " of oneDNN cannot be started: ", refusal, process_limit());
}

}  // namespace

void with_library_threads(const std::function<void()>& body) {
  static std::atomic<int> startable{1};
  const int threads = num_threads(), previous = omp_get_max_threads();
  if (startable < threads) {
    require_startable(threads - 1);
    startable = threads;
  }
  omp_set_num_threads(threads);
  body();
  omp_set_num_threads(previous);
}

}  // namespace mantissa
