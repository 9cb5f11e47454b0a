// The table of contents of all mathematics. Every kernel is a struct of named operands that run() takes. Its contract states dtype and
// shape of every operand as contract.h writes them; the longer contracts are in kernel_contracts.cpp. Callers see only Backend&.
//
// Conventions. N = rows (tokens), C = channels, V = vocabulary. Matrices are row-major. "Values" (x, y, weight, dy, dx) share one dtype:
// fp32 or bf16, and on the reference backend also fp64. Statistics, losses and parameter gradients ("stats") are fp32, or fp64 where the
// values are fp64. Sums have a fixed order that depends on the shapes only. `accumulate` adds to the output instead of overwriting it.
// Optional operands, and only those, have a default initializer. Indices (ids, targets, positions, segment starts) must be in range: the
// uploader checks them because a device cannot throw, and CPU kernels check again.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mantissa/backend/attention_path.h"
#include "mantissa/backend/contract.h"
#include "mantissa/backend/gemm_path.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/rng.h"
#include "mantissa/base/trace.h"
#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

// Says in which lane of a device this thread works. A device does things in order within a lane; there are two, which run beside each
// other. A CPU has one.

enum class Lane : uint8_t { compute, communication };

Lane current_lane();  // lane of this thread; compute unless a scope says otherwise

// Until the end of the block, the kernels, copies and memory that this thread asks a device for belong to the lane.
class LaneScope {
 public:
  explicit LaneScope(Lane lane);
  ~LaneScope();
  LaneScope(const LaneScope&) = delete;
  LaneScope& operator=(const LaneScope&) = delete;

 private:
  Lane outer_;
};

struct Fill {  // out[...] = value
  Tensor out;
  double value;

  Contract contract() const { return Contract("fill").output("out", out, "any [...]"); }
};

struct Convert {  // out = x rounded to the dtype of out (RNE); the same dtype is a copy
  Tensor x, out;

  Contract contract() const {
    const char* const spec = x.dtype() == out.dtype() ? "any [...]" : "floating [...]";
    return Contract("convert").input("x", x, spec).output("out", out, spec);
  }
};

// out = std * random_normal(key, what, index), where index counts the elements of the whole tensor of which out is a box. out[0] has
// first_index. With out viewed as [rows, last dimension], each row begins row_stride after the one before; row_stride 0 means that rows are
// adjacent.
struct RandomNormal {
  Tensor out;
  RngKey key;
  uint32_t what;
  int64_t first_index;
  double std;
  int64_t row_stride = 0;

  Contract contract() const {
    Contract c("random_normal");
    c.output("out", out, "[...]").that(first_index >= 0, "first_index is ", first_index);
    const bool apart = row_stride == 0 || (out.shape().rank() > 0 && row_stride >= out.shape()[-1]);
    return c.that(apart, "row_stride is ", row_stride, ", out ", out.shape());
  }
};

struct Add {  // out = a + b; out may be a or b
  Tensor a, b, out;

  Contract contract() const { return Contract("add").input("a", a, "[...]").input("b", b, "[...]").in_place("out", out, "[...]"); }
};

// Sums the rows of `others` with `own` between them, as row `place` of R + 1: neighbors, then pairs of them, and so on, as
// GradientAccumulator does with micro batches. Each sum is rounded, as by Add. own gets the sum of all; others are unspecified then.
struct TreeSum {
  Tensor own, others;
  int64_t place;

  Contract contract() const {
    Contract c("tree_sum");
    c.output("own", own, "[N]").output("others", others, "[R, N]");
    return c.that(place >= 0 && place <= c.size('R'), "place is ", place, " among ", c.size('R'), " others");
  }
  int64_t bytes_moved() const { return others.bytes() + 2 * own.bytes(); }
};

// Computes out = x + bias in every row. x are unrounded sums; out may be x.
struct AddBias {
  Tensor x, bias, out;

  Contract contract() const {
    return Contract("add_bias").input("bias", bias, "[C]").in_place("out", out, "[N, C]").input("x", x, "stats [N, C]");
  }
};

struct Operand {  // a matrix, read transposed where the flag says so
  Value value;
  bool transposed = false;

  const QuantizedTensor* quantized() const { return std::get_if<QuantizedTensor>(&value); }
  const Tensor& dense() const { return std::get<Tensor>(value); }
  int64_t rows() const { return shape_of(value)[transposed ? 1 : 0]; }  // rows of op(value)
  int64_t cols() const { return shape_of(value)[transposed ? 0 : 1]; }
};

// FLOPs of kernels are those of the model: of GEMMs and attention, a multiplication and an addition each. flops() of the structs below has
// them, and time lines show them.

// out [M, N] (+)= op(a) [M, K] * op(b) [K, N] + bias [N]. This is the only way to multiply matrices. High-precision operands share a dtype;
// out has it too, or is stats. Accumulation is fp32 (fp64 for fp64). Here and in row kernels a backend may flush subnormals to zero.
//
// A quantized operand stands for its dequantized values. It is dequantized to the dtype of the other operand, or to bf16 if both are
// quantized. That is exact in bf16 unless a non-zero block has an extreme scale code (see extreme_scale()); then the GEMM runs in fp32 and
// honors subnormals. With two quantized operands out is bf16 or fp32; an accumulated sum is always stats.
struct Gemm {
  Operand a, b;
  Tensor out;
  bool accumulate;
  Tensor bias{};

  double flops() const { return 2.0 * static_cast<double>(out.dim(0)) * static_cast<double>(out.dim(1)) * static_cast<double>(a.cols()); }
  Contract contract() const;
};

// Writes element codes and scales of x [M, C], fp32 or bf16 (flashinfer: bf16 only). `out` has M rows, or M rounded up to whole blocks, of
// which those beyond M are zeros: M need not be a multiple of the block. If `out` is rowwise, `second` may get the columnwise codes of x,
// or these as rowwise codes of its transpose.
// nonfinite [1] i32 is set to 1 if x holds a NaN or Inf, else left alone. The given bits are quantized: a caller that holds fp32 and wants
// the codes of bf16 rounds first.
struct Quantize {
  Tensor x;
  QuantizedTensor out;
  QuantizedTensor second{};
  Tensor nonfinite{};

  Contract contract() const;
};

// out [R, C] (fp32 or bf16) = element * 2^(scale - 127), rounded once; of NVFP4 element * scale * 2^tensor_exponent. A scale of 255, or of
// NVFP4 one that is NaN, gives NaN, and -0 under flashinfer gives +0. extreme
// [1] i32 is set to 1 if a block with an extreme scale code holds a non-zero element, else left alone. A narrower out takes the columns
// from first_col on; it begins with a block and ends with one, the last of which may be smaller than the others.
struct Dequantize {
  QuantizedTensor x;
  Tensor out;
  int64_t first_col = 0;
  Tensor extreme{};

