#include "train/gemm_rate.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>

#include "backend/ceilings.h"
#include "comm/mesh.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"
#include "mantissa/plan/estimate.h"

namespace mantissa {
namespace {

constexpr int kGemms = 5;  // the best of them counts: the first makes its kernels, or chooses an algorithm
// FLOPs of a rank whose run takes many times what the measurement takes.
constexpr double kWorthMeasuringOnCpu = 2e12, kWorthMeasuringOnGpu = 5e15;

// Measures with a backend of its own, so that its matrices go. Returns 0 if they found no memory, or a GPU has no library.
double rate_of_rank(const std::string& name, Dtype dtype) {
  try {
    const auto device = make_backend(name);
    GemmCeiling gemm(*device, dtype, GemmCeiling::usual_rows(*device));
    double best = 0.0;
    for (int i = 0; i < kGemms; ++i) {
      const Moment began(*device);
      gemm.run();
      const Moment ended(*device);
      device->synchronize();
      best = std::max(best, gemm.flops() / began.seconds_until(ended));
    }
    return best;
  } catch (const Error& error) {
    if (error.code() != ExitCode::environment) throw;
    log_warning("the GEMM rate, which mfu_meas refers to, was not measured: ", error.what());
    return 0.0;
  }
}

}  // namespace

std::optional<double> measured_gemm_rate(const RunConfig& config, const Backend& device, const Communicator& world) {
  const double per_token = step_flops_per_token(config);
  const double tokens = static_cast<double>(config.training.tokens_per_step()) * static_cast<double>(*config.training.steps);
  const std::string name = device.name();
  if (name != "cpu" && name != "cuda") return {};
  if (per_token * tokens / world.size() < (name == "cpu" ? kWorthMeasuringOnCpu : kWorthMeasuringOnGpu)) return {};
  const std::vector<double> rates = world.all(rate_of_rank(name, config.precision.dtype));
  if (std::ranges::count(rates, 0.0) > 0) return {};
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

namespace {

struct Peak {
  std::string_view gpu;
  double flops;
};

// Peaks by NVIDIA's data sheets, without sparsity. Where a sheet states only the rate with sparsity, the dense rate is half of it.
constexpr Peak kPeaks[] = {{"NVIDIA A100-SXM4-40GB", 312e12},
                           {"NVIDIA A100-SXM4-80GB", 312e12},
                           {"NVIDIA A100-PCIE-40GB", 312e12},
                           {"NVIDIA A100 80GB PCIe", 312e12},
                           {"NVIDIA H100 80GB HBM3", 989e12},
                           {"NVIDIA H100 NVL", 835e12},
                           {"NVIDIA H100 PCIe", 756e12},
                           {"NVIDIA H200", 989e12},
                           {"NVIDIA GH200 480GB", 989e12},
                           {"NVIDIA GH200 144G HBM3e", 989e12},
                           {"NVIDIA B200", 2250e12},
                           {"NVIDIA GB200", 2500e12},
                           {"NVIDIA GeForce RTX 4090", 165e12},
                           {"NVIDIA GeForce RTX 5090", 209.5e12}};

}  // namespace

std::optional<double> data_sheet_peak(std::string_view gpu) {
  for (const Peak& peak : kPeaks) {
    if (peak.gpu == gpu) return peak.flops;
  }
  return {};
}

std::optional<double> data_sheet_peak(const std::vector<Gpu>& of_ranks) {
  std::set<uint64_t> counted;
  double sum = 0.0;
  for (const Gpu& gpu : of_ranks) {
    const std::optional<double> peak = data_sheet_peak(gpu.name);
    if (!peak) return {};
    if (counted.insert(gpu.place).second) sum += *peak;
  }
  return sum;
}

std::optional<double> data_sheet_peak(const Backend& device, const Communicator& world) {
  if (device.name() != std::string_view("cuda")) return {};
  const Gpu own = find_gpu(default_gpu()).value_or(Gpu{});
  const std::vector<std::string> names = all_gather_strings(world, own.name);
  const std::vector<uint64_t> places = world.all(own.place);
  std::vector<Gpu> of_ranks;
  for (size_t r = 0; r < names.size(); ++r) of_ranks.push_back({.name = names[r], .place = places[r]});
  return data_sheet_peak(of_ranks);
}

}  // namespace mantissa
