// The expected texts, without the marks around what is trained, are those that transformers 5.23.0 renders with the templates of the
// repositories of the models (as llama-cpp-python 0.3.36 carries them), the date of harmony's given.
#include "mantissa/data/chat_template.h"

#include <gmock/gmock.h>

#include <set>

#include "text/bpe_tokenizer.h"
#include "text/jinja.h"

namespace mantissa::chat_template_test {

constexpr ChatRole kSystem = ChatRole::system, kUser = ChatRole::user, kAssistant = ChatRole::assistant;

// The conversation as one text, in which [[ and ]] enclose what is trained.
std::string rendered(ChatTemplate which, const std::vector<ChatMessage>& messages, const std::optional<std::string>& date = {}) {
  std::string out;
  bool trained = false;
  for (const ChatPiece& piece : render_chat(which, messages, date)) {
    if (piece.trained != trained) out += piece.trained ? "[[" : "]]";
    trained = piece.trained;
    out += piece.text;
  }
  return out + (trained ? "]]" : "");
}

const std::vector<ChatMessage> kTwoTurns = {{kUser, "Hi"}, {kAssistant, "Hello."}, {kUser, "2+2?"}, {kAssistant, "4"}};

TEST(ChatTemplates, PlainChatMlAddsNothingAndQwen25ASystemMessageOfItsOwn) {
  EXPECT_EQ(rendered(ChatTemplate::chatml, kTwoTurns),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello.<|im_end|>]]\n"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>]]\n");
  EXPECT_EQ(rendered(ChatTemplate::qwen25, {{kUser, "Hi"}, {kAssistant, "Hello."}, {kUser, "2+2?"}, {kAssistant, " 4\n"}}),
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello.<|im_end|>]]\n"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[ 4\n<|im_end|>]]\n");
  for (const ChatTemplate which : {ChatTemplate::chatml, ChatTemplate::qwen25})
    EXPECT_EQ(rendered(which, {{kSystem, "Be brief."}, {kUser, "Hi"}, {kAssistant, "Hello."}}),
              "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello.<|im_end|>]]\n");
  EXPECT_EQ(rendered(ChatTemplate::qwen25, {{kSystem, ""}, {kAssistant, "Hello."}}),
            "<|im_start|>system\n<|im_end|>\n<|im_start|>assistant\n[[Hello.<|im_end|>]]\n")
      << "an empty one counts";
}

TEST(ChatTemplates, Qwen3ThinksInItsLastAnswerIfOnlyEmptily) {
  EXPECT_EQ(rendered(ChatTemplate::qwen3, kTwoTurns),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello.<|im_end|>]]\n"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\n4<|im_end|>]]\n");
}

TEST(ChatTemplates, Qwen3TakesReasoningFromItsFieldOrOutOfTheContent) {
  EXPECT_EQ(rendered(ChatTemplate::qwen3, {{kSystem, "Be brief."},
                                           {kUser, "Hi"},
                                           {kAssistant, "<think>\nold\n</think>\n\nHello."},
                                           {kUser, "2+2?"},
                                           {kAssistant, "\n4", "\nTwo and two.\n"}}),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello.<|im_end|>]]\n"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[<think>\nTwo and two.\n</think>\n\n4<|im_end|>]]\n");
  EXPECT_EQ(rendered(ChatTemplate::qwen3, {{kUser, "2+2?"}, {kAssistant, "<think>\nsum\n</think>\n\n4"}}),
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[<think>\nsum\n</think>\n\n4<|im_end|>]]\n");
  EXPECT_EQ(rendered(ChatTemplate::qwen3, {{kUser, "2+2?"}, {kAssistant, "<think>\n4</think>\n5", ""}}),
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\n<think>\n4</think>\n5<|im_end|>]]\n")
      << "an empty field counts";
}

// Reasoning goes from the last <think> before the first </think> up to there, and the content begins behind the last </think>.
TEST(ChatTemplates, Qwen3DropsWhatRepeatedMarksEnclose) {
  EXPECT_EQ(rendered(ChatTemplate::qwen3, {{kUser, "2+2?"}, {kAssistant, "<think>\n3?\n<think>\n4!\n</think>\n3</think>\n4"}}),
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[<think>\n4!\n</think>\n\n4<|im_end|>]]\n");
}

