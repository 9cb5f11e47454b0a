// Runs whose table of tokens is rounded: what they report and resume, on ranks and beside gathered codes; and exports of them where a
// server takes it.
#include "checkpoint/precision_setup.h"
#include "exports.h"
#include "hf/gguf_export.h"
#include "metrics/run_metrics.h"
#include "model_options.h"
#include "training_on_ranks.h"

namespace mantissa::token_table_test {

using test::error_of;
using test::kEightBits;
using test::kEightBitTable;
using test::kFourBitTable;
using test::logits_of;
using test::Sets;
using test::TensorLayout;
using test::TrainedRun;
using test::with;
using ::testing::AllOf;
using ::testing::HasSubstr;

const Sets kTied = {"model.tie_word_embeddings=true"}, kUntied = {"model.tie_word_embeddings=false"};

class TokenTable : public test::ExportTest {};

// As a run that starts from the model in this format and changes nothing.
TEST_F(TokenTable, OfAnyModelIsRoundedAsOneThatWasTrainedSo) {
  const std::string saved = trained("saved", kTied), untied = trained("untied", kUntied);
  const std::vector<std::pair<std::string, Sets>> cases = {
      {"four", {kFourBitTable}}, {"eight", {kEightBits, kEightBitTable}}, {"all", {"precision.recipe=mxfp4_qat", kFourBitTable}}};
  for (const auto& [name, precision] : cases) {
    for (const std::string& from : {saved, untied}) {
      const std::string run_name = name + (from == saved ? " tied" : " untied");
      SCOPED_TRACE(run_name);
      const Sets start = with(from == saved ? kTied : kUntied, {"checkpoint.init_from=" + from, "optimizer.lr=1e-30"});
      const std::string run = trained(run_name, with(precision, start));
      EXPECT_TRUE(logits_of(from, {.precision = precision}) == logits_of(run));
      EXPECT_FALSE(logits_of(from, {.precision = precision}) == logits_of(from));
      export_model(from, path(run_name + " hf"), {}, make_backend("cpu"), precision);
      export_to(run, run_name + " hf of the run");
      EXPECT_TRUE(all_bytes(run_name + " hf") == all_bytes(run_name + " hf of the run"));
      EXPECT_EQ(difference(run_name + " hf", run), std::nullopt);
      EXPECT_TRUE(logits_of(path(run_name + " hf"), {.precision = {"precision.recipe=high"}}) == logits_of(path(run_name + " hf")));
    }
  }
}

// Rows of a dequantized export are those that a lookup reads.
TEST_F(TokenTable, HasTheRowsOfItsExport) {
  const std::string saved = trained("saved", with(kTied, {kFourBitTable}));
  export_to(saved, "hf");
  const LoadedModel loaded = load_model(saved, make_backend("cpu"));
  const Parameter& table = loaded.model->parameters().all().front();
  ASSERT_EQ(table.name, "embed.weight");
  std::vector<float> values = to_host<float>(decoded(table.codes(), Dtype::f32));
  values.resize(static_cast<size_t>(8 * 64));  // without padding
  EXPECT_EQ(test::HfFolder(path("hf")).values("model.embed_tokens.weight"), values);
}

TEST_F(TokenTable, IsRefusedForServersWithoutIt) {
  const std::string saved = trained("saved", with(kTied, {"precision.recipe=mxfp4_qat", kFourBitTable}));
  for (const Convention convention : {Convention::compressed_tensors, Convention::sglang, Convention::modelopt, Convention::fp8}) {
    const Error error = error_of([&] { pack_to(saved, "packed", convention); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("embed (recipe mxfp4_qat, e2m1 1x32 flashinfer): servers of the format hf have embeddings"),
                                    HasSubstr("take the format mlx or gguf, or dequantized weights")));
  }
  RunConfig config = CheckpointReader(saved).config();
  config.checkpoint.exported = ExportOptions{.weights = ExportWeights::packed};
  ConfigReport report;
  check_export(config, report);
  EXPECT_THAT(error_of([&] { report.throw_if_failed(); }).what(), HasSubstr("checkpoint.export: packed weights: embed"));
}

class TokenTableRuns : public test::TrainingOnRanks {
 protected:
  static Sets sets(const Sets& more) {
    return with({"model.hidden_size=64", "model.intermediate_size=64", "precision.dtype=bf16", "training.steps=3", "model.pad_vocab_to=64",
                 kFourBitTable},
                with(with(tree_of(4), kTied), more));
  }
};

TEST_F(TokenTableRuns, LearnBesideGatheredCodesAndExperts) {
  const Sets experts = {R"(model.moe={"num_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 32})"};
  for (const auto& [name, more] : {std::pair<std::string, Sets>("gather", {"precision.recipe=mxfp8", "precision.fp8_param_gather=true"}),
                                   {"experts", experts},
                                   {"recomputed", {"training.recompute=full"}}}) {
    SCOPED_TRACE(name);
    const TrainedRun alone = run_on(1, name, sets(more));
    const TensorLayout layout{2, 1, false, name == "experts" ? 2 : 1};
    expect_same_course(alone, run_on(layout, name + " of two", sets(more)));
    expect_same_checkpoints(name, name + " of two", 3);
    const TrainedRun high = run_on(1, name + " high", with(sets(more), {"precision.rules=[]"}));
    EXPECT_NE(alone.losses.front(), high.losses.front());
    EXPECT_LT(alone.losses.back(), alone.losses.front());
  }
  EXPECT_EQ(contents("gather", 3).at("plan").find(R"("wire":"e2m1")"), std::string::npos) << "values are gathered";
}

TEST_F(TokenTableRuns, ResumeWithTheSameBitsAndInNoOtherFormat) {
  run_on(1, "whole", sets({"training.steps=4", "checkpoint.interval=2"}));
  const Sets resumed = sets({"training.steps=4", "checkpoint.resume=" + checkpoint("whole", 2)});
  run_on(1, "rest", resumed);
  EXPECT_TRUE(state_of("rest", 4) == state_of("whole", 4));
  const Sets high = with(resumed, {"precision.rules=[]"});
  EXPECT_THAT(error_of([&] { run_on(1, "high", high); }).what(), HasSubstr("embed: mxfp4_qat -> high"));
  run_on(1, "allowed", with(high, {"checkpoint.allow_recipe_change=true"}));
  EXPECT_FALSE(state_of("allowed", 4) == state_of("whole", 4));
}

TEST_F(TokenTableRuns, ReportTheErrorsOfTheTable) {
  run_on(1, "reported", sets({"precision.report_interval=1"}));
  std::vector<std::string> measured;
  for (const PrecisionEvent& event : read_run_metrics(run_folder("reported")).precision)
    measured.push_back(event.module + ' ' + event.role);
  EXPECT_THAT(measured, ::testing::Contains("embed weight"));
}

}  // namespace mantissa::token_table_test
