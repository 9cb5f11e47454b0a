#include "io/safetensors.h"

#include <sys/stat.h>

#include <cerrno>
#include <iomanip>
#include <set>
#include <tuple>
#include <utility>

#include "mantissa/base/error.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"

namespace mantissa {

UnchangedFiles::State UnchangedFiles::state_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    const int error = errno;
    require(error == ENOENT || error == ENOTDIR, path_failure(error), path, ": cannot be accessed: ", system_message(error));
    return {};
  }
  return {static_cast<int64_t>(status.st_dev),
          static_cast<int64_t>(status.st_ino),
          status.st_size,
          status.st_mtim.tv_sec,
          status.st_mtim.tv_nsec,
          status.st_ctim.tv_sec,
          status.st_ctim.tv_nsec};
}

void UnchangedFiles::look_at(const std::filesystem::path& path) {
  const State now = state_of(path.native());
  const auto [seen, is_new] = seen_.emplace(path.native(), now);
  require(is_new || seen->second == now, ExitCode::data, path.native(),
          ": was changed or replaced while the model was read; wait until nothing writes there, and read it again");
}

void UnchangedFiles::require_unchanged() {
  for (const auto& [path, state] : seen_) look_at(path);
}

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
constexpr const char* kFormatKey = "format";  // in metadata

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
  if (!empty && bits % 8 != 0) return text(bits, " bits are not a whole number of bytes");
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
    if (!parsed.problems.empty()) fail_at(parsed.problems.front().offset, "the header is not JSON: ", parsed.problems.front().message);
    require_at(0, parsed.root.size() <= SafetensorsLimits::kTensors, "more than ", SafetensorsLimits::kTensors, " tensors");
    SafetensorsHeader header;
    for (const auto& [name, value] : parsed.root.members()) {
      require_at(value.place, value.is_object(), '"', shown(name), "\" must be an object");
      if (name != kMetadataKey) {
        header.entries.push_back(tensor(name, value));
        continue;
      }
      for (const auto& [key, one] : value.members()) {
        require_at(one.place, one.is_string(), "metadata \"", shown(key), "\" must be text");
        header.metadata.emplace(key, one.string());
      }
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
      require_at(entry.place, !std::holds_alternative<uint64_t>(number), whose, key, ": ", entry.dump(), " is larger than any file");
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
              entry->begin > end ? "no tensor has the bytes before" : "another tensor has bytes of", " tensor \"", shown(entry->name),
              "\", which begins at ", entry->begin);
      end = entry->end;
    }
    require(end == data_begin_ + buffer_bytes_, ExitCode::data, source_, ": byte ", end, ": the tensors end here, but the file has ",
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
  SafetensorsMetadata others = metadata;
  const auto format = others.extract(kFormatKey);
  out += R"({"__metadata__":{"format":)" + quoted(format.empty() ? "pt" : format.mapped());
  for (const auto& [key, value] : others) out += "," + quoted(key) + ":" + quoted(value);
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

// Reads files.

namespace {

namespace fs = std::filesystem;

SafetensorsHeader read_header(const File& file, int64_t file_bytes) {
  const std::string source = file.path().string();
  std::array<std::byte, 8> front{};
  const auto size = static_cast<int64_t>(front.size());
  require(file_bytes >= size, ExitCode::data, source, ": byte ", file_bytes, ": ends within the length of its header");
  file.read_at(0, front);
  uint64_t length = 0;
  for (size_t i = front.size(); i-- > 0;) length = length << 8 | std::to_integer<uint64_t>(front[i]);
  require(length <= SafetensorsLimits::kHeaderBytes, ExitCode::data, source, ": byte 0: a header of ", length, " bytes, at most ",
          SafetensorsLimits::kHeaderBytes, " are accepted");
  require(std::cmp_less_equal(length, file_bytes - size), ExitCode::data, source, ": byte 0: a header of ", length, " bytes in a file of ",
          file_bytes);
  std::string content(static_cast<size_t>(length), '\0');
  file.read_at(size, std::as_writable_bytes(std::span(content)));
  return parse_safetensors_header(content, file_bytes, source);
}

const SafetensorsEntry* find_by_name(const std::vector<SafetensorsEntry>& entries, std::string_view name) {
  const auto found = std::lower_bound(entries.begin(), entries.end(), name, [](const auto& entry, auto what) { return entry.name < what; });
  return found != entries.end() && found->name == name ? &*found : nullptr;
}

void read_part(const File& file, const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> out) {
  require(offset >= 0 && offset <= entry.bytes() && std::cmp_less_equal(out.size(), entry.bytes() - offset), entry.name, ": ", out.size(),
          " bytes from byte ", offset, " of ", entry.bytes());
  file.read_at(entry.begin + offset, out);
}

// Returns whether there is something of this name, even a broken link.
bool is_there(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  require(!error || status.type() == fs::file_type::not_found, path_failure(error.value()), path.string(),
          ": cannot be accessed: ", error.message());
  return fs::exists(status);
}

}  // namespace

SafetensorsFile::SafetensorsFile(const fs::path& path)
    : file_(File::open_input(path)), bytes_(file_.size()), header_(read_header(file_, bytes_)) {}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const { return find_by_name(entries(), name); }

void SafetensorsFile::read(const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> out) const {
  read_part(file_, entry, offset, out);
}

SafetensorsFolder::SafetensorsFolder(const fs::path& folder) {
  const fs::path single = folder / "model.safetensors", index = folder / "model.safetensors.index.json";
  seen_.look_at(single);
  seen_.look_at(index);
  const bool has_single = is_there(single), has_index = is_there(index);
  require(has_single || has_index, ExitCode::usage, folder.string(), ": has neither model.safetensors nor model.safetensors.index.json");
  require(!has_single || !has_index, ExitCode::usage, folder.string(),
          ": has both model.safetensors and model.safetensors.index.json; remove the one that is not the model");
  if (has_single) {
    add_file(single);
    return;
  }
  const std::string source = index.string();
  const auto weight_map = parse_safetensors_index(File::open_input(index).content(SafetensorsLimits::kHeaderBytes), source);
  std::set<std::string> names;
  for (const auto& [tensor, file] : weight_map) names.insert(file);
  for (const std::string& name : names) {
    require(is_there(folder / name), ExitCode::data, source, ": weight_map names the file ", name, ", which is not beside it");
    add_file(folder / name);
  }
  for (const SafetensorsEntry& entry : entries_) {
    const fs::path& file = files_[static_cast<size_t>(entry.file)];
    const auto mapped = weight_map.find(entry.name);
    require(mapped != weight_map.end(), ExitCode::data, file.native(), ": byte ", entry.begin, ": tensor \"", shortened(entry.name),
            "\" is not in the weight_map of ", source);
    require(file.filename() == mapped->second, ExitCode::data, file.native(), ": byte ", entry.begin, ": tensor \"", shortened(entry.name),
            "\" should be in ", mapped->second, " by the weight_map of ", source);
  }
  for (const auto& [name, file] : weight_map)
    require(find(name) != nullptr, ExitCode::data, source, ": weight_map has a tensor \"", printable(shortened(name)), "\", which ", file,
            " lacks");
}

void SafetensorsFolder::add_file(const fs::path& path) {
  seen_.look_at(path);
  SafetensorsFile file(path);
  seen_.look_at(path);
  if (files_.empty()) metadata_ = file.metadata();
  std::vector<SafetensorsEntry>& added = file.header_.entries;
  require(entries_.size() + added.size() <= SafetensorsLimits::kTensors, ExitCode::data, path.string(),
          ": with the files before it more than ", SafetensorsLimits::kTensors, " tensors");
  for (SafetensorsEntry& entry : added) entry.file = static_cast<int32_t>(files_.size());
  const auto middle = static_cast<std::ptrdiff_t>(entries_.size());
  std::move(added.begin(), added.end(), std::back_inserter(entries_));
  std::inplace_merge(entries_.begin(), entries_.begin() + middle, entries_.end(),
                     [](const SafetensorsEntry& a, const SafetensorsEntry& b) { return a.name < b.name; });
  files_.push_back(path);
}

const SafetensorsEntry* SafetensorsFolder::find(std::string_view name) const { return find_by_name(entries_, name); }

void SafetensorsFolder::read(const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> out) {
  if (open_file_ != entry.file) {
    const auto file = static_cast<size_t>(entry.file);
    open_file_ = -1;
    open_ = File::open_input(files_.at(file));
    seen_.look_at(files_[file]);
    open_file_ = entry.file;
  }
  read_part(open_, entry, offset, out);
}

// Writes files.

namespace {

std::string file_name(size_t file, size_t files) {
  if (files == 1) return "model.safetensors";
  std::ostringstream out;
  out << std::setfill('0') << "model-" << std::setw(5) << file + 1 << "-of-" << std::setw(5) << files << ".safetensors";
  return std::move(out).str();
}

}  // namespace

void write_new_file(const std::filesystem::path& path, std::string_view content, int64_t bytes) {
  File file = File::create(path, bytes);
  file.write_at(0, std::as_bytes(std::span(content)));
  file.sync();
  file.close();
}

std::vector<SafetensorsTensor> in_file_order(std::vector<SafetensorsTensor> tensors) {
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return std::tie(b.dtype, a.name) < std::tie(a.dtype, b.name); });
  return tensors;
}

