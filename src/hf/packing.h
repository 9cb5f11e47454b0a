// Defines how files of Hugging Face's form hold codes and scales: the names of their tensors and quantization_config, by convention.
//
//   compressed-tensors  X.weight F8_E4M3 or X.weight_packed U8 [out, in / 2], X.weight_scale U8 [out, in / 32]
//                       NVFP4: X.weight_packed U8 [out, in / 2], X.weight_scale F8_E4M3 [out, in / 16], X.weight_global_scale F32 [1],
//                       by which scales are divided, and, where servers quantize inputs to NVFP4, X.input_global_scale F32 [1]
//   sglang              X.weight F8_E4M3, X.weight_scale_inv U8, which holds the scale in spite of its name
//   modelopt            X.weight F8_E4M3, X.weight_scale U8; hf_quant_config.json beside config.json. NVFP4: X.weight U8 [out, in / 2],
//                       X.weight_scale F8_E4M3 [out, in / 16], X.weight_scale_2 F32 [], which is multiplied with, X.input_scale F32 []
//   gpt-oss             its experts only: X_blocks U8 [E, out, in / 32, 16], X_scales U8 [E, out, in / 32], whatever is asked for
//   mlx-lm              X.weight U32 [out, in / 8] of E2M1 or [out, in / 4] of E4M3, X.scales U8; also for all experts at once (mlx.h).
//                       NVFP4 has scales of E4M3 [out, in / 16] and none for the tensor
//   fp8                 X.weight F8_E4M3, X.weight_scale_inv [ceil(out / 128), ceil(in / 128)], which is multiplied with, too, as in
//                       DeepSeek-V3 and Qwen3-FP8: F32, BF16 or F8_E8M0; routed experts also, as in DeepSeek-V4 with expert_dtype fp4,
//                       X.weight I8 [out, in / 2] with E2M1 codes, X.weight_scale_inv F8_E8M0 [out, in / 32]. DeepSeek-V4 says X.scale
//                       for X.weight_scale_inv, which is read, too
//
// Other scales are E8M0, compact, one for 32 values along a row, whatever blocks they come from, but those of tiles of fp8. sglang and
// modelopt have no E2M1 with scales of E8M0.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_reader.h"
#include "mantissa/config/run_config.h"
#include "mantissa/formats/format.h"
#include "mantissa/precision/rules.h"
#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

// Lists of modules that are not quantized ("ignore", "modules_to_not_convert", "exclude_modules") and what servers make of them. There is
// no one reading: vLLM takes an entry for a whole name or, by skip_with_substr, for any part of one (is_layer_skipped of its
// quant_utils.py), SGLang for parts between dots since its pull request 23467, others for the beginning of a name. Servers ask by the names
// of the modules into which they fuse linears: qkv_proj, gate_up_proj, and experts.

struct IgnoreList {
  std::string where;  // file and key, for messages
  std::vector<std::string> entries;
  bool whole_names = true;  // as those who wrote it read it; else transformers: ends of names, and expressions up to the end of a module
};

// A linear of a file by name ("model.layers.0.mlp.up_proj"), and whether it holds codes.
struct FileLinear {
  std::string name;
  bool codes = false;
};

// Returns a sentence for each entry and each reading that disagrees with the file: an entry that names linears that are codes, one that
// names nothing in the file, and linears that are values although no entry is their whole name. Each names all its linears. Entries that
// are expressions ("re:...", * and ?) are read alike by all; they are left out. `modules`: all names in the file that an entry may mean.
std::vector<std::string> ignore_list_findings(const IgnoreList& list, const std::vector<FileLinear>& linears,
                                              const std::vector<std::string>& modules);

// Scheme by which a server multiplies: codes of a weight, and the format to which it quantizes the input, none for high precision.
struct PackedScheme {
  Format format = Format::e4m3;
  Format inputs = Format::none;
  int64_t block = kPackedBlock;  // along a row of inputs; 16 is that of NVFP4, 128 that of fp8, whose E4M3 weights have tiles
  // Scales of the tensors of NVFP4, 2^exponent. No quantization_config has them. An input's may be none: it is no power of two.
  int8_t exponent = 0;
  std::optional<int8_t> input_exponent = {};
  auto operator<=>(const PackedScheme&) const = default;
};

