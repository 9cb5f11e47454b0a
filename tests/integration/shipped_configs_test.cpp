// Every shipped configuration under every preset that it can be given, cut to one layer and 64 random tokens: two steps of training in
// memory. Tests of the parts use round sizes; these are the sizes that people run.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "mantissa/backend/functions.h"
#include "mantissa/base/rng.h"
#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/checkpoint/precision_setup.h"
#include "mantissa/train/load_config.h"
#include "mantissa/train/training_step.h"

namespace mantissa::shipped_configs_test {

namespace fs = std::filesystem;

constexpr int64_t kTokens = 64;

std::vector<std::string> shipped_configs() {
  std::vector<std::string> out;
  for (const auto& entry : fs::directory_iterator(fs::path(MANTISSA_SOURCE_DIR) / "configs")) {
    const std::string name = entry.path().stem().string();
    if (entry.path().extension() == ".json" && name != "config.schema") out.push_back(name);
  }
  std::sort(out.begin(), out.end());
  return out;
}

// What `config check` says of the configuration with these settings; nullopt where it refuses them.
std::optional<RunConfig> checked(const std::string& name, const std::vector<std::string>& sets, bool whole_vocabulary = false,
                                 const std::vector<std::string>& recipe_files = {}) {
  const std::string folder = std::string(MANTISSA_SOURCE_DIR) + "/configs/";
  ConfigSources sources{.file = folder + name + ".json", .sets = sets};
  for (const std::string& file : recipe_files) sources.set_files.push_back(folder + "recipes/" + file);
  for (const char* cut :
       {"model.num_layers=1", "training.micro_batch_size=1", "training.grad_accum=1", "training.global_batch_size=null"}) {
    sources.sets.emplace_back(cut);
  }
  sources.sets.push_back(text("training.seq_len=", kTokens));
  ConfigSources plain{.file = sources.file, .sets = {}};
  if (name == "finetune") plain.sets = {"model.vocab_size=300"};  // its model is that of a folder
  sources.sets.insert(sources.sets.end(), plain.sets.begin(), plain.sets.end());
  if (const std::optional<MoeConfig> moe = load_run_config(plain, Inputs::unchecked).config.model.moe) {
    sources.sets.push_back(text("model.moe.intermediate_size=", std::min<int64_t>(moe->intermediate_size, 512)));
    for (const char* cut :
         {"model.moe.num_experts=4", "model.moe.num_experts_per_tok=2", "model.moe.dense_layers=[]", "model.vocab_size=1024"}) {
      sources.sets.emplace_back(cut);
    }
  }
  try {
    RunConfig config = load_run_config(sources, Inputs::unchecked).config;
    if (!config.model.vocab_size) config.model.vocab_size = 65;  // that of a character text
    // A smaller vocabulary that is the same modulo all blocks, as only embeddings and output projection know it.
    if (!whole_vocabulary) config.model.vocab_size = std::min(*config.model.vocab_size, 1024 + *config.model.vocab_size % 128);
    resolve_plan(config);
    return config;
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    return std::nullopt;
  }
}

Batch random_tokens(int64_t vocabulary) {
  Batch batch;
  batch.sequences = 1;
  batch.length = batch.target_count = kTokens;
  for (int64_t i = 0; i < kTokens; ++i) {
    const auto words = random_words({.seed = 5, .stream = RngStream::test}, 1, static_cast<uint64_t>(i));
    batch.tokens.push_back(static_cast<int32_t>(words[0] % static_cast<uint64_t>(vocabulary)));
    batch.targets.push_back(static_cast<int32_t>(words[1] % static_cast<uint64_t>(vocabulary)));
    batch.positions.push_back(static_cast<int32_t>(i));
    batch.segment_starts.push_back(0);
  }
  return batch;
}

class ShippedConfig : public ::testing::TestWithParam<std::string> {
 protected:
  // Whether the configuration takes these settings; if so it trains, and its loss falls.
  bool trains(const std::vector<std::string>& sets, bool whole_vocabulary = false, const std::vector<std::string>& recipe_files = {}) {
    const std::optional<RunConfig> config = checked(GetParam(), sets, whole_vocabulary, recipe_files);
    if (!config) return false;
    Gpt model(config->model, *device_, resolve_plan(*config), {.recompute = config->training.recompute});
    Optimizer optimizer(model.parameters(), config->optimizer);
    initialize(optimizer);
    GradientAccumulator accumulator(model.parameters(), Accumulation::running, 1);
    const Batch batch = random_tokens(*config->model.vocab_size);
    const auto step = [&] { return training_step(model, optimizer, accumulator, batch, 1, 1e-3); };
    const StepResult first = step(), second = step();
    EXPECT_EQ(first.bad + second.bad, "") << ::testing::PrintToString(sets);
    const double variance = static_cast<double>(config->model.hidden_size) * config->model.init_std * config->model.init_std;  // of logits
    EXPECT_NEAR(first.loss, std::log(*config->model.vocab_size) + variance / 2, 0.7) << ::testing::PrintToString(sets);
    EXPECT_LT(second.loss, first.loss) << ::testing::PrintToString(sets);
    return true;
  }

