// Reads the trace of a run (metrics/run_trace.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "mantissa/base/trace.h"

namespace mantissa::tools {

struct TracedSpan {
  std::string name;
  Track track = Track::step;
  double begin = 0.0, duration = 0.0;  // microseconds
  int thread = 0;
  int64_t number = -1, bytes = 0;
  double flops = 0.0;

  double end() const { return begin + duration; }
  double middle() const { return begin + duration / 2; }
};

struct RankTrace {
  int rank = 0;
  std::string file;                    // that it was read from
  std::string device;                  // as training.device names it
  bool ended = false;                  // false: the run was killed meanwhile
  std::vector<TracedSpan> spans = {};  // in the order of their ends
};

struct ReadTrace {
  int ranks = 0;                 // ranks of the run
  int64_t first = 0, last = 0;   // steps that all parts were to trace
  std::vector<RankTrace> parts;  // by rank; those of some ranks may be missing
};

// Reads a run folder: the parts of its ranks if there are any, which a run leaves that was killed or still traces, else its trace.json. Or
// reads one such file. Throws Error(usage) if there is no trace, Error(data) that starts with file and line for a damaged one, and for a
// part of other steps than those before, which an earlier run left.
ReadTrace read_trace(const std::filesystem::path& run);

}  // namespace mantissa::tools
