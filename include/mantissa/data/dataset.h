// Concatenates token files, and views parts of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mantissa/data/token_file.h"

namespace mantissa {

// Returns the files that a path or glob names, sorted by bytes; of a Megatron pair the .bin; a prefix P stands for P.bin with P.idx. A name
// that exists is taken literally. Throws Error(usage) with the pattern and what the folder holds if nothing matches, or for a folder; with
// `key`, that of the pattern in a configuration, the message also says how to name another file.
std::vector<std::string> expand_paths(const std::string& pattern, const std::string& key = {});

// Concatenates files in the given order.
class TokenFiles {
 public:
  explicit TokenFiles(std::vector<TokenFile> files);

  int64_t tokens() const { return ends_.back(); }
  bool has_documents() const;  // every file knows its documents
  bool has_mask() const;       // some file may mark tokens untrained
  bool has_examples() const;   // JSONL of examples, in rows
  const std::vector<TokenFile>& files() const { return files_; }
  // Like TokenFile::read(), across files.
  void read(int64_t begin, int64_t count, int32_t* out, uint8_t* marks = nullptr) const;

 private:
  std::vector<TokenFile> files_;
  std::vector<int64_t> ends_;  // ends_[i]: tokens in files 0..i
};

// Views tokens [begin, end) of files that outlive it.
class TokenDataset {
 public:
  explicit TokenDataset(const TokenFiles& files) : TokenDataset(files, 0, files.tokens()) {}
  TokenDataset(const TokenFiles& files, int64_t begin, int64_t end);

  int64_t tokens() const { return end_ - begin_; }
  bool has_mask() const { return files_->has_mask(); }
  bool has_examples() const { return files_->has_examples(); }
  void read(int64_t begin, int64_t count, int32_t* out, uint8_t* marks = nullptr) const;

 private:
  const TokenFiles* files_;
  int64_t begin_, end_;
};

// Returns how many tokens are for training if the last `valid_fraction` of n tokens is held out: floor(n * (1 - f)).
int64_t training_tokens(int64_t n, double valid_fraction);

}  // namespace mantissa
