// Outcomes of exports that are asked for: their order, their checkpoints, and a rank that cannot make its part.
#include <csignal>
#include <thread>

#include "checkpoint_testing.h"
#include "exports_of_runs.h"
#include "io/pending_folder.h"
#include "io/safetensors.h"
#include "mantissa/base/log.h"
#include "process.h"
#include "train/run_exports.h"

namespace mantissa::pending_exports_test {

using test::kAlone;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Exports of checkpoints that a finished run left, asked for one after the other.
class ExportsAskedFor : public test::ExportsOfRuns {
 protected:
  explicit ExportsAskedFor(std::vector<std::string> model = {}) : model_(std::move(model)) {
    run_on(kAlone, "run", with_model({"checkpoint.interval=1", "checkpoint.keep_latest=9", "training.steps=3"}));
  }
  std::string directory() const { return run_folder("run") + "/checkpoints"; }
  LoadedConfig exporting() const { return config("run", sets(kAlone, with_model({"checkpoint.export={}", "checkpoint.keep_latest=2"}))); }
  SavedCheckpoint saved(int64_t step) const {
    return {.path = checkpoint("run", step), .hash = CheckpointReader(checkpoint("run", step)).hash()};
  }
  // The outcomes of exports on ranks; the events are those of the first.
  std::vector<ExportEvent> made(int ranks, const std::vector<SavedCheckpoint>& of) const {
    std::vector<ExportEvent> events;
    const LoadedConfig loaded = exporting();
    const auto errors = test::run_ranks(ranks, [&](const Communicator& world) {
      std::optional<CheckpointDirectory> directory;
      if (world.rank() == 0) directory.emplace(loaded.config.checkpoint.dir, KeepPolicy{}, "test");
      RunExports exports(loaded.config, world, [&](const ExportEvent& event) {
        if (world.rank() == 0) events.push_back(event);
      });
      for (const SavedCheckpoint& one : of) exports.add(one, directory);
      EXPECT_GT(exports.pending(), 0U);
      while (exports.pending() > 0) exports.advance(directory);
    });
    EXPECT_THAT(errors, ::testing::Each(IsEmpty()));
    return events;
  }

 private:
  std::vector<std::string> with_model(std::vector<std::string> sets) const {
    sets.insert(sets.end(), model_.begin(), model_.end());
    return sets;
  }

