// Random combinations of all keys of sections model, precision and logging: what the configuration accepts trains, on one rank and on
// several. An error behind the start would cost a user the steps since the last save.
#include <gmock/gmock.h>

#include <cmath>
#include <map>

#include "thread_ranks.h"
#include "training.h"

namespace mantissa::random_settings_test {

using Values = std::vector<std::string>;

// Settings of every fifth trial.
const std::vector<std::string> kSimulated = {R"(precision.recipes={"own": {"gemms": ["fprop", "dgrad", "wgrad"], "simulate": {
    "weight": {"format": "e2m1", "block": [16, 16], "scale": "e4m3"},
    "input": {"format": "e3m2", "block": [1, 16], "rounding": "stochastic"},
    "output_grad": {"format": "e2m1", "block": [1, 16], "scale": "e4m3", "rounding": "stochastic"},
    "hadamard": 16, "hadamard_gemms": ["wgrad"]}}})",
                                             "precision.recipe=own"};

// Values of keys that are neither true nor false nor a choice, for three steps of a tiny model.
const std::map<std::string, Values>& listed_values() {
  static const std::map<std::string, Values> values = {
      {"model.vocab_size", {"8", "40"}},
      {"model.pad_vocab_to", {"32", "64"}},
      {"model.hidden_size", {"128"}},
      {"model.num_layers", {"1", "3"}},
      {"model.num_attention_heads", {"4"}},
      {"model.num_key_value_heads", {"2", "1"}},
      {"model.head_dim", {"16", "64"}},
      {"model.intermediate_size", {"128"}},
      {"model.max_position_embeddings", {"32"}},
      {"model.norm_eps", {"1e-5"}},
      {"model.rope_theta", {"500"}},
      {"model.rope_scaling", {R"({"type": "llama3"})", R"({"type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.8})"}},
      {"model.rope_scaling.factor", {"2"}},
      {"model.rope_scaling.original_max_position_embeddings", {"8"}},
      {"model.rope_scaling.low_freq_factor", {"1.5"}},
      {"model.rope_scaling.high_freq_factor", {"3"}},
      {"model.rope_scaling.beta_fast", {"16"}},
      {"model.rope_scaling.beta_slow", {"2"}},
      {"model.rope_scaling.attention_factor", {"1.2"}},
      {"model.rope_scaling.mscale", {"0.7"}},
      {"model.rope_scaling.mscale_all_dim", {"0.8"}},
      {"model.swiglu_limit", {"1.5"}},
      {"model.sliding_window", {"1", "5"}},
      {"model.sliding_layers", {"[0]"}},
      {"model.init_std", {"0.1"}},
      {"model.moe",
       {R"({"num_experts": 4, "intermediate_size": 64})", R"({"num_experts": 4, "intermediate_size": 128})",
        R"({"num_experts": 4, "intermediate_size": 64, "score": "sigmoid", "bias_update_rate": 0.01})"}},
      {"model.moe.num_experts", {"2"}},
      {"model.moe.num_experts_per_tok", {"1"}},
      {"model.moe.intermediate_size", {"32"}},
      {"model.moe.shared_intermediate_size", {"64"}},
      {"model.moe.dense_layers", {"[0]"}},
      {"model.moe.routed_scaling_factor", {"2.5"}},
      {"model.moe.n_group", {"2"}},
      {"model.moe.topk_group", {"2"}},
      {"model.moe.aux_loss_coef", {"0", "0.1"}},
      {"model.moe.seq_aux_loss_coef", {"0.1"}},
      {"model.moe.z_loss_coef", {"0.1"}},
      {"model.moe.bias_update_rate", {"0.01"}},
      {"model.moe.capacity_factor", {"0.5"}},
      {"precision.recipe",
       {"bf16", "fp32", "mxfp8", "mxfp8_te", "mxfp8_weights", "fp8_block", "mxfp4_qat", "mxfp4_qat_mxfp8_act", "mxfp8",
        "mxfp4_qat_mxfp4_act", "nvfp4_qat", "nvfp4_qat_nvfp4_act"}},
      {"precision.recipes",
       {R"({"own": {"base": "mxfp8", "weight": {"block": [1, 32]}}})", R"({"own": {"base": "mxfp4_qat"}})",
        R"({"own": {"base": "mxfp8_te", "backward": "dequantized"}})"}},
      {"precision.rules",
       {R"([{"match": "layers.0.*", "recipe": "high"}])", R"([{"match": "layers.*.attn.*", "recipe": "mxfp8"}])",
        R"([{"match": "layers.{0,-1}.attn.out", "recipe": "own"}])", R"([{"match": "layers.*.moe.experts.*", "recipe": "mxfp4_qat"}])",
        R"([{"match": "layers.*.moe.experts.*", "recipe": "own"}])", R"([{"match": "layers.*.{attn,mlp}.*", "recipe": "own"}])"}},
      {"precision.report_interval", {"1", "2", "3"}},
      {"logging.run_name", {}},  // the test's own
      {"logging.dir", {}},
      {"logging.interval", {"2", "3"}},
  };
  return values;
}

