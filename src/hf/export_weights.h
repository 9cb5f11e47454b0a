// The tensors of an export and their bytes.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "mantissa/hf/export.h"

namespace mantissa {

// Calls body(run, first row, last row + 1 of the parameter) for chunks of the rows of a tensor, in order.
void for_chunks(const ArchitectureTensor& tensor, const std::function<void(const RowRun&, int64_t, int64_t)>& body);

class ExportedWeights {
 public:
  // Of weights of these types, which must outlive this. narrow: tensors that were bf16 in the imported file although their parameter is
  // kept in fp32. Throws what export_model() says of models and conventions.
  ExportedWeights(const ForwardTypes& types, const ModelConfig& model, const ExportOptions& options, std::set<std::string> narrow = {});

  Architecture architecture() const { return architecture_; }
  std::vector<SafetensorsTensor> tensors() const;
  Dtype common_dtype() const;                                // for config.json: bf16 if any matrix is
  const PackedModules& modules() const { return modules_; }  // linears by name
  std::string quantization() const;                          // "": nothing is packed

  // The bytes of all tensors in file order, on the rank that writes. Returns, there, a list for mantissa.json: what each tensor is made
  // from, and its hash.
  using Put = std::function<void(std::span<const std::byte>)>;
  nlohmann::json write(ForwardReader& weights, const Put& put) const;

 private:
  enum class Role { values, codes, scales };
  struct Item {
    const ArchitectureTensor* tensor;
    Role role;
    SafetensorsTensor file;
  };

  bool packs(const ArchitectureTensor& tensor) const;
  void find_modules();
  void require_expressible(const ArchitectureTensor& tensor) const;
  void require_one_scheme_per_layer() const;
  Dtype dtype_of(const ArchitectureTensor& tensor) const;
  nlohmann::json entry_of(const Item& item) const;
  void write_item(const Item& item, ForwardReader& weights, const Put& put) const;
  void write_by_matrix(const Item& item, ForwardReader& weights, const Put& put) const;
  void with_rows(const Item& item, const RowRun& run, ForwardReader& weights, const Put& use) const;
  // Of the parameter, from row `begin`; where: what they were read from, for messages.
  struct Rows {
    const ArchitectureTensor& tensor;
    const RowRun& run;
    int64_t begin;
    std::span<const float> values;
  };
  std::vector<std::byte> value_bytes(const Rows& rows, const std::string& where) const;

  const ForwardTypes& types_;
  ExportOptions options_;
  Architecture architecture_;
  std::vector<ArchitectureTensor> tensors_;
  std::set<std::string> narrow_;
  PackedModules modules_;
  std::vector<Item> items_;
};

}  // namespace mantissa
