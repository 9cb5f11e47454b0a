#include "data/example.h"

#include <gmock/gmock.h>

#include "files.h"

namespace mantissa::example_test {

using test::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Bytes, and tokens of ChatML from 256 on. Among these, texts spell <|im_end|> as $.
TextEncoder encoder() {
  return {.name = "fake",
          .encode =
              [](std::string_view text, const TextOrigin&, SpecialTokenText special) {
                std::vector<int32_t> ids;
                for (const char byte : text)
                  ids.push_back(byte == '$' && special == SpecialTokenText::tokens ? 257 : static_cast<uint8_t>(byte));
                return ids;
              },
          .id_of =
              [](std::string_view token) {
                return token == "<|im_start|>" ? std::optional(256) : token == "<|im_end|>" ? std::optional(257) : std::nullopt;
              }};
}

LineOptions options() { return {.encoder = encoder(), .vocab_size = 300, .chat_template = ChatTemplate::chatml}; }

Example read(const LineOptions& with, const std::string& line, const std::string& name = "f") {
  return LineReader(with).read(parse_line(line, name), name);
}

// The words of an example that are trained, and those that are not, in which 256 and 257 are { and }.
std::string shown(const Example& example) {
  std::string out;
  bool trained = false;
  for (size_t i = 0; i < example.ids.size(); ++i) {
    if (example.trained[i] != trained) out += example.trained[i] ? "[" : "]";
    trained = example.trained[i];
    const int32_t id = example.ids[i];
    out += id == 256 ? '{' : id == 257 ? '}' : static_cast<char>(id);
  }
  return out + (trained ? "]" : "");
}

TEST(Examples, TokensHaveTheirMask) {
  const Example example = read({.vocab_size = 300}, R"({"tokens": [5, 299, 0], "mask": [0, 1, true], "id": "x"})");
  EXPECT_THAT(example.ids, ElementsAre(5, 299, 0));
  EXPECT_THAT(example.trained, ElementsAre(false, true, true));
}

TEST(Examples, ACompletionIsTrainedWithItsEnd) {
  LineOptions with_end = options();
  EXPECT_EQ(shown(read(with_end, R"({"prompt": "2+2=", "completion": "4"})")), "2+2=[4]");
  with_end.appended = 257;
  EXPECT_EQ(shown(read(with_end, R"({"prompt": "2+2=", "completion": "4"})")), "2+2=[4}]");
  EXPECT_EQ(shown(read(with_end, R"({"prompt": "", "completion": ""})")), "[}]");
  with_end.encoder->before_text = {'^', '^'};
  EXPECT_EQ(shown(read(with_end, R"({"prompt": "2+2=", "completion": "4"})")), "^^2+2=[4}]");
}

// Prompt and completion are a text in two parts: what the tokenizer puts around a text is around both.
TEST(Examples, ACompletionEndsAsATextDoesAndOnce) {
  LineOptions around = options();
  around.encoder->before_text = {'^'};
  around.encoder->after_text = {257};
  EXPECT_EQ(shown(read(around, R"({"prompt": "2+2=", "completion": "4"})")), "^2+2=[4}]");
  EXPECT_EQ(shown(read(around, R"({"prompt": "2+2=", "completion": ""})")), "^2+2=[}]") << "which is something to learn";
  around.appended = 257;
  EXPECT_EQ(shown(read(around, R"({"prompt": "2+2=", "completion": "4"})")), "^2+2=[4}]") << "which is appended already";
  around.encoder->after_text = {};
  EXPECT_EQ(shown(read(around, R"({"prompt": "2+2=", "completion": "4$"})")), "^2+2=[4}]") << "which the text ends with";
  EXPECT_EQ(shown(read(around, R"({"prompt": "2+2=$", "completion": ""})")), "^2+2=}[}]") << "of the prompt, which is not trained";
  EXPECT_EQ(shown(read(around, R"({"prompt": "", "completion": "$4"})")), "^[}4}]");
}

TEST(Examples, SpecialTokensAreTokensInTextsAndTextInMessages) {
  EXPECT_EQ(shown(read(options(), R"({"prompt": "Hi$", "completion": "Yo$"})")), "Hi}[Yo}]");
  EXPECT_EQ(shown(read(options(), R"({"messages": [{"role": "user", "content": "Hi$"}, {"role": "assistant", "content": "Yo$"}]})")),
            "{user\nHi$}\n{assistant\n[Yo$}]\n");
}

TEST(Examples, TellWhatIsThereTwice) {
  using Counts = std::pair<int64_t, int64_t>;
  LineOptions around = options();
  around.encoder->before_text = {'^', '<'};
  around.encoder->after_text = {257, '|'};
  const auto repeated = [&](const std::string& prompt, const std::string& completion) {
    const RepeatedTokens found = read(around, "{\"prompt\": \"" + prompt + "\", \"completion\": \"" + completion + "\"}").repeated;
    return Counts(found.begins, found.ends);
  };
  EXPECT_EQ(repeated("a", "b"), Counts(0, 0));
  EXPECT_EQ(repeated("^<a", "b"), Counts(1, 0));
  EXPECT_EQ(repeated("^a", "b|"), Counts(0, 0)) << "a part of it";
  EXPECT_EQ(repeated("^<", "b$|"), Counts(1, 1));
  EXPECT_EQ(repeated("a^<", "$|b"), Counts(0, 0)) << "elsewhere";
}

TEST(Examples, TurnsOfTheAssistantAreTrained) {
  EXPECT_EQ(
      shown(read(
          options(),
          R"({"prompt": "ignored", "messages": [{"role": "user", "content": "{Hi"}, {"role": "assistant", "content": "é", "tool_calls": null},
                    {"role": "user", "content": ""}, {"role": "assistant", "content": ""}], "tools": []})")),
      "{user\n{Hi}\n{assistant\n[é}]\n{user\n}\n{assistant\n[}]\n");
}

TEST(Examples, WhatTheOptionsLackIsAUsageError) {
  const auto error = [](const char* line, LineOptions lacking) { return error_of([&] { read(lacking, line, "f, line 3"); }); };
  const char* const messages = R"({"messages": [{"role": "assistant", "content": "x"}]})";
  LineOptions lacking = options();
  lacking.chat_template.reset();
  EXPECT_EQ(error(messages, lacking).code(), ExitCode::usage);
  EXPECT_THAT(error(messages, lacking).what(),
              HasSubstr("data.chat_template: f, line 3 has \"messages\", which need a template: chatml, "));
  lacking.chat_template = ChatTemplate::llama3;
  EXPECT_EQ(error(messages, lacking).code(), ExitCode::usage);
  EXPECT_THAT(error(messages, lacking).what(), HasSubstr("llama3 needs the token <|begin_of_text|>, which the fake tokenizer lacks"));
  lacking = options();
  lacking.vocab_size = 257;
  EXPECT_EQ(error(messages, lacking).code(), ExitCode::usage);
  EXPECT_THAT(error(messages, lacking).what(), HasSubstr("model.vocab_size: 257 leaves out the token <|im_end|>, whose id is 257"));
  lacking = {.vocab_size = 300};
  EXPECT_EQ(error(R"({"prompt": "", "completion": "x"})", lacking).code(), ExitCode::usage);
  EXPECT_THAT(error(R"({"prompt": "", "completion": "x"})", lacking).what(), HasSubstr("data.tokenizer: f, line 3 has \"completion\""));
  lacking.appended = 3;
  EXPECT_THAT(error(R"({"tokens": [1], "mask": [1]})", lacking).what(), HasSubstr("data.append_eod: applies to texts and completions"));
  LineOptions both = options();
  both.appended = 257;
  EXPECT_EQ(shown(read(both, R"({"messages": [{"role": "assistant", "content": "x"}]})")), "{assistant\n[x}]\n")
      << "which the template ends";
}

TEST(ChatPrompts, AreEncodedAsConversationsAre) {
  const auto asked = [](const std::string& messages) {
    return read_chat_prompt(parse_json("{\"messages\": [" + messages + "]}", "f"), options(), "f, line 3");
  };
  const std::string user = R"({"role": "user", "content": "Hi"})", assistant = R"({"role": "assistant", "content": "Ho"})";
  Example whole = read(options(), "{\"messages\": [" + user + "," + assistant + "," + user + "," + assistant + "]}");
  const std::vector<int32_t> ids = asked(user + "," + assistant + "," + user);
  whole.ids.resize(whole.ids.size() - 4);  // "Ho", the end and a line end
  EXPECT_EQ(ids, whole.ids);
  for (const std::string& none : {std::string(), user + "," + assistant, std::string(R"({"role": "system", "content": "Hi"})")}) {
    const Error error = error_of([&] { asked(none); });
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_THAT(error.what(), HasSubstr("f, line 3: messages: must end with a message of the user"));
  }
  for (const char* const line : {"[]", "3", "{}", R"({"messages": 3})"})
    EXPECT_EQ(error_of([&] { read_chat_prompt(parse_json(line, "f"), options(), "f"); }).code(), ExitCode::data) << line;
}

}  // namespace mantissa::example_test
