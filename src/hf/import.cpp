#include "mantissa/hf/import.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "mantissa/base/log.h"
#include "mantissa/base/version.h"
#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/checkpoint/checkpoint_writer.h"
#include "mantissa/formats/element.h"
#include "mantissa/hf/hf_weights.h"
#include "mantissa/io/pending_folder.h"
#include "mantissa/models/model_shape.h"
#include "mantissa/tensor/nonfinite.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kImportChunkBytes = 8 << 20;

// Types of tensors whose parameter is kept in a wider one: of these the checkpoint would not know.
nlohmann::json narrow_tensors(const HfWeights& weights) {
  nlohmann::json names = nlohmann::json::array();
  for (const ArchitectureTensor& tensor : weights.tensors()) {
    if (weights.file_dtype(tensor) != weights.form(tensor.parameter).dtype) names.push_back(tensor.name);
  }
  return names;
}

CheckpointHead head_of(const HfWeights& weights) {
  const RunConfig config = weights.run_config();
  return {
      .config = effective_config(config),
      .state =
          nlohmann::json{
              {"imported", {{"architecture", architecture_name(weights.config().architecture)}, {"bf16_tensors", narrow_tensors(weights)}}}}
              .dump(),
      .fingerprints = {.build = build_fingerprint()}};
}

// Whether the parameter stays codes. Embeddings and routers are in high precision here, whatever a file has, and so is an output projection
// that is not E4M3 with quantized inputs.
bool keeps_codes(const HfWeights& weights, const PrecisionPlan& plan, const std::string& parameter) {
  return weights.form(parameter).codes && plan.of(parameter.substr(0, parameter.rfind('.'))).resident_codes();
}

int64_t bytes_of(const HfWeights& weights, const PrecisionPlan& plan, const ParameterShape& parameter) {
  const WeightForm form = weights.form(parameter.name);
  if (keeps_codes(weights, plan, parameter.name)) return parameter.shape[0] * (code_bytes(form) + scale_bytes(form));
  return parameter.shape.elements() * dtype_bytes(form.dtype);
}

// Calls body(first row, last row + 1) for chunks of rows of so many bytes.
void for_chunks(int64_t rows, int64_t row_bytes, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t step = std::max<int64_t>(1, kImportChunkBytes / row_bytes);
  for (int64_t row = 0; row < rows; row += step) body(row, std::min(rows, row + step));
}

[[noreturn]] void refuse(const HfWeights& weights, const ParameterShape& parameter, int64_t row, int64_t column, const char* why) {
  fail(ExitCode::data, weights.where(), ": ", weights.element(parameter.name, row, column), ' ', why);
}

void write_values(HfWeights& weights, const ParameterShape& parameter, ShardStream& shard) {
  const WeightForm form = weights.form(parameter.name);
  shard.begin("value." + parameter.name, form.dtype, dimensions(parameter.shape));
  const int64_t columns = parameter.shape.with_dim0(1).elements();
  std::vector<std::byte> chunk;
  for_chunks(parameter.shape[0], columns * dtype_bytes(form.dtype), [&](int64_t begin, int64_t end) {
    Box box = whole_box(dimensions(parameter.shape));
    box.start[0] = begin;
    box.size[0] = end - begin;
    chunk.resize(static_cast<size_t>(box.elements() * dtype_bytes(form.dtype)));
    if (form.codes) {
      weights.read_fp32(parameter.name, box, {reinterpret_cast<float*>(chunk.data()), static_cast<size_t>(box.elements())});
    } else {
      weights.read(parameter.name, box, chunk);
    }
    const int64_t bad = first_nonfinite(form.dtype, chunk);
    if (bad >= 0) refuse(weights, parameter, begin + bad / columns, bad % columns, "is NaN or Inf");
    shard.write(chunk);
  });
}

// Rows [begin, end) of a parameter, of codes or of scales alone.
struct CodeRows {
  int64_t begin, end;
  std::span<const std::byte> codes, scales;
};

// A scale of 255, or in E4M3 a code of 0x7F, is NaN.
void require_numbers(const HfWeights& weights, const ParameterShape& parameter, const CodeRows& rows) {
  const WeightForm form = weights.form(parameter.name);
  const auto refuse_at = [&](size_t at, int64_t row_bytes, int64_t values, const char* why) {
    const auto index = static_cast<int64_t>(at);
    refuse(weights, parameter, rows.begin + index / row_bytes, index % row_bytes * values, why);
  };
  for (size_t i = 0; i < rows.scales.size(); ++i) {
    if (rows.scales[i] == std::byte{kScaleNan}) refuse_at(i, scale_bytes(form), kPackedBlock, "has a scale that is NaN");
  }
  for (size_t i = 0; i < rows.codes.size() && form.codes.format == Format::e4m3; ++i) {
    if ((rows.codes[i] & std::byte{0x7F}) == std::byte{0x7F}) refuse_at(i, code_bytes(form), 1, "is NaN");
  }
}

