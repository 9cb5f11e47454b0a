// Ranks that stop, stick or fail alone: how the job ends on all of them (fault table rows 1, 4, 6, 7, 9, 13, 27).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "process.h"
#include "rank_processes.h"

namespace mantissa::failures_test {

using test::RankProcesses;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

constexpr int kRanks = 3;

class Failures : public ::testing::Test {
 protected:
  Failures() {
    std::string letters;
    for (int i = 0; i < 4000; ++i) letters += "abcdefgh"[(i * i + i / 7) % 8];
    test::write_file(folder_ / "text.txt", letters);
    const nlohmann::json config = {
        {"model",
         {{"hidden_size", 32}, {"num_layers", 1}, {"num_attention_heads", 2}, {"intermediate_size", 48}, {"max_position_embeddings", 16}}},
        {"training", {{"steps", 1000000}, {"seq_len", 16}, {"micro_batch_size", 1}, {"grad_accum", 1}, {"threads", 1}}},
        {"data", {{"path", "text.txt"}, {"tokenizer", "char"}}},
        {"eval", {{"interval", 0}, {"iters", 2}}},
        {"checkpoint", {{"interval", 10}}},
        {"logging", {{"dir", "run"}, {"tensorboard", false}}}};
    test::write_file(folder_ / "run.json", config.dump());
  }

