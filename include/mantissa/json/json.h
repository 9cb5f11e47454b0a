// Parses strict JSON: UTF-8 without a byte order mark, no duplicate keys, no NaN or Inf, integers of at most 64 bits, at most 32 levels
// deep, nothing after the value. Time and memory are proportional to the text: at most 48 bytes a byte of it. Comments are allowed only
// where the reader asks for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "mantissa/base/error.h"

namespace mantissa {

// Parses files that a program wrote. Throws Error(code) whose message starts with "source:line:column: ".
nlohmann::json parse_strict_json(std::string_view text, const std::string& source, ExitCode code = ExitCode::data);

// Parses one line of a file, which `source` names with its number. The message starts with "source: ".
nlohmann::json parse_json_line(std::string_view line, const std::string& source, ExitCode code = ExitCode::data);

// Returns what nlohmann's parser says of an invalid text, without its framing, which quotes what was read and may be the whole text.
std::string json_problem(const std::exception& error);

// Parses files that people write: // and /* */ comments are allowed, and every value has a place. A node has its place and its content; the
// rest is read from the text. There may be one node for two bytes of text, so nodes are small.
struct JsonNode {
  using Members = std::map<std::string, JsonNode, std::less<>>;
  using Entries = std::vector<JsonNode>;

  uint32_t key = 0;    // position of the key; of the value for the root and for entries of a list
  uint32_t value = 0;  // position of the value
  std::variant<std::monostate, std::unique_ptr<Members>, std::unique_ptr<Entries>> content;  // scalar, object, list; null: nothing in it

  bool is_object() const { return content.index() == 1; }
  bool is_list() const { return content.index() == 2; }
  const Members& members() const;  // none if this is no object
  const Entries& entries() const;  // none if this is no list
  Members& members();              // this becomes an object if it is none
  Entries& entries();              // this becomes a list if it is none

  // These resemble those of a nlohmann::json, for code that builds either.
  bool contains(const std::string& name) const { return members().contains(name); }
  JsonNode& operator[](const std::string& name) { return members()[name]; }
  JsonNode& emplace_back() { return entries().emplace_back(); }
  size_t size() const { return is_list() ? entries().size() : members().size(); }
};

struct JsonProblem {
  size_t offset;
  std::string key;  // of the value at hand, dotted: "data.train.0"; "" for the root
  std::string message;
};

struct LocatedJson {
  static constexpr size_t kMostProblems = 50;
  JsonNode root;                      // undefined content if there are problems
  std::vector<JsonProblem> problems;  // empty: valid. After a syntax error the rest of the text is not looked at
  size_t more_problems = 0;           // that are not listed
};

// Positions are offsets in the text plus `base`, so that those of several texts can be told apart; they must fit.
LocatedJson parse_located_json(std::string_view text, uint32_t base = 0);

// Returns the scalar that starts at the offset of a valid text.
nlohmann::json json_scalar_at(std::string_view text, size_t offset);

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