// Codes in the largest scales may be beyond fp32, of which there are few.
void require_finite(HfWeights& weights, const ParameterShape& parameter, const CodeRows& rows) {
  constexpr std::byte kSafe{240};  // 448 * 2^(240 - 127) and less is in fp32
  if (std::ranges::none_of(rows.scales, [&](std::byte scale) { return scale > kSafe; })) return;
  const int64_t columns = parameter.shape.with_dim0(1).elements();
  std::vector<float> values(static_cast<size_t>((rows.end - rows.begin) * columns));
  weights.read_fp32(parameter.name, {.start = {rows.begin, 0}, .size = {rows.end - rows.begin, columns}}, values);
  const int64_t bad = first_nonfinite(Dtype::f32, std::as_bytes(std::span(values)));
  if (bad >= 0) refuse(weights, parameter, rows.begin + bad / columns, bad % columns, "is Inf: its code times its scale is beyond fp32");
}

// All codes, then all scales, of which there are few enough to be read twice.
void write_codes(HfWeights& weights, const ParameterShape& parameter, ShardStream& shard) {
  const WeightForm form = weights.form(parameter.name);
  const int64_t row_codes = code_bytes(form), row_scales = scale_bytes(form);
  std::vector<std::byte> codes, scales;
  shard.begin("codes." + parameter.name, Dtype::u8, {parameter.shape[0], row_codes});
  for_chunks(parameter.shape[0], row_codes, [&](int64_t begin, int64_t end) {
    codes.resize(static_cast<size_t>((end - begin) * row_codes));
    scales.resize(static_cast<size_t>((end - begin) * row_scales));
    weights.read_codes(parameter.name, begin, end, codes, scales);
    const CodeRows rows{.begin = begin, .end = end, .codes = codes, .scales = scales};
    require_numbers(weights, parameter, rows);
    require_finite(weights, parameter, rows);
    shard.write(codes);
  });
  shard.begin("scales." + parameter.name, Dtype::u8, {parameter.shape[0], row_scales});
  for_chunks(parameter.shape[0], row_codes, [&](int64_t begin, int64_t end) {
    scales.resize(static_cast<size_t>((end - begin) * row_scales));
    weights.read_codes(parameter.name, begin, end, {}, scales);
    require_numbers(weights, parameter, {.begin = begin, .end = end, .codes = {}, .scales = scales});
    shard.write(scales);
  });
}

}  // namespace

ImportedModel import_model(const fs::path& folder, const fs::path& output) {
  HfWeights weights(folder);
  const std::vector<TokenizerFile> files = tokenizer_files(weights);
  const std::vector<ParameterShape> parameters = parameter_shapes(model_shape(weights.config().model));
  ImportedModel imported{.architecture = weights.config().architecture};
  const PrecisionPlan plan = resolve_plan(weights.run_config());
  for (const ParameterShape& parameter : parameters) {
    imported.parameters += parameter.shape.elements();
    imported.bytes += bytes_of(weights, plan, parameter);
  }
  for (const TokenizerFile& file : files) imported.bytes += static_cast<int64_t>(file.bytes.size());
  for (const ParameterShape& parameter : parameters) {
    if (weights.form(parameter.name).codes && !keeps_codes(weights, plan, parameter.name))
      log_warning(parameter.name, ": codes in ", folder.string(), ", imported as values: no recipe computes with this module's codes so");
  }
  const CheckpointHead head = head_of(weights);
  PendingFolder pending(output);
  ShardStream shard(pending.path(), imported.bytes);
  for (const ParameterShape& parameter : parameters)
    keeps_codes(weights, plan, parameter.name) ? write_codes(weights, parameter, shard) : write_values(weights, parameter, shard);
  for (const TokenizerFile& file : files) {
    shard.begin(kTokenizerFilePrefix + file.name, Dtype::u8, {static_cast<int64_t>(file.bytes.size())});
    shard.write(std::as_bytes(std::span(file.bytes)));
  }
  weights.require_unchanged();
  write_manifest(assemble_manifest(head, {shard.finish()}), pending.path());
  CheckpointReader(pending.path()).verify();
  pending.publish();
  return imported;
}

}  // namespace mantissa
