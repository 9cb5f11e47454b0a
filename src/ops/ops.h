// Differentiable operations: forward and gradient stand side by side in src/ops/<op>.cpp. Every function computes at once and, under a
// Tape::Scope, records its gradient. Weights that are leaves receive their gradients in place. Each has a numeric gradient check in
// tests/ops/ops_gradient_test.cpp; a test fails when one is missing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "autograd/tape.h"
#include "comm/mesh.h"
#include "mantissa/precision/operands.h"

namespace mantissa {

// The tensor-parallel context of an operation: its position among the ranks that share its weight, in Megatron's tensor parallelism
// (Shoeybi et al. 2019) and sequence parallelism (Korthikanti et al. 2022). An operation makes at most one exchange forward and one
// backward for each weight, except cross_entropy, whose chunks each have one.

struct TensorParallel {
  Communicator group{};       // the ranks that share the weight; a group of one changes nothing and costs nothing
  Split split = Split::none;  // none: the operation is local
  // > 0: sequence parallelism. Activations outside split operations hold this rank's share of so many rows, share_of(tokens, rank, size).
  // Else they are whole and the same on all ranks.
  int64_t tokens = 0;
};
// Returns the context on a mesh; tokens: of all its tensor ranks.
TensorParallel tensor_parallel(const Mesh& mesh, Split split, int64_t tokens);

struct RowRange {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
// Returns a contiguous, nearly equal, possibly empty range: begin = rows * rank / ranks. The last rank has the last row.
RowRange share_of(int64_t rows, int rank, int ranks);

// Holds the position of a training run, so that operations that round at random draw bits which depend on what is rounded alone. Outside of
// a scope they round to nearest.

struct RoundingPosition {
  uint64_t seed = 0;
  int64_t step = 0;   // steps before
  int64_t token = 0;  // number, in the run of all ranks and steps, of the first token of the tensors at hand
};

// Sets the position of this thread until the end of the block.
class RoundingScope {
 public:
  explicit RoundingScope(const RoundingPosition& position);
  ~RoundingScope();
  RoundingScope(const RoundingScope&) = delete;
  RoundingScope& operator=(const RoundingScope&) = delete;

 private:
  RoundingPosition position_;
  const RoundingPosition* previous_;
};

const RoundingPosition* rounding_position();  // null outside of a scope

// Identifies the parameter of a model that a weight is, and the part of it that this rank has: random rounding draws by global element.
struct WeightPlace {
  uint32_t number = 0;
  Sharding sharding{};
  std::vector<int64_t> parts{};  // rows of fused parts, of this rank; empty: one
};

// A weight [out, in] as the GEMMs of a linear operation read it: in high precision, as codes (the recipe's weight or fake-quantized
// weight), or both. Its gradient is that of the high-precision value, straight through the quantization.
struct LinearWeight {
  LinearWeight(const Var& var) : high(var.value()), leaf(var.leaf()) {}  // NOLINT: a plain variable is a weight
  LinearWeight(Tensor value, QuantizedTensor quantized, Leaf* gradient, WeightPlace at = {})
      : high(std::move(value)), codes(std::move(quantized)), leaf(gradient), place(std::move(at)) {}

  Tensor high;            // undefined where the codes are the parameter
  QuantizedTensor codes;  // undefined where nothing reads codes
  Leaf* leaf = nullptr;
  WeightPlace place{};

  Var var() const { return leaf ? Var(high, *leaf) : Var(high); }  // as an input of a node on the tape
  const Shape& shape() const { return high.defined() ? high.shape() : codes.shape; }
  Backend& device() const { return high.defined() ? high.device() : codes.device(); }
};

// Says what backward keeps of an activation that is cheap to compute again.
enum class Keep { value, nothing };

// Looks up rows of weight [V, C] by ids [N] i32: [N, C]. Rows of a weight with codes are those of its codes, decoded. Column-parallel,
// weight has V rows of V * size, from V * rank on, and the outputs are summed over the group, which is exact. With sequence parallelism ids
// has all tokens, and the result is this rank's share of them.
Var embedding(const Tensor& ids, const LinearWeight& weight, const TensorParallel& tp = {});

Var add(const Var& a, const Var& b);

// A residual connection: x + branch, or x alone. The norm that reads it adds them in its own pass.
struct Residual {
  Var x, branch{};

