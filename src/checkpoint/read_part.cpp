#include "mantissa/checkpoint/read_part.h"

#include <algorithm>

#include "mantissa/backend/functions.h"

namespace mantissa {

Box box_of(const Part& part, const Part::Slab& slab) {
  Box box = whole_box(dimensions(part.shape()));
  box.start.front() = slab.row;
  box.size.front() = slab.end - slab.begin;
  if (box.start.size() > 1) box.start.back() = slab.column;
  return box;
}

void read_part(WeightSource& weights, const Part& part, const Tensor& master) {
  for (const Part::Slab& slab : part.slabs()) {
    const Tensor rows = master.slice(slab.begin - part.begin, slab.end - part.begin);
    fill_from_host(rows, [&](std::span<std::byte> bytes) {
      weights.read_fp32(part.of->name, box_of(part, slab), {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)});
    });
  }
  master.device().run(Fill{.out = master.slice(part.stored_end() - part.begin, master.dim(0)), .value = 0.0});
}

// All of the parameters, in parts whose masters fit into some megabytes.
std::vector<Part> slabs_of(ParameterSet& parameters) {
  constexpr int64_t kElements = 4 << 20, kBand = 128;
  std::vector<Part> slabs;
  for (const Part& whole : parameters.whole_parts()) {
    const int64_t columns = whole.of->shape.with_dim0(1).elements(), rows = std::max<int64_t>(1, kElements / columns / kBand) * kBand;
    for (int64_t row = 0; row < whole.end; row += rows)
      slabs.push_back({.of = whole.of, .begin = row, .end = std::min(whole.end, row + rows)});
  }
  return slabs;
}

}  // namespace mantissa
