// Converts text to token ids and back. There are three kinds: `byte` (256 ids, the byte values), `char` (one id per distinct Unicode
// character of the training data, in order of code points, as nanoGPT numbers them) and `bpe` (a tokenizer.json of Hugging Face). Only the
// last has special tokens; with the others an end-of-document id comes from data.eod_id.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "mantissa/data/data_config.h"
#include "text/bpe_tokenizer.h"

namespace mantissa {

class InputFile;

// The files of a tokenizer of kind bpe, as they came.
struct BpeFiles {
  std::string tokenizer;  // tokenizer.json
  std::string config;     // tokenizer_config.json, which names the end token; "": there is none
};

// Counts texts that spell what the tokenizer puts before or after each text, so that it is there twice.
struct RepeatedTokens {
  int64_t begins = 0, ends = 0;

  void add(const RepeatedTokens& more) { begins += more.begins, ends += more.ends; }
};

// Return whether ids begin or end with all of some others; false if there are no others.
bool begins_with(std::span<const int32_t> ids, std::span<const int32_t> others);
bool ends_with(std::span<const int32_t> ids, std::span<const int32_t> others);

class Tokenizer {
 public:
  static Tokenizer bytes();
  // Throws Error(data) unless strictly ascending Unicode scalar values, at least one.
  static Tokenizer characters(std::vector<char32_t> ascending);
  // Collects the distinct characters of the files. Throws Error(data), with the position, where one is not UTF-8.
  static Tokenizer characters_of(std::span<const InputFile> files, const Progressed& progressed = {});

  // Throws Error(data) that begins with `name` for a tokenizer.json that is damaged or not supported (bpe_tokenizer.h).
  static Tokenizer bpe(BpeFiles files, const std::string& name);
  // Reads a tokenizer.json, or that of a folder. Throws Error(usage) if there is none.
  static Tokenizer from_path(const std::string& path);

  // Write and read {"type": "byte"}, {"type": "char", "characters": [10, 32, ...]} (code points by id), or {"type": "bpe", "xxh64": ...}
  // with the hash of tokenizer.json, which is not read back. from_json throws Error(data) with `name`.
  std::string to_json() const;
  static Tokenizer from_json(std::string_view json, const std::string& name);

  // Reads nanoGPT's meta.pkl as JSON: {"itos": {"0": "\n", "1": " ", ...}, ...}, ids in order of code points. Throws Error(data) with
  // `name`.
  static Tokenizer from_nanogpt_meta(std::string_view json, const std::string& name);

  TokenizerKind kind() const { return kind_; }
  int64_t size() const;                                        // ids are 0 .. size()-1
  const BpeFiles* files() const;                               // null unless of kind bpe
  std::optional<int32_t> end_token() const;                    // the one that tokenizer_config.json names
  std::optional<int32_t> id_of(std::string_view token) const;  // id in the vocabulary of kind bpe, of "<|im_start|>" for example
  // Ids that stand before and after a text as the model of kind bpe expects it: beginning and end of sequence.
  std::span<const int32_t> before_text() const;
  std::span<const int32_t> after_text() const;

  // Throws Error(origin.code) naming the character and its byte position if it is not in the vocabulary, or where the text is not UTF-8.
  // special: of kind bpe, whether "<|endoftext|>" in the text is that token.
  std::vector<int32_t> encode(std::string_view text, const TextOrigin& origin = {},
                              SpecialTokenText special = SpecialTokenText::tokens) const;
  // Returns before_text() and the ids of the text: what a model continues.
  std::vector<int32_t> encode_prompt(std::string_view text, const TextOrigin& origin) const;
  // Returns whether the text of such a prompt begins with before_text(), too.
  bool begins_twice(std::span<const int32_t> prompt) const;

  // Returns bytes of UTF-8. An id without a token (a vocabulary larger than the tokenizer's) becomes U+FFFD; of kind bpe it is passed over,
  // as are special tokens.
  std::string decode(std::span<const int32_t> ids) const;
  // Returns true if the last of the ids name bytes whose text may become another with the next id (BpeTokenizer).
  bool ends_in_bytes(std::span<const int32_t> ids) const;

 private:
  friend class DocumentEncoder;
  struct Bpe;
  explicit Tokenizer(TokenizerKind kind) : kind_(kind) {}

  TokenizerKind kind_;
  std::shared_ptr<const Bpe> bpe_;
  std::vector<char32_t> characters_;  // ascending; the index is the id
  std::vector<int32_t> id_of_;        // by code point up to the largest; -1: none
};

// Decodes the tokens that continue a text, as they come: what a token adds to a text may depend on those before it.
class TokenStream {
 public:
  TokenStream(const Tokenizer& tokenizer, std::vector<int32_t> prompt)
      : tokenizer_(&tokenizer), ids_(std::move(prompt)), read_(ids_.size()) {}

  // Returns the text that the tokens so far add. Kind bpe holds back a character that is not whole, and tokens that name bytes until one
  // follows that names none, because the decoder takes such a run as a whole. Kind byte gives each byte at once.
  std::string add(int32_t id);
  // Returns what is left of it, with U+FFFD for a character that did not become whole.
  std::string rest();

 private:
  const Tokenizer* tokenizer_;
  std::vector<int32_t> ids_;  // from a place where the text was whole
  size_t read_;               // so many of them are in the returned text
};

// Returns what tokens add to the text of a prompt.
std::string continuation(const Tokenizer& tokenizer, const std::vector<int32_t>& prompt, std::span<const int32_t> ids);

// Encodes documents one after the other, without holding them whole where the tokenizer allows it (bpe_tokenizer.h).
class DocumentEncoder {
 public:
  // Takes the ids of a document in order, and says when it has ended; possibly long after add(), but not after flush().
  struct Sink {
    std::function<void(std::span<const int32_t>)> ids;
    std::function<void()> end_of_document;
  };
  DocumentEncoder(const Tokenizer& tokenizer, Sink sink);  // the tokenizer must outlive it
  ~DocumentEncoder();

  // Adds a part of a document, which may end anywhere, also inside a character. Throws as Tokenizer::encode() does; origin.offset is that
  // of the part.
  void add(std::string_view part, const TextOrigin& origin);
  void end_document(const TextOrigin& origin);
  void flush();
  const RepeatedTokens& repeated() const { return repeated_; }  // counts over the documents that have ended

 private:
  void add_ids(std::span<const int32_t> ids);
  void finish_document();

  const Tokenizer* tokenizer_;
  Sink sink_;
  RepeatedTokens repeated_;
  std::vector<int32_t> first_, last_;      // ids of a document, as many as are put before and after it
  std::unique_ptr<StreamEncoder> stream_;  // null unless of kind bpe
  std::string carried_;                    // kind char: a character that the end of a part cut off
  bool within_ = false;                    // a document
};

// A tokenizer that lies in no file of its own.
struct SavedTokenizer {
  Tokenizer tokenizer;
  std::string from;  // path of the checkpoint, or of the folder that holds it
};

// Tokens after which a model has said all.

// Returns the end tokens that a model learned from this data: the one that data.append_eod appends, the end of an answer of
// data.chat_template, and the end token of the tokenizer, as far as they are there. tokenizer: none if the data was tokens.
std::vector<int32_t> learned_end_tokens(const DataConfig& config, const std::optional<Tokenizer>& tokenizer);

// Returns the learned end tokens that this data taught, whatever the model knew before: all but the end token of a tokenizer that nothing
// appended.
std::vector<int32_t> taught_end_tokens(const DataConfig& config, const std::optional<Tokenizer>& tokenizer);

}  // namespace mantissa
