// Reads the objects of JSONL. An object is a text or an example to fine-tune on, in one of these forms, which its keys tell:
//
//   {"text": "..."}                                a document; every token is trained
//   {"tokens": [5, 6, 7], "mask": [0, 1, 1]}       ids, and which of them are trained
//   {"prompt": "...", "completion": "..."}         a text in two parts; the completion is trained, with what ends it
//   {"messages": [{"role": "user", "content": "..."}, ...]}   a conversation; what the assistant says is trained (chat_template.h)
//
// Special tokens that text, prompt and completion spell are these tokens; in the contents of messages they are text like any other
// (docs/huggingface.md, Special tokens).
//
// A message has role (system, only first; user; assistant), content and, of the assistant, thinking or reasoning_content, as templates for
// which it exists call it. Null is as good as absent, tools are refused by name, other keys of an object are ignored. All objects of a file
// have the form of the first.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "mantissa/data/chat_template.h"
#include "mantissa/json/json.h"

namespace mantissa {

enum class LineForm { text, tokens, completion, messages };

// trained[i]: ids[i] is a target that counts. The first token of an example has no context, so it never is one.
struct Example {
  std::vector<int32_t> ids;
  std::vector<bool> trained;
  RepeatedTokens repeated = {};

  void add(std::span<const int32_t> more, bool are_trained);
};

// Functions and ids of a tokenizer that an example needs.
struct TextEncoder {
  std::string name;                                        // for messages: "byte"
  std::vector<int32_t> before_text = {}, after_text = {};  // around a text
  std::function<std::vector<int32_t>(std::string_view text, const TextOrigin& origin, SpecialTokenText special)> encode;
  std::function<std::optional<int32_t>(std::string_view token)> id_of;
};
TextEncoder encoder_of(const Tokenizer& tokenizer);  // the tokenizer must outlive it

struct LineOptions {
  std::optional<TextEncoder> encoder = {};  // needed by all forms but tokens
  int64_t vocab_size = 0;                   // ids must be below
  std::optional<int32_t> appended = {};     // to completions that do not end with it; to texts the reader of the file does
  std::optional<ChatTemplate> chat_template = {};
  std::optional<std::string> chat_date = {};
};

// Reads a line of JSON, whose name begins messages: that of the file with the number of the line. Throws Error(data) with the column.
Json parse_line(std::string_view line, const std::string& name);

// Returns the texts of an object: the document, prompt and completion, or what messages contain. Throws as LineReader::read() does for one
// of no form, and Error(usage) for one of tokens.
std::vector<std::string> texts_of(const Json& object, const std::string& name);

// Returns the ids of a conversation, {"messages": ...}, whose last message is the user's, up to where the answer begins. Throws as
// LineReader::read() does.
std::vector<int32_t> read_chat_prompt(const Json& object, const LineOptions& options, const std::string& name);

class LineReader {
 public:
  explicit LineReader(LineOptions options) : options_(std::move(options)) {}

  // `name` says where the object stands; messages begin with it. Throws Error(data) for one that has none of the forms, another form than
  // the first, or a value that is no such thing; Error(usage) for one that needs what the options lack. A text is not encoded: the example
  // is empty, and text() has it.
  Example read(const Json& object, const std::string& name);
  const std::string& text() const { return text_; }

  std::optional<LineForm> form() const { return form_; }  // none: no object was read

 private:
  LineOptions options_;
  std::optional<LineForm> form_;
  std::string text_;
};

}  // namespace mantissa