// An answer may follow no query, or the result of a tool, which is no query either.
TEST(ChatTemplates, Qwen3ThinksAfterTheLastQueryOnly) {
  EXPECT_EQ(rendered(ChatTemplate::qwen3, {{kSystem, "Count."}, {kAssistant, "1, 2, 3", "begin"}}),
            "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>assistant\n[[1, 2, 3<|im_end|>]]\n");
  EXPECT_EQ(rendered(ChatTemplate::qwen3,
                     {{kUser, "2+2?"}, {kAssistant, "I ask.", "How?"}, {kUser, "<tool_response>4</tool_response>"}, {kAssistant, "4"}}),
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[<think>\nHow?\n</think>\n\nI ask.<|im_end|>]]\n"
            "<|im_start|>user\n<tool_response>4</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n[[<think>\n\n</think>\n\n4<|im_end|>]]\n");
  EXPECT_EQ(
      rendered(ChatTemplate::qwen3, {{kUser, "2+2?"}, {kAssistant, "4", "Sum."}, {kUser, "<tool_response>?"}, {kAssistant, "A mark."}}),
      "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>]]\n"
      "<|im_start|>user\n<tool_response>?<|im_end|>\n"
      "<|im_start|>assistant\n[[<think>\n\n</think>\n\nA mark.<|im_end|>]]\n")
      << "a query that only begins like one of a tool";
}

TEST(ChatTemplates, Llama3TellsItsDateAndTrims) {
  EXPECT_EQ(
      rendered(ChatTemplate::llama3, {{kUser, " Hi \n"}, {kAssistant, "\tHello. "}, {kUser, "2+2?"}, {kAssistant, "4"}}),
      "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
      "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
      "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hello.<|eot_id|>]]<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
      "<|start_header_id|>assistant<|end_header_id|>\n\n[[4<|eot_id|>]]");
  EXPECT_EQ(
      rendered(ChatTemplate::llama3, {{kSystem, "\u3000Be brief.\n"}, {kUser, "Hi"}, {kAssistant, "Hello."}}, "01 Jan 2026"),
      "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 01 Jan 2026\n\n"
      "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
      "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hello.<|eot_id|>]]");
  EXPECT_THAT(
      rendered(ChatTemplate::llama3, {{kUser, "\x1C\x1DHi\x1E\x1F"}, {kAssistant, "\x1BHello."}}),
      ::testing::EndsWith("<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[[\x1BHello.<|eot_id|>]]"));
}

// The <|end|> of the first answer stands where the model wrote <|return|>.
TEST(ChatTemplates, HarmonyReasonsInAChannelOfTheLastAnswer) {
  const std::string system =
      "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
      "Current date: 2026-01-01\n\nReasoning: medium\n\n"
      "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>";
  EXPECT_EQ(
      rendered(ChatTemplate::harmony,
               {{kSystem, "Be brief."}, {kUser, "Hi"}, {kAssistant, "Hello.", "old"}, {kUser, "2+2?"}, {kAssistant, "4", "Two and two."}},
               "2026-01-01"),
      system +
          "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|><|start|>user<|message|>Hi<|end|>"
          "<|start|>assistant[[<|channel|>final<|message|>Hello.]]<|end|><|start|>user<|message|>2+2?<|end|>"
          "<|start|>assistant[[<|channel|>analysis<|message|>Two and two.<|end|>"
          "<|start|>assistant<|channel|>final<|message|>4<|return|>]]");
  EXPECT_EQ(rendered(ChatTemplate::harmony, {{kUser, "Hi"}, {kAssistant, "Hello."}}, "2026-01-01"),
            system + "<|start|>user<|message|>Hi<|end|><|start|>assistant[[<|channel|>final<|message|>Hello.<|return|>]]");
  EXPECT_EQ(rendered(ChatTemplate::harmony, {{kSystem, ""}, {kAssistant, "Hello."}}, "2026-01-01"),
            system + "<|start|>assistant[[<|channel|>final<|message|>Hello.<|return|>]]")
      << "without instructions";
  EXPECT_THAT(rendered(ChatTemplate::harmony, kTwoTurns), ::testing::HasSubstr("Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n#"));
}

// A user's message is text, whatever it looks like.
TEST(ChatTemplates, NamesOfTokensInAMessageAreText) {
  const std::vector<ChatPiece> pieces = render_chat(ChatTemplate::chatml, std::vector<ChatMessage>{{kUser, "<|im_end|>"}}, {});
  EXPECT_EQ(pieces.at(1), (ChatPiece{.text = "user\n<|im_end|>"}));
  EXPECT_EQ(pieces.at(2), (ChatPiece{.text = "<|im_end|>", .special = true}));
}

std::string prompt(ChatTemplate which, const std::vector<ChatMessage>& messages, const std::optional<std::string>& date = {}) {
  std::string out;
  const std::vector<ChatPiece> pieces = render_chat_prompt(which, messages, date);
  for (const ChatPiece& piece : pieces) out += piece.text;
  EXPECT_FALSE(pieces.back().trained);
  return out;
}

TEST(ChatPrompts, EndWhereTheAnswerBegins) {
  const std::vector<ChatMessage> question = {{kSystem, "Be brief."}, {kUser, "Hi"}};
  for (const ChatTemplate which : {ChatTemplate::chatml, ChatTemplate::qwen25, ChatTemplate::qwen3})
    EXPECT_EQ(prompt(which, question), "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(
      prompt(ChatTemplate::llama3, question, "1 Jan 2026"),
      "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 1 Jan 2026\n\n"
      "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n");
  EXPECT_THAT(
      prompt(ChatTemplate::harmony, question),
      ::testing::EndsWith(
          "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"));
}

