// Indices that are out of range. A kernel cannot throw: whoever waits for its lane gets the error that the reference throws at once, and
// nothing outside an operand was touched.
#include <gmock/gmock.h>

#include <functional>
#include <optional>

#include "testing.h"

namespace mantissa::error_word_test {

using test::tensor_of;
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

  // run(device) runs one kernel with one wrong index.
  void expect_error_of_reference(const std::function<void(Backend&)>& run) {
    const std::optional<Error> expected = error_of([&] { run(*reference_); });
    ASSERT_TRUE(expected);
    EXPECT_FALSE(error_of([&] { run(device()); })) << "before anybody waits";
    const std::optional<Error> error = error_of([&] { device().synchronize(); });
    ASSERT_TRUE(error) << "instead of " << expected->what();
    EXPECT_STREQ(error->what(), expected->what());
    EXPECT_EQ(error->code(), expected->code());
    EXPECT_FALSE(error_of([&] { device().synchronize(); })) << "it was told";
  }

 private:
  const std::unique_ptr<Backend> reference_ = make_backend("cpu_reference"), device_ = make_backend("cuda");
};

Tensor indices(Backend& device, const std::vector<double>& values) {
  return tensor_of(device, Dtype::i32, {static_cast<int64_t>(values.size())}, values);
}
Tensor filled(Backend& device, Shape shape) {
  const Tensor out = empty(device, Dtype::f32, shape);
  device.run(Fill{.out = out, .value = 0.5});
  return out;
}

TEST_F(ErrorWord, NamesIdsOfAnEmbedding) {
  for (const double wrong : {-1.0, 11.0, 2e9, -2e9}) {
    for (const TableRows part : {TableRows{}, TableRows{.first = 3, .rows = 11}}) {
      const int64_t rows = part.rows == 0 ? 11 : 4;
      expect_error_of_reference([&](Backend& d) {
        d.run(
            EmbeddingForward{.ids = indices(d, {3, 10, wrong, 0}), .weight = filled(d, {rows, 5}), .out = filled(d, {4, 5}), .part = part});
      });
      expect_error_of_reference([&](Backend& d) {
        d.run(EmbeddingBackward{.ids = indices(d, {3, 10, wrong, 0}),
                                .dy = filled(d, {4, 5}),
                                .dweight = filled(d, {rows, 5}),
                                .accumulate = true,
                                .part = part});
      });
    }
  }
}

TEST_F(ErrorWord, NamesPositionsOfRope) {
  const HeadLayout layout{.heads = 2, .kv_heads = 1, .head_dim = 4};
  for (const double wrong : {-1.0, 7.0, 2e9}) {
    expect_error_of_reference([&](Backend& d) {
      d.run(Rope{.x = filled(d, {3, 16}),
                 .table = filled(d, {7, 4}),
                 .positions = indices(d, {6, wrong, 0}),
                 .y = filled(d, {3, 16}),
                 .layout = layout,
                 .inverse = false});
    });
  }
}

TEST_F(ErrorWord, NamesTargetsOfALoss) {
  for (const double wrong : {9.0, 10.0, 2e9}) {  // the logits have 10 columns
    const auto targets = [&](Backend& d) { return indices(d, {8, -1, wrong, -2e9}); };
    expect_error_of_reference([&](Backend& d) {
      const Tensor logits = filled(d, {4, 10});
      d.run(CrossEntropy{.logits = logits, .targets = targets(d), .loss = filled(d, {4}), .vocab = 9, .scale = 1.0, .dlogits = logits});
    });
    expect_error_of_reference([&](Backend& d) {
      d.run(CrossEntropyShare{.logits = filled(d, {4, 10}), .targets = targets(d), .sums = filled(d, {4, 2}), .first = 0, .vocab = 9});
    });
    expect_error_of_reference([&](Backend& d) {
      const Tensor logits = filled(d, {4, 10});
      d.run(CrossEntropyOfShares{.logits = logits,
                                 .targets = targets(d),
                                 .sums = filled(d, {1, 4, 2}),
                                 .loss = filled(d, {4}),
                                 .first = 0,
                                 .vocab = 9,
                                 .scale = 1.0,
                                 .dlogits = logits});
    });
  }
}

// Of a row whose target is refused nothing is trained.
TEST_F(ErrorWord, LeavesOtherRowsAlone) {
  const Tensor logits = filled(device(), {2, 4}), loss = filled(device(), {2}), dlogits = filled(device(), {2, 4});
  device().run(
      CrossEntropy{.logits = logits, .targets = indices(device(), {1, 4}), .loss = loss, .vocab = 4, .scale = 4.0, .dlogits = dlogits});
  EXPECT_TRUE(error_of([&] { device().synchronize(); }));
  EXPECT_EQ(test::values(dlogits), (std::vector<double>{1, -3, 1, 1, 0, 0, 0, 0}));
  EXPECT_EQ(test::values(loss)[1], 0.0);
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

}  // namespace mantissa::error_word_test
