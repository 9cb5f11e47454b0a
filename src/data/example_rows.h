// Packs examples whole into rows, each of which becomes a sample.
#pragma once

#include <map>
#include <span>

#include "data/token_layout.h"
#include "mantissa/data/example.h"

namespace mantissa {

class ExampleRows {
 public:
  // row_tokens 0: examples follow each other, and none is cut.
  ExampleRows(int64_t vocab_size, int64_t row_tokens) : row_tokens_(row_tokens) { layout_.type = type_in_memory(vocab_size); }

  // An example goes where it leaves the smallest gap, else into a new row. The end of one that is longer than a row is cut off.
  void add(const Example& example);

  // The rest of a row is a document of its own, of untrained tokens 0 that are padding.
  TokenLayout take();

 private:
  int64_t place(int64_t tokens);

  int64_t row_tokens_;
  TokenLayout layout_;
  std::multimap<int64_t, int64_t> gaps_;  // where a row goes on that is not full, by how much is left of it
};

}  // namespace mantissa
