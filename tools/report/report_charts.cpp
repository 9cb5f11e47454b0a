#include "tools/report/report_charts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "mantissa/base/error.h"
#include "mantissa/base/integers.h"
#include "tools/report/svg.h"

namespace mantissa::tools {
namespace {

// Leaves room beside the drawing for half of a label of nine digits.
constexpr double kWidth = 664, kHeight = 260, kLeft = 64, kRight = 628, kTop = 10, kBottom = 226;

// A range of greater values has no size.
bool drawable(const MetricPoint& point) { return std::abs(point.value) <= 1e300; }

struct Frame {
  Axis x, y;
  double px(const MetricPoint& point) const { return x.place(static_cast<double>(point.step), kLeft, kRight); }
  double py(const MetricPoint& point) const { return y.place(point.value, kBottom, kTop); }
};

std::optional<Frame> frame_of(const std::vector<ChartLine>& lines) {
  double first = HUGE_VAL, last = -HUGE_VAL, low = HUGE_VAL, high = -HUGE_VAL;
  for (const ChartLine& line : lines) {
    for (const MetricPoint& point : *line.points) {
      if (!drawable(point)) continue;
      first = std::min(first, static_cast<double>(point.step));
      last = std::max(last, static_cast<double>(point.step));
      low = std::min(low, point.value);
      high = std::max(high, point.value);
    }
  }
  if (low > high) return {};
  return Frame{axis_over(first, last, 8), axis_over(low, high, 5)};
}

void draw_axes(Svg& svg, const Frame& frame) {
  for (const double tick : frame.y.ticks) {
    const double y = frame.y.place(tick, kBottom, kTop);
    svg.line(kLeft, y, kRight, y, "grid");
    svg.text(kLeft - 6, y + 4, "end", number_text(tick));
  }
  for (const double tick : frame.x.ticks) {
    const double x = frame.x.place(tick, kLeft, kRight);
    svg.line(x, kTop, x, kBottom, "grid");
    svg.text(x, kBottom + 16, "middle", number_text(tick, 9));
  }
  svg.text((kLeft + kRight) / 2, kHeight - 2, "middle", "step");
}

// Keeps two points, the least and the greatest, of each part, so that outliers stay. A part with a gap keeps it.
Series thinned(const Series& all) {
  constexpr size_t kParts = 500;
  if (all.size() <= 2 * kParts) return all;
  Series out;
  for (size_t part = 0; part < kParts; ++part) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(part * all.size() / kParts);
    const auto end = all.begin() + static_cast<std::ptrdiff_t>((part + 1) * all.size() / kParts);
    const auto gap = std::find_if(begin, end, [](const MetricPoint& point) { return !drawable(point); });
    const auto [least, most] = std::minmax_element(begin, gap, [](const auto& a, const auto& b) { return a.value < b.value; });
    if (begin != gap) out.insert(out.end(), {*std::min(least, most), *std::max(least, most)});
    if (gap != end) out.push_back(*gap);
  }
  return out;
}

std::string path_of(const Series& points, const Frame& frame) {
  std::string path;
  bool gap = true;
  for (const MetricPoint& point : points) {
    const bool finite = drawable(point);
    if (finite) {
      path += text(gap ? "M" : "L", number_text(frame.px(point)), ' ', number_text(frame.py(point)));
      if (gap) path += "h0";  // a point between two gaps shows as a dot
    }
    gap = !finite;
  }
  return path;
}

void draw_line(Svg& svg, const ChartLine& line, const Frame& frame) {
  const std::string color = text("run", line.run % kRunColors);
  svg.element("path", {{"class", (line.dots ? "line dashed " : "line ") + color}, {"d", path_of(thinned(*line.points), frame)}},
              line.label);
  if (!line.dots) return;
  for (const MetricPoint& point : *line.points) {
    if (!drawable(point)) continue;
    svg.element("circle",
                {{"class", "dot " + color}, {"cx", number_text(frame.px(point))}, {"cy", number_text(frame.py(point))}, {"r", "3"}},
                text(line.label, ", step ", point.step, ": ", number_text(point.value)));
  }
}

// ---- heat map

constexpr double kCellHeight = 16, kNames = 180, kCellsWidth = 720;
constexpr size_t kMostSteps = 100;

// Returns the color at a share of the range, by the stops of the color map viridis, which stays in order of lightness for the color-blind.
std::string color_of(double share) {
  constexpr std::array<std::array<double, 3>, 5> kStops{{{68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37}}};
  const double place = (share > 0.0 ? std::min(share, 1.0) : 0.0) * (kStops.size() - 1);  // NaN for a range without a size
  const auto stop = std::min(static_cast<size_t>(place), kStops.size() - 2);
  std::string out = "rgb(";
  for (size_t i = 0; i < 3; ++i) {
    const double value = kStops[stop][i] + (place - static_cast<double>(stop)) * (kStops[stop + 1][i] - kStops[stop][i]);
    out += text(i > 0 ? "," : "", std::lround(value));
  }
  return out + ")";
}

std::string color_of(const PrecisionEvent& cell, const Decibels& range) {
  if (!cell.amax) return "rgb(213,0,50)";
  return cell.sqnr_db ? color_of((*cell.sqnr_db - range.low) / std::max(1e-9, range.high - range.low)) : color_of(1.0);
}

double scaled_blocks(const PrecisionEvent& cell) {
  double blocks = 0.0;
  for (const auto& [exponent, count] : cell.scale_exponents()) blocks += static_cast<double>(count);
  return blocks;
}

// Lists the most frequent scales: ", scales 2^-9: 60%, 2^-8: 30% ...".
std::string scales_text(const PrecisionEvent& cell) {
  constexpr size_t kShown = 4;
  std::vector<std::pair<int64_t, int>> by_count;
  for (const auto& [exponent, count] : cell.scale_exponents()) by_count.emplace_back(-count, exponent);
  std::sort(by_count.begin(), by_count.end());
  const double blocks = scaled_blocks(cell);
  std::string out;
  for (size_t i = 0; i < std::min(kShown, by_count.size()); ++i) {
    const double percent = -100.0 * static_cast<double>(by_count[i].first) / blocks;
    out += text(i == 0 ? ", scales 2^" : ", 2^", by_count[i].second, ": ", number_text(percent, 3), '%');
  }
  return by_count.size() > kShown ? out + " ..." : out;
}

std::string cell_title(const PrecisionEvent& cell) {
  const std::string place = text(cell.module, ' ', cell.role, ", step ", cell.step, ": ");
  if (!cell.amax) return place + "NaN or Inf";
  return text(place, cell.sqnr_db ? number_text(*cell.sqnr_db, 4) + " dB" : "exact", ", clipped ", number_text(100.0 * cell.clipped, 3),
              "%, flushed ", number_text(100.0 * cell.flushed, 3), "%, amax ", number_text(*cell.amax, 4), scales_text(cell),
              cell.worst_expert
                  ? text(", worst expert ", cell.worst_expert->expert, ": ", number_text(cell.worst_expert->sqnr_db, 4), " dB")
                  : std::string());
}

// Maps steps to columns.
std::map<int64_t, size_t> columns_of(const std::vector<PrecisionEvent>& cells) {
  std::set<int64_t> steps;
  for (const PrecisionEvent& cell : cells) steps.insert(cell.step);
  const size_t stride = ceil_div(steps.size(), kMostSteps);
  std::map<int64_t, size_t> columns;
  size_t index = 0;
  for (const int64_t step : steps) {
    if (index++ % stride == 0) columns.emplace(step, columns.size());
  }
  return columns;
}

std::vector<std::string> rows_of(const std::vector<PrecisionEvent>& cells) {
  std::vector<std::string> rows;
  for (const PrecisionEvent& cell : cells) {
    if (std::find(rows.begin(), rows.end(), cell.module) == rows.end()) rows.push_back(cell.module);
  }
  return rows;
}

}  // namespace

