#include "text/bpe_model.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <utility>

#include "mantissa/base/text.h"
#include "text/characters.h"

namespace mantissa {
namespace {

// ByteLevel spells bytes with letters that can be printed: bytes 33 to 126, 161 to 172 and 174 to 255 with the characters of the same
// number, the other 68, in order, with those from U+0100 (GPT-2's bytes_to_unicode).

struct ByteLetters {
  std::array<char32_t, 256> letters{};
  std::array<int, 324> bytes{};  // by letter; -1: none

  constexpr ByteLetters() {
    bytes.fill(-1);
    char32_t other = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool is_printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      const char32_t letter = is_printable ? static_cast<char32_t>(byte) : other++;
      letters[static_cast<size_t>(byte)] = letter;
      bytes[letter] = byte;
    }
  }
};

constexpr ByteLetters kByteLetters;

}  // namespace

std::optional<std::string> bytes_of_letters(std::string_view spelled) {
  std::string out;
  for (size_t at = 0; at < spelled.size();) {
    const char32_t letter = next_character(spelled, at);
    if (letter >= kByteLetters.bytes.size() || kByteLetters.bytes[letter] < 0) return std::nullopt;
    out += static_cast<char>(kByteLetters.bytes[letter]);
  }
  return out;
}

std::string letters_of_bytes(std::string_view bytes) {
  std::string out;
  for (const char byte : bytes) append_utf8(kByteLetters.letters[static_cast<uint8_t>(byte)], out);
  return out;
}

namespace {

constexpr uint32_t kNoMerge = std::numeric_limits<uint32_t>::max();
constexpr size_t kFewSymbols = 64;                                  // up to so many are merged without a heap
constexpr size_t kLongestKnown = 48, kMostKnown = size_t{1} << 16;  // pieces that a cache holds

uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

}  // namespace

void BpeModel::MergeTable::reserve(size_t merges) { slots_.resize(std::bit_ceil(2 * merges + 2)); }

size_t BpeModel::MergeTable::slot_of(uint64_t pair) const {
  const uint64_t mixed = (pair ^ (pair >> 29)) * 0x9E3779B97F4A7C15ULL;
  size_t slot = (mixed >> 20) & (slots_.size() - 1);
  while (slots_[slot].pair != pair && slots_[slot].pair != UINT64_MAX) slot = (slot + 1) & (slots_.size() - 1);
  return slot;
}

void BpeModel::MergeTable::put(int32_t left, int32_t right, Merge merge) {
  const uint64_t pair = pair_of(left, right);
  slots_[slot_of(pair)] = {.pair = pair, .merge = merge};
}

const BpeModel::Merge* BpeModel::MergeTable::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  const Slot& slot = slots_[slot_of(pair)];
  return slot.pair == pair ? &slot.merge : nullptr;
}

BpeModel BpeModel::from(const JsonReader& json, bool byte_level) {
  // Files from before version 0.8 of tokenizers have no type; what tells a BPE is its merges.
  const std::string type = json.value().contains("type")     ? json.at("type").as<std::string>()
                           : json.value().contains("merges") ? "BPE"
                                                             : "?";
  json.require(type == "BPE", "the model ", shortened(type), " is not supported (BPE is)");
  BpeModel out;
  out.byte_level_ = byte_level;
  out.read_vocabulary(json.at("vocab"));
  out.read_options(json);
  out.read_merges(json.at("merges"));
  return out;
}

void BpeModel::read_vocabulary(const JsonReader& json) {
  json.require(json.value().is_object() && json.value().size() > 0, "must be an object of tokens and their ids");
  // An unused id between costs a few bytes, but ids that are mostly unused are no vocabulary.
  const Limits limits{.min = 0, .max = static_cast<double>(16 * json.value().size() + 65536)};
  std::vector<bool> taken;
  for (const auto& [token, value] : json.value().members()) {
    const auto id = static_cast<size_t>(json.at(token).as<int64_t>(limits));
    if (id >= tokens_.size()) tokens_.resize(id + 1), taken.resize(id + 1);
    json.require(!taken[id], "two tokens have the id ", id);
    taken[id] = true;
    tokens_[id] = token;
    spelled_.emplace(token, static_cast<int32_t>(id));
    // The text or the bytes that it stands for. One that no bytes spell stands for none: its own text never occurs in letters of bytes.
    ids_.emplace(byte_level_ ? bytes_of_letters(token).value_or("") : token, static_cast<int32_t>(id));
  }
}

