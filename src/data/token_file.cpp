#include "mantissa/data/token_file.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "data/token_layout.h"
#include "mantissa/base/utf8.h"
#include "mantissa/data/documents.h"

namespace mantissa {
namespace {

// Returns where the file stops being UTF-8; its size if its end cuts a character off; none if it is UTF-8.
std::optional<int64_t> first_bad_byte(const InputFile& file, const Progressed& progressed) {
  Utf8Decoder decoder;
  std::optional<int64_t> bad;
  const auto decode = [&](std::string_view bytes, int64_t offset) {
    for (size_t i = 0; !bad && i < bytes.size(); ++i)
      if (decoder.feed(static_cast<uint8_t>(bytes[i])) == Utf8Decoder::Status::invalid) bad = offset + static_cast<int64_t>(i);
  };
  file.for_each_window(decode, progressed);
  return bad || decoder.between_characters() ? bad : file.size();
}

bool is_text(DataFormat format) { return format == DataFormat::text || format == DataFormat::jsonl; }

// Resolves the names of a Megatron pair, which may be its prefix or its .idx.
std::string data_path(const std::string& path, DataFormat format) {
  const bool pair = format == DataFormat::megatron || path.ends_with(".idx") || !file_exists(path);
  const std::string bin = with_extension(path, ".bin");
  return pair && file_exists(bin) && file_exists(with_extension(path, ".idx")) ? bin : path;
}

TokenLayout layout_of(const InputFile& file, DataFormat format, const TokenFileOptions& options) {
  switch (format) {
    case DataFormat::llmc: return llmc_layout(file);
    case DataFormat::llmq: return llmq_layout(file);
    case DataFormat::nanogpt: return nanogpt_layout(file, options.dtype == TokenDtype::u16 ? ElementType::u16 : ElementType::u32);
    case DataFormat::megatron: return megatron_layout(file, InputFile(with_extension(file.path(), ".idx")));
    case DataFormat::text: return text_layout(file, options);
    case DataFormat::jsonl: return jsonl_layout(file, options);
    case DataFormat::automatic: break;
  }
  fail(ExitCode::internal, "a token file's format is resolved before it is read");
}

void check_options(const InputFile& file, DataFormat format, const TokenFileOptions& options) {
  require(options.vocab_size > 0, "token file without a vocabulary size");
  require(!options.eod_id || (*options.eod_id >= 0 && *options.eod_id < options.vocab_size), ExitCode::usage,
          "data.eod_id: ", options.eod_id.value_or(0), " is not below the vocabulary size ", options.vocab_size);
  require(!options.append_eod || is_text(format), ExitCode::usage, "data.append_eod: applies to text and JSONL, but ", file.path(), " is ",
          choice_name(format), ", which holds tokens already");
  require(!options.append_eod || options.eod_id, ExitCode::usage, "data.append_eod: needs data.eod_id (this tokenizer has no end token)");
  require(format != DataFormat::text || options.tokenizer != nullptr, ExitCode::usage, "data.tokenizer: ", file.path(),
          " is text and needs a tokenizer (byte, char or a tokenizer.json)");
}

// Widens `count` values of T. Returns the index of the first that is no id below vocab, or -1.
template <class T>
int64_t widen(const std::byte* bytes, int64_t count, int64_t vocab, int32_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, bytes + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    if (std::cmp_less(value, 0) || std::cmp_greater_equal(value, vocab)) return i;
    out[i] = static_cast<int32_t>(value);
  }
  return -1;
}

int64_t widen(ElementType type, const std::byte* bytes, int64_t count, int64_t vocab, int32_t* out) {
  switch (type) {
    case ElementType::u8: return widen<uint8_t>(bytes, count, vocab, out);
    case ElementType::i8: return widen<int8_t>(bytes, count, vocab, out);
    case ElementType::i16: return widen<int16_t>(bytes, count, vocab, out);
    case ElementType::u16: return widen<uint16_t>(bytes, count, vocab, out);
    case ElementType::i32: return widen<int32_t>(bytes, count, vocab, out);
    case ElementType::u32: return widen<uint32_t>(bytes, count, vocab, out);
    case ElementType::i64: return widen<int64_t>(bytes, count, vocab, out);
  }
  fail(ExitCode::internal, "unknown token element type");
}

int64_t value_at(ElementType type, const std::byte* bytes) {
  const auto load = [bytes]<class T>(T value) {
    std::memcpy(&value, bytes, sizeof value);
    return static_cast<int64_t>(value);
  };
  switch (type) {
    case ElementType::u8: return load(uint8_t{});
    case ElementType::i8: return load(int8_t{});
    case ElementType::i16: return load(int16_t{});
    case ElementType::u16: return load(uint16_t{});
    case ElementType::i32: return load(int32_t{});
    case ElementType::u32: return load(uint32_t{});
    case ElementType::i64: return load(int64_t{});
  }
  return 0;
}

}  // namespace

