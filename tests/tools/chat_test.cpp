// A conversation from a tokenizer that was trained on it to the answer of the model.
#include <gmock/gmock.h>

#include <iostream>
#include <sstream>

#include "data/tokenizer.h"
#include "mantissa/base/log.h"
#include "mantissa/data/chat_template.h"
#include "mantissa/json/json.h"
#include "mantissa/train/train.h"
#include "tool_commands.h"

namespace mantissa::chat_test {

using test::write_file;
using ::testing::HasSubstr;
using ::testing::Not;
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
  EXPECT_EQ(answer({"run"}, "[" + asked("Bye") + ",\n" + asked("Hi") + "]"), "See you.\n---------------\nHello there.\n---------------\n")
      << "a list of them";

  const std::tuple<Words, std::string, const char*> mistakes[] = {
      {{"run", "--chat-template", "llama3"}, asked("Hi"), "--chat-template: llama3 needs the token <|begin_of_text|>, "},
      {{"run", "--chat-date", "today"}, asked("Hi"), "--chat-date: applies to"},
      {{"run"}, "\n \n", "ask.jsonl: has no conversation"},
      {{"run"}, asked(test::repeated("Hi ", 60)), "ask.jsonl, line 1: the conversation has "}};
  for (const auto& [words, lines, says] : mistakes) EXPECT_THAT(answer(words, lines, 2), HasSubstr(says));
  EXPECT_THAT(answer({"run"}, asked("Hi") + conversation("Hi", "Ho"), 4),
              HasSubstr("ask.jsonl, line 2: messages: must end with a message of the user"));

  // An export that names another end, between blank lines.
  output({"export", "run", "--output", "export"});
  write_file("export/generation_config.json", R"({"eos_token_id": 0})");
  EXPECT_EQ(answer({"export", "--chat-template", "chatml"}, "\n" + asked("Hi") + " \n"), "Hello there.\n");
  EXPECT_THAT(answer({"export"}, asked("Hi"), 2), HasSubstr("give it with --chat-template: chatml, "));
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

// A folder of a step of training on conversations, "export", and its tokenizer.
class ChatFolder : public ::testing::Test {
 protected:
  ChatFolder() {
    write_file("chats.jsonl", conversation("Hi", "Hello there.") + conversation("Bye", "See you."));
    write_file("run.json", kConfig);
    output({"tokenize", "--train-vocab", "280", "--chat-template", "chatml", "--output", "own.json", "chats.jsonl"});
    trained("run", {});
    exported_ = output({"export", "run", "--output", "export"});
  }
  // Returns the log.
  static std::string trained(const std::string& name, const Words& sets) {
    // Room for the system message of qwen2.5.
    Words all = {"training.steps=1", "logging.dir=" + name, "model.max_position_embeddings=128", "training.seq_len=128"};
    all.insert(all.end(), sets.begin(), sets.end());
    open_log({.console = false, .file = name + ".log"});
    train(load_run_config({.file = "run.json", .sets = all}), {"test"}, {});
    close_log();
    return test::read_file(name + ".log");
  }
  // Standard error of a command that succeeds.
  static std::string told(const Words& words) {
    ::testing::internal::CaptureStderr();
    output(words);
    close_log();
    return ::testing::internal::GetCapturedStderr();
  }

