#include "text/characters.h"

#include <algorithm>
#include <map>

#include "text/jinja.h"
#include "text/unicode_tables.inc"

namespace mantissa {
namespace {

// General categories, in the order of scripts/unicode_tables.py. Letters and marks come first.
constexpr std::array<std::string_view, 30> kCategoryNames = {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl",
                                                             "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc",
                                                             "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co", "Cn"};
constexpr uint8_t kMe = 7, kNd = 8, kNl = 9, kNo = 10, kPc = 11;
static_assert(kCategoryNames[kMe] == "Me" && kCategoryNames[kNd] == "Nd" && kCategoryNames[kNo] == "No" && kCategoryNames[kPc] == "Pc");

// Symbols that are alphabetic: circled and squared letters.
constexpr std::array<CodePointRange, 4> kAlphabeticSymbols = {
    {{0x24B6, 0x24E9}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}}};

template <class Ranges>
bool is_within(const Ranges& ranges, char32_t character) {
  return std::any_of(ranges.begin(), ranges.end(),
                     [&](const CodePointRange& one) { return character >= one.first && character <= one.last; });
}

uint8_t category_of(char32_t character) {
  static const std::vector<uint8_t> kUnpacked = [] {
    std::vector<uint8_t> out(kCodePoints);
    for (size_t i = 0; i < std::size(kCategoryRuns); ++i) {
      const size_t end = i + 1 < std::size(kCategoryRuns) ? kCategoryRuns[i + 1] >> 8 : kCodePoints;
      std::fill(out.begin() + (kCategoryRuns[i] >> 8), out.begin() + static_cast<std::ptrdiff_t>(end),
                static_cast<uint8_t>(kCategoryRuns[i] & 0xFF));
    }
    return out;
  }();
  return kUnpacked[character];
}

}  // namespace

