#include "mantissa/base/integers.h"
#include "mantissa/formats/swizzle.h"
#include "tools/bench/bench_operands.h"

namespace mantissa::tools {
namespace {

constexpr int64_t kRows = 16384, kWidth = 768, kFeedForward = 3072, kVocab = 50304, kHeadDim = 64;
constexpr int64_t kUnpadded = 50257;  // tokens of GPT-2; model.pad_vocab_to pads a row of logits to kVocab

using Kernels = std::vector<Workload>;

void add_norms(Kernels& out, Backend& device, Dtype dtype) {
  BenchOperands o(device, dtype);
  const Tensor x = o.values({kRows, kWidth}), w = o.values({kWidth}), y = o.values({kRows, kWidth}), dx = o.values({kRows, kWidth});
  const Tensor mean = o.stats({kRows}), rstd = o.stats({kRows}), dw = o.stats({kWidth}), db = o.stats({kWidth});
  const auto add = [&](const char* name, const auto& k) { out.push_back(o.workload(name, text(kRows, "x", kWidth), k)); };
  add("kernel.add", Add{.a = x, .b = y, .out = dx});
  const Tensor eight = o.stats({8, kRows / 8 * kWidth});
  add("kernel.tree_sum", TreeSum{.own = eight.slice(0, 1).view({eight.dim(1)}), .others = eight.slice(1, 8), .place = 3});
  add("kernel.rms_norm_forward", RmsNormForward{.x = x, .weight = w, .y = y, .rstd = rstd, .eps = 1e-6});
  add("kernel.rms_norm_backward", RmsNormBackward{.x = x, .weight = w, .rstd = rstd, .dy = y, .dx = dx, .dweight = dw, .accumulate = true});
  add("kernel.layer_norm_forward", LayerNormForward{.x = x, .weight = w, .y = y, .mean = mean, .rstd = rstd, .eps = 1e-5, .bias = w});
  add("kernel.layer_norm_backward",
      LayerNormBackward{
          .x = x, .weight = w, .mean = mean, .rstd = rstd, .dy = y, .dx = dx, .dweight = dw, .accumulate = true, .dbias = db});
  const Tensor sums = o.stats({kRows, kWidth});
  add("kernel.add_bias", AddBias{.x = sums, .bias = w, .out = y});
  add("kernel.sum_rows", SumRows{.x = x, .out = dw, .accumulate = true});
}

void add_activations(Kernels& out, Backend& device, Dtype dtype) {
  BenchOperands o(device, dtype);
  const int64_t rows = kRows / 2;
  const Tensor x = o.values({rows, kFeedForward}), y = o.values({rows, kFeedForward}), dx = o.values({rows, kFeedForward});
  const Tensor gated = o.values({rows, 2 * kFeedForward}), dgated = o.values({rows, 2 * kFeedForward});
  const auto add = [&](const char* name, const auto& k) { out.push_back(o.workload(name, text(rows, "x", kFeedForward), k)); };
  add("kernel.gelu_tanh_forward", GeluForward{.x = x, .out = y, .form = GeluForm::tanh});
  add("kernel.gelu_tanh_backward", GeluBackward{.x = x, .dy = y, .dx = dx, .form = GeluForm::tanh});
  add("kernel.gelu_erf_forward", GeluForward{.x = x, .out = y, .form = GeluForm::erf});
  add("kernel.gelu_erf_backward", GeluBackward{.x = x, .dy = y, .dx = dx, .form = GeluForm::erf});
  add("kernel.swiglu_forward", SwiGluForward{.x = gated, .out = y});
  add("kernel.swiglu_backward", SwiGluBackward{.x = gated, .dy = y, .dx = dgated});
}

void add_heads(Kernels& out, Backend& device, Dtype dtype) {
  BenchOperands o(device, dtype);
  const HeadLayout layout{.heads = 12, .kv_heads = 4, .head_dim = kHeadDim};
  const Tensor x = o.values({kRows, layout.row()}), y = o.values({kRows, layout.row()}), dx = o.values({kRows, layout.row()});
  const Tensor q = o.values({kHeadDim}), k = o.values({kHeadDim}), dq = o.stats({kHeadDim}), dk = o.stats({kHeadDim});
  const Tensor rstd = o.stats({kRows, layout.heads + layout.kv_heads}), table = o.stats({1024, kHeadDim}), positions = o.ids(kRows, 1024);
  const auto add = [&](const char* name, const auto& kernel) { out.push_back(o.workload(name, text(kRows, "x", layout.row()), kernel)); };
  add("kernel.rope", Rope{.x = x, .table = table, .positions = positions, .y = y, .layout = layout, .inverse = false});
  add("kernel.qk_norm_forward", QkNormForward{.x = x, .q_weight = q, .k_weight = k, .y = y, .rstd = rstd, .layout = layout, .eps = 1e-6});
  add("kernel.qk_norm_backward", QkNormBackward{.x = x,
                                                .q_weight = q,
                                                .k_weight = k,
                                                .rstd = rstd,
                                                .dy = y,
                                                .dx = dx,
                                                .dq_weight = dq,
                                                .dk_weight = dk,
                                                .layout = layout,
                                                .accumulate = true});
}

void add_vocabulary(Kernels& out, Backend& device, Dtype dtype) {
  BenchOperands o(device, dtype);
  const int64_t rows = 512;
  const Tensor logits = o.values({rows, kVocab}), targets = o.ids(rows, kUnpadded), loss = o.stats({rows});
  const CrossEntropy in_place{.logits = logits, .targets = targets, .loss = loss, .vocab = kUnpadded, .scale = 1e-3, .dlogits = logits};
  out.push_back(o.workload("kernel.cross_entropy", text(rows, "x", kVocab), in_place));
  const Tensor share = o.stats({rows, 2}), shares = o.stats({2, rows, 2});
  out.push_back(o.workload("kernel.cross_entropy_share", text(rows, "x", kVocab),
                           CrossEntropyShare{.logits = logits, .targets = targets, .sums = share, .first = 0, .vocab = kUnpadded}));
  const CrossEntropyOfShares of_shares{
      .logits = logits, .targets = targets, .sums = shares, .loss = loss, .first = 0, .vocab = kUnpadded, .scale = 1e-3, .dlogits = logits};
  out.push_back(o.workload("kernel.cross_entropy_of_shares", text(rows, "x", kVocab), of_shares));
  const Tensor teacher = o.values({rows, kVocab}), taught = o.stats({1, rows, DistillationShare::kSums});
  out.push_back(o.workload("kernel.distillation_share", text(rows, "x", kVocab),
                           DistillationShare{.logits = logits,
                                             .teacher = teacher,
                                             .targets = targets,
                                             .sums = taught.view({rows, DistillationShare::kSums}),
                                             .first = 0,
                                             .vocab = kUnpadded,
                                             .temperature = 1.0}));
  out.push_back(o.workload("kernel.distillation_of_shares", text(rows, "x", kVocab),
                           DistillationOfShares{.logits = logits,
                                                .teacher = teacher,
                                                .targets = targets,
                                                .sums = taught,
                                                .loss = loss,
                                                .first = 0,
                                                .vocab = kUnpadded,
                                                .temperature = 1.0,
                                                .weight = 1.0,
                                                .scale = 1e-3,
                                                .dlogits = logits}));
  const Tensor weight = o.values({kVocab, kWidth}), ids = o.ids(kRows, kUnpadded), y = o.values({kRows, kWidth});
  const Tensor dweight = o.stats({kVocab, kWidth});
  const auto add = [&](const char* name, const auto& k) { out.push_back(o.workload(name, text(kRows, "x", kWidth), k)); };
  add("kernel.embedding_forward", EmbeddingForward{.ids = ids, .weight = weight, .out = y});
  add("kernel.embedding_backward", EmbeddingBackward{.ids = ids, .dy = y, .dweight = dweight, .accumulate = true});
}

void add_update(Kernels& out, Backend& device, Dtype dtype) {
  BenchOperands o(device, dtype);
  const int64_t n = int64_t{16} << 20;
  const Shape shape{n / 1024, 1024};
  const Tensor master = o.stats(shape), m = zeros(device, Dtype::f32, shape), v = zeros(device, Dtype::f32, shape), grad = o.stats(shape);
  const Tensor step = zeros(device, Dtype::f32, {static_cast<int64_t>(StepValue::count)});
  const auto add = [&](const char* name, const auto& k) { out.push_back(o.workload(name, text(n), k)); };
  add("kernel.adamw", AdamW{.master = master,
                            .m = m,
                            .v = v,
                            .grad = grad,
                            .step = step,
                            .beta1 = 0.9,
                            .beta2 = 0.95,
                            .eps = 1e-8,
                            .weight_decay = 0.1,
                            .value = dtype == Dtype::bf16 ? o.values(shape) : Tensor()});
  if (dtype != Dtype::f32) return;
  add("kernel.squared_norm", SquaredNorm{.x = grad, .partials = empty(device, Dtype::f64, {ceil_div(shape[0], 32)})});
  add("kernel.convert_to_bf16", Convert{.x = grad, .out = empty(device, Dtype::bf16, shape)});
}

// The quantizing kernels, against a memory copy.
void add_quantized(Kernels& out, Backend& device, Dtype dtype) {
  if (dtype != Dtype::bf16) return;  // only bf16 is quantized
  constexpr int64_t kCols = 2048;
  BenchOperands o(device, dtype);
  const Tensor x = o.values({kRows, kCols}), y = empty_like(x);
  const auto add = [&](const char* name, const auto& k) { out.push_back(o.workload(name, text(kRows, "x", kCols), k)); };
  const Quantization rows{Format::e4m3, 1, 32}, tiles{Format::e4m3, 32, 32}, fake{Format::e2m1, 1, 32, ScaleRule::flashinfer};
  const QuantizedTensor row = quantized(x, rows), column = quantized(x, rows.transposed()), tile = quantized(x, tiles),
                        packed = quantized(x, fake);
  add("kernel.quantize_row", Quantize{.x = x, .out = row});
  add("kernel.quantize_column", Quantize{.x = x, .out = column});
  add("kernel.quantize_both", Quantize{.x = x, .out = row, .second = column});
  add("kernel.quantize_tiles", Quantize{.x = x, .out = tile});
  add("kernel.quantize_e2m1", Quantize{.x = x, .out = packed});
  const QuantizedTensor searched = quantized(x, {Format::e2m1, 1, 32, ScaleRule::mse});
  add("kernel.quantize_e2m1_mse", Quantize{.x = x, .out = searched});
  const QuantizedTensor nvfp4 = quantized(x, {Format::nvfp4, 1, kNvfp4Block, ScaleRule::nearest, {}, -2});
  const QuantizedTensor searched_nvfp4 = quantized(x, {Format::nvfp4, 1, kNvfp4Block, ScaleRule::mse, {}, -2});
  add("kernel.quantize_nvfp4", Quantize{.x = x, .out = nvfp4});
  add("kernel.quantize_nvfp4_mse", Quantize{.x = x, .out = searched_nvfp4});
  add("kernel.dequantize_row", Dequantize{.x = row, .out = y});
  add("kernel.dequantize_tiles", Dequantize{.x = tile, .out = y});
  add("kernel.dequantize_e2m1", Dequantize{.x = packed, .out = y});
  add("kernel.dequantize_nvfp4", Dequantize{.x = nvfp4, .out = y});
  add("kernel.requantize_columns", RequantizeColumns{.x = row, .out = column});
  add("kernel.fake_quantize", FakeQuantize{.x = x, .out = y, .how = fake});
  const Tensor swizzled = empty(device, Dtype::u8, {swizzled_bytes(kRows, kCols / 32)});
  add("kernel.swizzle_scales", SwizzleScales{.x = row, .out = swizzled});
  out.back().bytes = static_cast<double>(row.scales.bytes() + swizzled.bytes());  // codes are not looked at
}

}  // namespace

void bench_kernels(Backend& device, const BenchOptions& options) {
  Harness harness(device, options);
  const std::vector<void (*)(Kernels&, Backend&, Dtype)> groups{add_norms,      add_activations, add_heads,
                                                                add_vocabulary, add_update,      add_quantized};
  int expected = 0;
  const auto each = [&](const std::function<void(const Workload&)>& visit) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      for (const auto group : groups) {
        Kernels kernels;
        group(kernels, device, dtype);
        for (const Workload& workload : kernels) {
          if (harness.wants(workload)) visit(workload);
        }
      }
    }
  };
  each([&](const Workload&) { ++expected; });
  harness.expect(expected);
  each([&](const Workload& workload) { harness.measure(workload); });
}

}  // namespace mantissa::tools
