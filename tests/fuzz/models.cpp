// Accepted: the tensors of a GGUF file are inside it, apart and as they were written, and all that its keys make is read or refused; a
// folder for mlx-lm gives every value of its model.
#include <algorithm>
#include <cmath>
#include <vector>

#include "hf/gguf_reader.h"
#include "hf/hf_weights.h"
#include "io/ggml_blocks.h"
#include "models/model_shape.h"
#include "targets.h"

namespace mantissa::fuzz {
namespace {

void require_apart(const GgufHeader& header, int64_t bytes) {
  int64_t end = 0;
  for (const GgufTensor& tensor : header.tensors()) {
    promise(tensor.begin >= end && tensor.begin % header.alignment() == 0, "tensors are apart, and aligned");
    const GgmlTypeInfo& info = ggml_type_info(tensor.type);
    promise(tensor.bytes == tensor.elements() / info.block * info.bytes, "a tensor has the bytes of its shape");
    end = tensor.begin + tensor.bytes;
  }
  promise(end <= bytes, "tensors are inside the file");
}

// Asks for each key as every type; only one answers.
void require_typed(const GgufHeader& header) {
  for (const auto& entry : header.keys()) {
    const std::string& key = entry.first;
    int answers = 0;
    answers += accepted([&] { header.boolean(key); }) ? 1 : 0;
    answers += accepted([&] { header.number(key); }) ? 1 : 0;
    answers += accepted([&] { header.string(key); }) ? 1 : 0;
    answers += accepted([&] { header.strings(key); }) ? 1 : 0;
    answers += accepted([&] { header.integers(key); }) ? 1 : 0;
    promise(answers <= 1, "a key has one type");
  }
}

}  // namespace

bool gguf_file(std::string_view input) {
  const MemoryFile content(input);
  std::optional<GgufFile> file;
  if (!accepted([&] { file.emplace(content.path()); })) return false;
  const GgufHeader& header = file->header();
  require_apart(header, static_cast<int64_t>(input.size()));
  require_typed(header);
  for (const GgufTensor& tensor : header.tensors()) {
    std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes));
    file->read(tensor, 0, bytes);
    promise(std::ranges::equal(bytes, std::as_bytes(std::span(input.substr(static_cast<size_t>(tensor.begin), bytes.size())))),
            "the bytes of a tensor are those of the file");
    std::vector<float> values(static_cast<size_t>(tensor.elements()));
    decode_ggml(tensor.type, bytes, values);
  }
  std::string config;
  if (accepted([&] { config = gguf_config(header, {.rope_factors = {1.0F, 2.0F}}); }))
    accepted([&] { read_architecture_config(config, "config.json"); });
  accepted([&] {
    const auto files = gguf_tokenizer(header);
    const Tokenizer tokenizer =
        Tokenizer::bpe({.tokenizer = files.at("tokenizer.json"), .config = files.at("tokenizer_config.json")}, "FILE");
    promise(tokenizer.size() <= static_cast<int64_t>(input.size()), "a token takes bytes of the file");
  });
  accepted([&] { HfWeights weights(content.path()); });
  return true;
}

bool mlx_folder(std::string_view input) {
  static const ScratchFolder scratch;
  const size_t zero = input.find('\0');
  scratch.file("config.json", input.substr(0, zero));
  scratch.file("model.safetensors", zero == std::string_view::npos ? "" : input.substr(zero + 1));
  return accepted([&] {
    HfWeights weights(scratch.path);
    require(weights.format() == ExportFormat::mlx, ExitCode::data, "this is no folder for mlx-lm");
    for (const auto& [path, scheme] : weights.packed_modules())
      promise(scheme.format == Format::e4m3 || scheme.format == Format::e2m1, "a scheme is MXFP8 or MXFP4");
    for (const ParameterShape& parameter : parameter_shapes(model_shape(weights.config().model))) {
      std::vector<float> values(static_cast<size_t>(parameter.shape.elements()));
      weights.read_fp32(parameter.name, whole_box(dimensions(parameter.shape)), values);
    }
    weights.run_config();
  });
}

}  // namespace mantissa::fuzz
