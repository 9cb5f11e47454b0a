// A conversation from a tokenizer that was trained on it to the answer of the model.
#include <gmock/gmock.h>

#include "mantissa/data/tokenizer.h"
#include "mantissa/json/json.h"
#include "mantissa/train/train.h"
#include "tool_commands.h"

namespace mantissa::chat_test {

using test::write_file;
using ::testing::HasSubstr;
using Words = std::vector<std::string>;

std::string message(const std::string& role, const std::string& content) {
  return R"({"role": ")" + role + R"(", "content": ")" + content + "\"}";
}
std::string asked(const std::string& user) { return "{\"messages\": [" + message("user", user) + "]}\n"; }
std::string conversation(const std::string& user, const std::string& assistant) {
  return "{\"messages\": [" + message("user", user) + ", " + message("assistant", assistant) + "]}\n";
}

constexpr const char* kConfig =
    R"({"model": {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64},
  "precision": {"dtype": "fp32"}, "optimizer": {"lr": 5e-3}, "schedule": {"warmup_steps": 5},
  "training": {"steps": 60, "seq_len": 64, "micro_batch_size": 1, "grad_accum": 1}, "eval": {"interval": 0},
  "data": {"train": [{"path": "chats.jsonl"}], "valid": [{"path": "chats.jsonl"}], "tokenizer": "own.json", "chat_template": "chatml"},
  "logging": {"dir": "run"}})";

// The message of an error, else what is printed.
std::string output(const Words& words, int exit_code = 0) {
  const test::CommandResult result = test::command_result(words);
  EXPECT_EQ(result.exit_code, exit_code) << result.error;
  return exit_code == 0 ? result.output : result.error;
}

// The likeliest answer.
std::string answer(Words command, const std::string& lines, int exit_code = 0) {
  write_file("ask.jsonl", lines);
  command.insert(command.begin(), "generate");
  command.insert(command.end(), {"--temperature", "0", "--max-new-tokens", "60", "--chat", "ask.jsonl"});
  return output(command, exit_code);
}

TEST(Chat, AModelAnswersWhatItLearnedAndStops) {
  const test::TemporaryFolder folder;
  const test::WorkingFolder here(folder.path());
  write_file("chats.jsonl", conversation("Hi", "Hello there.") + conversation("Bye", "See you."));
  write_file("run.json", kConfig);
  output({"tokenize", "--train-vocab", "280", "--chat-template", "chatml", "--output", "own.json", "chats.jsonl"});
  train(load_run_config({.file = "run.json"}), {"test"}, {});
  EXPECT_EQ(answer({"run"}, asked("Bye") + asked("Hi")), "See you.\n---------------\nHello there.\n---------------\n");

  const std::tuple<Words, std::string, const char*> mistakes[] = {
      {{"run", "--chat-template", "llama3"}, asked("Hi"), "--chat-template: llama3 needs the token <|begin_of_text|>, "},
      {{"run", "--chat-date", "today"}, asked("Hi"), "--chat-date: is for"},
      {{"run"}, "\n \n", "ask.jsonl: has no conversation"},
      {{"run"}, asked(test::repeated("Hi ", 60)), "ask.jsonl, line 1: the conversation has "}};
  for (const auto& [words, lines, says] : mistakes) EXPECT_THAT(answer(words, lines, 2), HasSubstr(says));
  EXPECT_THAT(answer({"run"}, asked("Hi") + conversation("Hi", "Ho"), 4),
              HasSubstr("ask.jsonl, line 2: messages: must end with a message of the user"));

  // An export that names another end, between blank lines.
  output({"export", "run", "--output", "export"});
  write_file("export/generation_config.json", R"({"eos_token_id": 0})");
  EXPECT_EQ(answer({"export", "--chat-template", "chatml"}, "\n" + asked("Hi") + " \n"), "Hello there.\n");
  EXPECT_THAT(answer({"export"}, asked("Hi"), 2), HasSubstr("name its template with --chat-template: chatml, "));
  Json config = parse_json(test::read_file("export/config.json"), "config");
  config["eos_token_id"] = 0;
  write_file("export/config.json", config.dump());
  train(load_run_config({.file = "run.json", .sets = {"checkpoint.init_from=export", "logging.dir=second", "training.steps=1"}}), {"test"},
        {});
  output({"export", "second", "--output", "again"});
  output({"verify", "again", "--against", "second"});
  const int32_t end = Tokenizer::from_path("own.json").id_of("<|im_end|>").value();
  for (const char* const file : {"again/config.json", "again/generation_config.json"}) {
    EXPECT_EQ(parse_json(test::read_file(file), "g").get("eos_token_id"), Json(Json::Entries{0, end}))
        << file << " names the end that was learned, too";
  }
  const std::string prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
  EXPECT_EQ(output({"generate", "second", "--temperature", "0", "--prompt", prompt}), prompt + "Hello there.\n");
}

}  // namespace mantissa::chat_test
