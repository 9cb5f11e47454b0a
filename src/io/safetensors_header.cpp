// Parses and formats the JSON of safetensors files: headers and indexes.
#include <algorithm>
#include <array>
#include <utility>

#include "mantissa/base/integers.h"
#include "mantissa/base/printable.h"
#include "mantissa/io/plain_file_name.h"
#include "mantissa/io/safetensors.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

struct DtypeInfo {
  const char* name;
  int bits;
};
constexpr std::array<DtypeInfo, kFileDtypes> kDtypes = {{
    {"BOOL", 8},    {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6}, {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8},
    {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16}, {"F16", 16}, {"BF16", 16},   {"I32", 32},
    {"U32", 32},    {"F32", 32},        {"C64", 64},        {"F64", 64},    {"I64", 64}, {"U64", 64},
}};

constexpr size_t kLengthBytes = 8;  // before the header
constexpr std::string_view kMetadataKey = "__metadata__";

// Says why there is no such tensor; "" if there is, and then `bytes` is its size.
std::string shape_problem(FileDtype dtype, const std::vector<int64_t>& shape, int64_t& bytes) {
  int64_t bits = file_dtype_bits(dtype);
  bool empty = false;
  if (shape.size() > SafetensorsLimits::kRank)
    return text(shape.size(), " dimensions, at most ", SafetensorsLimits::kRank, " are accepted");
  for (const int64_t size : shape) {
    if (size < 0) return text("a dimension of ", size);
    empty = empty || size == 0;
    if (size > 0 && __builtin_mul_overflow(bits, size, &bits)) return text("[", joined(shape), "] has more elements than can be counted");
  }
  if (!empty && bits % 8 != 0) return text(bits, " bits are no whole number of bytes");
  bytes = empty ? 0 : bits / 8;
  return "";
}

// Says why a name is refused; "" if it is not. Names go into logs and into other files.
std::string name_problem(std::string_view name) {
  if (name.empty()) return "a name must not be empty";
  if (name.size() > SafetensorsLimits::kNameBytes)
    return text("a name of ", name.size(), " bytes, at most ", SafetensorsLimits::kNameBytes, " are accepted");
  if (printable(name) != name) return "a name with control characters";
  return "";
}

// Accepts the only valid form of a header.
class HeaderReader {
 public:
  HeaderReader(std::string_view content, int64_t file_bytes, const std::string& source)
      : text_(content),
        source_(source),
        data_begin_(static_cast<int64_t>(kLengthBytes + content.size())),
        buffer_bytes_(file_bytes - data_begin_) {}

  SafetensorsHeader read() {
    require_at(0, text_.starts_with('{'), "the header must begin with {");
    const size_t last = text_.find_last_not_of(' ');
    require_at(last, text_[last] == '}', "the header must end with } and be padded with spaces only");
    const ParsedJson parsed = parse_strict_json(text_);
    if (!parsed.problems.empty()) fail_at(parsed.problems.front().offset, "the header is no JSON: ", parsed.problems.front().message);
    require_at(0, parsed.root.size() <= SafetensorsLimits::kTensors, "more than ", SafetensorsLimits::kTensors, " tensors");
    SafetensorsHeader header;
    for (const auto& [name, value] : parsed.root.members()) {
      require_at(value.place, value.is_object(), '"', shown(name), "\" must be an object");
      if (name == kMetadataKey)
        header.metadata = metadata(value);
      else
        header.entries.push_back(tensor(name, value));
    }
    require_tiled(header.entries);
    return header;
  }

 private:
  static std::string shown(std::string_view name) { return printable(shortened(name)); }

  template <class... Parts>
  [[noreturn]] void fail_at(size_t position, const Parts&... parts) const {
    fail(ExitCode::data, source_, ": byte ", kLengthBytes + position, ": ", parts...);
  }
  template <class... Parts>
  void require_at(size_t position, bool ok, const Parts&... parts) const {
    if (!ok) fail_at(position, parts...);
  }

