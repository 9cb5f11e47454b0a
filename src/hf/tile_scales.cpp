#include "hf/tile_scales.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "mantissa/base/error.h"
#include "mantissa/formats/e8m0.h"
#include "mantissa/formats/element.h"

namespace mantissa {
std::optional<uint8_t> e8m0_of_scale(float scale) {
  const uint8_t code = e8m0_of_fp32_bits(std::bit_cast<uint32_t>(scale));
  return code == kScaleNan ? std::nullopt : std::optional(code);
}

TileScales read_tile_scales(std::span<const std::byte> bytes, const SafetensorsEntry& entry, const std::string& where) {
  TileScales scales{.values = {}, .columns = entry.shape.back()};
  const auto width = static_cast<size_t>(file_dtype_bits(entry.dtype)) / 8;
  for (size_t i = 0; i < bytes.size() / width; ++i) {
    uint32_t word = 0;
    std::memcpy(&word, bytes.data() + i * width, width);
    const uint32_t bits = entry.dtype == FileDtype::bf16 ? word << 16 : word;
    const float scale = std::bit_cast<float>(entry.dtype == FileDtype::f8_e8m0 ? fp32_bits_of_e8m0(static_cast<uint8_t>(word)) : bits);
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

namespace {

// Highest and lowest bit, as powers of two, of the magnitudes 0 (not used), 0.5, 1, 1.5, 2, 3, 4 and 6.
constexpr std::array kHighestBit = {0, -1, 0, 0, 1, 1, 2, 2}, kLowestBit = {0, -1, 0, -1, 1, 0, 2, 1};
// Bits that E4M3 spans: 1.75 * 2^8 is its largest number, and 2^-9 its least.
constexpr int kSpan = 8 + 9;

// Rows of one matrix, at most as many as a tile has.
struct RowsOfTiles {
  std::vector<std::byte> codes, scales;
  int64_t rows, columns;
};

// Returns true if the tile that begins with this column loses nothing.
bool fits(const RowsOfTiles& block, int64_t first) {
  int highest = -1000, lowest = 1000;
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t column = first; column < std::min(first + kTile, block.columns); ++column) {
      const int64_t place = row * block.columns + column;
      const auto byte = std::to_integer<unsigned>(block.codes[static_cast<size_t>(place / 2)]);
      const unsigned magnitude = (column % 2 == 0 ? byte : byte >> 4U) & 7U;
      const int scale = std::to_integer<int>(block.scales[static_cast<size_t>(place / kPackedBlock)]);
      if (magnitude == 0) continue;
      highest = std::max(highest, scale + kHighestBit[magnitude]);
      lowest = std::min(lowest, scale + kLowestBit[magnitude]);
    }
  }
  return highest - lowest <= kSpan;
}

void count_tiles(HfWeights& folder, const ArchitectureTensor& tensor, const RowRun& run, TileFit& fit) {
  const WeightForm form = folder.form(tensor.parameter);
  const int64_t each = tensor.rows() / tensor.matrices;
  for (int64_t row = 0, rows = 0; row < run.rows; row += rows) {
    const int64_t first = run.file_row + row * run.step;
    rows = std::min({kTile, run.rows - row, (each - first % each + run.step - 1) / run.step});  // within one matrix and one tile
    RowsOfTiles block{.codes = std::vector<std::byte>(static_cast<size_t>(rows * code_bytes(form))),
                      .scales = std::vector<std::byte>(static_cast<size_t>(rows * scale_bytes(form))),
                      .rows = rows,
                      .columns = form.columns};
    folder.read_codes(tensor.parameter, run.row + row, run.row + row + rows, block.codes, block.scales);
    const auto bad = std::ranges::find(block.scales, std::byte{kScaleNan});
    require(bad == block.scales.end(), ExitCode::data, folder.where(), ": ", tensor.name, ": a scale of row ",
            first + (bad - block.scales.begin()) / scale_bytes(form) * run.step, " is NaN");
    for (int64_t column = 0; column < form.columns; column += kTile) {
      ++fit.tiles;
      if (fits(block, column)) continue;
      const int64_t last = first + (rows - 1) * run.step;
      if (fit.lossy++ == 0)
        fit.first =
            text(tensor.name, ", rows ", first, " to ", last, ", columns ", column, " to ", std::min(column + kTile, form.columns) - 1);
    }
  }
}

}  // namespace

TileFit fit_of_tiles(HfWeights& folder) {
  TileFit fit;
  for (const ArchitectureTensor& tensor : folder.tensors()) {
    if (folder.form(tensor.parameter).codes.format != Format::e2m1) continue;
    for (const RowRun& run : tensor.runs) count_tiles(folder, tensor, run, fit);
  }
  return fit;
}

}  // namespace mantissa
