#include <algorithm>
#include <filesystem>

#include "json/config_merge.h"
#include "json/json_fields.h"
#include "mantissa/base/text.h"
#include "mantissa/json/config.h"

namespace mantissa {
namespace {

constexpr size_t kLongestMessage = 1000;  // paths and lists of names are not values

std::string above(const std::string& key) { return key.substr(0, key.find('.') == std::string::npos ? 0 : key.rfind('.')); }

void mark(std::vector<bool>& marks, uint32_t position) {
  if (position >= marks.size()) marks.resize(std::max<size_t>(position + 1, 2 * marks.size()));
  marks[position] = true;
}

bool marked(const std::vector<bool>& marks, uint32_t position) { return position < marks.size() && marks[position]; }

const std::string& key_origin(const ConfigPlace& place) { return place.key_origin.empty() ? place.origin : place.key_origin; }

// origin: "" where nothing was read, so that a value is nobody's default.
std::string reported(const std::string& key, const std::string& message, const std::string& origin) {
  return text(printable(detail::shown_key(key)), key.empty() ? "" : ": ", shortened(message, kLongestMessage),
              origin.empty() ? "" : "   (" + origin + ")");
}

}  // namespace

ConfigReport::ConfigReport() : sources_(std::make_shared<detail::SourceTree>()) {}

void ConfigReport::error(const std::string& key, const std::string& message) {
  error(key, [&] { return message; });
}

void ConfigReport::error(const std::string& key, const Message& message) {
  mark_failed(key);
  add(order(key), [&] { return reported(key, message(), place(key).origin); });
}

void ConfigReport::key_error(const std::string& key, const std::string& message) {
  mark_failed(key);
  add(order(key), [&] { return reported(key, message, key_origin(place(key))); });
}

void ConfigReport::error(const std::string& key, const Json& at, const Message& message) {
  mark(failed_at_, at.key);
  add(sources_->order(at), [&] { return reported(key, message(), sources_->place(at).origin); });
}

void ConfigReport::key_error(const std::string& key, const Json& at, const Message& message) {
  mark(failed_at_, at.key);
  add(sources_->order(at), [&] { return reported(key, message(), key_origin(sources_->place(at))); });
}

void ConfigReport::failed_below(const Json& at) { mark(failed_below_, at.key); }

void ConfigReport::source_error(const std::string& message, int64_t order) {
  add(order, [&] { return shortened(message, kLongestMessage); });
}

// Keeps errors of equal order in the order in which they were found.
void ConfigReport::add(int64_t order, const Message& message) {
  ++errors_;
  const bool full = messages_.size() == kMostMessages;
  if (full && order >= messages_.rbegin()->first) return;
  if (full) messages_.erase(std::prev(messages_.end()));
  messages_.emplace(order, message());
}

void ConfigReport::mark_failed(const std::string& key) {
  const Json* const node = sources_->find(key);
  if (node != nullptr) {
    mark(failed_at_, node->key);
  } else {
    failed_unstated_.insert(key);
  }
  for (std::string at = key; !at.empty();) {
    at = above(at);
    if (const Json* const object = sources_->find(at)) mark(failed_below_, object->key);
  }
}

bool ConfigReport::failed(const std::string& key) const {
  const Json* const node = sources_->find(key);
  if (node != nullptr && marked(failed_below_, node->key)) return true;
  for (std::string at = key; !at.empty(); at = above(at)) {
    const Json* const object = sources_->find(at);
    if ((object != nullptr && marked(failed_at_, object->key)) || failed_unstated_.contains(at)) return true;
  }
  const auto below = failed_unstated_.lower_bound(key + ".");
  return below != failed_unstated_.end() && below->starts_with(key + ".");
}

bool ConfigReport::given(const std::string& key) const {
  return !derived_.contains(key) && (stated_.contains(key) || sources_->find(key) != nullptr);
}

// An object that was made of members has no place of its own; one that a source holds stands behind its key.
bool ConfigReport::made_of_members(const std::string& key) const {
  const Json* const node = sources_->find(key);
  return node != nullptr && node->is_object() && node->key == node->place;
}

std::string ConfigReport::origin(const std::string& key) const {
  if (derived_.contains(key)) return "derived";
  return given(key) ? place(key).origin : "default";
}

ConfigReport::Nearest ConfigReport::nearest(const std::string& key) const {
  for (std::string at = key;; at = above(at)) {
    if (!derived_.contains(at)) {
      const auto stated = stated_.find(at);
      if (stated != stated_.end()) return {.stated = &stated->second};
      if (const Json* const node = sources_->find(at)) return {.node = node};
    }
    if (at.empty()) return {};
  }
}

ConfigPlace ConfigReport::place(const std::string& key) const {
  const auto [stated, node] = nearest(key);
  if (stated != nullptr) return *stated;
  if (node != nullptr) return sources_->place(*node);
  return {.origin = sources_->has_sources() || !stated_.empty() ? "default" : ""};
}

int64_t ConfigReport::order(const std::string& key) const {
  const auto [stated, node] = nearest(key);
  if (stated != nullptr) return stated->order;
  return node != nullptr ? sources_->order(*node) : 0;
}

void ConfigReport::set_place(const std::string& key, ConfigPlace place) {
  derived_.erase(key);
  stated_[key] = std::move(place);
}

void ConfigReport::derive(const std::string& key) { derived_.insert(key); }

void ConfigReport::throw_if_failed() const {
  if (ok()) return;
  if (errors_ == 1) fail(ExitCode::usage, messages_.begin()->second);
  std::string all = text(errors_, " errors in the configuration:");
  for (const auto& [order, message] : messages_) all += "\n  " + message;
  std::string more = std::to_string(errors_ - messages_.size());
  for (size_t at = more.size(); at > 3; at -= 3) more.insert(at - 3, 1, ',');  // 39,950
  if (more != "0") all += "\n  ... and " + more + " more";
  fail(ExitCode::usage, all);
}

namespace {

void resolve(const Field& field, const std::string& key, ConfigReport& report) {
  if (field.kind() == FieldKind::list) {
    for (size_t i = 0; i < field.size(); ++i) resolve(field.element(i), key + "." + std::to_string(i), report);
    return;
  }
  if (field.kind() == FieldKind::map) {
    for (const Field& entry : field.members()) resolve(entry, key + "." + entry.name, report);
    return;
  }
  const Scalar value = field.get();
  if (std::holds_alternative<std::monostate>(value)) return;
  if (field.kind() == FieldKind::object) {
    for (const Field& member : field.members()) resolve(member, key.empty() ? member.name : key + "." + member.name, report);
  } else if (field.limits.input_path && !report.failed(key)) {
    const auto& path = std::get<std::string>(value);
    if (path.empty()) {
      report.error(key, report.given(key) ? "must name a file, got an empty string" : "is missing; give the file to read");
    } else {
      field.set(absolute_input_path(path, key, report));
    }
  }
}

}  // namespace

std::string absolute_input_path(const std::string& path, const std::string& key, const ConfigReport& report) {
  const std::filesystem::path directory = report.place(key).directory;
  return std::filesystem::absolute(directory / path).lexically_normal().string();
}

void resolve_input_paths(const std::vector<Field>& fields, ConfigReport& report) {
  for (const Field& field : fields) resolve(field, field.name, report);
}

namespace {

using detail::dotted;

// Reads values into fields.
class Reader {
 public:
  Reader(ConfigReport& report, const ForeignNames& foreign, std::vector<std::string> all_keys)
      : report_(report), tree_(report.sources()), foreign_(foreign), all_keys_(std::move(all_keys)) {}

