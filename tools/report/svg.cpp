#include "tools/report/svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace mantissa::tools {
namespace {

// Returns the least of 1, 2, 5 times a power of ten that is not below `value`.
double round_step(double value) {
  const double power = std::pow(10.0, std::floor(std::log10(value)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= value * (1.0 - 1e-9)) return factor * power;
  }
  return 10.0 * power;
}

std::string place_text(double value) { return number_text(std::round(100.0 * value) / 100.0, 7); }

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      case '\n':
      case '\t': out += c; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          out += "\xEF\xBF\xBD";
        } else {
          out += c;
        }
    }
  }
  return out;
}

std::string number_text(double value, int digits) {
  std::array<char, 40> buffer{};
  const int size = std::snprintf(buffer.data(), buffer.size(), "%.*g", digits, value == 0.0 ? 0.0 : value);  // no -0
  return {buffer.data(), static_cast<size_t>(size)};
}

Axis axis_over(double low, double high, int count) {
  const double size = std::max(std::abs(low), std::abs(high));
  if (!(high - low > std::max(1e-9 * size, 1e-300))) {
    const double margin = size < 1e-290 ? 1.0 : 0.1 * size;
    low -= margin;
    high = low + 2.0 * margin;
  }
  const double step = round_step((high - low) / count);
  Axis axis{.low = std::floor(low / step + 1e-9) * step, .high = std::ceil(high / step - 1e-9) * step};
  const auto first = std::llround(axis.low / step), last = std::llround(axis.high / step);
  for (auto i = first; i <= last; ++i) axis.ticks.push_back(static_cast<double>(i) * step);
  return axis;
}

Svg::Svg(double width, double height, const std::string& title)
    : out_("<svg viewBox=\"0 0 " + number_text(width) + " " + number_text(height) + "\" role=\"img\"><title>" + escaped(title) +
           "</title>\n") {}

void Svg::element(const char* name, Attributes attributes, const std::string& title) {
  out_ += std::string("<") + name;
  for (const auto& [key, value] : attributes) out_ += std::string(" ") + key + "=\"" + escaped(value) + "\"";
  out_ += title.empty() ? "/>\n" : "><title>" + escaped(title) + "</title></" + name + ">\n";
}

void Svg::line(double x1, double y1, double x2, double y2, const char* style) {
  element("line", {{"class", style}, {"x1", place_text(x1)}, {"y1", place_text(y1)}, {"x2", place_text(x2)}, {"y2", place_text(y2)}});
}

void Svg::text(double x, double y, const char* anchor, const std::string& content) {
  out_ += "<text x=\"" + place_text(x) + "\" y=\"" + place_text(y) + "\" text-anchor=\"" + anchor + "\">" + escaped(content) + "</text>\n";
}

}  // namespace mantissa::tools