  Var sum() const { return branch.value().defined() ? add(x, branch) : x; }
};
struct NormedSum {
  Var sum, normed;
};

// x [N, in] * weight [out, in]^T + bias [out] (optional: default Var): [N, out] in the dtype of x. `operands`, which a recipe converts to,
// say which of the three GEMMs reads which operand in which format; by default all are high precision.
//
// Column-parallel, weight and bias are this rank's rows, x is whole and the result is [N, out of this rank]. Row-parallel, weight is [out,
// in of this rank] and x [N, in of this rank], while bias and result are whole. The sums over the ranks (dx column-parallel, the result
// row-parallel) stay fp32 until they are added in tree order and rounded once; the bias is added after that sum. With sequence parallelism
// x (column-parallel) and the result (row-parallel) are shares of tokens. If only fprop's rowwise codes of x are needed, its rows are sent
// as codes, else as values, with the same bits. With sequence parallelism the bias gradient of a row-parallel layer is that of this rank's
// tokens alone, and the owner of the bias sums it over the group.
Var linear(const Var& x, const LinearWeight& weight, const Var& bias, const LinearOperands& operands = {}, const TensorParallel& tp = {});

// Computes fprop alone, in any dtype; nothing is recorded. Column-parallel, the columns of all ranks are gathered to whole rows, of all
// tokens.
Tensor linear_fprop(const Tensor& x, const LinearWeight& weight, Dtype out, const LinearOperands& operands, const TensorParallel& tp = {});

// bias is optional: default Var.
NormedSum rms_norm(const Residual& x, const Var& weight, double eps);
NormedSum layer_norm(const Residual& x, const Var& weight, const Var& bias, double eps);
inline Var rms_norm(const Var& x, const Var& weight, double eps) { return rms_norm(Residual{x}, weight, eps).normed; }
inline Var layer_norm(const Var& x, const Var& weight, const Var& bias, double eps) {
  return layer_norm(Residual{x}, weight, bias, eps).normed;
}

// The next three take packed q|k|v rows [N, layout.row()]; see the kernels of the same names.
Var qk_norm(const Var& qkv, const Var& q_weight, const Var& k_weight, HeadLayout layout, double eps);
// Rotates in place if `qkv` is the last handle of its values; so does the gradient.
Var rope(Var qkv, const Tensor& table, const Tensor& positions, HeadLayout layout);
// Returns [N, heads * D]; scores are scaled by 1/sqrt(head_dim). segment_starts (default Tensor) and sinks [heads] (default Var) are
// optional.
Var attention(const Var& qkv, int64_t batch, HeadLayout layout, const Tensor& segment_starts, int64_t window = 0, const Var& sinks = {});

// Converts x to another dtype; its gradient has that of x.
Var convert(const Var& x, Dtype dtype);

// Maps x [N, 2I] = gate | up to [N, I]. limit: see SwiGluForward.
Var swiglu(const Var& x, Keep keep, double limit = 0.0);
Var gelu(const Var& x, GeluForm form, Keep keep);

inline constexpr int64_t kLogitsAtATime = int64_t{1} << 26;  // 256 MiB in fp32

// ---- mixture of experts: N tokens, E experts, K top-k assignments of each token

struct RoutingOptions {
  RoutingRule rule;
  int64_t sequences = 1;                            // into which the tokens are divided
  double balance = 0, sequence_balance = 0, z = 0;  // how much of each auxiliary loss (RouteBackward) joins the gradient of the logits
};

struct Routing {
  Var weights;     // [N, K], in the dtype of the logits
  Tensor experts;  // [N, K] i32; -1: padding
  Tensor scores;   // [N, E]
  Tensor counts;   // [sequences, E] i32
};

// Routes by logits [N, E] fp32 (or fp64), which are -Inf for padding. bias [E], optional, counts for the selection only. The gradient of
// the logits is that of the weights and of the auxiliary losses, which no loss on the tape holds.
Routing route(const Var& logits, const RoutingOptions& options, const Tensor& bias = {});

// Surround operations that take all tokens where tensor ranks share them (sequence parallelism); else both return their argument.
// gathered_tokens() returns all rows, of which each rank brings its share; own_tokens() returns this rank's share of rows that are the same
// on all. The gradient of gathered rows is the same on all ranks, so it is not summed: each takes its share.
Var gathered_tokens(const Var& x, const TensorParallel& tp);
Var own_tokens(const Var& x, const TensorParallel& tp);

struct AllToAllPlan;

// Holds the weights of the permuted tokens of a dispatch. dispatched_swiglu() stores them; a bias in combined_linear() stores what it adds
// to their gradient, which is combined with the rest of it.
struct RowWeights {
  Tensor values{}, more_gradient{};
};

// Rows of permuted tokens whose operands are simulated, as a host knows them. An operand is several matrices, each rounded on its own: the
// rows that an expert has of one rank. Random rounding is keyed by the global index of a row's assignment; padding rows use indices that no
// assignment has.
struct NumberedRows {
  std::vector<int64_t> ends;         // ends of the matrices, beginning with 0
  std::vector<int64_t> assignments;  // indices; none where all is rounded to nearest
};

// Says where the permuted tokens of each assignment lie (DispatchTable). Among several ranks it covers the assignments of all of them to
// experts of this one, in the order of rank, expert and token; the rows of an expert are those of rank 0, then of rank 1, and so on, each a
// whole multiple.
struct Dispatch {
  Tensor offsets, rows, assignments;
  int64_t per_row = 1;                               // assignments of a token
  Tensor gradient_offsets{};                         // bounds of the groups that have a gradient of their own; undefined: offsets
  std::shared_ptr<const AllToAllPlan> all_to_all{};  // null: all experts are here
  std::shared_ptr<const HostGroups> host{};          // where the host knows offsets
  std::shared_ptr<const NumberedRows> numbered{};    // number_rows()
  std::shared_ptr<RowWeights> weights = std::make_shared<RowWeights>();
};
// `ranks` share the experts equally, in their order: rank r has experts [r E / size, (r + 1) E / size). Each has its own tokens, which are
// dispatched to the experts and combined again. They call it together, as they do the two operations with its result, forward and backward.
Dispatch dispatch(const Tensor& experts, int64_t num_experts, int64_t multiple, int64_t capacity = 0, const Communicator& ranks = {},
                  ExpertGradients gradients = ExpertGradients::summed);
// Adds what recipes with simulated operands read of a dispatch. The ranks of the dispatch call it together, in the RoundingScope of their
// tokens if `rounding` is stochastic.
void number_rows(Dispatch& to, Rounding rounding);

// Computes the first GEMM of every expert, gate and up as one, on its permuted tokens, then SwiGLU times the weight of each row: x [N, in],
// weights [N, K], a grouped weight gate_up [E * 2I, in] and bias [E * 2I] (optional: default Var) of this rank's experts give [R, I].
// Dispatch is one exchange together with the weights, and so is its gradient. Where tensor ranks share experts, each has rows of gate and
// of up: x and weights are whole, the result is [R, I of this rank], and their gradients are sums over the ranks, rounded once.
struct DispatchedOptions {
  Keep keep;
  bool as_codes;       // where fprop reads x as codes they are made of x once and rows of codes move, else rows of values
  double limit = 0.0;  // SwiGluForward
};
Var dispatched_swiglu(const Var& x, const Var& weights, const LinearWeight& gate_up, const Var& bias, const Dispatch& to,
                      const LinearOperands& operands, const DispatchedOptions& options, const TensorParallel& tp = {});

// Computes the second GEMM of every expert and combines the rows of each token: x [R, I] and a grouped weight down [E * out, I] give [N,
// out]. Where the recipe requantizes the output gradient, its rowwise codes are made of dy once and dispatched; else values are. Where
// tensor ranks share experts, each has columns of down, and the rows are summed over the ranks in fp32 and rounded once before they are
// combined. bias [E * out] (optional: default Var) is whole on each of these ranks and is multiplied by the weights of the rows, as x is
// already; its gradient is of dy as dispatched.
Var combined_linear(const Var& x, const LinearWeight& down, const Var& bias, const Dispatch& from, const LinearOperands& operands,
                    const TensorParallel& tp = {});

// A teacher in the loss: a model that is not trained, whose distributions the rows of logits learn in addition to their targets, or instead
// of them (DistillationOfShares).
struct LossTeacher {
  Tensor x;             // [N, C of the teacher], in the dtype of the student's x, and shared by the ranks like it
  LinearWeight weight;  // [Vp, C of the teacher], shared by the ranks like the student's
  double share = 1.0;   // share of the divergence from the teacher in the loss; the rest is the cross entropy of the targets
  double temperature = 1.0;
};

struct LossOptions {
  int64_t vocab;         // columns that take part in the softmax; the rest are padding
  int64_t target_count;  // the loss is the sum over targets divided by this
  Dtype logits_dtype;
  int64_t chunk_elements = kLogitsAtATime;
  Tensor row_losses{};  // where given, [N] of stats: gets the loss of each row
  std::optional<LossTeacher> teacher{};
  Tensor row_cross_entropies{};  // with a teacher, where given, [N] of stats: gets the cross entropy of each row, whatever its share
};

// Computes output projection, softmax and cross entropy in chunks of rows, so that logits [N, Vp] never exist as a whole: x [N, C], weight
// [Vp, C] and targets [N] i32 (negative: ignored) give one fp64 [1]. Gradients are computed with the loss and scaled to d(loss) = 1, so
// backward must start here. Chunks are whole multiples of 64 rows, or of a block, even if one of them has more elements than
// chunk_elements. Column-parallel, weight has Vp rows of Vp * size, from Vp * rank on; the loss, over all of them, has the same
// bits on every rank; x is whole or, with sequence parallelism, this rank's share, while targets has all tokens. The ranks exchange two
// numbers a row. A teacher's logits are computed chunk by chunk beside the student's, in chunks of half as many rows; the ranks then
// exchange five numbers a row, and two more for row_cross_entropies.
Var cross_entropy(const Var& x, const LinearWeight& weight, const Tensor& targets, const LossOptions& options,
                  const LinearOperands& operands = {}, const TensorParallel& tp = {});

}  // namespace mantissa