struct Key {
  std::string name;
  Values values;
};

// Adds the keys of a field, and of the fields of a section, which needs no value of its own unless it may be absent.
void add_keys(const Field& field, const std::string& section, std::vector<Key>& keys) {
  const std::string name = section + '.' + field.name;
  const bool object = field.kind() == FieldKind::object;
  if (!object || field.type->nullable) {
    Key& key = keys.emplace_back(Key{name, field.kind() == FieldKind::choice ? field.type->choices : Values{"true", "false"}});
    const auto listed = listed_values().find(name);
    if (listed != listed_values().end()) {
      key.values = listed->second;
    } else if (field.kind() != FieldKind::choice && field.kind() != FieldKind::boolean) {
      ADD_FAILURE() << name << " has no values to choose from";
    }
  }
  if (!object) return;
  for (const Field& member : field.members()) add_keys(member, name, keys);
}

std::vector<Key> all_keys() {
  RunConfig config;
  config.model.moe.emplace();
  config.model.rope_scaling.emplace();
  std::vector<Key> keys;
  for (const Field& section : fields_of(config)) {
    if (section.name != "model" && section.name != "precision" && section.name != "logging") continue;
    for (const Field& field : section.members()) add_keys(field, section.name, keys);
  }
  std::erase_if(keys, [](const Key& key) { return key.values.empty(); });
  return keys;
}

struct Layout {
  int data = 1, tensor = 1, expert = 1;
  bool sequence = false;
  int ranks() const { return data * tensor; }
};

class RandomSettings : public test::TrainingTest {
 protected:
  // Returns none if the configuration refuses the settings.
  std::optional<LoadedConfig> accepted(const std::string& name, const std::vector<std::string>& sets, const Layout& layout) const {
    std::vector<std::string> all;
    all.insert(all.end(),
               {"model.hidden_size=64", "model.intermediate_size=64", "training.steps=3", "training.micro_batch_size=1",
                "training.grad_accum=2", text("training.threads=", layout.ranks() > 1 ? 1 : 0), text("parallel.data=", layout.data),
                text("parallel.tensor=", layout.tensor), text("parallel.expert=", layout.expert),
                text("parallel.sequence_parallel=", layout.sequence ? "true" : "false")});
    all.insert(all.end(), sets.begin(), sets.end());
    try {
      LoadedConfig loaded = config(name, std::move(all));
      RunConfig with_vocabulary = loaded.config;
      if (!with_vocabulary.model.vocab_size) with_vocabulary.model.vocab_size = 8;  // the letters of the text
      resolve_plan(with_vocabulary);
      return loaded;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
      return {};
    }
  }

