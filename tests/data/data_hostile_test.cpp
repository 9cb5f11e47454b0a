// Damaged and hostile token files: each is refused with Error(data) before memory is taken for what it claims, and no read leaves the file.
// Files that break off, or in which any one byte is another, are in tests/fuzz/fuzz_test.cpp.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "data/token_file.h"
#include "data/token_writer.h"
#include "files.h"

namespace mantissa::data_hostile_test {

using test::error_of;
using test::read_file;
using test::write_file;
using ::testing::HasSubstr;

template <class T>
std::string bytes_of(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

constexpr DataFormat kLlmc = DataFormat::llmc, kLlmq = DataFormat::llmq, kMegatron = DataFormat::megatron;

class HostileTest : public ::testing::Test {
 protected:
  HostileTest() {
    MegatronWriter megatron(folder_ / "m", {.vocab_size = 100, .eod_id = 9});
    LlmcWriter llmc(folder_ / "c.bin", {.vocab_size = 100, .eod_id = 9});
    for (int32_t document = 1; document <= 5; ++document) {
      const std::vector<int32_t> ids(static_cast<size_t>(document), document);
      megatron.add_document(ids);
      llmc.add_document(ids);
    }
    megatron.finish();
    llmc.finish();
    idx_ = read_file(folder_ / "m.idx");
    bin_ = read_file(folder_ / "m.bin");
    llmc_ = read_file(folder_ / "c.bin");
    llmq_ = std::string(1024, '\0') + std::string(36, '\1') + "\xff\x01";
    std::memcpy(llmq_.data(), "BIN.TOK\n", 8);
    const int32_t fields[] = {2, 4, 9, 1 << 24 | 1 << 16 | 1 << 8 | 2, 1};
    std::memcpy(llmq_.data() + 8, fields, sizeof fields);
  }

  // Opens and reads everything.
  void use(const std::string& path, DataFormat format = DataFormat::automatic) {
    const TokenFile file(path, {.format = format, .vocab_size = 1 << 25, .eod_id = 9});
    ASSERT_LE(file.tokens(), 1 << 20);
    std::vector<int32_t> tokens(static_cast<size_t>(file.tokens()));
    std::vector<uint8_t> marks(tokens.size());
    file.read(0, file.tokens(), tokens.data(), marks.data());
  }

  // Expects an error for a file of this format (Megatron: its index) in which these bytes are others; at its end more are appended.
  Error refused(DataFormat format, size_t at, const std::string& bytes) {
    const bool pair = format == DataFormat::megatron;
    std::string content = pair ? idx_ : format == DataFormat::llmc ? llmc_ : llmq_;
    content.replace(std::min(at, content.size()), bytes.size(), bytes);
    std::filesystem::remove(folder_ / "x.idx");
    write_file(folder_ / "x.bin", pair ? bin_ : content);
    if (pair) write_file(folder_ / "x.idx", content);
    const Error error = error_of([&] { use(folder_ / "x.bin", pair ? DataFormat::automatic : format); });
    EXPECT_EQ(error.code(), ExitCode::data) << "byte " << at << ": " << error.what();
    return error;
  }

  test::TemporaryFolder folder_;
  std::string idx_, bin_, llmc_, llmq_;
};

TEST_F(HostileTest, TheUndamagedFilesAreAccepted) {
  use(folder_ / "m");
  use(folder_ / "c.bin");
  write_file(folder_ / "q.bin", llmq_);
  use(folder_ / "q.bin");
}

TEST_F(HostileTest, BytesTooManyAreRefused) {
  for (const DataFormat format : {kLlmc, kLlmq, kMegatron}) refused(format, std::string::npos, "xx");
  write_file(folder_ / "m.bin", bin_ + "xx");
  EXPECT_THAT(error_of([&] { use(folder_ / "m"); }).what(), HasSubstr("m.bin: 42 bytes, but"));
}

// idx: 5 sequences of 2, 3, 4, 5, 6 tokens; their number at 18, that of documents at 26, lengths at 34, offsets at 54, documents at 94.
TEST_F(HostileTest, NumbersThatDoNotFitTheFileAreRefused) {
  for (const uint64_t count : {uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{1} << 60, (uint64_t{1} << 62) + 5, uint64_t{1} << 63,
                               ~uint64_t{0}, ~uint64_t{0} / 12 + 1, ~uint64_t{0} / 20 + 1}) {
    for (const size_t at : {18U, 26U}) refused(kMegatron, at, bytes_of(count));
    refused(kMegatron, 18, bytes_of(count) + bytes_of(count));
  }
  for (const int32_t count : {-1, INT32_MIN, INT32_MAX, 1 << 30, 21, 19}) {
    refused(kLlmc, 8, bytes_of(count));
    refused(kLlmq, 16, bytes_of(count));
  }
  for (const int32_t length : {-1, INT32_MIN, INT32_MAX, 0, 3}) refused(kMegatron, 34, bytes_of(length));
  for (const int64_t offset : {int64_t{-4}, INT64_MIN, INT64_MAX, int64_t{40}, int64_t{5}, int64_t{2}})
    refused(kMegatron, 62, bytes_of(offset));
  for (const int64_t document : {int64_t{-1}, int64_t{6}, INT64_MAX, INT64_MIN})
    for (const size_t at : {94U, 102U}) refused(kMegatron, at, bytes_of(document));
  refused(kMegatron, 110, bytes_of(int64_t{0}));  // falls
  refused(kMegatron, 134, bytes_of(int64_t{4}));  // ends before the last sequence
}

TEST_F(HostileTest, WrongMagicAndVersionNameWhatWasExpected) {
  struct Row {
    DataFormat format;
    size_t at;
    std::string bytes;
    const char* says;
  };
  const std::vector<Row> rows = {{kLlmc, 0, bytes_of(int32_t{7}), "20240520"},
                                 {kLlmc, 0, bytes_of(int32_t{20240326}), "a model of llm.c"},
                                 {kLlmc, 0, bytes_of(int32_t{20240328}), "a tokenizer of llm.c"},
                                 {kLlmc, 0, bytes_of(int32_t{20240522}), "an evaluation set of llm.c"},
                                 {kLlmc, 0, bytes_of(int32_t{20240527}), "an optimizer state of llm.c"},
                                 {kLlmc, 4, bytes_of(int32_t{2}), "version 1, found 2"},
                                 {kLlmq, 8, bytes_of(int32_t{1}), "found version 1"},
                                 {kLlmq, 12, bytes_of(int32_t{2}), "with 2 bytes"},
                                 {kLlmq, 24, bytes_of(int32_t{2}), "has_masks"},
                                 {kMegatron, 9, bytes_of(uint64_t{2}), "version 1 is read, found 2"}};
  for (const Row& row : rows) EXPECT_THAT(refused(row.format, row.at, row.bytes).what(), HasSubstr(row.says));
  for (const char code : {'\0', '\6', '\7', '\11', '\377'}) EXPECT_THAT(refused(kMegatron, 17, {code}).what(), HasSubstr("dtype code"));
  write_file(folder_ / "x.bin", bytes_of(int32_t{20240326}) + llmc_.substr(4));
  EXPECT_THAT(error_of([&] { use(folder_ / "x.bin"); }).what(), HasSubstr("a model of llm.c")) << "whatever format is asked for";
}

TEST_F(HostileTest, IdsOutOfRangeNameFileAndPosition) {
  write_file(folder_ / "n.bin", std::string("\x01\x00\x02\x00\x0a\x00", 6));
  const Error nano = error_of([&] {
    TokenFile file(folder_ / "n.bin", {.vocab_size = 10});
    int32_t out[3];
    file.read(0, 3, out);
  });
  EXPECT_EQ(nano.code(), ExitCode::data);
  EXPECT_THAT(nano.what(), HasSubstr("n.bin: token 2 is 10, but the vocabulary has 10 ids"));
  EXPECT_THAT(nano.what(), HasSubstr("data.dtype"));
  const Error negative = refused(kLlmq, 1024 + 8, bytes_of(int32_t{-5}));
  EXPECT_THAT(negative.what(), HasSubstr("token 2 is -5"));
  EXPECT_THAT(negative.what(), Not(HasSubstr("data.dtype")));
  write_file(folder_ / "n.bin", "abc");
  EXPECT_THAT(error_of([&] { use(folder_ / "n.bin", DataFormat::nanogpt); }).what(), HasSubstr("data.dtype")) << "an odd number of bytes";
}

TEST_F(HostileTest, FileTruncatedWhileOpenIsAnErrorNotASignal) {
  const TokenFile file(folder_ / "c.bin", {.vocab_size = 100});
  int32_t out[20];
  file.read(0, 20, out);
  std::filesystem::resize_file(folder_ / "c.bin", 1030);
  const Error error = error_of([&] { file.read(0, 20, out); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("c.bin: ends at byte 1030"));
}

TEST_F(HostileTest, FoldersAndMissingFilesAreUsageErrors) {
  EXPECT_EQ(error_of([&] { use(folder_.path().string()); }).code(), ExitCode::usage);
  EXPECT_EQ(error_of([&] { use(folder_ / "c.bin/below"); }).code(), ExitCode::usage);
  std::filesystem::remove(folder_ / "m.idx");
  EXPECT_EQ(error_of([&] { use(folder_ / "m.bin", DataFormat::megatron); }).code(), ExitCode::usage);
}

}  // namespace mantissa::data_hostile_test