// A model that is asked sees what it saw when it learned the answer.
TEST(ChatPrompts, AreTheBeginningsOfWhatIsLearned) {
  for (const auto& [name, which] : choices(ChatTemplate())) {
    std::vector<ChatMessage> messages = {{kUser, "Hi"}, {kAssistant, "Hello."}, {kUser, "2+2?"}};
    const std::string asked = prompt(which, messages, {});
    messages.push_back({kAssistant, "4"});
    std::string learned;
    for (const ChatPiece& piece : render_chat(which, messages, {})) learned += piece.text;
    EXPECT_TRUE(learned.starts_with(asked)) << name << "\n" << asked << "\n" << learned;
  }
}

std::string by_text(ChatTemplate which, const std::vector<ChatMessage>& messages, const std::optional<std::string>& date, bool asks,
                    const char* thinking) {
  Json::Entries list;
  for (const ChatMessage& message : messages) {
    Json one = {{"role", choice_name(message.role)}, {"content", message.content}};
    if (message.thinking) one[thinking] = *message.thinking;
    list.push_back(one);
  }
  Json variables = Json::Members();
  variables["messages"] = list;
  variables["add_generation_prompt"] = asks;
  return render_jinja(chat_template_text(which, date), {.variables = variables});
}

// A server renders the conversations as they were trained.
TEST(ChatTemplateTexts, RenderTheSameConversations) {
  const std::vector<std::vector<ChatMessage>> all = {
      kTwoTurns,
      {{kSystem, " Be brief.\n"}, {kUser, " Hi \n"}, {kAssistant, "\tHello. "}},
      {{kSystem, ""}, {kUser, "It's {{ a }} \\ \"b\"?"}, {kAssistant, ""}},
      {{kUser, "Hi"}, {kAssistant, "<think>\nold\n</think>\n\nHello."}, {kUser, "2+2?"}, {kAssistant, "<think>\nsum\n\n</think>\n\n4"}},
      {{kUser, "2+2?"}, {kAssistant, "<think>\n4</think>\n5</think>6"}, {kAssistant, "<think>b</think>c"}},
      {{kUser, "2+2?"}, {kAssistant, "a"}, {kUser, "<tool_response>?</tool_response>"}, {kAssistant, "b"}},
      {{kAssistant, "First."}, {kUser, "<tool_response>?"}, {kAssistant, "Last."}},
      {{kUser, "Hi"}}};
  const std::vector<std::vector<ChatMessage>> reasoned = {
      {{kUser, "Hi"}, {kAssistant, "Hello.", "old"}, {kUser, "2+2?"}, {kAssistant, "\n4", "\nTwo and two.\n"}},
      {{kUser, "2+2?"}, {kAssistant, "<think>\n4</think>\n5", ""}}};
  for (const auto& [name, which] : choices(ChatTemplate())) {
    for (const std::optional<std::string>& date : {std::optional<std::string>(), std::optional<std::string>("1 'Jan' \\n 2026")}) {
      const auto expect_same = [&, &name = name, &which = which](const std::vector<ChatMessage>& messages, const char* thinking) {
        std::string expected;
        for (const ChatPiece& piece : render_chat(which, messages, date)) expected += piece.text;
        EXPECT_EQ(by_text(which, messages, date, false, thinking), expected) << name;
        if (messages.back().role != kUser) return;
        EXPECT_EQ(by_text(which, messages, date, true, thinking), prompt(which, messages, date)) << name;
      };
      for (const auto& messages : all) expect_same(messages, "thinking");
      if (!shows_thinking(which)) continue;
      for (const auto& messages : reasoned)
        for (const char* const thinking : {"thinking", "reasoning_content"}) expect_same(messages, thinking);
    }
  }
}

TEST(ChatTokens, AreThoseThatTheTemplatesRender) {
  const std::vector<ChatMessage> all = {{kSystem, "a"}, {kUser, "b"}, {kAssistant, "c"}, {kUser, "d"}, {kAssistant, "e", "f"}};
  for (const auto& [name, which] : choices(ChatTemplate())) {
    std::vector<ChatMessage> messages = all;
    if (!shows_thinking(which)) messages.back().thinking.reset();
    std::set<std::string> rendered;
    for (const ChatPiece& piece : render_chat(which, messages, {}))
      if (piece.special) rendered.insert(piece.text);
    std::set<std::string> tokens;
    for (const AddedToken& token : chat_tokens(which)) {
      tokens.insert(token.content);
      EXPECT_EQ(token.special, token.content.find("think") == std::string::npos);
    }
    EXPECT_EQ(rendered, tokens) << name;
    EXPECT_TRUE(rendered.contains(end_of_answer(which))) << name;
  }
}

}  // namespace mantissa::chat_template_test
