#include "text/bpe_trainer.h"

#include <algorithm>
#include <queue>
#include <set>
#include <vector>

#include "mantissa/base/text.h"
#include "text/bpe_model.h"

namespace mantissa {

Json tokenizer_file(const TokenizerParts& parts) {
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", parts.added_tokens},
          {"normalizer", nullptr},
          {"pre_tokenizer", parts.pre_tokenizer},
          {"post_processor", nullptr},
          {"decoder", parts.decoder},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"vocab", parts.vocab},
            {"merges", parts.merges}}}};
}

Json byte_level_part() { return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}}; }

namespace {

constexpr const char* kTrainedPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

Json pretokenizer_json() {
  const Json split = {{"type", "Split"}, {"pattern", {{"Regex", kTrainedPattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", Json::Entries{split, byte_level_part()}}};
}

// The pairs of a corpus of distinct words, and what becomes of them when one is merged.
class PairCounts {
 public:
  explicit PairCounts(const std::unordered_map<std::string, int64_t>& words) {
    std::vector<std::pair<std::string, int64_t>> sorted(words.begin(), words.end());
    std::ranges::sort(sorted);  // so that nothing depends on the order of a hash table
    for (const auto& [word, count] : sorted) {
      std::vector<int32_t> symbols;
      for (const char byte : word) symbols.push_back(static_cast<uint8_t>(byte));
      words_.push_back({std::move(symbols), count});
      add_counts(words_.size() - 1, 1);
      for (size_t i = 0; i + 1 < word.size(); ++i) add_word({words_.back().symbols[i], words_.back().symbols[i + 1]}, words_.size() - 1);
    }
    for (const auto& [pair, count] : counts_) queue_.push({count, pair});
  }

  using Pair = std::pair<int32_t, int32_t>;
  // Returns the most frequent pair; none: no pair occurs twice.
  std::optional<Pair> most_frequent() {
    while (!queue_.empty()) {
      const Candidate top = queue_.top();
      queue_.pop();
      const int64_t now = counts_[top.pair];
      if (now < 2) continue;
      if (now == top.count) return top.pair;
      queue_.push({now, top.pair});  // it was counted before others were merged
    }
    return std::nullopt;
  }

  void merge(Pair pair, int32_t into) {
    std::set<Pair> made;
    const std::vector<size_t> where = std::exchange(words_with_[pair], {});
    for (const size_t word : where) {
      std::vector<int32_t> merged = merged_in(words_[word].symbols, pair, into);
      if (merged.size() == words_[word].symbols.size()) continue;  // another merge took the pair apart
      add_counts(word, -1);
      words_[word].symbols = std::move(merged);
      add_counts(word, 1);
      const std::vector<int32_t>& symbols = words_[word].symbols;
      for (size_t i = 0; i + 1 < symbols.size(); ++i) {
        if (symbols[i] != into && symbols[i + 1] != into) continue;  // it was there before, and has the word
        made.insert({symbols[i], symbols[i + 1]});
        add_word({symbols[i], symbols[i + 1]}, word);
      }
    }
    for (const Pair& one : made) queue_.push({counts_[one], one});
  }

 private:
  struct Word {
    std::vector<int32_t> symbols;
    int64_t count;
  };
  struct Candidate {
    int64_t count;
    Pair pair;
    bool operator<(const Candidate& other) const { return count != other.count ? count < other.count : pair > other.pair; }
  };
  struct HashOfPair {
    size_t operator()(const Pair& pair) const {
      return (static_cast<size_t>(pair.first) << 32 | static_cast<uint32_t>(pair.second)) * size_t{0x9E3779B97F4A7C15};
    }
  };

  void add_counts(size_t word, int64_t sign) {
    const auto& [symbols, count] = words_[word];
    for (size_t i = 0; i + 1 < symbols.size(); ++i) counts_[{symbols[i], symbols[i + 1]}] += sign * count;
  }

  void add_word(const Pair& pair, size_t word) {
    std::vector<size_t>& in = words_with_[pair];
    if (in.empty() || in.back() != word) in.push_back(word);
  }

  static std::vector<int32_t> merged_in(const std::vector<int32_t>& symbols, Pair pair, int32_t into) {
    std::vector<int32_t> out;
    for (size_t i = 0; i < symbols.size(); ++i) {
      const bool found = i + 1 < symbols.size() && symbols[i] == pair.first && symbols[i + 1] == pair.second;
      out.push_back(found ? into : symbols[i]);
      if (found) ++i;
    }
    return out;
  }

  std::vector<Word> words_;
  std::unordered_map<Pair, int64_t, HashOfPair> counts_;
  std::unordered_map<Pair, std::vector<size_t>, HashOfPair> words_with_;  // words that have the pair, or had it
  std::priority_queue<Candidate> queue_;
};

}  // namespace

// Part of the text at hand that is not yet cut.
struct BpeTrainer::Text {
  Pretokenizer pretokenizer = Pretokenizer::from(JsonReader(json, "the tokenizer"));
  Pretokenizer::Cutter cutter{pretokenizer};
  Utf8Decoder utf8;
  std::string pending;
  size_t enough = kWindow;

  static constexpr size_t kWindow = size_t{1} << 20;
  static inline const Json json = pretokenizer_json();
};

BpeTrainer::BpeTrainer() : text_(std::make_unique<Text>()) {}
BpeTrainer::~BpeTrainer() = default;

void BpeTrainer::add(std::string_view part, const TextOrigin& origin) {
  for (size_t i = 0; i < part.size(); ++i)
    require(text_->utf8.feed(static_cast<uint8_t>(part[i])) != Utf8Decoder::Status::invalid, origin.code, origin.name,
            ": not UTF-8 at byte ", origin.offset + static_cast<int64_t>(i));
  text_->pending += part;
  if (text_->pending.size() >= text_->enough) count(true);
}

void BpeTrainer::end_text(const TextOrigin& origin) {
  require(text_->utf8.between_characters(), origin.code, origin.name, ": ends inside a UTF-8 character");
  count(false);
}

void BpeTrainer::count(bool goes_on) {
  TextPieces pieces;
  const std::string_view whole = std::string_view(text_->pending).substr(0, whole_characters(text_->pending));
  const size_t cut = text_->cutter.cut(whole, 0, goes_on, pieces);
  text_->pending.erase(0, cut);
  text_->enough = std::max(Text::kWindow, 2 * text_->pending.size());
  for (size_t i = 0; i < pieces.count(); ++i) ++words_[std::string(pieces.piece(i))];
}

std::string BpeTrainer::train(int64_t vocab_size, std::vector<AddedToken> added) const {
  added.insert(added.begin(), {.content = kDefaultEndToken, .special = true});
  const int64_t fewest = kFewestTokens - 1 + std::ssize(added), merged = vocab_size - std::ssize(added);
  require(vocab_size >= fewest, ExitCode::usage, "a vocabulary of bytes has at least ", fewest, " tokens, got ", vocab_size);
  std::vector<std::string> bytes;  // bytes that each token stands for
  for (int byte = 0; byte < 256; ++byte) bytes.emplace_back(1, static_cast<char>(byte));
  PairCounts pairs(words_);
  Json::Entries merges;
  while (std::ssize(bytes) < merged) {
    const std::optional<PairCounts::Pair> pair = pairs.most_frequent();
    if (!pair) break;
    const std::string &left = bytes[static_cast<size_t>(pair->first)], &right = bytes[static_cast<size_t>(pair->second)];
    merges.emplace_back(text(letters_of_bytes(left), ' ', letters_of_bytes(right)));
    pairs.merge(*pair, static_cast<int32_t>(bytes.size()));
    bytes.push_back(left + right);
  }
  Json vocab = Json::Members(), at_end = Json::Entries();
  for (size_t id = 0; id < bytes.size(); ++id) vocab.add(letters_of_bytes(bytes[id]), id);
  for (size_t i = 0; i < added.size(); ++i) {
    vocab.add(added[i].content, bytes.size() + i);
    at_end.entries().push_back({{"id", bytes.size() + i},
                                {"content", added[i].content},
                                {"single_word", false},
                                {"lstrip", false},
                                {"rstrip", false},
                                {"normalized", false},
                                {"special", added[i].special}});
  }
  const Json file = tokenizer_file(
      {.vocab = vocab, .merges = merges, .added_tokens = at_end, .pre_tokenizer = pretokenizer_json(), .decoder = byte_level_part()});
  return file.dump(1, Json::Order::keys) + "\n";
}

}  // namespace mantissa
