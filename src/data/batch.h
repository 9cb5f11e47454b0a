// Makes rows of tokens for the model. A dataset is its tokens in order; sample j is tokens [j*T, j*T + T], so neighbors share one token,
// but for examples, which lie whole in rows of T tokens: a sample is a row, in which none sees another, whatever DocumentOptions say.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/token_file.h"

namespace mantissa {

// Returns the files that a path or glob names, sorted by bytes; of a Megatron pair the .bin; a prefix P stands for P.bin with P.idx. A name
// that exists is taken literally. Throws Error(usage) with the pattern and what the folder holds if nothing matches, or for a folder; with
// `key`, that of the pattern in a configuration, the message also says how to name another file.
std::vector<std::string> expand_paths(const std::string& pattern, const std::string& key = {});

// Files one after the other, or a part of them. Copies share the files.
class TokenDataset {
 public:
  explicit TokenDataset(std::vector<TokenFile> files);
  TokenDataset part(int64_t begin, int64_t end) const;  // tokens [begin, end) of this one

  int64_t tokens() const { return end_ - begin_; }
  bool has_documents() const;  // every file knows its documents
  bool has_mask() const;       // some file may mark tokens untrained
  bool has_examples() const;   // JSONL of examples, in rows
  const std::vector<TokenFile>& files() const { return *files_; }
  // Like TokenFile::read(), across files.
  void read(int64_t begin, int64_t count, int32_t* out, uint8_t* marks = nullptr) const;

 private:
  std::shared_ptr<const std::vector<TokenFile>> files_;
  std::vector<int64_t> ends_;  // ends_[i]: tokens in files 0..i
  int64_t begin_ = 0, end_ = 0;
};

// Returns how many tokens are for training if the last `valid_fraction` of n tokens is held out: floor(n * (1 - f)).
int64_t training_tokens(int64_t n, double valid_fraction);

// Decides which sample comes when. The whole state is one counter (the number of samples drawn before), so a restart, another number of
// ranks or another global batch loses and repeats nothing: sample c of a run depends on (seed, sizes, weights, c) only.

// A keyed bijection of [0, size): an 8-round Feistel network over the next power of two, its round function Philox; a value outside is
// walked along its cycle until it is inside (Black and Rogaway 2002: fewer than two steps on average). O(1) memory.
class Permutation {
 public:
  Permutation(int64_t size, uint64_t seed, uint32_t dataset, uint64_t epoch);
  int64_t operator()(int64_t index) const;  // index in [0, size)

 private:
  uint64_t shuffle(uint64_t value) const;

  uint64_t size_, seed_, epoch_;
  uint32_t dataset_;
  int left_bits_, right_bits_;
};

// One sample of one dataset, in one pass over it.
struct SampleId {
  int32_t dataset = 0;
  int64_t epoch = 0;
  int64_t sample = 0;
  bool operator==(const SampleId&) const = default;
};

class Sampler {
 public:
  // samples[i] >= 1 of dataset i, weights[i] > 0 (normalized here).
  Sampler(std::vector<int64_t> samples, std::vector<double> weights, uint64_t seed);

  // Datasets are blended greedily, as Megatron does: draw n takes the dataset with the largest weight * max(n, 1) - taken, ties the lowest.
  // Going forward costs O(datasets) per draw, going back starts over: after a restart 10^8 draws are replayed in about a second. One
  // dataset: O(1).
  SampleId at(int64_t counter);

 private:
  int32_t next_dataset() const;

  std::vector<int64_t> samples_;
  std::vector<double> weights_;
  uint64_t seed_;
  int64_t drawn_ = 0;
  std::vector<int64_t> taken_;  // by dataset, after drawn_ draws
};

inline constexpr int32_t kNoTarget = -1;

struct Batch {
  int64_t sequences = 0, length = 0;  // B, T; every vector below is [B, T]
  std::vector<int32_t> tokens;
  std::vector<int32_t> targets;         // the next token; kNoTarget: takes no part in the loss
  std::vector<int32_t> positions;       // 0..T-1, or restarting at each document
  std::vector<int32_t> segment_starts;  // the first position of the row that position t may attend to; 0 without document_mask
  std::vector<int32_t> lengths = {};    // [B]: tokens of each row, behind which is padding; empty: there is none
  int64_t target_count = 0;             // targets that count
  bool all_count = false;               // all, in every batch of this data
  std::vector<SampleId> samples;        // [B]: which samples these are

  int64_t padding() const;  // how many tokens are padding
};

// Says what document boundaries do.
struct DocumentOptions {
  bool mask_eod_loss = false;       // no loss where the input is eod_id or the last token of a document
  bool reset_position_ids = false;  // positions restart at each document
  bool document_mask = false;       // attention stops at documents
  bool any() const { return mask_eod_loss || reset_position_ids || document_mask; }
};

class TrainData {
 public:
  // Throws Error(usage) if a dataset is shorter than one sample (T + 1 tokens, T of examples), Error(data) for one without trained tokens.
  TrainData(std::vector<TokenDataset> datasets, std::vector<double> weights, int64_t seq_len, uint64_t seed, DocumentOptions documents);

  // Returns samples counter .. counter + sequences - 1 of the run. Sample i of step s has the counter s * global_batch_size + i.
  Batch batch(int64_t counter, int64_t sequences);

  int64_t tokens() const;   // tokens of all datasets
  int64_t samples() const;  // samples of all datasets, each counted once

 private:
  std::vector<TokenDataset> datasets_;
  int64_t seq_len_;
  DocumentOptions documents_;
  Sampler sampler_;
  bool all_count_;
};

struct ValidationSet {
  std::string name;  // its path
  TokenDataset tokens;
};

class ValidationData {
 public:
  // Throws Error(usage) for a set of fewer than two tokens.
  ValidationData(std::vector<ValidationSet> sets, int64_t seq_len, DocumentOptions documents);

  int sets() const { return static_cast<int>(sets_.size()); }
  const std::string& name(int set) const { return sets_.at(static_cast<size_t>(set)).name; }
  // Counts the windows 0, 1, 2, ... in file order; the last may be short, so that each target counts once.
  int64_t windows(int set) const;
  // Returns windows [first, min(first + count, windows)). The rest of a short window's row has token 0 and no target.
  Batch batch(int set, int64_t first, int64_t count) const;

 private:
  std::vector<ValidationSet> sets_;
  int64_t seq_len_;
  DocumentOptions documents_;
};

}  // namespace mantissa
