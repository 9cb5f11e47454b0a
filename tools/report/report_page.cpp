#include "tools/report/report_page.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <span>

#include "job/launch.h"
#include "json/json_fields.h"
#include "mantissa/metrics/events.h"
#include "tools/report/report_charts.h"
#include "tools/report/svg.h"

namespace mantissa::tools {
namespace {

using Runs = std::vector<RunMetrics>;

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --ink: #222; --soft: #777; --grid: #ddd; --paper: #fff;
  --run0: #0068b0; --run1: #c8500a; --run2: #00815c; --run3: #a8488f; --run4: #8a6d00; --run5: #2f8fc0; --run6: #6a4a9c; --run7: #555; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --soft: #999; --grid: #3a3a3a; --paper: #161616;
  --run0: #5cb3f0; --run1: #f58a4b; --run2: #3fc79a; --run3: #e08fc8; --run4: #dcbb3c; --run5: #9bd8f5; --run6: #b79cf0; --run7: #aaa; } }
body { font: 15px/1.5 sans-serif; color: var(--ink); background: var(--paper); max-width: 1340px; margin: 2em auto; padding: 0 1em; }
h1, h2, h3 { font-weight: 600; line-height: 1.2; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr)); gap: 1em 2em; margin-top: 1.5em; }
figure { margin: 0 0 1em; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: var(--soft); }
table { border-collapse: collapse; } th, td { text-align: left; padding: 0.15em 1em 0.15em 0; border-bottom: 1px solid var(--grid); }
pre { overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--grid); padding-left: 1em; }
.scroll { overflow-x: auto; } td.text { overflow-wrap: anywhere; min-width: 7em; } .soft { color: var(--soft); } summary { cursor: pointer; }
.grid { stroke: var(--grid); stroke-width: 1; }
.line { fill: none; stroke-width: 1.5; stroke-linejoin: round; stroke-linecap: round; } .dashed { stroke-dasharray: 5 4; }
.swatch { display: inline-block; width: 1.6em; height: 0; border-top: 4px solid; vertical-align: middle; margin-right: 0.5em; }
)";

std::string style() {
  std::string out = kStyle;
  for (size_t i = 0; i < kRunColors; ++i)
    out += text(".line.run", i, " { stroke: var(--run", i, "); } .dot.run", i, " { fill: var(--run", i, "); } .swatch.run", i,
                " { border-color: var(--run", i, "); }\n");
  return out;
}

std::string swatch(size_t run) { return text("<span class=\"swatch run", run % kRunColors, "\"></span>"); }

// ---- summary

std::string last_text(const Series& series) { return series.empty() ? "-" : number_text(series.back().value); }

std::string best_text(const Series& series) {
  double best = HUGE_VAL;
  for (const MetricPoint& point : series) best = std::fmin(best, point.value);
  return std::isfinite(best) ? number_text(best) : "-";
}

// Returns "2, at steps 100, 350"; of many the newest.
std::string restarts_text(const RunMetrics& run) {
  constexpr size_t kShown = 4;
  if (run.starts.size() < 2) return "0";
  const std::span<const int64_t> steps = std::span(run.starts).subspan(1);
  const size_t older = steps.size() - std::min(kShown, steps.size());
  return text(steps.size(), ", at ", steps.size() == 1 ? "step " : "steps ", older > 0 ? "... " : "", joined(steps.subspan(older)));
}

// Reads it from the configuration; the metrics do not have it.
std::string ranks_text(const RunMetrics& run) {
  if (run.config.empty()) return "-";
  const std::string source = run.name + "/config.json";
  const Json config = parse_json(run.config, source);
  int64_t ranks = 1;
  for (const char* const key : {"data", "tensor"}) {
    const Json* const found = config.get("parallel").find(key);
    if (found != nullptr) ranks *= JsonReader(*found, source, text("parallel.", key)).as<int64_t>(limits::between(1, kMostRanks));
  }
  return std::to_string(ranks);
}

std::string text_cell(const std::string& content) { return "<td class=\"text\">" + content + "</td>"; }

std::string summary_row(const RunMetrics& run, size_t index) {
  const int64_t step = run.lr.empty() ? run.start.step : run.lr.back().step;
  std::string row = "<tr>" + text_cell(swatch(index) + escaped(run.name)) + text_cell(escaped(run.start.precision));
  for (const std::string& cell :
       {text(step, " of ", run.start.steps), restarts_text(run), text(run.tokens), text(run.start.parameters), last_text(run.loss),
        last_text(run.valid_loss), best_text(run.valid_loss), last_text(run.tokens_per_second), ranks_text(run)})
    row += "<td>" + cell + "</td>";
  return row + text_cell(escaped(text(run.start.device, ", ", count_text(run.start.threads, "thread")))) + "</tr>\n";
}

std::string summary(const Runs& runs) {
  std::string out = "<div class=\"scroll\"><table>\n<tr>";
  for (const char* head : {"run", "precision", "steps", "restarts", "tokens", "parameters", "last training loss", "last validation loss",
                           "best", "tok/s", "ranks", "device"})
    out += text("<th>", head, "</th>");
  out += "</tr>\n";
  for (size_t i = 0; i < runs.size(); ++i) out += summary_row(runs[i], i);
  return out + "</table></div>\n";
}

