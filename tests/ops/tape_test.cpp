#include "autograd/tape.h"

#include <deque>

#include "ops/ops.h"
#include "testing.h"

namespace mantissa::test::tape_test {

class TapeTest : public BackendTest {
 protected:
  Tensor random(Shape shape, uint32_t what) { return random_tensor(reference(), Dtype::f32, shape, what); }
  Leaf leaf(Shape shape) {
    return {.grad = tensor_of(reference(), Dtype::f32, shape, std::vector<double>(static_cast<size_t>(shape.elements()), std::nan("")))};
  }
  static std::vector<double> sum(const Leaf& a, const Leaf& b) {
    std::vector<double> out = values(a.grad);
    const std::vector<double> other = values(b.grad);
    for (size_t i = 0; i < out.size(); ++i) out[i] += other[i];
    return out;
  }
};

TEST_F(TapeTest, SharedGradientIsNotAliased) {
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var a = tape.input(random({2, 3}, 1)), b = tape.input(random({2, 3}, 2));
  const Var out = add(add(a, b), a);  // add hands one gradient tensor to both inputs; a gets two of them
  const Tensor dy = random({2, 3}, 3);
  const std::vector<double> one = values(dy);
  std::vector<double> two = one;
  for (double& x : two) x *= 2.0;
  tape.backward(out, dy);
  EXPECT_EQ(values(tape.take_gradient(a)), two);
  EXPECT_EQ(values(tape.take_gradient(b)), one) << "the sum for a was made in the tensor that b shares";
  EXPECT_EQ(values(dy), one) << "the caller's gradient was changed";
}

TEST_F(TapeTest, UnreachedInputHasNoGradient) {
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var a = tape.input(random({2, 3}, 1)), b = tape.input(random({2, 3}, 2));
  add(b, b);  // leads nowhere
  tape.backward(add(a, a), random({2, 3}, 3));
  EXPECT_TRUE(tape.take_gradient(a).defined());
  EXPECT_FALSE(tape.take_gradient(b).defined());
  EXPECT_FALSE(tape.take_gradient(a).defined()) << "taking moves it out";
}

// Tokens before a completion have no targets.
TEST_F(TapeTest, PositionsWithoutATargetHaveNoGradientOfTheLoss) {
  const std::vector<double> targets = {-1, -1, 4, -1, 0, 7, -1};
  for (Backend* const device : {&reference(), &fast()}) {
    Tape tape;
    const Tape::Scope scope(&tape);
    const Var x = tape.input(random_tensor(*device, Dtype::f32, {7, 32}, 1));
    Leaf dweight{.grad = tensor_of(*device, Dtype::f32, {8, 32}, std::vector<double>(8 * 32, 0))};
    const Var weight(random_tensor(*device, Dtype::f32, {8, 32}, 2), dweight);
    tape.backward(cross_entropy(x, weight, tensor_of(*device, Dtype::i32, {7}, targets),
                                {.vocab = 8, .target_count = 3, .logits_dtype = Dtype::f32}));
    const std::vector<double> dx = values(tape.take_gradient(x));
    for (size_t i = 0; i < dx.size(); ++i) EXPECT_EQ(dx[i] == 0.0, targets[i / 32] < 0) << i;
  }
}

TEST_F(TapeTest, NothingIsRecordedWithoutATapeOrWhilePausedOrForConstants) {
  Leaf dweight = leaf({3});
  const Tensor x = random({2, 3}, 1), w = random({3}, 2);
  EXPECT_FALSE(rms_norm(Var(x), Var(w, dweight), 1e-5).wants_gradient());
  Tape tape;
  const Tape::Scope scope(&tape);
  {
    const Tape::Scope paused(nullptr);
    EXPECT_EQ(Tape::current(), nullptr);
    EXPECT_FALSE(rms_norm(Var(x), Var(w, dweight), 1e-5).wants_gradient());
  }
  EXPECT_EQ(Tape::current(), &tape);
  EXPECT_FALSE(add(Var(x), Var(x)).wants_gradient());
  EXPECT_EQ(tape.nodes(), 0U);
  EXPECT_TRUE(rms_norm(Var(x), Var(w, dweight), 1e-5).wants_gradient());
  EXPECT_EQ(tape.nodes(), 1U);
}

TEST_F(TapeTest, AnErrorRestoresThePreviousTape) {
  Tape outer, inner;
  const Tape::Scope scope(&outer);
  try {
    const Tape::Scope nested(&inner);
    add(inner.input(random({2, 3}, 1)), Var(random({3, 2}, 2)));
    FAIL() << "shapes differ";
  } catch (const Error&) {
  }
  EXPECT_EQ(Tape::current(), &outer);
}

// The leaves that told that they are complete, in order, with the number of nodes of the tape that had run before.
TEST_F(TapeTest, ALeafIsReadyWhenTheLastOperationThatUsedItHasRun) {
  Leaf tied = leaf({3}), once = leaf({3}), unreached = leaf({3});
  std::vector<std::string> reported;
  tied.ready = [&] { reported.push_back(text("tied ", tied.written)); };
  once.ready = [&] { reported.push_back(text("once ", once.written)); };
  unreached.ready = [&] { reported.push_back(text("unreached ", unreached.written)); };
  const Tensor w = random({3}, 2);
  for (int pass = 1; pass <= 2; ++pass) {
    reported.clear();
    Tape tape;
    const Tape::Scope scope(&tape);
    const Var x = tape.input(random({2, 3}, 1));
    const Var first = rms_norm(x, Var(w, tied), 1e-5);
    const Var second = rms_norm(first, Var(w, once), 1e-5);
    rms_norm(second, Var(w, unreached), 1e-5);  // leads nowhere
    const Var out = rms_norm(second, Var(w, tied), 1e-5);
    EXPECT_EQ(tied.uses, 2);
    tape.backward(out, random({2, 3}, 3));
    EXPECT_EQ(reported, (std::vector<std::string>{"unreached 0", "once 1", "tied 1"})) << "pass " << pass;
    EXPECT_EQ(tied.uses, 0);
  }
}

TEST_F(TapeTest, ATapeThatIsDroppedHoldsNoLeafBackAfterItsReset) {
  Leaf used = leaf({3});
  int reported = 0;
  used.ready = [&] { ++reported; };
  const auto recorded = [&](Tape& tape) { return rms_norm(tape.input(random({2, 3}, 1)), Var(random({3}, 2), used), 1e-5); };
  {
    Tape dropped;
    const Tape::Scope scope(&dropped);
    recorded(dropped);
  }
  used.reset();
  Tape tape;
  const Tape::Scope scope(&tape);
  tape.backward(recorded(tape), random({2, 3}, 3));
  EXPECT_EQ(reported, 1);
}

TEST_F(TapeTest, ALeafOfARecomputedSegmentIsReadyWithinIt) {
  Leaf inner = leaf({3}), outer = leaf({3});
  std::vector<std::string> reported;
  inner.ready = [&] { reported.emplace_back("inner"); };
  outer.ready = [&] { reported.emplace_back("outer"); };
  const Tensor w = random({3}, 2);
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var x = rms_norm(tape.input(random({2, 3}, 1)), Var(w, outer), 1e-5);
  const Var out = recompute(x, [&](const Var& again) { return rms_norm(again, Var(w, inner), 1e-5); });
  EXPECT_EQ(inner.uses, 0) << "nothing is recorded before backward";
  tape.backward(out, random({2, 3}, 3));
  EXPECT_EQ(reported, (std::vector<std::string>{"inner", "outer"}));
}

TEST_F(TapeTest, BackwardRefusesConstantsAndAnotherNumberOfGradients) {
  Tape tape;
  EXPECT_THROW(tape.backward(Var(random({1}, 1))), Error);
  EXPECT_THROW(tape.take_gradient(Var(random({1}, 1))), Error);
  const Tape::Scope scope(&tape);
  const Var x = tape.input(random({2}, 1));
  const Var out = record("broken", x.value(), {x, x}, [](const Tensor& dy) { return std::vector<Tensor>{dy}; });
  EXPECT_THROW(tape.backward(out, x.value()), Error);
}

// One micro batch: d(weight) of x * weight^T under dy.
void micro_batch(const Tensor& x, const Tensor& weight, Leaf& leaf, const Tensor& dy) {
  Tape tape;
  const Tape::Scope scope(&tape);
  tape.backward(linear(Var(x), Var(weight, leaf), Var()), dy);
}

TEST_F(TapeTest, LeavesAddUpMicroBatchesAndResetOverwrites) {
  const Tensor w = random({4, 3}, 1), x1 = random({5, 3}, 2), x2 = random({5, 3}, 3), dy = random({5, 4}, 4);
  Leaf first = leaf({4, 3}), second = leaf({4, 3}), both = leaf({4, 3});  // all NaN: what is not overwritten shows
  micro_batch(x1, w, first, dy);
  micro_batch(x2, w, second, dy);
  micro_batch(x1, w, both, dy);
  micro_batch(x2, w, both, dy);
  EXPECT_TRUE(close(values(both.grad), sum(first, second), 1e-6));
  both.reset();
  micro_batch(x2, w, both, dy);
  EXPECT_TRUE(same_bits(both.grad, second.grad)) << "after reset the first contribution overwrites";
}

TEST_F(TapeTest, OneParameterUsedTwiceGetsBothContributions) {
  const Tensor w = random({3, 3}, 1), x = random({5, 3}, 2), dy = random({5, 3}, 3);
  Leaf tied = leaf({3, 3}), inner = leaf({3, 3}), outer = leaf({3, 3});
  const auto run = [&](Leaf& a, Leaf& b) {
    Tape tape;
    const Tape::Scope scope(&tape);
    tape.backward(linear(linear(Var(x), Var(w, a), Var()), Var(w, b), Var()), dy);
  };
  run(tied, tied);
  run(inner, outer);
  EXPECT_TRUE(close(values(tied.grad), sum(inner, outer), 1e-6));
}

TEST_F(TapeTest, BackwardFreesWhatItSaved) {
  const Tensor x = random({64, 64}, 1), dy = random({64, 64}, 2);
  const int64_t before = reference().allocator_stats().in_use;
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var in = tape.input(x);
  tape.backward(gelu(gelu(in, GeluForm::erf, Keep::value), GeluForm::erf, Keep::value), dy);
  EXPECT_EQ(tape.nodes(), 0U);
  tape.take_gradient(in);
  EXPECT_EQ(reference().allocator_stats().in_use, before);
}

// Two blocks of a small network; depth 0: no recompute, 1: each block, 2: each block inside a recomputed pair.
class RecomputeTest : public TapeTest {
 protected:
  struct Gradients {
    Tensor out, dx;
    std::deque<Leaf> leaves;
    int64_t kept;  // bytes between forward and backward
  };

