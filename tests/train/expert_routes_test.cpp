// Tensor ranks send every token to the experts that one process sends it to, where no two experts are so near that rounding could decide.
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "backend/cpu/reference/reference.h"
#include "mantissa/train/device_batch.h"
#include "mantissa/train/load_config.h"
#include "mantissa/train/training_step.h"
#include "testing.h"
#include "thread_ranks.h"

namespace mantissa::expert_routes_test {

using ::testing::Each;
using ::testing::IsEmpty;

// The reference, which writes down where tokens go, and the least gap between the last expert that a token takes and the next.
class RoutingBackend : public CpuReference {
 public:
  std::vector<double> experts;
  double least_gap = std::numeric_limits<double>::infinity();

 protected:
  void execute(const RouteForward& k) override {
    CpuReference::execute(k);
    std::ranges::copy(test::values(k.experts), std::back_inserter(experts));
    std::vector<double> scores = test::values(k.scores);
    const int64_t count = k.scores.dim(1);
    for (auto token = scores.begin(); token != scores.end(); token += count) {
      std::sort(token, token + count, std::greater());
      least_gap = std::min(least_gap, token[k.rule.top_k - 1] - token[k.rule.top_k]);
    }
  }
};

RunConfig config_of(int tensor) {
  const nlohmann::json json = {{"model",
                                {{"vocab_size", 64},
                                 {"hidden_size", 64},
                                 {"num_layers", 2},
                                 {"num_attention_heads", 4},
                                 {"intermediate_size", 64},
                                 {"max_position_embeddings", 32},
                                 {"init_std", 0.2},
                                 {"moe", {{"num_experts", 8}, {"num_experts_per_tok", 2}, {"intermediate_size", 32}}}}},
                               {"precision", {{"dtype", "fp32"}}},
                               {"training", {{"seq_len", 32}, {"micro_batch_size", 2}, {"grad_accum", 1}}},
                               {"data", {{"path", "none"}}}};
  return load_run_config(
             {.file = "c.json", .text = json.dump(), .set_files = {}, .sets = {text("parallel.data=1"), text("parallel.tensor=", tensor)}},
             Inputs::unchecked, tensor)
      .config;
}

Batch random_batch() {
  Batch batch;
  batch.sequences = 2;
  batch.length = 32;
  for (const double token : test::values(test::random_indices(*make_backend("cpu"), 64, 64, 21))) {
    batch.positions.push_back(static_cast<int32_t>(std::ssize(batch.tokens) % 32));
    batch.tokens.push_back(static_cast<int32_t>(token));
  }
  batch.targets = batch.tokens;
  batch.segment_starts.assign(batch.tokens.size(), 0);
  batch.target_count = std::ssize(batch.tokens);
  batch.all_count = true;
  return batch;
}

void route(const RunConfig& config, const Mesh& mesh, RoutingBackend& device) {
  Gpt model(config.model, device, resolve_plan(config), training_options(config, mesh));
  Optimizer optimizer(model.parameters(), config.optimizer, mesh);
  optimizer.initialize(5);
  const DeviceBatch rows = to_device(model, random_batch(), 0, 2);
  const Tape::Scope paused(nullptr);
  model.loss(rows.tokens, rows.targets, 64);
}

TEST(ExpertRoutes, OfTensorRanksAreThoseOfOne) {
  RoutingBackend alone;
  route(config_of(1), {}, alone);
  ASSERT_EQ(alone.experts.size(), 2U * 64U * 2U) << "layers, tokens, assignments";
  EXPECT_GE(alone.least_gap, 1e-4) << "another seed";
  for (const int ranks : {2, 4}) {
    const auto errors = test::run_ranks(ranks, [&](const Communicator& world) {
      RoutingBackend device;
      route(config_of(ranks), make_mesh(world, {.tensor = ranks}), device);
      EXPECT_EQ(device.experts, alone.experts) << "rank " << world.rank() << " of " << ranks;
    });
    EXPECT_THAT(errors, Each(IsEmpty()));
  }
}

}  // namespace mantissa::expert_routes_test
