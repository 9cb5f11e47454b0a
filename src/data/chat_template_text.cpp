// Writes the templates of chat_template.cpp in the language that servers read.
#include "mantissa/data/chat_template.h"

namespace mantissa {
namespace {

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
