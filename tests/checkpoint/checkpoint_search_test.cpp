// The checkpoint that a path stands for, and the search for the newest good one.
#include <gmock/gmock.h>

#include "checkpoint_testing.h"

namespace mantissa::test::checkpoint_search_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---- loading

TEST_F(CheckpointTest, AFolderWithoutCheckpointsIsAFreshStart) {
  EXPECT_EQ(newest(), std::nullopt);
  open_directory(folder);
  EXPECT_EQ(newest(), std::nullopt);
}

TEST_F(CheckpointTest, ADamagedNewestIsPassedOverWithALineAndAllDamagedAreNoFreshStart) {
  CheckpointDirectory directory = open_directory(folder);
  for (int64_t step = 1; step <= 3; ++step) directory.save(State(step).content());
  flip_byte(checkpoints() / "step-00000003/shard-00000.safetensors", 4000);  // sizes, header and manifest still agree
  EXPECT_EQ(newest(), 2);
  EXPECT_THAT(log(), HasSubstr("step-00000003/shard-00000.safetensors: chunk 0 (bytes 0 to 8000) is damaged"));
  std::filesystem::remove(checkpoints() / "step-00000001/manifest.json");
  std::filesystem::remove_all(checkpoints() / "step-00000002");
  std::filesystem::remove_all(checkpoints() / "step-00000003");
  EXPECT_EQ(error_code_of([&] { newest(); }), ExitCode::data);
  EXPECT_THAT(log(), HasSubstr("step-00000003: there is no such checkpoint folder"));
}

// A run goes on between the listing of its checkpoints and their reading, and keeps its newest ones.
TEST_F(CheckpointTest, OnesThatWereDeletedMeanwhileAreLookedForAgain) {
  class GoesOn : public SearchTogether {
   public:
    explicit GoesOn(CheckpointDirectory& directory) : directory_(directory) {}
    std::vector<CheckpointCandidate> first_of(const std::vector<CheckpointCandidate>& own) const override {
      for (int saved = 0; next_ <= 4 && saved < 2; ++saved) directory_.save(State(next_++).content());
      return own;
    }

   private:
    CheckpointDirectory& directory_;
    mutable int64_t next_ = 3;
  };
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  for (int64_t step = 1; step <= 2; ++step) directory.save(State(step).content());
  const auto loaded = load_newest(
      checkpoints(), [](CheckpointReader&) {}, GoesOn(directory));
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->step, 4);
}

TEST_F(CheckpointTest, AFolderCalledLatestIsSetAside) {
  CheckpointDirectory directory = open_directory(folder);
  directory.save(State(1).content());
  std::filesystem::remove(checkpoints() / "latest");
  std::filesystem::create_directory(checkpoints() / "latest");
  const auto loaded = load_newest(checkpoints(), [](CheckpointReader&) {});
  ASSERT_TRUE(loaded);
  directory.adopt(*loaded);
  EXPECT_TRUE(std::filesystem::is_regular_file(checkpoints() / "latest"));
  EXPECT_EQ(newest(), 1);
  std::filesystem::remove(checkpoints() / "latest");
  std::filesystem::create_directory(checkpoints() / "latest");
  directory.save(State(2).content());
  EXPECT_EQ(newest(), 2);
  EXPECT_THAT(log(), HasSubstr("latest: set aside as .bad-latest-"));
}

TEST_F(CheckpointTest, ABrokenLatestFileIsNotNeeded) {
  CheckpointDirectory directory = open_directory(folder);
  for (int64_t step = 1; step <= 2; ++step) directory.save(State(step).content());
  const std::string good = read_file(checkpoints() / "latest");
  for (const std::string& bad : {std::string(), std::string("\n"), good.substr(0, 20), "../../etc " + good.substr(14),
                                 std::string(1000, 'x'), std::string("step-00000099 0123456789abcdef\n")}) {
    write_file(checkpoints() / "latest", bad);
    EXPECT_EQ(newest(), 2) << bad;
  }
  std::filesystem::remove(checkpoints() / "latest");
  EXPECT_EQ(newest(), 2);
}

TEST_F(CheckpointTest, TheDamagedLatestIsTriedOnceAndOtherErrorsOfTheLoaderPassThrough) {
  CheckpointDirectory directory = open_directory(folder);
  for (int64_t step = 1; step <= 2; ++step) directory.save(State(step).content());
  write_file(checkpoints() / "step-00000002/manifest.json", "{");
  EXPECT_EQ(newest(), 1);
  const std::string lines = log();
  EXPECT_NE(lines.find("checkpoint passed over"), std::string::npos);
  EXPECT_EQ(lines.find("checkpoint passed over"), lines.rfind("checkpoint passed over")) << lines;
  const auto load = [](CheckpointReader&) { fail(ExitCode::data, "the data changed"); };
  EXPECT_STREQ(error_of([&] { load_newest(checkpoints(), load); }).what(), "the data changed");
}

