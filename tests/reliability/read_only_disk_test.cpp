// The real program on a disk that nothing can be written to, whatever file it meets first (fault table row 4): in a mount namespace of its
// own, which is not allowed everywhere.
#include <gmock/gmock.h>

#include <memory>

#include "process.h"
#include "training.h"

namespace mantissa::read_only_disk_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

constexpr const char* kReadOnly = "mount -o remount,ro disk || exit 77; ";
constexpr const char* kFull = "head -c 5000000 /dev/zero > disk/fill 2> /dev/null; ";
constexpr const char* kWithoutInodes = "i=0; while touch disk/fill$i 2> /dev/null; do i=$((i + 1)); done; ";

// A folder with a run, its export and a place for a disk.
class RunBesideADisk : public test::TrainingTest {
 public:
  RunBesideADisk() {
    test::write_file(folder_ / "run.json", effective_config(config("run", {"training.steps=1", "data.tokenizer=byte"}).config));
    std::filesystem::create_directory(folder_ / "disk");
    if (on_disk(kReadOnly, "--version").exit_code == 77) return;
    mounts_ = true;
    const std::vector<std::string> train = {"train", "run.json", "--set", "logging.dir=trained", "--set", "checkpoint.dir=%d/checkpoints"};
    EXPECT_EQ(test::run_mantissa(train, folder_.path()).exit_code, 0);
    EXPECT_EQ(test::run_mantissa({"export", "trained", "--output", "model"}, folder_.path()).exit_code, 0);
  }
  void TestBody() override {}
  bool mounts() const { return mounts_; }

  // "disk" holds an empty folder, one for a run, and a run.
  test::ProcessResult on_disk(const std::string& prepare, const std::string& command) const {
    return test::run_process({"unshare", "-rm", "sh", "-c",
                              "mount -t tmpfs -o size=4m,nr_inodes=60 none disk && mkdir -p disk/empty disk/run/checkpoints || exit 77; "
                              "if [ -d trained ]; then cp -r trained disk; fi; " +
                                  prepare + "exec " MANTISSA_BINARY " " + command},
                             folder_.path());
  }
  std::filesystem::path folder() const { return folder_.path(); }
  std::vector<std::string> files() const {
    std::vector<std::string> out;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_.path())) out.push_back(entry.path().string());
    return out;
  }

 private:
  bool mounts_ = false;
};

// All tests have the same.
class Disk : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { run_ = std::make_unique<RunBesideADisk>(); }
  static void TearDownTestSuite() { run_.reset(); }
  void SetUp() override {
    if (!run_->mounts()) GTEST_SKIP() << "no right to mount a disk";
  }
  static test::ProcessResult on_disk(const std::string& prepare, const std::string& command) { return run_->on_disk(prepare, command); }
  static std::string train(const std::string& logging, const std::string& checkpoints, const std::string& more = "") {
    return "train run.json --set logging.dir=" + logging + " --set checkpoint.dir=" + checkpoints + more;
  }

  static inline std::unique_ptr<RunBesideADisk> run_;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)
};

// Commands that write one thing and end.
const std::vector<std::string> kOutputs = {
    "export trained --output disk/model",
    "export trained --output disk/empty/model",
    "export model --output disk/exported",
    "tokenize text.txt --output disk/tokens --tokenizer byte",
    "tokenize text.txt --output disk/empty/tokens --tokenizer char --format llmc",
    "report trained --output disk/report.html",
    "eval trained --logprobs disk/logprobs.jsonl",
};
const std::string kBench = "bench gemm --json disk/bench.jsonl";  // opens it before it measures