int64_t element_bytes(ElementType type) {
  switch (type) {
    case ElementType::u8:
    case ElementType::i8: return 1;
    case ElementType::i16:
    case ElementType::u16: return 2;
    case ElementType::i32:
    case ElementType::u32: return 4;
    case ElementType::i64: return 8;
  }
  fail(ExitCode::internal, "unknown token element type");
}

DataFormat recognize_format(const InputFile& file, const Progressed& progressed) {
  const DataFormat by_magic = format_by_magic(file);
  if (by_magic != DataFormat::automatic) return by_magic;
  const std::string& path = file.path();
  if (path.ends_with(".bin")) return file_exists(with_extension(path, ".idx")) ? DataFormat::megatron : DataFormat::nanogpt;
  if (claims_json(file)) return DataFormat::jsonl;
  if (const std::optional<int64_t> bad = first_bad_byte(file, progressed)) {
    fail(ExitCode::data, path, ": neither a known token file nor UTF-8 text, which ends at byte ", *bad,
         "; set data.format to one of megatron, llmc, llmq, nanogpt, text, jsonl");
  }
  return DataFormat::text;
}

TokenFile::TokenFile(const std::string& path, const TokenFileOptions& options)
    : options_(options), file_(data_path(path, options.format)), format_(options.format) {
  if (format_ == DataFormat::automatic) format_ = recognize_format(file_, options_.progressed);
  check_options(file_, format_, options_);
  layout_ = layout_of(file_, format_, options_);
  options_.tokenizer = nullptr;  // used for opening only: they need not outlive that
  options_.progressed = nullptr;
  files_ = {file_.path()};
  if (format_ == DataFormat::megatron) files_.push_back(with_extension(file_.path(), ".idx"));
}

void TokenFile::read(int64_t begin, int64_t count, int32_t* out, uint8_t* marks) const {
  require(begin >= 0 && count >= 0 && begin <= tokens() - count, "tokens ", begin, " + ", count, " of ", tokens(), " in ", path());
  const int64_t width = element_bytes(layout_.type);
  std::vector<std::byte> window;
  const std::byte* bytes = layout_.memory.data() + begin * width;
  if (layout_.memory.empty()) {
    window.resize(static_cast<size_t>(count * width));
    file_.read(layout_.offset + begin * width, window.data(), count * width);
    bytes = window.data();
  }
  const int64_t bad = widen(layout_.type, bytes, count, options_.vocab_size, out);
  if (bad >= 0) fail_id(begin + bad, value_at(layout_.type, bytes + bad * width));
  if (marks == nullptr) return;
  const bool indexed = !layout_.document_starts.empty();
  const uint8_t eod_mark = indexed ? end_token : format_ == DataFormat::llmc ? end_token | starts_document : end_token | ends_document;
  for (int64_t i = 0; i < count; ++i) marks[i] = options_.eod_id == out[i] ? eod_mark : uint8_t{0};
  if (indexed) mark_indexed(begin, count, marks);
  if (layout_.mask_offset >= 0) mark_masked(begin, count, marks);
  for (int64_t i = 0; i < count && !layout_.trained.empty(); ++i) {
    if (!layout_.trained[static_cast<size_t>(begin + i)]) marks[i] |= untrained;
  }
  for (int64_t i = 0; i < count && !layout_.padding.empty(); ++i) {
    if (layout_.padding[static_cast<size_t>(begin + i)]) marks[i] |= fills_row;
  }
}

void TokenFile::mark_indexed(int64_t begin, int64_t count, uint8_t* marks) const {
  const auto& starts = layout_.document_starts;
  const auto mark = [&](int64_t position, uint8_t what) {
    if (position >= begin && position < begin + count) marks[position - begin] |= what;
  };
  for (auto start = std::lower_bound(starts.begin(), starts.end(), begin); start != starts.end() && *start <= begin + count; ++start) {
    mark(*start, starts_document);
    mark(*start - 1, ends_document);
  }
  mark(tokens() - 1, ends_document);
}

void TokenFile::mark_masked(int64_t begin, int64_t count, uint8_t* marks) const {
  const int64_t first = begin / 8, last = (begin + count + 7) / 8;
  std::vector<uint8_t> bits(static_cast<size_t>(last - first));
  file_.read(layout_.mask_offset + first, bits.data(), last - first);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = begin + i;
    const bool trained = (bits[static_cast<size_t>(position / 8 - first)] >> (position % 8)) & 1;
    if (!trained) marks[i] |= untrained;
  }
}

void TokenFile::fail_id(int64_t position, int64_t id) const {
  fail(ExitCode::data, path(), ": token ", position, " is ", id, ", but the vocabulary has ", options_.vocab_size, " ids",
       format_ == DataFormat::nanogpt ? "; nanoGPT files do not say how wide a token is: is data.dtype right?" : "");
}

}  // namespace mantissa
