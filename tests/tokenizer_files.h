// Small tokenizer.json files: a vocabulary that tests can see through, with all that a member says changed by name.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "mantissa/json/json.h"
#include "text/bpe_tokenizer.h"

namespace mantissa::test {

// Tokens are the letters "abcdehlorw", some merges of theirs, and what `more` lists; ids in this order.
inline Json small_bpe(const std::vector<std::string>& more = {}) {
  Json vocab = Json::Members();
  int64_t id = 0;
  for (const char letter : std::string("abcdehlorw")) vocab.add(std::string(1, letter), id++);
  for (const char* const merged : {"he", "ll", "hell", "hello", "or", "wor", "ld"}) vocab.add(merged, id++);
  for (const std::string& token : more) vocab.add(token, id++);
  return {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::Entries{"h e", "l l", "he ll", "hell o", "o r", "w or", "l d"}}};
}

// A tokenizer of it without any other part.
inline Json small_tokenizer(const std::vector<std::string>& more = {}) {
  return {{"version", "1.0"},          {"added_tokens", Json::Entries()}, {"normalizer", nullptr},   {"pre_tokenizer", nullptr},
          {"post_processor", nullptr}, {"decoder", {{"type", "Fuse"}}},   {"model", small_bpe(more)}};
}

inline Json added_token(const std::string& content, int64_t id, bool special = true) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

// The file with tokens that no text has for the ids that its added tokens leave out, so that tests may give them round ids.
inline Json without_gaps(Json json) {
  constexpr int64_t kMostLeftOut = 1000;
  const Json vocab = json.get("model").get("vocab"), given = json.get("added_tokens");
  if (!given.is_list() || !vocab.is_object()) return json;
  auto next = static_cast<int64_t>(vocab.size());
  Json::Entries tokens;
  for (const Json& token : given.entries()) {
    const auto id = static_cast<int64_t>(token.get("id").number());
    const bool known = vocab.contains(token.get("content").string());
    for (; !known && next < id && id < next + kMostLeftOut; ++next) tokens.push_back(added_token(text("<unused ", next, ">"), next));
    tokens.push_back(token);
    next = std::max(next, id + 1);
  }
  json["added_tokens"] = tokens;
  return json;
}

inline BpeTokenizer made(const Json& json) { return BpeTokenizer::from_json(without_gaps(json).dump(), "t.json"); }

inline std::vector<int32_t> encode(const BpeTokenizer& tokenizer, std::string_view text,
                                   SpecialTokenText special = SpecialTokenText::tokens) {
  return tokenizer.encode(text, {}, special);
}

}  // namespace mantissa::test
