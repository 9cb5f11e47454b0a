// JSON: a value, and its parser, which is strict: UTF-8 without a byte order mark, no duplicate keys, no number beyond the range of
// doubles, at most 32 levels deep, at most 4 GiB, nothing after the value. Time and memory are proportional to the text: at most 48 bytes
// a byte of it. Comments are allowed only where the reader asks for them. Structs are read from values by json_fields.h.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "mantissa/base/error.h"

namespace mantissa {

// A value that holds no others: null, true or false, integer, another number, string.
using Scalar = std::variant<std::monostate, bool, int64_t, uint64_t, double, std::string>;

// Null, true or false, an integer, another number, a string, a list or an object. A parsed value has its place. There may be one value for
// two bytes of text, so values are small: 24 bytes, to which a string, list or object adds only what it holds.
class Json {
 public:
  using Entries = std::vector<Json>;
  using Members = std::map<std::string, Json, std::less<>>;

  uint32_t key = 0;    // position of the key; of the value for the root and for entries of a list. Of a made value: its turn in the object
  uint32_t place = 0;  // position of the value

  Json() = default;  // null
  Json(std::nullptr_t) {}
  Json(std::monostate) {}
  template <std::same_as<bool> T>
  Json(T value) : content_(value) {}
  template <std::integral T>
  requires(!std::same_as<T, bool>) Json(T value)
      : content_(std::in_range<int64_t>(value) ? Content(static_cast<int64_t>(value)) : Content(static_cast<uint64_t>(value))) {}
  template <std::floating_point T>
  Json(T value) : content_(static_cast<double>(value)) {}
  Json(std::string value) : content_(Box(std::move(value))) {}
  Json(const char* value) : Json(std::string(value)) {}
  Json(Entries entries) : content_(Box(std::move(entries))) {}
  Json(Members members) : content_(Box(std::move(members))) {}
  explicit Json(const Scalar& scalar);
  Json(std::initializer_list<Json> values);  // pairs of a name and a value are an object, in this order, others a list
  template <class T>
  Json(const std::vector<T>& values) : Json(Entries(values.begin(), values.end())) {}
  template <class T>
  Json(const std::optional<T>& value) : Json(value ? Json(*value) : Json()) {}

  bool is_null() const { return holds<std::monostate>(); }
  bool is_boolean() const { return holds<bool>(); }
  bool is_integer() const { return holds<int64_t>() || holds<uint64_t>(); }
  bool is_number() const { return is_integer() || holds<double>(); }
  bool is_string() const { return holds<Box<std::string>>(); }
  bool is_list() const { return holds<Box<Entries>>(); }
  bool is_object() const { return holds<Box<Members>>(); }
  const char* type_name() const;  // "null", "boolean", "number", "string", "array", "object"

  Scalar scalar() const;                                             // null if this is a list or an object
  double number() const;                                             // the value of a number
  const std::string& string() const { return held<std::string>(); }  // "" if this is no string
  const Entries& entries() const { return held<Entries>(); }         // none if this is no list
  const Members& members() const { return held<Members>(); }         // none if this is no object
  Entries& entries() { return made<Entries>(); }                     // this becomes a list if it is none
  Members& members() { return made<Members>(); }                     // this becomes an object if it is none
  size_t size() const { return is_list() ? entries().size() : members().size(); }

  bool contains(std::string_view name) const { return find(name) != nullptr; }
  const Json* find(std::string_view name) const;   // the member; none: nullptr
  const Json& at(std::string_view name) const;     // the member, which is there
  const Json& get(std::string_view name) const;    // the member; none: null
  Json& operator[](const std::string& name);       // the member, made if absent, of an object or null
  Json& add(const std::string& name, Json value);  // the member, after all others if it is new, of an object or null
  const Json& at(size_t index) const { return entries().at(index); }
  Json& operator[](size_t index) { return entries().at(index); }

  // Writes the value; with an indent, a line for each entry. NaN and Inf, which JSON lacks, become null; bytes that are no UTF-8 become
  // U+FFFD.
  enum class Order { names, keys };  // order of members: by name, or as they were added or stand in the text
  std::string dump(int indent = -1, Order order = Order::names) const;
  std::string shown() const;  // for messages: the compact form, shortened

  // Numbers are equal by value, whatever their type.
  friend bool operator==(const Json& a, const Json& b);

 private:
  // A pointer that copies what it points to; null stands for an empty value.
  template <class T>
  class Box {
   public:
    Box() = default;
    explicit Box(T value) : own_(value.empty() ? nullptr : std::make_unique<T>(std::move(value))) {}
    Box(const Box& other) : own_(other.own_ ? std::make_unique<T>(*other.own_) : nullptr) {}
    Box(Box&&) noexcept = default;
    Box& operator=(Box other) noexcept {
      own_ = std::move(other.own_);
      return *this;
    }
    ~Box() = default;
    const T& get() const {
      static const T empty;
      return own_ ? *own_ : empty;
    }
    T& get() {
      if (!own_) own_ = std::make_unique<T>();
      return *own_;
    }
    bool operator==(const Box& other) const { return get() == other.get(); }

   private:
    std::unique_ptr<T> own_;
  };
  using Content = std::variant<std::monostate, bool, int64_t, uint64_t, double, Box<std::string>, Box<Entries>, Box<Members>>;

  template <class T>
  bool holds() const {
    return std::holds_alternative<T>(content_);
  }
  template <class T>
  const T& held() const {
    static const Box<T> none;
    const auto* const own = std::get_if<Box<T>>(&content_);
    return (own != nullptr ? *own : none).get();
  }
  template <class T>
  T& made() {
    if (!holds<Box<T>>()) content_ = Box<T>();
    return std::get<Box<T>>(content_).get();
  }

  Content content_;
};

// Parses files that a program wrote, some of which have integers beyond 64 bits (transformers' model_max_length): these become doubles.
// Throws Error(code) whose message starts with "source:line:column: ".
Json parse_json(std::string_view text, const std::string& source, ExitCode code = ExitCode::data);

// Parses one line of a file, which `source` names with its number. The message starts with "source: ".
Json parse_json_line(std::string_view line, const std::string& source, ExitCode code = ExitCode::data);

struct JsonProblem {
  size_t offset;
  std::string key;  // key of the value at hand, dotted: "data.train.0"; "" for the root
  std::string message;
};

struct ParsedJson {
  static constexpr size_t kMostProblems = 50;
  Json root;                          // undefined content if there are problems
  std::vector<JsonProblem> problems;  // empty: valid. After a syntax error the rest of the text is not looked at
  size_t more_problems = 0;           // problems that are not listed
};

// Parses strictly, as parse_json() does.
ParsedJson parse_strict_json(std::string_view text);
Json parse_json_or_null(std::string_view text);  // null: the text is invalid

// Parses files that people write: // and /* */ comments are allowed, integers beyond 64 bits are not. Positions are offsets in the text
// plus `base`, so that those of several texts can be told apart; they must fit.
ParsedJson parse_commented_json(std::string_view text, uint32_t base = 0);

// Returns the values that hold no others, empty lists and objects included, by path: "training.steps", "data.train.0.path".
std::map<std::string, const Json*> leaves_of(const Json& root);

// Converts offsets of a text, which must outlive this, to "14:11", line and column from 1 in characters. Each conversion reads a few
// hundred bytes, not everything before the offset.
class TextLines {
 public:
  explicit TextLines(std::string_view text);
  std::string at(size_t offset) const;

 private:
  struct Mark {
    uint32_t line, column;
  };
  std::string_view text_;
  std::vector<Mark> marks_;
};

}  // namespace mantissa
