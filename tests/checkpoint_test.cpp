// Saving, loading, keeping, resharding and comparing checkpoints. Crashes and damage: reliability/checkpoint_faults_test.cpp.
#include <gmock/gmock.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "checkpoint_testing.h"
#include "mantissa/io/checkpoint_diff.h"
#include "mantissa/io/hash.h"

namespace mantissa::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

void flip_byte(const std::filesystem::path& path, int64_t position) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(position);
  const char byte = static_cast<char>(file.get());
  file.seekp(position);
  file.put(static_cast<char>(byte ^ 1));
  ASSERT_TRUE(file.flush().good());
}

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
  EXPECT_EQ(reader.manifest().dataset_fingerprint, "data");
  EXPECT_EQ(reader.manifest().build_fingerprint, "build");
}

TEST_F(CheckpointTest, TheFingerprintOfTheConfigIsTheHashOfItsTextInTheManifest) {
  State state(1);
  CheckpointContent content = state.content();
  content.config = R"({ "b": 1.50, "a": "\u00e9" })";
  const SavedCheckpoint saved = open_directory(folder).save(content);
  const Manifest manifest = CheckpointReader(saved.path).manifest();
  EXPECT_EQ(manifest.config, "{\"a\":\"\u00e9\",\"b\":1.5}");
  EXPECT_EQ(manifest.config_fingerprint, hex64(xxh64(manifest.config)));
}

TEST_F(CheckpointTest, TheFolderHoldsLockLatestAndCheckpointsOnly) {
  CheckpointDirectory directory = open_directory(folder);
  directory.save(State(1).content());
  directory.save(State(2).content());
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK", "latest", "step-00000001", "step-00000002"));
  EXPECT_THAT(names_in(checkpoints() / "step-00000002"), ElementsAre("manifest.json", "shard-00000.bin"));
  EXPECT_EQ(read_file(checkpoints() / "latest"), "step-00000002 " + CheckpointReader(checkpoints() / "step-00000002").hash() + "\n");
}

TEST_F(CheckpointTest, EveryDtypeEmptyTensorsAndScalarsAreSaved) {
  const std::vector<bf16> narrow(6, bf16{0x3f80});
  const std::vector<double> wide = {1.5};
  const std::vector<int32_t> integers = {-1, 2, 3};
  CheckpointContent content{.step = 1, .dataset_fingerprint = "", .build_fingerprint = "", .tensors = {}};
  content.tensors = {{.name = "bf16", .dtype = Dtype::bf16, .shape = {2, 3}, .boxes = {}, .data = std::as_bytes(std::span(narrow)).data()},
                     {.name = "scalar", .dtype = Dtype::f64, .shape = {}, .boxes = {}, .data = std::as_bytes(std::span(wide)).data()},
                     {.name = "empty", .dtype = Dtype::f32, .shape = {0, 5}, .boxes = {}, .data = nullptr},
                     {.name = "i32", .dtype = Dtype::i32, .shape = {3}, .boxes = {}, .data = std::as_bytes(std::span(integers)).data()}};
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

// ---- what is never saved

TEST_F(CheckpointTest, NonFiniteValuesAreNeverSaved) {
  CheckpointDirectory directory = open_directory(folder);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    State state(1, 10000);
    state.weights()[4321] = bad;
    try {
      directory.save(state.content());
      ADD_FAILURE() << "saved " << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::numerical);
      EXPECT_THAT(error.what(), HasSubstr("w: element 4321 is NaN or Inf"));
    }
  }
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK"));
}

TEST_F(CheckpointTest, NonFiniteValuesAreFoundInEveryFloatingDtype) {
  const std::vector<bf16> narrow = {bf16{0x7f7f}, bf16{0xff80}};
  const std::vector<double> wide = {1e308, std::numeric_limits<double>::quiet_NaN()};
  const std::vector<int32_t> integers = {0x7f800000, -1};
  const auto content = [](Dtype dtype, std::span<const std::byte> bytes) {
    CheckpointContent out{.step = 1, .dataset_fingerprint = "", .build_fingerprint = "", .tensors = {}};
    out.tensors = {{.name = "w", .dtype = dtype, .shape = {2}, .boxes = {}, .data = bytes.data()}};
    return out;
  };
  EXPECT_EQ(error_code_of([&] { require_finite(content(Dtype::bf16, std::as_bytes(std::span(narrow)))); }), ExitCode::numerical);
  EXPECT_EQ(error_code_of([&] { require_finite(content(Dtype::f64, std::as_bytes(std::span(wide)))); }), ExitCode::numerical);
  EXPECT_EQ(error_code_of([&] { require_finite(content(Dtype::i32, std::as_bytes(std::span(integers)))); }), ExitCode::ok);
}

// ---- the same step again

TEST_F(CheckpointTest, TheSameStateIsNotWrittenTwice) {
  CheckpointDirectory directory = open_directory(folder);
  EXPECT_FALSE(directory.save(State(5).content()).already_there);
  const auto written = std::filesystem::last_write_time(checkpoints() / "step-00000005/manifest.json");
  EXPECT_TRUE(directory.save(State(5).content()).already_there);
  EXPECT_EQ(std::filesystem::last_write_time(checkpoints() / "step-00000005/manifest.json"), written);
  EXPECT_EQ(newest(), 5);
}