  void object(const std::vector<Field>& fields, const Json& value, const std::string& key) {
    for (const auto& [name, entry] : value.members()) {
      const auto found = std::find_if(fields.begin(), fields.end(), [&name = name](const Field& field) { return field.name == name; });
      if (found != fields.end()) {
        read(*found, entry, dotted(key, name));
      } else if (!key.empty() || name != "$schema") {
        report_.key_error(dotted(key, name), entry, [&, &name = name] { return "unknown key" + hint(fields, name); });
      }
    }
  }

 private:
  void read(const Field& field, const Json& value, const std::string& key) {
    const size_t errors = report_.errors();
    const bool is_word = field.kind() == FieldKind::text && (value.is_boolean() || value.is_number());
    if (value.is_list() && field.kind() == FieldKind::list) {
      const Json::Entries& entries = value.entries();
      field.resize(entries.size());
      for (size_t i = 0; i < entries.size(); ++i) read(field.element(i), entries[i], dotted(key, std::to_string(i)));
    } else if (value.is_object() && field.kind() == FieldKind::map) {
      map(field, value, key);
    } else if (value.is_object() && field.kind() == FieldKind::object) {
      if (field.type->nullable && std::holds_alternative<std::monostate>(field.get())) field.set(true);
      if (!value.members().empty()) object(field.members(), value, key);
    } else if (const std::string argument = is_word ? tree_.argument(value) : ""; !argument.empty()) {
      field.set(argument);  // on the command line everything is text: --set logging.run_name=7 needs no quotes
    } else if (value.is_boolean() && !field.type->short_form.empty()) {
      const std::vector<Field> members = field.members();
      const Field& member = *std::ranges::find(members, field.type->short_form, &Field::name);
      report_.set_place(dotted(key, member.name), report_.place(key));
      read(member, value, key);
    } else if (!detail::set_scalar(field, value)) {
      report_.error(key, value, [&] { return detail::mismatch(field, value); });
    }
    if (report_.errors() != errors) report_.failed_below(value);
  }

