// The tensors of an export and their bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/hash.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_reader.h"
#include "hf/hugging_face.h"
#include "hf/packing.h"
#include "io/safetensors.h"
#include "mantissa/config/run_config.h"
#include "mantissa/precision/plan.h"
#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

// The weights that forward multiplies by: each as its module's recipe reads it in fprop. An export holds these values, or their codes.

// Types of weights that were trained under a plan, which must outlive this.
class ForwardTypes {
 public:
  explicit ForwardTypes(const PrecisionPlan& plan) : plan_(plan) {}
  virtual ~ForwardTypes() = default;
  ForwardTypes(const ForwardTypes&) = delete;
  ForwardTypes& operator=(const ForwardTypes&) = delete;

  const ModulePrecision& module_of(const std::string& parameter) const { return plan_.module_of(parameter); }
  // Returns the format of its codes; none if forward reads it in high precision.
  Quantization quantized(const std::string& parameter) const;
  bool quantizes_inputs(const std::string& parameter) const;  // inputs of the GEMM with it
  // Returns the scheme by which a server multiplies where it takes these codes; none: no codes.
  std::optional<PackedScheme> scheme(const std::string& parameter) const;
  // Returns the narrowest type of an export that is right whatever the values: that of the module, or bf16 where the weight is quantized,
  // because its codes are made of values in bf16 and no element is finer than these. Codes of a folder may be finer.
  virtual Dtype dtype(const std::string& parameter) const;
  // Returns true if forward rounds this weight to bf16 although exports keep it in fp32 unless told otherwise: products of codes and scales
  // of a folder.
  virtual bool rounds(const std::string&) const { return false; }

 private:
  const PrecisionPlan& plan_;
};

// Reads the weights from a checkpoint or a folder.
class ForwardWeights : public ForwardTypes {
 public:
  // `source` holds a model of `plan`; both must outlive this. Quantization and decoding run on `device`; every device gives the same bits.
  ForwardWeights(TensorReader& source, const PrecisionPlan& plan, std::unique_ptr<Backend> device);

  void require_unchanged() { source_.require_unchanged(); }  // TensorReader
  std::string where() const { return source_.where(); }      // for messages
  Dtype dtype(const std::string& parameter) const override;  // the file's type for a weight that was never trained
  bool rounds(const std::string& parameter) const override;

  // Reads whole rows [begin, end) as fp32: exactly what the GEMMs read, except for values that rounds() names.
  void read(const std::string& parameter, int64_t begin, int64_t end, std::span<float> out);
  // Return the rows as codes, E2M1 two in a byte, and with a scale for 32 values of a row, whatever their blocks: repeated where a block is
  // larger. Readers of a file know no rule: where forward decodes -0 as +0, codes are +0.
  std::vector<std::byte> codes(const std::string& parameter, int64_t begin, int64_t end);
  std::vector<std::byte> scales(const std::string& parameter, int64_t begin, int64_t end);
  // Returns the scales of whole tiles, one each.
  std::vector<std::byte> tile_scales(const std::string& parameter, int64_t begin, int64_t end);

 private:
  Tensor values(const std::string& parameter, int64_t begin, int64_t end);
  // Whole blocks that hold the rows; they begin at row `first` of the parameter. A last block that is short is filled with zeros.
  struct Blocks {
    QuantizedTensor codes;
    int64_t first;
  };
  Blocks blocks(const std::string& parameter, int64_t begin, int64_t end);
  QuantizedTensor kept_codes(const std::string& parameter, int64_t begin, int64_t end);

  TensorReader& source_;
  std::unique_ptr<Backend> device_;
  std::map<std::string, Shape> shapes_;
};

// The file mantissa.json of an export: what every tensor was made from, and hashes of all tensors and files.

struct ProvenTensor {
  std::string name, module, dtype;
  std::vector<int64_t> shape;
  Quantization how = {};  // that of the weight that it is a part of
  Hash64 hash = {};
};