TEST_F(CheckpointTest, APathIsResolvedToTheCheckpointItNames) {
  CheckpointDirectory directory = open_directory(folder);
  directory.save(State(1).content());
  directory.save(State(2).content());
  for (const char* name : {"checkpoints/step-00000001", "checkpoints/step-00000001/"})
    EXPECT_EQ(open_checkpoint(folder / name).directory(), checkpoints() / "step-00000001") << name;
  for (const char* name : {"checkpoints", "checkpoints/", "checkpoints/latest", ""})  // the last as a run folder
    EXPECT_EQ(open_checkpoint(folder / name).directory(), checkpoints() / "step-00000002") << name;
  EXPECT_EQ(error_code_of([&] { open_checkpoint(folder / "missing"); }), ExitCode::usage);
  std::filesystem::create_directory(folder / "empty");
  EXPECT_EQ(error_code_of([&] { open_checkpoint(folder / "empty"); }), ExitCode::usage);
  write_file(checkpoints() / "latest", "nonsense");
  EXPECT_EQ(error_code_of([&] { open_checkpoint(checkpoints()); }), ExitCode::data);
}

// ---- the best one

TEST_F(CheckpointTest, TheBestIsThatWhichItsFileNamesAndNoOther) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  const auto load = [](CheckpointReader& reader) { reader.verify(); };
  const std::filesystem::path best = checkpoints() / "best";
  EXPECT_THAT(error_of([&] { load_checkpoint(best, load); }).what(), HasSubstr("best: there is no such checkpoint"));
  directory.name_best(directory.save(State(1).content()));
  for (int64_t step = 2; step <= 4; ++step) directory.save(State(step).content());
  EXPECT_THAT(steps_in(checkpoints()), ElementsAre(1, 3, 4)) << "it is kept";
  EXPECT_EQ(load_checkpoint(best, load).step, 1);
  EXPECT_EQ(open_checkpoint(best).manifest().step, 1);
  EXPECT_EQ(newest(), 4) << "a search of the folder does not care";
  directory.name_best(directory.save(State(5).content()));
  EXPECT_THAT(steps_in(checkpoints()), ElementsAre(4, 5)) << "the one before it goes";
  const std::string good = read_file(best);
  write_file(best, "step-00000004 0123456789abcdef\n");
  EXPECT_EQ(error_code_of([&] { load_checkpoint(best, load); }), ExitCode::data) << "another version";
  for (const std::string& bad : {std::string(), std::string("step-00000004")}) {
    write_file(best, bad);
    EXPECT_THAT(error_of([&] { load_checkpoint(best, load); }).what(), HasSubstr("best: is damaged")) << bad;
    EXPECT_EQ(error_code_of([&] { open_checkpoint(best); }), ExitCode::data) << bad;
  }
  write_file(best, good);
  EXPECT_EQ(load_checkpoint(best, load).step, 5);
  flip_byte(checkpoints() / "step-00000005/shard-00000.safetensors", 4000);
  EXPECT_EQ(error_code_of([&] { load_checkpoint(best, load); }), ExitCode::data) << "no other takes its place";
}

TEST_F(CheckpointTest, TheBestIsListedAsItsFileSays) {
  CheckpointDirectory directory = open_directory(folder);
  for (const int64_t step : {1, 2, 3}) {
    const SavedCheckpoint saved = directory.save(State(step).content());
    if (step == 2) directory.name_best(saved);
  }
  const auto listed = [this] { return list_checkpoints(checkpoints()); };
  for (const CheckpointStatus& status : listed()) {
    EXPECT_EQ(status.best, status.step == 2);
    EXPECT_EQ(status.problem, "");
  }
  write_file(checkpoints() / "best", "step-00000002 0123456789abcdef\n");
  EXPECT_TRUE(listed()[1].best);
  EXPECT_THAT(listed()[1].problem, HasSubstr("is not the version that was named")) << "of that name it is another";
}

// Nothing has said yet what the state of the run calls its best.
TEST_F(CheckpointTest, TheBestStaysWhenAFolderIsOpenedAgain) {
  {
    CheckpointDirectory directory = open_directory(folder);
    directory.name_best(directory.save(State(1).content()));
    write_file(checkpoints() / "best.tmp", "step-0000");
  }
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  EXPECT_FALSE(std::filesystem::exists(checkpoints() / "best.tmp")) << "a kill left it";
  for (const int64_t step : {2, 3, 4}) directory.save(State(step).content());
  EXPECT_THAT(steps_in(checkpoints()), ElementsAre(1, 3, 4));
}

