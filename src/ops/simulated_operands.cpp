#include "ops/simulated_operands.h"

namespace mantissa {
namespace {

// Returns how many matrices of weights the groups have here.
int64_t matrices_of(const Dispatch& groups) { return groups.offsets.defined() ? groups.offsets.dim(0) - 1 : 1; }

// Returns the parts of each matrix.
std::vector<int64_t> parts_of_one(const WeightPlace& weight, const Dispatch& groups) {
  std::vector<int64_t> parts = weight.parts;
  parts.resize(parts.size() / static_cast<size_t>(matrices_of(groups)));
  return parts;
}

// Returns where the share of a rank lies among the elements of all ranks; empty: where it is here.
std::vector<int64_t> places_of_share(int64_t size, int ranks, int rank, const std::vector<int64_t>& parts) {
  std::vector<int64_t> out;
  if (ranks == 1) return out;
  int64_t before = 0;  // in a fused part every rank has as many elements
  for (const int64_t part : parts.empty() ? std::vector<int64_t>{size} : parts) {
    for (int64_t i = 0; i < part; ++i) out.push_back(before * ranks + part * rank + i);
    before += part;
  }
  return out;
}

}  // namespace

std::vector<int64_t> simulated_ends(const Dispatch& groups, OperandRole role, int64_t rows) {
  if (groups.offsets.defined() && role != OperandRole::weight) {
    require(groups.numbered != nullptr, "experts whose operands are simulated need number_rows()");
    return groups.numbered->ends;
  }
  std::vector<int64_t> ends;
  for (int64_t i = 0, matrices = matrices_of(groups); i <= matrices; ++i) ends.push_back(rows * i / matrices);
  return ends;
}

RoundingDraws draws_of(const WeightPlace& weight, const Dispatch& groups, GemmRole gemm, OperandRole role, const Shape& shape,
                       const RoundingPosition& at) {
  const ModelRanks& ranks = weight.sharding.ranks;
  const int of_out = weight.sharding.row_ranks(), of_in = weight.sharding.column_ranks();
  const bool along_out = role == OperandRole::output_grad;
  const int columns = along_out ? of_out : of_in;
  RoundingDraws draws{.seed = at.seed,
                      .what = weight.number * 16 + static_cast<uint32_t>(gemm) * 4 + static_cast<uint32_t>(role),
                      .columns = shape[1] * columns,
                      .row_places = {},
                      .column_places = places_of_share(shape[1], columns, ranks.tensor_rank,
                                                       along_out ? parts_of_one(weight, groups) : std::vector<int64_t>())};
  int64_t first = 0;
  if (role == OperandRole::weight) {
    draws.row_places = places_of_share(shape[0], of_out, ranks.tensor_rank, weight.parts);
    const int64_t expert_rank = ranks.expert > 1 ? ranks.expert_rank : 0;
    first = (at.step * ranks.expert + expert_rank) * shape[0] * of_out;
  } else if (groups.numbered) {
    draws.row_places = groups.numbered->assignments;
  } else {
    first = at.token;
  }
  draws.first = static_cast<uint64_t>(first) * static_cast<uint64_t>(draws.columns);
  return draws;
}

RoundingDraws slice(const RoundingDraws& all, int64_t begin, int64_t end) {
  RoundingDraws out = all;
  if (all.row_places.empty()) {
    out.first += static_cast<uint64_t>(begin * all.columns);
  } else {
    out.row_places.assign(all.row_places.begin() + begin, all.row_places.begin() + end);
  }
  return out;
}

}  // namespace mantissa
