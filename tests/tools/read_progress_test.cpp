// Progress lines: the times when they move, and the bytes that commands are said to read, against those that they read.
#include "tools/report/read_progress.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <stdlib.h>
#include <unistd.h>

#include "checkpoint/checkpoint_search.h"
#include "checkpoint/saved_model.h"
#include "hf/export.h"
#include "hf/hf_weights.h"
#include "tool_commands.h"
#include "tools/console.h"
#include "training.h"

namespace mantissa::read_progress_test {

using namespace tools;

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class ReadProgressTest : public test::TrainingTest {
 protected:
  // Large enough that headers, manifests and what a reader keeps do not count.
  CheckpointReader trained(const std::string& recipe) const {
    run("run", {"training.steps=1", "data.tokenizer=byte", "model.hidden_size=256", "model.intermediate_size=16384", "model.num_layers=1",
                "precision.recipe=" + recipe});
    return open_checkpoint(run_folder("run"));
  }

  // Bytes that body() reads over those that it was said to read.
  static double share(int64_t said, const std::function<void()>& body) {
    const int64_t before = bytes_read().value();
    body();
    return static_cast<double>(bytes_read().value() - before) / static_cast<double>(said);
  }
  static void expect_near_one(double share) { EXPECT_NEAR(share, 1.0, 0.1); }
};

TEST_F(ReadProgressTest, CommandsReadAboutWhatTheyAreSaidToRead) {
  for (const char* const recipe : {"high", "mxfp8"}) {
    CheckpointReader reader = trained(recipe);
    const std::string out = folder_ / (std::string("out-") + recipe), in = folder_ / (std::string("in-") + recipe);
    SCOPED_TRACE(recipe);
    expect_near_one(share(bytes_to_verify(reader), [&] {
      reader.verify();
      verify_codes(reader, *make_backend("cpu"));
    }));
    // Its tensors, smaller than a chunk of the checkpoint here, are in another order there: some chunks are read again.
    const double exported =
        share(bytes_to_export(run_folder("run")), [&] { export_model(run_folder("run"), out, {}, make_backend("cpu")); });
    EXPECT_TRUE(0.9 < exported && exported < 1.35) << exported;
    expect_near_one(share(bytes_of_folder(out), [&] { verify_export(out); }));
    ModelExport against(run_folder("run"), {}, make_backend("cpu"));
    HfWeights written(out);
    const double compared =
        share(bytes_to_compare(out, run_folder("run")), [&] { EXPECT_EQ(export_difference(written, against.weights()), std::nullopt); });
    EXPECT_TRUE(0.9 < compared && compared < 1.35) << compared;
    const double again = share(bytes_to_export(out), [&] { export_model(out, in, {}, make_backend("cpu")); });
    EXPECT_TRUE(0.9 < again && again < 1.35) << again;
    std::filesystem::remove_all(run_folder("run"));
  }
}

TEST_F(ReadProgressTest, TokenizeReadsItsTextsAsOftenAsItIsSaidTo) {
  const std::string path = folder_ / "long.txt";
  test::write_file(path, std::string(3000000, 'a'));
  for (const std::string kind : {"byte", "char"}) {
    test::CommandResult result;
    expect_near_one(share(bytes_to_tokenize({path}, kind == "char"), [&] {
      result = test::command_result({"tokenize", path, "--output", folder_ / kind, "--tokenizer", kind});
    }));
    EXPECT_THAT(result.output, HasSubstr("3000000 tokens"));
  }
}

TEST(ReadProgressLine, SaysHowMuchIsReadAndTheTimeLeft) {
  EXPECT_EQ(read_progress_line(25, 100, 4.0), "[######..................] 25% | 12s left");
  EXPECT_EQ(read_progress_line(0, 100, 4.0), "[........................] 0%");
  EXPECT_EQ(progress_bar(0.29), "[######..................] 29%") << "100 * 0.29 is less than 29";
  EXPECT_THAT(read_progress_line(120, 100, 99.0), HasSubstr("] 99% | 1s left")) << "what was to come was estimated";
}

// Standard error while it lives; the other end is read here.
class Errors {
 public:
  // Takes both.
  Errors(int written, int read) : read_(read), before_(::dup(STDERR_FILENO)) {
    ::dup2(written, STDERR_FILENO);
    ::close(written);
  }
  ~Errors() { ::close(read_); }
  Errors(const Errors&) = delete;
  Errors& operator=(const Errors&) = delete;
  // All that was written, at the end.
  std::string take() {
    ::dup2(before_, STDERR_FILENO);
    ::close(before_);
    std::string out;
    char block[4096];
    for (ssize_t got = 0; (got = ::read(read_, block, sizeof block)) > 0;) out.append(block, static_cast<size_t>(got));
    return out;
  }

