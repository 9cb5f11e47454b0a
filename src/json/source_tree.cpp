#include "source_tree.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "config_merge.h"
#include "mantissa/base/printable.h"

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

}  // namespace mantissa::detail
