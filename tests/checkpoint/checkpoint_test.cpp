// Saving, loading, keeping, resharding and comparing checkpoints. Crashes and damage: reliability/checkpoint_faults_test.cpp.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "checkpoint/checkpoint_diff.h"
#include "checkpoint_testing.h"

namespace mantissa::test::checkpoint_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(CheckpointTest, SavedStateIsReadBackBitForBit) {
  State state(7);
  state.weights()[3] = -0.0f;
  state.weights()[4] = std::numeric_limits<float>::denorm_min();
  const SavedCheckpoint saved = open_directory(folder).save(state.content());
  EXPECT_EQ(saved.path, checkpoints() / "step-00000007");
  EXPECT_EQ(saved.bytes, 2 * 1000 * 4);
  CheckpointReader reader(saved.path);
  EXPECT_TRUE(state.equals(reader));
  EXPECT_EQ(reader.manifest().samples, 7 * 64);
  EXPECT_EQ(reader.manifest().config, R"({"model":{"hidden_size":512}})");
  EXPECT_EQ(reader.manifest().tokenizer, R"({"type":"byte"})");
  EXPECT_EQ(reader.manifest().state, R"({"skipped":0,"window":[1,2.5]})");
  EXPECT_EQ(reader.manifest().fingerprints.dataset, "data");
  EXPECT_EQ(reader.manifest().fingerprints.build, "build");
}

// Two states are compared by these texts.
TEST_F(CheckpointTest, WhatIsToBeSavedIsDescribedAsTheManifestReturnsIt) {
  CheckpointContent content = State(1).content();
  content.config = content.tokenizer = content.plan = content.layout = content.state = R"({ "b": 1.50, "a": "\u00e9" })";
  const Manifest described = assemble_manifest(content, {describe_shard(content.tensors, 0, content.step)});
  const Manifest found = CheckpointReader(open_directory(folder).save(content).path).manifest();
  for (const Manifest* const manifest : {&described, &found}) {
    for (const std::string& json : {manifest->config, manifest->tokenizer, manifest->plan, manifest->layout, manifest->state})
      EXPECT_EQ(json, "{\"a\":\"\u00e9\",\"b\":1.5}");
    EXPECT_EQ(manifest->fingerprints.config, xxh64(manifest->config).text());
  }
}

TEST_F(CheckpointTest, TheFolderHoldsLockLatestAndCheckpointsOnly) {
  CheckpointDirectory directory = open_directory(folder);
  directory.save(State(1).content());
  directory.save(State(2).content());
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK", "latest", "step-00000001", "step-00000002"));
  EXPECT_THAT(names_in(checkpoints() / "step-00000002"), ElementsAre("manifest.json", "shard-00000.safetensors"));
  EXPECT_EQ(read_file(checkpoints() / "latest"), "step-00000002 " + CheckpointReader(checkpoints() / "step-00000002").hash() + "\n");
}

TEST_F(CheckpointTest, EveryDtypeEmptyTensorsAndScalarsAreSaved) {
  const std::vector<bf16> narrow(6, bf16{0x3f80});
  const std::vector<double> wide = {1.5};
  const std::vector<int32_t> integers = {-1, 2, 3};
  CheckpointContent content{{.step = 1}, {}};
  content.tensors = {{.name = "bf16", .shape = {2, 3}, .boxes = {}, .data = saved_tensor({2, 3}, narrow)},
                     {.name = "scalar", .shape = {}, .boxes = {}, .data = saved_tensor({}, wide)},
                     {.name = "empty", .shape = {0, 5}, .boxes = {}, .data = saved_tensor({0, 5}, std::vector<float>())},
                     {.name = "i32", .shape = {3}, .boxes = {}, .data = saved_tensor({3}, integers)}};
  CheckpointReader reader(open_directory(folder).save(content).path);
  std::vector<bf16> narrow_back(6);
  std::vector<double> wide_back(1);
  std::vector<int32_t> integers_back(3);
  reader.read("bf16", std::as_writable_bytes(std::span(narrow_back)));
  reader.read("scalar", std::as_writable_bytes(std::span(wide_back)));
  reader.read("empty", {});
  reader.read("i32", std::as_writable_bytes(std::span(integers_back)));
  EXPECT_EQ(std::memcmp(narrow.data(), narrow_back.data(), 12), 0);
  EXPECT_EQ(wide, wide_back);
  EXPECT_EQ(integers, integers_back);
}

