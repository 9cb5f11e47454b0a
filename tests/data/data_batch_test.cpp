#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>

#include "data/batch.h"
#include "data/token_writer.h"
#include "files.h"

namespace mantissa::data_batch_test {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr int32_t kEod = 90;

// Token files together, in their order.
template <class... Files>
TokenDataset together(Files... files) {
  std::vector<TokenFile> list;
  (list.push_back(std::move(files)), ...);
  return TokenDataset(std::move(list));
}

class BatchTest : public ::testing::Test {
 protected:
  // A Megatron file of one document, whose ids are 0, 1, 2, ...
  TokenFile counting(const std::string& name, int32_t tokens) {
    std::vector<int32_t> ids(static_cast<size_t>(tokens));
    std::iota(ids.begin(), ids.end(), 0);
    return documents(name, {ids}, {});
  }

  TokenFile documents(const std::string& name, const std::vector<std::vector<int32_t>>& contents, std::optional<int32_t> eod) {
    MegatronWriter writer(folder_ / name, {.vocab_size = 1000, .eod_id = eod});
    for (const auto& content : contents) writer.add_document(content);
    writer.finish();
    return TokenFile(folder_ / name, {.vocab_size = 1000});
  }

  TokenFile ids(const std::string& name, const std::vector<uint16_t>& content, std::optional<int32_t> eod) {
    test::write_file(folder_ / name, std::string_view(reinterpret_cast<const char*>(content.data()), content.size() * 2));
    return TokenFile(folder_ / name, {.vocab_size = 1000, .eod_id = eod});
  }

  // The one row of a dataset of exactly one sample.
  Batch one_row(TokenFile file, DocumentOptions options) {
    const TokenDataset files = together(std::move(file));
    TrainData data({files}, {1.0}, files.tokens() - 1, 1, options);
    return data.batch(0, 1);
  }

