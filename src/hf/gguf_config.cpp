#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <set>

#include "hf/gguf_model.h"
#include "hf/gguf_reader.h"
#include "hf/hugging_face.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

// The first of those that have one name (gguf_architecture()).
constexpr std::array kGgufArchitectures = {Architecture::llama,     Architecture::qwen2,   Architecture::qwen3,
                                           Architecture::qwen3_moe, Architecture::gpt_oss, Architecture::gpt2};

constexpr double kDefaultRopeBase = 1e4;  // that of llama.cpp

constexpr const char* kTruncateDifference = "model.rope_scaling.truncate:";

// Keys that change nothing that the model computes.
constexpr std::array kIgnored = {gguf::kVocabulary, "ARCH.rope.scaling.finetuned", "ARCH.tensor_data_layout"};

// Reads keys of the architecture, and tracks which were read.
class ModelKeys {
 public:
  ModelKeys(const GgufHeader& header, std::string_view architecture) : header_(header), architecture_(architecture) {}

  std::optional<int64_t> integer(const char* key) {
    require_one(key);
    return header_.integer(name(key));
  }
  std::optional<double> number(const char* key) {
    require_one(key);
    return header_.number(name(key));
  }
  std::optional<std::string_view> string(const char* key) { return header_.string(name(key)); }
  int64_t needed(const char* key) { return needed(key, integer(key)); }
  double needed_number(const char* key) { return needed(key, number(key)); }
  void ignore(const char* key) { name(key); }

  // Requires that a number is absent or one of these.
  void only(const char* key, const std::vector<double>& allowed, const char* why) {
    const std::optional<double> value = number(key);
    if (value && std::ranges::find(allowed, *value) == allowed.end()) refuse(key, text("is ", *value, ": ", why));
  }
  void must_be(const char* key, bool allowed, const char* why) {
    if (header_.boolean(name(key)).value_or(allowed) != allowed) refuse(key, text("is ", allowed ? "false" : "true", ": ", why));
  }
  [[noreturn]] void refuse(const char* key, const std::string& why) {
    fail(ExitCode::usage, header_.source(), ": key \"", name(key), "\": ", why);
  }

  bool has_tensor(std::string_view tensor) const {
    return std::ranges::find(header_.tensors(), tensor, &GgufTensor::name) != header_.tensors().end();
  }

  void require_all_known() const {
    std::vector<std::string> unknown;
    for (const auto& [key, value] : header_.keys())
      if (key.starts_with(architecture_ + ".") && !known_.contains(key)) unknown.push_back(printable(shortened(key)));
    constexpr size_t kShown = 10;
    const size_t more = unknown.size() > kShown ? unknown.size() - kShown : 0;
    unknown.resize(unknown.size() - more);
    require(unknown.empty(), ExitCode::usage, header_.source(),
            ": keys that mantissa does not know, and that may change what the model computes:\n  ", joined(unknown, "\n  "),
            more > 0 ? text("\n  and ", more, " more") : "");
  }

 private:
  void require_one(const char* key) {
    const GgufValue* const value = header_.find(name(key));
    if (value != nullptr && value->type == GgufType::array)
      refuse(key, "is a list with a value for each layer; layers of mantissa are alike");
  }
  std::string name(const char* key) { return *known_.insert(gguf_key(key, architecture_)).first; }
  template <class T>
  T needed(const char* key, const std::optional<T>& value) {
    require(value.has_value(), ExitCode::data, header_.source(), ": has no key \"", name(key), '"');
    return *value;
  }

  const GgufHeader& header_;
  std::string architecture_;
  std::set<std::string> known_;
};

// Llama3's scaling, whose file has only what the wavelengths are divided by. original / low and original / high say it all; files of others
// have low 1.
struct Llama3Scaling {
  double factor, original, high, low = 1.0;

  double of(double wavelength) const {
    if (wavelength < original / high) return 1.0;
    if (wavelength > original / low) return factor;
    const double smooth = (original / wavelength - low) / (high - low);
    return 1.0 / ((1.0 - smooth) / factor + smooth);
  }
};

class RopeFactors {
 public:
  RopeFactors(const std::vector<float>& factors, double base) : factors_(factors), base_(base) {}

