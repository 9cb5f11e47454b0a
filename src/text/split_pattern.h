// A regular expression of a tokenizer, matched by PCRE2. PCRE2 sees no characters but classes of them, one byte each (characters.h):
// the tables of characters.h alone decide which are letters, digits or white space.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace mantissa {

class SplitPattern {
 public:
  // Takes an expression written for Oniguruma. Throws Error(data) that begins with the construct for those that are not supported
  // (pattern_syntax.h), and with PCRE2's reason for what is no expression; and, as literal() does, for more than 16 KiB.
  static SplitPattern expression(std::string_view written);
  static SplitPattern literal(std::string_view text);

  const std::string& written() const { return written_; }
  size_t characters_before() const;  // characters before a match at which the expression may look

 private:
  friend class PatternMatcher;
  struct Compiled;
  explicit SplitPattern(std::string written) : written_(std::move(written)) {}

  std::string written_;
  std::shared_ptr<const Compiled> compiled_;
};

struct PatternMatch {
  enum class Kind { match, none, undecided };  // undecided: it depends on what follows the text
  Kind kind = Kind::none;
  size_t begin = 0, end = 0;  // a match, which is never empty
};

// Finds the matches of one pattern, which must outlive it, in texts that are UTF-8. Each thread has its own.
class PatternMatcher {
 public:
  explicit PatternMatcher(const SplitPattern& pattern);
  ~PatternMatcher();
  PatternMatcher(PatternMatcher&&) noexcept;
  PatternMatcher& operator=(PatternMatcher&&) = delete;

  // Sets the text whose matches next() returns, which must outlive that.
  void search(std::string_view text);
  // Returns the first match behind the last one. Where the text goes on, a match that the continuation may change is undecided. Throws
  // Error(data) where the expression takes too many steps.
  PatternMatch next(bool text_goes_on = false);

 private:
  struct Search;
  const SplitPattern* pattern_;
  std::unique_ptr<Search> search_;
};

}  // namespace mantissa
