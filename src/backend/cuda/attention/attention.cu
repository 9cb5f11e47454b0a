// Attention forward, as in FlashAttention-2 (Dao 2023): a block has a tile of queries of one head and goes over the tiles of keys that
// these see. It has kTile channels of the values: where a head has more, several blocks compute the same scores.
#include "backend/cuda/attention/attention_tiles.h"
#include "backend/cuda/cuda_backend.h"

namespace mantissa {
namespace {

using namespace gpu;

// The softmax of a thread's rows: the largest score so far, and beside it the sum of exponentials. All threads of a row have the same.
struct TileSoftmax {
  float largest[kEach], sum[kEach];
};

// Turns scores into exponentials, except those that are hidden, and scales what was summed before to the new largest score.
__device__ void softmax_step(Sums& scores, TileSoftmax& rows, Sums& mixed) {
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kEach; ++i) {
    float largest = rows.largest[i];
    MANTISSA_UNROLL
    for (unsigned j = 0; j < kEach; ++j) largest = Largest<float>()(scores.at[i][j], largest);
    largest = join_row(largest, Largest<float>());
    const float factor = rows.largest[i] == largest ? 1.0F : expf(rows.largest[i] - largest);
    float sum = 0.0F;
    MANTISSA_UNROLL
    for (unsigned j = 0; j < kEach; ++j) {
      const float score = scores.at[i][j], weight = is_hidden(score) || score == kNoScore ? 0.0F : expf(score - largest);
      sum += weight;
      scores.at[i][j] = is_hidden(score) ? score : weight;
      mixed.at[i][j] *= factor;
    }
    rows.sum[i] = rows.sum[i] * factor + join_row(sum, Plus<float>());
    rows.largest[i] = largest;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) attend(Attention<T> k) {
  auto& sides = block_shared<Sides>();
  auto& weights = block_shared<Weights>();
  auto index = static_cast<unsigned>(block());
  const int64_t part = take_last(index, ceil_div(k.head_dim, int64_t{kTile})),
                tile = take_last(index, ceil_div(k.queries_of_sequence, int64_t{kTile})), head = take_last(index, k.heads),
                sequence = index;
  const int64_t kv = static_cast<unsigned>(head) / static_cast<unsigned>(k.group);
  const Range queries{tile * kTile, k.queries_of_sequence}, channels{part * kTile, k.head_dim};
  const Range own{queries.first, queries.first + kTile < queries.end ? queries.first + kTile : queries.end};
  const int64_t end = own.end + k.ahead;  // end of the keys
  const HeadRows<const T> q{k.queries + sequence * k.queries_of_sequence * k.query_stride + head * k.head_dim, k.query_stride};
  const int64_t key_at = sequence * k.keys_of_sequence * k.key_stride + kv * k.head_dim;
  const HeadRows<const T> keys{k.keys + key_at, k.key_stride}, values{k.values + key_at, k.key_stride};
  const Mask mask{k.segment_starts ? k.segment_starts + sequence * k.queries_of_sequence : nullptr, k.window};
  const float sink = k.sinks ? value_of(k.sinks[head]) : kNoScore;
  TileSoftmax softmax;
  for (float& largest : softmax.largest) largest = sink;
  for (float& sum : softmax.sum) sum = sink == kNoScore ? 0.0F : 1.0F;
  Sums mixed;
  for (int64_t first_key = first_of(mask, {own.first + k.ahead, end}) / kTile * kTile; first_key < end; first_key += kTile) {
    const Range range{first_key, end};
    Sums scores;
    add_product(sides, ByChannels<T>{q, own}, ByChannels<T>{keys, range}, k.head_dim, scores);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kEach; ++i) {
      const int64_t query = own.first + first_row() + i, position = query + k.ahead;
      const int64_t first = query < own.end ? mask.first(position) : 0;
      MANTISSA_UNROLL
      for (unsigned j = 0; j < kEach; ++j) {
        const int64_t key = first_key + first_col() + j;
        scores.at[i][j] = key >= first && key <= position ? scores.at[i][j] * k.scale : hidden_weight();
      }
    }
    softmax_step(scores, softmax, mixed);
    add_weighted(sides, weights, scores, ByRows<T>{values, channels}, range, mixed);
  }
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kEach; ++i) {
    const int64_t row = own.first + first_row() + i;
    for (float& value : mixed.at[i]) value /= softmax.sum[i];
    if (!k.lse || part > 0 || first_col() > 0 || row >= own.end) continue;
    k.lse[(sequence * k.heads + head) * k.queries_of_sequence + row] = softmax.largest[i] + logf(softmax.sum[i]);
  }
  const int64_t row = k.heads * k.head_dim;
  write_rows(mixed, HeadRows<T>{k.out + sequence * k.queries_of_sequence * row + head * k.head_dim, row}, own, channels);
}

