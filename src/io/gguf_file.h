// Files in the GGUF format of ggml, which hold a model whole: configuration, tokenizer and tensors. Little-endian:
//
//   4 bytes  "GGUF"
//   u32      version      3; 2 has the same layout. 1 had counts of 32 bits and is refused, as ggml does
//   u64      tensors      number of tensor infos
//   u64      keys         number of key-values
//   keys     key-value    string key; u32 GgufType; the value
//   tensors  tensor info  string name; u32 n <= 4; u64 sizes[n], the innermost first; u32 GgmlType; u64 offset in the data
//   padding               zeros up to a multiple of the alignment: key general.alignment, a u32 and a power of two; else 32
//   data                  the tensors in the order of their infos, each padded to a multiple of the alignment; the padding of the last may
//   be
//                         missing
//
//   string   u64 bytes, then so many bytes of UTF-8, without a zero at the end
//   bool     u8, 0 or 1
//   array    u32 GgufType of its elements, no array; u64 count; the elements, one after the other
//
// A row is `block` elements after `block` elements, each block encoded by itself (GgmlTypeInfo): sizes[0] is a multiple of `block`. Where a
// checkpoint of Hugging Face has [out, in], sizes are {in, out}, and the bytes of F32 are the same.
//
// The reader returns only what was checked. A fault of a file is Error(data) that names the file and the byte, key or tensor; a type that
// ggml knows and mantissa cannot decode is Error(usage) that names the tensor. Memory is at most that of the file's first bytes, up to the
// data, and some 100 bytes for each key and tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file.h"
#include "io/safetensors.h"

namespace mantissa {

inline constexpr std::string_view kGgufMagic = "GGUF";
inline constexpr uint32_t kGgufVersion = 3, kOldestGgufVersion = 2;
inline constexpr int64_t kGgufAlignment = 32;  // unless general.alignment says otherwise

// Types of values, by their numbers in files.
enum class GgufType : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
inline constexpr uint32_t kGgufTypes = 13;
const char* gguf_type_name(GgufType type);  // "u8", ..., "bool", "string", "array", ...

// Types of tensors that mantissa reads, by their numbers in files.
enum class GgmlType : uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  bf16 = 30,
  mxfp4 = 39
};

struct GgmlTypeInfo {
  GgmlType type;
  const char* name;  // "Q4_K", as ggml has it
  int64_t block;     // elements
  int64_t bytes;     // bytes of a block
};
const GgmlTypeInfo& ggml_type_info(GgmlType type);
// Returns the name of a type that ggml knows, also of those that mantissa cannot decode; null: ggml has no such type.
const char* ggml_type_name(uint32_t number);
// Returns "F32, F16, ..., MXFP4".
std::string readable_ggml_types();

