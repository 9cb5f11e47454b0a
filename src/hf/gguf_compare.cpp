#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "hf/gguf_export.h"
#include "hf/gguf_model.h"
#include "mantissa/formats/bf16.h"
#include "mantissa/formats/element.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

using GgufVerdict = std::optional<std::string>;

std::string_view bytes_in(const GgufHeader& header, const GgufValue& value) {
  return header.front().substr(static_cast<size_t>(value.begin), static_cast<size_t>(value.end - value.begin));
}

// Returns the strings of an array, as they lie in a file.
std::vector<std::string_view> strings_in(std::string_view bytes) {
  std::vector<std::string_view> out;
  while (bytes.size() >= sizeof(uint64_t)) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    out.push_back(bytes.substr(sizeof length, length));
    bytes.remove_prefix(sizeof length + out.back().size());
  }
  return out;
}

// Says where the values of a key differ.
std::string value_difference(const GgufKeys::Entry& expected, const GgufHeader& header, const GgufValue& found) {
  if (expected.type == GgufType::string) {
    const auto shown = [](std::string_view bytes) { return Json(std::string(bytes.substr(sizeof(uint64_t)))).shown(); };
    return text("is ", shown(bytes_in(header, found)), ", not ", shown(expected.bytes));
  }
  if (expected.type != GgufType::array) return "has another value";
  if (found.type != expected.type || found.element != expected.element || found.count != expected.count)
    return text("has ", found.count, " elements, not ", expected.count);
  if (expected.element != GgufType::string) {
    const size_t width = expected.bytes.size() / static_cast<size_t>(std::max<int64_t>(1, expected.count));
    const auto [here, there] = std::ranges::mismatch(expected.bytes, bytes_in(header, found));
    return text("[", static_cast<size_t>(here - expected.bytes.begin()) / width, "] differs");
  }
  const std::vector<std::string_view> wanted = strings_in(expected.bytes), given = strings_in(bytes_in(header, found));
  const auto [here, there] = std::ranges::mismatch(wanted, given);
  return text("[", here - wanted.begin(), "] is ", Json(std::string(*there)).shown(), ", not ", Json(std::string(*here)).shown());
}

// Compares keys of the architecture and the tokenizer with those that an export of the model has.
GgufVerdict key_difference(const GgufHeader& header, Architecture architecture, const ExportSource& source) {
  const ModelConfig& model = source.model->config.model;
  GgufKeys keys;
  add_gguf_model(architecture, model, keys);
  add_gguf_tokenizer(source.files_beside(), *model.vocab_size, keys);
  std::set<std::string_view> expected;
  for (const GgufKeys::Entry& entry : keys.entries()) {
    expected.insert(entry.key);
    const GgufValue* const found = header.find(entry.key);
    if (found == nullptr) return text("lacks the key ", entry.key);
    const bool typed = found->type == entry.type && (entry.type != GgufType::array || found->element == entry.element);
    if (!typed) return text(entry.key, " is of another type");
    if (found->count != entry.count || bytes_in(header, *found) != entry.bytes)
      return text(entry.key, ' ', value_difference(entry, header, *found));
  }
  const std::string of_architecture = text(gguf_architecture(architecture), '.');
  for (const auto& [key, value] : header.keys())
    if ((key.starts_with(of_architecture) || key.starts_with("tokenizer.")) && !expected.contains(key))
      return text("has the key ", key, ", which the model does not");
  return {};
}

// Returns the tensors that general.tensor_extra keeps from inputs of 4 bits.
std::set<std::string> without_four_bits(const GgufHeader& header) {
  const auto names = header.strings(gguf::kExtraNames);
  const GgufValue* const allowed = header.find(gguf::kFourBitInputs);
  if (!names || allowed == nullptr || allowed->element != GgufType::boolean || allowed->count != std::ssize(*names)) return {};
  std::set<std::string> out;
  for (size_t i = 0; i < names->size(); ++i)
    if (bytes_in(header, *allowed)[i] == '\0') out.emplace((*names)[i]);
  return out;
}

