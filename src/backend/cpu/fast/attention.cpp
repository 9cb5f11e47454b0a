// Attention in blocks (FlashAttention-2, Dao 2023): one piece of work is a block of queries of one head, which runs over its blocks of keys
// with an online softmax. bf16 is widened on the way into scratch.
#include "backend/cpu/fast/attention_heads.h"
#include "backend/cpu/fast/attention_query_block.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/indices.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

template <class T>
void forward(const AttentionForward& k) {
  const int64_t length = k.qkv.dim(0) / k.batch, tiles = ceil_div(length, kTile), heads = k.layout.heads, d = k.layout.head_dim;
  parallel_for(k.batch * heads * tiles, 1, Subnormals::flushed, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      // The longest rows of key blocks come first, so that what is left at the end is short.
      const int64_t tile = tiles - 1 - item % tiles, bh = item / tiles, b = bh / heads, h = bh % heads;
      const int64_t key = heads + h / (heads / k.layout.kv_heads), value = key + k.layout.kv_heads;
      const HeadRows<const T> qkv = sequence<const T>(k.qkv, b, k.batch, d);
      const FirstKeys first_keys(k.segment_starts, b, length, k.window);
      QueryBlock block(qkv.tile(h, tile), static_cast<float>(k.scale), softmax_start(k.sinks, h));
      for (int64_t j = first_keys.first_tile(tile); j <= tile; ++j) {
        block.attend(qkv.tile(key, j), qkv.tile(value, j), first_keys.mask(tile, j));
      }
      block.finish(sequence<T>(k.out, b, k.batch, d).tile(h, tile), k.lse.device_data<float>() + bh * length + tile * kTile);
    }
  });
}

}  // namespace

void CpuBackend::execute(const AttentionForward& k) {
  if (k.layout.head_dim > kLargestHead) return CpuReference::execute(k);
  check_segment_starts("attention", k.segment_starts, k.qkv.dim(0) / k.batch);
  k.qkv.dtype() == Dtype::bf16 ? forward<bf16>(k) : forward<float>(k);
}

}  // namespace mantissa