  test::TemporaryFolder folder_;
};

TEST_F(BatchTest, SampleJStartsAtJTimesLengthAndSharesOneTokenWithTheNext) {
  const TokenDataset files = together(counting("a", 30), counting("b", 12));
  TrainData data({files}, {1.0}, 8, 1234, {});
  const Batch batch = data.batch(0, 5);  // floor((42 - 1) / 8)
  std::vector<int32_t> all(42);
  files.read(0, 42, all.data());
  std::vector<int> seen(5);
  for (size_t row = 0; row < 5; ++row) {
    const auto sample = static_cast<size_t>(batch.samples[row].sample);
    ++seen[sample];
    for (size_t t = 0; t < 8; ++t) {
      EXPECT_EQ(batch.tokens[row * 8 + t], all[sample * 8 + t]);
      EXPECT_EQ(batch.targets[row * 8 + t], all[sample * 8 + t + 1]);
      EXPECT_EQ(batch.positions[row * 8 + t], static_cast<int32_t>(t));
      EXPECT_EQ(batch.segment_starts[row * 8 + t], 0);
    }
  }
  EXPECT_THAT(seen, Each(1));
  EXPECT_EQ(batch.target_count, 40);
}

TEST_F(BatchTest, MicroBatchesAreTheRowsOfTheWholeBatch) {
  const TokenDataset a = together(counting("a", 100)), b = together(counting("b", 50));
  TrainData whole({a, b}, {2, 1}, 4, 9, {});
  TrainData parts({a, b}, {2, 1}, 4, 9, {});
  const Batch batch = whole.batch(12, 6);
  std::vector<int32_t> tokens;
  for (int64_t counter = 12; counter < 18; counter += 2) {
    const Batch part = parts.batch(counter, 2);
    tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
  }
  EXPECT_EQ(tokens, batch.tokens);
}

TEST_F(BatchTest, TooShortForOneSampleIsAUsageError) {
  const TokenDataset files = together(counting("a", 8));
  const Error error = test::error_of([&] { TrainData({files}, {1.0}, 8, 1, {}); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), ::testing::HasSubstr("the training data: has 8 tokens, but training.seq_len 8 needs at least 9"));
}

// Documents are 1 2 E | 3 E | 4 5; each option makes something else of them.
const std::vector<std::vector<int32_t>> kDocuments = {{1, 2}, {3}, {4, 5}};

TEST_F(BatchTest, EachOptionActsAlone) {
  const auto expect = [&](DocumentOptions options, const std::vector<int32_t>& targets, const std::vector<int32_t>& positions,
                          const std::vector<int32_t>& starts) {
    const Batch row = one_row(documents("d", kDocuments, kEod), options);
    EXPECT_THAT(row.tokens, ElementsAre(1, 2, kEod, 3, kEod, 4, 5));
    EXPECT_EQ(row.targets, targets);
    EXPECT_EQ(row.positions, positions);
    EXPECT_EQ(row.segment_starts, starts);
    EXPECT_EQ(row.target_count, 7 - std::count(targets.begin(), targets.end(), kNoTarget));
    EXPECT_EQ(row.all_count, !options.mask_eod_loss);
  };
  const std::vector<int32_t> targets = {2, kEod, 3, kEod, 4, 5, kEod}, positions = {0, 1, 2, 3, 4, 5, 6}, starts(7);
  expect({}, targets, positions, starts);
  expect({.mask_eod_loss = true}, {2, kEod, kNoTarget, kEod, kNoTarget, 5, kEod}, positions, starts);
  expect({.reset_position_ids = true}, targets, {0, 1, 2, 0, 1, 0, 1}, starts);
  expect({.document_mask = true}, targets, positions, {0, 0, 0, 3, 3, 5, 5});
}

TEST_F(BatchTest, BoundariesAreThoseOfTheFormat) {
  const Batch nano = one_row(ids("n.bin", {1, 2, kEod, 3, kEod, 4, 5, kEod}, kEod), {true, true, true});
  EXPECT_THAT(nano.targets, ElementsAre(2, kEod, kNoTarget, kEod, kNoTarget, 5, kEod));
  LlmcWriter writer(folder_ / "c.bin", {.vocab_size = 1000, .eod_id = kEod});  // a file whose documents start with the end token
  for (const auto& content : kDocuments) writer.add_document(content);
  writer.finish();
  const Batch llmc = one_row(TokenFile(folder_ / "c.bin", {.vocab_size = 1000, .eod_id = kEod}), {true, true, true});
  EXPECT_THAT(llmc.tokens, ElementsAre(kEod, 1, 2, kEod, 3, kEod, 4));
  EXPECT_THAT(llmc.targets, ElementsAre(kNoTarget, 2, kEod, kNoTarget, kEod, kNoTarget, 5));
  for (const Batch* const row : {&nano, &llmc}) {
    EXPECT_THAT(row->positions, ElementsAre(0, 1, 2, 0, 1, 0, 1));
    EXPECT_THAT(row->segment_starts, ElementsAre(0, 0, 0, 3, 3, 5, 5));
  }
  const Batch without = one_row(documents("d", kDocuments, {}), {.mask_eod_loss = true});
  EXPECT_THAT(without.tokens, ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(without.targets, ElementsAre(2, kNoTarget, kNoTarget, 5)) << "the last token of a document predicts nothing";
  const TokenDataset files = together(ids("a.bin", {1, 2, kEod}, kEod), ids("b.bin", {3, 4}, kEod));
  const Batch both = TrainData({files}, {1.0}, 4, 1, {true, true, true}).batch(0, 1);
  EXPECT_THAT(both.positions, ElementsAre(0, 1, 2, 0));
  EXPECT_THAT(both.targets, ElementsAre(2, kEod, kNoTarget, 4));
}

TEST_F(BatchTest, ValidationCountsEachTargetOnceWhateverTheWindow) {
  for (const int32_t tokens : {2, 3, 8, 9, 10, 16, 17, 18, 100}) {
    const TokenDataset files = together(counting("v", tokens));
    for (const int64_t length : {1, 3, 8, 200}) {
      const ValidationData data({{.name = "v", .tokens = files}}, length, {});
      std::vector<int> seen(static_cast<size_t>(tokens));
      int64_t counted = 0, rows = 0;
      for (int64_t first = 0; first < data.windows(0); first += 3) {
        const Batch batch = data.batch(0, first, 3);
        rows += batch.sequences;
        counted += batch.target_count;
        ASSERT_EQ(batch.tokens.size(), static_cast<size_t>(batch.sequences * length));
        ASSERT_EQ(batch.lengths.size(), static_cast<size_t>(batch.sequences));
        for (int64_t row = 0; row < batch.sequences; ++row)
          EXPECT_EQ(batch.lengths[static_cast<size_t>(row)], std::min(length, tokens - 1 - (first + row) * length));
        for (size_t i = 0; i < batch.targets.size(); ++i) {
          if (batch.targets[i] == kNoTarget) continue;
          EXPECT_EQ(batch.targets[i], batch.tokens[i] + 1);
          ++seen[static_cast<size_t>(batch.targets[i])];
        }
      }
      EXPECT_EQ(rows, data.windows(0));
      EXPECT_EQ(counted, tokens - 1);
      EXPECT_EQ(seen[0], 0);
      EXPECT_THAT(std::vector<int>(seen.begin() + 1, seen.end()), Each(1)) << tokens << " tokens, length " << length;
    }
  }
}

TEST_F(BatchTest, LlmqMasksTakeTargetsOutOfTheLoss) {
  std::string content(1024, '\0');
  const int32_t fields[] = {2, 4, 4, 1000, 1}, tokens[] = {1, 2, 3, 4};
  content.replace(0, 8, "BIN.TOK\n");
  content.replace(8, sizeof fields, std::string_view(reinterpret_cast<const char*>(fields), sizeof fields));
  content += std::string(reinterpret_cast<const char*>(tokens), sizeof tokens) + '\x0A';
  test::write_file(folder_ / "q.bin", content);
  const Batch row = one_row(TokenFile(folder_ / "q.bin", {.vocab_size = 1000}), {});
  EXPECT_THAT(row.targets, ElementsAre(kNoTarget, 3, kNoTarget));
  EXPECT_EQ(row.target_count, 1);
  EXPECT_FALSE(row.all_count);
}

}  // namespace mantissa::data_batch_test
