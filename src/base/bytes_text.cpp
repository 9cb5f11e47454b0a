#include "mantissa/base/bytes_text.h"

#include <array>
#include <cmath>
#include <iomanip>

#include "mantissa/base/text.h"

namespace mantissa {

std::string bytes_text(int64_t bytes) {
  constexpr std::array kUnits = {" KiB", " MiB", " GiB", " TiB", " PiB", " EiB"};
  if (bytes < 1024) return text(bytes, " B");
  size_t unit = 0;
  double value = std::ldexp(static_cast<double>(bytes), -10);
  for (; value >= 1024.0 && unit + 1 < kUnits.size(); ++unit) value = std::ldexp(value, -10);
  return text(std::fixed, std::setprecision(1), value, kUnits[unit]);
}

}  // namespace mantissa
