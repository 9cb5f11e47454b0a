#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
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

// Dispatches tokens. Where groups usually have this many rows, the library of a GPU multiplies one group after the other (gemm_path.h). The
// host must then know where they end: it reads that once a dispatch.
Dispatch dispatch(const Tensor& experts, int64_t num_experts, int64_t multiple, int64_t capacity, const Communicator& ranks,
                  ExpertGradients gradients) {
  if (ranks.size() > 1) return dispatch_among(ranks, gradients, experts, num_experts, multiple, capacity);
  Dispatch out = dispatch_here(experts, num_experts, multiple, capacity);
  const int64_t usual_rows = ceil_div(experts.elements(), num_experts);
  const bool for_library = experts.device().gemm_device().library > 0 && usual_rows >= kRowsForLibrary;
  if (!for_library || gradients != ExpertGradients::summed) return out;
  const std::vector<int32_t> ends = to_host<int32_t>(out.offsets);
  out.host = std::make_shared<const HostGroups>(HostGroups{.offsets = {ends.begin(), ends.end()}, .usual_rows = usual_rows});
  return out;
}

}  // namespace mantissa
