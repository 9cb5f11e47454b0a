// Text and JSONL are tokenized when opened and kept in memory, two or four bytes a token; text of the byte tokenizer stays in its file.

#include "data/token_layout.h"
#include "mantissa/base/utf8.h"
#include "mantissa/json/json.h"
#include "mantissa/json/json_fields.h"

namespace mantissa {
namespace {

// Holds tokens in memory, two bytes each where the vocabulary allows it.
class TokenMemory {
 public:
  TokenMemory(const TokenFileOptions& options, int64_t expected_tokens) : options_(options) {
    layout_.type = options.vocab_size <= 65536 ? ElementType::u16 : ElementType::i32;
    layout_.memory.reserve(static_cast<size_t>(expected_tokens * element_bytes(layout_.type)));
  }

  void add_text(std::string_view text, const TextOrigin& origin) {
    for (const int32_t id : options_.tokenizer->encode(text, origin)) push(id);
  }

  void end_document() {
    if (options_.append_eod) push(*options_.eod_id);
    if (layout_.tokens > document_start_) layout_.document_starts.push_back(document_start_);
    document_start_ = layout_.tokens;
  }

  TokenLayout take() { return std::move(layout_); }

 private:
  void push(int32_t id) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&id);  // little endian: the low bytes come first
    layout_.memory.insert(layout_.memory.end(), bytes, bytes + element_bytes(layout_.type));
    ++layout_.tokens;
  }

  const TokenFileOptions& options_;
  TokenLayout layout_;
  int64_t document_start_ = 0;
};

}  // namespace

TokenLayout text_layout(const InputFile& file, const TokenFileOptions& options) {
  if (options.tokenizer->kind() == TokenizerKind::byte && !options.append_eod) {
    TokenLayout layout{.type = ElementType::u8, .tokens = file.size()};
    if (layout.tokens > 0) layout.document_starts = {0};
    return layout;
  }
  TokenMemory memory(options, file.size() + 1);
  std::string carried;  // a character cut off by the end of the window
  TextOrigin origin{.name = file.path(), .code = ExitCode::data};
  const auto add = [&](std::string_view window, int64_t) {
    carried += window;
    const size_t whole = whole_characters(carried);
    memory.add_text(std::string_view(carried).substr(0, whole), origin);
    carried.erase(0, whole);
    origin.offset += static_cast<int64_t>(whole);
  };
  file.for_each_window(add, options.progressed);
  memory.add_text(carried, origin);
  memory.end_document();
  return memory.take();
}

TokenLayout jsonl_layout(const InputFile& file, const TokenFileOptions& options) {
  TokenMemory memory(options, 0);
  std::string bytes(static_cast<size_t>(file.size()), '\0');
  file.read(0, bytes.data(), file.size());
  int64_t number = 0;
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t end = std::min(bytes.find('\n', begin), bytes.size());
    const std::string_view line(bytes.data() + begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string name = text(file.path(), ", line ", number);
    const Json object = parse_json(line, name);
    memory.add_text(JsonReader(object, name).at("text").as<std::string>(), {.name = name, .code = ExitCode::data});
    memory.end_document();
    if (options.progressed) options.progressed();
  }
  return memory.take();
}

}  // namespace mantissa
