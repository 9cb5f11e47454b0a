#include "io/ggml_blocks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "mantissa/base/error.h"
#include "mantissa/formats/fp16.h"

namespace mantissa {
namespace {

constexpr int kHalf = 16;    // elements in the low nibbles of a block of 32
constexpr int kPart = 32;    // elements of a part of a K block
constexpr int kParts = 8;    // parts of a K block
constexpr int kScales = 12;  // bytes of scales and minima of Q4_K and Q5_K

float fp16_at(const uint8_t* from) {
  uint16_t half = 0;
  std::memcpy(&half, from, sizeof half);
  return std::bit_cast<float>(fp32_bits_from_fp16_bits(half));
}

int low(uint8_t byte) { return byte & 0xF; }
int high(uint8_t byte) { return byte >> 4; }

void decode_f32(const uint8_t* block, float* out) { std::memcpy(out, block, sizeof *out); }
void decode_f16(const uint8_t* block, float* out) { *out = fp16_at(block); }
void decode_bf16(const uint8_t* block, float* out) {
  uint16_t half = 0;
  std::memcpy(&half, block, sizeof half);
  *out = std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
}

void decode_q4_0(const uint8_t* block, float* out) {
  const float d = fp16_at(block);
  for (int i = 0; i < kHalf; ++i) {
    const uint8_t byte = block[2 + i];
    out[i] = static_cast<float>(low(byte) - 8) * d;
    out[i + kHalf] = static_cast<float>(high(byte) - 8) * d;
  }
}

void decode_q4_1(const uint8_t* block, float* out) {
  const float d = fp16_at(block), m = fp16_at(block + 2);
  for (int i = 0; i < kHalf; ++i) {
    const uint8_t byte = block[4 + i];
    out[i] = static_cast<float>(low(byte)) * d + m;
    out[i + kHalf] = static_cast<float>(high(byte)) * d + m;
  }
}

// Returns the integers of a block of 5 bits.
std::array<int, 2 * kHalf> five_bits(const uint8_t* top, const uint8_t* bytes) {
  uint32_t bits = 0;
  std::memcpy(&bits, top, sizeof bits);
  std::array<int, 2 * kHalf> out{};
  for (unsigned i = 0; i < kHalf; ++i) {
    out[i] = low(bytes[i]) | static_cast<int>((bits >> i & 1U) << 4);
    out[i + kHalf] = high(bytes[i]) | static_cast<int>((bits >> (i + kHalf) & 1U) << 4);
  }
  return out;
}

void decode_q5_0(const uint8_t* block, float* out) {
  const float d = fp16_at(block);
  for (const int q : five_bits(block + 2, block + 6)) *out++ = static_cast<float>(q - 16) * d;
}

void decode_q5_1(const uint8_t* block, float* out) {
  const float d = fp16_at(block), m = fp16_at(block + 2);
  for (const int q : five_bits(block + 4, block + 8)) *out++ = static_cast<float>(q) * d + m;
}

void decode_q8_0(const uint8_t* block, float* out) {
  const float d = fp16_at(block);
  for (int i = 0; i < 2 * kHalf; ++i) out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * d;
}

void decode_mxfp4(const uint8_t* block, float* out) {
  static constexpr std::array kTwice = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // values of E2M1, doubled
  const uint32_t e = block[0], bits = e < 2 ? 0x00200000U << e : (e - 1) << 23;                    // 2^(e - 128)
  const auto scale = std::bit_cast<float>(bits);
  for (int i = 0; i < kHalf; ++i) {
    const uint8_t byte = block[1 + i];
    out[i] = static_cast<float>(kTwice[static_cast<size_t>(low(byte))]) * scale;
    out[i + kHalf] = static_cast<float>(kTwice[static_cast<size_t>(high(byte))]) * scale;
  }
}

struct PartScale {
  float scale, least;
};

// Returns the scale and the minimum of a part: bytes 0 to 3 have the scales of parts 0 to 3 in 6 bits, 4 to 7 the minima, and above these
// the upper two bits of parts 4 to 7, whose lower four are in bytes 8 to 11, scales below minima.
PartScale part_scale(const uint8_t* block, int part) {
  const float d = fp16_at(block), m = fp16_at(block + 2);
  const uint8_t* const bytes = block + 4;
  const int s = part < 4 ? bytes[part] & 0x3F : low(bytes[part + 4]) | bytes[part - 4] >> 6 << 4;
  const int t = part < 4 ? bytes[part + 4] & 0x3F : high(bytes[part + 4]) | bytes[part] >> 6 << 4;
  return {.scale = d * static_cast<float>(s), .least = m * static_cast<float>(t)};
}

void decode_parts(const uint8_t* block, const uint8_t* top, const uint8_t* nibbles, float* out) {
  for (int part = 0; part < kParts; ++part) {
    const PartScale of = part_scale(block, part);
    for (int i = 0; i < kPart; ++i) {
      const uint8_t byte = nibbles[part / 2 * kPart + i];
      const int fifth = top == nullptr ? 0 : (top[i] >> part & 1) << 4;
      const int q = (part % 2 == 0 ? low(byte) : high(byte)) + fifth;
      out[part * kPart + i] = of.scale * static_cast<float>(q) - of.least;
    }
  }
}

void decode_q4_k(const uint8_t* block, float* out) { decode_parts(block, nullptr, block + 4 + kScales, out); }
void decode_q5_k(const uint8_t* block, float* out) { decode_parts(block, block + 4 + kScales, block + 4 + kScales + kPart, out); }

void decode_q6_k(const uint8_t* block, float* out) {
  const uint8_t* const scales = block + 192;
  const float d = fp16_at(block + 208);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, quarter = i % 128 / kPart, at = i % kPart;
    const uint8_t byte = block[half * 64 + quarter % 2 * kPart + at], top = block[128 + half * kPart + at];
    const int q = ((quarter < 2 ? low(byte) : high(byte)) | (top >> (2 * quarter) & 3) << 4) - 32;
    out[i] = d * static_cast<float>(static_cast<int8_t>(scales[i / 16])) * static_cast<float>(q);
  }
}

using DecodeBlock = void(const uint8_t* block, float* out);

DecodeBlock* decoder_of(GgmlType type) {
  switch (type) {
    case GgmlType::f32: return decode_f32;
    case GgmlType::f16: return decode_f16;
    case GgmlType::bf16: return decode_bf16;
    case GgmlType::q4_0: return decode_q4_0;
    case GgmlType::q4_1: return decode_q4_1;
    case GgmlType::q5_0: return decode_q5_0;
    case GgmlType::q5_1: return decode_q5_1;
    case GgmlType::q8_0: return decode_q8_0;
    case GgmlType::q4_k: return decode_q4_k;
    case GgmlType::q5_k: return decode_q5_k;
    case GgmlType::q6_k: return decode_q6_k;
    case GgmlType::mxfp4: return decode_mxfp4;
  }
  fail(ExitCode::internal, "there is no type ", static_cast<uint32_t>(type), " of tensors");
}

}  // namespace

