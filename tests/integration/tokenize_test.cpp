// The tokenize command, run as a user runs it.
#include <gmock/gmock.h>

#include <filesystem>
#include <iterator>
#include <sstream>

#include "mantissa/data/token_file.h"
#include "process.h"

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

  // The arguments are separated by spaces.
  test::ProcessResult tokenize(const std::string& arguments) const {
    std::istringstream in("tokenize " + arguments);
    return test::run_mantissa({std::istream_iterator<std::string>(in), {}}, folder_.path());
  }

  std::vector<int32_t> tokens(const std::string& name, int64_t vocab_size) const {
    const TokenFile file(folder_ / name, {.vocab_size = vocab_size});
    std::vector<int32_t> out(static_cast<size_t>(file.tokens()));
    file.read(0, file.tokens(), out.data());
    return out;
  }

  test::TemporaryFolder folder_;
};

TEST_F(TokenizeTest, WritesMegatronFilesThatReadBack) {
  const test::ProcessResult outcome = tokenize("--output out --append-eod --eod-id 256 *.txt d.jsonl");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_THAT(outcome.output, HasSubstr("4 documents, 13 tokens, model.vocab_size 257"));
  EXPECT_THAT(tokens("out", 257), ElementsAre('a', 'b', 'c', 'a', 256, 'c', 'b', 256, 'a', 'b', 256, 'c', 256));
}

TEST_F(TokenizeTest, WritesLlmcFilesWithTheEndTokenInFront) {
  const test::ProcessResult outcome = tokenize("--output out --format llmc --append-eod --eod-id 256 a.txt b.txt");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_THAT(tokens("out.bin", 257), ElementsAre(256, 'a', 'b', 'c', 'a', 256, 'c', 'b'));
}

TEST_F(TokenizeTest, CharacterVocabularyIsKeptAndCanBeUsedAgain) {
  EXPECT_EQ(tokenize("--tokenizer char --output train a.txt").exit_code, 0);
  EXPECT_THAT(tokens("train", 3), ElementsAre(0, 1, 2, 0));
  EXPECT_EQ(tokenize("--tokenizer char --vocabulary train.tokenizer.json --output valid b.txt").exit_code, 0);
  EXPECT_THAT(tokens("valid", 3), ElementsAre(2, 1));
}

TEST_F(TokenizeTest, FilesThatAreThereStay) {
  for (const std::string file : {"out.bin", "out.idx", "out.tokenizer.json"}) {
    write_file(folder_ / file, "of something else");
    const test::ProcessResult outcome = tokenize("--tokenizer char --output out a.txt");
    EXPECT_EQ(outcome.exit_code, 2) << file;
    EXPECT_THAT(outcome.errors, HasSubstr(file + ": is there already"));
    EXPECT_EQ(test::read_file(folder_ / file), "of something else");
    std::filesystem::remove(folder_ / file);
  }
  EXPECT_EQ(tokenize("--tokenizer char --output out a.txt").exit_code, 0);
}

TEST_F(TokenizeTest, MistakesAreRefusedAndLeaveNothingBehind) {
  const auto names = [this] {
    std::vector<std::string> out;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) out.push_back(entry.path().filename());
    return out;
  };
  write_file(folder_ / "bad.txt", "ab\xff");
  write_file(folder_ / "chat.jsonl", R"({"messages": [{"role": "assistant", "content": "a"}]})");
  write_file(folder_ / "voc.json", R"({"type":"char","characters":[97]})");
  const auto before = names();
  const std::vector<std::tuple<const char*, int, const char*>> mistakes = {
      {"--output out none*.txt", 2, "matches no file"},
      {"--output no/such/out a.txt", 2, "there is no folder no/such"},
      {"--output out --append-eod a.txt", 2, "the next free id is 256"},
      {"--output out --append-eod --eod-id 300 a.txt", 2, "--eod-id"},
      {"--output out --format raw a.txt", 2, "--format"},
      {"--output out --vocabulary voc.json a.txt", 2, "--tokenizer char"},
      {"--output out --tokenizer char --vocabulary none.json a.txt", 2, "none.json"},
      {"--output out --tokenizer char --vocabulary voc.json a.txt", 4, "U+0062 'b'"},
      {"--output out --tokenizer char d.jsonl", 2, "--vocabulary"},
      {"--output out bad.txt", 4, "bad.txt"},
      {"--output out --format examples chat.jsonl", 2, "chat.jsonl, line 1 has \"messages\", which need a template"},
      {"--output out --format examples --chat-template chatml chat.jsonl", 2,
       "needs the token <|im_start|>, which the byte tokenizer lacks"},
      {"--output out --format examples --chat-template vicuna chat.jsonl", 2, "--chat-template"},
      {"a.txt", 2, "--output"},
      {"--output out", 2, "FILES"},
  };
  for (const auto& [arguments, code, message] : mistakes) {
    const test::ProcessResult outcome = tokenize(arguments);
    EXPECT_EQ(outcome.exit_code, code) << arguments << '\n' << outcome.errors;
    EXPECT_THAT(outcome.errors, HasSubstr(message)) << arguments;
    EXPECT_EQ(names(), before) << arguments;
  }
}

TEST_F(TokenizeTest, WritesExamplesThatKeepTheirMasks) {
  write_file(folder_ / "pairs.jsonl", "{\"prompt\": \"a\", \"completion\": \"bc\"}\n{\"prompt\": \"\", \"completion\": \"d\"}\n");
  EXPECT_EQ(tokenize("--output out --format examples --append-eod --eod-id 256 pairs.jsonl a.txt").exit_code, 0);
  const std::string written = test::read_file(folder_ / "out.jsonl");
  EXPECT_EQ(written,
            "{\"tokens\":[97,98,99,256],\"mask\":[0,1,1,1]}\n{\"tokens\":[100,256],\"mask\":[0,1]}\n"
            "{\"tokens\":[97,98,99,97,256],\"mask\":[0,1,1,1,1]}\n");
  EXPECT_EQ(tokenize("--output again --format examples out.jsonl").exit_code, 4) << "256 is no byte";
  write_file(folder_ / "ids.jsonl", "{\"tokens\":[97,98],\"mask\":[0,1]}\n");
  EXPECT_EQ(tokenize("--output again --format examples ids.jsonl").exit_code, 0);
  EXPECT_EQ(test::read_file(folder_ / "again.jsonl"), test::read_file(folder_ / "ids.jsonl"));
  for (const char* const format : {"megatron", "llmc"}) {
    const test::ProcessResult refused = tokenize(std::string("--output no --format ") + format + " pairs.jsonl");
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_THAT(refused.errors, HasSubstr("pairs.jsonl: has examples to fine-tune on, whose masks no file of Megatron or llm.c holds"));
  }
}

TEST_F(TokenizeTest, HelpShowsAnExample) {
  const test::ProcessResult outcome = tokenize("--help");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("mantissa tokenize --tokenizer byte"));
}

}  // namespace mantissa::tokenize_test
