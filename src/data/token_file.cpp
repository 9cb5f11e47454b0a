#include "data/token_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "mantissa/base/text.h"

namespace mantissa {
namespace {

// llm.c shard: 256 x i32 header: [0] magic 20240520, [1] version 1, [2] number of tokens; u16 tokens from byte 1024 to the end of the file.
//   Variant (Llama 3): magic 20240801, version 7, u32 tokens.
// llmq, i32 tokens from byte 1024 on:
//    0  "BIN.TOK\n"
//    8  i32 version 2
//   12  i32 bytes per token, 4
//   16  i32 number of tokens
//   20  i32 vocabulary
//   24  i32 has masks, 0 or 1; files written before there were masks hold "****"
//   With masks, one bit per token follows the tokens, lowest bit first. 0: the prediction made from the token does not count.
// nanoGPT: tokens only, u16 or u32.
// Megatron: PREFIX.bin holds tokens only. PREFIX.idx, unaligned:
//   0 "MMIDIDX\0\0"; 9 u64 version 1; 17 u8 dtype (1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16); 18 u64 S sequences; 26 u64 D;
//   34 i32[S] lengths in tokens; i64[S] byte offsets in the .bin; i64[D]: 0, then for each document the sequence one past its end;
//   i8[S] modes (multimodal only).
// All are little endian, as is every machine this runs on.

static_assert(std::endian::native == std::endian::little);

constexpr int64_t kHeaderBytes = 1024;
constexpr int32_t kLlmcMagic = 20240520, kLlmcMagicWide = 20240801;
constexpr std::string_view kLlmqMagic = "BIN.TOK\n";
constexpr std::string_view kMegatronMagic("MMIDIDX\0\0", 9);

template <class T>
T read_as(const InputFile& file, int64_t offset) {
  T value;
  file.read(offset, &value, sizeof value);
  return value;
}

bool starts_with(const InputFile& file, std::string_view magic) {
  std::string start(magic.size(), '\0');
  if (file.size() < static_cast<int64_t>(magic.size())) return false;
  file.read(0, start.data(), static_cast<int64_t>(start.size()));
  return start == magic;
}

// Says what llm.c's other magic numbers stand for; null: not one of them.
const char* llmc_other(int32_t magic) {
  switch (magic) {
    case 20240326: return "a model";
    case 20240328: return "a tokenizer";
    case 20240522: return "an evaluation set";
    case 20240527: return "an optimizer state";
    default: return nullptr;
  }
}

// Recognizes llm.c or llmq by its magic number, else returns automatic. Throws Error(data) for llm.c's files that hold no tokens.
DataFormat format_by_magic(const InputFile& file) {
  if (file.size() < 4) return DataFormat::automatic;
  const auto magic = read_as<int32_t>(file, 0);
  if (magic == kLlmcMagic || magic == kLlmcMagicWide) return DataFormat::llmc;
  const char* other = llmc_other(magic);
  require(other == nullptr, ExitCode::data, file.path(), ": this is ", other == nullptr ? "" : other, " of llm.c (magic ", magic,
          "), not token data (", kLlmcMagic, " or ", kLlmcMagicWide, ")");
  return starts_with(file, kLlmqMagic) ? DataFormat::llmq : DataFormat::automatic;
}

TokenLayout llmc_layout(const InputFile& file) {
  require(file.size() >= kHeaderBytes, ExitCode::data, file.path(), ": ", file.size(), " bytes, but an llm.c header has 1024");
  format_by_magic(file);
  std::array<int32_t, 3> header;
  file.read(0, header.data(), sizeof header);
  const auto [magic, version, tokens] = header;
  require(magic == kLlmcMagic || magic == kLlmcMagicWide, ExitCode::data, file.path(), ": llm.c token data start with ", kLlmcMagic, " or ",
          kLlmcMagicWide, ", found ", magic);
  const int32_t wanted = magic == kLlmcMagic ? 1 : 7;
  require(version == wanted, ExitCode::data, file.path(), ": llm.c magic ", magic, " goes with version ", wanted, ", found ", version);
  TokenLayout layout{.type = magic == kLlmcMagic ? ElementType::u16 : ElementType::u32, .offset = kHeaderBytes, .tokens = tokens};
  const int64_t expected = kHeaderBytes + tokens * element_bytes(layout.type);
  require(tokens >= 0 && file.size() == expected, ExitCode::data, file.path(), ": the header says ", tokens, " tokens, so ", expected,
          " bytes, but the file has ", file.size());
  return layout;
}

TokenLayout llmq_layout(const InputFile& file) {
  require(file.size() >= kHeaderBytes, ExitCode::data, file.path(), ": ", file.size(), " bytes, but an llmq header has 1024");
  require(starts_with(file, kLlmqMagic), ExitCode::data, file.path(), R"(: llmq token data start with "BIN.TOK\n")");
  std::array<int32_t, 5> header;
  file.read(8, header.data(), sizeof header);
  const auto [version, width, tokens, vocabulary, masks] = header;
  constexpr int32_t kNoMaskField = 0x2A2A2A2A;  // "****"
  require(version == 2 && width == 4, ExitCode::data, file.path(), ": llmq version 2 with 4 bytes a token is read, found version ", version,
          " with ", width, " bytes");
  require(masks == 0 || masks == 1 || masks == kNoMaskField, ExitCode::data, file.path(), ": llmq has_masks must be 0 or 1, found ", masks);
  const int64_t tokens_end = kHeaderBytes + int64_t{tokens} * 4;
  const int64_t expected = tokens_end + (masks == 1 ? (int64_t{tokens} + 7) / 8 : 0);
  require(tokens >= 0 && file.size() == expected, ExitCode::data, file.path(), ": the header says ", tokens, " tokens",
          masks == 1 ? " with masks" : "", ", so ", expected, " bytes, but the file has ", file.size());
  return {.type = ElementType::i32, .offset = kHeaderBytes, .tokens = tokens, .mask_offset = masks == 1 ? tokens_end : -1};
}

TokenLayout nanogpt_layout(const InputFile& file, ElementType type) {
  const int64_t width = element_bytes(type);
  require(file.size() % width == 0, ExitCode::data, file.path(), ": ", file.size(), " bytes are not a whole number of ", width,
          "-byte tokens (data.dtype)");
  return {.type = type, .tokens = file.size() / width};
}

ElementType megatron_type(const InputFile& idx) {
  switch (const auto code = read_as<uint8_t>(idx, 17)) {
    case 1: return ElementType::u8;
    case 2: return ElementType::i8;
    case 3: return ElementType::i16;
    case 4: return ElementType::i32;
    case 5: return ElementType::i64;
    case 8: return ElementType::u16;
    default:
      fail(ExitCode::data, idx.path(), ": dtype code ", int{code}, " is not an integer type (1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16)");
  }
}

// Reads an array of the index in order, in windows.
template <class T>
class ArrayReader {
 public:
  ArrayReader(const InputFile& file, int64_t offset, int64_t count) : file_(file), offset_(offset), left_(count) {}

