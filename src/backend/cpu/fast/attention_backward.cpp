// Gradients of attention in one pass over the blocks. With p = exp(scale q k - lse) and delta = dout out: ds = p (dout v - delta),
// dq = scale sum ds k, dk = scale sum ds q, dv = sum p dout. A piece of work owns a key head and every n-th block of its queries, and sums
// dk and dv in memory of its own, over its blocks in order; a second pass adds the n sums in order. n depends on the shape only.
#include <algorithm>

#include "backend/cpu/fast/attention_gemms.h"
#include "backend/cpu/fast/attention_heads.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/indices.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

// Few key heads are cut into parts, so that they occupy more cores; every part costs memory and adding, so it has some blocks of queries to
// do.
constexpr int64_t kWantedPieces = 8, kLeastBlocks = 4;

// Gradients of one block of keys, fp32 [kTile, head_dim rounded up to 16].
struct KeyGradients {
  float *dkey, *dvalue;
};

// One block of queries and the gradient of it. Lives on the stack of the thread, as in the forward pass.
class QueryBlockBackward {
 public:
  template <class T>
  QueryBlockBackward(TileRows<const T> queries, TileRows<const T> out, TileRows<const T> dout, const float* lse, float scale)
      : rows_(queries.rows), ld_(round_up(queries.head_dim, 16)), scale_(scale) {
    const int64_t padded = round_up(rows_, 8);
    widen_tile(queries, scale, queries_, ld_);
    widen_tile(dout, 1.0F, douts_, ld_);
    widen_tile(out, 1.0F, keys_, ld_);
    dot_rows(douts_, keys_, padded, ld_, statistics_.delta);
    std::fill(std::copy_n(lse, rows_, statistics_.lse), statistics_.lse + padded, 0.0F);
    transpose_tile(queries_, padded, ld_, queries_transposed_);
    transpose_tile(douts_, padded, ld_, douts_transposed_);
  }

  template <class T>
  void attend(TileRows<const T> keys, TileRows<const T> values, const TileMask& mask, KeyGradients gradients) {
    widen_tile(keys, 1.0F, keys_, ld_);
    widen_tile(values, 1.0F, values_, ld_);
    const auto gemm = [&](const float* a, const float* b, float* out) {
      return BlockGemm{.a = a, .b = b, .out = out, .keys = keys.rows, .queries = rows_, .ld = ld_};
    };
    score_gemm(gemm(keys_, queries_transposed_, p_), mask);
    score_gemm(gemm(values_, douts_transposed_, ds_), mask);
    gradient_tile(p_, ds_, round_up(keys.rows, 8), round_up(rows_, 8), mask, statistics_);
    key_gradient(p_, douts_, gradients.dvalue, keys.rows, mask);
    key_gradient(ds_, queries_, gradients.dkey, keys.rows, mask);
    query_gemm(gemm(ds_, keys_, dqueries_), mask, !empty_);
    empty_ = false;
  }

  template <class T>
  void finish(TileRows<T> dqueries) {
    float factor[kTile];
    std::fill_n(factor, kTile, scale_);
    store_tile(dqueries_, ld_, factor, dqueries);
  }

 private:
  // out [keys, ld] += a [keys, queries] * b [queries, ld]
  void key_gradient(const float* a, const float* b, float* out, int64_t keys, const TileMask& mask) const {
    tile_gemm({.a = a,
               .lda = kTile,
               .a_transposed = false,
               .b = b,
               .ldb = ld_,
               .out = out,
               .ldo = ld_,
               .rows = round_up(keys, 8),
               .cols = ld_,
               .depth = rows_,
               .accumulate = true,
               .triangle = mask.diagonal ? Triangle::a_upper : Triangle::none});
  }

  alignas(64) float queries_[kTile * kLargestHead];  // scaled
  alignas(64) float queries_transposed_[kTile * kLargestHead];
  alignas(64) float douts_[kTile * kLargestHead];
  alignas(64) float douts_transposed_[kTile * kLargestHead];
  alignas(64) float keys_[kTile * kLargestHead];
  alignas(64) float values_[kTile * kLargestHead];
  alignas(64) float dqueries_[kTile * kLargestHead];
  alignas(64) float p_[kTile * kTile];   // transposed
  alignas(64) float ds_[kTile * kTile];  // transposed
  QueryStatistics statistics_;
  int64_t rows_, ld_;
  float scale_;
  bool empty_ = true;
};

