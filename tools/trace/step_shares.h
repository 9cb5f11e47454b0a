// Says where the time of traced steps went: by rank, pass, kernel and module.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/base/trace.h"
#include "mantissa/json/json.h"

namespace mantissa::tools {

// The trace of a run (metrics/run_trace.h), as it is read back.

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
  int64_t attempt = 0;           // when their run began to
  std::vector<RankTrace> parts;  // by rank; those of some ranks may be missing
};

// Reads a run folder, in read_trace.cpp: the parts of its ranks if there are any, which a run leaves that was killed or still traces, else
// its trace.json. Or reads one such file. Throws Error(usage) if there is no trace, Error(data) that starts with file and line for a
// damaged one, and for a part of other steps, or of another attempt, than those before, which an earlier run left.
ReadTrace read_trace(const std::filesystem::path& run);

// Times of the thread that computes, or of a device's lane that does: kernels; exchanges, which it sends, receives and adds up itself;
// waits for what travels beside it; and the rest, in which no kernel runs.
struct Times {
  double kernels = 0.0, exchanges = 0.0, waits = 0.0, rest = 0.0;  // seconds
  double all() const { return kernels + exchanges + waits + rest; }
};

// Sums over calls.
struct Cost {
  double seconds = 0.0, flops = 0.0, bytes = 0.0;
  int64_t calls = 0;
};

struct PassCost {
  Times times;
  int64_t calls = 0;
};

struct RankShares {
  int rank = 0;
  bool ended = true;    // its trace has its end
  Times times;          // sum over the steps
  double beside = 0.0;  // seconds of exchanges that ran beside the computation
};

inline constexpr const char* kInNone = "(in none)";      // time outside of all passes, or of all modules
inline constexpr const char* kNoKernel = "(no kernel)";  // time in which no kernel, exchange or wait runs

// Sums over all ranks and steps that are there, by the names that tables and JSON show.
struct StepShares {
  std::vector<int64_t> steps;  // that all ranks have whole
  int ranks = 0;               // ranks of the run
  std::string device;
  std::vector<RankShares> by_rank;
  std::map<std::string, PassCost> passes;  // "forward"; kInNone
  std::map<std::string, Cost> kernels;     // "gemm fprop", "exchange of gradients", "wait"; kNoKernel
  std::map<std::string, Cost> modules;     // "layers.*.mlp.down"; kInNone
  std::map<std::string, Cost> beside;      // "exchange of gradients": those that ran beside the computation of steps
  std::map<std::string, Cost> between;     // "evaluation", "save": what followed one of the steps
  double flops = 0.0;

  double rank_steps() const { return static_cast<double>(steps.size() * by_rank.size()); }
  Times times() const;  // sum over ranks
};

// Throws Error(data) for spans that overlap and for a trace without a whole step, Error(usage) for a step that is not in it.
StepShares step_shares(const ReadTrace& trace, std::optional<int64_t> step);

std::string shares_table(const StepShares& shares, const std::string& name, size_t top);  // lines for people; top: rows of a table
Json shares_json(const StepShares& shares, const std::string& name);                      // figures of a step, mean over ranks and steps

}  // namespace mantissa::tools
