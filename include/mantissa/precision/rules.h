// Matches rules to modules. A pattern is anchored: it must match the whole path.
//
//   *        any run of characters, dots included        {a,b}   one of the alternatives, not nested
//   ?        one character                                layers.{0,-1}.*, layers.-1.*   negative counts from the last layer
//   re:...   a PCRE2 regular expression for the whole path
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/precision/config.h"

namespace mantissa {

// Says what a module computes. Only linear, router and output have a GEMM. sinks: scores of attention, one for each head.
enum class ModuleKind { embedding, norm, linear, router, output, sinks };
constexpr bool has_gemm(ModuleKind kind) { return kind == ModuleKind::linear || kind == ModuleKind::router || kind == ModuleKind::output; }

// A pattern without braces. This and Pattern are in rules.cpp.
struct PatternAlternative {
  std::string written;                     // as it would stand alone
  std::string glob;                        // with layers counted from 0
  std::shared_ptr<const void> expression;  // the expression of re:, instead of the glob
  bool literal_end = false;                // the last segment is written out: no * or ?, in a regular expression no | anywhere either
  bool has_wildcards = false;              // else it is the path of one module
  std::vector<size_t> choices;             // the word that it has of each {a,b}, by where that begins in the pattern

  // Throws Error(usage) if a regular expression needs too many steps.
  bool matches(const std::string& path) const;
};

class Pattern {
 public:
  // `layers` is the number of layers of the model. Throws Error(usage) for an invalid pattern and for a layer that does not exist; the
  // message does not repeat the pattern.
  Pattern(const std::string& pattern, int64_t layers);

  // Behaves as PatternAlternative::matches().
  bool matches(const std::string& path) const;
  // Returns all combinations of the alternatives in braces; at least one.
  const std::vector<PatternAlternative>& alternatives() const { return alternatives_; }

 private:
  std::vector<PatternAlternative> alternatives_;
};

struct RuledModule {
  std::string path;
  ModuleKind kind;
};

// Returns the index of the first rule that matches each module, none if there is none. Any rule can match a linear; only alternatives with
// a literal end match the router and what has no GEMM; none matches the output projection. Reports at precision.rules.N.match: invalid
// patterns; rules that match nothing, or have a word in braces with which they match nothing (with the nearest that would); rules that can
// never be reached; and rules that name `output`, as an alternative or by a regular expression that matches it and not every module.
std::vector<std::optional<size_t>> assign_rules(const std::vector<RuleConfig>& rules, const std::vector<RuledModule>& modules,
                                                ConfigReport& report);

// Like assign_rules(), for rules of another list, whose patterns may match every module, the output projection included: "*" is all of
// them.
std::vector<std::optional<size_t>> assign_patterns(const std::vector<std::string>& patterns, const std::vector<RuledModule>& modules,
                                                   const std::string& list, ConfigReport& report);

// "layers.3.attn.qkv" -> "layers.*.attn.qkv"
std::string any_layer(const std::string& path);
// Joins one module in several layers, ascending: "layers.{0..2,5}.attn.qkv". A single path stays as it is.
std::string joined_path(const std::vector<std::string>& paths);

}  // namespace mantissa
