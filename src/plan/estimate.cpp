#include "mantissa/plan/estimate.h"

#include <algorithm>
#include <cmath>

#include "mantissa/backend/gemm_scratch.h"
#include "mantissa/nn/layout.h"
#include "mantissa/nn/moe.h"
#include "mantissa/nn/shards.h"
#include "mantissa/optim/accumulation.h"
#include "mantissa/precision/operands.h"
#include "plan/activation_exchanges.h"

namespace mantissa {
namespace {

// Peaks of processes on x86-64 beyond their tensors hardly depend on the model: 24.6 MiB alone, 31.5 to 32.0 MiB of 2 to 8 ranks.
constexpr int64_t kProgramBytes = int64_t{25} << 20, kTransportBytes = int64_t{7} << 20;

// Caps sizes that no machine has, so that nothing wraps.
int64_t bytes(double count) { return static_cast<int64_t>(std::min(count, 1e18)); }

// Counts elements per token inside one block: what its modules read and write on one of the ranks that share it.
struct BlockWidths {
  int64_t hidden;
  int64_t own;  // of hidden, outside split operations: under sequence parallelism this rank's share of tokens
  int64_t qkv, heads, up = 0, inner = 0;
  int64_t norms, statistics;  // fp32; of the norms before attention and MLP, of all
  int64_t head_norm;          // q|k|v once more
  int64_t sums = 0;           // bytes of a GEMM of experts before its bias is added, if they have any
  int64_t dispatched = 0;     // of experts: their input, in rows of its own, and what the router reads, in fp32
};

// Returns the rows of experts, with their padding, for each token; 1 in an MLP.
double rows_per_token(const RunConfig& config, const PrecisionPlan& plan, const ModuleShape& module) {
  if (module.matrices == 1) return 1.0;
  const std::string moe = module.path.substr(0, module.path.find(".experts."));
  const int64_t tokens = config.training.micro_batch_size * config.training.seq_len;
  const int64_t multiple = row_multiple(plan.of(moe + ".experts.gate_up").recipe, plan.of(moe + ".experts.down").recipe);
  return static_cast<double>(dispatch_rows(tokens * module.active, module.matrices, multiple)) / static_cast<double>(tokens);
}

// Adds the widths of experts, and of an MLP beside them that all tokens pass, in place of those of the MLP.
void add_experts(const RunConfig& config, const PrecisionPlan& plan, const std::string& path, BlockWidths& widths) {
  const ModuleShape &up = plan.of(path + ".experts.gate_up").module, &down = plan.of(path + ".experts.down").module;
  const double rows = rows_per_token(config, plan, up);
  const auto of_rows = [rows](int64_t columns) { return static_cast<int64_t>(std::ceil(rows * static_cast<double>(columns))); };
  const int64_t ranks = config.parallel.tensor, shared = config.model.moe->shared_intermediate_size / ranks;
  widths.up = of_rows(up.out / ranks) + 2 * shared;
  widths.inner = of_rows(down.in / ranks) + shared;
  if (config.model.moe->expert_mlp_bias && config.precision.dtype != Dtype::f32) {
    widths.sums = dtype_bytes(Dtype::f32) * of_rows(std::max(up.out / ranks, down.out));
  }
  const int64_t element = dtype_bytes(config.precision.dtype), numbers = 2 * up.matrices;  // logits and scores
  widths.dispatched = of_rows(up.in) + (element == 4 ? 0 : up.in * 4 / element) + numbers * 4 / element;
}

BlockWidths block_widths(const RunConfig& config, const PrecisionPlan& plan, int64_t layer) {
  const ModelConfig& model = config.model;
  const int64_t ranks = config.parallel.tensor;
  const auto shape = [&](const char* module) -> const ModuleShape& { return plan.of(text("layers.", layer, '.', module)).module; };
  const ModuleShape& qkv = shape("attn.qkv");
  const int64_t heads = model.num_attention_heads, norms = model.norm == Norm::layer ? 4 : 2;
  BlockWidths widths{.hidden = qkv.in,
                     .own = config.parallel.sequence_parallel ? qkv.in / ranks : qkv.in,
                     .qkv = qkv.out / ranks,
                     .heads = shape("attn.out").in / ranks,
                     .norms = norms,
                     .statistics = norms + (heads + (model.qk_norm ? heads + model.kv_heads() : 0)) / ranks,
                     .head_norm = model.qk_norm ? qkv.out / ranks : 0};
  if (model.has_experts(layer)) {
    add_experts(config, plan, text("layers.", layer, ".moe"), widths);
  } else {
    widths.up = shape(model.gated() ? "mlp.gate_up" : "mlp.up").out / ranks;
    widths.inner = shape("mlp.down").in / ranks;
  }
  return widths;
}

// Counts what backward finds in memory: inputs of norms and of linears, q|k|v before the head norm and as attention reads it, statistics.
int64_t kept_bytes(const BlockWidths& width, Recompute recompute, int64_t element) {
  const int64_t ends = 2 * (width.own + width.hidden) + width.qkv + width.heads + width.up + width.dispatched;  // of all segments
  if (recompute == Recompute::full) return width.own * element;
  if (recompute == Recompute::selective) return ends * element + 4 * width.norms;
  return (ends + width.head_norm + width.inner) * element + 4 * width.statistics;
}

// Counts gradients in flight in the MLP of one block, beside its recomputed activations if nothing else was kept.
int64_t backward_bytes(const BlockWidths& width, Recompute recompute, int64_t element) {
  const int64_t gradients = (2 * width.hidden + width.dispatched + std::max(width.up + width.inner, 2 * width.qkv)) * element;
  return gradients + (recompute == Recompute::full ? kept_bytes(width, Recompute::none, element) : 0);
}

// Counts per token what backward finds beyond kept_bytes() where linears keep codes of their input instead, mostly below 0. Attention keeps
// its output beside its codes; an input that is recomputed is kept as neither.
double codes_bytes(const RunConfig& config, const PrecisionPlan& plan) {
  const Recompute recompute = config.training.recompute;
  const int64_t element = dtype_bytes(config.precision.dtype), ranks = config.parallel.tensor;
  if (recompute == Recompute::full) return 0.0;
  double sum = 0.0;
  for (const ModulePrecision& entry : plan.modules()) {
    const std::string& path = entry.module.path;
    if (entry.module.kind != ModuleKind::linear || !saves_input_codes(entry.recipe)) continue;
    const bool selective = recompute == Recompute::selective;
    if (selective && path.ends_with(".down")) continue;
    const bool beside = !selective && path.ends_with(".attn.out");
    const double codes = 1.0 + 1.0 / static_cast<double>(entry.recipe.input.block());
    const int64_t in = entry.module.in / (entry.module.split == Split::row_parallel ? ranks : 1);
    sum += rows_per_token(config, plan, entry.module) * static_cast<double>(in) * (codes - (beside ? 0.0 : static_cast<double>(element)));
  }
  return sum;
}

struct LinearSizes {
  double rows;  // of experts, of all
  int64_t in, out;
  int64_t matrices = 1;
};

// Returns the most that the backend needs for a GEMM of a linear layer beside its operands: of the three, one runs at a time.
double gemm_bytes(const Recipe& recipe, const LinearSizes& linear) {
  const auto scratch = [&](GemmRole role, GemmSizes sizes) {
    const GemmOperands operands = choose_operands(recipe, role);
    sizes.a_quantized = operands.first.source != OperandSource::high;
    sizes.b_quantized = operands.second.source != OperandSource::high;
    return gemm_scratch(sizes);
  };
  const auto in = static_cast<double>(linear.in), out = static_cast<double>(linear.out);
  const double rows_of_one = linear.rows / static_cast<double>(linear.matrices);
  return std::max({scratch(GemmRole::fprop, {.rows = linear.rows, .depth = in, .cols = out, .matrices = linear.matrices}),
                   scratch(GemmRole::dgrad, {.rows = linear.rows, .depth = out, .cols = in, .matrices = linear.matrices}),
                   scratch(GemmRole::wgrad, {.rows = out, .depth = rows_of_one, .cols = in, .sums = true})});
}

// Returns the most that a GEMM inside a block needs, on one of the ranks that share it.
double gemm_bytes(const RunConfig& config, const PrecisionPlan& plan) {
  const int64_t ranks = config.parallel.tensor;
  const auto tokens = static_cast<double>(config.training.micro_batch_size * config.training.seq_len);
  double largest = 0.0;
  for (const ModulePrecision& entry : plan.modules()) {
    const ModuleShape& module = entry.module;
    if (module.kind != ModuleKind::linear) continue;
    const LinearSizes sizes{.rows = tokens * rows_per_token(config, plan, module),
                            .in = module.in / (module.split == Split::row_parallel ? ranks : 1),
                            .out = module.out / (module.split == Split::column_parallel ? ranks : 1),
                            .matrices = module.matrices};
    largest = std::max(largest, gemm_bytes(entry.recipe, sizes));
  }
  return largest;
}

// Counts one chunk of the output projection and the gradient of its input.
double logits_bytes(const RunConfig& config, const PrecisionPlan& plan, int64_t tokens, int64_t element) {
  const int64_t vocab = config.model.padded_vocab_size() / config.parallel.tensor, hidden = config.model.hidden_size;
  const ModulePrecision* const output = plan.find("output");
  const Recipe recipe = output ? output->recipe : Recipe{};
  const int64_t rows = std::min(tokens, chunk_rows(vocab, recipe));
  const bool converts = config.model.logits_dtype == LogitsDtype::fp32 && element != 4;
  return static_cast<double>(rows * vocab * (converts ? 4 + element : element)) +
         static_cast<double>(tokens) * static_cast<double>(hidden * element) +
         gemm_bytes(recipe, {.rows = static_cast<double>(rows), .in = hidden, .out = vocab});
}

// Counts weights, their gradients and moments.
void add_parameters(const RunConfig& config, const PrecisionPlan& plan, MemoryEstimate& estimate) {
  const Layout layout(parameter_specs(plan, config.parallel.ranks(), config.training.expert_gradients()), Shards::kBucketBytes);
  const auto ranks = static_cast<int>(std::max<int64_t>(1, config.parallel.data));
  struct Own {
    int64_t masters = 0, moments = 0;
    int64_t all() const { return masters + moments; }
  };
  std::vector<Own> owned(static_cast<size_t>(ranks));
  int64_t largest = 0;
  for (const Layout::Bucket& bucket : layout.buckets()) {
    const int apart = layout.expert_ranks(bucket);
    const std::vector<Layout::Share> shares = layout.shares(bucket, ranks / apart);
    for (size_t r = 0; r < owned.size(); ++r) {
      const Layout::Share& share = shares[r / static_cast<size_t>(apart)];
      owned[r].masters += share.masters;
      owned[r].moments += share.moments;
      largest = std::max(largest, share.gradients * (std::ssize(shares) - 1));
    }
  }
  const Own most = *std::ranges::max_element(owned, {}, &Own::all);
  const Layout::Totals& all = layout.totals();
  const int64_t buffers = GradientAccumulator::buffers(config.training.accumulation, *config.training.grad_accum);
  estimate.masters = bytes(static_cast<double>(all.fp32_values) + static_cast<double>(most.masters));
  estimate.values = bytes(static_cast<double>(all.other_values + all.codes + all.copies + 4 * plan.buffers()));
  estimate.gradients = bytes(static_cast<double>(all.gradients) * static_cast<double>(buffers));
  estimate.optimizer = bytes(static_cast<double>(most.moments));
  estimate.exchange = bytes(static_cast<double>(largest));
  estimate.program = kProgramBytes + (config.parallel.world() > 1 ? kTransportBytes : 0);
}

}  // namespace

MemoryEstimate estimate_memory(const RunConfig& config, const PrecisionPlan& plan) {
  const ModelConfig& model = config.model;
  const int64_t element = dtype_bytes(config.precision.dtype), tokens = config.training.micro_batch_size * config.training.seq_len;
  const auto of_all_tokens = [tokens](int64_t each) { return static_cast<double>(tokens) * static_cast<double>(each); };
  int64_t kept = 0, in_flight = 0;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const BlockWidths widths = block_widths(config, plan, layer);
    kept += kept_bytes(widths, config.training.recompute, element);
    in_flight = std::max({in_flight, backward_bytes(widths, config.training.recompute, element), widths.sums});
    if (layer == 0) kept += 2 * widths.own * element;
  }
  MemoryEstimate estimate;
  add_parameters(config, plan, estimate);
  estimate.activations = bytes(of_all_tokens(kept) + static_cast<double>(tokens) * codes_bytes(config, plan));
  estimate.workspace = bytes(std::max(logits_bytes(config, plan, tokens, element), of_all_tokens(in_flight) + gemm_bytes(config, plan)));
  return estimate;
}

}  // namespace mantissa
