// Runs, and analyses of saved models, as one HTML file that needs nothing else: it holds their figures as JSON, and the style and scripts
// that draw them.
//
// cmake/embed_page.cmake joins report.html with report.css, report_charts.js, report_maps.js, report_analyses.js and report.js. The element
// "metrics" of the page holds {"runs": [...], "analyses": [...], "comparison": null or a table: title, head, rows, notes}. Each run has
// these members; numbers have seven significant digits:
//   name, precision, step, steps, restarts (their steps), tokens, parameters, ranks (null: unknown), device, config (text; "": none)
//   series     by name: steps, as [first, stride, count] for each range of them; values (null: not finite); points (how many the run has)
//   best       null, or value and objective: the least figure by which evaluations compare, and its name ("loss", "kl", ...)
//   maps       one per role: modules; cells [module, step, dB or null, clipped, flushed, amax or null, scales], and behind these the worst
//              expert and its dB; steps (how many the run has). Scales are exponents, each before its number of blocks
//   experts    null, or step and first (steps of the newest and the oldest report) and layers, whose load is the sum over these reports
//   samples    count, newest (step, prompt and text of each)
//   settings   the configuration by dotted key, as JSON texts
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "mantissa/json/json.h"
#include "metrics/run_metrics.h"

namespace mantissa::tools {

// Bounds a page to about 40 MB, which browsers draw in a few seconds.
struct PageLimits {
  size_t points = 2'000'000;  // in all series; beyond it long ones are thinned to extremes
  size_t cells = 100'000;     // in all maps; beyond it every second, third, ... step is kept
};

// In read_analysis.cpp. Reads what `mantissa analyze --json` wrote, and returns the members that the page shows; those that the file lacks
// are null or empty. Throws Error(data) that names file and member for any other file.
Json read_analysis(const std::filesystem::path& file);

// Analyses are as read_analysis() returns them, a comparison is as comparison_page() in tools/compare does; null: none. Throws Error(data)
// for a config.json that is no JSON, or whose ranks are none.
std::string report_page(const std::vector<RunMetrics>& runs, const Json::Entries& analyses = {}, const PageLimits& limits = {},
                        const Json& comparison = {});

}  // namespace mantissa::tools
