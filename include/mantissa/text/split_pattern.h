// A regular expression of a tokenizer, matched by PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace mantissa {

class SplitPattern {
 public:
  // Takes an expression written for Oniguruma. Throws Error(data) that begins with the construct for those that are not supported
  // (pattern_syntax.h), and with PCRE2's reason for what is no expression.
  static SplitPattern expression(std::string_view written);
  static SplitPattern literal(std::string_view text);

  const std::string& written() const { return written_; }
  size_t characters_before() const;  // of a match, at which the expression may look

 private:
  friend class PatternMatcher;
  SplitPattern(std::string written, const std::string& translated);

  std::string written_;
  std::shared_ptr<const void> code_;
};

struct PatternMatch {
  enum class Kind { match, none, undecided };  // undecided: it depends on what follows the text
  Kind kind = Kind::none;
  size_t begin = 0, end = 0;  // of a match, which is never empty
};

// Finds the matches of one pattern, which must outlive it, in texts that are UTF-8. Each thread has its own.
class PatternMatcher {
 public:
  explicit PatternMatcher(const SplitPattern& pattern);
  ~PatternMatcher();
  PatternMatcher(PatternMatcher&&) noexcept;
  PatternMatcher& operator=(PatternMatcher&&) = delete;

  // Returns the first match at or after `from`. Where the text goes on, one that depends on how is undecided. Throws Error(data) where the
  // expression takes too many steps.
  PatternMatch find(std::string_view text, size_t from, bool text_goes_on) const;

 private:
  struct Memory;
  const SplitPattern* pattern_;
  std::unique_ptr<Memory> memory_;
};

}  // namespace mantissa
