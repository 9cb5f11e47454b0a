#include "data/example.h"

#include <algorithm>
#include <array>

#include "json/json_fields.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

struct FormKey {
  const char* key;
  LineForm form;
};
constexpr std::array kFormKeys = {FormKey{"text", LineForm::text}, FormKey{"tokens", LineForm::tokens},
                                  FormKey{"completion", LineForm::completion}, FormKey{"messages", LineForm::messages}};

const char* key_of(LineForm form) { return std::ranges::find(kFormKeys, form, &FormKey::form)->key; }

LineForm form_of(const JsonReader& line) {
  line.require(line.value().is_object(), "must be an object, got ", line.value().shown());
  const FormKey* found = nullptr;
  for (const FormKey& known : kFormKeys) {
    if (!line.value().contains(known.key)) continue;
    line.require(found == nullptr, "has both \"", found == nullptr ? "" : found->key, "\" and \"", known.key,
                 "\", but may have only one of them");
    found = &known;
  }
  line.require(found != nullptr, "has none of the keys ",
               joined(kFormKeys, ", ", [](const FormKey& known) { return text('"', known.key, '"'); }),
               "; data.format text trains on the JSON itself");
  return found->form;
}

// Returns the value if it is an integer in [0, end).
std::optional<int32_t> index_of(const Json& value, int64_t end) {
  if (!value.is_integer()) return std::nullopt;
  const Scalar scalar = value.scalar();
  const auto* const integer = std::get_if<int64_t>(&scalar);
  if (integer == nullptr || *integer < 0 || *integer >= end) return std::nullopt;
  return static_cast<int32_t>(*integer);
}

const Json::Entries& list_at(const JsonReader& line, const char* key) {
  const JsonReader list = line.at(key);
  list.require(list.value().is_list(), "must be a list, got ", list.value().shown());
  return list.value().entries();
}

Example read_tokens(const JsonReader& line, int64_t vocab_size) {
  const Json::Entries &ids = list_at(line, "tokens"), &mask = list_at(line, "mask");
  line.require(!ids.empty(), "tokens: is empty");
  line.require(mask.size() == ids.size(), "mask: has ", count_text(mask.size(), "value"), " for ", count_text(ids.size(), "token"));
  Example example;
  example.ids.reserve(ids.size());
  example.trained.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::optional<int32_t> id = index_of(ids[i], vocab_size);
    if (!id) line.fail(text("tokens[", i, "]: must be an id below the vocabulary size ", vocab_size, ", got ", ids[i].shown()));
    const std::optional<int32_t> trained = mask[i].is_boolean() ? std::optional(mask[i] == Json(true) ? 1 : 0) : index_of(mask[i], 2);
    if (!trained) line.fail(text("mask[", i, "]: must be 0 or 1, got ", mask[i].shown()));
    example.ids.push_back(*id);
    example.trained.push_back(*trained == 1);
  }
  return example;
}

std::string string_at(const JsonReader& object, const char* key) { return object.at(key).as<std::string>(); }

bool is_given(const JsonReader& object, const char* key) { return !object.value().get(key).is_null(); }

Example read_completion(const JsonReader& line, const LineOptions& options, const std::string& name) {
  const TextOrigin origin{.name = name, .code = ExitCode::data};
  const TextEncoder& encoder = *options.encoder;
  const std::string completion = string_at(line, "completion");
  const std::vector<int32_t> prompt = encoder.encode(string_at(line, "prompt"), origin, SpecialTokenText::tokens);
  line.require(!completion.empty() || options.appended || !encoder.after_text.empty(),
               "completion: is empty, so there is nothing to learn");
  const std::vector<int32_t> learned = encoder.encode(completion, origin, SpecialTokenText::tokens);
  Example example;
  example.add(encoder.before_text, false);
  example.add(prompt, false);
  example.add(learned, true);
  example.add(encoder.after_text, true);
  const bool ended = !example.ids.empty() && example.trained.back() && example.ids.back() == options.appended;
  if (options.appended && !ended) example.add(std::span(&*options.appended, 1), true);
  example.repeated = {.begins = begins_with(prompt, encoder.before_text) ? 1 : 0, .ends = ends_with(learned, encoder.after_text) ? 1 : 0};
  return example;
}

