#include <gmock/gmock.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <numeric>

#include "data/token_file.h"
#include "data/token_writer.h"
#include "files.h"

namespace mantissa::data_token_file_test {

using test::error_of;
using test::write_file;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

std::string header(std::vector<int32_t> fields) {
  fields.resize(256);
  return bytes_of(fields);
}

// The five numbers follow the 8 bytes of the magic.
std::string llmq_header(const std::vector<int32_t>& fields) {
  std::string out = header({});
  const std::string numbers = bytes_of(fields);
  std::memcpy(out.data(), "BIN.TOK\n", 8);
  std::memcpy(out.data() + 8, numbers.data(), numbers.size());
  return out;
}

std::vector<int32_t> all_tokens(const TokenFile& file) {
  std::vector<int32_t> out(static_cast<size_t>(file.tokens()));
  file.read(0, file.tokens(), out.data());
  return out;
}

std::vector<int> all_marks(const TokenFile& file) {
  std::vector<int32_t> tokens(static_cast<size_t>(file.tokens()));
  std::vector<uint8_t> marks(tokens.size());
  file.read(0, file.tokens(), tokens.data(), marks.data());
  return {marks.begin(), marks.end()};
}

class TokenFileTest : public ::testing::Test {
 protected:
  TokenFile open(const std::string& name, std::string_view content, TokenFileOptions options) {
    write_file(folder_ / name, content);
    return TokenFile(folder_ / name, options);
  }

