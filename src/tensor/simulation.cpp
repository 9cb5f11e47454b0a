#include "mantissa/tensor/simulation.h"

#include <utility>

#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

Simulation Simulation::along(int dimension, int64_t transform) const {
  Simulation out = *this;
  out.hadamard = transform;
  out.contraction = dimension;
  if (dimension == 0 && block_rows == 1) std::swap(out.block_rows, out.block_cols);
  return out;
}

std::string element_text(const FreeElement& element) { return text('e', element.exponent_bits, 'm', element.mantissa_bits); }

const char* simulated_scale_name(SimulatedScale scale) { return scale == SimulatedScale::e8m0 ? "e8m0" : "e4m3"; }

const char* rounding_name(Rounding rounding) { return rounding == Rounding::nearest ? "nearest" : "stochastic"; }

std::ostream& operator<<(std::ostream& out, const Simulation& how) {
  if (!how) return out << "none";
  out << element_text(how.element) << ' ' << how.block_rows << 'x' << how.block_cols << ' ';
  out << (how.scale == SimulatedScale::e8m0 ? scale_rule_name(how.rule) : simulated_scale_name(how.scale));
  if (how.rounding == Rounding::stochastic) out << ' ' << rounding_name(how.rounding);
  if (how.hadamard > 0) out << " hadamard " << how.hadamard;
  return out;
}

}  // namespace mantissa
