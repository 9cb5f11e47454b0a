// A running job's exports: the files that `mantissa export` makes of the checkpoint beside them, from ranks of every layout.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <set>

#include "mantissa/base/log.h"
#include "mantissa/hf/export.h"
#include "mantissa/hf/import.h"
#include "mantissa/hf/live_weights.h"
#include "mantissa/io/pending_folder.h"
#include "mantissa/train/training_step.h"
#include "tensor_runs.h"

namespace mantissa::run_exports_test {

using test::TensorLayout;
using test::TrainedRun;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const TensorLayout kAlone{1, 1, false};
const std::vector<TensorLayout> kLayouts = {kAlone, {4, 1, false}, {1, 2, false}, {2, 2, false}};
const std::vector<TensorLayout> kExpertLayouts = {kAlone, {2, 1, false, 2}, {2, 2, false}, {2, 2, false, 2}};

class RunExports : public test::TrainingTest {
 protected:
  // 8 letters, padded to 12 rows: of two tensor ranks the second has two and the padding.
  static std::vector<std::string> sets(const TensorLayout& layout, const std::vector<std::string>& more) {
    std::vector<std::string> out = {"model.hidden_size=128",
                                    "model.intermediate_size=128",
                                    "model.num_attention_heads=4",
                                    "model.num_key_value_heads=2",
                                    "model.pad_vocab_to=12",
                                    "training.micro_batch_size=1",
                                    "training.grad_accum=null",
                                    "training.global_batch_size=4",
                                    "training.threads=1",
                                    "training.steps=2",
                                    "precision.dtype=bf16",
                                    "eval.iters=1",
                                    text("parallel.data=", layout.data),
                                    text("parallel.tensor=", layout.tensor),
                                    text("parallel.expert=", layout.expert)};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  TrainedRun run_on(const TensorLayout& layout, const std::string& name, const std::vector<std::string>& more,
                    const std::function<Request()>& request = {}) const {
    const LoadedConfig loaded = config(name, sets(layout, more));
    if (layout.ranks() == 1) return run(loaded, request);
    TrainedRun out;
    const auto errors = test::run_ranks(layout.ranks(), [&](const Communicator& world) {
      TrainedRun own = run(loaded, world.rank() == 0 ? request : nullptr, make_mesh(world, layout.tensor, layout.expert));
      if (world.rank() == 0) out = std::move(own);
    });
    EXPECT_THAT(errors, ::testing::Each(IsEmpty())) << name;
    return out;
  }

  std::string exported(const std::string& name, int64_t step) const { return run_folder(name) + "/exports/" + checkpoint_name(step); }
  static std::set<std::string> exports_of(const std::string& run) {
    std::set<std::string> names;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(run + "/exports", none)) names.insert(entry.path().filename());
    return names;
  }
  static std::map<std::string, std::string> files_of(const std::string& folder) {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) files[entry.path().filename()] = test::read_file(entry.path());
    return files;
  }
  std::map<std::string, std::string> files_from(const std::string& checkpoint, const std::string& name,
                                                const ExportOptions& options) const {
    CheckpointReader reader(checkpoint);
    export_model(reader, folder_ / name, options);
    return files_of(folder_ / name);
  }
  static void expect_same_files(const std::map<std::string, std::string>& found, const std::map<std::string, std::string>& expected) {
    EXPECT_EQ(found.size(), expected.size());
    for (const auto& [name, bytes] : expected) {
      const auto other = found.find(name);
      EXPECT_TRUE(other != found.end() && other->second == bytes) << name;
    }
  }
};

struct Setting {
  const char* name;
  std::vector<std::string> sets;
  std::vector<TensorLayout> layouts = kLayouts;
};

