// Merges the sources of a configuration into one tree.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "mantissa/json/config.h"
#include "mantissa/json/json.h"

namespace mantissa::detail {

// Holds the sources of a configuration and the tree of their values. A position encodes source and offset: sources lie one after
// the other from position 1 on, in the order in which they apply, so positions also sort messages. Position 0 is that of a default.

// A file, or an argument of --set.
struct Source {
  std::string name = {};                        // the file; empty for an argument
  std::string text = {};                        // content of the file; an argument as given, "KEY=VALUE"
  std::string directory = {};                   // folder of the file
  size_t value = 0;                             // where the value of an argument begins
  uint32_t base = 0;                            // the position of the first byte of the text
  mutable std::optional<TextLines> lines = {};  // made when the first place is printed
};

class SourceTree {
 public:
  // Gives the source its positions. Throws Error(usage) when there are none left.
  Source& add(Source source);

  Json root;

  bool has_sources() const { return !sources_.empty(); }
  const Json* find(std::string_view key) const;  // none: nullptr
  ConfigPlace place(const Json& node) const;
  int64_t order(const Json& node) const;
  std::string argument(const Json& node) const;  // the whole of it, if the node is the value of an argument; else ""

 private:
  const Source* source_of(uint32_t position) const;
  std::string origin(uint32_t position) const;

  std::deque<Source> sources_;
};

// Adds the file, the further files and the --set arguments in their order to report.sources(). Reports and leaves out what cannot be read,
// parsed or applied. Returns false if a file is missing.
bool merge_sources(const ConfigSources& sources, ConfigReport& report);

// Splits a key into names, each short enough to be shown.
std::string shown_key(std::string_view key);

std::string dotted(const std::string& key, std::string_view name);

}  // namespace mantissa::detail
