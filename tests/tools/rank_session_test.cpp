// Errors of one rank, as they reach the others.
#include "tools/rank_session.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "files.h"

namespace mantissa::rank_session_test {

using ::testing::HasSubstr;
using tools::RankSession;

class RankSessionTest : public ::testing::Test {
 protected:
  struct End {
    int code;
    std::string error;
  };

  // The errors that body throws on each rank, a process of its own; a signal ends it with 128 and more.
  std::vector<End> on_ranks(int world, const std::function<void(int)>& body) const {
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < world; ++rank) {
      const pid_t child = ::fork();
      if (child == 0) ::_exit(run(rank, world, body));
      ranks.push_back(child);
    }
    std::vector<End> ends;
    for (int rank = 0; rank < world; ++rank) {
      int status = 0;
      EXPECT_EQ(::waitpid(ranks[static_cast<size_t>(rank)], &status, 0), ranks[static_cast<size_t>(rank)]);
      const std::filesystem::path error = error_path(rank);
      ends.push_back({.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
                      .error = std::filesystem::exists(error) ? test::read_file(error) : ""});
    }
    return ends;
  }

 private:
  std::filesystem::path error_path(int rank) const { return folder_ / text("error", rank); }

  int run(int rank, int world, const std::function<void(int)>& body) const {
    try {
      Launch launch;
      launch.rank = launch.local_rank = rank;
      launch.world = launch.local_size = world;
      launch.in_order = true;
      launch.job = text("rank_session_test.", ::getppid());
      RankSession session(launch, RunConfig());
      session.run([&] { body(rank); });
    } catch (const Error& error) {
      test::write_file(error_path(rank), error.what());
      return static_cast<int>(error.code());
    }
    return 0;
  }

  test::TemporaryFolder folder_;
};

// UCX may find that a killed rank is gone before its connection to the store ends.
TEST_F(RankSessionTest, TheErrorOfAMessageThatALostRankLeftIsThatOfTheLostRank) {
  const std::vector<End> ends = on_ranks(3, [](int rank) {
    if (rank == 1) fail(ExitCode::peer_lost, "rank 1, receiving from rank 2: Input/output error");
    if (rank == 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    ::raise(SIGKILL);
  });
  EXPECT_EQ(ends[2].code, 128 + SIGKILL);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(ends[static_cast<size_t>(rank)].code, 6);
    EXPECT_THAT(ends[static_cast<size_t>(rank)].error, HasSubstr("closed its connection")) << rank;
    EXPECT_THAT(ends[static_cast<size_t>(rank)].error, HasSubstr("rank 2")) << rank;
  }
}

TEST_F(RankSessionTest, AnotherErrorOfARankIsItsOwn) {
  const std::vector<End> ends = on_ranks(2, [](int rank) {
    if (rank == 1) fail(ExitCode::data, "x.bin: damaged");
  });
  EXPECT_EQ(ends[1].code, 4);
  EXPECT_EQ(ends[1].error, "x.bin: damaged");
  EXPECT_EQ(ends[0].code, 4);
  EXPECT_THAT(ends[0].error, HasSubstr("x.bin: damaged"));
  EXPECT_THAT(ends[0].error, HasSubstr("rank 1"));
}

}  // namespace mantissa::rank_session_test
