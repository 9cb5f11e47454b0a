// Text and JSONL: tokenised when opened, so memory is up to four times the file; bytes of the byte tokenizer stay in the file.
#include <nlohmann/json.hpp>

#include "data/token_layout.h"
#include "mantissa/base/json.h"

namespace mantissa {
namespace {

// Tokens in memory, two bytes each where the vocabulary allows it.
class TokenMemory {
 public:
  explicit TokenMemory(const TokenFileOptions& options) : options_(options) {
    layout_.type = options.vocab_size <= 65536 ? ElementType::u16 : ElementType::i32;
  }

  void add_document(std::string_view text, const std::string& name) {
    layout_.document_starts.push_back(layout_.tokens);
    for (const int32_t id : options_.tokenizer->encode(text, {.name = name, .code = ExitCode::data})) push(id);
    if (options_.append_eod) push(*options_.eod_id);
    if (layout_.document_starts.back() == layout_.tokens) layout_.document_starts.pop_back();
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
};

std::string whole_file(const InputFile& file) {
  std::string bytes(static_cast<size_t>(file.size()), '\0');
  file.read(0, bytes.data(), file.size());
  return bytes;
}

}  // namespace

TokenLayout text_layout(const InputFile& file, const TokenFileOptions& options) {
  if (options.tokenizer->kind() == Tokenizer::Kind::byte && !options.append_eod) {
    TokenLayout layout{.type = ElementType::u8, .tokens = file.size()};
    if (layout.tokens > 0) layout.document_starts = {0};
    return layout;
  }
  TokenMemory memory(options);
  memory.add_document(whole_file(file), file.path());
  return memory.take();
}

TokenLayout jsonl_layout(const InputFile& file, const TokenFileOptions& options) {
  TokenMemory memory(options);
  const std::string bytes = whole_file(file);
  int64_t number = 0;
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t end = std::min(bytes.find('\n', begin), bytes.size());
    const std::string_view line(bytes.data() + begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string name = text(file.path(), ", line ", number);
    const auto object = parse_strict_json(line, name);
    require(object.is_object() && object.contains("text") && object["text"].is_string(), ExitCode::data, name,
            ": expected an object whose key \"text\" is a string");
    memory.add_document(object["text"].get_ref<const std::string&>(), name);
  }
  return memory.take();
}

}  // namespace mantissa
