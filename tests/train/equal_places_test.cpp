// Requirements of runs on GEMMs, and refusals of a CPU that does not meet them.
#include <gmock/gmock.h>

#include "backend/cpu/reference/reference.h"
#include "files.h"
#include "testing.h"
#include "train/replicas.h"

namespace mantissa::equal_places_test {

using ::testing::HasSubstr;

class UnevenCpu final : public CpuReference {
 public:
  std::string unequal_places() const override { return "fp32, rows: 2 of 64 differ"; }
};

Error refusal(const std::function<void(RunConfig&)>& change) {
  RunConfig config;
  config.model.vocab_size = 65;
  change(config);
  return test::error_of([&] { require_equal_places(config, UnevenCpu()); });
}

TEST(EqualPlaces, AreAskedForByExpertsRanksAndPadding) {
  const std::pair<std::function<void(RunConfig&)>, const char*> cases[] = {
      {[](RunConfig& config) { config.model.moe = MoeConfig{}; }, "the tokens beside it"},
      {[](RunConfig& config) { config.parallel = {.data = 2}; }, "number of ranks"},
      {[](RunConfig& config) { config.parallel = {.data = 1, .tensor = 2}; }, "number of ranks"},
      {[](RunConfig& config) { config.model.pad_vocab_to = 64; }, "padding of the vocabulary"}};
  for (const auto& [change, why] : cases) {
    const Error error = refusal(change);
    EXPECT_EQ(error.code(), ExitCode::environment) << why;
    EXPECT_THAT(error.what(), HasSubstr(why));
    EXPECT_THAT(error.what(), HasSubstr("2 of 64"));
    EXPECT_THAT(error.what(), HasSubstr("ONEDNN_MAX_CPU_ISA"));
  }
}

TEST(EqualPlaces, AreNotAskedForByOthersAndHoldHere) {
  RunConfig config;
  EXPECT_NO_THROW(require_equal_places(config, UnevenCpu()));
  config.model.moe = MoeConfig{};
  EXPECT_NO_THROW(require_equal_places(config, *make_backend("cpu")));
  EXPECT_NO_THROW(require_equal_places(config, *make_backend("cpu_reference")));
}

}  // namespace mantissa::equal_places_test