  Contract contract() const;
};

// Computes Dequantize(Quantize(x)) without writing codes. x and out share dtype (fp32 or bf16) and shape [R, C].
struct FakeQuantize {
  Tensor x, out;
  Quantization how;

  Contract contract() const;
};

// Says which bits round an element at random: those of (seed, what, number), and number = first + row * columns + column in the matrix of
// all ranks, so they are the same however it is divided.
struct RoundingDraws {
  uint64_t seed = 0;
  uint32_t what = 0;
  uint64_t first = 0;
  int64_t columns = 0;                                 // width of the matrix of all ranks
  std::vector<int64_t> row_places{}, column_places{};  // places of `out` in it; empty: 0, 1, ...
};

// out [R, C], fp32 or of the dtype of x, gets x [M, C] as values of a format that has no codes. Rows beyond M count as zeros. Blocks of
// how.hadamard elements along dimension how.contraction are transformed first (hadamard.h) and rounded to the dtype of x. Blocks at the
// edges may be short. With amax that of a block, A that of the whole and L the largest element, a value is
//
//   e8m0  element(x / 2^k) * 2^k, 2^k by how.rule (ScaleRule)
//   e4m3  element(x * min(1 / (s * (1 / S)), m)) * s * (1 / S) with S = min(448 L / A, m), s = E4M3(min(amax * (S * (1 / L)), 448)) and
//         m the largest fp32: each operation in fp32, in the order of Transformer Engine's NVFP4QuantizerRef
//
// Beyond L there is L, and zeros keep their sign. A NaN or Inf makes all of its block NaN, under e4m3 all of out. `error` gets the sums of
// QuantizationError of what is rounded, the scales as the exponents that they have, 127 + floor(log2 scale). With rows [R], row i of out is
// left out of it where rows[i] is -1, and so is the scale of a block of such rows. Devices without host memory refuse it.
struct Simulate {
  Tensor x, out;
  Simulation how;
  RoundingDraws draws{};  // for stochastic rounding
  Tensor error{}, rows{};

  Contract contract() const;
};

// Derives columnwise codes from rowwise ones by exponent shift. They equal the codes of the dequantized fp32 values of x, quantized
// columnwise with the same format and rule. x has 1 x b blocks, out b x 1; or out gets these as rowwise codes of the transpose.
struct RequantizeColumns {
  QuantizedTensor x, out;

  Contract contract() const;
};

// Writes scales in the 128 x 4 layout of cuBLASLt and tcgen05, with padding 0. Rowwise: outer = rows, inner = blocks of a row; columnwise:
// the transposed scales. out is u8 [swizzled_bytes(x)].
struct SwizzleScales {
  QuantizedTensor x;
  Tensor out;

  Contract contract() const;
};

// Measures how far codes q are from the values x [M, C] (fp32 or bf16) that they stand for. M is rounded up to whole blocks as in Quantize;
// elements beyond M do not count. out [Part::size] fp64 gets the sums of x^2 and (x - q)^2; the number of elements beyond the largest code
// of their block, and of non-zero elements coded as zero; the largest |x|; the number of elements; and from Part::scales on how many blocks
// have scale code 0, 1, .. 255. A NaN in x makes the sums and the largest NaN. With rows [M], row i is left out where rows[i] is -1, and so
// is the scale of a block of such rows.
struct QuantizationError {
  enum Part : int64_t { signal, noise, clipped, flushed, amax, elements, scales, size = scales + 256 };
  Tensor x;
  QuantizedTensor q;
  Tensor out;
  Tensor rows{};

  Contract contract() const;
};

struct SumCounts {  // out = sum over rows of counts, as whole numbers that fp64 holds
  Tensor counts, out;

  Contract contract() const { return Contract("sum_counts").input("counts", counts, "i32 [N, C]").output("out", out, "fp64 [C]"); }
};

struct SumRows {  // out (+)= sum over rows of x
  Tensor x, out;
  bool accumulate;

  Contract contract() const { return Contract("sum_rows").input("x", x, "[N, C]").output("out", out, "stats [C]"); }
};

// Says which rows of a table an operand of V rows holds: [first, first + V) of `rows`, or all if `rows` is 0.
struct TableRows {
  int64_t first = 0, rows = 0;

  // Checks that the rows lie in the table; V must be known.
  Contract& check(Contract& c) const {
    const bool inside = rows == 0 ? first == 0 : first >= 0 && first + c.size('V') <= rows;
    return c.that(inside, "the table's rows from ", first, " on, ", c.size('V'), " of them, are not among ", rows);
  }
  int64_t limit(int64_t own) const { return rows == 0 ? own : rows; }  // limit of ids
};

struct EmbeddingForward {  // out = weight[ids], 0 where weight has no such row; ids in [0, V) or [0, part.rows)
  Tensor ids, weight, out;
  TableRows part{};

  Contract contract() const {
    Contract c("embedding");
    c.input("ids", ids, "i32 [N]").input("weight", weight, "[V, C]").output("out", out, "[N, C]");
    return part.check(c);
  }
  int64_t bytes_moved() const { return ids.bytes() + 2 * out.bytes(); }  // only the rows of the ids are read
};

struct EmbeddingBackward {  // dweight (+)= rows of dy summed by id, in row order, of the ids that dweight has a row for
  Tensor ids, dy, dweight;
  bool accumulate;
  TableRows part{};

  Contract contract() const {
    Contract c("embedding backward");
    c.input("ids", ids, "i32 [N]").input("dy", dy, "[N, C]").output("dweight", dweight, "stats [V, C]");
    return part.check(c);
  }
  // Rows of the ids are read and written, and others written only if the sums are new.
  int64_t bytes_moved() const {
    const int64_t rows = dy.elements() * dtype_bytes(dweight.dtype());
    return ids.bytes() + dy.bytes() + 2 * rows + (accumulate ? 0 : dweight.bytes());
  }
};

// y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019). Where `branch` is given, both norms first write sum =
// x + branch, as Add does, and read it in the place of x.
struct RmsNormForward {
  Tensor x, weight, y, rstd;
  double eps;
  Tensor branch{}, sum{};  // both or none

  Contract contract() const {
    Contract c("rms_norm");
    c.input("x", x, "[N, C]").input("weight", weight, "[C]").input("branch", branch, "[N, C]?").output("sum", sum, "[N, C]?");
    c.output("y", y, "[N, C]").output("rstd", rstd, "stats [N]");
    return c.that(branch.defined() == sum.defined(), "branch and sum must be given together");
  }
};

