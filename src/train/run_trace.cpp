#include "train/run_trace.h"

#include <filesystem>
#include <iomanip>
#include <sstream>

#include "mantissa/base/file.h"
#include "mantissa/base/log.h"
#include "mantissa/base/pending_file.h"
#include "mantissa/base/trace.h"

namespace mantissa {

void RunTrace::begin_step(int64_t number, const std::function<void()>& settle) {
  if (!config_.training.trace) return;
  const std::vector<int64_t>& steps = config_.training.trace->steps;
  if (number > steps[1]) {
    if (tracing()) settle();
    return write();
  }
  if (number >= steps[0]) start_trace();
}

void RunTrace::write() const noexcept {
  if (!tracing()) return;
  try {
    std::ostringstream name;
    name << "trace-rank" << std::setw(5) << std::setfill('0') << rank_ << ".json";
    write_file_atomically(std::filesystem::path(config_.logging.dir) / name.str(), finish_trace(rank_));
  } catch (const std::exception& error) {  // what it shows is not worth the run
    log_warning("training.trace: ", error.what());
  }
}

}  // namespace mantissa
