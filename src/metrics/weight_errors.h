// Measures how far the codes of one weight are from its values, and where the error comes from. The figures are those that a run reports of
// it (precision.report_interval), to the last bit.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "mantissa/backend/backend.h"
#include "mantissa/metrics/events.h"
#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

// Returns none without error, or for NaN or Inf.
inline std::optional<double> decibels(double signal, double noise) {
  if (!(noise > 0.0) || !std::isfinite(noise)) return {};
  return 10.0 * std::log10(signal / noise);
}

// Returns what the kernel QuantizationError measured of NVFP4 with the scales of blocks, E4M3 under that of the tensor, as the exponents
// that they have: 127 + floor(log2 scale), 255 for NaN, as of other formats.
std::vector<double> with_exponents(std::span<const double> parts, const Quantization& how);

// Sums what the kernel QuantizationError measures of the operands of one module and role, and makes the figures of it.
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

// The sum of the squared error (x - q)^2 over the elements x of a weight, which have the codes q, by its cause:
//
//   dead zone   x^2 of the elements that are not zero and have the code 0: they are below half the least code of their block
//   scale       (x - q)^2 of the elements beyond the largest code of their block, which the scale clips
//   grid        (x - q)^2 of all others: the distance between two codes
//
// No element belongs to two of them, so they add up to the noise.
struct ErrorParts {
  double dead_zone = 0.0, scale = 0.0, grid = 0.0;

  double total() const { return dead_zone + scale + grid; }
  void add(const ErrorParts& other) { dead_zone += other.dead_zone, scale += other.scale, grid += other.grid; }
};

// The block with the least ratio of signal to noise, the first one of several.
struct WorstBlock {
  double sqnr_db = 0.0;
  int64_t row = 0, column = 0;  // its first element in the weight, where experts are one below the other

  void fields(auto& v) {
    v("sqnr_db", sqnr_db);
    v("row", row);
    v("column", column);
  }
};

struct WeightError {
  PrecisionEvent figures = {};                 // role "weight", step 0
  double signal = 0.0, noise = 0.0;            // sums of x^2 and (x - q)^2
  int64_t elements = 0, bytes = 0;             // bytes of the codes and scales
  std::optional<ErrorParts> parts = {};        // none: the format has no codes
  std::optional<WorstBlock> worst_block = {};  // none: no block has an error, or the format has no codes
};

class WeightErrors {
 public:
  // matrices: of a grouped weight, else 1.
  explicit WeightErrors(int64_t matrices) : matrices_(matrices) {}
  // Adds the next matrix: its values, rounded to bf16 and finite, and their codes, as training quantizes them.
  void add(const Tensor& rounded, const QuantizedTensor& codes);
  // Adds the next matrix in a format that has values only, as fprop reads it.
  void add(const Tensor& rounded, const Simulation& how);
  WeightError result() const;

 private:
  void add_measured(const Tensor& measured);
  void add_blocks(const Tensor& rounded, const QuantizedTensor& codes);

  int64_t matrices_, matrix_ = 0, rows_ = 0, bytes_ = 0;  // matrix_, rows_: added so far
  ErrorSums sums_;
  std::optional<WorstExpert> worst_expert_;
  std::optional<ErrorParts> parts_;
  double worst_ratio_ = 0.0;  // noise to signal of worst_block_
  std::optional<WorstBlock> worst_block_;
};

}  // namespace mantissa