std::string line_chart(const std::string& title, const std::vector<ChartLine>& lines) {
  const std::optional<Frame> frame = frame_of(lines);
  if (!frame) return {};
  Svg svg(kWidth, kHeight, title);
  draw_axes(svg, *frame);
  for (const ChartLine& line : lines) draw_line(svg, line, *frame);
  return std::move(svg).finish();
}

std::string heat_map(const std::string& title, const std::vector<PrecisionEvent>& cells, const Decibels& range) {
  const std::map<int64_t, size_t> columns = columns_of(cells);
  const std::vector<std::string> rows = rows_of(cells);
  const double width = kCellsWidth / static_cast<double>(columns.size()), bottom = kCellHeight * static_cast<double>(rows.size());
  Svg svg(kNames + kCellsWidth, bottom + 20, title);
  for (size_t i = 0; i < rows.size(); ++i) svg.text(kNames - 6, kCellHeight * (static_cast<double>(i) + 0.75), "end", rows[i]);
  for (const PrecisionEvent& cell : cells) {
    const auto column = columns.find(cell.step);
    if (column == columns.end()) continue;
    const auto row = static_cast<double>(std::find(rows.begin(), rows.end(), cell.module) - rows.begin());
    svg.element("rect",
                {{"x", number_text(kNames + width * static_cast<double>(column->second))},
                 {"y", number_text(kCellHeight * row)},
                 {"width", number_text(width)},
                 {"height", number_text(kCellHeight - 1)},
                 {"fill", color_of(cell, range)}},
                cell_title(cell));
  }
  svg.text(kNames, bottom + 14, "start", text("step ", columns.begin()->first));
  if (columns.size() > 1) svg.text(kNames + kCellsWidth, bottom + 14, "end", text("step ", columns.rbegin()->first));
  return std::move(svg).finish();
}

std::string heat_scale(const Decibels& range) {
  constexpr int kSteps = 32;
  Svg svg(kNames + kCellsWidth, 34, "colors of the heat maps");
  const double width = kCellsWidth / 2 / kSteps;
  for (int i = 0; i < kSteps; ++i) {
    svg.element("rect", {{"x", number_text(kNames + width * i)},
                         {"y", "0"},
                         {"width", number_text(width + 0.5)},
                         {"height", "14"},
                         {"fill", color_of((i + 0.5) / kSteps)}});
  }
  svg.text(kNames, 30, "start", number_text(range.low, 3) + " dB");
  svg.text(kNames + kCellsWidth / 2, 30, "end", number_text(range.high, 3) + " dB, or exact");
  return std::move(svg).finish();
}

}  // namespace mantissa::tools
