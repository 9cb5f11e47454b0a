#include "hf/gguf_reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "hf/export_weights.h"
#include "hf/gguf_model.h"
#include "hf/hf_weights.h"
#include "io/ggml_blocks.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/log.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

constexpr const char *kOutputTensor = "output.weight", *kEmbeddingTensor = "token_embd.weight";
constexpr int64_t kCodeBytes = 16, kScaleBytes = 1;  // a block of MXFP4

GgufFile opened(const std::filesystem::path& path, UnchangedFiles& seen) {
  seen.look_at(path);
  GgufFile file(path);
  seen.look_at(path);
  return file;
}

const GgufTensor* find_tensor(const GgufHeader& header, std::string_view name) {
  const auto found = std::ranges::find(header.tensors(), name, &GgufTensor::name);
  return found != header.tensors().end() ? &*found : nullptr;
}

// Returns whether a tensor stays codes: it is MXFP4, as are all with which it is fused into one parameter.
bool stays_codes(const GgufTensor& tensor, const std::map<std::string_view, GgmlType>& types) {
  if (tensor.type != GgmlType::mxfp4 || tensor.shape.size() < 2) return false;
  static const std::vector<std::vector<std::string>> kFused = {
      {".attn_q.", ".attn_k.", ".attn_v."}, {".ffn_gate.", ".ffn_up."}, {".ffn_gate_exps.", ".ffn_up_exps."}};
  for (const std::vector<std::string>& parts : kFused) {
    for (const std::string& own : parts) {
      const size_t at = tensor.name.find(own);
      if (at == std::string::npos) continue;
      return std::ranges::all_of(parts, [&](const std::string& part) {
        const auto found = types.find(std::string(tensor.name).replace(at, own.size(), part));
        return found == types.end() || found->second == GgmlType::mxfp4;  // GPT-2 has no gate
      });
    }
  }
  return true;
}

void require_model(const GgufHeader& header) {
  const std::string& source = header.source();
  const int64_t files = header.integer(gguf::kSplitCount).value_or(1);
  require(files <= 1, ExitCode::usage, source, ": key \"", gguf::kSplitCount, "\": is one of ", files,
          " files of a model; llama-gguf-split --merge of llama.cpp makes one of them");
  const std::string_view type = header.string(gguf::kType).value_or("model");
  require(type == "model", ExitCode::usage, source, ": key \"", gguf::kType, "\": is \"", printable(shortened(type)),
          "\", and mantissa reads models");
}

}  // namespace

GgufModelFiles::GgufModelFiles(const std::filesystem::path& path) : file_(opened(path, seen_)) {
  require_model(file_.header());
  add_entries();
}

void GgufModelFiles::add_entries() {
  const auto add = [&](const GgufTensor& tensor, Part part, SafetensorsTensor as) {
    const int64_t bytes = safetensors_bytes(as);
    entries_.push_back({std::move(as), 0, bytes, static_cast<int32_t>(places_.size())});
    places_.push_back({&tensor, part});
  };
  std::map<std::string_view, GgmlType> types;
  for (const GgufTensor& tensor : file_.header().tensors()) types.emplace(tensor.name, tensor.type);
  for (const GgufTensor& tensor : file_.header().tensors()) {
    if (tensor.name == kRopeFactors) continue;
    std::vector<int64_t> shape = tensor.shape;
    if (stays_codes(tensor, types)) {
      shape.back() = tensor.shape.back() / 2;
      add(tensor, Part::codes, {.name = tensor.name, .dtype = FileDtype::u8, .shape = shape});
      shape.back() = tensor.shape.back() / 32;
      const std::string name = packed_names(tensor.name, Format::e2m1, Convention::compressed_tensors, ExportFormat::gguf).scales;
      add(tensor, Part::scales, {.name = name, .dtype = FileDtype::u8, .shape = shape});
      continue;
    }
    const FileDtype dtype = tensor.type == GgmlType::bf16  ? FileDtype::bf16
                            : tensor.type == GgmlType::f16 ? FileDtype::f16
                                                           : FileDtype::f32;
    add(tensor, Part::values, {.name = tensor.name, .dtype = dtype, .shape = shape});
  }
  std::ranges::sort(entries_, {}, &SafetensorsEntry::name);
}

