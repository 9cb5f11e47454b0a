// Operations whose weight several ranks share: results and gradients in fp64 are those of one rank, and of central differences.
#include <numeric>

#include "split_ranks.h"

namespace mantissa::test::split_ops_test {

// Tokens: 0 is without sequence parallelism. Of 1 and 3 tokens some of four ranks have none.
struct SplitCase {
  std::string op;
  Split split;
  int64_t tokens;
};
void PrintTo(const SplitCase& c, std::ostream* out) {
  *out << c.op << '_' << (c.split == Split::column_parallel ? "rows_" : "columns_") << c.tokens << "_tokens";
}

constexpr int64_t kRowsWithoutShares = 5;

SplitOperation linear_operation(Backend& device, const SplitCase& c) {
  const int64_t rows = c.tokens > 0 ? c.tokens : kRowsWithoutShares;
  const bool column_parallel = c.split == Split::column_parallel, by_tokens = c.tokens > 0;
  const Cut tokens = by_tokens ? Cut::tokens : Cut::none;
  const int64_t in = column_parallel ? 3 : 8, out = column_parallel ? 8 : 3;
  return {.inputs = {{.whole = random_tensor(device, Dtype::f64, {rows, in}, 1), .cut = column_parallel ? tokens : Cut::columns},
                     {.whole = random_tensor(device, Dtype::f64, {out, in}, 2),
                      .cut = column_parallel ? Cut::rows : Cut::columns,
                      .parameter = true},
                     {.whole = random_tensor(device, Dtype::f64, {out}, 3),
                      .cut = column_parallel ? Cut::rows : Cut::none,
                      .parameter = true,
                      .partial = !column_parallel && by_tokens}},
          .output = column_parallel ? Cut::columns : tokens,
          .run = [](const std::vector<Var>& v, const TensorParallel& tp) { return linear(v[0], v[1], v[2], {}, tp); },
          .tp = {.split = c.split, .tokens = c.tokens}};
}

SplitOperation embedding_operation(Backend& device, const SplitCase& c) {
  const int64_t rows = c.tokens > 0 ? c.tokens : kRowsWithoutShares;
  std::vector<double> ids = values(random_indices(device, rows, 8, 5));
  return {.inputs = {{.whole = random_tensor(device, Dtype::f64, {8, 3}, 1), .cut = Cut::rows, .parameter = true}},
          .output = c.tokens > 0 ? Cut::tokens : Cut::none,
          .run =
              [ids](const std::vector<Var>& v, const TensorParallel& tp) {
                const Tensor of_all = tensor_of(v[0].value().device(), Dtype::i32, {static_cast<int64_t>(ids.size())}, ids);
                return embedding(of_all, v[0], tp);
              },
          .tp = {.split = c.split, .tokens = c.tokens}};
}

// Five of eight columns are valid: of four ranks, one has a valid one and one has none.
SplitOperation cross_entropy_operation(Backend& device, const SplitCase& c) {
  const int64_t rows = c.tokens > 0 ? c.tokens : kRowsWithoutShares;
  std::vector<double> targets = values(random_indices(device, rows, 5, 7));
  if (rows > 3) targets[1] = -1, targets[3] = -100;
  const LossOptions options{.vocab = 5, .target_count = 3, .logits_dtype = Dtype::f64, .chunk_elements = 1};
  return {.inputs = {{.whole = random_tensor(device, Dtype::f64, {rows, 3}, 1), .cut = c.tokens > 0 ? Cut::tokens : Cut::none},
                     {.whole = random_tensor(device, Dtype::f64, {8, 3}, 2), .cut = Cut::rows, .parameter = true}},
          .output = Cut::none,
          .run =
              [targets, options](const std::vector<Var>& v, const TensorParallel& tp) {
                const auto count = static_cast<int64_t>(targets.size());
                return cross_entropy(v[0], v[1], tensor_of(v[0].value().device(), Dtype::i32, {count}, targets), options, {}, tp);
              },
          .tp = {.split = c.split, .tokens = c.tokens}};
}

// Has a teacher of two channels, of which each rank takes its share.
SplitOperation taught_operation(Backend& device, const SplitCase& c) {
  SplitOperation out = cross_entropy_operation(device, c);
  const int64_t rows = c.tokens > 0 ? c.tokens : kRowsWithoutShares;
  std::vector<double> targets = values(random_indices(device, rows, 5, 7));
  if (rows > 3) targets[1] = -1, targets[3] = -100;
  out.run = [targets, rows, by_tokens = c.tokens > 0](const std::vector<Var>& v, const TensorParallel& tp) {
    Backend& own = v[0].value().device();
    const int64_t rank = tp.group.rank(), size = tp.group.size();
    const RowRange share = by_tokens ? share_of(rows, tp.group.rank(), tp.group.size()) : RowRange{0, rows};
    LossOptions options{.vocab = 5, .target_count = 3, .logits_dtype = Dtype::f64, .chunk_elements = 1};
    options.teacher = {.x = random_tensor(own, Dtype::f64, {rows, 2}, 71).slice(share.begin, share.end),
                       .weight = Var(random_tensor(own, Dtype::f64, {8, 2}, 72).slice(8 * rank / size, 8 * (rank + 1) / size)),
                       .share = 0.6,
                       .temperature = 1.7};
    return cross_entropy(v[0], v[1], tensor_of(own, Dtype::i32, {rows}, targets), options, {}, tp);
  };
  return out;
}

// 5 tokens that go to two of three experts, each a group of 8 rows or none.
SplitOperation experts_operation(Backend& device) {
  return {.inputs = {{.whole = random_tensor(device, Dtype::f64, {24, 8}, 1), .cut = Cut::columns},
                     {.whole = random_tensor(device, Dtype::f64, {3 * 4, 8}, 2), .cut = Cut::columns, .parameter = true}},
          .output = Cut::none,
          .run =
              [](const std::vector<Var>& v, const TensorParallel& tp) {
                const Tensor experts = tensor_of(v[0].value().device(), Dtype::i32, {5, 2}, {0, 2, 0, 2, 0, 2, 0, 2, 0, 2});
                return combined_linear(v[0], v[1], Var(), dispatch(experts, 3, 8), {}, tp);
              },
          .tp = {.split = Split::row_parallel}};
}

// Choices are those of experts_operation(); gate and up of each of the three experts are shared, and so are the columns of their result.
SplitOperation experts_up_operation(Backend& device) {
  return {.inputs = {{.whole = random_tensor(device, Dtype::f64, {5, 3}, 1)},
                     {.whole = random_tensor(device, Dtype::f64, {5, 2}, 2)},
                     {.whole = random_tensor(device, Dtype::f64, {3 * 2 * 4, 3}, 3), .cut = Cut::rows, .parameter = true, .parts = 3 * 2},
                     {.whole = random_tensor(device, Dtype::f64, {3 * 2 * 4}, 4), .cut = Cut::rows, .parameter = true, .parts = 3 * 2}},
          .output = Cut::columns,
          .run =
              [](const std::vector<Var>& v, const TensorParallel& tp) {
                const Tensor experts = tensor_of(v[0].value().device(), Dtype::i32, {5, 2}, {0, 2, 0, 2, 0, 2, 0, 2, 0, 2});
                return dispatched_swiglu(v[0], v[1], v[2], v[3], dispatch(experts, 3, 8), {}, {.keep = Keep::value, .as_codes = false}, tp);
              },
          .tp = {.split = Split::column_parallel}};
}

SplitOperation tokens_operation(Backend& device, const SplitCase& c) {
  const bool gathers = c.op == "gathered_tokens";
  return {.inputs = {{.whole = random_tensor(device, Dtype::f64, {c.tokens, 3}, 1), .cut = gathers ? Cut::tokens : Cut::none}},
          .output = gathers ? Cut::none : Cut::tokens,
          .run = [gathers](const std::vector<Var>& v,
                           const TensorParallel& tp) { return gathers ? gathered_tokens(v[0], tp) : own_tokens(v[0], tp); },
          .tp = {.split = c.split, .tokens = c.tokens}};
}

SplitOperation operation_of(Backend& device, const SplitCase& c) {
  if (c.op.ends_with("_tokens")) return tokens_operation(device, c);
  if (c.op == "experts") return experts_operation(device);
  if (c.op == "experts_up") return experts_up_operation(device);
  if (c.op == "taught") return taught_operation(device, c);
  return c.op == "linear"      ? linear_operation(device, c)
         : c.op == "embedding" ? embedding_operation(device, c)
                               : cross_entropy_operation(device, c);
}

// Gradients of sum(w y), or of the one number y if w is undefined, against central differences through the ranks. A few elements of each
// input are probed: that all of them are those of one rank is compared, too.
void expect_central_differences(const SplitOperation& operation, int ranks, Backend& device, const SplitResult& found, const Tensor& w) {
  for (size_t i = 0; i < operation.inputs.size(); ++i) {
    const Tensor& x = operation.inputs[i].whole;
    const std::vector<double> before = values(x), gradient = values(found.gradients.at(i));
    for (size_t at = i; at < before.size(); at += 1 + before.size() / 4) {
      const auto output = [&](double value) {
        set_value(x, static_cast<int64_t>(at), value);
        const std::vector<double> y = values(run_split(operation, ranks, device, found.y.shape()).y);
        return w.defined() ? std::inner_product(y.begin(), y.end(), values(w).begin(), 0.0) : y.at(0);
      };
      const double h = 1e-5 * std::max(1.0, std::abs(before[at])), above = output(before[at] + h), below = output(before[at] - h);
      set_value(x, static_cast<int64_t>(at), before[at]);
      EXPECT_NEAR((above - below) / (2.0 * h), gradient[at], 1e-7 * std::max(1.0, std::abs(gradient[at]))) << "input " << i << " at " << at;
    }
  }
}

// Only the order of sums differs from one rank, which has all.
SplitResult expect_one_rank(const SplitOperation& operation, int ranks, Backend& device, Shape y_shape, const Tensor& dy = {},
                            double of_y = 1e-14, double of_gradients = 1e-13) {
  const SplitResult whole = run_split(operation, 1, device, y_shape, Watch::gradients, dy);
  SplitResult split = run_split(operation, ranks, device, y_shape, Watch::gradients, dy);
  EXPECT_TRUE(close(split.y, whole.y, of_y));
  for (size_t i = 0; i < whole.gradients.size(); ++i) EXPECT_TRUE(close(split.gradients.at(i), whole.gradients[i], of_gradients)) << i;
  return split;
}

class SplitOps : public ::testing::TestWithParam<SplitCase> {
 protected:
  Threads one_{1};
};

TEST_P(SplitOps, GiveWhatOneRankGives) {
  const auto device = make_backend("cpu_reference");
  const SplitOperation operation = operation_of(*device, GetParam());
  std::vector<Var> constants;
  for (const SplitInput& input : operation.inputs) constants.emplace_back(input.whole);
  const Shape shape = operation.run(constants, {}).value().shape();
  const Tensor w =
      GetParam().op == "cross_entropy" || GetParam().op == "taught" ? Tensor() : random_tensor(*device, Dtype::f64, shape, 999);
  for (const int ranks : {2, 4}) {
    SCOPED_TRACE(text(ranks, " ranks"));
    const SplitResult found = expect_one_rank(operation, ranks, *device, shape, w);
    ASSERT_FALSE(HasFailure());
    if (GetParam().tokens <= 3) expect_central_differences(operation, ranks, *device, found, w);
  }
}

std::vector<SplitCase> split_cases() {
  std::vector<SplitCase> out = {{"experts_up", Split::column_parallel, 0}, {"experts", Split::row_parallel, 0}};
  for (const int64_t tokens : {0, 1, 3, 33}) {
    for (const Split split : {Split::column_parallel, Split::row_parallel}) out.push_back({"linear", split, tokens});
    for (const char* op : {"embedding", "cross_entropy", "taught"}) out.push_back({op, Split::column_parallel, tokens});
    if (tokens == 0) continue;
    for (const char* op : {"gathered_tokens", "own_tokens"}) out.push_back({op, Split::column_parallel, tokens});
  }
  return out;
}
INSTANTIATE_TEST_SUITE_P(, SplitOps, ::testing::ValuesIn(split_cases()), ::testing::PrintToStringParamName());

TEST(SplitCrossEntropy, HasSeveralChunks) {
  const Threads one(1);
  const auto device = make_backend("cpu_reference");
  SplitOperation operation = cross_entropy_operation(*device, {"cross_entropy", Split::column_parallel, 165});
  expect_one_rank(operation, 2, *device, {1});
  operation.tp.tokens = 0, operation.inputs[0].cut = Cut::none;
  expect_one_rank(operation, 2, *device, {1});
  expect_one_rank(taught_operation(*device, {"taught", Split::column_parallel, 165}), 2, *device, {1});
}

// Exponentials of differences from the largest logit of the first rank alone would overflow.
TEST(SplitCrossEntropy, TakesLogitsThatAreFarLargerOnOneRank) {
  const Threads one(1);
  const auto device = make_backend("cpu_reference");
  for (const size_t large : {0U, 1U}) {
    SplitOperation operation = cross_entropy_operation(*device, {"cross_entropy", Split::column_parallel, 0});
    std::vector<double> weight = values(operation.inputs[1].whole);
    for (size_t i = 0; i < weight.size() / 2; ++i) weight[i + large * weight.size() / 2] *= 1e4;
    operation.inputs[1].whole = tensor_of(*device, Dtype::f64, {8, 3}, weight);
    expect_one_rank(operation, 2, *device, {1}, {}, 1e-12, 1e-9);
  }
}

// Padded to 128, the fourth rank has 32 columns none of which is valid, the third has one. fp32 sums of 128 exponentials, and the
// log-sum-exp as a number of its own: 1e-6.
TEST(SplitCrossEntropy, TakesSharesWithoutAValidColumn) {
  const Threads one(1);
  const auto device = make_backend("cpu");
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    SplitOperation operation = cross_entropy_operation(*device, {"cross_entropy", Split::column_parallel, 40});
    operation.inputs[0] = {.whole = random_tensor(*device, dtype, {40, 16}, 1), .cut = Cut::tokens};
    operation.inputs[1].whole = random_tensor(*device, dtype, {128, 16}, 2);
    operation.run = [](const std::vector<Var>& v, const TensorParallel& tp) {
      Backend& own = v[0].value().device();
      const LossOptions options{.vocab = 65, .target_count = 40, .logits_dtype = Dtype::f32};
      return cross_entropy(v[0], v[1], random_indices(own, 40, 65, 7), options, {}, tp);
    };
    for (const int ranks : {2, 4}) {
      const SplitResult split = expect_one_rank(operation, ranks, *device, {1}, {}, 1e-6, dtype == Dtype::f32 ? 1e-5 : 0x1p-7);
      EXPECT_TRUE(close(values(split.gradients[1].slice(65, 128)), std::vector<double>(63 * 16), 0)) << "padding has no gradient";
    }
  }
}

