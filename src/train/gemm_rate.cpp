#include "train/gemm_rate.h"

#include <algorithm>
#include <chrono>
#include <string_view>

#include "mantissa/backend/ceilings.h"
#include "mantissa/models/model_shape.h"

namespace mantissa {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kGemms = 5;                 // the best of them counts: the first makes its kernels
constexpr double kWorthMeasuring = 2e12;  // FLOPs of a rank, 20 times what the measurement takes

double rate_of_rank(Dtype dtype) {
  const auto cpu = make_backend("cpu");  // of its own, so that its matrices go
  GemmCeiling gemm(*cpu, dtype);
  double best = 0.0;
  for (int i = 0; i < kGemms; ++i) {
    const auto start = Clock::now();
    gemm.run();
    best = std::max(best, gemm.flops() / std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

}  // namespace

std::optional<double> measured_gemm_rate(const RunConfig& config, const Backend& device, const Communicator& world) {
  const double per_token = training_flops_per_token(model_shape(config.model), config.training.seq_len);
  const double tokens = static_cast<double>(config.training.tokens_per_step()) * static_cast<double>(config.training.steps);
  if (device.name() != std::string_view("cpu") || per_token * tokens / world.size() < kWorthMeasuring) return {};
  double sum = 0.0;
  for (const double rate : world.all(rate_of_rank(config.precision.dtype))) sum += rate;
  return sum;
}

}  // namespace mantissa