  std::vector<std::string> model_;
};

TEST_F(ExportsAskedFor, WaitForEachOther) {
  const std::vector<ExportEvent> events = made(3, {saved(2), saved(1), saved(3)});
  ASSERT_EQ(events.size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(events[i].step, std::vector<int64_t>({2, 1, 3}).at(i));
    EXPECT_EQ(events[i].problem, "");
    expect_same_files(files_of(exported("run", events[i].step)), files_from(checkpoint("run", events[i].step), text("again ", i), {}));
  }
}

// Nothing of it stays, whatever it had written.
TEST_F(ExportsAskedFor, AnExportThatNobodyWaitsForIsCutShort) {
  const LoadedConfig loaded = exporting();
  std::optional<CheckpointDirectory> of_run(std::in_place, directory(), KeepPolicy{}, "test");
  {
    RunExports exports(loaded.config, {}, [](const ExportEvent&) {});
    exports.add(saved(2), of_run);
  }
  EXPECT_THAT(exports_of(run_folder("run")), IsEmpty());
}

TEST_F(ExportsAskedFor, OneThatIsThereOrAskedForIsNotMadeAgain) {
  const LoadedConfig loaded = exporting();
  std::optional<CheckpointDirectory> of_run(std::in_place, directory(), KeepPolicy{}, "test");
  RunExports exports(loaded.config, {}, [](const ExportEvent&) {});
  for (int i = 0; i < 2; ++i) exports.add(saved(2), of_run);
  EXPECT_EQ(exports.pending(), 1U);
  while (exports.pending() > 0) exports.advance(of_run);
  exports.add(saved(2), of_run);
  EXPECT_EQ(exports.pending(), 0U);
  const std::string file = exported("run", 2) + "/mantissa.json";
  std::string earlier = test::read_file(file);  // an earlier version named a convention of values, too
  const std::string none = R"("convention": null)";
  ASSERT_NE(earlier.find(none), std::string::npos);
  test::write_file(file, earlier.replace(earlier.find(none), none.size(), R"("convention": "compressed-tensors")"));
  exports.add(saved(2), of_run);
  EXPECT_EQ(exports.pending(), 0U);
  for (const int64_t other : {1, 3}) exports.add({.path = checkpoint("run", 2), .hash = saved(other).hash}, of_run);
  EXPECT_EQ(exports.pending(), 2U) << "other states of this step";
}

// The files there may hold anything: the export is replaced, and the run goes on.
TEST_F(ExportsAskedFor, OneWhoseMantissaJsonCannotBeReadIsMadeAgain) {
  const std::string file = exported("run", 2) + "/mantissa.json";
  made(1, {saved(2)});
  const std::string good = test::read_file(file);
  for (const std::string bad : {"", "{", "{}", R"({"format_version": 2})", "a folder"}) {
    std::filesystem::remove(file);
    bad == "a folder" ? void(std::filesystem::create_directory(file)) : test::write_file(file, bad);
    const std::vector<ExportEvent> events = made(2, {saved(2)});
    ASSERT_EQ(events.size(), 1U) << bad;
    EXPECT_EQ(events[0].problem, "") << bad;
    EXPECT_EQ(test::read_file(file), good) << bad;
  }
}

TEST_F(ExportsAskedFor, OneOfOtherOptionsIsMadeAgain) {
  const auto again = [&](const std::string& options) {
    run_on(kAlone, "run", {"checkpoint.export=" + options, "checkpoint.keep_latest=9", "checkpoint.resume=auto", "training.steps=3"});
    return files_of(exported("run", 3));
  };
  const ExportOptions fp32{.dtype = ExportDtype::fp32};
  expect_same_files(again("{}"), files_from(checkpoint("run", 3), "automatic", {}));
  expect_same_files(again(R"({"dtype": "fp32"})"), files_from(checkpoint("run", 3), "fp32", fp32));
  const auto before = std::filesystem::last_write_time(exported("run", 3));
  expect_same_files(again(R"({"dtype": "fp32"})"), files_from(checkpoint("run", 3), "fp32 again", fp32));
  EXPECT_EQ(std::filesystem::last_write_time(exported("run", 3)), before) << "which was there";
}

// The policy would delete the checkpoint if it did not wait for the export.
TEST_F(ExportsAskedFor, KeepTheirCheckpoint) {
  const LoadedConfig loaded = exporting();
  std::optional<CheckpointDirectory> of_run(std::in_place, directory(), KeepPolicy{.latest = 2}, "test");
  RunExports exports(loaded.config, {}, [](const ExportEvent&) {});
  for (const int64_t step : {1, 2}) exports.add(saved(step), of_run);
  for (int64_t step = 11; step <= 13; ++step) of_run->save(test::State(step).content());
  for (const int64_t step : {1, 2}) EXPECT_TRUE(std::filesystem::exists(checkpoint("run", step)));
  while (exports.pending() > 0) exports.advance(of_run);
  for (const int64_t step : {1, 2}) EXPECT_FALSE(std::filesystem::exists(checkpoint("run", step)));
  EXPECT_THAT(exports_of(run_folder("run")), IsEmpty()) << "which go with their checkpoints";
}

// A checkpoint of several chunks, each with a checksum of its own: a rank may read none of a chunk that another finds damaged.
class ExportsOfChunks : public ExportsAskedFor {
 protected:
  ExportsOfChunks() : ExportsAskedFor({"model.hidden_size=256", "model.intermediate_size=2048"}) {}