TEST_F(CheckpointTest, APinnedCheckpointStaysUntilItIsUnpinnedAsOften) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  for (int i = 0; i < 2; ++i) directory.pin(1);
  for (int64_t step = 1; step <= 4; ++step) directory.save(State(step).content());
  for (const bool there : {true, false}) {
    directory.unpin(1);
    EXPECT_EQ(std::filesystem::exists(checkpoints() / "step-00000001"), there);
  }
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK", "latest", "step-00000003", "step-00000004"));
}

// ---- what is never saved

TEST_F(CheckpointTest, ALargeShardTellsThatItGoesOn) {
  const int64_t elements = 2 * kCheckpointChunkBytes / 4 + 1;
  const std::vector<float> values(static_cast<size_t>(elements));
  const std::vector<CheckpointTensor> tensors = {{.name = "w", .shape = {elements}, .boxes = {}, .data = saved_tensor({elements}, values)}};
  int hashed = 0, written = 0;
  const ShardEntry entry = describe_shard(tensors, 0, 1, [&] { ++hashed; });
  write_shard(tensors, entry, folder.path(), [&] { ++written; });
  EXPECT_EQ(hashed, 3);
  EXPECT_EQ(written, 3);
}

TEST_F(CheckpointTest, NonFiniteValuesAreNeverSavedWhateverTheirDtype) {
  CheckpointDirectory directory = open_directory(folder);
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity}) {
    State state(1, 10000);
    state.weights()[4321] = bad;
    const Error error = error_of([&] { directory.save(state.content()); });
    EXPECT_EQ(error.code(), ExitCode::numerical);
    EXPECT_THAT(error.what(), HasSubstr("w: element 4321 is NaN or Inf"));
  }
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK"));
  const auto code_of = [](const auto& elements) {
    return error_code_of([&] { describe_shard({{.name = "w", .shape = {2}, .boxes = {}, .data = saved_tensor({2}, elements)}}, 0, 1); });
  };
  EXPECT_EQ(code_of(std::vector{bf16{0x7f7f}, bf16{0xff80}}), ExitCode::numerical);
  EXPECT_EQ(code_of(std::vector{1e308, std::numeric_limits<double>::quiet_NaN()}), ExitCode::numerical);
  EXPECT_EQ(code_of(std::vector<int32_t>{0x7f800000, -1}), ExitCode::ok);
}

TEST_F(CheckpointTest, DataOfAnotherSizeThanTheTensorIsRefused) {
  CheckpointContent content{{.step = 1}, {}};
  content.tensors = {{.name = "w", .shape = {3}, .boxes = {}, .data = saved_tensor({2}, std::vector<float>(2))}};
  const auto problem = [&] {
    const Error error = error_of([&] { describe_shard(content.tensors, 0, 1); });
    EXPECT_EQ(error.code(), ExitCode::internal);
    return std::string(error.what());
  };
  EXPECT_EQ(problem(), "w is [3], but its data has 2 elements");
  content.tensors[0].boxes = {{.start = {0}, .size = {1}}};
  EXPECT_EQ(problem(), "w is [3], of which its boxes have 1 elements, but its data has 2 elements");
}

// ---- the same step again

