// Operations whose weight several ranks share: gradients in fp64 against central differences through 2 and 4 ranks, results against one
// rank, and what they send.
#include "gradient_check.h"
#include "split_ranks.h"

namespace mantissa::test::split_ops_test {

// Tokens: 0 is without sequence parallelism. Of 1 and 3 tokens some of four ranks have none.
struct SplitCase {
  std::string op;
  Split split;
  int ranks;
  int64_t tokens;
};
void PrintTo(const SplitCase& c, std::ostream* out) {
  *out << c.op << '_' << (c.split == Split::column_parallel ? "rows_" : "columns_") << c.ranks << "_ranks_" << c.tokens << "_tokens";
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

// Of eight columns five are valid: of four ranks, one has a valid one and one has none.
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

// The same choices; gate and up of each of the three experts are shared, and so are the columns of what they give.
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
  return c.op == "linear"      ? linear_operation(device, c)
         : c.op == "embedding" ? embedding_operation(device, c)
                               : cross_entropy_operation(device, c);
}

// The operation on one rank, which has all.
Var on_one_rank(const SplitOperation& operation, const std::vector<Var>& inputs) { return operation.run(inputs, {}); }

std::vector<Var> constants(const SplitOperation& operation) {
  std::vector<Var> out;
  for (const SplitInput& input : operation.inputs) out.emplace_back(input.whole);
  return out;
}

// The ranks as one operation of the tape on whole tensors: its backward runs them with tapes of their own.
Var on_all_ranks(SplitOperation operation, int ranks, const std::vector<Var>& inputs, Shape y_shape) {
  for (size_t i = 0; i < inputs.size(); ++i) operation.inputs[i].whole = inputs[i].value();
  Backend& device = inputs[0].value().device();
  const SplitResult forward = run_split(operation, ranks, device, y_shape);
  const auto at = [&](size_t i) { return i < inputs.size() ? inputs[i] : Var(); };
  return record("split", forward.y, {at(0), at(1), at(2)}, [=, &device](const Tensor& dy) {
    const SplitResult result = run_split(operation, ranks, device, y_shape, true, dy);
    std::vector<Tensor> out(3);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].leaf() == nullptr) {
        out[i] = result.gradients.at(i);
        continue;
      }
      const auto [target, accumulate] = inputs[i].leaf()->target();
      if (accumulate) {
        device.run(Add{.a = target, .b = result.gradients.at(i), .out = target});
      } else {
        device.run(Convert{.x = result.gradients.at(i), .out = target});
      }
    }
    return out;
  });
}

class SplitOps : public ::testing::TestWithParam<SplitCase> {
 protected:
  Threads one_{1};
};

TEST_P(SplitOps, HaveTheGradientsOfCentralDifferences) {
  const auto device = make_backend("cpu_reference");
  const SplitOperation operation = operation_of(*device, GetParam());
  const Tensor whole = on_one_rank(operation, constants(operation)).value();
  std::vector<CheckedInput> inputs;
  for (const SplitInput& input : operation.inputs) {
    inputs.push_back({"input " + std::to_string(inputs.size()), input.whole, input.parameter ? Role::parameter : Role::activation});
  }
  expect_gradients(
      inputs, [&](const std::vector<Var>& v) { return on_all_ranks(operation, GetParam().ranks, v, whole.shape()); },
      GetParam().op == "cross_entropy" ? Output::loss : Output::tensor);
}

// Only the order of sums differs.
TEST_P(SplitOps, GiveWhatOneRankGives) {
  const auto device = make_backend("cpu_reference");
  const SplitOperation operation = operation_of(*device, GetParam());
  const Tensor whole = on_one_rank(operation, constants(operation)).value();
  EXPECT_TRUE(close(run_split(operation, GetParam().ranks, *device, whole.shape()).y, whole, 1e-14));
}