// Decodes the blocks in which the bytes lie.
void GgufModelFiles::read(const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> out) {
  const auto& [tensor, part] = places_[static_cast<size_t>(entry.file)];
  const bool as_stored = part == Part::values && (tensor->type == GgmlType::f32 || entry.dtype != FileDtype::f32);
  if (as_stored) return file_.read(*tensor, offset, out);
  const GgmlTypeInfo& info = ggml_type_info(tensor->type);
  const int64_t each = part == Part::values  ? info.block * static_cast<int64_t>(sizeof(float))
                       : part == Part::codes ? kCodeBytes
                                             : kScaleBytes;
  const int64_t first = offset / each, last = ceil_div(offset + std::ssize(out), each);
  std::vector<std::byte> blocks(static_cast<size_t>((last - first) * info.bytes)), decoded(static_cast<size_t>((last - first) * each));
  file_.read(*tensor, first * info.bytes, blocks);
  if (part == Part::values) {
    std::vector<float> values(static_cast<size_t>((last - first) * info.block));
    decode_ggml(tensor->type, blocks, values);
    std::memcpy(out.data(), reinterpret_cast<const std::byte*>(values.data()) + (offset - first * each), out.size());
    return;
  }
  if (part == Part::codes)
    split_mxfp4(blocks, decoded, {});
  else
    split_mxfp4(blocks, {}, decoded);
  std::memcpy(out.data(), decoded.data() + (offset - first * each), out.size());
}

std::vector<float> GgufModelFiles::rope_factors() const {
  const GgufTensor* const tensor = find_tensor(file_.header(), kRopeFactors);
  if (tensor == nullptr) return {};
  constexpr int64_t kMost = 1 << 20;
  require(tensor->elements() <= kMost, ExitCode::data, file_.header().source(), ": ", kRopeFactors, " has ", tensor->elements(),
          " elements, at most ", kMost, " are accepted");
  std::vector<std::byte> blocks(static_cast<size_t>(tensor->bytes));
  file_.read(*tensor, 0, blocks);
  std::vector<float> values(static_cast<size_t>(tensor->elements()));
  decode_ggml(tensor->type, blocks, values);
  return values;
}

std::string GgufModelFiles::config_source() const { return text(file_.path().string(), ": its keys as config.json"); }

std::string GgufModelFiles::config() {
  if (!config_) {
    const GgufHeader& header = file_.header();
    const auto is_mxfp4 = [](const Place& place) { return place.part == Part::codes; };
    config_ =
        gguf_config(header, {.tied = has_tied_output(), .mxfp4 = std::ranges::any_of(places_, is_mxfp4), .rope_factors = rope_factors()});
  }
  return *config_;
}

std::optional<std::string> GgufModelFiles::file(const std::string& name) {
  if (name == "config.json") return config();
  if (!texts_) {
    const GgufHeader& header = file_.header();
    texts_.emplace();
    if (const auto chat = header.string(gguf::kChatTemplate)) texts_->emplace("chat_template.jinja", *chat);
    const std::vector<int64_t> ends = gguf_end_tokens(header);
    if (ends.size() > 1 || (ends.size() == 1 && !header.integer(gguf::kEosToken)))
      texts_->emplace("generation_config.json", Json{{"eos_token_id", ends}}.dump(2) + "\n");
    try {
      if (has_gguf_tokenizer(header)) texts_->merge(gguf_tokenizer(header));
    } catch (const Error& error) {
      if (error.code() != ExitCode::usage) throw;
      log_warning(error.what());
    }
  }
  const auto found = texts_->find(name);
  return found != texts_->end() ? std::optional(found->second) : std::nullopt;
}

bool GgufModelFiles::has_tied_output() const {
  const GgufTensor* const output = find_tensor(file_.header(), kOutputTensor);
  const GgufTensor* const embedding = find_tensor(file_.header(), kEmbeddingTensor);
  if (output == nullptr) return true;
  if (embedding == nullptr || output->type != embedding->type || output->shape != embedding->shape) return false;
  constexpr int64_t kChunk = 1 << 20;
  std::vector<std::byte> a, b;
  for (int64_t at = 0; at < output->bytes; at += kChunk) {
    a.resize(static_cast<size_t>(std::min(kChunk, output->bytes - at)));
    b.resize(a.size());
    file_.read(*output, at, a);
    file_.read(*embedding, at, b);
    if (a != b) return false;
  }
  return true;
}

int64_t read_all_of_gguf(const std::filesystem::path& path, const Progressed& progressed) {
  HfWeights weights(path);
  std::vector<float> values;
  for (const ArchitectureTensor& tensor : weights.tensors()) {
    for_chunks(tensor, [&](const RowRun&, int64_t begin, int64_t end) {
      const int64_t columns = tensor.columns();
      Box box{.start = {begin}, .size = {end - begin}};
      if (tensor.shape.size() > 1) box = {.start = {begin, 0}, .size = {end - begin, columns}};
      values.resize(static_cast<size_t>((end - begin) * columns));
      weights.read_fp32(tensor.parameter, box, values);
      if (progressed) progressed();
      const auto bad = std::ranges::find_if(values, [](float value) { return !std::isfinite(value); });
      if (bad == values.end()) return;
      const int64_t at = bad - values.begin();
      fail(ExitCode::data, path.string(), ": ", weights.element(tensor.parameter, begin + at / columns, at % columns), " is ", *bad);
    });
  }
  weights.require_unchanged();
  return std::ssize(weights.tensors());
}

}  // namespace mantissa
