// What reaches the terminal: nothing that controls it, and nothing once its reader is gone.
#include <gmock/gmock.h>

#include "process.h"
#include "training.h"

namespace mantissa::terminal_test {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string kEvil = "evil\x1b[2J\nerror: forged";

class Terminal : public test::TrainingTest {
 protected:
  Terminal() {
    test::write_file(folder_ / "run.json", effective_config(config("run", {"training.steps=2", "data.tokenizer=byte"}).config));
  }

  test::ProcessResult mantissa(std::vector<std::string> arguments) const {
    return test::run_mantissa(std::move(arguments), folder_.path());
  }

  static void expect_harmless(const test::ProcessResult& run) {
    EXPECT_THAT(run.output + run.errors, HasSubstr("evil\\x1b[2J"));
    EXPECT_THAT(run.output + run.errors, Not(HasSubstr("\x1b")));
    EXPECT_THAT("\n" + run.output + run.errors, Not(HasSubstr("\nerror: forged")));
  }
};

TEST_F(Terminal, NamesInErrorsAreEscaped) {
  for (const std::string command : {"train", "eval", "verify", "inspect", "report", "conformance", "generate"}) {
    const auto run = mantissa({command, kEvil});
    EXPECT_EQ(run.exit_code, 2) << run.errors;
    expect_harmless(run);
  }
  expect_harmless(mantissa({kEvil}));
  expect_harmless(mantissa({"train", "run.json", kEvil}));
}

TEST_F(Terminal, OriginsOfKeysAreEscaped) {
  expect_harmless(mantissa({"config", "check", "run.json", "--set", "optimizer.lr=-1 " + kEvil}));
  const auto checked = mantissa({"config", "check", "run.json", "--set", "checkpoint.dir=" + kEvil});
  EXPECT_EQ(checked.exit_code, 0) << checked.errors;
  EXPECT_THAT(checked.output, HasSubstr("// --set checkpoint.dir=evil\\x1b[2J\\x0aerror: forged\n"));
  EXPECT_THAT(checked.output, Not(HasSubstr("\x1b")));
  test::write_file(folder_ / kEvil.substr(0, 12), "{\"optimizer\": {\"lr\": 2e-3}}");
  expect_harmless(mantissa({"config", "check", "run.json", "--set-file", kEvil.substr(0, 12)}));
}

TEST_F(Terminal, NamesInWhatIsPrintedAreEscaped) {
  const std::string folder = folder_ / kEvil.substr(0, 12);
  const std::string validation = folder + "-data";
  test::write_file(validation, test::second_order_text(500));
  const auto trained =
      mantissa({"train", "run.json", "--set", "logging.dir=" + folder, "--set", "checkpoint.dir=" + folder + "/checkpoints", "--set",
                "data.path=null", "--set", "data.train.0.path=text.txt", "--set", "data.valid.0.path=text.txt", "--set",
                "data.valid.1.path=" + validation});
  EXPECT_EQ(trained.exit_code, 0) << trained.errors;
  expect_harmless(trained);
  for (const std::vector<std::string>& command : {std::vector<std::string>{"eval", folder},
                                                  {"verify", folder},
                                                  {"inspect", folder + "/checkpoints/step-00000002"},
                                                  {"inspect", validation},
                                                  {"report", folder, "--output", folder + ".html"},
                                                  {"tokenize", "text.txt", "--output", folder + "-out"}}) {
    const auto run = mantissa(command);
    EXPECT_EQ(run.exit_code, 0) << command.front() << run.errors;
    expect_harmless(run);
  }
}

// Its standard output is a pipe that nobody reads any more, and SIGPIPE is ignored, as Python leaves it to its children.
class ReaderThatWentAway : public Terminal {
 protected:
  test::ProcessResult unread(const std::vector<std::string>& arguments) const {
    const std::string program =
        "import os, sys; r, w = os.pipe(); os.dup2(w, 1); os.close(r); os.close(w); os.execv(sys.argv[1], sys.argv[1:])";
    std::vector<std::string> words = {"python3", "-c", program, MANTISSA_BINARY};
    words.insert(words.end(), arguments.begin(), arguments.end());
    return test::run_process(words, folder_.path());
  }
};

TEST_F(ReaderThatWentAway, EndsACommandWithoutAWord) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  for (const std::vector<std::string>& command : {std::vector<std::string>{"config", "schema"},
                                                  {"inspect", run_folder("run")},
                                                  {"eval", run_folder("run")},
                                                  {"explain", "run.json"},
                                                  {"doctor"},
                                                  {"--help"}}) {
    const auto run = unread(command);
    EXPECT_EQ(run.exit_code, 128 + SIGPIPE) << command.front();
    EXPECT_EQ(run.errors, "") << command.front();
  }
}

TEST_F(ReaderThatWentAway, DoesNotStopTraining) {
  const auto run = unread({"train", "run.json"});
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_EQ(list_checkpoints(run_folder("run") + "/checkpoints").size(), 1U);
}

TEST_F(ReaderThatWentAway, LeavesTheFilesOfACommandWhole) {
  EXPECT_EQ(unread({"tokenize", "--tokenizer", "char", "text.txt", "--output", "out"}).exit_code, 128 + SIGPIPE);
  for (const char* const name : {"out.bin", "out.idx", "out.tokenizer.json"}) EXPECT_TRUE(std::filesystem::exists(folder_ / name)) << name;
}

// Its standard output and errors are a small pipe that somebody holds open and does not read.
class ReaderThatDoesNotRead : public Terminal {
 protected:
  std::vector<std::string> unread(const std::vector<std::string>& arguments) const {
    const std::string program =
        "import fcntl, os, sys; r, w = os.pipe(); fcntl.fcntl(w, 1031, 4096); os.set_inheritable(r, True); os.dup2(w, 1); os.dup2(w, 2); "
        "os.close(w); os.execv(sys.argv[1], sys.argv[1:])";  // 1031: F_SETPIPE_SZ
    std::vector<std::string> words = {"python3", "-c", program, MANTISSA_BINARY};
    words.insert(words.end(), arguments.begin(), arguments.end());
    return words;
  }
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
  for (int i = 0; i < 6000 && !std::filesystem::exists(folder_ / "ready"); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  launcher.send(SIGTERM);
  EXPECT_EQ(launcher.wait(), 75);
}

// Whether the worker waits for the reader, too, or has ended and left what it wrote in its pipe.
TEST_F(ReaderThatDoesNotRead, GetsAllThatALauncherShowsOnceItReads) {
  const std::string program =
      "import subprocess, sys, time; p = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE); time.sleep(4); "
      "sys.exit(p.stdout.read().count(b'x') != int(sys.argv[1]))";
  for (const std::string bytes : {"100000", "300000"}) {
    const auto run = test::run_process(
        {"python3", "-c", program, bytes, MANTISSA_BINARY, "launch", "--", "sh", "-c", "head -c " + bytes + " /dev/zero | tr '\\0' x"},
        folder_.path());
    EXPECT_EQ(run.exit_code, 0) << bytes << run.errors;
  }
}

}  // namespace mantissa::terminal_test
