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
#include "data/token_layout.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <limits>

namespace mantissa {
namespace {

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

}  // namespace

std::string with_extension(const std::string& path, const std::string& extension) {
  const bool pair = path.ends_with(".bin") || path.ends_with(".idx");
  return (pair ? path.substr(0, path.size() - 4) : path) + extension;
}

bool file_exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

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
  require(file.size() % width == 0, ExitCode::data, file.path(), ": ", file.size(), " bytes are no whole number of ", width,
          "-byte tokens (data.dtype)");
  return {.type = type, .tokens = file.size() / width};
}

namespace {

ElementType megatron_type(const InputFile& idx) {
  switch (const auto code = read_as<uint8_t>(idx, 17)) {
    case 1: return ElementType::u8;
    case 2: return ElementType::i8;
    case 3: return ElementType::i16;
    case 4: return ElementType::i32;
    case 5: return ElementType::i64;
    case 8: return ElementType::u16;
    default: fail(ExitCode::data, idx.path(), ": dtype code ", int{code}, " is no integer type (1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16)");
  }
}

struct MegatronIndex {
  int64_t sequences = 0, documents = 0;                     // documents: entries of document_indices, one more than there are documents
  int64_t lengths = 34, offsets = 0, document_indices = 0;  // where the arrays start
};

MegatronIndex megatron_index(const InputFile& idx) {
  require(idx.size() >= 34 && starts_with(idx, kMegatronMagic), ExitCode::data, idx.path(),
          ": not a Megatron index (\"MMIDIDX\" and a header of 34 bytes)");
  const auto version = read_as<uint64_t>(idx, 9);
  require(version == 1, ExitCode::data, idx.path(), ": Megatron index version 1 is read, found ", version);
  const auto sequences = read_as<uint64_t>(idx, 18), documents = read_as<uint64_t>(idx, 26);
  const auto room = static_cast<uint64_t>(idx.size() - 34);
  // Check each count alone first, so that the sum cannot overflow.
  const bool fits = sequences <= room / 12 && documents <= room / 8;
  const uint64_t without_modes = fits ? 12 * sequences + 8 * documents : 0;
  require(fits && (without_modes == room || without_modes + sequences == room), ExitCode::data, idx.path(), ": the header says ", sequences,
          " sequences and ", documents, " document entries, which does not fit a file of ", idx.size(), " bytes");
  require(documents >= 1, ExitCode::data, idx.path(), ": the document list is empty; it starts with 0");
  MegatronIndex index{.sequences = static_cast<int64_t>(sequences), .documents = static_cast<int64_t>(documents)};
  index.offsets = index.lengths + 4 * index.sequences;
  index.document_indices = index.offsets + 8 * index.sequences;
  return index;
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

}  // namespace

TokenLayout megatron_layout(const InputFile& bin, const InputFile& idx) {
  const MegatronIndex index = megatron_index(idx);
  TokenLayout layout{.type = megatron_type(idx)};
  const int64_t width = element_bytes(layout.type);
  ArrayReader<int32_t> lengths(idx, index.lengths, index.sequences);
  ArrayReader<int64_t> offsets(idx, index.offsets, index.sequences);
  ArrayReader<int64_t> documents(idx, index.document_indices, index.documents);
  int64_t document = documents.next(), documents_read = 1;
  require(document == 0, ExitCode::data, idx.path(), ": document 0 starts at sequence ", document, ", expected 0");
  for (int64_t sequence = 0; sequence <= index.sequences; ++sequence) {
    if (document == sequence) {
      if (sequence < index.sequences) layout.document_starts.push_back(layout.tokens);
      while (document == sequence && documents_read < index.documents) document = documents.next(), ++documents_read;
    }
    if (sequence == index.sequences) break;
    const int64_t length = lengths.next(), offset = offsets.next();
    require(length >= 0 && offset == layout.tokens * width && length <= (bin.size() - offset) / width, ExitCode::data, idx.path(),
            ": sequence ", sequence, " has ", length, " tokens at byte ", offset, ", expected to follow the one before at byte ",
            layout.tokens * width, " inside the ", bin.size(), " bytes of ", bin.path());
    layout.tokens += length;
  }
  require(document == index.sequences && documents_read == index.documents, ExitCode::data, idx.path(),
          ": the document list must rise from 0 to the number of sequences (", index.sequences, "); entry ", documents_read - 1, " is ",
          document);
  require(layout.tokens * width == bin.size(), ExitCode::data, bin.path(), ": ", bin.size(), " bytes, but ", idx.path(), " describes ",
          layout.tokens * width);
  auto& starts = layout.document_starts;
  starts.erase(std::unique(starts.begin(), starts.end()), starts.end());  // a document may be empty
  return layout;
}

}  // namespace mantissa
