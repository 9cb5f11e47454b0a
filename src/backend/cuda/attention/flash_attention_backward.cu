// Attention backward on tensor cores, by the formulas of attention_backward.cu. flash_dq goes over the keys that a block's queries see;
// flash_dkv goes over the queries that see a block's keys, and has scores whose rows are keys.
#include "backend/cuda/attention/flash_tiles.h"

namespace mantissa::gpu {
namespace {

enum class Order { first_rows_first, last_rows_first };
__device__ Place place(const AttentionGradient<bf16>& k, int64_t heads, Order order) {
  auto index = static_cast<unsigned>(block());
  const int64_t count = ceil_div(k.length, int64_t{kFlashRows}), at = take_last(index, count), head = take_last(index, heads);
  return {index, head, k.part((order == Order::last_rows_first ? count - 1 - at : at) * kFlashRows, kFlashRows)};
}

// Statistics of a tile of queries: log-sum-exp of their scores to base two, negated deltas, and the keys that they see.
template <unsigned kQueries>
struct Statistics {
  float lse[kQueries], minus_delta[kQueries];
  Sight sights[kQueries];
};
// One of these numbers, which a thread loads before a step and stores behind it, so that the load overlaps the step: the first kQueries
// threads have log-sum-exp and the first key of a query, the next ones a delta.
struct Statistic {
  float value = 0.0F;
  int first_key = INT32_MAX;
};
template <unsigned kQueries>
__device__ Statistic read_statistic(const AttentionGradient<bf16>& k, int64_t sequence, int64_t head, int64_t first, unsigned of) {
  const int64_t query = first + of % kQueries, at = (sequence * k.heads + head) * k.length + query;
  if (of >= 2 * kQueries || query >= k.length) return {};
  if (of >= kQueries) return {-k.deltas[at]};
  return {k.lse[at] * kLog2e, static_cast<int>(k.mask(sequence).first(query))};
}
template <unsigned kQueries>
__device__ void write_statistic(Statistics<kQueries>& to, const Statistic& own, int64_t first, unsigned of) {
  if (of < kQueries) to.lse[of] = own.value, to.sights[of] = {own.first_key, static_cast<int>(first + of)};
  if (of >= kQueries && of < 2 * kQueries) to.minus_delta[of - kQueries] = own.value;
}

template <unsigned kChannels>
struct TilesOfQueries {
  HeadTile<kFlashRows, kChannels> queries, douts;
  KeyTiles<kOfQueries<kChannels>.step, kChannels> keys;
  Statistics<kFlashRows> statistics;
  Place place;  // takes no registers here
};

template <unsigned kChannels>
__global__ void __launch_bounds__(kOfQueries<kChannels>.threads(), kOfQueries<kChannels>.blocks) flash_dq(AttentionGradient<bf16> k) {
  constexpr unsigned kFragments = kOfQueries<kChannels>.fragments, kStep = kOfQueries<kChannels>.step,
                     kOfBlock = kOfQueries<kChannels>.threads();
  static_assert(kOfQueries<kChannels>.at_once == kStep && kFitsAnyGpu<TilesOfQueries<kChannels>, kStep, kChannels>);
  auto& tiles = launched_shared<TilesOfQueries<kChannels>>();
  const Place at = place(k, k.heads, Order::last_rows_first);
  const int64_t kv = k.heads + static_cast<unsigned>(at.head) / static_cast<unsigned>(k.group);
  copy_tile<kOfBlock>(tiles.queries, k.packed(k.qkv, at.sequence, at.head), at.rows);
  copy_tile<kOfBlock>(tiles.douts, k.output(at.sequence, at.head), at.rows);
  const auto& statistics = tiles.statistics;
  for (unsigned i = thread(); i < 2 * kFlashRows; i += kOfBlock) {
    write_statistic(tiles.statistics, read_statistic<kFlashRows>(k, at.sequence, at.head, at.rows.first, i), at.rows.first, i);
  }
  const Mask mask = k.mask(at.sequence);
  const FirstKeys firsts = first_keys(mask, at.rows);
  if (thread() == 0) tiles.place = at;
  FlashSums<kFragments, kChannels / 8> dq = {};
  const auto step = [&](int key, auto& key_tile, auto& value_tile) {
    const bool hides = key < firsts.largest || key + static_cast<int>(kStep) - 1 > at.rows.first,
               idle = key >= at.rows.first + end_of_warp<kFragments>();  // all keys are behind
    WeightFragments<kFragments, kStep / 16> weights;
    if (!idle) {
      FlashSums<kFragments, kStep / 8> ds = {}, dp;
      for_each_sum(dp, [&](unsigned r, unsigned, float& sum) { sum = statistics.minus_delta[own_row<kFragments>(r)]; });
      add_scores(ds, rows_of_warp<kFragments>(tiles.queries), key_tile);
      add_scores(dp, rows_of_warp<kFragments>(tiles.douts), value_tile);
      for_each_sum(ds, [&](unsigned r, unsigned, float& sum) {
        sum = fast_exp2(multiply_add(sum, k.scale * kLog2e, -statistics.lse[own_row<kFragments>(r)]));
      });
      multiply(ds, dp);
      if (hides) hide(ds, statistics.sights, key, 0.0F);
      weights = rounded_weights(ds);
    }
    if (hides) {
      take_out_nonfinite<kStep>(key_tile, dq, [&](unsigned r, unsigned row) {
        return statistics.sights[own_row<kFragments>(r)].sees(key + static_cast<int>(row));
      });
    }
    if (!idle) add_weighted(dq, weights, key_tile);
  };
  for_each_step<kOfBlock>(tiles.keys, k.packed(k.qkv, at.sequence, kv), k.packed(k.qkv, at.sequence, kv + k.kv_heads), firsts.least,
                          static_cast<int>(at.rows.end), step);
  barrier();  // where there was no step
  float scales[2 * kFragments];
  for (float& scale : scales) scale = k.scale;
  write_rows(dq, scales, k.packed(k.dqkv, tiles.place.sequence, tiles.place.head), tiles.place.rows);
}

template <unsigned kChannels>
struct TilesOfKeys {
  static constexpr unsigned kStep = kOfKeys<kChannels>.step;
  HeadTile<kFlashRows, kChannels> values;  // rows of the block's keys
  HeadTile<kStep, kChannels> queries[2], douts[2];
  Statistics<kStep> statistics[2];
  Place place;
};

// The position in a walk over the tiles of queries that see some of a block's keys, through the heads that share them.
template <unsigned kStep>
struct QueryWalk {
  const AttentionGradient<bf16>& k;
  const Mask& mask;
  int begin, member, query;  // begin: of the block's keys
  bool hides;                // true if a query of the tile does not see a key of the block

