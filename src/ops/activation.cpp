#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"

namespace mantissa {
namespace {

// Returns the output as a Var that later operations save as a value, or as the means to recompute it.
Var kept(Var out, Keep keep, std::function<Tensor()> forward) {
  return keep == Keep::value ? out : rebuilt_on_demand(std::move(out), std::move(forward));
}

}  // namespace

Var swiglu(const Var& x, Keep keep, double limit) {
  const auto forward = [value = x.value(), limit] {
    Tensor out = empty(value.device(), value.dtype(), {value.dim(0), value.dim(1) / 2});
    value.device().run(SwiGluForward{.x = value, .out = out, .limit = limit});
    return out;
  };
  Var out = record("swiglu", forward(), {x}, [value = x.value(), limit](const Tensor& dy) {
    Tensor dx = empty_like(value);
    dy.device().run(SwiGluBackward{.x = value, .dy = dy, .dx = dx, .limit = limit});
    return std::vector<Tensor>{dx};
  });
  return kept(std::move(out), keep, forward);
}

Var gelu(const Var& x, GeluForm form, Keep keep) {
  const auto forward = [value = x.value(), form] {
    Tensor out = empty_like(value);
    value.device().run(GeluForward{.x = value, .out = out, .form = form});
    return out;
  };
  Var out = record("gelu", forward(), {x}, [value = x.value(), form](const Tensor& dy) {
    Tensor dx = empty_like(value);
    dy.device().run(GeluBackward{.x = value, .dy = dy, .dx = dx, .form = form});
    return std::vector<Tensor>{dx};
  });
  return kept(std::move(out), keep, forward);
}

}  // namespace mantissa
