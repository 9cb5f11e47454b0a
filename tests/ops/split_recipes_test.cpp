// Split linear operations under every kind of recipe: their codes are those of the whole operands, to the bit, their results those of one
// rank but for the order of sums; and what travels, to the byte.
#include "ops/linear.h"
#include "split_ranks.h"

namespace mantissa::test::split_recipes_test {

constexpr Quantization kRows{Format::e4m3, 1, 32}, kTiles{Format::e4m3, 32, 32}, kFake{Format::e2m1, 1, 32, ScaleRule::flashinfer},
    kNvfp4{Format::nvfp4, 1, 16, ScaleRule::nearest, {}, -4};
constexpr Quantization kRows128{Format::e4m3, 1, 128}, kTiles128{Format::e4m3, 128, 128};
constexpr GemmSet kAll{true, true, true};
constexpr int64_t kTokens = 37;  // shares of 9 and 10, of 18 and 19: no multiple of a block

struct Named {
  const char* name;
  Recipe recipe;
};
void PrintTo(const Named& named, std::ostream* out) { *out << named.name; }
const Named kRecipes[] = {
    {"high", {}},
    {"mxfp8", {.weight = kTiles, .input = kRows, .output_grad = kRows, .gemms = kAll}},
    {"mxfp8_rows", {.weight = kRows, .input = kRows, .output_grad = kRows, .gemms = kAll}},
    {"mxfp8_te", {.weight = kRows, .input = kRows, .output_grad = {Format::e5m2, 1, 32}, .gemms = kAll, .columns = ColumnSource::values}},
    {"dequantized", {.weight = kTiles, .input = kRows, .gemms = {true, false, false}, .backward = BackwardOperands::dequantized}},
    {"mxfp8_weights", {.weight = kTiles, .gemms = {true, true, false}}},
    {"fp8_block", {.weight = kTiles128, .input = kRows128, .output_grad = kRows128, .gemms = kAll}},
    {"mxfp4_qat_mxfp8_act", {.weight_fake_quant = kFake, .input = kRows, .output_grad = kRows, .gemms = kAll}},
    {"mxfp4_qat_mxfp4_act",
     {.weight_fake_quant = kFake, .input = kFake, .gemms = {true, false, false}, .backward = BackwardOperands::dequantized}},
    {"nvfp4_qat_nvfp4_act",
     {.weight_fake_quant = kNvfp4, .input = kNvfp4, .gemms = {true, false, false}, .backward = BackwardOperands::dequantized}},
    {"fprop_only", {.weight = kTiles, .input = kRows, .gemms = {true, false, false}}},
};

// A block of the recipe for each rank, wide and high.
int most_ranks(const Recipe& recipe) { return recipe.block() == 128 ? 2 : 4; }
int64_t width(const Recipe& recipe) { return most_ranks(recipe) * std::max<int64_t>(32, recipe.block()); }

LinearWeight weight_of(const Recipe& recipe, const Var& value) {
  const Quantization how = recipe.weight_fake_quant ? recipe.weight_fake_quant : recipe.weight;
  return {value.value(), how ? quantized(value.value(), how) : QuantizedTensor(), value.leaf()};
}

SplitOperation operation_of(Backend& device, const Recipe& recipe, Split split, bool by_tokens) {
  const int64_t n = width(recipe);
  const bool column_parallel = split == Split::column_parallel;
  const Cut tokens = by_tokens ? Cut::tokens : Cut::none;
  return {.inputs = {{.whole = random_tensor(device, Dtype::bf16, {kTokens, n}, 1), .cut = column_parallel ? tokens : Cut::columns},
                     {.whole = random_tensor(device, Dtype::bf16, {n, n}, 2),
                      .cut = column_parallel ? Cut::rows : Cut::columns,
                      .parameter = true},
                     {.whole = random_tensor(device, Dtype::bf16, {n}, 3),
                      .cut = column_parallel ? Cut::rows : Cut::none,
                      .parameter = true,
                      .partial = !column_parallel && by_tokens}},
          .output = column_parallel ? Cut::columns : tokens,
          .run = [recipe](const std::vector<Var>& v,
                          const TensorParallel& tp) { return linear(v[0], weight_of(recipe, v[1]), v[2], recipe, tp); },
          .tp = {.split = split, .tokens = by_tokens ? kTokens : 0}};
}

class SplitRecipes : public ::testing::TestWithParam<Named> {
 protected:
  // Sums that no rank makes with another have the order of one rank on the reference, whose sums run along the contraction: y of rows, dx
  // of columns, and, because the codes are the same, all weight gradients. The rest is a sum of 2 or 4 parts in fp32, rounded once to bf16:
  // a unit in the last place where it lies near a tie.
  static void expect_results(const SplitResult& split, const SplitResult& whole, bool column_parallel, bool reference) {
    EXPECT_TRUE(close(split.y, whole.y, 0x1p-7));
    EXPECT_TRUE(close(split.gradients[0], whole.gradients[0], 0x1p-7));
    EXPECT_TRUE(close(split.gradients[1], whole.gradients[1], 1e-5));
    EXPECT_TRUE(close(split.gradients[2], whole.gradients[2], 1e-5));
    if (!reference) return;
    EXPECT_TRUE(same_bits(split.gradients[1], whole.gradients[1]));
    EXPECT_TRUE(same_bits(column_parallel ? split.y : split.gradients[0], column_parallel ? whole.y : whole.gradients[0]));
  }

