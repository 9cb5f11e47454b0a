// Reads the keys of a config.json, and tracks which were read and what is wrong with them.
#pragma once

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

#include "mantissa/base/error.h"

namespace mantissa {

// null counts as absent unless stated otherwise. A value of another type is Error(data); one that asks for something unsupported is
// Error(usage).
class ArchitectureKeys {
 public:
  ArchitectureKeys(const nlohmann::json& object, std::string source, std::string prefix = "");

  bool has(const std::string& name);
  bool is_null(const std::string& name);                 // is there, as null
  const nlohmann::json& value(const std::string& name);  // that has() says is there
  std::optional<int64_t> integer(const std::string& name);
  std::optional<double> number(const std::string& name);
  // Returns the default of the transformers class if the key is absent. A null key gives none, as it does in the class.
  int64_t integer_or(const std::string& name, int64_t fallback);
  double number_or(const std::string& name, double fallback);
  bool flag(const std::string& name, bool fallback);
  std::string word(const std::string& name, const std::string& fallback);
  std::vector<int64_t> integers(const std::string& name);
  int64_t needed_integer(const std::string& name);
  double needed_number(const std::string& name);

  // Ignores a key that changes nothing that the model computes.
  void ignore(std::initializer_list<const char*> names);
  void require_present(const std::string& name);  // Error(data) otherwise
  // Requires that the key is absent or one of these.
  void only(const std::string& name, const std::vector<nlohmann::json>& allowed);
  // Throws Error(usage) that lists the keys nobody asked for.
  void require_all_known() const;
  [[noreturn]] void refuse(const std::string& name, const std::string& why) const;
  [[noreturn]] void wrong(const std::string& name, const std::string& wanted) const;

 private:
  const nlohmann::json& object_;
  std::string source_, prefix_;
  std::set<std::string> known_;
};

}  // namespace mantissa
