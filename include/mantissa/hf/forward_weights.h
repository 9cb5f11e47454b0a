// What forward multiplies by: each weight as its module's recipe reads it in fprop. An export holds these values, or their codes.
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

// Of weights that were trained under a plan, which must outlive this.
class ForwardTypes {
 public:
  explicit ForwardTypes(const PrecisionPlan& plan) : plan_(plan) {}
  virtual ~ForwardTypes() = default;
  ForwardTypes(const ForwardTypes&) = delete;
  ForwardTypes& operator=(const ForwardTypes&) = delete;

  const ModulePrecision& module_of(const std::string& parameter) const { return plan_.module_of(parameter); }
  // Its codes, none if forward reads it in high precision.
  Quantization quantized(const std::string& parameter) const;
  bool quantizes_inputs(const std::string& parameter) const;  // of the GEMM with it
  // What a server multiplies by where it takes these codes.
  std::optional<PackedScheme> scheme(const std::string& parameter) const;
  // Narrowest type of an export that is right whatever the values: that of its module, bf16 where it is quantized, as codes are then made
  // of values in bf16: no element is finer than these. Codes of a folder may be.
  virtual Dtype dtype(const std::string& parameter) const;
  // Whether forward rounds to bf16 what an export has in fp32 unless it is told otherwise: products of codes and scales of a folder.
  virtual bool rounds(const std::string&) const { return false; }

 private:
  const PrecisionPlan& plan_;
};

// Reads them from a checkpoint or a folder.
class ForwardWeights : public ForwardTypes {
 public:
  // Of a model of this plan. Both must outlive this. The device makes codes and values of them, the same bits as any other.
  ForwardWeights(TensorReader& source, const PrecisionPlan& plan, std::unique_ptr<Backend> device);

  void require_unchanged() { source_.require_unchanged(); }  // TensorReader
  std::string where() const { return source_.where(); }      // for messages
  Dtype dtype(const std::string& parameter) const override;  // of one that was never trained that of its file
  bool rounds(const std::string& parameter) const override;

  // Rows [begin, end), whole, of fp32: exactly what the GEMMs read, but for values that rounds() names.
  void read(const std::string& parameter, int64_t begin, int64_t end, std::span<float> out);
  // The same as codes, E2M1 two in a byte, and with a scale for 32 values of a row, whatever their blocks: repeated where one is larger.
  // Readers of a file know no rule: where forward decodes -0 as +0, codes are +0.
  std::vector<std::byte> codes(const std::string& parameter, int64_t begin, int64_t end);
  std::vector<std::byte> scales(const std::string& parameter, int64_t begin, int64_t end);
  // The scales of whole tiles, one each.
  std::vector<std::byte> tile_scales(const std::string& parameter, int64_t begin, int64_t end);

 private:
  Tensor values(const std::string& parameter, int64_t begin, int64_t end);
  // Whole blocks that hold the rows; the first is row `first`. What is short of one at the end is zeros.
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
