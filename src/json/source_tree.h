// Holds the sources of a configuration and the tree of their values. A position encodes source and offset: the texts lie one after the
// other from position 1 on, in the order in which they apply, so positions also sort messages. Position 0 is that of a default.
#pragma once

#include <cstdint>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "mantissa/json/config.h"
#include "mantissa/json/json.h"

namespace mantissa::detail {

// A file, or an argument of --set.
struct Source {
  std::string name = {};                        // of the file; empty for an argument
  std::string text = {};                        // of the file; an argument as given, "KEY=VALUE"
  std::string directory = {};                   // of the file
  size_t value = 0;                             // where the value of an argument begins
  bool plain = false;                           // that value is text and not JSON
  uint32_t base = 0;                            // the position of the first byte of the text
  mutable std::optional<TextLines> lines = {};  // made when the first place is printed
};

class SourceTree {
 public:
  // Gives the source its positions. Throws Error(usage) when there are none left.
  Source& add(Source source);

  JsonNode root;

  const JsonNode* find(std::string_view key) const;  // none: nullptr
  ConfigPlace place(const JsonNode& node) const;
  int64_t order(const JsonNode& node) const;
  nlohmann::json scalar(const JsonNode& node) const;
  std::string argument(const JsonNode& node) const;  // the whole of it, if the node is the value of an argument; else ""
  std::string shown(const JsonNode& node) const;     // the value as JSON, shortened

 private:
  const Source* source_of(uint32_t position) const;
  std::string origin(uint32_t position) const;
  void write(const JsonNode& node, std::string& out) const;

  std::deque<Source> sources_;
};

}  // namespace mantissa::detail
