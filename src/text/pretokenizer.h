// The pretokenizer of a tokenizer.json: cuts a text into the pieces that the model encodes one by one.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "json/json_fields.h"
#include "text/split_pattern.h"

namespace mantissa {

struct TextPieces;

// Fate of the matches of a pattern: left out, pieces of their own, or one piece with the match or the text beside them.
enum class MatchedText { removed, isolated, merged_with_previous, merged_with_next, contiguous };
constexpr auto choices(MatchedText) {
  return std::array{Choice{"Removed", MatchedText::removed}, Choice{"Isolated", MatchedText::isolated},
                    Choice{"MergedWithPrevious", MatchedText::merged_with_previous},
                    Choice{"MergedWithNext", MatchedText::merged_with_next}, Choice{"Contiguous", MatchedText::contiguous}};
}

class Pretokenizer {
 public:
  Pretokenizer() = default;
  // Reads null, ByteLevel, Split, Digits, Punctuation, Metaspace or a Sequence of them. Throws Error(data) with the place of any other.
  static Pretokenizer from(const JsonReader& json);

  bool has_byte_level() const { return byte_level_; }  // pieces are bytes to the model, not characters
  // Returns true if a text may be cut before its end is known.
  bool works_on_parts() const;
  // Returns true if a piece is another one where it begins a text: Metaspace with prepend_scheme first.
  bool asks_for_first() const;

  class Cutter;

 private:
  struct Split {
    SplitPattern pattern;
    MatchedText matched;
    bool inverted;
  };
  enum class Property { numeric, punctuation };
  struct SplitByProperty {
    Property property;
    MatchedText matched;
  };
  struct PrefixSpace {};  // ByteLevel's: a space before each piece that does not begin with one
  struct Metaspace {
    enum class Prepends { always, first, never };
    std::string replacement;
    Prepends prepends;
    bool splits;
  };
  using Step = std::variant<Split, SplitByProperty, PrefixSpace, Metaspace>;
  void add_steps(const JsonReader& json);

  std::vector<Step> steps_;
  bool byte_level_ = false;
};

// Cuts texts for one thread; the pretokenizer must outlive it.
class Pretokenizer::Cutter {
 public:
  explicit Cutter(const Pretokenizer& pretokenizer);

  // Appends the pieces of a text that has ended. Where it goes on (only if works_on_parts()), appends those that no continuation changes,
  // and returns how many bytes of the text they take; the rest is to be given again with more text. of_first: how many bytes, at its
  // beginning, come from the first character that the text had before it was normalized; only asks_for_first() needs it.
  size_t cut(std::string_view text, size_t of_first, bool text_goes_on, TextPieces& out);

 private:
  void apply(size_t step, std::string_view piece, size_t of_first, TextPieces& out);
  struct Where {
    std::optional<PatternMatcher>* matcher;  // the matcher of the step
    size_t of_first;
  };
  static void cut_piece(const Split& split, const Where& where, std::string_view piece, TextPieces& out);
  static void cut_piece(const SplitByProperty& split, const Where& where, std::string_view piece, TextPieces& out);
  static void cut_piece(const PrefixSpace& step, const Where& where, std::string_view piece, TextPieces& out);
  static void cut_piece(const Metaspace& metaspace, const Where& where, std::string_view piece, TextPieces& out);

  const Pretokenizer* own_;
  std::vector<std::optional<PatternMatcher>> matchers_;  // by step
};

// A text cut into pieces that follow each other.
struct TextPieces {
  std::string text;
  std::vector<size_t> ends;  // ends of the pieces in bytes, ascending; none is empty
  std::vector<size_t>
      of_first;  // by piece: how many of its bytes, at its beginning, come from the first character of the text; later pieces: none

  size_t count() const { return ends.size(); }
  std::string_view piece(size_t i) const {
    const size_t begin = i == 0 ? 0 : ends[i - 1];
    return std::string_view(text).substr(begin, ends[i] - begin);
  }
  size_t of_first_in(size_t i) const { return i < of_first.size() ? of_first[i] : 0; }
  void clear() { text.clear(), ends.clear(), of_first.clear(); }
  void add(std::string_view piece, size_t bytes_of_first = 0) {
    if (piece.empty()) return;
    if (bytes_of_first > 0) {
      of_first.resize(ends.size());
      of_first.push_back(bytes_of_first);
    }
    text += piece;
    ends.push_back(text.size());
  }
};

}  // namespace mantissa