class FromRanks : public RunExports, public ::testing::WithParamInterface<Setting> {};

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
    ::testing::Values(Setting{"high", {"model.attention_bias=qkv", "model.qk_norm=false"}},
                      Setting{"fp32", {"precision.dtype=fp32", "model.tie_word_embeddings=true"}, {kAlone, {2, 2, false}}},
                      Setting{"gpt2",
                              {"model.norm=layer", "model.norm_bias=true", "model.position=learned", "model.activation=gelu_tanh",
                               "model.num_key_value_heads=4", "model.attention_bias=all", "model.mlp_bias=true", "model.qk_norm=false"},
                              {kAlone, {1, 2, false}}},
                      Setting{"mxfp8", {"precision.recipe=mxfp8"}},
                      Setting{"mxfp8_gather", {"precision.recipe=mxfp8", "precision.fp8_param_gather=true"}},
                      Setting{"fp8_block",
                              {"precision.recipe=fp8_block", "model.hidden_size=256", "model.intermediate_size=256",
                               "model.num_key_value_heads=4"},
                              {kAlone, {2, 2, false}}},
                      Setting{"mxfp4_qat", {"precision.recipe=mxfp4_qat"}}, Setting{"experts", kExperts, kExpertLayouts}),
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
  for (size_t shard = 0; shard < 3; ++shard) write_shard(shards[shard], save.manifest.shards[shard], save.folder);
  return directory.commit(save).path;
}

TEST_F(RunExports, PiecesOfACheckpointDoNotShow) {
  std::vector<std::string> more = kExperts;
  more.emplace_back("checkpoint.export.weights=packed");
  run_on({2, 1, false, 2}, "run", more);
  const std::string pieces = saved_in_pieces(checkpoint("run", 2), folder_ / "pieces");
  auto found = files_from(pieces, "from pieces", {.weights = ExportWeights::packed}), expected = files_of(exported("run", 2));
  for (auto* files : {&found, &expected}) EXPECT_EQ(files->erase("mantissa.json"), 1U);  // it has the hash of the manifest
  expect_same_files(found, expected);
}

TEST_F(RunExports, OfKeptCheckpointsAloneAndNoLonger) {
  const std::vector<std::string> every = {"checkpoint.export={}", "checkpoint.interval=1", "checkpoint.keep_latest=2", "training.steps=4"};
  run_on({2, 1, false}, "kept", every);
  EXPECT_THAT(exports_of(run_folder("kept")), ElementsAre("step-00000003", "step-00000004"));

  int calls = 0;
  const auto request = [&calls] { return ++calls == 3 ? Request::save : calls == 6 ? Request::save_and_stop : Request::none; };
  const std::vector<std::string> asked = {"checkpoint.export={}", "training.steps=9"};
  const TrainedRun stopped = run_on(kAlone, "asked", asked, request);
  EXPECT_EQ(stopped.summary.exit, ExitCode::stopped);
  EXPECT_EQ(stopped.summary.steps, 5);
  EXPECT_THAT(exports_of(run_folder("asked")), ElementsAre("step-00000002"));
  std::vector<std::string> resumed = asked;
  resumed.insert(resumed.end(), {"training.steps=5", "checkpoint.resume=auto"});
  EXPECT_EQ(run_on(kAlone, "asked", resumed).summary.exit, ExitCode::ok);
  EXPECT_THAT(exports_of(run_folder("asked")), ElementsAre("step-00000002", "step-00000005")) << "that of the end was missing";
}