// ---- charts

std::string figure(const std::string& title, const std::string& drawing) {
  return "<figure><figcaption>" + escaped(title) + "</figcaption>\n" + (drawing.empty() ? "<p class=\"soft\">no values</p>\n" : drawing) +
         "</figure>\n";
}

std::string chart(const Runs& runs, const std::string& title, Series RunMetrics::*series) {
  std::vector<ChartLine> lines;
  for (size_t i = 0; i < runs.size(); ++i) lines.push_back({.label = runs[i].name, .run = i, .dots = false, .points = &(runs[i].*series)});
  return figure(title, line_chart(title, lines));
}

std::string loss_chart(const Runs& runs) {
  std::vector<ChartLine> lines;
  for (size_t i = 0; i < runs.size(); ++i) {
    lines.push_back({.label = runs[i].name + " training", .run = i, .dots = false, .points = &runs[i].loss});
    lines.push_back({.label = runs[i].name + " validation", .run = i, .dots = true, .points = &runs[i].valid_loss});
  }
  return figure("loss (dashed: validation)", line_chart("loss", lines));
}

// ---- precision

// Scales the colors of all maps together, so that a color means the same error in each of them. The range is at least 3 dB, so that colors
// far apart always mean errors far apart.
Decibels common_range(const Runs& runs) {
  Decibels range{HUGE_VAL, -HUGE_VAL};
  for (const RunMetrics& run : runs) {
    for (const PrecisionEvent& cell : run.precision) {
      if (cell.sqnr_db) range = {std::min(range.low, *cell.sqnr_db), std::max(range.high, *cell.sqnr_db)};
    }
  }
  if (range.low > range.high) return {0, 3};
  return {std::min(range.low, range.high - 3), range.high};
}

std::map<std::string, std::vector<PrecisionEvent>> cells_by_role(const RunMetrics& run) {
  std::map<std::string, std::vector<PrecisionEvent>> by_role;
  for (const PrecisionEvent& cell : run.precision) by_role[cell.role].push_back(cell);
  return by_role;
}

std::string heat_figure(const std::string& title, const std::vector<PrecisionEvent>& cells, const Decibels& range) {
  return figure(title, heat_map(title, cells, range));
}

std::string precision(const Runs& runs) {
  if (std::all_of(runs.begin(), runs.end(), [](const RunMetrics& run) { return run.precision.empty(); }))
    return "<p class=\"soft\">No run has precision statistics; precision.report_interval turns them on.</p>\n";
  const Decibels range = common_range(runs);
  std::string out =
      "<p>Signal to quantization noise per module and step, all maps by one scale; a red cell holds NaN or Inf. A cell tells more under "
      "the "
      "pointer.</p>\n" +
      heat_scale(range);
  for (const RunMetrics& run : runs) {
    for (const auto& [role, cells] : cells_by_role(run)) out += heat_figure(text(run.name, ": ", role), cells, range);
  }
  return out;
}

// ---- texts and configuration

std::string samples(const RunMetrics& run) {
  constexpr size_t kMost = 12;
  std::string out = "<h3>" + escaped(run.name) + "</h3>\n";
  const size_t shown = std::min(kMost, run.samples.size());
  if (shown < run.samples.size()) out += text("<p class=\"soft\">the newest ", shown, " of ", run.samples.size(), "</p>\n");
  for (size_t i = 0; i < shown; ++i) {
    const SampleEvent& event = run.samples[run.samples.size() - 1 - i];
    out += text("<details", i == 0 ? " open=\"open\"" : "", "><summary>step ", event.step, "</summary><pre><b>", escaped(event.prompt),
                "</b>", escaped(event.text), "</pre></details>\n");
  }
  return shown > 0 ? out : std::string();
}

std::string all_samples(const Runs& runs) {
  std::string out;
  for (const RunMetrics& run : runs) out += samples(run);
  return out.empty() ? out : "<h2>Samples</h2>\n" + out;
}

// Returns settings by dotted key.
std::map<std::string, std::string> settings(const RunMetrics& run) {
  std::map<std::string, std::string> out;
  if (run.config.empty()) return out;
  const Json config = parse_json(run.config, run.name + "/config.json");
  for (const auto& [key, value] : leaves_of(config)) out[key] = value->dump();
  return out;
}

bool has_setting(const std::map<std::string, std::string>& values, const std::string& key, const std::string& value) {
  const auto found = values.find(key);
  return found != values.end() && found->second == value;
}

std::string setting_cell(const std::map<std::string, std::string>& values, const std::string& key) {
  const auto found = values.find(key);
  return text_cell(found == values.end() ? "-" : escaped(found->second));
}

std::string setting_row(const std::string& key, const std::vector<std::map<std::string, std::string>>& of_runs) {
  std::string row = "<tr>" + text_cell(escaped(key));
  for (const auto& values : of_runs) row += setting_cell(values, key);
  return row + "</tr>\n";
}

