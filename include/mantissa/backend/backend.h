// The table of contents of all mathematics: one struct of named operands per kernel, which run() takes. Callers see only Backend&.
//
// Conventions. Shapes stand at the operands; N = rows (tokens), C = channels, V = vocabulary. Matrices are row-major. "Values" (x, y,
// weight, dy, dx) share one dtype: fp32 or bf16, and on the reference backend also fp64. Statistics, losses and parameter gradients
// ("stats") are fp32, or fp64 where the values are fp64. Sums have a fixed order that depends on the shapes only. Every kernel checks its
// shapes and dtypes and throws Error(internal) that names the kernel. Outputs may not overlap inputs unless a line says so. `accumulate`:
// add to the output instead of overwriting it. Optional operands, and only those, have a default initialiser.
#pragma once

#include <cstdint>
#include <memory>

#include "mantissa/base/rng.h"
#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

struct Fill {  // out[...] = value
  Tensor out;
  double value;
};

struct Convert {  // out = x rounded to the dtype of out (RNE); the same dtype is a copy
  Tensor x, out;
};

// out = std * random_normal(key, what, index), with the index that an element of out has in the whole of which out is a box: out[0] has
// first_index; with out as [rows, last dimension], each row begins row_stride after the one before it, or, where that is 0, at its end.
struct RandomNormal {
  Tensor out;
  RngKey key;
  uint32_t what;
  int64_t first_index;
  double std;
  int64_t row_stride = 0;
};

struct Add {  // out = a + b; out may be a or b
  Tensor a, b, out;
};

struct Operand {  // a matrix, read transposed where the flag says so
  Value value;
  bool transposed = false;

  const QuantizedTensor* quantized() const { return std::get_if<QuantizedTensor>(&value); }
  const Tensor& dense() const { return std::get<Tensor>(value); }
  int64_t rows() const { return shape_of(value)[transposed ? 1 : 0]; }  // of op(value)
  int64_t cols() const { return shape_of(value)[transposed ? 0 : 1]; }
};

// out [M, N] (+)= op(a) [M, K] * op(b) [K, N] + bias [N]. High-precision operands share a dtype; out has it too, or is stats. fp32
// accumulation (fp64 for fp64). The only way to multiply matrices.
//
// A quantised operand stands for its dequantised values. It is dequantised to the dtype of the other operand (bf16 if both are quantised),
// which is exact in bf16 unless a non-zero block has an extreme scale code (see extreme_scale()): then the product runs in fp32. With two
// quantised operands out is bf16 or fp32, with an accumulated sum always stats.
struct Gemm {
  Operand a, b;
  Tensor out;
  bool accumulate;
  Tensor bias{};
};

// Element codes and scales of x [M, C], fp32 or bf16 (flashinfer: bf16 only). Rows of `out` beyond M count as zeros: M is rounded up to
// whole blocks so that any number of tokens can be quantised. `second`: the same x in the other orientation, in the same pass. nonfinite
// [1] i32: set to 1 if x holds a NaN or Inf, else left alone. The bits given are quantised: who holds fp32 and wants what bf16 gives rounds
// first.
struct Quantize {
  Tensor x;
  QuantizedTensor out;
  QuantizedTensor second{};
  Tensor nonfinite{};
};

// out [R, C] (fp32 or bf16) = element * 2^(scale - 127), rounded once; a scale of 255 gives NaN, and -0 under flashinfer gives +0.
// extreme [1] i32: set to 1 if a block with an extreme scale code holds a non-zero element, else left alone. A narrower out takes whole
// blocks of columns from first_col on.
struct Dequantize {
  QuantizedTensor x;
  Tensor out;
  int64_t first_col = 0;
  Tensor extreme{};
};

// out = Dequantize(Quantize(x)) without the codes. x and out share dtype (fp32 or bf16) and shape [R, C].
struct FakeQuantize {
  Tensor x, out;
  Quantization how;
};

// Columnwise codes from rowwise ones by exponent shift: the bits of quantising the fp32 dequantised values of x columnwise, with its format
// and rule. x 1 x b, out b x 1.
struct RequantizeColumns {
  QuantizedTensor x, out;
};

// Scales in the 128 x 4 layout of cuBLASLt and tcgen05, padding written as 0. Rowwise: outer = rows, inner = blocks of a row; columnwise:
// the transposed scales. out u8 [swizzled_bytes(x)].
struct SwizzleScales {
  QuantizedTensor x;
  Tensor out;
};

// How far codes q are from the values x [M, C] (fp32 or bf16) that they stand for. M is rounded up to whole blocks as in Quantize; elements
// beyond M do not count. out [Part::size] fp64: sums of x^2 and (x - q)^2; elements beyond the largest code of their block, and such that
// are not zero but are coded as zero; the largest |x|; from Part::scales on how many blocks have scale code 0, 1, .. 255. A NaN in x makes
// the sums and the largest NaN.
struct QuantizationError {
  enum Part : int64_t { signal, noise, clipped, flushed, amax, scales, size = scales + 256 };
  Tensor x;
  QuantizedTensor q;
  Tensor out;
};

