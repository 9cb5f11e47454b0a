#include "json/config_merge.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>

#include "base/file.h"
#include "mantissa/base/text.h"

namespace mantissa::detail {

Source& SourceTree::add(Source source) {
  const uint64_t base = sources_.empty() ? 1 : uint64_t{sources_.back().base} + sources_.back().text.size() + 1;
  require(base + source.text.size() < std::numeric_limits<uint32_t>::max(), ExitCode::usage, source.name,
          ": the sources of the configuration are too large together (more than 4 GiB)");
  source.base = static_cast<uint32_t>(base);
  sources_.push_back(std::move(source));
  return sources_.back();
}

const Json* SourceTree::find(std::string_view key) const {
  const Json* at = &root;
  for (size_t begin = 0; begin < key.size() && at != nullptr;) {
    const size_t end = std::min(key.find('.', begin), key.size());
    const std::string_view name = key.substr(begin, end - begin);
    begin = end + 1;
    if (at->is_list()) {
      const Json::Entries& entries = at->entries();
      size_t index = entries.size();
      const auto [end_of_number, problem] = std::from_chars(name.data(), name.data() + name.size(), index);
      if (problem != std::errc() || end_of_number != name.data() + name.size()) index = entries.size();
      at = index < entries.size() ? &entries[index] : nullptr;
    } else {
      at = at->find(name);
    }
  }
  return at != nullptr && at->key != 0 ? at : nullptr;
}

ConfigPlace SourceTree::place(const Json& node) const {
  const Source* const source = source_of(node.key);
  ConfigPlace place{.origin = origin(node.place), .key_origin = "", .directory = "", .argument = argument(node), .order = order(node)};
  if (source == nullptr) return place;
  place.directory = source->directory;
  if (!source->name.empty()) place.key_origin = origin(node.key);
  return place;
}

int64_t SourceTree::order(const Json& node) const {
  const Source* const source = source_of(node.key);
  return source != nullptr && source->name.empty() ? source->base : node.key;
}

std::string SourceTree::argument(const Json& node) const {
  const Source* const source = source_of(node.place);
  if (source == nullptr || !source->name.empty()) return "";
  const bool whole = node.key - source->base < source->value && node.place - source->base >= source->value;  // its key stands before '='
  return whole ? source->text.substr(source->value) : "";
}

const Source* SourceTree::source_of(uint32_t position) const {
  const auto after = std::upper_bound(sources_.begin(), sources_.end(), position,
                                      [](uint32_t wanted, const Source& source) { return wanted < source.base; });
  return after == sources_.begin() ? nullptr : &*std::prev(after);
}

std::string SourceTree::origin(uint32_t position) const {
  const Source* const source = source_of(position);
  if (source == nullptr) return "default";
  if (source->name.empty())
    return "--set " + printable(shown_key(source->text.substr(0, source->value)) + shortened(source->text.substr(source->value)));
  if (!source->lines) source->lines.emplace(source->text);
  return printable(source->name) + ":" + source->lines->at(position - source->base);
}

namespace {

constexpr int64_t kLargestConfig = int64_t{16} << 20;
constexpr size_t kDeepestKey = 32;

class Merger {
 public:
  explicit Merger(ConfigReport& report) : report_(report), tree_(report.sources()) {}

  using Adapt = std::function<void(Json&)>;

  void add_file(const std::string& file, const std::optional<std::string>& content, const Adapt& adapt) {
    Source source{.name = file};
    std::string problem;
    try {
      if (content) {
        source.text = *content;
      } else {
        const File config = File::open_input(file);
        require(config.size() <= kLargestConfig, ExitCode::usage, file, ": too large for a config (more than 16 MiB)");
        source.text = config.content(kLargestConfig);
      }
      source.directory = std::filesystem::absolute(file).parent_path().string();
    } catch (const Error& error) {
      if (error.code() != ExitCode::usage) throw;
      problem = error.what();
    }
    const Source& added = tree_.add(std::move(source));
    if (problem.empty()) problem = add_text(added, adapt);
    if (problem.empty()) return;
    report_.source_error(problem, added.base);
    complete_ = false;
  }

  void add_argument(const std::string& argument) {
    Source& source = tree_.add({.text = argument});
    const size_t equals = argument.find('=');
    const std::string key = argument.substr(0, equals);
    if (equals == std::string::npos || key.empty() || key.front() == '.' || key.back() == '.' || key.find("..") != std::string::npos) {
      report_.source_error("--set " + shortened(argument) + ": expected KEY=VALUE, for example --set optimizer.lr=3e-4", source.base);
    } else if (static_cast<size_t>(std::count(key.begin(), key.end(), '.')) >= kDeepestKey) {
      report_.source_error(text("--set ", shortened(argument), ": more than ", kDeepestKey, " levels deep"), source.base);
    } else {
      source.value = equals + 1;
      if (std::optional<Json> value = value_of(source, key)) set(source, key, std::move(*value));
    }
  }

