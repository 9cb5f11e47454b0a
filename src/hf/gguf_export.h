// Exports a model as one GGUF file for llama.cpp, whose weights are those that forward multiplies by, and compares the file to show it.
// MXFP4 is taken over code by code (a block is its scale, then byte j with element j in the low nibble and element j + 16 in the high one);
// GGUF has no MXFP8, whose weights are BF16 of the values that they decode to. Routers, norms, biases and sinks are F32.
//
// llama.cpp multiplies MXFP4 weights by inputs of 4 bits on GPUs of the generation Blackwell, unless general.tensor_extra says otherwise:
// an export names all tensors whose inputs training did not round so. The keys mantissa.* say where a file comes from, and hold hashes of
// its tensors and keys.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hf/export.h"
#include "hf/gguf_tokenizer.h"
#include "io/gguf_file.h"

namespace mantissa {

struct GgufOptions {
  ExportWeights weights = ExportWeights::dequantized;  // packed: E2M1 as MXFP4, other codes as values
  ExportDtype dtype = ExportDtype::automatic;
  bool allow_different = false;
};

struct ExportedGguf : ExportedModel {
  int64_t codes = 0;    // tensors in MXFP4
  int64_t decoded = 0;  // tensors that are codes in forward and values here, for want of a type
  bool has_tokenizer = true;
};

// The tensors and keys of a file.
class GgufContent {
 public:
  struct Item {
    ArchitectureTensor tensor;
    GgmlType type = GgmlType::f32;
    bool decoded = false;
  };

  // Throws Error(usage) for a model that no architecture expresses, for what llama.cpp computes otherwise unless that is allowed, and for
  // codes that GGUF has no form for, by key or module.
  GgufContent(ExportSource& source, const GgufOptions& options);

  Architecture architecture() const { return architecture_; }
  const std::vector<Item>& items() const { return items_; }
  const std::vector<float>& rope_factors() const { return rope_factors_; }  // kRopeFactors, the last tensor; empty: none
  const GgufRemarks& remarks() const { return remarks_; }
  // Returns the layout with the hashes of the tensors in order; without them, one of the same size.
  GgufLayout layout(const std::vector<Hash64>& hashes = {}) const;

  // Calls put with the bytes of an item, in order.
  using Put = std::function<void(std::span<const std::byte>)>;
  void write(const Item& item, ForwardWeights& weights, const Put& put) const;

 private:
  void add_item(const ArchitectureTensor& tensor, const ExportSource& source);
  void add_keys(const ExportSource& source);

  GgufOptions options_;
  Architecture architecture_;
  std::vector<Item> items_;
  std::vector<float> rope_factors_;
  GgufRemarks remarks_;
  GgufKeys keys_;
};

// Exports to `output`, a file that is not there yet, which gets its name when it was compared. precision: the values that ExportSource
// takes.
ExportedGguf export_gguf(const std::filesystem::path& from, const std::filesystem::path& output, const GgufOptions& options,
                         std::unique_ptr<Backend> device, const std::vector<std::string>& precision = {});

// Compares the hashes of all tensors and keys with those in the file. Returns the number of tensors. Throws Error(data) that names the
// first that differs, Error(usage) for a file without hashes.
int64_t verify_gguf(const std::filesystem::path& path);
bool has_gguf_hashes(const std::filesystem::path& path);

// In gguf_compare.cpp. Returns the first difference between a file and what forward multiplies by, of names, shapes, keys of the
// architecture, tables of the tokenizer, codes, scales or values, or a tensor of MXFP4 whose inputs llama.cpp would round to 4 bits though
// forward does not; none: all is right. Values are compared bit by bit, but zeros as in export_difference().
std::optional<std::string> gguf_difference(GgufFile& file, ExportSource& source);
// Returns the number of tensors whose codes and scales gguf_difference() compares.
int64_t gguf_tensors_of_codes(const GgufFile& file, const ExportSource& source);
// Says that a file was exported without the tokenizer that the model has; none: it has it, or there is none.
std::optional<std::string> gguf_tokenizer_left_out(const GgufFile& file, const ExportSource& source);
std::vector<std::string> gguf_allowed_differences(const GgufFile& file);  // outcome of allow_different
// Returns a line for each thing that llama.cpp rounds and forward does not, in a file of this content.
std::vector<std::string> gguf_roundings(const GgufFile& file, const ExportSource& source);

// Calls body(first row, last row + 1) for chunks of the rows of a tensor, in the order of the file.
void for_file_rows(const ArchitectureTensor& tensor, const std::function<void(int64_t, int64_t)>& body);
// Returns the bytes of such rows, put together from what read() has for runs of the parameter's rows.
std::vector<std::byte> file_rows(const ArchitectureTensor& tensor, int64_t begin, int64_t end,
                                 const std::function<std::vector<std::byte>(const RowRun&)>& read);
// Returns blocks of MXFP4 for codes of two in a byte and their scales, one for 32.
std::vector<std::byte> mxfp4_blocks(std::span<const std::byte> codes, std::span<const std::byte> scales);
inline constexpr size_t kMxfp4Elements = 32, kMxfp4Bytes = 17;  // sizes of a block

}  // namespace mantissa
