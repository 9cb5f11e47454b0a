// Models as transformers of Hugging Face describes and names them: config.json, and the tensors of model.safetensors, of the families that
// the options of ModelConfig can express. In family_config.cpp (with hf/family_options.h), family_config_writer.cpp and
// family_tensors.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/models/model_config.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {

enum class Family { llama, qwen2, qwen3, qwen3_moe, mixtral, gpt2, gpt_oss };
const char* family_name(Family family);          // its model_type: "qwen3_moe"
const char* family_architecture(Family family);  // its class: "Qwen3MoeForCausalLM"

// What a config.json says of a model.
struct FamilyConfig {
  Family family = Family::qwen3;
  ModelConfig model = {};
  Dtype dtype = Dtype::f32;       // torch_dtype or dtype; float16, which nothing here computes in, is fp32
  bool says_dtype = false;        // else dtype is f32, and the tensors of the files have to say
  std::string quantization = {};  // the JSON text of quantization_config; "": none
};

// Every key is mapped, known to change nothing that a model computes, or refused by its name. Throws Error(data) for what is no such file,
// Error(usage) for a model that mantissa cannot compute.
FamilyConfig read_family_config(std::string_view text, const std::string& source);

// The family that a model is written as. Throws Error(usage) that names each option that no family has.
Family family_of(const ModelConfig& model);

// Token ids with a meaning, as config.json has them: JSON texts, for an id or a list of them. "": none.
struct SpecialTokens {
  std::string begin = {}, end = {}, pad = {};
};
SpecialTokens read_special_tokens(std::string_view config, const std::string& source);

// config.json of a model whose weights are of this dtype; quantization: the JSON text of quantization_config, "": none.
std::string family_config(const ModelConfig& model, Dtype dtype, const SpecialTokens& tokens, const std::string& quantization = {});

// Rows of a tensor in a file, `step` apart, that are consecutive rows of a parameter. A stack of matrices counts its rows through.
struct RowRun {
  int64_t file_row, row, rows, step = 1;
};

// A tensor as a family names and lays it out: it holds rows of one parameter. A vector has rows of one element. Transposed: its matrices
// are [in, out], as GPT-2's Conv1D and the experts of gpt-oss, whose gate and up alternate; rows are still those of [out, in].
struct FamilyTensor {
  std::string name;            // "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // in the file
  std::string parameter;       // "layers.0.attn.qkv.weight"
  std::vector<RowRun> runs;
  bool transposed = false;
  int64_t matrices = 1;
  int64_t width = 1;  // of a row

  int64_t columns() const { return width; }
  int64_t rows() const;  // of all matrices
  // Rows of the parameter in the order of the file, without gaps: they can be copied as they come.
  bool in_order() const { return !transposed && runs.size() == 1 && runs.front().step == 1; }
};

// "model.norm.weight[5]": an element by its row, among those of all matrices, and column, with the indices that it has in the file.
std::string element_name(const FamilyTensor& tensor, int64_t file_row, int64_t column);

// All tensors of a model, in the order of its parameters and their rows, which they tile. vocab_size must be set. Throws Error(usage) if
// there are more than kMostFamilyTensors: a config of a few bytes can ask for thousands of layers with thousands of experts.
inline constexpr size_t kMostFamilyTensors = 1'000'000;
std::vector<FamilyTensor> family_tensors(Family family, const ModelConfig& model);
// No more than `most` of them, and nothing is done for the others.
std::vector<FamilyTensor> first_family_tensors(Family family, const ModelConfig& model, size_t most);

// Tensors that older versions of a family saved and nothing reads.
bool is_family_buffer(Family family, const std::string& name);
// As names are here: some files lack the prefix of the base model ("transformer.", "model.").
std::string with_family_prefix(Family family, const std::string& name);

}  // namespace mantissa