  bool scale() const {
    return std::ranges::any_of(factors_, [](float factor) { return factor != 1.0F; });
  }
  // Returns the scaling that gives these factors; none: it is another.
  std::optional<Llama3Scaling> llama3(const std::vector<double>& originals) const {
    const auto factor = static_cast<double>(*std::ranges::max_element(factors_));
    for (const double original : originals) {
      const Llama3Scaling scaling{.factor = factor, .original = original, .high = kHigh};
      if (gives(scaling)) return scaling;
    }
    const std::optional<Llama3Scaling> solved = solve(factor);
    return solved && gives(*solved) ? solved : std::nullopt;
  }

 private:
  double wavelength(size_t i) const {
    return 2.0 * std::numbers::pi * std::pow(base_, static_cast<double>(i) / static_cast<double>(factors_.size()));
  }
  // The factors were made in fp32, from frequencies in fp32.
  bool gives(const Llama3Scaling& scaling) const {
    constexpr double kTolerance = 1e-3, kLongest = 1e15;
    if (!(scaling.original >= 1.0 && scaling.original <= kLongest)) return false;
    for (size_t i = 0; i < factors_.size(); ++i)
      if (!(std::abs(scaling.of(wavelength(i)) / static_cast<double>(factors_[i]) - 1.0) < kTolerance)) return false;
    return true;
  }
  // Between the two wavelengths the smooth part is linear in 1 / wavelength: slope / wavelength - offset. Small heads may have one factor
  // there.
  std::optional<Llama3Scaling> solve(double factor) const {
    struct Point {
      double inverse, smooth;
    };
    std::vector<Point> points;
    for (size_t i = 0; i < factors_.size(); ++i) {
      const double inverse = 1.0 / static_cast<double>(factors_[i]);
      if (factors_[i] > 1.0F && factors_[i] < static_cast<float>(factor))
        points.push_back({1.0 / wavelength(i), (inverse - 1.0 / factor) / (1.0 - 1.0 / factor)});
    }
    if (points.empty()) return {};
    const Point &a = points.front(), &b = points.back();
    if (points.size() == 1)
      return Llama3Scaling{.factor = factor, .original = std::round((1.0 + (kHigh - 1.0) * a.smooth) / a.inverse), .high = kHigh};
    const double slope = (a.smooth - b.smooth) / (a.inverse - b.inverse), offset = slope * a.inverse - a.smooth;
    return Llama3Scaling{.factor = factor, .original = std::round(slope / offset), .high = std::round(1e3 + 1e3 / offset) / 1e3};
  }

  static constexpr double kHigh = 4.0;  // high_freq_factor of all published models

  const std::vector<float>& factors_;
  double base_;
};

Json llama3_scaling(ModelKeys& keys, const GgufHeader& header, const std::vector<float>& factors, double base, int64_t head) {
  require(std::cmp_equal(factors.size(), head / 2), ExitCode::data, header.source(), ": rope_freqs.weight has ", factors.size(),
          " elements, and a head has ", head, " channels");
  const RopeFactors rope(factors, base);
  if (!rope.scale()) return {};
  constexpr double kOfLlama3 = 8192;
  const auto length = static_cast<double>(keys.needed(gguf::kContextLength));
  const double stated = keys.number(gguf::kRopeOriginalLength).value_or(kOfLlama3);
  const std::optional<Llama3Scaling> found = rope.llama3({stated, kOfLlama3, length});
  require(found.has_value(), ExitCode::usage, header.source(),
          ": rope_freqs.weight is not the scaling of Llama 3, which is all that mantissa reads there");
  return {{"rope_type", "llama3"},
          {"factor", found->factor},
          {"low_freq_factor", found->low},
          {"high_freq_factor", found->high},
          {"original_max_position_embeddings", static_cast<int64_t>(found->original)}};
}

