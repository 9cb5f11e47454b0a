#include "tools/conformance/golden_check.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iomanip>

#include "base/hash.h"
#include "json/json_fields.h"
#include "mantissa/backend/functions.h"
#include "mantissa/formats/bf16.h"
#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/swizzle.h"
#include "mantissa/formats/with_element.h"
#include "mantissa/precision/config.h"

namespace mantissa::tools {
namespace {

constexpr size_t kHeaderBytes = 64;
constexpr uint32_t kDequantized = 1, kSwizzled = 2, kNonfinite = 4;
constexpr std::array kFormats{Format::e4m3, Format::e5m2, Format::e2m1};
constexpr std::array kRules{ScaleRule::floor, ScaleRule::rceil, ScaleRule::flashinfer, ScaleRule::even, ScaleRule::ceil, ScaleRule::mse};
constexpr std::array<const char*, 3> kOrientations{"row", "col", "tile"};

using Header = std::array<uint32_t, 16>;  // word 0 is the magic

template <class... Parts>
void expect(bool ok, const Parts&... parts) {
  require(ok, ExitCode::data, parts...);
}

Header parse_header(std::string_view bytes, const char* magic) {
  expect(bytes.size() >= kHeaderBytes, "header: must have ", kHeaderBytes, " bytes, but the file has ", bytes.size());
  Header words{};
  std::memcpy(words.data(), bytes.data(), kHeaderBytes);
  expect(bytes.substr(0, 4) == magic, "header: does not begin with ", magic);
  expect(words[1] == 1, "header: version ", words[1], ", expected 1");
  expect(words[13] == 0 && words[14] == 0 && words[15] == 0, "header: reserved words 13 to 15 are not zero");
  const uint32_t crc = reflected_crc<kZlibPolynomial>(bytes.substr(kHeaderBytes));
  expect(words[12] == crc, "payload: crc32 is ", crc, ", the header says ", words[12]);
  return words;
}

// Returns a size of at most 2^15: products of sizes stay far inside 64 bits.
int64_t size_in(uint32_t word, const char* what) {
  expect(word > 0 && word <= 1U << 15, "header: ", what, " is ", word, ", expected 1 to ", 1U << 15);
  return word;
}

template <class T, size_t kCount>
T choice(const std::array<T, kCount>& choices, uint32_t word, size_t count, const char* what) {
  expect(word < count, "header: ", what, " is ", word, ", expected below ", count);
  return choices[word];
}

// Cuts a payload into its sections, in order.
class Sections {
 public:
  explicit Sections(std::string_view payload) : left_(payload) {}

  template <class T>
  std::vector<T> take(int64_t count, const char* what) {
    const auto elements = static_cast<size_t>(count);
    expect(left_.size() / sizeof(T) >= elements, "payload: ends inside ", what);
    std::vector<T> out(elements);
    std::copy_n(left_.data(), elements * sizeof(T), reinterpret_cast<char*>(out.data()));  // a section may be empty
    left_.remove_prefix(elements * sizeof(T));
    return out;
  }
  void end() const { expect(left_.empty(), "payload: ", left_.size(), " bytes are left over"); }

