// Gradients of a first step, against the moments that a run keeps of it, and their cosines.
#include <gmock/gmock.h>

#include <cmath>

#include "train/run_comparison.h"
#include "training.h"

namespace mantissa::first_gradient_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

class FirstGradient : public test::TrainingTest {};

// After one update without clipping the first moment is (1 - beta1) g.
TEST_F(FirstGradient, IsThatOfARunForAnyBatchRecipeAndTeacher) {
  run("teacher", {"training.steps=2", "training.seed=3"});
  for (const test::Sets& sets :
       {test::Sets{},
        {"training.teacher=" + run_folder("teacher"), "training.teacher_weight=0.5"},
        {"model.intermediate_size=64", "precision.recipe=mxfp4_qat", "precision.dtype=bf16", "training.accumulation=tree"},
        {"model.intermediate_size=64", "precision.recipe=own",  // random numbers differ by token
         R"(precision.recipes={"own": {"gemms": ["fprop", "dgrad", "wgrad"], "simulate": {
             "output_grad": {"format": "e2m1", "block": [1, 16], "scale": "e4m3", "rounding": "stochastic"}}}})"}}) {
    const test::Sets all = test::with(sets, {"training.seed=7", "training.steps=1", "optimizer.grad_clip=0", "optimizer.beta1=0.5"});
    const std::string name = text("run", sets.size());
    const Gradients gradients = first_gradients(config(name, all));
    EXPECT_FALSE(std::filesystem::exists(run_folder(name))) << "it writes nothing";
    run(name, all);
    size_t weights = 0;
    for (const std::string& parameter : parameters(name, 1)) {
      const auto found = gradients.find(parameter);
      if (found == gradients.end()) continue;
      ++weights;
      const std::vector<float> moment = tensor(name, 1, "m." + parameter);
      ASSERT_EQ(moment.size(), found->second.size()) << parameter;
      for (size_t i = 0; i < moment.size(); ++i) ASSERT_EQ(moment[i], 0.5F * found->second[i]) << parameter << ", " << i;
    }
    EXPECT_EQ(weights, gradients.size());
    EXPECT_EQ(weights, 2U * 4U + 1U) << "four linears in each of two layers, and the output";
  }
}

TEST_F(FirstGradient, HasNoFrozenWeights) {
  const Gradients gradients = first_gradients(config("a", {R"(optimizer.rules=[{"match": "layers.0.*", "lr_factor": 0}])"}));
  EXPECT_EQ(gradients.size(), 4U + 1U);
  EXPECT_EQ(gradients.count("layers.0.mlp.down.weight"), 0U);
  EXPECT_EQ(gradients.count("layers.1.mlp.down.weight"), 1U);
}

TEST_F(FirstGradient, MustBeFinite) {
  const Error error = test::error_of([&] { first_gradients(config("a", {"model.init_std=3e37"})); });
  EXPECT_EQ(error.code(), ExitCode::numerical);
  EXPECT_NE(std::string(error.what()).find(".weight: its gradient of the first step is not finite"), std::string::npos) << error.what();
}

TEST_F(FirstGradient, DependsOnTheSeed) {
  const Gradients one = first_gradients(config("a", {"training.seed=1"})), two = first_gradients(config("a", {"training.seed=2"})),
                  again = first_gradients(config("b", {"training.seed=1", "training.threads=1"}));
  EXPECT_EQ(one, again);
  EXPECT_NE(one, two);
}

TEST(GradientCosines, AreThoseOfTheAngles) {
  const Gradients baseline = {{"a", {1, 0}}, {"b", {3, 4}}, {"c", {0, 0}}, {"d", {1, 1}}};
  const std::map<std::string, double> found = gradient_cosines({{"a", {0, 2}}, {"b", {4, 3}}, {"c", {1, 1}}, {"d", {-2, -2}}}, baseline);
  EXPECT_THAT(found, ElementsAre(Pair("a", 0.0), Pair("b", ::testing::DoubleEq(0.96)), Pair("d", ::testing::DoubleEq(-1.0))))
      << "a gradient of 0 has no angle";
  EXPECT_THAT(gradient_cosines({{"other", {1}}}, baseline), IsEmpty()) << "frozen in one of them";
  EXPECT_THROW(gradient_cosines({{"a", {1, 2, 3}}}, baseline), Error);
}

}  // namespace mantissa::first_gradient_test