std::vector<SplitCase> split_cases() {
  std::vector<SplitCase> out;
  for (const int ranks : {2, 4}) {
    for (const int64_t tokens : {0, 1, 3, 33}) {
      for (const Split split : {Split::column_parallel, Split::row_parallel}) out.push_back({"linear", split, ranks, tokens});
      for (const char* op : {"embedding", "cross_entropy"}) out.push_back({op, Split::column_parallel, ranks, tokens});
      if (tokens == 0) continue;
      for (const char* op : {"gathered_tokens", "own_tokens"}) out.push_back({op, Split::column_parallel, ranks, tokens});
    }
    out.push_back({"experts_up", Split::column_parallel, ranks, 0});
    out.push_back({"experts", Split::row_parallel, ranks, 0});
  }
  return out;
}
INSTANTIATE_TEST_SUITE_P(, SplitOps, ::testing::ValuesIn(split_cases()), ::testing::PrintToStringParamName());

// Central differences of 165 rows would take minutes; the loss of one rank is checked by them elsewhere.
TEST(SplitCrossEntropy, HasSeveralChunks) {
  const Threads one(1);
  const auto device = make_backend("cpu_reference");
  for (const int64_t tokens : {0, 165}) {
    SplitOperation operation = cross_entropy_operation(*device, {"cross_entropy", Split::column_parallel, 2, 165});
    operation.tp.tokens = tokens;
    if (tokens == 0) operation.inputs[0].cut = Cut::none;
    const SplitResult two = run_split(operation, 2, *device, {1}, true), whole = run_split(operation, 1, *device, {1}, true);
    EXPECT_TRUE(close(two.y, whole.y, 1e-14));
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(close(two.gradients.at(i), whole.gradients.at(i), 1e-13)) << i;
  }
}

// Exponentials of differences from the largest logit of the first rank alone would overflow.
TEST(SplitCrossEntropy, TakesLogitsThatAreFarLargerOnOneRank) {
  const Threads one(1);
  const auto device = make_backend("cpu_reference");
  for (const int large : {0, 1}) {
    SplitOperation operation = cross_entropy_operation(*device, {"cross_entropy", Split::column_parallel, 2, 0});
    std::vector<double> weight = values(operation.inputs[1].whole);
    for (size_t i = 0; i < weight.size() / 2; ++i) weight[i + (large == 0 ? 0 : weight.size() / 2)] *= 1e4;
    operation.inputs[1].whole = tensor_of(*device, Dtype::f64, {8, 3}, weight);
    const SplitResult two = run_split(operation, 2, *device, {1}, true), whole = run_split(operation, 1, *device, {1}, true);
    EXPECT_TRUE(close(two.y, whole.y, 1e-12)) << large;
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(close(two.gradients.at(i), whole.gradients.at(i), 1e-9)) << large << ' ' << i;
  }
}

// Padded to 128, the fourth rank has 32 columns none of which is valid, the third has one. fp32 sums of 128 exponentials, and the
// log-sum-exp as a number of its own: 1e-6.
TEST(SplitCrossEntropy, TakesSharesWithoutAValidColumn) {
  const Threads one(1);
  const auto device = make_backend("cpu");
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    SplitOperation operation = cross_entropy_operation(*device, {"cross_entropy", Split::column_parallel, 4, 40});
    operation.inputs[0] = {.whole = random_tensor(*device, dtype, {40, 16}, 1), .cut = Cut::tokens};
    operation.inputs[1].whole = random_tensor(*device, dtype, {128, 16}, 2);
    operation.run = [](const std::vector<Var>& v, const TensorParallel& tp) {
      Backend& own = v[0].value().device();
      const LossOptions options{.vocab = 65, .target_count = 40, .logits_dtype = Dtype::f32};
      return cross_entropy(v[0], v[1], random_indices(own, 40, 65, 7), options, {}, tp);
    };
    const SplitResult whole = run_split(operation, 1, *device, {1}, true);
    for (const int ranks : {2, 4}) {
      const SplitResult split = run_split(operation, ranks, *device, {1}, true);
      EXPECT_TRUE(close(split.y, whole.y, 1e-6)) << dtype;
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(close(split.gradients.at(i), whole.gradients.at(i), dtype == Dtype::f32 ? 1e-5 : 0x1p-7)) << dtype << ' ' << i;
      }
      EXPECT_TRUE(close(values(split.gradients[1].slice(65, 128)), std::vector<double>(63 * 16), 0)) << "padding has no gradient";
    }
  }
}

