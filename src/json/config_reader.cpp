#include <algorithm>

#include "config_merge.h"
#include "mantissa/base/nearest.h"
#include "mantissa/json/json_fields.h"
#include "source_tree.h"

namespace mantissa {
namespace {

using detail::dotted;

Field short_member(const Field& field) {
  std::vector<Field> members = field.members();
  return *std::find_if(members.begin(), members.end(), [&](const Field& member) { return member.name == field.type->short_form; });
}

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
    if (value.is_object() || value.is_list()) {
      structure(field, value, key);
    } else {
      plain(field, value, key);
    }
    if (report_.errors() != errors) report_.failed_below(value);
  }

  void structure(const Field& field, const Json& value, const std::string& key) {
    if (value.is_list()) return field.kind() == FieldKind::list ? list(field, value, key) : type_error(field, value, key);
    if (field.kind() == FieldKind::map) return map(field, value, key);
    if (field.kind() != FieldKind::object) return type_error(field, value, key);
    if (field.type->nullable && std::holds_alternative<std::monostate>(field.get())) field.set(true);
    if (!value.members().empty()) object(field.members(), value, key);
  }

  void plain(const Field& field, const Json& value, const std::string& key) {
    const std::string argument = field.kind() == FieldKind::text && !value.is_string() && !value.is_null() ? tree_.argument(value) : "";
    if (!argument.empty()) {  // on the command line everything is text: --set logging.run_name=7 needs no quotes
      field.set(argument);
    } else if (value.is_boolean() && !field.type->short_form.empty()) {
      const Field member = short_member(field);
      report_.set_place(dotted(key, member.name), report_.place(key));
      plain(member, value, key);
    } else if (!detail::set_scalar(field, value)) {
      report_.error(key, value, [&] { return detail::mismatch(field, value); });
    }
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

  void list(const Field& field, const Json& value, const std::string& key) {
    const Json::Entries& entries = value.entries();
    field.resize(entries.size());
    for (size_t i = 0; i < entries.size(); ++i) read(field.element(i), entries[i], dotted(key, std::to_string(i)));
  }

  void type_error(const Field& field, const Json& value, const std::string& key) {
    report_.error(key, value, [&] { return detail::mismatch(field, value); });
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
