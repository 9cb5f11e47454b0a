#include "train/gemm_rate.h"

#include <algorithm>
#include <string>

#include "mantissa/backend/ceilings.h"
#include "mantissa/backend/moment.h"
#include "mantissa/models/model_shape.h"

namespace mantissa {
namespace {

constexpr int kGemms = 5;               // the best of them counts: the first makes its kernels, or chooses an algorithm
constexpr double kWorthMeasuring = 20;  // times what the measurement takes

// By a backend of its own, so that its matrices go.
double rate_of_rank(const std::string& name, Dtype dtype) {
  const auto device = make_backend(name);
  GemmCeiling gemm(*device, dtype);
  double best = 0.0;
  for (int i = 0; i < kGemms; ++i) {
    const Moment began(*device);
    gemm.run();
    const Moment ended(*device);
    device->synchronize();
    best = std::max(best, gemm.flops() / began.seconds_until(ended));
  }
  return best;
}

}  // namespace

std::optional<double> measured_gemm_rate(const RunConfig& config, const Backend& device, const Communicator& world) {
  const double per_token = training_flops_per_token(model_shape(config.model), config.training.seq_len);
  const double tokens = static_cast<double>(config.training.tokens_per_step()) * static_cast<double>(config.training.steps);
  const std::string name = device.name();
  if (name != "cpu" && name != "cuda") return {};
  if (per_token * tokens / world.size() < kWorthMeasuring * kGemms * GemmCeiling::flops(device)) return {};
  double sum = 0.0;
  for (const double rate : world.all(rate_of_rank(name, config.precision.dtype))) sum += rate;
  return sum;
}

}  // namespace mantissa
