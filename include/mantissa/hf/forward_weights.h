// The weights that forward multiplies by: each as its module's recipe reads it in fprop. An export holds these values, or their codes.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mantissa/checkpoint/tensor_reader.h"
#include "mantissa/hf/packing.h"
#include "mantissa/precision/plan.h"

namespace mantissa {

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

}  // namespace mantissa
