// Exports beside training: the files that `mantissa export` makes of the same checkpoint, from ranks of every layout.
#include "train/run_exports.h"

#include "checkpoint_testing.h"
#include "exports_of_runs.h"
#include "mantissa/base/log.h"
#include "mantissa/hf/load_model.h"
#include "mantissa/io/pending_folder.h"
#include "mantissa/train/training_step.h"

namespace mantissa::run_exports_test {

using test::ExportsOfRuns;
using test::kAlone;
using test::TensorLayout;
using test::TrainedRun;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::vector<TensorLayout> kLayouts = {kAlone, {4, 1, false}, {1, 2, false}, {2, 2, false}};
const std::vector<TensorLayout> kExpertLayouts = {kAlone, {2, 1, false, 2}, {2, 2, false}, {2, 2, false, 2}};

// Compares a folder with what forward multiplies by in a model that was loaded: its codes have the hashes of those in training.
void expect_live_values(const std::string& checkpoint, const std::string& folder) {
  const LoadedModel live = load_model(checkpoint, make_backend("cpu"));
  const PrecisionPlan plan = resolve_plan(live.config);
  const ForwardTypes types(plan);
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
};

class FromRanks : public ExportsOfRuns, public ::testing::WithParamInterface<Setting> {};

TEST_P(FromRanks, TheFilesAreThoseOfTheCheckpoint) {
  const bool quantizes = std::ranges::any_of(GetParam().sets, [](const std::string& set) { return set.starts_with("precision.recipe="); });
  for (const ExportWeights weights : {ExportWeights::dequantized, ExportWeights::packed}) {
    if (weights == ExportWeights::packed && !quantizes) continue;  // which is refused: there is nothing to pack
    for (const TensorLayout& layout : GetParam().layouts) {
      SCOPED_TRACE(text(layout.name(), " ", choice_name(weights)));
      const std::string name = text(layout.name(), choice_name(weights));
      std::vector<std::string> more = GetParam().sets;
      more.push_back(text("checkpoint.export.weights=", choice_name(weights)));
      EXPECT_EQ(run_on(layout, name, more).summary.failed_saves, 0);
      expect_same_files(files_of(exported(name, 2)), files_from(checkpoint(name, 2), name + " again", {.weights = weights}));
      expect_live_values(checkpoint(name, 2), exported(name, 2));
    }
  }
}

const std::vector<std::string> kExperts = {"precision.recipe=mxfp8",
                                           "precision.fp8_param_gather=true",
                                           "model.moe.num_experts=4",
                                           "model.moe.num_experts_per_tok=2",
                                           "model.moe.intermediate_size=64",
                                           "model.moe.dense_layers=[1]",
                                           "model.qk_norm=true",
                                           R"(precision.rules=[{"match":"layers.*.moe.experts.*","recipe":"mxfp4_qat_mxfp8_act"}])"};

INSTANTIATE_TEST_SUITE_P(
    , FromRanks,
    ::testing::Values(
        Setting{"high", {"model.attention_bias=qkv", "model.qk_norm=false"}},
        Setting{"fp32", {"precision.dtype=fp32", "model.tie_word_embeddings=true"}, {kAlone, {2, 2, false}}},
        Setting{"gpt2",
                {"model.norm=layer", "model.norm_bias=true", "model.position=learned", "model.activation=gelu_tanh",
                 "model.num_key_value_heads=4", "model.attention_bias=all", "model.mlp_bias=true", "model.qk_norm=false"},
                {kAlone, {1, 2, false}}},
        Setting{"mxfp8", {"precision.recipe=mxfp8"}},
        Setting{"mxfp8_gather", {"precision.recipe=mxfp8", "precision.fp8_param_gather=true"}},
        Setting{"fp8_block",
                {"precision.recipe=fp8_block", "model.hidden_size=256", "model.intermediate_size=256", "model.num_key_value_heads=4"},
                {kAlone, {2, 2, false}}},
        Setting{"mxfp4_qat", {"precision.recipe=mxfp4_qat"}},
        Setting{"mxfp4_qat_mxfp8_act", {"precision.recipe=mxfp4_qat_mxfp8_act"}, {kAlone, {2, 2, false}}},
        Setting{"mxfp8_te", {"precision.recipe=mxfp8_te"}, {kAlone, {2, 2, false}}},
        Setting{"mxfp8_weights", {"precision.recipe=mxfp8_weights"}, {kAlone, {2, 2, false}}},
        Setting{"output", {"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=64"}, {kAlone, {2, 2, false}}},
        Setting{"experts", kExperts, kExpertLayouts}),
    [](const auto& one) { return std::string(one.param.name); });

Shape shape_of(const std::vector<int64_t>& sizes) { return sizes.size() == 1 ? Shape{sizes[0]} : Shape{sizes[0], sizes[1]}; }

// The boxes of every third of seven pieces of a tensor, along its rows or, where these are few, its columns.
CheckpointTensor third_of(CheckpointReader& reader, const ManifestTensor& tensor, int64_t shard, Backend& device) {
  constexpr int64_t kPieces = 7, kShards = 3;
  const Box whole = whole_box(tensor.shape);
  const size_t axis = whole.size.size() > 1 && whole.size[0] < 40 ? 1 : 0;
  CheckpointTensor out{.name = tensor.name, .shape = shape_of(tensor.shape), .boxes = {}, .data = {}};
  std::vector<std::byte> bytes;
  for (int64_t i = shard; i < kPieces; i += kShards) {
    Box box = whole;
    box.start[axis] = whole.size[axis] * i / kPieces;
    box.size[axis] = whole.size[axis] * (i + 1) / kPieces - box.start[axis];
    std::vector<std::byte> piece(static_cast<size_t>(box.elements() * dtype_bytes(tensor.dtype)));
    reader.read(tensor.name, box, piece);
    bytes.insert(bytes.end(), piece.begin(), piece.end());
    out.boxes.push_back(box);
  }
  const auto elements = static_cast<int64_t>(bytes.size()) / dtype_bytes(tensor.dtype);
  out.data = from_host(device, tensor.dtype, {elements}, bytes.data());
  return out;
}

// The same checkpoint in three files, as ranks of a layout that no run has would have saved it.
std::string saved_in_pieces(const std::string& checkpoint, const std::filesystem::path& folder) {
  CheckpointReader reader(checkpoint);
  const std::unique_ptr<Backend> device = make_backend("cpu");
  std::vector<std::vector<CheckpointTensor>> shards(3);
  std::vector<ShardEntry> entries;
  for (int64_t shard = 0; shard < 3; ++shard) {
    auto& tensors = shards[static_cast<size_t>(shard)];
    for (const ManifestTensor& tensor : reader.manifest().tensors) tensors.push_back(third_of(reader, tensor, shard, *device));
    entries.push_back(describe_shard(tensors, shard, reader.manifest().step));
  }
  CheckpointDirectory directory(folder, {}, "test");
  const CheckpointDirectory::Save save = directory.begin(assemble_manifest(reader.manifest(), entries));
  for (size_t shard = 0; shard < 3; ++shard) write_shard(shards[shard], entries[shard], save.folder);
  return directory.commit(save).path;
}

TEST_F(ExportsOfRuns, PiecesOfACheckpointDoNotShow) {
  std::vector<std::string> more = kExperts;
  more.emplace_back("checkpoint.export.weights=packed");
  run_on({2, 1, false, 2}, "run", more);
  const std::string pieces = saved_in_pieces(checkpoint("run", 2), folder_ / "pieces");
  auto found = files_from(pieces, "from pieces", {.weights = ExportWeights::packed}), expected = files_of(exported("run", 2));
  for (auto* files : {&found, &expected}) EXPECT_EQ(files->erase("mantissa.json"), 1U);  // it has the hash of the manifest
  expect_same_files(found, expected);
}

TEST_F(ExportsOfRuns, OfKeptCheckpointsAloneAndNoLonger) {
  const std::vector<std::string> every = {"checkpoint.export={}", "checkpoint.interval=1", "checkpoint.keep_latest=2", "training.steps=4"};
  run_on({2, 1, false}, "kept", every);
  EXPECT_THAT(exports_of(run_folder("kept")), ElementsAre("step-00000003", "step-00000004"));

  int calls = 0;
  const auto request = [&calls] { return ++calls == 3 ? Request::save : calls == 6 ? Request::save_and_stop : Request::none; };
  const std::vector<std::string> asked = {"checkpoint.export={}", "training.steps=9"};
  const TrainedRun stopped = run_on(kAlone, "asked", asked, request);
  EXPECT_EQ(stopped.summary.exit, ExitCode::stopped);
  EXPECT_EQ(stopped.summary.steps, 5);
  EXPECT_THAT(exports_of(run_folder("asked")), ElementsAre("step-00000002")) << "a stop waits for it and begins no other";
  std::vector<std::string> resumed = asked;
  resumed.insert(resumed.end(), {"training.steps=5", "checkpoint.resume=auto"});
  EXPECT_EQ(run_on(kAlone, "asked", resumed).summary.exit, ExitCode::ok);
  EXPECT_THAT(exports_of(run_folder("asked")), ElementsAre("step-00000002", "step-00000005")) << "that of the end was missing";
}

// The checkpoint and its export belong to the step that is done when the request comes.
TEST_F(ExportsOfRuns, AStopWaitsForAnExportThatHasBegun) {
  bool asked = false;
  const auto request = [&asked] { return std::exchange(asked, true) ? Request::save_and_stop : Request::none; };
  const std::vector<std::string> sets = {"checkpoint.export={}", "checkpoint.interval=1", "training.steps=9", "logging.interval=100"};
  EXPECT_EQ(run_on(kAlone, "run", sets, request).summary.exit, ExitCode::stopped);
  EXPECT_THAT(exports_of(run_folder("run")), ElementsAre("step-00000001"));
}

// It comes with the vote of that step, before the save of the end. Nobody resumes a run that has done everything.
TEST_F(ExportsOfRuns, AStopDuringTheLastStepLeavesTheLastExport) {
  int calls = 0;  // one before the first step, then one a step
  const auto request = [&calls] { return ++calls > 2 ? Request::save_and_stop : Request::none; };
  const TrainedRun last = run_on({2, 1, false}, "run", {"checkpoint.export={}", "data.valid_fraction=0", "training.steps=2"}, request);
  EXPECT_EQ(last.losses.size(), 2U);
  EXPECT_EQ(last.summary.exit, ExitCode::ok);
  EXPECT_THAT(exports_of(run_folder("run")), ElementsAre("step-00000002"));
}

TEST_F(ExportsOfRuns, AFailedExportOfTheLastCheckpointShowsInTheCodeOfAStop) {
  std::filesystem::create_directories(run_folder("run"));
  test::write_file(run_folder("run") + "/exports", "a file in the way");
  int calls = 0;
  const auto request = [&calls] { return ++calls > 1 ? Request::save_and_stop : Request::none; };
  const std::vector<std::string> sets = {"checkpoint.export={}", "checkpoint.interval=1", "training.steps=9"};
  EXPECT_EQ(run_on(kAlone, "run", sets, request).summary.exit, ExitCode::storage);
  calls = 0;
  const std::vector<std::string> every_second = {"checkpoint.export={}", "checkpoint.interval=2", "training.steps=9",
                                                 "logging.interval=100"};
  std::filesystem::create_directories(run_folder("later"));
  test::write_file(run_folder("later") + "/exports", "a file in the way");
  const auto after_three = [&calls] { return ++calls > 3 ? Request::save_and_stop : Request::none; };
  const TrainedRun later = run_on(kAlone, "later", every_second, after_three);
  EXPECT_EQ(later.summary.steps, 3);
  EXPECT_EQ(later.summary.exit, ExitCode::stopped) << "that of step 3 was not asked for";
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

// What a process that was killed left, and an export that is of another state of this step.
TEST_F(ExportsOfRuns, LeftoversGo) {
  const std::string exports = run_folder("again") + "/exports/";
  for (const std::string left : {".trash-step-00000001-5", "step-00000002"}) {
    std::filesystem::create_directories(exports + left);
    test::write_file(exports + left + "/left.txt", "left");
  }
  {
    const PendingFolder pending(exports + "step-00000001");  // of a process at work, and copied one of none
    const std::string copy = exports + ".tmp-step-00000001-0123456789abcdef";
    std::filesystem::copy(pending.path(), copy);
    std::filesystem::copy(pending.path().string() + ".lock", copy + ".lock");
  }
  EXPECT_EQ(exports_of(run_folder("again")).size(), 4U);
  EXPECT_EQ(run_on(kAlone, "again", {"checkpoint.export={}"}).summary.exit, ExitCode::ok);
  EXPECT_THAT(exports_of(run_folder("again")), ElementsAre("step-00000002"));
  expect_same_files(files_of(exported("again", 2)), files_from(checkpoint("again", 2), "from checkpoint", {}));
}

// A run that goes on without exports is the last that looks there.
TEST_F(ExportsOfRuns, LeftoversGoWithoutAnotherExport) {
  const std::string left = run_folder("again") + "/exports/.tmp-step-00000001-0123456789abcdef";
  std::filesystem::create_directories(left);
  {
    const PendingFolder pending(folder_ / "pending");
    std::filesystem::copy(pending.path().string() + ".lock", left + ".lock");
  }
  EXPECT_EQ(run_on(kAlone, "again", {}).summary.exit, ExitCode::ok);
  EXPECT_THAT(exports_of(run_folder("again")), IsEmpty());
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
  EXPECT_THAT(log, HasSubstr("export of step 2 not made: "));
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

// Between its writing and its reading back.
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
