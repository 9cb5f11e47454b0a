// Folders of codes as other programs write them: MXFP8, block FP8 as DeepSeek-V3 and Qwen3-FP8 have it, and DeepSeek-V4's experts, with
// random codes, and values by the definition of the format.
#pragma once

#include <bit>
#include <cmath>

#include "exports.h"
#include "mantissa/formats/element.h"

namespace mantissa::test {

// Sizes of which every part is whole tiles, and sizes of which none is.
inline const nlohmann::json kWhole = {{"hidden_size", 256}, {"intermediate_size", 384}, {"head_dim", 64}, {"tie_word_embeddings", false}},
                            kRagged = {{"hidden_size", 160}, {"intermediate_size", 320}, {"head_dim", 48}, {"tie_word_embeddings", false}};
inline const nlohmann::json kBlockFp8Config = nlohmann::json::parse(R"({"quant_method": "fp8", "fmt": "e4m3",
    "activation_scheme": "dynamic", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]})");
inline const nlohmann::json kMxfp8Config = nlohmann::json::parse(R"({"quant_method": "mxfp8", "weight_block_size": [1, 32],
    "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]})");
inline const nlohmann::json kCompressedConfig = nlohmann::json::parse(R"({"quant_method": "compressed-tensors",
    "quantization_status": "compressed", "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8",
    "dynamic": true}}}})");
inline const std::string kDownWeight = "model.layers.1.mlp.down_proj.weight", kScaleInv = "_scale_inv";

inline int64_t tiles(int64_t size) { return (size + 127) / 128; }
inline std::array<uint32_t, 4> words_of(const std::string& name, uint64_t i) {
  return random_words({.seed = 11, .stream = RngStream::test}, static_cast<uint32_t>(std::hash<std::string>()(name)), i);
}

// Scales by the place of the tile. Powers of two differ, also from those of the neighbors.
using Scale = float (*)(const std::string& name, uint64_t tile);
inline float power_of_two(const std::string& name, uint64_t tile) {
  return std::ldexp(1.0F, -20 + static_cast<int>(words_of(name, tile)[0] % 12));
}
inline float any_number(const std::string& name, uint64_t tile) {
  const auto words = words_of(name, tile);
  return std::bit_cast<float>((words[0] & 0x007F0000U) | (100U + words[1] % 12U) << 23 | 0x00010000U);
}

inline std::string scale_bytes(FileDtype dtype, const std::string& name, int64_t count, Scale scale) {
  std::string bytes;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = std::bit_cast<uint32_t>(scale(name, static_cast<uint64_t>(i)));
    if (dtype == FileDtype::bf16) bits >>= 16;
    if (dtype == FileDtype::f8_e8m0 || dtype == FileDtype::u8) bits >>= 23;
    bytes.append(reinterpret_cast<const char*>(&bits), dtype == FileDtype::f32 ? 4 : dtype == FileDtype::bf16 ? 2 : 1);
  }
  return bytes;
}

inline std::string code_bytes_of(const std::string& name, int64_t count) {
  std::string bytes;
  for (uint64_t i = 0; bytes.size() < static_cast<size_t>(count); ++i) {
    for (const uint32_t word : words_of(name, i)) {
      const auto code = static_cast<uint8_t>(word >> 7);
      bytes += static_cast<char>((code & 0x7F) == 0x7F ? 0x3A : code);
    }
  }
  return bytes.substr(0, static_cast<size_t>(count));
}

// The form in which a weight is written as codes and scales of blocks.
struct CodesForm {
  FileDtype codes = FileDtype::f8_e4m3;
  FileDtype scales = FileDtype::u8;
  std::string suffix = "_scale";  // ".scale" stands in place of ".weight"
  int64_t rows = 1, columns = 32, codes_in_byte = 1;
  Scale scale = power_of_two;
};
inline HfFolder with_codes(const HfFolder& folder, const std::string& weight, const CodesForm& form) {
  const int64_t rows = folder.shape(weight)[0], columns = folder.shape(weight)[1], bytes = columns / form.codes_in_byte;
  const std::vector<int64_t> blocks = {(rows + form.rows - 1) / form.rows, (columns + form.columns - 1) / form.columns};
  const std::string stem = form.suffix.starts_with('.') ? weight.substr(0, weight.rfind('.')) : weight;
  return folder.put(weight, form.codes, {rows, bytes}, code_bytes_of(weight, rows * bytes))
      .put(stem + form.suffix, form.scales, blocks, scale_bytes(form.scales, weight, blocks[0] * blocks[1], form.scale));
}

