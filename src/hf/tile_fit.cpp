#include "mantissa/hf/tile_fit.h"

#include <algorithm>
#include <array>
#include <vector>

#include "hf/tile_scales.h"
#include "mantissa/formats/element.h"

namespace mantissa {
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
