// Lookups of a table that is codes: rows are decoded codes, and the gradient is that of the values, straight through the rounding.
#include "files.h"
#include "split_ranks.h"

namespace mantissa::test::quantized_embedding_test {

constexpr Quantization kFormats[] = {{Format::e2m1, 1, 32, ScaleRule::flashinfer},
                                     {Format::e2m1, 1, 32, ScaleRule::even},
                                     {Format::e2m1, 1, 16},
                                     {Format::e4m3, 1, 32},
                                     {Format::e5m2, 1, 64, ScaleRule::floor}};
constexpr int64_t kRows = 9, kColumns = 64;

// A table, and its codes, which are those of its bf16 rounding.
LinearWeight table_of(const Tensor& values, const Quantization& how, Leaf* leaf = nullptr) {
  return {values, quantized(converted(values, Dtype::bf16), how), leaf};
}

class QuantizedEmbedding : public ::testing::TestWithParam<const char*> {
 protected:
  Tensor ids(std::vector<double> of) const { return tensor_of(*device_, Dtype::i32, {std::ssize(of)}, of); }

  std::unique_ptr<Backend> device_ = make_backend(GetParam());
};

TEST_P(QuantizedEmbedding, HasTheRowsOfTheDecodedTable) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
    const Tensor values = random_tensor(*device_, dtype, {kRows, kColumns}, 1), read = ids({3, 0, 8, 3, 7});
    for (const Quantization& how : kFormats) {
      SCOPED_TRACE(text(how, ' ', dtype));
      const LinearWeight table = table_of(values, how);
      const Tensor found = embedding(read, table).value();
      EXPECT_EQ(found.dtype(), dtype);
      EXPECT_TRUE(same_bits(found, embedding(read, Var(decoded(table.codes, dtype))).value()));
      EXPECT_FALSE(same_bits(found, embedding(read, Var(values)).value()));
    }
  }
}

TEST_P(QuantizedEmbedding, PassesItsGradientStraightThrough) {
  const Tensor values = random_tensor(*device_, Dtype::bf16, {kRows, kColumns}, 1), read = ids({3, 0, 8, 3});
  const Tensor dy = random_tensor(*device_, Dtype::bf16, {4, kColumns}, 2);
  const auto gradient = [&](const auto& table) {
    Leaf leaf{.grad = zeros(*device_, Dtype::f32, {kRows, kColumns})};
    Tape tape;
    const Tape::Scope scope(&tape);
    tape.backward(embedding(read, table(leaf)), dy);
    EXPECT_TRUE(leaf.written);
    return leaf.grad;
  };
  const Tensor found = gradient([&](Leaf& leaf) { return table_of(values, kFormats[0], &leaf); });
  EXPECT_TRUE(same_bits(found, gradient([&](Leaf& leaf) { return LinearWeight(Var(values, leaf)); })));
}

TEST_P(QuantizedEmbedding, RefusesIdsThatTheTableLacks) {
  const LinearWeight table = table_of(random_tensor(*device_, Dtype::bf16, {kRows, kColumns}, 1), kFormats[0]);
  for (const double id : {-1.0, 9.0}) {
    const Error error = error_of([&] { embedding(ids({3, id}), table); });
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_EQ(std::string(error.what()), text("embedding: ids[1] is ", static_cast<int>(id), ", not in [0, 9)"));
  }
}

// Each rank has rows of the table.
TEST_P(QuantizedEmbedding, HasTheSameBitsAmongRanks) {
  const Threads one(1);
  constexpr int64_t kTokens = 37;
  for (const bool by_tokens : {false, true}) {
    const SplitOperation operation{
        .inputs = {{.whole = random_tensor(*device_, Dtype::bf16, {32, kColumns}, 1), .cut = Cut::rows, .parameter = true}},
        .output = by_tokens ? Cut::tokens : Cut::none,
        .run =
            [](const std::vector<Var>& v, const TensorParallel& tp) {
              const Tensor read = random_indices(v[0].value().device(), kTokens, 32, 5);
              return embedding(read, table_of(v[0].value(), kFormats[0], v[0].leaf()), tp);
            },
        .tp = {.split = Split::column_parallel, .tokens = by_tokens ? kTokens : 0}};
    const Tensor dy = random_tensor(*device_, Dtype::bf16, {kTokens, kColumns}, 2);
    const SplitResult alone = run_split(operation, 1, *device_, {kTokens, kColumns}, Watch::gradients, dy);
    for (const int ranks : {2, 4}) {
      const SplitResult split = run_split(operation, ranks, *device_, {kTokens, kColumns}, Watch::gradients, dy);
      ASSERT_FALSE(::testing::Test::HasFailure());
      EXPECT_TRUE(same_bits(split.y, alone.y)) << ranks;
      EXPECT_TRUE(same_bits(split.gradients[0], alone.gradients[0])) << ranks;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, QuantizedEmbedding, ::testing::Values("cpu_reference", "cpu"),
                         [](const auto& name) { return std::string(name.param); });

}  // namespace mantissa::test::quantized_embedding_test