  std::string shard() const { return checkpoint("run", 2) + "/shard-00000.safetensors"; }
  int64_t first_byte(const std::string& tensor) const {
    return test::header_bytes(shard()) + CheckpointReader(checkpoint("run", 2)).tensor(tensor).pieces.at(0).offset;
  }
  // The parts, out of those that two ranks write, that cannot be written.
  std::vector<int> refused_parts() const {
    std::vector<int> refused;
    for (const int part : {0, 1}) {
      const test::TemporaryFolder folder;
      ModelExport model(checkpoint("run", 2), {}, make_backend("cpu"));
      model.begin(folder.path());
      if (test::error_code_of([&] { model.write(folder.path(), part, 2); }) == ExitCode::data) refused.push_back(part);
    }
    return refused;
  }
};

// The export fails whichever of the ranks it is; the other has written its part by then.
TEST_F(ExportsOfChunks, ADamagedByteThatOneRankReadsFailsTheExport) {
  const SavedCheckpoint second = saved(2), third = saved(3);
  const std::vector<std::string> read_by = {"master.layers.0.mlp.gate_up.weight", "master.layers.1.mlp.down.weight"};
  for (int rank = 0; rank < 2; ++rank) {
    const int64_t byte = first_byte(read_by[static_cast<size_t>(rank)]);
    test::flip_byte(shard(), byte);
    EXPECT_THAT(refused_parts(), ElementsAre(rank)) << "what this test is about";
    const std::vector<ExportEvent> events = made(2, {second, third});
    test::flip_byte(shard(), byte);
    ASSERT_EQ(events.size(), 2U);
    EXPECT_THAT(events[0].problem, HasSubstr("is damaged"));
    EXPECT_EQ(events[1].problem, "") << "the next one is made";
    EXPECT_THAT(exports_of(run_folder("run")), ElementsAre("step-00000003"));
    std::filesystem::remove_all(exported("run", 3));
  }
}

// A byte of the part that the last rank compares changes when all ranks have read back what they wrote.
TEST_F(ExportsAskedFor, EachRankComparesAPart) {
  const LoadedConfig loaded = exporting();
  const SavedCheckpoint second = saved(2);
  const std::string tensor = "model.layers.1.mlp.down_proj.weight";
  const auto flip = [&] {
    for (const std::string& name : exports_of(run_folder("run"))) {
      const std::filesystem::path folder = run_folder("run") + "/exports/" + name;
      if (!std::filesystem::is_directory(folder)) continue;
      const SafetensorsFolder weights(folder);
      const SafetensorsEntry* const entry = weights.find(tensor);
      ASSERT_NE(entry, nullptr);
      test::flip_byte(folder / "model.safetensors", entry->begin);
    }
  };
  std::string problem;
  const auto errors = test::run_ranks(2, [&](const Communicator& world) {
    const test::TemporaryFolder folder;
    ModelExport model(second.path, {}, make_backend("cpu"));
    model.begin(folder.path());
    int64_t pieces = 0;
    model.write(folder.path(), world.rank(), 2, [&pieces] { ++pieces; });
    std::optional<CheckpointDirectory> of_run;
    if (world.rank() == 0) of_run.emplace(directory(), KeepPolicy{}, "test");
    RunExports exports(loaded.config, world, [&](const ExportEvent& event) {
      if (world.rank() == 0) problem = event.problem;
    });
    exports.add(second, of_run);
    while (exports.progress() < pieces) std::this_thread::yield();
    await_all(world);
    if (world.rank() == 0) flip();
    await_all(world);
    while (exports.pending() > 0) exports.advance(of_run);
  });
  EXPECT_THAT(errors, ::testing::Each(IsEmpty()));
  EXPECT_THAT(problem, HasSubstr("what was written is not what was to be: " + tensor + "["));
  EXPECT_THAT(exports_of(run_folder("run")), IsEmpty());
}

// They are of another step than the export that comes next.
TEST_F(ExportsAskedFor, DeleteWhatAKilledProcessLeftOfOthers) {
  std::filesystem::create_directories(run_folder("run") + "/exports");
  const int status = test::wait_for(test::start_child([&] {
    PendingFolder pending(exported("run", 1));
    return ::raise(SIGKILL);
  }));
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(exports_of(run_folder("run")).size(), 2U) << "the folder and its lock";
  made(1, {saved(2)});
  EXPECT_THAT(exports_of(run_folder("run")), ElementsAre("step-00000002"));
}

// The next one may need its room.
TEST_F(ExportsAskedFor, AnExportWithoutCheckpointGoesBeforeTheNextIsMade) {
  made(1, {saved(1)});
  const LoadedConfig loaded = exporting();
  std::optional<CheckpointDirectory> of_run(std::in_place, directory(), KeepPolicy{}, "test");
  std::filesystem::remove_all(checkpoint("run", 1));
  RunExports exports(loaded.config, {}, [](const ExportEvent&) {});
  exports.add(saved(2), of_run);
  EXPECT_FALSE(exports_of(run_folder("run")).contains("step-00000001"));
}

// A disk that is gone for a moment looks like a folder without checkpoints.
TEST_F(ExportsAskedFor, StayWhereNoCheckpointIsSeen) {
  made(1, {saved(1), saved(2), saved(3)});
  const LoadedConfig loaded = exporting();
  std::optional<CheckpointDirectory> of_run(std::in_place, directory(), KeepPolicy{}, "test");
  RunExports exports(loaded.config, {}, [](const ExportEvent&) {});
  exports.add({.path = checkpoint("run", 3), .hash = saved(2).hash}, of_run);  // another state
  std::filesystem::rename(directory(), directory() + "-away");
  while (exports.pending() > 0) exports.advance(of_run);
  EXPECT_THAT(exports_of(run_folder("run")), ::testing::IsSupersetOf({"step-00000001", "step-00000002"}));
  std::filesystem::rename(directory() + "-away", directory());
}

TEST_F(ExportsAskedFor, FailAsLongAsNoOtherTryMakesThemAndTheirCheckpointIsThere) {
  const LoadedConfig loaded = exporting();
  std::optional<CheckpointDirectory> of_run(std::in_place, directory(), KeepPolicy{}, "test");
  RunExports exports(loaded.config, {}, [](const ExportEvent&) {});
  const auto try_of = [&](const SavedCheckpoint& checkpoint) {
    exports.add(checkpoint, of_run);
    while (exports.pending() > 0) exports.advance(of_run);
    std::vector<int64_t> failed;
    for (const auto& [step, problem] : exports.failed(of_run)) {
      EXPECT_THAT(problem, HasSubstr("was replaced before it was exported"));
      failed.push_back(step);
    }
    return failed;
  };
  EXPECT_THAT(try_of({.path = checkpoint("run", 2), .hash = saved(3).hash}), ElementsAre(2));
  EXPECT_THAT(try_of({.path = checkpoint("run", 1), .hash = saved(3).hash}), ElementsAre(1, 2));
  EXPECT_THAT(try_of(saved(3)), ElementsAre(1, 2)) << "the newest says nothing of the others";
  EXPECT_THAT(try_of(saved(2)), ElementsAre(1));
  std::filesystem::remove_all(checkpoint("run", 1));
  EXPECT_THAT(try_of(saved(3)), IsEmpty()) << "nobody waits for it any more";
  EXPECT_EQ(exports.failures(), 2);
}

TEST_F(ExportsAskedFor, AResumedRunMakesThoseOfAsManyAsItKeeps) {
  const LoadedConfig loaded = exporting();  // keeps two
  std::optional<CheckpointDirectory> of_run(std::in_place, directory(), KeepPolicy{}, "test");
  RunExports exports(loaded.config, {}, [](const ExportEvent&) {});
  exports.add_missing(of_run);
  while (exports.pending() > 0) exports.advance(of_run);
  EXPECT_THAT(exports_of(run_folder("run")), ElementsAre("step-00000002", "step-00000003"));
}

// A damaged checkpoint takes no place among them.
TEST_F(ExportsAskedFor, AResumedRunMakesNoneOfADamagedCheckpoint) {
  const LoadedConfig loaded = exporting();  // keeps two
  std::optional<CheckpointDirectory> of_run(std::in_place, directory(), KeepPolicy{}, "test");
  test::flip_byte(checkpoint("run", 3) + "/manifest.json", 5);
  RunExports exports(loaded.config, {}, [](const ExportEvent&) {});
  exports.add_missing(of_run);
  EXPECT_EQ(exports.pending(), 2U);
  while (exports.pending() > 0) exports.advance(of_run);
  EXPECT_EQ(exports.failures(), 0);
  EXPECT_THAT(exports_of(run_folder("run")), ElementsAre("step-00000001", "step-00000002"));
}

TEST_F(ExportsAskedFor, ACheckpointThatWasReplacedIsNotExported) {
  const std::vector<ExportEvent> events = made(1, {{.path = checkpoint("run", 2), .hash = saved(3).hash}});
  ASSERT_EQ(events.size(), 1U);
  EXPECT_THAT(events[0].problem, HasSubstr("was replaced before it was exported"));
}

// A kill after a checkpoint was committed leaves it without an export.
TEST_F(ExportsAskedFor, AResumedRunMakesWhatIsMissing) {
  std::vector<std::string> more = {"checkpoint.export={}", "checkpoint.keep_latest=9", "checkpoint.resume=auto", "training.steps=4"};
  EXPECT_EQ(run_on(kAlone, "run", more).summary.exit, ExitCode::ok);
  EXPECT_THAT(exports_of(run_folder("run")), ElementsAre("step-00000001", "step-00000002", "step-00000003", "step-00000004"));
  EXPECT_THAT(test::read_file(run_folder("run") + "/metrics.jsonl"), HasSubstr("{\"type\":\"export\""));
}

}  // namespace mantissa::pending_exports_test
