// The tensors of an export and their bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
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

class HfWeights;

// The weights of a checkpoint or a folder that forward multiplies by: each as its module's recipe reads it in fprop. An export holds these
// values, or their codes.
class ForwardWeights {
 public:
  // `source` holds a model of `plan`; both must outlive this. Quantization and decoding run on `device`; every device gives the same bits.
  // takes_codes: codes of a folder that have the plan's format are taken as they are, in the place of codes made of their values.
  ForwardWeights(TensorReader& source, const PrecisionPlan& plan, std::unique_ptr<Backend> device, bool takes_codes = true);
  // Knows only the types of weights that are trained under a plan, which must outlive this.
  explicit ForwardWeights(const PrecisionPlan& plan) : plan_(plan) {}

  void require_unchanged() { source_->require_unchanged(); }  // TensorReader
  std::string where() const { return source_->where(); }      // for messages
  const PrecisionPlan& plan() const { return plan_; }
  const ModulePrecision& module_of(const std::string& parameter) const { return plan_.module_of(parameter); }
  // Returns the format of its codes; none if forward reads it in high precision.
  Quantization quantized(const std::string& parameter) const;
  Format input_format(const std::string& parameter) const;    // to which the GEMM with it quantizes inputs; none: it does not
  bool has_mxfp4_inputs(const std::string& parameter) const;  // in blocks of 32, which llama.cpp takes on GPUs of the generation Blackwell
  // Returns the narrowest type that holds what forward reads, whatever the values. Of a quantized weight it is bf16: codes are made of bf16
  // values, and decode to values that bf16 holds (codes of a folder may be finer). Else it is the module's compute dtype for a master, and
  // the type in the file for a weight of a folder.
  Dtype dtype(const std::string& parameter) const;
  // Returns true for values of a folder that are products of codes and fp32 scales and that forward rounds to bf16. An export keeps those
  // that bf16 does not hold in fp32, unless it is told to write bf16.
  bool rounds(const std::string& parameter) const;

  // Reads whole rows [begin, end) as fp32: exactly what the GEMMs read, except for values that rounds() names.
  void read(const std::string& parameter, int64_t begin, int64_t end, std::span<float> out);
  // Return the codes of the rows, E2M1 two in a byte, and their scales: one for 32 values of a row, of NVFP4 for 16, repeated where a block
  // is larger. A file does not name the scale rule, so under flashinfer, where forward decodes -0 as +0, codes of -0 are written as +0.
  std::vector<std::byte> codes(const std::string& parameter, int64_t begin, int64_t end);
  std::vector<std::byte> scales(const std::string& parameter, int64_t begin, int64_t end);
  // Returns the scales of whole tiles, one each.
  std::vector<std::byte> tile_scales(const std::string& parameter, int64_t begin, int64_t end);

 private:
  // Returns the form of the source; without one, that of a run's master.
  WeightForm form(const std::string& parameter) const { return source_ ? source_->form(parameter) : WeightForm{.master = true}; }
  Tensor values(const std::string& parameter, int64_t begin, int64_t end);
  // Whole blocks that hold the rows; they begin at row `first` of the parameter. A last block that is short is filled with zeros.
  struct Blocks {
    QuantizedTensor codes;
    int64_t first;
  };
  Blocks blocks(const std::string& parameter, int64_t begin, int64_t end);

  TensorReader* source_ = nullptr;
  const PrecisionPlan& plan_;
  std::unique_ptr<Backend> device_;
  bool takes_codes_ = true;
  std::map<std::string, Shape> shapes_;
};

// The file mantissa.json of an export: what every tensor was made from, and hashes of all tensors and files.

struct ProvenTensor {
  std::string name, module, dtype;
  std::vector<int64_t> shape;
  Quantization how = {};  // that of the weight that it is a part of
  std::string xxh64 = {};

