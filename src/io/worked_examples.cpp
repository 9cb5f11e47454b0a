#include <array>
#include <cerrno>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "mantissa/base/json.h"
#include "mantissa/formats/bf16.h"
#include "mantissa/formats/swizzle.h"
#include "mantissa/io/conformance.h"

namespace mantissa {
namespace {

constexpr size_t kBlock = 32;

double number(const std::string& digits, const std::string& where) {
  char* end = nullptr;
  const double value = std::strtod(digits.c_str(), &end);
  require(!digits.empty() && *end == '\0', ExitCode::data, where, ": '", digits, "' is no number");
  return value;
}

const nlohmann::json& member(const nlohmann::json& example, const char* key, bool right_type(const nlohmann::json&),
                             const std::string& where) {
  require(example.contains(key) && right_type(example[key]), ExitCode::data, where, ": ", key, " is absent or of another type");
  return example[key];
}

std::vector<std::string> strings(const nlohmann::json& example, const char* key, const std::string& where) {
  std::vector<std::string> out;
  for (const nlohmann::json& item : member(
           example, key, [](const nlohmann::json& v) { return v.is_array(); }, where)) {
    require(item.is_string(), ExitCode::data, where, ": ", key, " holds something else than strings");
    out.push_back(item.get<std::string>());
  }
  require(out.size() <= kBlock, ExitCode::data, where, ": ", key, " has ", out.size(), " entries, expected at most ", kBlock);
  return out;
}

std::string string_member(const nlohmann::json& example, const char* key, const std::string& where) {
  return member(
             example, key, [](const nlohmann::json& v) { return v.is_string(); }, where)
      .get<std::string>();
}

template <class T, size_t kCount>
T named(const std::array<T, kCount>& from, const char* name_of(T), const std::string& name, const std::string& where) {
  for (const T value : from) {
    if (name == name_of(value)) return value;
  }
  fail(ExitCode::data, where, ": unknown '", name, "'");
}

// One block as if it came from a file of golden vectors. The codes that are not listed are those of zeros.
GoldenQuantization parse_example(const nlohmann::json& example, Dtype dtype, const std::string& where) {
  GoldenQuantization out;
  out.input_dtype = dtype, out.rows = 1, out.columns = kBlock;
  out.how.format = named(std::array{Format::e4m3, Format::e5m2, Format::e2m1}, format_name, string_member(example, "fmt", where), where);
  out.how.rule = named(std::array{ScaleRule::rceil, ScaleRule::floor, ScaleRule::flashinfer}, scale_rule_name,
                       string_member(example, "mode", where), where);
  const auto input = strings(example, "input", where), codes = strings(example, "codes", where),
             values = strings(example, "dequant", where);
  require(codes.size() == input.size() && values.size() == input.size(), ExitCode::data, where,
          ": as many codes and values as inputs are expected");
  const auto scale = member(
                         example, "scale_code", [](const nlohmann::json& v) { return v.is_number_integer(); }, where)
                         .get<int64_t>();
  require(scale >= 0 && scale < 256, ExitCode::data, where, ": scale_code is ", scale, ", expected 0 to 255");
  out.scales = {static_cast<uint8_t>(scale)};
  // In a poisoned block the zeros that follow hold what its elements hold.
  const bool poisoned = scale == 255 && !codes.empty();
  const auto code_at = [&](size_t i) { return i < codes.size() ? codes[i] : poisoned ? codes.back() : std::string("0x0"); };
  for (size_t i = 0; i < kBlock; ++i) {
    const float x = i < input.size() ? static_cast<float>(number(input[i], where)) : 0.0F;
    const uint32_t bits = dtype == Dtype::bf16 ? to_bf16(x).bits : __builtin_bit_cast(uint32_t, x);
    for (int64_t byte = 0; byte < dtype_bytes(dtype); ++byte) out.input.push_back(static_cast<uint8_t>(bits >> (8 * byte)));
    out.codes.push_back(static_cast<uint8_t>(number(code_at(i), where)));
    const float value = i < values.size() ? static_cast<float>(number(values[i], where)) : poisoned ? __builtin_nanf("") : 0.0F;
    out.dequantised.push_back(__builtin_bit_cast(uint32_t, value));
  }
  if (out.how.format != Format::e2m1) return out;
  std::vector<uint8_t> packed;
  for (size_t i = 0; i < kBlock; i += 2) packed.push_back(pack_nibbles(out.codes[i], out.codes[i + 1]));
  out.codes = packed;
  return out;
}

}  // namespace

std::string worked_examples_difference(std::string_view json, const std::string& source, Backend& device) {
  const nlohmann::json examples = parse_strict_json(json, source);
  require(examples.is_array() && !examples.empty(), ExitCode::data, "expected a list of examples");
  for (const nlohmann::json& example : examples) {
    require(example.is_object(), ExitCode::data, "an example is no object");
    const std::string title = string_member(example, "title", "an example");
    for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
      const GoldenQuantization block = parse_example(example, dtype, title);
      if (dtype == Dtype::f32 && block.how.rule == ScaleRule::flashinfer) continue;
      const std::string found = conformance_difference(block, device);
      if (!found.empty()) return text(found, " (", title, ", ", scale_rule_name(block.how.rule), ", from ", dtype_name(dtype), ")");
    }
  }
  return "";
}

}  // namespace mantissa