// Both gradients add `other` to dx, as Add does, where it is given: what else reads x gives it.
struct RmsNormBackward {
  Tensor x, weight, rstd, dy, dx, dweight;
  bool accumulate;  // applies to dweight
  Tensor other{};

  Contract contract() const {
    Contract c("rms_norm backward");
    c.input("x", x, "[N, C]").input("weight", weight, "[C]").input("rstd", rstd, "stats [N]").input("dy", dy, "[N, C]");
    c.input("other", other, "[N, C]?");
    return c.output("dx", dx, "[N, C]").output("dweight", dweight, "stats [C]");
  }
};

// y = (x - mean) * rstd * weight + bias, biased variance (Ba et al. 2016).
struct LayerNormForward {
  Tensor x, weight, y, mean, rstd;
  double eps;
  Tensor bias{}, branch{}, sum{};

  Contract contract() const {
    Contract c("layer_norm");
    c.input("x", x, "[N, C]").input("weight", weight, "[C]").input("bias", bias, "[C]?");
    c.input("branch", branch, "[N, C]?").output("sum", sum, "[N, C]?");
    c.output("y", y, "[N, C]").output("mean", mean, "stats [N]").output("rstd", rstd, "stats [N]");
    return c.that(branch.defined() == sum.defined(), "branch and sum must be given together");
  }
};

struct LayerNormBackward {  // dbias present if and only if the forward had a bias
  Tensor x, weight, mean, rstd, dy, dx, dweight;
  bool accumulate;  // applies to dweight and dbias
  Tensor dbias{}, other{};

  Contract contract() const {
    Contract c("layer_norm backward");
    c.input("x", x, "[N, C]").input("weight", weight, "[C]").input("mean", mean, "stats [N]").input("rstd", rstd, "stats [N]");
    c.input("dy", dy, "[N, C]").input("other", other, "[N, C]?").output("dx", dx, "[N, C]");
    return c.output("dweight", dweight, "stats [C]").output("dbias", dbias, "stats [C]?");
  }
};

// Lays out a row of packed q|k|v: heads * head_dim query channels, then kv_heads * head_dim keys, then as many values.
struct HeadLayout {
  int64_t heads, kv_heads, head_dim;
  int64_t row() const { return (heads + 2 * kv_heads) * head_dim; }

  // Begins the contract of a kernel on such rows. D = head_dim, H = heads, L = query and key heads, Q = channels of the queries, K =
  // channels of the keys, R = row().
  Contract contract(const char* kernel) const;
  // Also declares qkv [N, R] of B = batch sequences of one length T, and optional segment_starts [N] i32.
  Contract contract(const char* kernel, const Tensor& qkv, int64_t batch, const Tensor& segment_starts) const;
};

// Normalizes every query head with q_weight and every key head with k_weight (RMS norm); values are copied.
struct QkNormForward {
  Tensor x, q_weight, k_weight, y, rstd;
  HeadLayout layout;
  double eps;

  Contract contract() const {
    Contract c = layout.contract("qk_norm");
    c.input("x", x, "[N, R]").input("q_weight", q_weight, "[D]").input("k_weight", k_weight, "[D]");
    return c.output("y", y, "[N, R]").output("rstd", rstd, "stats [N, L]");
  }
};

struct QkNormBackward {
  Tensor x, q_weight, k_weight, rstd, dy, dx, dq_weight, dk_weight;
  HeadLayout layout;
  bool accumulate;  // applies to dq_weight and dk_weight

  Contract contract() const {
    Contract c = layout.contract("qk_norm backward");
    c.input("x", x, "[N, R]").input("q_weight", q_weight, "[D]").input("k_weight", k_weight, "[D]").input("rstd", rstd, "stats [N, L]");
    c.input("dy", dy, "[N, R]").output("dx", dx, "[N, R]");
    return c.output("dq_weight", dq_weight, "stats [D]").output("dk_weight", dk_weight, "stats [D]");
  }
};

// Rotates query and key heads by position (rotate-half, Su et al. 2021; element j pairs with j + D/2); values are copied. Row p of table
// holds cos in the first D/2 columns and sin in the rest. positions lie in [0, P). y may be x. inverse rotates back, which is the gradient.
struct Rope {
  Tensor x, table, positions, y;
  HeadLayout layout;
  bool inverse;

  Contract contract() const {
    Contract c = layout.contract("rope");
    c.that(layout.head_dim % 2 == 0, "head_dim is ", layout.head_dim, ", but channels are rotated in pairs");
    c.input("x", x, "[N, R]").input("table", table, "fp32 [P, D]").input("positions", positions, "i32 [N]");
    return c.in_place("y", y, "[N, R]");
  }
};

// Returns the FLOPs of causal attention of a sequence, forward: 4 channels for each of the T^2 / 2 pairs of a query and a key that it sees,
// or of W T - W^2 / 2 with a window W below T. Backward counts twice as much. channels: those of all query heads.
inline double attention_flops(double channels, double length, double window) {
  const bool cut = window > 0.0 && window < length;
  return 2.0 * channels * (cut ? window * (2.0 * length - window) : length * length);
}

// Causal softmax attention, blocked as in FlashAttention-2 (Dao 2023), so memory is linear in T. lse is the log of the sum of exponentials
// of the scaled scores. Query head h reads key head h / (heads / kv_heads). Position i of a row attends to [segment_starts[i], i], or to
// [0, i] without segment_starts, and with a window only to the last `window` of these. Key blocks outside the mask cost nothing. sinks add
// one unscaled score without a value per query head: exp(sink) joins the sum of exponentials (gpt-oss).
struct AttentionForward {
  Tensor qkv, out, lse;
  int64_t batch;
  HeadLayout layout;
  double scale;
  Tensor segment_starts{};
  int64_t window = 0;
  Tensor sinks{};

  Contract contract() const {
    Contract c = layout.contract("attention", qkv, batch, segment_starts);
    c.input("sinks", sinks, "[H]?").output("out", out, "[N, Q]").output("lse", lse, "stats [B, H, T]");
    return c.that(window >= 0, "window is ", window);
  }
  double flops() const {
    const auto sequences = static_cast<double>(batch), tokens = static_cast<double>(out.dim(0));
    return batch == 0 ? 0.0 : sequences * attention_flops(static_cast<double>(out.dim(1)), tokens / sequences, static_cast<double>(window));
  }
};

