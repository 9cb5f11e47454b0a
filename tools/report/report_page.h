// One or several runs as one HTML file that needs nothing else: style and drawings are inline, there is no script, font or image, and it
// reads on light and dark backgrounds alike.
#pragma once

#include <string>
#include <vector>

#include "metrics/run_metrics.h"

namespace mantissa::tools {

// Returns the page: summary, loss (training and validation), learning rate, gradient norm and throughput of all runs overlaid; then by run
// the precision error per module and step (where there are statistics), texts that were written, and configuration. Throws Error(data) for
// a config.json that is no JSON.
std::string report_page(const std::vector<RunMetrics>& runs);

}  // namespace mantissa::tools
