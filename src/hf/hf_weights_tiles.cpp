// Reads block FP8: weights with a scale for each 128x128 tile of a tensor, as codes where they are those of the parameter, else as values.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "hf/tile_scales.h"
#include "mantissa/formats/element.h"
#include "mantissa/hf/hf_weights.h"

namespace mantissa {
namespace {

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
  const auto piece = std::ranges::find(pieces, &tensor, &Piece::tensor);
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

}  // namespace mantissa
