#include "backend/cuda/checked_index.h"
#include "backend/cuda/codes/packs.h"
#include "backend/cuda/cuda_backend.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

// Ids of a batch, and the rows of the table that an operand has.
struct Ids {
  CheckedIndices ids;
  int64_t count, first, rows;

  // Returns -1 for an id of another rank's part, or one that is refused.
  __device__ int64_t row(int64_t i) const {
    const int64_t row = ids.values[i] - first;
    return row >= 0 && row < rows ? row : -1;
  }
};

template <class Team, class T>
__global__ void __launch_bounds__(kThreads) gather(Ids k, Packs<const T> weight, Packs<T> out) {
  const int64_t i = Team::row();
  if (i >= k.count) return;
  const int64_t row = checked(k.ids, i) < 0 ? -1 : k.row(i);
  const Packs<const T> from = weight.row(row < 0 ? 0 : row);
  for_each_pack_of_row<Team>(weight.count, [&](int64_t first) { out.row(i).write(first, row < 0 ? Pack{} : from.read(first)); });
}

// The first id of each row of the table, and the complement of its last one: both are minima of numbers whose bits were all set before.
struct Uses {
  uint32_t *first, *not_last;
};

__global__ void __launch_bounds__(kThreads) find_uses(Ids k, Uses uses) {
  for_each_element(k.count, [=](int64_t i) {
    if (checked(k.ids, i) < 0 || k.row(i) < 0) return;
    fetch_min(&uses.first[k.row(i)], static_cast<uint32_t>(i));
    fetch_min(&uses.not_last[k.row(i)], ~static_cast<uint32_t>(i));
  });
}

// A bit for each id that a block has looked at: set if it is that of the block's row. There are two turns, because the first warp to go on
// looks at more ids while others still read.
struct UsesOfRow {
  unsigned of_warps[2][kWarpsOfBlock];
};

constexpr unsigned kLoadedAtOnce = 4;  // so that loads do not wait for each other

// Adds the rows of dy at start + 32 w + b for the bits b of found[w], in this order. A thread has packs of columns of its own.
template <class T>
__device__ void add_uses(const unsigned (&found)[kWarpsOfBlock], Packs<const T> dy, int64_t start, const Packs<float>& sums) {
  for_each_pack_of_row<OfBlock>(sums.count, [&](int64_t first) {
    Pack sum = sums.read(first);
    for (unsigned w = 0; w < kWarpsOfBlock; ++w) {
      for (unsigned uses = found[w]; uses != 0;) {
        Pack more[kLoadedAtOnce];
        const unsigned all = uses;
        MANTISSA_UNROLL
        for (unsigned n = 0; n < kLoadedAtOnce; ++n, uses &= uses - 1) {
          const int64_t row = start + w * kWarp + lowest_bit(uses != 0 ? uses : all);
          more[n] = dy.row(row).read(first);
        }
        unsigned left = all;
        MANTISSA_UNROLL
        for (unsigned n = 0; n < kLoadedAtOnce; ++n, left &= left - 1) {
          MANTISSA_UNROLL
          for (unsigned i = 0; i < kPack; ++i) sum.at[i] = left != 0 ? sum.at[i] + more[n].at[i] : sum.at[i];
        }
      }
    }
    sums.write(first, sum);
  });
}

// A block has an id. That of the first use of a row adds for all its uses, which it finds by votes, in the order of ids, up to the last
// one.
template <class T>
__global__ void __launch_bounds__(kThreads) scatter(Ids k, Uses uses, Packs<const T> dy, Packs<float> dweight) {
  const int64_t row = k.row(block());
  if (row < 0 || uses.first[row] != block()) return;
  const int64_t last = ~uses.not_last[row];
  auto& found = block_shared<UsesOfRow>().of_warps;
  unsigned turn = 0;
  for (int64_t start = block(); start <= last; start += kThreads, turn = 1 - turn) {
    const int64_t i = start + thread();
    const unsigned own = ballot(i <= last && k.row(i) == row);
    if (lane() == 0) found[turn][warp()] = own;
    barrier();
    unsigned any = 0;
    for (const unsigned votes : found[turn]) any |= votes;
    if (any != 0) add_uses(found[turn], dy, start, dweight.row(row));
  }
}

}  // namespace

void CudaBackend::execute(const EmbeddingForward& k) {
  const int64_t rows = k.weight.dim(0), channels = k.weight.dim(1), count = k.ids.dim(0);
  const Ids ids{checked(k.ids, IndexRule::below(ExitCode::data, "embedding", "ids", k.part.limit(rows))), count, k.part.first, rows};
  with_values(k.weight.dtype(), [&]<class T>() {
    const T* const weight = k.weight.device_data<T>();
    T* const out = k.out.device_data<T>();
    const RowPacks of{channels, begin_at_packs(channels, weight, out)};
    with_team(count, channels, [&]<class Team>(Grid grid) { launch(gather<Team, T>, grid, ids, of(weight), of(out)); });
  });
}

void CudaBackend::execute(const EmbeddingBackward& k) {
  const int64_t rows = k.dweight.dim(0), channels = k.dy.dim(1), count = k.ids.dim(0);
  const Ids ids{checked(k.ids, IndexRule::below(ExitCode::data, "embedding backward", "ids", k.part.limit(rows))), count, k.part.first,
                rows};
  if (!k.accumulate) execute(Fill{.out = k.dweight, .value = 0.0});
  const Tensor found = empty(*this, Dtype::i32, {2, rows});
  execute(Fill{.out = found, .value = -1.0});
  auto* const first = reinterpret_cast<uint32_t*>(found.device_data<int32_t>());
  const Uses uses{first, first + rows};
  launch(find_uses, {blocks_for(count), kThreads}, ids, uses);
  with_values(k.dy.dtype(), [&]<class T>() {
    const T* const dy = k.dy.device_data<T>();
    float* const dweight = k.dweight.device_data<float>();
    const RowPacks of{channels, begin_at_packs(channels, dy, dweight)};
    launch(scatter<T>, {count, kThreads}, ids, uses, of(dy), of(dweight));
  });
}

}  // namespace mantissa
