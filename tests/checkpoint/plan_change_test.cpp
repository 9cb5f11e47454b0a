// A resume under another recipe, and weights of another model: a change of any single thing that a recipe says of its operands, or that a
// model computes with, is found and named.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "checkpoint/precision_setup.h"
#include "checkpoint/saved_model.h"
#include "files.h"
#include "mantissa/train/load_config.h"

namespace mantissa::plan_change_test {

using ::testing::EndsWith;
using ::testing::HasSubstr;

// A run whose recipe "own" is this, in a model of one layer.
RunConfig run_with(const std::string& own) {
  return load_run_config({.file = "run.json",
                          .text = R"({"data": {"path": "x", "tokenizer": "byte"}, "precision": {"recipe": "own"},
                                      "model": {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 128}})",
                          .sets = {"precision.recipes.own=" + own}},
                         Inputs::unchecked)
      .config;
}

// "qkv: own (...)" of the first change; "" if a resume is taken as one under the same recipe.
std::string change(const std::string& before, const std::string& now) {
  try {
    allowed_plan_changes(resolve_plan(run_with(before)).to_json().dump(), resolve_plan(run_with(now)), "manifest.json", LoadFor::resume);
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    const std::string message = error.what();
    const size_t at = message.find("attn.qkv: ");
    return at == std::string::npos ? message : message.substr(at, message.find('\n', at) - at);
  }
}

// An operand's quantization as it stands in a config and, with sorted keys, in a message.
std::string how(const char* block, const char* format, const char* rule) {
  return text(R"({"block":)", block, R"(,"format":")", format, R"(","rule":")", rule, "\"}");
}

// A recipe that quantizes this one operand, and what changes in it.
struct Operand {
  std::string key, gemms;
  std::string format, other_format, rule, other_rule, block, other_block;
};

TEST(PlanChange, EveryPartOfEveryOperandCounts) {
  const Operand operands[] = {
      {"weight", R"(["fprop","dgrad"])", "e4m3", "e5m2", "rceil", "floor", "[32,32]", "[1,32]"},
      {"weight", R"(["fprop","dgrad"])", "e4m3", "e5m2", "rceil", "floor", "[1,32]", "[1,128]"},
      {"input", R"(["fprop","wgrad"])", "e4m3", "e5m2", "rceil", "floor", "[1,32]", "[1,128]"},
      {"output_grad", R"(["dgrad","wgrad"])", "e4m3", "e5m2", "rceil", "floor", "[1,32]", "[1,128]"},
      {"weight_fake_quant", "[]", "e2m1", "e4m3", "rceil", "floor", "[1,32]", "[1,16]"},
  };
  for (const Operand& o : operands) {
    const auto recipe = [&](const std::string& quantization) {
      return text(R"({"base":"high","gemms":)", o.gemms, ",\"", o.key, "\":", quantization, '}');
    };
    const std::string before = how(o.block.c_str(), o.format.c_str(), o.rule.c_str());
    EXPECT_EQ(change(recipe(before), recipe(before)), "");
    for (const std::string& now :
         {how(o.other_block.c_str(), o.format.c_str(), o.rule.c_str()), how(o.block.c_str(), o.other_format.c_str(), o.rule.c_str()),
          how(o.block.c_str(), o.format.c_str(), o.other_rule.c_str())}) {
      EXPECT_EQ(change(recipe(before), recipe(now)), "attn.qkv: own (" + o.key + ' ' + before + " -> " + now + ")");
    }
    if (o.gemms == "[]") {
      EXPECT_EQ(change(recipe(before), recipe("null")), "attn.qkv: own (" + o.key + ' ' + before + " -> null)");
    }
  }
}

TEST(PlanChange, EveryPartOfSimulatedOperandsCounts) {
  const auto recipe = [](const std::string& operand, const std::string& more = "") {
    return R"({"gemms":["fprop","dgrad","wgrad"],"simulate":{"weight":{"format":"e3m2"},"input":{"format":"e3m2"},"output_grad":)" +
           operand + more + "}}";
  };
  const std::string before = recipe(R"({"format":"e3m2"})");
  EXPECT_EQ(change(before, before), "");
  for (const std::string& now :
       {recipe(R"({"format":"e2m3"})"), recipe(R"({"format":"e3m2","block":[1,16]})"), recipe(R"({"format":"e3m2","scale":"e4m3"})"),
        recipe(R"({"format":"e3m2","rule":"even"})"), recipe(R"({"format":"e3m2","rounding":"stochastic"})"), recipe("null"),
        recipe(R"({"format":"e3m2"})", R"(,"hadamard":16,"hadamard_gemms":["wgrad"])")}) {
    EXPECT_THAT(change(before, now), HasSubstr("own (simulate {")) << now;
  }
  EXPECT_THAT(change(R"({"base":"high"})", before), HasSubstr("own (simulate null -> {"));
}