TEST_F(Disk, ThatIsReadOnlyIsOfTheEnvironmentWhateverFileIsMetFirst) {
  std::vector<std::string> commands = {
      train("disk/new", "disk/new/checkpoints"),
      train("disk/empty", "disk/empty"),
      train("disk/run", "disk/run/checkpoints"),
      train("disk/trained", "disk/trained/checkpoints", " --resume --set training.steps=2"),
      train("other", "disk/checkpoints"),
      train("other", "disk/empty"),
      "launch --nproc-per-node 2 " + train("disk/run", "disk/run/checkpoints", " --set parallel.data=2 --set training.grad_accum=1"),
      "launch --log-dir disk/logs doctor",
      "launch --log-dir disk/empty doctor",
      kBench,
  };
  commands.insert(commands.end(), kOutputs.begin(), kOutputs.end());
  const auto expect_refused = [&](const std::string& command) {
    const auto run = on_disk(kReadOnly, command);
    EXPECT_EQ(run.exit_code, 3) << command << run.errors;
    EXPECT_THAT(run.errors, AllOf(HasSubstr("disk/"), HasSubstr("Read-only file system"))) << command;
  };
  const std::vector<std::string> before = run_->files();
  for (const std::string& command : commands) expect_refused(command);
  EXPECT_THAT(run_->files(), UnorderedElementsAreArray(before)) << "refused before it leaves traces elsewhere";
  for (const std::string folder : {"disk/new", "disk/empty"}) {  // behind the lock, which lies elsewhere
    expect_refused(train(folder, "other"));
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(run_->folder() / "other"), {}), 1);
  }
}

TEST_F(Disk, ThatIsReadOnlyIsReadAsAnyOther) {
  const std::vector<std::string> commands = {"eval disk/trained",
                                             "generate disk/trained",
                                             "verify disk/trained",
                                             "inspect disk/trained",
                                             "export disk/trained --output copy",
                                             "report disk/trained --output page.html",
                                             train("tuned", "tuned/checkpoints", " --set checkpoint.init_from=disk/trained")};
  for (const std::string& command : commands) {
    const auto run = on_disk(kReadOnly, command);
    EXPECT_EQ(run.exit_code, 0) << command << run.errors;
  }
}

TEST_F(Disk, ThatIsFullIsAnErrorOfStorageForEveryOutput) {
  for (size_t i = 0; i < kOutputs.size(); ++i) {
    const auto run = on_disk(i % 2 == 0 ? kFull : kWithoutInodes, kOutputs[i]);
    EXPECT_EQ(run.exit_code, 7) << kOutputs[i] << run.errors;
    EXPECT_THAT(run.errors, HasSubstr("disk/")) << kOutputs[i];
  }
  EXPECT_EQ(on_disk(kWithoutInodes, kBench).exit_code, 7);
}

// Nothing is lost yet.
TEST_F(Disk, ThatIsFullBeforeTheFirstStepIsOfTheEnvironment) {
  for (const auto& [full, folder] :
       {std::pair{kFull, "disk/empty"}, {kFull, "disk/trained"}, {kWithoutInodes, "disk/new"}, {kWithoutInodes, "disk/run"}}) {
    const auto run = on_disk(full, train(folder, "%d/checkpoints", " --set checkpoint.resume=auto --set training.steps=2"));
    EXPECT_EQ(run.exit_code, 3) << folder << run.errors;
    EXPECT_THAT(run.errors, AllOf(HasSubstr(folder), HasSubstr(full == kFull ? " bytes, but 0 are free in " : "No space left on device")));
  }
}

// It has room for two checkpoints: the saves of three steps fail, and the last one takes the place of the first.
TEST_F(Disk, ThatIsFullAtTheEndKeepsTheLastState) {
  const std::string command = train("disk/small", "%d/checkpoints", " --set training.steps=30 --set checkpoint.interval=5");
  const auto run = on_disk("rm -r disk/trained && mount -o remount,size=1200k disk || exit 77; " MANTISSA_BINARY " " + command +
                               "; echo code $?; ls disk/small/checkpoints; ",
                           "verify disk/small");
  EXPECT_THAT(run.output, AllOf(HasSubstr("| 3 saves failed\n"), HasSubstr("code 0\nLOCK\nlatest\nstep-00000010\nstep-00000030\n"),
                                HasSubstr("intact: step 30")))
      << run.errors;
  EXPECT_THAT(run.errors, AllOf(HasSubstr("checkpoint.dir: this run keeps up to 4 checkpoints of "), HasSubstr("step-00000005: deleted, because the disk")));
}

}  // namespace mantissa::read_only_disk_test
