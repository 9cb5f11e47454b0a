// The sections of a run: every field is read, what depends on several keys, what is derived.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "files.h"
#include "mantissa/models/gpt.h"
#include "mantissa/plan/estimate.h"
#include "mantissa/train/load_config.h"

namespace mantissa::run_config_test {

using nlohmann::json;
using test::error_of;
using test::TemporaryFolder;
using test::write_file;
using ::testing::HasSubstr;
using ::testing::Not;

struct Read {
  RunConfig config;
  ConfigReport report;
  std::string errors() const {
    return report.ok() ? "" : error_of([&] { report.throw_if_failed(); }).what();
  }
};

// A whole config from the sections that matter to a test; without "data" the byte tokenizer and a path.
Read resolved(json sections, std::vector<std::string> sets = {}) {
  if (!sections.contains("data")) sections["data"] = {{"path", "text.txt"}, {"tokenizer", "byte"}};
  Read r;
  read_config(ConfigSources{.file = "c.json", .text = sections.dump(), .sets = std::move(sets)}, fields_of(r.config), r.report);
  resolve_run_config(r.config, r.report, "configs/my.run.json");
  return r;
}

// A value the field accepts that is not the one it has.
json another(const Field& field) {
  const Limits& limits = field.limits;
  switch (field.kind()) {
    case FieldKind::boolean: return field.get() != Scalar(true);
    case FieldKind::choice: {
      for (const std::string& name : field.type->choices) {
        if (field.get() != Scalar(name)) return name;
      }
      return nullptr;
    }
    case FieldKind::integer: return std::isfinite(limits.max) ? static_cast<int64_t>(limits.max) : 9'876'543;
    case FieldKind::number: return std::isfinite(limits.max) ? 0.375 : 98.75;
    case FieldKind::text: return "another";
    case FieldKind::list: return json::array();
    case FieldKind::object:
    case FieldKind::map: return json::object();
  }
  return {};
}

// Calls visit(dotted key, field) for every field that holds a value, also inside optional sections and lists.
template <class Visit>
void for_each_leaf(const std::vector<Field>& fields, const std::string& key, const Visit& visit) {
  for (const Field& field : fields) {
    const std::string here = key.empty() ? field.name : key + "." + field.name;
    if (field.kind() == FieldKind::object) {
      field.set(true);
      for_each_leaf(field.members(), here, visit);
    } else if (field.kind() == FieldKind::map) {
      for_each_leaf(field.add("x")->members(), here + ".x", visit);
    } else if (field.kind() == FieldKind::list) {
      field.resize(1);
      const Field element = field.element(0);
      if (element.kind() == FieldKind::object) {
        for_each_leaf(element.members(), here + ".0", visit);
      } else {
        visit(here + ".0", element);
      }
    } else {
      visit(here, field);
    }
  }
}

TEST(RunConfig, EveryFieldChangesTheEffectiveConfigAndNothingElse) {
  RunConfig scratch;
  int leaves = 0;
  for_each_leaf(fields_of(scratch), "", [&](const std::string& key, const Field& field) {
    ++leaves;
    const json value = another(field);
    if (field.type->choices.size() == 1) return;  // optimizer.type: nothing else to choose yet
    Read r;
    read_config(ConfigSources{.file = "", .sets = {key + "=" + value.dump()}}, fields_of(r.config), r.report);
    ASSERT_EQ(r.errors(), "") << key;
    const json before = json::parse(effective_config(RunConfig{})).flatten(), after = json::parse(effective_config(r.config)).flatten();
    std::string pointer = "/" + key;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    ASSERT_TRUE(after.contains(pointer)) << key;
    EXPECT_EQ(after.at(pointer), value) << key;
    EXPECT_TRUE(!before.contains(pointer) || before.at(pointer) != value) << key;
    for (const auto& [other, old] : before.items()) {  // an optional section that was null is no leaf any more
      if (other != pointer && after.contains(other)) {
        EXPECT_EQ(after.at(other), old) << key << " changed " << other;
      }
    }
  });
  EXPECT_GT(leaves, 100);
}

TEST(RunConfig, TwoBatchSizesGiveTheThird) {
  const auto batch = [](const json& training) {
    const Read r = resolved({{"training", training}});
    const TrainingConfig& t = r.config.training;
    return r.report.ok() ? text(t.micro_batch_size, '*', *t.grad_accum, '=', *t.global_batch_size) : r.errors();
  };
  EXPECT_EQ(batch(json::object()), "8*8=64");
  EXPECT_EQ(batch({{"micro_batch_size", 4}}), "4*16=64");
  EXPECT_EQ(batch({{"micro_batch_size", 12}, {"grad_accum", 1}}), "12*1=12");
  EXPECT_EQ(batch({{"micro_batch_size", 12}, {"grad_accum", 3}, {"global_batch_size", nullptr}}), "12*3=36");
  EXPECT_EQ(batch({{"micro_batch_size", 6}, {"global_batch_size", 18}}), "6*3=18");
  EXPECT_EQ(batch({{"grad_accum", 2}, {"global_batch_size", 10}}), "5*2=10");
  EXPECT_EQ(batch({{"global_batch_size", 24}}), "8*3=24");
  EXPECT_EQ(batch({{"micro_batch_size", 6}, {"grad_accum", 3}, {"global_batch_size", 18}}), "6*3=18");
  EXPECT_THAT(batch({{"micro_batch_size", 4}, {"grad_accum", 3}, {"global_batch_size", 64}}), HasSubstr("4 * 3 = 12, not 64   (c.json:1:"));
  EXPECT_THAT(batch({{"micro_batch_size", 12}}), HasSubstr("global_batch_size 64 is not a multiple of micro_batch_size 12"));
  EXPECT_THAT(batch({{"micro_batch_size", 16777216}, {"grad_accum", 16777216}}), HasSubstr("is more than 1073741824"));
}

// The largest values that are accepted, in all places at once: no count wraps.
TEST(RunConfig, CountsOfTheLargestModelFit) {
  const Read r = resolved({{"model",
                            {{"vocab_size", 2147483647},
                             {"pad_vocab_to", 65536},
                             {"hidden_size", 1 << 20},
                             {"num_layers", 10000},
                             {"num_attention_heads", 1 << 12},
                             {"head_dim", 1 << 10},
                             {"intermediate_size", 1 << 22},
                             {"max_position_embeddings", 1 << 24}}},
                           {"training", {{"seq_len", 1 << 24}, {"micro_batch_size", 1 << 24}, {"grad_accum", 1}}}});
  ASSERT_EQ(r.errors(), "");
  const double layer = 4.0 * 0x1p22 * 0x1p20 + 3 * 0x1p22 * 0x1p20, table = 2 * 0x1p31 * 0x1p20;
  const PrecisionPlan plan = resolve_plan(r.config);
  EXPECT_NEAR(static_cast<double>(plan.parameters()), 1e4 * layer + table, 1e-6 * 1e4 * layer);
  const MemoryEstimate memory = estimate_memory(r.config, plan);
  EXPECT_EQ(memory.activations, 1'000'000'000'000'000'000);
  EXPECT_GT(memory.total(), 3'000'000'000'000'000'000);
  EXPECT_THAT(resolved({{"model", {{"vocab_size", 2147483648}}}}).errors(), HasSubstr("model.vocab_size: must be"));
  EXPECT_THAT(resolved({{"model", {{"num_attention_heads", 1 << 13}, {"head_dim", 1 << 10}}}}).errors(), HasSubstr("is more than 4194304"));
  EXPECT_THAT(resolved({{"data", {{"path", "t"}, {"tokenizer", "byte"}, {"eod_id", 2147483648}}}}).errors(),
              HasSubstr("data.eod_id: must be"));
}

TEST(RunConfig, WhatIsDerivedReadsBackUnchanged) {
  const json rows = {{"format", "e4m3"}, {"rule", "floor"}, {"block", {1, 32}}};
  const json recipes = {{"a", {{"base", "mxfp8"}, {"weight", rows}, {"output_grad", nullptr}}}, {"b", {{"base", "mxfp4_qat"}}}};
  const Read r = resolved({{"training", {{"micro_batch_size", 2}, {"grad_accum", 3}}}, {"precision", {{"recipes", recipes}}}});
  Read again;
  read_config(ConfigSources{.file = "saved.json", .text = effective_config(r.config)}, fields_of(again.config), again.report);
  resolve_run_config(again.config, again.report, "saved.json");
  EXPECT_EQ(again.errors(), "");
  EXPECT_EQ(effective_config(again.config), effective_config(r.config));
}

TEST(RunConfig, DerivesHeadsVocabularyNameAndFolders) {
  const Read r = resolved({{"model", {{"hidden_size", 96}, {"num_attention_heads", 6}}}});
  ASSERT_EQ(r.errors(), "");
  EXPECT_EQ(r.config.model.num_key_value_heads, 6);
  EXPECT_EQ(r.config.model.head_dim, 16);
  EXPECT_EQ(r.config.model.vocab_size, 256);
  EXPECT_EQ(r.config.logging.run_name, "my.run");
  EXPECT_EQ(r.config.logging.dir, "runs/my.run");
  EXPECT_EQ(r.config.checkpoint.dir, "runs/my.run/checkpoints");
  EXPECT_EQ(r.report.origin("model.head_dim"), "derived");
  EXPECT_TRUE(std::filesystem::path(*r.config.data.path).is_absolute());
  const Read named = resolved({{"logging", {{"run_name", "a"}, {"dir", "/x/%n"}}}, {"checkpoint", {{"dir", "%d/c-%n"}}}});
  EXPECT_EQ(named.config.checkpoint.dir, "/x/a/c-a");
}

TEST(RunConfig, CrossFieldErrorsNameTheKey) {
  const json bytes = {{"path", "t"}, {"tokenizer", "byte"}};
  const auto data = [&](const json& more) {
    json all = bytes;
    all.update(more);
    return json{{"data", all}};
  };
  const auto rope = [](const json& scaling) { return json{{"model", {{"rope_scaling", scaling}}}}; };
  const std::pair<json, const char*> cases[] = {
      {{{"model", {{"hidden_size", 100}}}}, "model.hidden_size: must be a multiple of num_attention_heads 8"},
      {{{"model", {{"hidden_size", 24}}}}, "model.hidden_size: rotary positions need an even head_dim, got 3"},
      {{{"model", {{"head_dim", 33}}}}, "model.head_dim: rotary positions need an even head_dim, got 33"},
      {{{"model", {{"num_key_value_heads", 3}}}}, "model.num_key_value_heads: must divide num_attention_heads 8, got 3"},
      {{{"model", {{"norm_bias", true}}}}, "model.norm_bias: RMSNorm has no bias"},
      {{{"model", {{"position", "learned"}, {"rope_scaling", {{"type", "yarn"}}}}}}, "model.rope_scaling: needs model.position rope"},
      {{{"model", {{"rope_theta", 1}, {"rope_scaling", {{"type", "yarn"}}}}}},
       "model.rope_theta: must be above 1 for model.rope_scaling.type"},
      {rope({{"type", "llama3"}, {"beta_fast", 3}}), "model.rope_scaling.beta_fast: is of model.rope_scaling.type yarn, which is llama3"},
      {rope({{"type", "yarn"}, {"high_freq_factor", 3}}), "model.rope_scaling.high_freq_factor: is of model.rope_scaling.type llama3"},
      {rope({{"low_freq_factor", 4}}), "model.rope_scaling.high_freq_factor: must be above low_freq_factor 4, got 4"},
      {rope({{"type", "yarn"}, {"beta_slow", 32}}), "model.rope_scaling.beta_fast: must be above beta_slow 32, got 32"},
      {rope({{"type", "yarn"}, {"mscale", 1}}), "model.rope_scaling.mscale: needs mscale and mscale_all_dim together"},
      {rope({{"type", "yarn"}, {"mscale", 1}, {"mscale_all_dim", 1}, {"attention_factor", 1}}),
       "model.rope_scaling.mscale: does nothing beside attention_factor"},
      {{{"model", {{"sliding_layers", {0}}}}}, "model.sliding_layers: needs model.sliding_window"},
      {{{"model", {{"sliding_window", 4}, {"sliding_layers", {8}}}}}, "model.sliding_layers: there is no layer 8, model.num_layers is 8"},
      {{{"model", {{"sliding_window", 4}, {"sliding_layers", {1, 1}}}}}, "model.sliding_layers: names layer 1 twice"},
      {{{"model", {{"swiglu_limit", 7}}}}, "model.swiglu_limit: needs model.activation swiglu_clamped"},
      {{{"model", {{"activation", "gelu_erf"}, {"moe", json::object()}}}}, "model.activation: experts need swiglu or swiglu_clamped"},
      {{{"model", {{"mlp_bias", true}, {"moe", json::object()}}}}, "model.mlp_bias: is of dense models"},
      {{{"model", {{"vocab_size", 255}}}}, "model.vocab_size: the byte tokenizer has 256 ids, got 255"},
      {{{"training", {{"seq_len", 2048}}}}, "training.seq_len: must be at most model.max_position_embeddings 1024"},
      {{{"schedule", {{"type", "wsd"}, {"decay_steps", 950}}}}, "schedule.decay_steps: wsd: warmup_steps 100 + decay_steps 950"},
      {{{"checkpoint", {{"keep_latest", 1}}}}, "checkpoint.keep_latest: must be at least 2, got 1"},
      {{{"checkpoint", {{"init_from", "c"}, {"resume", "d"}}}}, "checkpoint.init_from: starts at step 0"},
      {{{"checkpoint", {{"dir", ""}}}}, "checkpoint.dir: must name a folder"},
      {{{"logging", {{"run_name", "a/b"}}}}, "logging.run_name: must be a plain file name"},
      {{{"eval", {{"samples", {{"prompts", json::array()}}}}}}, "eval.samples.prompts: must hold at least one text"},
      {{{"data", json::object()}}, "data: must name what to train on"},
      {{{"data", {{"path", "t"}}}}, "model.vocab_size: must be given: data.tokenizer is null"},
      {data({{"train", {{{"path", "x"}}}}}), "data.path: excludes data.train"},
      {data({{"train", {{{"weight", 2}}}}, {"path", nullptr}}), "data.train.0.path: is missing"},
      {data({{"path", nullptr}, {"train", {{{"path", "x"}}}}, {"valid_fraction", 0.2}}), "data.valid_fraction: splits the one file"},
      {data({{"format", "text"}, {"tokenizer", nullptr}}), "data.tokenizer: data.format text needs a tokenizer"},
      {data({{"append_eod", true}}), "data.append_eod: needs data.eod_id"},
      {data({{"append_eod", true}, {"format", "llmc"}}), "data.append_eod: is for text and JSONL"},
      {data({{"chat_template", "llama3"}, {"format", "text"}}), "data.chat_template: is for JSONL of messages"},
      {data({{"chat_template", "vicuna"}}), "data.chat_template: must be one of"},
      {data({{"chat_template", "qwen3"}, {"chat_date", "x"}}), "data.chat_date: is for data.chat_template llama3 and harmony"},
      {data({{"chat_date", "x"}}), "data.chat_date: is for data.chat_template"},
      {data({{"document_mask", true}, {"format", "nanogpt"}}), "data.document_mask: data.format nanogpt marks no documents"},
      {data({{"eod_id", 256}}), "data.eod_id: must be below model.vocab_size 256"},
      {data({{"path", ""}}), "data.path: must name a file, got an empty string"},
  };
  for (const auto& [sections, message] : cases) EXPECT_THAT(resolved(sections).errors(), HasSubstr(message)) << sections;
}

// Clocks and sockets count in integers.
TEST(RunConfig, AVocabularyIsPaddedToRowsForEveryTensorRank) {
  const auto padding = [](int64_t pad_vocab_to, int64_t tensor) {
    Read r = resolved(
        {{"model", {{"pad_vocab_to", pad_vocab_to}, {"hidden_size", 384}, {"num_attention_heads", 12}, {"intermediate_size", 384}}}});
    divide_model(r.config.model, tensor, r.report);
    EXPECT_EQ(r.errors(), "");
    return r.config.model.pad_vocab_to;
  };
  EXPECT_EQ(padding(1, 4), 4);
  EXPECT_EQ(padding(2, 4), 4);
  EXPECT_EQ(padding(8, 4), 8);
  EXPECT_EQ(padding(6, 4), 12);
  EXPECT_EQ(padding(2, 3), 6);
  EXPECT_EQ(padding(3, 1), 3);
}

TEST(RunConfig, TimeoutsAreAtMostAMillionSeconds) {
  for (const std::string key : {"init_timeout_s", "heartbeat_timeout_s", "step_timeout_s", "section_timeout_s"}) {
    EXPECT_EQ(resolved({{"parallel", {{key, 1e6}}}}).errors(), "");
    for (const double never : {0.0, -1.0, 1000001.0, 1e10, 1e300})
      EXPECT_THAT(resolved({{"parallel", {{key, never}}}}).errors(), HasSubstr("parallel." + key)) << never;
  }
}

TEST(RunConfig, AStageOfZeroIsAnsweredByName) {
  const auto read = [](const json& sections) {
    const Error error = error_of([&] { load_run_config({.file = "c.json", .text = sections.dump()}, Inputs::unchecked); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    return std::string(error.what());
  };
  const std::string answer = "unknown key; there is no stage of ZeRO to choose: with several data ranks it is 1";
  for (const char* name : {"zero_stage", "zero-stage", "use_distributed_optimizer"}) {
    EXPECT_THAT(read({{"parallel", {{name, 1}}}}), HasSubstr(std::string("parallel.") + name + ": " + answer));
  }
  EXPECT_THAT(read({{"zero_optimization", {{"stage", 1}}}}), HasSubstr("zero_optimization: " + answer));
}

TEST(RunConfig, KeysOfEarlierVersionsAreRefusedWithTheNewName) {
  const std::vector<std::pair<std::string, std::string>> renamed = {
      {"quantised_dispatch", "precision.quantized_dispatch"},
      {"score_after_choice", "model.moe.softmax_after_topk"},
  };
  for (const auto& [before, now] : renamed) {
    const std::string section = now.substr(0, now.rfind('.') + 1);
    const ConfigSources sources{.file = "c.json", .text = "{}", .sets = {section + before + "=true"}};
    const Error error = error_of([&] { load_run_config(sources, Inputs::unchecked); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr(section + before + ": unknown key; here it is '" + now + "'"));
  }
}

TEST(RunConfig, UnknownKeysOfEntriesOfListsAreRefused) {
  const json data = {
      {"tokenizer", "byte"}, {"train", {{{"path", "x"}}, {{"path", "y"}, {"wieght", 2}}}}, {"valid", {{{"path", "z"}, {"weigth", 1}}}}};
  const std::string errors =
      resolved({{"data", data}, {"precision", {{"rules", {{{"match", "output"}, {"recipe", "bf16"}, {"dtype", "bf16"}}}}}}}).errors();
  EXPECT_THAT(errors, HasSubstr("3 errors"));
  EXPECT_THAT(errors, HasSubstr("data.train.1.wieght: unknown key; did you mean 'weight'?   (c.json:1:"));
  EXPECT_THAT(errors, HasSubstr("data.valid.0.weigth: unknown key; did you mean 'weight'?   (c.json:1:"));
  EXPECT_THAT(errors, HasSubstr("precision.rules.0.dtype: unknown key"));
}

TEST(RunConfig, ASequenceMayBeAsLongAsThePositionsAndNoLonger) {
  const auto errors = [](int64_t seq_len) {
    return resolved({{"model", {{"max_position_embeddings", 100}}}, {"training", {{"seq_len", seq_len}}}}).errors();
  };
  EXPECT_EQ(errors(100), "");
  EXPECT_THAT(errors(101), HasSubstr("training.seq_len: must be at most model.max_position_embeddings 100, got 101"));
  EXPECT_THAT(errors(0), Not(HasSubstr("got 1024"))) << "the default, which nobody asked for";
}

TEST(RunConfig, MissingInputsAreNamedWithWhatIsThere) {
  const TemporaryFolder folder;
  write_file(folder / "there.txt", "x");
  write_file(
      folder / "c.json",
      "{\"data\": {\"tokenizer\": \"byte\",\n \"train\": [{\"path\": \"*.txt\"}, {\"path\": \"gone-*.txt\"}],\n \"valid\": [{\"path\": "
      "\"no.bin\"}]},\n \"checkpoint\": {\"init_from\": \"old\"}}");
  const Error error = error_of([&] { load_run_config({.file = folder / "c.json"}); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("3 errors"));
  EXPECT_THAT(error.what(), HasSubstr("gone-*.txt\" matches no file"));
  EXPECT_THAT(error.what(), HasSubstr("name yours with --set data.train.1.path=FILE"));
  EXPECT_THAT(error.what(), HasSubstr("name yours with --set data.valid.0.path=FILE"));
  EXPECT_THAT(error.what(), HasSubstr("there.txt"));
  EXPECT_THAT(error.what(), HasSubstr("c.json:2:40)"));
  EXPECT_THAT(error.what(), HasSubstr("checkpoint.init_from: no such checkpoint"));
  const LoadedConfig loaded = load_run_config(
      {.file = folder / "c.json",
       .sets = {"data.train=[{\"path\": \"" + (folder / "there.txt") + "\"}]", "data.valid=[]", "checkpoint.init_from=null"}});
  EXPECT_EQ(loaded.config.data.train.at(0).path, folder / "there.txt");
}

TEST(RunConfig, NothingIsDownloaded) {
  const TemporaryFolder folder;
  write_file(folder / "there.txt", std::string(9000, 'x'));
  write_file(folder / "c.json", R"({"data": {"path": "there.txt", "tokenizer": "byte"}})");
  const auto refused = [&](const std::string& from) {
    return std::string(error_of([&] { load_run_config({.file = folder / "c.json", .sets = {"checkpoint.init_from=" + from}}); }).what());
  };
  EXPECT_THAT(refused("Qwen/Qwen3-0.6B"), HasSubstr("nothing is downloaded"));
  EXPECT_THAT(refused(folder / "typo"), Not(HasSubstr("nothing is downloaded")));
}

TEST(RunConfig, AFolderInPlaceOfAConfigurationIsRefusedWithItsOwn) {
  const TemporaryFolder folder;
  const auto refused = [&] { return std::string(error_of([&] { load_run_config({.file = folder.path().string()}); }).what()); };
  EXPECT_THAT(refused(), HasSubstr(folder.path().string() + ": not a regular file"));
  write_file(folder / "config.json", "{}");
  EXPECT_EQ(refused(), folder.path().string() + ": is a folder; its configuration is " + (folder / "config.json"));
  EXPECT_THAT(error_of([&] { load_run_config({.file = folder / "config.json"}); }).what(), Not(HasSubstr("is a folder")));
}

TEST(ModelChange, KeysThatMayBeListedAreThoseOfTheModel) {
  const auto errors = [](const json& keys) { return resolved({{"checkpoint", {{"allow_model_change", keys}}}}).errors(); };
  EXPECT_EQ(errors({"model.rope_theta", "model.moe.num_experts", "model.rope_scaling.factor"}), "");
  const std::string refused = errors({"model.rope_scaling.faktor", "rope_theta"});
  EXPECT_THAT(refused, HasSubstr("\"model.rope_scaling.faktor\" is no key of section model; did you mean 'model.rope_scaling.factor'?"));
  EXPECT_THAT(refused, HasSubstr("checkpoint.allow_model_change.1: \"rope_theta\" is no key of section model; write \"model.rope_theta\""));
}

}  // namespace mantissa::run_config_test