struct AttentionBackward {  // without gradients of sinks; lse holds all that the others need of them
  Tensor qkv, out, lse, dout, dqkv;
  int64_t batch;
  HeadLayout layout;
  double scale;
  Tensor segment_starts{};
  int64_t window = 0;

  Contract contract() const {
    Contract c = layout.contract("attention backward", qkv, batch, segment_starts);
    c.input("out", out, "[N, Q]").input("lse", lse, "stats [B, H, T]").input("dout", dout, "[N, Q]");
    return c.output("dqkv", dqkv, "[N, R]").that(window >= 0, "window is ", window);
  }
  double flops() const {
    const auto sequences = static_cast<double>(batch), tokens = static_cast<double>(out.dim(0));
    const double forward = attention_flops(static_cast<double>(out.dim(1)), tokens / sequences, static_cast<double>(window));
    return batch == 0 ? 0.0 : 2.0 * sequences * forward;
  }
};

// dsinks (+)= -sum over rows of exp(sinks - lse) * (dout out), the gradient of a score without a value.
struct AttentionSinkGradient {
  Tensor sinks, out, lse, dout, dsinks;
  int64_t batch;
  HeadLayout layout;
  bool accumulate;

  Contract contract() const;
};

// One step of generation for rows qkv at positions first .. first + n - 1 of one sequence. Stores their keys and values into the cache;
// then each row attends to everything up to itself, or to the last `window` of that.
struct CachedAttention {
  Tensor qkv, keys, values, out;
  int64_t first;
  HeadLayout layout;
  double scale;
  int64_t window = 0;
  Tensor sinks{};

  Contract contract() const {
    Contract c = layout.contract("cached_attention");
    c.input("qkv", qkv, "[N, R]")
        .input("sinks", sinks, "[H]?")
        .output("keys", keys, "[P, K]")
        .output("values", values, "[P, K]")
        .output("out", out, "[N, Q]");
    const int64_t last = first + c.size('N') - 1;
    c.that(window >= 0, "window is ", window);
    return c.that(first >= 0 && last < c.size('P'), "positions ", first, " to ", last, " do not fit a cache of ", c.size('P'));
  }
};

// out = silu(gate) * up with x = gate | up (Shazeer 2020), times the row's weight where row_weights are given. With a limit it is the
// activation of gpt-oss: out = gate * sigmoid(1.702 gate) * (up + 1), with gate clamped from above at limit and up to [-limit, limit];
// clamped elements get no gradient.
struct SwiGluForward {
  Tensor x, out;
  Tensor row_weights{};
  double limit = 0.0;  // 0: none

  Contract contract() const {
    Contract c("swiglu");
    c.that(limit >= 0.0, "limit is ", limit);
    return c.input("x", x, "[N, 2C]").input("row_weights", row_weights, "stats [N]?").output("out", out, "[N, C]");
  }
};

struct SwiGluBackward {  // drow_weights present if and only if the forward had weights
  Tensor x, dy, dx;
  Tensor row_weights{}, drow_weights{};
  double limit = 0.0;

  Contract contract() const {
    Contract c("swiglu backward");
    c.that(limit >= 0.0, "limit is ", limit);
    c.input("x", x, "[N, 2C]").input("dy", dy, "[N, C]").output("dx", dx, "[N, 2C]");
    if (!row_weights.defined() && !drow_weights.defined()) return c;
    return c.input("row_weights", row_weights, "stats [N]").output("drow_weights", drow_weights, "stats [N]");
  }
};

enum class GeluForm { tanh, erf };

struct GeluForward {  // Hendrycks and Gimpel 2016; tanh: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
  Tensor x, out;
  GeluForm form;

  Contract contract() const { return Contract("gelu").input("x", x, "[...]").output("out", out, "[...]"); }
};

struct GeluBackward {
  Tensor x, dy, dx;
  GeluForm form;

  Contract contract() const { return Contract("gelu backward").input("x", x, "[...]").input("dy", dy, "[...]").output("dx", dx, "[...]"); }
};

// loss is log-sum-exp over the first `vocab` columns of logits minus the target's logit, and 0 where the target is negative. A target >=
// vocab throws. dlogits, if given, gets scale * (softmax - onehot), 0 in ignored rows and in columns >= vocab; it may be logits.
struct CrossEntropy {
  Tensor logits, targets, loss;
  int64_t vocab;
  double scale;
  Tensor dlogits{};

  Contract contract() const {
    Contract c("cross_entropy");
    c.input("logits", logits, "[N, V]").input("targets", targets, "i32 [N]").output("loss", loss, "stats [N]");
    c.in_place("dlogits", dlogits, "[N, V]?");
    return c.that(vocab > 0 && vocab <= c.size('V'), "vocab is ", vocab, ", the rows of logits have ", c.size('V'), " elements");
  }
};

// The first of two kernels that compute CrossEntropy of logits whose columns several ranks share. The columns here are [first, first + V)
// of the whole, of which only the first `vocab` of the whole take part in the softmax. Per row, sums gets log-sum-exp over the own columns,
// -Inf if there are none, and the target's logit if it is among them, else 0; both are 0 where the target is negative. A target >= vocab
// throws.
struct CrossEntropyShare {
  Tensor logits, targets, sums;
  int64_t first, vocab;

  Contract contract() const {
    Contract c("cross_entropy_share");
    c.input("logits", logits, "[N, V]").input("targets", targets, "i32 [N]").output("sums", sums, "stats [N, 2]");
    return c.that(first >= 0 && vocab > 0, "columns from ", first, " on of ", vocab);
  }
};

// The second kernel computes loss and dlogits as CrossEntropy does, from the sums of R ranks, combined in rank order. The loss has the same
// bits on all of them.
struct CrossEntropyOfShares {
  Tensor logits, targets, sums, loss;
  int64_t first, vocab;
  double scale;
  Tensor dlogits{};

  Contract contract() const {
    Contract c("cross_entropy_of_shares");
    c.input("logits", logits, "[N, V]").input("targets", targets, "i32 [N]").input("sums", sums, "stats [R, N, 2]");
    c.output("loss", loss, "stats [N]").in_place("dlogits", dlogits, "[N, V]?");
    return c.that(first >= 0 && vocab > 0, "columns from ", first, " on of ", vocab);
  }
};

