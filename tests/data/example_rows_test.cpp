// Examples from a file to batches.
#include <gmock/gmock.h>

#include <set>

#include "data/open_data.h"
#include "data/token_file.h"
#include "files.h"

namespace mantissa::example_rows_test {

using test::error_of;
using test::write_file;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ExampleRowsTest : public ::testing::Test {
 protected:
  DataConfig config(const std::string& content) {
    write_file(folder_ / "a.jsonl", content);
    DataConfig config;
    config.train = {{.path = folder_ / "a.jsonl"}};
    return config;
  }
  Data open(const DataConfig& config, int64_t seq_len) { return open_data(config, {.seq_len = seq_len, .vocab_size = 100}); }

  test::TemporaryFolder folder_;
};

// A line of so many tokens, all of the same id, of which the first `masked` are not trained.
std::string line(int id, int tokens, int masked = 0) {
  std::string ids, mask;
  for (int i = 0; i < tokens; ++i) {
    ids += (i > 0 ? "," : "") + std::to_string(id);
    mask += (i > 0 ? "," : "") + std::to_string(i >= masked);
  }
  return R"({"tokens": [)" + ids + R"(], "mask": [)" + mask + "]}\n";
}

constexpr int32_t kNo = kNoTarget;

TEST_F(ExampleRowsTest, LieWholeInRowsAndSeeOnlyThemselves) {
  Data data = open(config(line(1, 5, 2) + line(2, 6) + line(3, 3, 3) + line(4, 2, 1)), 8);
  EXPECT_EQ(data.train->tokens(), 16) << "1 and 3 in a row, 2 and 4 in another";
  const Batch batch = data.train->batch(0, 2);
  const size_t first = batch.samples[0].sample == 0 ? 0 : 8, second = 8 - first;
  const auto row = [](const std::vector<int32_t>& values, size_t begin) {
    return std::vector<int32_t>(values.begin() + static_cast<std::ptrdiff_t>(begin),
                                values.begin() + static_cast<std::ptrdiff_t>(begin) + 8);
  };
  EXPECT_THAT(row(batch.tokens, first), ElementsAre(1, 1, 1, 1, 1, 3, 3, 3));
  EXPECT_THAT(row(batch.targets, first), ElementsAre(kNo, 1, 1, 1, kNo, kNo, kNo, kNo));
  EXPECT_THAT(row(batch.positions, first), ElementsAre(0, 1, 2, 3, 4, 0, 1, 2));
  EXPECT_THAT(row(batch.segment_starts, first), ElementsAre(0, 0, 0, 0, 0, 5, 5, 5));
  EXPECT_THAT(row(batch.tokens, second), ElementsAre(2, 2, 2, 2, 2, 2, 4, 4));
  EXPECT_THAT(row(batch.targets, second), ElementsAre(2, 2, 2, 2, 2, kNo, 4, kNo));
  EXPECT_EQ(batch.target_count, 9);
  EXPECT_FALSE(batch.all_count);
}

TEST_F(ExampleRowsTest, GoWhereTheyLeaveTheSmallestGap) {
  Data data = open(config(line(1, 4) + line(2, 6) + line(3, 5) + line(4, 2) + line(5, 3)), 8);
  const TokenDataset& files = data.files.front();
  std::vector<int32_t> ids(static_cast<size_t>(files.tokens()));
  std::vector<uint8_t> marks(ids.size());
  files.read(0, files.tokens(), ids.data(), marks.data());
  EXPECT_THAT(ids, ElementsAre(1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 4, 4, 3, 3, 3, 3, 3, 5, 5, 5));
  EXPECT_THAT(std::vector(marks.begin() + 3, marks.begin() + 8),
              ElementsAre(ends_document | untrained, starts_document | untrained | fills_row, untrained | fills_row, untrained | fills_row,
                          ends_document | untrained | fills_row));
  for (int64_t i = 0; i < files.tokens(); ++i) {
    uint8_t alone = 0;
    files.read(i, 1, ids.data(), &alone);
    EXPECT_EQ(alone, marks[static_cast<size_t>(i)]) << "wherever reading begins: " << i;
  }
  EXPECT_EQ(data.train->batch(0, 3).segment_starts, data.train->batch(3, 3).segment_starts) << "three samples, in any order";
  EXPECT_EQ(open(config(line(1, 7) + line(2, 1)), 8).train->tokens(), 8) << "a gap of one token";
}

// Tokens without a target are tokens all the same, and so are those whose id is that of padding.
TEST_F(ExampleRowsTest, OnlyWhatFillsARowIsPadding) {
  Data data = open(config(line(1, 4) + line(2, 6, 6) + line(3, 5, 2) + line(0, 3, 3) + line(4, 8, 8)), 8);
  const Batch batch = data.train->batch(0, 4);
  for (size_t row = 0; row < 4; ++row) {
    const int32_t first = batch.tokens[8 * row];
    EXPECT_EQ(batch.lengths[row], first == 1 ? 4 : first == 2 ? 6 : 8) << first;
  }
  const DataConfig full = config(line(1, 8) + line(2, 5) + line(3, 3));
  EXPECT_THAT(open(full, 8).train->batch(0, 2).lengths, Each(8));
  DataConfig validated = config(line(1, 4) + line(2, 6));
  validated.valid = validated.train;
  EXPECT_THAT(open(validated, 8).valid.batch(0, 0, 2).lengths, ElementsAre(4, 6));
}

TEST_F(ExampleRowsTest, EveryRowIsASampleAndEveryTargetCountsOnce) {
  std::string lines;
  int64_t targets = 0;
  for (int i = 0; i < 50; ++i) {
    lines += line(1 + i, 1 + i * 7 % 16, i % 3);
    targets += std::max(0, i * 7 % 16 - std::max(0, i % 3 - 1));
  }
  DataConfig both = config(lines);
  both.valid = both.train;
  Data data = open(both, 16);
  const int64_t rows = data.train->tokens() / 16;
  const Batch epoch = data.train->batch(0, rows);
  EXPECT_EQ(epoch.target_count, targets);
  std::set<int64_t> samples;
  for (const SampleId& id : epoch.samples) samples.insert(id.sample);
  EXPECT_EQ(samples.size(), static_cast<size_t>(rows));
  EXPECT_EQ(data.valid.windows(0), rows);
  EXPECT_EQ(data.valid.batch(0, 0, rows).target_count, targets);
  EXPECT_EQ(data.files.front().files().front().examples().targets, targets);
}

TEST_F(ExampleRowsTest, TheEndOfALongOneIsCutOffCountedAndAWarning) {
  const DataConfig long_ones = config(line(1, 11, 3) + line(2, 8) + line(3, 9, 8));
  const Data data = open(long_ones, 8);
  const ExampleCounts& counts = data.files.front().files().front().examples();
  EXPECT_EQ(counts.examples, 3);
  EXPECT_EQ(counts.targets, 5 + 7 + 0);
  EXPECT_EQ(counts.cut_examples, 2);
  EXPECT_EQ(counts.cut_targets, 3 + 1);
  EXPECT_THAT(data_warnings(long_ones, data),
              ElementsAre(HasSubstr("a.jsonl: the ends of 2 of 3 examples, beyond training.seq_len, are cut off, with 4 of 16 targets")));
  const DataConfig whole = config(line(2, 8));
  EXPECT_THAT(data_warnings(whole, open(whole, 8)), ::testing::IsEmpty());
}

TEST_F(ExampleRowsTest, TheShortFormDividesThemBetweenRows) {
  DataConfig config = this->config(line(1, 8) + line(2, 8) + line(3, 8) + line(4, 8) + line(5, 8));
  config.path = config.train.front().path;
  config.train.clear();
  config.valid_fraction = 0.3;
  Data data = open(config, 8);
  EXPECT_EQ(data.train->tokens(), 24);
  EXPECT_THAT(data.train->batch(0, 3).targets, Each(::testing::AnyOf(kNo, 1, 2, 3)));
  EXPECT_EQ(data.valid.windows(0), 2);
  EXPECT_EQ(data.valid.batch(0, 0, 2).target_count, 14);
  EXPECT_EQ(open_validation_data(config, {.seq_len = 8, .vocab_size = 100}).valid.batch(0, 0, 2).tokens, data.valid.batch(0, 0, 2).tokens);
  write_file(*config.path, line(1, 8));
  const Error error = error_of([&] { open(config, 8); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("data.path: its examples fill 1 row of training.seq_len 8, too few"));
  config.valid_fraction = 0;
  EXPECT_EQ(open(config, 8).train->tokens(), 8);
}

TEST_F(ExampleRowsTest, WithoutATrainedTokenAreAnError) {
  const Error error = error_of([&] { open(config(line(1, 8, 8) + line(2, 1)), 8); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_STREQ(error.what(),
               "the training data: all 16 tokens are masked, so there is nothing to learn from; an example that is longer than "
               "training.seq_len loses its end");
  DataConfig two = config(line(1, 8, 8));
  write_file(folder_ / "b.jsonl", line(1, 8));
  two.train = {{.path = folder_ / "b.jsonl"}, {.path = folder_ / "a.jsonl"}};
  EXPECT_THAT(error_of([&] { open(two, 8); }).what(), HasSubstr("data.train[1]: all 8 tokens are masked"));
  write_file(folder_ / "masked.bin",
             "BIN.TOK\n" + std::string("\2\0\0\0\4\0\0\0\11\0\0\0\144\0\0\0\1\0\0\0", 20) + std::string(996 + 36 + 2, '\0'));
  two.train = {{.path = folder_ / "masked.bin"}};
  EXPECT_THAT(error_of([&] { open(two, 8); }).what(), HasSubstr("all 9 tokens are masked"));
}

TEST_F(ExampleRowsTest, AreNeverMixedIntoOneSequence) {
  for (const auto option : {&DataConfig::document_mask, &DataConfig::reset_position_ids}) {
    DataConfig config = this->config(line(1, 8));
    config.*option = true;
    EXPECT_TRUE(open(config, 8).train);
    config.*option = false;
    const Error error = error_of([&] { open(config, 8); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr(option == &DataConfig::document_mask ? "data.document_mask: " : "data.reset_position_ids: "));
  }
}

TEST_F(ExampleRowsTest, AreASetApartFromStreams) {
  DataConfig config = this->config(line(1, 8));
  write_file(folder_ / "b.jsonl", "{\"text\": \"some text to read\"}\n");
  config.tokenizer = "byte";
  const auto open = [&] { return open_data(config, {.seq_len = 8, .vocab_size = 256}); };
  config.train = {{.path = folder_ / "a.jsonl"}, {.path = folder_ / "b.jsonl"}};
  const Batch batch = open().train->batch(0, 2);
  EXPECT_FALSE(batch.all_count) << "those of one set do not";
  for (size_t row = 0; row < 2; ++row) EXPECT_EQ(batch.targets[row * 8 + 7] == kNo, batch.samples[row].dataset == 0);
  config.train = {{.path = folder_ / "*.jsonl"}};
  const Error error = error_of(open);
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("b.jsonl has no fine-tuning examples, but other files have"));
}

TEST_F(ExampleRowsTest, AreReadBackToBackWithoutRows) {
  config(line(1, 3, 1) + line(2, 2));
  const TokenFile file(folder_ / "a.jsonl", {.vocab_size = 100});
  std::vector<int32_t> ids(5);
  std::vector<uint8_t> marks(5);
  ASSERT_EQ(file.tokens(), 5);
  file.read(0, 5, ids.data(), marks.data());
  EXPECT_THAT(ids, ElementsAre(1, 1, 1, 2, 2));
  EXPECT_THAT(marks, ElementsAre(starts_document, 0, ends_document | untrained, starts_document, ends_document | untrained));
}

}  // namespace mantissa::example_rows_test
