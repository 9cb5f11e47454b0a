#include <gmock/gmock.h>

#include <algorithm>

#include "files.h"
#include "testing.h"
#include "train/training_step.h"

namespace mantissa::device_batch_test {

using ::testing::HasSubstr;

class DeviceBatchTest : public test::BackendTest {
 protected:
  DeviceBatchTest() {
    config_.vocab_size = 11;
    config_.pad_vocab_to = 16;  // ids of the padding are none
    config_.hidden_size = 8;
    config_.num_layers = 1;
    config_.num_attention_heads = 2;
    config_.intermediate_size = 8;
    config_.max_position_embeddings = 6;
    model_ = std::make_unique<Gpt>(config_, fast(), test::high_plan(config_), GptOptions{.gradients = false});
  }

  static Batch batch() {
    return {.sequences = 3,
            .length = 4,
            .tokens = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0},
            .targets = {1, 2, 3, kNoTarget, 5, 6, 7, 8, 9, 10, 0, 1},
            .positions = {0, 1, 2, 3, 0, 1, 0, 1, 0, 1, 2, 3},
            .segment_starts = {0, 1, 2, 3, 0, 0, 2, 2, 0, 0, 0, 0},
            .target_count = 11,
            .samples = {}};
  }

  ModelConfig config_;
  std::unique_ptr<Gpt> model_;
};

TEST_F(DeviceBatchTest, SequencesOfABatchAreUploaded) {
  const DeviceBatch rows = to_device(*model_, batch(), 1, 2);
  EXPECT_EQ(rows.tokens.batch, 2);
  EXPECT_EQ(to_host<int32_t>(rows.tokens.tokens), (std::vector<int32_t>{4, 5, 6, 7, 8, 9, 10, 0}));
  EXPECT_EQ(to_host<int32_t>(rows.targets), (std::vector<int32_t>{5, 6, 7, 8, 9, 10, 0, 1}));
  EXPECT_EQ(to_host<int32_t>(rows.tokens.positions), (std::vector<int32_t>{0, 1, 0, 1, 0, 1, 2, 3}));
  EXPECT_EQ(to_host<int32_t>(rows.tokens.segment_starts), (std::vector<int32_t>{0, 0, 2, 2, 0, 0, 0, 0}));
  EXPECT_FALSE(to_device(*model_, batch(), 2, 1).tokens.segment_starts.defined());
}

// Attention would look across its boundary.
TEST_F(DeviceBatchTest, ASequenceWithABoundaryMayBeAnyOfThem) {
  for (const size_t divided : {0U, 1U, 2U}) {
    Batch each = batch();
    std::ranges::fill(each.segment_starts, 0);
    each.segment_starts[4 * divided + 3] = 2;
    EXPECT_EQ(to_host<int32_t>(to_device(*model_, each, 0, 3).tokens.segment_starts), each.segment_starts) << divided;
  }
}

TEST_F(DeviceBatchTest, PaddingIsKnownByTheLengthsOfRows) {
  Batch padded = batch();
  padded.lengths = {4, 1, 3};
  const TokenBatch some = to_device(*model_, padded, 1, 2).tokens;
  EXPECT_EQ(some.lengths, (std::vector<int32_t>{1, 3}));
  EXPECT_EQ(some.padded(), 4);
  for (const TokenBatch& none : {to_device(*model_, padded, 0, 1).tokens, to_device(*model_, batch(), 0, 3).tokens}) {
    EXPECT_TRUE(none.lengths.empty());
    EXPECT_EQ(none.padded(), 0);
  }
  for (const int32_t length : {-1, 5}) {
    padded.lengths[1] = length;
    const Error error = test::error_of([&] { to_device(*model_, padded, 0, 3); });
    EXPECT_EQ(error.code(), ExitCode::internal);
    EXPECT_THAT(error.what(), HasSubstr(text("sequence 1 has ", length, " tokens of 4")));
  }
}

TEST_F(DeviceBatchTest, AnIndexThatIsOutsideIsNamedBySequenceAndPosition) {
  const auto error = [&](std::vector<int32_t> Batch::*member, size_t i, int32_t value) {
    Batch bad = batch();
    (bad.*member)[i] = value;
    EXPECT_NO_THROW(to_device(*model_, bad, i / 4 == 0 ? 1 : 0, 1)) << "in a sequence that is not asked for";
    return test::error_of([&] { to_device(*model_, bad, 0, 3); });
  };
  for (const int32_t id : {-1, 11, 15, 1 << 30}) EXPECT_EQ(error(&Batch::tokens, 6, id).code(), ExitCode::data) << id;
  for (const int32_t id : {-2, 11, 15, 1 << 30}) EXPECT_EQ(error(&Batch::targets, 6, id).code(), ExitCode::data) << id;
  for (const int32_t at : {-1, 4, 5}) EXPECT_EQ(error(&Batch::positions, 6, at).code(), ExitCode::internal) << at;
  for (const int32_t at : {-1, 3}) EXPECT_EQ(error(&Batch::segment_starts, 6, at).code(), ExitCode::internal) << at;
  EXPECT_THAT(error(&Batch::tokens, 6, 11).what(), HasSubstr("token [1, 2] is 11, not in [0, 11)"));
  EXPECT_THAT(error(&Batch::targets, 0, 11).what(), HasSubstr("target [0, 0] is 11, not in [-1, 11)"));
  EXPECT_THAT(error(&Batch::positions, 11, 6).what(), HasSubstr("position [2, 3] is 6, not in [0, 4)"));
  EXPECT_THAT(error(&Batch::segment_starts, 6, 3).what(), HasSubstr("segment start [1, 2] is 3, not in [0, 3)"));
}

}  // namespace mantissa::device_batch_test
