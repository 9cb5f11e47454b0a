// As attention_backward.cu, on tensor cores. dq goes over the keys that a block's queries see, dk and dv over the queries that see a
// block's keys, whose scores are the transposed ones.
#include "backend/cuda/flash_attention.h"
#include "backend/cuda/flash_tiles.h"

namespace mantissa::gpu {
namespace {

constexpr unsigned kQueries = 16;  // of a step over queries

// What a block works on.
struct Place {
  int64_t sequence, head;
  Range rows;
};
enum class Order { first_rows_first, last_rows_first };
__device__ Place place(const AttentionGradient<bf16>& k, int64_t heads, Order order) {
  auto index = static_cast<unsigned>(block());
  const int64_t count = ceil_div(k.length, int64_t{kFlashRows}), at = take_last(index, count), head = take_last(index, heads);
  return {index, head, k.part((order == Order::last_rows_first ? count - 1 - at : at) * kFlashRows, kFlashRows)};
}

// What this thread's queries of a block see, and their statistics.
struct Queries {
  int64_t first_row, first[2];
  float lse[2], delta[2];  // lse is a logarithm to base two

  __device__ Queries(const AttentionGradient<bf16>& k, const Place& at, const Mask& mask) : first_row(at.rows.first) {
    MANTISSA_UNROLL
    for (unsigned i = 0; i < 2; ++i) {
      const int64_t query = first_row + own_row(i), statistic = (at.sequence * k.heads + at.head) * k.length + query;
      const bool inside = query < at.rows.end;
      first[i] = inside ? mask.first(query) : 0;
      lse[i] = inside ? k.lse[statistic] * kLog2e : 0.0F;
      delta[i] = inside ? k.deltas[statistic] : 0.0F;
    }
  }
  __device__ bool sees(unsigned i, int64_t key) const { return key >= first[i] && key <= first_row + own_row(i); }
};

// Scores become their gradients.
__device__ void score_gradients(float (&scores)[kStepKeys / 8][4], const float (&dp)[kStepKeys / 8][4], const Queries& queries, int64_t key,
                                bool hides, float scale) {
  MANTISSA_UNROLL
  for (unsigned j = 0; j < kStepKeys / 8; ++j) {
    MANTISSA_UNROLL
    for (unsigned e = 0; e < 4; ++e) {
      const bool seen = !hides || queries.sees(e / 2, key + j * 8 + own_col() + e % 2);
      const float p = exp2f(scores[j][e] * (scale * kLog2e) - queries.lse[e / 2]);
      scores[j][e] = seen ? p * (dp[j][e] - queries.delta[e / 2]) * scale : 0.0F;
    }
  }
}

template <unsigned kChannels>
__global__ void __launch_bounds__(kThreads, 1) attention_dq(AttentionGradient<bf16> k) {
  auto& tiles = block_shared<KeyTiles<kChannels>>();
  const Place at = place(k, k.heads, Order::last_rows_first);
  const int64_t kv = k.heads + static_cast<unsigned>(at.head) / static_cast<unsigned>(k.group);
  const HeadRows<const bf16> keys = k.packed(k.qkv, at.sequence, kv), values = k.packed(k.qkv, at.sequence, kv + k.kv_heads);
  Fragment left[kChannels / 16], douts[kChannels / 16];
  load_left<kChannels>(left, k.packed(k.qkv, at.sequence, at.head), at.rows);
  load_left<kChannels>(douts, k.output(at.sequence, at.head), at.rows);
  const Mask mask = k.mask(at.sequence);
  const FirstKeys firsts = first_keys(mask, at.rows);
  const Queries queries(k, at, mask);
  float dq[kChannels / 8][4] = {};
  const int64_t begin = firsts.least / kStepKeys * kStepKeys;
  for_each_step(tiles, keys, values, begin, at.rows.end, [&](int64_t key, auto& key_tile, auto& value_tile) {
    float ds[kStepKeys / 8][4] = {}, dp[kStepKeys / 8][4] = {};
    add_scores<kStepKeys, kChannels>(
        ds, [&](unsigned c) { return left[c]; }, key_tile);
    add_scores<kStepKeys, kChannels>(
        dp, [&](unsigned c) { return douts[c]; }, value_tile);
    const bool hides = key < firsts.largest || key + kStepKeys - 1 > at.rows.first;
    score_gradients(ds, dp, queries, key, hides, k.scale);
    if (hides) take_out_nonfinite(key_tile, dq, [&](unsigned i, unsigned row) { return queries.sees(i, key + row); });
    add_weighted(dq, ds, key_tile);
  });
  write_rows(dq, k.packed(k.dqkv, at.sequence, at.head), at.rows);
}

template <unsigned kChannels>
struct QueryTiles {
  HeadTile<kFlashRows, kChannels> values;  // of the block's keys
  HeadTile<kQueries, kChannels> queries[2], douts[2];
};

// Goes over the tiles of queries that see one of a block's keys, head by head.
struct QueryWalk {
  const AttentionGradient<bf16>& k;
  const Mask& mask;
  Range keys;
  int64_t head, end_head, query, end_query;

