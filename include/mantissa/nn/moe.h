// Mixture of experts in place of an MLP: a router, experts whose weights are stacks, and, where the plan has it, an MLP that every token
// goes to.
#pragma once

#include <string>
#include <vector>

#include "mantissa/nn/modules.h"

namespace mantissa {

struct MoeOptions {
  RoutingOptions routing;  // of one sequence; forward() knows how many there are
  int64_t experts;
  double init_std, down_init_std;
  Keep keep;
  double limit;             // of SwiGLU (SwiGluForward)
  bool quantised_dispatch;  // codes move where the products read codes
  ExpertRanks ranks{};      // that share the experts
};

// What a router did in one forward pass.
struct RoutingRecord {
  Tensor counts;  // [sequences, E] i32: choices, before any was dropped
  Tensor losses;  // [3] fp64: RouterLosses; undefined where nobody asked
};

// What is kept of each router: its counts are there anyway, its losses take a pass over all scores in fp64.
enum class RouterFigures { counts, counts_and_losses };

// By forward pass and layer.
struct RoutingTally {
  RouterFigures wanted = RouterFigures::counts_and_losses;
  std::vector<RoutingRecord> records = {};
};

// Groups of rows begin at whole blocks of both products: rows of an expert are padded to a multiple of this.
int64_t row_multiple(const Recipe& gate_up, const Recipe& down);

class Moe {
 public:
  // path.router, path.experts.gate_up and .down, each with its bias where the plan has one, and, where the plan has them,
  // path.shared.gate_up and .down, and the buffer path.expert_bias, which the router adds to its scores for the choice only. Tensor ranks
  // share every expert.
  Moe(ParameterSet& set, const PrecisionPlan& plan, const std::string& path, const MoeOptions& options, const TensorRanks& ranks = {});
  // [N, hidden] -> [N, hidden], of this rank's share of so many tokens and sequences, each expert taking `capacity` tokens; 0: all. What
  // the router did goes to the tally, if there is one, but not what it does again in backward. Ranks that share tokens each route all of
  // them: scores of sequences, capacity and groups are of all tokens, and a router costs little beside the experts.
  // A call of all ranks that share the experts, forward and backward.
  Var forward(const Var& x, int64_t tokens, int64_t sequences, int64_t capacity, RoutingTally* tally) const;
  // The part of a rank without tokens in a forward() of the others. x [0, hidden].
  void serve(const Tensor& x) const;

 private:
  struct Stack {  // of experts' weights
    Recipe recipe;
    Parameter* weight;
    Parameter* bias = nullptr;
    Var bias_var() const { return bias ? bias->var() : Var(); }
  };
  Stack stack(ParameterSet& set, const ModulePrecision& module, double init_std) const;
  Var experts(const Var& x, const Var& weights, const Dispatch& to) const;

  MoeOptions options_;
  TensorRanks ranks_;
  int64_t multiple_;  // rows of experts are padded to it
  Linear router_;
  const Buffer* expert_bias_ = nullptr;
  Stack gate_up_, down_;
  std::optional<Mlp> shared_;
};

}  // namespace mantissa