// llama.cpp multiplies cos and sin by 1 + 0.1 ln factor and these two factors, and transformers by attention_factor, which is 1 + 0.1 ln
// factor unless it is stated. Below 0 stands for what is usual.
Json yarn_scaling(ModelKeys& keys, const GgufHeader& header, bool gpt_oss) {
  const double factor = keys.needed_number(gguf::kRopeScalingFactor);
  Json out = {{"rope_type", "yarn"},
              {"factor", factor},
              {"original_max_position_embeddings", keys.integer(gguf::kRopeOriginalLength).value_or(keys.needed(gguf::kContextLength))}};
  const auto fast = keys.number(gguf::kYarnBetaFast), slow = keys.number(gguf::kYarnBetaSlow);
  if (fast || gpt_oss) out.add("beta_fast", fast.value_or(32.0));
  if (slow || gpt_oss) out.add("beta_slow", slow.value_or(1.0));
  // There is no key. An export of mantissa notes false as a difference; of files of others, gpt-oss has it in its published folder.
  const bool whole_channels = !gguf_difference_noted(header, kTruncateDifference).value_or(gpt_oss);
  if (gpt_oss || !whole_channels) out.add("truncate", whole_channels);
  keys.only(gguf::kYarnExtFactor, {1.0, -1.0}, "mantissa has yarn as its paper defines it");
  keys.only(gguf::kYarnLogMultiplier, {0.0}, "mantissa has yarn as its paper defines it");
  double attention = keys.number(gguf::kRopeAttentionFactor).value_or(1.0);
  if (const double own = keys.number(gguf::kYarnAttentionFactor).value_or(1.0); own > 0.0) attention *= own;
  const auto all = static_cast<float>(attention * (1.0 + 0.1 * std::log(std::max(factor, 1.0))));
  if (!std::isfinite(all)) keys.refuse(gguf::kRopeAttentionFactor, text("is with that of yarn ", all));
  if (attention != 1.0) out.add("attention_factor", static_cast<double>(all));
  return out;
}

void add_rope(ModelKeys& keys, const GgufHeader& header, const GgufTensorFacts& facts, bool gpt_oss, int64_t head, Json& out) {
  const double base = keys.number(gguf::kRopeBase).value_or(kDefaultRopeBase);
  out.add("rope_theta", base);
  keys.only(gguf::kRopeDimensions, {static_cast<double>(head)}, "mantissa rotates all channels of a head");
  const std::string_view type = keys.string(gguf::kRopeScalingType).value_or("linear");  // as llama.cpp takes it
  Json scaling;
  if (type == "yarn") {
    if (!facts.rope_factors.empty()) keys.refuse(gguf::kRopeScalingType, "is yarn, and rope_freqs.weight scales, too");
    scaling = yarn_scaling(keys, header, gpt_oss);
  } else if (type == "linear") {
    keys.only(gguf::kRopeScalingFactor, {0.0, 1.0}, "a linear scaling of positions, and mantissa knows yarn and that of Llama 3");
  } else if (type != "none") {
    keys.refuse(gguf::kRopeScalingType, text("is \"", printable(shortened(type)), "\"; mantissa knows none, yarn and that of Llama 3"));
  }
  if (!facts.rope_factors.empty()) scaling = llama3_scaling(keys, header, facts.rope_factors, base, head);
  for (const char* const key : {gguf::kRopeScalingFactor, gguf::kRopeOriginalLength, gguf::kYarnExtFactor, gguf::kRopeAttentionFactor,
                                gguf::kYarnAttentionFactor, gguf::kYarnBetaFast, gguf::kYarnBetaSlow, gguf::kYarnLogMultiplier})
    keys.ignore(key);  // keys of yarn
  if (!scaling.is_null())
    out.add("rope_scaling", std::move(scaling));
  else if (gpt_oss)
    out.add("rope_scaling", {{"rope_type", "default"}});  // without it it is yarn
}

void add_window(ModelKeys& keys, bool gpt_oss, Json& out) {
  if (gpt_oss) {
    out.add("sliding_window", keys.needed(gguf::kSlidingWindow));
    return keys.only(gguf::kSlidingWindowPattern, {2.0}, "every second layer of gpt-oss has a window");
  }
  keys.ignore(gguf::kSlidingWindowPattern);
  const auto length = static_cast<double>(keys.needed(gguf::kContextLength));
  const double window = keys.number(gguf::kSlidingWindow).value_or(0.0);
  if (window > 0.0 && window < length) keys.refuse(gguf::kSlidingWindow, "mantissa reads windows of gpt-oss only");
}

