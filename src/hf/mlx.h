// Folders for mlx-lm, where they are not those of transformers. Names and layouts are a column of the table of architectures. Here is what
// config.json says of codes, and what mlx-lm computes otherwise. Bytes are those of packed weights of transformers:
//
//   X.weight  U32 [out, in / 8] of E2M1, [out, in / 4] of E4M3: the codes of a row, first in the lowest bits
//   X.scales  U8 [out, in / 32], E8M0; of NVFP4 [out, in / 16], E4M3, with which mlx-lm has no scale for the tensor
//
// with [E, out, ...] for the experts of a layer. Values are X.weight, never transposed.
#pragma once

#include <string>
#include <vector>

#include "hf/hugging_face.h"
#include "hf/packing.h"
#include "io/safetensors.h"

namespace mantissa {

class HfWeights;

// Names options of a model with which mlx-lm 0.32.2 computes otherwise, mostly without a word, or which it cannot load, each with what it
// does: "model.swiglu_limit: mlx-lm clamps at 7".
std::vector<std::string> mlx_differences(Architecture architecture, const ModelConfig& model);

// Returns the keys of config.json that say which modules are codes, as ArchitectureConfig::quantization: "quantization", with the format of
// most modules and an entry for each other one, false for high precision, and "quantize_activations" where inputs are quantized, which must
// be those of all modules or of none.
std::string mlx_quantization(const PackedModules& modules);

// Types by which mlx-lm computes a folder. Activations begin in the type of the embeddings, bf16 if these are codes. MLX promotes a product
// of bf16 and F32 to fp32, so that one norm in F32 makes all that follows fp32.
struct MlxTypes {
  Architecture architecture = {};
  FileDtype activations = FileDtype::bf16;  // in the end
  std::string widened_by = {};              // the tensor from which on they are fp32; "": none, as the embeddings have their type
  bool at_once = false;                     // nothing is computed before it
  Dtype trained = {};                       // the type of training's activations
  bool mxfp8_inputs = false;                // mlx-lm quantizes inputs of packed linears
  bool as_forward = true;                   // but for these types, forward computes the same
};
MlxTypes mlx_types(const HfWeights& folder, Dtype trained);
// Says what mlx-lm rounds that forward does not.
std::string mlx_rounding(const MlxTypes& types);
// Says what a folder whose inputs mlx-lm quantizes needs; "": it quantizes none.
std::string mlx_inputs_need(const HfWeights& folder);

}  // namespace mantissa
