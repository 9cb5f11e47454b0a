// The precision of every module, resolved from the configuration before any weight exists and equal on every rank. One plan decides about
// compute, storage, the bytes on the wire and the exported checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "mantissa/json/json.h"
#include "mantissa/precision/operands.h"
#include "mantissa/precision/rules.h"
#include "mantissa/tensor/sharding.h"

namespace mantissa {

enum class StoredType { fp32, bf16, e4m3, e5m2, e2m1, nvfp4 };
const char* stored_type_name(StoredType type);

// Rows of a fused weight that belong together: q, k and v of attn.qkv; gate and up of mlp.gate_up.
struct ModulePart {
  std::string name;
  int64_t out;
  std::string out_key = {};
  bool operator==(const ModulePart& other) const = default;
};

// Role of a module in its layer, where something depends on it. mlp_output: the second linear of an MLP or of experts. head_norm: the norm
// of q or k.
enum class ModuleRole { other, attention_output, head_norm, mlp_output };

struct ModuleShape {
  std::string path;
  ModuleKind kind = ModuleKind::linear;
  ModuleRole role = ModuleRole::other;
  int64_t out = 0, in = 0;                // weight [out, in]; norms and sinks have [out] and in 0. out 0: the vocabulary is not known yet
  int64_t bias = 0;                       // elements, of all matrices of a grouped weight
  int64_t padding = 0;                    // last rows of the weight, of no token: zero, and never stored
  std::vector<ModulePart> parts = {};     // empty: one part
  Split split = Split::none;              // each part by rows, or all by columns
  bool experts = false;                   // a grouped weight of experts, one below the other
  bool projects = false;                  // an embedding that is the output projection, too
  int64_t matrices = 1, active = 1;       // matrices of a grouped weight; active: those that a token is multiplied with
  int64_t window = 0;                     // for attn.out: keys that a query sees at most; 0: all
  std::string buffer_name = {};           // name of state that no gradient trains: a router's expert bias
  int64_t buffer = 0;                     // how many there are
  std::string out_key = {}, in_key = {};  // the key of the configuration whose value this size is, for errors; "": of no single one
  std::string weight_name() const { return kind == ModuleKind::sinks ? path : path + ".weight"; }
  std::string bias_name() const { return path + ".bias"; }
  int64_t rows() const { return matrices * out; }
  int64_t weight_elements() const { return in == 0 ? out : rows() * in; }
  int64_t active_elements() const { return weight_elements() / matrices * active; }
  int64_t active_parameters() const { return active_elements() + bias / matrices * active; }
  int64_t parameters() const { return weight_elements() + bias; }
  bool is_token_table() const { return kind == ModuleKind::embedding && split == Split::column_parallel; }
  bool multiplies() const { return has_gemm(kind) || projects; }
  // Return how these ranks share the weight and the bias, which is whole where they divide the columns of the weight.
  Sharding sharding(ModelRanks ranks) const;
  Sharding bias_sharding(ModelRanks ranks) const;
  ModuleShape on_rank(const ModelRanks& ranks) const;  // the part that each rank holds: matrices, out, in, bias and parts of it
  bool operator==(const ModuleShape& other) const = default;
};

// Description of a model, as far as a plan needs it.
struct ModelShape {
  std::vector<ModuleShape> modules;
  bool tied_embeddings = false;  // then there is no module `output`
  bool fp32_logits = false;
  int64_t tensor = 1;  // ranks that share each weight
};

// How the parameters of a module are trained (optimizer.rules).
struct ModuleTraining {
  double lr_factor = 1.0;                   // factor of the learning rate; 0: they stay as they are, without gradient and moments
  std::optional<double> weight_decay = {};  // in place of optimizer.weight_decay
  bool muon = false;                        // the weight, by Muon in place of AdamW; the bias by AdamW all the same

  bool frozen() const { return lr_factor == 0.0; }
};

// `rule` is the key that decided, "precision.recipe", "precision.rules.2" or "precision.fp8_output_proj", or "" where none did; `match` is
// the pattern of a rule. `bytes` counts resident memory: the parameter and its quantized copy, without gradients and optimizer state; an
// fp32 parameter is its own master.
struct ModulePrecision {
  ModuleShape module;
  std::string rule, match;
  Recipe recipe;
  StoredType storage = StoredType::bf16;   // type of the parameter in memory
  StoredType wire = StoredType::bf16;      // type in which parameters are gathered
  StoredType exported = StoredType::bf16;  // type that fprop multiplies by, and so that of an export
  int64_t bytes = 0;
  ModuleTraining training = {};