TEST(PlanChange, OneOperandOfSeveralIsNamedAlone) {
  const auto recipe = [](const char* changed) { return text(R"({"base":"mxfp8")", changed, '}'); };
  for (const std::string key : {"weight", "input", "output_grad"}) {
    const std::string message = change(recipe(""), recipe((",\"" + key + R"(":{"rule":"floor"})").c_str()));
    EXPECT_THAT(message, HasSubstr("own (" + key + " {"));
    for (const char* other : {"weight ", "input ", "output_grad ", "weight_fake_quant ", "gemms ", "compute "}) {
      EXPECT_TRUE(other == key + ' ' || message.find(other) == std::string::npos) << message;
    }
  }
}

TEST(PlanChange, GemmsWhatBackwardReadsAndTheTypeOfOtherOperandsCount) {
  const auto of = [](const char* base, const char* more) { return text(R"({"base":")", base, '"', more, '}'); };
  const auto gemms = [&](const char* list) { return of("mxfp8", (std::string(",\"gemms\":") + list).c_str()); };
  const std::string all = gemms(R"(["fprop","dgrad","wgrad"])");
  EXPECT_EQ(change(all, gemms(R"(["wgrad","dgrad","fprop"])")), "") << "the order does not";
  for (const char* fewer : {R"(["dgrad","wgrad"])", R"(["fprop","wgrad"])", R"(["fprop","dgrad"])"})
    EXPECT_THAT(change(all, gemms(fewer)), HasSubstr("own (gemms {")) << fewer;
  const auto mine = [&](const char* more) { return of("mxfp4_qat_mxfp8_act", more); };
  EXPECT_EQ(change(mine(""), mine(R"(,"columns":"rows","backward":"quantized")")), "");
  EXPECT_EQ(change(mine(""), mine(R"(,"columns":"values")")), R"(attn.qkv: own (columns null -> "values"))");
  const char* const values = R"(,"backward":"high_precision")";
  EXPECT_EQ(change(mine(R"(,"backward":"dequantized")"), mine(values)), R"(attn.qkv: own (backward "dequantized" -> "high_precision"))");
  EXPECT_EQ(change(mine(R"(,"output_grad":null,"gemms":["fprop"])"), mine(values)), R"(attn.qkv: own (backward null -> "high_precision"))");
  EXPECT_THAT(change(of("bf16", ""), of("fp32", "")), HasSubstr(R"(own (compute "bf16" -> "fp32")"));
}

// ---- the model

using Setting = void (*)(ModelConfig&);

// The keys that differ between a model of four heads and two layers and this one, and between one with experts or without.
std::string changed_keys(Setting before, Setting now, bool forward = false) {
  const auto model_with = [](Setting set) {
    ModelConfig model;
    model.hidden_size = 64, model.num_layers = 2, model.num_attention_heads = 4;
    set(model);
    return model;
  };
  const auto list =
      forward ? forward_differences(model_with(before), model_with(now)) : model_differences(model_with(before), model_with(now));
  std::vector<std::string> keys;
  for (const Difference& one : list) keys.push_back(one.key.substr(std::string_view("model.").size()));
  return joined(keys);
}

constexpr Setting kPlain = [](ModelConfig&) {};
constexpr Setting kClamped = [](ModelConfig& m) { m.activation = Activation::swiglu_clamped; };
constexpr Setting kLlama3 = [](ModelConfig& m) { m.rope_scaling = {.type = RopeScaling::llama3}; };
constexpr Setting kMoe = [](ModelConfig& m) { m.moe = MoeConfig(); };

TEST(ModelChange, WhatFollowsFromOtherKeysCountsAsGiven) {
  struct Derived {
    Setting left_out, given, other;
    const char* key;
  };
  const Derived all[] = {
      {kPlain, [](ModelConfig& m) { m.num_key_value_heads = 4; }, [](ModelConfig& m) { m.num_key_value_heads = 2; }, "num_key_value_heads"},
      {kPlain, [](ModelConfig& m) { m.head_dim = 16; }, [](ModelConfig& m) { m.head_dim = 32; }, "head_dim"},
      {kClamped, [](ModelConfig& m) { kClamped(m), m.swiglu_limit = 7.0; }, [](ModelConfig& m) { kClamped(m), m.swiglu_limit = 5.0; },
       "swiglu_limit"},
      {kLlama3, [](ModelConfig& m) { kLlama3(m), m.rope_scaling->low_freq_factor = 1.0, m.rope_scaling->high_freq_factor = 4.0; },
       [](ModelConfig& m) { kLlama3(m), m.rope_scaling->high_freq_factor = 8.0; }, "rope_scaling.high_freq_factor"},
      {kMoe, [](ModelConfig& m) { kMoe(m), m.moe->norm_topk_prob = true; }, [](ModelConfig& m) { kMoe(m), m.moe->norm_topk_prob = false; },
       "moe.norm_topk_prob"},
      {kMoe, [](ModelConfig& m) { kMoe(m), m.moe->softmax_after_topk = true; },
       [](ModelConfig& m) { kMoe(m), m.moe->num_experts_per_tok = 3; }, "moe.num_experts_per_tok"}};
  for (const Derived& derived : all) {
    EXPECT_EQ(changed_keys(derived.left_out, derived.given), "") << derived.key;
    EXPECT_EQ(changed_keys(derived.given, derived.left_out), "") << derived.key;
    EXPECT_EQ(changed_keys(derived.left_out, derived.other), derived.key);
  }
}

TEST(ModelChange, WhatComputesNothingMayDiffer) {
  EXPECT_EQ(changed_keys(kPlain, [](ModelConfig& m) { m.pad_vocab_to = 64; }), "");
  for (const Setting change : {+[](ModelConfig& m) { m.moe->aux_loss_coef = 0.5; }, +[](ModelConfig& m) { m.moe->seq_aux_loss_coef = 0.5; },
                               +[](ModelConfig& m) { m.moe->z_loss_coef = 0.5; }, +[](ModelConfig& m) { m.moe->bias_update_rate = 0.5; },
                               +[](ModelConfig& m) { m.moe->capacity_factor = 2.0; }, +[](ModelConfig& m) { m.moe->force_balance = true; },
                               +[](ModelConfig& m) { m.intermediate_size = 9; }}) {  // no layer has an MLP
    static Setting with;
    with = change;
    EXPECT_EQ(changed_keys(kMoe, [](ModelConfig& m) { kMoe(m), with(m); }), "");
  }
  constexpr Setting dense = [](ModelConfig& m) { kMoe(m), m.moe->dense_layers = {1}; };
  EXPECT_EQ(changed_keys(dense, [](ModelConfig& m) { dense(m), m.intermediate_size = 9; }), "intermediate_size");
  EXPECT_EQ(changed_keys(dense, [](ModelConfig& m) { kMoe(m), m.moe->dense_layers = {0}; }), "moe.dense_layers");
  EXPECT_THAT(changed_keys(kPlain, kMoe), ::testing::EndsWith("moe"));
  EXPECT_EQ(changed_keys(kPlain, kLlama3), "rope_scaling");
  EXPECT_EQ(changed_keys(kLlama3, [](ModelConfig& m) { kLlama3(m), m.rope_scaling->factor = 9; }), "rope_scaling.factor");
  constexpr Setting initial = [](ModelConfig& m) { m.init_std = 0.5, m.init_residual_scale = false, m.logits_dtype = LogitsDtype::fp32; };
  EXPECT_EQ(changed_keys(kPlain, initial), "logits_dtype, init_std, init_residual_scale");
  EXPECT_EQ(changed_keys(kPlain, initial, true), "");
}

// Windows are compared by layer, however they are given, and named once.
TEST(ModelChange, WindowsAreThoseOfTheLayers) {
  constexpr Setting all = [](ModelConfig& m) { m.sliding_window = 8; };
  EXPECT_EQ(changed_keys(all, [](ModelConfig& m) { all(m), m.sliding_layers = {0, 1}; }), "");
  EXPECT_EQ(changed_keys(all, [](ModelConfig& m) { all(m), m.sliding_layers = {1}; }), "sliding_window");
  EXPECT_EQ(changed_keys(all, [](ModelConfig& m) { m.sliding_window = 4; }), "sliding_window");
  EXPECT_EQ(changed_keys(kPlain, all), "sliding_window");
}

TEST(ModelChange, ARunMayStartFromAnotherModelWhereItsKeysAreListed) {
  RunConfig saved, current;
  saved.model.max_position_embeddings = 8;
  EXPECT_NO_THROW(require_initial_model(saved, current, "from")) << "rotary positions are computed";
  EXPECT_THROW(require_same_model(saved, current, "from"), Error);
  saved.model.position = current.model.position = Position::learned;
  saved.model.rope_theta = 5.0;
  current.checkpoint.allow_model_change = {"model.rope_theta"};
  const auto refusal = [&] {
    try {
      require_initial_model(saved, current, "from");
      return std::string();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      return std::string(error.what());
    }
  };
  EXPECT_THAT(refusal(), HasSubstr("from has another model:\n  model.max_position_embeddings: 8 in the checkpoint, 1024 here\n"));
  EXPECT_THAT(refusal(), ::testing::Not(HasSubstr("model.rope_theta")));
  EXPECT_THAT(refusal(), EndsWith("\nremove the section model to use that model: its weights do not fit this one"));
  current.checkpoint.allow_model_change.emplace_back("model.max_position_embeddings");
  EXPECT_EQ(refusal(), "");
}

// A model of fewer layers finds all of its weights.
TEST(ModelChange, AListOfKeysIsProposedOnlyWhereTheWeightsFit) {
  for (const auto& [fits, change] :
       std::vector<std::pair<bool, void (*)(ModelConfig&)>>{{true, [](ModelConfig& m) { m.norm_eps = 1e-3; }},
                                                            {true, [](ModelConfig& m) { m.num_layers = 1; }},
                                                            {false, [](ModelConfig& m) { m.num_layers = 100; }},
                                                            {false, [](ModelConfig& m) { m.hidden_size *= 2, m.norm_eps = 1e-3; }}}) {
    RunConfig current;
    change(current.model);
    const Error error = test::error_of([&, &current = current] { require_initial_model({}, current, "from"); });
    EXPECT_EQ(std::string(error.what()).find("in checkpoint.allow_model_change") != std::string::npos, fits) << error.what();
  }
}

}  // namespace mantissa::plan_change_test
