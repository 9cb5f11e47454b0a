#include "text/jinja_values.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "mantissa/base/error.h"
#include "mantissa/base/utf8.h"

namespace mantissa {
namespace {

constexpr std::string_view kWhitespace = " \t\r\n\v\f";
constexpr int kDeepestValue = 32;

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  fail(ExitCode::data, parts...);
}

JinjaValue value_of(auto content) {
  JinjaValue value;
  value.content = std::move(content);
  return value;
}

const char* kind_of(const JinjaValue& value) {
  constexpr std::array kNames = {"what is undefined", "none",   "a boolean", "an integer", "a number",
                                 "a string",          "a list", "an object", "a function"};
  return kNames.at(value.content.index());
}

std::optional<double> number_of(const JinjaValue& value) {
  if (const auto* const integer = value.get<int64_t>()) return static_cast<double>(*integer);
  if (const auto* const boolean = value.get<bool>()) return *boolean ? 1.0 : 0.0;
  const auto* const number = value.get<double>();
  return number != nullptr ? std::optional(*number) : std::nullopt;
}

std::optional<int64_t> integer_of(const JinjaValue& value) {
  if (const auto* const boolean = value.get<bool>()) return *boolean ? 1 : 0;
  const auto* const integer = value.get<int64_t>();
  return integer != nullptr ? std::optional(*integer) : std::nullopt;
}

const std::string& string_of(const JinjaValue& value, const char* of) {
  if (value.string() == nullptr) refuse(of, " needs a string, got ", kind_of(value));
  return *value.string();
}

bool equal(const JinjaValue& a, const JinjaValue& b, int depth = 0) {
  if (depth > kDeepestValue) refuse("lists and objects more than ", kDeepestValue, " levels deep");
  if (const std::optional<double> x = number_of(a), y = number_of(b); x && y) return *x == *y;
  if (a.string() != nullptr && b.string() != nullptr) return *a.string() == *b.string();
  if (const JinjaEntries* const x = a.entries(), * const y = b.entries(); x != nullptr && y != nullptr)
    return std::equal(x->begin(), x->end(), y->begin(), y->end(), [&](const auto& p, const auto& q) { return equal(p, q, depth + 1); });
  if (const JinjaMembers* const x = a.members(), * const y = b.members(); x != nullptr && y != nullptr) {
    return x->size() == y->size() && std::ranges::all_of(*x, [&](const auto& one) {
             const JinjaValue* const other = member(*y, one.first);
             return other != nullptr && equal(one.second, *other, depth + 1);
           });
  }
  return (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined());
}

bool contains(const JinjaValue& whole, const JinjaValue& part) {
  if (whole.string() != nullptr) return whole.string()->find(string_of(part, "in")) != std::string::npos;
  if (whole.members() != nullptr) return part.string() != nullptr && member(*whole.members(), *part.string()) != nullptr;
  if (whole.is_undefined()) return false;
  if (whole.entries() == nullptr) refuse("in needs a list, an object or a string, got ", kind_of(whole));
  return std::ranges::any_of(*whole.entries(), [&](const JinjaValue& one) { return equal(one, part); });
}

bool less(const JinjaValue& a, const JinjaValue& b) {
  if (const std::optional<double> x = number_of(a), y = number_of(b); x && y) return *x < *y;
  if (a.string() == nullptr || b.string() == nullptr) refuse("cannot compare ", kind_of(a), " with ", kind_of(b));
  return *a.string() < *b.string();
}

// Python's: rounds down.
int64_t floor_quotient(int64_t a, int64_t b) { return a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0); }

