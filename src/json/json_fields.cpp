#include "json/json_fields.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "mantissa/base/text.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

std::string wanted(const FieldType& type) {
  const auto kind = [&]() -> std::string {
    switch (type.kind) {
      case FieldKind::boolean: return "true or false";
      case FieldKind::integer: return "an integer";
      case FieldKind::number: return "a number";
      case FieldKind::text: return type.text_form;
      case FieldKind::choice: return "one of " + joined(type.choices);
      case FieldKind::list: return "a list";
      case FieldKind::object:
      case FieldKind::map: return "an object";
    }
    return "";
  };
  const std::string short_form = type.short_form.empty() ? "" : " or true or false";
  return kind() + short_form + (type.nullable ? " or null" : "");
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

// Describes the range that type and limits of an integer leave.
std::string integer_range(const Field& field) {
  const FieldType& type = *field.type;
  const Limits& limits = field.limits;
  const bool raised = limits.min > static_cast<double>(type.lowest), lowered = limits.max < static_cast<double>(type.highest);
  const std::string low = raised ? (limits.above_min ? "(" : "[") + plain(limits.min) : text('[', type.lowest);
  const std::string high = lowered ? plain(limits.max) + (limits.below_max ? ")" : "]") : text(type.highest, ']');
  return "in " + low + ", " + high;
}

// Returns the bound that the value crosses.
std::string crossed(const Limits& limits, double value) {
  if (value > limits.min || (value == limits.min && !limits.above_min)) {
    return (limits.below_max ? "below " : "at most ") + plain(limits.max);
  }
  if (limits.min == 0) return limits.above_min ? "positive" : "0 or more";
  return (limits.above_min ? "above " : "at least ") + plain(limits.min);
}

std::string member_path(const std::string& path, const std::string& name) { return path + (path.empty() ? "" : ".") + shortened(name); }

[[noreturn]] void fail_at(const std::string& source, const std::string& path, const std::string& problem) {
  fail(ExitCode::data, source, ": ", path, path.empty() ? "" : ": ", problem);
}

// The path from the value that is read to one inside it; it is put into words only for a message.
struct Step {
  const Step* above;        // none: `name` or `index` of the value that is read
  const std::string* name;  // none: an entry of a list
  size_t index;

  std::string path(const std::string& root) const {
    const std::string before = above == nullptr ? root : above->path(root);
    return name != nullptr ? member_path(before, *name) : text(before, '[', index, ']');
  }
};

class FieldReader {
 public:
  FieldReader(const std::string& source, const std::string& path, UnknownNames unknown) : source_(source), path_(path), unknown_(unknown) {}

  void read(const Field& field, const Json& value, const Step* at) const {
    if (field.limits.json) {
      field.set(value.dump());
    } else if (value.is_list() && field.kind() == FieldKind::list) {
      list(field, value, at);
    } else if (value.is_object() && field.kind() == FieldKind::map) {
      map(field, value, at);
    } else if (value.is_object() && field.kind() == FieldKind::object) {
      if (field.type->nullable) field.set(true);
      object(field.members(), value, at);
    } else if (value.is_null() && field.kind() == FieldKind::number && !field.type->nullable) {
      field.set(std::numeric_limits<double>::quiet_NaN());
    } else if (!detail::set_scalar(field, value)) {
      fail(at, detail::mismatch(field, value));
    }
  }

 private:
  void list(const Field& field, const Json& value, const Step* at) const {
    field.resize(0);
    const Json::Entries& entries = value.entries();
    for (size_t i = 0; i < entries.size(); ++i) {
      field.resize(i + 1);  // not all at once: entries are larger than the shortest texts that could claim to be some
      const Step step{at, nullptr, i};
      read(field.element(i), entries[i], &step);
    }
  }

  void map(const Field& field, const Json& value, const Step* at) const {
    for (const auto& [name, entry] : value.members()) {
      const Step step{at, &name, 0};
      const std::optional<Field> member = field.add(name);
      if (!member) fail(&step, "is not a valid name of an entry");
      read(*member, entry, &step);
    }
  }

  void object(const std::vector<Field>& fields, const Json& value, const Step* at) const {
    size_t known = 0;
    for (const Field& field : fields) {
      const Json* const member = value.find(field.name);
      if (member == nullptr && field.limits.later) continue;
      if (member == nullptr) fail(at, text("has no \"", field.name, '"'));
      ++known;
      const Step step{at, &field.name, 0};
      read(field, *member, &step);
    }
    if (unknown_ == UnknownNames::ignored || known == value.size()) return;
    for (const auto& [name, member] : value.members()) {
      const bool found = std::any_of(fields.begin(), fields.end(), [&name = name](const Field& field) { return field.name == name; });
      if (!found) fail(at, "has an unknown key " + Json(name).shown());
    }
  }

  [[noreturn]] void fail(const Step* at, const std::string& problem) const {
    fail_at(source_, at == nullptr ? path_ : at->path(path_), problem);
  }

  const std::string &source_, &path_;
  UnknownNames unknown_;
};

}  // namespace

bool detail::set_scalar(const Field& field, const Json& value) {
  if (value.is_null()) return field.type->nullable && field.set({});
  switch (field.kind()) {
    case FieldKind::boolean: return value.is_boolean() && field.set(value.scalar());
    case FieldKind::integer: return value.is_integer() && within(field.limits, value.number()) && field.set(value.scalar());
    case FieldKind::number: return value.is_number() && within(field.limits, value.number()) && field.set(value.number());
    case FieldKind::text:
    case FieldKind::choice: return value.is_string() && field.set(value.string());
    case FieldKind::object:
    case FieldKind::list:
    case FieldKind::map: return false;
  }
  return false;
}

std::string detail::mismatch(const Field& field, const Json& value) {
  const FieldType& type = *field.type;
  const bool integer = type.kind == FieldKind::integer && value.is_integer();
  if (integer || (type.kind == FieldKind::number && value.is_number())) {
    const bool fits = within(field.limits, value.number());
    const std::string range = fits ? integer_range(field) : crossed(field.limits, value.number());
    return "must be " + range + (type.nullable && !fits ? " or null" : "") + ", got " + value.shown();
  }
  const bool misspelled = type.kind == FieldKind::choice && value.is_string();
  return "must be " + wanted(type) + ", got " + value.shown() + (misspelled ? did_you_mean(value.string(), type.choices) : "");
}

JsonReader JsonReader::at(const std::string& name) const {
  if (!value_->is_object()) fail("must be an object, got " + value_->shown());
  const Json* const member = value_->find(name);
  require(member != nullptr, "has no \"", shortened(name), '"');
  return {*member, source_, member_path(path_, name)};
}

std::vector<JsonReader> JsonReader::entries() const {
  if (!value_->is_list()) fail("must be a list, got " + value_->shown());
  std::vector<JsonReader> entries;
  for (const Json& entry : value_->entries()) entries.emplace_back(entry, source_, text(path_, '[', entries.size(), ']'));
  return entries;
}

void JsonReader::read(const Field& into, UnknownNames unknown) const { FieldReader(source_, path_, unknown).read(into, *value_, nullptr); }

void JsonReader::fail(const std::string& problem) const { fail_at(source_, path_, problem); }

void detail::read_json(std::string_view content, const std::string& source, const Field& into, UnknownNames unknown) {
  const Json value = parse_json(content, source);
  JsonReader(value, source).read(into, unknown);
}

}  // namespace mantissa
