// Makes rows of tokens for the model. A dataset is its tokens in order; sample j is tokens [j*T, j*T + T], so neighbors share one token,
// but for examples, which lie whole in rows of T tokens: a sample is a row, in which none sees another, whatever DocumentOptions say.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/data/dataset.h"
#include "mantissa/data/sampler.h"

namespace mantissa {

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

  int64_t tokens() const;  // tokens of all datasets

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