TEST_F(CheckpointTest, ADamagedCheckpointOfTheSameStepIsSetAside) {
  CheckpointDirectory directory = open_directory(folder);
  directory.save(State(5).content());
  flip_byte(checkpoints() / "step-00000005/shard-00000.bin", 100);
  EXPECT_FALSE(directory.save(State(5).content()).already_there);
  EXPECT_EQ(newest(), 5);
  EXPECT_THAT(names_in(checkpoints()), ElementsAre(HasSubstr(".bad-step-00000005-"), "LOCK", "latest", "step-00000005"));
}

TEST_F(CheckpointTest, AnotherStateOfTheSameStepReplacesTheOldOneAndKeepsItAside) {
  CheckpointDirectory directory = open_directory(folder);
  State other(5);
  other.weights()[0] += 1;
  directory.save(other.content());
  directory.save(State(5).content());
  EXPECT_EQ(newest(), 5);
  EXPECT_THAT(log(), HasSubstr("holds another state of this step"));
}

// ---- keeping

TEST_F(CheckpointTest, TheLastKAndEveryMthAreKept) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 2, .every = 30});
  for (int64_t step = 10; step <= 100; step += 10) directory.save(State(step).content());
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK", "latest", "step-00000030", "step-00000060", "step-00000090", "step-00000100"));
}

TEST_F(CheckpointTest, DamagedOnesDoNotCountAmongTheKept) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  directory.save(State(1).content());
  directory.save(State(2).content());
  std::filesystem::resize_file(checkpoints() / "step-00000002/shard-00000.bin", 10);
  directory.save(State(3).content());
  EXPECT_TRUE(std::filesystem::exists(checkpoints() / "step-00000001"));
  directory.save(State(4).content());
  EXPECT_FALSE(std::filesystem::exists(checkpoints() / "step-00000001"));
  EXPECT_THAT(log(), HasSubstr("a damaged checkpoint is not counted"));
}

TEST_F(CheckpointTest, CheckpointsOfALaterStepAreNotDeleted) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  for (const int64_t step : {40, 50, 10, 20, 30}) directory.save(State(step).content());
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK", "latest", "step-00000020", "step-00000030", "step-00000040", "step-00000050"));
  EXPECT_EQ(newest(), 30);  // what `latest` names, not the highest number
}

TEST_F(CheckpointTest, KeepingOneOnlyIsRefused) {
  EXPECT_EQ(error_code_of([&] { open_directory(folder, {.latest = 1}); }), ExitCode::usage);
  EXPECT_FALSE(std::filesystem::exists(checkpoints()));
}

TEST_F(CheckpointTest, LeftoversAreSweptAtStart) {
  open_directory(folder).save(State(1).content());
  for (const char* name : {".tmp-00000002-abc", ".trash-step-00000000-abc", ".bad-step-00000001-abc"})
    std::filesystem::create_directories(checkpoints() / name / "inner");
  write_file(checkpoints() / "latest.tmp", "half");
  open_directory(folder);
  EXPECT_THAT(names_in(checkpoints()), ElementsAre(".bad-step-00000001-abc", "LOCK", "latest", "step-00000001"));
}

// ---- loading

TEST_F(CheckpointTest, AFolderWithoutCheckpointsIsAFreshStart) {
  EXPECT_EQ(newest(), std::nullopt);
  open_directory(folder);
  EXPECT_EQ(newest(), std::nullopt);
}

TEST_F(CheckpointTest, ADamagedNewestIsPassedOverWithALine) {
  CheckpointDirectory directory = open_directory(folder);
  for (int64_t step = 1; step <= 3; ++step) directory.save(State(step).content());
  flip_byte(checkpoints() / "step-00000003/shard-00000.bin", 4000);  // sizes and manifest still agree
  EXPECT_EQ(newest(), 2);
  EXPECT_THAT(log(), HasSubstr("step-00000003/shard-00000.bin: chunk 0 (bytes 0 to 8000) is damaged"));
}

TEST_F(CheckpointTest, AllDamagedIsAnErrorNotAFreshStart) {
  CheckpointDirectory directory = open_directory(folder);
  for (int64_t step = 1; step <= 2; ++step) directory.save(State(step).content());
  std::filesystem::remove(checkpoints() / "step-00000001/manifest.json");
  std::filesystem::remove_all(checkpoints() / "step-00000002");
  EXPECT_EQ(error_code_of([&] { newest(); }), ExitCode::data);
  EXPECT_THAT(log(), HasSubstr("step-00000002: there is no such checkpoint folder"));
}

TEST_F(CheckpointTest, ABrokenLatestFileIsNotNeeded) {
  CheckpointDirectory directory = open_directory(folder);
  for (int64_t step = 1; step <= 2; ++step) directory.save(State(step).content());
  const std::string good = read_file(checkpoints() / "latest");
  for (const std::string& bad :
       {std::string(), std::string("\n"), good.substr(0, 20), "../../etc " + good.substr(14), std::string(1000, 'x'),
        std::string("step-00000099 0123456789abcdef\n"), std::string("step-00000001 0123456789abcdef\n")}) {
    write_file(checkpoints() / "latest", bad);
    EXPECT_EQ(newest(), 2) << bad;
  }
  std::filesystem::remove(checkpoints() / "latest");
  EXPECT_EQ(newest(), 2);
}

