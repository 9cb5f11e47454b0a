// Every shipped configuration under every recipe that it can be given: loaded, planned and, cut to one layer, 64 random tokens and widths
// in proportion, two steps of training in memory.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "checkpoint/checkpoint.h"
#include "checkpoint/precision_setup.h"
#include "mantissa/base/rng.h"
#include "mantissa/train/load_config.h"
#include "train/training_step.h"

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

// The result of `config check` for the configuration with these settings; nullopt where it refuses them. Widths are divided by a power of
// two, so that whole heads and blocks of 128 stay whole.
std::optional<RunConfig> checked(const std::string& name, const std::vector<std::string>& sets,
                                 const std::vector<std::string>& recipe_files = {}) {
  const std::string folder = std::string(MANTISSA_SOURCE_DIR) + "/configs/";
  ConfigSources plain{.file = folder + name + ".json", .sets = {}};
  const bool tunes = name == "qat" || name == "qad";
  if (name == "finetune" || tunes) plain.sets = {"model.vocab_size=300"};                               // its model is that of a folder
  if (tunes) plain.sets.insert(plain.sets.end(), {"data.path=chats.jsonl", "checkpoint.export=null"});  // packed, which high cannot be
  if (name == "qad") plain.sets.emplace_back("training.teacher=null");
  const ModelConfig whole = load_run_config(plain, Inputs::unchecked).config.model;
  int64_t divisor = 1;
  while (whole.hidden_size / divisor > 512) divisor *= 2;
  ConfigSources sources{.file = plain.file, .sets = sets};
  for (const std::string& file : recipe_files) sources.set_files.push_back(folder + "recipes/" + file);
  for (const auto& [key, size] : {std::pair{"hidden_size", whole.hidden_size},
                                  {"intermediate_size", whole.intermediate_size},
                                  {"num_attention_heads", whole.num_attention_heads},
                                  {"num_key_value_heads", whole.kv_heads()}}) {
    sources.sets.push_back(text("model.", key, '=', std::max<int64_t>(1, size / divisor)));
  }
  sources.sets.insert(sources.sets.end(), {"model.num_layers=1", "training.micro_batch_size=1", "training.grad_accum=1",
                                           "training.global_batch_size=null", text("training.seq_len=", kTokens)});
  sources.sets.insert(sources.sets.end(), plain.sets.begin(), plain.sets.end());
  if (whole.moe) {
    const int64_t width = std::min<int64_t>(whole.moe->intermediate_size, 512);
    sources.sets.insert(sources.sets.end(), {text("model.moe.intermediate_size=", width), "model.moe.num_experts=4",
                                             "model.moe.num_experts_per_tok=2", "model.moe.dense_layers=[]", "model.vocab_size=1024"});
  }
  try {
    RunConfig config = load_run_config(sources, Inputs::unchecked).config;
    if (!config.model.vocab_size) config.model.vocab_size = 65;  // that of a character text
    // A smaller vocabulary that is the same modulo all blocks, as only embeddings and output projection know it.
    config.model.vocab_size = std::min(*config.model.vocab_size, 1024 + *config.model.vocab_size % 128);
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
  // Returns true if the configuration takes these settings; if so it trains, and its loss falls.
  bool trains(const std::vector<std::string>& sets, const std::vector<std::string>& recipe_files = {}) {
    const std::optional<RunConfig> config = checked(GetParam(), sets, recipe_files);
    if (!config) return false;
    Gpt model(config->model, *device_, resolve_plan(*config), {.recompute = config->training.recompute});
    Optimizer optimizer(model.parameters(), config->optimizer);
    optimizer.initialize(1);
    GradientAccumulator accumulator(model.parameters(), Accumulation::running, 1);
    const Batch batch = random_tokens(*config->model.vocab_size);
    const auto step = [&] { return training_step(model, optimizer, accumulator, batch, 1, 1e-3); };
    const StepResult first = step(), second = step();
    EXPECT_EQ(first.bad + second.bad, "") << ::testing::PrintToString(sets);
    const double variance = static_cast<double>(config->model.hidden_size) * config->model.init_std * config->model.init_std;  // in logits
    EXPECT_NEAR(first.loss, std::log(*config->model.vocab_size) + variance / 2, 0.7) << ::testing::PrintToString(sets);
    EXPECT_LT(second.loss, first.loss) << ::testing::PrintToString(sets);
    return true;
  }

  std::unique_ptr<Backend> device_ = make_backend("cpu");  // one for all: memory is used again
};

TEST_P(ShippedConfig, TrainsUnderEveryRecipe) {
  for (const std::string& preset : preset_names()) {
    const bool high = preset == "high" || preset == "bf16" || preset == "fp32";
    const bool taken = trains({"precision.recipe=" + preset});
    EXPECT_TRUE(taken || !high) << preset;
  }
  EXPECT_TRUE(trains({}, {"nvfp4.json"}));
  // Gathered codes, and a quantized output projection, which a tied one cannot be.
  const std::optional<RunConfig> plain = checked(GetParam(), {"precision.recipe=mxfp8"});
  EXPECT_EQ(trains({"precision.recipe=mxfp8", "precision.fp8_param_gather=true"}), plain.has_value());
  EXPECT_EQ(trains({"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=32"}),
            plain && !plain->model.tie_word_embeddings);
}

INSTANTIATE_TEST_SUITE_P(, ShippedConfig, ::testing::ValuesIn(shipped_configs()), [](const auto& c) {
  std::string name = c.param;
  std::replace_if(
      name.begin(), name.end(), [](char x) { return x == '-' || x == '.'; }, '_');
  return name;
});

}  // namespace mantissa::shipped_configs_test