  // Members of the file that verify_export() reads.
  void fields(auto& v) {
    v("tensor", name);
    v("dtype", dtype);
    v("shape", shape);
    v("xxh64", xxh64);
  }
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
// has_convention: the folder has codes in the form of options.convention. differences: ExportedWeights::deviations().
void write_export_proof(const std::filesystem::path& folder, const std::optional<ProvenCheckpoint>& checkpoint,
                        const ExportOptions& options, const std::vector<std::string>& precision, bool has_convention,
                        const std::vector<TokenizerFile>& files, const std::vector<ProvenTensor>& tensors,
                        const std::vector<std::string>& differences);

// Calls body(run, first row, last row + 1 of the parameter) for chunks of the rows of a tensor, in order.
void for_chunks(const ArchitectureTensor& tensor, const std::function<void(const RowRun&, int64_t, int64_t)>& body);

// Returns the part of a run whose rows lie between two rows of the file; it may have none.
RowRun rows_between(const RowRun& run, int64_t file_begin, int64_t file_end);

// Returns the type of a tensor's values: that asked for, but for routers; under auto the narrowest that holds the tensor exactly, where one
// that is codes in a folder is looked at. folder: null for a checkpoint.
Dtype dtype_of_values(const ArchitectureTensor& tensor, const ForwardWeights& types, ExportDtype asked, HfWeights* folder);

// Returns the values of a run of rows, in fp32 or bf16. Throws Error(data) for one that is NaN or Inf, Error(usage) for one that bf16 does
// not hold, both by its place in the file; `others` names the types to take then.
std::vector<std::byte> value_rows(const ArchitectureTensor& tensor, const RowRun& run, Dtype dtype, ForwardWeights& weights,
                                  const char* others);

// The tensors of an export, each in the type and the form that its files have.
class ExportedWeights {
 public:
  // Exports weights of these types, which must outlive this, as must the folder where one is exported again. Throws the errors of
  // export_model() about models and conventions.
  ExportedWeights(const ForwardWeights& types, const ModelConfig& model, const ExportOptions& options, HfWeights* folder = nullptr);

  Architecture architecture() const { return architecture_; }
  const SafetensorsLayout& layout() const { return *layout_; }
  const PackedModules& modules() const { return modules_; }  // linears by name
  std::string quantization() const;                          // as ArchitectureConfig has it; "": nothing is packed
  // Names what programs of the format do otherwise than training, or cannot load, where that is allowed: mlx_differences(), and inputs that
  // are quantized in training alone.
  const std::vector<std::string>& deviations() const { return deviations_; }

  // Calls put with the bytes of a tensor of the layout, in order.
  using Put = std::function<void(std::span<const std::byte>)>;
  void write(size_t number, ForwardWeights& weights, const Put& put) const;
  ProvenTensor description(size_t tensor) const;  // its source, without its hash

 private:
  enum class Role { values, codes, scales, tile_scales, tensor_scale, input_scale };
  struct Item {
    const ArchitectureTensor* tensor;
    Role role;
    SafetensorsTensor file;
  };

  bool of_mlx() const { return options_.format == ExportFormat::mlx; }
  void add_packed(const ArchitectureTensor& tensor);
  void find_modules();
  void settle_mlx_inputs();
  void require_expressible(const ArchitectureTensor& tensor) const;
  void require_one_scheme_per_layer() const;
  Dtype values_dtype(const ArchitectureTensor& tensor) const;
  float scale_of_tensor(const Item& item) const;
  std::vector<std::byte> rows_of(const Item& item, const RowRun& run, ForwardWeights& weights) const;

  const ForwardWeights& types_;
  ExportOptions options_;
  Architecture architecture_;
  std::vector<ArchitectureTensor> tensors_;
  HfWeights* folder_;  // null: a checkpoint
  PackedModules modules_;
  std::vector<std::string> deviations_;
  std::vector<Item> items_;  // as the layout has them
  std::optional<SafetensorsLayout> layout_;
};

}  // namespace mantissa
