#include "models/gpt.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "backend/few_rows.h"
#include "mantissa/backend/functions.h"
#include "models/rope_table.h"

namespace mantissa {
namespace {

double residual_std(const ModelConfig& config) {
  return config.init_residual_scale ? config.init_std / std::sqrt(2.0 * static_cast<double>(config.num_layers)) : config.init_std;
}

Keep keep_of(Recompute recompute) { return recompute == Recompute::selective ? Keep::nothing : Keep::value; }

MlpOptions mlp_options(const ModelConfig& config, Recompute recompute) {
  std::optional<GeluForm> gelu;
  if (config.activation == Activation::gelu_tanh) gelu = GeluForm::tanh;
  if (config.activation == Activation::gelu_erf) gelu = GeluForm::erf;
  return {.gelu = gelu,
          .init_std = config.init_std,
          .down_init_std = residual_std(config),
          .keep = keep_of(recompute),
          .limit = config.glu_limit()};
}

MoeOptions moe_options(const ModelConfig& config, const GptOptions& options) {
  const MoeConfig& moe = *config.moe;
  const auto share = static_cast<double>(options.micro_batches);
  return {.routing = {.rule = moe.rule(),
                      .balance = moe.aux_loss_coef / share,
                      .sequence_balance = moe.seq_aux_loss_coef / share,
                      .z = moe.z_loss_coef / share},
          .experts = moe.num_experts,
          .init_std = config.init_std,
          .down_init_std = residual_std(config),
          .keep = keep_of(options.recompute),
          .limit = config.glu_limit(),
          .quantized_dispatch = options.quantized_dispatch,
          .expert_gradients = options.expert_gradients};
}

// Refuses a plan that was made for another model, or that the device cannot compute. The config refuses the same; this also covers a config
// or recipe that was changed afterwards, and a GPU that was found, or that a command asked for.
void check_plan(const PrecisionPlan& plan, const ModelConfig& config, const Backend& device, int64_t tensor) {
  const ModulePrecision* const output = plan.find("output");
  if (output && output->recipe.quantizes()) {
    const std::vector<std::string> problems =
        output_projection_problems(output->recipe, {.tied_embeddings = config.tie_word_embeddings,
                                                    .fp32_logits = config.logits_dtype == LogitsDtype::fp32,
                                                    .rows = config.padded_vocab_size(),
                                                    .tensor = tensor});
    if (!problems.empty()) fail(ExitCode::usage, "precision.fp8_output_proj: ", problems.front());
  }
  const ModelShape model = model_shape(config);
  require(model.modules.front().out > 0, "model.vocab_size is not known yet");
  const auto same = [](const ModuleShape& module, const ModulePrecision& entry) { return module == entry.module; };
  require(std::ranges::equal(model.modules, plan.modules(), same), "the precision plan was made for another model");
  const std::optional<RecipeProblem> problem = device.host_memory() ? std::nullopt : plan.needs_cpu();
  if (problem) fail(ExitCode::usage, problem->key, ": ", problem->message, ": use the CPU as device, not ", device.name());
}

void check_attention(const AttentionForm& form, const Backend& device) {
  const AttentionDevice who = device.attention_device();
  const AttentionObstacle why = obstacle_of_cudnn(form, who);
  require(who.by != AttentionBy::cudnn || why == AttentionObstacle::none, ExitCode::usage, "training.attention is cudnn, but ",
          obstacle_text(why, form, who), ": set it to own");
}

}  // namespace

int64_t TokenBatch::padded() const {
  if (lengths.empty()) return 0;
  return tokens.dim(0) - std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

Gpt::Gpt(const ModelConfig& config, Backend& device, const PrecisionPlan& plan, const GptOptions& options)
    : config_(config),
      device_(device),
      compute_(plan.compute()),
      options_(options),
      layout_{.heads = config.num_attention_heads / options.mesh.tensor.size(),
              .kv_heads = config.kv_heads() / options.mesh.tensor.size(),
              .head_dim = config.head_size()} {
  device.allow_native_gemms(plan.native_gemms());
  device.allow_grouped_gemms(plan.grouped_gemms());
  device.choose_attention(options.attention);
  check_attention({.dtype = compute_,
                   .length = config.max_position_embeddings,
                   .heads = layout_.heads,
                   .kv_heads = layout_.kv_heads,
                   .head_dim = layout_.head_dim},
                  device);
  check_plan(plan, config, device, options.mesh.tensor.size());
  const Init normal{.constant = 0.0, .std = config.init_std};
  const Mesh& mesh = options_.mesh;
  const ModelRanks ranks = mesh.ranks();
  const NormOptions norm{.layer_norm = config.norm == Norm::layer, .eps = config.norm_eps};
  embed_ = &parameters_.add(weight_of(plan.of("embed"), normal, ranks));
  if (config.position == Position::learned) {
    position_ = &parameters_.add(weight_of(plan.of("position"), normal, ranks));
  }
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const std::string path = text("layers.", i);
    const AttentionOptions attention{.layout = layout_,
                                     .norm_eps = config.norm_eps,
                                     .init_std = config.init_std,
                                     .out_init_std = residual_std(config),
                                     .recompute = options.recompute == Recompute::selective,
                                     .window = config.window(i)};
    const auto mlp = [&]() -> std::variant<Mlp, Moe> {
      if (config.has_experts(i)) return Moe(parameters_, plan, path + ".moe", moe_options(config, options), mesh);
      return Mlp(parameters_, plan, path + ".mlp", mlp_options(config, options.recompute), mesh);
    };
    // Members are built in the order of the braces, so parameters are numbered in it.
    blocks_.push_back(Block{path, NormLayer(parameters_, plan.of(path + ".attn_norm"), norm, mesh),
                            Attention(parameters_, plan, path + ".attn", attention, mesh),
                            NormLayer(parameters_, plan.of(path + ".mlp_norm"), norm, mesh), mlp()});
  }
  final_norm_.emplace(parameters_, plan.of("final_norm"), norm, mesh);
  const ModulePrecision* const output = plan.find("output");
  output_ = output ? &parameters_.add(weight_of(*output, normal, ranks)) : embed_;
  output_operands_ = (output ? *output : plan.of("embed")).recipe;
  parameters_.allocate(device, stats_dtype(compute_), options.gradients);
}

TensorParallel Gpt::context(const TokenBatch& batch) const {
  return tensor_parallel(options_.mesh, Split::column_parallel, batch.tokens.dim(0));
}

Var Gpt::embed(const TokenBatch& batch) {
  const ModuleScope scope("embed");
  const Var x = embedding(batch.tokens, embed_->weight(), context(batch));
  if (!position_) return x;
  const Communicator& ranks = options_.mesh.tensor;
  const RowRange own = share_of(batch.positions.dim(0), ranks.rank(), ranks.size());
  const Tensor positions = options_.mesh.sequence_parallel ? batch.positions.slice(own.begin, own.end) : batch.positions;
  return add(x, embedding(positions, position_->var()));
}

// Returns what routers add to their logits, [N, E]: 0 for a token, -Inf for padding, so that it has no expert. Undefined without padding.
Tensor Gpt::router_mask(const TokenBatch& batch) const {
  if (batch.lengths.empty() || !config_.moe) return {};
  const int64_t row = batch.tokens.dim(0) / batch.batch;
  Tensor mask = zeros(device_, stats_dtype(compute_), {batch.tokens.dim(0), config_.moe->num_experts});
  for (int64_t i = 0; i < batch.batch; ++i) {
    const int64_t length = batch.lengths[static_cast<size_t>(i)];
    if (length == row) continue;
    device_.run(Fill{.out = mask.slice(i * row + length, (i + 1) * row), .value = -std::numeric_limits<double>::infinity()});
  }
  return mask;
}

Residual Gpt::block_forward(const Block& block, Residual&& in, const SequenceContext& context, RouterStatistics* statistics) const {
  const ModuleScope scope(block.path);
  Residual next;
  {
    const auto [x, attn_in] = block.attn_norm.forward(std::exchange(in, {}));  // which the MLP needs no more
    next = {x, block.attn.forward(attn_in, context)};
  }
  const auto [middle, mlp_in] = block.mlp_norm.forward(std::move(next));
  if (const auto* mlp = std::get_if<Mlp>(&block.mlp)) return {middle, mlp->forward(mlp_in, context.tokens)};
  const int64_t capacity = statistics ? config_.moe->capacity(context.tokens - context.padded) : 0;
  return {middle, std::get<Moe>(block.mlp).forward(mlp_in, context, capacity, statistics)};
}

// max_position_embeddings limits the length of sequences; most are far shorter.
Tensor Gpt::rope_table(int64_t positions) {
  constexpr int64_t kLeast = 1024;
  if (config_.position != Position::rope) return {};
  if (!rope_table_.defined() || rope_table_.dim(0) < positions) {
    const int64_t wanted = std::max(kLeast, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(positions))));
    rope_table_ = make_rope_table(device_, std::min(config_.max_position_embeddings, wanted),
                                  rope_frequencies(layout_.head_dim, config_.rope_theta, config_.rope_scaling));
  }
  return rope_table_;
}

