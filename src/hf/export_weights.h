// The tensors of an export and their bytes.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "hf/export_proof.h"
#include "mantissa/config/export_options.h"
#include "mantissa/hf/forward_weights.h"
#include "mantissa/hf/hugging_face.h"
#include "mantissa/io/safetensors.h"

namespace mantissa {

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