  // An input of which wgrad reads values, or codes made of these, is quantized where it is whole.
  static void expect_codes(const SplitResult& split, const SeenCodes& whole, const SplitOperation& operation) {
    const Recipe& recipe = GetParam().recipe;
    const bool column_parallel = operation.tp.split == Split::column_parallel;
    EXPECT_EQ(whole.size(), size_t{bool{recipe.input}} + size_t{bool{recipe.output_grad}});
    const Cut tokens = LinearOperands(recipe).saved_input == SavedAs::rows ? operation.inputs[0].cut : Cut::none;
    const auto ranks = static_cast<int>(split.codes.size());
    for (int r = 0; r < ranks; ++r) {
      for (const auto& [role, seen] : whole) {
        const Cut cut = role == OperandRole::output_grad ? (column_parallel ? Cut::columns : Cut::none)
                        : column_parallel                ? tokens
                                                         : Cut::columns;
        const auto& own = split.codes[static_cast<size_t>(r)].at(role);
        for (const auto& [found, all] : {std::pair(own.first, seen.first), std::pair(own.second, seen.second)}) {
          const Shape shape{kTokens, static_cast<int64_t>(all.size()) / kTokens};
          EXPECT_EQ(std::vector<double>(found.begin(), found.end()), cut_of({all.begin(), all.end()}, shape, cut, r, ranks))
              << role_name(role) << " of rank " << r;
        }
      }
    }
  }

  // Forward and backward of one linear make one exchange each at most, of these bytes over all ranks: a sum sends every element to its
  // owner and back from there, (R - 1) times each way; a share of tokens goes to or comes from R - 1 ranks.
  static void expect_traffic(const SplitResult& split, bool column_parallel, bool by_tokens) {
    const Recipe& recipe = GetParam().recipe;
    const int64_t elements = kTokens * width(recipe), others = std::ssize(split.sent) - 1;
    const bool codes = LinearOperands(recipe).saved_input == SavedAs::rows;
    const int64_t packed = is_four_bit(recipe.input.format) ? 2 : 1;
    const int64_t gathered = column_parallel && codes ? elements / packed + elements / recipe.input.block() : 2 * elements;
    int64_t sent = 0;
    for (const Traffic& traffic : split.sent) {
      sent += traffic.activations;
      EXPECT_EQ(traffic.control, 32 * (by_tokens ? 2 : 1)) << "a header for each exchange";
      EXPECT_EQ(traffic.gradients + traffic.parameters + traffic.other, 0);
    }
    EXPECT_EQ(sent, others * (by_tokens ? 4 * elements + gathered : 2 * 4 * elements));
  }

