// The files of tests/golden, made by the slow reference: quantized matrices of every format and rule, swizzled scales, a GEMM, worked
// examples and the manifest. golden_vectors_test holds the files against this; make_golden_vectors writes them anew.
#pragma once

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "mantissa/base/rng.h"
#include "mantissa/tensor/quantized_tensor.h"
#include "slow_formats.h"

namespace mantissa::test {

using GoldenFiles = std::map<std::string, std::string>;  // name to content

template <class T>
void append(std::string& out, const std::vector<T>& values) {
  out.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

inline std::string golden_file(const char* magic, std::vector<uint32_t> words, const std::string& payload) {
  words.resize(15);
  words[11] = reflected_crc<kZlibPolynomial>(payload);
  std::string out(magic);
  append(out, words);
  return out + payload;
}

// The compact scales where GEMMs read them: 128 rows by 4 blocks at a time, 32 rows interleaved by 4.
inline std::vector<uint8_t> slow_swizzle(const std::vector<uint8_t>& scales, size_t outer, size_t inner, bool columnwise) {
  const size_t tiles_down = (outer + 127) / 128, tiles_across = (inner + 3) / 4;
  std::vector<uint8_t> out;
  for (size_t tile = 0; tile < tiles_down * tiles_across; ++tile) {
    for (size_t byte = 0; byte < 512; ++byte) {
      const size_t i = tile / tiles_across * 128 + byte % 16 / 4 * 32 + byte / 16, j = tile % tiles_across * 4 + byte % 4;
      out.push_back(i < outer && j < inner ? scales[columnwise ? j * outer + i : i * inner + j] : uint8_t{0});
    }
  }
  return out;
}

struct Case {
  std::string kind;
  Format format;
  ScaleRule rule;
  size_t block_rows, block_columns, columns;
  std::vector<double> x;
  bool fp32 = false, dequantized = true, swizzled = false;
};

inline std::vector<uint8_t> packed_codes(const SlowFormat& format, const std::vector<uint8_t>& codes) {
  if (!format.packed()) return codes;
  std::vector<uint8_t> out;
  for (size_t i = 0; i < codes.size(); i += 2) out.push_back(static_cast<uint8_t>(codes[i + 1] * 16 + codes[i]));
  return out;
}

inline void add(GoldenFiles& files, nlohmann::json& manifest, const Case& c) {
  const SlowFormat& format = slow(c.format);
  const size_t rows = c.x.size() / c.columns;
  const bool nonfinite = !std::all_of(c.x.begin(), c.x.end(), [](double x) { return std::isfinite(x); });
  const bool tiles = c.block_rows == c.block_columns, columnwise = c.block_columns == 1;
  std::string payload;
  std::vector<double> input;  // as stored
  for (const double x : c.x) {
    const uint32_t bits = c.fp32 ? fp32_bits(x) : uint32_t{slow_bf16(x)} << 16;
    input.push_back(value_of_bits(bits));
    payload.append(reinterpret_cast<const char*>(&bits) + (c.fp32 ? 0 : 2), c.fp32 ? 4 : 2);
  }
  const SlowQuantized result = slow_quantize(format, c.rule, input, c.columns, c.block_rows, c.block_columns);
  const std::vector<uint8_t> codes = packed_codes(format, result.codes);
  append(payload, result.scales), append(payload, codes);
  if (c.dequantized) append(payload, result.values);
  std::vector<uint8_t> swizzled;
  if (c.swizzled)
    swizzled = slow_swizzle(result.scales, columnwise ? c.columns : rows, columnwise ? rows / 32 : c.columns / 32, columnwise);
  append(payload, swizzled);
  const auto word = [](auto value) { return static_cast<uint32_t>(value); };
  constexpr std::array kOfFile{ScaleRule::floor, ScaleRule::rceil, ScaleRule::flashinfer, ScaleRule::even, ScaleRule::ceil, ScaleRule::mse};
  const auto rule = static_cast<uint32_t>(std::ranges::find(kOfFile, c.rule) - kOfFile.begin());
  const std::string bytes = golden_file("MXG1",
                                        {1, word(c.format) - 1, rule, word(c.fp32), tiles ? 2U : word(columnwise), word(rows),
                                         word(c.columns), word(c.dequantized) + 2 * word(c.swizzled) + 4 * word(nonfinite),
                                         word(result.scales.size()), word(codes.size()), word(swizzled.size())},
                                        payload);
  const std::string end = tiles ? "tile" : columnwise ? "col" : "row", mode = scale_rule_name(c.rule), fmt = format_name(c.format);
  const std::string name =
      (c.swizzled ? text("swizzle_", rows, 'x', c.columns) : text(fmt, '_', mode, '_', c.kind, c.fp32 ? "_f32" : "")) + "_" + end + ".mxg";
  files[name] = bytes;
  manifest["files"].push_back({{"file", name},
                               {"fmt", fmt},
                               {"mode", mode},
                               {"input", c.fp32 ? "f32" : "bf16"},
                               {"blocks", tiles        ? "32x32 tiles"
                                          : columnwise ? "32x1 columnwise"
                                                       : "1x32 rowwise"},
                               {"rows", rows},
                               {"cols", c.columns},
                               {"dequant", c.dequantized},
                               {"swizzled", c.swizzled},
                               {"nonfinite", nonfinite},
                               {"bytes", bytes.size()}});
}

// Normal values, each row scaled by a power of two of its own between 2^-spread and 2^spread.
inline std::vector<double> random_matrix(size_t count, size_t columns, uint32_t what, int spread = 0) {
  std::vector<double> out;
  for (size_t i = 0; i < count; ++i) {
    const auto row = random_words({.seed = 5}, 1000 + what, i / columns)[0];
    const int power = spread == 0 ? 0 : static_cast<int>(row % static_cast<uint32_t>(2 * spread + 1)) - spread;
    out.push_back(std::ldexp(static_cast<double>(random_normal({.seed = 5}, what, i)), power));
  }
  return out;
}

// Blocks of which half of floor's scale, or twice it, may be the best for E2M1: most elements are where it rounds by as much as it can, and
// the largest of each 32 is little above 4, or large. All of a group have the same power of two and are one of the two.
inline std::vector<double> searched_blocks(size_t count, size_t group) {
  std::vector<double> out;
  for (size_t i = 0; i < count; ++i) {
    const auto of_group = random_words({.seed = 6}, 0, i / group), block = random_words({.seed = 6}, 1, i / 32),
               words = random_words({.seed = 6}, 2, i);
    const bool small = of_group[0] % 2 == 0;
    const double largest = small ? 4 + block[1] % 9 / 16.0 : 6.5 + block[1] % 25 / 16.0;
    const double midpoint = (small ? 0.25 : 0.5) * (1 + words[1] % 2 * 2);
    const bool clipped = i % 32 == block[3] % 32 || (!small && words[0] % 8 == 1);
    const double magnitude = clipped ? largest : words[0] % 4 == 0 ? words[1] % 17 / 16.0 : midpoint;
    out.push_back(std::ldexp(words[2] % 2 == 0 ? magnitude : -magnitude, static_cast<int>(of_group[1] % 64) - 32));
  }
  return out;
}

// Every midpoint between neighboring elements with the bf16 beside it, both signs, in blocks whose largest element fixes scale 127, then
// the same at another scale.
inline std::vector<double> ties(const SlowFormat& format) {
  std::vector<double> points;
  const size_t step = format.packed() ? 1 : 11;
  for (size_t code = 0; code + 1 < format.magnitudes.size(); code += code < 12 ? 1 : step) {
    const double middle = (format.magnitudes[code] + format.magnitudes[code + 1]) / 2;
    for (const double x : {middle, middle * (1 + 0x1p-7), middle * (1 - 0x1p-7)}) points.push_back(x), points.push_back(-x);
  }
  std::vector<double> out;
  for (const int power : {0, -30}) {
    for (size_t i = 0; i < points.size() || out.size() % 32 != 0;) {
      if (out.size() % 32 == 0) out.push_back(std::ldexp(format.max(), power));
      out.push_back(i < points.size() ? std::ldexp(points[i], power) : 0.0);
      ++i;
    }
  }
  return out;
}

// Blocks that begin as listed; the rest is filled with zeros and a few small elements.
inline std::vector<double> special(const SlowFormat& format) {
  const double max = format.max(), bf16_max = 0x1.FEp127, tiny = 0x1p-133;
  const std::vector<std::vector<double>> blocks = {{0, -0.0},
                                                   {tiny, -tiny, 5 * tiny},
                                                   {0x1p-126, -0x1p-127},
                                                   {max * 0x1p-127, -0x1p-133},
                                                   {max * 0x1.02p-127, 0x1p-126},
                                                   {max * 0x1.02p-126, -0x1p-127, 0x1p-126},
                                                   {max * 0x1.02p-125, -0x1p-127},
                                                   {bf16_max, 1e38, -1},
                                                   {-0x1.Cp127, 1},
                                                   {max, max / 2, -max * 0.96875},
                                                   {max * 1.0078125, -1, 0.3},
                                                   {format.power * 2 - format.power / 128, 1},
                                                   {kNan, 3},
                                                   {kInf, 1, -2},
                                                   {-1, -kInf, kNan},
                                                   {3, kNan, -6}};
  std::vector<double> out;
  for (const std::vector<double>& block : blocks) {
    for (size_t i = 0; i < 32; ++i) out.push_back(i < block.size() ? block[i] : i < 8 ? std::ldexp(block[0], -static_cast<int>(i)) : 0.0);
  }
  return out;
}

inline std::string golden_gemm(Format a_format, Format b_format, size_t m, size_t n, size_t k) {
  const auto operand = [&](Format format, size_t rows, uint32_t what) {
    std::vector<double> x = random_matrix(rows * k, k, what, 3);
    for (double& v : x) v = value_of_bits(uint32_t{slow_bf16(v)} << 16);
    return slow_quantize(slow(format), ScaleRule::rceil, x, k, 1, 32);
  };
  const SlowQuantized a = operand(a_format, m, 50), b = operand(b_format, n, 51);
  std::vector<double> product, magnitude;
  for (size_t i = 0; i < m * n; ++i) {
    long double sum = 0, total = 0;
    for (size_t j = 0; j < k; ++j) {
      const long double term = static_cast<long double>(value_of_bits(a.values[i / n * k + j])) *
                               static_cast<long double>(value_of_bits(b.values[i % n * k + j]));
      sum += term, total += std::abs(term);
    }
    product.push_back(static_cast<double>(sum)), magnitude.push_back(static_cast<double>(total));
  }
  std::string payload;
  append(payload, a.scales), append(payload, a.codes), append(payload, b.scales), append(payload, b.codes);
  append(payload, product), append(payload, magnitude);
  const auto word = [](auto value) { return static_cast<uint32_t>(value); };
  return golden_file("MXM1",
                     {1, word(a_format) - 1, word(b_format) - 1, word(m), word(n), word(k), word(a.scales.size()), word(b.scales.size())},
                     payload);
}

inline nlohmann::json worked_example(Format format, ScaleRule rule, const std::string& title, const std::vector<double>& input) {
  std::vector<double> block = input;
  block.resize(32);
  const SlowQuantized result = slow_quantize(slow(format), rule, block, 32, 1, 32);
  nlohmann::json inputs, codes, values;
  for (size_t i = 0; i < input.size(); ++i) {
    inputs.push_back(text(std::setprecision(17), input[i]));
    codes.push_back(text("0x", std::hex, int{result.codes[i]}));
    values.push_back(text(std::setprecision(17), value_of_bits(result.values[i])));
  }
  return {{"title", title},
          {"fmt", format_name(format)},
          {"mode", scale_rule_name(rule)},
          {"input", inputs},
          {"rest", "zeros"},
          {"scale_code", result.scales[0]},
          {"codes", codes},
          {"dequant", values}};
}

inline nlohmann::json worked_examples() {
  nlohmann::json out;
  out.push_back(worked_example(Format::e4m3, ScaleRule::floor, "above the largest element: floor saturates", {464, 448, -1, 0.25}));
  out.push_back(worked_example(Format::e4m3, ScaleRule::rceil, "above the largest element: rceil doubles the scale", {464, 448, -1, 0.25}));
  out.push_back(worked_example(Format::e4m3, ScaleRule::even, "below 1.9375: even is floor and saturates", {494, -1, 0.25}));
  out.push_back(worked_example(Format::e4m3, ScaleRule::even, "from 1.9375 on even doubles the scale", {496, -1, 0.25}));
  out.push_back(worked_example(Format::e2m1, ScaleRule::even, "from 1.75 on even doubles the scale", {3.5, 1, -0.25}));
  out.push_back(worked_example(Format::e5m2, ScaleRule::even, "from 1.875 on even doubles the scale", {0x1.Ep5, 1, -0.25}));
  out.push_back(worked_example(Format::e2m1, ScaleRule::ceil, "a power of two keeps its scale under ceil", {4, 1, -0.25}));
  out.push_back(worked_example(Format::e2m1, ScaleRule::ceil, "what is larger doubles it", {4.5, 1, -0.25}));
  out.push_back(worked_example(Format::e5m2, ScaleRule::rceil, "ties to even", {57344, -1.125, 1.375, 0x1p-17, 0x3p-17}));
  out.push_back(worked_example(Format::e2m1, ScaleRule::rceil, "one NaN poisons its block", {kNan, 3, -6}));
  out.push_back(worked_example(Format::e2m1, ScaleRule::mse, "clips: twice the scale would round 0.5", {7.25, 0.5, -0.5, 0.5, 0.5}));
  out.push_back(worked_example(Format::e2m1, ScaleRule::mse, "does not clip", {7.5, 0.5, -0.5, 0.5, 0.5}));
  out.push_back(worked_example(Format::e2m1, ScaleRule::mse, "half the scale, of equal errors",
                               {-4, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25}));
  out.push_back(worked_example(Format::e4m3, ScaleRule::mse, "as far as half a step is clipped", {464, -1, 0.3}));
  out.push_back(worked_example(Format::e2m1, ScaleRule::flashinfer, "NaN takes no part", {kNan, 3, -6}));
  out.push_back(worked_example(Format::e2m1, ScaleRule::flashinfer, "ties; -0 decodes to +0", {6, 0.25, 0.75, -0.25, 2.5, -5}));
  return out;
}

inline GoldenFiles golden_files() {
  GoldenFiles files;
  nlohmann::json manifest{{"files", nlohmann::json::array()}};
  for (const Format format : {Format::e4m3, Format::e5m2, Format::e2m1}) {
    const auto number = static_cast<uint32_t>(format);
    for (const ScaleRule rule :
         {ScaleRule::rceil, ScaleRule::floor, ScaleRule::even, ScaleRule::ceil, ScaleRule::flashinfer, ScaleRule::mse}) {
      if (rule == ScaleRule::flashinfer && format != Format::e2m1) continue;
      add(files, manifest, {"ties", format, rule, 1, 32, 32, ties(slow(format)), false, false});
      add(files, manifest, {"special", format, rule, 1, 32, 32, special(slow(format))});
    }
    add(files, manifest, {"wide", format, ScaleRule::rceil, 32, 1, 6, random_matrix(64 * 6, 6, number, 9), true});
    add(files, manifest, {"wide", format, ScaleRule::floor, 32, 32, 32, random_matrix(32 * 32, 32, number + 10, 9), false, false});
  }
  add(files, manifest, {"searched", Format::e2m1, ScaleRule::mse, 1, 32, 64, searched_blocks(96 * 64, 256)});
  add(files, manifest, {"searched", Format::e2m1, ScaleRule::mse, 32, 1, 6, searched_blocks(64 * 6, 192), true, false});
  add(files, manifest, {"", Format::e2m1, ScaleRule::rceil, 1, 32, 160, random_matrix(33 * 160, 160, 30), false, false, true});
  add(files, manifest, {"", Format::e4m3, ScaleRule::rceil, 32, 1, 34, random_matrix(96 * 34, 34, 31), false, false, true});
  for (const Format a : {Format::e4m3, Format::e5m2}) {
    const std::string name = text("gemm_", format_name(a), "_e4m3.mxm");
    files[name] = golden_gemm(a, Format::e4m3, 5, 7, 64);
    manifest["files"].push_back({{"file", name},
                                 {"kind", "gemm"},
                                 {"a", format_name(a)},
                                 {"b", "e4m3"},
                                 {"M", 5},
                                 {"N", 7},
                                 {"K", 64},
                                 {"bytes", files[name].size()}});
  }
  files["manifest.json"] = manifest.dump(1) + "\n";
  files["worked_examples.json"] = worked_examples().dump(1) + "\n";
  return files;
}

}  // namespace mantissa::test