Var Gpt::hidden(const TokenBatch& batch, RouterStatistics* statistics) {
  const SequenceContext context{.batch = batch.batch,
                                .tokens = batch.tokens.dim(0),
                                .positions = batch.positions,
                                .segment_starts = batch.segment_starts,
                                .padded = batch.padded(),
                                .router_mask = router_mask(batch),
                                .rope_table = rope_table(batch.tokens.dim(0) / batch.batch)};
  Residual x{embed(batch)};
  for (const Block& block : blocks_) {
    if (options_.recompute == Recompute::full && recording({x.x, x.branch})) {
      x = {recompute(x.sum(), [this, &block, context, statistics](const Var& again) {
        const ModuleScope scope(block.path);
        return block_forward(block, {again}, context, statistics).sum();
      })};
    } else {
      x = block_forward(block, std::move(x), context, statistics);
    }
  }
  return final_norm_->forward(std::move(x)).normed;
}

Dtype Gpt::logits_dtype() const { return config_.logits_dtype == LogitsDtype::fp32 ? stats_dtype(compute_) : compute_; }

LossTeacher Gpt::as_teacher(const TokenBatch& batch, const Teaching& teaching) {
  const Tape::Scope paused(nullptr);
  return {.x = hidden(batch).value(), .weight = output_->weight(), .share = teaching.share, .temperature = teaching.temperature};
}

