// Rotary frequencies against those of Hugging Face transformers, and the table made of them.
#include "models/rope_table.h"

#include "testing.h"

namespace mantissa::test {
namespace {

struct ScaledRope {
  int64_t head_dim;
  double theta;
  RopeScalingConfig scaling;
  std::vector<double> frequencies;
  double scale = 1.0;
};

// What modeling_rope_utils.py of transformers 5.23 gives, in fp32.
std::vector<ScaledRope> ropes_of_transformers() {
  constexpr RopeScaling yarn = RopeScaling::yarn;
  const auto of = [](RopeScaling type, double factor, int64_t length) {
    return RopeScalingConfig{.type = type, .factor = factor, .original_max_position_embeddings = length};
  };
  RopeScalingConfig llama = of(RopeScaling::llama3, 8, 8192), other = of(RopeScaling::llama3, 32, 1024), gpt_oss = of(yarn, 32, 4096);
  RopeScalingConfig truncated = gpt_oss, narrow = of(yarn, 4, 1024), deepseek = of(yarn, 40, 4096), short_ramp = of(yarn, 2, 5);
  other.low_freq_factor = 2, other.high_freq_factor = 8;
  gpt_oss.truncate = false, gpt_oss.beta_fast = 32, gpt_oss.beta_slow = 1;
  narrow.beta_fast = 8, narrow.beta_slow = 2, narrow.attention_factor = 1.25;
  deepseek.mscale = 1, deepseek.mscale_all_dim = 0.7;
  short_ramp.beta_fast = 1.2;
  RopeScalingConfig all_divided = short_ramp;
  all_divided.original_max_position_embeddings = 50000;
  const std::vector<double> kept{1.0, 0.31622776, 0.1};
  const auto rest = [](std::vector<double> first, std::initializer_list<double> more) {
    first.insert(first.end(), more);
    return first;
  };
  return {{16, 500000, llama, {1.0, 0.19392276, 0.037606031, 0.0072926651, 0.00052484602, 3.4281024e-05, 6.6478697e-06, 1.2891732e-06}},
          {12, 10000, other, {1.0, 0.21544345, 0.043152992, 0.00031249999, 6.7326073e-05, 1.4504967e-05}},
          {16,
           150000,
           gpt_oss,
           {1.0, 0.225418, 0.050813273, 0.0067949593, 0.00045648392, 1.8188337e-05, 4.0999785e-06, 9.2420896e-07},
           1.34657359},
          {16,
           150000,
           truncated,
           {1.0, 0.225418, 0.050813273, 0.0077554653, 0.00091445434, 1.8188337e-05, 4.0999785e-06, 9.2420896e-07},
           1.34657359},
          {16, 10000, narrow, rest(kept, {0.019764237, 0.0024999999, 0.00079056947, 0.00025000001, 7.9056947e-05}), 1.25},
          {16, 10000, deepseek, rest(kept, {0.023914725, 0.0051249997, 0.00084986218, 2.4999999e-05, 7.9056945e-06}), 1.08795461},
          {8, 100, short_ramp, {1.0, 0.15811388, 0.050000001, 0.015811389}, 1.06931472},
          {8, 2, all_divided, {0.5, 0.42044821, 0.35355338, 0.29730177}, 1.06931472}};
}

TEST(RopeTable, HasTheFrequenciesOfTransformers) {
  for (const ScaledRope& expected : ropes_of_transformers()) {
    SCOPED_TRACE(text("theta ", expected.theta, ", factor ", expected.scaling.factor));
    const RopeFrequencies found = rope_frequencies(expected.head_dim, expected.theta, expected.scaling);
    ASSERT_EQ(found.of_pairs.size(), expected.frequencies.size());
    for (size_t i = 0; i < found.of_pairs.size(); ++i) {
      EXPECT_NEAR(found.of_pairs[i], expected.frequencies[i], 2e-6 * expected.frequencies[i]) << i;  // fp32, a power and some steps
    }
    EXPECT_NEAR(found.scale, expected.scale, 1e-8);
  }
}

TEST(RopeTable, HoldsScaledCosinesThenSines) {
  const auto device = make_backend("cpu_reference");
  const std::vector<double> table = values(make_rope_table(*device, 3, {.of_pairs = {1.0, 0.25}, .scale = 1.5}));
  const std::vector<double> expected{1.5,
                                     1.5,
                                     0,
                                     0,
                                     1.5 * std::cos(1.0),
                                     1.5 * std::cos(0.25),
                                     1.5 * std::sin(1.0),
                                     1.5 * std::sin(0.25),
                                     1.5 * std::cos(2.0),
                                     1.5 * std::cos(0.5),
                                     1.5 * std::sin(2.0),
                                     1.5 * std::sin(0.5)};
  ASSERT_EQ(table.size(), expected.size());
  for (size_t i = 0; i < table.size(); ++i) EXPECT_EQ(table[i], static_cast<double>(static_cast<float>(expected[i]))) << i;
}

}  // namespace
}  // namespace mantissa::test
