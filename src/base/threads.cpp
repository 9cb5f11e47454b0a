// parallel_for on a lasting pool of std::threads. A loop waits only for workers that are inside it, never for one that has not been
// scheduled: on a machine shared with other processes that keeps short loops short, where a barrier of all threads would wait for the
// slowest.
#include <emmintrin.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "base/process_limit.h"
#include "base/single_threaded_library.h"
#include "mantissa/base/alternate_stack.h"
#include "mantissa/base/file.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/limits.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

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
    wake_sleepers();
    job.work();
    places_.fetch_and(0xFFFFFFFFU);  // nobody may join any more
    for (int spins = 0; places_.load() != 0; ++spins) pause(spins);
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
      wait_until_ready();  // memory that it allocates as it begins must not be that which the next one was found to have
    }
  }

 private:
  void wait_until_ready() {
    for (int ready = ready_.load(); ready < started_; ready = ready_.load()) ready_.wait(ready);
  }

  void wake_sleepers() {
    if (sleepers_.load() == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }

  static void pause(int spins) {
    if (spins < kSpins) {
      _mm_pause();
    } else {
      std::this_thread::yield();
    }
  }

  // Sets the stack size, which by default is what `ulimit -s` says.
  void start_one(const std::string& which) {
    require_memory(2 * kThreadStackBytes, which);  // beside the stack what libraries allocate as the thread begins: they end the process
    pthread_attr_t attributes;
    ::pthread_attr_init(&attributes);
    ::pthread_attr_setstacksize(&attributes, kThreadStackBytes);
    ::pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const int error = ::pthread_create(
        &thread, &attributes, [](void* self) -> void* { static_cast<Pool*>(self)->serve(); }, this);
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

}  // namespace mantissa
