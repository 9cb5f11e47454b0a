// Text to token ids and back as a tokenizer.json of Hugging Face with a BPE model says (crate tokenizers 0.2x): added tokens, normalizer,
// pretokenizer, model, the tokens that a post-processor puts around a text, and the decoder.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "json/json_fields.h"
#include "mantissa/base/error.h"
#include "text/bpe_model.h"
#include "text/normalizer.h"
#include "text/pretokenizer.h"

namespace mantissa {

// Name and exit code of errors about a text: a prompt is usage, a file is data.
struct TextOrigin {
  std::string name = "the text";
  ExitCode code = ExitCode::usage;
  int64_t offset = 0;  // position of the text's first byte in its source
};

// The member "added_tokens" of a tokenizer.json: texts that are one token wherever they occur, special ones among them.

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

// The decoder of a tokenizer.json: makes a text of tokens.

class TextDecoder {
 public:
  TextDecoder() = default;
  // Reads null, ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip or a Sequence of them. Throws Error(data) with the place of any
  // other.
  static TextDecoder from(const JsonReader& json);

  // Returns UTF-8; bytes that are none become U+FFFD. Without a decoder, spaces stand between tokens, as tokenizers has it.
  std::string decode(std::vector<std::string> tokens) const;
  // Returns true if ByteFallback takes the token for a byte.
  bool takes_for_byte(std::string_view token) const;

 private:
  using Step = std::function<void(std::vector<std::string>& tokens)>;  // changes them
  void add_steps(const JsonReader& json);

  std::vector<Step> steps_;
  bool falls_back_to_bytes_ = false;
};

// Returns the text with U+FFFD for what is no UTF-8: one for each longest beginning of a character, as Unicode recommends and Rust does.
std::string lossy_utf8(std::string_view bytes);

class BpeTokenizer {
 public:
  // Throws Error(data) that names the part of the file that is not supported or not valid. Truncation and padding, which the file states
  // for batches, are not used. An added token that model.vocab lacks has the id after those before it, as the package numbers them whatever
  // the file says: with another id, a model would be served with other ids than it was trained with.
  static BpeTokenizer from_json(std::string_view json, const std::string& source);
  BpeTokenizer(BpeTokenizer&&) = default;  // not copied: parts refer to each other
  BpeTokenizer& operator=(BpeTokenizer&&) = default;

  int64_t size() const;  // one more than the largest id, added tokens included
  // The id of a token as the file spells it: an added one, or one of the vocabulary.
  std::optional<int32_t> id_of(std::string_view token) const;
  // Ids that the post-processor puts before and after a text: beginning and end of sequence.
  std::span<const int32_t> before_text() const { return before_; }
  std::span<const int32_t> after_text() const { return after_; }

  // Returns the ids of a text, without those around it. Throws Error(origin.code) where it is not UTF-8.
  std::vector<int32_t> encode(std::string_view text, const TextOrigin& origin, SpecialTokenText special) const;
  // Returns UTF-8, without special tokens; ids that are no token are passed over.
  std::string decode(std::span<const int32_t> ids) const;
  // Returns true if the last id that decode() looks at names a byte ("<0x0A>"), which the next id may make a part of another character.
  bool ends_in_bytes(std::span<const int32_t> ids) const;

  // Returns true if a text may be encoded in parts (StreamEncoder): where a piece surely ends can be told before the text ends.
  bool works_on_parts() const;

 private:
  friend class StreamEncoder;
  BpeTokenizer() = default;
  void read_post_processor(const JsonReader& json);
  void read_template(const JsonReader& json);
  void put_around(const JsonReader& json, std::vector<int32_t> before, std::vector<int32_t> after);
  const std::string& shown_token(int32_t id) const;

  Normalizer normalizer_;
  Pretokenizer pretokenizer_;
  BpeModel model_;
  AddedTokens added_;
  TextDecoder decoder_;
  std::vector<int32_t> before_, after_;
};

// In stream_encoder.cpp. Encodes one text after the other, on all threads. It holds at most one window of text to encode, or one whole text
// if the tokenizer does not work on parts.
class StreamEncoder {
 public:
  static constexpr size_t kWindow = size_t{1} << 20;
  // Receives the ids of the text at hand, in order, and its end: possibly long after add(), but not after flush().
  struct Sink {
    std::function<void(std::span<const int32_t>)> ids;
    std::function<void()> end_of_text;
  };

  // The tokenizer must outlive it.
  StreamEncoder(const BpeTokenizer& tokenizer, Sink sink, SpecialTokenText special, size_t window = kWindow);
  ~StreamEncoder();

  // Adds a part of a text, which may end anywhere. Throws Error(origin.code) with the position where the bytes are not UTF-8; origin.offset
  // is that of the part.
  void add(std::string_view part, const TextOrigin& origin);
  void end_text(const TextOrigin& origin);
  // Everything that was added and ended has gone to the sink when this returns.
  void flush();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mantissa
