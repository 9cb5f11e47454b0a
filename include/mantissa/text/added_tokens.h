// The member "added_tokens" of a tokenizer.json: texts that are one token wherever they occur, special ones among them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "mantissa/json/json_fields.h"
#include "mantissa/text/normalizer.h"

namespace mantissa {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false;
  bool single_word = false;  // not beside a letter, digit or underscore
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and that behind it
  bool normalized = false;   // is looked for after normalization

  void fields(auto& v) {
    v("content", content);
    v("id", id, Limits{.min = 0, .max = int64_t{1} << 26});
    v("special", special, Limits{.later = true});
    v("single_word", single_word, Limits{.later = true});
    v("lstrip", lstrip, Limits{.later = true});
    v("rstrip", rstrip, Limits{.later = true});
    v("normalized", normalized, Limits{.later = true});
  }
};

// Says whether special tokens that a text spells are these tokens, or a text like any other.
enum class SpecialTokenText { tokens, text };

// Finds added tokens in a text: the first, the longest of those that begin there.
class AddedTokenMatcher {
 public:
  // Adds a token, which outlives the matcher, as it occurs in texts.
  void add(const AddedToken& token, const std::string& occurrence);

  // Two places in a text. They differ behind a token that takes white space along, in which the next one may begin.
  struct Start {
    size_t text = 0;   // no token takes white space before it along
    size_t token = 0;  // no token begins before it
    size_t space = 0;  // all between `token` and here is white space, and none follows; at most `token`: nothing is known
  };
  struct Found {
    size_t begin = 0, end = 0;          // with the white space that it takes along
    size_t own_end = 0;                 // without that
    const AddedToken* token = nullptr;  // none
  };
  // Returns the first that begins in text[from.token, limit), where `limit` is the end of the text or, if it goes on, at most decided().
  Found find(std::string_view text, Start from, size_t limit, SpecialTokenText special) const;
  // Returns how far the beginnings of tokens can be told in a text that goes on.
  size_t decided(std::string_view text) const { return text.size() - std::min(text.size(), longest_ > 0 ? longest_ - 1 : 0); }
  bool empty() const { return longest_ == 0; }

 private:
  struct Node {
    std::vector<std::pair<uint8_t, uint32_t>> next;  // by byte
    const AddedToken* token = nullptr;
  };
  Found match_at(std::string_view text, size_t at) const;

  std::vector<Node> nodes_ = {Node{}};
  std::array<bool, 256> first_{};  // bytes that some token begins with
  size_t longest_ = 0;
};

class AddedTokens {
 public:
  // Reads a list, or null. Throws Error(data) with the place of a token that is no text, or of an id that two tokens have.
  static AddedTokens from(const JsonReader& json, const Normalizer& normalizer);
  AddedTokens() = default;
  AddedTokens(AddedTokens&&) = default;  // not copied: it refers to its tokens
  AddedTokens& operator=(AddedTokens&&) = default;

  const std::vector<AddedToken>& tokens() const { return tokens_; }
  const AddedToken* find(int32_t id) const;
  const AddedToken* find(std::string_view content) const;
  const AddedTokenMatcher& before_normalization() const { return before_; }
  const AddedTokenMatcher& after_normalization() const { return after_; }
  // Returns true if they are found the same in parts of a text: none looks at the characters beside it.
  bool work_on_parts() const;

 private:
  std::vector<AddedToken> tokens_;
  std::unordered_map<int32_t, size_t> by_id_;
  std::unordered_map<std::string_view, size_t> by_content_;
  AddedTokenMatcher before_, after_;
};

}  // namespace mantissa
