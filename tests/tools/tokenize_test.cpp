// The tokenize command. Its messages about mistakes are in tests/golden/errors/commands.txt.
#include <gmock/gmock.h>

#include "data/token_file.h"
#include "tool_commands.h"

namespace mantissa::tokenize_test {

using test::write_file;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class TokenizeTest : public ::testing::Test {
 protected:
  TokenizeTest() {
    write_file(folder_ / "a.txt", "abca");
    write_file(folder_ / "b.txt", "cb");
    write_file(folder_ / "d.jsonl", "{\"text\":\"ab\"}\n{\"text\":\"c\"}\n");
  }

  static std::string tokenize(const std::string& words, int exit_code = 0) {
    const test::CommandResult result = test::command_result(test::words_of("tokenize " + words));
    EXPECT_EQ(result.exit_code, exit_code) << words << '\n' << result.error;
    return exit_code == 0 ? result.output : result.error;
  }

  std::vector<int32_t> tokens(const std::string& name, int64_t vocab_size) const {
    const TokenFile file(folder_ / name, {.vocab_size = vocab_size});
    std::vector<int32_t> out(static_cast<size_t>(file.tokens()));
    file.read(0, file.tokens(), out.data());
    return out;
  }

  test::TemporaryFolder folder_;
  test::WorkingFolder here_{folder_.path()};
};

TEST_F(TokenizeTest, WritesMegatronFilesThatReadBack) {
  EXPECT_THAT(tokenize("--output out --append-eod --eod-id 256 *.txt d.jsonl"), HasSubstr("4 documents, 13 tokens, model.vocab_size 257"));
  EXPECT_THAT(tokens("out", 257), ElementsAre('a', 'b', 'c', 'a', 256, 'c', 'b', 256, 'a', 'b', 256, 'c', 256));
}

TEST_F(TokenizeTest, WritesLlmcFilesWithTheEndTokenInFront) {
  tokenize("--output out --format llmc --append-eod --eod-id 256 a.txt b.txt");
  EXPECT_THAT(tokens("out.bin", 257), ElementsAre(256, 'a', 'b', 'c', 'a', 256, 'c', 'b'));
}

TEST_F(TokenizeTest, CharacterVocabularyIsKeptAndCanBeUsedAgain) {
  tokenize("--tokenizer char --output train a.txt");
  EXPECT_THAT(tokens("train", 3), ElementsAre(0, 1, 2, 0));
  tokenize("--tokenizer char --vocabulary train.tokenizer.json --output valid b.txt");
  EXPECT_THAT(tokens("valid", 3), ElementsAre(2, 1));
}

TEST_F(TokenizeTest, FilesThatAreThereStay) {
  for (const std::string file : {"out.bin", "out.idx", "out.tokenizer.json"}) {
    write_file(file, "of something else");
    EXPECT_THAT(tokenize("--tokenizer char --output out a.txt", 2), HasSubstr(file + ": exists already"));
    EXPECT_EQ(test::read_file(file), "of something else");
    std::filesystem::remove(file);
  }
}

TEST_F(TokenizeTest, EndsDocumentsOnceAndLeavesEmptyOnesOut) {
  write_file("e.jsonl", "{\"text\": \"\"}\n{\"text\": \"ab\"}\n{\"text\": \"c\\n\"}\n");
  EXPECT_THAT(tokenize("--output out --format examples --append-eod --eod-id 10 e.jsonl"), HasSubstr("2 documents, 5 tokens"));
  EXPECT_EQ(test::read_file("out.jsonl"), "{\"tokens\":[97,98,10],\"mask\":[0,1,1]}\n{\"tokens\":[99,10],\"mask\":[0,1]}\n");
  tokenize("--output ids --append-eod --eod-id 10 e.jsonl");
  EXPECT_THAT(tokens("ids", 256), ElementsAre('a', 'b', 10, 'c', 10));
}

TEST_F(TokenizeTest, ReadsListsOfObjectsAndJsonAsTextWhereAsked) {
  write_file("list.json", "[\n  {\"text\": \"ab\"},\n  {\"text\": \"c\"}\n]\n");
  write_file("other.json", "{\"a\": 1}");
  EXPECT_THAT(tokenize("--output out list.json d.jsonl"), HasSubstr("4 documents, 6 tokens"));
  EXPECT_THAT(tokenize("--output other other.json", 4), HasSubstr("other.json, line 1: has none of the keys"));
  EXPECT_THAT(tokenize("--output other --input-format text other.json"), HasSubstr("1 document, 8 tokens"));
  EXPECT_THAT(tokenize("--output train --train-vocab 260 other.json", 4), HasSubstr("other.json, line 1: has none of the keys"));
  tokenize("--output train --train-vocab 260 --input-format text other.json");
  EXPECT_THAT(tokenize("--output examples --format examples --chat-template chatml list.json d.jsonl", 2),
              HasSubstr("--chat-template: renders \"messages\", which no input has"));
}

TEST_F(TokenizeTest, WarnsOfTokensThatAreThereTwice) {
  write_file("own.json", R"({"version": "1.0", "added_tokens": [{"id": 3, "content": "<s>", "special": true}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []},
    "post_processor": {"type": "RobertaProcessing", "cls": ["<s>", 3], "sep": ["c", 2]}})");
  write_file("pairs.jsonl", "{\"prompt\": \"<s>a\", \"completion\": \"b\"}\n");
  write_file("twice.jsonl", "{\"text\": \"<s>a\"}\n{\"text\": \"bc\"}\n{\"text\": \"<s>bc\"}\n");
  ::testing::internal::CaptureStderr();
  tokenize("--tokenizer own.json --output out --format examples twice.jsonl pairs.jsonl b.txt");
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("twice.jsonl: the begin token, which the tokenizer puts before each text, is also written out in 2 texts"));
  EXPECT_THAT(said, HasSubstr("twice.jsonl: the end token, which the tokenizer puts after each text, is also written out in 2 texts"));
  EXPECT_THAT(said, HasSubstr("pairs.jsonl: the begin token, which the tokenizer puts before each text, is also written out in 1 text,"));
  EXPECT_THAT(said, ::testing::Not(HasSubstr("b.txt")));
}

TEST_F(TokenizeTest, WritesExamplesThatKeepTheirMasks) {
  write_file("pairs.jsonl", "{\"prompt\": \"a\", \"completion\": \"bc\"}\n{\"prompt\": \"\", \"completion\": \"d\"}\n");
  tokenize("--output out --format examples --append-eod --eod-id 256 pairs.jsonl a.txt");
  EXPECT_EQ(test::read_file("out.jsonl"),
            "{\"tokens\":[97,98,99,256],\"mask\":[0,1,1,1]}\n{\"tokens\":[100,256],\"mask\":[0,1]}\n"
            "{\"tokens\":[97,98,99,97,256],\"mask\":[0,1,1,1,1]}\n");
  tokenize("--output again --format examples out.jsonl", 4);  // 256 is no byte
  write_file("ids.jsonl", "{\"tokens\":[97,98],\"mask\":[0,1]}\n");
  tokenize("--output again --format examples ids.jsonl");
  EXPECT_EQ(test::read_file("again.jsonl"), test::read_file("ids.jsonl"));
}

}  // namespace mantissa::tokenize_test
