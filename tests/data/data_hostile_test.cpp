// Damaged and hostile token files: each is refused with Error(data) before memory is taken for what it claims, and no read leaves the file.
#include <gmock/gmock.h>

#include <cstring>
#include <filesystem>

#include "files.h"
#include "mantissa/data/token_file.h"
#include "mantissa/data/token_writer.h"

namespace mantissa::data_hostile_test {

using test::error_of;
using test::read_file;
using test::write_file;
using ::testing::HasSubstr;

template <class T>
std::string with_value(std::string bytes, size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof value);
  return bytes;
}

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

  Error refused(const std::string& content, DataFormat format) {
    write_file(folder_ / "x.bin", content);
    const Error error = error_of([&] { use(folder_ / "x.bin", format); });
    EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    return error;
  }

  Error refused_index(const std::string& idx) {
    write_file(folder_ / "x.bin", bin_);
    write_file(folder_ / "x.idx", idx);
    const Error error = error_of([&] { use(folder_ / "x.bin"); });
    EXPECT_EQ(error.code(), ExitCode::data) << error.what();
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

TEST_F(HostileTest, FilesTruncatedAtAnyByteAreRefused) {
  // Shortened byte by byte, from the whole file down to nothing.
  const auto shorten = [this](const std::string& path, const std::string& opened, DataFormat format) {
    for (auto size = std::filesystem::file_size(path); size-- > 0;) {
      std::filesystem::resize_file(path, size);
      ASSERT_EQ(error_of([&] { use(opened, format); }).code(), ExitCode::data) << path << " of " << size << " bytes";
    }
  };
  write_file(folder_ / "q.bin", llmq_);
  shorten(folder_ / "c.bin", folder_ / "c.bin", DataFormat::llmc);
  shorten(folder_ / "q.bin", folder_ / "q.bin", DataFormat::llmq);
  shorten(folder_ / "m.idx", folder_ / "m", DataFormat::megatron);
  write_file(folder_ / "m.idx", idx_);
  shorten(folder_ / "m.bin", folder_ / "m", DataFormat::megatron);
}

TEST_F(HostileTest, BytesTooManyAreRefused) {
  EXPECT_EQ(refused(llmc_ + "xx", DataFormat::llmc).code(), ExitCode::data);
  EXPECT_EQ(refused(llmq_ + "x", DataFormat::llmq).code(), ExitCode::data);
  EXPECT_EQ(refused_index(idx_ + "x").code(), ExitCode::data);
  write_file(folder_ / "m.bin", bin_ + "xx");
  EXPECT_THAT(error_of([&] { use(folder_ / "m"); }).what(), HasSubstr("m.bin: 42 bytes, but"));
}

// Every byte of header and index to every extreme: either refused or read without leaving the file (the sanitizer presets watch).
TEST_F(HostileTest, NoSingleByteMakesAReadLeaveTheFile) {
  int refusals = 0;
  const auto attempt = [&](const std::string& path, DataFormat format) {
    try {
      use(path, format);
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ExitCode::data) << error.what();
      ++refusals;
    }
  };
  const auto damage_each = [&](const std::string& path, const std::string& opened, const std::string& content, size_t size,
                               DataFormat format) {
    write_file(path, content);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const auto put = [&file](size_t at, char byte) { file.seekp(static_cast<std::streamoff>(at)).put(byte).flush(); };
    for (size_t i = 0; i < size; ++i) {
      for (const int flip : {0x01, 0x80, 0xFF}) {
        put(i, static_cast<char>(content[i] ^ flip));
        attempt(opened, format);
      }
      put(i, content[i]);
    }
    ASSERT_TRUE(file.good());
  };
  damage_each(folder_ / "x.bin", folder_ / "x.bin", llmc_, 16, DataFormat::llmc);
  damage_each(folder_ / "q.bin", folder_ / "q.bin", llmq_, 32, DataFormat::llmq);
  damage_each(folder_ / "m.idx", folder_ / "m", idx_, idx_.size(), DataFormat::megatron);
  EXPECT_GT(refusals, 400);
}