template <class T>
class Backward {
 public:
  explicit Backward(const AttentionBackward& k)
      : k_(k),
        d_(k.layout.head_dim),
        ld_(round_up(d_, 16)),
        length_(k.qkv.dim(0) / k.batch),
        tiles_(ceil_div(length_, kTile)),
        group_(k.layout.heads / k.layout.kv_heads),
        key_heads_(k.batch * k.layout.kv_heads),
        parts_(std::max<int64_t>(1, std::min(kWantedPieces / key_heads_, tiles_ * group_ / kLeastBlocks))),
        memory_(k.qkv.device().allocate(key_heads_ * parts_ * 2 * tiles_ * kTile * ld_ * int64_t{sizeof(float)})),
        sums_(reinterpret_cast<float*>(memory_.get())) {}

  void run() {
    parallel_for(key_heads_ * parts_, 1, Subnormals::flushed, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) query_blocks(i / parts_, i % parts_);
    });
    parallel_for(key_heads_ * tiles_, 1, Subnormals::flushed, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) add_parts(i / tiles_, i % tiles_);
    });
  }

 private:
  KeyGradients sums(int64_t key_head, int64_t part, int64_t tile) const {
    float* dkey = sums_ + ((key_head * parts_ + part) * 2 * tiles_ + tile) * kTile * ld_;
    return {dkey, dkey + tiles_ * kTile * ld_};
  }

  // Goes over blocks part, part + parts, ... of the queries that read the key head.
  void query_blocks(int64_t key_head, int64_t part) {
    std::fill_n(sums(key_head, part, 0).dkey, 2 * tiles_ * kTile * ld_, 0.0F);
    const int64_t b = key_head / k_.layout.kv_heads, kv = key_head % k_.layout.kv_heads;
    for (int64_t i = part; i < group_ * tiles_; i += parts_) query_block(b, kv, kv * group_ + i / tiles_, i % tiles_, part);
  }

  void query_block(int64_t b, int64_t kv, int64_t h, int64_t tile, int64_t part) {
    const HeadRows<const T> qkv = sequence<const T>(k_.qkv, b, k_.batch, d_);
    const FirstKeys first_keys(k_.segment_starts, b, length_, k_.window);
    const int64_t key = k_.layout.heads + kv, value = key + k_.layout.kv_heads;
    QueryBlockBackward block(qkv.tile(h, tile), sequence<const T>(k_.out, b, k_.batch, d_).tile(h, tile),
                             sequence<const T>(k_.dout, b, k_.batch, d_).tile(h, tile),
                             k_.lse.template device_data<float>() + (b * k_.layout.heads + h) * length_ + tile * kTile,
                             static_cast<float>(k_.scale));
    for (int64_t j = first_keys.first_tile(tile); j <= tile; ++j) {
      block.attend(qkv.tile(key, j), qkv.tile(value, j), first_keys.mask(tile, j), sums(b * k_.layout.kv_heads + kv, part, j));
    }
    block.finish(sequence<T>(k_.dqkv, b, k_.batch, d_).tile(h, tile));
  }

  void add_parts(int64_t key_head, int64_t tile) {
    const KeyGradients total = sums(key_head, 0, tile);
    for (int64_t part = 1; part < parts_; ++part) {
      const KeyGradients more = sums(key_head, part, tile);
      add_tile(total.dkey, more.dkey, kTile * ld_);
      add_tile(total.dvalue, more.dvalue, kTile * ld_);
    }
    const int64_t b = key_head / k_.layout.kv_heads, key = k_.layout.heads + key_head % k_.layout.kv_heads;
    const HeadRows<T> dqkv = sequence<T>(k_.dqkv, b, k_.batch, d_);
    float factor[kTile];
    std::fill_n(factor, kTile, 1.0F);
    store_tile(total.dkey, ld_, factor, dqkv.tile(key, tile));
    store_tile(total.dvalue, ld_, factor, dqkv.tile(key + k_.layout.kv_heads, tile));
  }

  const AttentionBackward& k_;
  int64_t d_, ld_, length_, tiles_, group_, key_heads_, parts_;
  std::shared_ptr<std::byte> memory_;
  float* sums_;  // [key_heads, parts, dk and dv, tiles * kTile, ld]
};

}  // namespace

void CpuBackend::execute(const AttentionBackward& k) {
  if (k.layout.head_dim > kLargestHead) return CpuReference::execute(k);
  check_segment_starts("attention backward", k.segment_starts, k.qkv.dim(0) / k.batch);
  k.qkv.dtype() == Dtype::bf16 ? Backward<bf16>(k).run() : Backward<float>(k).run();
}

}  // namespace mantissa