JinjaValue whole_arithmetic(const std::string& name, int64_t a, int64_t b) {
  int64_t out = 0;
  bool beyond = false;
  if ((name == "//" || name == "%") && (b == 0 || b == -1)) {
    if (b == 0) refuse("division by zero");
    if (name == "%") return value_of(int64_t{0});
    beyond = __builtin_sub_overflow(int64_t{0}, a, &out);
  } else if (name == "+") {
    beyond = __builtin_add_overflow(a, b, &out);
  } else if (name == "-") {
    beyond = __builtin_sub_overflow(a, b, &out);
  } else if (name == "*") {
    beyond = __builtin_mul_overflow(a, b, &out);
  } else if (name == "**") {
    out = 1;
    for (int64_t i = 0; i < std::min<int64_t>(b, 64 + b % 2) && !beyond && out != 0; ++i) beyond = __builtin_mul_overflow(out, a, &out);
  } else {
    const int64_t quotient = floor_quotient(a, b);
    out = name == "//" ? quotient : a - quotient * b;
  }
  if (beyond) refuse("an integer beyond 64 bits");
  return value_of(out);
}

JinjaValue arithmetic(const std::string& name, const JinjaValue& left, const JinjaValue& right) {
  const std::optional<int64_t> whole_left = integer_of(left), whole_right = integer_of(right);
  const bool whole = name != "/" && (name != "**" || whole_right.value_or(-1) >= 0);
  if (whole_left && whole_right && whole) return whole_arithmetic(name, *whole_left, *whole_right);
  const std::optional<double> a = number_of(left), b = number_of(right);
  if (!a || !b) refuse("cannot compute ", kind_of(left), ' ', name, ' ', kind_of(right));
  if (name == "**") return value_of(std::pow(*a, *b));
  if ((name == "/" || name == "//" || name == "%") && *b == 0.0) refuse("division by zero");
  if (name == "/") return value_of(*a / *b);
  if (name == "//") return value_of(std::floor(*a / *b));
  if (name == "%") return value_of(*a - std::floor(*a / *b) * *b);
  return value_of(name == "+" ? *a + *b : name == "-" ? *a - *b : *a * *b);
}

std::string trimmed(std::string_view text, std::string_view what, bool left, bool right) {
  const size_t first = left ? text.find_first_not_of(what) : 0;
  if (first == std::string_view::npos) return "";
  const size_t last = right ? text.find_last_not_of(what) : text.size();
  return last == std::string_view::npos ? "" : std::string(text.substr(first, right ? last + 1 - first : std::string_view::npos));
}

