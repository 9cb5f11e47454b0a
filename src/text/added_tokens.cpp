#include "mantissa/text/added_tokens.h"

#include <algorithm>

#include "text/characters.h"

namespace mantissa {
namespace {

size_t start_of_character_before(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (!begins_character(text[at])) --at;
  return at;
}

bool is_word_before(std::string_view text, size_t end) {
  if (end == 0) return false;
  size_t at = start_of_character_before(text, end);
  return is_word_character(next_character(text, at));
}

bool is_word_at(std::string_view text, size_t at) { return at < text.size() && is_word_character(next_character(text, at)); }

// Returns where the white space that ends here begins.
size_t start_of_space_before(std::string_view text, size_t from, size_t end) {
  while (end > from) {
    const size_t start = start_of_character_before(text, end);
    size_t at = start;
    if (!is_white_space(next_character(text, at))) break;
    end = start;
  }
  return end;
}

size_t end_of_space_after(std::string_view text, size_t at) {
  while (at < text.size()) {
    size_t next = at;
    if (!is_white_space(next_character(text, next))) break;
    at = next;
  }
  return at;
}

}  // namespace

void AddedTokenMatcher::add(const AddedToken& token, const std::string& occurrence) {
  if (occurrence.empty()) return;
  uint32_t node = 0;
  for (const char c : occurrence) {
    const auto byte = static_cast<uint8_t>(c);
    const auto found = std::ranges::find(nodes_[node].next, byte, &std::pair<uint8_t, uint32_t>::first);
    if (found != nodes_[node].next.end()) {
      node = found->second;
      continue;
    }
    const auto made = static_cast<uint32_t>(nodes_.size());
    nodes_[node].next.emplace_back(byte, made);
    nodes_.emplace_back();
    node = made;
  }
  nodes_[node].token = &token;
  first_[static_cast<uint8_t>(occurrence.front())] = true;
  longest_ = std::max(longest_, occurrence.size());
}

AddedTokenMatcher::Found AddedTokenMatcher::match_at(std::string_view text, size_t at) const {
  Found found;
  uint32_t node = 0;
  for (size_t end = at; end < text.size();) {
    const auto byte = static_cast<uint8_t>(text[end++]);
    const auto next = std::ranges::find(nodes_[node].next, byte, &std::pair<uint8_t, uint32_t>::first);
    if (next == nodes_[node].next.end()) break;
    node = next->second;
    if (nodes_[node].token != nullptr) found = {.begin = at, .end = end, .own_end = end, .token = nodes_[node].token};
  }
  return found;
}

AddedTokenMatcher::Found AddedTokenMatcher::find(std::string_view text, Start from, size_t limit, SpecialTokenText special) const {
  for (size_t at = from.token; at < limit; ++at) {
    if (!first_[static_cast<uint8_t>(text[at])]) continue;
    Found found = match_at(text, at);
    if (found.token == nullptr) continue;
    const AddedToken& token = *found.token;
    const bool is_text = token.special && special == SpecialTokenText::text;
    if (is_text || (token.single_word && (is_word_before(text, found.begin) || is_word_at(text, found.end)))) {
      at = found.end - 1;
      continue;
    }
    if (token.lstrip) found.begin = start_of_space_before(text, from.text, found.begin);
    if (token.rstrip) found.end = end_of_space_after(text, std::max(found.end, from.space));
    return found;
  }
  return {};
}

AddedTokens AddedTokens::from(const JsonReader& json, const Normalizer& normalizer) {
  AddedTokens out;
  if (json.value().is_null()) return out;
  for (const JsonReader& entry : json.entries()) {
    auto token = entry.as<AddedToken>();
    if (!token.content.empty()) out.tokens_.push_back(std::move(token));  // tokenizers passes over empty ones
  }
  for (size_t i = 0; i < out.tokens_.size(); ++i) {
    const AddedToken& token = out.tokens_[i];
    json.require(out.by_id_.emplace(token.id, i).second, "two tokens have the id ", token.id);
    json.require(out.by_content_.emplace(token.content, i).second, "\"", shortened(token.content), "\" is there twice");
    if (token.normalized)
      out.after_.add(token, normalizer.apply(token.content));
    else
      out.before_.add(token, token.content);
  }
  return out;
}

const AddedToken* AddedTokens::find(int32_t id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &tokens_[found->second];
}

const AddedToken* AddedTokens::find(std::string_view content) const {
  const auto found = by_content_.find(content);
  return found == by_content_.end() ? nullptr : &tokens_[found->second];
}

bool AddedTokens::work_on_parts() const {
  return std::ranges::none_of(tokens_, [](const AddedToken& token) { return token.single_word || token.lstrip || token.rstrip; });
}

}  // namespace mantissa