// Knowledge distillation (Hinton et al. 2015, arXiv 1503.02531) by two kernels, for logits whose columns R >= 1 ranks share as those of
// CrossEntropyShare. With s = logits, t = teacher, p = softmax(t / temperature) and q = softmax(s / temperature), the loss of a row is
//   weight temperature^2 sum p (log p - log q) + (1 - weight) (log-sum-exp(s) - s[target]),
// and 0 where the target is negative. A NaN or Inf among the logits of a row, the teacher's included, makes its loss NaN or Inf.
//
// The first kernel gets, of the own columns: log-sum-exp of s / temperature, that of t / temperature, the sum of p (t - s) / temperature
// with p relative to these columns, log-sum-exp of s, and s[target] if it is among them, else 0. Without own columns the third is 0 and
// those of log-sum-exp are -Inf. All are 0 where the target is negative; a target >= vocab throws.
struct DistillationShare {
  static constexpr int64_t kSums = 5;

  Tensor logits, teacher, targets, sums;
  int64_t first, vocab;
  double temperature;

  Contract contract() const {
    Contract c("distillation_share");
    c.input("logits", logits, "[N, V]").input("teacher", teacher, "[N, V]").input("targets", targets, "i32 [N]");
    c.size('S', kSums).output("sums", sums, "stats [N, S]");
    c.that(temperature > 0.0, "temperature is ", temperature);
    return c.that(first >= 0 && vocab > 0, "columns from ", first, " on of ", vocab);
  }
};

// The second kernel combines the sums of the ranks in rank order. dlogits, if given, gets scale times the gradient of the loss,
//   weight temperature (q - p) + (1 - weight) (softmax(s) - onehot),
// which is 0 where s and t are the same and weight is 1, in ignored rows and in columns >= vocab; it may be logits or teacher.
struct DistillationOfShares {
  Tensor logits, teacher, targets, sums, loss;
  int64_t first, vocab;
  double temperature, weight, scale;
  Tensor dlogits{};

  Contract contract() const {
    Contract c("distillation_of_shares");
    c.input("logits", logits, "[N, V]").input("teacher", teacher, "[N, V]").input("targets", targets, "i32 [N]");
    c.size('S', DistillationShare::kSums).input("sums", sums, "stats [R, N, S]");
    c.output("loss", loss, "stats [N]").in_place("dlogits", dlogits, "[N, V]?");
    c.that(temperature > 0.0 && weight > 0.0 && weight <= 1.0, "temperature is ", temperature, ", weight is ", weight);
    return c.that(first >= 0 && vocab > 0, "columns from ", first, " on of ", vocab);
  }
};

// Mixture of experts. E = experts, K = top-k assignments of a token, S = sequences of one length, R = permuted tokens: one group of rows
// for each expert, each padded to whole multiples, then rows of no group.

enum class RouterScore { softmax, sigmoid };

// Decides which experts a token goes to and with which weights. A token's assignments are the K experts with the largest score (softmax or
// sigmoid of the logits) + bias, written in ascending order; ties go to the lowest index, and NaN ranks below everything. With groups, only
// experts of the groups_kept best groups are eligible; a group is ranked by the sum of its best K / groups_kept, at least one, of score +
// bias (DeepSeek-V3). The weights are the chosen scores; softmax_after_topk takes softmax over the chosen logits instead (Mixtral);
// renormalize divides by their sum (sigmoid: + 1e-20); then scale multiplies. A NaN among the logits of a token makes all of its weights
// NaN.
struct RoutingRule {
  int64_t top_k;
  RouterScore score;
  bool softmax_after_topk, renormalize;
  double scale;
  int64_t groups = 1, groups_kept = 1;
  bool forced = false;  // for benchmarks: assignment j of token n is expert (n K + j) mod E, whatever its score

  // Checks the rule for so many experts.
  Contract& check(Contract& c, int64_t experts) const;
};

// scores are softmax over all experts, or sigmoid. counts[s, e] are the assignments of expert e in sequence s. A token whose logits are all
// -Inf is padding: its experts are -1, its weights and scores are 0, and nothing counts it. Callers say so by the logits, so
// that kernels need no operand for it. A token of the data has such logits only if each of them overflows to -Inf, which takes router
// weights near the largest fp32: it then goes to no expert, and unlike NaN that does not reach the loss.
struct RouteForward {
  Tensor logits, experts, weights, scores, counts;
  RoutingRule rule;
  Tensor bias{};

  Contract contract() const;
};

// dlogits is the gradient of dweights and of three losses: balance * E / (K N^2) * sum_e n_e sum_t P_te with N tokens, n_e assignments of
// expert e and scores P, divided by their sum where they are sigmoids; sequence_balance * the same of each sequence, averaged; z * mean of
// log-sum-exp(logits)^2 (Switch Transformer, Fedus et al. 2021; ST-MoE, Zoph et al. 2022). Counts are constants. Padding (RouteForward)
// counts as no token, a sequence of padding alone as no sequence, and the gradient of its logits is 0.
struct RouteBackward {
  Tensor logits, scores, experts, counts, dweights, dlogits;
  RoutingRule rule;
  double balance, sequence_balance, z;

  Contract contract() const;
};

struct RouterLosses {  // out = these three losses, each with a factor of 1
  Tensor logits, scores, counts, out;
  RoutingRule rule;

  Contract contract() const;
};

// Returns the rows of a dispatch of so many assignments to so many experts: a whole multiple that no padding exceeds.
int64_t dispatch_rows(int64_t assignments, int64_t experts, int64_t multiple);

// Sorts assignments by expert, stably. Group e is rows [offsets[e], offsets[e + 1]), a whole multiple whose last rows are padding.
// assignments[r] = n K + j, or -1 in padding and behind the last group. rows[n, j] is the row of assignment j of token n, or -1 if it is to
// no expert (-1) or was dropped: an expert keeps its first `capacity` assignments in token order, or all if capacity is 0.
struct DispatchTable {
  Tensor experts, offsets, rows, assignments;
  int64_t multiple, capacity = 0;

  Contract contract() const;
};

// Lays out rows that arrive from other ranks for the experts of this one. counts[r, e] of rank r are for expert e; they arrive in the order
// of rank and expert. Group e is rows [offsets[e], offsets[e + 1]), those of rank 0, then of rank 1, and so on; those of each rank begin at
// source_offsets[e * ranks + r] (optional) and are a whole multiple whose last rows are padding. rows[a] is the row of arrival a;
// assignments[r] = a, or -1 in padding. The caller knows the counts: rows has as many elements as arrive, assignments as there are rows.
struct ArrivalTable {
  Tensor counts, offsets, rows, assignments;
  int64_t multiple;
  Tensor source_offsets{};

  Contract contract() const;
};

// out[r] = x[assignments[r] / per_row], or zeros (codes 0 with scale 0, whatever the range) where that is -1. Takes rowwise codes or
// values. With part.rows, x holds some rows of a table: assignments are ids of it, as in EmbeddingForward, and per_row is 1.
struct Permute {
  Value x, out;
  Tensor assignments;
  int64_t per_row;
  TableRows part{};