// Keys that a file of a language model has; "ARCH" stands for the value of general.architecture ("llama", "qwen3moe", "gpt-oss"), and
// gguf_key() puts it in.
namespace gguf {
inline constexpr const char* kArchitecture = "general.architecture";  // string
inline constexpr const char* kType = "general.type";                  // string: "model"
inline constexpr const char* kName = "general.name";                  // string
inline constexpr const char* kAlignment = "general.alignment";        // u32
inline constexpr const char* kFileType = "general.file_type";         // u32, llama_ftype: that of most tensors
inline constexpr const char* kQuantizationVersion = "general.quantization_version";
inline constexpr uint32_t kQuantizationVersionNow = 2;

inline constexpr const char* kVocabulary = "ARCH.vocab_size";                                    // u32
inline constexpr const char* kContextLength = "ARCH.context_length";                             // u32
inline constexpr const char* kEmbeddingLength = "ARCH.embedding_length";                         // u32
inline constexpr const char* kBlockCount = "ARCH.block_count";                                   // u32
inline constexpr const char* kFeedForwardLength = "ARCH.feed_forward_length";                    // u32; of llama with experts: one expert's
inline constexpr const char* kExpertFeedForwardLength = "ARCH.expert_feed_forward_length";       // u32; qwen3moe, gpt-oss
inline constexpr const char* kExpertCount = "ARCH.expert_count";                                 // u32
inline constexpr const char* kExpertUsedCount = "ARCH.expert_used_count";                        // u32
inline constexpr const char* kHeadCount = "ARCH.attention.head_count";                           // u32
inline constexpr const char* kKvHeadCount = "ARCH.attention.head_count_kv";                      // u32
inline constexpr const char* kKeyLength = "ARCH.attention.key_length";                           // u32, head_dim
inline constexpr const char* kValueLength = "ARCH.attention.value_length";                       // u32, the same
inline constexpr const char* kNormRmsEpsilon = "ARCH.attention.layer_norm_rms_epsilon";          // f32
inline constexpr const char* kNormEpsilon = "ARCH.attention.layer_norm_epsilon";                 // f32; gpt2
inline constexpr const char* kSlidingWindow = "ARCH.attention.sliding_window";                   // u32; gpt-oss
inline constexpr const char* kSlidingWindowPattern = "ARCH.attention.sliding_window_pattern";    // u32; 2: every second layer
inline constexpr const char* kRopeDimensions = "ARCH.rope.dimension_count";                      // u32
inline constexpr const char* kRopeBase = "ARCH.rope.freq_base";                                  // f32
inline constexpr const char* kRopeScalingType = "ARCH.rope.scaling.type";                        // string: none, linear, yarn
inline constexpr const char* kRopeScalingFactor = "ARCH.rope.scaling.factor";                    // f32
inline constexpr const char* kRopeOriginalLength = "ARCH.rope.scaling.original_context_length";  // u32
inline constexpr const char* kRopeAttentionFactor = "ARCH.rope.scaling.attn_factor";             // f32: times that of yarn
inline constexpr const char* kYarnExtFactor = "ARCH.rope.scaling.yarn_ext_factor";               // f32
inline constexpr const char* kYarnAttentionFactor = "ARCH.rope.scaling.yarn_attn_factor";        // f32
inline constexpr const char* kYarnBetaFast = "ARCH.rope.scaling.yarn_beta_fast";                 // f32
inline constexpr const char* kYarnBetaSlow = "ARCH.rope.scaling.yarn_beta_slow";                 // f32
inline constexpr const char* kYarnLogMultiplier = "ARCH.rope.scaling.yarn_log_multiplier";       // f32

inline constexpr const char* kTokenizerModel = "tokenizer.ggml.model";   // string: "gpt2" is byte pairs over bytes
inline constexpr const char* kTokenizerPre = "tokenizer.ggml.pre";       // string: which expression splits texts ("qwen2", "smollm")
inline constexpr const char* kTokens = "tokenizer.ggml.tokens";          // strings by id, in the characters that stand for bytes
inline constexpr const char* kTokenTypes = "tokenizer.ggml.token_type";  // i32 by id: GgufTokenType
inline constexpr const char* kMerges = "tokenizer.ggml.merges";          // strings "left right", the first merged first
inline constexpr const char* kBosToken = "tokenizer.ggml.bos_token_id";  // u32
inline constexpr const char* kEosToken = "tokenizer.ggml.eos_token_id";  // u32
inline constexpr const char* kEotToken = "tokenizer.ggml.eot_token_id";  // u32: end of a turn
inline constexpr const char* kEomToken = "tokenizer.ggml.eom_token_id";  // u32: end of a message, the third end token
inline constexpr const char* kUnknownToken = "tokenizer.ggml.unknown_token_id";    // u32
inline constexpr const char* kPaddingToken = "tokenizer.ggml.padding_token_id";    // u32
inline constexpr const char* kAddBos = "tokenizer.ggml.add_bos_token";             // bool
inline constexpr const char* kAddEos = "tokenizer.ggml.add_eos_token";             // bool
inline constexpr const char* kAddSpacePrefix = "tokenizer.ggml.add_space_prefix";  // bool
inline constexpr const char* kChatTemplate = "tokenizer.chat_template";            // string

inline constexpr const char* kSplitCount = "split.count";  // u16: files that the model is divided into

inline constexpr const char* kVersionOfWriter = "mantissa.version";  // string; its presence marks an export of mantissa
inline constexpr const char* kDifferences = "mantissa.differences";  // strings "model.KEY: ...": what llama.cpp computes otherwise

inline constexpr const char* kExtraNames = "general.tensor_extra.name";        // strings: tensors of which the next key says:
inline constexpr const char* kFourBitInputs = "general.tensor_extra.prec_a4";  // bools: inputs may be rounded to 4 bits
}  // namespace gguf

enum class GgufTokenType : int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

// Returns the key with the architecture in it: "qwen3moe.block_count".
std::string gguf_key(std::string_view key, std::string_view architecture);

// A value of the metadata, where it lies in the file's first bytes.
struct GgufValue {
  GgufType type = GgufType::u8;
  GgufType element = GgufType::u8;  // type of the elements of an array
  int64_t count = 1;                // elements
  int64_t begin = 0, end = 0;       // bytes; those of the elements, of an array
};

