// Reads back what a run left in its folder, for a report: metrics.jsonl and config.json.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "mantissa/metrics/events.h"

namespace mantissa {

struct MetricPoint {
  int64_t step;
  double value;  // NaN: it was not finite
};
using Series = std::vector<MetricPoint>;  // by ascending step

struct RoutingPoint {
  int64_t step;
  std::vector<LayerRouting> layers;  // layers with experts
};
constexpr int64_t kRoutingSteps = 100;

struct RunMetrics {
  std::string name;             // name of the folder, as valid UTF-8
  std::string config;           // content of config.json; "" if there is none
  StartEvent start;             // the newest start; without folder
  std::vector<int64_t> starts;  // the step of every start: the first, and then each restart
  int64_t tokens = 0;
  Series loss, valid_loss, lr, gradient_norm, tokens_per_second;  // loss: of steps with targets
  Series valid_kl;                                                // divergences of evaluations beside a teacher
  Series milliseconds;                                            // duration of each step that was reported
  Series imbalance;                                               // in the layer with experts where it is largest
  std::vector<RoutingPoint> routing;                              // reports of the newest kRoutingSteps steps
  std::vector<PrecisionEvent> precision;
  std::vector<SampleEvent> samples;
};

// Steps that a resumed run repeated count once, as they were done last. Skips an incomplete last line, which a run leaves that is killed or
// still writing, and lines of unknown types. Throws Error(usage) if `folder` is no run or has no metrics, Error(data) that starts with file
// and line for a damaged line.
RunMetrics read_run_metrics(const std::filesystem::path& folder);

}  // namespace mantissa