  T next() {
    if (at_ == window_.size()) {
      window_.resize(static_cast<size_t>(std::min<int64_t>(left_, 1 << 16)));
      const int64_t bytes = static_cast<int64_t>(window_.size() * sizeof(T));
      file_.read(offset_, window_.data(), bytes);
      offset_ += bytes;
      left_ -= static_cast<int64_t>(window_.size());
      at_ = 0;
    }
    return window_[at_++];
  }

 private:
  const InputFile& file_;
  int64_t offset_, left_;
  size_t at_ = 0;
  std::vector<T> window_;
};

TokenLayout megatron_layout(const InputFile& bin, const InputFile& idx) {
  constexpr int64_t kHead = 34;
  require(idx.size() >= kHead && starts_with(idx, kMegatronMagic), ExitCode::data, idx.path(),
          ": not a Megatron index (\"MMIDIDX\" and a header of 34 bytes)");
  const auto version = read_as<uint64_t>(idx, 9), given = read_as<uint64_t>(idx, 18), entries = read_as<uint64_t>(idx, 26);
  require(version == 1, ExitCode::data, idx.path(), ": Megatron index version 1 is read, found ", version);
  const auto room = static_cast<uint64_t>(idx.size() - kHead);
  // Check each count alone first, so that the sum cannot overflow.
  const bool fits = given <= room / 12 && entries <= room / 8;
  const uint64_t without_modes = fits ? 12 * given + 8 * entries : 0;
  require(fits && (without_modes == room || without_modes + given == room), ExitCode::data, idx.path(), ": the header says ", given,
          " sequences and ", entries, " document entries, which does not fit a file of ", idx.size(), " bytes");
  require(entries >= 1, ExitCode::data, idx.path(), ": the document list is empty; it starts with 0");
  const auto sequences = static_cast<int64_t>(given), documents_given = static_cast<int64_t>(entries);
  TokenLayout layout{.type = megatron_type(idx)};
  const int64_t width = element_bytes(layout.type);
  ArrayReader<int32_t> lengths(idx, kHead, sequences);
  ArrayReader<int64_t> offsets(idx, kHead + 4 * sequences, sequences), documents(idx, kHead + 12 * sequences, documents_given);
  int64_t document = documents.next(), documents_read = 1;
  require(document == 0, ExitCode::data, idx.path(), ": document 0 starts at sequence ", document, ", expected 0");
  for (int64_t sequence = 0; sequence <= sequences; ++sequence) {
    if (document == sequence) {
      if (sequence < sequences) layout.document_starts.push_back(layout.tokens);
      while (document == sequence && documents_read < documents_given) document = documents.next(), ++documents_read;
    }
    if (sequence == sequences) break;
    const int64_t length = lengths.next(), offset = offsets.next();
    require(length >= 0 && offset == layout.tokens * width && length <= (bin.size() - offset) / width, ExitCode::data, idx.path(),
            ": sequence ", sequence, " has ", length, " tokens at byte ", offset, ", expected to follow the one before at byte ",
            layout.tokens * width, " inside the ", bin.size(), " bytes of ", bin.path());
    layout.tokens += length;
  }
  require(document == sequences && documents_read == documents_given, ExitCode::data, idx.path(),
          ": the document list must rise from 0 to the number of sequences (", sequences, "); entry ", documents_read - 1, " is ",
          document);
  require(layout.tokens * width == bin.size(), ExitCode::data, bin.path(), ": ", bin.size(), " bytes, but ", idx.path(), " describes ",
          layout.tokens * width);
  auto& starts = layout.document_starts;
  starts.erase(std::unique(starts.begin(), starts.end()), starts.end());  // a document may be empty
  return layout;
}

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
          choice_name(format), ", which already holds tokens");
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

// Calls visit() with a value of the type.
template <class Visit>
int64_t with_type(ElementType type, const Visit& visit) {
  switch (type) {
    case ElementType::u8: return visit(uint8_t{});
    case ElementType::i8: return visit(int8_t{});
    case ElementType::i16: return visit(int16_t{});
    case ElementType::u16: return visit(uint16_t{});
    case ElementType::i32: return visit(int32_t{});
    case ElementType::u32: return visit(uint32_t{});
    case ElementType::i64: return visit(int64_t{});
  }
  fail(ExitCode::internal, "unknown token element type");
}

}  // namespace

