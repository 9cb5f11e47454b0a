// Text and JSONL are tokenized when opened and kept in memory, two or four bytes a token; text of the byte tokenizer stays in its file.

#include <algorithm>

#include "data/token_layout.h"
#include "mantissa/data/documents.h"
#include "mantissa/json/json.h"
#include "mantissa/json/json_fields.h"

namespace mantissa {
namespace {

// Holds tokens in memory, two bytes each where the vocabulary allows it.
class TokenMemory {
 public:
  TokenMemory(const TokenFileOptions& options, int64_t expected_tokens)
      : options_(options),
        encoder_(*options.tokenizer,
                 {.ids = [this](std::span<const int32_t> ids) { std::ranges::for_each(ids, [this](int32_t id) { push(id); }); },
                  .end_of_document = [this] { finish_document(); }}) {
    layout_.type = options.vocab_size <= 65536 ? ElementType::u16 : ElementType::i32;
    layout_.memory.reserve(static_cast<size_t>(expected_tokens * element_bytes(layout_.type)));
  }
  TokenMemory(const TokenMemory&) = delete;
  TokenMemory& operator=(const TokenMemory&) = delete;

  DocumentEncoder& encoder() { return encoder_; }

  TokenLayout take() { return std::move(layout_); }

 private:
  void push(int32_t id) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&id);  // little endian: the low bytes come first
    layout_.memory.insert(layout_.memory.end(), bytes, bytes + element_bytes(layout_.type));
    ++layout_.tokens;
  }

  void finish_document() {
    if (options_.append_eod) push(*options_.eod_id);
    if (layout_.tokens > document_start_) layout_.document_starts.push_back(document_start_);
    document_start_ = layout_.tokens;
  }

  const TokenFileOptions& options_;
  TokenLayout layout_;
  int64_t document_start_ = 0;
  DocumentEncoder encoder_;
};

}  // namespace

void encode_text(const InputFile& file, DocumentEncoder& encoder, const Progressed& progressed) {
  const auto origin = [&file](int64_t offset) { return TextOrigin{.name = file.path(), .code = ExitCode::data, .offset = offset}; };
  file.for_each_window([&](std::string_view window, int64_t offset) { encoder.add(window, origin(offset)); }, progressed);
  encoder.end_document(origin(file.size()));
  encoder.flush();
}

void for_each_text(const InputFile& file, const std::function<void(const std::string&, const TextOrigin&)>& visit,
                   const Progressed& progressed) {
  const auto read = [&](std::string_view line, int64_t number, int64_t) {
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
    const std::string name = text(file.path(), ", line ", number);
    const Json object = parse_json_line(line, name);
    visit(JsonReader(object, name).at("text").as<std::string>(), {.name = name, .code = ExitCode::data});
  };
  file.for_each_line(read, progressed);
}

void encode_jsonl(const InputFile& file, DocumentEncoder& encoder, const Progressed& progressed) {
  const auto encode = [&encoder](const std::string& content, const TextOrigin& origin) {
    encoder.add(content, origin);
    encoder.end_document(origin);
  };
  for_each_text(file, encode, progressed);
  encoder.flush();
}

TokenLayout text_layout(const InputFile& file, const TokenFileOptions& options) {
  if (options.tokenizer->kind() == TokenizerKind::byte && !options.append_eod) {
    TokenLayout layout{.type = ElementType::u8, .tokens = file.size()};
    if (layout.tokens > 0) layout.document_starts = {0};
    return layout;
  }
  TokenMemory memory(options, options.tokenizer->kind() == TokenizerKind::bpe ? 0 : file.size() + 1);
  encode_text(file, memory.encoder(), options.progressed);
  return memory.take();
}

TokenLayout jsonl_layout(const InputFile& file, const TokenFileOptions& options) {
  TokenMemory memory(options, 0);
  encode_jsonl(file, memory.encoder(), options.progressed);
  return memory.take();
}

}  // namespace mantissa
