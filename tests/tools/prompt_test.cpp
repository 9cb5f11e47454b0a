// generate refuses prompts, and warns of them, before it prints anything; eval warns of its data.
#include <gmock/gmock.h>

#include "shared_run.h"
#include "tokenizer_files.h"
#include "tool_commands.h"

namespace mantissa::prompt_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Words = std::vector<std::string>;

// A run of one step whose tokenizer puts <s> before a text and knows the letters a, b and c, and one whose tokenizer puts nothing there.
// The models have 16 positions.
class PromptTest : public ::testing::Test {
 protected:
  struct Outcome {
    int exit_code;
    std::string output, error, log;
  };

  static void SetUpTestSuite() {
    folder_ = std::make_unique<test::TemporaryFolder>();
    const std::string plain = R"({"version": "1.0", "added_tokens": [{"id": 3, "content": "<s>", "special": true}],
      "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []}, "post_processor": null})";
    test::write_file(*folder_ / "plain.json", plain);
    test::write_file(*folder_ / "begins.json", test::replaced(plain, "null", R"({"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}], "special_tokens": {"<s>": {"ids": [3]}}})"));
    shared_ = std::make_unique<test::SharedRun>(Words{"training.steps=1", "data.tokenizer=" + (*folder_ / "begins.json")});
    plain_ = std::make_unique<test::SharedRun>(Words{"training.steps=1", "data.tokenizer=" + (*folder_ / "plain.json")});
  }
  static void TearDownTestSuite() {
    plain_.reset();
    shared_.reset();
    folder_.reset();
  }
  static Outcome generate(Words words, const test::SharedRun& run = *shared_) {
    words.insert(words.begin(), {"generate", run.path(), "--temperature", "0"});
    if (std::ranges::find(words, "--max-new-tokens") == words.end()) words.insert(words.end(), {"--max-new-tokens", "2"});
    return outcome(words);
  }
  static Outcome outcome(const Words& words) {
    ::testing::internal::CaptureStderr();
    const test::CommandResult result = test::command_result(words);
    return {result.exit_code, result.output, result.error, ::testing::internal::GetCapturedStderr()};
  }

  static inline std::unique_ptr<test::TemporaryFolder> folder_;
  static inline std::unique_ptr<test::SharedRun> shared_, plain_;
};

TEST_F(PromptTest, ARefusedPromptIsNotPrinted) {
  const Outcome many = generate({"--prompt", "abc", "--max-new-tokens", "99999999999"});
  EXPECT_EQ(many.exit_code, 2);
  EXPECT_THAT(many.error, HasSubstr("--max-new-tokens: must be from 1 to 16777216, got 99999999999"));
  EXPECT_THAT(many.output, IsEmpty());
  const Outcome none = generate({"--prompt", "xyz"}, *plain_);
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_THAT(none.error, HasSubstr("generation: the prompt is empty")) << "of letters that the tokenizer lacks";
  EXPECT_THAT(none.output, IsEmpty());
}

// All are checked before the first is continued, however many are continued at once.
TEST_F(PromptTest, NothingIsPrintedIfTheLastOfManyIsRefused) {
  test::write_file(*folder_ / "many.txt", test::repeated("abc\n", 64) + "xyz\n");
  const Outcome many = generate({"--prompts", *folder_ / "many.txt"}, *plain_);
  EXPECT_EQ(many.exit_code, 2);
  EXPECT_THAT(many.error, HasSubstr("generation: the prompt is empty"));
  EXPECT_THAT(many.output, IsEmpty());
}

TEST_F(PromptTest, ABeginTokenThatIsThereTwiceIsAWarning) {
  const std::string says = ": the begin token, which the tokenizer puts before each text, is also written out in 1 text";
  EXPECT_THAT(generate({"--prompt", "<s>ab"}).log, HasSubstr("--prompt" + says));
  EXPECT_THAT(generate({"--prompt", "ab<s>"}).log, Not(HasSubstr(says)));
  EXPECT_THAT(generate({"--prompt-ids", "3,3,1"}).log, Not(HasSubstr(says))) << "ids are as they are";
  test::write_file(*folder_ / "prompts.txt", "a\n<s>b\n");
  EXPECT_THAT(generate({"--prompts", *folder_ / "prompts.txt"}).log, HasSubstr("prompts.txt:2" + says));
}

TEST_F(PromptTest, APromptBeyondTheContextIsAWarning) {
  const std::string fits(15, 'a');  // and the begin token
  EXPECT_THAT(generate({"--prompt", fits}).log, IsEmpty());
  const Outcome cut = generate({"--prompt", fits + "b"});
  EXPECT_EQ(cut.exit_code, 0);
  EXPECT_THAT(cut.log, HasSubstr("--prompt: the prompt has 17 tokens, but the model has 16 positions: only the last 8 are read"));
  EXPECT_THAT(generate({"--prompt-ids", "1" + test::repeated(",1", 16)}).log, HasSubstr("--prompt-ids: the prompt has 17 tokens"));
}

TEST_F(PromptTest, EvaluatedDataHaveTheWarningsOfTraining) {
  const auto told = [](const std::string& lines, const Words& more = {}) {
    test::write_file(*folder_ / "data.jsonl", lines);
    Words words = {"eval", shared_->path(), "--data", *folder_ / "data.jsonl"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome run = outcome(words);
    EXPECT_EQ(run.exit_code, 0) << run.error;
    return run.log;
  };
  EXPECT_THAT(told("{\"text\": \"<s>ab\"}\n{\"text\": \"abc\"}\n"),
              HasSubstr("data.jsonl: the begin token, which the tokenizer puts before each text, is also written out in 1 text"));
  EXPECT_THAT(told("{\"text\": \"abc\"}\n"), Not(HasSubstr("begin token")));
  const std::string example = R"({"tokens": [0, 1, 2, 0, 1, 2], "mask": [0, 1, 1, 1, 1, 1]})";
  EXPECT_THAT(told(example, {"--seq-len", "4"}),
              HasSubstr("data.jsonl: the ends of 1 of 1 example, beyond --seq-len, are cut off, with 2 of 5 targets"));
  EXPECT_THAT(told(example), Not(HasSubstr("cut off")));
}

}  // namespace mantissa::prompt_test
