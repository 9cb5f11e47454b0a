#include "text/normalizer.h"

#include <algorithm>
#include <span>
#include <unordered_map>
#include <utility>

#include "mantissa/base/text.h"
#include "text/characters.h"
#include "text/unicode_tables.inc"

namespace mantissa {
namespace {

// A text is cut before characters that neither change nor join what stands before them; only pieces of more than one character are worked
// on.

// Hangul syllables are computed: the first, and the first jamo of each kind, of which the last kind counts none as its first.
constexpr char32_t kSyllables = 0xAC00, kLeading = 0x1100, kVowels = 0x1161, kTrailing = 0x11A7;
constexpr char32_t kLeadingCount = 19, kVowelCount = 21, kTrailingCount = 28, kSyllableCount = kLeadingCount * kVowelCount * kTrailingCount;

bool is_within(char32_t character, char32_t first, char32_t count) { return character >= first && character - first < count; }

class NormalForms {
 public:
  static const NormalForms& tables() {
    static const NormalForms kTables;
    return kTables;
  }

  // Returns true if the character stays as it is, whatever stands before it, and begins a piece of its own.
  bool stands_alone(char32_t character, NormalForm form) const { return (joins_[character] & bit(form)) == 0; }

  void append_normalized(std::string_view text, NormalForm form, std::string& out) const {
    std::vector<char32_t> characters;
    for (size_t at = 0; at < text.size();) decompose(next_character(text, at), form, characters);
    order(characters);
    compose(characters);
    for (const char32_t character : characters) append_utf8(character, out);
  }

 private:
  struct Decomposition {
    bool compatible;
    std::span<const uint32_t> characters;
  };

  NormalForms() : combining_(kCodePoints), joins_(kCodePoints) {
    for (size_t i = 0; i < std::size(kCombiningRuns); ++i) {
      const size_t first = kCombiningRuns[i] >> 8, end = i + 1 < std::size(kCombiningRuns) ? kCombiningRuns[i + 1] >> 8 : kCodePoints;
      std::fill(combining_.begin() + static_cast<std::ptrdiff_t>(first), combining_.begin() + static_cast<std::ptrdiff_t>(end),
                static_cast<uint8_t>(kCombiningRuns[i] & 0xFF));
    }
    for (size_t i = 0; i < std::size(kDecompositions);) i = read_decomposition(i);
    for (size_t c = 0; c < kCodePoints; ++c) joins_[c] = combining_[c] != 0 ? kBoth : 0;
    for (const auto& [pair, composite] : composites_) joins_[pair & UINT32_MAX] = kBoth;
    std::fill_n(joins_.begin() + kVowels, kVowelCount, kBoth);
    std::fill_n(joins_.begin() + kTrailing + 1, kTrailingCount - 1, kBoth);
    for (const auto& [character, decomposition] : decompositions_) {
      for (const NormalForm form : {NormalForm::composed, NormalForm::compatible})
        if (changes(character, form)) joins_[character] |= bit(form);
    }
  }

  static constexpr uint8_t kBoth = 3;
  static uint8_t bit(NormalForm form) { return form == NormalForm::composed ? 1 : 2; }
  static uint64_t pair_of(char32_t first, char32_t second) { return static_cast<uint64_t>(first) << 32 | second; }

  // An entry of kDecompositions (scripts/unicode_tables.py). Returns where the next begins.
  size_t read_decomposition(size_t i) {
    constexpr uint32_t kCount = 31, kCompatible = 32, kComposes = 64;
    const uint32_t head = kDecompositions[i++];
    const std::span<const uint32_t> characters(kDecompositions + i, head & kCount);
    decompositions_[head >> 8] = {.compatible = (head & kCompatible) != 0, .characters = characters};
    if ((head & kComposes) != 0) composites_[pair_of(characters[0], characters[1])] = head >> 8;
    return i + characters.size();
  }

  // Returns true if a character becomes others. No composite begins with a character that joins what stands before it.
  bool changes(char32_t character, NormalForm form) const {
    std::vector<char32_t> characters;
    decompose(character, form, characters);
    order(characters);
    compose(characters);
    return characters != std::vector{character};
  }

  void decompose(char32_t character, NormalForm form, std::vector<char32_t>& out) const {
    if (is_within(character, kSyllables, kSyllableCount)) {
      const char32_t index = character - kSyllables, trailing = index % kTrailingCount;
      out.push_back(kLeading + index / (kVowelCount * kTrailingCount));
      out.push_back(kVowels + index / kTrailingCount % kVowelCount);
      if (trailing != 0) out.push_back(kTrailing + trailing);
      return;
    }
    const auto found = decompositions_.find(character);
    if (found == decompositions_.end() || (found->second.compatible && form == NormalForm::composed)) return out.push_back(character);
    for (const uint32_t part : found->second.characters) decompose(part, form, out);
  }

