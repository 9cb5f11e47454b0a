// Says how the ranks that hold one model together share its parameters.
#pragma once

namespace mantissa {

// Numbers of ranks that hold a model together, and this rank among them. Tensor ranks share every matrix, expert ranks the experts of every
// layer.
struct ModelRanks {
  int tensor = 1, expert = 1;
  int tensor_rank = 0, expert_rank = 0;
  bool sequence_parallel = false;  // the tensor ranks share the tokens of norms and residuals, too

  bool several() const { return tensor > 1 || expert > 1; }
};

// Division of a matrix [out, in] among the tensor ranks: each has all of it, an equal share of its rows (column-parallel, as Megatron calls
// y = x W^T split by outputs) or an equal share of its columns (row-parallel).
enum class Split { none, column_parallel, row_parallel };

// Sharing of one parameter: tensor ranks divide each of its matrices; expert ranks have equal numbers of whole matrices, in their order.
struct Sharding {
  Split split = Split::none;
  ModelRanks ranks{};  // expert is 1 where all of them have the same matrices

  int row_ranks() const { return split == Split::column_parallel ? ranks.tensor : 1; }  // ranks that divide the rows
  int column_ranks() const { return split == Split::row_parallel ? ranks.tensor : 1; }
  bool is_copy() const { return split == Split::none && ranks.tensor_rank > 0; }  // a copy of what the first tensor rank has
};

// Selects whether ranks that share experts sum expert gradients over the source ranks of their tokens at once, or keep them apart by
// source, [experts of this rank, ranks, ...], and then sum them in an order that no layout changes.
enum class ExpertGradients { summed, by_source };

}  // namespace mantissa
