#include <algorithm>
#include <array>
#include <filesystem>
#include <iterator>
#include <map>

#include "mantissa/base/log.h"
#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/checkpoint/checkpoint_search.h"
#include "mantissa/checkpoint/config_differences.h"
#include "mantissa/checkpoint/saved_model.h"
#include "mantissa/checkpoint/tensor_reader.h"
#include "mantissa/precision/rules.h"

namespace mantissa {
namespace {

void add_difference(const char* key, const std::vector<int64_t>& saved, const std::vector<int64_t>& current,
                    std::vector<std::string>& list) {
  if (saved != current) list.push_back(text(key, ": [", joined(saved), "] in the checkpoint, [", joined(current), "] here"));
}

// Coefficients of losses, the capacity and a forced balance are no part of the model; load_buffers() judges the rate of expert biases.
std::vector<std::string> expert_differences(const std::optional<MoeConfig>& saved, const std::optional<MoeConfig>& current) {
  std::vector<std::string> list = differences("model.moe", saved, current);
  std::erase_if(list, [](const std::string& line) {
    const std::string key = line.substr(0, line.find(':'));
    return key.ends_with("_coef") || key.ends_with(".bias_update_rate") || key.ends_with(".capacity_factor") ||
           key.ends_with(".force_balance");
  });
  if (saved && current) add_difference("model.moe.dense_layers", saved->dense_layers, current->dense_layers, list);
  return list;
}

ModelConfig completed(ModelConfig model) {
  model.num_key_value_heads = model.kv_heads();
  model.head_dim = model.head_size();
  if (model.activation == Activation::swiglu_clamped) model.swiglu_limit = model.glu_limit();
  if (model.rope_scaling && model.rope_scaling->type == RopeScaling::llama3) {
    model.rope_scaling->low_freq_factor = model.rope_scaling->low_freq_factor.value_or(1.0);
    model.rope_scaling->high_freq_factor = model.rope_scaling->high_freq_factor.value_or(4.0);
  }
  if (!model.moe) return model;
  const RoutingRule rule = model.moe->rule();
  model.moe->norm_topk_prob = rule.softmax_after_topk || rule.renormalize;  // two ways to say the same of softmax
  model.moe->softmax_after_topk = false;
  if (model.moe->dense_layers.empty()) model.intermediate_size = 1;  // no layer has an MLP
  return model;
}

std::vector<int64_t> windows(const ModelConfig& model) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < model.num_layers; ++i) out.push_back(model.window(i));
  return out;
}

}  // namespace

std::vector<std::string> model_differences(const ModelConfig& saved, const ModelConfig& current) {
  const ModelConfig before = completed(saved), now = completed(current);
  std::vector<std::string> list = differences("model", before, now);
  std::erase_if(list, [](const std::string& line) { return difference_key(line) == "model.pad_vocab_to"; });  // padding is not stored
  std::ranges::move(differences("model.rope_scaling", before.rope_scaling, now.rope_scaling), std::back_inserter(list));
  std::ranges::move(expert_differences(before.moe, now.moe), std::back_inserter(list));
  std::erase_if(list, [](const std::string& line) { return difference_key(line) == "model.sliding_window"; });
  if (before.num_layers == now.num_layers && windows(before) != windows(now)) {
    list.push_back(text("model.sliding_window: ", joined(windows(before)), " by layer in the checkpoint, ", joined(windows(now)), " here"));
  }
  return list;
}

std::vector<std::string> forward_differences(const ModelConfig& saved, const ModelConfig& current) {
  constexpr std::array kFree = {"model.init_std", "model.init_residual_scale", "model.logits_dtype"};
  std::vector<std::string> list = model_differences(saved, current);
  std::erase_if(list, [&](const std::string& line) { return std::ranges::find(kFree, difference_key(line)) != kFree.end(); });
  return list;
}

void require_same_model(const RunConfig& saved, const RunConfig& current, const std::string& source) {
  const std::vector<std::string> list = model_differences(saved.model, current.model);
  require(list.empty(), ExitCode::usage, source, " is a checkpoint of another model:\n  ", joined(list, "\n  "));
}

void require_initial_model(const RunConfig& saved, const RunConfig& current, const std::string& source) {
  const bool rotary = saved.model.position == Position::rope && current.model.position == Position::rope;
  const std::vector<std::string>& allowed = current.checkpoint.allow_model_change;
  std::vector<std::string> refused;
  for (const std::string& line : forward_differences(saved.model, current.model)) {
    const std::string key = difference_key(line);
    if (rotary && key == "model.max_position_embeddings") continue;
    if (std::ranges::find(allowed, key) == allowed.end())
      refused.push_back(line);
    else
      log_warning("checkpoint.allow_model_change: ", line);
  }
  require(refused.empty(), ExitCode::usage, source, " is of another model:\n  ", joined(refused, "\n  "),
          "\nleave the section model out to take its model, or list in checkpoint.allow_model_change the keys that are meant to differ");
}

std::vector<std::string> reconciled_weights(const TensorReader& weights, const PrecisionPlan& plan) {
  std::map<std::pair<std::string, std::string>, std::vector<std::string>> changes;  // by module of any layer and what became of it
  for (const ModulePrecision& module : plan.modules()) {
    const std::string& path = module.module.path;
    const Quantization was = weights.has(path + ".weight") ? weights.form(path + ".weight").codes : Quantization{};
    const Quantization now = module.resident_codes();
    if (!was) continue;
    Quantization keeps = now;
    if (keeps.rule == ScaleRule::flashinfer) keeps.rule = ScaleRule::rceil;  // both keep the values of codes, whose rule no file names
    if (keeps == was) continue;
    const bool same_blocks = now.format == was.format && now.block_rows == was.block_rows && now.block_cols == was.block_cols;
    const auto form = [&](const Quantization& how) {
      return same_blocks ? text(how) : text(format_name(how.format), ' ', how.block_rows, 'x', how.block_cols);
    };
    const std::string here = now ? form(now) : dtype_name(module.recipe.compute);
    changes[{any_layer(path), text(form(was), " in the file, ", here, " here")}].push_back(path);
  }
  std::vector<std::string> lines;
  for (const auto& [key, paths] : changes) lines.push_back(joined_path(paths) + ": " + key.second);
  return lines;
}

}  // namespace mantissa
