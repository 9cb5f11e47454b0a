// A conversation from a tokenizer that was trained on it to the answer of the model, with the commands that a user runs.
#include <gmock/gmock.h>

#include "mantissa/data/tokenizer.h"
#include "mantissa/json/json.h"
#include "process.h"

namespace mantissa::chat_test {

using ::testing::HasSubstr;

class ChatTest : public ::testing::Test {
 protected:
  ChatTest() {
    test::write_file(folder_ / "chats.jsonl", conversation("Hi", "Hello there.") + conversation("Bye", "See you."));
    test::write_file(folder_ / "run.json",
                     R"({"model": {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 96,
      "max_position_embeddings": 64}, "precision": {"dtype": "fp32"}, "optimizer": {"lr": 5e-3}, "schedule": {"warmup_steps": 5},
      "training": {"steps": 60, "seq_len": 64, "micro_batch_size": 1, "grad_accum": 1}, "eval": {"interval": 0},
      "data": {"train": [{"path": "chats.jsonl"}], "valid": [{"path": "chats.jsonl"}], "tokenizer": "own.json", "chat_template": "chatml"},
      "logging": {"dir": "run"}})");
  }
  static std::string message(const std::string& role, const std::string& content) {
    return R"({"role": ")" + role + R"(", "content": ")" + content + "\"}";
  }
  static std::string asked(const std::string& user) { return "{\"messages\": [" + message("user", user) + "]}\n"; }
  static std::string conversation(const std::string& user, const std::string& assistant) {
    return "{\"messages\": [" + message("user", user) + ", " + message("assistant", assistant) + "]}\n";
  }
  std::string output(const std::vector<std::string>& arguments, int exit_code = 0) const {
    const auto result = test::run_mantissa(arguments, folder_.path());
    EXPECT_EQ(result.exit_code, exit_code) << result.errors;
    return exit_code == 0 ? result.output : result.errors;
  }

  test::TemporaryFolder folder_;
};

TEST_F(ChatTest, AModelAnswersWhatItLearnedAndStops) {
  output({"tokenize", "--train-vocab", "280", "--chat-template", "chatml", "--output", "own.json", "chats.jsonl"});
  output({"train", "run.json"});
  const std::vector<std::string> ask = {"--temperature", "0", "--max-new-tokens", "60", "--chat"};
  const auto answer = [&](std::vector<std::string> command, const std::string& lines) {
    test::write_file(folder_ / "ask.jsonl", lines);
    command.insert(command.end(), ask.begin(), ask.end());
    command.emplace_back("ask.jsonl");
    return output(command);
  };
  EXPECT_EQ(answer({"generate", "run"}, asked("Hi")), "Hello there.\n");
  EXPECT_EQ(answer({"generate", "run"}, asked("Bye") + asked("Hi")), "See you.\n---------------\nHello there.\n---------------\n");
  output({"export", "run", "--output", "export"});
  EXPECT_EQ(answer({"generate", "export", "--chat-template", "chatml"}, asked("Hi")), "Hello there.\n");

  EXPECT_THAT(output({"generate", "export", "--chat", "ask.jsonl"}, 2), HasSubstr("name its template with --chat-template: chatml, "));
  EXPECT_THAT(output({"generate", "run", "--chat", "ask.jsonl", "--chat-template", "llama3"}, 2),
              HasSubstr("--chat-template: llama3 needs the token <|begin_of_text|>, "));
  EXPECT_THAT(output({"generate", "run", "--chat", "ask.jsonl", "--chat-date", "today"}, 2), HasSubstr("--chat-date: is for"));
  test::write_file(folder_ / "export/generation_config.json", R"({"eos_token_id": 0})");
  EXPECT_EQ(answer({"generate", "export", "--chat-template", "chatml"}, "\n" + asked("Hi") + " \n"), "Hello there.\n")
      << "where the folder names another end, between blank lines";
  Json config = parse_json(test::read_file(folder_ / "export/config.json"), "config");
  config["eos_token_id"] = 0;
  test::write_file(folder_ / "export/config.json", config.dump());
  output({"train", "run.json", "--set", "checkpoint.init_from=export", "--set", "logging.dir=second", "--set", "training.steps=1"});
  output({"export", "second", "--output", "again"});
  output({"verify", "again", "--against", "second"});
  const int32_t end = Tokenizer::from_path(folder_ / "own.json").id_of("<|im_end|>").value();
  for (const char* const file : {"again/config.json", "again/generation_config.json"}) {
    EXPECT_EQ(parse_json(test::read_file(folder_ / file), "g").get("eos_token_id"), Json(Json::Entries{0, end}))
        << file << " names the end that was learned, too";
  }
  EXPECT_EQ(output({"generate", "second", "--temperature", "0", "--prompt", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"}),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello there.\n");
  EXPECT_THAT(output({"generate", "run", "--chat", "ask.jsonl", "--prompt", "a"}, 2), HasSubstr("--chat stands for prompts"));
  EXPECT_THAT(output({"generate", "run", "--chat-template", "chatml"}, 2), HasSubstr("--chat-template: goes with --chat"));
  for (const auto& [lines, says] : {std::pair{std::string("\n \n"), "ask.jsonl: has no conversation"},
                                    {asked(test::repeated("Hi ", 60)), "ask.jsonl, line 1: the conversation has "}}) {
    test::write_file(folder_ / "ask.jsonl", lines);
    EXPECT_THAT(output({"generate", "run", "--chat", "ask.jsonl"}, 2), HasSubstr(says));
  }
  EXPECT_THAT(output({"generate", "run", "--chat", "nothing.jsonl"}, 2), HasSubstr("nothing.jsonl"));
  EXPECT_THAT(output({"tokenize", "--train-vocab", "258", "--chat-template", "chatml", "--output", "b.json", "chats.jsonl"}, 2),
              HasSubstr("--train-vocab: must be from 259 to "));
  test::write_file(folder_ / "ask.jsonl", asked("Hi") + conversation("Hi", "Ho"));
  EXPECT_THAT(output({"generate", "run", "--chat", "ask.jsonl"}, 4),
              HasSubstr("ask.jsonl, line 2: messages: must end with a message of the user"));
}

TEST_F(ChatTest, WithoutATokenizerOfItsTemplateItIsRefused) {
  output({"train", "run.json", "--set", "data.tokenizer=byte", "--set", "data.chat_template=null", "--set",
          R"(data.train=[{"path": "run.json"}])", "--set", R"(data.valid=[{"path": "run.json"}])", "--set", "training.steps=1"});
  test::write_file(folder_ / "ask.jsonl", asked("Hi"));
  EXPECT_THAT(output({"generate", "run", "--chat", "ask.jsonl", "--chat-template", "qwen3"}, 2),
              HasSubstr("--chat-template: qwen3 needs the token <|im_start|>, which the tokenizer of "));
}

}  // namespace mantissa::chat_test
