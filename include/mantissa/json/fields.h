// A struct declares each of its members once, with name, meaning and limits; that list reads and writes them as JSON: configurations, which
// people write (config.h), and files that programs write (json_fields.h). The default is the member's initializer.
//
//   struct AdamWConfig {
//     double beta1 = 0.9, weight_decay = 0.1;
//     void fields(auto& v) {
//       v("beta1", beta1, "first moment decay", limits::fraction);
//       v("weight_decay", weight_decay, "decoupled weight decay", limits::not_negative);
//     }
//   };
//
// Members may be bool, integers, double, std::string, an enum with choices(), another such struct, std::optional of these (null in JSON)
// and std::vector of these; std::map is an object whose names the file chooses, of strings or integers. Numbers are double, so that 0.1 in
// a file is written back as 0.1. A type with `static constexpr const char* kTextForm`, text() and parse() is a string of that form. A
// struct with `static constexpr const char* kShortForm = "enabled";` may be written as the value of that member alone.
#pragma once

#include <charconv>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "mantissa/base/error.h"
#include "mantissa/json/json.h"

namespace mantissa {

// Says what a field accepts beyond its type; of a list, each of its entries.
struct Limits {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;   // min itself is excluded
  bool below_max = false;   // max itself is excluded
  bool input_path = false;  // a path that is read: relative to the file that names it; on the command line, to the working directory
  bool json = false;        // a string that holds JSON, which stands in the file as the value that it is
  bool later = false;       // a file of an earlier version may lack it
};

namespace limits {
inline constexpr Limits positive{.min = 0, .above_min = true};
inline constexpr Limits not_negative{.min = 0};
inline constexpr Limits fraction{.min = 0, .max = 1, .below_max = true};  // [0, 1)
inline constexpr Limits ratio{.min = 0, .max = 1};                        // [0, 1]
inline constexpr Limits input_path{.input_path = true};
inline constexpr Limits json{.json = true};
inline constexpr Limits later{.later = true};
constexpr Limits between(double min, double max) { return {.min = min, .max = max}; }
}  // namespace limits

// The names of an enum in JSON: constexpr auto choices(Norm) { return std::array{Choice{"rms", Norm::rms}, Choice{"layer", Norm::layer}}; }
template <class E>
struct Choice {
  const char* name;
  E value;
};
template <class E>
Choice(const char*, E) -> Choice<E>;

template <class E>
const char* choice_name(E value) {
  for (const auto& choice : choices(value)) {
    if (choice.value == value) return choice.name;
  }
  fail(ExitCode::internal, "enum value ", static_cast<int64_t>(value), " has no name");
}

template <class E>
std::vector<std::string> choice_names() {
  std::vector<std::string> names;
  for (const auto& choice : choices(E{})) names.emplace_back(choice.name);
  return names;
}

// Returns none if there is no choice of that name.
template <class E>
std::optional<E> choice_of(const std::string& name) {
  for (const auto& choice : choices(E{})) {
    if (choice.name == name) return choice.value;
  }
  return {};
}

enum class FieldKind { boolean, integer, number, text, choice, object, list, map };

struct Field;

// Describes all members of one C++ type; there is one of these for each type.
struct FieldType {
  FieldKind kind = FieldKind::text;
  bool nullable = false;
  const char* text_form = "a string";     // text
  std::vector<std::string> choices = {};  // choice
  int64_t lowest = 0;                     // integer: the range of the type
  uint64_t highest = 0;
  std::string short_form = {};                            // object: the member that a plain value stands for, or ""
  Scalar (*get)(const Field&) = nullptr;                  // all but list and map; a choice is its name, an object null or true
  bool (*set)(const Field&, const Scalar&) = nullptr;     // takes what get returns; true creates an absent optional object
  std::vector<Field> (*members)(const Field&) = nullptr;  // object, map
  std::optional<Field> (*add)(const Field&, const std::string&) = nullptr;  // map: the entry of a name, made if absent; none: no name
  size_t (*size)(const Field&) = nullptr;                                   // list
  void (*resize)(const Field&, size_t) = nullptr;
  Field (*element)(const Field&, size_t) = nullptr;
};

// One member of a struct with fields(). Valid as long as the struct (for elements: as long as the list keeps its size).
struct Field {
  std::string name;
  const char* description = "";
  Limits limits = {};
  const FieldType* type = nullptr;
  void* member = nullptr;