// The kernel for tiles of queries, of so many sequences.
template <class T>
KernelLaunch<Attention<T>> tile_kernel(const Attention<T>& k, int64_t sequences, bool flash) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (flash) return flash_forward(k, sequences);
  }
  return {attend<T>,
          {sequences * k.heads * ceil_div(k.queries_of_sequence, int64_t{kTile}) * ceil_div(k.head_dim, int64_t{kTile}), kThreads}};
}

constexpr int64_t kLeastTileRows = 16;  // fewer queries leave most of a tile empty
// The sums of a warp over its keys for one query. A lane has every 32nd channel.
template <unsigned kOfLane>
struct RowSums {
  float largest = kNoScore, sum = 0.0F, mixed[kOfLane] = {};
};

// Loads channels, with zeros behind the last one.
template <class T, unsigned kOfLane>
__device__ void load_channels(const T* row, int64_t head_dim, float (&to)[kOfLane]) {
  MANTISSA_UNROLL
  for (unsigned c = 0; c < kOfLane; ++c) {
    const int64_t channel = c * kWarp + lane();
    to[c] = channel < head_dim ? value_of(row[channel]) : 0.0F;
  }
}

// A warp takes keys [first, first + count), up to 32 of them: first a lane has the score of a key, then channels of the values.
template <class T, unsigned kOfLane>
__device__ void attend_keys(const Attention<T>& k, const float (&query)[kOfLane], int64_t first, unsigned count, RowSums<kOfLane>& row) {
  float own[kOfLane], score = kNoScore;
  for (unsigned i = 0; i < count; ++i) {
    load_channels(k.keys + first + i * k.key_stride, k.head_dim, own);
    float product = 0.0F;
    MANTISSA_UNROLL
    for (unsigned c = 0; c < kOfLane; ++c) product = multiply_add(query[c], own[c], product);
    product = join_warp(product, Plus<float>());
    if (lane() == i) score = product * k.scale;
  }
  const float largest = join_warp(Largest<float>()(score, row.largest), Largest<float>());
  const float factor = row.largest == largest ? 1.0F : expf(row.largest - largest),
              weight = score == kNoScore ? 0.0F : expf(score - largest);
  row.sum = row.sum * factor + join_warp(weight, Plus<float>());
  row.largest = largest;
  MANTISSA_UNROLL
  for (float& sum : row.mixed) sum *= factor;
  for (unsigned i = 0; i < count; ++i) {
    load_channels(k.values + first + i * k.key_stride, k.head_dim, own);
    const float of_key = shuffle(weight, i);
    MANTISSA_UNROLL
    for (unsigned c = 0; c < kOfLane; ++c) row.mixed[c] = multiply_add(of_key, own[c], row.mixed[c]);
  }
}

template <unsigned kOfLane>
struct OfWarpsOfRow {
  float largest[kWarpsOfBlock], sum[kWarpsOfBlock], mixed[kWarpsOfBlock][kOfLane * kWarp];
};

// One sequence. A block has a query of a head, and a warp every eighth 32 keys that it sees; then a thread joins a channel of the warps, in
// their order.
template <class T, unsigned kOfLane>
__global__ void __launch_bounds__(kThreads, kGemmBlocks) attend_row(Attention<T> k) {
  auto& parts = block_shared<OfWarpsOfRow<kOfLane>>();
  auto index = static_cast<unsigned>(block());
  const int64_t head = take_last(index, k.heads), query = index, end = query + k.ahead + 1, first = Mask{nullptr, k.window}.first(end - 1);
  const int64_t kv = static_cast<unsigned>(head) / static_cast<unsigned>(k.group) * k.head_dim;
  float channels[kOfLane];
  load_channels(k.queries + query * k.query_stride + head * k.head_dim, k.head_dim, channels);
  RowSums<kOfLane> row;
  for (int64_t key = first + warp() * kWarp; key < end; key += kThreads) {
    const auto count = static_cast<unsigned>(end - key < kWarp ? end - key : kWarp);
    attend_keys(k, channels, key * k.key_stride + kv, count, row);
  }
  if (lane() == 0) parts.largest[warp()] = row.largest, parts.sum[warp()] = row.sum;
  MANTISSA_UNROLL
  for (unsigned c = 0; c < kOfLane; ++c) parts.mixed[warp()][c * kWarp + lane()] = row.mixed[c];
  barrier();
  const float sink = k.sinks ? value_of(k.sinks[head]) : kNoScore;
  float largest = sink, mixed = 0.0F;
  for (const float each : parts.largest) largest = Largest<float>()(each, largest);
  float sum = sink == kNoScore ? 0.0F : expf(sink - largest);
  if (thread() >= k.head_dim) return;
  for (unsigned w = 0; w < kWarpsOfBlock; ++w) {
    const float factor = parts.largest[w] == largest ? 1.0F : expf(parts.largest[w] - largest);
    sum += parts.sum[w] * factor;
    mixed += parts.mixed[w][thread()] * factor;
  }
  k.out[(query * k.heads + head) * k.head_dim + thread()] = rounded<T>(mixed / sum);
}

