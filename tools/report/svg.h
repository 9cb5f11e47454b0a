// A small writer of inline SVG: elements, escaped text, axes whose ticks are 1, 2 or 5 times a power of ten.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mantissa::tools {

// Text for element content and attribute values. Control characters, which XML forbids, become U+FFFD.
std::string escaped(std::string_view text);
std::string number_text(double value, int digits = 5);  // "0.0006", "3.2e-05"; the shortest with so many significant digits

struct Axis {
  double low = 0.0, high = 1.0;
  std::vector<double> ticks = {};  // within [low, high]

  // Returns the place of `value` on a line from `from` (low) to `to` (high).
  double place(double value, double from, double to) const { return from + (value - low) / (high - low) * (to - from); }
};
// Holds all of [low, high], with about `count` ticks; a range too narrow for them is widened. Neither is beyond 1e300.
Axis axis_over(double low, double high, int count);

class Svg {
 public:
  using Attributes = std::initializer_list<std::pair<const char*, std::string>>;

  // `title` is what a screen reader and a resting pointer say.
  Svg(double width, double height, const std::string& title);
  // Writes <name a="1"/>, or with a <title> inside. Values of attributes and the title are escaped here.
  void element(const char* name, Attributes attributes, const std::string& title = {});
  void line(double x1, double y1, double x2, double y2, const char* style);
  // anchor: "start", "middle" or "end".
  void text(double x, double y, const char* anchor, const std::string& content);
  std::string finish() && { return std::move(out_) + "</svg>\n"; }

 private:
  std::string out_;
};

}  // namespace mantissa::tools
