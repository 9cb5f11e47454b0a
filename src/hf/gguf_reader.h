// A GGUF file as the folder from which such files are made: tensors with the names of the file (architecture_tensors.cpp has them), and
// what its keys say as config.json, generation_config.json, tokenizer.json, tokenizer_config.json and chat_template.jinja.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "hf/model_files.h"
#include "io/gguf_file.h"

namespace mantissa {

// Tensors of F32, BF16 and F16 are as in the file; MXFP4 is two tensors, U8 codes "X" [out, in / 2] and U8 scales "X (scales)"
// [out, in / 32], as other files have them; all others are F32, decoded as they are read (io/ggml_blocks.h).
class GgufModelFiles : public ModelFiles {
 public:
  // Throws Error(data) for a damaged file, Error(usage) for one of several files of a model, or one that is no model.
  explicit GgufModelFiles(const std::filesystem::path& path);

  std::string config() override;
  std::string config_source() const override;
  // tokenizer.json is absent, with a warning in the log, where gguf_tokenizer() throws Error(usage).
  std::optional<std::string> file(const std::string& name) override;
  const std::vector<SafetensorsEntry>& entries() override { return entries_; }
  void read(const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> out) override;
  std::optional<ExportFormat> format() override { return ExportFormat::gguf; }
  void require_unchanged() override { seen_.require_unchanged(); }

  const GgufFile& gguf() const { return file_; }

 private:
  enum class Part { values, codes, scales };
  struct Place {
    const GgufTensor* tensor;
    Part part;
  };
  void add_entries();
  std::vector<float> rope_factors() const;
  bool has_tied_output() const;

  UnchangedFiles seen_;
  GgufFile file_;
  std::vector<SafetensorsEntry> entries_;  // by name; `file` is the index of its place
  std::vector<Place> places_;
  std::optional<std::string> config_;
  std::optional<std::map<std::string, std::string>> texts_;  // all other files, by name
};

// Facts about the tensors of a file, which its keys do not tell.
struct GgufTensorFacts {
  bool tied = false;                     // there is no output projection, or it is the embedding
  bool mxfp4 = false;                    // some tensor has codes
  std::vector<float> rope_factors = {};  // rope_freqs.weight; empty: there is none
};

// Returns the config.json that a file's keys stand for. Throws Error(usage), naming the key, for a model that mantissa cannot compute and
// for keys of the architecture that it does not know; Error(data) for keys that are missing or wrong. In gguf_config.cpp.
std::string gguf_config(const GgufHeader& header, const GgufTensorFacts& facts);

// Returns whether the program that wrote an export of mantissa noted a difference of llama.cpp that begins so ("model.KEY:"); none: the
// file is another program's.
std::optional<bool> gguf_difference_noted(const GgufHeader& header, std::string_view what);

// Returns whether there is a tokenizer, in whatever form. In gguf_tokenizer.cpp, as are the next four.
bool has_gguf_tokenizer(const GgufHeader& header);

// Returns tokenizer.json and tokenizer_config.json. Throws Error(usage), naming the key, for a tokenizer that mantissa does not have;
// Error(data) for one that contradicts itself.
std::map<std::string, std::string> gguf_tokenizer(const GgufHeader& header);

// Returns the names of the ways to split texts, values of tokenizer.ggml.pre, that gguf_tokenizer() knows.
std::vector<std::string> gguf_pretokenizers();

// Returns the ids at which texts end: those of the end of a text, of a turn and of a message, without repetition.
std::vector<int64_t> gguf_end_tokens(const GgufHeader& header);

// Returns the tokenizer of a tokenizer.json, of a folder that holds one, or of a GGUF file. Throws what Tokenizer::from_path() and
// gguf_tokenizer() throw.
Tokenizer tokenizer_at(const std::string& path);

// Decodes all tensors. Returns their number. progressed is called after each chunk. Throws Error(data) that names the first value that is
// NaN or Inf.
int64_t read_all_of_gguf(const std::filesystem::path& path, const Progressed& progressed = {});

}  // namespace mantissa