TEST_F(HostileTest, CountsThatOverflowAreRefused) {
  for (const uint64_t count : {uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{1} << 60, (uint64_t{1} << 62) + 5, (uint64_t{1} << 63),
                               ~uint64_t{0}, ~uint64_t{0} / 12 + 1, ~uint64_t{0} / 20 + 1}) {
    EXPECT_EQ(refused_index(with_value(idx_, 18, count)).code(), ExitCode::data) << count;
    EXPECT_EQ(refused_index(with_value(idx_, 26, count)).code(), ExitCode::data) << count;
    EXPECT_EQ(refused_index(with_value(with_value(idx_, 18, count), 26, count)).code(), ExitCode::data) << count;
  }
  for (const int32_t count : {-1, INT32_MIN, INT32_MAX, 1 << 30, 21, 19}) {
    EXPECT_EQ(refused(with_value(llmc_, 8, count), DataFormat::llmc).code(), ExitCode::data) << count;
    EXPECT_EQ(refused(with_value(llmq_, 16, count), DataFormat::llmq).code(), ExitCode::data) << count;
  }
}

// idx: 5 sequences of 2, 3, 4, 5, 6 tokens; lengths at 34, offsets at 54, documents at 94.
TEST_F(HostileTest, IndexEntriesOutOfPlaceAreRefused) {
  for (const int32_t length : {-1, INT32_MIN, INT32_MAX, 0, 3})
    EXPECT_EQ(refused_index(with_value(idx_, 34, length)).code(), ExitCode::data) << length;
  for (const int64_t offset : {int64_t{-4}, INT64_MIN, INT64_MAX, int64_t{40}, int64_t{5}, int64_t{2}}) {
    EXPECT_EQ(refused_index(with_value(idx_, 62, offset)).code(), ExitCode::data) << offset;
  }
  for (const int64_t document : {int64_t{-1}, int64_t{6}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(refused_index(with_value(idx_, 94, document)).code(), ExitCode::data) << document;
    EXPECT_EQ(refused_index(with_value(idx_, 102, document)).code(), ExitCode::data) << document;
  }
  EXPECT_EQ(refused_index(with_value(idx_, 110, int64_t{0})).code(), ExitCode::data);  // falls
  EXPECT_EQ(refused_index(with_value(idx_, 134, int64_t{4})).code(), ExitCode::data);  // ends before the last sequence
}

TEST_F(HostileTest, WrongMagicAndVersionNameWhatWasExpected) {
  EXPECT_THAT(refused(with_value(llmc_, 0, int32_t{7}), DataFormat::llmc).what(), HasSubstr("20240520"));
  EXPECT_THAT(refused(with_value(llmc_, 4, int32_t{2}), DataFormat::llmc).what(), HasSubstr("version 1, found 2"));
  EXPECT_THAT(refused(with_value(llmq_, 8, int32_t{1}), DataFormat::llmq).what(), HasSubstr("found version 1"));
  EXPECT_THAT(refused(with_value(llmq_, 12, int32_t{2}), DataFormat::llmq).what(), HasSubstr("with 2 bytes"));
  EXPECT_THAT(refused(with_value(llmq_, 24, int32_t{2}), DataFormat::llmq).what(), HasSubstr("has_masks"));
  EXPECT_THAT(refused_index(with_value(idx_, 9, uint64_t{2})).what(), HasSubstr("version 1 is read, found 2"));
  for (const char code : {'\0', '\6', '\7', '\11', '\377'})
    EXPECT_THAT(refused_index(with_value(idx_, 17, code)).what(), HasSubstr("dtype code"));
}

TEST_F(HostileTest, LlmcFilesThatHoldNoTokensAreNamed) {
  const std::vector<std::pair<int32_t, const char*>> others = {{20240326, "a model of llm.c"},
                                                               {20240328, "a tokenizer of llm.c"},
                                                               {20240522, "an evaluation set of llm.c"},
                                                               {20240527, "an optimizer state of llm.c"}};
  for (const auto& [magic, what] : others) {
    for (const DataFormat format : {DataFormat::automatic, DataFormat::llmc}) {
      const Error error = refused(with_value(llmc_, 0, magic), format);
      EXPECT_EQ(error.code(), ExitCode::data);
      EXPECT_THAT(error.what(), HasSubstr(what));
    }
  }
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
  const Error negative = refused(with_value(llmq_, 1024 + 8, int32_t{-5}), DataFormat::llmq);
  EXPECT_EQ(negative.code(), ExitCode::data);
  EXPECT_THAT(negative.what(), HasSubstr("token 2 is -5"));
  EXPECT_THAT(negative.what(), Not(HasSubstr("data.dtype")));
}

TEST_F(HostileTest, OddNumberOfBytesIsNoNanoGptFile) { EXPECT_THAT(refused("abc", DataFormat::nanogpt).what(), HasSubstr("data.dtype")); }

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