  Var block(const Var& x, size_t i, std::deque<Leaf>& leaves) {
    const Var normed = rms_norm(x, Var(norms_[i], leaves[3 * i]), 1e-5);
    const Var hidden = linear(normed, Var(ups_[i], leaves[3 * i + 1]), Var());
    return add(x, linear(swiglu(hidden, Keep::nothing), Var(downs_[i], leaves[3 * i + 2]), Var()));
  }

  std::deque<Leaf> new_leaves() {
    std::deque<Leaf> out;
    for (int i = 0; i < 2; ++i) {
      for (const Shape shape : {Shape{kWidth}, Shape{2 * kHidden, kWidth}, Shape{kWidth, kHidden}}) out.push_back(leaf(shape));
    }
    return out;
  }
  Gradients run(int depth) {
    Gradients g;
    g.leaves = new_leaves();
    const auto one = [&](const Var& x, size_t i) {
      const auto segment = [this, i, &g](const Var& v) { return block(v, i, g.leaves); };
      return depth > 0 ? recompute(x, segment) : segment(x);
    };
    const auto pair = [&](const Var& x) { return one(one(x, 0), 1); };
    const int64_t before = reference().allocator_stats().in_use;
    Tape tape;
    const Tape::Scope scope(&tape);
    const Var x = tape.input(x_), out = depth > 1 ? recompute(x, pair) : pair(x);
    g.kept = reference().allocator_stats().in_use - before;
    g.out = out.value();
    tape.backward(out, dy_);
    g.dx = tape.take_gradient(x);
    return g;
  }

