// Ranks that are killed before all have met, with nobody who ends the others (fault table row 1): they leave with 6, the late ones too.
#include <gmock/gmock.h>

#include <fstream>
#include <set>
#include <sstream>

#include "process.h"
#include "rank_processes.h"

namespace mantissa::rendezvous_test {

using test::RankProcesses;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

// Whether a process has a TCP connection.
bool connected(pid_t pid) {
  std::set<std::string> own;
  std::error_code gone;
  for (const auto& entry : fs::directory_iterator(text("/proc/", pid, "/fd"), gone)) own.insert(fs::read_symlink(entry, gone));
  std::ifstream lines(text("/proc/", pid, "/net/tcp"));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::vector<std::string> fields;
    for (std::string word; words >> word;) fields.push_back(word);
    if (fields.size() > 9 && fields[3] == "01" && own.contains("socket:[" + fields[9] + "]")) return true;
  }
  return false;
}

class RendezvousOfProcesses : public ::testing::Test {
 protected:
  // The last of three ranks begins once a file is there. They meet in this folder, where no other job sweeps what the dead left.
  static std::vector<std::string> words(int rank) {
    const std::string command = "XDG_RUNTIME_DIR=. exec " + std::string(MANTISSA_BINARY) + " bench comm";
    return {"sh", "-c", (rank == 2 ? "while [ ! -e go ]; do sleep 0.05; done; " : "") + command};
  }

  // The two that are there have met, and one of them is killed before the third comes.
  void kill_before_the_last(int victim) {
    RankProcesses run(3, folder_.path(), words);
    for (int i = 0; i < 3000 && !connected(run.pid(1)); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::this_thread::sleep_for(std::chrono::seconds(1));  // for the proof
    ASSERT_FALSE(run.ended(0) || run.ended(1)) << run.errors(0) << run.errors(1);
    run.send(victim, SIGKILL);
    ASSERT_TRUE(run.wait_for({victim}, 30));
    test::write_file(folder_ / "go", "");
    ASSERT_TRUE(run.wait_for_all(60)) << "of 300 s that ranks have to come";
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_EQ(run.code(rank), 6) << run.errors(rank);
      EXPECT_THAT(run.errors(rank), HasSubstr("rank " + std::to_string(victim)));
    }
  }

  test::TemporaryFolder folder_;
};

TEST_F(RendezvousOfProcesses, AKilledRankEndsTheOthers) { kill_before_the_last(1); }

TEST_F(RendezvousOfProcesses, AKilledRank0EndsTheOthers) { kill_before_the_last(0); }

}  // namespace mantissa::rendezvous_test
