// The tables of a tokenizer in a GGUF file, as llama.cpp reads them for byte pairs over bytes (tokenizer.ggml.model gpt2). llama.cpp knows
// a fixed number of expressions that cut texts, by name (tokenizer.ggml.pre); it normalizes nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hf/export_files.h"
#include "io/gguf_writer.h"

namespace mantissa {

// Sentences for the user of a file, each as "tokenizer.json: normalizer: llama.cpp ...".
struct GgufRemarks {
  std::vector<std::string> differences;  // llama.cpp computes otherwise than training, or cannot load: refused unless allowed
  std::vector<std::string> notes;        // it comes close
};

// Adds the tables, special tokens and the chat template; of a tokenizer that llama.cpp cannot read, and of a model without one, that there
// is none: llama.cpp then takes token ids alone. Throws Error(data) for files that are damaged, Error(usage) for a token beyond the
// vocabulary.
GgufRemarks add_gguf_tokenizer(const ExportFiles& files, int64_t vocab_size, GgufKeys& keys);

}  // namespace mantissa
