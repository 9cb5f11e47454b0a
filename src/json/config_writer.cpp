#include <cmath>

#include "json/config_merge.h"
#include "json/json_fields.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

using detail::dotted;

bool is_null(const Field& field) {
  return field.kind() != FieldKind::list && field.kind() != FieldKind::map && std::holds_alternative<std::monostate>(field.get());
}

// Writes a line for each value, with its origin where there is a report, or compactly.
class Writer {
 public:
  Writer(bool compact, const ConfigReport* report) : compact_(compact), report_(report) {}

  void object(const std::vector<Field>& fields, const std::string& key) {
    block('{', '}', fields.size(), [&](size_t i) {
      out_ += Json(fields[i].name).dump() + (compact_ ? ":" : ": ");
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
      const Scalar scalar = field.get();
      out_ += (field.limits.json ? parse_json(std::get<std::string>(scalar), field.name, ExitCode::internal) : Json(scalar)).dump();
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
      if (report_ != nullptr && is_leaf(entry.field)) out_ += "  // " + report_->origin(entry.key);
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

Json schema_of(const Field& field);

void add_properties(const std::vector<Field>& fields, Json& properties) {
  for (const Field& field : fields) properties.add(field.name, schema_of(field));
}

void add_limits(const Field& field, Json& schema) {
  // Whole limits are written as integers, as a person would.
  const auto number = [](double value) {
    return value == static_cast<double>(static_cast<int64_t>(value)) ? Json(static_cast<int64_t>(value)) : Json(value);
  };
  const Limits& limits = field.limits;
  if (std::isfinite(limits.min)) schema.add(limits.above_min ? "exclusiveMinimum" : "minimum", number(limits.min));
  if (std::isfinite(limits.max)) schema.add(limits.below_max ? "exclusiveMaximum" : "maximum", number(limits.max));
  if (field.kind() == FieldKind::integer && field.type->lowest == 0 && !schema.contains("minimum")) schema.add("minimum", 0);
}

Json schema_of(const Field& field) {
  Json schema;
  if (field.description[0] != '\0') schema.add("description", field.description);
  Json::Entries types = {schema_type(field.kind())};
  if (!field.type->short_form.empty()) types.emplace_back("boolean");
  if (field.type->nullable) types.emplace_back("null");
  schema.add("type", types.size() == 1 ? types[0] : Json(types));
  if (field.kind() == FieldKind::choice) {
    schema.add("enum", field.type->choices);
    if (field.type->nullable) schema["enum"].entries().emplace_back();
  }
  add_limits(field, schema);
  if (field.kind() == FieldKind::list) {
    Json::Entries values;  // a list of objects is empty by default
    for (size_t i = 0; i < field.size(); ++i) values.emplace_back(field.element(i).get());
    schema.add("default", Json(values));
    field.resize(1);
    schema.add("items", schema_of(field.element(0)));
  } else if (field.kind() == FieldKind::map) {
    schema.add("default", Json::Members());
    const std::optional<Field> entry = field.add("x");
    require(entry.has_value(), field.name, ": the names of a map in a config are strings");
    schema.add("additionalProperties", schema_of(*entry));
  } else if (field.kind() == FieldKind::object) {
    if (field.type->nullable) schema.add("default", {});
    field.set(true);
    schema.add("additionalProperties", false);
    add_properties(field.members(), schema.add("properties", Json::Members()));
  } else if (!field.name.empty()) {
    schema.add("default", Json(field.get()));
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
  Json properties = {{"$schema", {{"type", "string"}, {"description", "this schema, for editors"}}}};
  add_properties(fields, properties);
  const Json schema = {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
                       {"title", title},
                       {"type", "object"},
                       {"additionalProperties", false},
                       {"properties", properties}};
  return schema.dump(2, Json::Order::keys) + "\n";
}

}  // namespace mantissa