  static constexpr int64_t kRows = 9, kWidth = 8, kHidden = 20;
  Tensor x_ = random({kRows, kWidth}, 1), dy_ = random({kRows, kWidth}, 2);
  Tensor norms_[2] = {random({kWidth}, 3), random({kWidth}, 4)};
  Tensor ups_[2] = {random({2 * kHidden, kWidth}, 5), random({2 * kHidden, kWidth}, 6)};
  Tensor downs_[2] = {random({kWidth, kHidden}, 7), random({kWidth, kHidden}, 8)};
};

TEST_F(RecomputeTest, NestedRecomputeEqualsNoneBitForBit) {
  const Gradients plain = run(0);
  int64_t kept = plain.kept;
  for (const int depth : {1, 2}) {
    const Gradients again = run(depth);
    EXPECT_TRUE(same_bits(again.out, plain.out)) << depth;
    EXPECT_TRUE(same_bits(again.dx, plain.dx)) << depth;
    for (size_t i = 0; i < plain.leaves.size(); ++i) {
      EXPECT_TRUE(same_bits(again.leaves[i].grad, plain.leaves[i].grad)) << "depth " << depth << ", parameter " << i;
    }
    EXPECT_LT(again.kept, kept) << "recompute " << depth << " keeps less than before";
    kept = again.kept;
  }
}

TEST_F(RecomputeTest, ASegmentWhoseInputWantsNoGradientIsRefused) {
  std::deque<Leaf> leaves = new_leaves();
  Tape tape;
  const Tape::Scope scope(&tape);
  EXPECT_THROW(recompute(Var(x_), [&](const Var& x) { return block(x, 0, leaves); }), Error);
}

TEST_F(TapeTest, ARebuiltValueIsMadeAgainOnlyInBackward) {
  const Tensor x = random({5, 3}, 1), w = random({4, 3}, 2), dy = random({5, 4}, 3);
  Leaf expected = leaf({4, 3}), rebuilt = leaf({4, 3});
  micro_batch(x, w, expected, dy);
  int calls = 0;
  Tape tape;
  const Tape::Scope scope(&tape);
  Tensor kept = random({5, 3}, 1);
  const int64_t with_value = reference().allocator_stats().in_use;
  Var out;
  {
    const Var again = rebuilt_on_demand(Var(std::move(kept)), [&] {
      ++calls;
      return x;
    });
    kept = {};
    out = linear(again, Var(w, rebuilt), Var());
  }
  EXPECT_EQ(calls, 0);
  const int64_t output_bytes = out.value().bytes();
  EXPECT_EQ(reference().allocator_stats().in_use, with_value - x.bytes() + output_bytes) << "the value itself was kept";
  tape.backward(out, dy);
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(same_bits(rebuilt.grad, expected.grad));
}

}  // namespace mantissa::test::tape_test
