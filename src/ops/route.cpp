#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"
#include "ops/permuted_tokens.h"

namespace mantissa {

Routing route(const Var& logits, const RoutingOptions& options, const Tensor& bias) {
  const Tensor& x = logits.value();
  Backend& device = x.device();
  const int64_t tokens = x.dim(0), assignments = options.rule.top_k;
  Routing out{.weights = {},
              .experts = empty(device, Dtype::i32, {tokens, assignments}),
              .scores = empty_like(x),
              .counts = empty(device, Dtype::i32, {options.sequences, x.dim(1)})};
  const Tensor weights = empty(device, x.dtype(), {tokens, assignments});
  device.run(RouteForward{.logits = x,
                          .experts = out.experts,
                          .weights = weights,
                          .scores = out.scores,
                          .counts = out.counts,
                          .rule = options.rule,
                          .bias = bias});
  out.weights =
      record("route", weights, {logits}, [x, options, experts = out.experts, scores = out.scores, counts = out.counts](const Tensor& dy) {
        const Tensor dx = empty_like(x);
        dy.device().run(RouteBackward{.logits = x,
                                      .scores = scores,
                                      .experts = experts,
                                      .counts = counts,
                                      .dweights = dy,
                                      .dlogits = dx,
                                      .rule = options.rule,
                                      .balance = options.balance,
                                      .sequence_balance = options.sequence_balance,
                                      .z = options.z});
        return std::vector<Tensor>{dx};
      });
  return out;
}

Dispatch dispatch(const Tensor& experts, int64_t num_experts, int64_t multiple, int64_t capacity, const Communicator& ranks,
                  ExpertGradients gradients) {
  if (ranks.size() > 1) return dispatch_among(ranks, gradients, experts, num_experts, multiple, capacity);
  Backend& device = experts.device();
  Dispatch out{.offsets = empty(device, Dtype::i32, {num_experts + 1}),
               .rows = empty_like(experts),
               .assignments = empty(device, Dtype::i32, {dispatch_rows(experts.elements(), num_experts, multiple)}),
               .per_row = experts.dim(1)};
  device.run(DispatchTable{.experts = experts,
                           .offsets = out.offsets,
                           .rows = out.rows,
                           .assignments = out.assignments,
                           .multiple = multiple,
                           .capacity = capacity});
  return out;
}

}  // namespace mantissa
