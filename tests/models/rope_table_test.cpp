// Rotary frequencies against those of Hugging Face transformers, and the table made of them.
#include "models/rope_table.h"

#include "testing.h"

namespace mantissa::test::rope_table_test {

struct ScaledRope {
  int64_t head_dim;
  double theta;
  RopeScalingConfig scaling;
  std::vector<float> frequencies;
  float scale = 1.0F;
};

// Results of modeling_rope_utils.py of transformers 5.23, in fp32.
std::vector<ScaledRope> ropes_of_transformers() {
  constexpr RopeScaling yarn = RopeScaling::yarn;
  const auto of = [](RopeScaling type, double factor, int64_t length) {
    return RopeScalingConfig{.type = type, .factor = factor, .original_max_position_embeddings = length};
  };
  RopeScalingConfig llama = of(RopeScaling::llama3, 8, 8192), other = of(RopeScaling::llama3, 32, 1024), gpt_oss = of(yarn, 32, 4096);
  // Where theta is no fp32 number and the factor no power of two, the order of operations shows.
  RopeScalingConfig odd = of(RopeScaling::llama3, 7, 1000);
  odd.high_freq_factor = 40;
  RopeScalingConfig truncated = gpt_oss, narrow = of(yarn, 4, 1024), deepseek = of(yarn, 40, 4096), short_ramp = of(yarn, 2, 5);
  other.low_freq_factor = 2, other.high_freq_factor = 8;
  gpt_oss.truncate = false, gpt_oss.beta_fast = 32, gpt_oss.beta_slow = 1;
  narrow.beta_fast = 8, narrow.beta_slow = 2, narrow.attention_factor = 1.25;
  deepseek.mscale = 1, deepseek.mscale_all_dim = 0.7;
  short_ramp.beta_fast = 1.2;
  RopeScalingConfig all_divided = short_ramp;
  all_divided.original_max_position_embeddings = 50000;
  const RopeScalingConfig many_turns{.type = yarn, .factor = 2, .original_max_position_embeddings = 10000, .beta_fast = 1000};
  return {
      {16,
       500000,
       llama,
       {1, 0.193922758F, 0.0376060307F, 0.00729266508F, 0.000524846022F, 3.42810235e-05F, 6.64786967e-06F, 1.28917316e-06F}},
      {12, 10000, other, {1, 0.215443447F, 0.0431529917F, 0.000312499993F, 6.73260729e-05F, 1.45049671e-05F}},
      {16,
       150000,
       gpt_oss,
       {1, 0.225418001F, 0.0508132726F, 0.00679495931F, 0.000456483918F, 1.8188337e-05F, 4.09997847e-06F, 9.24208962e-07F},
       1.34657359F},
      {16,
       150000,
       truncated,
       {1, 0.225418001F, 0.0508132726F, 0.00775546534F, 0.000914454344F, 1.8188337e-05F, 4.09997847e-06F, 9.24208962e-07F},
       1.34657359F},
      {16,
       10000,
       narrow,
       {1, 0.316227764F, 0.100000001F, 0.0197642371F, 0.00249999994F, 0.000790569466F, 0.000250000012F, 7.90569466e-05F},
       1.25F},
      {16,
       10000,
       deepseek,
       {1, 0.316227764F, 0.100000001F, 0.0239147246F, 0.00512499968F, 0.000849862176F, 2.49999994e-05F, 7.90569447e-06F},
       1.0879546F},
      {8, 100, short_ramp, {1, 0.158113882F, 0.0500000007F, 0.0158113893F}, 1.06931472F},
      {8, 2, all_divided, {0.5F, 0.420448214F, 0.353553385F, 0.297301769F}, 1.06931472F},
      {8, 100, many_turns, {1, 0.293640047F, 0.0857142881F, 0.0248464681F}, 1.06931472F},
      {16, 194920.4, odd, {1, 0.19284378F, 0.013675726F, 0.0016320966F, 0.000323573768F, 7.05896673e-05F, 1.53995843e-05F, 3.359517e-06F}}};
}

TEST(RopeTable, HasTheFrequenciesOfTransformersToTheBit) {
  for (const ScaledRope& expected : ropes_of_transformers()) {
    SCOPED_TRACE(text("theta ", expected.theta, ", factor ", expected.scaling.factor));
    const RopeFrequencies found = rope_frequencies(expected.head_dim, expected.theta, expected.scaling);
    EXPECT_EQ(found.of_pairs, expected.frequencies);
    EXPECT_EQ(found.scale, expected.scale);
  }
}

// An angle of thousands of radians is an fp32 number there, and half a thousandth off the true one.
TEST(RopeTable, TurnsByTheAnglesOfTransformersFarFromTheStart) {
  const auto device = make_backend("cpu_reference");
  const RopeFrequencies frequencies = rope_frequencies(128, 1e6, {});
  const std::vector<float> first{1, 0.805842221F, 0.649381638F, 0.523299158F, 0.421696514F, 0.339820832F};
  EXPECT_EQ(std::vector(frequencies.of_pairs.begin(), frequencies.of_pairs.begin() + 6), first);
  const std::vector<double> table = values(make_rope_table(*device, 16384, frequencies));
  const std::vector<double> cosines{-0.918830931, 0.416730314, 0.183145821, -0.980777264};
  const std::vector<double> sines{0.394651443, 0.909030139, 0.983085752, 0.195130706};
  for (size_t i = 0; i < cosines.size(); ++i) {
    EXPECT_NEAR(table[size_t{16383} * 128 + i], cosines[i], 1e-7) << i;  // the last bit of torch's cosine
    EXPECT_NEAR(table[size_t{16383} * 128 + 64 + i], sines[i], 1e-7) << i;
  }
}

TEST(RopeTable, HoldsScaledCosinesThenSines) {
  const auto device = make_backend("cpu_reference");
  const std::vector<double> table = values(make_rope_table(*device, 3, {.of_pairs = {1.0F, 0.25F}, .scale = 1.5F}));
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
  for (size_t i = 0; i < table.size(); ++i) EXPECT_NEAR(table[i], expected[i], 1e-7) << i;
}

}  // namespace mantissa::test::rope_table_test
