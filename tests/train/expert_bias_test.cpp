// Loss-free balance: biases follow from assignments, and they change the choice alone.
#include <gtest/gtest.h>

#include "testing.h"
#include "train/training_step.h"

namespace mantissa::expert_bias_test {

class ExpertBias : public test::BackendTest {
 protected:
  ExpertBias() {
    for (const char* name : {"layers.0.moe.expert_bias", "layers.2.moe.expert_bias"}) set_.add_buffer({.name = name, .shape = {4}});
    set_.allocate(fast(), Dtype::f32, true);
  }
  std::vector<float> bias(size_t layer) { return to_host<float>(set_.buffers()[layer].value); }

  ParameterSet set_;
};

using Values = std::vector<float>;

TEST_F(ExpertBias, StartsAtZeroAndIsNoParameter) {
  EXPECT_EQ(bias(0), Values(4, 0.0F));
  EXPECT_TRUE(set_.all().empty());
  EXPECT_EQ(set_.elements(), 0);
}

TEST_F(ExpertBias, FallsWhereAnExpertHasMoreThanTheMeanOfItsLayer) {
  update_expert_biases(set_, 0.25, {5, 1, 2, 0, /* mean 2 */ 0, 0, 1, 2 /* mean 3/4 */});
  EXPECT_EQ(bias(0), Values({-0.25F, 0.25F, 0.0F, 0.25F}));
  EXPECT_EQ(bias(1), Values({0.25F, 0.25F, -0.25F, -0.25F}));
  update_expert_biases(set_, 0.25, {2, 2, 2, 2, 3, 3, 3, 2});
  EXPECT_EQ(bias(0), Values({-0.25F, 0.25F, 0.0F, 0.25F})) << "even";
  EXPECT_EQ(bias(1), Values({0.0F, 0.0F, -0.5F, 0.0F}));
}

// The count is beyond what fp32 counts.
TEST_F(ExpertBias, SeesASingleAssignmentMore) {
  const double many = 1e9;
  update_expert_biases(set_, 1.0, {many, many, many + 1, many - 1, many, many, many, many});
  EXPECT_EQ(bias(0), Values({0.0F, 0.0F, -1.0F, 1.0F}));
  EXPECT_EQ(bias(1), Values(4, 0.0F));
}

TEST_F(ExpertBias, CountsTheAssignmentsOfAllMicroBatches) {
  const double loss = 0.5;
  const std::vector<double> figures{11, 2, 3, 4, loss, loss, loss, 0, 0, 7, 0, loss, loss, loss,   // a micro batch of two layers
                                    0,  1, 0, 0, loss, loss, loss, 2, 2, 2, 2, loss, loss, loss};  // another
  EXPECT_EQ(expert_assignments(set_, figures), (std::vector<double>{11, 3, 3, 4, 2, 2, 9, 2}));
  EXPECT_EQ(expert_assignments(set_, {}), std::vector<double>(8, 0.0)) << "a rank without a batch";
  EXPECT_TRUE(expert_assignments(ParameterSet(), figures).empty());
}

TEST_F(ExpertBias, FiguresOfRoutersGrowAndStay) {
  RouterStatistics statistics(RouterFigures::counts, 1);
  EXPECT_FALSE(statistics.figures().defined());
  for (int pass = 0; pass < 5; ++pass) fast().run(Fill{.out = statistics.next(fast(), 2), .value = 1.0 + pass});
  EXPECT_EQ(to_host<double>(statistics.figures()),
            (std::vector<double>{1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5}));
}

TEST_F(ExpertBias, HasANameOfItsOwn) {
  ParameterSet set;
  set.add_buffer({.name = "a", .shape = {2}});
  EXPECT_THROW(set.add_buffer({.name = "a", .shape = {2}}), Error);
  EXPECT_THROW(set_.add_buffer({.name = "b", .shape = {2}}), Error) << "there is memory already";
}

}  // namespace mantissa::expert_bias_test