constexpr const char* kNoTools =
    "tools are not rendered; scripts/interop/chat_tokens.py writes tokens and mask with the model's own template";

void refuse_tools(const JsonReader& object, std::span<const char* const> keys) {
  for (const char* const key : keys) {
    const Json& value = object.value().get(key);
    if (!value.is_null() && !(value.is_list() && value.size() == 0)) object.at(key).fail(kNoTools);
  }
}

ChatMessage read_message(const JsonReader& message, ChatTemplate which, bool first) {
  constexpr std::array kToolKeys = {"tool_calls", "tool_call_id", "function_call"};
  constexpr std::array<std::string_view, 4> kKeys = {"role", "content", "thinking", "reasoning_content"};
  const JsonReader role = message.at("role");
  const std::string name = role.as<std::string>();
  role.require(name != "tool" && name != "function" && name != "ipython", "is ", name, ", but ", kNoTools);
  const std::optional<ChatRole> known_role = choice_of<ChatRole>(name);
  role.require(known_role.has_value(), "must be system, user or assistant, got \"", shortened(name), '"');
  role.require(*known_role != ChatRole::system || first, "a system message must be the first");
  refuse_tools(message, kToolKeys);
  for (const auto& [key, value] : message.value().members()) {
    const bool known = std::ranges::find(kKeys, key) != kKeys.end() || value.is_null() || (value.is_list() && value.size() == 0);
    message.require(known, "has an unknown key \"", shortened(key), "\"; role, content, thinking and reasoning_content are known");
  }
  const JsonReader content = message.at("content");
  ChatMessage read{.role = *known_role, .content = content.as<std::string>()};
  const bool thinking = is_given(message, "thinking"), reasoning = is_given(message, "reasoning_content");
  message.require(!thinking || !reasoning, "has both thinking and reasoning_content, but may have only one of them");
  if (thinking || reasoning) {
    const JsonReader given = message.at(thinking ? "thinking" : "reasoning_content");
    given.require(read.role == ChatRole::assistant, "only messages of the assistant may have reasoning");
    given.require(shows_thinking(which), "data.chat_template ", choice_name(which), " has no place for reasoning");
    read.thinking = given.as<std::string>();
  }
  content.require(which != ChatTemplate::harmony || read.content.find("<|channel|>") == std::string::npos,
                  "contains <|channel|>; give the reasoning in thinking");
  return read;
}

std::vector<ChatMessage> read_messages(const JsonReader& line, ChatTemplate which) {
  constexpr std::array kToolKeys = {"tools", "functions"};
  refuse_tools(line, kToolKeys);
  const JsonReader list = line.at("messages");
  std::vector<ChatMessage> messages;
  for (const JsonReader& message : list.entries()) {
    message.require(message.value().is_object(), "must be an object, got ", message.value().shown());
    messages.push_back(read_message(message, which, messages.empty()));
  }
  return messages;
}

Example encoded(std::span<const ChatPiece> pieces, const LineOptions& options, const std::string& name) {
  Example example;
  for (const ChatPiece& piece : pieces) {
    if (!piece.special) {
      example.add(options.encoder->encode(piece.text, {.name = name, .code = ExitCode::data}, SpecialTokenText::text), piece.trained);
      continue;
    }
    const std::optional<int32_t> id = options.encoder->id_of(piece.text);
    if (!id) {
      fail(ExitCode::usage, "data.chat_template: ", choice_name(*options.chat_template), " needs the token ", piece.text, ", which the ",
           options.encoder->name,
           " tokenizer lacks: use another template, or train a tokenizer with tokenize --train-vocab --chat-template");
    }
    require(*id < options.vocab_size, ExitCode::usage, "model.vocab_size: ", options.vocab_size, " leaves out the token ", piece.text,
            ", whose id is ", *id);
    example.add(std::span(&*id, 1), piece.trained);
  }
  return example;
}

ChatTemplate template_of(const LineOptions& options, const std::string& name) {
  require(options.chat_template.has_value(), ExitCode::usage, "data.chat_template: ", name,
          " has \"messages\", which need a template: ", joined(choice_names<ChatTemplate>()));
  return *options.chat_template;
}

