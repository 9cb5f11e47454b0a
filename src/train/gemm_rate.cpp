#include "train/gemm_rate.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "mantissa/backend/ceilings.h"
#include "mantissa/backend/moment.h"
#include "mantissa/base/log.h"
#include "mantissa/models/model_shape.h"

namespace mantissa {
namespace {

constexpr int kGemms = 5;  // the best of them counts: the first makes its kernels, or chooses an algorithm
// FLOPs of a rank whose run takes many times what the measurement takes.
constexpr double kWorthMeasuringOnCpu = 2e12, kWorthMeasuringOnGpu = 5e15;

double measured_rate(Backend& device, GemmCeiling& gemm) {
  const Moment began(device);
  gemm.run();
  const Moment ended(device);
  device.synchronize();
  return gemm.flops() / began.seconds_until(ended);
}

// Measures with a backend of its own, so that its matrices go. Returns 0 if they found no memory, or a GPU has no library.
double rate_of_rank(const std::string& name, Dtype dtype) {
  try {
    const auto device = make_backend(name);
    GemmCeiling gemm(*device, dtype, GemmCeiling::usual_rows(*device));
    double best = 0.0;
    for (int i = 0; i < kGemms; ++i) best = std::max(best, measured_rate(*device, gemm));
    return best;
  } catch (const Error& error) {
    if (error.code() != ExitCode::environment) throw;
    log_warning("the rate of GEMMs, which mfu_meas refers to, was not measured: ", error.what());
    return 0.0;
  }
}

}  // namespace

std::optional<double> measured_gemm_rate(const RunConfig& config, const Backend& device, const Communicator& world) {
  const double per_token = training_flops_per_token(model_shape(config.model), config.training.seq_len);
  const double tokens = static_cast<double>(config.training.tokens_per_step()) * static_cast<double>(config.training.steps);
  const std::string name = device.name();
  if (name != "cpu" && name != "cuda") return {};
  if (per_token * tokens / world.size() < (name == "cpu" ? kWorthMeasuringOnCpu : kWorthMeasuringOnGpu)) return {};
  const std::vector<double> rates = world.all(rate_of_rank(name, config.precision.dtype));
  if (std::ranges::count(rates, 0.0) > 0) return {};
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

}  // namespace mantissa