struct GgufTensor {
  std::string name;
  GgmlType type = GgmlType::f32;
  std::vector<int64_t> shape = {};  // the outermost first: [out, in]
  int64_t begin = 0;                // in the file
  int64_t bytes = 0;

  int64_t elements() const;
};

struct GgufLimits {
  static constexpr int64_t kFrontBytes = 128 << 20;  // before the data; a vocabulary of 256,000 tokens takes 15 MB
  static constexpr size_t kRank = 4;
  static constexpr int64_t kNameBytes = 1024, kKeyBytes = 65'535;
  static constexpr size_t kTensors = SafetensorsLimits::kTensors, kKeys = 100'000;
};

// Keys and tensor infos: all of a file before its data.
class GgufHeader {
 public:
  // Appends bytes of the file to those that are known, until there are at least `needed`.
  using ReadMore = std::function<void(std::string& front, int64_t needed)>;
  // Parses the first bytes of a file of `file_bytes`; without `read_more` they are all that there is.
  GgufHeader(std::string front, int64_t file_bytes, std::string source, const ReadMore& read_more = {});

  uint32_t version() const { return version_; }
  int64_t alignment() const { return alignment_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }                   // in the order of the file
  const std::vector<std::pair<std::string, GgufValue>>& keys() const { return keys_; }  // by key
  std::string_view front() const { return front_; }
  const std::string& source() const { return source_; }

  // Values of keys; none: there is no such key. A value of another type is Error(data) that names the key.
  const GgufValue* find(std::string_view key) const;
  std::optional<int64_t> integer(std::string_view key) const;  // any integer type
  // An f32 is the double of its shortest decimal: 1e-05 for the f32 next to it.
  std::optional<double> number(std::string_view key) const;
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string_view> string(std::string_view key) const;
  std::optional<std::vector<std::string_view>> strings(std::string_view key) const;
  std::optional<std::vector<int64_t>> integers(std::string_view key) const;
  [[noreturn]] void wrong(std::string_view key, const std::string& what) const;  // Error(data)

 private:
  class Parser;
  std::string front_, source_;
  uint32_t version_ = 0;
  int64_t alignment_ = kGgufAlignment;
  std::vector<std::pair<std::string, GgufValue>> keys_;
  std::vector<GgufTensor> tensors_;
};

// A file that stays open, read by bounded reads (base/file.h). Not for use by several threads at once.
class GgufFile {
 public:
  // Throws Error(usage) if there is no such file.
  explicit GgufFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  const GgufHeader& header() const { return header_; }
  // Reads exactly out.size() bytes of a tensor, as they are in the file, from byte `offset` of it.
  void read(const GgufTensor& tensor, int64_t offset, std::span<std::byte> out) const;

 private:
  File file_;
  GgufHeader header_;
};

// Returns whether a user's path is a file that begins as GGUF does, or has its ending.
bool is_gguf_file(const std::filesystem::path& path);

// The front of a file that is written: keys and tensor infos, all that stands before the data.

// Keys and values in the order in which they were added.
class GgufKeys {
 public:
  // A value as files hold it: its bytes, or those of the elements of an array.
  struct Entry {
    std::string key;
    GgufType type = GgufType::u8, element = GgufType::u8;
    int64_t count = 1;
    std::string bytes;
  };

  // A key is added once.
  void add_u32(std::string key, int64_t value);  // Error(internal) beyond 32 bits
  void add_f32(std::string key, double value);
  void add_bool(std::string key, bool value);
  void add_string(std::string key, std::string_view value);
  void add_strings(std::string key, const std::vector<std::string>& values);
  void add_i32s(std::string key, const std::vector<int32_t>& values);
  void add_bools(std::string key, const std::vector<bool>& values);

  const std::vector<Entry>& entries() const { return entries_; }

 private:
  void add(Entry entry);
  std::vector<Entry> entries_;
};

struct GgufLayout {
  std::string front;                // all before the data, with the padding
  std::vector<GgufTensor> tensors;  // with their places in the file
  int64_t bytes = 0;                // size of the file
};

// Lays out a file with these tensors, whose places are not looked at. The sizes of values alone decide about places, so that a value may be
// replaced by one of the same size when the data is there. Throws Error(internal) for a row that is no whole number of blocks.
GgufLayout gguf_layout(const GgufKeys& keys, std::vector<GgufTensor> tensors);

}  // namespace mantissa
