#include "mantissa/checkpoint/read_shard.h"

#include <algorithm>

#include "mantissa/backend/functions.h"

namespace mantissa {

Box box_of(const ParameterShard& shard, const ParameterShard::Chunk& chunk) {
  Box box = whole_box(dimensions(shard.shape()));
  box.start.front() = chunk.row;
  box.size.front() = chunk.end - chunk.begin;
  if (box.start.size() > 1) box.start.back() = chunk.column;
  return box;
}

void read_shard(WeightSource& weights, const ParameterShard& shard, const Tensor& master) {
  for (const ParameterShard::Chunk& chunk : shard.chunks()) {
    const Tensor rows = master.slice(chunk.begin - shard.begin, chunk.end - shard.begin);
    fill_from_host(rows, [&](std::span<std::byte> bytes) {
      weights.read_fp32(shard.of->name, box_of(shard, chunk), {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)});
    });
  }
  master.device().run(Fill{.out = master.slice(shard.stored_end() - shard.begin, master.dim(0)), .value = 0.0});
}

// Divides all parameters into shards whose masters fit into some megabytes.
std::vector<ParameterShard> chunks_of(ParameterSet& parameters) {
  constexpr int64_t kElements = 4 << 20, kRowBlock = 128;
  std::vector<ParameterShard> chunks;
  for (const ParameterShard& whole : parameters.whole_shards()) {
    const int64_t columns = whole.of->shape.with_dim0(1).elements(),
                  rows = std::max<int64_t>(1, kElements / columns / kRowBlock) * kRowBlock;
    for (int64_t row = 0; row < whole.end; row += rows)
      chunks.push_back({.of = whole.of, .begin = row, .end = std::min(whole.end, row + rows)});
  }
  return chunks;
}

}  // namespace mantissa
