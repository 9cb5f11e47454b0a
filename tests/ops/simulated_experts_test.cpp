// Linear operations of experts on simulated operands: the rows of each expert and its weight are rounded as matrices of their own, and
// random rounding draws by the assignment of a row and by the expert of a weight.
#include <gmock/gmock.h>

#include <numeric>

#include "files.h"
#include "mantissa/backend/functions.h"
#include "ops/experts.h"
#include "ops/linear.h"
#include "ops/ops.h"
#include "ops/quantization_observer.h"
#include "simulated_gemms.h"

namespace mantissa::test::simulated_experts_test {

constexpr int64_t kIn = 96, kOut = 64, kExperts = 4, kChoices = 2, kTokens = 53, kMultiple = 32;
constexpr RoundingPosition kAt{.seed = 5, .step = 3, .token = 1000};
constexpr uint32_t kNumber = 7;

const std::vector<NamedRecipe> kRecipes = with_usual({
    {"random", simulating({.weight = random(kRows), .input = random(kRows), .output_grad = random(kRows)})},
    {"nvfp4",
     simulating({.weight = kNvTiles, .input = kNvRows, .output_grad = random(kNvRows), .hadamard = 16, .hadamard_gemms = {.wgrad = true}})},
    {"all_transformed",
     simulating({.weight = kRows, .input = kRows, .output_grad = random(kRows), .hadamard = 32, .hadamard_gemms = kAll})},
});

// Every fifth token goes to experts 0 and 1, others to one of these and to 3; expert 2 has none.
std::vector<int64_t> choices() {
  std::vector<int64_t> out;
  for (int64_t n = 0; n < kTokens; ++n) {
    out.push_back(n % 5 == 0 ? 0 : n % 2);
    out.push_back(n % 5 == 0 ? 1 : 3);
  }
  return out;
}

// Numbers of the rows of an expert in the run: its assignments in the order of tokens, and in padding its own below zero.
std::vector<int64_t> numbers_of(int64_t expert) {
  std::vector<int64_t> out;
  const std::vector<int64_t> experts = choices();
  for (size_t i = 0; i < experts.size(); ++i) {
    if (experts[i] == expert) out.push_back(kAt.token * kChoices + static_cast<int64_t>(i));
  }
  for (int64_t last = out.empty() ? 0 : out.back(), below = 1; std::ssize(out) % kMultiple != 0; ++below)
    out.push_back(-last * 1024 - below);
  return out;
}

struct Operands {
  Tensor x, w, dy;
  Dispatch to;

  explicit Operands(Backend& device) : w(random_tensor(device, Dtype::bf16, {kExperts * kOut, kIn}, 2)) {
    const std::vector<int64_t> experts = choices();
    const std::vector<int32_t> of(experts.begin(), experts.end());
    to = dispatch(from_host(device, Dtype::i32, {kTokens, kChoices}, of.data()), kExperts, kMultiple);
    const auto moved = [&](int64_t columns, uint32_t seed) {
      return std::get<Tensor>(to_experts(to, random_tensor(device, Dtype::bf16, {kTokens, columns}, seed)).rows);
    };
    x = moved(kIn, 1), dy = moved(kOut, 3);
  }
};

class SimulatedExperts : public BackendTest, public ::testing::WithParamInterface<NamedRecipe> {};

TEST_P(SimulatedExperts, ReadTheOperandsOfTheRecipe) {
  const Recipe& r = GetParam().recipe;
  Operands given(fast());
  const RoundingScope scope(kAt);
  number_rows(given.to, Rounding::stochastic);
  Leaf leaf{zeros(fast(), Dtype::f32, given.w.shape())};
  const LinearGemms gemms(LinearWeight(given.w, {}, &leaf, {.number = kNumber}), r, given.to);
  const LinearInput input = gemms.input(given.x, true);
  const Tensor y = empty(fast(), Dtype::bf16, given.dy.shape()), dx = empty_like(given.x);
  gemms.fprop(input, {}, y);
  gemms.backward(gemms.kept(input), given.dy, dx);

  const std::vector<double> ends = values(given.to.offsets);
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    SCOPED_TRACE(expert);
    const auto begin = static_cast<int64_t>(ends[static_cast<size_t>(expert)]),
               end = static_cast<int64_t>(ends[static_cast<size_t>(expert) + 1]);
    const std::vector<int64_t> numbers = numbers_of(expert);
    ASSERT_EQ(end - begin, std::ssize(numbers));
    if (begin == end) continue;
    const auto of = [&](const Tensor& t, OperandRole operand, GemmRole role, int dimension) {
      RoundingDraws draws{
          .seed = kAt.seed, .what = kNumber * 16 + static_cast<uint32_t>(role) * 4 + static_cast<uint32_t>(operand), .columns = t.dim(1)};
      if (operand == OperandRole::weight) draws.first = static_cast<uint64_t>((kAt.step * kExperts + expert) * kOut * kIn);
      if (operand != OperandRole::weight) draws.row_places = numbers;
      return read(t, r, format_of(r, operand), role, dimension, draws);
    };
    const int64_t row = expert * kOut;
    expect_three_gemms({.y = y.slice(begin, end), .dx = dx.slice(begin, end), .dw = leaf.grad.slice(row, row + kOut)},
                       given.x.slice(begin, end), given.w.slice(row, row + kOut), given.dy.slice(begin, end), of, 0x1p-7);
  }
}

