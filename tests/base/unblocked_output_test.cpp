// Output goes to a pipe that somebody reads late, slowly or not at all.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>

#include "mantissa/base/log.h"
#include "pipe.h"

namespace mantissa::unblocked_output_test {

std::string lines(int64_t bytes) {
  std::string out(static_cast<size_t>(bytes), 'x');
  for (size_t i = 99; i < out.size(); i += 100) out[i] = '\n';
  return out;
}
constexpr int64_t kMiB = 1 << 20;

TEST(UnblockedOutput, WaitsForAReaderAndHasAllBytes) {
  test::Pipe pipe;
  UnblockedOutput output(pipe.writing());
  EXPECT_EQ(output.seconds_waiting(), 0.0);
  const std::string all = lines(300'000);
  output.write(all);
  EXPECT_TRUE(output.waiting());
  std::string read;
  while (output.waiting()) {
    read += pipe.read_all();
    output.flush();
  }
  EXPECT_EQ(read + pipe.read_all(), all);
  EXPECT_EQ(output.dropped_lines(), 0);
}

// One line may be longer than what is kept of others.
TEST(UnblockedOutput, KeepsALineThatFollowsNothing) {
  test::Pipe pipe;
  UnblockedOutput output(pipe.writing());
  const std::string all = lines(3 * kMiB);
  output.write(all);
  std::string read;
  while (output.waiting()) {
    read += pipe.read_all();
    output.flush();
  }
  EXPECT_EQ(read + pipe.read_all(), all);
  EXPECT_EQ(output.dropped_lines(), 0);
}

TEST(UnblockedOutput, CountsTheLinesThatItDropsBehindAMiB) {
  test::Pipe pipe;
  UnblockedOutput output(pipe.writing());
  const std::string first = lines(pipe.room() + kMiB - 100);
  output.write(first);
  output.write("kept\n" + lines(100));
  EXPECT_EQ(output.dropped_lines(), 0);
  output.write("one\ntwo\n");
  output.write("three\n");
  EXPECT_EQ(output.dropped_lines(), 3);
  EXPECT_EQ(output.error(), 0);
  std::string read;
  while (output.waiting()) {
    read += pipe.read_all();
    output.flush();
  }
  EXPECT_EQ(read + pipe.read_all(), first + "kept\n" + lines(100));
  output.write("four\n");
  EXPECT_EQ(pipe.read_all(), "four\n");
  EXPECT_EQ(output.dropped_lines(), 3);
}

TEST(UnblockedOutput, HasNoMoreForAReaderThatWasGivenUp) {
  test::Pipe pipe;
  UnblockedOutput output(pipe.writing());
  output.write(lines(pipe.room() + 200));
  output.give_up();
  EXPECT_FALSE(output.waiting());
  EXPECT_EQ(output.dropped_lines(), 2);
  pipe.read_all();
  output.write("a\nb\n");
  EXPECT_EQ(pipe.read_all(), "");
  EXPECT_EQ(output.dropped_lines(), 4);
}

TEST(UnblockedOutput, CountsSecondsFromWhenItsReaderLastTookSome) {
  test::Pipe pipe;
  UnblockedOutput output(pipe.writing());
  const auto seconds_of = [&](const auto& action) {
    const auto began = std::chrono::steady_clock::now();
    action();
    const double waiting = output.seconds_waiting();
    EXPECT_LE(waiting, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    return waiting;
  };
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  output.write(lines(pipe.room()));
  EXPECT_EQ(output.seconds_waiting(), 0.0);
  pause();
  seconds_of([&] { output.write(lines(pipe.room() + 100)); });
  pause();
  output.flush();
  EXPECT_GE(output.seconds_waiting(), 0.05) << "nobody took any";
  seconds_of([&] { pipe.read_all(), output.flush(); });
  EXPECT_TRUE(output.waiting());
  pipe.read_all();
  output.flush();
  EXPECT_EQ(output.seconds_waiting(), 0.0);
}

TEST(UnblockedOutput, TellsAFullDiskFromAReaderThatWentAway) {
  const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  UnblockedOutput disk(full);
  disk.write("a\nb\n");
  EXPECT_EQ(disk.error(), ENOSPC);
  EXPECT_EQ(disk.dropped_lines(), 2);
  ::close(full);
  test::Pipe pipe;
  UnblockedOutput gone(pipe.writing());
  pipe.close_reading();
  const auto before = std::signal(SIGPIPE, SIG_IGN);
  gone.write("a\n");
  std::signal(SIGPIPE, before);
  EXPECT_EQ(gone.error(), EPIPE);
  EXPECT_EQ(gone.dropped_lines(), 1);
}

}  // namespace mantissa::unblocked_output_test
