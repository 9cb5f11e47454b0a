// Split linear operations under every kind of recipe: their codes are those of the whole operands, to the bit, their results those of one
// rank but for the order of sums; and what travels, to the byte.
#include "mantissa/base/integers.h"
#include "mantissa/ops/quantization_observer.h"
#include "ops/linear_gemms.h"
#include "split_ranks.h"

namespace mantissa::test::split_recipes_test {

constexpr Quantization kRows{Format::e4m3, 1, 32}, kTiles{Format::e4m3, 32, 32}, kFake{Format::e2m1, 1, 32, ScaleRule::flashinfer};
constexpr Quantization kRows128{Format::e4m3, 1, 128}, kTiles128{Format::e4m3, 128, 128};
constexpr GemmSet kAll{true, true, true};
constexpr int64_t kTokens = 37;  // shares of 9 and 10, of 18 and 19: no multiple of a block

struct Named {
  const char* name;
  Recipe recipe;
};
const Named kRecipes[] = {
    {"high", {}},
    {"mxfp8", {.weight = kTiles, .input = kRows, .output_grad = kRows, .gemms = kAll}},
    {"mxfp8_rows", {.weight = kRows, .input = kRows, .output_grad = kRows, .gemms = kAll}},
    {"mxfp8_te", {.weight = kRows, .input = kRows, .output_grad = {Format::e5m2, 1, 32}, .gemms = kAll, .columns = ColumnSource::values}},
    {"dequantized", {.weight = kTiles, .input = kRows, .gemms = {true, false, false}, .backward = BackwardOperands::dequantized}},
    {"mxfp8_weights", {.weight = kTiles, .gemms = {true, true, false}}},
    {"fp8_block", {.weight = kTiles128, .input = kRows128, .output_grad = kRows128, .gemms = kAll}},
    {"mxfp4_qat_mxfp8_act", {.weight_fake_quant = kFake, .input = kRows, .output_grad = kRows, .gemms = kAll}},
    {"fprop_only", {.weight = kTiles, .input = kRows, .gemms = {true, false, false}}},
};

struct RecipeCase {
  Named recipe;
  Split split;
  int ranks;
  bool by_tokens;
};
std::string name_of(const RecipeCase& c) {
  return text(c.recipe.name, c.split == Split::column_parallel ? "_rows_" : "_columns_", c.ranks, c.by_tokens ? "_by_tokens" : "");
}
void PrintTo(const RecipeCase& c, std::ostream* out) { *out << name_of(c); }

// Four blocks of the recipe wide and high.
int64_t width(const Recipe& recipe) { return 4 * std::max<int64_t>(32, recipe.block()); }

LinearWeight weight_of(const Recipe& recipe, const Var& value) {
  const Quantization how = recipe.weight_fake_quant ? recipe.weight_fake_quant : recipe.weight;
  return {value.value(), how ? quantized(value.value(), how) : QuantizedTensor(), value.leaf()};
}

SplitOperation operation_of(Backend& device, const RecipeCase& c) {
  const int64_t n = width(c.recipe.recipe);
  const bool column_parallel = c.split == Split::column_parallel;
  const Cut tokens = c.by_tokens ? Cut::tokens : Cut::none;
  return {.inputs = {{.whole = random_tensor(device, Dtype::bf16, {kTokens, n}, 1), .cut = column_parallel ? tokens : Cut::columns},
                     {.whole = random_tensor(device, Dtype::bf16, {n, n}, 2),
                      .cut = column_parallel ? Cut::rows : Cut::columns,
                      .parameter = true},
                     {.whole = random_tensor(device, Dtype::bf16, {n}, 3),
                      .cut = column_parallel ? Cut::rows : Cut::none,
                      .parameter = true,
                      .partial = !column_parallel && c.by_tokens}},
          .output = column_parallel ? Cut::columns : tokens,
          .run = [recipe = c.recipe.recipe](const std::vector<Var>& v,
                                            const TensorParallel& tp) { return linear(v[0], weight_of(recipe, v[1]), v[2], recipe, tp); },
          .tp = {.split = c.split, .tokens = c.by_tokens ? kTokens : 0}};
}

class SplitRecipes : public ::testing::TestWithParam<RecipeCase> {
 protected:
  Threads one_{1};
};

// What no rank sums with another has the order of one rank on the reference, whose sums run along the contraction: y of rows, dx of
// columns, and, because the codes are the same, all weight gradients. The rest is a sum of 2 or 4 parts in fp32, rounded once to bf16: a
// unit in the last place where it lies near a tie.
TEST_P(SplitRecipes, GiveWhatOneRankGives) {
  const bool column_parallel = GetParam().split == Split::column_parallel;
  for (const char* name : {"cpu_reference", "cpu"}) {
    const auto device = make_backend(name);
    const SplitOperation operation = operation_of(*device, GetParam());
    const int64_t n = width(GetParam().recipe.recipe);
    const Tensor dy = random_tensor(*device, Dtype::bf16, {kTokens, n}, 4);
    const SplitResult whole = run_split(operation, 1, *device, {kTokens, n}, true, dy);
    const SplitResult split = run_split(operation, GetParam().ranks, *device, {kTokens, n}, true, dy);
    ASSERT_FALSE(HasFailure());
    EXPECT_TRUE(close(split.y, whole.y, 0x1p-7)) << name;
    EXPECT_TRUE(close(split.gradients[0], whole.gradients[0], 0x1p-7)) << name;
    EXPECT_TRUE(close(split.gradients[1], whole.gradients[1], 1e-5)) << name;
    EXPECT_TRUE(close(split.gradients[2], whole.gradients[2], 1e-5)) << name;
    if (device->name() == std::string("cpu")) continue;
    EXPECT_TRUE(same_bits(split.gradients[1], whole.gradients[1]));
    EXPECT_TRUE(same_bits(column_parallel ? split.y : split.gradients[0], column_parallel ? whole.y : whole.gradients[0]));
  }
}

struct Seen {
  std::vector<uint8_t> codes, scales;
};

// Of all operands that a run quantizes, by role.
std::map<OperandRole, Seen> codes_of(const SplitOperation& operation, const Communicator& group, const Tensor& dy) {
  std::map<OperandRole, Seen> out;
  const ObserverScope scope([&](const QuantizedOperand& operand) {
    const int64_t rows = operand.x.dim(0);
    const QuantizedTensor codes = slice(operand.codes, 0, rows);
    out[operand.role] = {to_host<uint8_t>(codes.codes), to_host<uint8_t>(codes.scales)};
  });
  run_rank(operation, group, "cpu", true, dy);
  return out;
}

std::vector<double> doubles(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

void expect_cut(const std::vector<uint8_t>& own, const std::vector<uint8_t>& whole, Cut cut, int rank, int ranks, const char* what) {
  const Shape shape{kTokens, static_cast<int64_t>(whole.size()) / kTokens};
  EXPECT_EQ(doubles(own), cut_of(doubles(whole), shape, cut, rank, ranks)) << what << " of rank " << rank;
}

TEST_P(SplitRecipes, QuantizeToTheCodesOfTheWhole) {
  const RecipeCase& c = GetParam();
  const auto device = make_backend("cpu");
  const SplitOperation operation = operation_of(*device, c);
  const bool column_parallel = c.split == Split::column_parallel;
  const Tensor dy = random_tensor(*device, Dtype::bf16, {kTokens, width(c.recipe.recipe)}, 4);
  std::map<OperandRole, Seen> whole = codes_of(operation, {}, dy);
  std::vector<std::map<OperandRole, Seen>> of(static_cast<size_t>(c.ranks));
  EXPECT_THAT(
      run_ranks(c.ranks, [&](const Communicator& group) { of[static_cast<size_t>(group.rank())] = codes_of(operation, group, dy); }),
      ::testing::Each(::testing::IsEmpty()));
  EXPECT_EQ(whole.size(), size_t{bool{c.recipe.recipe.input}} + size_t{bool{c.recipe.recipe.output_grad}});
  // An input of which wgrad reads values, or codes made of these, is quantized where it is whole.
  const Cut tokens = saved_input(c.recipe.recipe) == SavedAs::rows ? operation.inputs[0].cut : Cut::none;
  for (int r = 0; r < c.ranks; ++r) {
    for (auto& [role, seen] : whole) {
      const Cut cut = role == OperandRole::output_grad ? (column_parallel ? Cut::columns : Cut::none)
                      : column_parallel                ? tokens
                                                       : Cut::columns;
      expect_cut(of[static_cast<size_t>(r)][role].codes, seen.codes, cut, r, c.ranks, role_name(role));
      expect_cut(of[static_cast<size_t>(r)][role].scales, seen.scales, cut, r, c.ranks, role_name(role));
    }
  }
}

std::vector<RecipeCase> recipe_cases() {
  std::vector<RecipeCase> out;
  for (const Named& recipe : kRecipes) {
    for (const int ranks : {2, 4}) {
      for (const Split split : {Split::column_parallel, Split::row_parallel}) {
        for (const bool by_tokens : {false, true}) out.push_back({recipe, split, ranks, by_tokens});
      }
    }
  }
  return out;
}
INSTANTIATE_TEST_SUITE_P(, SplitRecipes, ::testing::ValuesIn(recipe_cases()), [](const auto& c) { return name_of(c.param); });

// Padding rows included: columnwise codes follow from them.
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

// The shards of a weight quantize to the codes of the whole, split by rows or columns at blocks.
TEST(QuantizedShards, AreShardsOfTheCodes) {
  const auto device = make_backend("cpu");
  for (const Quantization& how : {kRows, kTiles, kFake, kRows128, kTiles128}) {
    const int64_t n = 4 * how.block();
    const Tensor w = random_tensor(*device, Dtype::bf16, {n, n}, 2);
    const QuantizedTensor whole = quantized(w, how);
    for (const Cut cut : {Cut::rows, Cut::columns}) {
      for (int r = 0; r < 4; ++r) {
        const QuantizedTensor shard = quantized(cut_of(*device, w, cut, r, 4), how);
        EXPECT_TRUE(same_bits(shard.codes, cut_of(*device, whole.codes, cut, r, 4))) << how << r;
        EXPECT_TRUE(same_bits(shard.scales, cut_of(*device, whole.scales, cut, r, 4))) << how << r;
      }
    }
  }
}

// Forward and backward of one linear make one exchange each at most, of these bytes over all ranks: a sum sends every element to its owner
// and back from there, (R - 1) times each way; a share of tokens goes to or comes from R - 1 ranks.
TEST_P(SplitRecipes, SendWhatTheirFormulaSays) {
  const RecipeCase& c = GetParam();
  const Recipe& recipe = c.recipe.recipe;
  const auto device = make_backend("cpu");
  const SplitOperation operation = operation_of(*device, c);
  const int64_t n = width(recipe), elements = kTokens * n, others = c.ranks - 1;
  const SplitResult result =
      run_split(operation, c.ranks, *device, {kTokens, n}, true, random_tensor(*device, Dtype::bf16, {kTokens, n}, 4));
  ASSERT_FALSE(HasFailure());
  const bool codes = saved_input(recipe) == SavedAs::rows;
  const int64_t gathered = c.split == Split::column_parallel && codes ? elements + elements / recipe.input.block() : 2 * elements;
  int64_t sent = 0;
  for (const Traffic& traffic : result.sent) {
    sent += traffic.activations;
    EXPECT_EQ(traffic.control, 32 * (c.by_tokens ? 2 : 1)) << "a header for each exchange";
    EXPECT_EQ(traffic.gradients + traffic.parameters + traffic.other, 0);
  }
  EXPECT_EQ(sent, others * (c.by_tokens ? 4 * elements + gathered : 2 * 4 * elements));
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
    const SplitResult whole = run_split(operation, 1, *device, {1}, true);
    for (const bool by_tokens : {false, true}) {
      operation.tp.tokens = by_tokens ? tokens : 0;
      operation.inputs[0].cut = by_tokens ? Cut::tokens : Cut::none;
      const SplitResult split = run_split(operation, 2, *device, {1}, true);
      ASSERT_FALSE(::testing::Test::HasFailure());
      EXPECT_TRUE(close(split.y, whole.y, 1e-6)) << named.name;
      EXPECT_TRUE(close(split.gradients[0], whole.gradients[0], 0x1p-6)) << named.name;
      EXPECT_TRUE(close(split.gradients[1], whole.gradients[1], 0x1p-8)) << named.name;
    }
  }
}

// Of a sum only the own share stays, and backward needs no gradient of a constant.
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
      const SplitResult result = run_split(operation, ranks, *device, {1}, true);
      ASSERT_FALSE(::testing::Test::HasFailure());
      int64_t sent = 0;
      for (const Traffic& traffic : result.sent) sent += traffic.activations;
      const int64_t others = ranks - 1, numbers = others * ranks * kTokens * 2 * 4;
      // By tokens: vectors to their shares, x to all, dx in fp32 to its shares, and to all again.
      const int64_t vectors = by_tokens ? others * kElements * (2 + 2 + 4 + 2) : others * kElements * 2 * (2 + 4);
      EXPECT_EQ(sent, numbers + vectors);
      for (const Traffic& traffic : result.sent) EXPECT_EQ(traffic.control, 32 * (by_tokens ? 5 : 3));
    }
  }
}

}  // namespace mantissa::test::split_recipes_test
