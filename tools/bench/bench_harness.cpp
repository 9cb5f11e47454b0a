#include "tools/bench/bench_harness.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "backend/gpus.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/host_name.h"
#include "base/parallel.h"
#include "comm/mesh.h"
#include "mantissa/base/version.h"
#include "mantissa/json/json.h"
#include "plan/plan_table.h"

namespace mantissa::tools {
namespace {

constexpr size_t kSlices = 9;  // at least
// A GPU measures the same again and again; a CPU is shared.
double slice_seconds(const Backend& device) { return device.host_memory() ? 0.05 : 0.02; }
constexpr double kForeignLoad = 0.05;

double clock_seconds(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Returns the core-seconds since boot in which any process ran, or the hypervisor took the core away.
double busy_core_seconds() {
  std::ifstream stat("/proc/stat");
  std::string cpu;
  double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
  stat >> cpu >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal;
  return (user + nice + system + irq + softirq + steal) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// Measures the share of the cores that processes other than the ranks of this host used while it lived.
class ForeignLoad {
 public:
  double share(const Communicator& host) const {
    const double wall = monotonic_seconds() - wall_, ours = clock_seconds(CLOCK_PROCESS_CPUTIME_ID) - ours_;
    const double host_ours = static_cast<double>(host.sum(std::llround(ours * 1e6))) * 1e-6;
    return std::max(0.0, busy_core_seconds() - busy_ - host_ours) / (wall * static_cast<double>(sysconf(_SC_NPROCESSORS_ONLN)));
  }

 private:
  double wall_ = monotonic_seconds(), ours_ = clock_seconds(CLOCK_PROCESS_CPUTIME_ID), busy_ = busy_core_seconds();
};

// Units in which a workload's rate is reported.
struct Unit {
  const char *name, *counted, *ratio;
  double scale;
};

Unit unit_of(const Workload& workload) {
  if (workload.against != nullptr) return {"tokens/s", "tokens", "ratio_against", 1.0};
  if (workload.flops > 0.0) return {"GFLOP/s", "flops", "ratio_gemm", 1e-9};
  return {"GB/s", "bytes", "ratio_copy", 1e-9};
}

double work_of(const Workload& workload) {
  return workload.against != nullptr ? workload.tokens : workload.flops > 0.0 ? workload.flops : workload.bytes;
}

}  // namespace

double monotonic_seconds() { return clock_seconds(CLOCK_MONOTONIC); }

std::string machine_text(const Backend& device) {
  return device.host_memory() ? gemm_instruction_set() : text(device.name(), ' ', gemm_device_text(device.gemm_device()));
}

Spread spread_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto quantile = [&](double q) { return values[static_cast<size_t>(std::lround(q * static_cast<double>(values.size() - 1)))]; };
  return {.median = quantile(0.5), .p10 = quantile(0.1), .p90 = quantile(0.9)};
}

Json percentiles(const Spread& spread, double scale) {
  return {{"med", spread.median * scale}, {"p10", spread.p10 * scale}, {"p90", spread.p90 * scale}};
}

void JsonLines::open(const std::string& path) {
  if (path.empty()) return;
  std::error_code unknown;
  require(!std::filesystem::is_fifo(path, unknown), ExitCode::usage, "--json ", path, ": is a pipe, not a file");
  path_ = path;
  out_.open(path, std::ios::app);
  const int error = errno;
  require(out_.is_open(), error == ENOSPC ? ExitCode::storage : path_failure(error), "--json ", path,
          ": cannot be opened for writing: ", system_message(error));
}

void JsonLines::append(const std::string& line) {
  if (!is_open()) return;
  out_ << line << std::endl;
  require(out_.good(), ExitCode::storage, "--json ", path_, ": write failed");
}

Harness::Harness(Backend& device, const BenchOptions& options, const Communicator& world)
    : device_(device),
      options_(options),
      world_(world),
      host_(world.split(static_cast<int>(xxh64(host_name()).value & 0x7fffffff))),
      deadline_(monotonic_seconds() + options.time_budget),
      threads_(num_threads()) {
  agree(world_, [this] {
    if (world_.rank() == 0) json_.open(options_.json);
  });
  if (world_.rank() > 0) return;
  const std::string ranks = world_.size() > 1 ? text(world_.size(), " ranks x ") : "";
  std::printf("mantissa %s (%s), %s, %s%d threads; ratio = median of alternating slices [p10 .. p90]\n", version().c_str(),
              git_revision().c_str(), machine_text(device_).c_str(), ranks.c_str(), threads_);
}

bool Harness::decided(bool vote) const { return world_.all(static_cast<char>(vote)).front() != 0; }

// Returns the seconds of one call, repeated until the slice is full. Where a device comes later than the host asks, waits are among twice
// as many calls each time, so that they do not count for short ones.
double Harness::timed(const std::function<void()>& run) const {
  world_.barrier();
  const double begin = monotonic_seconds();
  int calls = 0, in_a_row = 1;
  double elapsed = 0.0;
  do {
    for (int i = 0; i < in_a_row; ++i) run();
    device_.synchronize();
    calls += in_a_row;
    if (!device_.host_memory()) in_a_row *= 2;
    elapsed = std::ranges::max(world_.all(monotonic_seconds() - begin));
  } while (elapsed < slice_seconds(device_));
  return elapsed / calls;
}

// Times calls without a collective between them, which would wait for one under way.
double Harness::timed_in_a_row(const std::function<void()>& run, int calls) const {
  world_.barrier();
  run();
  const double begin = monotonic_seconds();
  for (int i = 0; i < calls; ++i) run();
  device_.synchronize();
  return std::ranges::max(world_.all(monotonic_seconds() - begin)) / calls;
}

double Harness::gemm_rate(Dtype dtype) {
  std::optional<GemmCeiling>& ceiling = gemm_[dtype == Dtype::bf16 ? 1 : 0];
  if (!ceiling) {
    ceiling.emplace(device_, dtype, GemmCeiling::usual_rows(device_));
    timed([&] { ceiling->run(); });
  }
  return world_.size() * ceiling->flops() / timed([&] { ceiling->run(); });
}

double Harness::copy_rate() {
  if (!copy_) {
    copy_.emplace(device_, int64_t{256} << 20);
    timed([&] { copy_->run(); });
  }
  return world_.size() * copy_->bytes() / timed([&] { copy_->run(); });
}

double Harness::ceiling_rate(const Workload& workload) {
  if (workload.against != nullptr) return workload.against->tokens / timed(workload.against->run);
  return workload.flops > 0.0 ? gemm_rate(workload.dtype) : copy_rate();
}

Measurement Harness::measure(const Workload& workload) {
  const bool compares = workload.against != nullptr;
  const double budget = std::max(0.0, deadline_ - monotonic_seconds()) / std::max(1, remaining_--);
  const double end = monotonic_seconds() + budget;
  const int calls = static_cast<int>(std::ceil(slice_seconds(device_) / timed(workload.run)));  // alike on all ranks
  if (compares) ceiling_rate(workload);
  std::vector<double> ratios, seconds, ceilings;
  int disturbed = 0;
  while (ratios.size() < kSlices || decided(compares && monotonic_seconds() < end)) {
    const ForeignLoad load;
    const bool last = compares && ratios.size() % 2 == 1;
    double ceiling = last ? 0.0 : ceiling_rate(workload);
    const double elapsed = world_.size() > 1 ? timed_in_a_row(workload.run, calls) : timed(workload.run);
    if (last) ceiling = ceiling_rate(workload);
    const bool foreign = world_.sum(load.share(host_) > kForeignLoad ? 1 : 0) > 0;
    if (decided(foreign && monotonic_seconds() < end)) continue;
    disturbed += foreign ? 1 : 0;
    ceilings.push_back(ceiling);
    seconds.push_back(elapsed);
    ratios.push_back(work_of(workload) / elapsed / ceiling);
  }
  const Measurement result{.ratio = spread_of(ratios),
                           .seconds = spread_of(seconds),
                           .ceiling_rate = spread_of(ceilings).median,
                           .slices = static_cast<int>(ratios.size()),
                           .disturbed = disturbed};
  report(workload, result);
  return result;
}

void Harness::report(const Workload& workload, const Measurement& result) {
  if (world_.rank() > 0) return;
  const Unit unit = unit_of(workload);
  const std::string name = workload.against != nullptr ? workload.against->bench
                           : workload.flops == 0.0     ? "copy"
                                                       : text(dtype_name(gemm_[workload.dtype == Dtype::bf16 ? 1 : 0]->dtype()), " gemm");
  std::printf("%-34s %-20s %-5s %10.3f ms  %8.1f %s  %.3f of %s (%.0f) [%.3f .. %.3f]", workload.bench.c_str(), workload.shape.c_str(),
              dtype_name(workload.dtype), result.seconds.median * 1e3, work_of(workload) / result.seconds.median * unit.scale, unit.name,
              result.ratio.median, name.c_str(), result.ceiling_rate * unit.scale, result.ratio.p10, result.ratio.p90);
  if (result.disturbed > 0) std::printf("  %d of %d slices beside other load", result.disturbed, result.slices);
  std::printf("\n");
  std::fflush(stdout);
  if (!json_.is_open()) return;
  Json line{{"bench", workload.bench}, {"shape", workload.shape}, {"dtype", dtype_name(workload.dtype)}};
  line.add("git", git_revision());
  line.add("us", percentiles(result.seconds, 1e6));
  line.add(unit.counted, work_of(workload));
  line.add(unit.ratio, percentiles(result.ratio, 1.0));
  line.add("ceiling", {{"name", name}, {"rate", result.ceiling_rate}});
  line.add("slices", result.slices);
  line.add("disturbed", result.disturbed);
  line.add("device", {{"isa", machine_text(device_)}, {"threads", threads_}, {"ranks", world_.size()}});
  if (!device_.host_memory()) {
    GemmCounts counts = device_.gemm_counts();
    for (size_t path = 0; path < counts.size(); ++path) counts[path] -= std::exchange(counted_[path], counts[path]);
    line.add("gpus", find_gpus().text);
    line.add("gemms", gemm_counts_text(counts));
  }
  json_.append(line.dump(-1, Json::Order::keys));
}

}  // namespace mantissa::tools