// Returns the scheme of a format whose blocks are the usual ones.
PackedScheme packed_scheme(Format format, Format inputs = Format::none);
// Returns how a file keeps the codes of a weight.
Quantization form_of(const PackedScheme& scheme);

// Returns whether servers quantize inputs so, which weights in `weight` multiply: to E4M3 by rceil, with any scale, or, servers for fp8,
// with one of amax 1e-4 at least; beside E2M1 weights in blocks of 32 also to E2M1 as flashinfer does; beside those of NVFP4 to NVFP4 only.
bool as_servers_quantize(const Quantization& input, Format weight, int64_t block = kPackedBlock);

struct PackedNames {
  std::string codes, scales;
  std::string tensor_scale = {}, input_scale = {};  // NVFP4 alone has them
};
// Returns the names for a tensor "X.weight", or, of gpt-oss, "X"; in a folder of mlx-lm whatever the convention.
PackedNames packed_names(const std::string& weight, Format format, Convention convention, ExportFormat folder = ExportFormat::hf);
inline constexpr std::string_view kOfExperts = ".experts.";  // in names of files
// Returns whether a tensor or linear of a file is of an expert that tokens are routed to.
inline bool is_routed_expert(std::string_view name) { return name.find(kOfExperts) != std::string_view::npos; }

// Linears of a file by name ("model.layers.0.mlp.up_proj"): those with a scheme are codes, the others are not.
using PackedModules = std::map<std::string, std::optional<PackedScheme>>;

// Throws Error(usage) for what the convention lacks: E2M1, or, but for NVFP4 of modelopt, inputs in high precision.
std::string quantization_config(const PackedModules& modules, Convention convention);
// The quantization_config of gpt-oss, where only experts are codes.
inline constexpr const char* kMxfp4Config =
    R"({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
        "lm_head"]})";
inline constexpr const char* kModeloptSideFile = "hf_quant_config.json";
// modules are such as quantization_config() takes.
std::string modelopt_side_file(const PackedModules& modules);

// Reads a quantization_config, or what mlx-lm has in its place (ArchitectureConfig::quantization): how a server multiplies by each linear,
// by name. Throws Error(usage) that names the key for one that mantissa does not understand, Error(data) for an invalid one. In
// packed_config.cpp.
class PackedConfig {
 public:
  // key names the object in its file.
  PackedConfig(std::string_view object, const std::string& source, const std::string& key = "quantization_config");
  // Reads hf_quant_config.json.
  static PackedConfig of_modelopt(std::string_view side_file, const std::string& source);

  // Returns nothing for a linear that is not quantized.
  std::optional<PackedScheme> scheme(const std::string& module) const;
  bool names_modules() const { return names_modules_; }                          // else scheme() is that of a linear if it is codes
  bool block_fp8() const { return block_fp8_; }                                  // the form of the convention fp8
  bool scales_of_inputs_are_powers() const { return input_scales_are_powers_; }  // for fp8; else they are any fp32 numbers
  const std::string& where() const { return where_; }                            // file and key, for messages
  const std::vector<IgnoreList>& ignored() const { return lists_; }              // lists that are not empty, and count

 private:
  struct Expression {
    std::string where;  // with the expression as it is written
    Pattern pattern;
    bool matches(const std::string& module) const;
  };
  class Keys;
  void read_mlx(const Json& config, const std::string& source);
  void read_one_scheme(Keys& keys, const std::string& method);
  void read_modelopt(Keys& keys);
  void read_ignored_layers(Keys& keys);
  void read_compressed_tensors(Keys& keys);
  void read_not_converted(Keys& keys, const std::string& key);
  void keep_list(const Keys& keys, const std::string& key, const std::vector<std::string>& names, bool whole_names);

  std::string where_;
  bool names_modules_ = true, block_fp8_ = false, input_scales_are_powers_ = false, mlx_ = false;
  std::vector<IgnoreList> lists_;
  std::optional<PackedScheme> one_;                               // all conventions but compressed-tensors
  std::optional<PackedScheme> routed_;                            // scheme of routed experts in fp8, where they have another
  std::map<std::string, PackedScheme> targets_;                   // by name, or class; they go before one_
  std::vector<std::pair<Expression, PackedScheme>> expressions_;  // the first that matches counts
  std::set<std::string> ignored_, ignored_ends_;                  // as targets_; by the end of their names
  std::vector<Expression> ignored_expressions_;
};

}  // namespace mantissa
