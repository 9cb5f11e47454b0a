// Reads the lines of JSONL. A line is a text or an example to fine-tune on, in one of these forms, which its keys tell:
//
//   {"text": "..."}                                a document; every token is trained
//   {"tokens": [5, 6, 7], "mask": [0, 1, 1]}       ids, and which of them are trained
//   {"prompt": "...", "completion": "..."}         text; the completion is trained, with the end token if one is appended
//   {"messages": [{"role": "user", "content": "..."}, ...]}   a conversation; what the assistant says is trained (chat_template.h)
//
// A message has role (system, only first; user; assistant), content and, of the assistant, thinking or reasoning_content, as templates for
// which it exists call it. Null is as good as absent, tools are refused by name, other keys of a line are ignored. All lines of a file have
// the form of the first.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/data/chat_template.h"
#include "mantissa/data/tokenizer.h"

namespace mantissa {

enum class LineForm { text, tokens, completion, messages };

// trained[i]: ids[i] is a target that counts. The first token of an example has no context, so it never is one.
struct Example {
  std::vector<int32_t> ids;
  std::vector<bool> trained;

  void add(std::span<const int32_t> more, bool are_trained);
};

// What an example needs of a tokenizer.
struct TextEncoder {
  std::string name;                                                                             // for messages: "byte"
  std::vector<int32_t> before_text = {};                                                        // begins a prompt
  std::function<std::vector<int32_t>(std::string_view text, const TextOrigin& origin)> encode;  // names of tokens in it are text
  std::function<std::optional<int32_t>(std::string_view token)> id_of;
};
TextEncoder encoder_of(const Tokenizer& tokenizer);  // which must outlive it

struct LineOptions {
  std::optional<TextEncoder> encoder = {};  // needed by all forms but tokens
  int64_t vocab_size = 0;                   // ids must be below
  std::optional<int32_t> appended = {};     // to completions; to texts the reader of the file does
  std::optional<ChatTemplate> chat_template = {};
  std::optional<std::string> chat_date = {};
};

// Returns the texts of a line: the document, prompt and completion, or what messages contain. Throws as LineReader::read() does for a line
// of no form, and Error(usage) for one of tokens.
std::vector<std::string> texts_of(std::string_view line, const std::string& name);

// Returns the ids of a conversation, {"messages": ...}, whose last message is the user's, up to where the answer begins. Throws as
// LineReader::read() does.
std::vector<int32_t> read_chat_prompt(std::string_view line, const LineOptions& options, const std::string& name);

class LineReader {
 public:
  explicit LineReader(LineOptions options) : options_(std::move(options)) {}

  // `name` is that of the file with the number of the line; messages begin with it. Throws Error(data) for a line that has none of the
  // forms, another form than the first line, or a value that is no such thing; Error(usage) for one that needs what the options lack.
  // A text is not encoded: the example is empty, and text() has it.
  Example read(std::string_view line, const std::string& name);
  const std::string& text() const { return text_; }

  std::optional<LineForm> form() const { return form_; }  // none: no line was read

 private:
  LineOptions options_;
  std::optional<LineForm> form_;
  std::string text_;
};

}  // namespace mantissa