void BpeModel::read_options(const JsonReader& json) {
  const Json& value = json.value();
  for (const char* const name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json& given = value.get(name);
    json.require(given.is_null() || (given.is_string() && given.string().empty()), name, " ", given.shown(), " is not supported");
  }
  const Json& dropout = value.get("dropout");
  json.require(dropout.is_null() || (dropout.is_number() && dropout.number() == 0.0), "dropout ", dropout.shown(), " is not supported");
  const auto flag = [&](const char* name) { return !value.get(name).is_null() && json.at(name).as<bool>(); };
  ignores_merges_ = flag("ignore_merges");
  fuses_unknown_ = flag("fuse_unk");
  if (!value.get("unk_token").is_null()) {
    const auto token = json.at("unk_token").as<std::string>();
    unknown_ = id_of(token);
    json.require(unknown_.has_value(), "unk_token \"", shortened(token), "\" is not in the vocabulary");
  }
  const bool has_bytes = flag("byte_fallback");
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  for (size_t byte = 0; byte < byte_ids_.size(); ++byte) {
    letter_ids_[byte] = byte_level_ ? id_of(letters_of_bytes(std::string(1, static_cast<char>(byte)))).value_or(-1) : -1;
    const std::string named = {'<', '0', 'x', kDigits[byte / 16], kDigits[byte % 16], '>'};
    byte_ids_[byte] = has_bytes ? id_of(named).value_or(-1) : -1;
  }
}

// Reads "a b", or ["a", "b"] since version 0.20 of tokenizers.
void BpeModel::read_merges(const JsonReader& json) {
  json.require(json.value().is_list(), "must be a list");
  merges_.reserve(json.value().size());
  uint32_t rank = 0;
  for (const Json& merge : json.value().entries()) {
    if (merge.is_list()) {
      json.require(merge.size() == 2 && merge.at(size_t{0}).is_string() && merge.at(1).is_string(), "entry ", rank,
                   " must have two tokens");
      add_merge(json, rank++, merge.at(size_t{0}).string(), merge.at(1).string());
      continue;
    }
    const std::string_view pair = merge.string();
    const size_t blank = pair.find(' ');
    json.require(blank != std::string_view::npos && pair.find(' ', blank + 1) == std::string_view::npos, "entry ", rank, " ", merge.shown(),
                 " must have two tokens and a space between them");
    add_merge(json, rank++, pair.substr(0, blank), pair.substr(blank + 1));
  }
}

void BpeModel::add_merge(const JsonReader& json, uint32_t rank, std::string_view left, std::string_view right) {
  const auto id = [&](std::string_view token) {
    const std::optional<int32_t> found = id_of(token);
    json.require(found.has_value(), "entry ", rank, ": \"", token, "\" is not in the vocabulary");
    return *found;
  };
  const int32_t first = id(left), second = id(right);
  merges_.put(first, second, {.rank = rank, .id = id(text(left, right))});
}

const std::string& BpeModel::token(int32_t id) const {
  static const std::string kNone;
  return id >= 0 && static_cast<size_t>(id) < tokens_.size() ? tokens_[static_cast<size_t>(id)] : kNone;
}

std::optional<int32_t> BpeModel::id_of(std::string_view spelled) const {
  const auto found = spelled_.find(spelled);
  return found == spelled_.end() ? std::nullopt : std::optional(found->second);
}

void BpeModel::encode(std::string_view piece, Cache& cache, std::vector<int32_t>& ids) const {
  const bool kept = piece.size() <= kLongestKnown;
  if (kept) {
    const auto known = cache.known_.find(piece);
    if (known != cache.known_.end()) {
      ids.insert(ids.end(), known->second.begin(), known->second.end());
      return;
    }
  }
  cache.symbols_.clear();
  if (const auto whole = ignores_merges_ ? ids_.find(piece) : ids_.end(); whole != ids_.end()) {
    cache.symbols_.push_back(whole->second);
  } else {
    split(piece, cache.symbols_);
    cache.symbols_.size() <= kFewSymbols ? merge_few(cache) : merge_many(cache);
  }
  ids.insert(ids.end(), cache.symbols_.begin(), cache.symbols_.end());
  if (kept && cache.known_.size() < kMostKnown) cache.known_.emplace(piece, cache.symbols_);
}

