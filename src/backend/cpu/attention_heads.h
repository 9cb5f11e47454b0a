// Where the heads of packed q|k|v rows lie, and which keys the queries of a block see.
#pragma once

#include <algorithm>

#include "backend/cpu/attention_tiles.h"
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

// Sequence b of `rows` [batch * length, stride].
template <class T>
HeadRows<T> sequence(const Tensor& rows, int64_t b, int64_t batch, int64_t head_dim) {
  const int64_t length = rows.dim(0) / batch, stride = rows.dim(1);
  return {rows.device_data<std::remove_const_t<T>>() + b * length * stride, stride, length, head_dim};
}

// The first key of each query of one sequence; zero where segment_starts is undefined.
class FirstKeys {
 public:
  FirstKeys(const Tensor& segment_starts, int64_t b, int64_t length)
      : starts_(segment_starts.defined() ? segment_starts.device_data<int32_t>() + b * length : nullptr), length_(length) {}

  // The first key block that a query of the block sees. Starts need not rise from row to row.
  int64_t first_tile(int64_t query_tile) const {
    if (starts_ == nullptr) return 0;
    const int64_t begin = query_tile * kTile;
    return *std::min_element(starts_ + begin, starts_ + std::min(length_, begin + kTile)) / kTile;
  }

  TileMask mask(int64_t query_tile, int64_t key_tile) const {
    TileMask mask;
    mask.diagonal = query_tile == key_tile;
    mask.partial = mask.diagonal;
    for (int64_t i = 0; i < kTile; ++i) {
      const int64_t row = query_tile * kTile + i;
      const int64_t first = starts_ == nullptr || row >= length_ ? 0 : std::max<int64_t>(0, starts_[row] - key_tile * kTile);
      mask.partial = mask.partial || first > 0;
      mask.first[i] = static_cast<int32_t>(first);
      mask.last[i] = static_cast<int32_t>(mask.diagonal ? i : kTile - 1);
    }
    return mask;
  }

 private:
  const int32_t* starts_;
  int64_t length_;
};

}  // namespace mantissa