  __device__ QueryWalk(const AttentionGradient<bf16>& gradient, const Mask& of, int64_t first)
      : k(gradient), mask(of), begin(static_cast<int>(first)), member(0), query(begin) {
    sees_keys();
  }
  __device__ bool done() const { return member == k.group; }
  __device__ Range tile() const { return k.part(query, kStep); }
  __device__ int end_keys() const { return static_cast<int>(k.part(begin, kFlashRows).end); }
  __device__ int end() const {  // end of the queries that see a key
    return static_cast<int>(k.window > 0 && k.window < k.length - end_keys() + 1 ? end_keys() - 1 + k.window : k.length);
  }
  __device__ void go_on() {
    do {
      query += static_cast<int>(kStep);
      if (query >= end()) query = begin, ++member;
    } while (!sees_keys() && query > begin);
  }
  __device__ bool sees_keys() {
    const FirstKeys firsts = first_keys(mask, tile());
    hides = query < end_keys() - 1 || query + static_cast<int>(kStep) > k.length || firsts.largest > begin;
    return firsts.least < end_keys();
  }
};

// Adds what queries [first, first + kAtOnce) of a tile give to the gradients of this warp's keys. Rows are keys, columns queries.
template <unsigned kAtOnce, unsigned kFragments, unsigned kChannels, unsigned kStep>
__device__ void add_queries(const QueryWalk<kStep>& at, float scale, const Fragment (&keys)[kFragments][kChannels / 16],
                            TilesOfKeys<kChannels>& tiles, unsigned now, unsigned first, float (&dk)[kFragments][kChannels / 8][4],
                            float (&dv)[kFragments][kChannels / 8][4]) {
  auto &queries = tiles.queries[now], &douts = tiles.douts[now];
  const auto& statistics = tiles.statistics[now];
  const bool hides = at.hides,
             idle = at.begin + first_of_warp<kFragments>() >= at.query + static_cast<int>(first + kAtOnce);  // all queries are before
  const auto sees = [&](unsigned r, unsigned col) { return statistics.sights[col].sees(at.begin + own_row<kFragments>(r)); };
  WeightFragments<kFragments, kAtOnce / 16> weights, gradients;
  if (!idle) {
    FlashSums<kFragments, kAtOnce / 8> p = {}, ds;
    for_each_sum(ds, [&](unsigned, unsigned col, float& sum) { sum = statistics.minus_delta[first + col]; });
    add_scores(
        p, [&](unsigned f, unsigned c) { return keys[f][c]; }, queries, first);
    add_scores(ds, rows_of_warp<kFragments>(tiles.values), douts, first);
    for_each_sum(p, [&](unsigned, unsigned col, float& sum) { sum = fast_exp2(multiply_add(sum, scale, -statistics.lse[first + col])); });
    multiply(ds, p);
    if (hides) {
      for_each_sum(p, [&](unsigned r, unsigned col, float& sum) { sum = sees(r, first + col) ? sum : 0.0F; });
      for_each_sum(ds, [&](unsigned r, unsigned col, float& sum) { sum = sees(r, first + col) ? sum : 0.0F; });
    }
    weights = rounded_weights(p), gradients = rounded_weights(ds);
  }
  if (hides) take_out_nonfinite<kAtOnce>(douts, dv, sees, first);
  if (!idle) add_weighted(dv, weights, douts, first);
  if (hides) take_out_nonfinite<kAtOnce>(queries, dk, sees, first);
  if (idle) return;
  add_weighted(dk, gradients, queries, first);
}

template <unsigned kChannels>
__global__ void __launch_bounds__(kOfKeys<kChannels>.threads(), kOfKeys<kChannels>.blocks) flash_dkv(AttentionGradient<bf16> k) {
  constexpr unsigned kFragments = kOfKeys<kChannels>.fragments, kStep = kOfKeys<kChannels>.step, kAtOnce = kOfKeys<kChannels>.at_once,
                     kOfBlock = kOfKeys<kChannels>.threads();
  static_assert(2 * kStep <= kOfBlock && kFitsAnyGpu<TilesOfKeys<kChannels>, kAtOnce, kChannels>);
  auto& tiles = launched_shared<TilesOfKeys<kChannels>>();
  const Place at = place(k, k.kv_heads, Order::first_rows_first);
  const Mask mask = k.mask(at.sequence);
  Fragment keys[kFragments][kChannels / 16];
  load_left(keys, k.packed(k.qkv, at.sequence, k.heads + at.head), at.rows);
  copy_tile<kOfBlock>(tiles.values, k.packed(k.qkv, at.sequence, k.heads + k.kv_heads + at.head), at.rows);
  const auto copy = [&](const QueryWalk<kStep>& walk, int64_t head, unsigned to) {
    if (!walk.done()) {
      copy_tile<kOfBlock>(tiles.queries[to], k.packed(k.qkv, at.sequence, head), walk.tile());
      copy_tile<kOfBlock>(tiles.douts[to], k.output(at.sequence, head), walk.tile());
    }
    commit_copies();
  };
  if (thread() == 0) tiles.place = at;
  FlashSums<kFragments, kChannels / 8> dk = {}, dv = {};
  unsigned now = 0;
  QueryWalk<kStep> walk(k, mask, at.rows.first);
  copy(walk, at.head * k.group, now);
  write_statistic(tiles.statistics[now], read_statistic<kStep>(k, at.sequence, at.head * k.group, walk.query, thread()), walk.query,
                  thread());
  while (!walk.done()) {
    QueryWalk<kStep> next = walk;
    next.go_on();
    wait_copies<0>();
    barrier();  // the copies of all threads are there, and nobody reads the other tiles any more
    const int64_t head = tiles.place.head * k.group + next.member;
    copy(next, head, now ^ 1U);
    const Statistic statistic = next.done() ? Statistic{} : read_statistic<kStep>(k, at.sequence, head, next.query, thread());
    for (unsigned first = 0; first < kStep; first += kAtOnce) add_queries<kAtOnce>(walk, k.scale * kLog2e, keys, tiles, now, first, dk, dv);
    write_statistic(tiles.statistics[now ^ 1U], statistic, next.query, thread());
    walk.member = next.member, walk.query = next.query, walk.hides = next.hides;
    now ^= 1U;
  }
  float ones[2 * kFragments], scales[2 * kFragments];
  for (unsigned r = 0; r < 2 * kFragments; ++r) ones[r] = 1.0F, scales[r] = k.scale;
  const Place& to = tiles.place;
  write_rows(dk, scales, k.packed(k.dqkv, to.sequence, k.heads + to.head), to.rows);
  write_rows(dv, ones, k.packed(k.dqkv, to.sequence, k.heads + k.kv_heads + to.head), to.rows);
}

// The kernels that give dq, and dk and dv.
template <unsigned kChannels>
std::array<KernelLaunch<AttentionGradient<bf16>>, 2> launches(const AttentionGradient<bf16>& k, int64_t sequences) {
  const int64_t tiles = sequences * ceil_div(k.length, int64_t{kFlashRows});
  return {{{flash_dq<kChannels>, {tiles * k.heads, kOfQueries<kChannels>.threads(), sizeof(TilesOfQueries<kChannels>)}},
           {flash_dkv<kChannels>, {tiles * k.kv_heads, kOfKeys<kChannels>.threads(), sizeof(TilesOfKeys<kChannels>)}}}};
}

}  // namespace

std::array<KernelLaunch<AttentionGradient<bf16>>, 2> flash_backward(const AttentionGradient<bf16>& k, int64_t sequences) {
  return k.head_dim == 64 ? launches<64>(k, sequences) : launches<128>(k, sequences);
}

}  // namespace mantissa::gpu
