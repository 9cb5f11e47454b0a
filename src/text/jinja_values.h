// Values of templates, and what operators, filters, tests and methods make of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mantissa/json/json.h"

namespace mantissa {

struct JinjaValue;
using JinjaEntries = std::vector<JinjaValue>;
using JinjaMembers = std::vector<std::pair<std::string, JinjaValue>>;  // in the order in which they were added

// Counts work, and throws Error(data) beyond the limit. At the end it empties what a template changed, which may hold itself.
class JinjaWork {
 public:
  JinjaWork() = default;
  ~JinjaWork();
  JinjaWork(const JinjaWork&) = delete;
  JinjaWork& operator=(const JinjaWork&) = delete;
  void add(size_t bytes);
  void changes(const std::shared_ptr<JinjaMembers>& object) { objects_.push_back(object); }

 private:
  size_t done_ = 0;
  std::vector<std::shared_ptr<JinjaMembers>> objects_;
};

struct JinjaUndefined {
  std::string name = {};
};
struct JinjaArguments;
using JinjaFunction = std::function<JinjaValue(const JinjaArguments& arguments)>;
struct JinjaValue {
  std::variant<JinjaUndefined, std::monostate, bool, int64_t, double, std::string, std::shared_ptr<JinjaEntries>,
               std::shared_ptr<JinjaMembers>, std::shared_ptr<JinjaFunction>>
      content = JinjaUndefined{};

  template <class T>
  const T* get() const {
    return std::get_if<T>(&content);
  }
  template <class T>
  T* shared() const {  // null but for lists, members and functions
    const auto* const found = std::get_if<std::shared_ptr<T>>(&content);
    return found != nullptr ? found->get() : nullptr;
  }
  bool is_undefined() const { return get<JinjaUndefined>() != nullptr; }
  bool is_none() const { return get<std::monostate>() != nullptr; }
  const std::string* string() const { return get<std::string>(); }
  JinjaEntries* entries() const { return shared<JinjaEntries>(); }
  JinjaMembers* members() const { return shared<JinjaMembers>(); }
};

struct JinjaArguments {
  JinjaEntries values = {};
  JinjaMembers named = {};
};

JinjaValue jinja_value(const Json& json);
JinjaValue jinja_list(JinjaEntries entries);
JinjaValue jinja_function(JinjaFunction function);

// All throw Error(data), without a place, for what cannot be done with these values or is not known here.
bool is_true(const JinjaValue& value);
std::string printed(const JinjaValue& value);
const JinjaValue* member(const JinjaMembers& members, const std::string& name);  // null: none
void set_member(JinjaMembers& members, const std::string& name, JinjaValue value);
JinjaEntries entries_of(const JinjaValue& value, JinjaWork& work);  // entries that a loop goes through
JinjaValue binary_result(const std::string& name, const JinjaValue& left, const JinjaValue& right, JinjaWork& work);
JinjaValue negative(const JinjaValue& value);
JinjaValue item_of(const JinjaValue& of, const JinjaValue& index);
JinjaValue slice_of(const JinjaValue& of, const JinjaValue (&bounds)[3], JinjaWork& work);
JinjaValue method_of(const JinjaValue& of, const std::string& name, JinjaWork& work);  // undefined: it has none of this name
JinjaValue filtered(const std::string& name, const JinjaValue& value, const JinjaArguments& arguments, JinjaWork& work);
bool passes(const std::string& name, const JinjaValue& value, const JinjaEntries& arguments);

}  // namespace mantissa
