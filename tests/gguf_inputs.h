// GGUF files, written byte by byte, right or wrong; and what a converter makes of a folder of Hugging Face's form.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hf_folders.h"
#include "io/gguf_file.h"
#include "text/bpe_model.h"

namespace mantissa::test {

// The parts of a file.

template <class T>
std::string le(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
inline std::string gguf_string(const std::string& value) { return le(static_cast<uint64_t>(value.size())) + value; }
inline std::string gguf_key(const std::string& key, GgufType type, const std::string& value) {
  return gguf_string(key) + le(static_cast<uint32_t>(type)) + value;
}
inline std::string gguf_u32(const std::string& key, uint32_t value) { return gguf_key(key, GgufType::u32, le(value)); }
inline std::string gguf_f32(const std::string& key, float value) { return gguf_key(key, GgufType::f32, le(value)); }
inline std::string gguf_bool(const std::string& key, bool value) {
  return gguf_key(key, GgufType::boolean, le(static_cast<uint8_t>(value)));
}
inline std::string gguf_text(const std::string& key, const std::string& value) {
  return gguf_key(key, GgufType::string, gguf_string(value));
}
inline std::string gguf_texts(const std::string& key, const std::vector<std::string>& values) {
  std::string all = le(static_cast<uint32_t>(GgufType::string)) + le(static_cast<uint64_t>(values.size()));
  for (const std::string& value : values) all += gguf_string(value);
  return gguf_key(key, GgufType::array, all);
}
inline std::string gguf_i32s(const std::string& key, const std::vector<int32_t>& values) {
  std::string all = le(static_cast<uint32_t>(GgufType::i32)) + le(static_cast<uint64_t>(values.size()));
  for (const int32_t value : values) all += le(value);
  return gguf_key(key, GgufType::array, all);
}
// Sizes are the innermost first.
inline std::string gguf_info(const std::string& name, const std::vector<uint64_t>& sizes, uint32_t type, uint64_t offset) {
  std::string out = gguf_string(name) + le(static_cast<uint32_t>(sizes.size()));
  for (const uint64_t size : sizes) out += le(size);
  return out + le(type) + le(offset);
}

struct GgufParts {
  std::vector<std::string> keys = {}, infos = {};
  std::string data = {};
  uint32_t version = 3;
  std::optional<uint64_t> tensor_count = {}, key_count = {};  // else those of the parts
  size_t alignment = 32;
};
inline std::string gguf_bytes(const GgufParts& parts) {
  std::string out =
      "GGUF" + le(parts.version) + le(parts.tensor_count.value_or(parts.infos.size())) + le(parts.key_count.value_or(parts.keys.size()));
  for (const std::string& key : parts.keys) out += key;
  for (const std::string& info : parts.infos) out += info;
  if (!parts.data.empty()) out.resize((out.size() + parts.alignment - 1) / parts.alignment * parts.alignment);
  return out + parts.data;
}

struct GgufTensorOf {
  std::vector<int64_t> shape;  // the outermost first
  GgmlType type = GgmlType::f32;
  std::string bytes;
};
using GgufTensors = std::map<std::string, GgufTensorOf>;

inline std::string gguf_bytes(const std::vector<std::string>& keys, const GgufTensors& tensors) {
  GgufParts parts{.keys = keys};
  for (const auto& [name, tensor] : tensors) {
    parts.data.resize((parts.data.size() + parts.alignment - 1) / parts.alignment * parts.alignment);
    parts.infos.push_back(
        gguf_info(name, {tensor.shape.rbegin(), tensor.shape.rend()}, static_cast<uint32_t>(tensor.type), parts.data.size()));
    parts.data += tensor.bytes;
  }
  return gguf_bytes(parts);
}

// Values as a type holds them, rounded in some way of the test's own.
struct Encoded {
  std::string bytes;
  std::vector<float> values;
};

inline Encoded encoded(GgmlType type, const std::vector<float>& values) {
  Encoded out;
  const auto add = [&](auto bits, float value) {
    out.bytes += le(bits);
    out.values.push_back(value);
  };
  if (type == GgmlType::f32)
    for (const float value : values) add(value, value);
  if (type == GgmlType::bf16 || type == GgmlType::f16) {
    for (const float value : values) {
      const auto wide = std::bit_cast<uint32_t>(value);
      const auto exponent = static_cast<int>(wide >> 23 & 0xFF) - 112;
      const auto half =
          static_cast<uint16_t>(type == GgmlType::bf16 ? wide >> 16
                                : exponent < 1         ? 0
                                               : (wide >> 16 & 0x8000) | static_cast<uint32_t>(exponent) << 10 | (wide >> 13 & 0x3FF));
      add(half, std::bit_cast<float>(type == GgmlType::bf16 ? static_cast<uint32_t>(half) << 16 : fp32_bits_from_fp16_bits(half)));
    }
  }
  for (size_t at = 0; (type == GgmlType::q8_0 || type == GgmlType::mxfp4) && at < values.size(); at += 32) {
    float most = 0;
    for (size_t i = 0; i < 32; ++i) most = std::max(most, std::abs(values[at + i]));
    int exponent = 0;
    std::frexp(most, &exponent);        // most < 2^exponent
    exponent = std::max(exponent, -7);  // least of a scale in fp16
    std::vector<float> block;
    if (type == GgmlType::q8_0) {
      const float d = std::ldexp(1.0F, exponent - 7);
      out.bytes += le(static_cast<uint16_t>((exponent - 7 + 15) << 10));
      for (size_t i = 0; i < 32; ++i) {
        const auto q = static_cast<int8_t>(std::clamp(std::round(values[at + i] / d), -127.0F, 127.0F));
        add(q, static_cast<float>(q) * d);
      }
      continue;
    }
    static constexpr std::array kMagnitudes = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
    const float scale = std::ldexp(1.0F, exponent - 2);
    std::array<uint8_t, 32> codes{};
    for (size_t i = 0; i < 32; ++i) {
      const float value = values[at + i] / scale;
      const auto nearest = std::ranges::min_element(kMagnitudes, {}, [&](float one) { return std::abs(one - std::abs(value)); });
      const bool negative = value < 0 && *nearest > 0;
      codes[i] = static_cast<uint8_t>((nearest - kMagnitudes.begin()) | (negative ? 8 : 0));
      out.values.push_back((negative ? -*nearest : *nearest) * scale);
    }
    out.bytes += static_cast<char>(exponent - 2 + 127);
    for (size_t i = 0; i < 16; ++i) out.bytes += static_cast<char>(codes[i] | codes[i + 16] << 4);
  }
  return out;
}

// A tokenizer of bytes, four merges and tokens of other kinds.
struct GgufWords {
  std::vector<std::string> tokens, merges = {"t h", "th e", "1 2", "Ġ the"};
  std::vector<int32_t> types;
  std::vector<std::string> keys = {};

  GgufWords() {
    for (int byte = 0; byte < 256; ++byte) {
      const auto one = static_cast<char>(byte);
      tokens.push_back(letters_of_bytes({&one, 1}));
    }
    for (const char* const merged : {"th", "the", "12", "Ġthe"}) tokens.emplace_back(merged);
    types.assign(tokens.size(), 1);
    for (const auto& [token, type] :
         std::vector<std::pair<const char*, int>>{{"<|end|>", 3}, {"<tool>", 4}, {"[PAD]", 5}, {"<|turn|>", 3}}) {
      tokens.emplace_back(token);
      types.push_back(type);
    }
  }
  static constexpr int32_t kThe = 257, kTwelve = 258, kSpaceThe = 259, kEnd = 260, kTool = 261, kTurn = 263;

  GgufHeader header(const std::vector<std::string>& more = {}) const {
    GgufParts parts{.keys = keys};
    parts.keys.insert(parts.keys.end(), more.begin(), more.end());
    const std::string bytes = gguf_bytes(parts);
    return {bytes, std::ssize(bytes), "FILE"};
  }
  GgufWords with(const std::string& pre, const std::string& model = "gpt2") const {
    GgufWords out = *this;
    out.keys = {gguf_text("tokenizer.ggml.model", model),      gguf_text("tokenizer.ggml.pre", pre),
                gguf_texts("tokenizer.ggml.tokens", tokens),   gguf_i32s("tokenizer.ggml.token_type", types),
                gguf_texts("tokenizer.ggml.merges", merges),   gguf_u32("tokenizer.ggml.eos_token_id", kEnd),
                gguf_u32("tokenizer.ggml.bos_token_id", kTurn)};
    return out;
  }
};

// A folder as llama.cpp's convert_hf_to_gguf.py converts it: the test's own words for names, layouts and keys.
class ConvertedFolder {
 public:
  using TypeOf = std::function<GgmlType(const std::string& name, const std::vector<int64_t>& shape)>;

  explicit ConvertedFolder(const std::string& folder, TypeOf type_of = {}) : folder_(folder), type_of_(std::move(type_of)) {
    const nlohmann::json config = nlohmann::json::parse(read_file(folder + "/config.json"));
    type_ = config.at("model_type");
    model_ = read_architecture_config(config.dump(), "config.json").model;
    for (const std::string& name : folder_.names()) add(name);
    for (auto& [name, stack] : stacks_) {
      std::vector<int64_t> shape = stack.begin()->second.shape;
      shape.insert(shape.begin(), static_cast<int64_t>(stack.size()));
      std::vector<float> all;
      for (size_t e = 0; e < stack.size(); ++e) all.insert(all.end(), stack.at(e).values.begin(), stack.at(e).values.end());
      put(name, {shape, all});
    }
    add_keys();
  }

  std::vector<std::string> keys;
  GgufTensors tensors;

  std::string bytes() const { return gguf_bytes(keys, tensors); }
  void write(const std::string& path) const { write_file(path, bytes()); }
  // Writes the values that the types hold, in F32.
  void write_values(const std::string& path) const {
    GgufTensors wide;
    for (const auto& [name, values] : rounded_) wide[name] = {tensors.at(name).shape, GgmlType::f32, encoded(GgmlType::f32, values).bytes};
    write_file(path, gguf_bytes(keys, wide));
  }
  std::string key_of(const std::string& key) const { return architecture() + "." + key; }
  std::string architecture() const {
    if (type_ == "qwen3_moe") return "qwen3moe";
    return type_ == "gpt_oss" ? "gpt-oss" : type_ == "mixtral" ? "llama" : type_;
  }

 private:
  struct Values {
    std::vector<int64_t> shape;
    std::vector<float> values;
  };

  void put(const std::string& name, const Values& tensor) {
    const GgmlType type = type_of_ ? type_of_(name, tensor.shape) : GgmlType::f32;
    const Encoded as = encoded(type, tensor.values);
    tensors[name] = {.shape = tensor.shape, .type = type, .bytes = as.bytes};
    rounded_[name] = as.values;
  }

  static Values transposed(const Values& from) {  // each matrix
    const size_t rank = from.shape.size();
    const auto rows = static_cast<size_t>(from.shape[rank - 2]), columns = static_cast<size_t>(from.shape[rank - 1]);
    Values out = from;
    std::swap(out.shape[rank - 2], out.shape[rank - 1]);
    for (size_t first = 0; first < from.values.size(); first += rows * columns)
      for (size_t r = 0; r < rows; ++r)
        for (size_t c = 0; c < columns; ++c) out.values[first + c * rows + r] = from.values[first + r * columns + c];
    return out;
  }
  // Rows (head, half, j) become (head, j, half).
  static Values permuted(const Values& from, int64_t heads) {
    const auto rows = static_cast<size_t>(from.shape[0]), columns = from.values.size() / rows, head = rows / static_cast<size_t>(heads);
    Values out = from;
    for (size_t row = 0; row < rows; ++row) {
      const size_t of = row / head, half = row % head / (head / 2), j = row % (head / 2), to = of * head + 2 * j + half;
      std::copy_n(from.values.begin() + static_cast<ptrdiff_t>(row * columns), columns,
                  out.values.begin() + static_cast<ptrdiff_t>(to * columns));
    }
    return out;
  }
  // Every second one of the last dimension.
  static Values every_second(const Values& from, size_t first) {
    Values out{.shape = from.shape, .values = {}};
    out.shape.back() /= 2;
    for (size_t i = first; i < from.values.size(); i += 2) out.values.push_back(from.values[i]);
    return out;
  }

  void add(const std::string& hf) {
    const Values tensor{folder_.shape(hf), folder_.values(hf)};
    std::string name = hf;
    for (const char* const base : {"model.", "transformer."})
      if (name.starts_with(base)) name = name.substr(std::strlen(base));
    static const std::map<std::string, std::string> kOuter = {
        {"embed_tokens.weight", "token_embd.weight"}, {"wte.weight", "token_embd.weight"},   {"wpe.weight", "position_embd.weight"},
        {"norm.weight", "output_norm.weight"},        {"ln_f.weight", "output_norm.weight"}, {"ln_f.bias", "output_norm.bias"},
        {"lm_head.weight", "output.weight"}};
    if (const auto outer = kOuter.find(name); outer != kOuter.end()) return put(outer->second, tensor);
    const size_t begin = name.find('.') + 1, end = name.find('.', begin);
    const std::string block = "blk." + name.substr(begin, end - begin) + ".", part = name.substr(end + 1);
    if (type_ == "gpt_oss" && part.starts_with("mlp.experts.")) return add_gpt_oss_experts(block, part.substr(12), tensor);
    if (const size_t experts = part.find(".experts."); experts != std::string::npos) {
      const std::string rest = part.substr(experts + 9), linear = rest.substr(rest.find('.') + 1);
      static const std::map<std::string, std::string> kLinears = {{"gate_proj.weight", "gate"}, {"w1.weight", "gate"},
                                                                  {"up_proj.weight", "up"},     {"w3.weight", "up"},
                                                                  {"down_proj.weight", "down"}, {"w2.weight", "down"}};
      stacks_[block + "ffn_" + kLinears.at(linear) + "_exps.weight"][std::stoul(rest)] = tensor;
      return;
    }
    if (part == "self_attn.sinks") return put(block + "attn_sinks.weight", tensor);
    const std::string stem = part.substr(0, part.rfind('.'));
    static const std::map<std::string, std::string> kParts = {{"input_layernorm", "attn_norm"},
                                                              {"self_attn.q_proj", "attn_q"},
                                                              {"self_attn.k_proj", "attn_k"},
                                                              {"self_attn.v_proj", "attn_v"},
                                                              {"self_attn.o_proj", "attn_output"},
                                                              {"self_attn.q_norm", "attn_q_norm"},
                                                              {"self_attn.k_norm", "attn_k_norm"},
                                                              {"mlp.gate_proj", "ffn_gate"},
                                                              {"mlp.up_proj", "ffn_up"},
                                                              {"mlp.down_proj", "ffn_down"},
                                                              {"mlp.gate", "ffn_gate_inp"},
                                                              {"mlp.router", "ffn_gate_inp"},
                                                              {"block_sparse_moe.gate", "ffn_gate_inp"},
                                                              {"ln_1", "attn_norm"},
                                                              {"ln_2", "ffn_norm"},
                                                              {"attn.c_attn", "attn_qkv"},
                                                              {"attn.c_proj", "attn_output"},
                                                              {"mlp.c_fc", "ffn_up"},
                                                              {"mlp.c_proj", "ffn_down"}};
    const char* const second_norm = type_ == "gpt_oss" ? "post_attention_norm" : "ffn_norm";
    const std::string own = stem == "post_attention_layernorm" ? second_norm : kParts.at(stem);
    const bool conv = type_ == "gpt2" && tensor.shape.size() == 2, pairs = type_ == "llama" || type_ == "mixtral";
    Values as = conv ? transposed(tensor) : tensor;
    if (pairs && own == "attn_q") as = permuted(as, model_.num_attention_heads);
    if (pairs && own == "attn_k") as = permuted(as, model_.kv_heads());
    put(block + own + part.substr(stem.size()), as);
  }

  void add_gpt_oss_experts(const std::string& block, const std::string& part, const Values& tensor) {
    const bool bias = part.ends_with("_bias");
    const char* const kind = bias ? ".bias" : ".weight";
    const auto stored = [&](const Values& one) { return bias ? one : transposed(one); };
    if (part.starts_with("down_proj")) return put(block + "ffn_down_exps" + kind, stored(tensor));
    put(block + "ffn_gate_exps" + kind, stored(every_second(tensor, 0)));
    put(block + "ffn_up_exps" + kind, stored(every_second(tensor, 1)));
  }

  void add_keys() {
    keys.push_back(gguf_text("general.architecture", architecture()));
    const auto count = [&](const char* key, int64_t value) { keys.push_back(gguf_u32(key_of(key), static_cast<uint32_t>(value))); };
    count("context_length", model_.max_position_embeddings);
    count("embedding_length", model_.hidden_size);
    count("block_count", model_.num_layers);
    count("feed_forward_length", type_ == "mixtral" || type_ == "gpt_oss" ? model_.moe->intermediate_size : model_.intermediate_size);
    count("attention.head_count", model_.num_attention_heads);
    if (type_ == "gpt2") return keys.push_back(gguf_f32(key_of("attention.layer_norm_epsilon"), static_cast<float>(model_.norm_eps)));
    count("attention.head_count_kv", model_.kv_heads());
    count("attention.key_length", model_.head_size());
    count("attention.value_length", model_.head_size());
    count("rope.dimension_count", model_.head_size());
    count("vocab_size", *model_.vocab_size);
    keys.push_back(gguf_f32(key_of("attention.layer_norm_rms_epsilon"), static_cast<float>(model_.norm_eps)));
    keys.push_back(gguf_f32(key_of("rope.freq_base"), static_cast<float>(model_.rope_theta)));
    if (!model_.moe) return;
    count("expert_count", model_.moe->num_experts);
    count("expert_used_count", model_.moe->num_experts_per_tok);
    if (type_ != "mixtral") count("expert_feed_forward_length", model_.moe->intermediate_size);
    if (type_ != "gpt_oss") return;
    count("attention.sliding_window", *model_.sliding_window);
    keys.push_back(gguf_text(key_of("rope.scaling.type"), "yarn"));
    keys.push_back(gguf_f32(key_of("rope.scaling.factor"), static_cast<float>(model_.rope_scaling->factor)));
    count("rope.scaling.original_context_length", model_.rope_scaling->original_max_position_embeddings);
  }

  HfFolder folder_;
  TypeOf type_of_;
  std::string type_;
  ModelConfig model_;
  std::map<std::string, std::map<size_t, Values>> stacks_;
  std::map<std::string, std::vector<float>> rounded_;
};

}  // namespace mantissa::test
