// Exports beside training: the files that `mantissa export` makes of the same checkpoint, from ranks of every layout.
#include "train/run_exports.h"

#include "checkpoint_testing.h"
#include "exports_of_runs.h"
#include "hang.h"
#include "hf/load_model.h"
#include "hf_folders.h"
#include "io/pending_folder.h"
#include "mantissa/base/log.h"
#include "train/training_step.h"

namespace mantissa::run_exports_test {

using test::ExportsOfRuns;
using test::kAlone;
using test::TensorLayout;
using test::TrainedRun;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::vector<TensorLayout> kLayouts = {kAlone, {4, 1, false}, {1, 2, false}, {2, 2, false}};

// Compares a folder with what forward multiplies by in a model that was loaded: its codes have the hashes of those in training.
void expect_live_values(const std::string& checkpoint, const std::string& folder) {
  const LoadedModel live = load_model(checkpoint, make_backend("cpu"));
  const PrecisionPlan plan = resolve_plan(live.config);
  const ForwardWeights types(plan);
  HfWeights written(folder);
  for (const ParameterShard& whole : live.model->parameters().whole_shards()) {
    const Parameter& of = *whole.of;
    const Shape matrix{of.shape[0], of.shape.with_dim0(1).elements()};
    Tensor all = empty(*live.device, Dtype::f32, matrix);
    if (types.quantized(of.name))
      live.device->run(Dequantize{.x = of.codes(), .out = all});
    else
      all = converted(of.value(), Dtype::f32).view(matrix);
    const std::vector<float> here = to_host<float>(all.slice(0, whole.stored_end()));
    std::vector<float> there(here.size());
    written.read_fp32(of.name, whole_box(dimensions(of.stored_shape())), there);
    EXPECT_EQ(there, here) << of.name;
  }
}

struct Setting {
  const char* name;
  std::vector<std::string> sets;
  std::vector<TensorLayout> layouts = kLayouts;
  ExportFormat format = ExportFormat::hf;
};
void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

class FromRanks : public ExportsOfRuns, public ::testing::WithParamInterface<Setting> {};

// Packed from every second layout; what is not quantized cannot be packed.
TEST_P(FromRanks, TheFilesAreThoseOfTheCheckpoint) {
  const bool quantizes = std::ranges::any_of(GetParam().sets, [](const std::string& set) { return set.starts_with("precision.recipe="); });
  for (bool packs = false; const TensorLayout& layout : GetParam().layouts) {
    const ExportWeights weights = quantizes && packs ? ExportWeights::packed : ExportWeights::dequantized;
    packs = !packs;
    const std::string name = text(layout.name(), choice_name(weights));
    SCOPED_TRACE(name);
    std::vector<std::string> more = GetParam().sets;
    more.push_back(text("checkpoint.export.weights=", choice_name(weights)));
    more.push_back(text("checkpoint.export.format=", choice_name(GetParam().format)));
    EXPECT_EQ(run_on(layout, name, more).summary.failed_saves, 0);
    expect_same_files(files_of(exported(name, 2)),
                      files_from(checkpoint(name, 2), name + " again", {.format = GetParam().format, .weights = weights}));
    expect_live_values(checkpoint(name, 2), exported(name, 2));
  }
}

INSTANTIATE_TEST_SUITE_P(
    , FromRanks,
    ::testing::Values(
        Setting{"high", {"model.attention_bias=qkv", "model.qk_norm=false"}},
        Setting{"fp32", {"precision.dtype=fp32", "model.tie_word_embeddings=true"}, {kAlone, {2, 2, false}}},
        Setting{"gpt2",
                {"model.norm=layer", "model.norm_bias=true", "model.position=learned", "model.activation=gelu_tanh",
                 "model.num_key_value_heads=4", "model.attention_bias=all", "model.mlp_bias=true", "model.qk_norm=false"},
                {kAlone, {1, 2, false}}},
        Setting{"mxfp8", {"precision.recipe=mxfp8"}, {{4, 1, false}, {2, 2, false}}},
        Setting{"mxfp8_gather", {"precision.recipe=mxfp8", "precision.fp8_param_gather=true"}, {{1, 2, false}, {4, 1, false}}},
        Setting{"fp8_block",
                {"precision.recipe=fp8_block", "model.hidden_size=256", "model.intermediate_size=256", "model.num_key_value_heads=4"},
                {kAlone, {2, 2, false}}},
        Setting{"mxfp4_qat", {"precision.recipe=mxfp4_qat"}, {{2, 2, false}, kAlone}},
        Setting{"mxfp4_even",
                {"precision.recipe=own", R"(precision.recipes={"own": {"base": "mxfp4_qat", "weight_fake_quant": {"rule": "even"}}})"},
                {{2, 2, false}, kAlone}},
        Setting{"mxfp4_qat_mxfp8_act", {"precision.recipe=mxfp4_qat_mxfp8_act"}, {kAlone, {2, 2, false}}},
        Setting{"mxfp4_qat_mxfp4_act", {"precision.recipe=mxfp4_qat_mxfp4_act"}, {{2, 2, false}}},
        Setting{"mxfp8_te", {"precision.recipe=mxfp8_te"}, {kAlone, {2, 2, false}}},
        Setting{"mxfp8_weights", {"precision.recipe=mxfp8_weights"}, {kAlone, {2, 2, false}}},
        Setting{"output", {"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=64"}, {kAlone, {2, 2, false}}},
        Setting{"experts",
                {"precision.recipe=mxfp8", "precision.fp8_param_gather=true", "model.moe.num_experts=4", "model.moe.num_experts_per_tok=2",
                 "model.moe.intermediate_size=64", "model.moe.dense_layers=[1]", "model.qk_norm=true",
                 R"(precision.rules=[{"match":"layers.*.moe.experts.*","recipe":"mxfp4_qat_mxfp8_act"}])"},
                {kAlone, {2, 1, false, 2}, {2, 2, false}, {2, 2, false, 2}}},
        Setting{"mlx",
                {"precision.recipe=mxfp8", "model.moe.num_experts=4", "model.moe.num_experts_per_tok=2", "model.moe.intermediate_size=64",
                 "model.moe.dense_layers=[1]", "model.qk_norm=true",
                 R"(precision.rules=[{"match":"layers.*.moe.experts.*","recipe":"mxfp4_qat"}])"},
                {kAlone, {2, 2, false, 2}},
                ExportFormat::mlx}),
    [](const auto& one) { return std::string(one.param.name); });

// Exports of kept checkpoints alone and no longer. A stop waits for an export that has begun and begins no other; one that comes with the
// vote of the last step leaves the last export, as nobody resumes a run that has done everything.
TEST_F(ExportsOfRuns, EndWithTheRun) {
  struct Course {
    const char* name;
    TensorLayout layout;
    std::vector<std::string> sets;
    int save, stop;  // the call for requests at which a save, and from which on a stop is asked for: the first is before the first step
    bool blocked;    // a file is where the folder of exports would be
    ExitCode exit;
    int64_t steps;
    std::set<std::string> exports;
  };
  const std::string each = "checkpoint.interval=1", second = "checkpoint.interval=2", nine = "training.steps=9",
                    quiet = "logging.interval=100";
  const Course courses[] = {
      {"kept",
       {2, 1, false},
       {each, "checkpoint.keep_latest=2", "training.steps=4"},
       0,
       99,
       false,
       ExitCode::ok,
       4,
       {"step-00000003", "step-00000004"}},
      {"asked", kAlone, {nine}, 3, 6, false, ExitCode::stopped, 5, {"step-00000002"}},
      {"waits", kAlone, {each, nine, quiet}, 0, 2, false, ExitCode::stopped, 1, {"step-00000001"}},
      {"last", {2, 1, false}, {"data.valid_fraction=0", "training.steps=2"}, 0, 3, false, ExitCode::ok, 2, {"step-00000002"}},
      {"failed", kAlone, {each, nine}, 0, 2, true, ExitCode::storage, 1, {}},
      {"not_asked", kAlone, {second, nine, quiet}, 0, 4, true, ExitCode::stopped, 3, {}},
  };
  for (const Course& course : courses) {
    SCOPED_TRACE(course.name);
    std::filesystem::create_directories(run_folder(course.name));
    if (course.blocked) test::write_file(run_folder(course.name) + "/exports", "a file in the way");
    int calls = 0;
    const auto request = [&] {
      ++calls;
      return calls == course.save ? Request::save : calls >= course.stop ? Request::save_and_stop : Request::none;
    };
    std::vector<std::string> sets = course.sets;
    sets.emplace_back("checkpoint.export={}");
    const TrainedRun done = run_on(course.layout, course.name, sets, request);
    EXPECT_EQ(done.summary.exit, course.exit);
    EXPECT_EQ(done.summary.steps, course.steps);
    EXPECT_EQ(exports_of(run_folder(course.name)), course.exports);
  }
  EXPECT_EQ(run_on(kAlone, "asked", {"checkpoint.export={}", "training.steps=5", "checkpoint.resume=auto"}).summary.exit, ExitCode::ok);
  EXPECT_THAT(exports_of(run_folder("asked")), ElementsAre("step-00000002", "step-00000005")) << "that of the end was missing";
}

// Each that waits holds its checkpoint: no more than one does while another is made, however fast steps are.
TEST_F(ExportsOfRuns, ASaveWaitsUntilOneExportIsPending) {
  size_t most = 0;
  const auto request = [&] {
    most = std::max(most, steps_in(run_folder("run") + "/checkpoints").size());
    return Request::none;
  };
  const std::vector<std::string> sets = {"checkpoint.export={}", "checkpoint.interval=1", "checkpoint.keep_latest=2", "training.steps=9",
                                         "logging.interval=100"};
  EXPECT_EQ(run_on(kAlone, "run", sets, request).summary.exit, ExitCode::ok);
  EXPECT_GE(most, 2U);
  EXPECT_LE(most, 3U) << "the two newest, of which the older may wait for its export, and that whose export is being made";
  EXPECT_THAT(exports_of(run_folder("run")), ElementsAre("step-00000008", "step-00000009"));
}

TEST_F(ExportsOfRuns, AreMadeWhileTheRunTrains) {
  const auto began = std::chrono::steady_clock::now();
  int calls = 0;
  bool made = false;
  const auto request = [&] {
    if (++calls == 3) return Request::save;  // after step 2
    // An export that the stop waits for was not made while the run trained.
    const bool hangs = std::chrono::steady_clock::now() - began > test::kHang;
    made = made || (!hangs && exports_of(run_folder("run")).contains("step-00000002"));
    return made || hangs ? Request::save_and_stop : Request::none;
  };
  run_on(kAlone, "run", {"checkpoint.export={}", "training.steps=1000000"}, request);
  EXPECT_TRUE(made);
}

// A watchdog ends a run that reports no progress.
TEST_F(ExportsOfRuns, AreProgressOfTheRunThatWaitsForThem) {
  bool saved = false;
  int reports = 0;
  TrainEvents events;
  events.saved = [&](const SaveEvent&) { saved = true; };
  events.set_phase = [&](int64_t, const char* section) { reports += saved && section == std::string_view("save") ? 1 : 0; };
  train(config("run", sets(kAlone, {"checkpoint.export={}"})), {"test"}, events);
  EXPECT_GT(reports, 0);
}

// All ranks write into the run folder; without exports only rank 0 does.
TEST_F(ExportsOfRuns, NeedARunFolderThatAllRanksSee) {
  const auto errors = [&](const std::vector<std::string>& more) {
    return test::run_ranks(2, [&](const Communicator& world) {
      std::vector<std::string> all = sets({2, 1, false}, more);
      all.push_back("checkpoint.dir=" + (folder_ / text("saved", more.size())));
      run(config(text("rank", world.rank(), "of", more.size()), all), {}, world);
    });
  };
  EXPECT_THAT(errors({}), ::testing::Each(IsEmpty()));
  EXPECT_THAT(errors({"checkpoint.export={}"}), ::testing::Each(HasSubstr("3: logging.dir: rank 1 does not see in ")));
}

// Leftovers are those of a process that was killed, and an export of another state of this step. A run that goes on without exports is the
// last that looks there.
TEST_F(ExportsOfRuns, LeftoversGo) {
  const std::string exports = run_folder("again") + "/exports/";
  for (const std::string left : {".trash-step-00000001-5", "step-00000002"}) {
    std::filesystem::create_directories(exports + left);
    test::write_file(exports + left + "/left.txt", "left");
  }
  const auto leave_pending = [&](const std::string& copy) {
    const PendingFolder pending(exports + "step-00000001");  // one of a process at work, and a copy of one of none
    std::filesystem::copy(pending.path(), copy);
    std::filesystem::copy(pending.path().string() + ".lock", copy + ".lock");
  };
  leave_pending(exports + ".tmp-step-00000001-0123456789abcdef");
  EXPECT_EQ(exports_of(run_folder("again")).size(), 4U);
  EXPECT_EQ(run_on(kAlone, "again", {"checkpoint.export={}"}).summary.exit, ExitCode::ok);
  EXPECT_THAT(exports_of(run_folder("again")), ElementsAre("step-00000002"));
  expect_same_files(files_of(exported("again", 2)), files_from(checkpoint("again", 2), "from checkpoint", {}));
  std::filesystem::create_directories(run_folder("without") + "/exports");
  leave_pending(run_folder("without") + "/exports/.tmp-step-00000001-0123456789abcdef");
  EXPECT_EQ(run_on(kAlone, "without", {}).summary.exit, ExitCode::ok);
  EXPECT_THAT(exports_of(run_folder("without")), IsEmpty());
}

TEST_F(ExportsOfRuns, FilesOfTheModelThatItStartedFromGoAlong) {
  run_on(kAlone, "first", {"checkpoint.export={}"});
  test::write_file(exported("first", 2) + "/generation_config.json", "{\"eos_token_id\": 7}\n");
  run_on({1, 2, false}, "second", {"checkpoint.export={}", "checkpoint.init_from=" + exported("first", 2)});
  const auto files = files_of(exported("second", 2));
  expect_same_files(files, files_from(checkpoint("second", 2), "again", {}));
  EXPECT_EQ(files.at("generation_config.json"), "{\"eos_token_id\": 7}\n");
  EXPECT_EQ(files.at("tokenizer.json"), test::read_file(exported("first", 2) + "/tokenizer.json"));
}

// Training goes on, on all ranks, and only the last one decides.
TEST_F(ExportsOfRuns, AFailureIsThatOfASave) {
  std::vector<std::string> sets = {"checkpoint.export={}", "checkpoint.interval=2", "training.steps=4"};
  const std::string exports = run_folder("gone") + "/exports";
  std::filesystem::create_directories(run_folder("gone"));
  test::write_file(exports, "a file in the way");
  open_log({.console = false, .file = folder_ / "log.txt"});
  const TrainedRun failed = run_on({1, 2, false}, "gone", sets);
  close_log();
  const std::string log = test::read_file(folder_ / "log.txt");
  EXPECT_THAT(log, HasSubstr("the export of step 2 was not made: "));
  EXPECT_THAT(log, ::testing::Not(HasSubstr("checkpoint of step"))) << "which was saved, also where no path is known";
  EXPECT_EQ(failed.losses.size(), 4U);
  EXPECT_EQ(failed.summary.failed_saves, 2);
  EXPECT_EQ(failed.summary.exit, ExitCode::storage);
  EXPECT_EQ(failed.summary.checkpoint, checkpoint("gone", 4));
  EXPECT_THAT(test::read_file(run_folder("gone") + "/metrics.jsonl"), HasSubstr("exports: "));
  std::filesystem::remove(exports);
  sets.emplace_back("checkpoint.resume=auto");
  EXPECT_EQ(run_on({1, 2, false}, "gone", sets).summary.exit, ExitCode::ok);
  EXPECT_THAT(exports_of(run_folder("gone")), ElementsAre("step-00000002", "step-00000004")) << "which a resume makes";
  expect_same_files(files_of(exported("gone", 4)), files_from(checkpoint("gone", 4), "again", {}));
}

// Each of several ranks compares a part of the folder, and together they compare all.
TEST_F(ExportsOfRuns, EveryTensorIsComparedByOneRank) {
  constexpr int kRanks = 3;
  run_on(kAlone, "run", {});
  files_from(checkpoint("run", 2), "out", {});
  const test::HfFolder whole(folder_ / "out");
  ModelExport model(checkpoint("run", 2), {}, make_backend("cpu"));
  std::set<int> found;
  for (const std::string& tensor : whole.names()) {
    whole.flip(tensor, 1, 1).write(folder_ / "out");
    HfWeights written(folder_ / "out");
    int differences = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::optional<std::string> difference = model.difference(written, rank, kRanks);
      if (!difference) continue;
      EXPECT_THAT(*difference, HasSubstr("what was written is not what was to be: " + tensor + "["));
      ++differences;
      found.insert(rank);
    }
    EXPECT_EQ(differences, 1) << tensor;
  }
  EXPECT_EQ(found.size(), kRanks);
}

// The byte changes between the writing of the export and its reading back.
TEST_F(ExportsOfRuns, AByteThatChangesOnTheDiskIsFound) {
  run_on(kAlone, "run", {});
  ModelExport model(checkpoint("run", 2), {}, make_backend("cpu"));
  const std::filesystem::path folder = folder_ / "flipped", file = folder / "model.safetensors";
  std::filesystem::create_directory(folder);
  model.begin(folder);
  const int64_t header = test::header_bytes(file);
  const auto flip = [&] {
    std::string bytes = test::read_file(file);
    bytes[static_cast<size_t>(header)] = static_cast<char>(bytes[static_cast<size_t>(header)] ^ 1);
    test::write_file(file, bytes);
  };
  bool flipped = false;
  const Error error = test::error_of([&] {
    model.write(folder, 0, 1, [&] {
      if (!std::exchange(flipped, true)) flip();
    });
  });
  EXPECT_EQ(error.code(), ExitCode::storage);
  EXPECT_THAT(error.what(), HasSubstr(" is not what was written"));
}

}  // namespace mantissa::run_exports_test
