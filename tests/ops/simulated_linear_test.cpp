// Linear operations on simulated operands: results are those of the GEMMs of the values that the recipe names, made here one by one, and
// random rounding draws by the global element.
#include <map>
#include <numeric>

#include "ops/ops.h"
#include "ops/quantization_observer.h"
#include "simulated_gemms.h"

namespace mantissa::test::simulated_linear_test {

constexpr int64_t kIn = 96, kOut = 64;

const std::vector<NamedRecipe> kRecipes = with_usual({
    {"input_only", simulating({.input = kRows}, {true, false, true})},
    {"gradient_of_wgrad", simulating({.output_grad = kRows}, {false, false, true})},
    {"fprop_only", simulating({.weight = kTiles, .input = kRows}, {true, false, false})},
    {"nvfp4",
     simulating({.weight = kNvTiles, .input = kNvRows, .output_grad = kNvRows, .hadamard = 16, .hadamard_gemms = {.wgrad = true}})},
    {"all_transformed", simulating({.weight = kRows, .input = kRows, .output_grad = kRows, .hadamard = 32, .hadamard_gemms = kAll})},
    {"fp32_compute", simulating({.weight = kNvTiles, .input = kNvRows, .output_grad = kNvRows}, kAll, Dtype::f32)},
});

Products run(const Recipe& recipe, const Tensor& x, const Tensor& w, const Tensor& dy, const WeightPlace& place = {}) {
  Leaf leaf{zeros(x.device(), Dtype::f32, w.shape())};
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var input = tape.input(x);
  const Var y = linear(input, LinearWeight(w, {}, &leaf, place), Var(), recipe);
  tape.backward(y, dy);
  return {y.value(), tape.take_gradient(input), leaf.grad};
}

class SimulatedLinear : public BackendTest, public ::testing::WithParamInterface<NamedRecipe> {};

TEST_P(SimulatedLinear, ReadsTheOperandsOfTheRecipe) {
  const Recipe& r = GetParam().recipe;
  const auto of = [&](const Tensor& t, OperandRole operand, GemmRole role, int dimension) {
    return read(t, r, format_of(r, operand), role, dimension);
  };
  for (Backend* device : {&reference(), &fast()}) {
    for (const int64_t tokens : {37, 64}) {
      SCOPED_TRACE(device->name());
      const Tensor x = random_tensor(*device, r.compute, {tokens, kIn}, 1), w = random_tensor(*device, r.compute, {kOut, kIn}, 2);
      const Tensor dy = random_tensor(*device, r.compute, {tokens, kOut}, 3);
      expect_three_gemms(run(r, x, w, dy), x, w, dy, of, r.compute == Dtype::bf16 ? 0x1p-7 : 1e-6);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, SimulatedLinear, ::testing::ValuesIn(kRecipes), [](const auto& c) { return std::string(c.param.name); });

class RandomRounding : public BackendTest {
 protected:
  const Recipe kRandom = simulating({.weight = random(kRows), .input = random(kRows), .output_grad = random(kRows)});
  Tensor x_ = random_tensor(reference(), Dtype::bf16, {64, kIn}, 1), w_ = random_tensor(reference(), Dtype::bf16, {kOut, kIn}, 2);
  Tensor dy_ = random_tensor(reference(), Dtype::bf16, {64, kOut}, 3);
};

TEST_F(RandomRounding, IsToNearestOutsideOfATrainingStep) {
  const Recipe nearest = simulating({.weight = kRows, .input = kRows, .output_grad = kRows});
  const Products found = run(kRandom, x_, w_, dy_), expected = run(nearest, x_, w_, dy_);
  EXPECT_TRUE(same_bits(found.y, expected.y));
  EXPECT_TRUE(same_bits(found.dx, expected.dx));
  EXPECT_TRUE(same_bits(found.dw, expected.dw));
}

// Numbers of elements run through the whole run for tokens, and through all steps for weights.
TEST_F(RandomRounding, DrawsByStepTokenTensorAndElement) {
  const RoundingPosition at{.seed = 5, .step = 3, .token = 1000};
  const RoundingScope scope(at);
  const auto of = [&](const Tensor& t, OperandRole operand, GemmRole role, int dimension) {
    const int64_t first_row = operand == OperandRole::weight ? at.step * kOut : at.token, columns = t.dim(1);
    return read(t, kRandom, random(kRows), role, dimension,
                RoundingDraws{.seed = 5,
                              .what = 7 * 16 + static_cast<uint32_t>(role) * 4 + static_cast<uint32_t>(operand),
                              .first = static_cast<uint64_t>(first_row * columns),
                              .columns = columns});
  };
  expect_three_gemms(run(kRandom, x_, w_, dy_, {.number = 7}), x_, w_, dy_, of, 0x1p-7);
}

TEST_F(RandomRounding, OtherStepsTokensSeedsAndParametersDrawOtherBits) {
  const auto at = [&](const RoundingPosition& position, uint32_t number) {
    const RoundingScope scope(position);
    return run(kRandom, x_, w_, dy_, {.number = number});
  };
  const Products one = at({.seed = 1, .step = 2, .token = 64}, 3);
  EXPECT_TRUE(same_bits(at({.seed = 1, .step = 2, .token = 64}, 3).dw, one.dw));
  EXPECT_FALSE(same_bits(at({.seed = 2, .step = 2, .token = 64}, 3).dw, one.dw));
  EXPECT_FALSE(same_bits(at({.seed = 1, .step = 2, .token = 128}, 3).dw, one.dw));
  EXPECT_FALSE(same_bits(at({.seed = 1, .step = 2, .token = 64}, 4).dw, one.dw));
  EXPECT_FALSE(same_bits(at({.seed = 1, .step = 3, .token = 64}, 3).y, one.y)) << "the weight has others in each step";
}

// Compares two micro batches, or two ranks that share the data: blocks of 32 tokens are whole.
TEST_F(RandomRounding, TokensDrawAlikeInAnyBatch) {
  const auto rows = [&](int64_t begin, int64_t end) {
    const RoundingScope scope({.seed = 1, .step = 2, .token = 640 + begin});
    return run(kRandom, x_.slice(begin, end), w_, dy_.slice(begin, end), {.number = 3});
  };
  const Products whole = rows(0, 64), first = rows(0, 32), second = rows(32, 64);
  EXPECT_TRUE(same_bits(first.y, whole.y.slice(0, 32)));
  EXPECT_TRUE(same_bits(second.y, whole.y.slice(32, 64)));
  EXPECT_TRUE(same_bits(first.dx, whole.dx.slice(0, 32)));
  EXPECT_TRUE(same_bits(second.dx, whole.dx.slice(32, 64)));
  std::vector<double> sum = values(first.dw);
  const std::vector<double> rest = values(second.dw);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += rest[i];
  EXPECT_TRUE(close(sum, values(whole.dw), 1e-6));
}

Tensor columns_of(const Tensor& x, const std::vector<int64_t>& columns) {
  std::vector<double> out;
  const std::vector<double> all = values(x);
  for (int64_t r = 0; r < x.dim(0); ++r) {
    for (const int64_t c : columns) out.push_back(all[static_cast<size_t>(r * x.dim(1) + c)]);
  }
  return tensor_of(x.device(), x.dtype(), {x.dim(0), std::ssize(columns)}, out);
}

Tensor rows_of(const Tensor& x, const std::vector<int64_t>& rows) {
  std::vector<double> out;
  for (const int64_t r : rows) {
    const std::vector<double> row = values(x.slice(r, r + 1));
    out.insert(out.end(), row.begin(), row.end());
  }
  return tensor_of(x.device(), x.dtype(), {std::ssize(rows), x.dim(1)}, out);
}

std::vector<int64_t> numbers(int64_t first, int64_t count) {
  std::vector<int64_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), first);
  return out;
}

// Rows of a fused weight of parts of 128 and 64, which two ranks share: each has half of both. Or half of the columns.
TEST_F(RandomRounding, RanksThatShareAWeightDrawItsElements) {
  const Tensor fused = random_tensor(reference(), Dtype::bf16, {192, kIn}, 2), dy = random_tensor(reference(), Dtype::bf16, {64, 192}, 3);
  const Tensor wide = random_tensor(reference(), Dtype::bf16, {kOut, 128}, 2), x = random_tensor(reference(), Dtype::bf16, {64, 128}, 1);
  const RoundingScope scope({.seed = 1, .step = 2, .token = 64});
  const Products of_fused = run(kRandom, x_, fused, dy, {.number = 3}), of_wide = run(kRandom, x, wide, dy_, {.number = 3});
  for (const int rank : {0, 1}) {
    std::vector<int64_t> own = numbers(rank * 64, 64);
    const WeightPlace columns{.number = 3, .sharding = {.split = Split::row_parallel, .ranks = {.tensor = 2, .tensor_rank = rank}}};
    const Products by_columns = run(kRandom, columns_of(x, own), columns_of(wide, own), dy_, columns);
    EXPECT_TRUE(same_bits(by_columns.dx, columns_of(of_wide.dx, own))) << rank;
    EXPECT_TRUE(same_bits(by_columns.dw, columns_of(of_wide.dw, own))) << rank;
    for (const int64_t row : numbers(128 + rank * 32, 32)) own.push_back(row);
    const WeightPlace rows{
        .number = 3, .sharding = {.split = Split::column_parallel, .ranks = {.tensor = 2, .tensor_rank = rank}}, .parts = {64, 32}};
    const Products by_rows = run(kRandom, x_, rows_of(fused, own), columns_of(dy, own), rows);
    EXPECT_TRUE(same_bits(by_rows.y, columns_of(of_fused.y, own))) << rank;
    EXPECT_TRUE(same_bits(by_rows.dw, rows_of(of_fused.dw, own))) << rank;
  }
}

// Errors are shown once for each role; both GEMMs that read an output gradient show theirs, and so do those that read an input or a weight.
TEST_F(RandomRounding, ErrorsAreShownToTheObserver) {
  std::map<OperandRole, std::vector<double>> noise;
  const ObserverScope observer([&](const QuantizedOperand& operand) {
    EXPECT_FALSE(operand.codes.defined());
    const std::vector<double> sums = values(operand.error);
    noise[operand.role].push_back(sums[QuantizationError::noise] / sums[QuantizationError::signal]);
  });
  run(kRandom, x_, w_, dy_);
  for (const OperandRole role : {OperandRole::weight, OperandRole::input, OperandRole::output_grad}) {
    EXPECT_EQ(noise[role].size(), 2U) << role_name(role);
    for (const double of : noise[role]) EXPECT_NEAR(of, 0.0015, 0.0015) << role_name(role);
  }
}

// Tokens that are transformed together with padding are not shown.
TEST_F(RandomRounding, ErrorsAreOfTokensAndNotOfPadding) {
  const std::vector<int32_t> lengths = {20, 32};
  for (const bool transformed : {false, true}) {
    const Recipe recipe = simulating({.weight = kRows,
                                      .input = kRows,
                                      .output_grad = kRows,
                                      .hadamard = transformed ? 32 : 0,
                                      .hadamard_gemms = {.wgrad = transformed}});
    std::map<OperandRole, std::vector<double>> elements;
    const PaddingScope padding(lengths, 32);
    const ObserverScope observer(
        [&](const QuantizedOperand& operand) { elements[operand.role].push_back(values(operand.error)[QuantizationError::elements]); });
    run(recipe, x_, w_, dy_);
    const size_t shown = transformed ? 1 : 2;
    EXPECT_EQ(elements[OperandRole::input], std::vector<double>(shown, 52.0 * kIn));
    EXPECT_EQ(elements[OperandRole::output_grad], std::vector<double>(shown, 52.0 * kOut));
    EXPECT_EQ(elements[OperandRole::weight], std::vector<double>(2, 1.0 * kOut * kIn));
  }
}

// The loss goes through its tokens in chunks of 64, of which the second has other padding than the first.
TEST_F(RandomRounding, ErrorsOfTheLossAreOfTheTokensOfEachChunk) {
  const std::vector<int32_t> lengths = {48, 42};
  const Recipe recipe = simulating({.weight = kRows, .input = kRows, .output_grad = kRows});
  std::map<OperandRole, std::vector<double>> elements;
  const PaddingScope padding(lengths, 48);
  const ObserverScope observer(
      [&](const QuantizedOperand& operand) { elements[operand.role].push_back(values(operand.error)[QuantizationError::elements]); });
  Leaf leaf{zeros(reference(), Dtype::f32, {kOut, kIn})};
  Tape tape;
  const Tape::Scope scope(&tape);
  const LossOptions options{.vocab = kOut, .target_count = 96, .logits_dtype = Dtype::bf16, .chunk_elements = 1};
  tape.backward(cross_entropy(tape.input(random_tensor(reference(), Dtype::bf16, {96, kIn}, 1)), LinearWeight(w_, {}, &leaf),
                              random_indices(reference(), 96, kOut, 9), options, recipe));
  EXPECT_EQ(elements[OperandRole::input], (std::vector<double>{64.0 * kIn, 64.0 * kIn, 26.0 * kIn, 26.0 * kIn}));
  EXPECT_EQ(elements[OperandRole::output_grad], (std::vector<double>{64.0 * kOut, 64.0 * kOut, 26.0 * kOut, 26.0 * kOut}));
}

}  // namespace mantissa::test::simulated_linear_test
