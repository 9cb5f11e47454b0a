#include "tools/conformance/golden_check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iomanip>

#include "mantissa/backend/functions.h"
#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/swizzle.h"
#include "mantissa/formats/with_element.h"

namespace mantissa::tools {
namespace {

constexpr long double kStoredTolerance = 0x1p-48L;  // for the GEMM that the file itself holds

// Returns "section: [i, j] is 0x12, expected 0x34; 5 of 640 differ", or "" if same(i) holds for every element.
template <class T, class Same>
std::string first_difference(const char* section, const std::vector<T>& actual, const std::vector<T>& expected, int64_t columns,
                             Same&& same) {
  require(actual.size() == expected.size(), section, ": ", actual.size(), " elements, expected ", expected.size());
  size_t first = actual.size(), count = 0;
  for (size_t i = actual.size(); i-- > 0;) {
    if (!same(i)) first = i, ++count;
  }
  if (count == 0) return "";
  std::ostringstream out;
  const auto width = static_cast<size_t>(columns);
  out << section << ": [" << first / width << ", " << first % width << "] is ";
  if constexpr (std::is_integral_v<T>) {
    const int digits = 2 * static_cast<int>(sizeof(T));
    const auto hex = [&](T value) -> std::ostream& {
      return out << "0x" << std::hex << std::setfill('0') << std::setw(digits) << uint64_t{value};
    };
    hex(actual[first]) << ", expected ";
    hex(expected[first]) << std::dec;
  } else {
    out << std::setprecision(9) << actual[first] << ", expected " << expected[first];
  }
  out << "; " << count << " of " << actual.size() << (count == 1 ? " differs" : " differ");
  return std::move(out).str();
}

template <class T>
std::string first_difference(const char* section, const std::vector<T>& actual, const std::vector<T>& expected, int64_t columns) {
  return first_difference(section, actual, expected, columns, [&](size_t i) { return actual[i] == expected[i]; });
}

// A nibble becomes an element of its own, so that an index is that of a column.
std::vector<uint8_t> element_codes(const std::vector<uint8_t>& codes, Format format) {
  if (format != Format::e2m1) return codes;
  std::vector<uint8_t> out;
  for (const uint8_t byte : codes) out.push_back(unpack_nibble(byte, 0)), out.push_back(unpack_nibble(byte, 1));
  return out;
}

bool same_value(uint32_t a, uint32_t b) {
  const auto nan = [](uint32_t bits) { return (bits & ~kFp32Sign) > kFp32Inf; };
  return a == b || (nan(a) && nan(b));
}

QuantizedTensor uploaded(Backend& device, const std::vector<uint8_t>& codes, const std::vector<uint8_t>& scales, Shape shape,
                         const Quantization& how) {
  return {.codes = from_host(device, Dtype::u8, codes_shape(shape, how), codes.data()),
          .scales = from_host(device, Dtype::u8, scales_shape(shape, how), scales.data()),
          .shape = shape,
          .how = how};
}

// Each kernel on the file's own bytes, so that one fault shows in one section. Outputs begin as 0xFF: what is not written is found.
std::string quantization_difference(const GoldenQuantization& file, Backend& device) {
  const Shape shape{file.rows, file.columns};
  const auto prefilled = [&](Dtype dtype, Shape of) {
    const std::vector<uint8_t> ones(static_cast<size_t>(of.elements() * dtype_bytes(dtype)), 0xFF);
    return from_host(device, dtype, of, ones.data());
  };
  const QuantizedTensor quantized{.codes = prefilled(Dtype::u8, codes_shape(shape, file.how)),
                                  .scales = prefilled(Dtype::u8, scales_shape(shape, file.how)),
                                  .shape = shape,
                                  .how = file.how};
  device.run(Quantize{.x = from_host(device, file.input_dtype, shape, file.input.data()), .out = quantized});
  std::string found = first_difference("scales", to_host<uint8_t>(quantized.scales), file.scales, quantized.scales.dim(1));
  if (!found.empty()) return found;
  found = first_difference("codes", element_codes(to_host<uint8_t>(quantized.codes), file.how.format),
                           element_codes(file.codes, file.how.format), file.columns);
  if (!found.empty()) return found;
  const QuantizedTensor given = uploaded(device, file.codes, file.scales, shape, file.how);
  if (!file.dequantized.empty()) {
    const Tensor values = prefilled(Dtype::f32, shape);
    device.run(Dequantize{.x = given, .out = values});
    std::vector<uint32_t> bits;
    for (const float value : to_host<float>(values)) bits.push_back(std::bit_cast<uint32_t>(value));
    found = first_difference("dequantized", bits, file.dequantized, file.columns,
                             [&](size_t i) { return same_value(bits[i], file.dequantized[i]); });
    if (!found.empty()) return found;
  }
  if (!file.swizzled.empty()) {
    const Tensor swizzled = prefilled(Dtype::u8, {static_cast<int64_t>(file.swizzled.size())});
    device.run(SwizzleScales{.x = given, .out = swizzled});
    found = first_difference("swizzled", to_host<uint8_t>(swizzled), file.swizzled, 512);
  }
  return found;
}

std::vector<long double> operand_values(Format format, const std::vector<uint8_t>& codes, const std::vector<uint8_t>& scales) {
  std::vector<long double> out;
  with_element(format, [&]<class E>() {
    for (size_t i = 0; i < codes.size(); ++i) {
      out.push_back(static_cast<long double>(std::bit_cast<float>(E::decode(codes[i], scales[i / 32]))));
    }
  });
  return out;
}

struct GemmElement {
  long double sum = 0, magnitude = 0;
  void add(long double term) { sum += term, magnitude += std::abs(term); }
};

bool is_stored(const GemmElement& element, const GoldenGemm& file, size_t i) {
  const auto stored = static_cast<long double>(file.product[i]), stored_magnitude = static_cast<long double>(file.magnitude[i]);
  return std::abs(element.sum - stored) <= kStoredTolerance * element.magnitude &&
         std::abs(element.magnitude - stored_magnitude) <= kStoredTolerance * element.magnitude;
}

// The GEMM and its magnitudes in extended precision against what the file holds: a code or scale that was changed shows here also where
// the tolerance of the fp32 GEMM would hide it.
std::string stored_gemm_difference(const GoldenGemm& file) {
  const std::vector<long double> a = operand_values(file.a_format, file.a_codes, file.a_scales);
  const std::vector<long double> b = operand_values(file.b_format, file.b_codes, file.b_scales);
  const auto k = static_cast<size_t>(file.k), n = static_cast<size_t>(file.n);
  for (size_t i = 0; i < file.product.size(); ++i) {
    GemmElement element;
    for (size_t j = 0; j < k; ++j) element.add(a[i / n * k + j] * b[i % n * k + j]);
    if (!is_stored(element, file, i)) {
      return text("GEMM: the file's codes and scales give [", i / n, ", ", i % n, "] = ", static_cast<double>(element.sum),
                  " of magnitude ", static_cast<double>(element.magnitude), ", the file says ", file.product[i], " of ", file.magnitude[i]);
    }
  }
  return "";
}

std::string gemm_difference(const GoldenGemm& file, Backend& device) {
  std::string found = stored_gemm_difference(file);
  if (!found.empty()) return found;
  const Shape a{file.m, file.k}, b{file.n, file.k};
  const Tensor out = empty(device, Dtype::f32, {file.m, file.n});
  device.run(Gemm{.a = {.value = uploaded(device, file.a_codes, file.a_scales, a, {.format = file.a_format})},
                  .b = {.value = uploaded(device, file.b_codes, file.b_scales, b, {.format = file.b_format}), .transposed = true},
                  .out = out,
                  .accumulate = false});
  const double tolerance = gemm_tolerance(file.k);
  std::vector<double> actual;
  for (const float value : to_host<float>(out)) actual.push_back(static_cast<double>(value));
  return first_difference("GEMM", actual, file.product, file.n,
                          [&](size_t i) { return std::abs(actual[i] - file.product[i]) <= tolerance * file.magnitude[i]; });
}

}  // namespace

double gemm_tolerance(int64_t k) { return 1e-6 * std::max(1.0, static_cast<double>(k) / 4096); }

std::string conformance_difference(const GoldenFile& file, Backend& device) {
  const auto* const product = std::get_if<GoldenGemm>(&file);
  return product ? gemm_difference(*product, device) : quantization_difference(std::get<GoldenQuantization>(file), device);
}

}  // namespace mantissa::tools