  int64_t bytes_on_rank(const ModelRanks& ranks) const;  // the part of `bytes` that each rank holds

  // Returns whether the codes are the parameter, without a value beside them.
  bool stores_only_codes() const { return storage != StoredType::fp32 && storage != StoredType::bf16; }
  // Returns the format of the weight's codes in memory, beside its value or in its place; none if no GEMM reads codes.
  const Quantization& resident_codes() const { return recipe.reads_weight_codes() ? recipe.weight : recipe.weight_fake_quant; }
};

// An output projection that is to take the formats of the ambient recipe.
struct OutputProjection {
  bool tied_embeddings = false, fp32_logits = false;
  int64_t rows = 0;    // padded vocabulary, 0 if it is not known yet
  int64_t tensor = 1;  // ranks that share the rows
};
// Lists the unmet conditions of precision.fp8_output_proj; each message continues the name of the switch. Both the config and the
// constructor of the layer check them.
std::vector<std::string> output_projection_problems(const Recipe& ambient, const OutputProjection& output);

class PrecisionPlan {
 public:
  // Own recipes must be complete (complete_recipes). Everything that is wrong is reported with the key at fault; then the plan is unusable.
  static PrecisionPlan resolve(const PrecisionConfig& config, const ModelShape& model, ConfigReport& report);
  // Takes modules that are already resolved.
  PrecisionPlan(Dtype compute, std::vector<ModulePrecision> modules);

  Dtype compute() const { return compute_; }             // dtype of activations, and of all that belongs to no module
  bool quantizes_operands() const;                       // true if it quantizes operands of any GEMM
  bool native_gemms() const { return native_gemms_; }    // a device may multiply codes as codes
  bool grouped_gemms() const { return grouped_gemms_; }  // a library may multiply all groups of rows at once
  const std::vector<ModulePrecision>& modules() const { return modules_; }
  const ModulePrecision* find(const std::string& path) const;  // null: the plan has no such module
  const ModulePrecision& of(const std::string& path) const;    // throws Error(internal) in that case
  // Returns the module that has this parameter, its weight or its bias. Throws Error(internal) if none has.
  const ModulePrecision& module_of(const std::string& parameter) const;
  int64_t parameters() const;
  int64_t trained_parameters() const;                        // parameters that are not frozen
  void set_training(const std::vector<ModuleTraining>& of);  // by module; else all are trained alike
  int64_t buffers() const;                                   // elements of state that no gradient trains
  int64_t active_parameters() const;  // parameters that a token is computed with: of expert weights, those of the experts it goes to
  int64_t bytes() const;              // resident, of all modules
  int64_t bytes_on_rank(const ModelRanks& ranks) const;
  int64_t bytes_beside_masters() const;  // like bytes(), without fp32 parameters, which are the masters

  // Returns the key of a recipe that simulates formats, which only CPUs compute, and what is wrong on another device; none: no recipe does.
  std::optional<RecipeProblem> needs_cpu() const;
  // Returns the XXH64 of what each module computes, stores, sends and exports; names of recipes and rules do not count.
  uint64_t hash() const;
  // In plan_text.cpp, as are the next four. Returns one entry per module, in the order of the model; "hash" as 16 hex digits.
  Json to_json() const;
  // Returns one sentence for each thing that is allowed but costs something or may not be meant.
  std::vector<std::string> warnings() const;
  // Returns what precision.fp8_param_gather, which is off, would save; none: nothing.
  std::optional<std::string> gather_advice() const;
  // Returns which experts get their tokens as values although precision.quantized_dispatch is on, and why; none: none does.
  const std::optional<std::string>& dispatch_advice() const { return dispatch_advice_; }
  // Returns what blocks of 1 x b cost that tiles do not, for weights that are multiplied as codes; none without such weights.
  std::optional<std::string> cost_of_rows() const;

 private:
  Dtype compute_;
  bool native_gemms_ = true, grouped_gemms_ = false;
  std::vector<ModulePrecision> modules_;
  std::unordered_map<std::string, size_t> by_path_, by_parameter_;
  std::vector<std::string> idle_keys_;  // warnings about the config
  std::optional<std::string> dispatch_advice_;
};

}  // namespace mantissa