  std::unique_ptr<Backend> device_ = make_backend("cpu");  // one for all: memory is used again

 private:
  // Drawn once for all recipes: that would take most of the time.
  void initialize(Optimizer& optimizer) {
    const auto drawn_for = [&](const Optimizer::State& state) -> std::vector<float>& {
      return masters_[text(state.shard.of->name, ' ', state.shard.shape().elements())];
    };
    if (std::ranges::all_of(optimizer.states(), [&](const auto& state) { return !drawn_for(state).empty(); })) {
      for (const Optimizer::State& state : optimizer.states()) device_->upload(drawn_for(state).data(), state.master);
      return optimizer.store_masters();
    }
    optimizer.initialize(1);
    for (const Optimizer::State& state : optimizer.states()) drawn_for(state) = to_host<float>(state.master);
  }
  std::map<std::string, std::vector<float>> masters_;
};

TEST_P(ShippedConfig, TrainsUnderEveryPreset) {
  for (const std::string& preset : preset_names()) {
    const bool high = preset == "high" || preset == "bf16" || preset == "fp32";
    const bool taken = trains({"precision.recipe=" + preset});
    EXPECT_TRUE(taken || !high) << preset;
  }
}

// Each element is simulated on its own, so wide models would take long.
TEST_P(ShippedConfig, TrainsInNvfp4) {
  const std::optional<RunConfig> plain = checked(GetParam(), {});
  ASSERT_TRUE(plain);
  if (plain->model.hidden_size > 768) return;
  EXPECT_TRUE(trains({}, false, {"nvfp4.json"}));
}

TEST_P(ShippedConfig, TrainsWithGatheredCodesAndAQuantizedOutputProjection) {
  const std::optional<RunConfig> plain = checked(GetParam(), {"precision.recipe=mxfp8"});
  const bool whole = std::getenv("ONEDNN_MAX_CPU_ISA") == nullptr;  // with other instructions the GEMMs of the layer are what is new
  const bool tied = plain && plain->model.tie_word_embeddings;
  EXPECT_EQ(trains({"precision.recipe=mxfp8", "precision.fp8_param_gather=true"}, whole && tied), plain.has_value());
  EXPECT_EQ(trains({"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=32"}, whole), plain && !tied);
}

INSTANTIATE_TEST_SUITE_P(, ShippedConfig, ::testing::ValuesIn(shipped_configs()), [](const auto& c) {
  std::string name = c.param;
  std::replace_if(
      name.begin(), name.end(), [](char x) { return x == '-' || x == '.'; }, '_');
  return name;
});

}  // namespace mantissa::shipped_configs_test
