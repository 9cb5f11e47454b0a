#include <gmock/gmock.h>

#include "files.h"
#include "hf/export_files.h"

namespace mantissa::generation_config_test {

using test::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

SamplingDefaults read(const char* content) { return read_sampling_defaults(content, "a/generation_config.json"); }

TEST(GenerationConfig, StatedValuesOfSamplingAreTaken) {
  const SamplingDefaults all =
      read(R"({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.0, "eos_token_id": [1]})");
  EXPECT_EQ(all.temperature, 0.6);
  EXPECT_EQ(all.top_k, 20);
  EXPECT_EQ(all.top_p, 0.95);
  EXPECT_THAT(all.unused, IsEmpty());
  const SamplingDefaults none = read(R"({"do_sample": true, "top_k": null, "min_p": null})");
  EXPECT_FALSE(none.temperature || none.top_k || none.top_p);
  EXPECT_THAT(none.unused, IsEmpty());
}

// transformers takes the likeliest token then, whatever stands beside it, its defaults among it.
TEST(GenerationConfig, WhereNothingIsSampledValuesAreTold) {
  const std::string beside = " beside do_sample that is not true";
  for (const char* const config :
       {R"({"temperature": 0.6, "top_p": 0.9, "top_k": 5})", R"({"do_sample": false, "temperature": 0.6, "top_p": 0.9, "top_k": 5})"}) {
    const SamplingDefaults found = read(config);
    EXPECT_FALSE(found.temperature || found.top_k || found.top_p);
    EXPECT_THAT(found.unused, ElementsAre("temperature = 0.6" + beside, "top_p = 0.9" + beside, "top_k = 5" + beside));
  }
  EXPECT_THAT(read(R"({"temperature": -1, "top_k": "x"})").unused, ElementsAre("temperature = -1" + beside, "top_k = \"x\"" + beside))
      << "no reason to refuse the model";
  EXPECT_THAT(read(R"({"do_sample": false, "temperature": 1.0, "top_p": 1.0, "top_k": 50})").unused, IsEmpty());
}

TEST(GenerationConfig, WhatChangesTokensInTransformersAloneIsTold) {
  EXPECT_THAT(
      read(R"({"do_sample": true, "repetition_penalty": 1.05, "min_p": 0.1, "num_beams": 4, "suppress_tokens": [5], "min_length": 3})")
          .unused,
      ElementsAre("repetition_penalty = 1.05", "min_p = 0.1", "num_beams = 4", "suppress_tokens = [5]", "min_length = 3"));
  EXPECT_THAT(read(R"({"typical_p": 0.9, "exponential_decay_length_penalty": [5, 1.1], "force_words_ids": [[1]], "bad_words_ids": [[2]],
                       "sequence_bias": [[[3], 1.5]]})")
                  .unused,
              ElementsAre("typical_p = 0.9", "exponential_decay_length_penalty = [5,1.1]", "force_words_ids = [[1]]",
                          "bad_words_ids = [[2]]", "sequence_bias = [[[3],1.5]]"));
  const std::string of_beams = R"("length_penalty": 2.0, "diversity_penalty": 0.5})";
  EXPECT_THAT(read(("{" + of_beams).c_str()).unused, IsEmpty()) << "which only beams have";
  EXPECT_THAT(read((R"({"num_beams": 2, )" + of_beams).c_str()).unused,
              ElementsAre("num_beams = 2", "length_penalty = 2.0", "diversity_penalty = 0.5"));
  EXPECT_THAT(read(R"({"typical_p": 1.0, "bad_words_ids": [], "sequence_bias": {}, "force_words_ids": [], "num_beams": 3,
                       "length_penalty": 1.0, "diversity_penalty": 0.0})")
                  .unused,
              ElementsAre("num_beams = 3"));
  EXPECT_THAT(
      read(R"({"repetition_penalty": 1, "min_p": 0, "num_beams": 1, "suppress_tokens": [], "bad_words_ids": null, "max_new_tokens": 9})")
          .unused,
      IsEmpty());
}

TEST(GenerationConfig, WhatIsNoValueIsDamage) {
  std::vector<std::string> damaged = {"[]", "{", R"({"do_sample": 1})"};
  for (const char* const value :
       {R"("temperature": "x")", R"("temperature": -1)", R"("top_p": 0)", R"("top_p": 1.5)", R"("top_k": -1)", R"("top_k": 1.5)"})
    damaged.push_back(text(R"({"do_sample": true, )", value, "}"));
  for (const std::string& config : damaged) {
    const Error error = error_of([&] { read(config.c_str()); });
    EXPECT_EQ(error.code(), ExitCode::data) << config;
    EXPECT_THAT(error.what(), HasSubstr("a/generation_config.json")) << config;
  }
  EXPECT_EQ(read(R"({"do_sample": true, "top_k": 0})").top_k, 0) << "all tokens";
}

}  // namespace mantissa::generation_config_test
