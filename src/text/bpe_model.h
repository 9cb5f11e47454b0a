// Byte pair encoding (Sennrich et al. 2016) as tokenizers (Hugging Face) defines it: a piece starts as its characters, or bytes; as long as
// two neighbors have a merge, the pair with the lowest rank, and of such pairs the first, becomes one symbol.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "json/json_fields.h"

namespace mantissa {

class BpeModel {
 public:
  // Reads the member "model" of a tokenizer.json. byte_level: tokens are spelled with the 256 letters that ByteLevel has for bytes. Throws
  // Error(data) with the place of any other model, of options that no published BPE has (dropout, prefixes and suffixes of words), of
  // merges whose tokens are not in the vocabulary, and of an id that two tokens have.
  static BpeModel from(const JsonReader& json, bool byte_level);

  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }    // one more than the largest id
  int64_t count() const { return static_cast<int64_t>(spelled_.size()); }  // number of tokens
  // A token as the vocabulary spells it; "" for an id that has none.
  const std::string& token(int32_t id) const;
  std::optional<int32_t> id_of(std::string_view spelled) const;

  // Pieces that were encoded before, and memory that encode() uses. Each thread has its own.
  class Cache;
  // Appends the ids of a piece. A character, or the letter of a byte, without a token becomes its bytes, the unknown token, or nothing, as
  // the model says.
  void encode(std::string_view piece, Cache& cache, std::vector<int32_t>& ids) const;

 private:
  struct Merge {
    uint32_t rank;
    int32_t id;
  };
  struct HashOfView {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  using Ids = std::unordered_map<std::string, int32_t, HashOfView, std::equal_to<>>;
  // An open hash table: most pairs that encode() looks up have no merge.
  class MergeTable {
   public:
    void reserve(size_t merges);
    void put(int32_t left, int32_t right, Merge merge);
    const Merge* find(int32_t left, int32_t right) const;

   private:
    struct Slot {
      uint64_t pair = UINT64_MAX;
      Merge merge = {};
    };
    size_t slot_of(uint64_t pair) const;
    std::vector<Slot> slots_;
  };

  void read_vocabulary(const JsonReader& json);
  void read_options(const JsonReader& json);
  void read_merges(const JsonReader& json);
  void add_merge(const JsonReader& json, uint32_t rank, std::string_view left, std::string_view right);
  void split(std::string_view piece, std::vector<int32_t>& symbols) const;
  void merge_few(Cache& cache) const;
  void merge_many(Cache& cache) const;

  bool byte_level_ = false, ignores_merges_ = false, fuses_unknown_ = false;
  std::vector<std::string> tokens_;        // by id, as spelled
  Ids spelled_, ids_;                      // by spelling; by the text or the bytes it stands for
  std::array<int32_t, 256> letter_ids_{};  // by the byte that a letter stands for; -1: none. Without byte_level none is there
  std::array<int32_t, 256> byte_ids_{};    // ids of <0x00> to <0xFF>; -1: none. Without byte_fallback none is there
  std::optional<int32_t> unknown_;
  MergeTable merges_;
};

class BpeModel::Cache {
 public:
  Cache() = default;

 private:
  friend class BpeModel;
  std::unordered_map<std::string, std::vector<int32_t>, HashOfView, std::equal_to<>> known_;
  std::vector<int32_t> symbols_;
  std::vector<Merge> merges_;  // merge of each symbol with the next
  std::vector<int32_t> next_, previous_;
  std::vector<uint64_t> heap_;  // rank, then position
};

// In bpe_model.cpp. The bytes that a token spells with ByteLevel's letters; none: it has other characters.
std::optional<std::string> bytes_of_letters(std::string_view spelled);
// The letters of bytes.
std::string letters_of_bytes(std::string_view bytes);

}  // namespace mantissa
