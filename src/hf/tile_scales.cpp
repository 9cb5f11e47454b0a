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

namespace {

// Reads block FP8: weights with a scale for each 128x128 tile of a tensor, as codes where they are those of the parameter, else as values.

// Values of the 256 codes.
const std::array<float, 256>& e4m3_values() {
  static const std::array<float, 256> values = [] {
    constexpr uint8_t kScaleOfOne = 127;
    std::array<float, 256> all;
    for (unsigned code = 0; code < all.size(); ++code)
      all[code] = std::bit_cast<float>(E4M3::decode(static_cast<uint8_t>(code), kScaleOfOne));
    return all;
  }();
  return values;
}

}  // namespace

// If this is true of all pieces of a parameter, each piece begins with a tile of it.
bool HfWeights::Piece::whole_tiles() const { return run.rows % kTile == 0 && tensor->columns() % kTile == 0; }

WeightForm HfWeights::form_of_tiles(const std::vector<Piece>& pieces) {
  const bool codes = std::ranges::all_of(pieces, [](const Piece& piece) { return piece.whole_tiles() && !piece.tiles->no_power_of_two; });
  if (!codes) return {.dtype = Dtype::f32, .products = true};
  const PackedScheme scheme{.format = Format::e4m3, .block = kTile};
  return {.dtype = Dtype::f32, .codes = form_of(scheme), .columns = pieces.front().tensor->columns()};
}

std::optional<FileDtype> HfWeights::tile_scales_dtype(const ArchitectureTensor& tensor) const {
  const std::vector<Piece>& pieces = pieces_of(tensor.parameter);
  const auto piece = std::ranges::find_if(pieces, [&](const Piece& one) { return one.tensor->name == tensor.name; });
  return piece->tiles ? std::optional(piece->scales->dtype) : std::nullopt;
}

// Returns false for a tensor that is not block FP8.
bool HfWeights::require_block_fp8_form(const ArchitectureTensor& tensor, const SafetensorsEntry& entry,
                                       const SafetensorsEntry& scales) const {
  const int64_t rows = tensor.rows(), columns = tensor.columns();
  const bool tiles = entry.dtype == FileDtype::f8_e4m3, four_bits = entry.dtype == FileDtype::i8 && entry.name.ends_with(".weight");
  if (!block_fp8_ || (!tiles && !four_bits)) return false;
  require(!tensor.transposed, ExitCode::usage, where(), ": ", entry.name,
          " is the experts of a layer in one tensor, which have no block FP8: mantissa reads these as blocks and scales of MXFP4");
  require(tiles ? holds_tile_scales(scales.dtype) : scales.dtype == FileDtype::f8_e8m0, ExitCode::usage, where(), ": ", entry.name, " is ",
          entry.dtype, " with scales in ", scales.dtype,
          "; of quant_method fp8 mantissa reads F8_E4M3 with scales in F32, BF16 or F8_E8M0, and I8, which is E2M1, with F8_E8M0");
  if (tiles) {
    require_shape(entry, tensor.shape);
    require_shape(scales, {tiles_along(rows), tiles_along(columns)});
    return true;
  }
  require_whole_blocks(entry, columns);
  require_shape(entry, {rows, columns / 2});
  require_shape(scales, {rows, columns / kPackedBlock});
  return true;
}

// Reads the scales of rows [begin, end) of the parameter as E8M0 codes.
void HfWeights::read_tile_scales_of(const Piece& piece, int64_t begin, int64_t end, std::span<std::byte> out) {
  const int64_t columns = piece.tiles->columns;
  for (int64_t row = begin; row < end; row += kTile) {
    for (int64_t column = 0; column < columns; ++column) {
      const float scale = piece.tiles->at(piece.run.file_row + row - piece.run.row, column * kTile);
      out[static_cast<size_t>((row - begin) / kTile * columns + column)] = std::byte{*e8m0_of_scale(scale)};
    }
  }
}

// Multiplies codes by the scales of their tiles, rounded once to fp32.
void HfWeights::read_tiles(const Piece& piece, int64_t begin, int64_t end, std::span<std::byte> out) {
  const int64_t columns = piece.tensor->columns();
  std::vector<std::byte> codes(static_cast<size_t>((end - begin) * columns));
  read_file_rows(piece, *piece.entry, columns, begin, end, codes);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t file_row = piece.run.file_row + (row - piece.run.row) * piece.run.step;
    for (int64_t column = 0; column < columns; ++column) {
      const auto at = static_cast<size_t>((row - begin) * columns + column);
      const float value = e4m3_values()[std::to_integer<uint8_t>(codes[at])] * piece.tiles->at(file_row, column);
      std::memcpy(out.data() + at * sizeof value, &value, sizeof value);
    }
  }
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

  std::byte code(int64_t row, int64_t pair) const { return codes[static_cast<size_t>(row * columns / 2 + pair)]; }
  int scale(int64_t row, int64_t column) const {
    return std::to_integer<int>(scales[static_cast<size_t>(row * columns / kPackedBlock + column / kPackedBlock)]);
  }
};

// Returns true if the tile that begins with this column loses nothing.
bool fits(const RowsOfTiles& block, int64_t first) {
  int highest = -1000, lowest = 1000;
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t column = first; column < std::min(first + kTile, block.columns); ++column) {
      const auto byte = std::to_integer<unsigned>(block.code(row, column / 2));
      const unsigned magnitude = (column % 2 == 0 ? byte : byte >> 4U) & 7U;
      const int scale = block.scale(row, column);
      if (magnitude == 0) continue;
      highest = std::max(highest, scale + kHighestBit[magnitude]);
      lowest = std::min(lowest, scale + kLowestBit[magnitude]);
    }
  }
  return highest - lowest <= kSpan;
}

// Returns how many rows of a run from `row` of it on belong to one matrix and one tile.
int64_t rows_of_tile(const ArchitectureTensor& tensor, const RowRun& run, int64_t row) {
  const int64_t each = tensor.rows() / tensor.matrices, at = (run.file_row + row * run.step) % each;
  return std::min({kTile, run.rows - row, (each - at + run.step - 1) / run.step});
}

void count_tiles(HfWeights& folder, const ArchitectureTensor& tensor, const RowRun& run, TileFit& fit) {
  const WeightForm form = folder.form(tensor.parameter);
  for (int64_t row = 0, rows = 0; row < run.rows; row += rows) {
    rows = rows_of_tile(tensor, run, row);
    RowsOfTiles block{.codes = std::vector<std::byte>(static_cast<size_t>(rows * code_bytes(form))),
                      .scales = std::vector<std::byte>(static_cast<size_t>(rows * scale_bytes(form))),
                      .rows = rows,
                      .columns = form.columns};
    folder.read_codes(tensor.parameter, run.row + row, run.row + row + rows, block.codes, block.scales);
    const auto bad = std::ranges::find(block.scales, std::byte{kScaleNan});
    require(bad == block.scales.end(), ExitCode::data, folder.where(), ": ", tensor.name, ": a scale of row ",
            run.file_row + (row + (bad - block.scales.begin()) / scale_bytes(form)) * run.step, " is NaN");
    for (int64_t column = 0; column < form.columns; column += kTile) {
      ++fit.tiles;
      if (fits(block, column)) continue;
      const int64_t first = run.file_row + row * run.step, last = first + (rows - 1) * run.step;
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
