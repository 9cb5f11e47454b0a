// The weights of a folder of Hugging Face's form, or of a GGUF file, which may be codes. run_config() and the functions about modules are
// in load_model.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_reader.h"
#include "hf/hugging_face.h"
#include "hf/model_files.h"
#include "hf/packing.h"
#include "io/safetensors.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

// Matrices as architectures store them, [in, out], and as parameters are, [out, in].

// Writes the transposed matrix of `rows` x `columns` elements, whose size is what the bytes give each.
inline void transpose(std::span<const std::byte> from, int64_t rows, int64_t columns, std::span<std::byte> to) {
  const auto height = static_cast<size_t>(rows), width = static_cast<size_t>(columns), bytes = from.size() / (height * width);
  for (size_t row = 0; row < height; ++row) {
    for (size_t column = 0; column < width; ++column)
      std::memcpy(to.data() + (column * height + row) * bytes, from.data() + (row * width + column) * bytes, bytes);
  }
}

struct TileScales;

// A folder with config.json and model.safetensors, or its shards, or a GGUF file, of which all that follows holds, too. Opening it checks
// every name, shape and type, but reads no values other than those of an output projection beside tied embeddings, which must be equal to
// them, and the scales of block FP8. Throws Error(data) for tensors that are missing, or that the model has no place for, Error(usage) for
// a model or a type that mantissa lacks.
class HfWeights : public TensorReader {
 public:
  explicit HfWeights(const std::filesystem::path& folder);
  ~HfWeights() override;

  const ArchitectureConfig& config() const { return config_; }
  // Returns the RunConfig of a checkpoint made from this folder: model and dtype from config.json, recipes that match packed weights,
  // sequences of at most 1,024 tokens. Where config.json names no dtype, it is bf16 if all tensors of values are BF16, else fp32.
  RunConfig run_config() const;
  const std::vector<ArchitectureTensor>& tensors() const { return tensors_; }
  ExportFormat format() const { return format_; }  // mlx: by the metadata of its files, or by its "quantization"; gguf: a file
  // Returns the modules by path whose weights are codes that a server multiplies by, also those that no recipe computes so.
  std::map<std::string, PackedScheme> packed_modules() const;
  // Returns where codes of block FP8 and NVFP4 are not computed as a server does it: weights that are read as values, and how inputs are
  // rounded.
  std::vector<std::string> server_findings() const;
  // Returns the findings that also hold for a run with recipes of its own: which weights are read as values, and why.
  std::vector<std::string> weights_as_values() const;
  // Returns a sentence if most scales of tensors of NVFP4 seem to be those of another convention, which has their inverse: with them
  // weights are far too large, and with their inverses they are not.
  std::optional<std::string> inverted_scales() const;
  // Returns the type of a tensor's scales that are those of 128x128 tiles; none if it has no such scales. The tensor may be of another
  // format.
  std::optional<FileDtype> tile_scales_dtype(const ArchitectureTensor& tensor) const;
  // Returns what servers that read the list of unquantized modules in other ways would make of the modules (packing.h).
  std::vector<std::string> ignore_list_findings() const;
  // Says which inputs vLLM rounds to 4 bits, although nothing in the folder asks for it, and how to keep it from that; none: no inputs.
  std::optional<std::string> vllm_rounding() const;
  // Names an element of a parameter by its place in the tensor of transformers: "model.layers.0.self_attn.k_proj.weight[3, 5]".
  std::string element(const std::string& parameter, int64_t row, int64_t column) const;
  // Returns a text file of the folder; none if there is no such file. Throws Error(data) as require_unchanged() does.
  std::optional<std::string> file(const std::string& name) { return files_->file(name); }
  std::string config_source() const { return files_->config_source(); }  // file of the config, for messages
  // Returns a hash of config.json, of the tensors' names, types, shapes and places, and of the first bytes of each: ranks compare it.
  std::string fingerprint();
  // Throws Error(data) unless everything read from the folder until now belongs to one state of its files.
  void require_unchanged() override { files_->require_unchanged(); }
  // Returns the dtype in which files hold the rows of a tensor, which may be of another format: F32 unless all are BF16. F16 counts as F32,
  // which it becomes.
  Dtype file_dtype(const ArchitectureTensor& tensor) const;
  // Returns the type in which files hold the first rows of a parameter.
  FileDtype type_in_file(const std::string& parameter) const { return pieces_of(parameter).front().entry->dtype; }

