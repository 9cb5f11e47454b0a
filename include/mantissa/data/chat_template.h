// Renders conversations as published chat templates do, without their language: chatml (plain), qwen2.5, qwen3, llama3 (3.1 to 3.3) and
// harmony (gpt-oss), of which none has tools here.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mantissa/json/fields.h"

namespace mantissa {

struct AddedToken;

enum class ChatTemplate { chatml, qwen25, qwen3, llama3, harmony };
constexpr auto choices(ChatTemplate) {
  return std::array{Choice{"chatml", ChatTemplate::chatml}, Choice{"qwen2.5", ChatTemplate::qwen25}, Choice{"qwen3", ChatTemplate::qwen3},
                    Choice{"llama3", ChatTemplate::llama3}, Choice{"harmony", ChatTemplate::harmony}};
}

// Return whether a template has a place for the reasoning before an answer, and whether it tells the model a date.
constexpr bool shows_thinking(ChatTemplate which) { return which == ChatTemplate::qwen3 || which == ChatTemplate::harmony; }
constexpr bool tells_date(ChatTemplate which) { return which == ChatTemplate::llama3 || which == ChatTemplate::harmony; }

enum class ChatRole { system, user, assistant };
constexpr auto choices(ChatRole) {
  return std::array{Choice{"system", ChatRole::system}, Choice{"user", ChatRole::user}, Choice{"assistant", ChatRole::assistant}};
}

struct ChatMessage {
  ChatRole role = ChatRole::user;
  std::string content;
  std::optional<std::string> thinking = {};  // only in a message of the assistant
};

// A stretch of a rendered conversation: the name of a token, or text to encode. Stretches that the model writes are trained.
struct ChatPiece {
  std::string text;
  bool special = false, trained = false;
  bool operator==(const ChatPiece&) const = default;
};

// Renders a conversation. Of each turn of the assistant the part that the model writes is trained, with the token that ends it; neither the
// header that asks for it, nor the text that another turn puts in place of that end (harmony: <|return|> becomes <|end|> in history). A
// system message comes first, or there is none. `date`: null stands for the template's own: llama3 "26 Jul 2024", harmony none. No two
// neighbors are text of the same training.
std::vector<ChatPiece> render_chat(ChatTemplate which, std::span<const ChatMessage> messages, const std::optional<std::string>& date);

// Like render_chat(), for a conversation that the assistant is to answer, up to where its answer begins. The last message is the user's.
std::vector<ChatPiece> render_chat_prompt(ChatTemplate which, std::span<const ChatMessage> messages,
                                          const std::optional<std::string>& date);

// The tokens that the template needs, without ids. <think> and </think> are not special, as in Qwen3's own tokenizer, so decoding keeps
// them.
std::vector<AddedToken> chat_tokens(ChatTemplate which);

// The last token of an answer.
const char* end_of_answer(ChatTemplate which);

// Returns the template in the language of chat_template.jinja: it renders what render_chat() does, and with add_generation_prompt what
// render_chat_prompt() does. In chat_template.cpp.
std::string chat_template_text(ChatTemplate which, const std::optional<std::string>& date);

// The date that a template tells where none is given.
inline constexpr const char* kLlama3Date = "26 Jul 2024";

}  // namespace mantissa
