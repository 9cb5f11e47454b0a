// Parameters of sizes that do not divide: short row blocks, vectors, blocks of 128, padding, codes with and without a value.
#pragma once

#include "nn/parameter.h"
#include "testing.h"

namespace mantissa::test {

inline std::vector<ParameterSpec> odd_parameters(Dtype dtype) {
  const Quantization tiles{Format::e4m3, 32, 32}, rows{Format::e4m3}, blocks{Format::e4m3, 128, 128}, fours{Format::e2m1};
  std::vector<ParameterSpec> out = {{.name = "embed.weight", .shape = {75, 64}, .init = {.std = 0.5}, .dtype = dtype, .padding = 11}};
  for (const std::string layer : {"layers.0.", "layers.1.", "layers.2."}) {
    const auto add = [&](const char* name, Shape shape, Init init, const Quantization& how = {}, bool keeps_value = true) {
      out.push_back({.name = layer + name, .shape = shape, .init = init, .dtype = dtype, .quantized = how, .keeps_value = keeps_value});
    };
    add("norm.weight", {75}, {.constant = 1.0});
    add("copy.weight", {96, 64}, {.std = 0.5}, tiles);
    add("codes.weight", {70, 64}, {.std = 2.0}, layer == "layers.0." ? rows : fours, false);
    if (layer == "layers.0.") add("tiles.weight", {416, 160}, {.std = 1.0}, tiles, false);
    if (layer == "layers.1.") add("blocks.weight", {384, 128}, {.std = 1.0}, blocks, false);
    if (layer == "layers.2.") add("blocks.weight", {392, 144}, {.std = 1.0}, blocks, false);  // the last blocks are smaller
    add("bias", {5}, {});
  }
  out.push_back({.name = "output.weight", .shape = {33, 5}, .init = {.std = 0.1}, .dtype = dtype});
  return out;
}

inline void add_odd_parameters(ParameterSet& set, Backend& device, Dtype dtype) {
  for (const ParameterSpec& spec : odd_parameters(dtype)) set.add(spec);
  set.allocate(device, Dtype::f32, true);
}

}  // namespace mantissa::test
