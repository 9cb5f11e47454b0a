// JSON values in tests: reading, changing and printing them.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "json/json_fields.h"

namespace mantissa {

inline std::ostream& operator<<(std::ostream& out, const Json& value) { return out << value.dump(); }

namespace test {

inline Json json(std::string_view text) { return parse_json(text, "JSON of a test"); }

// The patch is that of RFC 7396: objects merge, null removes, all else replaces.
inline void merge(Json& into, const Json& patch) {
  for (const auto& [name, value] : patch.members()) {
    if (value.is_null()) {
      into.members().erase(name);
    } else if (value.is_object()) {
      merge(into.members()[name], value);
    } else {
      into.members()[name] = value;
    }
  }
}

// Replaces members.
inline void update(Json& into, const Json& by) {
  for (const auto& [name, value] : by.members()) into[name] = value;
}

// Sets what "/a/0/b" names, or removes it where there is no value.
inline void set_at(Json& root, const std::string& pointer, const std::optional<Json>& value) {
  const size_t slash = pointer.find('/', 1);
  const std::string name = pointer.substr(1, slash == std::string::npos ? slash : slash - 1);
  const auto index = [&] { return std::stoul(name); };
  if (slash != std::string::npos) {
    set_at(root.is_list() ? root[index()] : root[name], pointer.substr(slash), value);
  } else if (!value && root.is_list()) {
    root.entries().erase(root.entries().begin() + static_cast<int64_t>(index()));
  } else if (!value) {
    root.members().erase(name);
  } else if (root.is_list()) {
    root[index()] = *value;
  } else {
    root[name] = *value;
  }
}

}  // namespace test
}  // namespace mantissa
