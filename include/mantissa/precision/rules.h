// Which modules a rule means. A pattern is anchored: it must match the whole path.
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

// What a module computes. Only linear, router and output have a GEMM.
enum class ModuleKind { embedding, norm, linear, router, output };

class Pattern {
 public:
  // `layers` is the number of layers of the model. Throws Error(usage) for a pattern that is no pattern and for a layer that does not
  // exist; the message does not repeat the pattern.
  Pattern(const std::string& pattern, int64_t layers);

  // Throws Error(usage) if a regular expression needs too many steps.
  bool matches(const std::string& path) const;
  // The last segment is written out, without any of * ? { }.
  bool has_literal_end() const { return literal_end_; }
  // No segment has a * or ?: the pattern lists its modules.
  bool lists_modules() const { return lists_modules_; }

 private:
  std::vector<std::string> globs_;          // the alternatives, without braces
  std::shared_ptr<const void> expression_;  // of re:
  bool literal_end_ = false, lists_modules_ = false;
};

struct RuledModule {
  std::string path;
  ModuleKind kind;
};

// The index of the first rule that matches each module, none if there is none. Linears are matched by any rule; embeddings, norms and the
// router by rules with a literal end; the output projection by none. Reports at precision.rules.N.match: patterns that are none, rules that
// match nothing (with the nearest that would), that can never be reached, and that name `output`.
std::vector<std::optional<size_t>> assign_rules(const std::vector<RuleConfig>& rules, const std::vector<RuledModule>& modules,
                                                ConfigReport& report);

// "layers.3.attn.qkv" -> "layers.*.attn.qkv"
std::string any_layer(const std::string& path);
// One module in several layers, ascending: "layers.{0..2,5}.attn.qkv". A single path stays as it is.
std::string joined_path(const std::vector<std::string>& paths);

}  // namespace mantissa