  static std::vector<std::string> words(const std::vector<std::string>& sets) {
    std::vector<std::string> out = {MANTISSA_BINARY, "train", "run.json"};
    for (const std::string& set : sets) out.insert(out.end(), {"--set", set});
    return out;
  }
  std::unique_ptr<RankProcesses> start(const std::vector<std::string>& sets = {}) const {
    return std::make_unique<RankProcesses>(kRanks, folder_.path(), [&](int) { return words(sets); });
  }
  // Settings for a token file that a test can cut.
  std::vector<std::string> token_data() const {
    std::vector<uint16_t> ids(200000);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint16_t>(i % 50);
    test::write_file(folder_ / "tokens.bin", {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(uint16_t)});
    return {"data.path=tokens.bin", "data.tokenizer=null", "data.format=nanogpt", "model.vocab_size=50"};
  }
  bool appears(const std::string& file) const {
    for (int i = 0; i < 6000 && !fs::exists(folder_ / file); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return fs::exists(folder_ / file);
  }
  // No file of this rank grows beyond this.
  static bool limit_files(const RankProcesses& run, int rank, rlim_t bytes) {
    const rlimit value{.rlim_cur = bytes, .rlim_max = RLIM_INFINITY};
    return ::prlimit(run.pid(rank), RLIMIT_FSIZE, &value, nullptr) == 0;
  }
  static void expect_codes(RankProcesses& run, int code, double seconds = 120) {
    EXPECT_TRUE(run.wait_for_all(seconds));
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(run.code(rank), code) << "rank " << rank << ": " << run.errors(rank);
  }

  test::TemporaryFolder folder_;
};

TEST_F(Failures, AStoppedRankEndsTheOthersWithinItsHeartbeatTimeout) {
  for (const int stopped : {0, 1}) {
    fs::remove_all(folder_ / "run");
    const auto run = start({"parallel.heartbeat_timeout_s=4"});
    ASSERT_TRUE(appears("run/checkpoints/step-00000010"));
    run->send(stopped, SIGSTOP);
    std::vector<int> others = {0, 1, 2};
    std::erase(others, stopped);
    ASSERT_TRUE(run->wait_for(others, 20)) << "4 s and what it takes to leave";
    for (const int rank : others) {
      EXPECT_EQ(run->code(rank), 6) << run->errors(rank);
      EXPECT_THAT(run->errors(rank), HasSubstr("rank " + std::to_string(stopped)));
      EXPECT_THAT(run->errors(rank), HasSubstr("sent no heartbeat for 4 s (parallel.heartbeat_timeout_s)"));
      EXPECT_THAT(run->errors(rank), HasSubstr("rank " + std::to_string(rank) + " is at step "));
      EXPECT_THAT(run->errors(rank), HasSubstr("(call "));
      EXPECT_THAT(run->errors(rank), HasSubstr("mantissa("));
    }
    run->send(stopped, SIGCONT);
    EXPECT_TRUE(run->wait_for({stopped}, 20));
    EXPECT_EQ(run->code(stopped), 6) << run->errors(stopped);
  }
}

// The freezer of a cgroup and a machine that was suspended do this, too.
TEST_F(Failures, AJobThatWasStoppedLongerThanTheHeartbeatTimeoutGoesOn) {
  const auto run = start({"parallel.heartbeat_timeout_s=6", "parallel.step_timeout_s=6"});
  ASSERT_TRUE(appears("run/checkpoints/step-00000010"));
  for (const int first : {0, 1}) {  // to go on
    for (int rank = 0; rank < kRanks; ++rank) run->send(rank, SIGSTOP);
    std::this_thread::sleep_for(std::chrono::seconds(10));
    for (int i = 0; i < kRanks; ++i) {
      run->send((first + i) % kRanks, SIGCONT);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    EXPECT_FALSE(run->wait_for({0, 1, 2}, 3)) << run->errors(0) << run->errors(1);
  }
  run->send(1, SIGTERM);
  expect_codes(*run, 75);
}

TEST_F(Failures, ALostRankWasLastSeenAtAStepOfLate) {
  const auto run = start({"parallel.heartbeat_timeout_s=100"});  // a heartbeat for its own sake every 20 s
  ASSERT_TRUE(appears("run/checkpoints/step-00000010"));
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // a step is told a tenth of a second after the last
  run->send(2, SIGKILL);
  ASSERT_TRUE(run->wait_for({0, 1}, 20));
  EXPECT_THAT(run->errors(1), ::testing::ContainsRegex("rank 2 \\(.*closed its connection; last seen at step [1-9][0-9]"));
}

// A pipe in the place of the metrics that nobody reads: the main thread of rank 0 waits in write() for ever, while the others wait for it
// and all heartbeats go on.
TEST_F(Failures, AStuckMainThreadEndsAllRanksWithinTheStepTimeout) {
  fs::create_directory(folder_ / "run");
  ASSERT_EQ(::mkfifo((folder_ / "run/metrics.jsonl").c_str(), 0600), 0);
  const int reader = ::open((folder_ / "run/metrics.jsonl").c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  ::fcntl(reader, F_SETPIPE_SZ, 4096);
  const auto run = start({"parallel.step_timeout_s=5", "checkpoint.interval=0", "checkpoint.resume=auto"});
  expect_codes(*run, 6);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_THAT(run->errors(rank), HasSubstr("no progress for 5 s (parallel.step_timeout_s), at step "));
    EXPECT_THAT(run->errors(rank), HasSubstr("rank " + std::to_string(rank) + " is at step "));
    EXPECT_THAT(run->errors(rank), HasSubstr("(step); its latest collectives: "));
    EXPECT_THAT(run->errors(rank), HasSubstr("mantissa("));
  }
  EXPECT_THAT(run->errors(1), HasSubstr("rank 0 (")) << "as the one that does not go on";
  EXPECT_THAT(run->errors(0), HasSubstr("write")) << "where it is";
  ::close(reader);
}

TEST_F(Failures, DataThatIsCutWhileItIsReadEndsAllRanksWith4) {
  const auto run = start(token_data());
  ASSERT_TRUE(appears("run/checkpoints/step-00000010")) << (run->wait_for_all(1), run->errors(0));
  fs::resize_file(folder_ / "tokens.bin", 2000);
  expect_codes(*run, 4);
  EXPECT_THAT(run->errors(0) + run->errors(1) + run->errors(2), HasSubstr("tokens.bin"));
}

// Nearly always one rank reads beyond the end first; all others end with its code, and often before it.
TEST_F(Failures, TheLauncherNamesTheRankThatFailedFirst) {
  std::vector<std::string> all = words(token_data());
  all.insert(all.end(), {"--set", "training.steps=20000"});
  all.insert(all.begin() + 1, {"launch", "--nproc-per-node", "3", "--"});
  std::thread cutter([&] {
    EXPECT_TRUE(appears("run/checkpoints/step-00000010"));
    fs::resize_file(folder_ / "tokens.bin", 340000);  // a tenth of the text is for validation
  });
  const auto run = test::run_process(all, folder_.path());
  cutter.join();
  EXPECT_EQ(run.exit_code, 4) << run.errors;
  std::smatch named;
  ASSERT_TRUE(std::regex_search(run.errors, named, std::regex("error: rank ([0-9]) \\("))) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("mantissa launch: rank " + named[1].str() + " failed first: exit code 4"));
}

TEST_F(Failures, TooManyNonfiniteStepsEndAllRanksWith5AndSaveNothing) {
  const auto run = start({"optimizer.lr=1e30", "optimizer.grad_clip=0", "schedule.warmup_steps=0", "checkpoint.interval=1000"});
  expect_codes(*run, 5);
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_THAT(run->errors(rank), HasSubstr("3 steps in a row were not finite"));
  EXPECT_THAT(run->errors(1), HasSubstr("warning rank 1: step ")) << "others say who they are";
  EXPECT_THAT(run->errors(0), Not(HasSubstr("warning rank 0")));
  EXPECT_THAT(run->output(1), "") << "only rank 0 prints";
  for (const auto& entry : fs::directory_iterator(folder_ / "run/checkpoints")) EXPECT_EQ(entry.path().filename(), "LOCK");
}

// One rank can write no file of more than a page: its disk is full.
TEST_F(Failures, AFullDiskOfOneRankFailsTheSaveOfAllAndTrainingGoesOn) {
  const auto run = start({"checkpoint.interval=20", "training.steps=400"});
  ASSERT_TRUE(appears("run/checkpoints/step-00000020"));
  ASSERT_TRUE(limit_files(*run, 1, 4096));
  const auto failed = [&] { return run->output(0).find("FAILED: rank 1: ") != std::string::npos; };
  for (int i = 0; i < 3000 && !failed(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(failed()) << run->output(0);
  ASSERT_TRUE(limit_files(*run, 1, RLIM_INFINITY));
  expect_codes(*run, 0);
  EXPECT_THAT(run->output(0), HasSubstr("done | step 400"));
  EXPECT_TRUE(fs::exists(folder_ / "run/checkpoints/step-00000400"));
}

TEST_F(Failures, IfTheLastSaveOfOneRankFailsAllEndWith7) {
  const auto run = start({"checkpoint.interval=0", "training.steps=600"});
  ASSERT_TRUE(appears("run/metrics.jsonl"));
  ASSERT_TRUE(limit_files(*run, 2, 4096));
  expect_codes(*run, 7);
  EXPECT_THAT(run->output(0), HasSubstr("save  600 | FAILED: rank 2: "));
  EXPECT_THAT(run->output(0), HasSubstr("not saved | step 600"));
  for (const auto& entry : fs::directory_iterator(folder_ / "run/checkpoints")) EXPECT_EQ(entry.path().filename(), "LOCK");
}

TEST_F(Failures, SignalsToOneRankAreAnsweredByAll) {
  const auto run = start({"checkpoint.interval=0"});
  ASSERT_TRUE(appears("run/metrics.jsonl"));
  run->send(2, SIGUSR2);  // save and go on
  for (int i = 0; i < 3000 && run->output(0).find("save  ") == std::string::npos; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_THAT(run->output(0), HasSubstr("save  "));
  EXPECT_FALSE(run->ended(0) || run->ended(1) || run->ended(2));
  run->send(1, SIGUSR1);
  expect_codes(*run, 75);
}

// It runs a tenth of the time.
TEST_F(Failures, ASlowRankIsReportedAndEndsNothing) {
  const auto run = start({"training.grad_accum=8", "training.steps=2000", "checkpoint.interval=0"});
  ASSERT_TRUE(appears("run/metrics.jsonl"));
  const auto reported = [&] { return run->errors(0).find("the others wait for rank 1, whose forward and backward ran below 0.7") != -1UL; };
  while (!reported() && !run->ended(1)) {
    for (const auto& [signal, milliseconds] : {std::pair(SIGSTOP, 20), std::pair(SIGCONT, 2)}) {
      run->send(1, signal);
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    }
  }
  expect_codes(*run, 0);
  EXPECT_TRUE(reported()) << run->errors(0);
  EXPECT_THAT(test::read_file(folder_ / "run/metrics.jsonl"),
              ::testing::ContainsRegex("\"type\":\"straggler\",.*\"rank\":1,\"section\":\"forward and backward\",\"ratio\":0\\.[0-6]"));
  EXPECT_THAT(run->errors(1) + run->errors(2), Not(HasSubstr("wait for rank"))) << "only rank 0 says it";
}

TEST_F(Failures, EqualRanksAreNotReported) {
  const auto run = start({"training.grad_accum=8", "training.steps=300", "checkpoint.interval=0"});
  expect_codes(*run, 0);
  EXPECT_THAT(test::read_file(folder_ / "run/metrics.jsonl"), Not(HasSubstr("straggler")));
}

TEST_F(Failures, ASecondJobInTheSameFolderEndsWith3OnAllRanks) {
  const auto first = start();
  ASSERT_TRUE(appears("run/checkpoints/step-00000010"));
  const fs::path elsewhere = folder_ / "second";
  fs::create_directory(elsewhere);
  const auto again = [&](int) {
    std::vector<std::string> out = words({"logging.dir=" + (folder_ / "run"), "data.path=" + (folder_ / "text.txt")});
    out[2] = folder_ / "run.json";
    out.emplace_back("--resume");
    return out;
  };
  RankProcesses second(kRanks, elsewhere, again);
  expect_codes(second, 3);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_THAT(second.errors(rank), HasSubstr("is in use by"));
    EXPECT_FALSE(first->ended(rank));
  }
  // What a killed job leaves does not stand in the way of the next.
  for (int rank = 0; rank < kRanks; ++rank) first->send(rank, SIGKILL);
  ASSERT_TRUE(first->wait_for_all(10));
  RankProcesses third(kRanks, elsewhere, again);
  for (int i = 0; i < 3000 && third.output(0).find("continues at") == std::string::npos && !third.ended(0); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  third.send(0, SIGTERM);
  expect_codes(third, 75);
}

TEST_F(Failures, AConfigOfFourRanksIsRefusedByOneProcess) {
  const auto alone = test::run_process(words({"parallel.data=4"}), folder_.path());
  EXPECT_EQ(alone.exit_code, 2);
  EXPECT_THAT(alone.errors, HasSubstr("needs 4 ranks, but this is one process alone: start it with mantissa launch --nproc-per-node 4"));
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}

}  // namespace mantissa::failures_test