const CodePoints& white_space() {
  static const CodePoints kRanges = {{0x09, 0x0D},     {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
                                     {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};
  return kRanges;
}

bool is_white_space(char32_t character) { return is_within(white_space(), character); }

bool is_numeric(char32_t character) {
  const uint8_t category = category_of(character);
  return category >= kNd && category <= kNo;
}

bool is_punctuation(char32_t character) {
  static constexpr std::array<CodePointRange, 4> kAscii = {{{'!', '/'}, {':', '@'}, {'[', '`'}, {'{', '~'}}};
  const auto* const after = std::upper_bound(std::begin(kPunctuationRuns), std::end(kPunctuationRuns), character << 8 | 0xFF);
  return is_within(kAscii, character) || (*(after - 1) & 0xFF) != 0;
}

bool is_word_character(char32_t character) {
  constexpr char32_t kNonJoiner = 0x200C, kJoiner = 0x200D;
  const uint8_t category = category_of(character);
  return category <= kMe || category == kNd || category == kNl || category == kPc || is_within(kAlphabeticSymbols, character) ||
         character == kNonJoiner || character == kJoiner;
}

char32_t lower_case(char32_t character) {
  size_t first = 0, end = std::size(kLowerCase) / 2;  // pairs
  while (first < end) {
    const size_t middle = (first + end) / 2;
    if (kLowerCase[2 * middle] == character) return kLowerCase[2 * middle + 1];
    if (kLowerCase[2 * middle] < character)
      first = middle + 1;
    else
      end = middle;
  }
  return character;
}

bool is_python_space(char32_t character) { return (character >= 0x1C && character <= 0x1F) || is_white_space(character); }

size_t python_spaces_before(std::string_view text) {
  Utf8Decoder decoder;
  size_t end = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const Utf8Decoder::Status status = decoder.feed(static_cast<uint8_t>(text[i]));
    if (status == Utf8Decoder::Status::more) continue;
    if (status == Utf8Decoder::Status::invalid || !is_python_space(decoder.character())) break;
    end = i + 1;
  }
  return end;
}

std::string_view stripped(std::string_view text, const std::function<bool(char32_t)>& drops, bool left, bool right) {
  size_t first = text.size(), last = 0;
  for_each_character(text, [&](char32_t character, size_t begin, size_t end) {
    if (drops(character)) return;
    first = std::min(first, begin);
    last = end;
  });
  if (last == 0) return {};
  return text.substr(left ? first : 0, (right ? last : text.size()) - (left ? first : 0));
}

std::string_view python_stripped(std::string_view text) { return stripped(text, is_python_space); }

CodePoints united(CodePoints ranges) {
  std::ranges::sort(ranges);
  CodePoints out;
  for (const CodePointRange& one : ranges) {
    if (!out.empty() && one.first <= out.back().last + 1)
      out.back().last = std::max(out.back().last, one.last);
    else
      out.push_back(one);
  }
  return out;
}

CodePoints others(const CodePoints& points) {
  CodePoints out;
  char32_t next = 0;
  for (const CodePointRange& one : points) {
    if (one.first > next) out.push_back({next, one.first - 1});
    next = one.last + 1;
  }
  if (next < kCodePoints) out.push_back({next, kCodePoints - 1});
  return out;
}

bool is_among(const CodePoints& points, char32_t character) {
  const auto after = std::ranges::upper_bound(points, character, {}, &CodePointRange::first);
  return after != points.begin() && character <= std::prev(after)->last;
}

std::optional<CodePoints> code_points_of(std::string_view category) {
  if (std::ranges::none_of(kCategoryNames, [&](std::string_view name) { return name == category || name.substr(0, 1) == category; }))
    return std::nullopt;
  CodePoints out;
  for (size_t i = 0; i < std::size(kCategoryRuns); ++i) {
    const char32_t end = i + 1 < std::size(kCategoryRuns) ? kCategoryRuns[i + 1] >> 8 : kCodePoints;
    if (kCategoryNames[kCategoryRuns[i] & 0xFF].starts_with(category)) out.push_back({kCategoryRuns[i] >> 8, end - 1});
  }
  return united(std::move(out));
}

CodePoints word_characters() {
  CodePoints out = {{0xB2, 0xB3}, {0xB9, 0xB9}, {0xBC, 0xBE}};
  out.insert(out.end(), kAlphabeticSymbols.begin(), kAlphabeticSymbols.end());
  for (const char* const category : {"L", "M", "Nd", "Nl", "Pc"}) {
    const CodePoints points = *code_points_of(category);
    out.insert(out.end(), points.begin(), points.end());
  }
  return united(std::move(out));
}

std::optional<CharacterClasses> CharacterClasses::dividing(std::span<const CodePoints> sets) {
  Partition partition = {{.first = 0, .id = 0}};
  size_t classes = 1;
  for (const CodePoints& set : sets) {
    partition = refined(partition, set, classes);
    if (classes > kMost) return std::nullopt;
  }
  return CharacterClasses(partition, classes);
}

// Divides each class into what is among the set and what is not, and counts the classes anew.
CharacterClasses::Partition CharacterClasses::refined(const Partition& partition, const CodePoints& set, size_t& classes) {
  std::map<std::pair<size_t, bool>, size_t> ids;
  Partition out;
  const auto add = [&](char32_t first, size_t old_id, bool among) {
    const size_t id = ids.try_emplace({old_id, among}, ids.size()).first->second;
    if (out.empty() || out.back().id != id) out.push_back({.first = first, .id = id});
  };
  auto range = set.begin();
  for (size_t i = 0; i < partition.size(); ++i) {
    const char32_t end = i + 1 < partition.size() ? partition[i + 1].first : kCodePoints;
    for (char32_t at = partition[i].first; at < end;) {
      while (range != set.end() && range->last < at) ++range;
      const bool among = range != set.end() && range->first <= at;
      add(at, partition[i].id, among);
      at = range == set.end() ? end : std::min<char32_t>(end, among ? range->last + 1 : range->first);
    }
  }
  classes = ids.size();
  return out;
}

CharacterClasses::CharacterClasses(const Partition& partition, size_t classes) : members_(classes), page_of_(kCodePoints / kPage) {
  for (const Interval& interval : partition) members_[interval.id] = interval.first;
  std::vector<std::optional<uint16_t>> uniform(classes);  // pages of one class
  size_t i = 0;
  for (size_t page = 0; page < page_of_.size(); ++page) {
    const auto first = static_cast<char32_t>(page * kPage), end = static_cast<char32_t>(first + kPage);
    while (i + 1 < partition.size() && partition[i + 1].first <= first) ++i;
    const bool is_uniform = i + 1 == partition.size() || partition[i + 1].first >= end;
    if (is_uniform && uniform[partition[i].id]) {
      page_of_[page] = *uniform[partition[i].id];
      continue;
    }
    page_of_[page] = static_cast<uint16_t>(pages_.size());
    if (is_uniform) uniform[partition[i].id] = page_of_[page];
    std::array<uint8_t, kPage>& made = pages_.emplace_back();
    for (char32_t at = first; at < end; ++at) {
      if (i + 1 < partition.size() && partition[i + 1].first == at) ++i;
      made[at - first] = static_cast<uint8_t>(partition[i].id);
    }
  }
}

std::vector<uint8_t> CharacterClasses::classes_of(const CodePoints& set) const {
  std::vector<uint8_t> out;
  for (size_t id = 0; id < members_.size(); ++id) {
    if (is_among(set, members_[id])) out.push_back(static_cast<uint8_t>(id));
  }
  return out;
}

void CharacterClasses::classify(std::string_view text, std::string& classes) const {
  classes.resize(text.size());
  size_t count = 0;
  for (size_t at = 0; at < text.size();) classes[count++] = static_cast<char>(class_of(next_character(text, at)));
  classes.resize(count);
}

}  // namespace mantissa
