// The chat template beside a model, against one of data.chat_template.
#include <gmock/gmock.h>

#include "hf/export_files.h"
#include "mantissa/json/json.h"

namespace mantissa::chat_files_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Files = std::vector<TokenizerFile>;

Files with_template(const std::string& text) { return {{.name = "chat_template.jinja", .bytes = text}}; }
std::string difference(const std::string& text, ChatTemplate which, const std::optional<std::string>& date = {}) {
  return chat_template_difference(with_template(text), which, date);
}

constexpr const char* kOwnSystem =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are Bo<|im_end|>\\n' "
    "}}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

TEST(ChatFiles, ADefaultSystemMessageOfTheFolderIsADifference) {
  EXPECT_EQ(difference(kOwnSystem, ChatTemplate::chatml),
            R"(its chat_template.jinja renders [{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello."}] as )"
            R"("<|im_start|>system\nYou are Bo<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n", )"
            R"(data.chat_template chatml as "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n")");
}

TEST(ChatFiles, TemplatesThatRenderTheSameAreNone) {
  for (const auto& [name, which] : choices(ChatTemplate())) {
    for (const std::optional<std::string>& date : {std::optional<std::string>(), std::optional<std::string>("1 May 2026")})
      EXPECT_EQ(difference(chat_template_text(which, date), which, date), "") << name;
    EXPECT_EQ(chat_template_difference({}, which, {}), "") << "there is none to differ from " << name;
  }
  EXPECT_EQ(difference(chat_template_text(ChatTemplate::llama3, "1 May 2026"), ChatTemplate::llama3, "2 May 2026"), "")
      << "it has the date that it is given";
  EXPECT_EQ(difference("{{ strftime_now('%d') }}" + chat_template_text(ChatTemplate::harmony, {}), ChatTemplate::harmony), "")
      << "which has no date unless one is given";
  EXPECT_EQ(difference(kOwnSystem + std::string("{# but #}"), ChatTemplate::qwen25).empty(), false);
  std::string qwen = kOwnSystem;
  qwen.replace(qwen.find("You are Bo"), 10, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.");
  EXPECT_EQ(difference(qwen, ChatTemplate::qwen25), "");
}

// The second conversation alone tells that one apart.
TEST(ChatFiles, AnAnswerIsAskedForAlike) {
  std::string open = kOwnSystem;
  open.replace(open.find("You are Bo"), 10, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.");
  open.replace(open.find("assistant\\n' }}{% endif"), 11, "assistant\\n<think>");
  EXPECT_THAT(difference(open, ChatTemplate::qwen25), AllOf(HasSubstr("\"What is 2 + 2?\"}] and the begin of an answer as \"..."),
                                                            HasSubstr("assistant\\n<think>\", data.chat_template qwen2.5 as \"...")));
}

// Variables that transformers gives a template, and the date.
TEST(ChatFiles, SpecialTokensAndTheDateAreThoseOfTheModelAndOfTheRun) {
  const std::string text =
      "{{- bos_token }}{%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
      "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}"
      "{%- else %}{%- set system_message = '' %}{%- endif %}"
      "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\nToday Date: ' + date_string + '\\n\\n' "
      "}}"
      "{{- system_message }}{{- '<|eot_id|>' }}{%- for message in messages %}"
      "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
      "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}";
  for (const char* const token : {R"("<|begin_of_text|>")", R"({"content": "<|begin_of_text|>", "lstrip": false})"}) {
    const Files files = {{.name = "chat_template.jinja", .bytes = text},
                         {.name = "tokenizer_config.json", .bytes = std::string(R"({"bos_token": )") + token + "}"}};
    EXPECT_EQ(chat_template_difference(files, ChatTemplate::llama3, {}), "") << token;
    EXPECT_EQ(chat_template_difference(files, ChatTemplate::llama3, "2 Jan 2027"), "") << token;
  }
  EXPECT_THAT(difference(text, ChatTemplate::llama3), HasSubstr("as \"<|start_header_id|>system")) << "without that of the tokenizer";
}

TEST(ChatFiles, TheTemplateIsTheOneThatTransformersTakes) {
  const auto found = [](const Files& files) {
    const std::optional<FolderTemplate> one = folder_template(files);
    return one ? one->file + " " + one->text : "none";
  };
  const TokenizerFile jinja{.name = "chat_template.jinja", .bytes = "a"},
      config{.name = "tokenizer_config.json", .bytes = R"({"chat_template": "b"})"},
      older{.name = "chat_template.json", .bytes = R"({"chat_template": "c"})"},
      several{.name = "tokenizer_config.json",
              .bytes = R"({"chat_template": [{"name": "rag", "template": "d"}, {"name": "default", "template": "e"}]})"};
  EXPECT_EQ(found({older, config, jinja}), "chat_template.jinja a");
  EXPECT_EQ(found({older, config}), "tokenizer_config.json b");
  EXPECT_EQ(found({older}), "chat_template.json c");
  EXPECT_EQ(found({several}), "tokenizer_config.json e");
  for (const char* const none : {"{}", "[]", "{", R"({"chat_template": null})", R"({"chat_template": [{"name": "rag", "template": "d"}]})"})
    EXPECT_EQ(found({{.name = "tokenizer_config.json", .bytes = none}}), "none") << none;
}

TEST(ChatFiles, ATemplateThatCannotBeRenderedHereIsTold) {
  EXPECT_THAT(difference("{% include 'a' %}", ChatTemplate::chatml),
              AllOf(HasSubstr("its chat_template.jinja does not render [{"),
                    HasSubstr("here, so it may differ from data.chat_template chatml: line 1: the statement include is not supported")));
  EXPECT_THAT(difference("{{ raise_exception('Roles!') }}", ChatTemplate::chatml), HasSubstr("the template raised an exception: Roles!"));
}

TEST(ChatFiles, AnExportHasTheTemplateThatWasTrained) {
  DataConfig data;
  const Files own = {{.name = "chat_template.jinja", .bytes = kOwnSystem},
                     {.name = "chat_template.json", .bytes = "{}"},
                     {.name = "tokenizer_config.json", .bytes = R"({"b": 1, "chat_template": "c", "a": 2})"}};
  const auto taken = [&](Files files) {
    std::string said = take_chat_template(data, files);
    std::string all;
    for (const TokenizerFile& file : files) all += file.name + "=" + file.bytes + "\n";
    return std::pair(said, all);
  };
  EXPECT_EQ(taken(own).first, "") << "no conversation was trained";
  EXPECT_EQ(taken(own).second,
            "chat_template.jinja=" + own[0].bytes + "\nchat_template.json={}\ntokenizer_config.json=" + own[2].bytes + "\n");
  data.chat_template = ChatTemplate::chatml;
  const std::string written = chat_template_text(ChatTemplate::chatml, {});
  const auto [said, all] = taken(own);
  EXPECT_THAT(said, HasSubstr("chat template chatml, which was trained, in the place of the model's: its chat_template.jinja renders ["));
  EXPECT_EQ(all, "tokenizer_config.json={\n  \"b\": 1,\n  \"a\": 2\n}\n\nchat_template.jinja=" + written + "\n");
  EXPECT_EQ(taken({}), std::pair(std::string("chat template chatml, which was trained"), "chat_template.jinja=" + written + "\n"));
  const std::string same = written + "{# and tools #}";
  EXPECT_EQ(taken(with_template(same)), std::pair(std::string(), "chat_template.jinja=" + same + "\n")) << "the model's can do more";
  data.chat_template = ChatTemplate::harmony;
  data.chat_date = "2026-01-02";
  EXPECT_THAT(taken({}).second, HasSubstr("'2026-01-02'"));
}

}  // namespace mantissa::chat_files_test