// Appends the symbols of a piece before any merge. An unknown token waits for the next character with a token of its own: those of bytes
// come before it, and fuse_unk looks past them, as in tokenizers.
void BpeModel::split(std::string_view piece, std::vector<int32_t>& symbols) const {
  bool unknown_waits = false;
  for (size_t at = 0; at < piece.size();) {
    const size_t begin = at;
    int32_t id = -1;
    if (byte_level_) {
      id = letter_ids_[static_cast<uint8_t>(piece[at++])];
    } else {
      next_character(piece, at);
      const auto found = ids_.find(piece.substr(begin, at - begin));
      if (found != ids_.end()) id = found->second;
    }
    if (id >= 0) {
      if (std::exchange(unknown_waits, false)) symbols.push_back(*unknown_);
      symbols.push_back(id);
      continue;
    }
    const std::string_view character = piece.substr(begin, at - begin);
    const std::string bytes = byte_level_ ? letters_of_bytes(character) : std::string(character);
    const auto id_of_byte = [this](char byte) { return byte_ids_[static_cast<uint8_t>(byte)]; };
    if (std::ranges::all_of(bytes, [&](char byte) { return id_of_byte(byte) >= 0; })) {
      std::ranges::transform(bytes, std::back_inserter(symbols), id_of_byte);
      continue;
    }
    if (!unknown_) continue;
    if (std::exchange(unknown_waits, true) && !fuses_unknown_) symbols.push_back(*unknown_);
  }
  if (unknown_waits) symbols.push_back(*unknown_);
}

// Looks at all pairs for each merge.
void BpeModel::merge_few(Cache& cache) const {
  std::vector<int32_t>& symbols = cache.symbols_;
  std::vector<Merge>& merges = cache.merges_;
  merges.assign(symbols.size(), {.rank = kNoMerge, .id = -1});
  const auto look_up = [&](size_t i) {
    const Merge* const found = i + 1 < symbols.size() ? merges_.find(symbols[i], symbols[i + 1]) : nullptr;
    merges[i] = found != nullptr ? *found : Merge{.rank = kNoMerge, .id = -1};
  };
  for (size_t i = 0; i < symbols.size(); ++i) look_up(i);
  while (symbols.size() > 1) {
    const auto least = std::ranges::min_element(merges, {}, &Merge::rank);
    if (least->rank == kNoMerge) return;
    const auto at = least - merges.begin();
    symbols[static_cast<size_t>(at)] = least->id;
    symbols.erase(symbols.begin() + at + 1);
    merges.erase(least + 1);
    look_up(static_cast<size_t>(at));
    if (at > 0) look_up(static_cast<size_t>(at) - 1);
  }
}

// Keeps the pairs in a heap, and the symbols in a list: in time n log n.
void BpeModel::merge_many(Cache& cache) const {
  std::vector<int32_t>& symbols = cache.symbols_;
  require(std::in_range<int32_t>(symbols.size()), ExitCode::data, "a text has ", symbols.size(),
          " symbols between two places where the tokenizer cuts");
  const auto count = static_cast<int32_t>(symbols.size());
  std::vector<int32_t>&next = cache.next_, &previous = cache.previous_;
  std::vector<uint64_t>& heap = cache.heap_;
  next.resize(symbols.size()), previous.resize(symbols.size()), heap.clear();
  const auto merge_at = [&](int32_t i) -> const Merge* {
    const int32_t right = next[static_cast<size_t>(i)];
    return right < count && symbols[static_cast<size_t>(i)] >= 0
               ? merges_.find(symbols[static_cast<size_t>(i)], symbols[static_cast<size_t>(right)])
               : nullptr;
  };
  const auto push = [&](int32_t i) {
    const Merge* const merge = merge_at(i);
    if (merge == nullptr) return;
    heap.push_back(static_cast<uint64_t>(merge->rank) << 32 | static_cast<uint32_t>(i));
    std::ranges::push_heap(heap, std::greater<>());
  };
  for (int32_t i = 0; i < count; ++i) next[static_cast<size_t>(i)] = i + 1, previous[static_cast<size_t>(i)] = i - 1;
  for (int32_t i = 0; i < count; ++i) push(i);
  while (!heap.empty()) {
    std::ranges::pop_heap(heap, std::greater<>());
    const uint64_t top = heap.back();
    heap.pop_back();
    const auto at = static_cast<int32_t>(top & UINT32_MAX);
    const Merge* const merge = merge_at(at);
    if (merge == nullptr || merge->rank != top >> 32) continue;  // one of the two has been merged since
    const auto left = static_cast<size_t>(at), right = static_cast<size_t>(next[left]);
    symbols[left] = merge->id;
    symbols[right] = -1;
    next[left] = next[right];
    if (next[left] < count) previous[static_cast<size_t>(next[left])] = at;
    push(at);
    if (previous[left] >= 0) push(previous[left]);
  }
  std::erase(symbols, -1);
}

}  // namespace mantissa