  bool complete() const { return complete_; }

 private:
  // Returns what is wrong with the text as a whole.
  std::string add_text(const Source& source, const Adapt& adapt) {
    ParsedJson parsed = parse_commented_json(source.text, source.base);
    if (parsed.problems.empty()) {
      if (!parsed.root.is_object()) return source.name + ":1:1: a config must be an object { ... }, got " + parsed.root.type_name();
      if (adapt) adapt(parsed.root);
      merge(tree_.root, std::move(parsed.root));
      return "";
    }
    const TextLines lines(source.text);
    for (const JsonProblem& problem : parsed.problems) {
      const std::string key = printable(shown_key(problem.key));
      report_.source_error(text(key, key.empty() ? "" : ": ", problem.message, "   (", source.name, ":", lines.at(problem.offset), ")"),
                           source.base + static_cast<int64_t>(problem.offset));
    }
    report_.more_source_errors(parsed.more_problems);
    complete_ = false;
    return "";
  }

  void merge(Json& into, Json&& patch) {
    if (!into.is_object() || !patch.is_object()) {
      into = std::move(patch);
      return;
    }
    into.key = patch.key;
    into.place = patch.place;
    for (auto& [name, value] : patch.members()) merge(into.members()[name], std::move(value));
  }

  // Walks to the key, making objects on the way. A number is an index where a list stands, or where nothing stands yet. A made object has
  // the place of its name in the argument.
  void set(const Source& source, const std::string& key, Json value) {
    Json* at = &tree_.root;
    for (size_t begin = 0; begin <= key.size();) {
      const size_t end = std::min(key.find('.', begin), key.size());
      const std::string name = key.substr(begin, end - begin);
      at = at->is_list() || (!at->is_object() && is_index(name)) ? element(*at, name, source, key) : &at->members()[name];
      if (at == nullptr) return;
      const uint32_t place = source.base + static_cast<uint32_t>(begin);
      if (end == key.size()) {
        *at = std::move(value);
        at->key = place;
      } else if (at->key == 0) {
        at->key = at->place = place;
      }
      begin = end + 1;
    }
  }

  // Takes text that is no JSON for a string, except for a number that nothing here can hold.
  std::optional<Json> value_of(const Source& source, const std::string& key) {
    const uint32_t value = source.base + static_cast<uint32_t>(source.value);
    ParsedJson parsed = parse_commented_json(std::string_view(source.text).substr(source.value), value);
    if (parsed.problems.empty()) return std::move(parsed.root);
    const std::string& problem = parsed.problems.front().message;
    if (parsed.problems.size() == 1 && (problem.starts_with("integer beyond 64 bits") || problem.starts_with("number overflow"))) {
      report_.source_error(text(printable(shown_key(key)), ": ", problem, "   (--set ", shortened(source.text), ")"), source.base);
      return {};
    }
    Json words(source.text.substr(source.value));
    words.key = words.place = value;
    return words;
  }

  static bool is_index(const std::string& name) { return name.find_first_not_of("0123456789") == std::string::npos && name.size() < 10; }

  Json* element(Json& parent, const std::string& name, const Source& source, const std::string& key) {
    Json::Entries& entries = parent.entries();
    size_t index = entries.size() + 1;
    if (is_index(name)) std::from_chars(name.data(), name.data() + name.size(), index);
    if (index > entries.size()) {
      report_.source_error(text(printable(shown_key(key)), ": '", shortened(name), "' is not an entry of this list, which has ",
                                entries.size(), " (they count from 0; the next number appends)   (--set ", shortened(source.text), ")"),
                           source.base);
      return nullptr;
    }
    if (index == entries.size()) entries.emplace_back();
    return &entries[index];
  }

  ConfigReport& report_;
  SourceTree& tree_;
  bool complete_ = true;
};

}  // namespace

bool merge_sources(const ConfigSources& sources, ConfigReport& report) {
  Merger merger(report);
  if (!sources.file.empty()) merger.add_file(sources.file, sources.text, sources.adapt);
  for (const std::string& file : sources.set_files) merger.add_file(file, std::nullopt, {});
  for (const std::string& argument : sources.sets) merger.add_argument(argument);
  return merger.complete();
}

std::string shown_key(std::string_view key) {
  constexpr size_t kMostNames = 4;  // shown in full length
  std::string shown;
  for (size_t begin = 0; begin <= key.size() && shown.size() <= kMostNames * kShownCharacters;) {
    const size_t end = std::min(key.find('.', begin), key.size());
    shown += (begin == 0 ? "" : ".") + shortened(key.substr(begin, end - begin));
    begin = end + 1;
  }
  return shortened(shown, kMostNames * kShownCharacters);
}

std::string dotted(const std::string& key, std::string_view name) {
  return key.empty() ? std::string(name) : key + "." + std::string(name);
}

}  // namespace mantissa::detail
