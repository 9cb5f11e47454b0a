// Attention backward. With p = exp(scale q k - lse) and delta = dout out: ds = scale p (dout v - delta), dq = sum ds k, dk = sum ds q,
// dv = sum p dout. One kernel gives dq, another one dk and dv; both compute p and ds, so that no two blocks add to one element.
#include "backend/cuda/attention/attention_tiles.h"
#include "backend/cuda/codes/packs.h"
#include "backend/cuda/cuda_backend.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

// deltas [B, H, T] = dout . out, of heads that lie [B, T, H, D], `rows` of B T. So many lanes have a head, a power of two.
template <class T>
__global__ void __launch_bounds__(kThreads) find_deltas(Packs<const T> out, Packs<const T> dout, int64_t rows, int64_t heads,
                                                        int64_t length, unsigned lanes_of_head, float* deltas) {
  const int64_t item = (block() * kThreads + thread()) / lanes_of_head, row = item / heads, head = item % heads;
  float sum = 0.0F;
  for (int64_t first = lane() % lanes_of_head * kPack; row < rows && first < out.count; first += lanes_of_head * kPack) {
    const Pack a = dout.row(item).read(first), b = out.row(item).read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) sum += a.at[i] * b.at[i];
  }
  for (unsigned lanes = lanes_of_head / 2; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
  if (row < rows && lane() % lanes_of_head == 0) deltas[(row / length * heads + head) * length + row % length] = sum;
}

MANTISSA_HOST_DEVICE int64_t tiles_of(int64_t count) { return ceil_div(count, int64_t{kTile}); }

// The work of a block: a tile of rows of a head, and channels.
struct Place {
  int64_t sequence, head;
  Range rows, channels;
};
template <class T>
__device__ Place place(const AttentionGradient<T>& k, int64_t heads) {
  auto index = static_cast<unsigned>(block());
  const int64_t part = take_last(index, tiles_of(k.head_dim)), tile = take_last(index, tiles_of(k.length)), head = take_last(index, heads);
  return {index, head, k.part(tile * kTile, kTile), {part * kTile, k.head_dim}};
}

__device__ float probability(float score, float scale, float lse, bool seen) { return seen ? expf(score * scale - lse) : hidden_weight(); }
__device__ float score_gradient(float p, float dp, float delta, float scale) { return is_hidden(p) ? p : p * (dp - delta) * scale; }

// A block is alone on its multiprocessor: where two share one, three tiles of sums leave too few registers for the rest.
template <class T>
__global__ void __launch_bounds__(kThreads, 1) attention_dq(AttentionGradient<T> k) {
  auto& sides = block_shared<Sides>();
  auto& weights = block_shared<Weights>();
  const Place at = place(k, k.heads);
  const int64_t kv = k.heads + static_cast<unsigned>(at.head) / static_cast<unsigned>(k.group),
                statistics = (at.sequence * k.heads + at.head) * k.length;
  const HeadRows<const T> keys = k.packed(k.qkv, at.sequence, kv), values = k.packed(k.qkv, at.sequence, kv + k.kv_heads);
  const ByChannels<T> queries{k.packed(k.qkv, at.sequence, at.head), at.rows}, douts{k.output(at.sequence, at.head), at.rows};
  const Mask mask = k.mask(at.sequence);
  Sums dq;
  for (int64_t key = first_of(mask, at.rows) / kTile * kTile; key < at.rows.end; key += kTile) {
    const Range range{key, at.rows.end};
    Sums scores, dp;
    add_product(sides, queries, ByChannels<T>{keys, range}, k.head_dim, scores);
    add_product(sides, douts, ByChannels<T>{values, range}, k.head_dim, dp);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kEach; ++i) {
      const int64_t query = at.rows.first + first_row() + i;
      const bool inside = query < at.rows.end;
      const int64_t first = inside ? mask.first(query) : 0;
      const float lse = inside ? k.lse[statistics + query] : 0.0F, delta = inside ? k.deltas[statistics + query] : 0.0F;
      MANTISSA_UNROLL
      for (unsigned j = 0; j < kEach; ++j) {
        const int64_t seen = key + first_col() + j;
        const float p = probability(scores.at[i][j], k.scale, lse, inside && seen >= first && seen <= query);
        scores.at[i][j] = score_gradient(p, dp.at[i][j], delta, k.scale);
      }
    }
    add_weighted(sides, weights, scores, ByRows<T>{keys, at.channels}, range, dq);
  }
  write_rows(dq, k.packed(k.dqkv, at.sequence, at.head), at.rows, at.channels);
}

