// Progress lines: when they move, and whether what a command is said to read is what it reads.
#include "tools/read_progress.h"

#include <gmock/gmock.h>

#include "mantissa/io/checkpoint_search.h"
#include "mantissa/train/export.h"
#include "mantissa/train/import.h"
#include "tools/command.h"
#include "tools/console.h"
#include "training.h"

namespace mantissa {
namespace {

using namespace tools;

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class ReadProgressTest : public test::TrainingTest {
 protected:
  // Large enough that headers and manifests do not count.
  CheckpointReader trained(const std::string& recipe) const {
    run("run", {"training.steps=1", "data.tokenizer=byte", "model.hidden_size=256", "model.intermediate_size=1024", "model.num_layers=4",
                "precision.recipe=" + recipe});
    return open_checkpoint(run_folder("run"));
  }

  // Bytes that body() reads over those that it was said to read.
  static double share(int64_t said, const std::function<void()>& body) {
    const int64_t before = bytes_read().value();
    body();
    return static_cast<double>(bytes_read().value() - before) / static_cast<double>(said);
  }
  static void expect_near_one(double share, double tolerance = 0.1) { EXPECT_NEAR(share, 1.0, tolerance); }
};

TEST_F(ReadProgressTest, CommandsReadAboutWhatTheyAreSaidToRead) {
  for (const char* const recipe : {"high", "mxfp8"}) {
    CheckpointReader reader = trained(recipe);
    const std::string out = folder_ / (std::string("out-") + recipe), in = folder_ / (std::string("in-") + recipe);
    SCOPED_TRACE(recipe);
    expect_near_one(share(bytes_to_verify(reader), [&] {
      reader.verify();
      verify_codes(reader);
    }));
    CheckpointReader fresh = open_checkpoint(run_folder("run"));
    // Its tensors, smaller than a chunk of the checkpoint here, are in another order there: some chunks are read again.
    expect_near_one(share(bytes_to_export(fresh), [&] { export_model(fresh, out, {}); }), 0.35);
    expect_near_one(share(bytes_of_folder(out), [&] { verify_export(out); }));
    expect_near_one(share(bytes_to_import(out), [&] { import_model(out, in); }));
    std::filesystem::remove_all(run_folder("run"));
  }
}

TEST_F(ReadProgressTest, TokenizeReadsItsTextsAsOftenAsItIsSaidTo) {
  const std::string path = folder_ / "long.txt";
  test::write_file(path, std::string(3000000, 'a'));
  for (const std::string kind : {"byte", "char"}) {
    const Command command = tokenize_command();
    for (const Option& option : command.options) {
      if (option.name == "FILES") std::get<std::vector<std::string>*>(option.target)->push_back(path);
      if (option.name == "--output") *std::get<std::string*>(option.target) = folder_ / kind;
      if (option.name == "--tokenizer") *std::get<std::string*>(option.target) = kind;
    }
    ::testing::internal::CaptureStdout();
    expect_near_one(share(bytes_to_tokenize({path}, kind == "char"), [&] { EXPECT_EQ(command.run(), ExitCode::ok); }));
    EXPECT_THAT(::testing::internal::GetCapturedStdout(), HasSubstr("3000000 tokens"));
  }
}

TEST(ReadProgressLine, SaysHowMuchIsReadAndTheTimeLeft) {
  EXPECT_EQ(read_progress_line(25, 100, 4.0), "[######..................] 25% | 12s left");
  EXPECT_EQ(read_progress_line(0, 100, 4.0), "[........................] 0%");
  EXPECT_THAT(read_progress_line(120, 100, 99.0), HasSubstr("] 99% | 1s left")) << "what was to come was estimated";
}

TEST(ReadProgressLine, NothingIsDrawnWithoutATerminal) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(with_read_progress(100, [] { return 7; }), 7);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), IsEmpty());
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
  }
  const std::string drawn = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(drawn, AllOf(HasSubstr("] 1% 1/100 | eta 1m39s"), HasSubstr("] 50% 50/100 | eta 1m3"), Not(HasSubstr("0/100 | eta 0s"))));
}

}  // namespace
}  // namespace mantissa
