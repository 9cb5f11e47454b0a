// The building blocks of a transformer. A module takes path, sizes and formats from its entry of the precision plan, adds its parameters to
// the ParameterSet when it is built, and has a forward() of its own shape, because composition is by concrete types. The set must outlive
// the modules; the plan need not.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mantissa/precision/plan.h"
#include "nn/parameter.h"
#include "ops/ops.h"

namespace mantissa {

// Specify a rank's share of the weight of a module, and of its bias, stored as the plan says.
ParameterSpec weight_of(const ModulePrecision& module, Init init, const ModelRanks& ranks = {},
                        ExpertGradients gradients = ExpertGradients::summed);
ParameterSpec bias_of(const ModulePrecision& module, const ModelRanks& ranks = {}, ExpertGradients gradients = ExpertGradients::summed);
// Returns the specs of weights and biases of all modules in the order in which a model adds them, without initial values.
std::vector<ParameterSpec> parameter_specs(const PrecisionPlan& plan, const ModelRanks& ranks = {},
                                           ExpertGradients gradients = ExpertGradients::summed);

class Linear {
 public:
  // Adds weight [out, in] and, if the plan has one, a bias that starts at 0.
  Linear(ParameterSet& set, const ModulePrecision& module, double init_std, const Mesh& mesh = {});
  // Maps [N, in] to [N, out], or this rank's share of either. tokens: N over all ranks.
  Var forward(const Var& x, int64_t tokens) const {
    const ModuleScope scope(path_);
    return linear(x, weight_->weight(), bias_ ? bias_->var() : Var(), operands_, tensor_parallel(mesh_, weight_->sharding.split, tokens));
  }

 private:
  std::string path_;
  LinearOperands operands_;
  Mesh mesh_;
  Parameter* weight_;
  Parameter* bias_ = nullptr;
};

struct NormOptions {
  bool layer_norm = false;  // else RMSNorm, which has no bias
  double eps = 1e-6;
};

class NormLayer {
 public:
  NormLayer(ParameterSet& set, const ModulePrecision& module, const NormOptions& options, const Mesh& mesh = {});
  NormedSum forward(const Residual& x) const;  // [N, C] -> [N, C]

 private:
  std::string path_;
  Parameter* weight_;
  Parameter* bias_ = nullptr;
  NormOptions options_;
};

// Holds keys and values of one sequence in one layer, [P, kv_heads * D] each.
struct KeyValueCache {
  Tensor keys, values;
  int64_t length = 0;  // positions stored
};

// Inputs of attention besides x.
struct SequenceContext {
  int64_t batch = 1;
  int64_t tokens = 0;                       // N, of all ranks
  Tensor positions;                         // [N] i32
  Tensor segment_starts;                    // [N] i32, or undefined
  int64_t padded = 0;                       // tokens that are padding
  Tensor router_mask{};                     // [N, E], added to the logits of routers (Gpt::router_mask()); undefined without padding
  Tensor rope_table;                        // undefined: no rotation
  std::vector<KeyValueCache*> caches = {};  // generation: the rows extend these sequences, each by as many
};

struct AttentionOptions {
  HeadLayout layout;
  double norm_eps, init_std, out_init_std;
  bool recompute;      // keep only the projected q|k|v for backward
  int64_t window = 0;  // keys that a query sees; 0: all
};

class Attention {
 public:
  // Adds path.qkv, path.out and, where the plan has them, path.q_norm, path.k_norm and path.sinks; tensor ranks share them by heads.
  Attention(ParameterSet& set, const PrecisionPlan& plan, const std::string& path, const AttentionOptions& options, const Mesh& mesh = {});
  Var forward(const Var& x, const SequenceContext& context) const;  // [N, hidden] -> [N, hidden]

 private:
  Var core(Var x, const SequenceContext& context) const;
  Var cached(const Var& qkv, const SequenceContext& context) const;

  std::string path_;
  AttentionOptions options_;
  Linear qkv_, out_;
  Parameter* q_norm_ = nullptr;
  Parameter* k_norm_ = nullptr;
  Parameter* sinks_ = nullptr;
};

struct MlpOptions {
  std::optional<GeluForm> gelu;  // none: SwiGLU with gate and up fused
  double init_std, down_init_std;
  Keep keep;
  double limit = 0.0;  // SwiGluForward::limit
};

class Mlp {
 public:
  // Adds path.up or path.gate_up, and path.down.
  Mlp(ParameterSet& set, const PrecisionPlan& plan, const std::string& path, const MlpOptions& options, const Mesh& mesh = {});
  Var forward(const Var& x, int64_t tokens) const;  // [N, hidden] -> [N, hidden]

 private:
  std::string path_;
  MlpOptions options_;
  Linear up_, down_;
};

}  // namespace mantissa
