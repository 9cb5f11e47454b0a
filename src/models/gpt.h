// The decoder-only, pre-norm transformer with every option of ModelConfig. Qwen3, Llama and GPT-2 shapes are settings of this one class.
#pragma once

#include <deque>
#include <limits>
#include <variant>
#include <vector>

#include "models/model_shape.h"
#include "nn/moe.h"

namespace mantissa {

struct GptOptions {
  Recompute recompute = Recompute::none;
  bool gradients = true;
  Mesh mesh{};                // its ranks hold this model together
  int64_t micro_batches = 1;  // in a global batch: each has its share of the auxiliary losses of routers
  AttentionBy attention = AttentionBy::own;
  bool quantized_dispatch = true;  // dispatches tokens to experts as codes where GEMMs there read codes
  ExpertGradients expert_gradients = ExpertGradients::summed;
  int64_t logits_at_a_time = kLogitsAtATime;  // elements of a chunk of the loss
};

// Rows of tokens with what belongs to them; all are i32 tensors [batch * length].
struct TokenBatch {
  int64_t batch;
  Tensor tokens, positions;
  Tensor segment_starts;  // undefined: attention sees the whole past
  // Tokens of each row; the rest of it is padding: no expert takes it, and no loss, statistic or limit of experts counts it. Empty: there
  // is none.
  std::vector<int32_t> lengths = {};

  int64_t padded() const;  // how many tokens are padding
};

class Gpt;

// A model whose distribution another one learns beside its targets, or instead of them, by LossTeacher. It is held by the same ranks,
// computes in the same dtype and has the same columns of logits; its own size is free.
struct Teaching {
  Gpt* teacher = nullptr;  // null: the targets are all there is to learn
  double share = 1.0, temperature = 1.0;
  Tensor cross_entropy{};  // with a teacher, where given, fp64 [1]: gets what the loss would be without it
};

class Gpt {
 public:
  // Adds all parameters of model_shape(config), stored and multiplied as the plan says, and allocates them, uninitialized.
  // config.vocab_size must be set. Throws Error(internal) otherwise and for the plan of another model, Error(usage) for an output
  // projection that cannot be quantized as asked for (precision.fp8_output_proj).
  Gpt(const ModelConfig& config, Backend& device, const PrecisionPlan& plan, const GptOptions& options);
  Gpt(const Gpt&) = delete;
  Gpt& operator=(const Gpt&) = delete;

  const ModelConfig& config() const { return config_; }
  ParameterSet& parameters() { return parameters_; }
  Backend& device() const { return device_; }
  Dtype compute() const { return compute_; }

  // Returns the sum of the losses of targets (>= 0) divided by target_count, one fp64. Under a Tape::Scope it can be differentiated; the
  // gradients include those of the auxiliary losses of routers. With statistics, it records what each router did, and experts take as many
  // tokens as their capacity, as in training; without, they take all. All ranks that share experts call it together, as they do logits().
  // With a teacher, the loss is that of LossTeacher; the teacher's forward pass comes first, and nothing of it is recorded.
  Var loss(const TokenBatch& batch, const Tensor& targets, int64_t target_count, RouterStatistics* statistics = nullptr,
           const Teaching& teaching = {});
  // Joins the collectives of loss() on ranks that share experts, with zero tokens and without gradients.
  void join_expert_collectives() const;
  // Returns what each target adds to the loss, [batch * length] of stats: minus the logarithm of its probability, 0 where there is no
  // target. Records no gradients.
  Tensor target_losses(const TokenBatch& batch, const Tensor& targets);
  // Returns logits [batch * length, padded vocabulary] of a whole batch in the logits dtype; for tests and small evaluations.
  Tensor logits(const TokenBatch& batch);

  // Logits in parts of its rows: hidden_states() returns what the output projection reads of a whole batch, [batch * length, hidden],
  // without gradients; logits_of() the logits of some of these rows, each with the bits that it has among all.
  Tensor hidden_states(const TokenBatch& batch);
  Tensor logits_of(const Tensor& hidden_states) const;

  // Generate. `tokens` extend the sequence in `cache` (one entry per layer, from new_cache()); next_logits() returns the logits of the last
  // one, [padded vocabulary] fp32, and throws Error(internal) if the cache cannot hold them. A cache has room for so many positions, at
  // most for max_position_embeddings.
  std::vector<KeyValueCache> new_cache(int64_t positions = std::numeric_limits<int64_t>::max()) const;
  Tensor next_logits(const std::vector<int32_t>& tokens, std::vector<KeyValueCache>& cache);
  // Like the other next_logits(), for several sequences, each with one token more: returns [sequences, padded vocabulary], to the bits that
  // each has alone.
  Tensor next_logits(const std::vector<int32_t>& tokens, const std::vector<std::vector<KeyValueCache>*>& caches);

 private:
  struct Block {
    std::string path;
    NormLayer attn_norm;
    Attention attn;
    NormLayer mlp_norm;
    std::variant<Mlp, Moe> mlp;
  };
  Dtype logits_dtype() const;
  TensorParallel context(const TokenBatch& batch) const;  // context of the embedding and the output projection
  LossTeacher as_teacher(const TokenBatch& batch, const Teaching& teaching);
  Tensor router_mask(const TokenBatch& batch) const;
  // Extends each sequence by as many tokens; returns what the final norm reads of the tokens that this rank has.
  Var extended(const std::vector<int32_t>& tokens, const std::vector<std::vector<KeyValueCache>*>& caches);
  Tensor next_logits_of(const Tensor& rows) const;
  Var embed(const TokenBatch& batch);
  // Takes its input over, so that no longer than needed are both parts of a sum in memory.
  Residual block_forward(const Block& block, Residual&& in, const SequenceContext& context, RouterStatistics* statistics = nullptr) const;
  Var hidden(const TokenBatch& batch, RouterStatistics* statistics = nullptr);  // after the final norm, [N, hidden]
  Tensor rope_table(int64_t positions);                                         // for at least so many positions; undefined if not rotary

  ModelConfig config_;
  Backend& device_;
  Dtype compute_;
  GptOptions options_;
  HeadLayout layout_;
  ParameterSet parameters_;
  Parameter* embed_ = nullptr;
  Parameter* position_ = nullptr;
  std::deque<Block> blocks_;
  std::optional<NormLayer> final_norm_;
  Parameter* output_ = nullptr;  // the embedding if tied
  LinearOperands output_operands_;
  Tensor rope_table_;  // [positions, head_dim] fp32: cos | sin; grows with the sequences up to max_position_embeddings
};

}  // namespace mantissa