struct SumRows {  // out [C] (stats) (+)= sum over rows of x [N, C]
  Tensor x, out;
  bool accumulate;
};

struct EmbeddingForward {  // out [N, C] = weight [V, C][ids [N]]; an id outside [0, V) throws
  Tensor ids, weight, out;
};

struct EmbeddingBackward {  // dweight [V, C] (stats) (+)= rows of dy [N, C] summed by id, in row order
  Tensor ids, dy, dweight;
  bool accumulate;
};

// y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019). x, y [N, C]; weight [C]; rstd [N] stats.
struct RmsNormForward {
  Tensor x, weight, y, rstd;
  double eps;
};

struct RmsNormBackward {  // dx [N, C]; dweight [C] stats
  Tensor x, weight, rstd, dy, dx, dweight;
  bool accumulate;  // applies to dweight
};

// y = (x - mean) * rstd * weight + bias, biased variance (Ba et al. 2016). mean, rstd [N] stats; bias [C] optional.
struct LayerNormForward {
  Tensor x, weight, y, mean, rstd;
  double eps;
  Tensor bias{};
};

struct LayerNormBackward {  // dbias present if and only if the forward had a bias
  Tensor x, weight, mean, rstd, dy, dx, dweight;
  bool accumulate;  // applies to dweight and dbias
  Tensor dbias{};
};

// How a row of packed q|k|v is laid out: heads * head_dim query channels, then kv_heads * head_dim keys, then as many values.
struct HeadLayout {
  int64_t heads, kv_heads, head_dim;
  int64_t row() const { return (heads + 2 * kv_heads) * head_dim; }
};

// RMS norm of every query head with q_weight [D] and every key head with k_weight [D]; values are copied. x, y [N, layout.row()];
// rstd [N, heads + kv_heads] stats.
struct QkNormForward {
  Tensor x, q_weight, k_weight, y, rstd;
  HeadLayout layout;
  double eps;
};

struct QkNormBackward {
  Tensor x, q_weight, k_weight, rstd, dy, dx, dq_weight, dk_weight;
  HeadLayout layout;
  bool accumulate;  // applies to dq_weight and dk_weight
};

// Rotary position embedding, rotate-half (Su et al. 2021; element j pairs with j + D/2), of query and key heads; values are copied.
// table [P, D] fp32: cos in the first D/2 columns, sin in the rest, row = position. positions [N] i32 in [0, P). inverse: rotates back,
// which is the gradient. x, y [N, layout.row()].
struct Rope {
  Tensor x, table, positions, y;
  HeadLayout layout;
  bool inverse;
};

// Causal softmax attention (blocked as in FlashAttention-2, Dao 2023: memory linear in T). qkv [B*T, layout.row()], out [B*T, heads * D],
// lse [B, heads, T] stats: log of the sum of exponentials of the scaled scores. Query head h reads key head h / (heads / kv_heads).
// segment_starts [B*T] i32: position i of a row attends to [segment_starts[i], i]; absent: to [0, i].
struct AttentionForward {
  Tensor qkv, out, lse;
  int64_t batch;
  HeadLayout layout;
  double scale;
  Tensor segment_starts{};
};

struct AttentionBackward {
  Tensor qkv, out, lse, dout, dqkv;
  int64_t batch;
  HeadLayout layout;
  double scale;
  Tensor segment_starts{};
};

// One step of generation: rows qkv [n, layout.row()] at positions first .. first + n - 1 of one sequence. Their keys and values are stored
// into keys, values [P, kv_heads * D], then each row attends to everything up to itself. out [n, heads * D].
struct CachedAttention {
  Tensor qkv, keys, values, out;
  int64_t first;
  HeadLayout layout;
  double scale;
};

struct SwiGluForward {  // out [N, I] = silu(gate) * up, x [N, 2I] = gate | up (Shazeer 2020)
  Tensor x, out;
};

struct SwiGluBackward {
  Tensor x, dy, dx;
};

enum class GeluForm { tanh, erf };

struct GeluForward {  // Hendrycks and Gimpel 2016; tanh: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
  Tensor x, out;
  GeluForm form;
};

struct GeluBackward {
  Tensor x, dy, dx;
  GeluForm form;
};

// loss [N] stats: log-sum-exp over the first `vocab` columns of logits [N, Vp] minus the target's logit; 0 where targets [N] i32 is
// negative. A target >= vocab throws. dlogits, where given, = scale * (softmax - onehot), 0 in ignored rows and in columns >= vocab; it may
// be logits.
struct CrossEntropy {
  Tensor logits, targets, loss;
  int64_t vocab;
  double scale;
  Tensor dlogits{};
};

// Index into the small fp32 tensor that holds what changes each step, so that a step can be replayed without new arguments.
enum class StepValue : int { lr, inverse_bias_correction1, inverse_bias_correction2, clip_factor, skip, count };