  std::string where() const override { return folder_.string(); }
  bool has(const std::string& parameter) const override { return pieces_.contains(parameter); }
  WeightForm form(const std::string& parameter) const override;
  void read(const std::string& parameter, const Box& box, std::span<std::byte> out) override;
  void read_codes(const std::string& parameter, int64_t begin, int64_t end, std::span<std::byte> codes,
                  std::span<std::byte> scales) override;

 private:
  // The scale of a tensor of NVFP4 in a file: of compressed-tensors those of blocks are divided by it, of ModelOpt multiplied.
  struct TensorScale {
    std::string name;
    float value = 1.0F;
    bool divides = false;

    // Returns n where the factor is 2^n; none: it is no power of two that mantissa has.
    std::optional<int8_t> exponent() const;
  };
  struct Piece {
    const ArchitectureTensor* tensor;
    const SafetensorsEntry* entry;   // the values or codes
    const SafetensorsEntry* scales;  // null: values
    const TileScales* tiles;         // the scales of block FP8; null: others
    std::optional<TensorScale> tensor_scale, input_scale;
    RowRun run;

    Format format() const;
  };
  static const Piece* ends_within_tile(const std::vector<Piece>& pieces);
  using Unused = std::map<std::string, const SafetensorsEntry*>;  // by the name with its prefix
  static std::optional<int8_t> common_exponent(const std::vector<Piece>& pieces, std::optional<TensorScale> Piece::*scale);
  void find_tensors();
  bool find(const ArchitectureTensor& tensor, Unused& unused);
  TensorScale read_tensor_scale(const SafetensorsEntry& entry, bool divides) const;
  void require_form(const ArchitectureTensor& tensor, const SafetensorsEntry& entry, const SafetensorsEntry* scales) const;
  void require_shape(const SafetensorsEntry& found, const std::vector<int64_t>& wanted) const;
  void require_other_format(const ArchitectureTensor& tensor, const SafetensorsEntry& entry, const SafetensorsEntry& scales) const;
  std::optional<PackedConfig> packed_config() const;
  std::map<std::string, PackedScheme> computed_modules() const;
  void require_tied_output(const SafetensorsEntry& output);
  const std::vector<Piece>& pieces_of(const std::string& parameter) const;
  void require_no_sign(const Piece& piece, std::span<const std::byte> scales) const;
  void read_two_levels(const Piece& piece, int64_t begin, int64_t end, std::span<std::byte> out);
  void read_tiles(const Piece& piece, int64_t begin, int64_t end, std::span<std::byte> out);
  void read_rows(const Piece& piece, int64_t begin, int64_t end, std::span<std::byte> out);
  void read_file_rows(const Piece& piece, const SafetensorsEntry& entry, int64_t row_bytes, int64_t begin, int64_t end,
                      std::span<std::byte> out);
  std::span<const std::byte> turned_matrix(const Piece& piece, int64_t matrix);

  std::filesystem::path folder_;
  std::unique_ptr<ModelFiles> files_;
  ArchitectureConfig config_;
  bool block_fp8_ = false;  // by quantization_config
  ExportFormat format_;
  std::map<const SafetensorsEntry*, std::unique_ptr<TileScales>> tile_scales_;
  std::vector<ArchitectureTensor> tensors_;
  std::map<std::string, std::vector<Piece>> pieces_;  // by parameter, in the order of its rows
  const SafetensorsEntry* turned_ = nullptr;          // the tensor of which turned_bytes_ is a matrix with rows and columns exchanged
  int64_t turned_matrix_ = -1;
  std::vector<std::byte> turned_bytes_;
};

// Reads the files that go with a model (kTokenizerFiles). Throws Error(usage) or Error(data) for a config.json or generation_config.json
// whose special tokens an export, eval or generate could not read.
std::vector<TokenizerFile> tokenizer_files(HfWeights& weights);

}  // namespace mantissa
