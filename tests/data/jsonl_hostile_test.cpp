// JSONL that is wrong, in every way that its forms can be. A refusal names file, line, key and reason; the code is that of data, or that of
// usage where the configuration lacks what the line needs.
#include <gmock/gmock.h>

#include <chrono>
#include <sstream>

#include "data/token_file.h"
#include "error_messages.h"
#include "files.h"
#include "hang.h"

namespace mantissa::jsonl_hostile_test {

using test::error_of;
using test::write_file;
using ::testing::HasSubstr;

struct Hostile {
  std::string content;
  std::string says;  // after the name of the file
  ExitCode code = ExitCode::data;
};

const std::string kTokens = R"({"tokens": [1, 2], "mask": [0, 1]})";
const std::string kPair = R"({"prompt": "a", "completion": "b"})";

std::string nested(const std::string& open, const std::string& close, int levels) {
  std::string out;
  for (int i = 0; i < levels; ++i) out += open;
  for (int i = 0; i < levels; ++i) out += close;
  return out;
}

std::vector<Hostile> broken_json() {
  std::vector<Hostile> all = {{"{", ", line 1, column "},
                              {"\n\n{\n", ", line 3, column "},
                              {"{\n  \"text\": \"a\"\n}\n", ", line 1, column 2: "},
                              {kTokens + "\n" + kTokens + "x\n", ", line 2, column 35"},
                              {std::string("{\"text\":\"a\0b\"}", 14), ", line 1, column "},
                              {std::string(200, '\0'), ", line 1, column 1"},
                              {nested("[", "]", 100'000), ", line 1, column "},
                              {nested("{\"a\":", "}", 100'000), ", line 1, column "}};
  std::istringstream lines(
      R"(} ] , : " 'a' nul +1 01 1. .5 1e 0x10 NaN Infinity - {] [} {"a"} {"a":} {"a":1,} {a:1} {'a':1} {"a""b"} //{} /**/{}
                              {}{} {}x "\x" "\u12" {"tokens":[1,],"mask":[1]} {"text":"a","text":"b"} <html> a,b,c)");
  for (std::string line; lines >> line;) all.push_back({line, ", line 1, column "});
  for (const char* const line : {"{\"a\":1 \"b\":2}", "\"\t\"", "\xff", "\"\xc3\"", "\"\xed\xa0\x80\"", "\xef\xbb\xbf{}"})
    all.push_back({line, ", line 1, column "});
  return all;
}

std::vector<Hostile> no_form() {
  const std::string keys = R"(has none of the keys "text", "tokens", "completion", "messages")";
  std::vector<Hostile> all = {
      {R"({})", ", line 1: " + keys},
      {R"({"prompt": "a"})", ", line 1: " + keys},
      {R"({"Messages": []})", ", line 1: " + keys},
      {R"({"mask": [1]})", ", line 1: " + keys},
      {R"({"instruction": "a", "output": "b"})", ", line 1: " + keys},
      {R"({"text": "a", "tokens": [1]})", R"(, line 1: has both "text" and "tokens", but may have only one of them)"},
      {R"({"completion": "a", "messages": []})", R"(, line 1: has both "completion" and "messages", but)"},
      {kTokens + "\n" + kPair, R"(, line 2: has "completion", but the lines before have "tokens")"},
      {kPair + "\n\n" + R"({"text": "a"})", R"(, line 3: has "text", but the lines before have "completion")"},
      {kPair + "\n{}", ", line 2: " + keys}};
  for (const char* const line : {"1", "null", "true", "\"text\""}) all.push_back({line, ", line 1: must be an object, got "});
  return all;
}

std::vector<Hostile> wrong_lists() {
  const std::string no_end = ": the list that the file begins with is not closed";
  return {{"[", no_end},
          {"[ \n", no_end},
          {"[" + kPair, no_end},
          {"[" + kPair + ",\n", no_end},
          {"[" + kPair + ", {\"te", ", line 1, column 39: "},
          {"[,]", ", line 1, column 2: an entry is missing"},
          {"[\n" + kPair + ",]", ", line 2, column 36: an entry is missing"},
          {"[" + kPair + ",," + kPair + "]", ", line 1, column 37: an entry is missing"},
          {"[]x", ", line 1, column 3: there is text after the end of the list"},
          {"[" + kPair + "]\n  [", ", line 2, column 3: there is text after the end"},
          {"[" + kPair + "\n" + kPair + "]", ", line 2, column 1: "},
          {"[\n " + kPair + ",\n {\"prompt\": \"\xC3\xA9\" x}]", ", line 3, column 17: "},
          {"[" + kPair + "}]", ", line 1, column 36: "},
          {"[" + kPair + ", {\"text\": ]}]", ", line 1, column 47: "},
          {"[\n\n 7]", ", entry 1 (line 3): must be an object, got 7"},
          {"[1,]", ", entry 1 (line 1): must be an object, got 1"},
          {"[" + kPair + ",\n[" + kPair + "]]", ", entry 2 (line 2): must be an object, got ["},
          {"[" + kPair + ",\n" + kTokens + "]", R"(, entry 2 (line 2): has "tokens", but the lines before have "completion")"},
          {"[{\"text\": \"" + nested("[", "]", 40) + "\"}, {\"a\": 1}]", ", entry 2 (line 1): has "},
          {"\xEF\xBB\xBF[" + kPair + "]", ", line 1, column 1: starts with a byte order mark"}};
}

std::vector<Hostile> wrong_tokens() {
  const auto line = [](const std::string& tokens, const std::string& mask) {
    return "{\"tokens\": " + tokens + ", \"mask\": " + mask + "}";
  };
  std::vector<Hostile> all = {
      {R"({"tokens": [1, 2]})", R"(, line 1: has no "mask")"},
      {line("[]", "[]"), ", line 1: tokens: is empty"},
      {line("[1]", "[]"), ", line 1: mask: has 0 values for 1 token"},
      {line("[1, 2]", "[1]"), ", line 1: mask: has 1 value for 2 tokens"},
      {line("[1]", "[1, 1]"), ", line 1: mask: has 2 values for 1 token"},
      {kTokens + "\n" + line("[1, 300]", "[1, 1]"), ", line 2: tokens[1]: must be an id below the vocabulary size 300, got 300"}};
  for (const char* const tokens : {"null", "1", "\"abc\"", "{}", "true"})
    all.push_back({line(tokens, "[1]"), ", line 1: tokens: must be a list, got "});
  for (const char* const mask : {"null", "1", "\"1\"", "{}"}) all.push_back({line("[1]", mask), ", line 1: mask: must be a list, got "});
  for (const char* const id : {"-1", "300", "1.0", "1.5", "1e2", "null", "\"1\"", "true", "[1]", "{}", "9223372036854775807",
                               "18446744073709551615", "-9223372036854775808", "4294967296", "2147483648"})
    all.push_back(
        {line("[0, " + std::string(id) + "]", "[1, 1]"), ", line 1: tokens[1]: must be an id below the vocabulary size 300, got "});
  for (const char* const flag : {"2", "-1", "0.5", "1.0", "null", "\"1\"", "[1]", "{}", "256"})
    all.push_back({line("[0, 1]", "[1, " + std::string(flag) + "]"), ", line 1: mask[1]: must be 0 or 1, got "});
  all.push_back({line("[18446744073709551616]", "[1]"),
                 ", line 1: tokens[0]: must be an id below the vocabulary size 300, got 1.8446744073709552e+19"});
  return all;
}

std::vector<Hostile> wrong_texts() {
  std::vector<Hostile> all = {{R"({"completion": "b"})", R"(, line 1: has no "prompt")"},
                              {R"({"prompt": "a", "completion": ""})", ", line 1: completion: is empty"},
                              {R"({"prompt": null, "completion": "b"})", ", line 1: prompt: "},
                              {R"({"prompt": [{"role": "user", "content": "a"}], "completion": "b"})", ", line 1: prompt: "}};
  for (const char* const value : {"null", "1", "[]", "{}", "true", "[\"a\"]"}) {
    all.push_back({R"({"text": )" + std::string(value) + "}", ", line 1: text: "});
    all.push_back({R"({"prompt": "a", "completion": )" + std::string(value) + "}", ", line 1: completion: "});
  }
  return all;
}

std::vector<Hostile> wrong_conversations() {
  const auto line = [](const std::string& messages, const std::string& more = "") { return "{\"messages\": " + messages + more + "}"; };
  const auto message = [&](const std::string& members) { return line("[{\"role\": \"user\", \"content\": \"a\"}, {" + members + "}]"); };
  const std::string answer = R"([{"role": "assistant", "content": "a"}])", said = R"("role": "assistant", "content": "a")";
  std::vector<Hostile> all = {
      {line("[]"), ", line 1: messages: has no message of the assistant"},
      {line(R"([{"role": "user", "content": "a"}])"), ", line 1: messages: has no message of the assistant"},
      {message(""), R"(, line 1: messages[1]: has no "role")"},
      {message(R"("role": "assistant")"), R"(, line 1: messages[1]: has no "content")"},
      {message(R"("content": "a")"), R"(, line 1: messages[1]: has no "role")"},
      {message(R"("role": "system", "content": "a")"), ", line 1: messages[1].role: a system message must be the first"},
      {message(R"("from": "gpt", "value": "a")"), R"(, line 1: messages[1]: has no "role")"},
      {message(said + R"(, "name": "x")"), R"(, line 1: messages[1]: has an unknown key "name")"},
      {message(said + R"(, "weight": 0)"), R"(, line 1: messages[1]: has an unknown key "weight")"},
      {message(said + R"(, "thinking": "x", "reasoning_content": "y")"), ", line 1: messages[1]: has both thinking and reasoning_content"},
      {message(said + R"(, "thinking": "x")"), ", line 1: messages[1].thinking: data.chat_template chatml has no place for reasoning"},
      {message(R"("role": "user", "content": "a", "thinking": "x")"),
       ", line 1: messages[1].thinking: only messages of the assistant may have reasoning"},
      {message(R"("role": "assistant", "content": null, "tool_calls": [{}])"), ", line 1: messages[1].tool_calls: tools are not rendered"},
      {message(said + R"(, "function_call": {"name": "f"})"), ", line 1: messages[1].function_call: tools are not rendered"},
      {line(answer, R"(, "tools": [{"name": "f"}])"), ", line 1: tools: tools are not rendered"},
      {line(answer, R"(, "functions": {"name": "f"})"), ", line 1: functions: tools are not rendered"},
      {line("[1]"), ", line 1: messages[0]: must be an object, got 1"}};
  for (const char* const role : {"tool", "function", "ipython"})
    all.push_back({message(R"("content": "a", "role": ")" + std::string(role) + '"'),
                   text(", line 1: messages[1].role: is ", role, ", but tools are not")});
  for (const char* const role : {"developer", "Assistant", "human", "gpt", "", "assistant "})
    all.push_back({message(R"("content": "a", "role": ")" + std::string(role) + '"'),
                   ", line 1: messages[1].role: must be system, user or assistant, got "});
  for (const char* const value : {"null", "1", "{}", "[]", "true", "[{\"type\": \"text\", \"text\": \"a\"}]"}) {
    all.push_back({message(R"("role": "assistant", "content": )" + std::string(value)), ", line 1: messages[1].content: "});
    all.push_back({message(R"("content": "a", "role": )" + std::string(value)), ", line 1: messages[1].role: "});
  }
  for (const char* const value : {"1", "\"a\"", "{}", "null", "true"})
    all.push_back({line(value), ", line 1: messages: must be a list, got "});
  all.push_back({line(answer), ": chatml needs the token <|im_start|>, which the byte tokenizer lacks", ExitCode::usage});
  return all;
}

class HostileJsonl : public ::testing::Test {
 protected:
  Error refusal(const std::string& content, TokenFileOptions options) {
    write_file(folder_ / "a.jsonl", content);
    return error_of([&] { TokenFile(folder_ / "a.jsonl", options); });
  }

  test::TemporaryFolder folder_;
  Tokenizer bytes_ = Tokenizer::bytes();
  TokenFileOptions options_ = {.tokenizer = &bytes_, .vocab_size = 300, .chat_template = ChatTemplate::chatml, .row_tokens = 8};
};

TEST_F(HostileJsonl, IsRefusedWithFileLineKeyAndReason) {
  std::vector<Hostile> all = broken_json();
  for (const auto& more : {no_form(), wrong_lists(), wrong_tokens(), wrong_texts(), wrong_conversations()})
    all.insert(all.end(), more.begin(), more.end());
  EXPECT_GE(all.size(), 150U);
  for (const Hostile& hostile : all) {
    const Error error = refusal(hostile.content, options_);
    EXPECT_EQ(error.code(), hostile.code) << shortened(hostile.content) << ": " << error.what();
    EXPECT_THAT(error.what(), HasSubstr((hostile.code == ExitCode::data ? folder_ / "a.jsonl" : std::string()) + hostile.says))
        << shortened(hostile.content);
    EXPECT_LT(std::string_view(error.what()).size(), 1000U) << shortened(hostile.content);
  }
}

TEST_F(HostileJsonl, HasReasoningOnlyWhereATemplateShowsIt) {
  options_.chat_template = ChatTemplate::harmony;
  const std::string line = R"({"messages": [{"role": "assistant", "content": "<|channel|>final", "thinking": "x"}]})";
  EXPECT_THAT(refusal(line, options_).what(), HasSubstr("messages[0].content: contains <|channel|>; give the reasoning in thinking"));
}

// A line is refused at 64 MiB, whatever the file has behind it.
TEST_F(HostileJsonl, TakesMemoryAndTimeOfItsLongestLine) {
  const auto start = std::chrono::steady_clock::now();
  write_file(folder_ / "a.jsonl", "\n{\"text\": \"");
  std::filesystem::resize_file(folder_ / "a.jsonl", 100 << 20);
  EXPECT_THAT(error_of([&] { TokenFile(folder_ / "a.jsonl", options_); }).what(), HasSubstr("a.jsonl, line 2: has more than 64 MiB"));
  EXPECT_THAT(refusal(std::string(2 << 20, '['), options_).what(), HasSubstr("a.jsonl, line 1, column "));
  std::string lists = "{\"messages\": [";
  while (lists.size() < (1U << 20)) lists += "[],";
  EXPECT_THAT(refusal(lists + "[]]}", options_).what(), HasSubstr("messages[0]: must be an object"));
  EXPECT_THAT(refusal(std::string(2 << 20, '\n') + "x", options_).what(), HasSubstr("a.jsonl, line 2097153, column 1"));
  write_file(folder_ / "a.jsonl", "\n[");
  std::filesystem::resize_file(folder_ / "a.jsonl", 100 << 20);
  EXPECT_THAT(error_of([&] { TokenFile(folder_ / "a.jsonl", options_); }).what(),
              HasSubstr("a.jsonl, line 2: an entry has more than 64 MiB"));
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), test::kHangSeconds);
}

// Entries may be over any lines and windows of the file, with brackets and quotation marks in texts.
TEST_F(HostileJsonl, AListOfObjectsIsReadAsItsLinesAre) {
  const auto read = [this](const std::string& name, const std::string& content) {
    write_file(folder_ / name, content);
    const TokenFile file(folder_ / name, options_);
    EXPECT_EQ(file.format(), DataFormat::jsonl) << name;
    std::vector<int32_t> ids(static_cast<size_t>(file.tokens()));
    std::vector<uint8_t> marks(ids.size());
    file.read(0, file.tokens(), ids.data(), marks.data());
    return std::tuple(ids, marks, file.examples().examples, file.form());
  };
  std::vector<std::string> objects = {kPair, R"({"prompt": "a]},[{\\", "completion": "\"]\\\",[", "other": [{}, [1, [2]], "]"]})",
                                      R"({"prompt": "\\", "completion": "ok"})"};
  while (objects.size() < 30'000) objects.push_back(R"({"prompt": "Say )" + std::to_string(objects.size()) + R"(", "completion": "ok"})");
  const auto joined_by = [&](const char* between) { return joined(objects, between); };
  const auto lines = read("a.jsonl", joined_by("\n"));
  EXPECT_EQ(std::get<2>(lines), 30'000);
  EXPECT_EQ(std::get<3>(lines), LineForm::completion);
  EXPECT_GT(joined_by("\n").size(), 1U << 20) << "more than a window";
  for (const char* const name : {"b.json", "b.jsonl", "b.txt"}) EXPECT_TRUE(read(name, "[" + joined_by(",") + "]") == lines) << name;
  EXPECT_TRUE(read("b.json", "\n [\r\n\t" + joined_by("\n,\n\n ") + " \n]\n\n") == lines);
  EXPECT_TRUE(read("b.json", test::replaced("[" + joined_by(",") + "]", ", \"completion\"", ",\n  \"completion\"")) == lines) << "pretty";
}

struct Claim {
  std::string name, content, says;
};

std::vector<Claim> claims() {
  const std::string others = R"({"instruction": "Say 0", "input": "", "output": "0"})", mark = "\xEF\xBB\xBF",
                    pretty = "{\n  \"prompt\": \"a\",\n  \"completion\": \"b\"\n}\n";
  return {{"a.json", others, ", line 1: has none of the keys"},
          {"a.txt", others, ", line 1: has none of the keys"},
          {"a.txt", std::string(100, ' ') + others, ", line 1: has none of the keys"},
          {"a.txt", " [\n " + others + "]", ", entry 1 (line 2): has none of the keys"},
          {"a.json", pretty, ", line 1, column 2: "},
          {"a", pretty, ", line 1, column 2: "},
          {"a.json", mark + kPair, ", line 1, column 1: starts with a byte order mark"},
          {"a.txt", mark + "[" + kPair, ", line 1, column 1: starts with a byte order mark"},
          {"a.txt", R"({"\"": 1})", ", line 1: has none of the keys"},
          {"a.JSON", "hello", ", line 1, column 1: "},
          {"a.ndjson", "hello", ", line 1, column 1: "},
          {"a.json", "[1, 2]", ", entry 1 (line 1): must be an object, got 1"},
          {"a.json", "{}", ", line 1: has none of the keys"}};
}

TEST_F(HostileJsonl, WhatClaimsToBeJsonIsNeverReadAsText) {
  for (const auto& [name, content, says] : claims()) {
    write_file(folder_ / name, content);
    options_.format = DataFormat::automatic;
    const Error error = error_of([&, &name = name] { TokenFile(folder_ / name, options_); });
    EXPECT_EQ(error.code(), ExitCode::data) << name << ' ' << content;
    EXPECT_THAT(error.what(), HasSubstr((folder_ / name) + says)) << content;
    options_.format = DataFormat::text;
    EXPECT_EQ(TokenFile(folder_ / name, options_).tokens(), std::ssize(content)) << "which was asked for";
  }
  options_.format = DataFormat::automatic;
  EXPECT_THAT(refusal("{}", options_).what(), HasSubstr("; data.format text trains on the JSON itself")) << "the way out";
  EXPECT_THAT(refusal("{\n}", options_).what(), HasSubstr("; an object must be on one line, unless the file is a list of objects"));
  EXPECT_THAT(refusal("{x}", options_).what(), ::testing::Not(HasSubstr("one line")));
  for (const char* const text : {"{hello\n", "hello {\"text\":\"a\"}\n", "[a](b)", "{}", "[]", "{ \"a\" }", "[[\"a\": 1", "[1]", "\"a\": 1",
                                 "{'a': 1}", "{\"a", "{\"a\\", "[", "{", ""}) {
    write_file(folder_ / "a.txt", text);
    EXPECT_EQ(TokenFile(folder_ / "a.txt", options_).format(), DataFormat::text) << text;
  }
}

// The position is that of the byte which shows it, or the end of the file where a character is cut off.
TEST_F(HostileJsonl, ABadByteOfATextHasItsPosition) {
  const std::string long_text(1 << 20, 'a');
  for (const auto& [content, byte] : {std::pair<std::string, size_t>{"ab\xff", 2},
                                      {"\xC3\xA9\xC3", 3},
                                      {"\xC3(", 1},
                                      {long_text + "a\xC3\xA9\x80", (1 << 20) + 3},
                                      {long_text.substr(1) + "\xC3\xA9\xC3", (1 << 20) + 2}}) {
    write_file(folder_ / "a.txt", content);
    const Error error = error_of([&] { TokenFile(folder_ / "a.txt", options_); });
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_THAT(error.what(),
                HasSubstr(text(folder_ / "a.txt", ": is neither a known token file nor UTF-8 text (byte ", byte, " is not);")));
  }
}

TEST_F(HostileJsonl, MayBeEmpty) {
  for (const char* const content : {"", "\n", " \t\r\n\n", "[]", " [\n]\n"}) {
    write_file(folder_ / "a.jsonl", content);
    EXPECT_EQ(TokenFile(folder_ / "a.jsonl", options_).tokens(), 0);
  }
}

}  // namespace mantissa::jsonl_hostile_test
