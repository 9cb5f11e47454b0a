// The folder that a run leaves stands for the run: its config.json goes on from the checkpoints beside it, whatever the folder is called by
// now and wherever the command runs.
#include <gmock/gmock.h>

#include "checkpoint_testing.h"
#include "process.h"
#include "training.h"

namespace mantissa::run_folder_test {

namespace fs = std::filesystem;
using test::error_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;

class RunFolder : public test::TrainingTest {
 protected:
  RunFolder() {
    nlohmann::json json = nlohmann::json::parse(effective_config(config("a", {"training.steps=2", "schedule.warmup_steps=1"}).config));
    json["logging"].erase("dir");
    json["checkpoint"].erase("dir");
    test::write_file(folder_ / "c.json", json.dump());
    fs::create_directory(folder_ / "other");
  }

  test::ProcessResult train(Words words, const std::string& directory = ".") const {
    words.insert(words.begin(), "train");
    return test::run_mantissa(words, folder_.path() / directory);
  }
  // Goes on to so many steps, with this file in this directory.
  void expect_continued(const std::string& file, const std::string& directory, int64_t from, int64_t to, Words more = {}) const {
    Words words = {file, "--resume", "--set", text("training.steps=", to)};
    words.insert(words.end(), more.begin(), more.end());
    const auto run = train(words, directory);
    EXPECT_EQ(run.exit_code, 0) << file << ": " << run.errors;
    EXPECT_THAT(run.output, AllOf(HasSubstr(text(" | continues at ", from, " from ")), HasSubstr(text("done | step ", to))));
  }
  std::vector<std::string> runs() const { return test::names_in(folder_ / "runs"); }
};

TEST_F(RunFolder, ItsConfigGoesOnFromTheCheckpointsBesideItFromAnyDirectoryAndUnderAnyName) {
  ASSERT_EQ(train({"c.json"}).exit_code, 0);
  expect_continued("../runs/a/config.json", "other", 2, 3);
  EXPECT_FALSE(fs::exists(folder_ / "other/runs"));
  fs::rename(folder_ / "runs/a", folder_ / "runs/b");
  expect_continued("runs/b/config.json", ".", 3, 4);
  expect_continued("config.json", "runs/b", 4, 5);
  expect_continued("./config.json", "runs/b", 5, 6);
  expect_continued("../config.json", "runs/b/checkpoints", 6, 7);
  EXPECT_THAT(runs(), ElementsAre("b"));
  fs::create_directory_symlink(folder_ / "runs/b", folder_ / "link");
  expect_continued(folder_ / "link/config.json", "other", 7, 8);
  fs::create_directory(folder_ / "disk");
  fs::copy(folder_ / "runs/b", folder_ / "disk/b", fs::copy_options::recursive);
  expect_continued("disk/b/config.json", ".", 8, 9);
  EXPECT_TRUE(fs::exists(folder_ / "disk/b/checkpoints/step-00000009"));
  EXPECT_FALSE(fs::exists(folder_ / "runs/b/checkpoints/step-00000009"));
}

// Metrics and checkpoints stay together, also where one of the folder's keys is given.
TEST_F(RunFolder, ItsConfigStartsAnotherRunUnderAnotherNameOrInAnotherFolder) {
  ASSERT_EQ(train({"c.json"}).exit_code, 0);
  const std::string before = test::read_file(folder_ / "runs/a/config.json");
  const auto used = train({"runs/a/config.json"});
  EXPECT_EQ(used.exit_code, 2);
  EXPECT_THAT(used.errors, HasSubstr("runs/a: holds metrics or checkpoints of an earlier run; continue it with --resume, or start another "
                                     "with --set logging.run_name=a-2\n"));
  for (const auto& [set, folder] : {std::pair{"logging.run_name=a-2", "runs/a-2"}, {"logging.dir=new", "new"}}) {
    const auto other = train({"runs/a/config.json", "--set", set});
    EXPECT_EQ(other.exit_code, 0) << other.errors;
    for (const char* const name : {"metrics.jsonl", "checkpoints/step-00000002"})
      EXPECT_TRUE(fs::exists(folder_.path() / folder / name)) << set << ' ' << name;
  }
  EXPECT_EQ(test::read_file(folder_ / "runs/a/config.json"), before);
  const auto nothing = train({"runs/a/config.json", "--resume", "--set", "logging.dir=third"});
  EXPECT_EQ(nothing.exit_code, 2);
  EXPECT_THAT(nothing.errors, HasSubstr("checkpoint.resume: there is no checkpoint to resume from in " + (folder_ / "third/checkpoints")));
}

TEST_F(RunFolder, CheckpointsThatLieElsewhereAreFoundFromAnyDirectory) {
  ASSERT_EQ(train({"c.json", "--set", "checkpoint.dir=saved/%n"}).exit_code, 0);
  fs::rename(folder_ / "runs/a", folder_ / "runs/b");
  expect_continued("../runs/b/config.json", "other", 2, 3);
  EXPECT_TRUE(fs::exists(folder_ / "saved/a/step-00000003"));
  EXPECT_FALSE(fs::exists(folder_ / "runs/b/checkpoints"));
}

TEST_F(RunFolder, CheckpointsLieInsideOrElsewhereHoweverThePathsAreSpelled) {
  for (const auto& [dir, there, moved] : {std::tuple{"./runs//%n/saved", "runs/a/saved", "runs/b/saved"},
                                          {"runs/x/../%n/saved", "runs/a/saved", "runs/b/saved"},
                                          {"%d/../saved", "runs/saved", "runs/saved"},
                                          {"%d-saved", "runs/a-saved", "runs/a-saved"}}) {
    ASSERT_EQ(train({"c.json", "--set", text("checkpoint.dir=", dir)}).exit_code, 0);
    EXPECT_TRUE(fs::exists(folder_.path() / there / "step-00000002")) << dir;
    fs::rename(folder_ / "runs/a", folder_ / "runs/b");
    expect_continued("../runs/b/config.json", "other", 2, 3);
    EXPECT_TRUE(fs::exists(folder_.path() / moved / "step-00000003")) << dir;
    fs::remove_all(folder_ / "runs");
  }
}

// Only what a configuration says has placeholders, no name that lies above.
TEST_F(RunFolder, NamesOfFoldersAboveAreNoPlaceholders) {
  const std::string above = "100%n%d";
  for (const auto& [dir, there] : {std::pair{"%d/checkpoints", "runs/a/checkpoints"}, {"saved/%%n/%n", "saved/%n/a"}}) {
    ASSERT_EQ(train({"c.json", "--set", text("checkpoint.dir=", dir)}).exit_code, 0);
    fs::create_directory(folder_ / above);
    for (const char* const name : {"runs", "saved"})
      if (fs::exists(folder_ / name)) fs::rename(folder_ / name, folder_.path() / above / name);
    const nlohmann::json moved = {{"directory", folder_ / above}, {"git_revision", ""}};
    test::write_file(folder_.path() / above / "runs/a/run.json", moved.dump());
    expect_continued(above + "/runs/a/config.json", ".", 2, 3);
    expect_continued("a/config.json", above + "/runs", 3, 4);
    EXPECT_TRUE(fs::exists(folder_.path() / above / there / "step-00000004")) << dir;
    EXPECT_THAT(test::names_in(folder_.path() / above / "runs"), ElementsAre("a"));
    fs::remove_all(folder_ / above);
  }
}

// Beside a file of that name which no run wrote there is nothing that it could stand for.
TEST_F(RunFolder, AConfigThatNoRunWroteHasTheFoldersThatItNames) {
  ASSERT_EQ(train({"c.json"}).exit_code, 0);
  for (const auto& [record, text] : {std::pair{"run.json", "{}"}, {"run.json", "{"}, {"run.jsonl", R"({"git_revision": ""})"}}) {
    fs::remove_all(folder_ / "plain");
    fs::create_directory(folder_ / "plain");
    fs::copy_file(folder_ / "runs/a/config.json", folder_ / "plain/config.json");
    test::write_file(folder_ / "plain/" + record, text);
    EXPECT_EQ(load_run_config({.file = folder_ / "plain/config.json"}).config.logging.dir, "runs/a") << record << text;
  }
}

// The path that a run began with has served its purpose.
TEST_F(RunFolder, ARunThatBeganWithACheckpointOfAnotherGoesOnFromItsOwn) {
  ASSERT_EQ(train({"c.json"}).exit_code, 0);
  const Words path = {"--set", "checkpoint.resume=runs/a", "--set", "training.steps=3"};
  ASSERT_EQ(train({"c.json", path[0], path[1], path[2], path[3], "--set", "logging.run_name=b"}).exit_code, 0);
  expect_continued("runs/b/config.json", ".", 3, 4);
  const auto both = train({"runs/b/config.json", "--resume", path[0], path[1]});
  EXPECT_EQ(both.exit_code, 2);
  EXPECT_THAT(both.errors, HasSubstr("checkpoint.resume: names runs/a, but --resume continues this run"));
}

TEST_F(RunFolder, AResumeThatFindsNothingIsAnErrorThatNamesWhereItLooked) {
  const std::string message = "checkpoint.resume: there is no checkpoint to resume from in " + (folder_ / "runs/a/checkpoints");
  for (const Words& words : {Words{"c.json", "--resume"}, {"c.json", "--resume", "--dry-run"}}) {
    const auto run = train(words);
    EXPECT_EQ(run.exit_code, 2);
    EXPECT_THAT(run.errors, HasSubstr(message));
    EXPECT_FALSE(fs::exists(folder_ / "runs"));
  }
  fs::create_directories(folder_ / "runs/a/checkpoints");
  EXPECT_EQ(train({"c.json", "--resume"}).exit_code, 2) << "an empty folder";
  test::write_file(folder_ / "runs/a/checkpoints/latest", "step-00000002 0123456789abcdef\n");
  EXPECT_EQ(train({"c.json", "--resume"}).exit_code, 4) << "there was one";
  fs::remove_all(folder_ / "runs");
  const auto first = train({"c.json", "--set", "checkpoint.resume=auto"});
  EXPECT_EQ(first.exit_code, 0) << first.errors;
  EXPECT_THAT(first.output, HasSubstr(" | starts afresh: no checkpoint in runs/a/checkpoints\n"));
  EXPECT_THAT(train({"c.json", "--set", "checkpoint.resume=auto", "--set", "training.steps=3"}).output,
              AllOf(HasSubstr("continues at 2"), Not(HasSubstr("starts afresh"))));
}

}  // namespace mantissa::run_folder_test