TEST_F(CheckpointTest, TheSameStateIsNotWrittenTwiceAndAnotherOrADamagedOneIsReplaced) {
  CheckpointDirectory directory = open_directory(folder);
  State other(5);
  other.weights()[0] += 1;
  directory.save(other.content());
  EXPECT_FALSE(directory.save(State(5).content()).already_there);
  EXPECT_EQ(newest(), 5);
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK", "latest", "step-00000005")) << "the old one is deleted";
  const auto written = std::filesystem::last_write_time(checkpoints() / "step-00000005/manifest.json");
  EXPECT_TRUE(directory.save(State(5).content()).already_there);
  EXPECT_EQ(std::filesystem::last_write_time(checkpoints() / "step-00000005/manifest.json"), written);
  flip_byte(checkpoints() / "step-00000005/shard-00000.safetensors", 100);
  EXPECT_FALSE(directory.save(State(5).content()).already_there);
  EXPECT_EQ(newest(), 5);
  EXPECT_THAT(names_in(checkpoints()), ElementsAre(HasSubstr(".bad-step-00000005-"), "LOCK", "latest", "step-00000005"));
  write_file(checkpoints() / checkpoint_name(6), "no folder");
  directory.save(State(6).content());
  EXPECT_EQ(newest(), 6) << "a file in its place is set aside";
}

TEST_F(CheckpointTest, LeftoversAreSweptAtStartButForTheNewestTwoThatWereSetAsideAndWhatIsNotOurs) {
  open_directory(folder).save(State(1).content());
  const auto now = std::filesystem::file_time_type::clock::now();
  int hours = 0;
  for (const char* name :
       {".bad-step-00000003-a", ".bad-step-00000009-b", ".bad-step-00000002-c", ".bad-step-00000004-d", ".tmp-00000002-abc",
        ".trash-step-00000000-abc", ".old-notes", ".old-step-1-x", ".old-step-00000001", ".old-step-00000001-mine"}) {
    std::filesystem::create_directories(checkpoints() / name / "inner");
    std::filesystem::last_write_time(checkpoints() / name, now - std::chrono::hours(10) + std::chrono::hours(hours++));
  }
  write_file(checkpoints() / "latest.tmp", "half");
  open_directory(folder);
  EXPECT_THAT(names_in(checkpoints()), ElementsAre(".bad-step-00000002-c", ".bad-step-00000004-d", ".old-notes", ".old-step-00000001",
                                                   ".old-step-00000001-mine", ".old-step-1-x", "LOCK", "latest", "step-00000001"));
}

TEST_F(CheckpointTest, AStateThatLostItsNameToNoneOrADamagedOneIsPutBackAtStart) {
  open_directory(folder).save(State(1).content());
  std::filesystem::rename(checkpoints() / "step-00000001", checkpoints() / ".old-step-00000001-0123456789abcdef");
  open_directory(folder);
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK", "latest", "step-00000001"));
  EXPECT_EQ(newest(), 1);
  std::filesystem::create_directories(checkpoints() / ".old-step-00000001-fedcba9876543210/inner");
  open_directory(folder);
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK", "latest", "step-00000001")) << "the new one has the name";
  EXPECT_EQ(newest(), 1);
  std::filesystem::rename(checkpoints() / "step-00000001", checkpoints() / ".old-step-00000001-0123456789abcdef");
  std::filesystem::create_directories(checkpoints() / "step-00000001/inner");
  open_directory(folder);
  EXPECT_EQ(newest(), 1) << "the new one is damaged";
  EXPECT_THAT(log(), HasSubstr("step-00000001: set aside as .bad-step-00000001-"));
}

TEST_F(CheckpointTest, APipeInThePlaceOfTheLockIsNotWaitedFor) {
  std::filesystem::create_directories(checkpoints());
  ASSERT_EQ(::mkfifo((checkpoints() / "LOCK").c_str(), 0600), 0);
  EXPECT_EQ(error_code_of([&] { open_directory(folder); }), ExitCode::usage);
  EXPECT_EQ(error_code_of([&] { require_unlocked(checkpoints()); }), ExitCode::usage);
}

// ---- keeping

