// Parses and formats the JSON of safetensors files: headers and indexes.
#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "mantissa/base/integers.h"
#include "mantissa/base/printable.h"
#include "mantissa/io/plain_file_name.h"
#include "mantissa/io/safetensors.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

using nlohmann::json;

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

// Tracks how far a text was read: nlohmann's parser gives no positions.
struct Reading {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at;
  const char** read;

  reference operator*() const { return *at; }
  Reading& operator++() {
    *read = ++at;
    return *this;
  }
  bool operator==(const Reading& other) const { return at == other.at; }
};

// Receives the events of the parser and accepts the only valid form; anything else stops it at once.
class HeaderReader : public nlohmann::json_sax<json> {
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
    const size_t zero = text_.find('\0');  // to nlohmann it is the end, whatever follows
    require_at(zero, zero == std::string_view::npos, "the header has a zero byte");
    read_ = text_.data();
    json::sax_parse(Reading{text_.data(), &read_}, Reading{text_.data() + text_.size(), &read_}, this);
    std::sort(tensors_.begin(), tensors_.end(),
              [](const Found& a, const Found& b) { return std::tie(a.entry.name, a.at) < std::tie(b.entry.name, b.at); });
    require_unique();
    require_tiled();
    SafetensorsHeader header{.entries = {}, .metadata = std::move(metadata_)};
    header.entries.reserve(tensors_.size());
    for (Found& found : tensors_) header.entries.push_back(std::move(found.entry));
    return header;
  }

  bool null() override { return unexpected(); }
  bool boolean(bool) override { return unexpected(); }
  bool binary(binary_t&) override { return unexpected(); }
  bool number_float(number_float_t, const string_t&) override { return unexpected(); }
  bool number_integer(number_integer_t) override { return unexpected(); }  // a negative one

  bool number_unsigned(number_unsigned_t value) override {
    next_token();
    if (in_ != In::list) refuse_value();
    std::vector<int64_t>& list = field_ == Field::shape ? shape_ : offsets_;
    const size_t most = field_ == Field::shape ? SafetensorsLimits::kRank : 2;
    require_here(list.size() < most, field_name(), " has more than ", most, " numbers");
    require_here(std::in_range<int64_t>(value), field_name(), ": ", value, " is beyond any file");
    list.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    next_token();
    if (in_ == In::metadata) {
      metadata_.emplace(name_, std::move(value));
      return true;
    }
    if (in_ != In::tensor || field_ != Field::dtype) refuse_value();
    dtype_ = parse_file_dtype(value);
    require_here(dtype_.has_value(), "there is no dtype \"", shown(value), "\"");
    return true;
  }

  bool key(string_t& name) override {
    next_token();
    if (in_ == In::tensor) return field(name);
    if (in_ == In::metadata) {
      require_here(!metadata_.contains(name), "metadata has two keys \"", shown(name), "\"");
    } else {
      begin_tensor(name);
    }
    name_ = std::move(name);
    return true;
  }

  bool start_object(size_t) override {
    next_token();
    if (in_ != In::file && in_ != In::tensors) refuse_value();
    in_ = in_ == In::file ? In::tensors : name_ == kMetadataKey ? In::metadata : In::tensor;
    return true;
  }
  bool end_object() override {
    next_token();
    if (in_ == In::tensor) end_tensor();
    in_ = in_ == In::tensors ? In::file : In::tensors;
    return true;
  }
  bool start_array(size_t) override {
    next_token();
    if (in_ != In::tensor || (field_ != Field::shape && field_ != Field::offsets)) refuse_value();
    in_ = In::list;
    return true;
  }
  bool end_array() override {
    next_token();
    in_ = In::tensor;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    fail_at(position > 0 ? position - 1 : 0, "the header is no JSON: ", json_problem(error));
  }

 private:
  enum class In { file, tensors, tensor, list, metadata };
  enum class Field { none, dtype, shape, offsets };
  struct Found {
    SafetensorsEntry entry;
    size_t at;  // of its name in the text
  };

  static std::string shown(std::string_view name) { return printable(shortened(name)); }

  template <class... Parts>
  [[noreturn]] void fail_at(size_t position, const Parts&... parts) const {
    fail(ExitCode::data, source_, ": byte ", kLengthBytes + position, ": ", parts...);
  }
  template <class... Parts>
  void require_at(size_t position, bool ok, const Parts&... parts) const {
    if (!ok) fail_at(position, parts...);
  }
  // At the token at hand, about the tensor that it belongs to.
  template <class... Parts>
  [[noreturn]] void fail_here(const Parts&... parts) const {
    if (in_ == In::tensor || in_ == In::list) fail_at(token_, "tensor \"", shown(name_), "\": ", parts...);
    fail_at(token_, parts...);
  }
  template <class... Parts>
  void require_here(bool ok, const Parts&... parts) const {
    if (!ok) fail_here(parts...);
  }

  // Where the token of the event begins: behind the one before. After a number one character more was read, which is none of a token's
  // unless it ends a list or an object: those are read again.
  void next_token() {
    const auto between = [](char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == ',' || c == ':'; };
    token_ = end_of_last_;
    while (token_ < text_.size() && between(text_[token_])) ++token_;
    end_of_last_ = static_cast<size_t>(read_ - text_.data());
  }

  const char* field_name() const { return field_ == Field::shape ? "shape" : field_ == Field::offsets ? "data_offsets" : "dtype"; }

  bool unexpected() {
    next_token();
    refuse_value();
  }
  [[noreturn]] void refuse_value() const {
    switch (in_) {
      case In::file: fail_here("the header must be an object");
      case In::tensors: fail_here("\"", shown(name_), "\" must be an object");
      case In::metadata: fail_here("metadata \"", shown(name_), "\" must be text");
      case In::list: fail_here(field_name(), " must hold whole numbers of 0 or more");
      case In::tensor: break;
    }
    fail_here(field_name(), field_ == Field::dtype ? " must be the name of a type" : " must be a list of numbers");
  }

  void begin_tensor(const std::string& name) {
    if (name == kMetadataKey) {
      require_here(!std::exchange(has_metadata_, true), "two keys ", kMetadataKey);
      return;
    }
    const std::string problem = name_problem(name);
    require_here(problem.empty(), "tensor \"", shown(name), "\": ", problem);
    require_here(tensors_.size() < SafetensorsLimits::kTensors, "more than ", SafetensorsLimits::kTensors, " tensors");
    name_token_ = token_;
    has_shape_ = has_offsets_ = false;
    dtype_.reset();
    field_ = Field::none;
  }

  bool field(const std::string& name) {
    field_ = name == "dtype" ? Field::dtype : name == "shape" ? Field::shape : name == "data_offsets" ? Field::offsets : Field::none;
    bool twice = field_ == Field::dtype && dtype_.has_value();
    if (field_ == Field::shape) twice = std::exchange(has_shape_, true);
    if (field_ == Field::offsets) twice = std::exchange(has_offsets_, true);
    require_here(field_ != Field::none, "unknown key \"", shown(name), "\"");
    require_here(!twice, "two keys ", field_name());
    if (field_ == Field::shape) shape_.clear();
    if (field_ == Field::offsets) offsets_.clear();
    return true;
  }

  void end_tensor() {
    token_ = name_token_;
    require_here(dtype_.has_value(), "has no dtype");
    require_here(has_shape_, "has no shape");
    require_here(has_offsets_ && offsets_.size() == 2, "must have two data_offsets");
    int64_t bytes = 0;
    const std::string problem = shape_problem(*dtype_, shape_, bytes);
    require_here(problem.empty(), problem);
    const int64_t begin = offsets_[0], end = offsets_[1];
    require_here(begin <= end, "data_offsets [", begin, ", ", end, "] end before they begin");
    require_here(end <= buffer_bytes_, "data_offsets [", begin, ", ", end, "] end beyond the file, which has ", buffer_bytes_,
                 " bytes after the header");
    require_here(end - begin == bytes, *dtype_, " [", joined(shape_), "] has ", bytes, " bytes, data_offsets [", begin, ", ", end,
                 "] hold ", end - begin);
    SafetensorsEntry entry{{.name = std::move(name_), .dtype = *dtype_, .shape = shape_}, data_begin_ + begin, data_begin_ + end, 0};
    tensors_.push_back({std::move(entry), name_token_});
  }

  void require_unique() const {
    const auto same = [](const Found& a, const Found& b) { return a.entry.name == b.entry.name; };
    const auto twice = std::adjacent_find(tensors_.begin(), tensors_.end(), same);
    if (twice != tensors_.end()) fail_at((twice + 1)->at, "two tensors are called \"", shown(twice->entry.name), "\"");
  }

  void require_tiled() const {
    std::vector<uint32_t> order(tensors_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<uint32_t>(i);
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      return std::tie(tensors_[a].entry.begin, tensors_[a].entry.end) < std::tie(tensors_[b].entry.begin, tensors_[b].entry.end);
    });
    int64_t end = data_begin_;
    for (const uint32_t i : order) {
      const SafetensorsEntry& entry = tensors_[i].entry;
      require(entry.begin == end, ExitCode::data, source_, ": byte ", std::min(entry.begin, end), ": ",
              entry.begin > end ? "bytes of no tensor before" : "bytes of another tensor in", " tensor \"", shown(entry.name),
              "\", whose bytes begin at ", entry.begin);
      end = entry.end;
    }
    require(end == data_begin_ + buffer_bytes_, ExitCode::data, source_, ": byte ", end, ": the tensors end here, the file has ",
            data_begin_ + buffer_bytes_, " bytes");
  }

  std::string_view text_;
  const std::string& source_;
  int64_t data_begin_, buffer_bytes_;
  const char* read_ = nullptr;
  size_t token_ = 0, end_of_last_ = 0;

  In in_ = In::file;
  std::string name_;  // of the tensor or of the metadata at hand
  size_t name_token_ = 0;
  Field field_ = Field::none;
  std::optional<FileDtype> dtype_;
  std::vector<int64_t> shape_, offsets_;
  bool has_shape_ = false, has_offsets_ = false, has_metadata_ = false;
  std::vector<Found> tensors_;
  SafetensorsMetadata metadata_;
};

std::string quoted(const std::string& name) { return json(name).dump(); }

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
  json index = parse_strict_json(content, source);
  const auto found = index.is_object() ? index.find("weight_map") : index.end();
  require(found != index.end() && found->is_object(), ExitCode::data, source, ": must have an object weight_map");
  require(found->size() <= SafetensorsLimits::kTensors, ExitCode::data, source, ": weight_map has more than ", SafetensorsLimits::kTensors,
          " tensors");
  std::map<std::string, std::string> files;
  for (auto& [name, file] : found->items()) {
    const std::string* const plain = file.get_ptr<const std::string*>();
    require(plain != nullptr && is_plain_file_name(*plain), ExitCode::data, source, ": weight_map: \"", printable(shortened(name)),
            "\" must be in a file beside the index, got ", shortened(file.dump()));
    files.emplace_hint(files.end(), name, *plain);
  }
  return files;
}

}  // namespace mantissa
