// Layers of experts that ranks share give each rank what it gets alone: outputs, gradients of its tokens, and, kept apart, those of the
// weights, to the last bit. They run over random routes: experts without rows, ranks to which nothing goes, ranks without tokens.
#include <gmock/gmock.h>

#include <deque>
#include <random>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "mantissa/precision/config.h"
#include "ops/ops.h"
#include "simulated_gemms.h"
#include "thread_ranks.h"

namespace mantissa::test::permuted_tokens_test {

constexpr int64_t kExperts = 4, kHidden = 64, kInner = 32, kChoices = 2;

// The tokens of one rank, and where they go.
struct Tokens {
  std::vector<double> x, weights, dy, experts;
  int64_t count;
  int64_t first = 0;  // number in the run
};

// The first experts are the likelier ones, down to certainty.
Tokens random_tokens(std::mt19937_64& rng, int64_t count, int64_t likely) {
  Tokens out{.x = {}, .weights = {}, .dy = {}, .experts = {}, .count = count};
  const auto number = [&] { return static_cast<double>(static_cast<int64_t>(rng() % 2001) - 1000) / 500; };
  for (int64_t i = 0; i < count * kHidden; ++i) {
    out.x.push_back(number());
    out.dy.push_back(number());
  }
  for (int64_t i = 0; i < count * kChoices; ++i) out.weights.push_back(number());
  for (int64_t i = 0; i < count; ++i) {
    const auto first = static_cast<int64_t>(rng() % static_cast<uint64_t>(likely - 1));
    out.experts.push_back(static_cast<double>(first));
    out.experts.push_back(static_cast<double>(first + 1 + static_cast<int64_t>(rng() % static_cast<uint64_t>(likely - 1 - first))));
  }
  return out;
}

struct Result {
  std::vector<double> y, dx, dweights;
  std::vector<std::vector<double>> parameters;  // gate_up, down and their biases
};

Result run(const Tokens& tokens, const Recipe& recipe, int64_t capacity, const Communicator& ranks, ExpertGradients gradients) {
  const auto device = make_backend("cpu");
  const Dtype dtype = recipe.compute;
  const int64_t size = ranks.size(), own = kExperts / size, sources = gradients == ExpertGradients::by_source ? size : 1;
  const auto share = [&](const Tensor& grouped) {
    const int64_t rows = grouped.dim(0) / size;
    return grouped.slice(ranks.rank() * rows, (ranks.rank() + 1) * rows);
  };
  const Shape shapes[] = {{2 * kInner, kHidden}, {kHidden, kInner}, {2 * kInner}, {kHidden}};  // shapes of an expert
  std::vector<Tensor> parameters;
  std::deque<Leaf> leaves;
  for (const Shape& shape : shapes) {
    parameters.push_back(
        share(random_tensor(*device, dtype, shape.with_dim0(kExperts * shape[0]), static_cast<uint32_t>(3 + leaves.size()))));
    leaves.push_back({.grad = empty(*device, Dtype::f32, shape.with_dim0(own * sources * shape[0]))});
  }
  const auto weight = [&](size_t i) {
    const Tensor& value = parameters[i];
    const Quantization how = recipe.weight ? recipe.weight : recipe.weight_fake_quant;
    const ModelRanks place{.expert = static_cast<int>(size), .expert_rank = ranks.rank()};
    return LinearWeight(value, how ? quantized(value, how) : QuantizedTensor(), &leaves[i], {.number = 3, .sharding = {.ranks = place}});
  };
  const auto tensor = [&](Dtype of, int64_t columns, const std::vector<double>& from) {
    return tensor_of(*device, of, {tokens.count, columns}, from);
  };
  const RoundingScope position({.seed = 5, .step = 2, .token = tokens.first});
  Dispatch to = dispatch(tensor(Dtype::i32, kChoices, tokens.experts), kExperts, 32, capacity, ranks, gradients);
  if (recipe.simulated.any()) number_rows(to, Rounding::stochastic);
  EXPECT_FALSE(to.host);
  if (size > 1) {
    const Dispatch summed = dispatch(tensor(Dtype::i32, kChoices, tokens.experts), kExperts, 32, capacity, ranks, ExpertGradients::summed);
    require(summed.host != nullptr, "the host does not know the groups");
    EXPECT_EQ(std::vector<double>(summed.host->offsets.begin(), summed.host->offsets.end()), values(summed.offsets));
    EXPECT_EQ(summed.host->usual_rows, ceil_div(tokens.count * kChoices * size, kExperts));
  }
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var x = tape.input(tensor(dtype, kHidden, tokens.x)), weights = tape.input(tensor(Dtype::f32, kChoices, tokens.weights));
  Recipe direct = recipe;  // only the gradient of what goes back to tokens is shifted
  direct.requantizes_output_grad = false;
  const Var inner =
      dispatched_swiglu(x, weights, weight(0), Var(parameters[2], leaves[2]), to, direct, {.keep = Keep::value, .as_codes = true});
  const Var y = combined_linear(inner, weight(1), Var(parameters[3], leaves[3]), to, recipe);
  tape.backward(y, tensor(dtype, kHidden, tokens.dy));
  Result out{
      .y = values(y.value()), .dx = values(tape.take_gradient(x)), .dweights = values(tape.take_gradient(weights)), .parameters = {}};
  for (const Leaf& leaf : leaves) out.parameters.push_back(values(leaf.grad));
  return out;
}

// The gradients of an expert from a source, out of gradients [experts of a rank, sources, ...].
std::vector<double> of_source(const std::vector<double>& gradients, size_t experts, size_t sources, size_t expert, size_t source) {
  const size_t each = gradients.size() / experts / sources, begin = (expert * sources + source) * each;
  return {gradients.begin() + static_cast<int64_t>(begin), gradients.begin() + static_cast<int64_t>(begin + each)};
}

// Scales of two levels, of an expert's tokens of one rank, and all elements at random.
const Recipe kSimulated = simulating({.weight = random(kNvTiles),
                                      .input = random(kNvRows),
                                      .output_grad = random(kNvRows),
                                      .hadamard = 16,
                                      .hadamard_gemms = {.wgrad = true}});

class PermutedTokens : public ::testing::TestWithParam<std::string> {};

TEST_P(PermutedTokens, OfRanksAreThoseOfEachAlone) {
  const Threads one(1);
  Recipe recipe = GetParam() == "simulated"
                      ? kSimulated
                      : preset_recipe(GetParam() == "shifted" ? "mxfp8" : GetParam(), GetParam() == "high" ? Dtype::f32 : Dtype::bf16);
  recipe.requantizes_output_grad = GetParam() == "shifted";
  std::mt19937_64 rng(17);
  for (int trial = 0; trial < 10; ++trial) {
    const size_t ranks = trial % 2 == 0 ? 2 : 4;
    const int64_t likely = 2 + trial % 3, capacity = trial % 5 == 4 ? 3 : 0;
    std::vector<Tokens> tokens;
    for (size_t r = 0; r < ranks; ++r) {
      const auto count = static_cast<int64_t>(rng() % 3 == 0 ? rng() % 3 : rng() % 80);
      const int64_t first = r == 0 ? 640 : tokens[r - 1].first + tokens[r - 1].count;
      tokens.push_back(random_tokens(rng, r == 0 ? std::max<int64_t>(1, count) : count, likely));
      tokens.back().first = first;
    }
    std::vector<Result> together(ranks);
    const auto errors = run_ranks(static_cast<int>(ranks), [&](const Communicator& world) {
      const auto r = static_cast<size_t>(world.rank());
      together[r] = run(tokens[r], recipe, capacity, world, ExpertGradients::by_source);
    });
    ASSERT_THAT(errors, testing::Each(testing::IsEmpty())) << "trial " << trial;
    for (size_t r = 0; r < ranks; ++r) {
      if (tokens[r].count == 0) continue;
      SCOPED_TRACE(text("trial ", trial, ", rank ", r, " of ", ranks));
      const Result alone = run(tokens[r], recipe, capacity, {}, ExpertGradients::summed);
      EXPECT_EQ(together[r].y, alone.y);
      EXPECT_EQ(together[r].dx, alone.dx);
      EXPECT_EQ(together[r].dweights, alone.dweights);
      const size_t own = kExperts / ranks;
      for (size_t expert = 0; expert < kExperts; ++expert) {
        const Result& owner = together[expert / own];
        for (size_t i = 0; i < 4; ++i) {
          EXPECT_EQ(of_source(owner.parameters[i], own, ranks, expert % own, r), of_source(alone.parameters[i], kExperts, 1, expert, 0))
              << expert;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, PermutedTokens,
                         ::testing::Values("high", "mxfp8", "mxfp8_te", "shifted", "mxfp4_qat_mxfp8_act", "mxfp4_qat_mxfp4_act",
                                           "simulated"),
                         [](const auto& c) { return c.param; });

}  // namespace mantissa::test::permuted_tokens_test
