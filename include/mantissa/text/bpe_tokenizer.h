// Text to token ids and back as a tokenizer.json of Hugging Face with a BPE model says (crate tokenizers 0.2x): added tokens, normalizer,
// pretokenizer, model, the tokens that a post-processor puts around a text, and the decoder.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/text/added_tokens.h"
#include "mantissa/text/bpe_model.h"
#include "mantissa/text/normalizer.h"
#include "mantissa/text/pretokenizer.h"
#include "mantissa/text/text_decoder.h"
#include "mantissa/text/text_origin.h"

namespace mantissa {

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
