// Sums what the kernel QuantizationError measures of the operands of one module and role, and makes the figures of it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>

#include "mantissa/backend/backend.h"
#include "mantissa/metrics/events.h"

namespace mantissa {

// Returns none without error, or for NaN or Inf.
inline std::optional<double> decibels(double signal, double noise) {
  if (!(noise > 0.0) || !std::isfinite(noise)) return {};
  return 10.0 * std::log10(signal / noise);
}

class ErrorSums {
 public:
  void add(std::span<const double> parts) {
    using Part = QuantizationError::Part;
    const double amax = std::isnan(parts_[Part::amax]) ? parts_[Part::amax] : std::max(parts[Part::amax], parts_[Part::amax]);
    for (size_t i = 0; i < parts_.size(); ++i) parts_[i] += parts[i];
    parts_[Part::amax] = amax;
  }
  void add(const ErrorSums& other) { add(other.parts_); }
  double part(QuantizationError::Part which) const { return parts_[which]; }
  bool none() const { return part(QuantizationError::elements) == 0.0; }

  void write(PrecisionEvent& event) const {
    using Part = QuantizationError::Part;
    event.sqnr_db = decibels(part(Part::signal), part(Part::noise));
    event.clipped = part(Part::clipped) / part(Part::elements);
    event.flushed = part(Part::flushed) / part(Part::elements);
    if (std::isfinite(part(Part::amax))) event.amax = part(Part::amax);
    for (uint16_t code = 0; code < 256; ++code) {
      const auto blocks = static_cast<int64_t>(parts_[static_cast<size_t>(Part::scales + code)]);
      if (blocks > 0) event.scales[code] = blocks;
    }
  }

 private:
  std::array<double, QuantizationError::size> parts_{};
};

}  // namespace mantissa
