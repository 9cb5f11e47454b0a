// What reaches the terminal: nothing that controls it, and nothing once its reader is gone.
#include <gmock/gmock.h>

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
      "import subprocess, sys, time\n"
      "started = [(n, subprocess.Popen(sys.argv[1:] + [f\"head -c {n} /dev/zero | tr '\\\\0' x\"], stdout=subprocess.PIPE))"
      " for n in (100000, 300000)]\n"
      "time.sleep(4)\n"
      "sys.exit(any(p.stdout.read().count(b'x') != n for n, p in started))";
  const auto run = test::run_process({"python3", "-c", program, MANTISSA_BINARY, "launch", "--", "sh", "-c"}, folder_.path());
  EXPECT_EQ(run.exit_code, 0) << run.errors;
}

}  // namespace mantissa::terminal_test
