// Says how the ranks that hold one model together share its parameters.
#pragma once

namespace mantissa {

// How many ranks these are, and which of them this one is. Tensor ranks share every matrix, expert ranks the experts of every layer.
struct ModelRanks {
  int tensor = 1, expert = 1;
  int tensor_rank = 0, expert_rank = 0;
  bool sequence_parallel = false;  // the tensor ranks share the tokens of norms and residuals, too

  bool several() const { return tensor > 1 || expert > 1; }
};

// How the tensor ranks divide a matrix [out, in]: each has all of it, an equal share of its rows (column-parallel, as Megatron calls
// y = x W^T split by outputs) or an equal share of its columns (row-parallel).
enum class Split { none, column_parallel, row_parallel };

// How they share one parameter: tensor ranks divide each of its matrices, expert ranks have equal numbers of whole ones, in their order.
struct Sharding {
  Split split = Split::none;
  ModelRanks ranks{};  // expert is 1 where all of them have the same matrices

  int row_ranks() const { return split == Split::column_parallel ? ranks.tensor : 1; }  // that divide the rows
  int column_ranks() const { return split == Split::row_parallel ? ranks.tensor : 1; }
  bool is_copy() const { return split == Split::none && ranks.tensor_rank > 0; }  // of what the first tensor rank has
};

// Whether the ranks that share experts sum the gradients of these weights over the ranks whose tokens they are of, or keep them apart,
// [experts of this rank, ranks, ...], until they are summed in an order that no layout changes.
enum class ExpertGradients { summed, by_source };

}  // namespace mantissa