// Returns the values of whole rows of a file.
std::vector<float> decoded_rows(std::span<const std::byte> bytes, GgmlType type) {
  std::vector<float> out;
  if (type == GgmlType::f32) {
    out.resize(bytes.size() / sizeof(float));
    std::memcpy(out.data(), bytes.data(), bytes.size());
  } else if (type == GgmlType::bf16) {
    std::vector<bf16> narrow(bytes.size() / sizeof(bf16));
    std::memcpy(narrow.data(), bytes.data(), bytes.size());
    for (const bf16 value : narrow) out.push_back(to_float(value));
  } else {
    for (size_t block = 0; block < bytes.size(); block += kMxfp4Bytes) {
      const auto scale = std::to_integer<uint8_t>(bytes[block]);
      for (size_t element = 0; element < kMxfp4Elements; ++element) {
        const auto pair = std::to_integer<unsigned>(bytes[block + 1 + element % (kMxfp4Elements / 2)]);
        const auto code = static_cast<uint8_t>(element < kMxfp4Elements / 2 ? pair & 15U : pair >> 4U);
        out.push_back(std::bit_cast<float>(E2M1::decode(code, scale)));
      }
    }
  }
  return out;
}

bool has_codes_of(GgmlType type, const Quantization& how) {
  return type == GgmlType::mxfp4 && how.format == Format::e2m1 && std::cmp_equal(how.block_cols, kMxfp4Elements);
}

// Compares rows of a tensor with what forward reads.
class RowComparison {
 public:
  RowComparison(const GgufTensor& found, const ArchitectureTensor& tensor, ForwardWeights& weights)
      : found_(found),
        tensor_(tensor),
        weights_(weights),
        how_(weights.quantized(tensor.parameter)),
        narrow_(found.type == GgmlType::bf16 && weights.rounds(tensor.parameter)),
        zeros_alike_(found.type == GgmlType::mxfp4 || how_.rule == ScaleRule::flashinfer) {}

  GgufVerdict of(std::span<const std::byte> bytes, int64_t begin, int64_t end) {
    if (has_codes_of(found_.type, how_))
      if (GgufVerdict difference = of_codes(bytes, begin, end)) return difference;
    return of_values(bytes, begin, end);
  }

 private:
  std::string place(int64_t begin, size_t i) const {
    const auto index = static_cast<int64_t>(i);
    return element_name(tensor_, begin + index / tensor_.columns(), index % tensor_.columns());
  }

  GgufVerdict of_codes(std::span<const std::byte> bytes, int64_t begin, int64_t end) {
    const std::vector<std::byte> expected = file_rows(tensor_, begin, end, [&](const RowRun& run) {
      const int64_t first = run.row, last = run.row + run.rows;
      return mxfp4_blocks(weights_.codes(tensor_.parameter, first, last), weights_.scales(tensor_.parameter, first, last));
    });
    const auto [here, there] = std::ranges::mismatch(expected, bytes);
    if (here == expected.end()) return {};
    const auto at = static_cast<size_t>(here - expected.begin()), block = at / kMxfp4Bytes, in_block = at % kMxfp4Bytes;
    const unsigned wanted = std::to_integer<unsigned>(*here), given = std::to_integer<unsigned>(*there);
    if (in_block == 0)
      return text("the scale of the block at ", place(begin, block * kMxfp4Elements), " is ", given, ", forward's is ", wanted);
    const bool low = ((wanted ^ given) & 15U) != 0;
    const size_t element = in_block - 1 + (low ? 0 : kMxfp4Elements / 2);
    return text("the code of ", place(begin, block * kMxfp4Elements + element), " is ", low ? given & 15U : given >> 4U, ", forward's is ",
                low ? wanted & 15U : wanted >> 4U);
  }

  GgufVerdict of_values(std::span<const std::byte> bytes, int64_t begin, int64_t end) {
    const std::vector<float> there = decoded_rows(bytes, found_.type);
    const std::vector<std::byte> read = file_rows(tensor_, begin, end, [&](const RowRun& run) {
      std::vector<float> values(static_cast<size_t>(run.rows * tensor_.columns()));
      weights_.read(tensor_.parameter, run.row, run.row + run.rows, values);
      const auto raw = std::as_bytes(std::span(values));
      return std::vector<std::byte>(raw.begin(), raw.end());
    });
    for (size_t i = 0; i < there.size(); ++i) {
      float here = 0;
      std::memcpy(&here, read.data() + i * sizeof here, sizeof here);
      if (narrow_) here = to_float(to_bf16(here));
      if (std::bit_cast<uint32_t>(there[i]) == std::bit_cast<uint32_t>(here)) continue;
      if (zeros_alike_ && there[i] == 0.0F && here == 0.0F) continue;
      return text(place(begin, i), " is ", there[i], ", forward multiplies by ", here);
    }
    return {};
  }