INSTANTIATE_TEST_SUITE_P(, SimulatedExperts, ::testing::ValuesIn(kRecipes), [](const auto& c) { return std::string(c.param.name); });

class ExpertsOfARank : public BackendTest {};

// Elements of padding and its blocks do not count. All operands are read by two GEMMs.
TEST_F(ExpertsOfARank, ShowErrorsWithoutPadding) {
  Operands given(fast());
  number_rows(given.to, Rounding::nearest);
  EXPECT_TRUE(given.to.numbered->assignments.empty());
  Leaf leaf{zeros(fast(), Dtype::f32, given.w.shape())};
  const LinearGemms gemms(LinearWeight(given.w, {}, &leaf, {.number = kNumber}),
                          simulating({.weight = kRows, .input = kTiles, .output_grad = kRows}), given.to);
  const LinearGemms transformed(
      LinearWeight(given.w, {}, &leaf, {.number = kNumber}),
      simulating({.weight = kRows, .input = kRows, .output_grad = kRows, .hadamard = 32, .hadamard_gemms = {.wgrad = true}}), given.to);
  std::map<OperandRole, double> elements, scales;
  const ObserverScope observer([&](const QuantizedOperand& operand) {
    const std::vector<double> sums = values(operand.error);
    elements[operand.role] += sums[QuantizationError::elements];
    scales[operand.role] += std::accumulate(sums.begin() + QuantizationError::scales, sums.end(), 0.0);
  });
  const LinearInput input = gemms.input(given.x, true);
  gemms.fprop(input, {}, empty(fast(), Dtype::bf16, given.dy.shape()));
  gemms.backward(gemms.kept(input), given.dy, empty_like(given.x));
  constexpr double kAssignments = kTokens * kChoices, kWeights = kExperts * kOut * kIn;
  EXPECT_EQ(elements[OperandRole::output_grad], 2 * kAssignments * kOut);
  EXPECT_EQ(elements[OperandRole::input], 2 * kAssignments * kIn);
  EXPECT_EQ(elements[OperandRole::weight], 2 * kWeights);
  EXPECT_EQ(scales[OperandRole::weight], 2 * kWeights / 32);
  elements.clear(), scales.clear();  // wgrad transforms tokens and padding together, and shows neither
  transformed.backward(transformed.kept(transformed.input(given.x, true)), given.dy, empty_like(given.x));
  EXPECT_EQ(elements[OperandRole::output_grad], kAssignments * kOut);
  EXPECT_EQ(scales[OperandRole::output_grad], kAssignments * kOut / 32);
  EXPECT_EQ(elements[OperandRole::input], 0);
}

TEST_F(ExpertsOfARank, NeedNumbersOfTheirRows) {
  const Operands given(fast());
  const LinearGemms gemms(Var(given.w), simulating({.input = kRows}, {true, false, true}), given.to);
  EXPECT_THAT(error_of([&] { gemms.fprop(gemms.input(given.x, false), {}, empty(fast(), Dtype::bf16, given.dy.shape())); }).what(),
              ::testing::HasSubstr("number_rows()"));
}

}  // namespace mantissa::test::simulated_experts_test