  Threads one_{1};
};

TEST_P(SplitRecipes, HaveTheResultsAndCodesOfOneRankAndSendWhatTheirFormulaSays) {
  const Recipe& recipe = GetParam().recipe;
  const Shape shape{kTokens, width(recipe)};
  for (const auto& [name, ranks] : {std::pair<const char*, int>("cpu_reference", most_ranks(recipe)), std::pair<const char*, int>("cpu", 2),
                                    std::pair<const char*, int>("cpu", most_ranks(recipe))}) {
    const bool reference = name == std::string("cpu_reference");
    const auto device = make_backend(name);
    const Tensor dy = random_tensor(*device, Dtype::bf16, shape, 4);
    for (const Split direction : {Split::column_parallel, Split::row_parallel}) {
      const bool column_parallel = direction == Split::column_parallel;
      const SplitResult whole =
          run_split(operation_of(*device, recipe, direction, false), 1, *device, shape, reference ? Watch::gradients : Watch::codes, dy);
      for (const bool by_tokens : {false, true}) {
        SCOPED_TRACE(text(name, column_parallel ? " rows " : " columns ", ranks, by_tokens ? " by tokens" : ""));
        const SplitOperation operation = operation_of(*device, recipe, direction, by_tokens);
        const SplitResult split = run_split(operation, ranks, *device, shape, reference ? Watch::gradients : Watch::codes, dy);
        ASSERT_FALSE(HasFailure());
        expect_results(split, whole, column_parallel, reference);
        if (!reference) expect_codes(split, whole.codes.at(0), operation);
        expect_traffic(split, column_parallel, by_tokens);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, SplitRecipes, ::testing::ValuesIn(kRecipes), [](const auto& c) { return std::string(c.param.name); });

// The codes include those of padding rows, from which columnwise codes follow.
TEST(GatheredInput, HasTheCodesOfTheWhole) {
  const Threads one(1);
  for (const Quantization& how : {kRows, kRows128, Quantization{Format::e5m2, 1, 32}}) {
    const Recipe recipe{.weight = how, .input = how, .output_grad = how, .gemms = kAll};
    for (const int64_t tokens : {1, 3, 33, 64}) {
      const auto device = make_backend("cpu");
      const Tensor x = random_tensor(*device, Dtype::bf16, {tokens, 256}, 1);
      const QuantizedTensor whole = quantized_padded(x, how);
      EXPECT_THAT(run_ranks(4,
                            [&](const Communicator& group) {
                              const auto own = make_backend("cpu");
                              const LinearGemms products(Var(zeros(*own, Dtype::bf16, {256, 256})), recipe);
                              const Tensor share = cut_of(*own, x, Cut::tokens, group.rank(), 4);
                              const TensorParallel tp{.group = group, .split = Split::column_parallel, .tokens = tokens};
                              const ObserverScope scope(
                                  [](const QuantizedOperand& operand) { require(operand.x.dim(0) > 0, "nothing is shown as an operand"); });
                              const LinearInput input = products.gathered_input(tp, share, true);
                              require(!input.high.defined() && input.codes.shape == whole.shape, "of another shape");
                              require(bool{same_bits(input.codes.codes, whole.codes)}, "other codes");
                              require(bool{same_bits(input.codes.scales, whole.scales)}, "other scales");
                            }),
                  ::testing::Each(::testing::IsEmpty()))
          << tokens << " tokens, " << how;
    }
  }
}

// Chunks of gathered codes have the blocks of tokens that chunks of values have. The log-sum-exp is rounded once more than on one rank, the
// gradient of logits is rounded to bf16, and dx is a sum of parts.
TEST(SplitVocabulary, TakesChunksOfGatheredCodes) {
  const Threads one(1);
  for (const Named& named : kRecipes) {
    const auto device = make_backend("cpu_reference");
    const int64_t n = width(named.recipe), tokens = 165;
    SplitOperation operation{
        .inputs = {{.whole = random_tensor(*device, Dtype::bf16, {tokens, n}, 1)},
                   {.whole = random_tensor(*device, Dtype::bf16, {n, n}, 2, 0.1), .cut = Cut::rows, .parameter = true}},
        .output = Cut::none,
        .run =
            [recipe = named.recipe, n](const std::vector<Var>& v, const TensorParallel& tp) {
              const LossOptions options{.vocab = n - 3, .target_count = tokens, .logits_dtype = Dtype::f32, .chunk_elements = 1};
              const Tensor targets = random_indices(v[0].value().device(), tokens, n - 3, 6);
              return cross_entropy(v[0], weight_of(recipe, v[1]), targets, options, recipe, tp);
            },
        .tp = {.split = Split::column_parallel}};
    const SplitResult whole = run_split(operation, 1, *device, {1}, Watch::gradients);
    for (const bool by_tokens : {false, true}) {
      operation.tp.tokens = by_tokens ? tokens : 0;
      operation.inputs[0].cut = by_tokens ? Cut::tokens : Cut::none;
      const SplitResult split = run_split(operation, 2, *device, {1}, Watch::gradients);
      ASSERT_FALSE(::testing::Test::HasFailure());
      EXPECT_TRUE(close(split.y, whole.y, 1e-6)) << named.name;
      EXPECT_TRUE(close(split.gradients[0], whole.gradients[0], 0x1p-6)) << named.name;
      EXPECT_TRUE(close(split.gradients[1], whole.gradients[1], 0x1p-8)) << named.name;
    }
  }
}

// A rank keeps only its own share of a sum, and backward needs no gradient of a constant.
TEST(SplitLinear, KeepsOnlyItsShareAndTakesConstants) {
  const auto device = make_backend("cpu");
  const Tensor x = random_tensor(*device, Dtype::f32, {64, 64}, 1), dy = random_tensor(*device, Dtype::f32, {64, 64}, 4);
  EXPECT_THAT(run_ranks(4,
                        [&](const Communicator& group) {
                          const auto own = make_backend("cpu");
                          const Tensor w = cut_of(*own, x, Cut::columns, group.rank(), 4), dw = zeros(*own, Dtype::f32, {64, 16});
                          const Tensor share = cut_of(*own, dy, Cut::tokens, group.rank(), 4);
                          Leaf leaf{.grad = dw};
                          const TensorParallel tp{.group = group, .split = Split::row_parallel, .tokens = 64};
                          const Recipe recipe{.compute = Dtype::f32};
                          {
                            const int64_t before = own->allocator_stats().in_use;
                            const Var y = linear(Var(w), Var(w), Var(), recipe, tp);
                            require(own->allocator_stats().in_use - before == 16 * 64 * 4, "keeps more than its share");
                          }
                          Tape tape;
                          const Tape::Scope scope(&tape);
                          tape.backward(linear(Var(w), Var(w, leaf), Var(), recipe, tp), share);
                          require(leaf.written, "no gradient");
                        }),
              ::testing::Each(::testing::IsEmpty()));
}

// Two fp32 numbers a row to every other rank, the vectors of the embedding and gradients of x.
TEST(SplitVocabulary, SendsTwoNumbersARow) {
  const Threads one(1);
  const auto device = make_backend("cpu");
  constexpr int64_t kIn = 16, kElements = kTokens * kIn;
  for (const int ranks : {2, 4}) {
    for (const bool by_tokens : {false, true}) {
      SplitOperation operation{
          .inputs = {{.whole = random_tensor(*device, Dtype::bf16, {32, kIn}, 1), .cut = Cut::rows, .parameter = true}},
          .output = Cut::none,
          .run =
              [](const std::vector<Var>& v, const TensorParallel& tp) {
                Backend& own = v[0].value().device();
                const Var x = embedding(random_indices(own, kTokens, 32, 5), v[0], tp);
                const LossOptions options{.vocab = 32, .target_count = kTokens, .logits_dtype = Dtype::f32};
                return cross_entropy(x, v[0], random_indices(own, kTokens, 32, 6), options, {}, tp);
              },
          .tp = {.split = Split::column_parallel, .tokens = by_tokens ? kTokens : 0}};
      const SplitResult result = run_split(operation, ranks, *device, {1}, Watch::gradients);
      ASSERT_FALSE(::testing::Test::HasFailure());
      int64_t sent = 0;
      for (const Traffic& traffic : result.sent) sent += traffic.activations;
      const int64_t others = ranks - 1, numbers = others * ranks * kTokens * 2 * 4;
      // Exchanges by tokens are: vectors to their shares, x to all, dx in fp32 to its shares, and to all again.
      const int64_t vectors = by_tokens ? others * kElements * (2 + 2 + 4 + 2) : others * kElements * 2 * (2 + 4);
      EXPECT_EQ(sent, numbers + vectors);
      for (const Traffic& traffic : result.sent) EXPECT_EQ(traffic.control, 32 * (by_tokens ? 5 : 3));
    }
  }
}

}  // namespace mantissa::test::split_recipes_test