class BlockFp8 : public ExportTest {
 protected:
  // A model whose weights of names that hold `part`, but not `values`, are codes of this form.
  HfFolder folder_of(const std::string& name, const nlohmann::json& config, const std::string& part, const CodesForm& form,
                     const std::string& values = "no weight") const {
    HfFolder folder(path(name), config.value("num_experts", 0) > 0 ? "qwen3_moe" : "qwen3", "BF16", config);
    for (const std::string& weight : folder.names())
      if (weight.find(part) != std::string::npos && weight.find(values) == std::string::npos) folder = with_codes(folder, weight, form);
    folder.write(path(name));
    return folder;
  }
  HfFolder block_folder(const std::string& name, const nlohmann::json& sizes, FileDtype dtype, Scale scale,
                        const nlohmann::json& quantization = kBlockFp8Config) const {
    const CodesForm form{.scales = dtype, .suffix = kScaleInv, .rows = 128, .columns = 128, .scale = scale};
    return folder_of(name, changed(sizes, {{"quantization_config", quantization}}), "_proj.weight", form);
  }
  HfFolder mx_folder(const std::string& name, const nlohmann::json& quantization, const nlohmann::json& sizes = nlohmann::json::object(),
                     const std::string& values = "no weight") const {
    return folder_of(name, changed(sizes, {{"quantization_config", quantization}}), "_proj.weight", {}, values);
  }
  // Experts of four bits with DeepSeek-V4's names of scales, `inner` wide, beside attention in values.
  HfFolder deepseek_folder(const std::string& name, int64_t inner) const {
    nlohmann::json config = {
        {"hidden_size", 128}, {"head_dim", 64}, {"num_experts", 3}, {"moe_intermediate_size", inner}, {"expert_dtype", "fp4"}};
    config["quantization_config"] = kBlockFp8Config;
    config["quantization_config"]["modules_to_not_convert"] = {"lm_head", R"(model\.layers\.\d+\.self_attn)"};
    return folder_of(name, config, ".experts.",
                     {.codes = FileDtype::i8, .scales = FileDtype::f8_e8m0, .suffix = ".scale", .codes_in_byte = 2});
  }
  void pack(const std::string& from, const std::string& to) const { pack_to(from, to, Convention::fp8); }
  // The value that the file holds, by the definition of the format.
  static float element(const HfFolder& folder, const std::string& weight, int64_t row, int64_t column, Scale scale) {
    const int64_t columns = folder.shape(weight)[1];
    const auto code = static_cast<uint8_t>(folder.bytes(weight)[static_cast<size_t>(row * columns + column)]);
    const double code_value = std::bit_cast<float>(E4M3::decode(code, 127));
    return static_cast<float>(code_value *
                              static_cast<double>(scale(weight, static_cast<uint64_t>(row / 128 * tiles(columns) + column / 128))));
  }
  void expect_values_of_the_formula(const HfFolder& folder, const std::string& name, Scale scale) const;
};

// Compares all values of all parameters at once, and of each tensor a box that begins and ends within tiles.
inline void BlockFp8::expect_values_of_the_formula(const HfFolder& folder, const std::string& name, Scale scale) const {
  HfWeights weights(path(name));
  int64_t compared = 0;
  for (const ArchitectureTensor& tensor : weights.tensors()) {
    if (folder.dtype(tensor.name) != FileDtype::f8_e4m3) continue;
    const RowRun run = tensor.runs.front();
    const int64_t columns = tensor.columns(), first = run.rows / 3, left = columns / 3;
    for (const Box& box : {Box{.start = {run.row, 0}, .size = {run.rows, columns}},
                           Box{.start = {run.row + first, left}, .size = {run.rows - first - 1, columns - left - 1}}}) {
      std::vector<float> values(static_cast<size_t>(box.elements()));
      weights.read_fp32(tensor.parameter, box, values);
      for (int64_t i = 0; i < box.elements(); ++i, ++compared) {
        const int64_t row = box.start[0] - run.row + i / box.size[1], column = box.start[1] + i % box.size[1];
        ASSERT_EQ(std::bit_cast<uint32_t>(values[static_cast<size_t>(i)]),
                  std::bit_cast<uint32_t>(element(folder, tensor.name, row, column, scale)))
            << tensor.name << '[' << row << ", " << column << ']';
      }
    }
  }
  EXPECT_GT(compared, 0);
}

}  // namespace mantissa::test
