#include "mantissa/tensor/quantized_tensor.h"

#include <utility>

#include "mantissa/base/integers.h"

namespace mantissa {

const char* format_name(Format format) {
  switch (format) {
    case Format::none: return "none";
    case Format::e4m3: return "e4m3";
    case Format::e5m2: return "e5m2";
    case Format::e2m1: return "e2m1";
    case Format::nvfp4: return "nvfp4";
  }
  return "unknown";
}

const char* scale_rule_name(ScaleRule rule) {
  switch (rule) {
    case ScaleRule::rceil: return "rceil";
    case ScaleRule::floor: return "floor";
    case ScaleRule::flashinfer: return "flashinfer";
    case ScaleRule::even: return "even";
    case ScaleRule::ceil: return "ceil";
    case ScaleRule::mse: return "mse";
    case ScaleRule::nearest: return "nearest";
  }
  return "unknown";
}

std::string scales_text(const Quantization& how) {
  if (how.format == Format::nvfp4) return text(" 2^", int{how.tensor_exponent});
  return how.range == ScaleRange{} ? "" : text(" 2^", int{how.range.least} - 127, "..2^", int{how.range.most} - 127);
}

std::ostream& operator<<(std::ostream& out, const Quantization& how) {
  if (!how) return out << "none";
  return out << format_name(how.format) << ' ' << how.block_rows << 'x' << how.block_cols << ' ' << scale_rule_name(how.rule)
             << scales_text(how);
}

Shape codes_shape(const Shape& shape, const Quantization& how) {
  require(how && shape.rank() == 2, "a quantized tensor is a matrix with a format, not ", shape, " as ", how);
  require(how.block_rows > 0 && how.block_cols > 0, shape, " cannot have blocks of ", how);
  if (!is_four_bit(how.format)) return shape;
  require(shape[1] % 2 == 0, "rows of ", shape[1], ' ', format_name(how.format), " codes do not fill whole bytes");
  return {shape[0], shape[1] / 2};
}

Shape scales_shape(const Shape& shape, const Quantization& how) {
  codes_shape(shape, how);
  return {ceil_div(shape[0], how.block_rows), ceil_div(shape[1], how.block_cols)};
}

Shape shape_of(const Value& value) {
  const auto* quantized = std::get_if<QuantizedTensor>(&value);
  return quantized ? quantized->shape : std::get<Tensor>(value).shape();
}

Backend& device_of(const Value& value) {
  const auto* quantized = std::get_if<QuantizedTensor>(&value);
  return quantized ? quantized->device() : std::get<Tensor>(value).device();
}

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