  // Draws a value for every key with this chance, in an order of its own; a value is kept where those before allow it.
  std::vector<std::string> drawn(uint32_t trial, const std::vector<Key>& keys, const Layout& layout) const {
    std::vector<std::pair<uint32_t, std::string>> ordered;
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto words = random_words({.seed = 24}, trial, i);
      const Values& values = keys[i].values;
      const bool section = keys[i].name == "model.moe" || keys[i].name == "precision.recipe";  // on which other keys depend
      if (words[0] % 8 >= (section ? 6U : 3U)) continue;
      ordered.emplace_back(section ? words[1] / 4 : words[1], keys[i].name + '=' + values[words[2] % values.size()]);
    }
    std::ranges::sort(ordered);
    std::vector<std::string> sets;
    if (trial % 5 == 0) sets = kSimulated;
    for (const auto& [order, set] : ordered) {
      if (trial % 5 == 0 && set.starts_with("precision.recipe")) continue;
      sets.push_back(set);
      if (!accepted("drawn", sets, layout)) sets.pop_back();
    }
    return sets;
  }

  static std::vector<double> losses_on(const LoadedConfig& loaded, const Layout& layout) {
    if (layout.ranks() == 1) return run(loaded).losses;
    std::vector<double> losses;
    const auto errors = test::run_ranks(layout.ranks(), [&](const Communicator& world) {
      const test::TrainedRun own = run(loaded, {}, world);
      if (world.rank() == 0) losses = own.losses;
    });
    EXPECT_THAT(errors, ::testing::Each(::testing::IsEmpty()));
    return losses;
  }

  // Trains, and returns all settings that were tried.
  std::string train_drawn(uint32_t first, uint32_t count, const Layout& layout) const {
    const std::vector<Key> keys = all_keys();
    std::string tried;
    for (uint32_t trial = first; trial < first + count; ++trial) {
      const std::string name = text("trial", trial);
      const std::vector<std::string> sets = drawn(trial, keys, layout);
      SCOPED_TRACE(::testing::PrintToString(sets));
      for (const std::string& set : sets) tried += set + '\n';
      const std::optional<LoadedConfig> loaded = accepted(name, sets, layout);
      if (!loaded) continue;  // reported there
      std::vector<double> losses;
      EXPECT_NO_THROW(losses = losses_on(*loaded, layout));
      EXPECT_THAT(losses, ::testing::Not(::testing::IsEmpty()));
      for (const double loss : losses) EXPECT_TRUE(std::isfinite(loss)) << loss;
    }
    return tried;
  }
};

TEST_F(RandomSettings, TrainOnOneRankWhateverIsAccepted) {
  const std::string tried = train_drawn(0, 80, {});
  for (const Key& key : all_keys()) {
    const std::string within = '"' + key.name.substr(key.name.rfind('.') + 1) + '"';  // part of a section that was set as a whole
    EXPECT_THAT(tried, ::testing::AnyOf(::testing::HasSubstr(key.name + '='), ::testing::HasSubstr(within)));
  }
}

TEST_F(RandomSettings, TrainOnDataRanksWhateverIsAccepted) { train_drawn(1000, 10, {.data = 2}); }

TEST_F(RandomSettings, TrainOnTensorRanksWhateverIsAccepted) {
  train_drawn(2000, 8, {.tensor = 2});
  train_drawn(3000, 8, {.tensor = 2, .sequence = true});
}

TEST_F(RandomSettings, TrainOnExpertRanksWhateverIsAccepted) { train_drawn(4000, 10, {.data = 2, .expert = 2}); }

// Sums over tensor ranks and those of experts are added to biases by kernels of their own.
TEST_F(RandomSettings, BiasesMayHaveAnotherComputeTypeThanActivations) {
  const std::vector<std::string> dense = {"model.attention_bias=all", "model.mlp_bias=true"};
  const std::vector<std::string> experts = {R"(model.moe={"num_experts": 4, "intermediate_size": 64, "expert_mlp_bias": true})"};
  const std::pair<std::string, std::string> types[] = {{"bf16", "fp32"}, {"fp32", "bf16"}};
  for (const auto& [activations, biases] : types) {
    for (std::vector<std::string> sets : {dense, experts}) {
      sets.insert(sets.end(), {"precision.dtype=" + activations, "precision.recipe=" + biases, "schedule.warmup_steps=0"});
      SCOPED_TRACE(::testing::PrintToString(sets));
      const Layout tensor{.tensor = 2}, alone{};
      const std::string name = activations + sets[0].substr(6, 3);
      const std::vector<double> one = losses_on(accepted(name + "1", sets, alone).value(), alone),
                                two = losses_on(accepted(name + "2", sets, tensor).value(), tensor);
      EXPECT_THAT(two, ::testing::Pointwise(::testing::DoubleNear(1e-2), one));
    }
  }
}

}  // namespace mantissa::random_settings_test
