// Measures speed: ceiling and workload alternate in short slices, and the result is the median of the per-slice ratios with its spread. A
// slice during which other processes took more than 5% of the cores is repeated while the time budget lasts. Two workloads alternate as
// long as it lasts, and which is the first of a slice alternates, too.
//
// On several ranks each takes part in every slice, which begins together and lasts as long as on the slowest rank. Rates are those of all
// ranks, and rank 0 decides and reports. A gather that one call leaves under way is finished by the next, so one call is made before those
// that count.
#pragma once

#include <cstdint>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backend/ceilings.h"
#include "mantissa/backend/gemm_path.h"
#include "mantissa/base/text.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"
#include "mantissa/json/json.h"

namespace mantissa::tools {

// A timed workload. Rates are per call of run(); its ratio refers to another workload if there is one, else to a GEMM if flops > 0, else to
// a copy.
struct Workload {
  std::string bench;  // "kernel.rms_norm_forward"
  std::string shape;  // "16384x768"
  Dtype dtype = Dtype::f32;
  double flops = 0.0;  // floating point operations
  double bytes = 0.0;  // the algorithm's minimum: read once, written once
  std::function<void()> run;
  double tokens = 0.0;                // counted by the rates of a workload and the one against it
  const Workload* against = nullptr;  // takes turns with it instead of a ceiling
};

struct Spread {
  double median = 0.0, p10 = 0.0, p90 = 0.0;
};
Spread spread_of(std::vector<double> values);
Json percentiles(const Spread& spread, double scale);  // writes {"med", "p10", "p90"}

struct Measurement {
  Spread ratio;             // workload rate / ceiling rate, per slice
  Spread seconds;           // seconds of one call
  double ceiling_rate = 0;  // FLOP/s or B/s, median
  int slices = 0;
  int disturbed = 0;  // slices kept although other processes ran
};

struct BenchOptions {
  std::string filter;       // part of a bench name, its dtype and its shape; "": all
  double time_budget = 60;  // seconds for the whole command
  std::string json;         // file for one JSON object a line; "": none
};

// Appends each result to the file of --json; does nothing without it.
class JsonLines {
 public:
  // Throws Error(storage) where the disk is full, and otherwise as path_failure() says.
  void open(const std::string& path);
  bool is_open() const { return out_.is_open(); }
  void append(const std::string& line);

 private:
  std::string path_;
  std::ofstream out_;
};

class Harness {
 public:
  Harness(Backend& device, const BenchOptions& options, const Communicator& world = {});
  // Returns whether the filter admits "kernel.add bf16 16384x768".
  bool wants(const std::string& bench, Dtype dtype, const std::string& shape) const {
    return text(bench, ' ', dtype_name(dtype), ' ', shape).find(options_.filter) != std::string::npos;
  }
  bool wants(const Workload& workload) const { return wants(workload.bench, workload.dtype, workload.shape); }
  // Announces workloads that will follow, so that the time budget is shared.
  void expect(int workloads) { remaining_ = workloads; }
  // Measures, prints a line, appends JSON.
  Measurement measure(const Workload& workload);

 private:
  double timed(const std::function<void()>& run) const;
  double timed_in_a_row(const std::function<void()>& run, int calls) const;
  bool decided(bool vote) const;
  double gemm_rate(Dtype dtype);
  double copy_rate();
  double ceiling_rate(const Workload& workload);
  void report(const Workload& workload, const Measurement& result);

  Backend& device_;
  BenchOptions options_;
  Communicator world_, host_;  // all ranks, and those on this host
  JsonLines json_;
  double deadline_;
  int threads_;
  int remaining_ = 1;
  std::optional<GemmCeiling> gemm_[2];  // fp32, bf16
  GemmCounts counted_{};                // by the line before
  std::optional<CopyCeiling> copy_;
};

double monotonic_seconds();
std::string machine_text(const Backend& device);  // "AMX bf16", "cuda sm_90"

// Subcommands; each measures what the filter admits. They are in bench_kernels.cpp, bench_gemms.cpp, bench_moe.cpp and, on every rank of
// `world`, bench_comm.cpp.
void bench_kernels(Backend& device, const BenchOptions& options);
void bench_gemm(Backend& device, const BenchOptions& options);
void bench_attention(Backend& device, const BenchOptions& options);
void bench_moe(Backend& device, const BenchOptions& options);
void bench_comm(const Communicator& world, Backend& device, const BenchOptions& options);

struct GenerationShape {
  int64_t batch = 1, new_tokens = 32;
};
struct Opponent {
  std::string name;                 // its settings of --against
  std::optional<RunConfig> config;  // none: there is none
};
// Generates from a prompt of one token, greedily, and compares the bytes of weights that it reads with a copy; then its speed with that of
// the opponent. In bench_generate.cpp.
void bench_generate(const RunConfig& config, const GenerationShape& shape, const Opponent& other, const BenchOptions& options);

}  // namespace mantissa::tools
