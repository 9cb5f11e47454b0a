// Models as transformers of Hugging Face describes and names them: config.json, and the tensors of model.safetensors, of the architectures
// that the options of ModelConfig can express. In architecture_config.cpp (with hf/architecture_table.h),
// architecture_table.cpp and architecture_tensors.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/config/run_config.h"
#include "mantissa/models/model_config.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {

enum class Architecture { llama, qwen2, qwen3, qwen3_moe, mixtral, gpt2, gpt_oss };
const char* architecture_name(Architecture architecture);   // its model_type: "qwen3_moe"
const char* architecture_class(Architecture architecture);  // its class: "Qwen3MoeForCausalLM"

// Content of a config.json that concerns the model.
struct ArchitectureConfig {
  Architecture architecture = Architecture::qwen3;
  ModelConfig model = {};
  Dtype dtype = Dtype::f32;  // torch_dtype or dtype; float16, which nothing here computes in, is fp32
  bool says_dtype = false;   // else dtype is f32, and the tensors of the files have to say
  // The JSON text of quantization_config, with expert_dtype as its member, or of an object with the keys "quantization" and
  // "quantize_activations", which are mlx-lm's; "": none.
  std::string quantization = {};
  // Keys that change training alone and are no options here, or have another meaning, each with what becomes of it: "attn_pdrop = 0.1 ...".
  std::vector<std::string> training_keys = {};
};

// Maps every key, ignores those known not to change the computation, and refuses all others by name. Throws Error(data) for an invalid
// file, Error(usage) for a model that mantissa cannot compute.
ArchitectureConfig read_architecture_config(std::string_view text, const std::string& source);

// Returns the architecture as which a model is written. Throws Error(usage) that names each option that no architecture has.
Architecture architecture_of(const ModelConfig& model);

// Special token ids of a config.json, which has one or a list; empty: none.
struct SpecialTokens {
  std::vector<int64_t> begin = {}, end = {}, pad = {};
};
// Throws Error(data) for what is no id of 64 bits.
SpecialTokens read_special_tokens(std::string_view config, const std::string& source);

// Keys of a config.json that speak of the balance loss of routers, which transformers adds in training where output_router_logits is true.
// Its coefficient is that of the sum over experts of num_experts * f * P over all layers at once, f being counts / tokens: with equal
// loads in each layer that is `experts of a token / layers` times as much in every layer's loss here (model.moe.aux_loss_coef).
struct RouterLossKeys {
  bool asked = false;                      // output_router_logits
  std::optional<double> coefficient = {};  // router_aux_loss_coef
};
// Throws Error(data) for a file that is no JSON object.
RouterLossKeys read_router_loss_keys(std::string_view config, const std::string& source);

// Writes the config.json of a model whose weights have this dtype; quantization is as in ArchitectureConfig. router_loss: keys of the file
// that the model came from, if any. The loss is asked for where that file asks; a coefficient that training did not use stays.
std::string architecture_config(const ModelConfig& model, Dtype dtype, const SpecialTokens& tokens, const std::string& quantization = {},
                                const RouterLossKeys& router_loss = {});

// A run of rows of a tensor in a file, `step` apart, that are consecutive rows of a parameter. Rows of a grouped weight are numbered
// through its matrices.
struct RowRun {
  int64_t file_row, row, rows, step = 1;
};

// A tensor as an architecture names and lays it out: it holds rows of one parameter. A vector has rows of one element. transposed: its
// matrices are [in, out], as GPT-2's Conv1D and the experts of gpt-oss, whose gate and up alternate; rows are still those of [out, in].
// mlx-lm and GGUF transpose nothing and stack the experts of each linear of a layer, [E, out, in]; GGUF has the rows of q and k of Llama
// and Mixtral in the order of pairs that rotate together.
struct ArchitectureTensor {
  std::string name;            // "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // in the file
  std::string parameter;       // "layers.0.attn.qkv.weight"
  std::vector<RowRun> runs;
  bool transposed = false;
  int64_t matrices = 1;
  int64_t width = 1;  // elements of a row

  int64_t columns() const { return width; }
  int64_t rows() const;  // rows of all matrices
  // Returns whether the file has the rows of the parameter in order, without gaps, so that they can be copied as they are.
  bool in_order() const { return !transposed && runs.size() == 1 && runs.front().step == 1; }
};

// Names an element, "model.norm.weight[5]", by its row among those of all matrices and its column, with the indices that it has in the
// file.
std::string element_name(const ArchitectureTensor& tensor, int64_t file_row, int64_t column);

// Returns all tensors of a model as the format names them, in the order of its parameters and their rows, which they tile. vocab_size must
// be set. Throws Error(usage) if there are more than kMostArchitectureTensors: a config of a few bytes can ask for thousands of layers with
// thousands of experts.
inline constexpr size_t kMostArchitectureTensors = 1'000'000;
std::vector<ArchitectureTensor> architecture_tensors(Architecture architecture, const ModelConfig& model,
                                                     ExportFormat format = ExportFormat::hf);
// Stops at `most` tensors, without work for the others.
std::vector<ArchitectureTensor> first_architecture_tensors(Architecture architecture, const ModelConfig& model, ExportFormat format,
                                                           size_t most);

// Returns whether older versions of an architecture saved a tensor of this name that nothing reads.
bool is_architecture_buffer(Architecture architecture, const std::string& name);
// Adds the prefix of the base model ("transformer.", "model."), which some files lack.
std::string with_base_prefix(Architecture architecture, const std::string& name, ExportFormat format = ExportFormat::hf);

}  // namespace mantissa
