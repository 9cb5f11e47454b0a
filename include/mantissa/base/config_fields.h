// How a member of each type becomes a Field: the templates behind FieldList. Included by config.h only.
#pragma once

#include <type_traits>

#include "mantissa/base/config.h"

namespace mantissa {
namespace detail {

template <class T>
concept ConfigStruct = requires(T& config, FieldList& list) {
  config.fields(list);
};

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};
template <class T>
struct IsMap : std::false_type {};
template <class T>
struct IsMap<std::map<std::string, T>> : std::true_type {};

template <class T>
concept HasShortForm = requires {
  T::kShortForm;
};

template <class T>
Scalar to_scalar(const T& value) {
  if constexpr (ConfigStruct<T>) {
    return true;
  } else if constexpr (std::is_enum_v<T>) {
    return std::string(choice_name(value));
  } else if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::string> || std::is_same_v<T, double>) {
    return value;
  } else if constexpr (std::is_signed_v<T>) {
    return static_cast<int64_t>(value);
  } else {
    return static_cast<uint64_t>(value);
  }
}

// The reader has checked type, range and choice.
template <class T>
T from_scalar(const Scalar& scalar) {
  if constexpr (ConfigStruct<T>) {
    return T{};
  } else if constexpr (std::is_enum_v<T>) {
    for (const auto& choice : choices(T{})) {
      if (choice.name == std::get<std::string>(scalar)) return choice.value;
    }
    fail(ExitCode::internal, "no such choice: ", std::get<std::string>(scalar));
  } else if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::string> || std::is_same_v<T, double>) {
    return std::get<T>(scalar);
  } else if constexpr (std::is_signed_v<T>) {
    return static_cast<T>(std::get<int64_t>(scalar));
  } else {
    return static_cast<T>(std::get<uint64_t>(scalar));
  }
}

template <class T>
void describe_type(Field& field) {
  if constexpr (ConfigStruct<T>) {
    field.kind = FieldKind::object;
    if constexpr (HasShortForm<T>) field.short_form = T::kShortForm;
  } else if constexpr (std::is_enum_v<T>) {
    field.kind = FieldKind::choice;
    for (const auto& choice : choices(T{})) field.choices.emplace_back(choice.name);
  } else if constexpr (std::is_same_v<T, bool>) {
    field.kind = FieldKind::boolean;
  } else if constexpr (std::is_integral_v<T>) {
    field.kind = FieldKind::integer;
    field.lowest = static_cast<int64_t>(std::numeric_limits<T>::min());
    field.highest = static_cast<uint64_t>(std::numeric_limits<T>::max());
  } else if constexpr (std::is_same_v<T, double>) {
    field.kind = FieldKind::number;
  } else {
    static_assert(std::is_same_v<T, std::string>,
                  "a config member is bool, integer, double, string, enum, struct, optional, vector or map");
    field.kind = FieldKind::text;
  }
}

template <class T>
Field describe(T& member);

template <class T>
Field describe_map(std::map<std::string, T>& member) {
  Field field;
  field.kind = FieldKind::map;
  field.add = [&member](const std::string& name) {
    Field entry = describe(member[name]);
    entry.name = name;
    return entry;
  };
  field.members = [&member, add = field.add] {
    std::vector<Field> entries;
    for (const auto& [name, value] : member) entries.push_back(add(name));
    return entries;
  };
  return field;
}

template <class T>
Field describe(T& member) {
  Field field;
  if constexpr (IsMap<T>::value) {
    return describe_map(member);
  } else if constexpr (IsVector<T>::value) {
    field.kind = FieldKind::list;
    field.size = [&member] { return member.size(); };
    field.resize = [&member](size_t size) { member.resize(size); };
    field.element = [&member](size_t index) { return describe(member[index]); };
  } else if constexpr (IsOptional<T>::value) {
    using Inner = typename T::value_type;
    describe_type<Inner>(field);
    field.nullable = true;
    field.get = [&member] { return member ? to_scalar(*member) : Scalar{}; };
    field.set = [&member](const Scalar& scalar) {
      if (std::holds_alternative<std::monostate>(scalar)) {
        member.reset();
      } else {
        member = from_scalar<Inner>(scalar);
      }
    };
    if constexpr (ConfigStruct<Inner>) field.members = [&member] { return fields_of(*member); };
  } else {
    describe_type<T>(field);
    field.get = [&member] { return to_scalar(member); };
    field.set = [&member](const Scalar& scalar) { member = from_scalar<T>(scalar); };
    if constexpr (ConfigStruct<T>) field.members = [&member] { return fields_of(member); };
  }
  return field;
}

}  // namespace detail

template <class T>
void FieldList::operator()(const char* name, T& member, const char* description, Limits limits) {
  Field field = detail::describe(member);
  field.name = name;
  field.description = description;
  field.limits = limits;
  fields_.push_back(std::move(field));
}

}  // namespace mantissa