TEST_F(CheckpointTest, TheBestIsAdoptedAsTheStateSays) {
  {
    CheckpointDirectory directory = open_directory(folder, {.latest = 9});
    for (int64_t step = 1; step <= 3; ++step) directory.save(State(step).content());
    EXPECT_TRUE(directory.adopt_best(2)) << "a kill came before the file was written";
  }
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  for (int64_t step = 4; step <= 6; ++step) directory.save(State(step).content());
  EXPECT_THAT(steps_in(checkpoints()), ElementsAre(2, 5, 6)) << "the file alone protects it";
  EXPECT_EQ(directory.best().value().path, checkpoints() / "step-00000002");
  EXPECT_FALSE(directory.adopt_best(4)) << "it is gone";
  EXPECT_THAT(log(), HasSubstr("the best checkpoint so far is lost"));
  EXPECT_FALSE(std::filesystem::exists(checkpoints() / "best"));
  EXPECT_TRUE(directory.adopt_best(5));
  EXPECT_FALSE(directory.adopt_best(std::nullopt));
  EXPECT_FALSE(std::filesystem::exists(checkpoints() / "best"));
}

// A run saves a better one, and deletes the one before, between the reading of the file and that of the checkpoint.
TEST_F(CheckpointTest, TheBestThatWasDeletedMeanwhileIsLookedForAgain) {
  class GoesOn : public SearchTogether {
   public:
    explicit GoesOn(CheckpointDirectory& directory) : directory_(directory) {}
    std::vector<CheckpointCandidate> first_of(const std::vector<CheckpointCandidate>& own) const override {
      for (; next_ <= 4; ++next_) directory_.name_best(directory_.save(State(next_).content()));
      return own;
    }

   private:
    CheckpointDirectory& directory_;
    mutable int64_t next_ = 2;
  };
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  directory.name_best(directory.save(State(1).content()));
  const auto load = [](CheckpointReader&) {};
  EXPECT_EQ(load_checkpoint(checkpoints() / "best", load, GoesOn(directory)).step, 4);
}

// ---- the candidates of a folder

class Candidates : public CheckpointTest {
 protected:
  // Steps 1 to 3; `latest` names 3.
  Candidates() {
    CheckpointDirectory directory = open_directory(folder);
    for (int64_t step = 1; step <= 3; ++step) directory.save(State(step).content());
  }
  std::filesystem::path at(int64_t step) const { return checkpoints() / checkpoint_name(step); }
  void replace(int64_t step, int64_t by) const {
    std::filesystem::remove_all(at(step));
    std::filesystem::copy(at(by), at(step));
  }
  void write_latest(int64_t step, const std::string& hash) const {
    write_file(checkpoints() / "latest", checkpoint_name(step) + " " + hash + "\n");
  }
  // The first candidate of the folder is damage that says `reason`, and a search goes on to `next`.
  void expect_damage(const std::string& reason, int64_t next) const {
    for (const std::filesystem::path& path : {checkpoints(), folder.path(), checkpoints() / "latest"}) {
      const Error error = error_of([&] { open_checkpoint(path); });
      EXPECT_EQ(error.code(), ExitCode::data) << path;
      EXPECT_THAT(error.what(), HasSubstr(reason));
    }
    EXPECT_EQ(newest(), next) << reason;
  }
};

TEST_F(Candidates, AreWhatLatestNamesThenThatFolderThenTheOthersFromTheNewest) {
  CheckpointReader two(at(2));
  write_latest(2, two.hash());
  std::vector<std::string> found;
  for (const CheckpointCandidate& candidate : checkpoint_candidates(find_checkpoint(folder.path())))
    found.push_back(candidate.path.filename().string() + " " + std::to_string(*candidate.step) + " " + candidate.hash);
  EXPECT_THAT(found,
              ElementsAre("step-00000002 2 " + two.hash(), "step-00000002 2 ", "step-00000003 3 ", "step-00000002 2 ", "step-00000001 1 "));
}

// Changes are made to the same folder one after the other.
TEST_F(Candidates, TheFirstIsDamageWhenItOrLatestIs) {
  write_latest(2, "0123456789abcdef");
  expect_damage("step-00000002: is not the version that was named (0123456789abcdef)", 2);
  EXPECT_THAT(log(), HasSubstr("checkpoint passed over"));
  EXPECT_EQ(log().find("instead of"), std::string::npos) << "the same folder in another version is no other step: " << log();
  write_file(checkpoints() / "latest", "nonsense");
  expect_damage("latest: is damaged", 3);
  write_latest(3, CheckpointReader(at(3)).hash());
  std::filesystem::resize_file(at(3) / "shard-00000.safetensors", 10);
  expect_damage("has 10 bytes, but the manifest says ", 2);
  EXPECT_THAT(log(), HasSubstr("checkpoints: step 2 is loaded instead of step 3"));
  replace(3, 1);
  expect_damage("step-00000003: holds step 1", 2);
  std::filesystem::remove_all(at(3));
  expect_damage("step-00000003: there is no such checkpoint folder", 2);
  std::filesystem::remove(checkpoints() / "latest");
  EXPECT_EQ(open_checkpoint(folder.path()).manifest().step, 2) << "nothing was published";
  EXPECT_EQ(newest(), 2);
  write_file(checkpoints() / "latest", "nonsense");
  for (int64_t step = 1; step <= 2; ++step) std::filesystem::remove_all(at(step));
  EXPECT_EQ(error_code_of([&] { newest(); }), ExitCode::data) << "there were some";
}

