// Reads the weights of a model from wherever they are: the checkpoint of a run, or a folder of Hugging Face's form (hf/hf_weights.h).
#pragma once

#include <span>
#include <string>

#include "mantissa/checkpoint/checkpoint_reader.h"
#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

// Number of values for each scale of packed weights, along a row.
inline constexpr int64_t kPackedBlock = 32;

// Form in which a parameter is kept: as values or, in a file that is packed, as codes.
struct WeightForm {
  Dtype dtype = Dtype::f32;  // dtype of its values
  bool master = false;       // a run's master: fp32, whatever forward reads
  Quantization codes = {};   // in blocks of [1, 32], or in tiles
  int64_t columns = 0;       // number of columns of codes
  bool products = false;     // values are codes times scales, which are any numbers of fp32
};

// Reads parameters by their names in the model, whole, also those that ranks share. Throws Error(data) for damage, which names file and
// tensor. Not for use by several threads at once.
class TensorReader {
 public:
  TensorReader() = default;
  virtual ~TensorReader() = default;
  TensorReader(const TensorReader&) = delete;
  TensorReader& operator=(const TensorReader&) = delete;

  virtual std::string where() const = 0;  // for messages
  virtual bool has(const std::string& parameter) const = 0;
  virtual WeightForm form(const std::string& parameter) const = 0;
  // Read a box of values, row-major, in form().dtype; of codes whole rows [begin, end), E2M1 two in a byte, and the scales of their blocks,
  // which begin with row `begin`. An empty span is not read.
  virtual void read(const std::string& parameter, const Box& box, std::span<std::byte> out) = 0;
  virtual void read_codes(const std::string& parameter, int64_t begin, int64_t end, std::span<std::byte> codes,
                          std::span<std::byte> scales) = 0;

  // Throws Error(data) unless all that was read until now is of one state of its files; a checkpoint's hashes say that at once.
  virtual void require_unchanged() {}

  // Reads values in fp32, which is exact.
  void read_fp32(const std::string& parameter, const Box& box, std::span<float> out);

 private:
  void decode(const std::string& parameter, const WeightForm& kept, const Box& box, std::span<float> out);
};

// Returns the form of a file's codes. A file names no rule: its codes are read as their format defines them, -0 too. Quantizing their
// values by rceil keeps each of them.
Quantization packed_form(Format format);

// Return the bytes of a row of codes, and of a row of its scales, which are those of block_rows rows.
int64_t code_bytes(const WeightForm& form);
int64_t scale_bytes(const WeightForm& form);

// Reads the masters "master.NAME" of a checkpoint, which are fp32.
class CheckpointWeights : public TensorReader {
 public:
  explicit CheckpointWeights(CheckpointReader& reader) : reader_(reader) {}  // the reader must outlive this
  std::string where() const override { return reader_.directory().string(); }
  bool has(const std::string& parameter) const override { return reader_.has(name_of(parameter)); }
  WeightForm form(const std::string&) const override { return {.master = true}; }
  void read(const std::string& parameter, const Box& box, std::span<std::byte> out) override { reader_.read(name_of(parameter), box, out); }
  void read_codes(const std::string& parameter, int64_t begin, int64_t end, std::span<std::byte> codes,
                  std::span<std::byte> scales) override;

 private:
  static std::string name_of(const std::string& parameter) { return "master." + parameter; }
  CheckpointReader& reader_;
};

}  // namespace mantissa
