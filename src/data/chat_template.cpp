#include "mantissa/data/chat_template.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "text/bpe_tokenizer.h"
#include "text/jinja.h"

namespace mantissa {
namespace {

// The templates are those of the repositories of the models: Qwen2.5-7B-Instruct, Qwen3-0.6B, Llama-3.1-8B-Instruct and gpt-oss-120b.

using Messages = std::span<const ChatMessage>;

class Pieces {
 public:
  void special(const char* token, bool trained = false) { pieces_.push_back({.text = token, .special = true, .trained = trained}); }
  void text(std::string_view text, bool trained = false) {
    if (text.empty()) return;
    if (pieces_.empty() || pieces_.back().special || pieces_.back().trained != trained) pieces_.push_back({.text = {}, .trained = trained});
    pieces_.back().text += text;
  }
  std::vector<ChatPiece> take() { return std::move(pieces_); }

 private:
  std::vector<ChatPiece> pieces_;
};

std::string_view without_newlines_before(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of('\n'), text.size()));
  return text;
}

std::string_view without_newlines_behind(std::string_view text) { return text.substr(0, text.find_last_not_of('\n') + 1); }

void chatml_turn(Pieces& out, const char* role, std::string_view content) {
  out.special("<|im_start|>");
  out.text(role);
  out.text("\n");
  out.text(content);
  out.special("<|im_end|>");
  out.text("\n");
}

void chatml(Pieces& out, Messages messages, const char* default_system) {
  const bool has_system = !messages.empty() && messages.front().role == ChatRole::system;
  if (!has_system && default_system != nullptr) chatml_turn(out, "system", default_system);
  for (const ChatMessage& message : messages) {
    if (message.role != ChatRole::assistant) {
      chatml_turn(out, choice_name(message.role), message.content);
      continue;
    }
    out.special("<|im_start|>");
    out.text("assistant\n");
    out.text(message.content, true);
    out.special("<|im_end|>", true);
    out.text("\n");
  }
}

struct Answer {
  std::string_view thinking, content;
};

// Qwen3 takes reasoning between <think> and </think> out of a content that has no other.
Answer qwen3_answer(const ChatMessage& message) {
  constexpr std::string_view kOpen = "<think>", kClose = "</think>";
  const std::string_view content = message.content;
  if (message.thinking) return {*message.thinking, content};
  const size_t first = content.find(kClose);
  if (first == std::string_view::npos) return {{}, content};
  std::string_view thinking = without_newlines_behind(content.substr(0, first));
  if (const size_t open = thinking.rfind(kOpen); open != std::string_view::npos) thinking.remove_prefix(open + kOpen.size());
  return {without_newlines_before(thinking), without_newlines_before(content.substr(content.rfind(kClose) + kClose.size()))};
}

// Answers to the last query keep their reasoning, which the last message always has, if only an empty one.
void qwen3(Pieces& out, Messages messages) {
  size_t last_query = messages.size() - 1;
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string& content = messages[i].content;
    const bool response = content.starts_with("<tool_response>") && content.ends_with("</tool_response>");
    if (messages[i].role == ChatRole::user && !response) last_query = i;
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    if (message.role != ChatRole::assistant) {
      chatml_turn(out, choice_name(message.role), message.content);
      continue;
    }
    const Answer answer = qwen3_answer(message);
    out.special("<|im_start|>");
    out.text("assistant\n");
    if (i > last_query && (i + 1 == messages.size() || !answer.thinking.empty())) {
      out.special("<think>", true);
      out.text("\n", true);
      out.text(without_newlines_behind(without_newlines_before(answer.thinking)), true);
      out.text("\n", true);
      out.special("</think>", true);
      out.text("\n\n", true);
      out.text(without_newlines_before(answer.content), true);
    } else {
      out.text(answer.content, true);
    }
    out.special("<|im_end|>", true);
    out.text("\n");
  }
}

void llama3_header(Pieces& out, const char* role) {
  out.special("<|start_header_id|>");
  out.text(role);
  out.special("<|end_header_id|>");
  out.text("\n\n");
}

void llama3_turn(Pieces& out, const char* role, std::string_view content, bool trained) {
  llama3_header(out, role);
  out.text(content, trained);
  out.special("<|eot_id|>", trained);
}

void llama3(Pieces& out, Messages messages, const std::string& date) {
  const bool has_system = !messages.empty() && messages.front().role == ChatRole::system;
  std::string system = "Cutting Knowledge Date: December 2023\nToday Date: " + date + "\n\n";
  if (has_system) system += python_stripped(messages.front().content);
  out.special("<|begin_of_text|>");
  llama3_turn(out, "system", system, false);
  for (const ChatMessage& message : messages.subspan(has_system ? 1 : 0))
    llama3_turn(out, choice_name(message.role), python_stripped(message.content), message.role == ChatRole::assistant);
}

void harmony_turn(Pieces& out, const char* role, std::string_view content) {
  out.special("<|start|>");
  out.text(role);
  out.special("<|message|>");
  out.text(content);
  out.special("<|end|>");
}

void harmony_answer(Pieces& out, const char* channel, std::string_view content) {
  out.special("<|channel|>", true);
  out.text(channel, true);
  out.special("<|message|>", true);
  out.text(content, true);
}