void add_experts(ModelKeys& keys, Architecture of, Json& out) {
  out.add(of == Architecture::qwen3_moe ? "num_experts" : "num_local_experts", keys.needed(gguf::kExpertCount));
  out.add("num_experts_per_tok", keys.needed(gguf::kExpertUsedCount));
  if (of == Architecture::qwen3_moe) {
    out.add("moe_intermediate_size", keys.needed(gguf::kExpertFeedForwardLength));
    out.add("norm_topk_prob", true);  // ggml always does
  }
  keys.must_be("ARCH.expert_weights_norm", true, "weights of experts are normalized");
  keys.only("ARCH.expert_weights_scale", {0.0, 1.0}, "weights of experts are not scaled");
  keys.only("ARCH.expert_gating_func", {0.0, 1.0, 3.0}, "mantissa reads routers with a softmax");
  keys.only("ARCH.expert_shared_count", {0.0}, "mantissa reads no shared experts");
  keys.only("ARCH.expert_shared_feed_forward_length", {0.0}, "mantissa reads no shared experts");
  keys.only("ARCH.leading_dense_block_count", {0.0}, "every layer has experts");
}

void add_rms(ModelKeys& keys, const GgufHeader& header, const GgufTensorFacts& facts, Architecture of, Json& out) {
  const bool gpt_oss = of == Architecture::gpt_oss, moe = of == Architecture::qwen3_moe || of == Architecture::mixtral || gpt_oss;
  const int64_t hidden = keys.needed(gguf::kEmbeddingLength), heads = keys.needed(gguf::kHeadCount);
  if (heads < 1) keys.refuse(gguf::kHeadCount, text("is ", heads));
  const int64_t head = keys.integer(gguf::kKeyLength).value_or(hidden / heads);
  keys.only(gguf::kValueLength, {static_cast<double>(head)}, "keys and values of mantissa have one size");
  const std::optional<int64_t> expert_width = moe ? keys.integer(gguf::kExpertFeedForwardLength) : std::nullopt;
  const std::optional<int64_t> width = keys.integer(gguf::kFeedForwardLength);
  out.add("hidden_size", hidden);
  const bool of_expert = expert_width && (gpt_oss || !width);  // that of qwen3moe has no layer without experts
  out.add("intermediate_size", of_expert ? *expert_width : keys.needed(gguf::kFeedForwardLength));
  out.add("num_hidden_layers", keys.needed(gguf::kBlockCount));
  out.add("num_attention_heads", heads);
  out.add("num_key_value_heads", keys.integer(gguf::kKvHeadCount).value_or(heads));
  out.add("head_dim", head);
  out.add("max_position_embeddings", keys.needed(gguf::kContextLength));
  out.add("rms_norm_eps", keys.needed_number(gguf::kNormRmsEpsilon));
  if (of == Architecture::llama || of == Architecture::qwen3 || of == Architecture::qwen3_moe)
    out.add("attention_bias", keys.has_tensor("blk.0.attn_output.bias"));
  if (of == Architecture::llama) out.add("mlp_bias", keys.has_tensor("blk.0.ffn_up.bias"));
  add_rope(keys, header, facts, gpt_oss, head, out);
  add_window(keys, gpt_oss, out);
  if (moe) add_experts(keys, of, out);
}

void add_gpt2(ModelKeys& keys, Json& out) {
  const int64_t heads = keys.needed(gguf::kHeadCount);
  out.add("n_embd", keys.needed(gguf::kEmbeddingLength));
  out.add("n_layer", keys.needed(gguf::kBlockCount));
  out.add("n_head", heads);
  out.add("n_inner", keys.needed(gguf::kFeedForwardLength));
  out.add("n_positions", keys.needed(gguf::kContextLength));
  out.add("layer_norm_epsilon", keys.needed_number(gguf::kNormEpsilon));
  out.add("activation_function", "gelu_new");
  keys.only(gguf::kKvHeadCount, {static_cast<double>(heads)}, "GPT-2 has as many heads of keys");
  if (heads < 1) keys.refuse(gguf::kHeadCount, text("is ", heads));
  const auto head = static_cast<double>(keys.needed(gguf::kEmbeddingLength) / heads);
  for (const char* const key : {gguf::kKeyLength, gguf::kValueLength}) keys.only(key, {head}, "heads of GPT-2 divide its channels");
}