struct ProvenCheckpoint {
  int64_t step = 0;
  std::string manifest;  // its hash

  void fields(auto& v) {
    v("step", step);
    v("manifest", manifest);
  }
};

// Writes it into a folder that holds these files. Without a checkpoint the model came from a folder of Hugging Face's form.
// has_convention: the folder has codes in the form of options.convention.
void write_export_proof(const std::filesystem::path& folder, const std::optional<ProvenCheckpoint>& checkpoint,
                        const ExportOptions& options, bool has_convention, const std::vector<TokenizerFile>& files,
                        const std::vector<ProvenTensor>& tensors);

// Calls body(run, first row, last row + 1 of the parameter) for chunks of the rows of a tensor, in order.
void for_chunks(const ArchitectureTensor& tensor, const std::function<void(const RowRun&, int64_t, int64_t)>& body);

// Types of the tensors of a folder that is exported again.
struct FolderTypes {
  std::set<std::string> narrow = {};                               // tensors that are bf16 although their parameter is kept in fp32
  std::set<std::string> codes = {};                                // tensors that are codes, also those that are read as values
  std::map<std::string, FileDtype> tile_scales = {};               // scales of tensors in block FP8
  std::function<bool(const ArchitectureTensor&)> bf16_holds = {};  // asked of tensors that are codes; reads what it has to
};

class ExportedWeights {
 public:
  // Exports weights of these types, which must outlive this. Throws the errors of export_model() about models and conventions.
  ExportedWeights(const ForwardTypes& types, const ModelConfig& model, const ExportOptions& options, FolderTypes folder = {});

  Architecture architecture() const { return architecture_; }
  const SafetensorsLayout& layout() const { return *layout_; }
  Dtype common_dtype() const;                                // for config.json: bf16 if any matrix is
  const PackedModules& modules() const { return modules_; }  // linears by name
  std::string quantization() const;                          // "": nothing is packed

  // Calls put with the bytes of a tensor of the layout, in order.
  using Put = std::function<void(std::span<const std::byte>)>;
  void write(size_t tensor, ForwardWeights& weights, const Put& put) const;
  ProvenTensor description(size_t tensor) const;  // its source, without its hash

 private:
  enum class Role { values, codes, scales };
  struct Item {
    const ArchitectureTensor* tensor;
    Role role;
    SafetensorsTensor file;
  };

  bool packs(const ArchitectureTensor& tensor) const;
  bool has_tiles(const ArchitectureTensor& tensor) const;
  void add_packed(const ArchitectureTensor& tensor);
  FileDtype tile_scales_dtype(const ArchitectureTensor& tensor) const;
  void find_modules();
  void require_expressible(const ArchitectureTensor& tensor) const;
  void require_block_fp8(const ArchitectureTensor& tensor, const std::string& who) const;
  void require_one_scheme_per_layer() const;
  Dtype values_dtype(const ArchitectureTensor& tensor) const;
  void lay_out();
  void write_by_matrix(const Item& item, ForwardWeights& weights, const Put& put) const;
  std::vector<std::byte> rows_of(const Item& item, const RowRun& run, ForwardWeights& weights) const;
  // Values of the parameter from row `begin` on; where: their source, for messages.
  struct Rows {
    const ArchitectureTensor& tensor;
    FileDtype dtype;  // in the file
    const RowRun& run;
    int64_t begin;
    std::span<const float> values;
  };
  std::vector<std::byte> value_bytes(const Rows& rows, const std::string& where) const;

  const ForwardTypes& types_;
  ExportOptions options_;
  Architecture architecture_;
  std::vector<ArchitectureTensor> tensors_;
  FolderTypes folder_;
  PackedModules modules_;
  std::vector<Item> items_;  // as the layout has them
  std::optional<SafetensorsLayout> layout_;
};

}  // namespace mantissa
