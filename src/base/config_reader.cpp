#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "config_merge.h"
#include "mantissa/base/nearest.h"

namespace mantissa {
namespace {

using detail::dotted;
using nlohmann::json;

std::string shown(const json& value) {
  constexpr size_t kLongest = 60;
  const std::string all = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return all.size() <= kLongest ? all : all.substr(0, kLongest) + "...";
}

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

Field short_member(const Field& field) {
  std::vector<Field> members = field.members();
  return *std::find_if(members.begin(), members.end(), [&](const Field& member) { return member.name == field.short_form; });
}

std::string wanted(const Field& field) {
  const auto type = [&]() -> std::string {
    switch (field.kind) {
      case FieldKind::boolean: return "true or false";
      case FieldKind::integer: return "an integer";
      case FieldKind::number: return "a number";
      case FieldKind::text: return "a string";
      case FieldKind::choice: return "one of " + joined(field.choices);
      case FieldKind::object: return "an object";
      case FieldKind::list: return "a list";
      case FieldKind::map: return "an object";
    }
    return "";
  };
  const std::string short_form = field.short_form.empty() ? "" : " or " + wanted(short_member(field));
  return type() + short_form + (field.nullable ? " or null" : "");
}

bool within(const Limits& limits, double value) {
  const bool low = limits.above_min ? value > limits.min : value >= limits.min;
  const bool high = limits.below_max ? value < limits.max : value <= limits.max;
  return low && high;
}

std::string plain(double bound) {
  const bool whole = bound == std::floor(bound) && std::abs(bound) < 1e15;
  return whole ? text(static_cast<int64_t>(bound)) : text(bound);
}

// The bound that the value crosses.
std::string crossed(const Limits& limits, double value) {
  if (value > limits.min || (value == limits.min && !limits.above_min)) {
    return (limits.below_max ? "below " : "at most ") + plain(limits.max);
  }
  if (limits.min == 0) return limits.above_min ? "positive" : "0 or more";
  return (limits.above_min ? "above " : "at least ") + plain(limits.min);
}

// Reads one JSON value into one field. The JSON type is checked before the value is taken: get<int>() takes 1.5 and wraps negatives.
class Reader {
 public:
  Reader(ConfigReport& report, const ForeignNames& foreign, std::vector<std::string> all_keys)
      : report_(report), foreign_(foreign), all_keys_(std::move(all_keys)) {}

  void object(const std::vector<Field>& fields, const json& value, const std::string& key) {
    for (const auto& [name, entry] : value.items()) {
      const auto found = std::find_if(fields.begin(), fields.end(), [&name = name](const Field& field) { return field.name == name; });
      if (found != fields.end()) {
        read(*found, entry, dotted(key, name));
      } else if (!key.empty() || name != "$schema") {
        unknown(fields, name, dotted(key, name));
      }
    }
  }

 private:
  void read(const Field& field, const json& value, const std::string& key) {
    if (value.is_null() && field.nullable) {
      field.set({});
      return;
    }
    switch (field.kind) {
      case FieldKind::boolean: return value.is_boolean() ? field.set(value.get<bool>()) : type_error(field, value, key);
      case FieldKind::integer: return integer(field, value, key);
      case FieldKind::number: return number(field, value, key);
      case FieldKind::text: return string(field, value, key);
      case FieldKind::choice: return choice(field, value, key);
      case FieldKind::object: return section(field, value, key);
      case FieldKind::list: return list(field, value, key);
      case FieldKind::map: return map(field, value, key);
    }
  }

  void integer(const Field& field, const json& value, const std::string& key) {
    if (!value.is_number_integer()) return type_error(field, value, key);
    if (!within(field.limits, value.get<double>())) return range_error(field, value, key);
    const bool negative = !value.is_number_unsigned() && value.get<int64_t>() < 0;
    const bool fits = negative ? value.get<int64_t>() >= field.lowest : value.get<uint64_t>() <= field.highest;
    if (!fits) return report_.error(key, text("must be in [", field.lowest, ", ", field.highest, "], got ", shown(value)));
    const bool is_signed = field.lowest < 0;
    field.set(is_signed ? Scalar(value.get<int64_t>()) : Scalar(value.get<uint64_t>()));
  }

  void number(const Field& field, const json& value, const std::string& key) {
    if (!value.is_number()) return type_error(field, value, key);
    if (!within(field.limits, value.get<double>())) return range_error(field, value, key);
    field.set(value.get<double>());
  }

