#include <array>
#include <cerrno>
#include <cstdlib>

#include "json/json_fields.h"
#include "mantissa/formats/bf16.h"
#include "mantissa/formats/swizzle.h"
#include "mantissa/precision/config.h"
#include "tools/conformance/golden_check.h"

namespace mantissa::tools {
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
