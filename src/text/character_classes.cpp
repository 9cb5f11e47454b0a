#include "text/character_classes.h"

#include <algorithm>
#include <map>

namespace mantissa {

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
