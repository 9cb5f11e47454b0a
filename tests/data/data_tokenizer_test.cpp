#include <gmock/gmock.h>

#include "data/documents.h"
#include "data/tokenizer.h"
#include "files.h"
#include "mantissa/base/text.h"

namespace mantissa::data_tokenizer_test {

using test::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Tokenizer characters_of_text(std::string_view text) {
  const test::TemporaryFolder folder;
  test::write_file(folder / "a.txt", text);
  std::vector<InputFile> files;
  files.emplace_back(folder / "a.txt");
  return Tokenizer::characters_of(files);
}

TEST(Tokenizer, ByteIdsAreTheByteValues) {
  const Tokenizer tokenizer = Tokenizer::bytes();
  EXPECT_EQ(tokenizer.size(), 256);
  EXPECT_THAT(tokenizer.encode(std::string_view("a\0\xff", 3)), ElementsAre(97, 0, 255));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("\xff\x80 any bytes")), "\xff\x80 any bytes");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{97, 256, -1}), "a\uFFFD\uFFFD") << "an id without a token is seen";
}

TEST(Tokenizer, CharactersAreNumberedInOrderOfCodePoints) {
  const Tokenizer tokenizer = characters_of_text("b\u00e9a\nb\U0001F600\u20ac");
  EXPECT_EQ(tokenizer.size(), 6);
  EXPECT_THAT(tokenizer.encode("\nab\u00e9\u20ac\U0001F600"), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{5, 0, 3}), "\U0001F600\n\u00e9");
}

TEST(Tokenizer, ShakespeareAlphabetHasTheIdsOfNanoGpt) {
  // nanoGPT: sorted(list(set(data))).
  const Tokenizer tokenizer = characters_of_text("zyxwvutsrqponmlkjihgfedcbaZYXWVUTSRQPONMLKJIHGFEDCBA?;:3.-,'&$! \n");
  EXPECT_EQ(tokenizer.size(), 65);
  EXPECT_THAT(tokenizer.encode("\n First"), ElementsAre(0, 1, 18, 47, 56, 57, 58));
  EXPECT_EQ(characters_of_text(std::string((1 << 20) - 1, 'x') + "\u20ac").size(), 2) << "one across two windows of a file";
}

TEST(Characters, AreListedInRangesOfLettersAndDigitsAndNotWithoutEnd) {
  EXPECT_EQ(describe_characters(std::u32string_view(U"\t\n !,-.3789ABYZabd\u00e9")), "U+0009 \\n space ! , - . 3 7-9 A B Y Z a b d \u00e9");
  std::u32string many;
  for (char32_t character = 0x4E00; many.size() < 50; character += 2) many += character;
  const std::string list = describe_characters(many);
  EXPECT_TRUE(list.starts_with("\u4e00 \u4e02 ")) << list;
  EXPECT_TRUE(list.ends_with("\u4e4e and 10 more")) << list;
}

TEST(Tokenizer, UnknownCharacterIsNamed) {
  const Tokenizer tokenizer = characters_of_text("abc");
  const Error prompt = error_of([&] { tokenizer.encode("ab\u00e9"); });
  EXPECT_EQ(prompt.code(), ExitCode::usage);
  EXPECT_THAT(prompt.what(), HasSubstr("U+00E9 '\u00e9'"));
  EXPECT_THAT(prompt.what(), HasSubstr("byte 3"));
  EXPECT_THAT(prompt.what(), HasSubstr("is not among the 3 characters of the training data: a-c"));
  const Error file = error_of([&] { tokenizer.encode("\n", {.name = "x.txt", .code = ExitCode::data}); });
  EXPECT_EQ(file.code(), ExitCode::data);
  EXPECT_THAT(file.what(), HasSubstr("x.txt: the character U+000A "));
}

TEST(Tokenizer, InvalidUtf8IsADataErrorWithItsPosition) {
  for (const std::string_view bad :
       {"ab\xff", "ab\xc0\x80", "ab\xed\xa0\x80", "ab\xf4\x90\x80\x80", "ab\xe2\x82", "ab\xe0\x80\x80", "ab\xc3("}) {
    const Error error = error_of([&] { characters_of_text(bad); });
    EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("UTF-8"));
    EXPECT_FALSE(is_utf8(bad));
  }
  EXPECT_THAT(error_of([] { characters_of_text("ab\xff"); }).what(), HasSubstr("byte 2"));
}

TEST(Tokenizer, EveryScalarValueSurvivesUtf8) {
  Utf8Decoder decoder;
  for (char32_t character = 0; character <= 0x10FFFF; ++character) {
    if (!is_unicode_scalar(character)) continue;
    std::string bytes;
    append_utf8(character, bytes);
    for (size_t i = 0; i < bytes.size(); ++i) {
      const auto status = decoder.feed(static_cast<uint8_t>(bytes[i]));
      ASSERT_EQ(status, i + 1 < bytes.size() ? Utf8Decoder::Status::more : Utf8Decoder::Status::character)
          << static_cast<uint32_t>(character);
    }
    ASSERT_EQ(decoder.character(), character);
  }
}

TEST(Tokenizer, JsonGivesTheSameTokenizerBack) {
  const Tokenizer tokenizer = characters_of_text("hello w\u00f6rld\n");
  const Tokenizer again = Tokenizer::from_json(tokenizer.to_json(), "checkpoint");
  EXPECT_EQ(again.encode("hell\u00f6\n"), tokenizer.encode("hell\u00f6\n"));
  EXPECT_EQ(again.size(), tokenizer.size());
  EXPECT_EQ(Tokenizer::from_json(Tokenizer::bytes().to_json(), "checkpoint").kind(), TokenizerKind::byte);
}

TEST(Tokenizer, DamagedJsonIsRefused) {
  for (const char* bad : {"", R"({"type":"byte","type":"byte"})"})
    EXPECT_EQ(error_of([&] { Tokenizer::from_json(bad, "m"); }).code(), ExitCode::data);
  for (const char* characters : {"[]", "[5,5]", "[6,5]", "[-1]", "[55296]", "[1114112]", "[1.5]", "\"ab\"", "[4294967296]"}) {
    const std::string json = text(R"({"type":"char","characters":)", characters, '}');
    EXPECT_EQ(error_of([&] { Tokenizer::from_json(json, "manifest"); }).code(), ExitCode::data) << characters;
  }
}

TEST(Tokenizer, FilesOfOtherProgramsAreToldFromDamagedOnes) {
  const auto problem = [](const char* json) { return std::string(error_of([&] { Tokenizer::from_json(json, "t.json"); }).what()); };
  const std::string foreign = R"(t.json: not a tokenizer written by mantissa ({"type": "byte"} or {"type": "char", "characters": [...]}))";
  for (const char* json :
       {R"({"version":"1.0","model":{"type":"BPE","vocab":{}}})", R"({"type":"bpe"})", R"({"type":1})", R"(["byte"])", "5"})
    EXPECT_EQ(problem(json), foreign) << json;
  EXPECT_EQ(problem(R"({"type":"char","characters":[-1]})"), "t.json: characters[0]: must be 0 or more, got -1");
  EXPECT_EQ(problem(R"({"type":"char"})"), "t.json: characters: must hold at least one code point");
}

}  // namespace mantissa::data_tokenizer_test