  // On the command line everything is text: --set logging.run_name=7 needs no quotes.
  void string(const Field& field, const json& value, const std::string& key) {
    const std::string& argument = report_.place(key).argument;
    if (value.is_string()) return field.set(value.get<std::string>());
    if (!argument.empty() && report_.given(key) && value.is_primitive() && !value.is_null()) return field.set(argument);
    type_error(field, value, key);
  }

  void choice(const Field& field, const json& value, const std::string& key) {
    if (!value.is_string()) return type_error(field, value, key);
    const auto name = value.get<std::string>();
    if (std::find(field.choices.begin(), field.choices.end(), name) != field.choices.end()) return field.set(name);
    report_.error(key, "must be " + wanted(field) + ", got " + shown(value) + did_you_mean(name, field.choices));
  }

  void section(const Field& field, const json& value, const std::string& key) {
    if (!field.short_form.empty() && value.is_boolean()) return short_value(short_member(field), value, key);
    if (!value.is_object()) return type_error(field, value, key);
    if (field.nullable) field.set(true);
    object(field.members(), value, key);
  }

  void short_value(const Field& member, const json& value, const std::string& key) {
    report_.set_place(dotted(key, member.name), report_.place(key));
    read(member, value, key);
  }

  // Names stay printable and free of the dot that separates keys.
  void map(const Field& field, const json& value, const std::string& key) {
    if (!value.is_object()) return type_error(field, value, key);
    constexpr const char* kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    for (const auto& [name, entry] : value.items()) {
      if (name.empty() || name.find_first_not_of(kLetters) != std::string::npos) {
        report_.key_error(dotted(key, name), "a name has letters, digits, '_' and '-' only");
      } else {
        read(field.add(name), entry, dotted(key, name));
      }
    }
  }

  void list(const Field& field, const json& value, const std::string& key) {
    if (!value.is_array()) return type_error(field, value, key);
    field.resize(value.size());
    for (size_t i = 0; i < value.size(); ++i) read(field.element(i), value[i], dotted(key, std::to_string(i)));
  }

  void type_error(const Field& field, const json& value, const std::string& key) {
    report_.error(key, "must be " + wanted(field) + ", got " + shown(value));
  }

  void range_error(const Field& field, const json& value, const std::string& key) {
    report_.error(key,
                  "must be " + crossed(field.limits, value.get<double>()) + (field.nullable ? " or null" : "") + ", got " + shown(value));
  }

  // The name in another place of this config, then the name of another program, then the nearest name in this place.
  void unknown(const std::vector<Field>& fields, const std::string& name, const std::string& key) {
    std::string plain = name.substr(std::min(name.find_first_not_of('-'), name.size()));
    std::replace(plain.begin(), plain.end(), '-', '_');
    std::vector<std::string> siblings;
    for (const Field& field : fields) siblings.push_back(field.name);
    const auto elsewhere = std::find_if(all_keys_.begin(), all_keys_.end(), [&](const std::string& k) { return k.ends_with("." + plain); });
    const auto foreign = foreign_.find(plain);
    std::string hint = did_you_mean(plain, siblings);
    if (elsewhere != all_keys_.end() && std::find(siblings.begin(), siblings.end(), plain) == siblings.end()) {
      hint = "; did you mean '" + *elsewhere + "'?";
    } else if (foreign != foreign_.end()) {
      hint = "; here it is '" + foreign->second + "'";
    }
    report_.key_error(key, "unknown key" + hint);
  }

  ConfigReport& report_;
  const ForeignNames& foreign_;
  std::vector<std::string> all_keys_;
};

void collect_keys(const std::vector<Field>& fields, const std::string& key, std::vector<std::string>& keys) {
  for (const Field& field : fields) {
    const std::string here = dotted(key, field.name);
    keys.push_back(here);
    const bool present = field.kind == FieldKind::object && !std::holds_alternative<std::monostate>(field.get());
    if (present) collect_keys(field.members(), here, keys);
  }
}

}  // namespace

bool read_config(const ConfigSources& sources, const std::vector<Field>& fields, ConfigReport& report, const ForeignNames& foreign) {
  const detail::Merged merged = detail::merge_sources(sources, report);
  std::vector<std::string> keys;
  collect_keys(fields, "", keys);
  Reader(report, foreign, std::move(keys)).object(fields, merged.value, "");
  return merged.complete;
}

}  // namespace mantissa
