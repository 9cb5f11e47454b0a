// Where the weights of a model are read from: a checkpoint, of a run or imported, or a folder of Hugging Face's form (the latter in
// family_weights.cpp and packed_config.cpp).
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mantissa/io/checkpoint_reader.h"
#include "mantissa/io/safetensors.h"
#include "mantissa/models/hugging_face.h"
#include "mantissa/models/packing.h"
#include "mantissa/train/config.h"

namespace mantissa {

// How a parameter is kept: as values or, in an imported file that was packed, as codes.
struct WeightForm {
  Dtype dtype = Dtype::f32;  // of its values
  bool master = false;       // of a run: fp32, whatever forward reads
  Quantization codes = {};   // in blocks of [1, 32]
  int64_t columns = 0;       // of codes
};

// Parameters by their names in the model, whole: what ranks share is one. Throws Error(data) for what is damaged, which names file and
// tensor. Not for use by several threads at once.
class WeightSource {
 public:
  WeightSource() = default;
  virtual ~WeightSource() = default;
  WeightSource(const WeightSource&) = delete;
  WeightSource& operator=(const WeightSource&) = delete;

  virtual std::string where() const = 0;  // for messages
  virtual WeightForm form(const std::string& parameter) const = 0;
  // A box of values, row-major, in form().dtype. Of codes whole rows [begin, end), E2M1 two in a byte, and their scales; what is empty is
  // not read.
  virtual void read(const std::string& parameter, const Box& box, std::span<std::byte> out) = 0;
  virtual void read_codes(const std::string& parameter, int64_t begin, int64_t end, std::span<std::byte> codes,
                          std::span<std::byte> scales) = 0;

  // Values in fp32, which is exact.
  void read_fp32(const std::string& parameter, const Box& box, std::span<float> out);

 private:
  void decode(const std::string& parameter, const WeightForm& kept, const Box& box, std::span<float> out);
};

// As a file's codes are read: the rule that a recipe quantises by, for which -0 is 0 in E2M1.
Quantization packed_form(Format format);

// Bytes of a row of codes, and of its scales.
int64_t code_bytes(const WeightForm& form);
int64_t scale_bytes(const WeightForm& form);

// Tensors "master.NAME", which runs save, or what import makes: "value.NAME", or "codes.NAME" and "scales.NAME".
class CheckpointWeights : public WeightSource {
 public:
  explicit CheckpointWeights(CheckpointReader& reader) : reader_(reader) {}  // which must outlive this
  std::string where() const override { return reader_.directory().string(); }
  WeightForm form(const std::string& parameter) const override;
  void read(const std::string& parameter, const Box& box, std::span<std::byte> out) override;
  void read_codes(const std::string& parameter, int64_t begin, int64_t end, std::span<std::byte> codes,
                  std::span<std::byte> scales) override;

 private:
  std::string name_of(const std::string& parameter) const;
  CheckpointReader& reader_;
};

// A folder with config.json and model.safetensors, or its shards. Opening it checks every name, shape and type, but reads no values other
// than those of an output projection beside tied embeddings, which must be these. Throws Error(data) for tensors that are missing, or that
// the model has no place for, Error(usage) for a model or a type that mantissa has not.
class FamilyWeights : public WeightSource {
 public:
  explicit FamilyWeights(const std::filesystem::path& folder);

  const FamilyConfig& config() const { return config_; }
  // The configuration that a checkpoint of it has: its model in the type that config.json names, weights that are codes as their recipes
  // read them, sequences of at most 1,024 tokens. Where config.json names no type, it is bf16 if all tensors of values are BF16, else fp32.
  RunConfig run_config() const;
  const std::vector<FamilyTensor>& tensors() const { return tensors_; }
  // Modules by path whose weights are codes that a server multiplies by, also those that no recipe computes so with.
  std::map<std::string, PackedScheme> packed_modules() const;
  // An element of a parameter by its place in the tensor that transformers has for it: "model.layers.0.self_attn.k_proj.weight[3, 5]".
  std::string element(const std::string& parameter, int64_t row, int64_t column) const;
  // A text file of the folder; none if there is no such file. Throws Error(data) as require_unchanged() does.
  std::optional<std::string> file(const std::string& name);
  // Throws Error(data) unless all that was read of the folder until now is of one state of its files.
  void require_unchanged();
  // As the tensor is in its file; F16 counts as F32, which it becomes.
  Dtype file_dtype(const FamilyTensor& tensor) const;

  std::string where() const override { return folder_.string(); }
  WeightForm form(const std::string& parameter) const override;
  void read(const std::string& parameter, const Box& box, std::span<std::byte> out) override;
  void read_codes(const std::string& parameter, int64_t begin, int64_t end, std::span<std::byte> codes,
                  std::span<std::byte> scales) override;

 private:
  struct Piece {
    const FamilyTensor* tensor;
    const SafetensorsEntry* entry;   // of values or codes
    const SafetensorsEntry* scales;  // null: values
    RowRun run;

    Format format() const;
  };
  using Unused = std::map<std::string, const SafetensorsEntry*>;  // by the name with its prefix
  Unused all_tensors() const;
  void find_tensors();
  bool find(const FamilyTensor& tensor, Unused& unused);
  void require_form(const FamilyTensor& tensor, const SafetensorsEntry& entry, const SafetensorsEntry* scales) const;
  void require_one_form() const;
  std::optional<PackedScheme> scheme_of(const std::vector<Piece>& pieces, const PackedConfig& config) const;
  std::optional<PackedConfig> packed_config() const;
  Dtype dtype_of_tensors() const;
  void require_tied_output(const SafetensorsEntry& output);
  const std::vector<Piece>& pieces_of(const std::string& parameter) const;
  void read_rows(const Piece& piece, int64_t begin, int64_t end, std::span<std::byte> out);
  void read_file_rows(const Piece& piece, const SafetensorsEntry& entry, int64_t row_bytes, int64_t begin, int64_t end,
                      std::span<std::byte> out);
  std::span<const std::byte> turned_matrix(const Piece& piece, int64_t matrix);

  std::filesystem::path folder_;
  UnchangedFiles seen_;  // beside the weights
  FamilyConfig config_;
  SafetensorsFolder files_;
  std::vector<FamilyTensor> tensors_;
  std::map<std::string, std::vector<Piece>> pieces_;        // by parameter, in the order of its rows
  std::map<std::string, const SafetensorsEntry*> entries_;  // by the name that FamilyTensor has
  const SafetensorsEntry* turned_ = nullptr;                // of which a matrix has its rows and columns exchanged in turned_bytes_
  int64_t turned_matrix_ = -1;
  std::vector<std::byte> turned_bytes_;
};

// Whether a folder given by a user is one of these.
bool is_family_folder(const std::filesystem::path& folder);

// The text of a file in a model's folder. Throws Error(usage) if there is none.
std::string family_file(const std::filesystem::path& folder, const std::string& name);

}  // namespace mantissa
