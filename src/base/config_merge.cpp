#include "config_merge.h"

#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "mantissa/base/json.h"

namespace mantissa::detail {
namespace {

using nlohmann::json;

constexpr int64_t kSourceStride = int64_t{1} << 40;  // orders of one source, above any byte offset in it
constexpr std::uintmax_t kLargestConfig = std::uintmax_t{16} << 20;

std::string dotted_pointer(const std::string& pointer) {
  std::string key;
  for (size_t i = 1; i < pointer.size(); ++i) {
    if (pointer[i] == '/') {
      key += '.';
    } else if (pointer[i] == '~') {
      key += pointer[++i] == '0' ? '~' : '/';
    } else {
      key += pointer[i];
    }
  }
  return key;
}

std::string read_text(const std::string& file) {
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  require(std::filesystem::exists(status), ExitCode::usage, file, ": no such config file");
  require(std::filesystem::is_regular_file(status), ExitCode::usage, file, ": a config must be a regular file");
  require(std::filesystem::file_size(file, error) <= kLargestConfig, ExitCode::usage, file, ": too large for a config (more than 16 MiB)");
  std::ifstream stream(file, std::ios::binary);
  require(stream.good(), ExitCode::usage, file, ": cannot be opened for reading");
  return {std::istreambuf_iterator<char>(stream), {}};
}

// Collects the places of one source; they reach the report in merge order, so a later source replaces those of an earlier one.
class Merger {
 public:
  explicit Merger(ConfigReport& report) : report_(report) {}

  void add_file(const std::string& file, const std::optional<std::string>& content) {
    const int64_t order = ++source_ * kSourceStride;
    try {
      add_text(file, content ? *content : read_text(file), order);
    } catch (const Error& error) {
      report_.source_error(error.what(), order);
      merged_.complete = false;
    }
  }

  void add_argument(const std::string& argument) {
    const int64_t order = ++source_ * kSourceStride;
    const size_t equals = argument.find('=');
    const std::string key = argument.substr(0, equals);
    if (equals == std::string::npos || key.empty() || key.front() == '.' || key.back() == '.' || key.find("..") != std::string::npos) {
      report_.source_error("--set " + argument + ": expected KEY=VALUE, for example --set optimizer.lr=3e-4", order);
      return;
    }
    const std::string value = argument.substr(equals + 1);
    const LocatedJson parsed = parse_located_json(value);
    const ConfigPlace place{.origin = "--set " + argument, .key_origin = "", .directory = "", .argument = value, .order = order};
    set(key, parsed.problems.empty() ? *parsed.value : json(value), place);
  }

  Merged take() { return std::move(merged_); }

 private:
  void add_text(const std::string& file, const std::string& content, int64_t order) {
    const LocatedJson parsed = parse_located_json(content);
    for (const JsonProblem& problem : parsed.problems) {
      const std::string key = printable(dotted_pointer(problem.pointer));
      report_.source_error(
          text(key, key.empty() ? "" : ": ", problem.message, "   (", file, ":", line_and_column(content, problem.offset), ")"),
          order + static_cast<int64_t>(problem.offset));
    }
    if (!parsed.problems.empty()) {
      merged_.complete = false;
      return;
    }
    require(parsed.value->is_object(), ExitCode::usage, file, ":1:1: a config must be an object { ... }, got ", parsed.value->type_name());
    merge(merged_.value, *parsed.value, "");
    const std::string directory = std::filesystem::absolute(file).parent_path().string();
    for (const auto& [pointer, at] : parsed.places) {
      report_.set_place(dotted_pointer(pointer), {.origin = file + ":" + line_and_column(content, at.value),
                                                  .key_origin = file + ":" + line_and_column(content, at.key),
                                                  .directory = directory,
                                                  .argument = "",
                                                  .order = order + static_cast<int64_t>(at.key)});
    }
  }

  void merge(json& into, const json& patch, const std::string& key) {
    if (!into.is_object() || !patch.is_object()) {
      into = patch;
      report_.forget(key);
      return;
    }
    for (const auto& [name, value] : patch.items()) merge(into[name], value, dotted(key, name));
  }

  // Walks to the key, making objects on the way; a number is an index where a list stands, or where nothing stands yet.
  void set(const std::string& key, json value, const ConfigPlace& place) {
    json* at = &merged_.value;
    std::string path;
    for (size_t begin = 0; begin <= key.size();) {
      const size_t end = std::min(key.find('.', begin), key.size());
      const std::string name = key.substr(begin, end - begin);
      path = dotted(path, name);
      at = at->is_array() || (!at->is_object() && is_index(name)) ? element(*at, name, key, place) : member(*at, name);
      if (at == nullptr) return;
      if (!report_.given(path)) report_.set_place(path, place);
      begin = end + 1;
    }
    report_.forget(key);
    report_.set_place(key, place);
    ConfigPlace inside = place;
    inside.argument.clear();
    place_below(key, value, inside);
    *at = std::move(value);
  }

  void place_below(const std::string& key, const json& value, const ConfigPlace& place) {
    if (!value.is_structured()) return;
    for (const auto& [name, entry] : value.items()) {  // the names of a list are its indices
      report_.set_place(dotted(key, name), place);
      place_below(dotted(key, name), entry, place);
    }
  }

  static bool is_index(const std::string& name) { return name.find_first_not_of("0123456789") == std::string::npos && name.size() < 10; }

  static json* member(json& parent, const std::string& name) {
    if (!parent.is_object()) parent = json::object();
    return &parent[name];
  }

  json* element(json& parent, const std::string& name, const std::string& key, const ConfigPlace& place) {
    if (!parent.is_array()) parent = json::array();
    size_t index = parent.size() + 1;
    if (is_index(name)) std::from_chars(name.data(), name.data() + name.size(), index);
    if (index > parent.size()) {
      report_.source_error(text(key, ": '", name, "' is no entry of a list with ", parent.size(),
                                " (count from 0; the next number appends)   (", place.origin, ")"),
                           place.order);
      return nullptr;
    }
    if (index == parent.size()) parent.push_back(json());
    return &parent[index];
  }

  ConfigReport& report_;
  Merged merged_{.value = json::object()};
  int64_t source_ = 0;
};

}  // namespace

Merged merge_sources(const ConfigSources& sources, ConfigReport& report) {
  Merger merger(report);
  if (!sources.file.empty()) merger.add_file(sources.file, sources.text);
  for (const std::string& file : sources.set_files) merger.add_file(file, std::nullopt);
  for (const std::string& argument : sources.sets) merger.add_argument(argument);
  return merger.take();
}

std::string printable(const std::string& key) {
  const std::string quoted = json(key).dump(-1, ' ', false, json::error_handler_t::replace);
  return quoted.substr(1, quoted.size() - 2);
}

std::string dotted(const std::string& key, std::string_view name) {
  return key.empty() ? std::string(name) : key + "." + std::string(name);
}

}  // namespace mantissa::detail
