// Searches the layouts of a run: how its ranks are divided into data, tensor and expert ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mantissa/json/config.h"
#include "mantissa/plan/estimate.h"
#include "plan/cost.h"

namespace mantissa::tools {

struct LayoutChoice {
  RunConfig config;
  MemoryEstimate memory;
  double step_seconds = 0.0;
};

struct FoundLayouts {
  std::vector<LayoutChoice> fastest_first;
  std::string refusal;       // why the first layout that the configuration refuses is none; "": it refuses none
  int64_t least_memory = 0;  // bytes of the smallest, whether it fits or not; 0: no layout divides the run
};

// Returns every layout of `world` ranks that the model and the global batch of `run` allow and whose estimate fits into `memory` bytes of a
// rank; `sources` are those of the run. A layout has the least recomputation that fits, since less is faster, and with
// it the largest micro batch that fits, behind whose backward pass more of the exchange is hidden. The links that layouts need must be
// known.
FoundLayouts search_layouts(const ConfigSources& sources, const RunConfig& run, int64_t world, const Rates& rates, double memory);

// Both show at most kMostLayouts. `price` is that of a rank hour, 0 if there is none.
constexpr size_t kMostLayouts = 10;
std::string layout_table(const std::vector<LayoutChoice>& found, double price);
Json layouts_json(const std::vector<LayoutChoice>& found, double price);

}  // namespace mantissa::tools
