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

bool is_all_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

// Rust's char::to_lowercase: the full mapping, of which U+0130 is the only one of two characters.
void append_lowercase(char32_t character, std::string& out) {
  constexpr char32_t kDottedI = 0x130, kDotAbove = 0x307;
  if (character == kDottedI) {
    out += 'i';
    return append_utf8(kDotAbove, out);
  }
  append_utf8(lower_case(character), out);
}

// Returns where the first characters of a text end.
size_t end_of_characters(std::string_view text, std::ptrdiff_t count) {
  size_t end = 0;
  for (; count > 0 && end < text.size(); --count) next_character(text, end);
  return end;
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

// Runs an action whose Error lacks the place of what it is about.
template <class Action>
auto at_place(const JsonReader& json, Action&& action) {
  try {
    return action();
  } catch (const Error& error) {
    json.fail(error.what());
  }
}

}  // namespace

SplitPattern split_pattern(const JsonReader& json) {
  const bool regex = json.value().contains("Regex");
  json.require(regex || json.value().contains("String"), R"(must be {"String": ...} or {"Regex": ...}, got )", json.value().shown());
  const JsonReader member = json.at(regex ? "Regex" : "String");
  const auto content = member.as<std::string>();
  return at_place(member, [&] { return regex ? SplitPattern::expression(content) : SplitPattern::literal(content); });
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
  if (!json.value().is_null()) add_steps(json, out.steps_);
  return out;
}

void Normalizer::add_steps(const JsonReader& json, std::vector<Step>& steps) {
  const auto type = json.at("type").as<std::string>();
  json.require(steps.size() < kMostTokenizerSteps, "has more than ", kMostTokenizerSteps, " steps");
  if (type == "Sequence") {
    for (const JsonReader& one : json.at("normalizers").entries()) add_steps(one, steps);
  } else if (type == "NFC" || type == "NFKC") {
    steps.emplace_back(Compose{.compatible = type == "NFKC"});
  } else if (type == "Lowercase") {
    steps.emplace_back(Lowercase{});
  } else if (type == "Prepend") {
    steps.emplace_back(Prepend{json.at("prepend").as<std::string>()});
  } else if (type == "Replace") {
    steps.emplace_back(Replace{split_pattern(json.at("pattern")), json.at("content").as<std::string>()});
  } else if (type == "Strip") {
    steps.emplace_back(Strip{.left = json.at("strip_left").as<bool>(), .right = json.at("strip_right").as<bool>()});
  } else {
    json.at("type").fail(
        text("the normalizer ", shortened(type), " is not supported (NFC, NFKC, Prepend, Replace, Lowercase, Strip, Sequence are)"));
  }
}

bool Normalizer::works_on_parts() const {
  return std::ranges::all_of(
      steps_, [](const Step& step) { return std::holds_alternative<Compose>(step) || std::holds_alternative<Lowercase>(step); });
}

std::string Normalizer::apply(std::string_view text) const {
  size_t of_first = 0;
  return apply(text, of_first);
}

std::string Normalizer::apply(std::string_view text, size_t& of_first) const {
  std::string out(text);
  for (const Step& step : steps_) {
    out = std::visit([&](const auto& one) { return applied(one, out, of_first); }, step);
    require(out.size() <= kMostGrowth * text.size() + kMostGrowth, ExitCode::data, "the normalizer makes more than ", kMostGrowth,
            " bytes of one");
  }
  return out;
}

std::string Normalizer::applied(const Compose& step, const std::string& text, size_t& of_first) {
  if (is_all_ascii(text)) return text;
  const NormalForm form = step.compatible ? NormalForm::compatible : NormalForm::composed;
  std::string out = in_normal_form(text, form);
  if (of_first > 0) {
    const std::string alone = in_normal_form(text.substr(0, of_first), form);
    of_first = end_of_characters(out, std::ranges::count_if(alone, begins_character));
  }
  return out;
}

std::string Normalizer::applied(const Lowercase&, const std::string& text, size_t& of_first) {
  const size_t first = std::exchange(of_first, 0);
  std::string out;
  for (size_t at = 0; at < text.size();) {
    append_lowercase(next_character(text, at), out);
    if (at <= first) of_first = out.size();
  }
  return out;
}

std::string Normalizer::applied(const Prepend& step, const std::string& text, size_t& of_first) {
  if (of_first > 0) of_first += step.text.size();
  return text.empty() ? text : step.text + text;
}

std::string Normalizer::applied(const Replace& step, const std::string& text, size_t& of_first) {
  PatternMatcher matcher(step.pattern);
  if (of_first > 0) of_first = of_first_after(matcher, step.content, text, of_first);
  return replaced(matcher, step.content, text);
}

std::string Normalizer::applied(const Strip& step, const std::string& text, size_t& of_first) {
  size_t begin = 0, end = 0;  // bounds of the text without white space at its ends
  bool found = false;
  for (size_t at = 0; at < text.size();) {
    const size_t first = at;
    if (is_white_space(next_character(text, at))) continue;
    if (!std::exchange(found, true)) begin = first;
    end = at;
  }
  if (!found) return step.left || step.right ? "" : text;
  begin = step.left ? begin : 0;
  end = step.right ? end : text.size();
  of_first = std::min(end, std::max(begin, of_first)) - begin;
  return text.substr(begin, end - begin);
}

}  // namespace mantissa
