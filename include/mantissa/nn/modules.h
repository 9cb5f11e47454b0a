// The building blocks of a transformer. A module holds references to its parameters, adds them to the ParameterSet under its path when it
// is built, and has a forward() of its own shape: composition is by concrete types. The set must outlive the modules.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "mantissa/nn/parameter.h"
#include "mantissa/ops/ops.h"

namespace mantissa {

// What a module's products read, and whether its weight is kept as codes alone.
struct WeightPrecision {
  Recipe recipe{};
  bool codes_only = false;
  Storage storage() const;  // of the weight
};
// By the path of a module.
using PrecisionOf = std::function<WeightPrecision(const std::string& path)>;

class Linear {
 public:
  // weight [out, in], bias [out] if asked for (starts at 0).
  Linear(ParameterSet& set, const std::string& path, int64_t in, int64_t out, bool bias, double init_std, const PrecisionOf& precision);
  Var forward(const Var& x) const {  // [N, in] -> [N, out]
    return linear(x, weight_->weight(), bias_ ? bias_->var() : Var(), recipe_);
  }

 private:
  Recipe recipe_;
  Parameter* weight_;
  Parameter* bias_ = nullptr;
};

struct NormOptions {
  bool layer_norm = false;  // else RMSNorm
  bool bias = false;
  double eps = 1e-6;
};

class NormLayer {
 public:
  NormLayer(ParameterSet& set, const std::string& path, int64_t channels, const NormOptions& options, const PrecisionOf& precision);
  Var forward(const Var& x) const;  // [N, C] -> [N, C]

 private:
  Parameter* weight_;
  Parameter* bias_ = nullptr;
  NormOptions options_;
};

// Keys and values of one sequence in one layer, [P, kv_heads * D] each.
struct KeyValueCache {
  Tensor keys, values;
  int64_t length = 0;  // positions stored
};

// What attention needs besides its input.
struct SequenceContext {
  int64_t batch = 1;
  Tensor positions;                // [N] i32
  Tensor segment_starts;           // [N] i32, or undefined
  Tensor rope_table;               // undefined: no rotation
  KeyValueCache* cache = nullptr;  // generation: the rows extend this sequence
};

struct AttentionOptions {
  int64_t hidden;
  HeadLayout layout;
  bool qk_norm, qkv_bias, out_bias;
  double norm_eps, init_std, out_init_std;
  bool recompute;  // keep only the projected q|k|v for backward
};

class Attention {
 public:
  Attention(ParameterSet& set, const std::string& path, const AttentionOptions& options, const PrecisionOf& precision);
  Var forward(const Var& x, const SequenceContext& context) const;  // [N, hidden] -> [N, hidden]

 private:
  Var core(const Var& qkv, const SequenceContext& context) const;
  Var cached(const Var& qkv, const SequenceContext& context) const;

  AttentionOptions options_;
  Linear qkv_, out_;
  Parameter* q_norm_ = nullptr;
  Parameter* k_norm_ = nullptr;
};

struct MlpOptions {
  int64_t hidden, intermediate;
  std::optional<GeluForm> gelu;  // none: SwiGLU with gate and up fused
  bool bias;
  double init_std, down_init_std;
  Keep keep;
};

class Mlp {
 public:
  Mlp(ParameterSet& set, const std::string& path, const MlpOptions& options, const PrecisionOf& precision);
  Var forward(const Var& x) const;  // [N, hidden] -> [N, hidden]

 private:
  MlpOptions options_;
  Linear up_, down_;
};

}  // namespace mantissa