// Logits of one text, and the next ones of a text that is written.
TEST(SplitLinearGemm, GathersWholeRowsOfLogits) {
  const Threads one(1);
  const auto device = make_backend("cpu_reference");
  for (const int ranks : {2, 4}) {
    for (const int64_t tokens : {0, 1, 3}) {
      for (const int64_t rows : {1, 3}) {
        if (tokens > 0 && rows != tokens) continue;
        const Tensor x = random_tensor(*device, Dtype::f64, {rows, 5}, 1), weight = random_tensor(*device, Dtype::f64, {8, 5}, 2);
        const SplitOperation operation{
            .inputs = {{.whole = x, .cut = tokens > 0 ? Cut::tokens : Cut::none}, {.whole = weight, .cut = Cut::rows}},
            .output = Cut::none,
            .run = [](const std::vector<Var>& v,
                      const TensorParallel& tp) { return Var(linear_fprop(v[0].value(), v[1], Dtype::f64, {}, tp)); },
            .tp = {.split = Split::column_parallel, .tokens = tokens}};
        EXPECT_TRUE(same_bits(run_split(operation, ranks, *device, {rows, 8}).y, linear_fprop(x, Var(weight), Dtype::f64, {})));
      }
    }
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
  const auto throws = [](int ranks, const std::function<void(Backend&, const TensorParallel&)>& body, Split split, const char* words) {
    std::vector<std::string> errors = run_ranks(ranks, [&](const Communicator& group) {
      const auto device = make_backend("cpu_reference");
      body(*device, {.group = group, .split = split, .tokens = 5});
    });
    for (const std::string& error : errors)
      EXPECT_THAT(error, ::testing::AllOf(::testing::StartsWith("70: "), ::testing::HasSubstr(words)));
  };
  const auto matrix = [](Backend& d, int64_t rows) { return Var(zeros(d, Dtype::f32, {rows, 4})); };
  throws(
      2, [&](Backend& d, const TensorParallel& p) { linear(matrix(d, 5), matrix(d, 4), Var(), {}, p); }, Split::column_parallel,
      "linear: 5 rows, but rank");
  throws(
      2, [&](Backend& d, const TensorParallel& p) { linear(matrix(d, 4), matrix(d, 4), Var(), {}, p); }, Split::row_parallel,
      "linear: 4 rows of 5 tokens");
  throws(
      2, [&](Backend& d, const TensorParallel& p) { linear_fprop(matrix(d, 5).value(), matrix(d, 4), Dtype::f32, {}, p); },
      Split::row_parallel, "linear_fprop: only shares of rows");
  throws(
      2, [&](Backend& d, const TensorParallel& p) { gathered_tokens(matrix(d, 5), p); }, Split::column_parallel,
      "gathered_tokens: 5 rows, but rank");
  throws(
      2, [&](Backend& d, const TensorParallel& p) { own_tokens(matrix(d, 4), p); }, Split::column_parallel,
      "a share of 4 rows of 5 tokens");
  throws(
      2, [&](Backend& d, const TensorParallel& p) { embedding(zeros(d, Dtype::i32, {4}), matrix(d, 4), p); }, Split::column_parallel,
      "4 ids of 5 tokens");
  throws(
      2, [&](Backend& d, const TensorParallel& p) { embedding(zeros(d, Dtype::i32, {5}), matrix(d, 4), p); }, Split::row_parallel,
      "split by rows");
  const LossOptions options{.vocab = 5, .target_count = 3, .logits_dtype = Dtype::f32};
  throws(
      2, [&](Backend& d, const TensorParallel& p) { cross_entropy(matrix(d, 5), matrix(d, 4), zeros(d, Dtype::i32, {5}), options, {}, p); },
      Split::column_parallel, "cross_entropy: 5 rows, but rank");
}

}  // namespace mantissa::test::split_ops_test