  FieldKind kind() const { return type->kind; }
  Scalar get() const { return type->get(*this); }
  bool set(const Scalar& scalar) const { return type->set(*this, scalar); }  // false, and nothing is set: no value of the type
  std::vector<Field> members() const { return type->members(*this); }
  std::optional<Field> add(const std::string& entry) const { return type->add(*this, entry); }
  size_t size() const { return type->size(*this); }
  void resize(size_t size) const { type->resize(*this, size); }
  Field element(size_t index) const { return type->element(*this, index); }
};

// Turns fields() into data.
class FieldList {
 public:
  template <class T>
  void operator()(const char* name, T& member, const char* description = "", const Limits& limits = {});
  template <class T>
  void operator()(const char* name, T& member, const Limits& limits) {
    (*this)(name, member, "", limits);
  }
  std::vector<Field> take() { return std::move(fields_); }

 private:
  std::vector<Field> fields_;
};

namespace detail {

template <class T>
concept FieldStruct = requires(T& config, FieldList& list) {
  config.fields(list);
};

template <class T>
concept HasTextForm = requires {
  T::kTextForm;
};

template <class T>
concept HasShortForm = requires {
  T::kShortForm;
};

template <class T>
Scalar to_scalar(const T& value) {
  if constexpr (FieldStruct<T>) {
    return true;
  } else if constexpr (std::is_enum_v<T>) {
    return std::string(choice_name(value));
  } else if constexpr (HasTextForm<T>) {
    return value.text();
  } else if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::string> || std::is_same_v<T, double>) {
    return value;
  } else if constexpr (std::is_signed_v<T>) {
    return static_cast<int64_t>(value);
  } else {
    return static_cast<uint64_t>(value);
  }
}

// The scalar has the type that to_scalar() gives; integers may have either sign.
template <class T>
std::optional<T> from_scalar(const Scalar& scalar) {
  if constexpr (FieldStruct<T>) {
    return T{};
  } else if constexpr (std::is_enum_v<T>) {
    return choice_of<T>(std::get<std::string>(scalar));
  } else if constexpr (HasTextForm<T>) {
    return T::parse(std::get<std::string>(scalar));
  } else if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::string> || std::is_same_v<T, double>) {
    return std::get<T>(scalar);
  } else {
    const auto fitting = [](auto value) { return std::in_range<T>(value) ? std::optional(static_cast<T>(value)) : std::nullopt; };
    const auto* const number = std::get_if<int64_t>(&scalar);
    return number != nullptr ? fitting(*number) : fitting(std::get<uint64_t>(scalar));
  }
}

// A text is its own name. Returns none for a number that is written otherwise, such as "007".
template <class K>
std::optional<K> key_of_name(const std::string& name) {
  if constexpr (std::is_same_v<K, std::string>) {
    return name;
  } else {
    K key{};
    std::from_chars(name.data(), name.data() + name.size(), key);
    return text(key) == name ? std::optional(key) : std::nullopt;
  }
}

// The description of a large struct takes long to compile, so one source compiles it: beside the struct stands
// `extern template const FieldType& detail::field_type<RunConfig>();`, and there the same without `extern`.
template <class T>
const FieldType& field_type();

template <class T>
Field field_of(T& member, std::string name = {}, const char* description = "", const Limits& limits = {}) {
  return {.name = std::move(name), .description = description, .limits = limits, .type = &field_type<T>(), .member = &member};
}

