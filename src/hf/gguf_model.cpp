#include "hf/gguf_model.h"

#include <cmath>

#include "mantissa/base/text.h"
#include "models/rope_table.h"

namespace mantissa {
namespace {

// Returns whether it is the architecture llama of llama.cpp, which has a row of rope_freqs.weight for each pair of channels.
bool is_llama(Architecture architecture) { return architecture == Architecture::llama || architecture == Architecture::mixtral; }

}  // namespace

const char* gguf_architecture(Architecture architecture) {
  switch (architecture) {
    case Architecture::llama:
    case Architecture::mixtral: return "llama";
    case Architecture::qwen2: return "qwen2";
    case Architecture::qwen3: return "qwen3";
    case Architecture::qwen3_moe: return "qwen3moe";
    case Architecture::gpt2: return "gpt2";
    case Architecture::gpt_oss: return "gpt-oss";
  }
  fail(ExitCode::internal, "no architecture");
}

std::vector<float> gguf_rope_factors(Architecture architecture, const ModelConfig& model) {
  if (!is_llama(architecture) || !model.rope_scaling || model.rope_scaling->type != RopeScaling::llama3) return {};
  const std::vector<float> plain = rope_frequencies(model.head_size(), model.rope_theta, {}).of_pairs,
                           scaled = rope_frequencies(model.head_size(), model.rope_theta, model.rope_scaling).of_pairs;
  std::vector<float> factors;
  for (size_t i = 0; i < plain.size(); ++i) factors.push_back(plain[i] / scaled[i]);
  return factors;
}

namespace {

void add_rope(const char* name, const ModelConfig& model, GgufKeys& keys) {
  keys.add_u32(gguf_key(gguf::kRopeDimensions, name), model.head_size());
  keys.add_f32(gguf_key(gguf::kRopeBase, name), model.rope_theta);
  if (!model.rope_scaling || model.rope_scaling->type != RopeScaling::yarn) return;
  const RopeScalingConfig& yarn = *model.rope_scaling;
  keys.add_string(gguf_key(gguf::kRopeScalingType, name), "yarn");
  keys.add_f32(gguf_key(gguf::kRopeScalingFactor, name), yarn.factor);
  keys.add_u32(gguf_key(gguf::kRopeOriginalLength, name), yarn.original_max_position_embeddings);
  // llama.cpp scales cos and sin by 0.1 log(factor) + 1, times this.
  const auto usual = static_cast<float>(0.1 * std::log(yarn.factor) + 1.0);
  const float scale = rope_frequencies(model.head_size(), model.rope_theta, yarn).scale;
  if (scale != usual) keys.add_f32(gguf_key(gguf::kRopeAttentionFactor, name), scale / usual);
}

}  // namespace

void add_gguf_model(Architecture architecture, const ModelConfig& model, GgufKeys& keys) {
  const char* const name = gguf_architecture(architecture);
  const auto add = [&](const char* key, int64_t value) { keys.add_u32(gguf_key(key, name), value); };
  const int64_t inner = model.moe ? model.moe->intermediate_size : model.intermediate_size;
  keys.add_string(gguf::kArchitecture, name);
  keys.add_u32(gguf::kQuantizationVersion, gguf::kQuantizationVersionNow);
  add(gguf::kVocabulary, model.vocab_size.value());
  add(gguf::kContextLength, model.max_position_embeddings);
  add(gguf::kEmbeddingLength, model.hidden_size);
  add(gguf::kBlockCount, model.num_layers);
  add(gguf::kFeedForwardLength, inner);
  add(gguf::kHeadCount, model.num_attention_heads);
  add(gguf::kKvHeadCount, model.kv_heads());
  add(gguf::kKeyLength, model.head_size());
  add(gguf::kValueLength, model.head_size());
  const bool gpt2 = architecture == Architecture::gpt2;
  keys.add_f32(gguf_key(gpt2 ? gguf::kNormEpsilon : gguf::kNormRmsEpsilon, name), model.norm_eps);
  if (!gpt2) add_rope(name, model, keys);
  if (model.moe) {
    add(gguf::kExpertCount, model.moe->num_experts);
    add(gguf::kExpertUsedCount, model.moe->num_experts_per_tok);
    if (architecture != Architecture::mixtral) add(gguf::kExpertFeedForwardLength, inner);
  }
  if (architecture == Architecture::gpt_oss && model.sliding_window) add(gguf::kSlidingWindow, *model.sliding_window);
}

namespace {

struct GgufDifference {
  const char* option;  // that of section "model"
  bool (*differs)(Architecture architecture, const ModelConfig& model);
  const char* what;  // llama.cpp does
};

bool is_yarn(const ModelConfig& model) { return model.rope_scaling && model.rope_scaling->type == RopeScaling::yarn; }
bool is_qwen3(Architecture architecture) { return architecture == Architecture::qwen3 || architecture == Architecture::qwen3_moe; }

constexpr GgufDifference kGgufDifferences[] = {
    {"swiglu_limit", [](Architecture of, const ModelConfig& model) { return of == Architecture::gpt_oss && model.glu_limit() != 7.0; },
     "clamps at 7"},
    {"rope_scaling.beta_fast",
     [](Architecture, const ModelConfig& model) { return is_yarn(model) && model.rope_scaling->beta_fast.value_or(32.0) != 32.0; },
     "takes 32 in this architecture, whatever the file says"},
    {"rope_scaling.beta_slow",
     [](Architecture, const ModelConfig& model) { return is_yarn(model) && model.rope_scaling->beta_slow.value_or(1.0) != 1.0; },
     "takes 1 in this architecture, whatever the file says"},
    {"rope_scaling.truncate",
     [](Architecture, const ModelConfig& model) { return is_yarn(model) && !model.rope_scaling->truncate.value_or(true); },
     "begins and ends the blend at whole channels"},
    {"rope_scaling.type", [](Architecture of, const ModelConfig& model) { return model.rope_scaling && !is_yarn(model) && !is_llama(of); },
     "scales rotations by llama3 in the architecture llama only, and does not here"},
    {"sliding_window",
     [](Architecture of, const ModelConfig& model) { return of != Architecture::gpt_oss && model.sliding_window.has_value(); },
     "has no windows in this architecture: every token sees all before it"},
    {"sliding_layers",
     [](Architecture of, const ModelConfig& model) {
       for (int64_t layer = 0; of == Architecture::gpt_oss && layer < model.num_layers; ++layer)
         if ((model.window(layer) > 0) != (layer % 2 == 0)) return true;
       return false;
     },
     "has the window of gpt-oss in layers 0, 2, 4 and so on"},
    {"head_dim",
     [](Architecture of, const ModelConfig& model) {
       return of == Architecture::qwen2 && model.head_size() * model.num_attention_heads != model.hidden_size;
     },
     "takes hidden_size / num_attention_heads in this architecture, and cannot load others"},
    {"attention_bias",
     [](Architecture of, const ModelConfig& model) { return is_qwen3(of) && model.attention_bias != AttentionBias::none; },
     "has no bias of the output projection in this architecture, and cannot load it"},
    {"activation",
     [](Architecture of, const ModelConfig& model) { return of == Architecture::gpt2 && model.activation != Activation::gelu_tanh; },
     "computes gelu_tanh"},
    {"tie_word_embeddings",
     [](Architecture of, const ModelConfig& model) { return of == Architecture::gpt_oss && model.tie_word_embeddings; },
     "ties none of gpt-oss, and cannot load it without an output projection"},
    {"moe.norm_topk_prob",
     [](Architecture of, const ModelConfig& model) { return of == Architecture::qwen3_moe && !model.moe->rule().softmax_after_topk; },
     "divides the weights of a token by their sum"},
    {"moe.dense_layers",
     [](Architecture of, const ModelConfig& model) { return of == Architecture::qwen3_moe && !model.moe->dense_layers.empty(); },
     "wants experts in all layers of this architecture, and cannot load others"},
};

}  // namespace

std::vector<std::string> gguf_differences(Architecture architecture, const ModelConfig& model) {
  std::vector<std::string> found;
  for (const GgufDifference& one : kGgufDifferences)
    if (one.differs(architecture, model)) found.push_back(text("model.", one.option, ": llama.cpp ", one.what));
  return found;
}

}  // namespace mantissa