  SafetensorsMetadata metadata(const Json& object) const {
    SafetensorsMetadata metadata;
    for (const auto& [name, value] : object.members()) {
      require_at(value.place, value.is_string(), "metadata \"", shown(name), "\" must be text");
      metadata.emplace(name, value.string());
    }
    return metadata;
  }

  SafetensorsEntry tensor(const std::string& name, const Json& object) const {
    const std::string whose = text("tensor \"", shown(name), "\": "), unfit = name_problem(name);
    require_at(object.key, unfit.empty(), whose, unfit);
    for (const auto& [key, value] : object.members())
      require_at(value.key, std::ranges::find(kMembers, key) != kMembers.end(), whose, "unknown key \"", shown(key), '"');
    const Json& type = member(object, "dtype", whose);
    require_at(type.place, type.is_string(), whose, "dtype must be the name of a type");
    const std::optional<FileDtype> dtype = parse_file_dtype(type.string());
    require_at(type.place, dtype.has_value(), whose, "there is no dtype \"", shown(type.string()), '"');
    const std::vector<int64_t> shape = numbers(object, "shape", SafetensorsLimits::kRank, whose);
    const std::vector<int64_t> offsets = numbers(object, "data_offsets", 2, whose);
    require_at(object.key, offsets.size() == 2, whose, "must have two data_offsets");
    int64_t bytes = 0;
    const std::string problem = shape_problem(*dtype, shape, bytes);
    require_at(object.key, problem.empty(), whose, problem);
    const int64_t begin = offsets[0], end = offsets[1];
    require_at(object.key, begin <= end, whose, "data_offsets [", begin, ", ", end, "] end before they begin");
    require_at(object.key, end <= buffer_bytes_, whose, "data_offsets [", begin, ", ", end, "] end beyond the file, which has ",
               buffer_bytes_, " bytes after the header");
    require_at(object.key, end - begin == bytes, whose, *dtype, " [", joined(shape), "] has ", bytes, " bytes, data_offsets [", begin, ", ",
               end, "] hold ", end - begin);
    return {{.name = name, .dtype = *dtype, .shape = shape}, data_begin_ + begin, data_begin_ + end, 0};
  }

  const Json& member(const Json& tensor, const char* key, const std::string& whose) const {
    require_at(tensor.key, tensor.contains(key), whose, "has no ", key);
    return tensor.at(key);
  }
  std::vector<int64_t> numbers(const Json& tensor, const char* key, size_t most, const std::string& whose) const {
    const Json& list = member(tensor, key, whose);
    require_at(list.place, list.is_list(), whose, key, " must be a list of numbers");
    require_at(list.place, list.size() <= most, whose, key, " has more than ", most, " numbers");
    std::vector<int64_t> numbers;
    for (const Json& entry : list.entries()) {
      const Scalar number = entry.scalar();
      require_at(entry.place, !std::holds_alternative<uint64_t>(number), whose, key, ": ", entry.dump(), " is beyond any file");
      const auto* const whole = std::get_if<int64_t>(&number);
      require_at(entry.place, whole != nullptr && *whole >= 0, whose, key, " must hold whole numbers of 0 or more");
      numbers.push_back(*whole);
    }
    return numbers;
  }

  void require_tiled(const std::vector<SafetensorsEntry>& entries) const {
    std::vector<const SafetensorsEntry*> order;
    for (const SafetensorsEntry& entry : entries) order.push_back(&entry);
    std::ranges::sort(order, {}, [](const SafetensorsEntry* entry) { return std::pair(entry->begin, entry->end); });
    int64_t end = data_begin_;
    for (const SafetensorsEntry* const entry : order) {
      require(entry->begin == end, ExitCode::data, source_, ": byte ", std::min(entry->begin, end), ": ",
              entry->begin > end ? "bytes of no tensor before" : "bytes of another tensor in", " tensor \"", shown(entry->name),
              "\", whose bytes begin at ", entry->begin);
      end = entry->end;
    }
    require(end == data_begin_ + buffer_bytes_, ExitCode::data, source_, ": byte ", end, ": the tensors end here, the file has ",
            data_begin_ + buffer_bytes_, " bytes");
  }

