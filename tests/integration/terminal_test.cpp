// Output that reaches the terminal: nothing that controls it, and nothing once its reader is gone.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "process.h"
#include "training.h"

namespace mantissa::terminal_test {

using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;

const std::string kEvil = "evil\x1b[2J\nerror: forged";

class Terminal : public test::TrainingTest {
 protected:
  Terminal() {
    test::write_file(folder_ / "run.json", effective_config(config("run", {"training.steps=2", "data.tokenizer=byte"}).config));
  }

  test::ProcessResult mantissa(const Words& words) const { return test::run_mantissa(words, folder_.path()); }

  static void expect_harmless(const test::ProcessResult& run, int exit_code) {
    EXPECT_EQ(run.exit_code, exit_code) << run.errors;
    EXPECT_THAT(run.output + run.errors, HasSubstr("evil\\x1b[2J"));
    EXPECT_THAT(run.output + run.errors, Not(HasSubstr("\x1b")));
    EXPECT_THAT("\n" + run.output + run.errors, Not(HasSubstr("\nerror: forged")));
  }
};

// All errors are printed at one place.
TEST_F(Terminal, NamesInErrorsAndOriginsOfKeysAreEscaped) {
  for (const Words& words : {Words{kEvil},
                             {"train", kEvil},
                             {"eval", kEvil},
                             {"train", "run.json", kEvil},
                             {"config", "check", "run.json", "--set", "optimizer.lr=-1 " + kEvil}})
    expect_harmless(mantissa(words), 2);
  const auto checked = mantissa({"config", "check", "run.json", "--set", "checkpoint.dir=" + kEvil});
  EXPECT_EQ(checked.exit_code, 0) << checked.errors;
  EXPECT_THAT(checked.output, HasSubstr("// --set checkpoint.dir=evil\\x1b[2J\\x0aerror: forged\n"));
  EXPECT_THAT(checked.output, Not(HasSubstr("\x1b")));
  test::write_file(folder_ / kEvil.substr(0, 12), "{\"optimizer\": {\"lr\": 2e-3}}");
  expect_harmless(mantissa({"config", "check", "run.json", "--set-file", kEvil.substr(0, 12)}), 0);
}

TEST_F(Terminal, NamesInWhatIsPrintedAreEscaped) {
  const std::string folder = folder_ / kEvil.substr(0, 12), validation = folder + "-data";
  test::write_file(validation, test::second_order_text(500));
  for (const Words& words :
       {Words{"train", "run.json", "--set", "logging.dir=" + folder, "--set", "checkpoint.dir=" + folder + "/checkpoints", "--set",
              "data.path=null", "--set", "data.train.0.path=text.txt", "--set", "data.valid.0.path=text.txt", "--set",
              "data.valid.1.path=" + validation},
        {"eval", folder},
        {"verify", folder},
        {"inspect", folder + "/checkpoints/step-00000002"},
        {"inspect", validation},
        {"report", folder, "--output", folder + ".html"},
        {"tokenize", "text.txt", "--output", folder + "-out"}})
    expect_harmless(mantissa(words), 0);
}

// Its standard output is a pipe that nobody reads any more, and SIGPIPE is ignored, as Python leaves it to its children.
class ReaderThatWentAway : public Terminal {
 protected:
  test::ProcessResult unread(const Words& arguments) const {
    const std::string program =
        "import os, sys; r, w = os.pipe(); os.dup2(w, 1); os.close(r); os.close(w); os.execv(sys.argv[1], sys.argv[1:])";
    Words words = {"python3", "-c", program, MANTISSA_BINARY};
    words.insert(words.end(), arguments.begin(), arguments.end());
    return test::run_process(words, folder_.path());
  }
};

TEST_F(ReaderThatWentAway, EndsACommandWithoutAWordAndLeavesItsFilesWhole) {
  run("run", {"training.steps=1", "data.tokenizer=byte"});
  for (const Words& words : {Words{"config", "schema"},
                             {"eval", run_folder("run")},
                             {"doctor"},
                             {"--help"},
                             {"tokenize", "--tokenizer", "char", "text.txt", "--output", "out"}}) {
    const auto run = unread(words);
    EXPECT_EQ(run.exit_code, 128 + SIGPIPE) << words.front();
    EXPECT_EQ(run.errors, "") << words.front();
  }
  for (const char* const name : {"out.bin", "out.idx", "out.tokenizer.json"}) EXPECT_TRUE(std::filesystem::exists(folder_ / name)) << name;
}

TEST_F(ReaderThatWentAway, DoesNotStopTraining) {
  const auto run = unread({"train", "run.json"});
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_EQ(list_checkpoints(run_folder("run") + "/checkpoints").size(), 1U);
}

TEST_F(ReaderThatWentAway, LosesNothingThatALauncherReports) {
  const auto run = unread({"launch", "--", "sh", "-c", "echo a; echo b"});
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(run.errors, "");
}

// Its standard output and errors are a small pipe that somebody holds open and does not read.
class ReaderThatDoesNotRead : public Terminal {
 protected:
  static Words unread(const Words& arguments) {
    const std::string program =
        "import fcntl, os, sys; r, w = os.pipe(); fcntl.fcntl(w, 1031, 4096); os.set_inheritable(r, True); os.dup2(w, 1); os.dup2(w, 2); "
        "os.close(w); os.execv(sys.argv[1], sys.argv[1:])";  // 1031: F_SETPIPE_SZ
    Words words = {"python3", "-c", program, MANTISSA_BINARY};
    words.insert(words.end(), arguments.begin(), arguments.end());
    return words;
  }