// Keys do not hold what an export with --allow-different has otherwise than llama.cpp, such as windows of llama.
void require_keys_hold_all(const GgufHeader& header) {
  for (const std::string_view noted : header.strings(gguf::kDifferences).value_or(std::vector<std::string_view>()))
    require(!noted.starts_with("model.") || noted.starts_with(kTruncateDifference), ExitCode::usage, header.source(),
            ": was exported with --allow-different, and its keys do not hold what the model has otherwise than llama.cpp:\n  ",
            printable(shortened(noted)), "\nread the model that it was exported from");
}

int64_t vocabulary_of(const GgufHeader& header) {
  const auto found = std::ranges::find(header.tensors(), "token_embd.weight", &GgufTensor::name);
  require(found != header.tensors().end() && found->shape.size() == 2, ExitCode::data, header.source(),
          ": has no matrix token_embd.weight, whose rows are those of the vocabulary");
  return found->shape.front();
}

}  // namespace

std::optional<bool> gguf_difference_noted(const GgufHeader& header, std::string_view what) {
  if (header.find(gguf::kVersionOfWriter) == nullptr) return {};
  const auto noted = header.strings(gguf::kDifferences).value_or(std::vector<std::string_view>());
  return std::ranges::any_of(noted, [&](std::string_view one) { return one.starts_with(what); });
}

std::string gguf_config(const GgufHeader& header, const GgufTensorFacts& facts) {
  require_keys_hold_all(header);
  const std::optional<std::string_view> name = header.string(gguf::kArchitecture);
  require(name.has_value(), ExitCode::data, header.source(), ": has no key \"", gguf::kArchitecture, '"');
  const auto known =
      std::ranges::find(kGgufArchitectures, *name, [](Architecture one) { return std::string_view(gguf_architecture(one)); });
  require(known != kGgufArchitectures.end(), ExitCode::usage, header.source(), ": key \"", gguf::kArchitecture, "\": is \"",
          printable(shortened(*name)), "\"; mantissa knows ", joined(kGgufArchitectures, ", ", gguf_architecture));
  ModelKeys keys(header, *name);
  Architecture of = *known;
  const bool has_experts = keys.integer(gguf::kExpertCount).value_or(0) > 0;
  if (of == Architecture::llama && has_experts) of = Architecture::mixtral;
  if (has_experts && of != Architecture::mixtral && of != Architecture::qwen3_moe && of != Architecture::gpt_oss)
    keys.refuse(gguf::kExpertCount, text("mantissa knows no ", *name, " with experts"));
  keys.ignore(gguf::kExpertUsedCount);
  Json out = {{"architectures", {architecture_class(of)}}, {"model_type", architecture_name(of)}, {"vocab_size", vocabulary_of(header)}};
  of == Architecture::gpt2 ? add_gpt2(keys, out) : add_rms(keys, header, facts, of, out);
  out.add("tie_word_embeddings", facts.tied);
  if (const auto begin = header.integer(gguf::kBosToken)) out.add("bos_token_id", *begin);
  if (const auto end = header.integer(gguf::kEosToken)) out.add("eos_token_id", *end);
  if (const auto pad = header.integer(gguf::kPaddingToken)) out.add("pad_token_id", *pad);
  if (facts.mxfp4) out.add("quantization_config", {{"quant_method", "mxfp4"}});
  for (const char* const key : kIgnored) keys.ignore(key);
  keys.must_be("ARCH.attention.causal", true, "mantissa reads models that see what is before a token");
  keys.must_be("ARCH.use_parallel_residual", false, "mantissa computes attention and MLP one after the other");
  keys.only("ARCH.pooling_type", {0.0}, "mantissa reads models that predict tokens");
  keys.require_all_known();
  return out.dump(2, Json::Order::keys) + "\n";
}

}  // namespace mantissa
