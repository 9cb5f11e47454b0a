#include <gmock/gmock.h>

#include <numeric>

#include "files.h"
#include "mantissa/data/batch.h"
#include "mantissa/data/token_writer.h"

namespace mantissa::data_batch_test {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr int32_t kEod = 90;

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
    std::vector<TokenFile> list;
    list.push_back(std::move(file));
    const TokenFiles files(std::move(list));
    TrainData data({TokenDataset(files)}, {1.0}, files.tokens() - 1, 1, options);
    return data.batch(0, 1);
  }

  test::TemporaryFolder folder_;
};

TokenFiles together(TokenFile first, TokenFile second) {
  std::vector<TokenFile> list;
  list.push_back(std::move(first));
  list.push_back(std::move(second));
  return TokenFiles(std::move(list));
}

TEST_F(BatchTest, SampleJStartsAtJTimesLengthAndSharesOneTokenWithTheNext) {
  const TokenFiles files = together(counting("a", 30), counting("b", 12));
  TrainData data({TokenDataset(files)}, {1.0}, 8, 1234, {});
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
  std::vector<TokenFile> first, second;
  first.push_back(counting("a", 100));
  second.push_back(counting("b", 50));
  const TokenFiles a(std::move(first)), b(std::move(second));
  TrainData whole({TokenDataset(a), TokenDataset(b)}, {2, 1}, 4, 9, {});
  TrainData parts({TokenDataset(a), TokenDataset(b)}, {2, 1}, 4, 9, {});
  const Batch batch = whole.batch(12, 6);
  std::vector<int32_t> tokens;
  for (int64_t counter = 12; counter < 18; counter += 2) {
    const Batch part = parts.batch(counter, 2);
    tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
  }
  EXPECT_EQ(tokens, batch.tokens);
}

TEST_F(BatchTest, TooShortForOneSampleIsAUsageError) {
  std::vector<TokenFile> list;
  list.push_back(counting("a", 8));
  const TokenFiles files(std::move(list));
  const Error error = test::error_of([&] { TrainData({TokenDataset(files)}, {1.0}, 8, 1, {}); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), ::testing::HasSubstr("the training data: has 8 tokens, but training.seq_len 8 needs at least 9"));
}

// Tokens 1 2 E | 3 E | 4 5: what each option makes of them.
const std::vector<std::vector<int32_t>> kDocuments = {{1, 2}, {3}, {4, 5}};

TEST_F(BatchTest, WithoutOptionsDocumentsChangeNothing) {
  const Batch row = one_row(documents("d", kDocuments, kEod), {});
  EXPECT_THAT(row.targets, ElementsAre(2, kEod, 3, kEod, 4, 5, kEod));
  EXPECT_THAT(row.positions, ElementsAre(0, 1, 2, 3, 4, 5, 6));
  EXPECT_THAT(row.segment_starts, Each(0));
  EXPECT_EQ(row.target_count, 7);
  EXPECT_TRUE(row.all_count);
}

TEST_F(BatchTest, EachOptionActsAlone) {
  const Batch masked = one_row(documents("d", kDocuments, kEod), {.mask_eod_loss = true});
  EXPECT_THAT(masked.tokens, ElementsAre(1, 2, kEod, 3, kEod, 4, 5));
  EXPECT_THAT(masked.targets, ElementsAre(2, kEod, kNoTarget, kEod, kNoTarget, 5, kEod));
  EXPECT_EQ(masked.target_count, 5);
  EXPECT_FALSE(masked.all_count);
  EXPECT_THAT(masked.positions, ElementsAre(0, 1, 2, 3, 4, 5, 6));
  const Batch reset = one_row(documents("d", kDocuments, kEod), {.reset_position_ids = true});
  EXPECT_THAT(reset.positions, ElementsAre(0, 1, 2, 0, 1, 0, 1));
  EXPECT_THAT(reset.segment_starts, Each(0));
  EXPECT_EQ(reset.target_count, 7);
  EXPECT_TRUE(reset.all_count);
  const Batch separate = one_row(documents("d", kDocuments, kEod), {.document_mask = true});
  EXPECT_THAT(separate.segment_starts, ElementsAre(0, 0, 0, 3, 3, 5, 5));
  EXPECT_THAT(separate.positions, ElementsAre(0, 1, 2, 3, 4, 5, 6));
}

