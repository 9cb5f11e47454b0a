// Reads and writes what a comparison knows of its runs, in and beside their folders.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "metrics/run_metrics.h"
#include "tools/compare/comparison.h"
#include "tools/compare/comparison_plan.h"

namespace mantissa::tools {

constexpr int64_t kLargestRunFile = 64 << 20;  // bytes

// Throws Error(usage) unless the folder, if it is there, is of this run. Threads change no bit, paths may be seen from elsewhere, and the
// vocabulary may follow from the data.
void require_same_run(const PlannedRun& run, const std::filesystem::path& folder);

// Throws Error(usage) for a folder that holds files but none of a comparison, which writes RUN.inputs.json before anything else of a run.
void require_folder_of_comparison(const std::filesystem::path& folder);

// RUN.state.json beside the folder of a run: how its processes went.
struct RunState {
  std::vector<Measured> starts = {};  // one for each process
  bool diverged = false;              // training ended with ExitCode::numerical

  // Returns how the times of its steps were measured; none: in different ways, or nobody knows.
  std::optional<Measured> measured() const;

  void fields(auto& v) {
    v("starts", starts);
    v("diverged", diverged);
  }
};
RunState read_state(const std::filesystem::path& run);  // as of a run without starts if there is no such file
void write_state(const std::filesystem::path& run, const RunState& state);

// A finished run has no checkpoint that would say what it read, so a file beside its folder does.
void write_inputs(const std::filesystem::path& run, const RunInputs& inputs);

// Throws Error(usage) unless the run read what runs read now.
void require_same_inputs(const std::filesystem::path& run, const RunInputs& now);

// Returns the metrics of a run that has finished; none: it has not.
std::optional<RunMetrics> finished_metrics(const PlannedRun& run, const std::filesystem::path& folder);

}  // namespace mantissa::tools
