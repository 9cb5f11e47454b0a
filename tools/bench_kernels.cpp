#include <vector>

#include "bench_harness.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"

namespace mantissa::tools {
namespace {

// Tensors of one benchmark, filled with normal data.
class Operands {
 public:
  Operands(Backend& device, Dtype dtype) : device_(device), dtype_(dtype) {}

  Tensor values(Shape shape) { return normal(dtype_, shape); }
  Tensor stats(Shape shape) { return normal(Dtype::f32, shape); }
  Tensor ids(int64_t count, int64_t limit) {
    std::vector<int32_t> data(static_cast<size_t>(count));
    for (size_t i = 0; i < data.size(); ++i) {
      data[i] = static_cast<int32_t>(random_words({.seed = 2, .stream = RngStream::test}, what_, i)[0] % static_cast<uint64_t>(limit));
    }
    ++what_;
    return from_host(device_, Dtype::i32, {count}, data.data());
  }

 private:
  Tensor normal(Dtype dtype, Shape shape) {
    Tensor out = empty(device_, Dtype::f32, shape);
    device_.run(RandomNormal{.out = out, .key = {.seed = 1, .stream = RngStream::test}, .what = what_++, .first_index = 0, .std = 1.0});
    return converted(out, dtype);
  }

  Backend& device_;
  Dtype dtype_;
  uint32_t what_ = 0;
};

constexpr int64_t kRows = 16384, kWidth = 768, kFeedForward = 3072, kVocab = 50257, kHeadDim = 64;

struct Size {
  int64_t v;  // bytes of one value
  double rows(int64_t channels, int64_t n = kRows) const { return static_cast<double>(n * channels * v); }
};

using Kernels = std::vector<Workload>;

template <class Kernel>
std::function<void()> runner(Backend& device, Kernel kernel) {
  return [&device, kernel] { device.run(kernel); };
}

void add_norms(Kernels& out, Backend& device, Dtype dtype) {
  Operands o(device, dtype);
  const Size size{dtype_bytes(dtype)};
  const std::string shape = text(kRows, "x", kWidth);
  const Tensor x = o.values({kRows, kWidth}), w = o.values({kWidth}), y = o.values({kRows, kWidth}), dx = o.values({kRows, kWidth});
  const Tensor mean = o.stats({kRows}), rstd = o.stats({kRows}), dw = o.stats({kWidth}), db = o.stats({kWidth});
  const auto add = [&](const char* name, double passes, std::function<void()> run) {
    out.push_back({.bench = name, .shape = shape, .dtype = dtype, .bytes = passes * size.rows(kWidth), .run = std::move(run)});
  };
  add("kernel.add", 3, runner(device, Add{.a = x, .b = y, .out = dx}));
  add("kernel.rms_norm_forward", 2, runner(device, RmsNormForward{.x = x, .weight = w, .y = y, .rstd = rstd, .eps = 1e-6}));
  add("kernel.rms_norm_backward", 3,
      runner(device, RmsNormBackward{.x = x, .weight = w, .rstd = rstd, .dy = y, .dx = dx, .dweight = dw, .accumulate = true}));
  add("kernel.layer_norm_forward", 2,
      runner(device, LayerNormForward{.x = x, .weight = w, .y = y, .mean = mean, .rstd = rstd, .eps = 1e-5, .bias = w}));
  add("kernel.layer_norm_backward", 3,
      runner(device,
             LayerNormBackward{
                 .x = x, .weight = w, .mean = mean, .rstd = rstd, .dy = y, .dx = dx, .dweight = dw, .accumulate = true, .dbias = db}));
  add("kernel.sum_rows", 1, runner(device, SumRows{.x = x, .out = dw, .accumulate = true}));
}

void add_activations(Kernels& out, Backend& device, Dtype dtype) {
  Operands o(device, dtype);
  const Size size{dtype_bytes(dtype)};
  const int64_t rows = kRows / 2;
  const Tensor x = o.values({rows, kFeedForward}), y = o.values({rows, kFeedForward}), dx = o.values({rows, kFeedForward});
  const Tensor gated = o.values({rows, 2 * kFeedForward}), dgated = o.values({rows, 2 * kFeedForward});
  const auto add = [&](const char* name, double passes, std::function<void()> run) {
    out.push_back({.bench = name,
                   .shape = text(rows, "x", kFeedForward),
                   .dtype = dtype,
                   .bytes = passes * size.rows(kFeedForward, rows),
                   .run = std::move(run)});
  };
  add("kernel.gelu_tanh_forward", 2, runner(device, GeluForward{.x = x, .out = y, .form = GeluForm::tanh}));
  add("kernel.gelu_tanh_backward", 3, runner(device, GeluBackward{.x = x, .dy = y, .dx = dx, .form = GeluForm::tanh}));
  add("kernel.gelu_erf_forward", 2, runner(device, GeluForward{.x = x, .out = y, .form = GeluForm::erf}));
  add("kernel.gelu_erf_backward", 3, runner(device, GeluBackward{.x = x, .dy = y, .dx = dx, .form = GeluForm::erf}));
  add("kernel.swiglu_forward", 3, runner(device, SwiGluForward{.x = gated, .out = y}));
  add("kernel.swiglu_backward", 5, runner(device, SwiGluBackward{.x = gated, .dy = y, .dx = dgated}));
}

void add_heads(Kernels& out, Backend& device, Dtype dtype) {
  Operands o(device, dtype);
  const Size size{dtype_bytes(dtype)};
  const HeadLayout layout{.heads = 12, .kv_heads = 4, .head_dim = kHeadDim};
  const Tensor x = o.values({kRows, layout.row()}), y = o.values({kRows, layout.row()}), dx = o.values({kRows, layout.row()});
  const Tensor q = o.values({kHeadDim}), k = o.values({kHeadDim}), dq = o.stats({kHeadDim}), dk = o.stats({kHeadDim});
  const Tensor rstd = o.stats({kRows, layout.heads + layout.kv_heads}), table = o.stats({1024, kHeadDim}), positions = o.ids(kRows, 1024);
  const auto add = [&](const char* name, double passes, std::function<void()> run) {
    out.push_back({.bench = name,
                   .shape = text(kRows, "x", layout.row()),
                   .dtype = dtype,
                   .bytes = passes * size.rows(layout.row()),
                   .run = std::move(run)});
  };
  add("kernel.rope", 2, runner(device, Rope{.x = x, .table = table, .positions = positions, .y = y, .layout = layout, .inverse = false}));
  add("kernel.qk_norm_forward", 2,
      runner(device, QkNormForward{.x = x, .q_weight = q, .k_weight = k, .y = y, .rstd = rstd, .layout = layout, .eps = 1e-6}));
  add("kernel.qk_norm_backward", 3,
      runner(device, QkNormBackward{.x = x,
                                    .q_weight = q,
                                    .k_weight = k,
                                    .rstd = rstd,
                                    .dy = y,
                                    .dx = dx,
                                    .dq_weight = dq,
                                    .dk_weight = dk,
                                    .layout = layout,
                                    .accumulate = true}));
}

void add_vocabulary(Kernels& out, Backend& device, Dtype dtype) {
  Operands o(device, dtype);
  const Size size{dtype_bytes(dtype)};
  const int64_t rows = 512;
  const Tensor logits = o.values({rows, kVocab}), targets = o.ids(rows, kVocab), loss = o.stats({rows});
  out.push_back(
      {.bench = "kernel.cross_entropy",
       .shape = text(rows, "x", kVocab),
       .dtype = dtype,
       .bytes = 2 * size.rows(kVocab, rows),  // forward and gradient in place
       .run = runner(device,
                     CrossEntropy{.logits = logits, .targets = targets, .loss = loss, .vocab = kVocab, .scale = 1e-3, .dlogits = logits})});
  const Tensor weight = o.values({kVocab, kWidth}), ids = o.ids(kRows, kVocab), rows_out = o.values({kRows, kWidth});
  out.push_back({.bench = "kernel.embedding_forward",
                 .shape = text(kRows, "x", kWidth),
                 .dtype = dtype,
                 .bytes = 2 * size.rows(kWidth),
                 .run = runner(device, EmbeddingForward{.ids = ids, .weight = weight, .out = rows_out})});
  const Tensor dweight = o.stats({kVocab, kWidth});
  out.push_back({.bench = "kernel.embedding_backward",
                 .shape = text(kRows, "x", kWidth),
                 .dtype = dtype,
                 .bytes = size.rows(kWidth) + 2.0 * static_cast<double>(kRows * kWidth * 4),
                 .run = runner(device, EmbeddingBackward{.ids = ids, .dy = rows_out, .dweight = dweight, .accumulate = true})});
}

void add_update(Kernels& out, Backend& device, Dtype dtype) {
  Operands o(device, dtype);
  const int64_t n = int64_t{16} << 20;
  const Shape shape{n / 1024, 1024};
  const Tensor master = o.stats(shape), m = zeros(device, Dtype::f32, shape), v = zeros(device, Dtype::f32, shape), grad = o.stats(shape);
  const Tensor step = zeros(device, Dtype::f32, {static_cast<int64_t>(StepValue::count)});
  const Tensor value = dtype == Dtype::bf16 ? o.values(shape) : Tensor();
  out.push_back({.bench = "kernel.adamw",
                 .shape = text(n),
                 .dtype = dtype,
                 .bytes = static_cast<double>(n) * (28.0 + (value.defined() ? 2.0 : 0.0)),
                 .run = runner(device, AdamW{.master = master,
                                             .m = m,
                                             .v = v,
                                             .grad = grad,
                                             .step = step,
                                             .beta1 = 0.9,
                                             .beta2 = 0.95,
                                             .eps = 1e-8,
                                             .weight_decay = 0.1,
                                             .value = value})});
  if (dtype != Dtype::f32) return;
  const Tensor partials = empty(device, Dtype::f64, {ceil_div(shape[0], 32)});
  out.push_back({.bench = "kernel.squared_norm",
                 .shape = text(n),
                 .dtype = dtype,
                 .bytes = static_cast<double>(n) * 4.0,
                 .run = runner(device, SquaredNorm{.x = grad, .partials = partials})});
  const Tensor rounded = empty(device, Dtype::bf16, shape);
  out.push_back({.bench = "kernel.convert_to_bf16",
                 .shape = text(n),
                 .dtype = dtype,
                 .bytes = static_cast<double>(n) * 6.0,
                 .run = runner(device, Convert{.x = grad, .out = rounded})});
}

}  // namespace

void bench_kernels(Backend& device, const BenchOptions& options) {
  Harness harness(device, options);
  using Group = void (*)(Kernels&, Backend&, Dtype);
  const std::vector<Group> groups{add_norms, add_activations, add_heads, add_vocabulary, add_update, add_quantized};
  int expected = 0;
  const auto each = [&](const std::function<void(const Workload&)>& visit) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      for (const Group group : groups) {
        Kernels kernels;
        group(kernels, device, dtype);
        for (const Workload& workload : kernels) {
          if (harness.wants(workload.bench)) visit(workload);
        }
      }
    }
  };
  each([&](const Workload&) { ++expected; });
  harness.expect(expected);
  each([&](const Workload& workload) { harness.measure(workload); });
}

}  // namespace mantissa::tools