std::string with_extension(const std::string& path, const std::string& extension) {
  const bool pair = path.ends_with(".bin") || path.ends_with(".idx");
  return (pair ? path.substr(0, path.size() - 4) : path) + extension;
}

bool file_exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

int64_t element_bytes(ElementType type) {
  return with_type(type, []<class T>(T) { return static_cast<int64_t>(sizeof(T)); });
}

DataFormat recognize_format(const InputFile& file, const Progressed& progressed) {
  const DataFormat by_magic = format_by_magic(file);
  if (by_magic != DataFormat::automatic) return by_magic;
  const std::string& path = file.path();
  if (path.ends_with(".bin")) return file_exists(with_extension(path, ".idx")) ? DataFormat::megatron : DataFormat::nanogpt;
  if (claims_json(file)) return DataFormat::jsonl;
  if (const std::optional<int64_t> bad = first_bad_byte(file, progressed)) {
    fail(ExitCode::data, path, ": is neither a known token file nor UTF-8 text (byte ", *bad,
         " is not); set data.format to one of megatron, llmc, llmq, nanogpt, text, jsonl");
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
  const int64_t bad = with_type(layout_.type, [&]<class T>(T) { return widen<T>(bytes, count, options_.vocab_size, out); });
  if (bad >= 0) {
    const int64_t id = with_type(layout_.type, [&](auto value) {
      std::memcpy(&value, bytes + bad * width, sizeof value);
      return static_cast<int64_t>(value);
    });
    fail(ExitCode::data, path(), ": token ", begin + bad, " is ", id, ", but the vocabulary has ", options_.vocab_size, " ids",
         format_ == DataFormat::nanogpt ? "; nanoGPT files do not say how wide a token is: is data.dtype right?" : "");
  }
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

}  // namespace mantissa