std::string in_case(std::string text, bool upper) {
  for (char& c : text) {
    if (upper && c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
    if (!upper && c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return text;
}

// The first letter, or that of every word, is large.
std::string capitalized(const std::string& text, bool words) {
  std::string out = in_case(text, false);
  for (size_t i = 0; i < out.size(); ++i) {
    const bool begins = i == 0 || (words && kWhitespace.find(out[i - 1]) != std::string_view::npos);
    if (begins && out[i] >= 'a' && out[i] <= 'z') out[i] = static_cast<char>(out[i] - 'a' + 'A');
  }
  return out;
}

std::string with_replaced(std::string_view text, const std::string& from, const std::string& to, JinjaWork& work) {
  if (from.empty()) refuse("replace needs a text that is not empty");
  std::string out;
  for (size_t at = 0; at <= text.size();) {
    const size_t found = std::min(text.find(from, at), text.size());
    out += text.substr(at, found - at);
    if (found < text.size()) out += to;
    work.add(out.size() / 16 + 1);
    at = found < text.size() ? found + from.size() : text.size() + 1;
  }
  return out;
}

JinjaEntries split_text(std::string_view text, const JinjaArguments& arguments) {
  JinjaEntries out;
  const bool blanks = arguments.values.empty() || arguments.values[0].is_none();
  const std::string separator = blanks ? "" : string_of(arguments.values[0], "split");
  if (!blanks && separator.empty()) refuse("split needs a separator that is not empty");
  int64_t left = arguments.values.size() > 1 ? integer_of(arguments.values[1]).value_or(-1) : -1;
  for (;;) {
    if (blanks) text = text.substr(std::min(text.find_first_not_of(kWhitespace), text.size()));
    if (blanks && text.empty()) return out;
    const size_t end = blanks ? text.find_first_of(kWhitespace) : text.find(separator);
    const bool last = end == std::string_view::npos || left == 0;
    out.push_back(value_of(std::string(last ? text : text.substr(0, end))));
    if (last) return out;
    text.remove_prefix(end + (blanks ? 1 : separator.size()));
    --left;
  }
}

using Arguments = JinjaArguments;

const JinjaValue& argument(const Arguments& arguments, size_t at, const char* of) {
  if (at >= arguments.values.size()) refuse(of, " needs ", count_text(at + 1, "argument"));
  return arguments.values[at];
}

// Prefixes or suffixes may be one string or a list of them.
bool has_affix(const std::string& text, const JinjaValue& affix, bool prefix) {
  const auto has = [&](const JinjaValue& one) {
    const std::string& part = string_of(one, prefix ? "startswith" : "endswith");
    return prefix ? text.starts_with(part) : text.ends_with(part);
  };
  return affix.entries() != nullptr ? std::ranges::any_of(*affix.entries(), has) : has(affix);
}

JinjaValue string_method(const std::string& text, const std::string& name, JinjaWork& work) {
  const auto made = [](auto method) { return jinja_function(method); };
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    return made([text, name](const Arguments& with) {
      const bool given = !with.values.empty() && !with.values[0].is_none();
      return value_of(
          trimmed(text, given ? std::string_view(string_of(with.values[0], "strip")) : kWhitespace, name != "rstrip", name != "lstrip"));
    });
  }
  if (name == "split") return made([text](const Arguments& with) { return jinja_list(split_text(text, with)); });
  if (name == "startswith" || name == "endswith") {
    const bool prefix = name == "startswith";
    return made([text, prefix](const Arguments& with) { return value_of(has_affix(text, argument(with, 0, "startswith"), prefix)); });
  }
  if (name == "replace") {
    return made([text, &work](const Arguments& with) {
      return value_of(with_replaced(text, string_of(argument(with, 0, "replace"), "replace"),
                                    string_of(argument(with, 1, "replace"), "replace"), work));
    });
  }
  if (name == "upper" || name == "lower") return made([text, name](const Arguments&) { return value_of(in_case(text, name == "upper")); });
  if (name == "title" || name == "capitalize")
    return made([text, name](const Arguments&) { return value_of(capitalized(text, name == "title")); });
  if (name != "find") return {};
  return made([text](const Arguments& with) {
    const size_t found = text.find(string_of(argument(with, 0, "find"), "find"));
    return value_of(found == std::string::npos ? int64_t{-1} : static_cast<int64_t>(found));
  });
}

JinjaEntries parts_of(const JinjaMembers& members, bool names, bool values) {
  JinjaEntries out;
  for (const auto& [name, value] : members) {
    if (names && values)
      out.push_back(jinja_list({value_of(name), value}));
    else
      out.push_back(names ? value_of(name) : value);
  }
  return out;
}

JinjaValue object_method(const std::shared_ptr<JinjaMembers>& members, const std::string& name) {
  const bool items = name == "items", keys = name == "keys";
  if (items || keys || name == "values") {
    return jinja_function([members, items, keys](const Arguments&) { return jinja_list(parts_of(*members, items || keys, !keys)); });
  }
  if (name != "get") return {};
  return jinja_function([members](const Arguments& with) {
    const JinjaValue* const found = member(*members, string_of(argument(with, 0, "get"), "get"));
    if (found != nullptr) return *found;
    return with.values.size() > 1 ? with.values[1] : value_of(std::monostate());
  });
}

// Writes it like json.dumps() of Python.
std::string json_of(const JinjaValue& value, const std::string& indent, JinjaWork& work, int depth = 0) {
  if (depth > kDeepestValue) refuse("lists and objects more than ", kDeepestValue, " levels deep");
  work.add(16);
  if (value.string() != nullptr) return Json(*value.string()).dump();
  if (const auto* const boolean = value.get<bool>()) return *boolean ? "true" : "false";
  if (value.is_none()) return "null";
  if (number_of(value)) return printed(value);
  const JinjaEntries* const list = value.entries();
  const JinjaMembers* const object = value.members();
  if (list == nullptr && object == nullptr) refuse("tojson cannot write ", kind_of(value));
  std::string inner, separator = indent.empty() ? ", " : ",", line;
  if (!indent.empty()) {
    line = "\n";
    for (int i = 0; i <= depth; ++i) line += indent;
  }
  std::vector<std::string> parts;
  if (list != nullptr)
    for (const JinjaValue& one : *list) parts.push_back(line + json_of(one, indent, work, depth + 1));
  else
    for (const auto& [name, one] : *object) parts.push_back(line + Json(name).dump() + ": " + json_of(one, indent, work, depth + 1));
  inner = joined(parts, separator.c_str());
  if (!indent.empty() && !parts.empty()) inner += line.substr(0, line.size() - indent.size());
  return list != nullptr ? "[" + inner + "]" : "{" + inner + "}";
}

const JinjaValue* named(const Arguments& arguments, const char* name, size_t at) {
  if (const JinjaValue* const found = member(arguments.named, name)) return found;
  return at < arguments.values.size() ? &arguments.values[at] : nullptr;
}

std::string json_filter(const JinjaValue& value, const Arguments& arguments, JinjaWork& work) {
  const JinjaValue* const wanted = named(arguments, "indent", 0);
  const std::optional<int64_t> indent = wanted != nullptr ? integer_of(*wanted) : std::nullopt;
  if (indent && (*indent < 0 || *indent > 16)) refuse("tojson takes an indent from 0 to 16");
  return json_of(value, std::string(static_cast<size_t>(indent.value_or(0)), ' '), work);
}

std::string joined_text(const JinjaValue& value, const Arguments& arguments, JinjaWork& work) {
  const JinjaValue* const separator = named(arguments, "d", 0);
  const std::string between = separator != nullptr ? printed(*separator) : "";
  return joined(entries_of(value, work), between.c_str(), printed);
}

// select, reject and their forms for an attribute; map.
JinjaValue chosen(const std::string& name, const JinjaValue& value, const Arguments& arguments, JinjaWork& work) {
  const bool attribute = name.ends_with("attr"), wanted = name.starts_with("select");
  const size_t first = attribute ? 1 : 0;
  JinjaEntries out;
  for (const JinjaValue& one : entries_of(value, work)) {
    const JinjaValue subject = attribute ? item_of(one, argument(arguments, 0, name.c_str())) : one;
    bool passed = false;
    if (arguments.values.size() <= first) {
      passed = is_true(subject);
    } else {
      const auto rest = arguments.values.begin() + static_cast<std::ptrdiff_t>(first) + 1;
      passed = passes(string_of(arguments.values[first], name.c_str()), subject, JinjaEntries(rest, arguments.values.end()));
    }
    if (passed == wanted) out.push_back(one);
  }
  return jinja_list(std::move(out));
}

JinjaValue mapped(const JinjaValue& value, const Arguments& arguments, JinjaWork& work) {
  const JinjaValue* const attribute = member(arguments.named, "attribute");
  JinjaEntries out;
  for (const JinjaValue& one : entries_of(value, work)) {
    if (attribute != nullptr)
      out.push_back(item_of(one, *attribute));
    else
      out.push_back(filtered(string_of(argument(arguments, 0, "map"), "map"), one, {}, work));
  }
  return jinja_list(std::move(out));
}

size_t length_of(const JinjaValue& value, JinjaWork& work) {
  if (value.entries() != nullptr) return value.entries()->size();
  if (value.members() != nullptr) return value.members()->size();
  return entries_of(value, work).size();
}

JinjaValue to_number(const JinjaValue& value, bool whole) {
  if (const std::optional<double> number = number_of(value)) {
    if (!whole) return value_of(*number);
    if (std::abs(*number) < 9e18) return value_of(static_cast<int64_t>(*number));
  }
  if (value.string() != nullptr) {
    const Json read = parse_json_or_null(trimmed(*value.string(), kWhitespace, true, true));
    if (read.is_number()) return to_number(value_of(read.number()), whole);
  }
  return whole ? value_of(int64_t{0}) : value_of(0.0);  // the default of the filter
}

JinjaValue text_filter(const std::string& name, const JinjaValue& value, const Arguments& arguments, JinjaWork& work) {
  if (name == "trim")
    return value_of(trimmed(printed(value), arguments.values.empty() ? kWhitespace : string_of(arguments.values[0], "trim"), true, true));
  if (name == "upper" || name == "lower") return value_of(in_case(printed(value), name == "upper"));
  if (name == "capitalize" || name == "title") return value_of(capitalized(printed(value), name == "title"));
  if (name == "string" || name == "safe") return value_of(printed(value));
  if (name == "tojson") return value_of(json_filter(value, arguments, work));
  if (name == "join") return value_of(joined_text(value, arguments, work));
  if (name == "replace") {
    const std::string &from = string_of(argument(arguments, 0, "replace"), "replace"),
                      &to = string_of(argument(arguments, 1, "replace"), "replace");
    return value_of(with_replaced(printed(value), from, to, work));
  }
  refuse("the filter ", shortened(name), " is not known here");
}

}  // namespace

JinjaWork::~JinjaWork() {
  for (const auto& object : objects_) object->clear();
}

void JinjaWork::add(size_t bytes) {
  constexpr size_t kMost = size_t{1} << 26;
  done_ += bytes + 1;
  if (done_ > kMost) refuse("the template does too much");
}

JinjaValue jinja_list(JinjaEntries entries) { return value_of(std::make_shared<JinjaEntries>(std::move(entries))); }
JinjaValue jinja_function(JinjaFunction function) { return value_of(std::make_shared<JinjaFunction>(std::move(function))); }

JinjaValue jinja_value(const Json& json) {
  if (json.is_string()) return value_of(json.string());
  if (json.is_list()) {
    JinjaEntries entries;
    for (const Json& one : json.entries()) entries.push_back(jinja_value(one));
    return jinja_list(std::move(entries));
  }
  if (json.is_object()) {
    auto members = std::make_shared<JinjaMembers>();
    for (const auto& [name, one] : json.members()) members->emplace_back(name, jinja_value(one));
    return value_of(std::move(members));
  }
  const Scalar scalar = json.scalar();
  if (const auto* const boolean = std::get_if<bool>(&scalar)) return value_of(*boolean);
  if (const auto* const integer = std::get_if<int64_t>(&scalar)) return value_of(*integer);
  if (json.is_number()) return value_of(json.number());
  return value_of(std::monostate());
}

bool is_true(const JinjaValue& value) {
  if (const std::optional<double> number = number_of(value)) return *number != 0.0;
  if (value.string() != nullptr) return !value.string()->empty();
  if (value.entries() != nullptr) return !value.entries()->empty();
  if (value.members() != nullptr) return !value.members()->empty();
  return !value.is_undefined() && !value.is_none();
}

std::string printed(const JinjaValue& value) {
  if (value.string() != nullptr) return *value.string();
  if (value.is_undefined()) return "";
  if (value.is_none()) return "None";
  if (const auto* const boolean = value.get<bool>()) return *boolean ? "True" : "False";
  if (const auto* const integer = value.get<int64_t>()) return std::to_string(*integer);
  if (const auto* const number = value.get<double>()) {
    const std::string digits = Json(*number).dump();
    return digits.find_first_of(".en") == std::string::npos ? digits + ".0" : digits;
  }
  refuse(kind_of(value), " is printed, which is not known here");
}

const JinjaValue* member(const JinjaMembers& members, const std::string& name) {
  const auto found = std::ranges::find(members, name, &JinjaMembers::value_type::first);
  return found == members.end() ? nullptr : &found->second;
}

void set_member(JinjaMembers& members, const std::string& name, JinjaValue value) {
  const auto found = std::ranges::find(members, name, &JinjaMembers::value_type::first);
  if (found == members.end())
    members.emplace_back(name, std::move(value));
  else
    found->second = std::move(value);
}

JinjaEntries entries_of(const JinjaValue& value, JinjaWork& work) {
  const size_t entries = value.entries() != nullptr ? value.entries()->size() : 0;
  work.add(sizeof(JinjaValue) * (value.string() != nullptr ? value.string()->size() : entries));
  if (value.entries() != nullptr) return *value.entries();
  if (value.members() != nullptr) return parts_of(*value.members(), true, false);
  if (value.is_undefined()) return {};
  if (value.string() == nullptr) refuse("cannot go through ", kind_of(value));
  JinjaEntries characters;
  for (const char c : *value.string()) {
    if (!characters.empty() && continues_character(c))
      std::get<std::string>(characters.back().content) += c;
    else
      characters.push_back(value_of(std::string(1, c)));
  }
  return characters;
}

JinjaValue binary_result(const std::string& name, const JinjaValue& left, const JinjaValue& right, JinjaWork& work) {
  if (name == "==" || name == "!=") return value_of(equal(left, right) == (name == "=="));
  if (name == "in") return value_of(contains(right, left));
  if (name == "<" || name == ">=") return value_of(less(left, right) == (name == "<"));
  if (name == ">" || name == "<=") return value_of(less(right, left) == (name == ">"));
  const bool texts = left.string() != nullptr && right.string() != nullptr;
  if (name == "~" || (name == "+" && texts)) {
    std::string out = printed(left) + printed(right);
    work.add(out.size());
    return value_of(std::move(out));
  }
  if (name == "+" && left.entries() != nullptr && right.entries() != nullptr) {
    JinjaEntries out = *left.entries();
    out.insert(out.end(), right.entries()->begin(), right.entries()->end());
    work.add(sizeof(JinjaValue) * out.size());
    return jinja_list(std::move(out));
  }
  return arithmetic(name, left, right);
}

JinjaValue negative(const JinjaValue& value) { return arithmetic("-", value_of(int64_t{0}), value); }

JinjaValue item_of(const JinjaValue& of, const JinjaValue& index) {
  if (of.is_undefined()) refuse(of.get<JinjaUndefined>()->name, " is undefined");
  if (of.members() != nullptr) {
    const JinjaValue* const found = index.string() != nullptr ? member(*of.members(), *index.string()) : nullptr;
    return found != nullptr ? *found : value_of(JinjaUndefined{index.string() != nullptr ? *index.string() : "an item"});
  }
  const std::optional<int64_t> at = integer_of(index);
  if (!at || (of.entries() == nullptr && of.string() == nullptr)) return value_of(JinjaUndefined{"an item"});
  JinjaWork work;
  const JinjaEntries characters = of.string() != nullptr ? entries_of(of, work) : JinjaEntries();
  const JinjaEntries& entries = of.string() != nullptr ? characters : *of.entries();
  const int64_t place = *at < 0 ? *at + std::ssize(entries) : *at;
  return place >= 0 && place < std::ssize(entries) ? entries[static_cast<size_t>(place)] : value_of(JinjaUndefined{"an item"});
}

JinjaValue slice_of(const JinjaValue& of, const JinjaValue (&bounds)[3], JinjaWork& work) {
  const JinjaEntries entries = entries_of(of, work);
  const int64_t size = std::ssize(entries), step = integer_of(bounds[2]).value_or(1);
  if (step == 0) refuse("a slice needs a step other than 0");
  const auto bound = [&](const JinjaValue& given, int64_t otherwise) {
    const std::optional<int64_t> at = integer_of(given);
    if (!at) return otherwise;
    const int64_t lowest = step < 0 ? -1 : 0, highest = step < 0 ? size - 1 : size;
    return std::clamp(*at < 0 ? *at + size : *at, lowest, highest);
  };
  const int64_t first = bound(bounds[0], step < 0 ? size - 1 : 0), last = bound(bounds[1], step < 0 ? -1 : size);
  JinjaEntries out;
  const int64_t stride = std::clamp(step, -size - 1, size + 1);
  for (int64_t at = first; stride > 0 ? at < last : at > last; at += stride) out.push_back(entries[static_cast<size_t>(at)]);
  if (of.string() == nullptr) return jinja_list(std::move(out));
  return value_of(joined(out, "", printed));
}

JinjaValue method_of(const JinjaValue& of, const std::string& name, JinjaWork& work) {
  if (of.string() != nullptr) return string_method(*of.string(), name, work);
  if (const auto* const members = of.get<std::shared_ptr<JinjaMembers>>()) return object_method(*members, name);
  return {};
}

JinjaValue filtered(const std::string& name, const JinjaValue& value, const Arguments& arguments, JinjaWork& work) {
  if (name == "default" || name == "d") {
    const JinjaValue* const empty_too = named(arguments, "boolean", 1);
    const bool absent = value.is_undefined() || (empty_too != nullptr && is_true(*empty_too) && !is_true(value));
    const JinjaValue* const other = named(arguments, "default_value", 0);
    return !absent ? value : other != nullptr ? *other : value_of(std::string());
  }
  if (name == "length" || name == "count") return value_of(static_cast<int64_t>(length_of(value, work)));
  if (name == "list") return jinja_list(entries_of(value, work));
  if (name == "items" && value.members() != nullptr) return jinja_list(parts_of(*value.members(), true, true));
  if (name == "first" || name == "last") return item_of(jinja_list(entries_of(value, work)), value_of(int64_t{name == "first" ? 0 : -1}));
  if (name == "reverse") {
    JinjaEntries entries = entries_of(value, work);
    std::ranges::reverse(entries);
    return value.string() != nullptr ? value_of(joined(entries, "", printed)) : jinja_list(std::move(entries));
  }
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr") return chosen(name, value, arguments, work);
  if (name == "map") return mapped(value, arguments, work);
  if (name == "int" || name == "float") return to_number(value, name == "int");
  work.add(value.string() != nullptr ? value.string()->size() : 16);
  return text_filter(name, value, arguments, work);
}

bool passes(const std::string& name, const JinjaValue& value, const JinjaEntries& arguments) {
  const auto* const boolean = value.get<bool>();
  const std::optional<double> number = number_of(value);
  if (name == "defined" || name == "undefined") return value.is_undefined() == (name == "undefined");
  if (name == "none") return value.is_none();
  if (name == "string") return value.string() != nullptr;
  if (name == "mapping") return value.members() != nullptr;
  if (name == "sequence" || name == "iterable")
    return value.string() != nullptr || value.entries() != nullptr || value.members() != nullptr;
  if (name == "callable") return value.shared<JinjaFunction>() != nullptr;
  if (name == "boolean") return boolean != nullptr;
  if (name == "true" || name == "false") return boolean != nullptr && *boolean == (name == "true");
  if (name == "number") return number.has_value();
  if (name == "integer") return value.get<int64_t>() != nullptr;
  if (name == "float") return value.get<double>() != nullptr;
  if ((name == "odd" || name == "even") && integer_of(value)) return (*integer_of(value) % 2 != 0) == (name == "odd");
  const bool equality = name == "equalto" || name == "eq" || name == "==", inequality = name == "ne" || name == "!=";
  if ((equality || inequality || name == "in") && arguments.size() == 1)
    return name == "in" ? contains(arguments[0], value) : equal(value, arguments[0]) == equality;
  refuse("the test ", shortened(name), " is not known here");
}

}  // namespace mantissa