  const test::TemporaryFolder folder_;
  const test::WorkingFolder here_{folder_.path()};
  std::string exported_;
};

constexpr const char* kOther = "{% for m in messages %}{{ '<|user|>' + m.content }}{% endfor %}";

TEST_F(ChatFolder, HasTheTemplateThatWasTrained) {
  const std::string own = chat_template_text(ChatTemplate::chatml, {});
  EXPECT_EQ(test::read_file("export/chat_template.jinja"), own) << "there was none";
  EXPECT_THAT(exported_, HasSubstr("\nexport: chat template chatml, which was trained\n"));
  EXPECT_THAT(trained("alike", {"checkpoint.init_from=export"}), Not(HasSubstr("chat_template.jinja")));

  write_file("export/chat_template.jinja", kOther);
  write_file("export/tokenizer_config.json", R"({"eos_token": "<|endoftext|>", "chat_template": "x"})");
  const std::string differs = "export: its chat_template.jinja renders [{";
  EXPECT_THAT(trained("second", {"checkpoint.init_from=export"}), HasSubstr(differs));
  EXPECT_THAT(output({"export", "second", "--output", "again"}),
              HasSubstr("\nagain: chat template chatml, which was trained, in the place of the model's: its chat_template.jinja renders"));
  EXPECT_EQ(test::read_file("again/chat_template.jinja"), own);
  EXPECT_FALSE(parse_json(test::read_file("again/tokenizer_config.json"), "again").contains("chat_template"));
  output({"verify", "again", "--against", "second"});
  EXPECT_THAT(trained("exports", {"checkpoint.init_from=export", "checkpoint.export={}"}),
              HasSubstr("checkpoint.export: chat template chatml, which was trained, in the place of"));
  EXPECT_EQ(test::read_file("exports/exports/step-00000001/chat_template.jinja"), own);

  write_file("export/chat_template.jinja", own + "{# with tools #}");
  trained("third", {"checkpoint.init_from=export"});
  EXPECT_THAT(output({"export", "third", "--output", "kept"}), Not(HasSubstr("chat template")));
  EXPECT_EQ(test::read_file("kept/chat_template.jinja"), own + "{# with tools #}") << "it renders the same and may do more";
}

// Readers ask generation_config.json first, and config.json where that names no end token.
TEST_F(ChatFolder, BothFilesNameTheEndTokensOfTheModelAndTheEndThatWasLearned) {
  Json config = parse_json(test::read_file("export/config.json"), "config");
  config["eos_token_id"] = 0;
  write_file("export/config.json", config.dump());
  write_file("export/generation_config.json", "{}");
  trained("second", {"checkpoint.init_from=export"});
  output({"export", "second", "--output", "again"});
  const int32_t end = Tokenizer::from_path("own.json").id_of("<|im_end|>").value();
  for (const char* const file : {"again/config.json", "again/generation_config.json"})
    EXPECT_EQ(parse_json(test::read_file(file), file).get("eos_token_id"), Json(Json::Entries{0, end})) << file;
  // The end tokens that the files of a model name stay if nothing was learned.
  write_file("texts.jsonl", R"({"text": "Hello there. See you."})"
                            "\n");
  const Words texts = {R"(data={"train": [{"path": "texts.jsonl"}], "valid": [{"path": "texts.jsonl"}]})", "training.seq_len=4"};
  Words sets = {"checkpoint.init_from=export"};
  sets.insert(sets.end(), texts.begin(), texts.end());
  trained("plain", sets);
  output({"export", "plain", "--output", "plain-export"});
  EXPECT_EQ(test::read_file("plain-export/generation_config.json"), "{}");
  EXPECT_EQ(parse_json(test::read_file("plain-export/config.json"), "c").get("eos_token_id"), Json(0));
  // An end token that was appended to each text was learned, too.
  sets.emplace_back("data.append_eod=true");
  sets.emplace_back("data.eod_id=7");
  trained("ends", sets);
  output({"export", "ends", "--output", "ends-export"});
  for (const char* const file : {"ends-export/config.json", "ends-export/generation_config.json"})
    EXPECT_EQ(parse_json(test::read_file(file), file).get("eos_token_id"), Json(Json::Entries{0, 7})) << file;
}

TEST_F(ChatFolder, AnotherTemplateThanTheModelsIsTold) {
  write_file("ask.jsonl", asked("Hi"));
  write_file("export/chat_template.jinja", kOther);
  const Words generate = {"generate", "export", "--chat", "ask.jsonl", "--max-new-tokens", "1", "--chat-template"},
              eval = {"eval", "export", "--data", "chats.jsonl", "--chat-template"};
  for (Words words : {generate, eval}) {
    words.emplace_back("chatml");
    EXPECT_THAT(told(words), HasSubstr("export: its chat_template.jinja renders [{"));
    words.back() = "qwen2.5";
    words[1] = "run";
    EXPECT_THAT(told(words), HasSubstr("was trained with data.chat_template chatml, not with qwen2.5"));
    words.back() = "chatml";
    EXPECT_EQ(told(words), "");
  }
  const Words tokenize = {"tokenize", "--format", "examples",    "--tokenizer",     "export",
                          "--output", "examples", "chats.jsonl", "--chat-template", "chatml"};
  EXPECT_THAT(told(tokenize), HasSubstr("export: its chat_template.jinja renders [{"));
  EXPECT_THAT(trained("qwen", {"checkpoint.init_from=run", "data.chat_template=qwen2.5"}),
              HasSubstr("was trained with data.chat_template chatml, but this run has qwen2.5"));
  EXPECT_THAT(trained("same", {"checkpoint.init_from=run"}), Not(HasSubstr("was trained with")));
}

// The older places of a template count where no chat_template.jinja is there.
TEST_F(ChatFolder, TheTemplateMayLieInTheOtherFiles) {
  write_file("ask.jsonl", asked("Hi"));
  std::filesystem::remove("export/chat_template.jinja");
  for (const std::string name : {"chat_template.json", "tokenizer_config.json"}) {
    const Json content = {{"eos_token", "<|endoftext|>"}, {"chat_template", kOther}};
    write_file("export/" + name, content.dump());
    const std::string says = "its " + name + " renders [{";
    EXPECT_THAT(told({"generate", "export", "--chat", "ask.jsonl", "--max-new-tokens", "1", "--chat-template", "chatml"}),
                HasSubstr("export: " + says));
    EXPECT_THAT(told({"eval", "export", "--data", "chats.jsonl", "--chat-template", "chatml"}), HasSubstr("export: " + says));
    for (const char* const tokenizer : {"export", "export/tokenizer.json"}) {
      EXPECT_THAT(told({"tokenize", "--format", "examples", "--tokenizer", tokenizer, "--output", "examples", "chats.jsonl",
                        "--chat-template", "chatml"}),
                  HasSubstr(says))
          << tokenizer;
      for (const auto& entry : std::filesystem::directory_iterator("."))
        if (entry.path().filename().string().starts_with("examples")) std::filesystem::remove_all(entry.path());
    }
    EXPECT_THAT(trained("from-" + name, {"checkpoint.init_from=export"}), HasSubstr("export: " + says));
    std::filesystem::remove("export/" + name);
  }
  // A checkpoint keeps the template of its folder for those who train conversations later.
  write_file("export/chat_template.jinja", kOther);
  write_file("texts.jsonl", R"({"text": "Hello there. See you."})"
                            "\n");
  trained("texts", {"checkpoint.init_from=export", "training.seq_len=4",
                    R"(data={"train": [{"path": "texts.jsonl"}], "valid": [{"path": "texts.jsonl"}]})"});
  EXPECT_THAT(trained("chats", {"checkpoint.init_from=texts"}), HasSubstr("its chat_template.jinja renders [{"));
}

// A folder whose template tells a date is compared at the date of the command or of the run.
TEST_F(ChatFolder, TemplatesAreComparedAtOneDate) {
  output({"tokenize", "--train-vocab", "300", "--chat-template", "llama3", "--output", "dated.json", "chats.jsonl"});
  const Words dated = {"data.tokenizer=dated.json", "data.chat_template=llama3", "model.max_position_embeddings=384",
                       "training.seq_len=384"};
  const auto with = [&](const Words& more) {
    Words all = dated;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  trained("dated", with({"data.chat_date=1 May 2026"}));
  output({"export", "dated", "--output", "dated-export"});
  write_file("ask.jsonl", asked("Hi"));
  const Words generate = {"generate", "dated-export", "--chat", "ask.jsonl", "--max-new-tokens", "1", "--chat-template", "llama3"};
  EXPECT_THAT(told(generate), HasSubstr("its chat_template.jinja renders [{")) << "by its own date";
  Words later = generate;
  later.insert(later.end(), {"--chat-date", "2 May 2026"});
  EXPECT_EQ(told(later), "");
  EXPECT_THAT(trained("other", with({"checkpoint.init_from=dated-export"})), HasSubstr("its chat_template.jinja renders [{"));
  EXPECT_THAT(trained("same", with({"checkpoint.init_from=dated-export", "data.chat_date=2 May 2026"})),
              Not(HasSubstr("chat_template.jinja")));
}

TEST_F(ChatFolder, ConversationsAndPromptsComeFromStandardInput) {
  const auto from_input = [](const std::string& input, const Words& words, int exit_code = 0) {
    std::istringstream text(input);
    std::streambuf* const before = std::cin.rdbuf(text.rdbuf());
    const std::string out = output(words, exit_code);
    std::cin.rdbuf(before);
    std::cin.clear();
    return out;
  };
  const Words greedy = {"generate", "run", "--temperature", "0", "--max-new-tokens", "5"};
  const auto with = [&](const Words& more) {
    Words all = greedy;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const std::string lines = asked("Bye") + "\n" + asked("Hi");
  write_file("ask.jsonl", lines);
  EXPECT_EQ(from_input(lines, with({"--chat", "-"})), output(with({"--chat", "ask.jsonl"})));
  EXPECT_EQ(from_input(lines.substr(0, lines.size() - 1), with({"--chat", "-"})), output(with({"--chat", "ask.jsonl"})))
      << "without the last line end";
  const std::string list = "[" + asked("Bye") + ",\n" + asked("Hi") + "]";
  for (const std::string& input : {list, "\n \n" + list, std::string(100'000, ' ') + list + "\n"})
    EXPECT_EQ(from_input(input, with({"--chat", "-"})), output(with({"--chat", "ask.jsonl"}))) << input.size();
  EXPECT_THAT(from_input("[" + asked("Hi") + ", 1]", with({"--chat", "-"}), 4), HasSubstr("standard input"));
  EXPECT_EQ(from_input("a\nb\n", with({"--prompts", "-"})), output(with({"--prompt", "a", "--prompt", "b"})));
  EXPECT_THAT(from_input("\n" + conversation("Hi", "Ho"), with({"--chat", "-"}), 4),
              HasSubstr("standard input, line 2: messages: must end"));
  EXPECT_THAT(from_input(test::repeated("a\n", 40000) + "\n", with({"--prompts", "-"}), 2), HasSubstr("standard input:40001: is empty"));
  EXPECT_THAT(from_input("", with({"--chat", "-"}), 2), HasSubstr("standard input: has no conversation"));
  EXPECT_THAT(from_input("", with({"--prompts", "-"}), 2), HasSubstr("standard input: is empty"));
}

TEST_F(ChatFolder, SamplingIsThatOfTheModelUnlessOptionsSayOtherwise) {
  const Words generate = {"generate", "export", "--prompt", "Hi", "--max-new-tokens", "20", "--seed", "5"};
  const auto with = [&](const Words& more) {
    Words all = generate;
    all.insert(all.end(), more.begin(), more.end());
    return output(all);
  };
  const std::string greedy = with({"--temperature", "0"}), usual = with({});
  EXPECT_EQ(usual, with({"--temperature", "0.8", "--top-k", "50", "--top-p", "1"}));
  ASSERT_NE(usual, greedy);
  for (const char* const likeliest :
       {R"({"do_sample": true, "top_k": 1})", R"({"do_sample": true, "temperature": 0})", R"({"do_sample": true, "top_p": 1e-9})"}) {
    write_file("export/generation_config.json", likeliest);
    EXPECT_EQ(with({}), greedy) << likeliest;
    EXPECT_EQ(with({"--temperature", "0.8", "--top-k", "50", "--top-p", "1"}), usual) << likeliest;
  }
  write_file("export/generation_config.json", R"({"do_sample": true, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})");
  EXPECT_EQ(told(generate),
            "export: generation_config.json: temperature 0.6, top-k 20\n"
            "export: generation_config.json: not used here: repetition_penalty = 1.1\n");
  Words cooler = generate;
  cooler.insert(cooler.end(), {"--temperature", "0.5"});
  EXPECT_EQ(told(cooler),
            "export: generation_config.json: top-k 20\n"
            "export: generation_config.json: not used here: repetition_penalty = 1.1\n");
  write_file("export/generation_config.json", R"({"do_sample": true, "temperature": -1})");
  EXPECT_THAT(output(generate, 4), HasSubstr("export: generation_config.json: temperature"));
  write_file("export/generation_config.json", R"({"temperature": -1})");
  EXPECT_EQ(with({}), usual);
  // Before generation_config.json was, its keys stood in config.json.
  Json config = parse_json(test::read_file("export/config.json"), "config");
  config["do_sample"] = true;
  config["top_k"] = 1;
  config["num_beams"] = 4;
  write_file("export/config.json", config.dump());
  EXPECT_EQ(with({}), usual) << "the newer file alone counts";
  std::filesystem::remove("export/generation_config.json");
  EXPECT_EQ(with({}), greedy);
  EXPECT_EQ(told(generate), "export: config.json: top-k 1\nexport: config.json: not used here: num_beams = 4\n");
}

TEST_F(ChatFolder, EvalTakesTheWindowOfTheRun) {
  trained("short", {"training.seq_len=64"});
  EXPECT_THAT(output({"eval", "short"}), HasSubstr(" | seq_len 64\n"));
  EXPECT_THAT(output({"eval", "short", "--seq-len", "80"}), HasSubstr(" | seq_len 80\n"));
}

// Which examples the last rows have depends on the length of a row and on the template: others would be scored that were trained on.
TEST(Chat, ExamplesThatARunHoldsOutAreThoseOfItsOwnRows) {
  const test::TemporaryFolder folder;
  const test::WorkingFolder here(folder.path());
  std::string lines;
  for (int i = 0; i < 40; ++i) lines += conversation(test::repeated("Hi ", 1 + static_cast<size_t>(i * 7 % 10)), "Hello there.");
  write_file("chats.jsonl", lines);
  write_file("run.json", kConfig);
  output({"tokenize", "--train-vocab", "280", "--chat-template", "chatml", "--output", "own.json", "chats.jsonl"});
  train(load_run_config({.file = "run.json", .sets = {"data.train=[]", "data.valid=[]", "data.path=chats.jsonl", "training.steps=1"}}),
        {"test"}, {});
  const std::string own = output({"eval", "run"});
  EXPECT_THAT(own, HasSubstr(" | seq_len 64\n"));
  EXPECT_EQ(output({"eval", "run", "--seq-len", "64", "--chat-template", "chatml"}), own);
  EXPECT_THAT(output({"eval", "run", "--seq-len", "48"}, 2), HasSubstr("--seq-len: the run holds out the examples"));
  EXPECT_THAT(output({"eval", "run", "--chat-template", "qwen2.5"}, 2), HasSubstr("--chat-template: the run holds out the examples"));
  EXPECT_THAT(output({"eval", "run", "--seq-len", "48", "--data", "chats.jsonl"}), HasSubstr(" | seq_len 48\n"));
}

// Conversations that were rendered before are prompts and completions, whose special tokens are these tokens in training, too.
TEST(Chat, ARenderedPromptIsAnsweredAsItWasTrained) {
  const test::TemporaryFolder folder;
  const test::WorkingFolder here(folder.path());
  const auto prompt = [](const std::string& user) { return "<|im_start|>user\n" + user + "<|im_end|>\n<|im_start|>assistant\n"; };
  const auto pair = [&](const std::string& user, const std::string& assistant) {
    return Json{{"prompt", prompt(user)}, {"completion", assistant + "<|im_end|>"}}.dump() + "\n";
  };
  write_file("chats.jsonl", pair("Hi", "Hello there.") + pair("Bye", "See you."));
  write_file("run.json", kConfig);
  output({"tokenize", "--train-vocab", "280", "--chat-template", "chatml", "--output", "own.json", "chats.jsonl"});
  train(load_run_config({.file = "run.json", .sets = {"data.chat_template=null", "data.append_eod=true"}}), {"test"}, {});
  for (const auto& [user, answer] : {std::pair{"Hi", "Hello there.\n"}, {"Bye", "See you.\n"}})
    EXPECT_EQ(output({"generate", "run", "--temperature", "0", "--max-new-tokens", "20", "--prompt", prompt(user)}), prompt(user) + answer);
}

}  // namespace mantissa::chat_test