// Adds what the queries of each head and tile give to dk and dv of a tile of keys. Rows of the tile are keys, columns queries.
template <class T>
__global__ void __launch_bounds__(kThreads) attention_dkv(AttentionGradient<T> k) {
  auto& sides = block_shared<Sides>();
  auto& weights = block_shared<Weights>();
  const Place at = place(k, k.kv_heads);
  const int64_t kv = k.heads + at.head;
  const Mask mask = k.mask(at.sequence);
  Sums dk, dv;
  for (int64_t head = at.head * k.group; head < (at.head + 1) * k.group; ++head) {
    const int64_t statistics = (at.sequence * k.heads + head) * k.length;
    const HeadRows<const T> queries = k.packed(k.qkv, at.sequence, head), douts = k.output(at.sequence, head);
    for (int64_t first_query = at.rows.first; first_query < k.length; first_query += kTile) {
      if (k.window > 0 && first_query - k.window + 1 >= at.rows.end) break;
      const Range tile = k.part(first_query, kTile);
      if (first_of(mask, tile) >= at.rows.end) continue;
      Sums p, ds;
      add_product(sides, ByChannels<T>{k.packed(k.qkv, at.sequence, kv), at.rows}, ByChannels<T>{queries, tile}, k.head_dim, p);
      MANTISSA_UNROLL
      for (unsigned j = 0; j < kEach; ++j) {
        const int64_t query = tile.first + first_col() + j;
        const bool inside = query < tile.end;
        const int64_t first = inside ? mask.first(query) : 0;
        const float lse = inside ? k.lse[statistics + query] : 0.0F;
        MANTISSA_UNROLL
        for (unsigned i = 0; i < kEach; ++i) {
          const int64_t key = at.rows.first + first_row() + i;
          p.at[i][j] = probability(p.at[i][j], k.scale, lse, inside && key >= first && key <= query);
        }
      }
      add_weighted(sides, weights, p, ByRows<T>{douts, at.channels}, tile, dv);
      add_product(sides, ByChannels<T>{k.packed(k.qkv, at.sequence, kv + k.kv_heads), at.rows}, ByChannels<T>{douts, tile}, k.head_dim, ds);
      MANTISSA_UNROLL
      for (unsigned j = 0; j < kEach; ++j) {
        const int64_t query = tile.first + first_col() + j;
        const float delta = query < tile.end ? k.deltas[statistics + query] : 0.0F;
        MANTISSA_UNROLL
        for (unsigned i = 0; i < kEach; ++i) ds.at[i][j] = score_gradient(p.at[i][j], ds.at[i][j], delta, k.scale);
      }
      add_weighted(sides, weights, ds, ByRows<T>{queries, at.channels}, tile, dk);
    }
  }
  write_rows(dk, k.packed(k.dqkv, at.sequence, k.heads + at.head), at.rows, at.channels);
  write_rows(dv, k.packed(k.dqkv, at.sequence, k.heads + k.kv_heads + at.head), at.rows, at.channels);
}

