#include "backend/checks.h"

#include <bit>

#include "backend/contract.h"

namespace mantissa {

void check(const Fill& k) { Contract("fill").output("out", k.out); }

void check(const Convert& k) {
  Contract contract("convert");
  contract.input("x", k.x).output("out", k.out, k.out.dtype(), k.x.shape());
  if (k.x.dtype() != k.out.dtype()) contract.floating("x", k.x).floating("out", k.out);
}

void check(const RandomNormal& k) {
  Contract contract("random_normal");
  contract.output("out", k.out).floating("out", k.out);
  contract.that(k.first_index >= 0, "first_index is ", k.first_index);
  const bool apart = k.row_stride == 0 || (k.out.shape().rank() > 0 && k.row_stride >= k.out.shape()[-1]);
  contract.that(apart, "row_stride is ", k.row_stride, ", out ", k.out.shape());
}

void check(const Add& k) {
  Contract contract("add");
  contract.input("a", k.a).floating("a", k.a);
  contract.input("b", k.b, k.a.dtype(), k.a.shape()).in_place("out", k.out, k.a.dtype(), k.a.shape());
}

void check(const SumRows& k) {
  Contract contract("sum_rows");
  contract.input("x", k.x).floating("x", k.x).rank("x", k.x, 2);
  contract.output("out", k.out, stats_dtype(k.x.dtype()), {k.x.dim(1)});
}

void check(const EmbeddingForward& k) {
  Contract contract("embedding");
  contract.input("ids", k.ids).rank("ids", k.ids, 1).has("ids", k.ids, Dtype::i32, k.ids.shape());
  contract.input("weight", k.weight).floating("weight", k.weight).rank("weight", k.weight, 2);
  contract.output("out", k.out, k.weight.dtype(), {k.ids.dim(0), k.weight.dim(1)});
}

void check(const EmbeddingBackward& k) {
  Contract contract("embedding backward");
  contract.input("dy", k.dy).floating("dy", k.dy).rank("dy", k.dy, 2);
  contract.input("ids", k.ids, Dtype::i32, {k.dy.dim(0)});
  contract.output("dweight", k.dweight).rank("dweight", k.dweight, 2);
  contract.that(k.dweight.dtype() == stats_dtype(k.dy.dtype()) && k.dweight.dim(1) == k.dy.dim(1), "dweight is ", k.dweight.dtype(), ' ',
                k.dweight.shape(), ", dy ", k.dy.dtype(), ' ', k.dy.shape());
}

void check(const SwiGluForward& k) {
  Contract contract("swiglu");
  contract.input("x", k.x).floating("x", k.x).rank("x", k.x, 2);
  contract.that(k.x.dim(1) % 2 == 0, "the rows of x have ", k.x.dim(1), " elements, not gate and up of one size");
  contract.output("out", k.out, k.x.dtype(), {k.x.dim(0), k.x.dim(1) / 2});
}

void check(const SwiGluBackward& k) {
  Contract contract("swiglu backward");
  contract.input("x", k.x).floating("x", k.x).rank("x", k.x, 2);
  contract.that(k.x.dim(1) % 2 == 0, "the rows of x have ", k.x.dim(1), " elements, not gate and up of one size");
  contract.input("dy", k.dy, k.x.dtype(), {k.x.dim(0), k.x.dim(1) / 2});
  contract.output("dx", k.dx, k.x.dtype(), k.x.shape());
}

void check(const GeluForward& k) {
  Contract contract("gelu");
  contract.input("x", k.x).floating("x", k.x).output("out", k.out, k.x.dtype(), k.x.shape());
}

void check(const GeluBackward& k) {
  Contract contract("gelu backward");
  contract.input("x", k.x).floating("x", k.x);
  contract.input("dy", k.dy, k.x.dtype(), k.x.shape()).output("dx", k.dx, k.x.dtype(), k.x.shape());
}

void check(const CrossEntropy& k) {
  Contract contract("cross_entropy");
  contract.input("logits", k.logits).floating("logits", k.logits).rank("logits", k.logits, 2);
  const int64_t rows = k.logits.dim(0);
  contract.input("targets", k.targets, Dtype::i32, {rows}).output("loss", k.loss, stats_dtype(k.logits.dtype()), {rows});
  contract.that(k.vocab > 0 && k.vocab <= k.logits.dim(1), "vocab is ", k.vocab, ", the rows of logits have ", k.logits.dim(1),
                " elements");
  if (k.dlogits.defined()) contract.in_place("dlogits", k.dlogits, k.logits.dtype(), k.logits.shape());
}

void check(const AdamW& k) {
  Contract contract("adamw");
  contract.output("master", k.master);
  const Dtype stats = k.master.dtype();
  contract.that(stats == Dtype::f32 || stats == Dtype::f64, "master is ", stats, ", not fp32 or fp64");
  contract.output("m", k.m, stats, k.master.shape()).output("v", k.v, stats, k.master.shape());
  contract.input("grad", k.grad, stats, k.master.shape());
  contract.input("step", k.step, Dtype::f32, {static_cast<int64_t>(StepValue::count)});
  if (k.value.defined()) contract.output("value", k.value, k.value.dtype(), k.master.shape()).floating("value", k.value);
}

void check(const FinishGradients& k) {
  Contract contract("finish_gradients");
  contract.input("partials", k.partials).rank("partials", k.partials, 1).has("partials", k.partials, Dtype::f64, k.partials.shape());
  contract.input("losses", k.losses).rank("losses", k.losses, 1).has("losses", k.losses, Dtype::f64, k.losses.shape());
  contract.input("flags", k.flags).rank("flags", k.flags, 1).has("flags", k.flags, Dtype::i32, k.flags.shape());
  contract.output("step", k.step, Dtype::f32, {static_cast<int64_t>(StepValue::count)});
  contract.output("outcome", k.outcome, Dtype::f64, {static_cast<int64_t>(StepOutcome::count)});
  const bool tree = std::has_single_bit(static_cast<uint64_t>(k.losses.dim(0)));
  contract.that(!k.pairwise || tree, "pairs need a power of two of losses, got ", k.losses.dim(0));
}

void check(const SquaredNorm& k) {
  Contract contract("squared_norm");
  contract.input("x", k.x).floating("x", k.x);
  contract.that(k.x.shape().rank() > 0, "x is a scalar, without rows");
  contract.output("partials", k.partials, Dtype::f64, {(k.x.dim(0) + 31) / 32});
}

}  // namespace mantissa
