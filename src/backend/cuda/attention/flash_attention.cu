#include <numbers>

#include "backend/cuda/attention/flash_tiles.h"

namespace mantissa::gpu {
namespace {

// The online softmax of a lane's rows: the number that is subtracted from their scores before they become powers of two, and the lane's
// part of the sum of these.
template <unsigned kFragments>
struct FlashSoftmax {
  float subtracted[2 * kFragments], sum[2 * kFragments];
};

// The growth of a row's largest score up to which another number stays subtracted, so that sums are seldom rescaled: powers up to 2^kGrowth
// are exact enough.
constexpr float kGrowth = 8.0F;

// Turns scores into exponentials, and scales what was summed before to what is subtracted now.
template <unsigned kFragments, unsigned kKeys, unsigned kColumns>
__device__ void softmax_step(float (&scores)[kFragments][kKeys][4], float scale, FlashSoftmax<kFragments>& rows,
                             float (&mixed)[kFragments][kColumns][4]) {
  float factor[2 * kFragments];
  bool grows = false;
  MANTISSA_UNROLL
  for (unsigned r = 0; r < 2 * kFragments; ++r) {
    float largest = kNoScore;
    MANTISSA_UNROLL
    for (const auto& of : scores[r / 2]) largest = fmaxf(largest, fmaxf(of[r % 2 * 2], of[r % 2 * 2 + 1]));
    largest = join_quad(largest, [](float a, float b) { return fmaxf(a, b); }) * scale;
    const float before = rows.subtracted[r];
    if (largest > before + kGrowth) rows.subtracted[r] = largest;
    factor[r] = before == rows.subtracted[r] ? 1.0F : fast_exp2(before - rows.subtracted[r]);
    grows = grows || factor[r] != 1.0F;
  }
  if (ballot(grows) != 0) {
    MANTISSA_UNROLL
    for (unsigned r = 0; r < 2 * kFragments; ++r) {
      rows.sum[r] *= factor[r];
      MANTISSA_UNROLL
      for (auto& of : mixed[r / 2]) of[r % 2 * 2] *= factor[r], of[r % 2 * 2 + 1] *= factor[r];
    }
  }
  MANTISSA_UNROLL
  for (unsigned r = 0; r < 2 * kFragments; ++r) {
    const float subtracted = rows.subtracted[r] == kNoScore ? 0.0F : rows.subtracted[r];  // nothing was seen so far
    MANTISSA_UNROLL
    for (auto& of : scores[r / 2]) {
      MANTISSA_UNROLL
      for (unsigned e = r % 2 * 2; e < r % 2 * 2 + 2; ++e) {
        of[e] = fast_exp2(multiply_add(of[e], scale, -subtracted));
        rows.sum[r] += of[e];
      }
    }
  }
}

// The score of the head's sink, to base two.
__device__ float sink_of(const Attention<bf16>& k, const Place& at) { return k.sinks ? value_of(k.sinks[at.head]) * kLog2e : kNoScore; }

// Divides by the sums of exponentials, and writes.
template <unsigned kFragments, unsigned kColumns>
__device__ void finish(const Attention<bf16>& k, const Place& at, const FlashSoftmax<kFragments>& softmax,
                       const float (&mixed)[kFragments][kColumns][4]) {
  float factors[2 * kFragments];
  MANTISSA_UNROLL
  for (unsigned r = 0; r < 2 * kFragments; ++r) {
    const float sum = join_quad(softmax.sum[r], Plus<float>()) + (k.sinks ? fast_exp2(sink_of(k, at) - softmax.subtracted[r]) : 0.0F);
    factors[r] = 1.0F / sum;
    const int64_t row = at.rows.first + own_row<kFragments>(r);
    if (!k.lse || lane() % 4 > 0 || row >= at.rows.end) continue;
    k.lse[(at.sequence * k.heads + at.head) * k.queries_of_sequence + row] = softmax.subtracted[r] * std::numbers::ln2_v<float> + logf(sum);
  }
  const int64_t row = k.heads * k.head_dim;
  write_rows(mixed, factors, {k.out + at.sequence * k.queries_of_sequence * row + at.head * k.head_dim, row}, at.rows);
}

template <unsigned kChannels>
struct ForwardTiles {
  HeadTile<kFlashRows, kChannels> queries;
  KeyTiles<kForward<kChannels>.step, kChannels> keys;
  Sight sights[kFlashRows];  // keys that the queries see
  Place place;               // takes no registers here
};

template <unsigned kChannels>
__global__ void __launch_bounds__(kForward<kChannels>.threads(), kForward<kChannels>.blocks) flash_attend(Attention<bf16> k) {
  constexpr unsigned kFragments = kForward<kChannels>.fragments, kStep = kForward<kChannels>.step, kAtOnce = kForward<kChannels>.at_once,
                     kOfBlock = kForward<kChannels>.threads();
  static_assert(kFitsAnyGpu<ForwardTiles<kChannels>, kStep, kChannels>);
  auto& tiles = launched_shared<ForwardTiles<kChannels>>();
  auto index = static_cast<unsigned>(block());
  const int64_t count = ceil_div(k.queries_of_sequence, int64_t{kFlashRows});
  const int64_t tile = count - 1 - take_last(index, count);  // tiles that see most keys begin first
  const int64_t head = take_last(index, k.heads), end_row = (tile + 1) * kFlashRows;
  const Place at{index, head, {tile * kFlashRows, end_row < k.queries_of_sequence ? end_row : k.queries_of_sequence}};
  const int64_t kv = static_cast<unsigned>(at.head) / static_cast<unsigned>(k.group),
                key_at = at.sequence * k.keys_of_sequence * k.key_stride + kv * k.head_dim,
                query_at = at.sequence * k.queries_of_sequence * k.query_stride + at.head * k.head_dim;
  copy_tile<kOfBlock>(tiles.queries, {k.queries + query_at, k.query_stride}, at.rows);
  const Mask mask{k.segment_starts ? k.segment_starts + at.sequence * k.queries_of_sequence : nullptr, k.window};
  const int first_position = static_cast<int>(at.rows.first + k.ahead), end = static_cast<int>(at.rows.end + k.ahead);
  const FirstKeys firsts = first_keys(mask, {first_position, end});
  if (thread() < kFlashRows) {
    const int position = first_position + static_cast<int>(thread());
    tiles.sights[thread()] = sight_of(mask, position, position < end);
  }
  FlashSoftmax<kFragments> softmax{};
  for (float& subtracted : softmax.subtracted) subtracted = sink_of(k, at);
  if (thread() == 0) tiles.place = at;
  FlashSums<kFragments, kChannels / 8> mixed = {};
  const auto step = [&](int key, auto& key_tile, auto& value_tile) {
    const bool hides = key < firsts.largest || key + static_cast<int>(kStep) - 1 > first_position;
    if (hides) {
      take_out_nonfinite<kStep>(value_tile, mixed, [&](unsigned r, unsigned row) {
        return tiles.sights[own_row<kFragments>(r)].sees(key + static_cast<int>(row));
      });
    }
    for (unsigned first = 0; first < kStep; first += kAtOnce) {
      if (key + static_cast<int>(first) >= first_position + end_of_warp<kFragments>()) break;  // this warp sees none of them
      FlashSums<kFragments, kAtOnce / 8> scores = {};
      add_scores(scores, rows_of_warp<kFragments>(tiles.queries), key_tile, first);
      if (hides) hide(scores, tiles.sights, key + static_cast<int>(first), kNoScore);
      softmax_step(scores, k.scale * kLog2e, softmax, mixed);
      add_weighted(mixed, rounded_weights(scores), value_tile, first);
    }
  };
  for_each_step<kOfBlock>(tiles.keys, {k.keys + key_at, k.key_stride}, {k.values + key_at, k.key_stride}, firsts.least, end, step);
  barrier();  // where there was no step
  finish(k, tiles.place, softmax, mixed);
}

}  // namespace

KernelLaunch<Attention<bf16>> flash_forward(const Attention<bf16>& k, int64_t sequences) {
  const int64_t blocks = sequences * k.heads * ceil_div(k.queries_of_sequence, int64_t{kFlashRows});
  if (k.head_dim == 64) return {flash_attend<64>, {blocks, kForward<64>.threads(), sizeof(ForwardTiles<64>)}};
  return {flash_attend<128>, {blocks, kForward<128>.threads(), sizeof(ForwardTiles<128>)}};
}

}  // namespace mantissa::gpu
