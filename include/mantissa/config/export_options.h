// Options of an export: those of `mantissa export`, and checkpoint.export of a run.
#pragma once

#include <array>

#include "mantissa/json/fields.h"

namespace mantissa {

enum class ExportDtype { automatic, bf16, fp32 };  // automatic: the narrowest that is exact (ForwardTypes::dtype)
constexpr auto choices(ExportDtype) {
  return std::array{Choice{"auto", ExportDtype::automatic}, Choice{"bf16", ExportDtype::bf16}, Choice{"fp32", ExportDtype::fp32}};
}

// dequantized: values; packed: quantized weights as codes and scales, by a convention (packing.h).
enum class ExportWeights { dequantized, packed };
constexpr auto choices(ExportWeights) {
  return std::array{Choice{"dequantized", ExportWeights::dequantized}, Choice{"packed", ExportWeights::packed}};
}

// Form in which a server expects codes and scales (hf/packing.h).
enum class Convention { compressed_tensors, sglang, modelopt, fp8 };
constexpr auto choices(Convention) {
  return std::array{Choice{"compressed-tensors", Convention::compressed_tensors}, Choice{"sglang", Convention::sglang},
                    Choice{"modelopt", Convention::modelopt}, Choice{"fp8", Convention::fp8}};
}

struct ExportOptions {
  ExportWeights weights = ExportWeights::dequantized;
  Convention convention = Convention::compressed_tensors;
  ExportDtype dtype = ExportDtype::automatic;  // dtype of values

  bool operator==(const ExportOptions&) const = default;
  void fields(auto& v) {
    v("weights", weights, "dequantized: values; packed: codes and scales of what the plan quantizes");
    v("convention", convention, "of packed weights: how a server expects them; gpt-oss has a form of its own");
    v("dtype", dtype, "of values; auto: the narrowest that holds each tensor exactly");
  }
};

}  // namespace mantissa
