#include <omp.h>

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "base/process_limit.h"
#include "mantissa/base/error.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
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
          " of the library cannot be started: ", refusal, process_limit());
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