  // Reads a pipe that has a name, and counts its letters x.
  class LateReader {
   public:
    explicit LateReader(std::string path) : path_(std::move(path)) {
      EXPECT_EQ(::mkfifo(path_.c_str(), 0600), 0);
      reading_ = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
      EXPECT_GE(reading_, 0);
    }
    ~LateReader() { ::close(reading_); }
    LateReader(const LateReader&) = delete;
    LateReader& operator=(const LateReader&) = delete;

    const std::string& path() const { return path_; }
    ssize_t read() {
      const ssize_t got = ::read(reading_, block_.data(), block_.size());
      if (got > 0) letters_ += std::count(block_.data(), block_.data() + got, 'x');
      return got;
    }
    int64_t letters_to_the_end() {
      EXPECT_TRUE(test::eventually([&] { return read() == 0; })) << "the end of the file";
      return letters_;
    }

   private:
    std::string path_;
    int reading_ = -1;
    int64_t letters_ = 0;
    std::array<char, 65536> block_{};
  };
};

TEST_F(ReaderThatDoesNotRead, DoesNotHoldTraining) {
  const auto run = test::run_process(unread({"train", "run.json", "--set", "training.steps=400"}), folder_.path());
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(list_checkpoints(run_folder("run") + "/checkpoints").back().step, 400);
  EXPECT_THAT(test::read_file(run_folder("run") + "/log.txt"), HasSubstr(" lines of output dropped"));
}

TEST_F(ReaderThatDoesNotRead, LetsTheLauncherHandOnSignals) {
  const std::string script = "trap 'exit 75' TERM; head -c 300000 /dev/zero & sleep 0.5; touch ready; while :; do sleep 0.05; done";
  test::BackgroundProcess launcher(unread({"launch", "--", "sh", "-c", script}), folder_.path(), folder_ / "unread.log");
  EXPECT_TRUE(test::eventually([&] { return std::filesystem::exists(folder_ / "ready"); }));
  launcher.send(SIGTERM);
  ASSERT_TRUE(launcher.ends()) << "it waits for a reader, although it was asked to end";
  EXPECT_EQ(launcher.wait(), 75);
}

// The worker waits for the reader, too, or has ended and left what it wrote in its pipe, or has failed, or another process holds its pipe
// open, or the pipe holds more than is read at once and its reader pauses for longer than a second, or only the rest of a line has no room.
TEST_F(ReaderThatDoesNotRead, GetsAllThatALauncherShowsOnceItReads) {
  test::write_file(folder_ / "wide.py", "import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20)\nos.write(1, b'x' * 300000)\n");
  const std::string program =
      "import os, subprocess, sys, time\n"
      "def start(n, script):\n"
      "  return n, subprocess.Popen(sys.argv[1:] + [script], stdout=subprocess.PIPE)\n"
      "def shown(process, pauses):\n"
      "  count = 0\n"
      "  for i in range(pauses):\n"
      "    count += os.read(process.stdout.fileno(), 65536).count(b'x')\n"
      "    time.sleep(1.5)\n"
      "  return count + process.stdout.read().count(b'x')\n"
      "def letters(n): return f\"head -c {n} /dev/zero | tr '\\\\0' x; \"\n"
      "started = [start(300000, 'python3 wide.py'), start(100000, letters(100000)), start(300000, letters(300000)),\n"
      "           start(100000, letters(100000) + 'exit 3'), start(100000, 'setsid sleep 20 & ' + letters(100000)),\n"
      "           start(66000, letters(65000) + 'echo; ' + letters(1000))]\n"
      "time.sleep(4)\n"
      "missing = [n - shown(p, 2 if i == 0 else 0) for i, (n, p) in enumerate(started)]\n"
      "sys.exit(f'missing {missing}, codes {[p.wait() for n, p in started]}')";
  const auto run = test::run_process({"python3", "-c", program, MANTISSA_BINARY, "launch", "--", "sh", "-c"}, folder_.path());
  EXPECT_THAT(run.errors, HasSubstr("missing [0, 0, 0, 0, 0, 0], codes [0, 0, 0, 3, 0, 0]\n"));
}

// The launcher gets no time of its CPU while the second passes that it gives to what a worker leaves behind.
TEST_F(ReaderThatDoesNotRead, GetsAllOfALauncherThatWasStoppedWhenItBeganToRead) {
  LateReader reader(folder_ / "pipe");
  const std::string script = "head -c 120000 /dev/zero | tr '\\0' x; touch ended";
  test::BackgroundProcess launcher({MANTISSA_BINARY, "launch", "--", "sh", "-c", script}, folder_.path(), reader.path());
  EXPECT_TRUE(test::eventually([&] { return std::filesystem::exists(folder_ / "ended") && test::children_of(launcher.pid()).empty(); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it has found that
  launcher.send(SIGSTOP);
  while (reader.read() > 0) continue;
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  launcher.send(SIGCONT);
  EXPECT_EQ(reader.letters_to_the_end(), 120000);
  EXPECT_EQ(launcher.wait(), 0);
}

// A process that outlives its rank writes a moment after that has been waited for, more than the launcher takes while nobody reads. By the
// time somebody does, the second is over that the launcher gives to such a process.
TEST_F(ReaderThatDoesNotRead, GetsAllThatADaemonWroteAfterItsRankHadEnded) {
  LateReader reader(folder_ / "pipe");
  test::write_file(folder_ / "daemon.sh",
                   "x=$(head -c 120000 /dev/zero | tr '\\0' x)\n"
                   "touch ready\n"
                   "while kill -0 $1 2> /dev/null; do :; done\n"
                   "i=0; while [ $i -lt 2000 ]; do i=$((i + 1)); done\n"
                   "printf %s \"$x\"\n"
                   "touch written\n");
  const std::string script = "setsid sh daemon.sh $$ & until [ -e ready ]; do sleep 0.01; done";
  test::BackgroundProcess launcher({MANTISSA_BINARY, "launch", "--", "sh", "-c", script}, folder_.path(), reader.path());
  EXPECT_TRUE(test::eventually([&] { return std::filesystem::exists(folder_ / "written"); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_EQ(reader.letters_to_the_end(), 120000);
  EXPECT_EQ(launcher.wait(), 0);
}

TEST_F(ReaderThatDoesNotRead, LeavesAllOfItInTheLogsOfALauncher) {
  const std::string script = "trap 'exit 75' TERM; head -c 100000 /dev/zero | tr '\\0' x; touch ready; while :; do sleep 0.05; done";
  test::BackgroundProcess launcher(unread({"launch", "--log-dir", "logs", "--", "sh", "-c", script}), folder_.path(),
                                   folder_ / "unread.log");
  EXPECT_TRUE(test::eventually([&] { return std::filesystem::exists(folder_ / "ready"); }));
  launcher.send(SIGTERM);
  ASSERT_TRUE(launcher.ends());
  EXPECT_EQ(launcher.wait(), 75);
  EXPECT_EQ(std::filesystem::file_size(folder_ / "logs/attempt_0/0/stdout.log"), 100000U);
}

// Neither the output nor the log grows beyond a block.
TEST_F(Terminal, AFullDiskDoesNotStopALauncherWhichReportsWhatItLost) {
  const std::string script = "head -c 5000 /dev/zero | tr '\\0' x";
  const Words words = {"sh", "-c",  "ulimit -f 1; exec \"$@\"", "sh", MANTISSA_BINARY, "launch", "--log-dir", "logs", "--", "sh",
                       "-c", script};
  const auto run = test::run_process(words, folder_.path());
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(run.errors,
            "mantissa launch: 1 line of output dropped: File too large\n"
            "mantissa launch: logs/attempt_0/0/stdout.log: does not have all of the output: File too large\n");
}

}  // namespace mantissa::terminal_test
