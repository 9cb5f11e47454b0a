#include <numbers>

#include "backend/cuda/flash_attention.h"
#include "backend/cuda/flash_tiles.h"

namespace mantissa::gpu {
namespace {

// Blocks of a multiprocessor; the sums of 128 channels leave room for one.
template <unsigned kChannels>
constexpr unsigned kBlocks = kChannels == 64 ? 2 : 1;

// Of a thread's rows: the largest score so far, and this thread's part of the sum of exponentials beside it. Powers are of two.
struct Softmax {
  float largest[2], sum[2];
};

// Scores become exponentials; what was summed before is scaled to the new largest score.
template <unsigned kChannels>
__device__ void softmax_step(float (&scores)[kStepKeys / 8][4], Softmax& rows, float (&mixed)[kChannels / 8][4]) {
  float factor[2];
  MANTISSA_UNROLL
  for (unsigned i = 0; i < 2; ++i) {
    float largest = rows.largest[i];
    MANTISSA_UNROLL
    for (auto& of : scores) largest = Largest<float>()(of[2 * i], Largest<float>()(of[2 * i + 1], largest));
    largest = join_quad(largest, Largest<float>());
    factor[i] = rows.largest[i] == largest ? 1.0F : exp2f(rows.largest[i] - largest);
    float sum = 0.0F;
    MANTISSA_UNROLL
    for (auto& of : scores) {
      MANTISSA_UNROLL
      for (unsigned e = 2 * i; e < 2 * i + 2; ++e) {
        of[e] = of[e] == kNoScore ? 0.0F : exp2f(of[e] - largest);
        sum += of[e];
      }
    }
    rows.sum[i] = rows.sum[i] * factor[i] + sum;
    rows.largest[i] = largest;
  }
  if (ballot(factor[0] != 1.0F || factor[1] != 1.0F) == 0) return;
  MANTISSA_UNROLL
  for (auto& of : mixed) {
    MANTISSA_UNROLL
    for (unsigned e = 0; e < 4; ++e) of[e] *= factor[e / 2];
  }
}

// A block's queries of one head, and which keys those of this thread see.
struct Queries {
  int64_t sequence, head;
  Range own;
  int64_t ahead, first[2];

  __device__ int64_t position(unsigned i) const { return own.first + own_row(i) + ahead; }
  __device__ int64_t end_key() const { return own.end + ahead; }
  __device__ bool sees(unsigned i, int64_t key) const { return key >= first[i] && key <= position(i); }
};
__device__ Queries place(const Attention<bf16>& k) {
  auto index = static_cast<unsigned>(block());
  const int64_t count = ceil_div(k.queries_of_sequence, int64_t{kFlashRows});
  const int64_t tile = count - 1 - take_last(index, count);  // those that see most keys begin first
  const int64_t head = take_last(index, k.heads), end = (tile + 1) * kFlashRows;
  return {index, head, {tile * kFlashRows, end < k.queries_of_sequence ? end : k.queries_of_sequence}, k.ahead, {}};
}

__device__ void scale_scores(float (&scores)[kStepKeys / 8][4], const Queries& queries, int64_t key, bool hides, float scale) {
  MANTISSA_UNROLL
  for (unsigned j = 0; j < kStepKeys / 8; ++j) {
    MANTISSA_UNROLL
    for (unsigned e = 0; e < 4; ++e) {
      scores[j][e] = !hides || queries.sees(e / 2, key + j * 8 + own_col() + e % 2) ? scores[j][e] * scale : kNoScore;
    }
  }
}

// Divides by the sums of exponentials, and writes.
template <unsigned kChannels>
__device__ void finish(const Attention<bf16>& k, const Queries& queries, const Softmax& softmax, float (&mixed)[kChannels / 8][4]) {
  MANTISSA_UNROLL
  for (unsigned i = 0; i < 2; ++i) {
    const float sum = join_quad(softmax.sum[i], Plus<float>());
    MANTISSA_UNROLL
    for (auto& of : mixed) of[2 * i] /= sum, of[2 * i + 1] /= sum;
    const int64_t row = queries.own.first + own_row(i);
    if (!k.lse || lane() % 4 > 0 || row >= queries.own.end) continue;
    k.lse[(queries.sequence * k.heads + queries.head) * k.queries_of_sequence + row] =
        softmax.largest[i] * std::numbers::ln2_v<float> + logf(sum);
  }
  const int64_t row = k.heads * k.head_dim;
  write_rows(mixed, {k.out + queries.sequence * k.queries_of_sequence * row + queries.head * k.head_dim, row}, queries.own);
}

template <unsigned kChannels>
__global__ void __launch_bounds__(kThreads, kBlocks<kChannels>) flash_attend(Attention<bf16> k) {
  auto& tiles = block_shared<KeyTiles<kChannels>>();
  Queries queries = place(k);
  const int64_t kv = static_cast<unsigned>(queries.head) / static_cast<unsigned>(k.group), end = queries.end_key(),
                key_at = queries.sequence * k.keys_of_sequence * k.key_stride + kv * k.head_dim,
                query_at = queries.sequence * k.queries_of_sequence * k.query_stride + queries.head * k.head_dim;
  const HeadRows<const bf16> keys{k.keys + key_at, k.key_stride}, values{k.values + key_at, k.key_stride};
  Fragment left[kChannels / 16];
  load_left<kChannels>(left, {k.queries + query_at, k.query_stride}, queries.own);
  const Mask mask{k.segment_starts ? k.segment_starts + queries.sequence * k.queries_of_sequence : nullptr, k.window};
  const int64_t first_position = queries.own.first + k.ahead;
  const FirstKeys firsts = first_keys(mask, {first_position, end});
  MANTISSA_UNROLL
  for (unsigned i = 0; i < 2; ++i) queries.first[i] = queries.position(i) < end ? mask.first(queries.position(i)) : 0;

  const float sink = k.sinks ? value_of(k.sinks[queries.head]) * kLog2e : kNoScore;
  Softmax softmax{{sink, sink}, {}};
  if (lane() % 4 == 0 && sink != kNoScore) softmax.sum[0] = softmax.sum[1] = 1.0F;
  float mixed[kChannels / 8][4] = {};
  for_each_step(tiles, keys, values, firsts.least / kStepKeys * kStepKeys, end, [&](int64_t key, auto& key_tile, auto& value_tile) {
    float scores[kStepKeys / 8][4] = {};
    add_scores<kStepKeys, kChannels>(
        scores, [&](unsigned c) { return left[c]; }, key_tile);
    const bool hides = key < firsts.largest || key + kStepKeys - 1 > first_position;
    scale_scores(scores, queries, key, hides, k.scale * kLog2e);
    softmax_step<kChannels>(scores, softmax, mixed);
    if (hides) take_out_nonfinite(value_tile, mixed, [&](unsigned i, unsigned row) { return queries.sees(i, key + row); });
    add_weighted(mixed, scores, value_tile);
  });
  finish<kChannels>(k, queries, softmax, mixed);
}

}  // namespace

FlashLaunch<Attention<bf16>> flash_forward(const Attention<bf16>& k, int64_t sequences) {
  const Grid grid{sequences * k.heads * ceil_div(k.queries_of_sequence, int64_t{kFlashRows}), kThreads};
  return {k.head_dim == 64 ? flash_attend<64> : flash_attend<128>, grid};
}

}  // namespace mantissa::gpu