std::string head_of_differences(const Runs& runs) {
  std::string head = "<h3>What differs</h3>\n<div class=\"scroll\"><table>\n<tr><th>setting</th>";
  for (const RunMetrics& run : runs) head += "<th>" + escaped(run.name) + "</th>";
  return head + "</tr>\n";
}

std::string differences(const Runs& runs) {
  std::vector<std::map<std::string, std::string>> all;
  std::map<std::string, std::string> keys;
  for (const RunMetrics& run : runs) keys.merge(std::map(all.emplace_back(settings(run))));
  std::string rows;
  for (const auto& [key, first] : keys) {
    bool differs = false;
    for (const auto& values : all) differs = differs || !has_setting(values, key, first);
    if (differs) rows += setting_row(key, all);
  }
  if (rows.empty()) return {};
  return head_of_differences(runs) + rows + "</table></div>\n";
}

std::string configurations(const Runs& runs) {
  std::string out = "<h2>Configuration</h2>\n" + differences(runs);
  for (const RunMetrics& run : runs)
    out += "<details><summary>" + escaped(run.name) + "</summary><pre>" +
           (run.config.empty() ? "the run folder has no config.json" : escaped(run.config)) + "</pre></details>\n";
  return out;
}

// ---- experts

// Sums the assignments of each expert of a layer in the newest steps.
std::vector<int64_t> load_of(const std::vector<RoutingPoint>& routing, int64_t layer) {
  std::vector<int64_t> sum;
  for (const RoutingPoint& point : routing) {
    for (const LayerRouting& of : point.layers) {
      if (of.layer != layer) continue;
      sum.resize(std::max(sum.size(), of.load.size()));
      for (size_t e = 0; e < of.load.size(); ++e) sum[e] += of.load[e];
    }
  }
  return sum;
}

std::string layer_row(const RunMetrics& run, const LayerRouting& newest) {
  const std::vector<int64_t> load = load_of(run.routing, newest.layer);
  const auto most = std::ranges::max_element(load);
  double all = 0.0;
  for (const int64_t choices : load) all += static_cast<double>(choices);
  const bool any = all > 0.0;
  const double over_mean = any ? static_cast<double>(*most) * static_cast<double>(load.size()) / all : 0.0;
  const auto optional = [](const std::optional<double>& value) { return value ? number_text(*value, 4) : std::string("-"); };
  std::string row = "<tr>";
  for (const std::string& cell :
       {text(newest.layer), number_text(newest.imbalance, 4), any ? number_text(over_mean, 4) : "-", any ? text(most - load.begin()) : "-",
        number_text(100.0 * newest.dropped, 3) + "%", optional(newest.balance_loss), optional(newest.z_loss)})
    row += "<td>" + cell + "</td>";
  return row + "</tr>\n";
}

// Writes a row for each layer with experts.
std::string experts(const RunMetrics& run) {
  if (run.routing.empty()) return {};
  const RoutingPoint& newest = run.routing.back();
  std::string out = "<h3>" + escaped(run.name) + "</h3>\n<div class=\"scroll\"><table>\n<tr>";
  for (const std::string& head : {std::string("layer"), text("load, largest over mean, step ", newest.step),
                                  text("the same of the steps from ", run.routing.front().step), std::string("busiest expert in these"),
                                  std::string("dropped"), std::string("balance loss"), std::string("z-loss")})
    out += "<th>" + head + "</th>";
  out += "</tr>\n";
  for (const LayerRouting& layer : newest.layers) out += layer_row(run, layer);
  return out + "</table></div>\n";
}

std::string all_experts(const Runs& runs) {
  std::string out;
  for (const RunMetrics& run : runs) out += experts(run);
  return out.empty() ? out : "<h2>Experts</h2>\n" + out;
}

// Writes the section only if a run has experts.
std::string load_chart(const Runs& runs) {
  const bool any = std::ranges::any_of(runs, [](const RunMetrics& run) { return !run.imbalance.empty(); });
  return any ? chart(runs, "load of experts, largest over mean, worst layer", &RunMetrics::imbalance) : "";
}

}  // namespace

std::string report_page(const Runs& runs) {
  std::string title = "mantissa report:";
  for (const RunMetrics& run : runs) title += " " + run.name;
  return "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><title>" + escaped(title) +
         "</title>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<style>" + style() +
         "</style></head>\n<body>\n<h1>" + escaped(title) + "</h1>\n" + summary(runs) + "<div class=\"charts\">\n" + loss_chart(runs) +
         chart(runs, "learning rate", &RunMetrics::lr) + chart(runs, "gradient norm", &RunMetrics::gradient_norm) +
         chart(runs, "throughput, tokens per second", &RunMetrics::tokens_per_second) + load_chart(runs) + "</div>\n" + all_experts(runs) +
         "<h2>Precision</h2>\n" + precision(runs) + all_samples(runs) + configurations(runs) + "</body></html>\n";
}

}  // namespace mantissa::tools
