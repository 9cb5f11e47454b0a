// Reads the keys of a config.json, and tracks which were read and what is wrong with them.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "mantissa/base/error.h"
#include "mantissa/json/fields.h"
#include "mantissa/json/json.h"

namespace mantissa {

// null counts as absent unless stated otherwise. A value of another type is Error(data); one that asks for something unsupported is
// Error(usage).
class ArchitectureKeys {
 public:
  // The prefix is that of members of an object in the file: "rope_scaling.".
  ArchitectureKeys(const Json& object, std::string source, std::string prefix = "");

  bool has(const std::string& key);
  bool is_null(const std::string& key);                        // is there, as null
  const Json& value(const std::string& key);                   // value of a key for which has() is true
  const Json* stated(const std::string& key, FieldKind kind);  // nullptr: absent. A list is one of integers
  std::optional<int64_t> integer(const std::string& key);
  std::optional<double> number(const std::string& key);
  std::string word(const std::string& key, const std::string& fallback);
  int64_t integer_or(const std::string& key, int64_t fallback);  // null is of another type

  // Ignores keys that change nothing that the model computes.
  void ignore(const std::vector<std::string>& keys) { known_.insert(keys.begin(), keys.end()); }
  void require_present(const std::string& key);                   // Error(data) otherwise
  void require_not_null(const std::string& key, FieldKind kind);  // Error(data) otherwise
  // Requires that the key is absent or one of these.
  void only(const std::string& key, const std::vector<Json>& allowed);
  // Throws Error(usage) that lists the keys nobody asked for.
  void require_all_known() const;
  [[noreturn]] void refuse(const std::string& key, const std::string& why) const;
  [[noreturn]] void wrong(const std::string& key, const std::string& wanted) const;

  std::string name(const std::string& key) const { return prefix_ + key; }
  const std::string& source() const { return source_; }

 private:
  const Json& object_;
  std::string source_, prefix_;
  std::set<std::string> known_;
};

}  // namespace mantissa