// Decoupled weight decay (Loshchilov and Hutter 2019), one pass: g = grad * clip_factor; m, v updated; master -= lr * (m^/(sqrt(v^)+eps) +
// wd * master); value = master rounded, if given. All but value are stats, of one shape. step [StepValue::count] fp32. skip != 0: master,
// m and v stay as they are.
struct AdamW {
  Tensor master, m, v, grad, step;
  double beta1, beta2, eps, weight_decay;
  Tensor value{};
};

// What the gradients of a step amount to, in fp64. bad_weights: a flag was set.
enum class StepOutcome : int { loss, gradient_norm, bad_weights, skip, count };

// Ends the backward passes of a step. partials [P] fp64: SquaredNorm of all gradients; losses [L] fp64: of the micro batches; flags [F]
// i32: Quantize::nonfinite. loss = sum of losses, in order or, where `pairwise` (L a power of two), of neighbours, then of pairs of them;
// gradient_norm = root of the sum of partials in order. The step is to be skipped if a flag is set or one of the two is not finite. Writes
// outcome [StepOutcome::count] fp64 and of step [StepValue::count] fp32 clip_factor, min(1, clip / (norm + 1e-6)) as torch's
// clip_grad_norm_ or 1 for clip 0, and skip.
struct FinishGradients {
  Tensor partials, losses, flags, step, outcome;
  double clip;
  bool pairwise;
};

struct Sum {  // out [1] (fp64) = factor * sum of all elements of x (stats), in order, in fp64
  Tensor x, out;
  double factor;
};

// partials[i] (fp64) = sum of squares of rows [32 i, 32 i + 32) of x viewed as [dim 0, rest]; not finite if and only if a row element is
// not.
struct SquaredNorm {
  Tensor x, partials;
};

// The caching allocator's own counters, in bytes and calls; the system is where its memory comes from.
struct AllocatorStats {
  int64_t in_use = 0, peak_in_use = 0;  // handed out now, at most so far
  int64_t reserved = 0;                 // held from the system
  int64_t system_calls = 0;             // requests that went to the system
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;  // as training.device names it
  // 64-byte aligned, not initialised; goes back to the cache when the last handle is gone. Throws Error(internal) with the size on
  // exhaustion.
  virtual std::shared_ptr<std::byte> allocate(int64_t bytes) = 0;
  virtual AllocatorStats allocator_stats() const = 0;
  // Whether tensors lie in memory of the host. If they do not, only kernels, upload() and download() may touch them.
  virtual bool host_memory() const = 0;
  // All bytes of a tensor, from and to memory of the host. Both run after the kernels before them, and are done when they return.
  virtual void upload(const void* from, const Tensor& to) = 0;
  virtual void download(const Tensor& from, void* to) = 0;
  // How many products ran in fp32 so far because an operand held extreme scale codes, where others run in bf16.
  virtual int64_t fp32_products() const { return 0; }

  template <class Kernel>
  void run(const Kernel& k) {
    execute(k);
  }

 protected:
  virtual void execute(const Fill&) = 0;
  virtual void execute(const Convert&) = 0;
  virtual void execute(const RandomNormal&) = 0;
  virtual void execute(const Add&) = 0;
  virtual void execute(const Gemm&) = 0;
  virtual void execute(const Quantize&) = 0;
  virtual void execute(const Dequantize&) = 0;
  virtual void execute(const FakeQuantize&) = 0;
  virtual void execute(const RequantizeColumns&) = 0;
  virtual void execute(const SwizzleScales&) = 0;
  virtual void execute(const QuantizationError&) = 0;
  virtual void execute(const SumRows&) = 0;
  virtual void execute(const EmbeddingForward&) = 0;
  virtual void execute(const EmbeddingBackward&) = 0;
  virtual void execute(const RmsNormForward&) = 0;
  virtual void execute(const RmsNormBackward&) = 0;
  virtual void execute(const LayerNormForward&) = 0;
  virtual void execute(const LayerNormBackward&) = 0;
  virtual void execute(const QkNormForward&) = 0;
  virtual void execute(const QkNormBackward&) = 0;
  virtual void execute(const Rope&) = 0;
  virtual void execute(const AttentionForward&) = 0;
  virtual void execute(const AttentionBackward&) = 0;
  virtual void execute(const CachedAttention&) = 0;
  virtual void execute(const SwiGluForward&) = 0;
  virtual void execute(const SwiGluBackward&) = 0;
  virtual void execute(const GeluForward&) = 0;
  virtual void execute(const GeluBackward&) = 0;
  virtual void execute(const CrossEntropy&) = 0;
  virtual void execute(const AdamW&) = 0;
  virtual void execute(const FinishGradients&) = 0;
  virtual void execute(const Sum&) = 0;
  virtual void execute(const SquaredNorm&) = 0;
};

// "cpu": fast paths over the reference. "cpu_reference": plain fixed-order kernels only, also in fp64. One instance each may serve many
// threads' calls one after the other; it must outlive its tensors.
std::unique_ptr<Backend> make_cpu_backend();
std::unique_ptr<Backend> make_cpu_reference();

}  // namespace mantissa