  Contract contract() const;
  int64_t bytes_moved() const;  // only the rows that out has are read
};

struct Unpermute {  // out[n] = sum over ascending j of x[rows[n, j]] without those that are -1, rounded once
  Tensor x, rows, out;

  Contract contract() const {
    return Contract("unpermute").input("x", x, "[R, C]").input("rows", rows, "i32 [N, K]").output("out", out, "[N, C]");
  }
};

// Facts of groups of rows for a library: with the bounds, the host may ask it for a GEMM of each group.
struct HostGroups {
  std::vector<int64_t> offsets;  // content of the tensor `offsets`; empty: only the device knows it
  int64_t usual_rows;            // rows of a group if all had as many; a device decides by it, not by the actual rows, how to multiply
};

// Returns how many rows belong to groups, the padding of each included, as far as the host can know; else all `rows`.
int64_t rows_of_groups(const Tensor& offsets, const HostGroups* host, int64_t rows);

// Multiplies each group of rows with its matrix of a grouped weight, G matrices viewed as one below the other: out[r] = a[r] * op(b_g),
// with b_g [I, O] or, transposed, [O, I]. Rows of no group become zeros. Operands are as in Gemm. A row's result does not depend on the
// number of other rows.
struct GroupedGemm {
  Operand a, b;
  Tensor out, offsets;
  std::shared_ptr<const HostGroups> host{};  // null: only the device knows offsets, and no library may multiply

  double flops() const {
    const auto rows = static_cast<double>(rows_of_groups(offsets, host.get(), out.dim(0)));
    return 2.0 * rows * static_cast<double>(out.dim(1)) * static_cast<double>(a.cols());
  }
  Contract contract() const;
};

// out_g (+)= transposed a_g * b_g for every group g, [A, B] each, viewed as one below the other; a group without rows gives zeros, or adds
// nothing. Operands are as in Gemm, codes columnwise; groups begin at whole blocks.
struct GroupedWeightGradient {
  Value a, b;
  Tensor out, offsets;
  bool accumulate;
  std::shared_ptr<const HostGroups> host{};  // null: only the device knows offsets, and no library may multiply

  double flops() const {
    const auto rows = static_cast<double>(rows_of_groups(offsets, host.get(), shape_of(a)[0]));
    return 2.0 * rows * static_cast<double>(shape_of(a)[1]) * static_cast<double>(shape_of(b)[1]);
  }
  Contract contract() const;
};

// Adds the biases of a grouped weight, [G * C]: out[r] = x[r] + bias_g in the rows of group g, times the row's weight where row_weights are
// given; rows of no group are copied. x are unrounded sums.
struct AddGroupedBias {
  Tensor x, bias, out, offsets;
  Tensor row_weights{};

  Contract contract() const;
};

// dbias_g (+)= the sum of dy[r] over the rows of group g, times their weights; a group without rows gives zeros, or adds nothing.
struct GroupedBiasGradient {
  Tensor dy, dbias, offsets;
  bool accumulate;
  Tensor row_weights{};

  Contract contract() const;
};

// out[r] = dy[r] . bias_g in the rows of group g and 0 in others: what the bias adds to the gradient of a row's weight.
struct GroupedBiasDot {
  Tensor dy, bias, out, offsets;

  Contract contract() const;
};

// Indexes the small fp32 tensor of values that change each step, so that a step can be replayed without new arguments.
enum class StepValue : int { lr, inverse_bias_correction1, inverse_bias_correction2, clip_factor, skip, count };

// Says which random bits round moments that are bf16: those of element number first + row * row_stride + column, where rows and columns are
// of an operand viewed as [rows, last dimension]. Neighbors in number draw together: word number % 4 of random_words({seed, moments}, what,
// number / 4) has the bits of the first moment in its lower half and of the second in its upper half. row_stride 0: rows are adjacent.
struct MomentRounding {
  uint64_t seed = 0;
  uint32_t what = 0;
  uint64_t first = 0;
  int64_t row_stride = 0;
};

// Returns the dtype that moments may have in a contract: bf16, or that of masters and gradients.
inline const char* moments_spec(const Tensor& moments) { return moments.dtype() == Dtype::bf16 ? "bf16 [...]" : "stats [...]"; }

// Updates with decoupled weight decay (Loshchilov and Hutter 2019) in one pass: g = grad * clip_factor; m, v updated; master -= lr *
// (m^/(sqrt(v^)+eps) + wd * master); value = master rounded, if given. step is indexed by StepValue. If skip != 0, master, m and v stay as
// they are. Moments of bf16 are rounded by `rounding` when they are stored; the update reads them before.
struct AdamW {
  Tensor master, m, v, grad, step;
  double beta1, beta2, eps, weight_decay;
  Tensor value{};
  MomentRounding rounding{};

  Contract contract() const {
    Contract c("adamw");
    c.output("master", master, "stats [...]")
        .output("m", m, moments_spec(m))
        .output("v", v, moments_spec(m))
        .input("grad", grad, "stats [...]");
    c.size('S', static_cast<int64_t>(StepValue::count)).input("step", step, "fp32 [S]");
    return c.output("value", value, "floating [...]?");
  }
  // Master and moments are read, too.
  int64_t bytes_moved() const {
    return 2 * (master.bytes() + m.bytes() + v.bytes()) + grad.bytes() + step.bytes() + (value.defined() ? value.bytes() : 0);
  }
};

// The three kernels of Muon (Jordan et al. 2024) beside GEMMs. g = grad * clip_factor; m = momentum * m + (1 - momentum) * g; out = m or,
// with Nesterov's momentum, (1 - momentum) * g + momentum * m, rounded. If skip != 0, m stays, and out is computed from it and the gradient
// all the same. A momentum of bf16 is rounded by `rounding` when it is stored; out reads it before.
struct MuonMomentum {
  Tensor m, grad, step, out;
  double momentum;
  bool nesterov;
  MomentRounding rounding{};

  Contract contract() const {
    Contract c("muon_momentum");
    c.input("grad", grad, "stats [...]").output("m", m, moments_spec(m));
    c.size('S', static_cast<int64_t>(StepValue::count)).input("step", step, "fp32 [S]");
    return c.output("out", out, "floating [...]");
  }
  int64_t bytes_moved() const { return 2 * m.bytes() + grad.bytes() + step.bytes() + out.bytes(); }
};

struct DivideByNorm {  // out = x / max(sqrt(sum of partials in order), 1e-7), with partials of SquaredNorm; out may be x
  Tensor x, partials, out;