TEST_F(BatchTest, NanoGptBoundariesComeFromTheEndToken) {
  const Batch row = one_row(ids("n.bin", {1, 2, kEod, 3, kEod, 4, 5, kEod}, kEod), {true, true, true});
  EXPECT_THAT(row.targets, ElementsAre(2, kEod, kNoTarget, kEod, kNoTarget, 5, kEod));
  EXPECT_THAT(row.positions, ElementsAre(0, 1, 2, 0, 1, 0, 1));
  EXPECT_THAT(row.segment_starts, ElementsAre(0, 0, 0, 3, 3, 5, 5));
}

TEST_F(BatchTest, LlmcDocumentsStartWithTheEndToken) {
  LlmcWriter writer(folder_ / "c.bin", {.vocab_size = 1000, .eod_id = kEod});
  for (const auto& content : kDocuments) writer.add_document(content);
  writer.finish();
  const Batch row = one_row(TokenFile(folder_ / "c.bin", {.vocab_size = 1000, .eod_id = kEod}), {true, true, true});
  EXPECT_THAT(row.tokens, ElementsAre(kEod, 1, 2, kEod, 3, kEod, 4));
  EXPECT_THAT(row.targets, ElementsAre(kNoTarget, 2, kEod, kNoTarget, kEod, kNoTarget, 5));
  EXPECT_THAT(row.positions, ElementsAre(0, 1, 2, 0, 1, 0, 1));
  EXPECT_THAT(row.segment_starts, ElementsAre(0, 0, 0, 3, 3, 5, 5));
}

TEST_F(BatchTest, WithoutEndTokensTheLastTokenOfADocumentPredictsNothing) {
  const Batch row = one_row(documents("d", kDocuments, {}), {.mask_eod_loss = true});
  EXPECT_THAT(row.tokens, ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(row.targets, ElementsAre(2, kNoTarget, kNoTarget, 5));
}

TEST_F(BatchTest, DocumentBoundaryBetweenTwoFilesIsSeen) {
  const TokenFiles files = together(ids("a.bin", {1, 2, kEod}, kEod), ids("b.bin", {3, 4}, kEod));
  TrainData data({TokenDataset(files)}, {1.0}, 4, 1, {true, true, true});
  const Batch row = data.batch(0, 1);
  EXPECT_THAT(row.positions, ElementsAre(0, 1, 2, 0));
  EXPECT_THAT(row.targets, ElementsAre(2, kEod, kNoTarget, 4));
}

TEST_F(BatchTest, ValidationCountsEachTargetOnceWhateverTheWindow) {
  for (const int32_t tokens : {2, 3, 8, 9, 10, 16, 17, 18, 100}) {
    std::vector<TokenFile> list;
    list.push_back(counting("v", tokens));
    const TokenFiles files(std::move(list));
    for (const int64_t length : {1, 3, 8, 200}) {
      const ValidationData data({{.name = "v", .tokens = TokenDataset(files)}}, length, {});
      std::vector<int> seen(static_cast<size_t>(tokens));
      int64_t counted = 0, rows = 0;
      for (int64_t first = 0; first < data.windows(0); first += 3) {
        const Batch batch = data.batch(0, first, 3);
        rows += batch.sequences;
        counted += batch.target_count;
        ASSERT_EQ(batch.tokens.size(), static_cast<size_t>(batch.sequences * length));
        for (size_t i = 0; i < batch.targets.size(); ++i) {
          if (batch.targets[i] == kNoTarget) continue;
          EXPECT_EQ(batch.targets[i], batch.tokens[i] + 1);
          ++seen[static_cast<size_t>(batch.targets[i])];
        }
      }
      EXPECT_EQ(rows, data.windows(0));
      EXPECT_EQ(counted, tokens - 1);
      EXPECT_EQ(seen[0], 0);
      EXPECT_EQ(std::accumulate(seen.begin(), seen.end(), 0), tokens - 1);
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
