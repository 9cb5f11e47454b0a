// A run learns from a teacher: the loss, the weights that it moves, layouts of ranks, devices, resumes, and what is refused.
#include <gmock/gmock.h>

#include "async_device.h"
#include "config/training_options.h"
#include "hf/export.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"
#include "plan/cost.h"
#include "train/run.h"
#include "training_on_ranks.h"

namespace mantissa::distillation_test {

using test::error_of;
using test::Sets;
using test::TensorLayout;
using test::TrainedRun;
using test::with;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

const Sets kExperts{"model.moe.num_experts=4", "model.moe.num_experts_per_tok=2", "model.moe.intermediate_size=64",
                    "model.moe.aux_loss_coef=0"};
const Sets kStill{"optimizer.weight_decay=0", "training.steps=3", "optimizer.lr=1e-2", "schedule.warmup_steps=0"};

class Distillation : public test::TrainingOnRanks {
 protected:
  // Whole blocks of every format.
  LoadedConfig config(const std::string& name, const Sets& sets) const {
    return TrainingTest::config(name, with({"model.intermediate_size=64"}, sets));
  }
  using TrainingTest::run;
  TrainedRun run(const std::string& name, std::vector<std::string> sets) const { return run(config(name, sets)); }

  // Trains a model and returns the settings of a run that starts from it and learns from it.
  Sets from_itself(const std::string& teacher, const Sets& of_both) const {
    run(teacher, with({"training.steps=6"}, of_both));
    return with({"checkpoint.init_from=" + run_folder(teacher), "training.teacher=self"}, of_both);
  }
  std::map<std::string, std::string> weights(const std::string& name, int64_t step) const {
    std::map<std::string, std::string> all = contents(name, step);
    std::erase_if(all, [](const auto& tensor) { return !tensor.first.starts_with("master."); });
    return all;
  }
  // Returns the line of the last evaluation in metrics.jsonl.
  nlohmann::json validation(const std::string& name) const {
    std::istringstream lines(test::read_file(run_folder(name) + "/metrics.jsonl"));
    nlohmann::json last;
    for (std::string line; std::getline(lines, line);) {
      const nlohmann::json event = nlohmann::json::parse(line);
      if (event["type"] == "eval") last = event;
    }
    return last;
  }
  std::string refused(const Sets& sets) const {
    const Error error = error_of([&] { run("refused", sets); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    return error.what();
  }
};

// Both models compute the same logits, so no gradient is left, to the last bit.
TEST_F(Distillation, OfAModelFromItselfChangesNothing) {
  const Sets none, full{"precision.dtype=bf16", "training.recompute=full"}, fp32_logits{"precision.dtype=bf16", "model.logits_dtype=fp32"};
  int number = 0;
  for (const Sets& sets : {none, full, fp32_logits, with(kExperts, {"precision.dtype=bf16"})}) {
    const std::string teacher = text("teacher", ++number), name = text("student", number);
    const Sets settings = with(from_itself(teacher, sets), with(kStill, {"training.teacher_temperature=2"}));
    std::filesystem::remove(folder_ / "log.txt");
    open_log({.console = false, .file = folder_ / "log.txt"});
    const TrainedRun same = run(name, settings);
    close_log();
    EXPECT_THAT(same.losses, ::testing::ElementsAre(0.0, 0.0, 0.0)) << number;
    EXPECT_THAT(same.norms, Each(0.0)) << number;
    EXPECT_EQ(weights(name, 3), weights(teacher, 6)) << number;
    EXPECT_THAT(test::read_file(folder_ / "log.txt"), HasSubstr("the model predicts what its teacher does")) << number;
  }
}

// A teacher has none of the student's recipe and rules: it differs from what starts as its copy, and may have less layers than these name.
TEST_F(Distillation, ComesFromATeacherInHighPrecision) {
  const Sets sets = from_itself("teacher", {"precision.dtype=bf16"});
  for (const std::string recipe : {"mxfp8", "mxfp4_qat"})
    EXPECT_GT(run(recipe, with(sets, with(kStill, {"precision.recipe=" + recipe}))).losses[0], 1e-6) << recipe;
  run("short", {"precision.dtype=bf16", "training.steps=1", "model.num_layers=1"});
  const Sets rules = {R"(precision.rules=[{"match": "layers.1.mlp.*", "recipe": "mxfp8"}])",
                      R"(optimizer.rules=[{"match": "layers.1.*", "lr_factor": 0}])"};
  const TrainedRun deep = run("deep", with(rules, {"precision.dtype=bf16", "training.steps=1", "training.teacher=" + run_folder("short")}));
  EXPECT_GT(deep.losses[0], 0.0);
}

TEST_F(Distillation, FromAFolderIsThatFromItsCheckpoint) {
  const Sets sets = {"precision.dtype=bf16", "training.steps=2", "training.seed=5", "training.teacher="};
  const auto taught_by = [&](const std::string& name, const std::string& teacher) {
    Sets all = sets;
    all.back() += teacher;
    return run(name, all);
  };
  run("teacher", {"precision.dtype=bf16", "training.steps=6"});
  export_model(checkpoint("teacher", 6), folder_ / "folder", {}, make_backend("cpu"));
  expect_same_course(taught_by("from-checkpoint", run_folder("teacher")), taught_by("from-folder", folder_ / "folder"));
  // The letters of another text are as many ids, which stand for others.
  test::write_file(folder_ / "other.txt", "zyxwvuts" + std::string(4000, 'z'));
  run("letters", {"precision.dtype=bf16", "training.steps=1", "data.path=" + (folder_ / "other.txt")});
  export_model(checkpoint("letters", 1), folder_ / "letters", {}, make_backend("cpu"));
  const Error error = error_of([&] { taught_by("refused", folder_ / "letters"); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("has a tokenizer that differs from data.tokenizer char"));
}

// A model that knows nothing comes to know what its teacher does, in MXFP4 and without labels.
TEST_F(Distillation, TeachesWithoutLabels) {
  run("teacher", {"training.steps=120"});
  const TrainedRun taught = run("taught", {"training.teacher=" + run_folder("teacher"), "training.seed=5", "precision.dtype=bf16",
                                           "precision.recipe=mxfp4_qat", "training.steps=60"});
  EXPECT_LT(taught.losses[59], 0.7 * taught.losses[0]);
  EXPECT_LT(taught.valid_losses.back(), 1.9) << "a guess has " << std::log(8);
}

// The loss and the gradients of a step are mixtures of both, at any temperature; the moments after one step are the gradients, scaled.
TEST_F(Distillation, IsMixedWithLabels) {
  run("teacher", {"training.steps=20"});
  const Sets sets = {"training.teacher=" + run_folder("teacher"), "training.steps=1", "training.seed=5", "optimizer.grad_clip=0"};
  const TrainedRun labels = run("labels", with(sets, {"training.teacher=null"}));
  double before = 0.0;
  for (const std::string temperature : {"1", "3"}) {
    const Sets warm = with(sets, {"training.teacher_temperature=" + temperature});
    const std::string name = "divergence" + temperature;
    const double divergence = run(name, warm).losses[0];
    EXPECT_GT(divergence, 0.05);
    EXPECT_NE(divergence, before) << "the temperature counts";
    before = divergence;
    for (const double weight : {0.3, 0.9}) {
      const std::string both = text("both", temperature, weight);
      const double mixed = run(both, with(warm, {text("training.teacher_weight=", weight)})).losses[0];
      EXPECT_NEAR(mixed, weight * divergence + (1 - weight) * labels.losses[0], 1e-6) << both;
      for (const std::string& parameter : parameters(both, 1)) {
        const auto moments = [&](const std::string& of) { return tensor(of, 1, "m." + parameter); };
        const std::vector<float> found = moments(both), taught = moments(name), told = moments("labels");
        double largest = 0.0, error = 0.0;
        for (size_t i = 0; i < found.size(); ++i) {
          largest = std::max(largest, std::abs(double{found[i]}));
          error = std::max(error, std::abs(double{found[i]} - weight * double{taught[i]} - (1 - weight) * double{told[i]}));
        }
        EXPECT_LT(error, 1e-4 * largest + 1e-12) << both << ' ' << parameter;
        EXPECT_NE(taught, told) << parameter;
      }
    }
  }
}

// Steps tell both parts of the loss, whatever their weights, and evaluations the divergence beside their loss, whose bits stay.
TEST_F(Distillation, TellsTheDivergenceFromTheCrossEntropy) {
  run("teacher", {"training.steps=20"});
  const Sets still = {"training.steps=1", "training.seed=5", "optimizer.lr=1e-30", "optimizer.weight_decay=0", "schedule.warmup_steps=0"};
  const TrainedRun labels = run("labels", still);
  EXPECT_FALSE(labels.steps[0].divergence || labels.steps[0].cross_entropy);
  EXPECT_EQ(validation("labels").count("kl"), 0U);
  const Sets sets = with(still, {"training.teacher=" + run_folder("teacher")});
  const double plain = run("plain", sets).losses[0], divergence = validation("plain")["kl"];
  EXPECT_GT(divergence, 0.05);
  for (const std::string temperature : {"1", "3"}) {
    const Sets warm = with(sets, {"training.teacher_temperature=" + temperature});
    const double whole = run("whole" + temperature, warm).losses[0];
    const TrainedRun mixed = run("mixed" + temperature, with(warm, {"training.teacher_weight=0.3"}));
    EXPECT_NEAR(mixed.steps[0].cross_entropy.value(), labels.losses[0], 1e-9);
    EXPECT_NEAR(mixed.steps[0].divergence.value(), whole, 1e-5);
    EXPECT_EQ(mixed.valid_losses, labels.valid_losses);
    EXPECT_EQ(validation("mixed" + temperature)["kl"], divergence) << "without a temperature";
  }
  EXPECT_EQ(run("whole", sets).steps[0].divergence, plain);
  const Sets self = {"checkpoint.init_from=" + run_folder("teacher"), "training.teacher=self"};
  EXPECT_EQ(run("self", with(still, self)).steps[0].divergence, 0.0);
  EXPECT_EQ(validation("self")["kl"], 0.0);
}

// A student that is better than its teacher comes nearer to it: the divergence falls, and the loss rises.
TEST_F(Distillation, KeepsTheCheckpointNearestToTheTeacher) {
  run("teacher", {"training.steps=2"});
  run("better", {"training.steps=40"});
  const Sets sets = {"checkpoint.init_from=" + run_folder("better"),
                     "training.teacher=" + run_folder("teacher"),
                     "training.steps=4",
                     "eval.interval=1",
                     "eval.first=true",
                     "checkpoint.keep_best=true"};
  const TrainedRun nearer = run("nearer", sets), mixed = run("mixed", with(sets, {"training.teacher_weight=0.01"}));
  EXPECT_LT(nearer.valid_losses.front(), nearer.valid_losses.back()) << "else this shows nothing";
  EXPECT_EQ(nearer.summary.best_step, 4);
  EXPECT_EQ(nearer.summary.best_is, "kl");
  EXPECT_EQ(nearer.summary.best_valid_loss, validation("nearer")["kl"]);
  EXPECT_EQ(mixed.summary.best_is, "0.01 kl + 0.99 loss");
  EXPECT_NEAR(mixed.summary.best_valid_loss.value(), std::ranges::min(mixed.valid_losses), 0.02 * std::ranges::max(mixed.valid_losses));
}

// The lowest kl is far below any loss: where figures of both were compared, no evaluation would be the best again.
TEST_F(Distillation, LooksForTheBestAfreshUnderAnotherWeight) {
  run("teacher", {"training.steps=2"});
  const Sets sets = {"training.teacher=" + run_folder("teacher"), "eval.interval=1", "checkpoint.keep_best=true", "checkpoint.resume=auto"};
  const auto resumed = [&](const Sets& more) {
    std::filesystem::remove(folder_ / "log.txt");
    open_log({.console = false, .file = folder_ / "log.txt"});
    const TrainedRun rest = run("run", with(sets, more));
    close_log();
    return std::pair(rest, test::read_file(folder_ / "log.txt"));
  };
  resumed({"training.steps=3"});
  EXPECT_THAT(resumed({"training.steps=4"}).second, Not(HasSubstr("it looks for the best one afresh")));
  const auto [mixed, told] = resumed({"training.steps=6", "training.teacher_weight=0.01"});
  EXPECT_THAT(told, HasSubstr("training.teacher_weight: the best evaluation so far went by kl, this run goes by 0.01 kl + 0.99 loss: it "));
  EXPECT_EQ(mixed.summary.best_is, "0.01 kl + 0.99 loss");
  EXPECT_GT(mixed.summary.best_step.value_or(0), 4);
  EXPECT_NEAR(mixed.summary.best_valid_loss.value(), std::ranges::min(mixed.valid_losses), 0.02 * std::ranges::max(mixed.valid_losses));
}

// A teacher computes in high precision, whatever recipe it was trained with: its codes would round what it says. Ranks hold parts of it.
TEST_F(Distillation, FromATeacherThatWasTrainedInMxfp8ReadsItsMasters) {
  const Sets model = {"model.hidden_size=64", "precision.dtype=bf16"};
  run("teacher", with(model, {"training.steps=20", "precision.recipe=mxfp8", "precision.fp8_param_gather=true"}));
  run("plain",
      with(model, {"checkpoint.init_from=" + run_folder("teacher"), "training.steps=1", "optimizer.lr=1e-30"}));  // has equal masters
  export_model(checkpoint("teacher", 20), folder_ / "coded", {}, make_backend("cpu"));  // the values that its codes have
  const auto taught_by = [&](const TensorLayout& layout, const std::string& name, const std::string& teacher) {
    const Sets sets = {"training.steps=1", "training.seed=5", "model.num_attention_heads=4", "training.teacher=" + teacher};
    return run_on(layout, name, with(with(model, tree_of(8)), sets)).losses[0];
  };
  const double loss = taught_by({1, 1, false}, "by-mxfp8", run_folder("teacher"));
  EXPECT_EQ(loss, taught_by({1, 1, false}, "by-plain", run_folder("plain")));
  EXPECT_NE(loss, taught_by({1, 1, false}, "by-codes", folder_ / "coded"));
  EXPECT_EQ(loss, taught_by({4, 1, false}, "by-mxfp8-4", run_folder("teacher")));
  EXPECT_NEAR(loss, taught_by({2, 2, true}, "by-mxfp8-2-2", run_folder("teacher")), 2e-3 * loss);
  const Sets self = {"checkpoint.init_from=" + run_folder("teacher"), "training.teacher=self", "training.steps=1"};
  EXPECT_GT(run("rounded", with(with(model, self), {"precision.recipe=mxfp8"})).losses[0], 0.0) << "nor by the recipe of its student";
}

// Padding, masked targets and documents count as they do without a teacher.
TEST_F(Distillation, LeavesOutTargetsThatDoNotCount) {
  const Sets data = with(examples(), {"training.steps=2"});
  run("teacher", data);
  const TrainedRun same = run("same", with(with(data, kStill), {"checkpoint.init_from=" + run_folder("teacher"), "training.teacher=self"}));
  EXPECT_GT(same.steps[0].padding, 0.0);
  EXPECT_THAT(same.losses, Each(0.0));
  const TrainedRun other = run("other", with(data, {"training.teacher=" + run_folder("teacher"), "training.seed=5"}));
  EXPECT_GT(other.losses[0], 0.0);
}

// A teacher of another width, depth and kind; every step is a place to stop.
TEST_F(Distillation, GoesOnWhereItStopped) {
  const Sets other = with(kExperts, {"model.hidden_size=48", "model.num_layers=1", "training.seed=7", "training.steps=6"});
  run("teacher", other);
  const Sets sets = {"training.teacher=" + run_folder("teacher"),
                     "training.teacher_weight=0.8",
                     "training.teacher_temperature=2",
                     "precision.dtype=bf16",
                     "precision.recipe=mxfp4_qat",
                     "training.steps=4"};
  const TrainedRun straight = run("straight", with(sets, {"checkpoint.interval=1", "checkpoint.keep_every=1"}));
  for (int64_t k = 1; k < 4; ++k) {
    const std::string name = text("rest", k);
    const TrainedRun rest = run(name, with(sets, {"checkpoint.resume=" + checkpoint("straight", k)}));
    EXPECT_TRUE(test::same_elements(rest.losses, std::vector<double>(straight.losses.begin() + k, straight.losses.end()))) << k;
    EXPECT_TRUE(test::same_elements(state_of(name, 4), state_of("straight", 4))) << k;
  }
}

TEST_F(Distillation, IsRefusedWithAnotherTeacherThanItBeganWith) {
  for (const char* const teacher : {"first", "second"}) run(teacher, {"training.steps=1", text("training.seed=", int{teacher[0]})});
  const Sets sets{"training.steps=4", "checkpoint.resume=auto"}, first{"training.teacher=" + run_folder("first")};
  const auto stopped = [calls = 0]() mutable { return ++calls == 3 ? Request::save_and_stop : Request::none; };
  ASSERT_EQ(run(config("refused", with(sets, first)), stopped).summary.exit, ExitCode::stopped);
  EXPECT_THAT(refused(with(sets, {"training.teacher=" + run_folder("second")})),
              AllOf(HasSubstr("was trained with another training.teacher than " + checkpoint("second", 1) +
                              ": a run learns from the same to its end; if " + run_folder("second") +
                              " is the run that it learns from, and has saved since, name the checkpoint from then")));
  EXPECT_THAT(refused(sets), HasSubstr("was trained with a training.teacher: a run"));
  EXPECT_THAT(refused(with(sets, {"training.teacher=" + checkpoint("second", 1)})), Not(HasSubstr("saved since")));
  std::filesystem::rename(run_folder("first"), run_folder("moved"));
  EXPECT_THAT(refused(with(sets, first)),
              HasSubstr("training.teacher: no such checkpoint or folder of a model, from which this run learns to its end"));
  EXPECT_EQ(run("refused", with(sets, {"training.teacher=" + run_folder("moved")})).steps.back().step, 4) << "only its place is another";
  run("untaught", {"training.steps=2"});
  EXPECT_THAT(refused({"training.steps=3", "checkpoint.resume=" + checkpoint("untaught", 2), "training.teacher=" + run_folder("moved"),
                       "logging.run_name=new"}),
              HasSubstr("was trained without training.teacher"));
}

TEST_F(Distillation, IsRefusedWhereTheTeacherDoesNotFit) {
  const std::string vocabulary = "model.vocab_size=60";
  run("teacher", {"training.steps=1"});
  run("sixty", with(examples(), {"training.steps=1"}));
  const std::string teacher = "training.teacher=" + run_folder("teacher");
  EXPECT_THAT(refused({"training.teacher=self"}),
              HasSubstr("training.teacher: self is the model of checkpoint.init_from, which is not given"));
  EXPECT_THAT(refused({"training.teacher=" + run_folder("none")}), HasSubstr("training.teacher: no such checkpoint or folder of a model"));
  EXPECT_THAT(refused({"training.teacher="}), HasSubstr("training.teacher: must be a path, self or null, got an empty string"));
  EXPECT_THAT(refused({"training.teacher_weight=0.5"}), HasSubstr("training.teacher_weight: changes nothing without training.teacher"));
  EXPECT_THAT(refused({"training.teacher_temperature=2"}), HasSubstr("training.teacher_temperature: changes nothing without"));
  for (const char* const weight : {"0", "-1", "1.01"})
    EXPECT_THAT(refused({teacher, text("training.teacher_weight=", weight)}), HasSubstr("training.teacher_weight"));
  EXPECT_THAT(refused({teacher, "training.teacher_temperature=0"}), HasSubstr("training.teacher_temperature: must be positive"));
  EXPECT_THAT(refused({"training.teacher=" + run_folder("sixty")}),
              AllOf(HasSubstr("has 60 ids, but model.vocab_size is 8"), HasSubstr("a model learns only from one of the same vocabulary")));
  EXPECT_THAT(refused({teacher, "model.max_position_embeddings=32", "training.seq_len=32"}),
              HasSubstr("takes at most 16 tokens, but training.seq_len is 32"));
  const Error divided = error_of([&] {
    config("divided", {teacher, "model.num_attention_heads=4", "parallel.tensor=4", "parallel.data=1"});
  });
  EXPECT_THAT(divided.what(), AllOf(HasSubstr("training.teacher: the model of " + run_folder("teacher")),
                                    HasSubstr("model.num_attention_heads 2 cannot be divided among 4 ranks")));
  // Letters in another order: as many ids, which stand for others.
  test::write_file(folder_ / "other.txt", "zyxwvuts" + std::string(4000, 'z'));
  run("letters", {"training.steps=1", "data.path=" + (folder_ / "other.txt")});
  EXPECT_THAT(refused({"training.teacher=" + run_folder("letters")}), HasSubstr("has a tokenizer that differs from data.tokenizer char"));
  const Error dry = error_of([&] { preview_run(config("refused", {"training.teacher=" + run_folder("letters")})); });
  EXPECT_EQ(dry.code(), ExitCode::usage);
  EXPECT_THAT(dry.what(), HasSubstr("has a tokenizer that differs from data.tokenizer char"));
  run("experts", with(kExperts, {"training.steps=1", "model.moe.num_experts=3"}));
  const Error odd = error_of([&] {
    config("divided", with(kExperts, {"training.teacher=" + run_folder("experts"), "parallel.data=2", "parallel.expert=2"}));
  });
  EXPECT_EQ(odd.code(), ExitCode::usage);
  EXPECT_THAT(odd.what(), AllOf(HasSubstr("training.teacher: the model of " + run_folder("experts")),
                                HasSubstr("2 does not divide model.moe.num_experts 3")));
}

// The run may go on from elsewhere.
TEST_F(Distillation, KnowsItsTeacherByTheWholePath) {
  run("teacher", {"training.steps=1"});
  const std::string relative = std::filesystem::relative(run_folder("teacher")).string();
  ASSERT_NE(relative.front(), '/');
  const std::string kept = config("run", {"training.teacher=" + relative}).config.training.teacher.value();
  EXPECT_EQ(kept.front(), '/');
  EXPECT_TRUE(std::filesystem::equivalent(kept, run_folder("teacher")));
}

// Ids stand for texts by a tokenizer: where one side has none, equality is the user's word.
TEST_F(Distillation, WarnsWhereNothingTellsThatTokenizersAreEqual) {
  run("teacher", {"training.steps=1"});
  const Sets ids = with(examples(), {"training.steps=1"});
  run("ids", ids);
  const auto log_of = [&](const std::string& name, const Sets& sets) {
    open_log({.console = false, .file = folder_ / (name + ".txt")});
    run(name, with(sets, {"training.steps=1"}));
    close_log();
    return test::read_file(folder_ / (name + ".txt"));
  };
  const std::string unknown = "so nothing shows that the same ids stand for the same texts in the teacher";
  EXPECT_THAT(log_of("known", {"training.teacher=" + run_folder("teacher")}), Not(HasSubstr(unknown)));
  EXPECT_THAT(log_of("none", with(ids, {"training.teacher=" + run_folder("ids"), "training.seed=2"})),
              HasSubstr("training.teacher: data.tokenizer is null, " + unknown));
  EXPECT_THAT(log_of("self", with(ids, {"checkpoint.init_from=" + run_folder("ids"), "training.teacher=self"})), Not(HasSubstr(unknown)));
  export_model(checkpoint("teacher", 1), folder_ / "bare", {}, make_backend("cpu"));
  for (const char* const name : {"tokenizer.json", "tokenizer_config.json"})
    std::filesystem::remove(folder_ / ("bare/" + std::string(name)));
  EXPECT_THAT(log_of("bare-teacher", {"training.teacher=" + (folder_ / "bare")}),
              HasSubstr("training.teacher: " + (folder_ / "bare") + " has no tokenizer, " + unknown));
}

// explain and bench look at a configuration where its model may not be at hand: that of checkpoint.init_from has the shape of the run's
// own.
TEST_F(Distillation, IsNotNeededWhereInputsMayBeMissing) {
  const auto unchecked = [&](const Sets& sets) {
    const std::string own = effective_config(config("own", {}).config);
    return load_run_config({.file = folder_ / "own.json", .text = own, .set_files = {}, .sets = sets}, Inputs::unchecked, 1).config;
  };
  const auto memory_of = [&](RunConfig run) {
    run.model.vocab_size = 8;
    return estimate_memory(run, resolve_plan(run)).teacher;
  };
  const auto warnings = [](const RunConfig& run) { return joined(run_warnings(run, resolve_plan(run)), "\n"); };
  const RunConfig self = unchecked({"checkpoint.init_from=" + run_folder("none"), "training.teacher=self", "precision.recipe=mxfp4_qat"}),
                  away = unchecked({"training.teacher=" + run_folder("none")}), none = unchecked({});
  EXPECT_GT(memory_of(self), 0);
  EXPECT_EQ(memory_of(away), 0);
  const std::string line = "training.teacher: " + run_folder("none") + " is not there, so nothing here counts a teacher";
  EXPECT_THAT(warnings(away), HasSubstr(line));
  EXPECT_THAT(warnings(self), Not(HasSubstr("is not there")));
  EXPECT_THAT(warnings(none), Not(HasSubstr("training.teacher")));
  EXPECT_THAT(error_of([&] { config("checked", {"training.teacher=" + run_folder("none")}); }).what(), HasSubstr("no such checkpoint"));
}

// Under accumulation tree the number of data ranks, and of those that share experts, changes no bit; tensor ranks round sums differently.
TEST_F(Distillation, IsTheSameOnAnyLayout) {
  for (const bool experts : {false, true}) {
    const Sets base = with({"model.hidden_size=64", "model.intermediate_size=128", "model.num_attention_heads=4", "precision.dtype=bf16"},
                           experts ? kExperts : Sets());
    const std::string teacher = experts ? "experts" : "dense";
    run(teacher, with(base, {"training.steps=2", "model.num_layers=1"}));
    const Sets sets = with(with(base, tree_of(8)), {"training.teacher=" + run_folder(teacher), "precision.recipe=mxfp4_qat",
                                                    "training.steps=3", "training.replica_check_interval=1"});
    const TrainedRun alone = run_on({1, 1, false}, "alone" + teacher, sets);
    const int shared = experts ? 2 : 1;
    for (const TensorLayout& layout : {TensorLayout{2, 1, false, shared}, {4, 1, false, shared}}) {
      const std::string name = teacher + layout.name();
      const TrainedRun ranks = run_on(layout, name, sets);
      expect_same_course(alone, ranks);
      EXPECT_EQ(ranks.steps[0].divergence, alone.steps[0].divergence);
      EXPECT_EQ(ranks.steps[0].cross_entropy, alone.steps[0].cross_entropy);
      EXPECT_EQ(validation(name)["kl"], validation("alone" + teacher)["kl"]);
      expect_same_checkpoints("alone" + teacher, name, 3);
    }
    for (const TensorLayout& layout : {TensorLayout{1, 2, false}, {1, 2, true}, {2, 2, true, shared}}) {
      const TrainedRun together = run_on(layout, teacher + layout.name(), sets);
      EXPECT_NEAR(together.losses[0], alone.losses[0], 2e-3 * alone.losses[0]) << layout.name();
      EXPECT_NEAR(together.steps[0].cross_entropy.value(), alone.steps[0].cross_entropy.value(), 2e-3) << layout.name();
      EXPECT_NEAR(together.norms[0], alone.norms[0], 0.05 * alone.norms[0]) << layout.name();
    }
  }
}

TEST_F(Distillation, OnOtherDevicesHasTheBitsOfTheCpu) {
  const Sets sets = with(from_itself("teacher", {"precision.dtype=bf16"}),
                         {"precision.recipe=mxfp8", "training.teacher_weight=0.5", "training.steps=3", "training.accumulation=tree"});
  const TrainedRun expected = run("cpu", sets);
  expect_same_course(expected, run(config("closed", sets), {}, {}, [] { return std::make_unique<test::ClosedDevice>(); }));
  expect_same_course(expected, run(config("async", sets), {}, {}, [] { return std::make_unique<test::AsyncDevice>(); }));
  for (const char* const name : {"closed", "async"}) expect_same_checkpoints("cpu", name, 3);
}

// A run that is still training may save while another one starts from it, once for the model and once for the teacher.
TEST_F(Distillation, FromItselfReadsTheStartOnce) {
  run("base", {"training.steps=6"});
  LoadedConfig loaded = config("student", {"checkpoint.init_from=" + run_folder("base"), "training.teacher=self"});
  const Data data = open_run_data(loaded, {});
  const PrecisionPlan plan = plan_with_data(loaded.config, data);
  const std::unique_ptr<Backend> device = make_backend("cpu");
  const std::unique_ptr<Gpt> teacher = make_teacher(loaded.config, *device, {});
  const Communicator alone;
  const StartParts parts{.loaded = loaded, .world = alone, .data = data, .plan = plan};
  const auto start = [&](const std::function<void()>& meanwhile) {
    return find_start(parts, {.load_weights = [&](CheckpointReader&) { meanwhile(); }});
  };
  const StartPoint found = start([&] { run("base", {"training.steps=9", "checkpoint.resume=auto"}); });
  EXPECT_EQ(read_teacher(parts, found, teacher.get()).hash, CheckpointReader(checkpoint("base", 6)).hash());
  const Parameter& embed = teacher->parameters().all().front();
  EXPECT_EQ(to_host<float>(converted(embed.value(), Dtype::f32)), tensor("base", 6, "master." + embed.name));
  EXPECT_NE(tensor("base", 9, "master." + embed.name), tensor("base", 6, "master." + embed.name));
  // Another checkpoint takes the place of the one that was loaded.
  const StartPoint replaced = start([&] {
    const std::string first = checkpoint("base", 9);
    run("other", {"training.steps=9", "training.seed=4"});
    std::filesystem::remove_all(first);
    std::filesystem::rename(checkpoint("other", 9), first);
  });
  const Error error = error_of([&] { read_teacher(parts, replaced, teacher.get()); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("changed between its two uses in this run, as the model to start from and as its teacher"));
}

// The look before a run finds what the run would.
TEST_F(Distillation, IsPreviewedWithItsTeacher) {
  const Sets sets = from_itself("teacher", {"precision.dtype=bf16"});
  const RunPreview alone = preview_run(config("alone", {"precision.dtype=bf16"})), taught = preview_run(config("taught", sets));
  EXPECT_NEAR(taught.flops_per_token, alone.flops_per_token * 4 / 3, 1.0);
  EXPECT_NEAR(taught.evaluation_flops / alone.evaluation_flops, 2.0, 1e-9) << "forward passes of both, which are of one size";
  EXPECT_GT(taught.memory.teacher, 0);
  EXPECT_EQ(taught.memory.total() - taught.memory.teacher - taught.memory.workspace, alone.memory.total() - alone.memory.workspace);
}

}  // namespace mantissa::distillation_test
