// What forward multiplies by: each weight as its module's recipe reads it in fprop. An export holds these values, or their codes.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mantissa/checkpoint/weight_source.h"
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

  const ModulePrecision& module_of(const std::string& parameter) const;
  // Its codes, none if forward reads it in high precision.
  Quantization quantized(const std::string& parameter) const;
  bool quantizes_inputs(const std::string& parameter) const;  // of the GEMM with it
  // What a server multiplies by where it takes these codes.
  std::optional<PackedScheme> scheme(const std::string& parameter) const;
  // Narrowest type of an export that is right whatever the values: that of its module, bf16 where it is quantized.
  virtual Dtype dtype(const std::string& parameter) const;

 private:
  const PrecisionPlan& plan_;
};

// Where they are read. Of several ranks one writes: all make the same calls, and only that one receives what is read.
class ForwardReader : public ForwardTypes {
 public:
  using ForwardTypes::ForwardTypes;
  virtual std::string where() const = 0;  // for messages

  // Rows [begin, end), whole, of fp32: exactly what the GEMMs read.
  virtual void read(const std::string& parameter, int64_t begin, int64_t end, std::span<float> out) = 0;
  // The same as codes, E2M1 two in a byte, and with a scale for 32 values of a row, whatever their blocks: repeated where one is larger.
  virtual std::vector<std::byte> codes(const std::string& parameter, int64_t begin, int64_t end) = 0;
  virtual std::vector<std::byte> scales(const std::string& parameter, int64_t begin, int64_t end) = 0;

  // Runs body, which does not read here, on the rank that writes. What it throws all throw.
  virtual void at_writer(const std::function<void()>& body) { body(); }
};

// Of a checkpoint or a folder.
class ForwardWeights : public ForwardReader {
 public:
  // Of a model of this plan. Both must outlive this.
  ForwardWeights(WeightSource& source, const PrecisionPlan& plan);

  std::string where() const override { return source_.where(); }
  Dtype dtype(const std::string& parameter) const override;  // of one that was never trained that of its file
  void read(const std::string& parameter, int64_t begin, int64_t end, std::span<float> out) override;
  std::vector<std::byte> codes(const std::string& parameter, int64_t begin, int64_t end) override;
  std::vector<std::byte> scales(const std::string& parameter, int64_t begin, int64_t end) override;

 private:
  Tensor values(const std::string& parameter, int64_t begin, int64_t end);
  // Whole blocks that hold the rows; the first is row `first`. What is short of one at the end is zeros.
  struct Blocks {
    QuantizedTensor codes;
    int64_t first;
  };
  Blocks blocks(const std::string& parameter, int64_t begin, int64_t end);
  QuantizedTensor imported_codes(const std::string& parameter, int64_t begin, int64_t end);

  WeightSource& source_;
  std::unique_ptr<Backend> device_;
  std::map<std::string, Shape> shapes_;
};

// One scale for 32 values of a row from those of rows [begin, end) of blocks.
std::vector<std::byte> packed_scales(std::span<const std::byte> scales, int64_t columns, const Quantization& how, int64_t begin,
                                     int64_t end);

}  // namespace mantissa
