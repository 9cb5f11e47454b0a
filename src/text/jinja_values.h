// Values of templates, what operators, filters, tests and methods make of them, and how much of that a template may ask for. A value never
// changes and shares what it holds, so copies cost nothing. Only namespaces change, which no list, object or namespace may hold: so nothing
// holds itself, and how deep a value is is known when it is made.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mantissa/base/error.h"
#include "mantissa/json/json.h"

namespace mantissa {

struct JinjaNode;
struct JinjaNamespace;
struct JinjaValue;
using JinjaEntries = std::vector<JinjaValue>;
using JinjaMembers = std::vector<std::pair<std::string, JinjaValue>>;  // in the order in which they were added

// Counts bytes that are made or looked at, which bounds time and memory. Throws Error(data) beyond the limit.
class JinjaWork {
 public:
  void add(size_t bytes) {
    constexpr size_t kMost = size_t{1} << 25;
    done_ += bytes;
    require(done_ <= kMost, ExitCode::data, "the template does too much");
  }

 private:
  size_t done_ = 0;
};

struct JinjaUndefined {
  std::shared_ptr<const std::string> name = {};
};
struct JinjaFunction {
  const JinjaNode* macro;  // null: the given function of its name
};
struct JinjaValue {
  std::variant<JinjaUndefined, std::monostate, bool, int64_t, double, std::shared_ptr<const std::string>,
               std::shared_ptr<const JinjaEntries>, std::shared_ptr<const JinjaMembers>, std::shared_ptr<JinjaNamespace>, JinjaFunction>
      content = JinjaUndefined{};
  int depth = 0;  // levels of lists and objects

  template <class T>
  const T* get() const {
    return std::get_if<T>(&content);
  }
  template <class T>
  T* shared() const {  // null if this is no T
    const auto* const found = std::get_if<std::shared_ptr<T>>(&content);
    return found != nullptr ? found->get() : nullptr;
  }
  bool is_undefined() const { return get<JinjaUndefined>() != nullptr; }
  bool is_none() const { return get<std::monostate>() != nullptr; }
  const std::string* string() const { return shared<const std::string>(); }
  const JinjaEntries* entries() const { return shared<const JinjaEntries>(); }
  const JinjaMembers* members() const { return shared<const JinjaMembers>(); }
};

struct JinjaNamespace {
  JinjaMembers members = {};
};
struct JinjaArguments {
  JinjaEntries values = {};
  JinjaMembers named = {};
};

JinjaValue jinja_value(const Json& json, JinjaWork& work);
JinjaValue jinja_undefined(const std::string& name, JinjaWork& work);
JinjaValue jinja_text(std::string text, JinjaWork& work);
JinjaValue jinja_list(JinjaEntries entries, JinjaWork& work);
JinjaValue jinja_object(JinjaMembers members, JinjaWork& work);

// All throw Error(data), without a line, for operations that these values do not have or that are not supported.
bool is_true(const JinjaValue& value);
std::string printed(const JinjaValue& value, JinjaWork& work);
void set_member(JinjaMembers& members, const std::string& name, JinjaValue value, JinjaWork& work);
JinjaEntries entries_of(const JinjaValue& value, JinjaWork& work);  // entries that a loop goes through
// Returns the arguments in the order of the parameters; null: not given.
std::vector<const JinjaValue*> in_order(const std::string& name, const JinjaArguments& arguments,
                                        const std::vector<std::string>& parameters, size_t required = 0);
JinjaValue binary_result(const std::string& name, const JinjaValue& left, const JinjaValue& right, JinjaWork& work);
bool compares(const std::string& name, const JinjaValue& left, const JinjaValue& right, JinjaWork& work);
JinjaValue item_of(const JinjaValue& value, const JinjaValue& index, JinjaWork& work);
JinjaValue attribute_of(const JinjaValue& value, const std::string& name, JinjaWork& work);
JinjaValue slice_of(const JinjaValue& value, const JinjaEntries& bounds, JinjaWork& work);  // first, last, step
std::optional<JinjaValue> method_result(const std::string& name, const JinjaValue& value, const JinjaArguments& arguments, JinjaWork& work);
JinjaValue filtered(const std::string& name, const JinjaValue& value, const JinjaArguments& arguments, JinjaWork& work);
bool passes(const std::string& name, const JinjaValue& value, const JinjaValue* argument, JinjaWork& work);

}  // namespace mantissa