template <class T>
T& as(const Field& field) {
  return *static_cast<T*>(field.member);
}

template <class T>
FieldType type_for(std::type_identity<T>) {
  FieldType type;
  if constexpr (FieldStruct<T>) {
    type.kind = FieldKind::object;
    if constexpr (HasShortForm<T>) type.short_form = T::kShortForm;
    type.members = [](const Field& field) {
      FieldList list;
      as<T>(field).fields(list);
      return list.take();
    };
  } else if constexpr (std::is_enum_v<T>) {
    type.kind = FieldKind::choice;
    type.choices = choice_names<T>();
  } else if constexpr (HasTextForm<T>) {
    type.text_form = T::kTextForm;
  } else if constexpr (std::is_same_v<T, bool>) {
    type.kind = FieldKind::boolean;
  } else if constexpr (std::is_integral_v<T>) {
    type.kind = FieldKind::integer;
    type.lowest = static_cast<int64_t>(std::numeric_limits<T>::min());
    type.highest = static_cast<uint64_t>(std::numeric_limits<T>::max());
  } else if constexpr (std::is_same_v<T, double>) {
    type.kind = FieldKind::number;
  } else {
    static_assert(std::is_same_v<T, std::string>,
                  "a member is bool, integer, double, string, enum, struct, of a text form, optional, vector or map");
  }
  type.get = [](const Field& field) { return to_scalar(as<T>(field)); };
  type.set = [](const Field& field, const Scalar& scalar) {
    std::optional<T> value = from_scalar<T>(scalar);
    if (value) as<T>(field) = std::move(*value);
    return value.has_value();
  };
  return type;
}

template <class T>
FieldType type_for(std::type_identity<std::optional<T>>) {
  using Member = std::optional<T>;
  FieldType type = field_type<T>();
  type.nullable = true;
  type.get = [](const Field& field) { return as<Member>(field) ? to_scalar(*as<Member>(field)) : Scalar{}; };
  type.set = [](const Field& field, const Scalar& scalar) {
    const bool null = std::holds_alternative<std::monostate>(scalar);
    const Member value = null ? Member{} : from_scalar<T>(scalar);
    if (null || value) as<Member>(field) = value;
    return null || value;
  };
  if constexpr (FieldStruct<T>) type.members = [](const Field& field) { return field_type<T>().members(field_of(*as<Member>(field))); };
  return type;
}

template <class T>
FieldType type_for(std::type_identity<std::vector<T>>) {
  using Member = std::vector<T>;
  return {.kind = FieldKind::list,
          .size = [](const Field& field) { return as<Member>(field).size(); },
          .resize = [](const Field& field, size_t size) { as<Member>(field).resize(size); },
          .element = [](const Field& field, size_t index) { return field_of(as<Member>(field)[index], "", "", field.limits); }};
}

template <class K, class T>
FieldType type_for(std::type_identity<std::map<K, T>>) {
  using Member = std::map<K, T>;
  FieldType type{.kind = FieldKind::map};
  type.members = [](const Field& field) {
    std::vector<Field> entries;
    for (auto& [key, value] : as<Member>(field)) entries.push_back(field_of(value, text(key)));
    return entries;
  };
  type.add = [](const Field& field, const std::string& name) -> std::optional<Field> {
    const std::optional<K> key = key_of_name<K>(name);
    if (!key) return {};
    return field_of(as<Member>(field)[*key], name, "", field.limits);
  };
  return type;
}

template <class T>
const FieldType& field_type() {
  static const FieldType type = type_for(std::type_identity<T>{});
  return type;
}

}  // namespace detail

template <class T>
void FieldList::operator()(const char* name, T& member, const char* description, const Limits& limits) {
  fields_.push_back(detail::field_of(member, name, description, limits));
}

template <class T>
std::vector<Field> fields_of(T& config) {
  return detail::field_type<T>().members(detail::field_of(config));
}

}  // namespace mantissa
