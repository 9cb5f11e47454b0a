// Indices that are out of range. A kernel cannot throw: whoever waits for its lane gets the error that the reference throws at once, and
// nothing outside an operand was touched.
#include <gmock/gmock.h>

#include <functional>
#include <optional>

#include "kernel_cases_moe.h"

namespace mantissa::test::error_word_test {

using ::testing::HasSubstr;

std::optional<Error> error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  return {};
}

class ErrorWord : public ::testing::Test {
 protected:
  Backend& device() { return *device_; }

  // run(operands) runs one kernel with a wrong index.
  void expect_error_of_reference(const std::function<void(Operands&)>& run) {
    Operands good(*reference_, Dtype::f32);
    const std::optional<Error> expected = error_of([&] { run(good); });
    ASSERT_TRUE(expected);
    for (const Operands::Memory memory : {Operands::Memory::aligned, Operands::Memory::misaligned}) {
      Operands operands(device(), Dtype::f32, memory);
      EXPECT_FALSE(error_of([&] { run(operands); })) << "before anybody waits";
      const std::optional<Error> error = error_of([&] { device().synchronize(); });
      ASSERT_TRUE(error) << "instead of " << expected->what();
      EXPECT_STREQ(error->what(), expected->what());
      EXPECT_EQ(error->code(), expected->code());
      EXPECT_FALSE(error_of([&] { device().synchronize(); })) << "it was told";
      operands.expect_margins_untouched();
    }
  }

 private:
  const std::unique_ptr<Backend> reference_ = make_backend("cpu_reference"), device_ = make_backend("cuda");
};

Tensor ids(Operands& o, const std::vector<double>& values) { return o.given(Dtype::i32, {std::ssize(values)}, values); }
Tensor halves(Operands& o, Shape shape) {
  return o.given(Dtype::f32, shape, std::vector<double>(static_cast<size_t>(shape.elements()), 0.5));
}

TEST_F(ErrorWord, NamesIdsOfAnEmbedding) {
  for (const double wrong : {-1.0, 11.0, 2e9, -2e9}) {
    for (const TableRows part : {TableRows{}, TableRows{.first = 3, .rows = 11}}) {
      const int64_t rows = part.rows == 0 ? 11 : 4;
      expect_error_of_reference([&](Operands& o) {
        o.device().run(
            EmbeddingForward{.ids = ids(o, {3, 10, wrong, 0}), .weight = halves(o, {rows, 5}), .out = halves(o, {4, 5}), .part = part});
      });
      expect_error_of_reference([&](Operands& o) {
        o.device().run(EmbeddingBackward{
            .ids = ids(o, {3, 10, wrong, 0}), .dy = halves(o, {4, 5}), .dweight = halves(o, {rows, 5}), .accumulate = true, .part = part});
      });
    }
  }
}

TEST_F(ErrorWord, NamesPositionsOfRope) {
  const HeadLayout layout{.heads = 2, .kv_heads = 1, .head_dim = 4};
  for (const double wrong : {-1.0, 7.0, 2e9}) {
    expect_error_of_reference([&](Operands& o) {
      o.device().run(Rope{.x = halves(o, {3, 16}),
                          .table = halves(o, {7, 4}),
                          .positions = ids(o, {6, wrong, 0}),
                          .y = halves(o, {3, 16}),
                          .layout = layout,
                          .inverse = false});
    });
  }
}

TEST_F(ErrorWord, NamesTargetsOfALoss) {
  for (const double wrong : {9.0, 10.0, 2e9}) {  // the logits have 10 columns
    const auto targets = [&](Operands& o) { return ids(o, {8, -1, wrong, -2e9}); };
    expect_error_of_reference([&](Operands& o) {
      const Tensor logits = halves(o, {4, 10});
      o.device().run(
          CrossEntropy{.logits = logits, .targets = targets(o), .loss = halves(o, {4}), .vocab = 9, .scale = 1.0, .dlogits = logits});
    });
    expect_error_of_reference([&](Operands& o) {
      o.device().run(
          CrossEntropyShare{.logits = halves(o, {4, 10}), .targets = targets(o), .sums = halves(o, {4, 2}), .first = 0, .vocab = 9});
    });
    expect_error_of_reference([&](Operands& o) {
      const Tensor logits = halves(o, {4, 10});
      o.device().run(CrossEntropyOfShares{.logits = logits,
                                          .targets = targets(o),
                                          .sums = halves(o, {1, 4, 2}),
                                          .loss = halves(o, {4}),
                                          .first = 0,
                                          .vocab = 9,
                                          .scale = 1.0,
                                          .dlogits = logits});
    });
  }
}