Var Gpt::loss(const TokenBatch& batch, const Tensor& targets, int64_t target_count, RouterStatistics* statistics,
              const Teaching& teaching) {
  LossOptions options{.vocab = *config_.vocab_size,
                      .target_count = target_count,
                      .logits_dtype = logits_dtype(),
                      .chunk_elements = options_.logits_at_a_time};
  if (teaching.teacher) {
    const TraceSpan span(Track::pass, "teacher");
    options.teacher = teaching.teacher->as_teacher(batch, teaching);
    if (teaching.cross_entropy.defined()) options.row_cross_entropies = empty(device_, stats_dtype(compute_), {targets.elements()});
  }
  const Var x = hidden(batch, statistics);
  const ModuleScope scope("output");
  const Var loss = cross_entropy(x, output_->weight(), targets, options, output_operands_, context(batch));
  if (const Tensor& rows = options.row_cross_entropies; rows.defined())
    device_.run(Sum{.x = rows, .out = teaching.cross_entropy, .factor = 1.0 / static_cast<double>(target_count)});
  return loss;
}

Tensor Gpt::target_losses(const TokenBatch& batch, const Tensor& targets) {
  const Tape::Scope paused(nullptr);
  const Tensor losses = empty(device_, stats_dtype(compute_), {targets.elements()});
  cross_entropy(hidden(batch), output_->weight(), targets,
                {.vocab = *config_.vocab_size, .target_count = 1, .logits_dtype = logits_dtype(), .row_losses = losses}, output_operands_,
                context(batch));
  return losses;
}

void Gpt::join_expert_collectives() const {
  if (options_.mesh.expert.size() == 1) return;
  for (const Block& block : blocks_) {
    if (const auto* moe = std::get_if<Moe>(&block.mlp)) moe->join_collectives(empty(device_, compute_, {0, config_.hidden_size}));
  }
}

Tensor Gpt::logits(const TokenBatch& batch) {
  const Tape::Scope paused(nullptr);
  return linear_fprop(hidden(batch).value(), output_->weight(), logits_dtype(), output_operands_, context(batch));
}