// Copies rows of `width` elements, the first of which is at `first`; they lie `stride` elements apart.
template <class T>
__global__ void __launch_bounds__(kThreads) copy_rows(const T* first, int64_t stride, int64_t width, T* to, int64_t count) {
  for_each_element(count, [=](int64_t i) { to[i] = first[i / width * stride + i % width]; });
}

// Operands of a kernel of attention over packed rows, without a cache.
template <class T, class Kernel>
Attention<T> operands_of(const Kernel& k, const Tensor& qkv, const Tensor& out, int64_t sequences) {
  const HeadLayout& layout = k.layout;
  const int64_t length = qkv.dim(0) / sequences, d = layout.head_dim;
  const T* const x = qkv.device_data<T>();
  return {.queries = x,
          .keys = x + layout.heads * d,
          .values = x + (layout.heads + layout.kv_heads) * d,
          .sinks = data_or_null<T>(k.sinks),
          .query_stride = layout.row(),
          .key_stride = layout.row(),
          .queries_of_sequence = length,
          .keys_of_sequence = length,
          .ahead = 0,
          .heads = layout.heads,
          .group = layout.heads / layout.kv_heads,
          .head_dim = d,
          .segment_starts = nullptr,
          .window = k.window,
          .scale = static_cast<float>(k.scale),
          .out = out.device_data<T>(),
          .lse = nullptr};
}

}  // namespace

void CudaBackend::execute(const AttentionForward& k) {
  check_segment_starts("attention", k.segment_starts, k.qkv.dim(0) / k.batch);
  if (attend_by_library(k)) return;
  const bool flash = takes_flash(k.qkv.dtype(), k.layout.head_dim, k.scale);
  const Tensor qkv = flash ? aligned(*this, k.qkv) : k.qkv, out = flash ? aligned(*this, k.out, Contents::overwritten) : k.out;
  with_values(k.qkv.dtype(), [&]<class T>() {
    Attention<T> attention = operands_of<T>(k, qkv, out, k.batch);
    attention.segment_starts = data_or_null<int32_t>(k.segment_starts), attention.lse = k.lse.device_data<float>();
    const auto [kernel, grid] = tile_kernel(attention, k.batch, flash);
    launch(kernel, grid, attention);
  });
  copy_back(*this, out, k.out);
}

void CudaBackend::execute(const CachedAttention& k) {
  const int64_t rows = k.qkv.dim(0), d = k.layout.head_dim, channels = k.layout.kv_heads * d, count = rows * channels;
  const bool flash = rows >= kLeastTileRows && takes_flash(k.qkv.dtype(), d, k.scale);
  const Tensor qkv = flash ? aligned(*this, k.qkv) : k.qkv, out = flash ? aligned(*this, k.out, Contents::overwritten) : k.out;
  with_values(k.qkv.dtype(), [&]<class T>() {
    Attention<T> attention = operands_of<T>(k, qkv, out, 1);
    T *const keys = k.keys.device_data<T>() + k.first * channels, *const values = k.values.device_data<T>() + k.first * channels;
    const Grid copies{blocks_for(count), kThreads};
    launch(copy_rows<T>, copies, attention.keys, attention.key_stride, channels, keys, count);
    launch(copy_rows<T>, copies, attention.values, attention.key_stride, channels, values, count);
    const Tensor all_keys = flash ? aligned(*this, k.keys) : k.keys, all_values = flash ? aligned(*this, k.values) : k.values;
    attention.keys = all_keys.device_data<T>(), attention.values = all_values.device_data<T>(), attention.key_stride = channels;
    attention.keys_of_sequence = k.first + rows, attention.ahead = k.first;
    if (rows < kLeastTileRows && d <= 8 * kWarp) {
      const auto row_kernel = d <= 2 * kWarp ? attend_row<T, 2> : d <= 4 * kWarp ? attend_row<T, 4> : attend_row<T, 8>;
      return launch(row_kernel, {rows * k.layout.heads, kThreads}, attention);
    }
    const auto [kernel, grid] = tile_kernel(attention, 1, flash);
    launch(kernel, grid, attention);
  });
  copy_back(*this, out, k.out);
}

}  // namespace mantissa