 private:
  std::string_view left_;
};

void check_name(const std::string& name, const GoldenQuantization& file, const char* orientation) {
  const std::vector<std::string> parts = split(name.substr(0, name.rfind('.')), '_');
  expect(parts.size() >= (parts.front() == "swizzle" ? 3 : 4),
         "name: expected <format>_<rule>_<kind>_<row|col|tile>.mxg or swizzle_<R>x<C>_<row|col>.mxg");
  expect(parts.back() == orientation, "header: blocks are '", orientation, "', the name says '", parts.back(), "'");
  if (parts.front() == "swizzle") {
    const std::string size = text(file.rows, 'x', file.columns);
    expect(parts[1] == size, "header: the matrix is ", size, ", the name says ", parts[1]);
    return expect(!file.swizzled.empty(), "header: no swizzled scales, as the name says");
  }
  const char *format = format_name(file.how.format), *rule = scale_rule_name(file.how.rule);
  expect(parts.front() == format, "header: the format is ", format, ", the name says '", parts.front(), "'");
  expect(parts[1] == rule, "header: the rule is ", rule, ", the name says '", parts[1], "'");
  const bool fp32 = parts[parts.size() - 2] == "f32";
  expect(fp32 == (file.input_dtype == Dtype::f32), "header: the input is ", file.input_dtype, ", the name says ", fp32 ? "fp32" : "bf16");
}

bool holds_nonfinite(const GoldenQuantization& file) {
  const size_t size = file.input_dtype == Dtype::bf16 ? 2 : 4;
  for (size_t i = 0; i < file.input.size(); i += size) {
    const uint32_t exponent = (uint32_t{file.input[i + size - 1]} << 8 | file.input[i + size - 2]) & 0x7F80U;  // upper half of either
    if (exponent == 0x7F80U) return true;
  }
  return false;
}

// Compares the sizes of the sections that the header states with those that follow from its other words.
void check_counts(const Header& words, const GoldenQuantization& file) {
  const Shape shape{file.rows, file.columns};
  const Quantization& how = file.how;
  expect(file.rows % how.block_rows == 0 && file.columns % how.block_cols == 0, "header: ", shape, " has no whole number of blocks of ",
         how);
  expect(how.format != Format::e2m1 || file.columns % 2 == 0, "header: rows of ", file.columns, " e2m1 codes do not fill whole bytes");
  expect(words[9] == scales_shape(shape, how).elements(), "header: ", words[9], " scales, expected ", scales_shape(shape, how).elements());
  expect(words[10] == codes_shape(shape, how).elements(), "header: ", words[10], " bytes of codes, expected ",
         codes_shape(shape, how).elements());
  const bool has_swizzled = (words[8] & kSwizzled) != 0;
  expect(!has_swizzled || !how.tiles(), "header: tiles cannot have swizzled scales");
  const int64_t swizzled = !has_swizzled      ? 0
                           : how.columnwise() ? swizzled_bytes(file.columns, file.rows / 32)
                                              : swizzled_bytes(file.rows, file.columns / 32);
  expect(words[11] == swizzled, "header: ", words[11], " bytes of swizzled scales, expected ", swizzled);
}

GoldenQuantization parse_quantization(const std::string& name, std::string_view bytes) {
  const Header words = parse_header(bytes, "MXG1");
  GoldenQuantization out;
  const char* const orientation = choice(kOrientations, words[5], 3, "blocks");
  out.how = {.format = choice(kFormats, words[2], 3, "format"),
             .block_rows = words[5] == 0 ? 1 : 32,
             .block_cols = words[5] == 1 ? 1 : 32,
             .rule = choice(kRules, words[3], kRules.size(), "rule")};
  expect(words[4] < 2, "header: input is ", words[4], ", expected 0 or 1");
  out.input_dtype = words[4] == 0 ? Dtype::bf16 : Dtype::f32;
  expect(out.how.rule != ScaleRule::flashinfer || (out.how.format == Format::e2m1 && words[4] == 0),
         "header: flashinfer quantizes bf16 to e2m1 only");
  out.rows = size_in(words[6], "rows"), out.columns = size_in(words[7], "columns");
  expect(words[8] <= (kDequantized | kSwizzled | kNonfinite), "header: unknown flags ", words[8]);
  check_counts(words, out);
  Sections payload(bytes.substr(kHeaderBytes));
  const int64_t elements = out.rows * out.columns;
  out.input = payload.take<uint8_t>(elements * dtype_bytes(out.input_dtype), "the input");
  out.scales = payload.take<uint8_t>(words[9], "the scales");
  out.codes = payload.take<uint8_t>(words[10], "the codes");
  if (words[8] & kDequantized) out.dequantized = payload.take<uint32_t>(elements, "the dequantized values");
  out.swizzled = payload.take<uint8_t>(words[11], "the swizzled scales");
  payload.end();
  out.nonfinite = (words[8] & kNonfinite) != 0;
  expect(out.nonfinite == holds_nonfinite(out), "header: the flag for NaN and Inf disagrees with the input");
  check_name(name, out, orientation);
  return out;
}

GoldenGemm parse_gemm(const std::string& name, std::string_view bytes) {
  const Header words = parse_header(bytes, "MXM1");
  GoldenGemm out;
  out.a_format = choice(kFormats, words[2], 2, "format of A"), out.b_format = choice(kFormats, words[3], 2, "format of B");
  out.m = size_in(words[4], "M"), out.n = size_in(words[5], "N"), out.k = size_in(words[6], "K");
  expect(out.k % 32 == 0, "header: K is ", out.k, ", expected a multiple of 32");
  expect(words[7] == out.m * out.k / 32 && words[8] == out.n * out.k / 32, "header: ", words[7], " and ", words[8], " scales, expected ",
         out.m * out.k / 32, " and ", out.n * out.k / 32);
  expect(words[9] == 0 && words[10] == 0 && words[11] == 0, "header: reserved words 9 to 11 are not zero");
  Sections payload(bytes.substr(kHeaderBytes));
  out.a_scales = payload.take<uint8_t>(words[7], "the scales of A"), out.a_codes = payload.take<uint8_t>(out.m * out.k, "the codes of A");
  out.b_scales = payload.take<uint8_t>(words[8], "the scales of B"), out.b_codes = payload.take<uint8_t>(out.n * out.k, "the codes of B");
  out.product = payload.take<double>(out.m * out.n, "the GEMM"), out.magnitude = payload.take<double>(out.m * out.n, "the magnitudes");
  payload.end();
  const std::string expected = text("gemm_", format_name(out.a_format), '_', format_name(out.b_format), ".mxm");
  expect(name == expected, "header: the formats call for the name ", expected);
  return out;
}

}  // namespace

GoldenFile parse_golden_file(const std::string& name, std::string_view bytes) {
  if (name.ends_with(".mxm")) return parse_gemm(name, bytes);
  expect(name.ends_with(".mxg"), "name: expected .mxg or .mxm");
  return parse_quantization(name, bytes);
}

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
  const auto prefilled = [&](Dtype dtype, Shape sizes) {
    const std::vector<uint8_t> ones(static_cast<size_t>(sizes.elements() * dtype_bytes(dtype)), 0xFF);
    return from_host(device, dtype, sizes, ones.data());
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

// The GEMM and its magnitudes in extended precision against what the file holds: a code or scale that was changed shows here also where
// the tolerance of the fp32 GEMM would hide it.
std::string stored_gemm_difference(const GoldenGemm& file) {
  const std::vector<long double> a = operand_values(file.a_format, file.a_codes, file.a_scales);
  const std::vector<long double> b = operand_values(file.b_format, file.b_codes, file.b_scales);
  const auto k = static_cast<size_t>(file.k), n = static_cast<size_t>(file.n);
  for (size_t i = 0; i < file.product.size(); ++i) {
    long double sum = 0, magnitude = 0;
    for (size_t j = 0; j < k; ++j) {
      const long double term = a[i / n * k + j] * b[i % n * k + j];
      sum += term, magnitude += std::abs(term);
    }
    const auto is_near = [&](long double found, double stored) {
      return std::abs(found - static_cast<long double>(stored)) <= kStoredTolerance * magnitude;
    };
    if (!is_near(sum, file.product[i]) || !is_near(magnitude, file.magnitude[i]))
      return text("GEMM: the file's codes and scales give [", i / n, ", ", i % n, "] = ", static_cast<double>(sum), " of magnitude ",
                  static_cast<double>(magnitude), ", the file says ", file.product[i], " of ", file.magnitude[i]);
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

namespace {

constexpr size_t kBlock = 32;

// One block; what a number is stands as text, so that 0x, inf and nan can be written.
struct Example {
  std::string title;
  Format format = Format::none;
  ScaleRule rule = ScaleRule::rceil;
  uint8_t scale_code = 0;
  std::vector<std::string> input, codes, values;

  void fields(auto& v) {
    v("title", title);
    v("fmt", format);
    v("mode", rule);
    v("scale_code", scale_code);
    v("input", input);
    v("codes", codes);
    v("dequant", values);
  }
};

double number(const std::string& digits, const std::string& where) {
  char* end = nullptr;
  const double value = std::strtod(digits.c_str(), &end);
  require(!digits.empty() && *end == '\0', ExitCode::data, where, ": '", digits, "' is not a number");
  return value;
}

// The block as if it came from a file of golden vectors. The codes that are not listed are those of zeros.
GoldenQuantization as_golden(const Example& example, Dtype dtype) {
  const auto& [title, format, rule, scale_code, input, codes, values] = example;
  require(input.size() <= kBlock, ExitCode::data, title, ": input has ", input.size(), " entries, expected at most ", kBlock);
  require(codes.size() == input.size() && values.size() == input.size(), ExitCode::data, title,
          ": as many codes and values as inputs are expected");
  GoldenQuantization out;
  out.input_dtype = dtype, out.rows = 1, out.columns = kBlock;
  out.how.format = format, out.how.rule = rule, out.scales = {scale_code};
  // In a poisoned block the zeros that follow hold what its elements hold.
  const bool poisoned = scale_code == 255 && !codes.empty();
  const auto code_at = [&listed = codes, poisoned](size_t i) {
    return i < listed.size() ? listed[i] : poisoned ? listed.back() : std::string("0x0");
  };
  for (size_t i = 0; i < kBlock; ++i) {
    const float x = i < input.size() ? static_cast<float>(number(input[i], title)) : 0.0F;
    const uint32_t bits = dtype == Dtype::bf16 ? to_bf16(x).bits : __builtin_bit_cast(uint32_t, x);
    for (int64_t byte = 0; byte < dtype_bytes(dtype); ++byte) out.input.push_back(static_cast<uint8_t>(bits >> (8 * byte)));
    out.codes.push_back(static_cast<uint8_t>(number(code_at(i), title)));
    const float value = i < values.size() ? static_cast<float>(number(values[i], title)) : poisoned ? __builtin_nanf("") : 0.0F;
    out.dequantized.push_back(__builtin_bit_cast(uint32_t, value));
  }
  if (out.how.format != Format::e2m1) return out;
  std::vector<uint8_t> packed;
  for (size_t i = 0; i < kBlock; i += 2) packed.push_back(pack_nibbles(out.codes[i], out.codes[i + 1]));
  out.codes = packed;
  return out;
}

}  // namespace

std::string worked_examples_difference(std::string_view json, const std::string& source, Backend& device) {
  const auto examples = from_json<std::vector<Example>>(json, source);
  require(!examples.empty(), ExitCode::data, "expected a list of examples");
  for (const Example& example : examples) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
      const GoldenQuantization block = as_golden(example, dtype);
      if (dtype == Dtype::f32 && block.how.rule == ScaleRule::flashinfer) continue;
      const std::string found = conformance_difference(block, device);
      if (!found.empty()) return text(found, " (", example.title, ", ", scale_rule_name(block.how.rule), ", from ", dtype_name(dtype), ")");
    }
  }
  return "";
}

}  // namespace mantissa::tools
