// The charts of a report page, as inline SVG. Colors and line styles are classes that the page's style sheet defines: "run0" to "run7".
#pragma once

#include <string>
#include <vector>

#include "metrics/run_metrics.h"

namespace mantissa::tools {

constexpr size_t kRunColors = 8;

struct ChartLine {
  std::string label;
  size_t run;  // its color
  bool dots;   // few points: each is marked and says its value
  const Series* points;
};

// Value over step; values that are not finite are gaps. Long series are thinned to the extremes of equal parts. "" without any value.
std::string line_chart(const std::string& title, const std::vector<ChartLine>& lines);

// The colors of a heat map, in dB.
struct Decibels {
  double low, high;
};
// Module over step, one row each, colored by SQNR. `cells` by ascending step; at most 100 of the steps are shown.
std::string heat_map(const std::string& title, const std::vector<PrecisionEvent>& cells, const Decibels& range);
std::string heat_scale(const Decibels& range);  // the key to the colors

}  // namespace mantissa::tools
