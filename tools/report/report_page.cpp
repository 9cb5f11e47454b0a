#include "tools/report/report_page.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "job/launch.h"
#include "json/json_fields.h"
#include "mantissa/base/integers.h"
#include "mantissa/metrics/events.h"

namespace mantissa::tools {
namespace {

using Runs = std::vector<RunMetrics>;

constexpr std::string_view kPage =
#include "report_page.inc"
    ;

constexpr std::array<std::pair<const char*, Series RunMetrics::*>, 6> kSeries{{{"loss", &RunMetrics::loss},
                                                                               {"valid_loss", &RunMetrics::valid_loss},
                                                                               {"lr", &RunMetrics::lr},
                                                                               {"grad_norm", &RunMetrics::gradient_norm},
                                                                               {"tok_s", &RunMetrics::tokens_per_second},
                                                                               {"imbalance", &RunMetrics::imbalance}}};

// Seven digits are more than a chart shows, and half the text of a double. Null stands for none and for what is not finite.
Json number_json(const std::optional<double>& value) {
  if (!value || !std::isfinite(*value)) return {};
  std::array<char, 32> digits{};
  std::snprintf(digits.data(), digits.size(), "%.7g", *value);
  return std::strtod(digits.data(), nullptr);
}

// ---- series

// Keeps the first and the last point and, of each part, the least and the greatest, so that outliers stay, and a value that is not finite.
Series thinned(const Series& all, size_t most) {
  if (all.size() <= most) return all;
  const size_t parts = std::max<size_t>(1, most / 4);
  std::set<size_t> kept{0, all.size() - 1};
  for (size_t part = 0; part < parts; ++part) {
    const size_t begin = part * all.size() / parts, end = (part + 1) * all.size() / parts;
    size_t least = begin, greatest = begin, gap = begin;
    for (size_t i = begin; i < end; ++i) {
      if (!std::isfinite(all[i].value)) {
        gap = i;
        continue;
      }
      if (!(all[i].value >= all[least].value)) least = i;
      if (!(all[i].value <= all[greatest].value)) greatest = i;
    }
    kept.insert({least, greatest, gap});
  }
  Series out;
  for (const size_t i : kept) out.push_back(all[i]);
  return out;
}

// Steps that follow each other at one stride are one range.
Json steps_json(const Series& points) {
  constexpr uint64_t kMostStride = 1'000'000'000;  // beyond it, and where steps descend, a step is a range of its own
  const auto stride_behind = [&](size_t i) { return static_cast<uint64_t>(points[i + 1].step) - static_cast<uint64_t>(points[i].step); };
  Json::Entries ranges;
  for (size_t begin = 0, end; begin < points.size(); begin = end) {
    uint64_t stride = 1;
    end = begin + 1;
    if (end < points.size() && stride_behind(begin) <= kMostStride) {
      stride = stride_behind(begin);
      while (end < points.size() && stride_behind(end - 1) == stride) ++end;
    }
    ranges.push_back(Json{points[begin].step, stride, end - begin});
  }
  return ranges;
}

Json series_json(const Series& all, size_t most) {
  const Series points = thinned(all, most);
  Json::Entries values;
  for (const MetricPoint& point : points) values.push_back(number_json(point.value));
  return Json{{"steps", steps_json(points)}, {"values", std::move(values)}, {"points", all.size()}};
}

size_t most_points(const Runs& runs, const PageLimits& limits) {
  size_t points = 0, series = 0;
  for (const RunMetrics& run : runs) {
    for (const auto& [name, member] : kSeries) {
      points += (run.*member).size();
      if (!(run.*member).empty()) ++series;
    }
  }
  return points <= limits.points ? std::numeric_limits<size_t>::max() : limits.points / series;
}

// ---- maps of errors

Json cell_json(const PrecisionEvent& cell, size_t row) {
  Json::Entries scales;
  for (const auto& [exponent, blocks] : cell.scale_exponents()) {
    scales.emplace_back(exponent);
    scales.emplace_back(blocks);
  }
  Json::Entries out{row,
                    cell.step,
                    number_json(cell.sqnr_db),
                    number_json(cell.clipped),
                    number_json(cell.flushed),
                    number_json(cell.amax),
                    std::move(scales)};
  if (cell.worst_expert) {
    out.emplace_back(cell.worst_expert->expert);
    out.push_back(number_json(cell.worst_expert->sqnr_db));
  }
  return out;
}

// Keeps every `stride`-th of the steps.
Json map_json(const std::string& role, const std::vector<const PrecisionEvent*>& all, size_t stride) {
  std::map<int64_t, size_t> turns;
  for (const PrecisionEvent* const cell : all) turns[cell->step] = 0;
  size_t turn = 0;
  for (auto& step : turns) step.second = turn++;
  std::map<std::string, size_t> rows;
  Json::Entries modules, cells;
  for (const PrecisionEvent* const cell : all) {
    if (turns.at(cell->step) % stride != 0) continue;
    const auto [row, is_new] = rows.emplace(cell->module, modules.size());
    if (is_new) modules.emplace_back(cell->module);
    cells.push_back(cell_json(*cell, row->second));
  }
  return Json{{"role", role}, {"modules", std::move(modules)}, {"cells", std::move(cells)}, {"steps", turns.size()}};
}

Json maps_json(const RunMetrics& run, size_t stride) {
  std::map<std::string, std::vector<const PrecisionEvent*>> by_role;
  for (const PrecisionEvent& cell : run.precision) by_role[cell.role].push_back(&cell);
  Json::Entries maps;
  for (const auto& [role, cells] : by_role) maps.push_back(map_json(role, cells, stride));
  return maps;
}

size_t step_stride(const Runs& runs, const PageLimits& limits) {
  size_t cells = 0;
  for (const RunMetrics& run : runs) cells += run.precision.size();
  return std::max<size_t>(1, ceil_div(cells, limits.cells));
}

// ---- experts, texts, configuration

// Sums the assignments of each expert of a layer over the reports of the newest steps.
std::vector<int64_t> layer_load(const std::vector<RoutingPoint>& routing, int64_t layer) {
  std::vector<int64_t> sum;
  for (const RoutingPoint& point : routing) {
    for (const LayerRouting& other : point.layers) {
      if (other.layer != layer) continue;
      sum.resize(std::max(sum.size(), other.load.size()));
      for (size_t e = 0; e < other.load.size(); ++e) sum[e] += other.load[e];
    }
  }
  return sum;
}

Json experts_json(const RunMetrics& run) {
  if (run.routing.empty()) return {};
  const RoutingPoint& newest = run.routing.back();
  Json::Entries layers;
  for (const LayerRouting& layer : newest.layers) {
    layers.push_back(Json{{"layer", layer.layer},
                          {"imbalance", number_json(layer.imbalance)},
                          {"dropped", number_json(layer.dropped)},
                          {"balance_loss", number_json(layer.balance_loss)},
                          {"z_loss", number_json(layer.z_loss)},
                          {"load", layer_load(run.routing, layer.layer)}});
  }
  return Json{{"step", newest.step}, {"first", run.routing.front().step}, {"layers", std::move(layers)}};
}

Json samples_json(const RunMetrics& run) {
  constexpr size_t kMost = 12;
  Json::Entries newest;
  for (size_t i = run.samples.size(); i > 0 && newest.size() < kMost; --i) {
    const SampleEvent& sample = run.samples[i - 1];
    newest.push_back(Json{{"step", sample.step}, {"prompt", sample.prompt}, {"text", sample.text}});
  }
  return Json{{"count", run.samples.size()}, {"newest", std::move(newest)}};
}

Json settings_json(const Json& config) {
  Json settings = Json::Members();
  for (const auto& [key, value] : leaves_of(config)) settings.add(key, value->dump());
  return settings;
}

// Reads it from the configuration; the metrics do not have it.
int64_t rank_count(const Json& config, const std::string& source) {
  int64_t product = 1;
  for (const char* const key : {"data", "tensor"}) {
    const Json* const found = config.get("parallel").find(key);
    if (found != nullptr) product *= JsonReader(*found, source, text("parallel.", key)).as<int64_t>(limits::between(1, kMostRanks));
  }
  return product;
}

// Returns the least objective of the evaluations and its name, as checkpoint.keep_best compares them. Null: none has a finite one.
Json best_json(const RunMetrics& run, const Json& config, const std::string& source) {
  std::optional<double> weight, least;
  if (!run.valid_kl.empty()) {
    constexpr const char* kWeight = "teacher_weight";
    const Json* const found = config.get("training").find(kWeight);
    weight = found ? JsonReader(*found, source, text("training.", kWeight)).as<double>(Limits{.min = 0, .max = 1, .above_min = true}) : 1.0;
  }
  auto divergence = run.valid_kl.begin();
  for (const MetricPoint& point : run.valid_loss) {
    Evaluation result{.loss = point.value};
    while (divergence != run.valid_kl.end() && divergence->step < point.step) ++divergence;
    if (divergence != run.valid_kl.end() && divergence->step == point.step) result.divergence = divergence->value;
    if (weight && !result.divergence) continue;
    const double reached = result.objective(weight.value_or(1.0));
    if (std::isfinite(reached) && (!least || reached < *least)) least = reached;
  }
  return least ? Json{{"value", number_json(least)}, {"objective", objective_name(weight)}} : Json();
}

Json run_json(const RunMetrics& run, size_t most, size_t stride) {
  const std::string source = run.name + "/config.json";
  const bool configured = !run.config.empty();
  const Json config = configured ? parse_json(run.config, source) : Json();
  Json::Entries restarts;
  for (size_t i = 1; i < run.starts.size(); ++i) restarts.emplace_back(run.starts[i]);
  Json series;
  for (const auto& [name, member] : kSeries) series.add(name, series_json(run.*member, most));
  return Json{{"name", run.name},
              {"precision", run.start.precision},
              {"step", run.lr.empty() ? run.start.step : run.lr.back().step},
              {"steps", run.start.steps},
              {"restarts", std::move(restarts)},
              {"tokens", run.tokens},
              {"parameters", run.start.parameters},
              {"ranks", configured ? Json(rank_count(config, source)) : Json()},
              {"device", text(run.start.device, ", ", count_text(run.start.threads, "thread"))},
              {"series", std::move(series)},
              {"best", best_json(run, config, source)},
              {"maps", maps_json(run, stride)},
              {"experts", experts_json(run)},
              {"samples", samples_json(run)},
              {"settings", configured ? settings_json(config) : Json(Json::Members())},
              {"config", run.config}};
}

// No text ends the element or opens a comment in it: "<" stands in strings alone, where it has an escape.
std::string embedded(const Json& json) {
  std::string out;
  for (const char c : json.dump(-1, Json::Order::keys)) {
    if (c == '<') {
      out += "\\u003c";
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

std::string report_page(const Runs& runs, const Json::Entries& analyses, const PageLimits& limits, const Json& comparison) {
  constexpr std::string_view kMark = "{{metrics}}";
  const size_t place = kPage.find(kMark);
  const size_t most = most_points(runs, limits), stride = step_stride(runs, limits);
  Json::Entries all;
  for (const RunMetrics& run : runs) all.push_back(run_json(run, most, stride));
  Json metrics;
  metrics.add("runs", std::move(all));
  metrics.add("analyses", analyses);
  metrics.add("comparison", comparison);
  std::string page(kPage.substr(0, place));
  page += embedded(metrics);
  return page += kPage.substr(place + kMark.size());
}

}  // namespace mantissa::tools