  Contract contract() const {
    Contract c("divide_by_norm");
    c.input("x", x, "[N, ...]").size('P', ceil_div(c.size('N'), 32)).input("partials", partials, "fp64 [P]");
    return c.in_place("out", out, "[N, ...]");
  }
};

// gram = a I + b gram + c square. A step of Newton-Schulz multiplies by it: gram = x x^T, and square, unrounded, is gram gram.
struct NewtonSchulzPolynomial {
  Tensor gram, square;
  double a, b, c;

  Contract contract() const {
    return Contract("newton_schulz_polynomial").output("gram", gram, "[N, N]").input("square", square, "stats [N, N]");
  }
  int64_t bytes_moved() const { return 2 * gram.bytes() + square.bytes(); }
};

// master -= lr * (scale * direction + weight_decay * master); value = master rounded, if given. If skip != 0, master stays as it is.
struct MuonUpdate {
  Tensor master, direction, step;
  double scale, weight_decay;
  Tensor value{};

  Contract contract() const {
    Contract c("muon_update");
    c.output("master", master, "stats [...]").input("direction", direction, "floating [...]");
    c.size('S', static_cast<int64_t>(StepValue::count)).input("step", step, "fp32 [S]");
    return c.output("value", value, "floating [...]?");
  }
  int64_t bytes_moved() const { return 2 * master.bytes() + direction.bytes() + step.bytes() + (value.defined() ? value.bytes() : 0); }
};

// Indexes the outcome of a step's gradients, in fp64. bad_weights: a flag was set.
enum class StepOutcome : int { loss, gradient_norm, bad_weights, skip, count };

// Ends the backward passes of a step. partials are the SquaredNorm of all gradients, losses those of the micro batches, flags
// Quantize::nonfinite. loss is the sum of losses, in order or, where `pairwise` (their number is a power of two), of neighbors, then of
// pairs of them; gradient_norm is the root of the sum of partials in order. The step is to be skipped if a flag is set or one of the two is
// not finite. Writes outcome, indexed by StepOutcome, and clip_factor and skip of step, indexed by StepValue; clip_factor is min(1, clip /
// (norm + 1e-6)) as in torch's clip_grad_norm_, or 1 for clip 0.
struct FinishGradients {
  Tensor partials, losses, flags, step, outcome;
  double clip;
  bool pairwise;

  Contract contract() const {
    Contract c("finish_gradients");
    c.size('S', static_cast<int64_t>(StepValue::count)).size('O', static_cast<int64_t>(StepOutcome::count));
    c.input("partials", partials, "fp64 [P]").input("losses", losses, "fp64 [L]").input("flags", flags, "i32 [F]");
    c.output("step", step, "fp32 [S]").output("outcome", outcome, "fp64 [O]");
    const bool tree = std::has_single_bit(static_cast<uint64_t>(c.size('L')));
    return c.that(!pairwise || tree, "pairs need a power of two of losses, got ", c.size('L'));
  }
};

struct Sum {  // out = factor * sum of all elements of x, in order, in fp64
  Tensor x, out;
  double factor;

  Contract contract() const { return Contract("sum").input("x", x, "stats [...]").output("out", out, "fp64 [1]"); }
};

// partials[i] = sum of squares of rows [32 i, 32 i + 32) of x viewed as [N, rest], in fp64; it is finite if and only if all of them are.
struct SquaredNorm {
  Tensor x, partials;

  Contract contract() const {
    Contract c("squared_norm");
    c.input("x", x, "[N, ...]");
    return c.size('P', ceil_div(c.size('N'), 32)).output("partials", partials, "fp64 [P]");
  }
};

// Lists every kernel: Backend declares them, a complete backend overrides them, and tests must cover them.
#define MANTISSA_KERNELS(DECLARE) \
  DECLARE(Fill)                   \
  DECLARE(Convert)                \
  DECLARE(RandomNormal)           \
  DECLARE(Add)                    \
  DECLARE(TreeSum)                \
  DECLARE(AddBias)                \
  DECLARE(Gemm)                   \
  DECLARE(Quantize)               \
  DECLARE(Dequantize)             \
  DECLARE(FakeQuantize)           \
  DECLARE(RequantizeColumns)      \
  DECLARE(SwizzleScales)          \
  DECLARE(QuantizationError)      \
  DECLARE(Simulate)               \
  DECLARE(SumCounts)              \
  DECLARE(SumRows)                \
  DECLARE(EmbeddingForward)       \
  DECLARE(EmbeddingBackward)      \
  DECLARE(RmsNormForward)         \
  DECLARE(RmsNormBackward)        \
  DECLARE(LayerNormForward)       \
  DECLARE(LayerNormBackward)      \
  DECLARE(QkNormForward)          \
  DECLARE(QkNormBackward)         \
  DECLARE(Rope)                   \
  DECLARE(AttentionForward)       \
  DECLARE(AttentionBackward)      \
  DECLARE(AttentionSinkGradient)  \
  DECLARE(CachedAttention)        \
  DECLARE(SwiGluForward)          \
  DECLARE(SwiGluBackward)         \
  DECLARE(GeluForward)            \
  DECLARE(GeluBackward)           \
  DECLARE(CrossEntropy)           \
  DECLARE(CrossEntropyShare)      \
  DECLARE(CrossEntropyOfShares)   \
  DECLARE(DistillationShare)      \
  DECLARE(DistillationOfShares)   \
  DECLARE(RouteForward)           \
  DECLARE(RouteBackward)          \
  DECLARE(RouterLosses)           \
  DECLARE(DispatchTable)          \
  DECLARE(ArrivalTable)           \
  DECLARE(Permute)                \
  DECLARE(Unpermute)              \
  DECLARE(GroupedGemm)            \
  DECLARE(GroupedWeightGradient)  \
  DECLARE(AddGroupedBias)         \
  DECLARE(GroupedBiasGradient)    \
  DECLARE(GroupedBiasDot)         \
  DECLARE(AdamW)                  \
  DECLARE(MuonMomentum)           \
  DECLARE(DivideByNorm)           \
  DECLARE(NewtonSchulzPolynomial) \
  DECLARE(MuonUpdate)             \
  DECLARE(FinishGradients)        \
  DECLARE(Sum)                    \
  DECLARE(SquaredNorm)

// Counts bytes and calls of the caching allocator; the system is where its memory comes from.
struct AllocatorStats {
  int64_t in_use = 0, peak_in_use = 0;  // handed out now, at most so far
  int64_t reserved = 0;                 // held from the system
  int64_t system_calls = 0;             // requests that went to the system
};

