#include "tools/quantity.h"

#include <charconv>
#include <cmath>
#include <string_view>

#include "mantissa/base/error.h"
#include "mantissa/base/text.h"

namespace mantissa::tools {
namespace {

// Returns the factor of a unit; 0 if there is no such unit.
double unit_factor(std::string_view unit) {
  if (unit.empty()) return 1.0;
  constexpr std::string_view kDecimal = "kMGTPE", kBinary = "KMGTPE";
  const bool binary = unit.size() == 2 && unit[1] == 'i';
  const size_t power = (binary ? kBinary : kDecimal).find(unit[0]);
  if (power == std::string_view::npos || unit.size() > (binary ? 2U : 1U)) return 0.0;
  return std::pow(binary ? 1024.0 : 1000.0, static_cast<double>(power + 1));
}

}  // namespace

double quantity(const std::string& option, const std::string& word) {
  double number = 0.0;
  const char* const end = word.data() + word.size();
  const auto [unit, problem] = std::from_chars(word.data(), end, number);
  const double value = problem == std::errc() ? number * unit_factor({unit, end}) : 0.0;
  require(std::isfinite(value) && value > 0.0 && value <= 1e30, ExitCode::usage, option,
          ": must be a positive number, as 4e12 or 4T, with k, M, G, T, P, E for powers of 1000 or Ki, Mi, Gi, Ti, Pi, Ei for powers of "
          "1024, got '",
          printable(shortened(word)), "'");
  return value;
}

}  // namespace mantissa::tools