SafetensorsLayout::SafetensorsLayout(std::vector<SafetensorsTensor> tensors, const SafetensorsMetadata& metadata, int64_t shard_bytes)
    : tensors_(in_file_order(std::move(tensors))) {
  std::map<std::string_view, int> names;
  for (const SafetensorsTensor& tensor : tensors_) require(++names[tensor.name] == 1, "two tensors are called ", tensor.name);
  require(tensors_.size() <= SafetensorsLimits::kTensors, tensors_.size(), " tensors in one folder");
  size_t first = 0;
  while (files_.empty() || first < tensors_.size()) {
    int64_t end = 0;
    size_t last = first;
    for (; last < tensors_.size(); ++last) {
      const int64_t bytes = safetensors_bytes(tensors_[last]);
      if (last > first && bytes > shard_bytes - end) break;
      places_.push_back({.file = files_.size(), .begin = end, .end = end + bytes});
      end += bytes;
    }
    const std::string header = format_safetensors_header(std::span(tensors_).subspan(first, last - first), metadata);
    for (size_t i = first; i < last; ++i) {
      places_[i].begin += static_cast<int64_t>(header.size());
      places_[i].end += static_cast<int64_t>(header.size());
    }
    files_.push_back({.name = {}, .header = header, .bytes = static_cast<int64_t>(header.size()) + end});
    bytes_ += end;
    first = last;
  }
  for (size_t i = 0; i < files_.size(); ++i) files_[i].name = file_name(i, files_.size());
}