Example read_conversation(const JsonReader& line, const LineOptions& options, const std::string& name) {
  const ChatTemplate which = template_of(options, name);
  const std::vector<ChatMessage> messages = read_messages(line, which);
  line.at("messages")
      .require(std::ranges::find(messages, ChatRole::assistant, &ChatMessage::role) != messages.end(),
               "has no message of the assistant, so there is nothing to learn");
  return encoded(render_chat(which, messages, options.chat_date), options, name);
}

}  // namespace

void Example::add(std::span<const int32_t> more, bool are_trained) {
  ids.insert(ids.end(), more.begin(), more.end());
  trained.resize(ids.size(), are_trained);
}

TextEncoder encoder_of(const Tokenizer& tokenizer) {
  const std::span<const int32_t> before = tokenizer.before_text(), after = tokenizer.after_text();
  return {.name = choice_name(tokenizer.kind()),
          .before_text = {before.begin(), before.end()},
          .after_text = {after.begin(), after.end()},
          .encode = [&tokenizer](std::string_view text, const TextOrigin& origin,
                                 SpecialTokenText special) { return tokenizer.encode(text, origin, special); },
          .id_of = [&tokenizer](std::string_view token) { return tokenizer.id_of(token); }};
}

Json parse_line(std::string_view line, const std::string& name) {
  ParsedJson parsed = parse_strict_json(line);
  if (parsed.problems.empty()) return std::move(parsed.root);
  const JsonProblem& first = parsed.problems.front();
  const std::string place = TextLines(line).at(first.offset);  // "1:17"
  const bool is_object = line.substr(std::min(line.find_first_not_of(" \t"), line.size())).starts_with('{');
  const bool breaks_off = is_object && first.offset > line.find_last_not_of(" \t\r");
  fail(ExitCode::data, name, ", column ", place.substr(place.find(':') + 1), ": ", first.message,
       breaks_off ? "; an object must be on one line, unless the file is a list of objects" : "");
}

std::vector<std::string> texts_of(const Json& object, const std::string& name) {
  const JsonReader reader(object, name);
  std::vector<std::string> texts;
  const auto take = [&texts](const JsonReader& of, std::initializer_list<const char*> keys) {
    of.require(of.value().is_object(), "must be an object, got ", of.value().shown());
    for (const char* const key : keys)
      if (is_given(of, key)) texts.push_back(string_at(of, key));
  };
  const LineForm form = form_of(reader);
  require(form != LineForm::tokens, ExitCode::usage, name, ": has \"tokens\", but a tokenizer is trained on texts");
  if (form == LineForm::text) return {string_at(reader, "text")};
  if (form == LineForm::completion) return {string_at(reader, "prompt"), string_at(reader, "completion")};
  for (const JsonReader& message : reader.at("messages").entries()) take(message, {"content", "thinking", "reasoning_content"});
  return texts;
}

std::vector<int32_t> read_chat_prompt(const Json& object, const LineOptions& options, const std::string& name) {
  const JsonReader reader(object, name);
  reader.require(object.is_object(), "must be an object, got ", object.shown());
  const ChatTemplate which = template_of(options, name);
  const std::vector<ChatMessage> messages = read_messages(reader, which);
  reader.at("messages")
      .require(!messages.empty() && messages.back().role == ChatRole::user,
               "must end with a message of the user, which the assistant answers");
  return encoded(render_chat_prompt(which, messages, options.chat_date), options, name).ids;
}

Example LineReader::read(const Json& object, const std::string& name) {
  const JsonReader reader(object, name);
  const LineForm form = form_of(reader);
  reader.require(!form_ || form == *form_, "has \"", key_of(form), "\", but the lines before have \"", key_of(form_.value_or(form)),
                 "\"; all lines of a file must have one form");
  require(form_ || form != LineForm::tokens || !options_.appended, ExitCode::usage,
          "data.append_eod: applies to texts and completions, but ", name, " has \"tokens\", which are complete");
  form_ = form;
  if (form == LineForm::tokens) return read_tokens(reader, options_.vocab_size);
  if (form == LineForm::text) {
    text_ = string_at(reader, "text");
    return {};
  }
  require(options_.encoder.has_value(), ExitCode::usage, "data.tokenizer: ", name, " has \"", key_of(form),
          "\", which needs a tokenizer (byte, char or a tokenizer.json)");
  return form == LineForm::messages ? read_conversation(reader, options_, name) : read_completion(reader, options_, name);
}

}  // namespace mantissa