  // Sorts marks that follow each other by their classes.
  void order(std::vector<char32_t>& characters) const {
    const auto starts = [this](char32_t character) { return combining_[character] == 0; };
    for (auto at = characters.begin(); at != characters.end();) {
      const auto marks = std::find_if_not(at, characters.end(), starts);
      at = std::find_if(marks, characters.end(), starts);
      std::stable_sort(marks, at, [this](char32_t a, char32_t b) { return combining_[a] < combining_[b]; });
    }
  }

  void compose(std::vector<char32_t>& characters) const {
    size_t count = 0, starter = SIZE_MAX;  // kept characters; index of the last starter among them, SIZE_MAX: none yet
    for (const char32_t character : characters) {
      const uint8_t combining = combining_[character];
      // A mark is blocked by one of its class or above between it and the starter, a starter by any.
      const bool reaches = starter != SIZE_MAX && (count - 1 == starter || combining_[characters[count - 1]] < combining);
      const char32_t composite = reaches ? composite_of(characters[starter], character) : 0;
      if (composite != 0) {
        characters[starter] = composite;
        continue;
      }
      if (combining == 0) starter = count;
      characters[count++] = character;
    }
    characters.resize(count);
  }

  // Returns the composite of two characters; 0: they have none.
  char32_t composite_of(char32_t first, char32_t second) const {
    if (is_within(first, kLeading, kLeadingCount) && is_within(second, kVowels, kVowelCount))
      return kSyllables + ((first - kLeading) * kVowelCount + (second - kVowels)) * kTrailingCount;
    const bool open = is_within(first, kSyllables, kSyllableCount) && (first - kSyllables) % kTrailingCount == 0;
    if (open && is_within(second, kTrailing + 1, kTrailingCount - 1)) return first + (second - kTrailing);
    const auto found = composites_.find(pair_of(first, second));
    return found == composites_.end() ? 0 : found->second;
  }

  std::vector<uint8_t> combining_, joins_;  // by code point: the class; bits of the forms in which it does not stand alone
  std::unordered_map<char32_t, Decomposition> decompositions_;
  std::unordered_map<uint64_t, char32_t> composites_;  // by the pair
};

}  // namespace

std::string in_normal_form(std::string_view text, NormalForm form) {
  const NormalForms& tables = NormalForms::tables();
  std::string out;
  size_t done = 0, piece = 0;  // end of what is appended; begin of the piece at hand
  bool joined = false;         // the piece has more than its first character, or that one changes
  const auto end_piece = [&](size_t end) {
    if (joined) {
      out += text.substr(done, piece - done);
      tables.append_normalized(text.substr(piece, end - piece), form, out);
      done = end;
    }
    joined = false;
    piece = end;
  };
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    if (tables.stands_alone(next_character(text, at), form))
      end_piece(begin);
    else
      joined = true;
  }
  end_piece(text.size());
  out += text.substr(done);
  return out;
}

namespace {

constexpr size_t kMostGrowth = 1024;  // growth of a text, so that a file of a few replacements does not take all memory

std::string compose_text(const std::string& text, NormalForm form, size_t& of_first) {
  if (std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; })) return text;
  std::string out = in_normal_form(text, form);
  if (of_first > 0) {
    const std::string alone = in_normal_form(text.substr(0, of_first), form);
    auto count = std::ranges::count_if(alone, begins_character);
    for (of_first = 0; count > 0 && of_first < out.size(); --count) next_character(out, of_first);
  }
  return out;
}

// Rust's char::to_lowercase: the full mapping, of which U+0130 is the only one of two characters.
std::string lower_text(const std::string& text, size_t& of_first) {
  constexpr char32_t kDottedI = 0x130, kDotAbove = 0x307;
  const size_t first = std::exchange(of_first, 0);
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const char32_t character = next_character(text, at);
    append_utf8(character == kDottedI ? U'i' : lower_case(character), out);
    if (character == kDottedI) append_utf8(kDotAbove, out);
    if (at <= first) of_first = out.size();
  }
  return out;
}

