// Differentiable operations: forward and gradient stand side by side in src/ops/<op>.cpp. Every function computes at once and, under a
// Tape::Scope, records its gradient. Weights that are leaves receive their gradients in place. Each has a numeric gradient check in
// tests/ops/ops_gradient_test.cpp; a test fails when one is missing.
#pragma once

#include <memory>

#include "mantissa/autograd/tape.h"
#include "mantissa/ops/place.h"
#include "mantissa/precision/recipe.h"

namespace mantissa {

// A weight [out, in] as the products of a linear operation read it: in high precision, as codes (the recipe's weight or fake-quantised
// weight), or both. Its gradient is that of the high-precision value: straight through the quantisation.
struct LinearWeight {
  LinearWeight(const Var& var) : high(var.value()), leaf(var.leaf()) {}  // NOLINT: a plain variable is a weight
  LinearWeight(Tensor value, QuantizedTensor quantized, Leaf* gradient)
      : high(std::move(value)), codes(std::move(quantized)), leaf(gradient) {}

  Tensor high;            // undefined where the codes are the parameter
  QuantizedTensor codes;  // undefined where nothing reads codes
  Leaf* leaf = nullptr;

  Var var() const { return leaf ? Var(high, *leaf) : Var(high); }  // as an input of a node on the tape
  const Shape& shape() const { return high.defined() ? high.shape() : codes.shape; }
  Backend& device() const { return high.defined() ? high.device() : codes.device(); }
};

// What is kept for backward of an activation that is cheap to compute again.
enum class Keep { value, nothing };

// Rows of weight [V, C] by ids [N] i32: [N, C]. Split::rows: weight has V rows of V * size, from V * rank on, and the outputs are summed
// over the group, which is exact; with sequence parallelism ids are of all tokens, the result is this rank's share.
Var embedding(const Tensor& ids, const Var& weight, const Place& place = {});

Var add(const Var& a, const Var& b);

// x [N, in] * weight [out, in]^T + bias [out] (optional: default Var): [N, out] in the dtype of x. Which of the three products reads which
// operand in which format is the recipe's matter; without one all are high precision.
//
// Split::rows: weight and bias are this rank's rows, x is whole, the result [N, out of this rank]. Split::columns: weight is [out, in of
// this rank], x [N, in of this rank], bias and result are whole. What is a sum over the ranks, dx of the first and the result of the
// second, stays fp32 until it is added up, is added in tree order and rounded once; the bias is added after that sum. With sequence
// parallelism x of Split::rows and the result of Split::columns are shares of tokens; rows of x that fprop reads as codes travel as codes,
// with the bits of quantising all of them; and the bias gradient of Split::columns is that of the own tokens, which whoever owns it sums
// over the group.
Var linear(const Var& x, const LinearWeight& weight, const Var& bias, const Recipe& recipe = {}, const Place& place = {});

// The forward product alone, in any dtype; nothing is recorded. Split::rows: the columns of all ranks are gathered to whole rows, of all
// tokens.
Tensor linear_product(const Tensor& x, const LinearWeight& weight, Dtype out, const Recipe& recipe, const Place& place = {});

Var rms_norm(const Var& x, const Var& weight, double eps);

// bias optional: default Var.
Var layer_norm(const Var& x, const Var& weight, const Var& bias, double eps);

// The next three take packed q|k|v rows [N, layout.row()]; see the kernels of the same names.
Var qk_norm(const Var& qkv, const Var& q_weight, const Var& k_weight, HeadLayout layout, double eps);
Var rope(const Var& qkv, const Tensor& table, const Tensor& positions, HeadLayout layout);
// [N, heads * D]; scores are scaled by 1/sqrt(head_dim). segment_starts optional: default Tensor; sinks [heads] optional: default Var.
Var attention(const Var& qkv, int64_t batch, HeadLayout layout, const Tensor& segment_starts, int64_t window = 0, const Var& sinks = {});

// x in another dtype; its gradient in that of x.
Var convert(const Var& x, Dtype dtype);

// x [N, 2I] = gate | up: [N, I]. limit: SwiGluForward.
Var swiglu(const Var& x, Keep keep, double limit = 0.0);
Var gelu(const Var& x, GeluForm form, Keep keep);

inline constexpr int64_t kLogitsAtATime = int64_t{1} << 26;  // 256 MiB in fp32

// ---- mixture of experts: N tokens, E experts, K choices of each token

struct RoutingOptions {
  RoutingRule rule;
  int64_t sequences = 1;                            // into which the tokens are divided
  double balance = 0, sequence_balance = 0, z = 0;  // how much of each auxiliary loss (RouteBackward) joins the gradient of the logits
};

struct Routing {
  Var weights;     // [N, K], in the dtype of the logits
  Tensor experts;  // [N, K] i32
  Tensor scores;   // [N, E]
  Tensor counts;   // [sequences, E] i32
};

// logits [N, E] fp32 (or fp64). bias [E], optional, chooses only. The gradient of the logits is that of the weights and of the auxiliary
// losses, which no loss on the tape holds.
Routing route(const Var& logits, const RoutingOptions& options, const Tensor& bias = {});

// Ranks that share the experts of a layer, each with as many, in their order: rank r has experts [r E / size, (r + 1) E / size). Each has
// its own tokens; their rows travel to the experts and back. by_source: the gradients of weights are those of each rank's tokens, kept
// apart [experts of this rank, size, ...]; else their sum.
struct ExpertRanks {
  Communicator group{};
  bool by_source = false;
};

// Around operations that take all tokens where tensor ranks share them (sequence parallelism; else both are what they are given): all rows,
// of which each rank brings its share, and this rank's share of rows that all of them have alike. The gradient that all ranks have alike of
// the first is not added up: each takes its share.
Var gathered_tokens(const Var& x, const Place& place);
Var own_tokens(const Var& x, const Place& place);

struct ExpertJourney;

// The weights of the rows of a dispatch. dispatched_swiglu() leaves them; a bias of combined_linear() leaves what it adds to their
// gradient, which travels back with the rest of it.
struct RowWeights {
  Tensor values{}, more_gradient{};
};

// Where the rows of each choice lie (DispatchTable). Among several ranks: of the choices of all of them that go to experts of this one, in
// the order of rank, expert and token; rows of an expert are those of rank 0, then of rank 1, and so on, each a whole multiple.
struct Dispatch {
  Tensor offsets, rows, choices;
  int64_t per_row = 1;                             // choices of a token
  Tensor gradient_offsets{};                       // of the groups that have a gradient of their own; undefined: offsets
  std::shared_ptr<const ExpertJourney> journey{};  // null: all experts are here
  std::shared_ptr<RowWeights> weights = std::make_shared<RowWeights>();
};
// A call of all these ranks, as are the two operations with what it returns, forward and backward.
Dispatch dispatch(const Tensor& experts, int64_t num_experts, int64_t multiple, int64_t capacity = 0, const ExpertRanks& ranks = {});

// The first product of every expert, gate and up as one, on the rows of its tokens, and SwiGLU times the weight of each row: x [N, in],
// weights [N, K], gate_up a stack [E * 2I, in] and bias [E * 2I] (optional: default Var), of this rank's experts: [R, I]. What travels
// between ranks travels as it moves: in one exchange with the weights, and back in one. Where tensor ranks share experts, each has rows of
// gate and of up: x and weights are whole, the result is [R, I of this rank], and their gradients are sums over the ranks, rounded once.
struct DispatchedOptions {
  Keep keep;
  bool as_codes;       // where fprop reads x as codes they are made of x once and rows of codes move, else rows of values
  double limit = 0.0;  // SwiGluForward
};
Var dispatched_swiglu(const Var& x, const Var& weights, const LinearWeight& gate_up, const Var& bias, const Dispatch& to,
                      const Recipe& recipe, const DispatchedOptions& options, const Place& place = {});

// The second product of every expert, and the sum of a token's rows: x [R, I], down a stack [E * out, I]: [N, out]. Where the recipe shifts
// the output gradient its rowwise codes are made of dy once and move; else values do. Where tensor ranks share experts each has columns of
// down, and the rows are summed over the ranks in fp32 and rounded once before those of a token are added. bias [E * out] (optional:
// default Var), whole on each of these ranks, is multiplied by the weights of the rows, as x is already; its gradient is of dy as it moves.
Var combined_linear(const Var& x, const LinearWeight& down, const Var& bias, const Dispatch& from, const Recipe& recipe,
                    const Place& place = {});

struct LossOptions {
  int64_t vocab;         // columns that take part in the softmax; the rest are padding
  int64_t target_count;  // the loss is the sum over targets divided by this
  Dtype logits_dtype;
  int64_t chunk_elements = kLogitsAtATime;
  Tensor row_losses{};  // where given, [N] of stats: gets the loss of each row
};

// Rows whose logits, `columns` in each, exist at a time: whole multiples of 64 or of a block, even where one of them has more elements.
int64_t chunk_rows(int64_t columns, const Recipe& recipe, int64_t elements = kLogitsAtATime);

// Output projection, softmax and cross entropy in chunks of rows, so that logits [N, Vp] never exist as a whole. x [N, C], weight [Vp, C],
// targets [N] i32 (negative: ignored): one fp64 [1]. Gradients are computed with the loss and scaled to d(loss) = 1: backward must start
// here. Split::rows: weight has Vp rows of Vp * size, from Vp * rank on; the loss, over all of them, has the same bits on every rank; x is
// whole or, with sequence parallelism, this rank's share, while targets are of all tokens. Two numbers a row are exchanged.
Var cross_entropy(const Var& x, const LinearWeight& weight, const Tensor& targets, const LossOptions& options, const Recipe& recipe = {},
                  const Place& place = {});

}  // namespace mantissa