  __device__ QueryWalk(const AttentionGradient<bf16>& gradient, const Mask& of, const Place& at)
      : k(gradient), mask(of), keys(at.rows), head(at.head * k.group), end_head(head + k.group), query(keys.first), end_query(k.length) {
    if (k.window > 0 && k.window < end_query - keys.end + 1) end_query = keys.end - 1 + k.window;
  }
  __device__ bool done() const { return head == end_head; }
  __device__ Range tile() const { return k.part(query, kQueries); }
  __device__ void go_on() {
    do query += kQueries;
    while (query < end_query && mask.segment_starts && first_keys(mask, tile()).least >= keys.end);
    if (query < end_query) return;
    query = keys.first;
    ++head;
  }
};

template <unsigned kChannels>
struct KeyGradients {
  float dk[kChannels / 8][4] = {}, dv[kChannels / 8][4] = {};
};

// Adds what a tile of queries gives to the gradients of this warp's keys. Rows are keys, columns queries.
template <unsigned kChannels>
__device__ void add_queries(const QueryWalk& at, int64_t statistics, const Fragment (&keys)[kChannels / 16],
                            HeadTile<kFlashRows, kChannels>& values, HeadTile<kQueries, kChannels>& queries,
                            HeadTile<kQueries, kChannels>& douts, KeyGradients<kChannels>& out) {
  const AttentionGradient<bf16>& k = at.k;
  const Range tile = at.tile();
  const bool hides = tile.first < at.keys.end - 1 || tile.first + kQueries > k.length || first_keys(at.mask, tile).largest > at.keys.first;
  const auto sees = [&](unsigned i, unsigned col) {
    const int64_t key = at.keys.first + own_row(i), query = tile.first + col;
    return query < tile.end && key <= query && key >= at.mask.first(query);
  };
  float p[kQueries / 8][4] = {}, ds[kQueries / 8][4] = {};
  add_scores<kQueries, kChannels>(
      p, [&](unsigned c) { return keys[c]; }, queries);
  const auto value = [&](unsigned c) {
    Fragment own;
    load_matrices(own.at, values.at(warp() * 16 + lane() % 16, c * 16 + lane() / 16 * 8));
    return own;
  };
  add_scores<kQueries, kChannels>(ds, value, douts);
  MANTISSA_UNROLL
  for (unsigned j = 0; j < kQueries / 8; ++j) {
    MANTISSA_UNROLL
    for (unsigned e = 0; e < 4; ++e) {
      const unsigned col = j * 8 + own_col() + e % 2;
      const int64_t query = statistics + tile.first + col;
      const bool seen = !hides || sees(e / 2, col);
      const float lse = seen ? k.lse[query] * kLog2e : 0.0F, delta = seen ? k.deltas[query] : 0.0F;
      p[j][e] = seen ? exp2f(p[j][e] * (k.scale * kLog2e) - lse) : 0.0F;
      ds[j][e] = seen ? p[j][e] * (ds[j][e] - delta) * k.scale : 0.0F;
    }
  }
  if (hides) {
    take_out_nonfinite(douts, out.dv, sees);
    take_out_nonfinite(queries, out.dk, sees);
  }
  add_weighted(out.dv, p, douts);
  add_weighted(out.dk, ds, queries);
}

template <unsigned kChannels>
__global__ void __launch_bounds__(kThreads, 1) attention_dkv(AttentionGradient<bf16> k) {
  auto& tiles = block_shared<QueryTiles<kChannels>>();
  const Place at = place(k, k.kv_heads, Order::first_rows_first);
  const Mask mask = k.mask(at.sequence);
  Fragment keys[kChannels / 16];
  load_left<kChannels>(keys, k.packed(k.qkv, at.sequence, k.heads + at.head), at.rows);
  copy_tile(tiles.values, k.packed(k.qkv, at.sequence, k.heads + k.kv_heads + at.head), at.rows);
  const auto copy = [&](const QueryWalk& walk, unsigned to) {
    if (!walk.done()) {
      copy_tile(tiles.queries[to], k.packed(k.qkv, at.sequence, walk.head), walk.tile());
      copy_tile(tiles.douts[to], k.output(at.sequence, walk.head), walk.tile());
    }
    commit_copies();
  };
  KeyGradients<kChannels> out;
  unsigned now = 0;
  QueryWalk walk(k, mask, at);
  copy(walk, now);
  while (!walk.done()) {
    QueryWalk next = walk;
    next.go_on();
    copy(next, now ^ 1U);
    wait_copies<1>();
    barrier();
    add_queries<kChannels>(walk, (at.sequence * k.heads + walk.head) * k.length, keys, tiles.values, tiles.queries[now], tiles.douts[now],
                           out);
    barrier();
    walk.head = next.head, walk.query = next.query;
    now ^= 1U;
  }
  write_rows(out.dk, k.packed(k.dqkv, at.sequence, k.heads + at.head), at.rows);
  write_rows(out.dv, k.packed(k.dqkv, at.sequence, k.heads + k.kv_heads + at.head), at.rows);
}

Grid grid_of(const AttentionGradient<bf16>& k, int64_t heads) { return {heads * ceil_div(k.length, int64_t{kFlashRows}), kThreads}; }

}  // namespace

FlashLaunch<AttentionGradient<bf16>> flash_dq(const AttentionGradient<bf16>& k, int64_t sequences) {
  return {k.head_dim == 64 ? attention_dq<64> : attention_dq<128>, grid_of(k, sequences * k.heads)};
}

FlashLaunch<AttentionGradient<bf16>> flash_dkv(const AttentionGradient<bf16>& k, int64_t sequences) {
  return {k.head_dim == 64 ? attention_dkv<64> : attention_dkv<128>, grid_of(k, sequences * k.kv_heads)};
}

}  // namespace mantissa::gpu