std::string strip_text(const std::string& text, bool left, bool right, size_t& of_first) {
  size_t begin = 0, end = 0;  // bounds of the text without white space at its ends
  bool found = false;
  for (size_t at = 0; at < text.size();) {
    const size_t first = at;
    if (is_white_space(next_character(text, at))) continue;
    if (!std::exchange(found, true)) begin = first;
    end = at;
  }
  if (!found) return left || right ? "" : text;
  begin = left ? begin : 0;
  end = right ? end : text.size();
  of_first = std::min(end, std::max(begin, of_first)) - begin;
  return text.substr(begin, end - begin);
}

// Returns how many bytes of the result of replaced() come from the first character, if so many of the text do. A replacement of several
// characters comes from the last of them, as tokenizers has it.
size_t of_first_after(PatternMatcher& matcher, std::string_view content, std::string_view text, size_t of_first) {
  size_t done = 0, out = 0;
  matcher.search(text);
  for (;;) {
    const PatternMatch match = matcher.next();
    if (match.kind == PatternMatch::Kind::none || match.begin >= of_first) return out + of_first - done;
    out += match.begin - done;
    if (match.end > of_first) return out;
    out += content.size();
    done = match.end;
  }
}

}  // namespace

SplitPattern split_pattern(const JsonReader& json) {
  const bool regex = json.value().contains("Regex");
  json.require(regex || json.value().contains("String"), R"(must be {"String": ...} or {"Regex": ...}, got )", json.value().shown());
  const JsonReader member = json.at(regex ? "Regex" : "String");
  const auto content = member.as<std::string>();
  try {
    return regex ? SplitPattern::expression(content) : SplitPattern::literal(content);
  } catch (const Error& error) {  // it lacks the place
    member.fail(error.what());
  }
}

std::string replaced(PatternMatcher& matcher, std::string_view content, std::string_view text) {
  std::string out;
  size_t done = 0;
  matcher.search(text);
  while (done < text.size()) {
    const PatternMatch match = matcher.next();
    if (match.kind == PatternMatch::Kind::none) break;
    out += text.substr(done, match.begin - done);
    out += content;
    done = match.end;
  }
  out += text.substr(done);
  return out;
}

Normalizer Normalizer::from(const JsonReader& json) {
  Normalizer out;
  if (!json.value().is_null()) out.add_steps(json);
  return out;
}

void Normalizer::add_steps(const JsonReader& json) {
  const auto type = json.at("type").as<std::string>();
  json.require(steps_.size() < kMostTokenizerSteps, "has more than ", kMostTokenizerSteps, " steps");
  if (type == "Sequence") {
    for (const JsonReader& one : json.at("normalizers").entries()) add_steps(one);
  } else if (type == "NFC" || type == "NFKC") {
    const NormalForm form = type == "NFKC" ? NormalForm::compatible : NormalForm::composed;
    steps_.emplace_back([form](const std::string& text, size_t& of_first) { return compose_text(text, form, of_first); });
  } else if (type == "Lowercase") {
    steps_.emplace_back(lower_text);
  } else if (type == "Prepend") {
    steps_.emplace_back([prefix = json.at("prepend").as<std::string>()](const std::string& text, size_t& of_first) {
      if (of_first > 0) of_first += prefix.size();
      return text.empty() ? text : prefix + text;
    });
  } else if (type == "Replace") {
    steps_.emplace_back([pattern = split_pattern(json.at("pattern")), content = json.at("content").as<std::string>()](
                            const std::string& text, size_t& of_first) {
      PatternMatcher matcher(pattern);
      if (of_first > 0) of_first = of_first_after(matcher, content, text, of_first);
      return replaced(matcher, content, text);
    });
  } else if (type == "Strip") {
    const bool left = json.at("strip_left").as<bool>(), right = json.at("strip_right").as<bool>();
    steps_.emplace_back([left, right](const std::string& text, size_t& of_first) { return strip_text(text, left, right, of_first); });
  } else {
    json.at("type").fail(
        text("the normalizer ", shortened(type), " is not supported (NFC, NFKC, Prepend, Replace, Lowercase, Strip, Sequence are)"));
  }
  works_on_parts_ = works_on_parts_ && (type == "Sequence" || type == "NFC" || type == "NFKC" || type == "Lowercase");
}

std::string Normalizer::apply(std::string_view text) const {
  size_t of_first = 0;
  return apply(text, of_first);
}

std::string Normalizer::apply(std::string_view text, size_t& of_first) const {
  std::string out(text);
  for (const Step& step : steps_) {
    out = step(out, of_first);
    require(out.size() <= kMostGrowth * text.size() + kMostGrowth, ExitCode::data, "the normalizer makes more than ", kMostGrowth,
            " bytes out of one");
  }
  return out;
}

}  // namespace mantissa
