#include "io/gguf_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <type_traits>
#include <utility>

#include "mantissa/base/error.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

constexpr std::array<const char*, kGgufTypes> kTypeNames = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                            "bool", "string", "array", "u64", "i64", "f64"};
constexpr std::array<int64_t, kGgufTypes> kTypeBytes = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};  // 0: it says how many

constexpr std::array kReadable = {GgmlTypeInfo{GgmlType::f32, "F32", 1, 4},       GgmlTypeInfo{GgmlType::f16, "F16", 1, 2},
                                  GgmlTypeInfo{GgmlType::bf16, "BF16", 1, 2},     GgmlTypeInfo{GgmlType::q4_0, "Q4_0", 32, 18},
                                  GgmlTypeInfo{GgmlType::q4_1, "Q4_1", 32, 20},   GgmlTypeInfo{GgmlType::q5_0, "Q5_0", 32, 22},
                                  GgmlTypeInfo{GgmlType::q5_1, "Q5_1", 32, 24},   GgmlTypeInfo{GgmlType::q8_0, "Q8_0", 32, 34},
                                  GgmlTypeInfo{GgmlType::q4_k, "Q4_K", 256, 144}, GgmlTypeInfo{GgmlType::q5_k, "Q5_K", 256, 176},
                                  GgmlTypeInfo{GgmlType::q6_k, "Q6_K", 256, 210}, GgmlTypeInfo{GgmlType::mxfp4, "MXFP4", 32, 17}};

