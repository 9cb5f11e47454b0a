#include "mantissa/hf/chat_files.h"

#include <algorithm>
#include <array>

#include "mantissa/hf/hf_weights.h"
#include "mantissa/json/json.h"
#include "mantissa/text/jinja.h"

namespace mantissa {
namespace {

constexpr const char* kTemplateFile = "chat_template.jinja";
constexpr const char* kOlderFile = "chat_template.json";
constexpr const char* kTokenizerConfig = "tokenizer_config.json";
constexpr const char* kTemplateKey = "chat_template";

struct Conversation {
  std::vector<ChatMessage> messages;
  bool asks;  // for an answer
};

// Two conversations: the first shows a default system message and the end of a conversation, the second a given one, an earlier answer and
// how an answer is asked for.
std::array<Conversation, 2> conversations() {
  const ChatMessage hi{.role = ChatRole::user, .content = "Hi"}, hello{.role = ChatRole::assistant, .content = "Hello."};
  return {Conversation{.messages = {hi, hello}, .asks = false},
          Conversation{.messages = {{.role = ChatRole::system, .content = "Be brief."},
                                    hi,
                                    hello,
                                    {.role = ChatRole::user, .content = "What is 2 + 2?"}},
                       .asks = true}};
}

Json json_of(const std::vector<ChatMessage>& messages) {
  Json::Entries out;
  for (const ChatMessage& message : messages) out.push_back({{"role", choice_name(message.role)}, {"content", message.content}});
  return out;
}

const TokenizerFile* file_named(const std::vector<TokenizerFile>& files, const char* name) {
  const auto found = std::ranges::find(files, name, &TokenizerFile::name);
  return found == files.end() ? nullptr : &*found;
}

Json json_in(const std::vector<TokenizerFile>& files, const char* name) {
  const TokenizerFile* const file = file_named(files, name);
  return file != nullptr ? parse_json_or_null(file->bytes) : Json();
}

// Returns the template at the key, which has one, or a list of them with names.
std::optional<std::string> template_in(const Json& config) {
  const Json& value = config.get(kTemplateKey);
  if (value.is_string()) return value.string();
  for (const Json& one : value.entries())
    if (one.get("name") == Json("default") && one.get("template").is_string()) return one.get("template").string();
  return std::nullopt;
}

// transformers gives a template the texts of the tokenizer's special tokens by the names of the roles that they have.
void add_special_tokens(const Json& tokenizer_config, Json& variables) {
  for (const auto& [name, value] : tokenizer_config.members()) {
    const Json& token = value.is_object() ? value.get("content") : value;
    if (name.ends_with("_token") && token.is_string()) variables[name] = token;
  }
}

std::string rendered(const Conversation& conversation, ChatTemplate which, const std::optional<std::string>& date) {
  const auto pieces =
      conversation.asks ? render_chat_prompt(which, conversation.messages, date) : render_chat(which, conversation.messages, date);
  return joined(pieces, "", &ChatPiece::text);
}

std::string rendered(const Conversation& conversation, const FolderTemplate& by, const Json& tokenizer_config, ChatTemplate which,
                     const std::optional<std::string>& date) {
  Json variables = Json::Members();
  variables["messages"] = json_of(conversation.messages);
  variables["add_generation_prompt"] = conversation.asks;
  variables["tools"] = variables["documents"] = Json();
  if (date) variables["date_string"] = *date;
  add_special_tokens(tokenizer_config, variables);
  const std::string today = date.value_or(which == ChatTemplate::llama3 ? kLlama3Date : "");
  return render_jinja(by.text, {.variables = variables, .strftime_now = [today](const std::string&) { return today; }});
}

// A part of the text around the byte, in quotation marks.
std::string around(const std::string& text, size_t byte) {
  size_t begin = byte > kShownCharacters / 2 ? byte - kShownCharacters / 2 : 0;
  while (begin > 0 && begin < text.size() && continues_character(text[begin])) --begin;
  return Json((begin > 0 ? "..." : "") + shortened(std::string_view(text).substr(begin), 2 * kShownCharacters)).dump();
}

}  // namespace

std::optional<FolderTemplate> folder_template(const std::vector<TokenizerFile>& files) {
  if (const TokenizerFile* const own = file_named(files, kTemplateFile)) return FolderTemplate{.file = kTemplateFile, .text = own->bytes};
  for (const char* const name : {kTokenizerConfig, kOlderFile})
    if (std::optional<std::string> found = template_in(json_in(files, name)))
      return FolderTemplate{.file = name, .text = std::move(*found)};
  return std::nullopt;
}

std::vector<TokenizerFile> files_beside_tokenizer(const std::filesystem::path& tokenizer) {
  std::error_code unknown;
  const std::filesystem::path folder = std::filesystem::is_directory(tokenizer, unknown) ? tokenizer : tokenizer.parent_path();
  std::vector<TokenizerFile> files;
  for (const char* const name : {kTemplateFile, kTokenizerConfig, kOlderFile})
    if (std::filesystem::is_regular_file(folder / name, unknown)) files.push_back({.name = name, .bytes = hf_file(folder, name)});
  return files;
}

std::string chat_template_difference(const std::vector<TokenizerFile>& files, ChatTemplate which, const std::optional<std::string>& date) {
  const std::optional<FolderTemplate> own = folder_template(files);
  if (!own) return "";
  const Json config = json_in(files, kTokenizerConfig);
  for (const Conversation& conversation : conversations()) {
    const std::string messages = json_of(conversation.messages).dump(-1, Json::Order::keys), here = rendered(conversation, which, date);
    std::string there;
    try {
      there = rendered(conversation, *own, config, which, date);
    } catch (const Error& error) {
      return text("its ", own->file, " does not render ", messages, " here, so it may differ from data.chat_template ", choice_name(which),
                  ": ", error.what());
    }
    if (there == here) continue;
    const auto [first, other] = std::ranges::mismatch(there, here);
    const auto at = static_cast<size_t>(first - there.begin());
    return text("its ", own->file, " renders ", messages, conversation.asks ? " and the begin of an answer" : "", " as ", around(there, at),
                ", data.chat_template ", choice_name(which), " as ", around(here, at));
  }
  return "";
}

std::string take_chat_template(const DataConfig& data, std::vector<TokenizerFile>& files) {
  if (!data.chat_template) return "";
  const std::string name = choice_name(*data.chat_template),
                    difference = chat_template_difference(files, *data.chat_template, data.chat_date);
  const std::optional<FolderTemplate> before = folder_template(files);
  if (before && difference.empty()) return "";
  std::erase_if(files, [](const TokenizerFile& file) { return file.name == kTemplateFile || file.name == kOlderFile; });
  for (TokenizerFile& file : files) {
    if (file.name != kTokenizerConfig) continue;
    Json config = parse_json_or_null(file.bytes);
    if (config.is_object() && config.members().erase(kTemplateKey) > 0) file.bytes = config.dump(2, Json::Order::keys) + "\n";
  }
  files.push_back({.name = kTemplateFile, .bytes = chat_template_text(*data.chat_template, data.chat_date)});
  return text("chat template ", name,
              before ? text(", which was trained, in the place of the model's: ", difference) : ", which was trained");
}

}  // namespace mantissa
