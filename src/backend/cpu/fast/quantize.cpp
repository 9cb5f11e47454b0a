// Quantizes bf16, row block by row block: quantize_row_blocks.h in clones.
#include <algorithm>
#include <atomic>
#include <vector>

#include "backend/cpu/fast/clones.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/quantize_row_blocks.h"
#include "backend/cpu/pieces.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

using lanes::RowBlock, lanes::kLanes, lanes::kPair;

template <class E>
[[gnu::always_inline]] inline bool quantize_as(const RowBlock& row_block, int16_t* words) {
  return row_block.out.how.rowwise() ? lanes::quantize_rows<E, kPair>(row_block, words) : lanes::quantize_columns<E>(row_block, words);
}

// The lanes take blocks of 32, 64, 96 ... and, of E2M1, which is fake-quantized in others as well, rows of 16, 48 ...
bool taken_by_lanes(const Quantize& k) {
  const Quantization& how = k.out.how;
  if (k.x.dtype() != Dtype::bf16) return false;
  if (how.block() % kPair == 0 && k.x.dim(1) % kPair == 0) return true;
  return how.format == Format::e2m1 && how.rowwise() && how.block() % kLanes == 0;
}

bool quantize_row_block(const RowBlock& row_block, int16_t* words) {
  if (row_block.out.how.block() % kPair != 0) return cloned<lanes::quantize_rows<E2M1, kLanes>>(row_block, words);
  switch (row_block.out.how.format) {
    case Format::e4m3: return cloned<quantize_as<E4M3>>(row_block, words);
    case Format::e5m2: return cloned<quantize_as<E5M2>>(row_block, words);
    case Format::none:  // its contract refuses it
    case Format::e2m1: break;
  }
  return cloned<quantize_as<E2M1>>(row_block, words);
}

}  // namespace

void CpuBackend::execute(const Quantize& k) {
  if (!taken_by_lanes(k)) return CpuReference::execute(k);
  const int64_t height = k.out.how.block(), rows = k.out.shape[0], cols = k.x.dim(1);
  std::atomic<bool> nonfinite = false;
  parallel_for(ceil_div(rows, height), std::max<int64_t>(1, rows_per_piece(cols) / height), [&](int64_t begin, int64_t end) {
    thread_local std::vector<int16_t> words;
    if (words.size() < static_cast<size_t>(cols)) words.resize(static_cast<size_t>(cols));
    for (int64_t i = begin; i < end; ++i) {  // block by block: what the first pass read is still in cache for the second
      const int64_t first = i * height, last = std::min(rows, first + height),
                    given = std::clamp<int64_t>(k.x.dim(0) - first, 0, last - first);
      const bf16* x = k.x.device_data<bf16>() + std::min(first, k.x.dim(0)) * cols;
      if (quantize_row_block({x, given, first, last, k.out}, words.data())) nonfinite = true;
      if (k.second.defined()) quantize_row_block({x, given, first, last, k.second}, words.data());
    }
  });
  if (nonfinite && k.nonfinite.defined()) *k.nonfinite.device_data<int32_t>() = 1;
}

}  // namespace mantissa