Tensor Gpt::hidden_states(const TokenBatch& batch) {
  const Tape::Scope paused(nullptr);
  return hidden(batch).value();
}

Tensor Gpt::logits_of(const Tensor& hidden_states) const {
  require(options_.mesh.tensor.size() == 1, "logits_of: is for a model that no ranks share");
  const Tape::Scope paused(nullptr);
  return linear_fprop(hidden_states, output_->weight(), logits_dtype(), output_operands_);
}

std::vector<KeyValueCache> Gpt::new_cache(int64_t positions) const {
  std::vector<KeyValueCache> cache(static_cast<size_t>(config_.num_layers));
  const Shape shape{std::min(positions, config_.max_position_embeddings), layout_.kv_heads * layout_.head_dim};
  for (KeyValueCache& layer : cache) {
    layer.keys = empty(device_, compute_, shape);
    layer.values = empty(device_, compute_, shape);
  }
  return cache;
}

Var Gpt::extended(const std::vector<int32_t>& tokens, const std::vector<std::vector<KeyValueCache>*>& caches) {
  const int64_t all = std::ssize(tokens), count = all / std::ssize(caches);
  std::vector<int32_t> positions;
  int64_t end = 0;
  for (const std::vector<KeyValueCache>* cache : caches) {
    const int64_t first = cache->at(0).length, room = cache->at(0).keys.dim(0);
    require(count > 0 && first + count <= room, "next_logits: ", first, " + ", count, " tokens, the cache holds ", room);
    for (int64_t i = 0; i < count; ++i) positions.push_back(static_cast<int32_t>(first + i));
    end = std::max(end, first + count);
  }
  const TokenBatch batch{.batch = std::ssize(caches),
                         .tokens = from_host(device_, Dtype::i32, {all}, tokens.data()),
                         .positions = from_host(device_, Dtype::i32, {all}, positions.data()),
                         .segment_starts = {}};
  SequenceContext context{
      .batch = batch.batch, .tokens = all, .positions = batch.positions, .segment_starts = {}, .rope_table = rope_table(end)};
  Residual x{embed(batch)};
  for (size_t i = 0; i < blocks_.size(); ++i) {
    context.caches.clear();
    for (std::vector<KeyValueCache>* cache : caches) context.caches.push_back(&(*cache)[i]);
    x = block_forward(blocks_[i], std::move(x), context);
  }
  return x.sum();
}

Tensor Gpt::next_logits_of(const Tensor& rows) const {
  const Var normed = final_norm_->forward({Var(rows)}).normed;
  return converted(linear_fprop(normed.value(), output_->weight(), logits_dtype(), output_operands_,
                                {.group = options_.mesh.tensor, .split = Split::column_parallel}),
                   Dtype::f32);
}

Tensor Gpt::next_logits(const std::vector<int32_t>& tokens, std::vector<KeyValueCache>& cache) {
  const FewRows scope;
  const Tape::Scope paused(nullptr);
  const Mesh& mesh = options_.mesh;
  // The last token's row goes to every rank; the last rank has it in any case.
  const Tensor x = extended(tokens, {&cache}).value(), row = empty(device_, x.dtype(), {1, x.dim(1)});
  const int last = mesh.tensor.size() - 1;
  if (!mesh.sequence_parallel || mesh.tensor.rank() == last) device_.run(Convert{.x = x.slice(x.dim(0) - 1, x.dim(0)), .out = row});
  if (mesh.sequence_parallel) mesh.tensor.broadcast(row, last, Purpose::other);
  const Tensor logits = next_logits_of(row);
  return logits.view({logits.elements()});
}

Tensor Gpt::next_logits(const std::vector<int32_t>& tokens, const std::vector<std::vector<KeyValueCache>*>& caches) {
  require(tokens.size() == caches.size(), "next_logits: ", tokens.size(), " tokens for ", caches.size(), " sequences");
  const FewRows scope(std::max(kFewRows, std::ssize(tokens)));
  const Tape::Scope paused(nullptr);
  const Var x = extended(tokens, caches);
  return next_logits_of(gathered_tokens(x, tensor_parallel(options_.mesh, Split::column_parallel, std::ssize(tokens))).value());
}

}  // namespace mantissa