// The names of the kernels that a backend was last asked for, for reports. Any thread may read it.
class KernelLog {
 public:
  void add(const char* kernel) {  // a literal
    latest_[asked_.fetch_add(1, std::memory_order_relaxed) % latest_.size()].store(kernel, std::memory_order_relaxed);
  }
  std::vector<std::string> latest() const;  // oldest first

 private:
  std::array<std::atomic<const char*>, 8> latest_{};
  std::atomic<uint32_t> asked_{0};
};

// A device that may work later than it is asked to. Kernels, copies and memory that a thread asks for belong to its lane (LaneScope) and
// are done in order within it; marks order the lanes of one device, and those of several in one process. A CPU has one lane: each call is
// done when it returns, and marks are null.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;  // as training.device names it
  // Returns 64-byte aligned, uninitialized memory of this thread's lane, which goes back to the cache of that lane when the last handle is
  // gone: what the lane was asked for until then may still use it. Another lane may use it as far as marks order its use. Throws
  // Error(environment) with the size on exhaustion.
  virtual std::shared_ptr<std::byte> allocate(int64_t bytes) = 0;
  virtual AllocatorStats allocator_stats() const = 0;
  // Returns whether tensors lie in host memory. If they do not, only kernels, upload() and download() may touch them.
  virtual bool host_memory() const = 0;
  // Copy all bytes of a tensor from and to host memory, in this thread's lane. When upload() returns, `from` may be reused, whether or not
  // the copy is complete; when download() returns, its copy is complete. download() and synchronize() wait, and look at the interrupt.
  virtual void upload(const void* from, const Tensor& to) = 0;
  virtual void download(const Tensor& from, void* to) = 0;
  // Asks for a copy of what the lane has put there so far, and returns what waits for it, as download() does: a few bytes, before other
  // work.
  virtual std::function<void(void* to)> begin_download(const Tensor& from);
  virtual void synchronize() = 0;  // returns when everything that all lanes were asked for so far has ended

  // A point in a lane, after all that it was asked for until then. Null: reached.
  using Mark = std::shared_ptr<const void>;
  virtual Mark mark() { return {}; }  // in this thread's lane
  // Lets work that this thread's lane is asked for from now on begin after the mark, which may be one of another device of the same kind.
  virtual void follow(const Mark&) {}
  virtual bool reached(const Mark&) const { return true; }
  // Returns the time between two marks that are reached. Marks that are null have none: 0.
  virtual double seconds(const Mark& from, const Mark& to) const {
    static_cast<void>(from), static_cast<void>(to);
    return 0.0;
  }
  // Every wait for the device calls `look` at least every 20 ms; it throws to end the wait.
  void set_interrupt(std::function<void()> look) { interrupt_ = std::move(look); }

  // Says how GEMMs are routed (gemm_path.h), and how many took which path.
  virtual GemmDevice gemm_device() const { return {}; }
  virtual GemmCounts gemm_counts() const { return {}; }
  // Says whether codes may be multiplied as codes from now on, where the device can, or always as the values that they stand for. A model
  // says it when it is made, so of several on a device the last decides.
  virtual void allow_native_gemms(bool) {}
  // Says likewise whether a library may multiply groups of rows whose sizes only the device knows.
  virtual void allow_grouped_gemms(bool) {}
  // Says likewise who computes attention. Throws Error(environment) where this build or this host has no cuDNN and it is asked for.
  virtual void choose_attention(AttentionBy by) { attention_by_ = by; }
  virtual AttentionDevice attention_device() const { return {.by = attention_by_}; }

  // Counts the GEMMs that ran in fp32 because an operand held extreme scale codes, where others run in bf16. A GPU counts them itself, a
  // grouped one as one; this returns its count as of the latest wait of the host.
  virtual int64_t fp32_gemms() const { return 0; }
  // Measures whether bits of GEMMs depend on the position of a row or column of an operand or on zeros behind the depth: "fp32, rows: 40 of
  // 64 differ". Returns "" on every machine where a token has the same bits whichever tokens are beside it and whichever rank computes it.
  virtual std::string unequal_places() const { return ""; }

  // Returns whether values may be fp64. Sums that a contract declares fp64 are fp64 on every backend.
  virtual bool computes_fp64() const = 0;

  // Throws Error(internal) with the kernel's and the operand's name if the contract is broken, before anything is written.
  template <class Kernel>
  void run(const Kernel& k) {
    const Contract contract = k.contract();
    if (!computes_fp64()) contract.refuse_fp64(name());
    const TraceSpan span(Track::kernel, contract.kernel());
    log_->add(contract.kernel());
    execute(k);
    RecordedSpan* const traced = span.ended();
    if (traced == nullptr) return;
    traced->bytes = bytes_moved(k, contract);
    traced->operands = contract.text_of_operands();
    if constexpr (requires { k.flops(); }) traced->flops = k.flops();
  }
  // Runs kernels of one kind that share no output, in any order; a device may run them as one.
  template <class Kernel>
  void run_all(std::span<const Kernel> all) {
    if (all.empty()) return;
    const TraceSpan span(Track::kernel, all.front().contract().kernel());
    int64_t bytes = 0;
    for (const Kernel& k : all) {
      const Contract contract = k.contract();
      if (!computes_fp64()) contract.refuse_fp64(name());
      bytes += bytes_moved(k, contract);
    }
    log_->add(all.front().contract().kernel());
    execute_all(all);
    if (RecordedSpan* const traced = span.ended()) traced->bytes = bytes;
  }
  std::shared_ptr<const KernelLog> kernel_log() const { return log_; }  // names of the latest kernels of run()

 protected:
#define MANTISSA_EXECUTE(Kernel) virtual void execute(const Kernel& k) = 0;
  MANTISSA_KERNELS(MANTISSA_EXECUTE)
#undef MANTISSA_EXECUTE
  virtual void execute_all(std::span<const AdamW> all) {
    for (const AdamW& k : all) execute(k);
  }
  virtual void execute_all(std::span<const SquaredNorm> all) {
    for (const SquaredNorm& k : all) execute(k);
  }

  void heed_interrupt() const {  // throws if the wait is to end
    if (interrupt_) interrupt_();
  }

 private:
  std::function<void()> interrupt_;
  AttentionBy attention_by_ = AttentionBy::own;
  std::shared_ptr<KernelLog> log_ = std::make_shared<KernelLog>();
};

// "cpu" has fast paths over the reference; "cpu_reference" has plain fixed-order kernels only, also in fp64. One instance may serve calls
// of many threads one after the other; it must outlive its tensors. Throws Error(environment) for a backend that this build lacks.
std::unique_ptr<Backend> make_backend(const std::string& name);

}  // namespace mantissa
