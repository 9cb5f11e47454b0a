#include "hf/tile_scales.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "mantissa/base/error.h"
#include "mantissa/formats/e8m0.h"

namespace mantissa {
namespace {

// Returns number `index` of `bytes`, little-endian words of `width` bytes.
uint32_t word_at(std::span<const std::byte> bytes, size_t index, size_t width) {
  uint32_t word = 0;
  std::memcpy(&word, bytes.data() + index * width, width);
  return word;
}

float scale_of(FileDtype dtype, uint32_t word) {
  if (dtype == FileDtype::f8_e8m0) return std::bit_cast<float>(fp32_bits_of_e8m0(static_cast<uint8_t>(word)));
  return std::bit_cast<float>(dtype == FileDtype::bf16 ? word << 16 : word);
}

}  // namespace

std::optional<uint8_t> e8m0_of_scale(float scale) {
  const uint8_t code = e8m0_of_fp32_bits(std::bit_cast<uint32_t>(scale));
  return code == kScaleNan ? std::nullopt : std::optional(code);
}

TileScales read_tile_scales(SafetensorsFolder& files, const SafetensorsEntry& entry, const std::string& where) {
  std::vector<std::byte> bytes(static_cast<size_t>(entry.bytes()));
  files.read(entry, 0, bytes);
  TileScales scales{.values = {}, .columns = entry.shape.back()};
  const auto width = static_cast<size_t>(file_dtype_bits(entry.dtype)) / 8;
  for (size_t i = 0; i < bytes.size() / width; ++i) {
    const float scale = scale_of(entry.dtype, word_at(bytes, i, width));
    const auto index = static_cast<int64_t>(i);
    const auto named = [&] { return text(entry.name, '[', index / scales.columns, ", ", index % scales.columns, "] is ", scale); };
    require(std::isfinite(scale) && scale > 0.0F, ExitCode::data, where, ": ", named(), ": a scale must be positive and finite");
    if (!scales.no_power_of_two && !e8m0_of_scale(scale)) scales.no_power_of_two = named();
    scales.values.push_back(scale);
  }
  return scales;
}

std::vector<std::byte> tile_scales_as(FileDtype dtype, std::span<const std::byte> codes) {
  if (dtype == FileDtype::f8_e8m0) return {codes.begin(), codes.end()};
  const size_t width = dtype == FileDtype::bf16 ? sizeof(uint16_t) : sizeof(uint32_t);
  std::vector<std::byte> out(codes.size() * width);
  for (size_t i = 0; i < codes.size(); ++i) {
    const uint32_t bits = fp32_bits_of_e8m0(std::to_integer<uint8_t>(codes[i])) >> (dtype == FileDtype::bf16 ? 16 : 0);
    std::memcpy(out.data() + i * width, &bits, width);
  }
  return out;
}

}  // namespace mantissa