  // Names stay printable and free of the dot that separates keys.
  void map(const Field& field, const Json& value, const std::string& key) {
    constexpr const char* kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    if (const size_t entries = value.members().size(); entries > kMostNames) {
      return report_.error(key, value, [&] { return text("has ", entries, " entries, at most ", kMostNames, " are accepted"); });
    }
    for (const auto& [name, entry] : value.members()) {
      if (name.empty() || name.find_first_not_of(kLetters) != std::string::npos) {
        report_.key_error(dotted(key, name), entry, [] { return "a name has letters, digits, '_' and '-' only"; });
      } else if (name.size() > kLongestName) {
        report_.key_error(dotted(key, name), entry, [] { return text("a name has at most ", kLongestName, " characters"); });
      } else {
        const std::optional<Field> member = field.add(name);
        require(member.has_value(), dotted(key, name), ": the names of a map in a config are strings");
        read(*member, entry, dotted(key, name));
      }
    }
  }

  // Suggests the name in another place of this config, then the name of another program, then the nearest name in this place.
  std::string hint(const std::vector<Field>& fields, const std::string& name) const {
    std::string plain = name.substr(std::min(name.find_first_not_of('-'), name.size()));
    std::replace(plain.begin(), plain.end(), '-', '_');
    std::vector<std::string> siblings;
    for (const Field& field : fields) siblings.push_back(field.name);
    const auto elsewhere = std::find_if(all_keys_.begin(), all_keys_.end(), [&](const std::string& k) { return k.ends_with("." + plain); });
    const auto foreign = foreign_.find(plain);
    if (elsewhere != all_keys_.end() && std::find(siblings.begin(), siblings.end(), plain) == siblings.end()) {
      return "; did you mean '" + *elsewhere + "'?";
    }
    if (foreign == foreign_.end()) return did_you_mean(plain, siblings);
    const bool words = foreign->second.find(' ') != std::string::npos;
    return words ? "; " + foreign->second : "; here it is '" + foreign->second + "'";
  }

  // These limit a map, whose entries have places of their own for all that they leave out.
  static constexpr size_t kMostNames = 1000, kLongestName = 128;

  ConfigReport& report_;
  const detail::SourceTree& tree_;
  const ForeignNames& foreign_;
  std::vector<std::string> all_keys_;
};

void collect_keys(const std::vector<Field>& fields, const std::string& key, std::vector<std::string>& keys) {
  for (const Field& field : fields) {
    const std::string here = dotted(key, field.name);
    keys.push_back(here);
    const bool present = field.kind() == FieldKind::object && !std::holds_alternative<std::monostate>(field.get());
    if (present) collect_keys(field.members(), here, keys);
  }
}

}  // namespace

bool read_config(const ConfigSources& sources, const std::vector<Field>& fields, ConfigReport& report, const ForeignNames& foreign) {
  const bool complete = detail::merge_sources(sources, report);
  std::vector<std::string> keys;
  collect_keys(fields, "", keys);
  Reader(report, foreign, std::move(keys)).object(fields, report.sources().root, "");
  return complete;
}

void read_section(const std::string& section, const std::vector<Field>& fields, ConfigReport& report) {
  const ForeignNames none;
  if (const Json* const given = report.sources().find(section)) Reader(report, none, {}).object(fields, *given, section);
}

}  // namespace mantissa