TEST_F(CheckpointTest, AFolderUnderAnotherStepsNameIsDamaged) {
  CheckpointDirectory directory = open_directory(folder);
  directory.save(State(1).content());
  directory.save(State(2).content());
  std::filesystem::rename(checkpoints() / "step-00000002", checkpoints() / "step-00000009");
  EXPECT_EQ(newest(), 1);
  EXPECT_THAT(log(), HasSubstr("step-00000009: holds step 2"));
}

TEST_F(CheckpointTest, TheDamagedLatestIsTriedOnce) {
  CheckpointDirectory directory = open_directory(folder);
  directory.save(State(1).content());
  directory.save(State(2).content());
  write_file(checkpoints() / "step-00000002/manifest.json", "{");
  EXPECT_EQ(newest(), 1);
  const std::string lines = log();
  const size_t first = lines.find("checkpoint passed over");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(lines.find("checkpoint passed over", first + 1), std::string::npos) << lines;
}

TEST_F(CheckpointTest, OtherErrorsOfTheLoaderPassThrough) {
  open_directory(folder).save(State(1).content());
  const auto load = [](CheckpointReader&) { fail(ExitCode::data, "the data changed"); };
  try {
    load_newest(checkpoints(), load);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "the data changed");
  }
}

TEST_F(CheckpointTest, APathIsResolvedToTheCheckpointItNames) {
  CheckpointDirectory directory = open_directory(folder);
  directory.save(State(1).content());
  directory.save(State(2).content());
  EXPECT_EQ(resolve_checkpoint(checkpoints() / "step-00000001"), checkpoints() / "step-00000001");
  EXPECT_EQ(resolve_checkpoint(checkpoints() / "step-00000001/"), checkpoints() / "step-00000001");
  EXPECT_EQ(resolve_checkpoint(checkpoints() / ""), checkpoints() / "step-00000002");
  EXPECT_EQ(resolve_checkpoint(checkpoints()), checkpoints() / "step-00000002");
  EXPECT_EQ(resolve_checkpoint(checkpoints() / "latest"), checkpoints() / "step-00000002");
  EXPECT_EQ(resolve_checkpoint(folder.path()), checkpoints() / "step-00000002");  // as a run folder
  EXPECT_EQ(error_code_of([&] { resolve_checkpoint(folder / "missing"); }), ExitCode::usage);
  std::filesystem::create_directory(folder / "empty");
  EXPECT_EQ(error_code_of([&] { resolve_checkpoint(folder / "empty"); }), ExitCode::usage);
  write_file(checkpoints() / "latest", "nonsense");
  EXPECT_EQ(error_code_of([&] { resolve_checkpoint(checkpoints()); }), ExitCode::data);
}

// ---- list, diff, names

TEST_F(CheckpointTest, TheListTellsWhatIsValidAndWhatIsLatest) {
  CheckpointDirectory directory = open_directory(folder);
  for (int64_t step = 1; step <= 3; ++step) directory.save(State(step).content());
  std::filesystem::resize_file(checkpoints() / "step-00000002/shard-00000.bin", 7999);
  const auto list = list_checkpoints(checkpoints());
  ASSERT_EQ(list.size(), 3u);
  EXPECT_EQ(list[0].problem, "");
  EXPECT_EQ(list[0].tensors, 2u);
  EXPECT_EQ(list[0].bytes, 8000);
  EXPECT_EQ(list[0].samples, 64);
  EXPECT_THAT(list[1].problem, HasSubstr("has 7999 bytes, the manifest says 8000"));
  EXPECT_FALSE(list[1].latest);
  EXPECT_TRUE(list[2].latest);
}

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
}

TEST(CheckpointName, RoundTripsAndRefusesEverythingElse) {
  for (const int64_t step : {int64_t{0}, int64_t{1}, int64_t{99'999'999}, int64_t{100'000'000}, int64_t{999'999'999'999}})
    EXPECT_EQ(checkpoint_step(checkpoint_name(step)), step);
  EXPECT_EQ(checkpoint_name(1000), "step-00001000");
  for (const char* name :
       {"step-1", "step-000000001", "step-0000000a", "step--0000001", "step-99999999999999999999", ".step-00000001", "step-"})
    EXPECT_EQ(checkpoint_step(name), std::nullopt) << name;
}

TEST(Hash, Xxh64HasThePublishedValues) {
  EXPECT_EQ(hex64(xxh64("")), "ef46db3751d8e999");
  EXPECT_EQ(hex64(xxh64("abc")), "44bc2cf5ad770999");
  EXPECT_EQ(parse_hex64("44bc2cf5ad770999"), 0x44bc2cf5ad770999u);
  EXPECT_EQ(parse_hex64("44BC2CF5AD770999"), std::nullopt);
}

}  // namespace
}  // namespace mantissa::test
