#include "mantissa/hf/forward_weights.h"

#include <algorithm>

#include "mantissa/backend/functions.h"
#include "mantissa/formats/element.h"
#include "mantissa/formats/swizzle.h"
#include "mantissa/models/model_shape.h"
#include "mantissa/tensor/nonfinite.h"

namespace mantissa {
namespace {

Box rows_of(const Shape& shape, int64_t begin, int64_t end) {
  Box box = whole_box(dimensions(shape));
  box.start[0] = begin;
  box.size[0] = end - begin;
  return box;
}

// Returns one scale for 32 values of a row from those of rows [begin, end) of blocks.
std::vector<std::byte> packed_scales(std::span<const std::byte> scales, int64_t columns, const Quantization& how, int64_t begin,
                                     int64_t end) {
  const int64_t row_scales = columns / how.block_cols, wide = how.block_cols / kPackedBlock;
  std::vector<std::byte> out;
  out.reserve(static_cast<size_t>((end - begin) * (columns / kPackedBlock)));
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t column = 0; column < columns / kPackedBlock; ++column)
      out.push_back(scales[static_cast<size_t>(row / how.block_rows * row_scales + column / wide)]);
  }
  return out;
}

// Gives +0 for each -0 among E2M1 codes, two in a byte.
void drop_signs_of_zeros(std::vector<std::byte>& codes) {
  for (std::byte& pair : codes) {
    const auto both = std::to_integer<uint8_t>(pair);
    const auto cleared = [](unsigned code) { return code == E2M1::sign_bit ? 0U : code; };
    pair = std::byte{pack_nibbles(static_cast<uint8_t>(cleared(both & 0xFU)), static_cast<uint8_t>(cleared(both >> 4U)))};
  }
}

}  // namespace

Quantization ForwardTypes::quantized(const std::string& parameter) const {
  const ModulePrecision& module = module_of(parameter);
  const bool high = module.exported == StoredType::fp32 || module.exported == StoredType::bf16;
  return high || !parameter.ends_with(".weight") ? Quantization{} : module.resident_codes();
}

bool ForwardTypes::quantizes_inputs(const std::string& parameter) const {
  const Recipe& recipe = module_of(parameter).recipe;
  return recipe.input && recipe.gemms.fprop;
}

std::optional<PackedScheme> ForwardTypes::scheme(const std::string& parameter) const {
  const Quantization how = quantized(parameter);
  if (!how) return {};
  return PackedScheme{.format = how.format, .inputs = quantizes_inputs(parameter)};
}

Dtype ForwardTypes::dtype(const std::string& parameter) const {
  return quantized(parameter) ? Dtype::bf16 : module_of(parameter).recipe.compute;
}

ForwardWeights::ForwardWeights(TensorReader& source, const PrecisionPlan& plan, std::unique_ptr<Backend> device)
    : ForwardTypes(plan), source_(source), device_(std::move(device)) {
  std::vector<ModuleShape> modules;
  for (const ModulePrecision& module : plan.modules()) modules.push_back(module.module);
  for (const ParameterShape& parameter : parameter_shapes({.modules = std::move(modules)})) shapes_[parameter.name] = parameter.shape;
}

Dtype ForwardWeights::dtype(const std::string& parameter) const {
  const WeightForm form = source_.form(parameter);
  return form.master || quantized(parameter) ? ForwardTypes::dtype(parameter) : form.dtype;
}

bool ForwardWeights::rounds(const std::string& parameter) const {
  const WeightForm form = source_.form(parameter);
  return form.products && !quantized(parameter) && module_of(parameter).recipe.compute == Dtype::bf16;
}

Tensor ForwardWeights::values(const std::string& parameter, int64_t begin, int64_t end) {
  const Shape shape = shapes_.at(parameter).with_dim0(end - begin);
  const Tensor out = empty(*device_, Dtype::f32, shape);
  fill_from_host(out, [&](std::span<std::byte> bytes) {
    const std::span<float> rows{reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
    source_.read_fp32(parameter, rows_of(shapes_.at(parameter), begin, end), rows);
  });
  return out;
}

// Reads the codes of the file as they are: made anew from their values, a scale could be another one with the same values.
QuantizedTensor ForwardWeights::kept_codes(const std::string& parameter, int64_t begin, int64_t end) {
  const WeightForm form = source_.form(parameter);
  const QuantizedTensor out = empty_quantized(*device_, {end - begin, form.columns}, quantized(parameter));
  fill_from_host(out.codes, [&](std::span<std::byte> codes) {
    fill_from_host(out.scales, [&](std::span<std::byte> scales) { source_.read_codes(parameter, begin, end, codes, scales); });
  });
  return out;
}

ForwardWeights::Blocks ForwardWeights::blocks(const std::string& parameter, int64_t begin, int64_t end) {
  const Quantization how = quantized(parameter);
  const Quantization kept = source_.form(parameter).codes;
  const int64_t first = begin / how.block_rows * how.block_rows;
  const int64_t last = std::min(shapes_.at(parameter)[0], (end + how.block_rows - 1) / how.block_rows * how.block_rows);
  if (kept == how) return {.codes = kept_codes(parameter, first, last), .first = first};
  const Tensor rounded = converted(values(parameter, first, last), Dtype::bf16);
  const int64_t columns = rounded.dim(1), bad = first_nonfinite(Dtype::bf16, HostBytes(rounded).get());
  require(bad < 0, ExitCode::data, source_.where(), ": ", parameter, "[", first + bad / columns, ", ", bad % columns, "] is NaN or Inf");
  return {.codes = mantissa::quantized(rounded, how), .first = first};
}

void ForwardWeights::read(const std::string& parameter, int64_t begin, int64_t end, std::span<float> out) {
  require(std::ssize(out) == shapes_.at(parameter).with_dim0(end - begin).elements(), parameter, ": ", out.size(), " values for rows ",
          begin, " to ", end);
  if (!quantized(parameter)) {
    const Tensor read = values(parameter, begin, end);
    const bool rounded = dtype(parameter) == Dtype::bf16 && source_.form(parameter).master;
    const Tensor exact = rounded ? converted(converted(read, Dtype::bf16), Dtype::f32) : read;
    return device_->download(exact, out.data());
  }
  const auto [codes, first] = blocks(parameter, begin, end);
  const Tensor all = empty(*device_, Dtype::f32, codes.shape);
  device_->run(Dequantize{.x = codes, .out = all});
  device_->download(all.slice(begin - first, end - first), out.data());
}

std::vector<std::byte> ForwardWeights::codes(const std::string& parameter, int64_t begin, int64_t end) {
  const auto [codes, first] = blocks(parameter, begin, end);
  const HostBytes rows(codes.codes.slice(begin - first, end - first));
  std::vector<std::byte> out(rows.get().begin(), rows.get().end());
  if (codes.how.rule == ScaleRule::flashinfer) drop_signs_of_zeros(out);
  return out;
}

std::vector<std::byte> ForwardWeights::scales(const std::string& parameter, int64_t begin, int64_t end) {
  const auto [codes, first] = blocks(parameter, begin, end);
  return packed_scales(HostBytes(codes.scales).get(), codes.shape[1], codes.how, begin - first, end - first);
}

std::vector<std::byte> ForwardWeights::tile_scales(const std::string& parameter, int64_t begin, int64_t end) {
  const auto [codes, first] = blocks(parameter, begin, end);
  require(first == begin && codes.shape[0] == end - begin, parameter, ": rows ", begin, " to ", end, " are no whole tiles");
  const HostBytes scales(codes.scales);
  return {scales.get().begin(), scales.get().end()};
}

}  // namespace mantissa
