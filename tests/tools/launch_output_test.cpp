// A launcher shows and logs the output of its workers, but for errors that it has shown.
#include <gmock/gmock.h>

#include <cerrno>
#include <memory>
#include <vector>

#include "files.h"
#include "pipe.h"
#include "tools/launch/launch_workers.h"

namespace mantissa::launch_output_test {

using tools::ShownErrors;
using tools::WorkerStream;

// Ranks whose standard errors are shown on one pipe.
class LaunchOutput : public ::testing::Test {
 protected:
  explicit LaunchOutput(int ranks = 2) {
    for (int rank = 0; rank < ranks; ++rank) add(text("[rank", rank, "]:"), "");
  }
  void add(const std::string& prefix, const std::string& log) {
    pipes_.push_back(std::make_unique<test::Pipe>());
    streams_.emplace_back(pipes_.back()->release_reading(), &shown_, prefix, log, errors_);
  }
  // Writes it, and shows it before anything else is written.
  void say(size_t rank, const std::string& what) {
    pipes_[rank]->write(what);
    streams_[rank].read();
  }
  std::string shown() const { return out_.read_all(); }

  test::Pipe out_;
  UnblockedOutput shown_{out_.writing()};
  ShownErrors errors_;
  std::vector<std::unique_ptr<test::Pipe>> pipes_;
  std::vector<WorkerStream> streams_;
};

TEST_F(LaunchOutput, AnErrorThatWasHeldBackIsNotShownBeforeALaterOne) {
  say(0, "error: x\n  and more\n");
  say(1, "error: x\n  and more\n");
  EXPECT_EQ(shown(), "[rank0]:error: x\n[rank0]:  and more\n");
  EXPECT_TRUE(streams_[1].repeats());
  say(1, "goes on\nerror: y\n");
  EXPECT_EQ(shown(), "[rank1]:goes on\n[rank1]:error: y\n");
  EXPECT_FALSE(streams_[1].repeats());
  say(1, "error: x\nerror: z\n");
  EXPECT_EQ(shown(), "[rank1]:error: z\n") << "an error may follow another directly";
}

TEST_F(LaunchOutput, ALineOfTwoErrorsIsShownInBoth) {
  say(0, "error: x\n  see z\n");
  say(1, "error: y\n  see z\n");
  EXPECT_EQ(shown(), "[rank0]:error: x\n[rank0]:  see z\n[rank1]:error: y\n[rank1]:  see z\n");
}

// Its last line differs, so the ones that were held back are shown with it: more than a MiB at once.
TEST_F(LaunchOutput, ALongErrorThatTurnsOutToBeAnotherOneIsShownWhole) {
  const std::string begins = "error: x\n" + test::repeated("  " + std::string(2000, 'y') + "\n", 800);
  std::string all;
  for (size_t rank = 0; rank < 2; ++rank) {
    const std::string error = begins + text("  of ", rank, "\n");
    for (size_t at = 0; at < error.size(); at += 32768) {
      say(rank, error.substr(at, 32768));
      while (shown_.waiting()) {
        all += shown();
        shown_.flush();
      }
    }
    all += shown();
  }
  EXPECT_EQ(shown_.dropped_lines(), 0);
  EXPECT_THAT(all, ::testing::HasSubstr("[rank1]:error: x\n[rank1]:  y"));
  EXPECT_THAT(all, ::testing::EndsWith("y\n[rank1]:  of 1\n"));
}

TEST_F(LaunchOutput, TheRestOfAPipeIsWhatWasThereWhenItWasNoted) {
  std::vector<WorkerStream>& streams = streams_;
  streams[0].note_rest();
  EXPECT_FALSE(streams[0].has_rest());
  pipes_[0]->write("abc\n");
  EXPECT_FALSE(streams[0].has_rest()) << "it came later";
  streams[0].note_rest();
  EXPECT_TRUE(streams[0].has_rest());
  pipes_[0]->write("d\n");
  streams[0].read();
  EXPECT_FALSE(streams[0].has_rest());
  EXPECT_EQ(shown(), "[rank0]:abc\n[rank0]:d\n");
  ASSERT_GE(::fcntl(pipes_[0]->writing(), F_SETPIPE_SZ, 1 << 20), 1 << 20) << "more than a stream reads at once";
  pipes_[0]->write(std::string(200'000, 'x'));
  streams[0].note_rest();
  streams[0].read();
  EXPECT_TRUE(streams[0].has_rest());
  pipes_[0]->close_writing();
  for (int i = 0; streams[0].has_rest(); ++i) {
    ASSERT_LT(i, 10);
    streams[0].read();
  }
  streams[0].read();
  EXPECT_FALSE(streams[0].open()) << "behind the rest is the end of the file";
  shown_.give_up();
}

// The launcher takes no more from the worker meanwhile, so that its memory stays bounded.
TEST_F(LaunchOutput, AStreamIsNotReadWhileItsReaderIsLate) {
  say(0, std::string(65'536, 'x'));
  EXPECT_TRUE(shown_.waiting());
  EXPECT_EQ(streams_[1].fd(), -1);
  shown();
  shown_.flush();
  EXPECT_GE(streams_[1].fd(), 0);
}

TEST_F(LaunchOutput, ALogThatCannotBeWrittenIsReportedAndWhatIsShownGoesOn) {
  add("[rank2]:", "/dev/full");
  const test::TemporaryFolder folder;
  add("[rank3]:", folder / "log");
  say(2, "a\n");
  say(2, "b\n");
  say(3, "c\n");
  EXPECT_EQ(shown(), "[rank2]:a\n[rank2]:b\n[rank3]:c\n");
  EXPECT_EQ(streams_[2].log_error(), ENOSPC);
  EXPECT_EQ(streams_[3].log_error(), 0);
  EXPECT_EQ(test::read_file(folder / "log"), "c\n");
}

}  // namespace mantissa::launch_output_test
