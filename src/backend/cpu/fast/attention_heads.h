// Locates the heads of packed q|k|v rows, and the keys that the queries of a block see.
#pragma once

#include <algorithm>

#include "backend/cpu/fast/attention_tiles.h"
#include "mantissa/backend/backend.h"

namespace mantissa {

// One sequence: `length` rows of heads * head_dim channels each, packed as in HeadLayout or only the query heads.
template <class T>
struct HeadRows {
  T* first;
  int64_t stride, length, head_dim;
  // Rows [tile * kTile, ...) of the head in column head * head_dim.
  TileRows<T> tile(int64_t head, int64_t index) const {
    return {first + head * head_dim + index * kTile * stride, stride, std::min(kTile, length - index * kTile), head_dim};
  }
};

// Returns sequence b of `rows` [batch * length, stride].
template <class T>
HeadRows<T> sequence(const Tensor& rows, int64_t b, int64_t batch, int64_t head_dim) {
  const int64_t length = rows.dim(0) / batch, stride = rows.dim(1);
  return {rows.device_data<std::remove_const_t<T>>() + b * length * stride, stride, length, head_dim};
}

// Returns where the last `window` keys up to a position begin; 0: all keys count.
inline int64_t window_start(int64_t position, int64_t window) { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }

// Finds the first key of each query of one sequence.
class FirstKeys {
 public:
  FirstKeys(const Tensor& segment_starts, int64_t b, int64_t length, int64_t window)
      : starts_(segment_starts.defined() ? segment_starts.device_data<int32_t>() + b * length : nullptr),
        length_(length),
        window_(window) {}

  // Returns the first key block that a query of the block sees. Starts need not rise from row to row.
  int64_t first_tile(int64_t query_tile) const {
    const int64_t begin = query_tile * kTile, in_window = window_start(begin, window_);
    if (starts_ == nullptr) return in_window / kTile;
    const int64_t start = *std::min_element(starts_ + begin, starts_ + std::min(length_, begin + kTile));
    return std::max(start, in_window) / kTile;
  }

  TileMask mask(int64_t query_tile, int64_t key_tile) const {
    TileMask mask;
    mask.diagonal = query_tile == key_tile;
    mask.partial = mask.diagonal;
    for (int64_t i = 0; i < kTile; ++i) {
      const int64_t row = query_tile * kTile + i;
      const int64_t first = row >= length_ ? 0 : std::max<int64_t>(0, first_key(row) - key_tile * kTile);
      mask.partial = mask.partial || first > 0;
      mask.first[i] = static_cast<int32_t>(first);
      mask.last[i] = static_cast<int32_t>(mask.diagonal ? i : kTile - 1);
    }
    return mask;
  }

 private:
  int64_t first_key(int64_t row) const {
    const int64_t in_window = window_start(row, window_);
    return starts_ == nullptr ? in_window : std::max<int64_t>(starts_[row], in_window);
  }

  const int32_t* starts_;
  int64_t length_, window_;
};

}  // namespace mantissa
