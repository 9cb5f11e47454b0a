#include <cmath>
#include <nlohmann/json.hpp>

#include "config_merge.h"
#include "mantissa/json/json.h"
#include "mantissa/json/json_fields.h"

namespace mantissa {
namespace {

using detail::dotted;
using nlohmann::ordered_json;

ordered_json to_json(const Scalar& scalar) {
  return std::visit(
      []<class T>(const T& value) -> ordered_json {
        if constexpr (std::is_same_v<T, std::monostate>) {
          return nullptr;
        } else {
          return value;
        }
      },
      scalar);
}

bool is_null(const Field& field) {
  return field.kind() != FieldKind::list && field.kind() != FieldKind::map && std::holds_alternative<std::monostate>(field.get());
}

// Writes a line for each value, with its origin where there is a report, or compactly.
class Writer {
 public:
  Writer(bool compact, const ConfigReport* report) : compact_(compact), report_(report) {}

  void object(const std::vector<Field>& fields, const std::string& key) {
    block('{', '}', fields.size(), [&](size_t i) {
      out_ += ordered_json(fields[i].name).dump() + (compact_ ? ":" : ": ");
      return Entry{fields[i], below(key, fields[i].name)};
    });
  }
  void value(const Field& field, const std::string& key) {
    if (is_null(field)) {
      out_ += "null";
    } else if (field.kind() == FieldKind::object || field.kind() == FieldKind::map) {
      object(field.members(), key);
    } else if (field.kind() == FieldKind::list) {
      block('[', ']', field.size(), [&](size_t i) { return Entry{field.element(i), below(key, std::to_string(i))}; });
    } else {
      const ordered_json scalar = to_json(field.get());
      const bool is_json = field.limits.json && scalar.is_string();
      out_ += is_json ? parse_strict_json(scalar.get<std::string>(), field.name, ExitCode::internal).dump()
                      : scalar.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
    }
  }
  std::string take() { return std::move(out_); }

 private:
  struct Entry {
    Field field;
    std::string key;
  };

  template <class Next>
  void block(char open, char close, size_t count, const Next& next) {
    out_ += open;
    indent_ += "  ";
    for (size_t i = 0; i < count; ++i) {
      new_line();
      const Entry entry = next(i);
      value(entry.field, entry.key);
      if (i + 1 < count) out_ += ',';
      if (is_leaf(entry.field)) comment(entry.key);
    }
    indent_.resize(indent_.size() - 2);
    if (count > 0) new_line();
    out_ += close;
  }

  void new_line() {
    if (!compact_) out_ += '\n' + indent_;
  }

  // Keys are for origins.
  std::string below(const std::string& key, const std::string& name) const { return report_ != nullptr ? dotted(key, name) : ""; }

  static bool is_leaf(const Field& field) {
    if (field.kind() == FieldKind::list) return field.size() == 0;
    if (field.kind() == FieldKind::map) return field.members().empty();
    return field.kind() != FieldKind::object || is_null(field);
  }

  void comment(const std::string& key) {
    if (report_ == nullptr) return;
    out_ += "  // " + report_->origin(key);
  }

  bool compact_;
  const ConfigReport* report_;
  std::string out_, indent_;
};

const char* schema_type(FieldKind kind) {
  switch (kind) {
    case FieldKind::boolean: return "boolean";
    case FieldKind::integer: return "integer";
    case FieldKind::number: return "number";
    case FieldKind::text:
    case FieldKind::choice: return "string";
    case FieldKind::object:
    case FieldKind::map: return "object";
    case FieldKind::list: return "array";
  }
  return "";
}

ordered_json schema_of(const Field& field);

ordered_json properties_of(const std::vector<Field>& fields) {
  ordered_json properties = ordered_json::object();
  for (const Field& field : fields) properties[field.name] = schema_of(field);
  return properties;
}

void add_limits(const Field& field, ordered_json& schema) {
  // Whole limits are written as integers, as a person would.
  const auto number = [](double value) {
    return value == static_cast<double>(static_cast<int64_t>(value)) ? ordered_json(static_cast<int64_t>(value)) : ordered_json(value);
  };
  const Limits& limits = field.limits;
  if (std::isfinite(limits.min)) schema[limits.above_min ? "exclusiveMinimum" : "minimum"] = number(limits.min);
  if (std::isfinite(limits.max)) schema[limits.below_max ? "exclusiveMaximum" : "maximum"] = number(limits.max);
  if (field.kind() == FieldKind::integer && field.type->lowest == 0 && !schema.contains("minimum")) schema["minimum"] = 0;
}

// A list of objects is empty by default.
ordered_json list_default(const Field& field) {
  ordered_json values = ordered_json::array();
  for (size_t i = 0; i < field.size(); ++i) values.push_back(to_json(field.element(i).get()));
  return values;
}

// Writes one name, or a list of them.
ordered_json types_of(const Field& field) {
  ordered_json types = ordered_json::array({schema_type(field.kind())});
  if (!field.type->short_form.empty()) types.push_back("boolean");
  if (field.type->nullable) types.push_back("null");
  return types.size() == 1 ? types[0] : types;
}

ordered_json schema_of(const Field& field) {
  ordered_json schema;
  if (field.description[0] != '\0') schema["description"] = field.description;
  schema["type"] = types_of(field);
  if (field.kind() == FieldKind::choice) {
    schema["enum"] = field.type->choices;
    if (field.type->nullable) schema["enum"].push_back(nullptr);
  }
  add_limits(field, schema);
  if (field.kind() == FieldKind::list) {
    schema["default"] = list_default(field);
    field.resize(1);
    schema["items"] = schema_of(field.element(0));
  } else if (field.kind() == FieldKind::map) {
    schema["default"] = ordered_json::object();
    const std::optional<Field> entry = field.add("x");
    require(entry.has_value(), field.name, ": the names of a map in a config are texts");
    schema["additionalProperties"] = schema_of(*entry);
  } else if (field.kind() == FieldKind::object) {
    if (field.type->nullable) schema["default"] = nullptr;
    field.set(true);
    schema["additionalProperties"] = false;
    schema["properties"] = properties_of(field.members());
  } else if (!field.name.empty()) {
    schema["default"] = to_json(field.get());
  }
  return schema;
}

}  // namespace

std::string effective_config(const std::vector<Field>& fields, const ConfigReport* report) {
  Writer writer(false, report);
  writer.object(fields, "");
  return writer.take() + "\n";
}

std::string json_text(const Field& field) {
  Writer writer(true, nullptr);
  writer.value(field, "");
  return writer.take();
}

std::string config_schema(const std::vector<Field>& fields, const std::string& title) {
  ordered_json schema = {{"$schema", "https://json-schema.org/draft/2020-12/schema"}, {"title", title}, {"type", "object"}};
  schema["additionalProperties"] = false;
  schema["properties"]["$schema"] = {{"type", "string"}, {"description", "this schema, for editors"}};
  schema["properties"].update(properties_of(fields));
  return schema.dump(2) + "\n";
}

}  // namespace mantissa