TEST_F(CheckpointTest, TheLastKAndEveryMthAreKept) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 2, .every = 30});
  for (int64_t step = 10; step <= 100; step += 10) directory.save(State(step).content());
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK", "latest", "step-00000030", "step-00000060", "step-00000090", "step-00000100"));
}

TEST_F(CheckpointTest, DamagedOnesAndThoseOfAnotherStepDoNotCountAmongTheKept) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  const auto there = [&](int64_t step) { return std::filesystem::exists(checkpoints() / checkpoint_name(step)); };
  for (const int64_t step : {1, 2}) directory.save(State(step).content());
  std::filesystem::resize_file(checkpoints() / "step-00000002/shard-00000.safetensors", 10);
  directory.save(State(3).content());
  EXPECT_TRUE(there(1));
  directory.save(State(4).content());
  EXPECT_FALSE(there(1));
  EXPECT_THAT(log(), HasSubstr("checkpoint.keep_latest does not count a damaged checkpoint"));
  std::filesystem::remove_all(checkpoints() / "step-00000004");
  std::filesystem::copy(checkpoints() / "step-00000003", checkpoints() / "step-00000004");
  directory.save(State(5).content());
  EXPECT_TRUE(there(3));
}

TEST_F(CheckpointTest, AFileNamedLikeACheckpointStopsNoDeletionAndIsNone) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  write_file(checkpoints() / checkpoint_name(1), "no folder");
  std::filesystem::create_symlink(checkpoint_name(4), checkpoints() / checkpoint_name(4));
  for (int64_t step = 5; step <= 8; ++step) directory.save(State(step).content());
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK", "latest", "step-00000001", "step-00000004", "step-00000007", "step-00000008"));
  EXPECT_THAT(log(), Not(HasSubstr("was not deleted")));
  EXPECT_EQ(list_checkpoints(checkpoints()).size(), 2U);
  EXPECT_EQ(newest(), 8);
}

TEST_F(CheckpointTest, CheckpointsOfALaterStepAreNotDeleted) {
  EXPECT_EQ(error_code_of([&] { open_directory(folder, {.latest = 1}); }), ExitCode::usage) << "of which a damaged one would be the last";
  EXPECT_FALSE(std::filesystem::exists(checkpoints()));
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  for (const int64_t step : {40, 50, 10, 20, 30}) directory.save(State(step).content());
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK", "latest", "step-00000020", "step-00000030", "step-00000040", "step-00000050"));
  EXPECT_EQ(newest(), 30);  // the one that `latest` names, not the highest number
}

// ---- diff

TEST_F(CheckpointTest, TheDifferenceNamesTensorsAndFirstElement) {
  CheckpointDirectory directory = open_directory(folder);
  State state(1);
  CheckpointReader a(directory.save(state.content()).path);
  EXPECT_TRUE(diff_checkpoints(a, a).empty());
  state.weights()[17] += 1;
  state.weights()[40] += 1;
  CheckpointContent content = state.content();
  content.step = 2;
  content.tensors[1].name = "w.v";
  CheckpointReader b(directory.save(content).path);
  const auto differences = diff_checkpoints(a, b);
  ASSERT_EQ(differences.size(), 3u);
  EXPECT_EQ(differences[0].name + ": " + differences[0].what, "w: 2 of 1000 elements, the first at 17");
  EXPECT_EQ(differences[1].name + ": " + differences[1].what, "w.m: only in the first");
  EXPECT_EQ(differences[2].name + ": " + differences[2].what, "w.v: only in the second");
  State last(1);
  last.weights()[999] += 1;
  content = last.content();
  content.step = 3;
  CheckpointReader c(directory.save(content).path);
  ASSERT_EQ(diff_checkpoints(a, c).size(), 1u);
  EXPECT_EQ(diff_checkpoints(a, c)[0].what, "1 of 1000 elements, the first at 999");
}

}  // namespace mantissa::test::checkpoint_test
