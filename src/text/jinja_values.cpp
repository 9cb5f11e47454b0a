#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "text/characters.h"
#include "text/jinja_syntax.h"

namespace mantissa {
namespace {

using Arguments = JinjaArguments;

constexpr int kDeepestValue = 32;
constexpr size_t kBlock = 64;  // bytes of a shared value beside what it holds

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  fail(ExitCode::data, parts...);
}

const char* kind_of(const JinjaValue& value) {
  constexpr std::array kNames = {"an undefined value", "none",   "a boolean", "an integer",  "a number",
                                 "a string",           "a list", "an object", "a namespace", "a function"};
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

const std::string& string_of(const JinjaValue& value, const std::string& user) {
  if (value.string() == nullptr) refuse(user, " needs a string, got ", kind_of(value));
  return *value.string();
}

bool is_given(const JinjaValue* argument) { return argument != nullptr && !argument->is_none(); }

// Returns the depth of what has this part, too.
int depth_with(const JinjaValue& part, int depth) {
  if (part.shared<JinjaNamespace>() != nullptr) refuse("a namespace in a list, an object or a namespace is not supported");
  if (part.depth >= kDeepestValue) refuse("lists and objects more than ", kDeepestValue, " levels deep");
  return std::max(depth, part.depth + 1);
}

const JinjaValue* member(const JinjaMembers& members, const std::string& name, JinjaWork& work) {
  work.add(members.size());
  const auto found = std::ranges::find(members, name, &JinjaMembers::value_type::first);
  return found == members.end() ? nullptr : &found->second;
}

// Searches in linear time, which std::string::find() does not.
size_t found_at(std::string_view text, std::string_view part, size_t from, JinjaWork& work) {
  const void* const found = part.empty() ? text.data() + from : memmem(text.data() + from, text.size() - from, part.data(), part.size());
  const size_t place = found != nullptr ? static_cast<size_t>(static_cast<const char*>(found) - text.data()) : std::string_view::npos;
  work.add(std::min(place, text.size()) - from + part.size());
  return place;
}

bool equal(const JinjaValue& a, const JinjaValue& b, JinjaWork& work) {
  work.add(sizeof(JinjaValue));
  if (const std::optional<double> x = number_of(a), y = number_of(b); x && y) return *x == *y;
  if (const std::string* const x = a.string(), * const y = b.string(); x != nullptr && y != nullptr) {
    work.add(std::min(x->size(), y->size()));
    return *x == *y;
  }
  if (const JinjaEntries* const x = a.entries(), * const y = b.entries(); x != nullptr && y != nullptr)
    return std::ranges::equal(*x, *y, [&](const auto& p, const auto& q) { return equal(p, q, work); });
  if (const JinjaMembers* const x = a.members(), * const y = b.members(); x != nullptr && y != nullptr) {
    return x->size() == y->size() && std::ranges::all_of(*x, [&](const auto& one) {
             const JinjaValue* const other = member(*y, one.first, work);
             return other != nullptr && equal(one.second, *other, work);
           });
  }
  return (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined());
}

bool contains(const JinjaValue& whole, const JinjaValue& part, JinjaWork& work) {
  if (whole.string() != nullptr) return found_at(*whole.string(), string_of(part, "in"), 0, work) != std::string_view::npos;
  if (whole.members() != nullptr) return part.string() != nullptr && member(*whole.members(), *part.string(), work) != nullptr;
  if (whole.is_undefined()) return false;
  if (whole.entries() == nullptr) refuse("in needs a list, an object or a string, got ", kind_of(whole));
  return std::ranges::any_of(*whole.entries(), [&](const JinjaValue& one) { return equal(one, part, work); });
}

bool less(const JinjaValue& a, const JinjaValue& b, JinjaWork& work) {
  if (const std::optional<double> x = number_of(a), y = number_of(b); x && y) return *x < *y;
  if (a.string() == nullptr || b.string() == nullptr) refuse("cannot compare ", kind_of(a), " with ", kind_of(b));
  work.add(std::min(a.string()->size(), b.string()->size()));
  return *a.string() < *b.string();
}

JinjaValue arithmetic(const std::string& name, const JinjaValue& left, const JinjaValue& right) {
  const std::optional<int64_t> a = integer_of(left), b = integer_of(right);
  if (!a || !b) refuse("cannot compute ", kind_of(left), ' ', name, ' ', kind_of(right));
  int64_t out = 0;
  bool beyond = false;
  if (name == "+") {
    beyond = __builtin_add_overflow(*a, *b, &out);
  } else if (name == "-") {
    beyond = __builtin_sub_overflow(*a, *b, &out);
  } else if (name == "%" && *b > 0) {
    out = *a % *b;
    if (out < 0) out += *b;  // Python rounds down
  } else {
    refuse("the operator ", name, name == "%" ? " 0 or less" : "", " is not supported");
  }
  if (beyond) refuse("an integer beyond 64 bits");
  return {out};
}

// Strips white space, or the characters that are given.
std::string_view trimmed(std::string_view text, const JinjaValue* what, bool left, bool right, JinjaWork& work) {
  if (!is_given(what)) return stripped(text, is_python_space, left, right);
  std::u32string drops;
  for_each_character(string_of(*what, "strip"), [&](char32_t character, size_t, size_t) { drops += character; });
  work.add(text.size() * drops.size());
  return stripped(
      text, [&](char32_t character) { return drops.find(character) != std::u32string::npos; }, left, right);
}

// Implements upper, lower and capitalize. Letters beyond ASCII have cases of several characters, and that depend on those around them.
std::string in_case(const std::string& name, std::string text) {
  if (std::ranges::any_of(text, [](char c) { return static_cast<uint8_t>(c) >= 0x80; }))
    refuse(name, " of non-ASCII text is not supported");
  for (char& c : text) {
    const bool upper = name == "upper" || (name == "capitalize" && &c == text.data());
    if (upper && c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
    if (!upper && c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return text;
}

std::string with_replaced(std::string_view text, const std::string& from, const std::string& to, JinjaWork& work) {
  if (from.empty()) refuse("replace needs a text that is not empty");
  std::string out;
  for (size_t begin = 0;;) {
    const size_t found = found_at(text, from, begin, work);
    out += text.substr(begin, found - begin);
    if (found == std::string_view::npos) return out;
    work.add(to.size());
    out += to;
    begin = found + from.size();
  }
}

// Splits at the separator; the last of more than `most` entries is the rest.
JinjaValue text_split(std::string_view text, const Arguments& with, JinjaWork& work) {
  const auto arguments = in_order("split", with, {"sep", "maxsplit"}, 1);
  const std::string& separator = string_of(*arguments[0], "split");
  const std::optional<int64_t> most = is_given(arguments[1]) ? integer_of(*arguments[1]) : -1;
  if (!most || separator.empty()) refuse("split needs a separator that is not empty, and an integer");
  JinjaEntries out;
  for (size_t begin = 0, end = 0; end != std::string_view::npos; begin = end + separator.size()) {
    end = std::ssize(out) == *most ? std::string_view::npos : found_at(text, separator, begin, work);
    out.push_back(jinja_text(std::string(text.substr(begin, end - begin)), work));
  }
  return jinja_list(std::move(out), work);
}

// Implements filters that are also methods of strings; none if `name` is not one of them.
std::optional<JinjaValue> text_result(const std::string& name, const std::string& text, const Arguments& with, JinjaWork& work) {
  if (name == "upper" || name == "lower" || name == "capitalize") return in_order(name, with, {}), jinja_text(in_case(name, text), work);
  if (name != "replace") return std::nullopt;
  const auto arguments = in_order(name, with, {"old", "new"}, 2);
  return jinja_text(with_replaced(text, string_of(*arguments[0], name), string_of(*arguments[1], name), work), work);
}

std::optional<JinjaValue> string_method(const std::string& name, const std::string& text, const Arguments& with, JinjaWork& work) {
  work.add(text.size());
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const JinjaValue* const what = in_order(name, with, {""})[0];
    return jinja_text(std::string(trimmed(text, what, name != "rstrip", name != "lstrip", work)), work);
  }
  if (name == "split") return text_split(text, with, work);
  if (name == "startswith" || name == "endswith") {
    const std::string& part = string_of(*in_order(name, with, {""}, 1)[0], name);
    return JinjaValue{name == "startswith" ? text.starts_with(part) : text.ends_with(part)};
  }
  return text_result(name, text, with, work);
}

JinjaValue parts_of(const JinjaMembers& members, bool names, bool values, JinjaWork& work) {
  JinjaEntries out;
  for (const auto& [name, value] : members) {
    const JinjaValue key = jinja_text(name, work);
    out.push_back(names && values ? jinja_list({key, value}, work) : names ? key : value);
  }
  return jinja_list(std::move(out), work);
}

std::optional<JinjaValue> object_method(const std::string& name, const JinjaMembers& members, const Arguments& with, JinjaWork& work) {
  if (name == "items" || name == "keys" || name == "values")
    return in_order(name, with, {}), parts_of(members, name != "values", name != "keys", work);
  if (name != "get") return std::nullopt;
  const auto arguments = in_order(name, with, {"", ""}, 1);
  const JinjaValue* const found = member(members, string_of(*arguments[0], name), work);
  return found != nullptr ? *found : arguments[1] != nullptr ? *arguments[1] : JinjaValue{std::monostate()};
}

// Writes like json.dumps() of Python. indent: of a level; none: all is one line.
void write_json(const JinjaValue& value, std::optional<size_t> indent, size_t level, std::string& out, JinjaWork& work) {
  const auto write = [&](std::string_view text) {
    work.add(text.size());
    out += text;
  };
  work.add(sizeof(JinjaValue));
  if (value.string() != nullptr) return write(Json(*value.string()).dump());
  if (value.is_none()) return write("null");
  if (const auto* const boolean = value.get<bool>()) return write(*boolean ? "true" : "false");
  if (number_of(value)) return write(printed(value, work));
  const JinjaEntries* const list = value.entries();
  const JinjaMembers* const object = value.members();
  if (list == nullptr && object == nullptr) refuse("tojson cannot write ", kind_of(value));
  const size_t size = list != nullptr ? list->size() : object->size();
  const auto new_line = [&](size_t to) {
    if (indent) write("\n" + std::string(*indent * to, ' '));
  };
  write(list != nullptr ? "[" : "{");
  for (size_t i = 0; i < size; ++i) {
    if (i > 0) write(indent ? "," : ", ");
    new_line(level + 1);
    if (object != nullptr) write(Json((*object)[i].first).dump() + ": ");
    write_json(list != nullptr ? (*list)[i] : (*object)[i].second, indent, level + 1, out, work);
  }
  if (size > 0) new_line(level);
  write(list != nullptr ? "]" : "}");
}

// Takes the arguments that transformers gives this filter, which are not those of Jinja.
JinjaValue json_text(const JinjaValue& value, const Arguments& with, JinjaWork& work) {
  const auto arguments = in_order("tojson", with, {"ensure_ascii", "indent"});
  if (arguments[0] != nullptr && is_true(*arguments[0])) refuse("the argument ensure_ascii of tojson is not supported");
  std::optional<size_t> indent;
  if (is_given(arguments[1])) {
    const int64_t wanted = integer_of(*arguments[1]).value_or(-1);
    if (wanted < 0 || wanted > 16) refuse("tojson takes an indent from 0 to 16");
    indent = static_cast<size_t>(wanted);
  }
  std::string out;
  write_json(value, indent, 0, out, work);
  return jinja_text(std::move(out), work);
}

std::string joined_text(const JinjaEntries& entries, const std::string& between, JinjaWork& work) {
  std::string out;
  for (const JinjaValue& one : entries) {
    out += (&one == entries.data() ? "" : between) + printed(one, work);
    work.add(between.size());
  }
  return out;
}

JinjaValue attribute_named(const JinjaValue& value, const JinjaValue& name, const std::string& filter, JinjaWork& work) {
  if (string_of(name, filter).find('.') != std::string::npos) refuse("the attribute ", shortened(*name.string()), " is not supported");
  return item_of(value, name, work);
}

// Implements select and reject, and their forms for an attribute.
JinjaValue chosen(const std::string& name, const JinjaValue& value, const Arguments& with, JinjaWork& work) {
  const bool attribute = name.ends_with("attr"), wanted = name.starts_with("select");
  if (!with.named.empty()) refuse("the argument ", shortened(with.named[0].first), " of ", name, " is not supported");
  auto arguments =
      in_order(name, with, attribute ? std::vector<std::string>{"attribute", "", ""} : std::vector<std::string>{"", ""}, attribute ? 1 : 0);
  if (!attribute) arguments.insert(arguments.begin(), nullptr);
  JinjaEntries out;
  for (const JinjaValue& one : entries_of(value, work)) {
    const JinjaValue subject = attribute ? attribute_named(one, *arguments[0], name, work) : one;
    const bool passed = arguments[1] != nullptr ? passes(string_of(*arguments[1], name), subject, arguments[2], work) : is_true(subject);
    if (passed == wanted) out.push_back(one);
  }
  return jinja_list(std::move(out), work);
}

JinjaValue mapped(const JinjaValue& value, const Arguments& with, JinjaWork& work) {
  if (!with.values.empty()) refuse("map without an attribute is not supported");
  const JinjaValue* const name = in_order("map", with, {"attribute"}, 1)[0];
  JinjaEntries out = entries_of(value, work);
  for (JinjaValue& one : out) one = attribute_named(one, *name, "map", work);
  return jinja_list(std::move(out), work);
}

size_t length_of(const JinjaValue& value, JinjaWork& work) {
  if (value.entries() != nullptr) return value.entries()->size();
  if (value.members() != nullptr) return value.members()->size();
  if (value.string() == nullptr) return entries_of(value, work).size();
  work.add(value.string()->size());
  return static_cast<size_t>(std::ranges::count_if(*value.string(), begins_character));
}

// Implements the filters without arguments that take a list or a text; none: it is none of them.
std::optional<JinjaValue> plain_filter(const std::string& name, const JinjaValue& value, JinjaWork& work) {
  if (name == "length" || name == "count") return JinjaValue{static_cast<int64_t>(length_of(value, work))};
  if (name == "string" || name == "safe") return jinja_text(printed(value, work), work);
  if (name == "items" && value.is_undefined()) return jinja_list({}, work);
  if (name == "items" && value.members() != nullptr) return parts_of(*value.members(), true, true, work);
  if (name != "list" && name != "first" && name != "last" && name != "reverse") return std::nullopt;
  JinjaEntries entries = entries_of(value, work);
  if (name == "reverse") std::ranges::reverse(entries);
  if (name == "reverse" && value.string() != nullptr) return jinja_text(joined_text(entries, "", work), work);
  if (name == "list" || name == "reverse") return jinja_list(std::move(entries), work);
  if (entries.empty()) return jinja_undefined("an item", work);
  return name == "first" ? entries.front() : entries.back();
}

// Implements the tests without an argument; none: it is none of them.
std::optional<bool> plain_test(const std::string& name, const JinjaValue& value) {
  const auto* const boolean = value.get<bool>();
  const bool undefined = value.is_undefined();  // Jinja takes it for an empty sequence
  if (name == "defined" || name == "undefined") return undefined == (name == "undefined");
  if (name == "none") return value.is_none();
  if (name == "string") return value.string() != nullptr;
  if (name == "mapping") return value.members() != nullptr;
  if (name == "sequence" || name == "iterable")
    return undefined || value.string() != nullptr || value.entries() != nullptr || value.members() != nullptr;
  if (name == "boolean") return boolean != nullptr;
  if (name == "true" || name == "false") return boolean != nullptr && *boolean == (name == "true");
  if (name == "number") return number_of(value).has_value();
  if (name == "integer") return value.get<int64_t>() != nullptr;
  if (name == "float") return value.get<double>() != nullptr;
  return std::nullopt;
}

}  // namespace

JinjaValue jinja_text(std::string text, JinjaWork& work) {
  work.add(kBlock + text.size());
  return {std::make_shared<const std::string>(std::move(text))};
}

JinjaValue jinja_undefined(const std::string& name, JinjaWork& work) {
  return {JinjaUndefined{*jinja_text(shortened(name), work).get<std::shared_ptr<const std::string>>()}};
}

JinjaValue jinja_list(JinjaEntries entries, JinjaWork& work) {
  work.add(kBlock + sizeof(JinjaValue) * entries.size());
  int depth = 1;
  for (const JinjaValue& one : entries) depth = depth_with(one, depth);
  return {.content = std::make_shared<const JinjaEntries>(std::move(entries)), .depth = depth};
}

JinjaValue jinja_object(JinjaMembers members, JinjaWork& work) {
  int depth = 1;
  for (const auto& [name, one] : members) {
    work.add(kBlock + name.size());
    depth = depth_with(one, depth);
  }
  return {.content = std::make_shared<const JinjaMembers>(std::move(members)), .depth = depth};
}

JinjaValue jinja_value(const Json& json, JinjaWork& work) {
  if (json.is_string()) return jinja_text(json.string(), work);
  if (json.is_list()) {
    JinjaEntries entries;
    for (const Json& one : json.entries()) entries.push_back(jinja_value(one, work));
    return jinja_list(std::move(entries), work);
  }
  if (json.is_object()) {
    std::vector<const Json::Members::value_type*> ordered;
    for (const auto& one : json.members()) ordered.push_back(&one);
    std::ranges::sort(ordered, {}, [](const auto* one) { return one->second.key; });
    JinjaMembers members;
    for (const auto* const one : ordered) members.emplace_back(one->first, jinja_value(one->second, work));
    return jinja_object(std::move(members), work);
  }
  const Scalar scalar = json.scalar();
  if (const auto* const boolean = std::get_if<bool>(&scalar)) return {*boolean};
  if (const auto* const integer = std::get_if<int64_t>(&scalar)) return {*integer};
  if (json.is_number()) return {json.number()};
  return {std::monostate()};
}

bool is_true(const JinjaValue& value) {
  if (const std::optional<double> number = number_of(value)) return *number != 0.0;
  if (value.string() != nullptr) return !value.string()->empty();
  if (value.entries() != nullptr) return !value.entries()->empty();
  if (value.members() != nullptr) return !value.members()->empty();
  return !value.is_undefined() && !value.is_none();
}

std::string printed(const JinjaValue& value, JinjaWork& work) {
  if (value.string() != nullptr) {
    work.add(value.string()->size());
    return *value.string();
  }
  if (value.is_undefined()) return "";
  if (value.is_none()) return "None";
  if (const auto* const boolean = value.get<bool>()) return *boolean ? "True" : "False";
  if (const auto* const integer = value.get<int64_t>()) return std::to_string(*integer);
  if (const auto* const number = value.get<double>()) return Json(*number).dump();
  refuse("printing ", kind_of(value), " is not supported");
}

void set_member(JinjaMembers& members, const std::string& name, JinjaValue value, JinjaWork& work) {
  depth_with(value, 0);
  work.add(members.size() + kBlock + name.size());
  const auto found = std::ranges::find(members, name, &JinjaMembers::value_type::first);
  if (found == members.end())
    members.emplace_back(name, std::move(value));
  else
    found->second = std::move(value);
}

JinjaEntries entries_of(const JinjaValue& value, JinjaWork& work) {
  if (value.members() != nullptr) return *parts_of(*value.members(), true, false, work).entries();
  if (value.is_undefined()) return {};
  if (value.entries() != nullptr) {
    work.add(sizeof(JinjaValue) * value.entries()->size());
    return *value.entries();
  }
  if (value.string() == nullptr) refuse("cannot go through ", kind_of(value));
  JinjaEntries characters;
  for_each_character(*value.string(), [&](char32_t, size_t begin, size_t end) {
    characters.push_back(jinja_text(value.string()->substr(begin, end - begin), work));
  });
  return characters;
}

std::vector<const JinjaValue*> in_order(const std::string& name, const JinjaArguments& arguments,
                                        const std::vector<std::string>& parameters, size_t required) {
  if (arguments.values.size() > parameters.size()) refuse(shortened(name), " takes ", count_text(parameters.size(), "argument"));
  std::vector<const JinjaValue*> out(parameters.size());
  for (size_t i = 0; i < arguments.values.size(); ++i) out[i] = &arguments.values[i];
  for (const auto& [key, value] : arguments.named) {
    const auto place = static_cast<size_t>(std::ranges::find(parameters, key) - parameters.begin());
    if (place == out.size() || out[place] != nullptr)
      refuse(shortened(name), " takes no argument ", shortened(key), place < out.size() ? " twice" : "");
    out[place] = &value;
  }
  for (size_t i = 0; i < required; ++i)
    if (out[i] == nullptr) refuse(name, " needs ", count_text(required, "argument"));
  return out;
}

bool compares(const std::string& name, const JinjaValue& left, const JinjaValue& right, JinjaWork& work) {
  if (name == "==" || name == "!=") return equal(left, right, work) == (name == "==");
  if (name == "in" || name == "not in") return contains(right, left, work) == (name == "in");
  return name == "<" || name == ">=" ? less(left, right, work) == (name == "<") : less(right, left, work) == (name == ">");
}

JinjaValue binary_result(const std::string& name, const JinjaValue& left, const JinjaValue& right, JinjaWork& work) {
  const bool texts = left.string() != nullptr && right.string() != nullptr;
  if (name == "~" || (name == "+" && texts)) return jinja_text(printed(left, work) + printed(right, work), work);
  if (name != "+" || left.entries() == nullptr || right.entries() == nullptr) return arithmetic(name, left, right);
  JinjaEntries out = entries_of(left, work);
  out.insert(out.end(), right.entries()->begin(), right.entries()->end());
  return jinja_list(std::move(out), work);
}

JinjaValue item_of(const JinjaValue& value, const JinjaValue& index, JinjaWork& work) {
  if (const auto* const undefined = value.get<JinjaUndefined>())
    refuse(undefined->name != nullptr ? *undefined->name : "an item", " is undefined");
  const auto* const space = value.shared<JinjaNamespace>();
  if (const JinjaMembers* const members = space != nullptr ? &space->members : value.members()) {
    if (index.string() == nullptr) return jinja_undefined("an item", work);
    const JinjaValue* const found = member(*members, *index.string(), work);
    return found != nullptr ? *found : jinja_undefined(*index.string(), work);
  }
  const std::optional<int64_t> given = integer_of(index);
  const JinjaEntries* const list = value.entries();
  if (!given || (list == nullptr && value.string() == nullptr)) return jinja_undefined("an item", work);
  const JinjaEntries characters = list == nullptr ? entries_of(value, work) : JinjaEntries();
  const JinjaEntries& entries = list == nullptr ? characters : *list;
  const int64_t place = *given < 0 ? *given + std::ssize(entries) : *given;
  return place >= 0 && place < std::ssize(entries) ? entries[static_cast<size_t>(place)] : jinja_undefined("an item", work);
}

// Methods come before members of the same name, as in Python.
JinjaValue attribute_of(const JinjaValue& value, const std::string& name, JinjaWork& work) {
  constexpr std::array<std::string_view, 4> kMethods = {"get", "items", "keys", "values"};
  if (value.members() != nullptr && std::ranges::find(kMethods, name) != kMethods.end())
    refuse("the method ", name, " without a call is not supported");
  return item_of(value, jinja_text(name, work), work);
}

JinjaValue slice_of(const JinjaValue& value, const JinjaEntries& bounds, JinjaWork& work) {
  if (value.string() == nullptr && value.entries() == nullptr) refuse("cannot take a slice of ", kind_of(value));
  const bool turned = integer_of(bounds[2]) == -1;
  if (!bounds[2].is_undefined() && !(turned && bounds[0].is_undefined() && bounds[1].is_undefined()))
    refuse("a slice with a step other than [::-1] is not supported");
  JinjaEntries out = entries_of(value, work);
  const auto size = std::ssize(out);
  const auto place = [&](const JinjaValue& given, int64_t otherwise) {
    const int64_t index = integer_of(given).value_or(otherwise);
    return out.begin() + std::clamp<int64_t>(index < 0 ? index + size : index, 0, size);
  };
  const auto first = place(bounds[0], 0), last = std::max(first, place(bounds[1], size));
  out = JinjaEntries(first, last);
  if (turned) std::ranges::reverse(out);
  if (value.string() == nullptr) return jinja_list(std::move(out), work);
  return jinja_text(joined_text(out, "", work), work);
}

std::optional<JinjaValue> method_result(const std::string& name, const JinjaValue& value, const JinjaArguments& arguments,
                                        JinjaWork& work) {
  if (value.string() != nullptr) return string_method(name, *value.string(), arguments, work);
  if (value.members() != nullptr) return object_method(name, *value.members(), arguments, work);
  return std::nullopt;
}

JinjaValue filtered(const std::string& name, const JinjaValue& value, const JinjaArguments& arguments, JinjaWork& work) {
  if (name == "default" || name == "d") {
    const auto with = in_order("default", arguments, {"default_value", "boolean"});
    const bool absent = value.is_undefined() || (with[1] != nullptr && is_true(*with[1]) && !is_true(value));
    return !absent ? value : with[0] != nullptr ? *with[0] : jinja_text("", work);
  }
  if (std::optional<JinjaValue> out = plain_filter(name, value, work)) return in_order(name, arguments, {}), *out;
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr") return chosen(name, value, arguments, work);
  if (name == "map") return mapped(value, arguments, work);
  if (name == "tojson") return json_text(value, arguments, work);
  if (name == "join") {
    const JinjaValue* const between = in_order(name, arguments, {"d"})[0];
    return jinja_text(joined_text(entries_of(value, work), between != nullptr ? printed(*between, work) : "", work), work);
  }
  if (name == "trim") {
    const JinjaValue* const what = in_order(name, arguments, {"chars"})[0];
    return jinja_text(std::string(trimmed(printed(value, work), what, true, true, work)), work);
  }
  if (name == "upper" || name == "lower" || name == "capitalize" || name == "replace")
    return *text_result(name, printed(value, work), arguments, work);
  refuse("the filter ", shortened(name), " is not supported");
}

bool passes(const std::string& name, const JinjaValue& value, const JinjaValue* argument, JinjaWork& work) {
  if (const std::optional<bool> passed = argument == nullptr ? plain_test(name, value) : std::nullopt) return *passed;
  const bool equality = name == "equalto" || name == "eq" || name == "==", inequality = name == "ne" || name == "!=";
  if (argument == nullptr || (!equality && !inequality && name != "in"))
    refuse("the test ", shortened(name), argument != nullptr ? " with 1 argument" : "", " is not supported");
  return name == "in" ? contains(*argument, value, work) : equal(value, *argument, work) == equality;
}

}  // namespace mantissa
