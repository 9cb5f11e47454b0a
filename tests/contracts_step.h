// Contracts of the kernels that end a step.
#pragma once

#include "contract_check.h"

namespace mantissa::test {

inline void adamw(ContractCheck& c) {
  using K = AdamW;
  const K good{.master = c.f32({4, 3}),
               .m = c.f32({4, 3}),
               .v = c.f32({4, 3}),
               .grad = c.f32({4, 3}),
               .step = c.f32({5}),
               .beta1 = 0.9,
               .beta2 = 0.95,
               .eps = 1e-8,
               .weight_decay = 0.1,
               .value = c.f32({4, 3})};
  c.operands("adamw", good, {{"master", &K::master}, {"m", &K::m}, {"v", &K::v}, {"grad", &K::grad}, {"step", &K::step}});
  c.optional_operands("adamw", good, {{"value", &K::value}});
  K bad = good;
  bad.value = bad.master;
  c.refuses(bad, "adamw", {"value overlaps master"});
}

inline void finish_gradients(ContractCheck& c) {
  using K = FinishGradients;
  const K good{.partials = c.f64({3}),
               .losses = c.f64({4}),
               .flags = c.i32({1}),
               .step = c.f32({5}),
               .outcome = c.f64({4}),
               .clip = 1.0,
               .pairwise = true};
  c.operands("finish_gradients", good, {{"step", &K::step}, {"outcome", &K::outcome}});
  for (Tensor K::*const operand : {&K::partials, &K::losses, &K::flags}) {
    K bad = good;
    bad.*operand = Tensor();
    c.refuses(bad, "finish_gradients", {"is missing"});
    bad.*operand = c.f32({4});
    c.refuses(bad, "finish_gradients", {"is fp32"});
    bad.*operand = (good.*operand).view({1, (good.*operand).elements()});
    c.refuses(bad, "finish_gradients", {"[1, "});
  }
  K odd = good;
  odd.losses = c.f64({3});
  c.refuses(odd, "finish_gradients", {"power of two", "3"});
  odd.pairwise = false;
  c.accepts(odd);
}

inline void sum(ContractCheck& c) {
  const Tensor x = c.f32({7});
  c.accepts(Sum{.x = x, .out = c.f64({1}), .factor = 1.0});
  c.refuses(Sum{.x = c.i32({7}), .out = c.f64({1}), .factor = 1.0}, "sum", {"x is i32"});
  c.refuses(Sum{.x = x, .out = c.f32({1}), .factor = 1.0}, "sum", {"out is fp32"});
  c.refuses(Sum{.x = x, .out = c.f64({2}), .factor = 1.0}, "sum", {"out", "[2]"});
}

inline void squared_norm(ContractCheck& c) {
  using K = SquaredNorm;
  c.operands("squared_norm", K{.x = c.f32({32, 7}), .partials = c.f64({1})}, {{"partials", &K::partials}});
  c.refuses(K{.x = c.f32({33, 7}), .partials = c.f64({1})}, "squared_norm", {"partials", "[2]"});
  c.refuses(K{.x = c.f32({}), .partials = c.f64({1})}, "squared_norm", {"x is fp32 []", "[N, ...]"});
}

}  // namespace mantissa::test
