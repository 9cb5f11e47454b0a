#include "metrics/routing_summary.h"

#include <gtest/gtest.h>

namespace mantissa::routing_summary_test {

TEST(RoutingSummary, IsThatOfTheTokensOfAllMicroBatches) {
  RunConfig config;
  config.model.num_layers = 1;
  config.model.moe.emplace();
  config.model.moe->num_experts = 4;
  config.model.moe->num_experts_per_tok = 2;
  config.training.grad_accum = 2;
  const auto summary = [&](const std::vector<double>& first, const std::vector<double>& second) {
    std::vector<double> rows;
    for (const std::vector<double>& loads : {first, second}) {
      rows.insert(rows.end(), loads.begin(), loads.end());
      rows.resize(rows.size() + static_cast<size_t>(RouterStatistics::kLosses));
    }
    return routing_summary(rows, RouterFigures::counts, config, Communicator()).at(0);
  };
  EXPECT_EQ(summary({1, 2, 3, 0}, {1, 0, 5, 4}).imbalance, 2.0) << "8 of 16 on one of 4";
  const LayerRouting nothing = summary({0, 0, 0, 0}, {0, 0, 0, 0});
  EXPECT_EQ(nothing.imbalance, 1.0) << "padding alone went to no expert";
  EXPECT_EQ(nothing.dropped, 0.0);
}

}  // namespace mantissa::routing_summary_test
