#include <cmath>
#include <cstdio>
#include <numeric>

#include "mantissa/base/integers.h"
#include "mantissa/precision/recipe.h"
#include "tools/bench/bench_operands.h"

namespace mantissa::tools {
namespace {

constexpr int64_t kHidden = 768, kGateUp = 2048, kMultiple = 32;

// Numbers of rows that the experts are given.
struct Load {
  const char* name;
  std::vector<int64_t> rows;
  int64_t asked() const { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }
  int64_t computed() const {
    int64_t sum = 0;
    for (const int64_t r : rows) sum += grouped_rows(round_up(r, kMultiple));
    return sum;
  }
};

Load even(const char* name, int64_t experts, int64_t rows) { return {name, std::vector<int64_t>(static_cast<size_t>(experts), rows)}; }

// Draws loads from zero to twice the mean, in random order.
Load ragged(const char* name, int64_t experts, int64_t mean) {
  Load out = even(name, experts, 0);
  for (int64_t e = 0; e < experts; ++e) out.rows[static_cast<size_t>(e)] = 2 * mean * (e * 5 % experts) / (experts - 1);
  return out;
}

// Makes the table of as many assignments, one a token, as the load says, in turns.
DispatchTable dispatched(Backend& device, const Load& load) {
  std::vector<int32_t> experts;
  for (int64_t turn = 0; std::ssize(experts) < load.asked(); ++turn) {
    for (size_t e = 0; e < load.rows.size(); ++e) {
      if (turn < load.rows[e]) experts.push_back(static_cast<int32_t>(e));
    }
  }
  const int64_t count = std::ssize(experts), groups = std::ssize(load.rows), rows = dispatch_rows(count, groups, kMultiple);
  const DispatchTable table{.experts = from_host(device, Dtype::i32, {count, 1}, experts.data()),
                            .offsets = empty(device, Dtype::i32, {groups + 1}),
                            .rows = empty(device, Dtype::i32, {count, 1}),
                            .assignments = empty(device, Dtype::i32, {rows}),
                            .multiple = kMultiple};
  device.run(table);
  return table;
}

std::string shape_of(const Load& load) { return text(load.name, ' ', kHidden, "->", kGateUp); }

struct Products {
  Workload grouped, dense;
};

// Makes the workloads of a load. Dense: one matrix for all rows that are asked for.
Products gemms(Backend& device, Dtype dtype, GemmRole role, const Load& load) {
  BenchOperands o(device, dtype);
  const DispatchTable table = dispatched(device, load);
  const int64_t experts = std::ssize(load.rows), room = table.assignments.elements(), asked = load.asked();
  const Tensor x = o.values({room, kHidden}), dy = o.values({room, kGateUp}), w = o.values({experts * kGateUp, kHidden});
  const Tensor dense_x = x.slice(0, asked), dense_dy = dy.slice(0, asked), dense_w = w.slice(0, kGateUp);
  const auto workload = [&](const char* name, const auto& k) {
    return Workload{.bench = name,
                    .shape = shape_of(load),
                    .dtype = dtype,
                    .run = [&device, k] { device.run(k); },
                    .tokens = static_cast<double>(asked)};
  };
  if (role == GemmRole::wgrad) {
    const Tensor dw = zeros(device, Dtype::f32, w.shape()), dense_dw = zeros(device, Dtype::f32, dense_w.shape());
    return {workload("moe.wgrad", GroupedWeightGradient{.a = dy, .b = x, .out = dw, .offsets = table.offsets, .accumulate = true}),
            workload("dense", Gemm{.a = {dense_dy, true}, .b = {dense_x}, .out = dense_dw, .accumulate = true})};
  }
  const bool fprop = role == GemmRole::fprop;
  const Tensor a = fprop ? x : dy, out = empty_like(fprop ? dy : x), dense_out = empty_like(fprop ? dense_dy : dense_x);
  return {workload(fprop ? "moe.fprop" : "moe.dgrad", GroupedGemm{.a = {a}, .b = {w, fprop}, .out = out, .offsets = table.offsets}),
          workload("dense", Gemm{.a = {a.slice(0, asked)}, .b = {dense_w, fprop}, .out = dense_out, .accumulate = false})};
}

// Measures the kernels that move rows, with two assignments a token, and the router.
std::vector<Workload> movements(Backend& device, Dtype dtype) {
  constexpr int64_t kTokens = 4096, kChoices = 2, kExperts = 8;
  BenchOperands o(device, dtype);
  const RoutingRule rule{.top_k = kChoices, .score = RouterScore::softmax, .softmax_after_topk = false, .renormalize = true, .scale = 1.0};
  const Tensor logits = o.stats({kTokens, kExperts}), scores = o.stats({kTokens, kExperts}), dlogits = empty_like(logits);
  const Tensor weights = o.stats({kTokens, kChoices}), counts = empty(device, Dtype::i32, {1, kExperts});
  const RouteForward route{.logits = logits,
                           .experts = empty(device, Dtype::i32, {kTokens, kChoices}),
                           .weights = weights,
                           .scores = scores,
                           .counts = counts,
                           .rule = rule};
  device.run(route);
  const int64_t rows = dispatch_rows(kTokens * kChoices, kExperts, kMultiple);
  const DispatchTable table{.experts = route.experts,
                            .offsets = empty(device, Dtype::i32, {kExperts + 1}),
                            .rows = empty(device, Dtype::i32, {kTokens, kChoices}),
                            .assignments = empty(device, Dtype::i32, {rows}),
                            .multiple = kMultiple};
  device.run(table);
  const Tensor x = o.values({kTokens, kHidden}), y = o.values({rows, kHidden});
  const RouteBackward backward{.logits = logits,
                               .scores = scores,
                               .experts = route.experts,
                               .counts = counts,
                               .dweights = weights,
                               .dlogits = dlogits,
                               .rule = rule,
                               .balance = 0.01,
                               .sequence_balance = 0.0,
                               .z = 0.001};
  const std::string routed = text(kTokens, "x", kExperts, " top ", kChoices), moved = text(kTokens * kChoices, "x", kHidden);
  std::vector<Workload> out{
      o.workload("moe.permute", moved, Permute{.x = x, .out = y, .assignments = table.assignments, .per_row = kChoices}),
      o.workload("moe.unpermute", moved, Unpermute{.x = y, .rows = table.rows, .out = x})};
  if (dtype != Dtype::f32) return out;  // the router's dtype
  out.push_back(o.workload("moe.route_forward", routed, route));
  out.push_back(o.workload("moe.route_backward", routed, backward));
  out.push_back(o.workload("moe.dispatch_table", routed, table));
  return out;
}

// Codes of a token's hidden state.
Workload permuted_codes(Backend& device) {
  constexpr int64_t kTokens = 4096, kChoices = 2;
  BenchOperands o(device, Dtype::bf16);
  const Quantization how{Format::e4m3, 1, 32};
  const QuantizedTensor x = quantized(o.values({kTokens, kHidden}), how);
  const Tensor assignments = o.ids(kTokens * kChoices, kTokens * kChoices);
  const QuantizedTensor y = empty_quantized(device, {kTokens * kChoices, kHidden}, how);
  return o.workload("moe.permute_codes", text(kTokens * kChoices, "x", kHidden),
                    Permute{.x = x, .out = y, .assignments = assignments, .per_row = kChoices});
}

}  // namespace

void bench_moe(Backend& device, const BenchOptions& options) {
  Harness harness(device, options);
  const std::vector<Load> all{even("8x128", 8, 128), even("8x256", 8, 256), ragged("8x~128", 8, 128), ragged("8x~512", 8, 512)};
  for (const Load& load : device.host_memory() ? all : std::vector<Load>()) {  // a GPU's kernel takes tiles of rows
    std::printf("%s: %.3f rows computed for a row asked\n", load.name,
                static_cast<double>(load.computed()) / static_cast<double>(load.asked()));
  }
  std::vector<Workload> others;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (Workload& workload : movements(device, dtype)) others.push_back(std::move(workload));
  }
  others.push_back(permuted_codes(device));
  std::erase_if(others, [&](const Workload& w) { return !harness.wants(w); });
  const char* const names[] = {"moe.fprop", "moe.dgrad", "moe.wgrad"};
  int expected = static_cast<int>(others.size());
  const auto each_gemm = [&](const auto& visit) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      for (const Load& load : all) {
        for (const GemmRole role : {GemmRole::fprop, GemmRole::dgrad, GemmRole::wgrad}) {
          if (harness.wants(names[static_cast<int>(role)], dtype, shape_of(load))) visit(dtype, role, load);
        }
      }
    }
  };
  each_gemm([&](Dtype, GemmRole, const Load&) { ++expected; });
  harness.expect(expected);
  for (const Workload& workload : others) harness.measure(workload);
  each_gemm([&](Dtype dtype, GemmRole role, const Load& load) {
    Products both = gemms(device, dtype, role, load);
    both.grouped.against = &both.dense;
    harness.measure(both.grouped);
  });
}

}  // namespace mantissa::tools
