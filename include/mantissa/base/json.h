// Strict JSON: UTF-8 without a byte order mark, no duplicate keys, no NaN or Inf, integers of at most 64 bits, at most 32 levels deep,
// nothing after the value. Memory is proportional to the text. Comments only where the reader asks for them.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/base/error.h"

namespace mantissa {

// For files that a program wrote. Throws Error(code) whose message starts with "source:line:column: ".
nlohmann::json parse_strict_json(std::string_view text, const std::string& source, ExitCode code = ExitCode::data);

// For files that people write: // and /* */ comments, and the place of everything.
struct JsonPlace {
  size_t key = 0;    // byte offset of the key; of the value for the root and for elements of a list
  size_t value = 0;  // byte offset of the value
};

struct JsonProblem {
  size_t offset;
  std::string pointer;  // JSON pointer of the value at hand, "" for the root
  std::string message;
};

struct LocatedJson {
  std::shared_ptr<const nlohmann::json> value;  // undefined content if there are problems, never null
  std::map<std::string, JsonPlace> places;      // by JSON pointer: "" is the root
  std::vector<JsonProblem> problems;            // empty: valid. After a syntax error the rest of the text is not looked at
};

LocatedJson parse_located_json(std::string_view text);

// The JSON pointer of a member or element below `parent` (RFC 6901: ~ and / are escaped).
std::string json_pointer(const std::string& parent, std::string_view name);

// "14:11": line and column from 1, in characters.
std::string line_and_column(std::string_view text, size_t offset);

}  // namespace mantissa