void decode_ggml(GgmlType type, std::span<const std::byte> blocks, std::span<float> out) {
  const GgmlTypeInfo& info = ggml_type_info(type);
  const auto bytes = static_cast<size_t>(info.bytes), elements = static_cast<size_t>(info.block), count = blocks.size() / bytes;
  require(count * bytes == blocks.size() && count * elements == out.size(), info.name, ": ", blocks.size(), " bytes for ", out.size(),
          " elements");
  DecodeBlock* const decode = decoder_of(type);
  const auto* const from = reinterpret_cast<const uint8_t*>(blocks.data());
  for (size_t i = 0; i < count; ++i) decode(from + i * bytes, out.data() + i * elements);
}

void split_mxfp4(std::span<const std::byte> blocks, std::span<std::byte> codes, std::span<std::byte> scales) {
  constexpr size_t kBytes = 1 + kHalf;
  const size_t count = blocks.size() / kBytes;
  require(count * kBytes == blocks.size() && (codes.empty() || codes.size() == count * kHalf) && (scales.empty() || scales.size() == count),
          "MXFP4: ", blocks.size(), " bytes for ", codes.size(), " of codes and ", scales.size(), " scales");
  for (size_t i = 0; i < count; ++i) {
    const std::byte* const block = blocks.data() + i * kBytes;
    if (!scales.empty()) scales[i] = block[0];
    if (codes.empty()) continue;
    const std::byte* const nibbles = block + 1;
    std::byte* const out = codes.data() + i * kHalf;
    constexpr std::byte kLow{0xF}, kHigh{0xF0};
    for (size_t c = 0; c < kHalf / 2; ++c) {
      const std::byte even = nibbles[2 * c], odd = nibbles[2 * c + 1];
      out[c] = (even & kLow) | (odd & kLow) << 4;
      out[c + kHalf / 2] = (even & kHigh) >> 4 | (odd & kHigh);
    }
  }
}

}  // namespace mantissa