// Only the last answer shows its reasoning, and only that one ends as the model writes it.
void harmony(Pieces& out, Messages messages, const std::optional<std::string>& date) {
  harmony_turn(out, "system",
               "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n" +
                   (date ? "Current date: " + *date + "\n" : std::string()) +
                   "\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.");
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    if (message.role == ChatRole::user) harmony_turn(out, "user", message.content);
    if (message.role == ChatRole::system && !message.content.empty())
      harmony_turn(out, "developer", "# Instructions\n\n" + message.content + "\n\n");
    if (message.role != ChatRole::assistant) continue;
    const bool last = i + 1 == messages.size();
    out.special("<|start|>");
    out.text("assistant");
    if (last && message.thinking) {
      harmony_answer(out, "analysis", *message.thinking);
      out.special("<|end|>", true);
      out.special("<|start|>", true);
      out.text("assistant", true);
    }
    harmony_answer(out, "final", message.content);
    last ? out.special("<|return|>", true) : out.special("<|end|>");
  }
}

}  // namespace

std::vector<ChatPiece> render_chat(ChatTemplate which, std::span<const ChatMessage> messages, const std::optional<std::string>& date) {
  Pieces out;
  switch (which) {
    case ChatTemplate::chatml: chatml(out, messages, nullptr); break;
    case ChatTemplate::qwen25: chatml(out, messages, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."); break;
    case ChatTemplate::qwen3: qwen3(out, messages); break;
    case ChatTemplate::llama3: llama3(out, messages, date.value_or(kLlama3Date)); break;
    case ChatTemplate::harmony: harmony(out, messages, date); break;
  }
  return out.take();
}

std::vector<ChatPiece> render_chat_prompt(ChatTemplate which, Messages messages, const std::optional<std::string>& date) {
  Pieces out;
  switch (which) {
    case ChatTemplate::chatml:
    case ChatTemplate::qwen25:
    case ChatTemplate::qwen3:
      out.special("<|im_start|>");
      out.text("assistant\n");
      break;
    case ChatTemplate::llama3: llama3_header(out, "assistant"); break;
    case ChatTemplate::harmony:
      out.special("<|start|>");
      out.text("assistant");
      break;
  }
  std::vector<ChatPiece> prompt = render_chat(which, messages, date), header = out.take();
  prompt.insert(prompt.end(), header.begin(), header.end());
  return prompt;
}

std::vector<AddedToken> chat_tokens(ChatTemplate which) {
  const auto special = [](std::initializer_list<const char*> names) {
    std::vector<AddedToken> tokens;
    for (const char* const name : names) tokens.push_back({.content = name, .special = true});
    return tokens;
  };
  std::vector<AddedToken> chatml = special({"<|im_start|>", "<|im_end|>"});
  switch (which) {
    case ChatTemplate::qwen3: chatml.insert(chatml.end(), {{.content = "<think>"}, {.content = "</think>"}}); break;
    case ChatTemplate::llama3: return special({"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"});
    case ChatTemplate::harmony: return special({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"});
    case ChatTemplate::chatml:
    case ChatTemplate::qwen25: break;
  }
  return chatml;
}

const char* end_of_answer(ChatTemplate which) {
  switch (which) {
    case ChatTemplate::llama3: return "<|eot_id|>";
    case ChatTemplate::harmony: return "<|return|>";
    case ChatTemplate::chatml:
    case ChatTemplate::qwen25:
    case ChatTemplate::qwen3: break;
  }
  return "<|im_end|>";
}

namespace {

// Writes the templates above in the language that servers read.

constexpr const char* kChatml =
    R"({%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
)";

constexpr const char* kQwen25 =
    R"({%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
)";

constexpr const char* kQwen3 =
    R"({%- set ns = namespace(last_query=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.last_query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif message.thinking is string %}
            {%- set reasoning = message.thinking %}
        {%- elif '</think>' in message.content %}
            {%- set reasoning = message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
)";

constexpr const char* kLlama3 =
    R"({%- set system = '' %}
{%- set turns = messages %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set turns = messages[1:] %}
{%- endif %}
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n' }}
{{- 'Today Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}
{%- for message in turns %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
)";

constexpr const char* kHarmonyBegin =
    R"({{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n' }}
)";
constexpr const char* kHarmony =
    R"({{- '\nReasoning: medium\n\n' }}
{{- '# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'system' and message.content %}
        {{- '<|start|>developer<|message|># Instructions\n\n' + message.content + '\n\n<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.thinking if message.thinking is string else message.reasoning_content %}
        {{- '<|start|>assistant' }}
        {%- if loop.last and reasoning is string %}
            {{- '<|channel|>analysis<|message|>' + reasoning + '<|end|><|start|>assistant' }}
        {%- endif %}
        {{- '<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last else '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant' }}
{%- endif %}
)";

// A string of the language.
std::string jinja_string(const std::string& text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\\' || c == '\'') out += '\\';
    out += c == '\n' ? std::string("\\n") : std::string(1, c);
  }
  return out + "'";
}

}  // namespace

std::string chat_template_text(ChatTemplate which, const std::optional<std::string>& date) {
  switch (which) {
    case ChatTemplate::chatml: break;
    case ChatTemplate::qwen25: return std::string(kQwen25) + kChatml;
    case ChatTemplate::qwen3: return kQwen3;
    case ChatTemplate::llama3:
      return "{%- if date_string is not defined %}\n    {%- set date_string = " + jinja_string(date.value_or(kLlama3Date)) +
             " %}\n{%- endif %}\n" + kLlama3;
    case ChatTemplate::harmony:
      return kHarmonyBegin + (date ? "{{- 'Current date: ' + " + jinja_string(*date) + " + '\\n' }}\n" : std::string()) + kHarmony;
  }
  return kChatml;
}

}  // namespace mantissa