// What a process that was killed left, and an export that is of another state of this step.
TEST_F(RunExports, LeftoversGo) {
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
TEST_F(RunExports, LeftoversGoWithoutAnotherExport) {
  const std::string left = run_folder("again") + "/exports/.tmp-step-00000001-0123456789abcdef";
  std::filesystem::create_directories(left);
  {
    const PendingFolder pending(folder_ / "pending");
    std::filesystem::copy(pending.path().string() + ".lock", left + ".lock");
  }
  EXPECT_EQ(run_on(kAlone, "again", {}).summary.exit, ExitCode::ok);
  EXPECT_THAT(exports_of(run_folder("again")), IsEmpty());
}

TEST_F(RunExports, FilesOfAnImportedModelGoAlong) {
  run_on(kAlone, "first", {"checkpoint.export={}"});
  test::write_file(exported("first", 2) + "/generation_config.json", "{\"eos_token_id\": 7}\n");
  import_model(exported("first", 2), folder_ / "imported");
  run_on({1, 2, false}, "second", {"checkpoint.export={}", "checkpoint.init_from=" + (folder_ / "imported")});
  const auto files = files_of(exported("second", 2));
  expect_same_files(files, files_from(checkpoint("second", 2), "again", {}));
  EXPECT_EQ(files.at("generation_config.json"), "{\"eos_token_id\": 7}\n");
  EXPECT_EQ(files.at("tokenizer.json"), test::read_file(exported("first", 2) + "/tokenizer.json"));
}

// Training goes on, on all ranks, and only the last one decides.
TEST_F(RunExports, AFailureIsThatOfASave) {
  std::vector<std::string> sets = {"checkpoint.export={}", "checkpoint.interval=2", "training.steps=4"};
  const std::string exports = run_folder("gone") + "/exports";
  std::filesystem::create_directories(run_folder("gone"));
  test::write_file(exports, "a file in the way");
  open_log({.console = false, .file = folder_ / "log.txt"});
  const TrainedRun failed = run_on({1, 2, false}, "gone", sets);
  close_log();
  const std::string log = test::read_file(folder_ / "log.txt");
  EXPECT_THAT(log, HasSubstr("export of step 2 not saved: "));
  EXPECT_THAT(log, ::testing::Not(HasSubstr("checkpoint of step"))) << "which was saved, also where no path is known";
  EXPECT_EQ(failed.losses.size(), 4U);
  EXPECT_EQ(failed.summary.failed_saves, 2);
  EXPECT_EQ(failed.summary.exit, ExitCode::storage);
  EXPECT_EQ(failed.summary.checkpoint, checkpoint("gone", 4));
  EXPECT_THAT(test::read_file(run_folder("gone") + "/metrics.jsonl"), HasSubstr("exports: "));
  std::filesystem::remove(exports);
  sets.emplace_back("checkpoint.resume=auto");
  EXPECT_EQ(run_on({1, 2, false}, "gone", sets).summary.exit, ExitCode::ok);
  EXPECT_THAT(exports_of(run_folder("gone")), ElementsAre("step-00000004"));
  expect_same_files(files_of(exported("gone", 4)), files_from(checkpoint("gone", 4), "again", {}));
}

// Between its writing and its reading back.
TEST_F(RunExports, AByteThatChangesOnTheDiskIsFound) {
  const LoadedConfig loaded = config("flipped", sets(kAlone, {"checkpoint.export={}"}));
  bool flipped = false;
  std::string problem;
  TrainEvents events;
  events.set_phase = [&](int64_t, const char*) {
    for (const std::string& name : exports_of(run_folder("flipped"))) {
      const std::string file = run_folder("flipped") + "/exports/" + name + "/model.safetensors";
      if (flipped || !std::filesystem::exists(file)) continue;
      std::string bytes = test::read_file(file);
      bytes.back() = static_cast<char>(bytes.back() ^ 1);
      test::write_file(file, bytes);
      flipped = true;
    }
  };
  events.saved = [&](const SaveEvent& event) { problem = event.problem; };
  EXPECT_EQ(train(loaded, {"test"}, events).exit, ExitCode::storage);
  EXPECT_TRUE(flipped);
  EXPECT_THAT(problem, HasSubstr(" is not what was exported: its hash differs"));
  EXPECT_THAT(exports_of(run_folder("flipped")), IsEmpty());
}

// Codes and scales travel as they are, and what rank 0 has does not.
TEST_F(RunExports, BytesSent) {
  const LoadedConfig loaded = config("sent", sets({2, 2, false}, {"precision.recipe=mxfp8", "model.hidden_size=256"}));
  RunConfig of = loaded.config;
  of.model.vocab_size = 8;
  const PrecisionPlan plan = resolve_plan(of);
  const auto errors = test::run_ranks(4, [&](const Communicator& world) {
    const Mesh mesh = make_mesh(world, 2);
    const std::unique_ptr<Backend> device = make_backend("cpu");
    Gpt model(of.model, *device, plan, training_options(of, mesh));
    Optimizer optimizer(model.parameters(), of.optimizer, mesh);
    optimizer.initialize(1);
    LiveWeights weights(model.parameters(), plan, mesh);
    const int64_t before = world.traffic().other;
    const std::string name = "layers.1.mlp.gate_up.weight";  // [256, 256]
    weights.codes(name, 0, 256);
    weights.scales(name, 0, 256);
    const auto sent = static_cast<double>(world.traffic().other - before);
    const double elements = world.rank() == 1 ? 256.0 * 256 / 2 : 0;
    EXPECT_GE(sent, elements) << world.rank();
    EXPECT_LE(sent, 1.04 * elements) << world.rank();
  });
  EXPECT_THAT(errors, ::testing::Each(IsEmpty()));
}

}  // namespace mantissa::run_exports_test