  const GgufTensor& found_;
  const ArchitectureTensor& tensor_;
  ForwardWeights& weights_;
  Quantization how_;
  bool narrow_;       // forward rounds the values to bf16 as it reads them
  bool zeros_alike_;  // a decoder may give the code of -0 as 0
};

GgufVerdict tensor_difference(const GgufFile& file, const GgufTensor& found, const ArchitectureTensor& tensor, ForwardWeights& weights) {
  if (found.shape != tensor.shape) return text(tensor.name, " is ", shape_text(found.shape), ", not ", shape_text(tensor.shape));
  if (found.type != GgmlType::f32 && found.type != GgmlType::bf16 && found.type != GgmlType::mxfp4)
    return text(tensor.name, " is ", ggml_type_info(found.type).name, ", and forward's values are compared in F32, BF16 and MXFP4");
  const int64_t row_bytes = found.bytes / tensor.rows();
  RowComparison comparison(found, tensor, weights);
  GgufVerdict difference;
  std::vector<std::byte> bytes;
  for_file_rows(tensor, [&](int64_t begin, int64_t end) {
    if (difference) return;
    bytes.resize(static_cast<size_t>((end - begin) * row_bytes));
    file.read(found, begin * row_bytes, bytes);
    difference = comparison.of(bytes, begin, end);
  });
  return difference;
}

GgufVerdict rope_difference(const GgufFile& file, const std::vector<float>& expected, const GgufTensor* found) {
  if (expected.empty() && found == nullptr) return {};
  if (expected.empty()) return text("has ", kRopeFactors, ", and the model has none");
  if (found == nullptr) return text("lacks ", kRopeFactors);
  std::vector<float> there(expected.size());
  const bool fits = found->type == GgmlType::f32 && found->shape == std::vector<int64_t>{std::ssize(expected)};
  if (fits) file.read(*found, 0, std::as_writable_bytes(std::span(there)));
  return fits && there == expected ? GgufVerdict() : text(kRopeFactors, " is not the model's");
}

}  // namespace

std::optional<std::string> gguf_difference(GgufFile& file, ExportSource& source) {
  const GgufHeader& header = file.header();
  const ModelConfig& model = source.model->config.model;
  const Architecture architecture = architecture_of(model);
  if (GgufVerdict difference = key_difference(header, architecture, source)) return difference;
  std::map<std::string_view, const GgufTensor*> found;
  for (const GgufTensor& tensor : header.tensors()) found[tensor.name] = &tensor;
  const std::set<std::string> eight_bits = without_four_bits(header);
  const auto take = [&](std::string_view name) {
    const auto node = found.extract(name);
    return node.empty() ? nullptr : node.mapped();
  };
  for (const ArchitectureTensor& tensor : architecture_tensors(architecture, model, ExportFormat::gguf)) {
    const GgufTensor* const own = take(tensor.name);
    if (own == nullptr) return text("lacks the tensor ", tensor.name);
    if (GgufVerdict difference = tensor_difference(file, *own, tensor, *source.weights)) return difference;
    const bool rounded = own->type == GgmlType::mxfp4 && !eight_bits.contains(tensor.name);
    if (rounded && !source.weights->has_mxfp4_inputs(tensor.parameter))
      return text(gguf::kFourBitInputs, " is not false for ", tensor.name,
                  ": llama.cpp multiplies it by inputs of 4 bits on Blackwell, as forward does not");
  }
  if (GgufVerdict difference = rope_difference(file, gguf_rope_factors(architecture, model), take(kRopeFactors))) return difference;
  if (!found.empty()) return text("has the tensor ", found.begin()->first, ", which the model does not");
  return {};
}

int64_t gguf_tensors_of_codes(const GgufFile& file, const ExportSource& source) {
  const ModelConfig& model = source.model->config.model;
  std::map<std::string_view, GgmlType> types;
  for (const GgufTensor& tensor : file.header().tensors()) types[tensor.name] = tensor.type;
  return std::ranges::count_if(architecture_tensors(architecture_of(model), model, ExportFormat::gguf), [&](const auto& tensor) {
    return types.contains(tensor.name) && has_codes_of(types[tensor.name], source.weights->quantized(tensor.parameter));
  });
}

