#include <cmath>
#include <cstdio>

#include "mantissa/precision/recipe.h"
#include "tools/bench/bench_operands.h"

namespace mantissa::tools {
namespace {

struct LinearShape {
  int64_t tokens, in, out;
};

Workload linear_workload(Backend& device, Dtype dtype, GemmRole role, const LinearShape& s) {
  BenchOperands o(device, dtype);
  const Tensor x = o.values({s.tokens, s.in}), w = o.values({s.out, s.in}), dy = o.values({s.tokens, s.out}),
               dw = zeros(device, Dtype::f32, {s.out, s.in});
  Gemm gemm{.a = {x}, .b = {w, true}, .out = empty_like(dy), .accumulate = false};
  if (role == GemmRole::dgrad) gemm = {.a = {dy}, .b = {w}, .out = empty_like(x), .accumulate = false};
  if (role == GemmRole::wgrad) gemm = {.a = {dy, true}, .b = {x}, .out = dw, .accumulate = true};
  const char* const names[] = {"gemm.fprop", "gemm.dgrad", "gemm.wgrad"};
  return {.bench = names[static_cast<int>(role)],
          .shape = text(s.tokens, "x", s.in, "->", s.out),
          .dtype = dtype,
          .flops = gemm.flops(),
          .run = [&device, gemm] { device.run(gemm); }};
}

// A CPU takes GPT-2 124M's shapes and two of a small model, another device those of GPT-2 124M and of configs/dense-1.3b.json.
std::vector<LinearShape> linear_shapes(const Backend& device) {
  using Widths = std::vector<std::pair<int64_t, int64_t>>;
  const Widths gpt2 = {{768, 2304}, {768, 768}, {768, 3072}, {3072, 768}, {768, 50257}},
               dense = {{2048, 6144}, {2048, 2048}, {2048, 11264}, {5632, 2048}, {2048, 50304}};
  std::vector<LinearShape> out;
  const auto add = [&out](int64_t tokens, const Widths& widths) {
    for (const auto& [in, wide] : widths) out.push_back({tokens, in, wide});
  };
  if (device.host_memory()) {
    add(256, gpt2), add(2048, gpt2), add(768, {{128, 384}, {128, 512}});
  } else {
    add(16384, gpt2), add(16384, dense);
  }
  return out;
}

struct AttentionShape {
  int64_t batch, length;
  HeadLayout layout{.heads = 12, .kv_heads = 12, .head_dim = 64};
};

std::vector<AttentionShape> attention_shapes(const Backend& device) {
  if (device.host_memory()) return {{4, 64}, {8, 256}, {2, 1024}};
  const HeadLayout dense{.heads = 16, .kv_heads = 16, .head_dim = 128};
  return {{16, 1024}, {8, 2048, dense}, {2, 8192, dense}};
}

Workload attention_workload(Backend& device, Dtype dtype, bool backward, const AttentionShape& shape) {
  const auto& [batch, length, layout] = shape;
  const int64_t rows = batch * length;
  const double scale = 1.0 / std::sqrt(static_cast<double>(layout.head_dim));
  const Shape heads{rows, layout.heads * layout.head_dim};
  BenchOperands o(device, dtype);
  const Tensor qkv = o.values({rows, layout.row()}), out = o.values(heads), dout = o.values(heads), dqkv = empty_like(qkv);
  const Tensor lse = empty(device, Dtype::f32, {batch, layout.heads, length});
  const AttentionForward forward{.qkv = qkv, .out = out, .lse = lse, .batch = batch, .layout = layout, .scale = scale};
  const AttentionBackward gradient{
      .qkv = qkv, .out = out, .lse = lse, .dout = dout, .dqkv = dqkv, .batch = batch, .layout = layout, .scale = scale};
  device.run(forward);
  const double flops = forward.flops() * (backward ? 2.5 : 1.0);  // five GEMMs in backward, which computes the scores again
  return {.bench = backward ? "attention.backward" : "attention.forward",
          .shape = text("B", batch, " T", length, " H", layout.heads, " D", layout.head_dim),
          .dtype = dtype,
          .flops = flops,
          .run = backward ? std::function<void()>([&device, gradient] { device.run(gradient); })
                          : std::function<void()>([&device, forward] { device.run(forward); })};
}

}  // namespace

void bench_gemm(Backend& device, const BenchOptions& options) {
  Harness harness(device, options);
  const std::vector<LinearShape> shapes = linear_shapes(device);
  harness.expect(static_cast<int>(shapes.size()) * 6);
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    double flops = 0.0, seconds = 0.0;  // sums over all GEMMs that were measured
    for (const LinearShape& shape : shapes) {
      for (const GemmRole role : {GemmRole::fprop, GemmRole::dgrad, GemmRole::wgrad}) {
        const Workload workload = linear_workload(device, dtype, role, shape);
        if (!harness.wants(workload)) continue;
        seconds += harness.measure(workload).seconds.median;
        flops += workload.flops;
      }
    }
    if (seconds > 0.0) std::printf("%s GEMMs together %.3g FLOP/s, for mantissa explain --flops\n", dtype_name(dtype), flops / seconds);
  }
}

void bench_attention(Backend& device, const BenchOptions& options) {
  Harness harness(device, options);
  const std::vector<AttentionShape> shapes = attention_shapes(device);
  harness.expect(static_cast<int>(shapes.size()) * 4);
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const AttentionShape& shape : shapes) {
      for (const bool backward : {false, true}) {
        const Workload workload = attention_workload(device, dtype, backward, shape);
        if (harness.wants(workload)) harness.measure(workload);
      }
    }
  }
}

}  // namespace mantissa::tools