TEST_F(Candidates, AFileThatIsNoModelIsSaidToBeAFile) {
  write_file(folder.path() / "README.md", "text");
  EXPECT_EQ(
      std::string(error_of([&] { open_checkpoint(folder.path() / "README.md"); }).what()),
      (folder / "README.md") + std::string(": is a file, and neither a checkpoint nor a model; name the folder of one, or a GGUF file"));
}

TEST_F(Candidates, ACheckpointThatIsNamedIsNotReplacedByAnother) {
  const auto load = [](CheckpointReader&) {};
  EXPECT_EQ(load_checkpoint(at(1), load).path, at(1));
  replace(2, 1);
  EXPECT_THAT(error_of([&] { load_checkpoint(at(2), load); }).what(), HasSubstr("step-00000002: holds step 1"));
  EXPECT_THAT(error_of([&] { open_checkpoint(at(2)); }).what(), HasSubstr("step-00000002: holds step 1"));
  std::filesystem::rename(at(2), checkpoints() / "best");
  EXPECT_EQ(open_checkpoint(checkpoints() / "best").manifest().step, 1) << "no name of a step, no step to hold";
  EXPECT_EQ(error_code_of([&] { load_checkpoint(folder / "missing", load); }), ExitCode::usage);
}

TEST_F(Candidates, TheListSaysWhatTheSearchWouldFind) {
  const auto problem = [&](size_t i) { return list_checkpoints(checkpoints()).at(i).problem; };
  const auto list = list_checkpoints(checkpoints());
  ASSERT_EQ(list.size(), 3U);
  for (const CheckpointStatus& one : list) {
    EXPECT_EQ(one.problem, "");
    EXPECT_EQ(one.tensors, 2u);
    EXPECT_EQ(one.bytes, 8000);
    EXPECT_EQ(one.latest, &one == &list.back());
  }
  EXPECT_EQ(list[1].samples, 128);
  replace(1, 2);
  write_latest(3, "0123456789abcdef");
  std::filesystem::resize_file(at(2) / "shard-00000.safetensors", 7999);
  EXPECT_THAT(problem(0), HasSubstr("holds step 2"));
  EXPECT_THAT(problem(1), HasSubstr("has 7999 bytes, but the manifest says "));
  EXPECT_THAT(problem(2), HasSubstr("is not the version that was named"));
}

TEST_F(Candidates, AdoptingOneMakesLatestNameIt) {
  CheckpointDirectory directory = open_directory(folder);
  std::filesystem::remove_all(at(3));
  const auto taken = load_newest(checkpoints(), [](CheckpointReader&) {});
  ASSERT_TRUE(taken);
  directory.adopt(*taken);
  EXPECT_EQ(read_file(checkpoints() / "latest"), "step-00000002 " + CheckpointReader(at(2)).hash() + "\n");
  const auto written = std::filesystem::last_write_time(checkpoints() / "latest");
  directory.adopt(*taken);
  EXPECT_EQ(std::filesystem::last_write_time(checkpoints() / "latest"), written) << "it is named already";
  const std::string named = read_file(checkpoints() / "latest");
  write_latest(2, "0123456789abcdef");
  directory.adopt(*taken);
  EXPECT_EQ(read_file(checkpoints() / "latest"), named) << "not this version of it";
}

TEST(CheckpointName, RoundTripsAndRefusesEverythingElse) {
  for (const int64_t step : {int64_t{0}, int64_t{1}, int64_t{99'999'999}, int64_t{100'000'000}, int64_t{999'999'999'999}})
    EXPECT_EQ(checkpoint_step(checkpoint_name(step)), step);
  EXPECT_EQ(checkpoint_name(1000), "step-00001000");
  for (const char* name :
       {"step-1", "step-000000001", "step-0000000a", "step--0000001", "step-99999999999999999999", ".step-00000001", "step-"})
    EXPECT_EQ(checkpoint_step(name), std::nullopt) << name;
}

}  // namespace mantissa::test::checkpoint_search_test