// Logits of one text, and the next ones of a text that is written.
TEST(SplitLinearGemm, GathersWholeRowsOfLogits) {
  const Threads one(1);
  const auto device = make_backend("cpu_reference");
  for (const auto& [rows, tokens] : {std::pair<int64_t, int64_t>(1, 0), {3, 0}, {1, 1}, {3, 3}}) {
    const Tensor x = random_tensor(*device, Dtype::f64, {rows, 5}, 1), weight = random_tensor(*device, Dtype::f64, {8, 5}, 2);
    const SplitOperation operation{
        .inputs = {{.whole = x, .cut = tokens > 0 ? Cut::tokens : Cut::none}, {.whole = weight, .cut = Cut::rows}},
        .output = Cut::none,
        .run = [](const std::vector<Var>& v,
                  const TensorParallel& tp) { return Var(linear_fprop(v[0].value(), v[1], Dtype::f64, {}, tp)); },
        .tp = {.split = Split::column_parallel, .tokens = tokens}};
    for (const int ranks : {2, 4})
      EXPECT_TRUE(same_bits(run_split(operation, ranks, *device, {rows, 8}).y, linear_fprop(x, Var(weight), Dtype::f64, {})));
  }
}

TEST(ShareOf, IsContiguousNearlyEqualAndEndsOnTheLastRank) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    for (const int64_t rows : {0, 1, 2, 3, 32, 33, 100}) {
      int64_t end = 0;
      for (int r = 0; r < ranks; ++r) {
        const RowRange own = share_of(rows, r, ranks);
        EXPECT_EQ(own.begin, end);
        EXPECT_TRUE(own.size() == rows / ranks || own.size() == (rows + ranks - 1) / ranks) << own.size() << " of " << rows;
        end = own.end;
      }
      EXPECT_EQ(end, rows);
      EXPECT_TRUE(rows == 0 || share_of(rows, ranks - 1, ranks).size() > 0);
    }
  }
}

