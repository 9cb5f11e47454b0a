// Exchanges of activations by tensor ranks: counted, layer by layer and in each direction.
#include <gmock/gmock.h>

#include "checkpoint/precision_setup.h"
#include "ops/exchange.h"
#include "thread_ranks.h"
#include "train/training_step.h"
#include "training.h"

namespace mantissa::tensor_exchanges_test {

using ::testing::Each;
using ::testing::IsEmpty;

// Calls of one rank while one micro batch goes forward, and back.
struct Calls {
  int64_t forward = 0, backward = 0;

  bool operator==(const Calls&) const = default;
  Calls operator-(const Calls& other) const { return {forward - other.forward, backward - other.backward}; }
};

std::ostream& operator<<(std::ostream& out, const Calls& calls) {
  return out << calls.forward << " forward, " << calls.backward << " back";
}

struct Kind {
  int64_t layers;
  bool sequence;
  Recompute recompute = Recompute::none;
};

Calls calls_of(const Kind& shape, int ranks, const std::string& recipe) {
  RunConfig config;
  config.model.vocab_size = 64;
  config.model.hidden_size = 128;
  config.model.num_layers = shape.layers;
  config.model.num_attention_heads = 4;
  config.model.intermediate_size = 128;
  config.model.max_position_embeddings = 16;
  config.precision.recipe = recipe;
  config.parallel.tensor = ranks;
  const PrecisionPlan plan = resolve_plan(config);
  Calls out;
  const auto errors = test::run_ranks(ranks, [&](const Communicator& group) {
    const auto device = make_backend("cpu");
    const Mesh mesh{.tensor = group, .sequence_parallel = shape.sequence};
    Gpt model(config.model, *device, plan, {.recompute = shape.recompute, .mesh = mesh});
    for (const ParameterShard& shard : model.parameters().whole_shards()) {
      const Tensor master = model.parameters().room_for_master(shard);
      model.parameters().draw_initial(shard, 1, master);
      model.parameters().store(shard, master);
    }
    const std::vector<int32_t> ids(16, 5);
    Batch batch;
    batch.sequences = 1, batch.length = 16, batch.tokens = ids, batch.targets = ids, batch.segment_starts.assign(16, 0);
    for (int32_t i = 0; i < 16; ++i) batch.positions.push_back(i);
    const DeviceBatch rows = to_device(model, batch, 0, 1);
    Tape tape;
    const Tape::Scope scope(&tape);
    const int64_t start = group.calls();
    const Var loss = model.loss(rows.tokens, rows.targets, 16);
    const int64_t middle = group.calls();
    tape.backward(loss);
    if (group.rank() == 0) out = {.forward = middle - start, .backward = group.calls() - middle};
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  return out;
}

// A layer sums after attention and MLP in forward, and before them in backward, without sequence parallelism; with it the tokens are
// gathered on the one side, and the sums are scattered on the other.
TEST(TensorExchanges, AreAtMostFourForEachLayerAndDirection) {
  for (const auto& [recipe, ranks] : {std::pair{"high", 2}, {"mxfp8", 4}, {"mxfp4_qat", 2}}) {
    const auto layer = [&](bool sequence) { return calls_of({2, sequence}, ranks, recipe) - calls_of({1, sequence}, ranks, recipe); };
    EXPECT_EQ(layer(false), (Calls{2, 2})) << recipe;
    EXPECT_EQ(layer(true), (Calls{4, 4})) << recipe;
  }
}

TEST(TensorExchanges, OfEmbeddingAndLossAreOnceAMicroBatch) {
  // The sum of the table's rows; two numbers of each row and the gradient of the hidden state. With shares of tokens also what the loss
  // and, back, the table read.
  const auto outside = [](bool sequence) {
    const Calls one = calls_of({1, sequence}, 2, "high"), two = calls_of({2, sequence}, 2, "high");
    return one - (two - one);
  };
  EXPECT_EQ(outside(false), (Calls{3, 0}));
  EXPECT_EQ(outside(true), (Calls{4, 1}));
}

TEST(TensorExchanges, AreRepeatedWhereALayerIsComputedAgain) {
  const auto layer = [](Recompute recompute) {
    return calls_of({2, true, recompute}, 2, "mxfp8") - calls_of({1, true, recompute}, 2, "mxfp8");
  };
  EXPECT_EQ(layer(Recompute::selective), (Calls{4, 4}));
  EXPECT_EQ(layer(Recompute::full), (Calls{4, 8}));
}

// Logits are those of a text; each rank computes some of their columns.
TEST(TensorExchanges, OfLogitsAreActivations) {
  const auto errors = test::run_ranks(2, [](const Communicator& group) {
    const auto device = make_backend("cpu");
    const Tensor own = test::tensor_of(*device, Dtype::f32, {2, 3}, std::vector<double>(6, group.rank()));
    const Tensor all = gathered_columns({.group = group, .split = Split::column_parallel}, own);
    EXPECT_EQ(test::values(all), (std::vector<double>{0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1}));
    EXPECT_EQ(group.traffic().activations, 2 * 3 * 4);
    EXPECT_EQ(group.traffic().other, 0);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

}  // namespace mantissa::tensor_exchanges_test
