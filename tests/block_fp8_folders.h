// Folders of block FP8 as DeepSeek-V3 and Qwen3-FP8 have them, with random codes, and their values by the definition of the format.
#pragma once

#include <bit>
#include <cmath>

#include "exports.h"
#include "mantissa/formats/element.h"

namespace mantissa::test {

// Sizes of which every part is whole tiles, and sizes of which none is.
inline const nlohmann::json kWhole = {{"hidden_size", 256}, {"intermediate_size", 384}, {"head_dim", 64}, {"tie_word_embeddings", false}},
                            kRagged = {{"hidden_size", 160}, {"intermediate_size", 320}, {"head_dim", 48}, {"tie_word_embeddings", false}};
inline const nlohmann::json kBlockFp8Config = {{"quant_method", "fp8"},          {"fmt", "e4m3"},
                                               {"activation_scheme", "dynamic"}, {"weight_block_size", {128, 128}},
                                               {"scale_fmt", "ue8m0"},           {"modules_to_not_convert", {"lm_head"}}};
inline const std::string kDownWeight = "model.layers.1.mlp.down_proj.weight", kScaleInv = "_scale_inv";

inline int64_t tiles(int64_t size) { return (size + 127) / 128; }
inline uint32_t word(const std::string& name, uint64_t i) {
  return random_words({.seed = 11, .stream = RngStream::test}, static_cast<uint32_t>(std::hash<std::string>()(name)), i)[0];
}

// Scales by the place of the tile. Powers of two differ, also from those of the neighbors.
using Scale = float (*)(const std::string& name, uint64_t tile);
inline float power_of_two(const std::string& name, uint64_t tile) {
  return std::ldexp(1.0F, -20 + static_cast<int>(word(name, tile) % 16));
}
inline float any_number(const std::string& name, uint64_t tile) {
  return std::bit_cast<float>((word(name, tile) & 0x007F0000U) | (100U + word(name, tile + 999) % 12U) << 23 | 0x00010000U);
}

inline std::string scale_bytes(FileDtype dtype, const std::string& name, int64_t count, Scale scale) {
  std::string bytes;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = std::bit_cast<uint32_t>(scale(name, static_cast<uint64_t>(i)));
    if (dtype == FileDtype::bf16) bits >>= 16;
    if (dtype == FileDtype::f8_e8m0) bits >>= 23;
    bytes.append(reinterpret_cast<const char*>(&bits), dtype == FileDtype::f32 ? 4 : dtype == FileDtype::bf16 ? 2 : 1);
  }
  return bytes;
}

inline std::string code_bytes_of(const std::string& name, int64_t count) {
  std::string bytes;
  for (int64_t i = 0; i < count; ++i) {
    const auto code = static_cast<uint8_t>(word(name, static_cast<uint64_t>(i)) >> 7);
    bytes += static_cast<char>((code & 0x7F) == 0x7F ? 0x3A : code);
  }
  return bytes;
}

class BlockFp8 : public ExportTest {
 protected:
  // A model whose linears are codes with one scale for a tile.
  HfFolder block_folder(const std::string& name, const nlohmann::json& sizes, FileDtype dtype, Scale scale,
                        const nlohmann::json& quantization = kBlockFp8Config, const std::string& type = "qwen3") const {
    nlohmann::json change = sizes;
    change["quantization_config"] = quantization;
    HfFolder folder(path(name), type, "BF16", change);
    for (const std::string& weight : folder.names()) {
      if (weight.find("_proj.weight") == std::string::npos) continue;
      const int64_t rows = folder.shape(weight)[0], columns = folder.shape(weight)[1];
      folder = folder.put(weight, FileDtype::f8_e4m3, {rows, columns}, code_bytes_of(weight, rows * columns))
                   .put(weight + kScaleInv, dtype, {tiles(rows), tiles(columns)},
                        scale_bytes(dtype, weight, tiles(rows) * tiles(columns), scale));
    }
    folder.write(path(name));
    return folder;
  }
  void pack(const std::string& from, const std::string& to) const { pack_to(from, to, Convention::fp8); }
  // What the file says, by the definition of the format.
  static float element(const HfFolder& folder, const std::string& weight, int64_t row, int64_t column, Scale scale) {
    const int64_t columns = folder.shape(weight)[1];
    const auto code = static_cast<uint8_t>(folder.bytes(weight)[static_cast<size_t>(row * columns + column)]);
    const double code_value = std::bit_cast<float>(E4M3::decode(code, 127));
    return static_cast<float>(code_value *
                              static_cast<double>(scale(weight, static_cast<uint64_t>(row / 128 * tiles(columns) + column / 128))));
  }
  void expect_values_of_the_formula(const HfFolder& folder, const std::string& name, Scale scale) const;
};

// All values of all parameters at once, and of each tensor a box that begins and ends within tiles.
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