 private:
  int read_, before_;
};

TEST_F(ReadProgressTest, OnATerminalAloneTheShareIsOfWhatIsReadSinceTheStartAndGoesAwayAtTheEnd) {
  for (const char* const name : {"NO_COLOR", "CI"}) ::unsetenv(name);
  test::write_file(folder_ / "part", std::string(10'000'000, 'a'));
  for (int i = 0; i < 4; ++i) test::read_file(folder_ / "part");
  ::testing::internal::CaptureStderr();
  const ReadProgress without_terminal(100);  // else it would be at 99% below
  ::testing::internal::GetCapturedStderr();
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_TRUE(terminal >= 0 && ::grantpt(terminal) == 0 && ::unlockpt(terminal) == 0);
  Errors errors(::open(::ptsname(terminal), O_RDWR | O_NOCTTY), terminal);
  const int result = with_read_progress(40'000'000, [&] {
    test::read_file(folder_ / "part");
    std::this_thread::sleep_for(std::chrono::milliseconds(2300));
    return 7;
  });
  EXPECT_EQ(result, 7);
  EXPECT_TRUE(draws_progress());
  ::setenv("CI", "1", 1);
  EXPECT_FALSE(draws_progress());
  ::unsetenv("CI");
  const std::string shown = errors.take();
  EXPECT_THAT(shown, StartsWith("\r\x1b[K[######..................] 25% | "));
  EXPECT_THAT(shown, AllOf(EndsWith("\r\x1b[K\r"), Not(HasSubstr("99%"))));
}

TEST(CountProgressLines, SayInALogOrAPipeHowFarACommandIs) {
  const auto said = [](int64_t count, const ProgressWaits& waits, int begun) {
    ::testing::internal::CaptureStderr();
    {
      CountProgress progress("eval", count, waits);
      for (int i = 0; i < begun; ++i) progress.begin_next();
    }
    return ::testing::internal::GetCapturedStderr();
  };
  const ProgressWaits none{.first = 0.0, .next = 0.0};
  EXPECT_EQ(said(4, none, 3), "eval: 25% | 0s left\neval: 50% | 0s left\n");
  EXPECT_EQ(said(4, {.first = 0.0, .next = 60.0}, 4), "eval: 25% | 0s left\n");
  EXPECT_EQ(said(4, {.first = 60.0, .next = 0.0}, 4), "");
  EXPECT_EQ(said(0, none, 4), "") << "of another rank";
}

TEST(ConsoleProgress, MovesBetweenStepLines) {
  ::testing::internal::CaptureStderr();
  {
    Console console(ConsoleMode::progress);
    console.progress_to(1);
    StepEvent event;
    event.step = 1;
    event.steps = 100;
    event.remaining_seconds = 99.0;
    console.progress(event);
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    console.progress_to(50);
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    event.step = 70;
    console.progress(event);
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    console.progress_to(60);
  }
  const std::string drawn = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(drawn, AllOf(HasSubstr("] 1% 1/100 | eta 1m39s"), HasSubstr("] 50% 50/100 | eta 1m3"), Not(HasSubstr("0/100 | eta 0s"))));
  EXPECT_THAT(drawn, AllOf(HasSubstr(" 70/100"), Not(HasSubstr(" 60/100")))) << "never back";
}

// The reader gets the bar of one moment, and not those of all the time in which it did not read.
TEST(ConsoleProgress, DrawsNothingWhileABarWaits) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_NONBLOCK), 0);
  ASSERT_EQ(::fcntl(ends[1], F_SETPIPE_SZ, 4096), 4096);
  const std::string full(4096, 'x');
  ASSERT_EQ(::write(ends[1], full.data(), full.size()), 4096);
  Errors errors(ends[1], ends[0]);
  {
    Console console(ConsoleMode::progress);
    for (int64_t step = 1; step <= 3; ++step) {
      StepEvent event;
      event.step = step;
      event.steps = 100;
      console.progress(event);
      std::this_thread::sleep_for(std::chrono::milliseconds(120));
    }
    std::string read(4096, ' ');
    ASSERT_EQ(::read(ends[0], read.data(), read.size()), 4096);
  }
  EXPECT_THAT(errors.take(), AllOf(HasSubstr(" 1/100"), Not(HasSubstr(" 2/100")), Not(HasSubstr(" 3/100")), EndsWith("\r\x1b[K\r")));
}

}  // namespace mantissa::read_progress_test