// Types that ggml has besides.
constexpr std::pair<uint32_t, const char*> kOthers[] = {
    {9, "Q8_1"},    {10, "Q2_K"},  {11, "Q3_K"},  {15, "Q8_K"},   {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"},
    {20, "IQ4_NL"}, {21, "IQ3_S"}, {22, "IQ2_S"}, {23, "IQ4_XS"}, {24, "I8"},      {25, "I16"},    {26, "I32"},     {27, "I64"},
    {28, "F64"},    {29, "IQ1_M"}, {34, "TQ1_0"}, {35, "TQ2_0"},  {40, "NVFP4"},   {41, "Q1_0"}};

constexpr int64_t kLeastTensorInfo = 8 + 4 + 4 + 8, kLeastKeyValue = 8 + 4 + 1;  // bytes

std::string shown(std::string_view name) { return printable(shortened(name)); }

bool is_integer(GgufType type) {
  return type != GgufType::f32 && type != GgufType::f64 && type != GgufType::boolean && type != GgufType::string && type != GgufType::array;
}

template <class T>
T read_as(std::string_view bytes, int64_t at) {
  static_assert(std::endian::native == std::endian::little);
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// Returns none for a u64 beyond the range of i64.
std::optional<int64_t> integer_at(std::string_view bytes, GgufType type, int64_t at) {
  switch (type) {
    case GgufType::u8: return read_as<uint8_t>(bytes, at);
    case GgufType::i8: return read_as<int8_t>(bytes, at);
    case GgufType::u16: return read_as<uint16_t>(bytes, at);
    case GgufType::i16: return read_as<int16_t>(bytes, at);
    case GgufType::u32: return read_as<uint32_t>(bytes, at);
    case GgufType::i32: return read_as<int32_t>(bytes, at);
    case GgufType::i64: return read_as<int64_t>(bytes, at);
    default: break;
  }
  const auto value = read_as<uint64_t>(bytes, at);
  return std::in_range<int64_t>(value) ? std::optional(static_cast<int64_t>(value)) : std::nullopt;
}

double shortest_decimal(float value) {
  std::array<char, 32> digits{};
  const char* const end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  double out = 0;
  std::from_chars(digits.data(), end, out);
  return out;
}

}  // namespace

const char* gguf_type_name(GgufType type) { return kTypeNames[static_cast<size_t>(type)]; }

const GgmlTypeInfo& ggml_type_info(GgmlType type) { return *std::ranges::find(kReadable, type, &GgmlTypeInfo::type); }

const char* ggml_type_name(uint32_t number) {
  const auto readable = std::ranges::find(kReadable, static_cast<GgmlType>(number), &GgmlTypeInfo::type);
  if (readable != kReadable.end()) return readable->name;
  const auto* const other = std::ranges::find(kOthers, number, &std::pair<uint32_t, const char*>::first);
  return other != std::end(kOthers) ? other->second : nullptr;
}

std::string readable_ggml_types() { return joined(kReadable, ", ", &GgmlTypeInfo::name); }

std::string gguf_key(std::string_view key, std::string_view architecture) {
  constexpr std::string_view kPlace = "ARCH";
  return key.starts_with(kPlace) ? text(architecture, key.substr(kPlace.size())) : std::string(key);
}

int64_t GgufTensor::elements() const {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

// Reads from the first byte to the last tensor info.
class GgufHeader::Parser {
 public:
  Parser(GgufHeader& out, int64_t file_bytes, const ReadMore& read_more) : out_(out), file_bytes_(file_bytes), read_more_(read_more) {}

  void parse() {
    require_at(0, file_bytes_ >= std::ssize(kGgufMagic) && bytes(std::ssize(kGgufMagic)) == kGgufMagic,
               "is no GGUF file: it does not begin with ", kGgufMagic);
    out_.version_ = take<uint32_t>();
    require_at(4, (out_.version_ & 0xffffU) != 0, "is in the byte order of big-endian machines, which mantissa does not read");
    require_at(4, out_.version_ >= kOldestGgufVersion && out_.version_ <= kGgufVersion, "version ", out_.version_,
               " of GGUF; mantissa reads ", kOldestGgufVersion, " and ", kGgufVersion);
    const auto tensors = take<uint64_t>(), keys = take<uint64_t>();
    require_count(8, tensors, "tensors", kLeastTensorInfo, GgufLimits::kTensors);
    require_count(16, keys, "key-values", kLeastKeyValue, GgufLimits::kKeys);
    for (uint64_t i = 0; i < keys; ++i) read_key_value();
    sort_keys();
    read_alignment();
    for (uint64_t i = 0; i < tensors; ++i) read_tensor();
    require_unique_tensors();
    place_tensors();
  }

 private:
  template <class... Parts>
  [[noreturn]] void fail_at(int64_t position, const Parts&... parts) const {
    fail(ExitCode::data, out_.source_, ": byte ", position, ": ", parts...);
  }
  template <class... Parts>
  void require_at(int64_t position, bool ok, const Parts&... parts) const {
    if (!ok) fail_at(position, parts...);
  }

  // Returns the next bytes of the file, which stay valid until the next call.
  std::string_view bytes(int64_t count) {
    require_at(at_, count <= file_bytes_ - at_, whose_, count, " bytes are to follow, and the file ends ", file_bytes_ - at_, " bytes on");
    require_at(at_, count <= GgufLimits::kFrontBytes - at_, whose_, "the keys and tensor infos have more than ", GgufLimits::kFrontBytes,
               " bytes");
    if (at_ + count > std::ssize(out_.front_)) {
      require_at(at_, static_cast<bool>(read_more_), whose_, "the bytes at hand end here");
      read_more_(out_.front_, at_ + count);
    }
    return std::string_view(out_.front_).substr(static_cast<size_t>(std::exchange(at_, at_ + count)), static_cast<size_t>(count));
  }
  template <class T>
  T take() {
    return read_as<T>(bytes(sizeof(T)), 0);
  }
  void require_count(int64_t position, uint64_t count, const char* of, int64_t least, size_t most) const {
    require_at(position, std::cmp_less_equal(count, file_bytes_ / least), count, ' ', of, " in a file of ", file_bytes_,
               " bytes, which is truncated or damaged");
    require_at(position, count <= most, count, ' ', of, ", at most ", most, " are accepted");
  }
  std::string name(const char* of, int64_t most) {
    const int64_t position = at_;
    const auto length = take<uint64_t>();
    require_at(position, length > 0 && std::cmp_less_equal(length, most), "the name of a ", of, " has ", length, " bytes; 1 to ", most,
               " are accepted");
    std::string out(bytes(static_cast<int64_t>(length)));
    require_at(position, printable(out) == out, "the name of a ", of, " is no UTF-8 without control characters: \"", shown(out), '"');
    return out;
  }

  void read_key_value() {
    whose_ = "";
    const std::string key = name("key", GgufLimits::kKeyBytes);
    whose_ = text("key \"", shown(key), "\": ");
    const int64_t position = at_;
    GgufValue value{.type = type()};
    if (value.type == GgufType::array) {
      value.element = type();
      require_at(position, value.element != GgufType::array, whose_, "an array of arrays, which GGUF does not have");
      const int64_t place = at_;
      const auto count = take<uint64_t>();
      const int64_t least = value.element == GgufType::string ? 8 : kTypeBytes[static_cast<size_t>(value.element)];
      require_at(place, std::cmp_less_equal(count, (file_bytes_ - at_) / least), whose_, count, " elements, and the file ends ",
                 file_bytes_ - at_, " bytes on");
      value.count = static_cast<int64_t>(count);
    } else {
      value.element = value.type;
    }
    value.begin = at_;
    skip(value);
    value.end = at_;
    out_.keys_.emplace_back(key, value);
  }

  GgufType type() {
    const int64_t position = at_;
    const auto number = take<uint32_t>();
    require_at(position, number < kGgufTypes, whose_, "there is no type ", number, " of values");
    return static_cast<GgufType>(number);
  }

  void skip(const GgufValue& value) {
    if (value.element == GgufType::string) {
      for (int64_t i = 0; i < value.count; ++i) {
        const int64_t position = at_;
        const auto length = take<uint64_t>();
        require_at(position, std::cmp_less_equal(length, file_bytes_ - at_), whose_, "a string of ", length, " bytes, and the file ends ",
                   file_bytes_ - at_, " bytes on");
        bytes(static_cast<int64_t>(length));
      }
      return;
    }
    const int64_t position = at_;
    const std::string_view all = bytes(value.count * kTypeBytes[static_cast<size_t>(value.element)]);
    if (value.element != GgufType::boolean) return;
    const size_t wrong = all.find_first_not_of(std::string_view("\0\1", 2));
    require_at(position + static_cast<int64_t>(wrong), wrong == std::string_view::npos, whose_, "a bool that is neither 0 nor 1");
  }

  void sort_keys() {
    whose_ = "";
    std::ranges::sort(out_.keys_, {}, &std::pair<std::string, GgufValue>::first);
    const auto twice = std::ranges::adjacent_find(out_.keys_, {}, &std::pair<std::string, GgufValue>::first);
    if (twice == out_.keys_.end()) return;
    fail_at(std::max(twice->second.begin, std::next(twice)->second.begin), "the key \"", shown(twice->first), "\" is there twice");
  }

  void read_alignment() {
    const GgufValue* const value = out_.find(gguf::kAlignment);
    if (value == nullptr) return;
    require_at(value->begin, value->type == GgufType::u32, gguf::kAlignment, " must be a u32, got ", gguf_type_name(value->type));
    const auto alignment = read_as<uint32_t>(out_.front_, value->begin);
    require_at(value->begin, std::has_single_bit(alignment), gguf::kAlignment, " must be a power of two, got ", alignment);
    out_.alignment_ = alignment;
  }

  void read_tensor() {
    whose_ = "";
    const int64_t position = at_;
    GgufTensor tensor{.name = name("tensor", GgufLimits::kNameBytes), .shape = {}};
    whose_ = text("tensor \"", shown(tensor.name), "\": ");
    const auto rank = take<uint32_t>();
    require_at(position, rank <= GgufLimits::kRank, whose_, rank, " dimensions, at most ", GgufLimits::kRank, " are accepted");
    int64_t elements = 1;
    for (uint32_t i = 0; i < rank; ++i) {
      const auto size = take<uint64_t>();
      require_at(position, size > 0 && std::in_range<int64_t>(size), whose_, "a dimension of ", size);
      require_at(position, !__builtin_mul_overflow(elements, static_cast<int64_t>(size), &elements), whose_,
                 "has more elements than can be counted");
      tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(size));
    }
    const auto number = take<uint32_t>();
    const auto known = std::ranges::find(kReadable, static_cast<GgmlType>(number), &GgmlTypeInfo::type);
    if (known == kReadable.end()) {
      const char* const type = ggml_type_name(number);
      require_at(position, type != nullptr, whose_, "there is no type ", number, " of tensors");
      fail(ExitCode::usage, out_.source_, ": ", whose_, "is ", type, "; mantissa reads ", readable_ggml_types());
    }
    tensor.type = known->type;
    const int64_t row = tensor.shape.empty() ? 1 : tensor.shape.back();
    require_at(position, row % known->block == 0, whose_, "rows of ", row, " elements are no whole blocks of ", known->name,
               ", which have ", known->block);
    require_at(position, !__builtin_mul_overflow(elements / known->block, known->bytes, &tensor.bytes) && tensor.bytes <= file_bytes_,
               whose_, elements, " elements of ", known->name, " in a file of ", file_bytes_, " bytes");
    const auto offset = take<uint64_t>();
    require_at(position, offset % static_cast<uint64_t>(out_.alignment_) == 0, whose_, "its data begin at ", offset,
               ", no multiple of the alignment ", out_.alignment_);
    require_at(position, std::cmp_equal(offset, data_), whose_, "its data begin at ", offset,
               ", and those of the tensors before it end at ", data_);
    tensor.begin = data_;
    end_ = data_ + tensor.bytes;
    data_ = round_up(end_, out_.alignment_);
    require_at(position, end_ <= file_bytes_, whose_, "its data end beyond the file, which has ", file_bytes_, " bytes");
    out_.tensors_.push_back(std::move(tensor));
  }

  void require_unique_tensors() const {
    std::set<std::string_view> names;
    for (const GgufTensor& tensor : out_.tensors_)
      require(names.insert(tensor.name).second, ExitCode::data, out_.source_, ": the tensor \"", shown(tensor.name), "\" is there twice");
  }

  // The last padding may be missing.
  void place_tensors() {
    const int64_t begin = round_up(at_, out_.alignment_), end = out_.tensors_.empty() ? at_ : begin + end_;
    for (GgufTensor& tensor : out_.tensors_) {
      tensor.begin += begin;
      require_at(tensor.begin, tensor.bytes <= file_bytes_ - tensor.begin, "tensor \"", shown(tensor.name), "\": ends at ",
                 tensor.begin + tensor.bytes, ", beyond the file, which has ", file_bytes_, " bytes");
    }
    require_at(end, file_bytes_ <= round_up(end, out_.alignment_), "the tensors end here, the file has ", file_bytes_, " bytes");
  }

  GgufHeader& out_;
  int64_t file_bytes_;
  const ReadMore& read_more_;
  int64_t at_ = 0;
  int64_t data_ = 0, end_ = 0;  // ends of the tensors so far, in the data: with the padding of the last, and without
  std::string whose_;           // "key "...": ", for messages
};

GgufHeader::GgufHeader(std::string front, int64_t file_bytes, std::string source, const ReadMore& read_more)
    : front_(std::move(front)), source_(std::move(source)) {
  Parser(*this, file_bytes, read_more).parse();
}

const GgufValue* GgufHeader::find(std::string_view key) const {
  const auto found = std::ranges::lower_bound(keys_, key, {}, [](const auto& one) { return std::string_view(one.first); });
  return found != keys_.end() && found->first == key ? &found->second : nullptr;
}

void GgufHeader::wrong(std::string_view key, const std::string& what) const {
  fail(ExitCode::data, source_, ": key \"", shown(key), "\": ", what);
}

std::optional<int64_t> GgufHeader::integer(std::string_view key) const {
  const GgufValue* const value = find(key);
  if (value == nullptr) return {};
  if (!is_integer(value->type)) wrong(key, text("must be an integer, got ", gguf_type_name(value->type)));
  const std::optional<int64_t> out = integer_at(front_, value->type, value->begin);
  if (!out) wrong(key, "is an integer beyond 2^63");
  return out;
}

std::optional<double> GgufHeader::number(std::string_view key) const {
  const GgufValue* const value = find(key);
  if (value == nullptr) return {};
  double out = 0;
  if (value->type == GgufType::f32) {
    const auto narrow = read_as<float>(front_, value->begin);
    out = std::isfinite(narrow) ? shortest_decimal(narrow) : static_cast<double>(narrow);
  } else if (value->type == GgufType::f64) {
    out = read_as<double>(front_, value->begin);
  } else if (is_integer(value->type)) {
    out = static_cast<double>(*integer(key));
  } else {
    wrong(key, text("must be a number, got ", gguf_type_name(value->type)));
  }
  if (!std::isfinite(out)) wrong(key, text("is ", out));
  return out;
}

std::optional<bool> GgufHeader::boolean(std::string_view key) const {
  const GgufValue* const value = find(key);
  if (value == nullptr) return {};
  if (value->type != GgufType::boolean) wrong(key, text("must be a bool, got ", gguf_type_name(value->type)));
  return front_[static_cast<size_t>(value->begin)] != 0;
}

std::optional<std::string_view> GgufHeader::string(std::string_view key) const {
  const GgufValue* const value = find(key);
  if (value == nullptr) return {};
  if (value->type != GgufType::string) wrong(key, text("must be a string, got ", gguf_type_name(value->type)));
  const auto begin = static_cast<size_t>(value->begin) + sizeof(uint64_t), end = static_cast<size_t>(value->end);
  const std::string_view out = std::string_view(front_).substr(begin, end - begin);
  if (!is_utf8(out)) wrong(key, "is no UTF-8");
  return out;
}

std::optional<std::vector<std::string_view>> GgufHeader::strings(std::string_view key) const {
  const GgufValue* const value = find(key);
  if (value == nullptr) return {};
  if (value->type != GgufType::array || value->element != GgufType::string)
    wrong(key, text("must be an array of strings, got ", gguf_type_name(value->type), " of ", gguf_type_name(value->element)));
  std::vector<std::string_view> out;
  out.reserve(static_cast<size_t>(value->count));
  int64_t at = value->begin;
  for (int64_t i = 0; i < value->count; ++i) {
    const auto length = read_as<uint64_t>(front_, at);
    at += static_cast<int64_t>(sizeof length);
    out.push_back(std::string_view(front_).substr(static_cast<size_t>(at), length));
    at += static_cast<int64_t>(length);
    if (!is_utf8(out.back())) wrong(key, text("entry ", i, " is no UTF-8"));
  }
  return out;
}

std::optional<std::vector<int64_t>> GgufHeader::integers(std::string_view key) const {
  const GgufValue* const value = find(key);
  if (value == nullptr) return {};
  if (value->type != GgufType::array || !is_integer(value->element))
    wrong(key, text("must be an array of integers, got ", gguf_type_name(value->type), " of ", gguf_type_name(value->element)));
  std::vector<int64_t> out;
  out.reserve(static_cast<size_t>(value->count));
  const int64_t width = kTypeBytes[static_cast<size_t>(value->element)];
  for (int64_t i = 0; i < value->count; ++i) {
    const std::optional<int64_t> one = integer_at(front_, value->element, value->begin + i * width);
    if (!one) wrong(key, text("entry ", i, " is an integer beyond 2^63"));
    out.push_back(*one);
  }
  return out;
}

namespace {

GgufHeader header_of(const File& file) {
  constexpr int64_t kFirst = 1 << 20;
  const int64_t size = file.size();
  const auto read_more = [&](std::string& front, int64_t needed) {
    const int64_t have = std::ssize(front),
                  wanted = std::min(size, std::max({needed, std::min(2 * have, GgufLimits::kFrontBytes), kFirst}));
    front.resize(static_cast<size_t>(wanted));
    file.read_at(have, std::as_writable_bytes(std::span(front)).subspan(static_cast<size_t>(have)));
  };
  return {"", size, file.path().string(), read_more};
}

}  // namespace

GgufFile::GgufFile(const std::filesystem::path& path) : file_(File::open_input(path)), header_(header_of(file_)) {}

void GgufFile::read(const GgufTensor& tensor, int64_t offset, std::span<std::byte> out) const {
  require(offset >= 0 && offset <= tensor.bytes && std::cmp_less_equal(out.size(), tensor.bytes - offset), tensor.name, ": ", out.size(),
          " bytes from byte ", offset, " of ", tensor.bytes);
  file_.read_at(tensor.begin + offset, out);
}

bool is_gguf_file(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return false;
  if (path.extension() == ".gguf") return true;
  if (std::filesystem::file_size(path, error) < kGgufMagic.size() || error) return false;
  std::string magic(kGgufMagic.size(), '\0');
  File::open_input(path).read_at(0, std::as_writable_bytes(std::span(magic)));
  return magic == kGgufMagic;
}

namespace {

template <class T>
void append_value(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_string(std::string& out, std::string_view text) {
  append_value(out, static_cast<uint64_t>(text.size()));
  out += text;
}

int64_t aligned(int64_t bytes) { return (bytes + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment; }

}  // namespace

void GgufKeys::add(Entry entry) {
  require(std::ranges::find(entries_, entry.key, &Entry::key) == entries_.end(), entry.key, " is there twice");
  entries_.push_back(std::move(entry));
}

void GgufKeys::add_u32(std::string key, int64_t value) {
  require(std::in_range<uint32_t>(value), key, ": ", value, " does not fit");
  Entry entry{.key = std::move(key), .type = GgufType::u32, .bytes = {}};
  append_value(entry.bytes, static_cast<uint32_t>(value));
  add(std::move(entry));
}

void GgufKeys::add_f32(std::string key, double value) {
  Entry entry{.key = std::move(key), .type = GgufType::f32, .bytes = {}};
  append_value(entry.bytes, static_cast<float>(value));
  add(std::move(entry));
}

void GgufKeys::add_bool(std::string key, bool value) {
  add({.key = std::move(key), .type = GgufType::boolean, .bytes = std::string(1, value ? '\1' : '\0')});
}

void GgufKeys::add_string(std::string key, std::string_view value) {
  Entry entry{.key = std::move(key), .type = GgufType::string, .bytes = {}};
  append_string(entry.bytes, value);
  add(std::move(entry));
}

void GgufKeys::add_strings(std::string key, const std::vector<std::string>& values) {
  Entry entry{.key = std::move(key), .type = GgufType::array, .element = GgufType::string, .count = std::ssize(values), .bytes = {}};
  for (const std::string& value : values) append_string(entry.bytes, value);
  add(std::move(entry));
}

void GgufKeys::add_i32s(std::string key, const std::vector<int32_t>& values) {
  Entry entry{.key = std::move(key), .type = GgufType::array, .element = GgufType::i32, .count = std::ssize(values), .bytes = {}};
  for (const int32_t value : values) append_value(entry.bytes, value);
  add(std::move(entry));
}

void GgufKeys::add_bools(std::string key, const std::vector<bool>& values) {
  Entry entry{.key = std::move(key), .type = GgufType::array, .element = GgufType::boolean, .count = std::ssize(values), .bytes = {}};
  for (const bool value : values) entry.bytes += value ? '\1' : '\0';
  add(std::move(entry));
}

GgufLayout gguf_layout(const GgufKeys& keys, std::vector<GgufTensor> tensors) {
  GgufLayout out{.front = std::string(kGgufMagic), .tensors = std::move(tensors)};
  append_value(out.front, kGgufVersion);
  append_value(out.front, static_cast<uint64_t>(out.tensors.size()));
  append_value(out.front, static_cast<uint64_t>(keys.entries().size()));
  for (const GgufKeys::Entry& entry : keys.entries()) {
    append_string(out.front, entry.key);
    append_value(out.front, static_cast<uint32_t>(entry.type));
    if (entry.type == GgufType::array) {
      append_value(out.front, static_cast<uint32_t>(entry.element));
      append_value(out.front, static_cast<uint64_t>(entry.count));
    }
    out.front += entry.bytes;
  }
  int64_t place = 0;
  for (GgufTensor& tensor : out.tensors) {
    const GgmlTypeInfo& type = ggml_type_info(tensor.type);
    require(tensor.shape.back() % type.block == 0, tensor.name, ": rows of ", tensor.shape.back(), " elements in blocks of ", type.block);
    tensor.begin = place;
    tensor.bytes = tensor.elements() / type.block * type.bytes;
    append_string(out.front, tensor.name);
    append_value(out.front, static_cast<uint32_t>(tensor.shape.size()));
    for (size_t i = tensor.shape.size(); i-- > 0;) append_value(out.front, static_cast<uint64_t>(tensor.shape[i]));
    append_value(out.front, static_cast<uint32_t>(tensor.type));
    append_value(out.front, static_cast<uint64_t>(place));
    place = aligned(place + tensor.bytes);
  }
  const int64_t front = aligned(std::ssize(out.front));
  out.front.resize(static_cast<size_t>(front), '\0');
  for (GgufTensor& tensor : out.tensors) tensor.begin += front;
  out.bytes = front + place;
  return out;
}

}  // namespace mantissa