TEST_F(ErrorWord, NamesTargetsOfALossWithATeacher) {
  for (const double wrong : {9.0, 2e9}) {
    const auto targets = [&](Operands& o) { return ids(o, {8, -1, wrong, -2e9}); };
    expect_error_of_reference([&](Operands& o) {
      o.device().run(DistillationShare{.logits = halves(o, {4, 10}),
                                       .teacher = halves(o, {4, 10}),
                                       .targets = targets(o),
                                       .sums = halves(o, {4, 5}),
                                       .first = 0,
                                       .vocab = 9,
                                       .temperature = 1.0});
    });
    expect_error_of_reference([&](Operands& o) {
      const Tensor logits = halves(o, {4, 10});
      o.device().run(DistillationOfShares{.logits = logits,
                                          .teacher = halves(o, {4, 10}),
                                          .targets = targets(o),
                                          .sums = halves(o, {1, 4, 5}),
                                          .loss = halves(o, {4}),
                                          .first = 0,
                                          .vocab = 9,
                                          .temperature = 1.0,
                                          .weight = 1.0,
                                          .scale = 1.0,
                                          .dlogits = logits});
    });
  }
}

// A query at position 68 of the second sequence of 70.
TEST_F(ErrorWord, NamesStartsOfSegments) {
  const HeadLayout layout{.heads = 2, .kv_heads = 1, .head_dim = 4};
  const Shape row{140, layout.row()}, channels{140, 8}, statistics{2, 2, 70};
  for (const double wrong : {-1.0, 69.0, 2e9, -2e9}) {
    for (const int64_t window : {0, 1'000'000'000}) {
      if (window > 0 && wrong != 69.0) continue;
      std::vector<double> starts(140, 0.0);
      starts[138] = wrong;
      expect_error_of_reference([&](Operands& o) {
        o.device().run(AttentionForward{.qkv = halves(o, row),
                                        .out = halves(o, channels),
                                        .lse = halves(o, statistics),
                                        .batch = 2,
                                        .layout = layout,
                                        .scale = 1.0,
                                        .segment_starts = ids(o, starts),
                                        .window = window});
      });
      expect_error_of_reference([&](Operands& o) {
        o.device().run(AttentionBackward{.qkv = halves(o, row),
                                         .out = halves(o, channels),
                                         .lse = halves(o, statistics),
                                         .dout = halves(o, channels),
                                         .dqkv = halves(o, row),
                                         .batch = 2,
                                         .layout = layout,
                                         .scale = 1.0,
                                         .segment_starts = ids(o, starts),
                                         .window = window});
      });
    }
  }
}

TEST_F(ErrorWord, NamesExpertsOfADispatch) {
  for (const double wrong : {-2.0, 3.0, 2e9, -2e9}) {
    expect_error_of_reference([&](Operands& o) {
      o.device().run(DispatchTable{.experts = o.given(Dtype::i32, {3, 2}, {0, 1, 2, 0, 1, wrong}),
                                   .offsets = index_output(o, "offsets", {4}),
                                   .rows = index_output(o, "rows", {3, 2}),
                                   .assignments = index_output(o, "assignments", {dispatch_rows(6, 3, 32)}),
                                   .multiple = 32});
    });
  }
}

TEST_F(ErrorWord, NamesExpertsOfARouter) {
  for (const double wrong : {-1.0, 6.0, 2e9, -2e9}) {
    for (const bool after : {false, true}) {
      expect_error_of_reference([&](Operands& o) {
        o.device().run(RouteBackward{.logits = halves(o, {3, 6}),
                                     .scores = halves(o, {3, 6}),
                                     .experts = o.given(Dtype::i32, {3, 2}, {0, 1, 2, 5, 1, wrong}),
                                     .counts = o.given(Dtype::i32, {1, 6}, std::vector<double>(6, 1.0)),
                                     .dweights = halves(o, {3, 2}),
                                     .dlogits = halves(o, {3, 6}),
                                     .rule = softmax_rule(2, after, true),
                                     .balance = 0.3,
                                     .sequence_balance = 0.2,
                                     .z = 0.1});
      });
    }
  }
}

// Ten rows arrive, of two ranks for two experts, and each group is rounded up to 32.
TEST_F(ErrorWord, NamesCountsOfOtherArrivals) {
  const std::vector<std::vector<double>> wrong = {{1, 2, 3, 5},     {1, 2, 3, 3},  {1, 2, -3, 10}, {-2e9, -1, 3, 4},
                                                  {2e9, 2e9, 3, 4}, {0, 0, 10, 0}, {4, 0, 3, 3}};
  for (const std::vector<double>& counts : wrong) {
    for (const int64_t room : {128, 64}) {
      if (counts[0] == 4 && room == 128) continue;  // three groups, of 96 rows
      expect_error_of_reference([&](Operands& o) {
        o.device().run(ArrivalTable{.counts = o.given(Dtype::i32, {2, 2}, counts),
                                    .offsets = index_output(o, "offsets", {3}),
                                    .rows = index_output(o, "rows", {10}),
                                    .assignments = index_output(o, "assignments", {room}),
                                    .multiple = 32,
                                    .source_offsets = index_output(o, "source_offsets", {5})});
      });
    }
  }
}

TEST_F(ErrorWord, NamesRowsThatArePermuted) {
  for (const double wrong : {-2.0, 8.0, 2e9, -2e9}) {
    for (const int64_t columns : {3, 4, 32}) {  // by units of every size
      expect_error_of_reference([&](Operands& o) {
        o.device().run(
            Permute{.x = o.input({4, columns}), .out = halves(o, {3, columns}), .assignments = ids(o, {7, wrong, -1}), .per_row = 2});
      });
      expect_error_of_reference([&](Operands& o) {
        o.device().run(
            Unpermute{.x = o.input({8, columns}), .rows = o.given(Dtype::i32, {2, 2}, {7, -1, wrong, 0}), .out = halves(o, {2, columns})});
      });
    }
    expect_error_of_reference([&](Operands& o) {
      const Quantization how{Format::e4m3, 1, 32};
      o.device().run(Permute{.x = quantized_input(o, 4, 96, how, 2),
                             .out = quantized_output(o, "codes", "scales", {3, 96}, how),
                             .assignments = ids(o, {7, wrong, -1}),
                             .per_row = 2});
    });
  }
}

// Runs every kernel with groups of rows, on 100 rows in as many groups as there are offsets before the last.
void run_on_groups(Operands& o, int kernel, const std::vector<double>& given) {
  const int64_t groups = std::ssize(given) - 1;
  const Tensor offsets = ids(o, given), x = halves(o, {100, 5});
  Backend& device = o.device();
  if (kernel == 0) device.run(GroupedGemm{.a = {x}, .b = {halves(o, {groups * 5, 3})}, .out = halves(o, {100, 3}), .offsets = offsets});
  if (kernel == 1)
    device.run(
        GroupedWeightGradient{.a = x, .b = halves(o, {100, 3}), .out = halves(o, {groups * 5, 3}), .offsets = offsets, .accumulate = true});
  if (kernel == 2) device.run(AddGroupedBias{.x = x, .bias = halves(o, {groups * 5}), .out = halves(o, {100, 5}), .offsets = offsets});
  if (kernel == 3) device.run(GroupedBiasGradient{.dy = x, .dbias = halves(o, {groups * 5}), .offsets = offsets, .accumulate = true});
  if (kernel == 4) device.run(GroupedBiasDot{.dy = x, .bias = halves(o, {groups * 5}), .out = halves(o, {100}), .offsets = offsets});
}

TEST_F(ErrorWord, NamesTheFirstOffsetOfGroupsThatCannotBe) {
  std::vector<double> many(601, 100.0);
  many[0] = 0, many[300] = 99, many[301] = 101, many[599] = -1;
  const std::vector<std::vector<double>> wrong = {
      {1, 40, 100}, {-1, 40, 100}, {0, 101, 100}, {0, 40, 39, 100}, {0, 40, 101}, {0, -7, 100}, {0, 2e9, 100}, {2e9, 2e9, 2e9}, many};
  for (const std::vector<double>& offsets : wrong) {
    for (const int kernel : {0, 1, 2, 3, 4}) expect_error_of_reference([&](Operands& o) { run_on_groups(o, kernel, offsets); });
  }
}

Tensor indices(Backend& device, const std::vector<double>& values) { return tensor_of(device, Dtype::i32, {std::ssize(values)}, values); }
Tensor filled(Backend& device, Shape shape) {
  const Tensor out = empty(device, Dtype::f32, shape);
  device.run(Fill{.out = out, .value = 0.5});
  return out;
}

// A choice that is refused is dropped.
TEST_F(ErrorWord, LeavesOtherChoicesAlone) {
  const DispatchTable table{.experts = tensor_of(device(), Dtype::i32, {2, 2}, {1, 0, 2, 1}),
                            .offsets = empty(device(), Dtype::i32, {3}),
                            .rows = tensor_of(device(), Dtype::i32, {2, 2}, {7, 7, 7, 7}),
                            .assignments = empty(device(), Dtype::i32, {dispatch_rows(4, 2, 2)}),
                            .multiple = 2};
  device().run(table);
  EXPECT_TRUE(error_of([&] { device().synchronize(); }));
  EXPECT_EQ(values(table.rows), (std::vector<double>{2, 0, -1, 3}));
  EXPECT_EQ(values(table.offsets), (std::vector<double>{0, 2, 4}));
}

// Nothing is trained for a row whose target is refused.
TEST_F(ErrorWord, LeavesOtherRowsAlone) {
  const Tensor logits = filled(device(), {2, 4}), loss = filled(device(), {2}), dlogits = filled(device(), {2, 4});
  device().run(
      CrossEntropy{.logits = logits, .targets = indices(device(), {1, 4}), .loss = loss, .vocab = 4, .scale = 4.0, .dlogits = dlogits});
  EXPECT_TRUE(error_of([&] { device().synchronize(); }));
  EXPECT_EQ(values(dlogits), (std::vector<double>{1, -3, 1, 1, 0, 0, 0, 0}));
  EXPECT_EQ(values(loss)[1], 0.0);
}

void gather(Backend& device, double id) {
  device.run(EmbeddingForward{.ids = indices(device, {id}), .weight = filled(device, {5, 3}), .out = filled(device, {1, 3})});
}

TEST_F(ErrorWord, IsToldByADownload) {
  const Tensor other = filled(device(), {2});
  gather(device(), 5);
  const std::optional<Error> error = error_of([&] { to_host<float>(other); });
  ASSERT_TRUE(error);
  EXPECT_THAT(error->what(), HasSubstr("embedding: ids[0] is 5, not in [0, 5)"));
  EXPECT_EQ(to_host<float>(other), (std::vector<float>{0.5F, 0.5F})) << "the device works on";
}

TEST_F(ErrorWord, IsTheFirst) {
  gather(device(), 4);
  gather(device(), 7);
  gather(device(), -8);
  const std::optional<Error> error = error_of([&] { device().synchronize(); });
  ASSERT_TRUE(error);
  EXPECT_THAT(error->what(), HasSubstr("ids[0] is 7"));
  gather(device(), -8);
  EXPECT_TRUE(error_of([&] { device().synchronize(); })) << "of a later kernel";
}

TEST_F(ErrorWord, MayBeLeftUntold) {
  for (int i = 0; i < 10; ++i) gather(*make_backend("cuda"), 5);
}

TEST_F(ErrorWord, BelongsToItsLane) {
  const Tensor other = filled(device(), {2});
  device().synchronize();
  {
    const LaneScope scope(Lane::communication);
    gather(device(), 5);
  }
  EXPECT_FALSE(error_of([&] { to_host<float>(other); })) << "which waits for the lane of computations";
  EXPECT_TRUE(error_of([&] { device().synchronize(); }));
}

}  // namespace mantissa::test::error_word_test