// A block has a head, whose rows lie in so many sequences.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sink_gradient(const T* sinks, const float* lse, const float* deltas, int64_t rows, int64_t length, float* dsinks, bool accumulate) {
  const float sink = value_of(sinks[block()]);
  double sum = 0.0;
  for (int64_t row = thread(); row < rows; row += kThreads) {
    const int64_t at = (row / length * blocks() + block()) * length + row % length;
    sum -= static_cast<double>(expf(sink - lse[at]) * deltas[at]);
  }
  sum = block_sum(sum);
  if (thread() == 0) dsinks[block()] = static_cast<float>(sum) + (accumulate ? dsinks[block()] : 0.0F);
}

}  // namespace

Tensor CudaBackend::attention_deltas(const Tensor& out, const Tensor& dout, const HeadLayout& layout, const Tensor& lse) {
  const Tensor deltas = empty(*this, Dtype::f32, lse.shape());
  const int64_t d = layout.head_dim;
  const unsigned lanes = std::min(kWarp, std::bit_ceil(static_cast<unsigned>(ceil_div(d, int64_t{kPack}))));
  with_values(out.dtype(), [&]<class T>() {
    const T *const y = out.device_data<T>(), *const dy = dout.device_data<T>();
    const RowPacks of{d, begin_at_packs(d, y, dy)};
    launch(find_deltas<T>, {ceil_div(out.dim(0) * layout.heads * lanes, int64_t{kThreads}), kThreads}, of(y), of(dy), out.dim(0),
           layout.heads, lse.dim(2), lanes, deltas.device_data<float>());
  });
  return deltas;
}

void CudaBackend::execute(const AttentionBackward& k) {
  const int64_t length = k.qkv.dim(0) / k.batch, heads = k.layout.heads, d = k.layout.head_dim;
  check_segment_starts("attention backward", k.segment_starts, length);
  if (attend_by_library(k)) return;
  const bool flash = takes_flash(k.qkv.dtype(), d, k.scale);
  const Tensor qkv = flash ? aligned(*this, k.qkv) : k.qkv, dout = flash ? aligned(*this, k.dout) : k.dout,
               dqkv = flash ? aligned(*this, k.dqkv, Contents::overwritten) : k.dqkv,
               deltas = attention_deltas(k.out, dout, k.layout, k.lse);
  with_values(k.qkv.dtype(), [&]<class T>() {
    const AttentionGradient<T> gradient{.qkv = qkv.device_data<T>(),
                                        .dout = dout.device_data<T>(),
                                        .lse = k.lse.device_data<float>(),
                                        .deltas = deltas.device_data<float>(),
                                        .segment_starts = data_or_null<int32_t>(k.segment_starts),
                                        .window = k.window,
                                        .length = length,
                                        .heads = heads,
                                        .kv_heads = k.layout.kv_heads,
                                        .group = heads / k.layout.kv_heads,
                                        .head_dim = d,
                                        .scale = static_cast<float>(k.scale),
                                        .dqkv = dqkv.device_data<T>()};
    if constexpr (std::is_same_v<T, bf16>) {
      if (flash) {
        for (const auto& each : flash_backward(gradient, k.batch)) launch(each.kernel, each.grid, gradient);
        return;
      }
    }
    const int64_t of_head = k.batch * tiles_of(length) * tiles_of(d);
    launch(attention_dq<T>, {of_head * heads, kThreads}, gradient);
    launch(attention_dkv<T>, {of_head * k.layout.kv_heads, kThreads}, gradient);
  });
  copy_back(*this, dqkv, k.dqkv);
}

void CudaBackend::execute(const AttentionSinkGradient& k) {
  const Tensor deltas = attention_deltas(k.out, k.dout, k.layout, k.lse);
  with_values(k.out.dtype(), [&]<class T>() {
    launch(sink_gradient<T>, {k.layout.heads, kThreads}, k.sinks.device_data<T>(), k.lse.device_data<float>(), deltas.device_data<float>(),
           k.out.dim(0), k.lse.dim(2), k.dsinks.device_data<float>(), k.accumulate);
  });
}

}  // namespace mantissa
