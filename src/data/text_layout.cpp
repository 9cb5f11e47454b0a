// Text and JSONL are tokenized when opened and kept in memory, two or four bytes a token; text of the byte tokenizer stays in its file.

#include <algorithm>

#include "data/example_rows.h"
#include "data/token_layout.h"
#include "mantissa/data/documents.h"

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
    layout_.type = type_in_memory(options.vocab_size);
    layout_.memory.reserve(static_cast<size_t>(expected_tokens * element_bytes(layout_.type)));
  }
  TokenMemory(const TokenMemory&) = delete;
  TokenMemory& operator=(const TokenMemory&) = delete;

  DocumentEncoder& encoder() { return encoder_; }

  TokenLayout take() {
    layout_.repeated = encoder_.repeated();
    return std::move(layout_);
  }

 private:
  void push(int32_t id) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&id);  // little endian: the low bytes come first
    layout_.memory.insert(layout_.memory.end(), bytes, bytes + element_bytes(layout_.type));
    ++layout_.tokens;
    last_ = id;
  }

  void finish_document() {
    if (layout_.tokens == document_start_) return;  // an empty text is no document
    if (options_.append_eod && last_ != options_.eod_id) push(*options_.eod_id);
    layout_.document_starts.push_back(document_start_);
    document_start_ = layout_.tokens;
  }

  const TokenFileOptions& options_;
  TokenLayout layout_;
  int64_t document_start_ = 0;
  int32_t last_ = -1;  // the last of the ids
  DocumentEncoder encoder_;
};

}  // namespace

TokenLayout text_layout(const InputFile& file, const TokenFileOptions& options) {
  if (options.tokenizer->kind() == TokenizerKind::byte && !options.append_eod) {
    TokenLayout layout{.type = ElementType::u8, .tokens = file.size()};
    if (layout.tokens > 0) layout.document_starts = {0};
    return layout;
  }
  TokenMemory memory(options, options.tokenizer->kind() == TokenizerKind::bpe ? 0 : file.size() + 1);
  read_text(file, memory.encoder(), options.progressed);
  return memory.take();
}

TokenLayout jsonl_layout(const InputFile& file, const TokenFileOptions& options) {
  std::optional<TokenMemory> texts;
  if (options.tokenizer != nullptr) texts.emplace(options, 0);
  ExampleRows rows(options.vocab_size, options.row_tokens);
  const LineForm form = read_jsonl(
      file,
      {.encoder = options.tokenizer == nullptr ? std::nullopt : std::optional(encoder_of(*options.tokenizer)),
       .vocab_size = options.vocab_size,
       .appended = options.append_eod ? options.eod_id : std::nullopt,
       .chat_template = options.chat_template,
       .chat_date = options.chat_date},
      {.texts = texts ? &texts->encoder() : nullptr, .example = [&rows](const Example& one) { rows.add(one); }}, options.progressed);
  TokenLayout layout = form == LineForm::text && texts ? texts->take() : rows.take();
  layout.form = form;
  return layout;
}

}  // namespace mantissa