std::optional<std::string> gguf_tokenizer_left_out(const GgufFile& file, const ExportSource& source) {
  const ExportFiles beside = source.files_beside();
  const bool has_own = std::ranges::any_of(beside.files, [](const TokenizerFile& one) {
    return one.name == "tokenizer.json" || one.name == "tokenizer.model" || one.name == "vocab.json";
  });
  if (!has_own || file.header().string(gguf::kTokenizerModel) != kNoGgufVocabulary) return {};
  return text("lacks the tokenizer of the model: ", kGgufWithoutTokenizer);
}

std::vector<std::string> gguf_allowed_differences(const GgufFile& file) {
  const auto noted = file.header().strings(gguf::kDifferences).value_or(std::vector<std::string_view>());
  return {noted.begin(), noted.end()};
}

std::vector<std::string> gguf_roundings(const GgufFile& file, const ExportSource& source) {
  const ModelConfig& model = source.model->config.model;
  const Architecture architecture = architecture_of(model);
  std::map<std::string_view, GgmlType> types;
  for (const GgufTensor& tensor : file.header().tensors()) types[tensor.name] = tensor.type;
  const std::set<std::string> eight_bits = without_four_bits(file.header());
  int64_t from_values = 0, from_codes = 0, narrowed = 0, four_bits = 0, own_rule = 0, unquantized = 0;
  for (const ArchitectureTensor& tensor : architecture_tensors(architecture, model, ExportFormat::gguf)) {
    const ModulePrecision& module = source.weights->module_of(tensor.parameter);
    const bool multiplied = tensor.parameter.ends_with(".weight") && has_gemm(module.module.kind) && types.contains(tensor.name);
    if (!multiplied) continue;
    const bool quantized = source.weights->input_format(tensor.parameter) != Format::none;
    if (types[tensor.name] == GgmlType::mxfp4) ++(quantized ? from_codes : from_values);
    const bool rounded = types[tensor.name] == GgmlType::mxfp4 && !eight_bits.contains(tensor.name);
    if (rounded && !source.weights->has_mxfp4_inputs(tensor.parameter)) ++four_bits;
    if (rounded && source.weights->has_mxfp4_inputs(tensor.parameter)) ++own_rule;
    if (types[tensor.name] == GgmlType::bf16 && module.recipe.compute == Dtype::f32 && !quantized) ++narrowed;
    if (types[tensor.name] != GgmlType::mxfp4 && quantized) ++unquantized;
  }
  std::vector<std::string> lines;
  const char* const eight = "to Q8_0, int8 in blocks of 32 with a scale in fp16, on CPUs, and to 8 bits on GPUs";
  if (from_values > 0)
    lines.push_back(text("llama.cpp rounds inputs of ", count_text(from_values, "MXFP4 tensor"), ' ', eight,
                         "; forward here reads them in high precision"));
  if (from_codes > 0)
    lines.push_back(text("llama.cpp rounds inputs of ", count_text(from_codes, "MXFP4 tensor"), ' ', eight,
                         "; forward here rounds them to another format"));
  if (four_bits > 0)
    lines.push_back(
        text("llama.cpp rounds inputs of ", count_text(four_bits, "MXFP4 tensor"),
             " to 4 bits on GPUs of the generation Blackwell, because the file does not keep it from that; forward here does not"));
  if (own_rule > 0)
    lines.push_back(
        text("llama.cpp rounds inputs of ", count_text(own_rule, "MXFP4 tensor"),
             " to 4 bits on GPUs of the generation Blackwell, as forward here does, but by a scale rule of its own: the rounded "
             "logarithm of the largest magnitude of a block"));
  if (unquantized > 0)
    lines.push_back(text("llama.cpp does not quantize inputs of ", count_text(unquantized, "tensor"), "; forward here does"));
  if (narrowed > 0)
    lines.push_back(text("llama.cpp rounds inputs of ", count_text(narrowed, "BF16 tensor"), " to bf16; forward here reads them in fp32"));
  if (architecture == Architecture::gpt2) lines.emplace_back("llama.cpp computes GELU by a table in fp16; forward here does not");
  lines.emplace_back("llama.cpp keeps keys and values in fp16 unless told otherwise (--cache-type-k f32 --cache-type-v f32)");
  return lines;
}

}  // namespace mantissa
