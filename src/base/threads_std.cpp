// parallel_for on a lasting pool of std::threads: for ThreadSanitizer, which cannot see the synchronisation inside libgomp.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/single_threaded_library.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

struct Job {
  detail::ChunkBody body;
  void* context;
  int64_t count, chunk, pieces;
  std::atomic<int64_t> next{0};

  // Takes pieces in order until none is left.
  void work() {
    for (int64_t i = next.fetch_add(1); i < pieces; i = next.fetch_add(1)) body(context, i * chunk, std::min(count, (i + 1) * chunk));
  }
};

class Pool {
 public:
  // One job at a time. False, with nothing done, while a job runs: another thread's, or the one whose body calls this.
  bool run(Job& job, int workers) {
    if (taken_.exchange(true)) return false;
    for (; started_ < workers; ++started_) std::thread([this] { serve(); }).detach();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      places_ = workers;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    places_ = 0;
    idle_.wait(lock, [this] { return active_ == 0; });
    taken_ = false;
    return true;
  }

 private:
  [[noreturn]] void serve() {
    const SingleThreadedLibrary guard;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return places_ > 0; });
      --places_;
      ++active_;
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--active_ == 0) idle_.notify_one();
    }
  }

  std::atomic<bool> taken_{false};
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  Job* job_ = nullptr;
  int started_ = 0, places_ = 0, active_ = 0;  // workers started; that may still join the job; in it
};

// Never destroyed: its threads sleep until the process ends, and destructors of statics may still use it.
Pool& pool() {
  static Pool& instance = *new Pool;
  return instance;
}

}  // namespace

void detail::parallel_chunks(int64_t count, int64_t chunk, ChunkBody body, void* context) {
  if (count <= 0) return;
  Job job{.body = body, .context = context, .count = count, .chunk = chunk, .pieces = (count + chunk - 1) / chunk};
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), job.pieces));
  const SingleThreadedLibrary guard;
  if (threads <= 1 || !pool().run(job, threads - 1)) job.work();
}

}  // namespace mantissa