size_t SafetensorsLayout::first_of(int part, int parts) const {
  if (part == parts) return tensors_.size();
  int64_t before = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const int64_t bytes = places_[i].end - places_[i].begin;
    if (before + bytes / 2 >= bytes_ / parts * part) return i;
    before += bytes;
  }
  return tensors_.size();
}

void SafetensorsLayout::create(const std::filesystem::path& folder) const {
  require_free_space(folder, bytes_);
  for (const ShardFile& file : files_) write_new_file(folder / file.name, file.header, file.bytes);
  if (files_.size() == 1) return;
  Json weight_map = Json::Members();
  for (size_t i = 0; i < tensors_.size(); ++i) weight_map[tensors_[i].name] = file(places_[i].file);
  const Json index = {{"metadata", {{"total_size", bytes_}}}, {"weight_map", std::move(weight_map)}};
  write_new_file(folder / "model.safetensors.index.json", index.dump(2) + "\n");
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& folder, const SafetensorsLayout& layout, size_t first, size_t last)
    : folder_(folder), layout_(layout), tensor_(first), last_(last) {
  begin_tensor();
}

// Goes to the place of the tensor whose turn it is. Tensors without bytes are complete at once.
void SafetensorsWriter::begin_tensor() {
  while (tensor_ < last_ && layout_.place(tensor_).begin == layout_.place(tensor_).end) ++tensor_;
  if (tensor_ < last_) at_ = layout_.place(tensor_).begin;
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  require(tensor_ < last_, bytes.size(), " bytes behind the last tensor");
  const SafetensorsLayout::Place& place = layout_.place(tensor_);
  require(std::cmp_less_equal(bytes.size(), place.end - at_), layout_.tensors()[tensor_].name, ": ", bytes.size(), " bytes, ",
          place.end - at_, " are missing");
  if (file_ && open_ != place.file) file_->sync();
  if (!file_ || open_ != place.file) file_.emplace(File::open_for_writing(folder_ / layout_.file(place.file)));
  open_ = place.file;
  file_->write_at(at_, bytes);
  at_ += static_cast<int64_t>(bytes.size());
  if (at_ < place.end) return;
  ++tensor_;
  begin_tensor();
}

void SafetensorsWriter::finish() {
  if (tensor_ < last_)
    fail(ExitCode::internal, layout_.tensors()[tensor_].name, ": ", layout_.place(tensor_).end - at_, " bytes are missing");
  if (!file_) return;
  file_->sync();
  file_->close();
}

}  // namespace mantissa