  static constexpr std::array<const char*, 3> kMembers = {"dtype", "shape", "data_offsets"};
  std::string_view text_;
  const std::string& source_;
  int64_t data_begin_, buffer_bytes_;
};

std::string quoted(const std::string& name) { return Json(name).dump(); }

}  // namespace

const char* file_dtype_name(FileDtype dtype) { return kDtypes[static_cast<size_t>(dtype)].name; }
int file_dtype_bits(FileDtype dtype) { return kDtypes[static_cast<size_t>(dtype)].bits; }
std::ostream& operator<<(std::ostream& out, FileDtype dtype) { return out << file_dtype_name(dtype); }

std::optional<FileDtype> parse_file_dtype(std::string_view name) {
  for (size_t i = 0; i < kDtypes.size(); ++i)
    if (name == kDtypes[i].name) return static_cast<FileDtype>(i);
  return std::nullopt;
}

int64_t safetensors_bytes(const SafetensorsTensor& tensor) {
  int64_t bytes = 0;
  const std::string problem = shape_problem(tensor.dtype, tensor.shape, bytes);
  require(problem.empty(), tensor.name, ": ", tensor.dtype, ": ", problem);
  return bytes;
}

SafetensorsHeader parse_safetensors_header(std::string_view content, int64_t file_bytes, const std::string& source) {
  require(std::cmp_less_equal(content.size(), file_bytes - static_cast<int64_t>(kLengthBytes)), "a header larger than its file");
  return HeaderReader(content, file_bytes, source).read();
}

std::string format_safetensors_header(std::span<const SafetensorsTensor> tensors, const SafetensorsMetadata& metadata) {
  std::string out(kLengthBytes, '\0');
  out += R"({"__metadata__":{"format":"pt")";
  for (const auto& [key, value] : metadata) {
    require(key != "format", "safetensors metadata: \"format\" is written by itself");
    out += "," + quoted(key) + ":" + quoted(value);
  }
  out += "}";
  int64_t end = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    const std::string problem = tensor.name == kMetadataKey ? "a name with a meaning of its own" : name_problem(tensor.name);
    require(problem.empty(), "tensor \"", tensor.name, "\": ", problem);
    const int64_t begin = std::exchange(end, end + safetensors_bytes(tensor));
    out += text(",", quoted(tensor.name), R"(:{"dtype":")", tensor.dtype, R"(","shape":[)", joined(tensor.shape, ","),
                R"(],"data_offsets":[)", begin, ",", end, "]}");
  }
  out += "}";
  out.resize(round_up(out.size(), kLengthBytes), ' ');
  const uint64_t length = out.size() - kLengthBytes;
  require(length <= SafetensorsLimits::kHeaderBytes, "a safetensors header of ", length, " bytes");
  for (size_t i = 0; i < kLengthBytes; ++i) out[i] = static_cast<char>(length >> (8 * i) & 0xff);
  return out;
}

std::map<std::string, std::string> parse_safetensors_index(std::string_view content, const std::string& source) {
  const Json index = parse_json(content, source);
  const Json& weight_map = index.get("weight_map");
  require(weight_map.is_object(), ExitCode::data, source, ": must have an object weight_map");
  require(weight_map.size() <= SafetensorsLimits::kTensors, ExitCode::data, source, ": weight_map has more than ",
          SafetensorsLimits::kTensors, " tensors");
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : weight_map.members()) {
    require(file.is_string() && is_plain_file_name(file.string()), ExitCode::data, source, ": weight_map: \"", printable(shortened(name)),
            "\" must be in a file beside the index, got ", file.shown());
    files.emplace_hint(files.end(), name, file.string());
  }
  return files;
}

}  // namespace mantissa