TEST(SplitOperands, AreNamedWhereTheyDoNotFit) {
  using Call = std::function<void(Backend&, const TensorParallel&)>;
  const auto matrix = [](Backend& d, int64_t rows) { return Var(zeros(d, Dtype::f32, {rows, 4})); };
  const auto ids = [](Backend& d, int64_t rows) { return zeros(d, Dtype::i32, {rows}); };
  const LossOptions options{.vocab = 5, .target_count = 3, .logits_dtype = Dtype::f32};
  using enum Split;
  const std::tuple<const char*, Split, Call> cases[] = {
      {"linear: 5 rows, but rank", column_parallel, [&](auto& d, auto& p) { linear(matrix(d, 5), matrix(d, 4), Var(), {}, p); }},
      {"linear: 4 rows of 5 tokens", row_parallel, [&](auto& d, auto& p) { linear(matrix(d, 4), matrix(d, 4), Var(), {}, p); }},
      {"linear_fprop: the weight must not be row-parallel", row_parallel,
       [&](auto& d, auto& p) { linear_fprop(matrix(d, 5).value(), matrix(d, 4), Dtype::f32, {}, p); }},
      {"gathered_tokens: 5 rows, but rank", column_parallel, [&](auto& d, auto& p) { gathered_tokens(matrix(d, 5), p); }},
      {"a share of 4 rows of 5 tokens", column_parallel, [&](auto& d, auto& p) { own_tokens(matrix(d, 4), p); }},
      {"4 ids of 5 tokens", column_parallel, [&](auto& d, auto& p) { embedding(ids(d, 4), matrix(d, 4), p); }},
      {"embedding: the weight must not be row-parallel", row_parallel, [&](auto& d, auto& p) { embedding(ids(d, 5), matrix(d, 4), p); }},
      {"cross_entropy: 5 rows, but rank", column_parallel,
       [&](auto& d, auto& p) { cross_entropy(matrix(d, 5), matrix(d, 4), ids(d, 5), options, {}, p); }}};
  for (const auto& [words, split, call] : cases) {
    const auto errors = run_ranks(2, [&, split = split, &call = call](const Communicator& group) {
      call(*make_backend("cpu_reference"), {.group = group, .split = split, .tokens = 5});
    });
    EXPECT_THAT(errors, ::testing::Each(::testing::AllOf(::testing::StartsWith("70: "), ::testing::HasSubstr(words))));
  }
}

}  // namespace mantissa::test::split_ops_test
