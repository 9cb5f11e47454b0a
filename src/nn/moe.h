// Mixture of experts in place of an MLP: a router, experts with grouped weights, and, where the plan has it, a shared MLP that every token
// passes.
#pragma once

#include <string>
#include <vector>

#include "nn/modules.h"

namespace mantissa {

struct MoeOptions {
  RoutingOptions routing;  // for one sequence; forward() knows how many there are
  int64_t experts;
  double init_std, down_init_std;
  Keep keep;
  double limit;             // SwiGluForward::limit
  bool quantized_dispatch;  // codes move where the GEMMs read codes
  ExpertGradients expert_gradients = ExpertGradients::summed;
};

// Says what is kept of each router. Counts are there anyway; losses take a pass over all scores in fp64.
enum class RouterFigures { counts, counts_and_losses };

// Collects figures of routers on the device, a row for each forward pass and layer, so that one download has all of a step.
class RouterStatistics {
 public:
  static constexpr int64_t kLosses = 3;  // RouterLosses

  // Begins with room for so many rows, which may become more.
  RouterStatistics(RouterFigures wanted, int64_t room) : wanted_(wanted), room_(room) {}
  RouterFigures wanted() const { return wanted_; }
  // Returns the next row, [E + kLosses] fp64: the assignments of each expert before any was dropped, then the losses, if they are wanted.
  Tensor next(Backend& device, int64_t experts);
  Tensor figures() const { return passes_ == 0 ? Tensor() : figures_.slice(0, passes_); }  // [passes * layers, E + kLosses]

 private:
  RouterFigures wanted_;
  int64_t room_, passes_ = 0;
  Tensor figures_;
};

class Moe {
 public:
  // Adds path.router and path.experts.gate_up and .down, each with its bias where the plan has one, and, where the plan has them,
  // path.shared.gate_up and .down and the buffer path.expert_bias, which the router adds to its scores for the selection only. Tensor ranks
  // share every expert, expert ranks have some of them each.
  Moe(ParameterSet& set, const PrecisionPlan& plan, const std::string& path, const MoeOptions& options, const Mesh& mesh = {});
  // Maps [N, hidden] to [N, hidden], of this rank's share of the tokens. Each expert takes `capacity` tokens, 0: all, and none takes
  // padding, which no figure and no auxiliary loss of the router counts. Adds the figures of the router to the statistics, if given, but
  // not those of a forward pass that backward repeats. Ranks that share tokens each route all of them, because losses of sequences,
  // capacity and groups depend on all tokens, and a router is cheap compared with the experts. All ranks that share the experts call it
  // together, forward and backward.
  Var forward(const Var& x, const SequenceContext& context, int64_t capacity, RouterStatistics* statistics) const;
  // Joins the collectives of forward() with zero tokens. x [0, hidden].
  void join_collectives(const Tensor& x) const;

 private:
  struct GroupedWeight {  // a grouped weight of experts, and its bias
    std::string path;
    LinearOperands operands;
    Parameter* weight;
    Parameter* bias = nullptr;
    Var bias_var() const { return bias ? bias->var() : Var(); }
  };
  GroupedWeight grouped_weight(ParameterSet& set, const ModulePrecision& module, double init_std);
  Dispatch dispatched(const Tensor& experts, int64_t multiple, int64_t capacity) const;
  Var experts(const Var& x, const Var& weights, const Dispatch& to) const;

  std::string path_;
  MoeOptions options_;
  Mesh mesh_;
  std::optional<Rounding> numbered_ = {};  // rounding of simulated operands, whose rows are numbered
  Linear router_;
  const Buffer* expert_bias_ = nullptr;
  GroupedWeight gate_up_, down_;
  int64_t multiple_;  // rows of an expert are padded to it, so that groups begin at whole blocks of both GEMMs
  std::optional<Mlp> shared_;
};

}  // namespace mantissa
