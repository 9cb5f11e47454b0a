#include "mantissa/checkpoint/read_shard.h"

#include <algorithm>
#include <iterator>

#include "mantissa/backend/functions.h"

namespace mantissa {

Box box_of(const ParameterShard& shard, const ParameterShard::Chunk& chunk) {
  Box box = whole_box(dimensions(shard.shape()));
  box.start.front() = chunk.row;
  box.size.front() = chunk.end - chunk.begin;
  if (box.start.size() > 1) box.start.back() = chunk.column;
  return box;
}

std::string read_shard(TensorReader& weights, const ParameterShard& shard, const Tensor& master) {
  std::string bad;
  for (const ParameterShard::Chunk& chunk : shard.chunks()) {
    const Tensor rows = master.slice(chunk.begin - shard.begin, chunk.end - shard.begin);
    fill_from_host(rows, [&](std::span<std::byte> bytes) {
      const std::span<float> values(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float));
      weights.read_fp32(shard.of->name, box_of(shard, chunk), values);
      if (bad.empty()) bad = nonfinite_read(shard, (chunk.begin - shard.begin) * (rows.elements() / rows.dim(0)), values);
    });
  }
  master.device().run(Fill{.out = master.slice(shard.stored_end() - shard.begin, master.dim(0)), .value = 0.0});
  return bad;
}

std::vector<ParameterShard> chunks_of(const ParameterShard& shard) {
  constexpr int64_t kElements = 4 << 20, kRowBlock = 128;
  std::vector<ParameterShard> chunks;
  const int64_t columns = shard.of->shape.with_dim0(1).elements(), rows = std::max<int64_t>(1, kElements / columns / kRowBlock) * kRowBlock;
  for (int64_t row = shard.begin; row < shard.end; row += rows)
    chunks.push_back({.of = shard.of, .begin = row, .end = std::min(shard.end, row + rows)});
  return chunks;
}

std::vector<ParameterShard> chunks_of(ParameterSet& parameters) {
  std::vector<ParameterShard> chunks;
  for (const ParameterShard& whole : parameters.whole_shards()) std::ranges::move(chunks_of(whole), std::back_inserter(chunks));
  return chunks;
}

}  // namespace mantissa
