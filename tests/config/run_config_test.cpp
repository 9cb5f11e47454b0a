// The sections of a run: every field is read; values that depend on several keys; values that are derived.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "error_messages.h"
#include "mantissa/plan/estimate.h"
#include "mantissa/train/load_config.h"
#include "models/gpt.h"

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
  const json before = json::parse(effective_config(RunConfig{})).flatten();
  RunConfig scratch;
  int leaves = 0;
  for_each_leaf(fields_of(scratch), "", [&](const std::string& key, const Field& field) {
    ++leaves;
    const json value = another(field);
    Read r;
    read_config(ConfigSources{.file = "", .sets = {key + "=" + value.dump()}}, fields_of(r.config), r.report);
    ASSERT_EQ(r.errors(), "") << key;
    const json after = json::parse(effective_config(r.config)).flatten();
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
}

TEST(RunConfig, EpochsTakeThePlaceOfSteps) {
  const auto length = [](const json& training) {
    const Read r = resolved({{"training", training}});
    return r.report.ok() ? text(r.config.training.steps.value_or(-1), ' ', r.report.origin("training.steps")) : r.errors();
  };
  EXPECT_EQ(length({{"epochs", 2.5}}), "-1 derived");
  EXPECT_EQ(length({{"epochs", 2}, {"steps", nullptr}}), "-1 derived");
  EXPECT_EQ(length({{"epochs", nullptr}}), "1000 default");
  EXPECT_THAT(length({{"epochs", 2}, {"steps", 1000}}),
              HasSubstr("training.epochs: is given beside training.steps 1000, but one of them says how long the run is: leave one out"));
  EXPECT_THAT(length({{"steps", nullptr}}), HasSubstr("training.steps: must be given, because training.epochs is null"));
  for (const double bad : {0.0, -1.0, 2e9}) EXPECT_THAT(length({{"epochs", bad}}), HasSubstr("training.epochs: must be ")) << bad;
}

TEST(RunConfig, StepsOfEpochsAreRoundedUp) {
  const auto steps = [](double epochs, int64_t sequences, int64_t batch) {
    Read r = resolved({{"training", {{"epochs", epochs}, {"grad_accum", 1}, {"micro_batch_size", batch}}}});
    resolve_steps(r.config, sequences, r.report);
    return r.report.ok() ? text(*r.config.training.steps) : r.errors();
  };
  EXPECT_EQ(steps(1, 64, 8), "8");
  EXPECT_EQ(steps(1, 65, 8), "9");
  EXPECT_EQ(steps(2.5, 100, 64), "4");
  EXPECT_EQ(steps(0.07, 100, 1), "7") << "the product is a bit more than 7";
  EXPECT_EQ(steps(0.7, 10, 1), "7");
  EXPECT_EQ(steps(1e-9, 5, 8), "1");
  EXPECT_THAT(steps(1e9, 1'000'000, 1), HasSubstr("training.epochs: 1e+09 are more than 1e+12 steps"));
}

TEST(RunConfig, ATraceBehindTheLastEpochIsRefused) {
  const auto errors = [](int64_t sequences) {
    Read r = resolved({{"training", {{"epochs", 1}, {"grad_accum", 1}, {"micro_batch_size", 8}, {"trace", {{"steps", {5, 9}}}}}}});
    resolve_steps(r.config, sequences, r.report);
    return r.errors();
  };
  EXPECT_EQ(errors(40), "");
  EXPECT_THAT(errors(32), HasSubstr("training.trace.steps: the run ends with step 4, got [5, 9]"));
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
  const Read percent = resolved({{"logging", {{"run_name", "a%d"}, {"dir", "/x%%n%/%n"}}}, {"checkpoint", {{"dir", "%d/%%%n%%d"}}}});
  EXPECT_EQ(percent.config.logging.dir, "/x%n%/a%d") << "what stands for a placeholder holds none";
  EXPECT_EQ(percent.config.checkpoint.dir, "/x%n%/a%d/%a%d%d");
}

// Only a folder that is stated later stands for itself: a name on the command line asks for a folder of that name.
TEST(RunConfig, ANameThatNoFolderHasIsRefused) {
  const std::string message = R"(logging.run_name: "b" is not used, because logging.dir "runs/a" has no %n)";
  const auto errors = [](const json& logging, const std::vector<std::string>& sets) {
    return resolved({{"logging", logging}}, sets).errors();
  };
  EXPECT_THAT(errors({{"run_name", "b"}, {"dir", "runs/a"}}, {}), HasSubstr(message));
  EXPECT_THAT(errors({{"dir", "runs/a"}, {"run_name", "b"}}, {}), HasSubstr(message));
  EXPECT_THAT(errors({{"dir", "runs/a"}}, {"logging.run_name=b"}), HasSubstr(message));
  EXPECT_THAT(errors({{"run_name", "a"}, {"dir", "runs/a"}}, {"logging.run_name=b"}), HasSubstr(message));
  EXPECT_THAT(errors(json::object(), {"logging.dir=runs/a", "logging.run_name=b"}), HasSubstr(message));
  EXPECT_EQ(errors({{"run_name", "b"}}, {"logging.dir=runs/a"}), "");
  EXPECT_EQ(errors({{"run_name", "b"}}, {"logging.run_name=b", "logging.dir=runs/a"}), "");
  EXPECT_EQ(errors({{"run_name", "a"}, {"dir", "runs/a"}}, {}), "");
  EXPECT_EQ(errors({{"run_name", nullptr}, {"dir", "runs/a"}}, {}), "");
  EXPECT_EQ(errors({{"run_name", "b"}, {"dir", "runs/a"}}, {"checkpoint.dir=%d/of-%n"}), "");
}

TEST(ConfigMessages, AreTheExpectedOnes) {
  const TemporaryFolder folder;
  write_file(folder / "text.txt", std::string(20'000, 'x'));
  const std::string data = R"("data": {"path": "text.txt", "tokenizer": "byte"},)";
  test::expect_messages("configurations", [&](const std::string& input) {
    const bool members = input.starts_with('"'), has_data = input.find("\"data\":") != std::string::npos;
    write_file(folder / "c.json", members ? "{" + (has_data ? "" : data) + "\n" + input + "}" : input);
    const auto outcome = test::outcome_of([&] { load_run_config({.file = folder / "c.json"}); });
    const std::string names = std::regex_replace(outcome, std::regex(folder.path().string() + "/(?=[a-z])"), "");
    return test::replaced(names, folder.path().string(), "FOLDER");
  });
}

TEST(RunConfig, AVocabularyIsPaddedToRowsForEveryTensorRank) {
  for (const auto& [pad_vocab_to, tensor, padded] : {std::array{1, 4, 4}, {2, 4, 4}, {8, 4, 8}, {6, 4, 12}, {2, 3, 6}, {3, 1, 3}}) {
    Read r = resolved(
        {{"model", {{"pad_vocab_to", pad_vocab_to}, {"hidden_size", 384}, {"num_attention_heads", 12}, {"intermediate_size", 384}}}});
    divide_model(r.config.model, tensor, r.report);
    EXPECT_EQ(r.errors(), "");
    EXPECT_EQ(r.config.model.pad_vocab_to, padded) << pad_vocab_to << " on " << tensor;
  }
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

TEST(RunConfig, AFolderInPlaceOfAConfigurationIsRefusedWithItsOwn) {
  const TemporaryFolder folder;
  const auto refused = [&] { return std::string(error_of([&] { load_run_config({.file = folder.path().string()}); }).what()); };
  EXPECT_THAT(refused(), HasSubstr(folder.path().string() + ": not a regular file"));
  write_file(folder / "config.json", "{}");
  EXPECT_EQ(refused(), folder.path().string() + ": is a folder; its configuration is " + (folder / "config.json"));
  EXPECT_THAT(error_of([&] { load_run_config({.file = folder / "config.json"}); }).what(), Not(HasSubstr("is a folder")));
  write_file(folder / "model.gguf", "");
  EXPECT_EQ(std::string(error_of([&] { load_run_config({.file = folder / "model.gguf"}); }).what()),
            (folder / "model.gguf") +
                ": is a model, not a configuration; name a configuration, and the model with --set checkpoint.init_from=" +
                (folder / "model.gguf"));
}

// A device multiplies for both in one way, which the model that is made last decides.
TEST(RunConfig, TeacherMultipliesAsTheRunDoes) {
  RunConfig config = resolved({}).config;
  config.training.teacher = "teacher";
  config.teacher = config.model;
  config.precision.native_products = NativeProducts::never;
  config.precision.grouped_gemms = GroupedGemms::automatic;
  const PrecisionConfig teacher = teacher_config(config).precision;
  EXPECT_EQ(teacher.native_products, NativeProducts::never);
  EXPECT_EQ(teacher.grouped_gemms, GroupedGemms::automatic);
}

// The library itself is looked for when the device is opened.
TEST(RunConfig, AttentionByCudnnIsRefusedWhereNoLibraryHasIt) {
  const auto with = [](const std::vector<std::string>& more) {
    std::vector<std::string> sets = {"training.attention=cudnn", "training.device=cuda", "model.hidden_size=64", "model.head_dim=64"};
    sets.insert(sets.end(), more.begin(), more.end());
    return resolved({}, sets);
  };
  EXPECT_EQ(with({}).errors(), "");
  for (const auto& [set, what] : {std::pair{"training.device=cpu", "is a CPU: set it to own, or training.device to cuda if the run will"},
                                  {"precision.dtype=fp32", "cuDNN takes bf16, and attention is computed in fp32: set it to own"},
                                  {"model.head_dim=20", "a multiple of 8, and head_dim is 20: set it to own"},
                                  {"model.head_dim=264", "cuDNN takes heads of up to 256 channels"},
                                  {"training.seq_len=1", "sequences have one token"}}) {
    EXPECT_THAT(with({set}).errors(),
                ::testing::AllOf(::testing::HasSubstr("training.attention: cudnn cannot be had: "), ::testing::HasSubstr(what)));
  }
}

}  // namespace mantissa::run_config_test