  test::TemporaryFolder folder_;
  const Tokenizer bytes_ = Tokenizer::bytes();
};

TEST_F(TokenFileTest, RawIdsAreNanoGptsAndLlmcShardsOfBothKindsAreKnownByTheirMagic) {
  const auto expect = [&](const char* name, const std::string& content, TokenFileOptions options, DataFormat format,
                          const std::vector<int32_t>& ids) {
    const TokenFile file = open(name, content, options);
    EXPECT_EQ(file.format(), format);
    EXPECT_EQ(all_tokens(file), ids);
  };
  expect("a.bin", bytes_of<uint16_t>({1, 2, 65000}), {.vocab_size = 65001}, DataFormat::nanogpt, {1, 2, 65000});
  expect("b.bin", bytes_of<uint32_t>({1, 100000}), {.dtype = TokenDtype::u32, .vocab_size = 100001}, DataFormat::nanogpt, {1, 100000});
  expect("a", header({20240520, 1, 3}) + bytes_of<uint16_t>({5, 6, 7}), {.vocab_size = 8}, DataFormat::llmc, {5, 6, 7});
  expect("c.bin", header({20240801, 7, 2}) + bytes_of<uint32_t>({5, 128000}), {.vocab_size = 128256}, DataFormat::llmc, {5, 128000});
}

TEST_F(TokenFileTest, LlmqIsReadWithAndWithoutMasks) {
  const std::string ids = bytes_of<int32_t>({1, 2, 3, 4, 5, 6, 7, 8, 9});
  const TokenFile plain = open("a.bin", llmq_header({2, 4, 9, 10, 0}) + ids, {.vocab_size = 10});
  EXPECT_EQ(plain.format(), DataFormat::llmq);
  EXPECT_THAT(all_tokens(plain), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_THAT(all_marks(plain), ::testing::Each(0));
  EXPECT_EQ(open("b.bin", llmq_header({2, 4, 9, 10, 0x2A2A2A2A}) + ids, {.vocab_size = 10}).tokens(), 9);
  const TokenFile masked = open("c.bin", llmq_header({2, 4, 9, 10, 1}) + ids + "\x05\x01", {.vocab_size = 10});
  const int off = untrained;
  EXPECT_THAT(all_marks(masked), ElementsAre(0, off, 0, off, off, off, off, off, 0));
  std::array<int32_t, 2> two;
  std::array<uint8_t, 2> marks;
  masked.read(7, 2, two.data(), marks.data());  // across the byte of the mask
  EXPECT_THAT(marks, ElementsAre(off, 0));
}

TEST_F(TokenFileTest, MegatronPairIsKnownByEveryOfItsNames) {
  MegatronWriter writer(folder_ / "train", {.vocab_size = 100, .eod_id = 99});
  writer.add_document(std::vector<int32_t>{1, 2, 3});
  writer.add_document({});
  writer.add_document(std::vector<int32_t>{4});
  EXPECT_EQ(writer.finish(), 6);
  for (const char* name : {"train", "train.bin", "train.idx"}) {
    const TokenFile file(folder_ / name, {.vocab_size = 100});
    EXPECT_EQ(file.format(), DataFormat::megatron);
    EXPECT_THAT(all_tokens(file), ElementsAre(1, 2, 3, 99, 4, 99));
    const int first = starts_document, last = ends_document;
    EXPECT_THAT(all_marks(file), ElementsAre(first, 0, 0, last, first, last));
    EXPECT_THAT(file.files(), ElementsAre(folder_ / "train.bin", folder_ / "train.idx"));
  }
}

TEST_F(TokenFileTest, MegatronBytesAreThoseOfTheSpecification) {
  MegatronWriter writer(folder_ / "p", {.vocab_size = 65499, .eod_id = {}});
  writer.add_document(std::vector<int32_t>{258, 3});
  writer.add_document(std::vector<int32_t>{4});
  writer.finish();
  EXPECT_EQ(test::read_file(folder_ / "p.bin"), bytes_of<uint16_t>({258, 3, 4}));
  std::string expected("MMIDIDX\0\0", 9);
  expected +=
      bytes_of<uint64_t>({1}) + "\x08" + bytes_of<uint64_t>({2, 3}) + bytes_of<int32_t>({2, 1}) + bytes_of<int64_t>({0, 4, 0, 1, 2});
  EXPECT_EQ(test::read_file(folder_ / "p.idx"), expected);
}

TEST_F(TokenFileTest, MegatronWidthFollowsTheVocabularyAndAnUnfinishedWriterLeavesNothing) {
  { MegatronWriter writer(folder_ / "x", {.vocab_size = 10, .eod_id = {}}); }
  { LlmcWriter writer(folder_ / "x.bin", {.vocab_size = 10, .eod_id = {}}); }
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
  for (const auto& [vocabulary, width] : {std::pair{65499, 2U}, {65500, 4U}}) {
    MegatronWriter writer(folder_ / "p", {.vocab_size = vocabulary, .eod_id = {}});
    writer.add_document(std::vector<int32_t>{7});
    writer.finish();
    EXPECT_EQ(test::read_file(folder_ / "p.bin").size(), width);
    EXPECT_THAT(all_tokens(TokenFile(folder_ / "p", {.vocab_size = vocabulary})), ElementsAre(7));
  }
}

TEST_F(TokenFileTest, MegatronIntegersOfEveryWidthAndModesAreRead) {
  const auto idx = [](uint8_t code, int64_t width, bool modes) {
    std::string out("MMIDIDX\0\0", 9);
    out += bytes_of<uint64_t>({1}) + static_cast<char>(code) + bytes_of<uint64_t>({2, 3}) + bytes_of<int32_t>({1, 1}) +
           bytes_of<int64_t>({0, width, 0, 1, 2});
    return modes ? out + std::string(2, '\0') : out;
  };
  const std::vector<std::pair<uint8_t, std::string>> cases = {{1, bytes_of<uint8_t>({1, 2})}, {2, bytes_of<int8_t>({1, 2})},
                                                              {3, bytes_of<int16_t>({1, 2})}, {4, bytes_of<int32_t>({1, 2})},
                                                              {5, bytes_of<int64_t>({1, 2})}, {8, bytes_of<uint16_t>({1, 2})}};
  for (const auto& [code, content] : cases) {
    write_file(folder_ / "m.bin", content);
    write_file(folder_ / "m.idx", idx(code, static_cast<int64_t>(content.size() / 2), code % 2 == 0));
    EXPECT_THAT(all_tokens(TokenFile(folder_ / "m", {.vocab_size = 3})), ElementsAre(1, 2)) << int{code};
  }
}

TEST_F(TokenFileTest, LlmcWriterPutsTheEndTokenBeforeEachDocument) {
  for (const int64_t vocabulary : {65536, 65537}) {
    LlmcWriter writer(folder_ / "o.bin", {.vocab_size = vocabulary, .eod_id = 9});
    writer.add_document(std::vector<int32_t>{1, 2});
    writer.add_document(std::vector<int32_t>{3});
    EXPECT_EQ(writer.finish(), 5);
    const TokenFile file(folder_ / "o.bin", {.vocab_size = vocabulary, .eod_id = 9});
    EXPECT_EQ(file.format(), DataFormat::llmc);
    EXPECT_THAT(all_tokens(file), ElementsAre(9, 1, 2, 9, 3));
    EXPECT_THAT(all_marks(file), ElementsAre(end_token | starts_document, 0, 0, end_token | starts_document, 0));
    EXPECT_EQ(test::read_file(folder_ / "o.bin").size(), vocabulary == 65536 ? 1024U + 10 : 1024U + 20);
  }
}

TEST_F(TokenFileTest, AnEndTokenThatADocumentHasIsNotWrittenAgain) {
  const std::vector<std::vector<int32_t>> documents = {{1, 9}, {2}, {9, 3}, {9}, {4, 9, 5}};
  MegatronWriter megatron(folder_ / "m", {.vocab_size = 10, .eod_id = 9});
  LlmcWriter llmc(folder_ / "c.bin", {.vocab_size = 10, .eod_id = 9});
  for (const auto& document : documents) megatron.add_document(document), llmc.add_document(document);
  EXPECT_EQ(megatron.finish(), 12);
  EXPECT_EQ(llmc.finish(), 10);
  EXPECT_THAT(all_tokens(TokenFile(folder_ / "m", {.vocab_size = 10})), ElementsAre(1, 9, 2, 9, 9, 3, 9, 9, 4, 9, 5, 9));
  EXPECT_THAT(all_tokens(TokenFile(folder_ / "c.bin", {.vocab_size = 10})), ElementsAre(9, 1, 9, 2, 9, 3, 9, 4, 9, 5));
}

TEST_F(TokenFileTest, TextOfTheByteTokenizerIsItsBytesAndTheEndTokenIfThereIsOne) {
  const TokenFile file = open("a.txt", "h\u00e9", {.tokenizer = &bytes_, .vocab_size = 256});
  EXPECT_EQ(file.format(), DataFormat::text);
  EXPECT_THAT(all_tokens(file), ElementsAre('h', 0xC3, 0xA9));
  EXPECT_THAT(all_marks(file), ElementsAre(starts_document, 0, ends_document));
  const TokenFile ended = open("a.txt", "hi", {.tokenizer = &bytes_, .vocab_size = 300, .eod_id = 299, .append_eod = true});
  EXPECT_THAT(all_tokens(ended), ElementsAre('h', 'i', 299));
  EXPECT_THAT(all_marks(ended), ElementsAre(starts_document, 0, ends_document | end_token));
}

TEST_F(TokenFileTest, TextIsCutIntoWindowsBetweenCharacters) {
  for (const std::string_view character : {"\u00e9", "\u20ac", "\U0001F600"}) {
    for (size_t before = (1 << 20) - character.size() + 1; before < (1 << 20); ++before) {
      const std::string content = std::string(before, 'x') + std::string(character) + "y";
      const Tokenizer tokenizer = Tokenizer::characters({'x', 'y', 0xE9, 0x20AC, 0x1F600});
      const auto ids = all_tokens(open("a.txt", content, {.tokenizer = &tokenizer, .vocab_size = 5}));
      ASSERT_EQ(ids.size(), before + 2);
      EXPECT_EQ(tokenizer.decode(ids), content);
    }
  }
  const Tokenizer tokenizer = Tokenizer::characters({'x'});
  const Error error = error_of([&] { open("a.txt", std::string((1 << 20) + 7, 'x') + "z", {.tokenizer = &tokenizer, .vocab_size = 1}); });
  EXPECT_THAT(error.what(), HasSubstr("ending at byte 1048583 "));
}

TEST_F(TokenFileTest, BytesThatAreNoTextNeedAnExplicitFormat) {
  const Error error = error_of([&] { open("a.dat", "\xff\xfe", {.tokenizer = &bytes_, .vocab_size = 256}); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("data.format"));
  EXPECT_EQ(open("a.dat", "\xff\xfe", {.format = DataFormat::text, .tokenizer = &bytes_, .vocab_size = 256}).tokens(), 2);
}

TEST_F(TokenFileTest, JsonLinesAreOneDocumentEach) {
  const TokenFile file = open("a.jsonl", "{\"text\":\"ab\"}\n\n{\"id\":1,\"x\":{\"text\":[0]},\"text\":\"\"}\r\n{\"text\":\"\\u00e9\"}",
                              {.tokenizer = &bytes_, .vocab_size = 256, .eod_id = 0, .append_eod = true});
  EXPECT_EQ(file.format(), DataFormat::jsonl);
  EXPECT_THAT(all_tokens(file), ElementsAre('a', 'b', 0, 0xC3, 0xA9, 0)) << "an empty text is no document";
  const int first = starts_document, last = ends_document | end_token;
  EXPECT_THAT(all_marks(file), ElementsAre(first, 0, last, first, 0, last));
}

TEST_F(TokenFileTest, OptionsThatDoNotFitTheFormatAreUsageErrors) {
  const std::string ids = bytes_of<uint16_t>({1, 2});
  EXPECT_THAT(error_of([&] { open("a.bin", ids, {.vocab_size = 9, .eod_id = 1, .append_eod = true}); }).what(),
              HasSubstr("data.append_eod"));
  EXPECT_THAT(error_of([&] { open("a.txt", "x", {.tokenizer = &bytes_, .vocab_size = 256, .append_eod = true}); }).what(),
              HasSubstr("data.eod_id"));
  EXPECT_EQ(error_of([&] { open("a.txt", "x", {.vocab_size = 256}); }).code(), ExitCode::usage);
  EXPECT_EQ(error_of([&] { open("a.bin", ids, {.vocab_size = 9, .eod_id = 9}); }).code(), ExitCode::usage);
  EXPECT_EQ(error_of([&] { TokenFile(folder_ / "missing", {.vocab_size = 9}); }).code(), ExitCode::usage);
}

TEST_F(TokenFileTest, ReadsAtAnyPlaceAgreeWithTheWhole) {
  std::vector<uint16_t> ids(1000);
  std::iota(ids.begin(), ids.end(), uint16_t{0});
  const TokenFile file = open("a.bin", bytes_of(ids), {.vocab_size = 1000});
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 1}, {999, 1}, {0, 1000}, {123, 456}, {1000, 0}}) {
    std::vector<int32_t> out(static_cast<size_t>(count));
    file.read(begin, count, out.data());
    for (int64_t i = 0; i < count; ++i) ASSERT_EQ(out[static_cast<size_t>(i)], begin + i);
  }
  EXPECT_EQ(error_of([&] {
              std::array<int32_t, 2> out;
              file.read(999, 2, out.data());
            }).code(),
            ExitCode::internal);
}

}  // namespace mantissa::data_token_file_test
