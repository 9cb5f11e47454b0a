// Every combination of recipe, tied embeddings, recomputation and data has the same bits at 1, 2, 4 and 8 ranks.
#include "rank_settings.h"

namespace mantissa {
namespace {

std::vector<test::RankSetting> combinations() {
  std::vector<test::RankSetting> out;
  for (const test::RankSetting& recipe : test::recipe_settings()) {
    for (const std::string tied : {"true", "false"}) {
      for (const std::string recompute : {"none", "selective", "full"}) {
        for (const std::string data : {"text", "mixture"}) {
          test::RankSetting setting = recipe;
          setting.name += (tied == "true" ? "_tied_" : "_untied_") + recompute + "_" + data;
          setting.sets.insert(setting.sets.end(), {"model.tie_word_embeddings=" + tied, "training.recompute=" + recompute});
          if (data == "mixture") setting.sets.push_back(data);
          out.push_back(setting);
        }
      }
    }
  }
  return out;
}

using RankParityMatrix = test::RankSettings;

TEST_P(RankParityMatrix, HasTheBitsOfOne) { expect_the_bits_of_one({2, 4, 8}); }

INSTANTIATE_TEST_SUITE_P(, RankParityMatrix, ::testing::ValuesIn(combinations()), [](const auto& c) { return c.param.name; });

}  // namespace
}  // namespace mantissa
