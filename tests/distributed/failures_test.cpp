// Ranks that stop, stick or fail alone: how the job ends on all of them (fault table rows 1, 4, 6, 7, 9, 13, 27).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "process.h"
#include "rank_processes.h"

namespace mantissa::failures_test {

using test::eventually;
using test::RankProcesses;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

constexpr int kRanks = 3;

// A job of three ranks, in a folder of its own, that would train for ever.
class Job {
 public:
  Job() {
    std::string letters;
    for (int i = 0; i < 4000; ++i) letters += "abcdefgh"[(i * i + i / 7) % 8];
    test::write_file(folder / "text.txt", letters);
    const nlohmann::json config = {
        {"model",
         {{"hidden_size", 32}, {"num_layers", 1}, {"num_attention_heads", 2}, {"intermediate_size", 48}, {"max_position_embeddings", 16}}},
        {"training", {{"steps", 1000000}, {"seq_len", 16}, {"micro_batch_size", 1}, {"grad_accum", 1}, {"threads", 1}}},
        {"data", {{"path", "text.txt"}, {"tokenizer", "char"}}},
        {"eval", {{"interval", 0}, {"iters", 2}}},
        {"checkpoint", {{"interval", 10}}},
        {"logging", {{"dir", "run"}, {"tensorboard", false}}}};
    test::write_file(folder / "run.json", config.dump());
  }

  static std::vector<std::string> words(const std::vector<std::string>& sets) {
    std::vector<std::string> out = {MANTISSA_BINARY, "train", "run.json"};
    for (const std::string& set : sets) out.insert(out.end(), {"--set", set});
    return out;
  }
  void start(const std::vector<std::string>& sets = {}) {
    run = std::make_unique<RankProcesses>(kRanks, folder.path(), [&](int) { return words(sets); });
  }
  bool appears(const std::string& file) const {
    return eventually([&] { return fs::exists(folder / ("run/" + file)); });
  }
  // No file of this rank grows beyond this.
  bool limit_files(int rank, rlim_t bytes) const {
    const rlimit value{.rlim_cur = bytes, .rlim_max = RLIM_INFINITY};
    return ::prlimit(run->pid(rank), RLIMIT_FSIZE, &value, nullptr) == 0;
  }
  void expect_codes(int code) const {
    EXPECT_TRUE(run->wait_for_all());
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(run->code(rank), code) << "rank " << rank << ": " << run->errors(rank);
  }
  void expect_no_checkpoint() const {
    for (const auto& entry : fs::directory_iterator(folder / "run/checkpoints")) EXPECT_EQ(entry.path().filename(), "LOCK");
  }
  bool prints(const std::string& what) const {
    return eventually([&] { return run->output(0).find(what) != std::string::npos || run->ended(0); }) &&
           run->output(0).find(what) != std::string::npos;
  }
  // Expects of each rank why it ends, and a report of its step, its latest collectives and its stack.
  void expect_reports(const std::vector<int>& ranks, const std::string& why) const {
    for (const int rank : ranks) {
      EXPECT_EQ(run->code(rank), 6) << run->errors(rank);
      EXPECT_THAT(run->errors(rank), HasSubstr(why));
      EXPECT_THAT(run->errors(rank), HasSubstr(text("rank ", rank, " is at step ")));
      EXPECT_THAT(run->errors(rank), HasSubstr("); its latest collectives: "));
      EXPECT_THAT(run->errors(rank), HasSubstr("mantissa("));
    }
  }

  test::TemporaryFolder folder;
  std::unique_ptr<RankProcesses> run;
};

// Stops one rank; the others must end within its heartbeat timeout.
void stop_one_rank(Job& job, int stopped) {
  job.run->send(stopped, SIGSTOP);
  std::vector<int> others = {0, 1, 2};
  std::erase(others, stopped);
  ASSERT_TRUE(job.run->wait_for(others));
  job.expect_reports(others, "sent no heartbeat for 4 s (parallel.heartbeat_timeout_s)");
  for (const int rank : others) EXPECT_THAT(job.run->errors(rank), HasSubstr(text("rank ", stopped, " ")));
  job.run->send(stopped, SIGCONT);
  EXPECT_TRUE(job.run->wait_for({stopped}));
  EXPECT_EQ(job.run->code(stopped), 6) << job.run->errors(stopped);
}

// Stops all ranks for longer than the heartbeat timeout, which is no loss: the freezer of a cgroup and a machine that was suspended do
// this, too.
void stop_all_ranks(Job& job, int first_to_go_on) {
  for (int rank = 0; rank < kRanks; ++rank) job.run->send(rank, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::seconds(6));
  for (int i = 0; i < kRanks; ++i) {
    job.run->send((first_to_go_on + i) % kRanks, SIGCONT);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_FALSE(job.run->wait_for({0, 1, 2}, 2)) << job.run->errors(0) << job.run->errors(1);
  job.run->send(1, SIGTERM);
  job.expect_codes(75);
}

// A pipe in the place of the metrics that nobody reads: the main thread of rank 0 waits in write() for ever, while the others wait for it
// and all heartbeats go on.
void stick_in_write(Job& job) {
  fs::create_directory(job.folder / "run");
  ASSERT_EQ(::mkfifo((job.folder / "run/metrics.jsonl").c_str(), 0600), 0);
  const int reader = ::open((job.folder / "run/metrics.jsonl").c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  ::fcntl(reader, F_SETPIPE_SZ, 4096);
  job.start({"parallel.step_timeout_s=4", "checkpoint.interval=0", "checkpoint.resume=auto"});
  job.expect_codes(6);
  job.expect_reports({0, 1, 2}, "no progress for 4 s (parallel.step_timeout_s), at step ");
  EXPECT_THAT(job.run->errors(1), HasSubstr("rank 0 (")) << "as the one that does not go on";
  EXPECT_THAT(job.run->errors(0), HasSubstr("write")) << "where it is";
  ::close(reader);
}

bool has_a_connection(pid_t pid) {
  std::set<std::string> own;
  std::error_code gone;
  for (const auto& entry : fs::directory_iterator(text("/proc/", pid, "/fd"), gone)) own.insert(fs::read_symlink(entry, gone));
  std::ifstream lines(text("/proc/", pid, "/net/tcp"));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    const std::vector<std::string> fields(std::istream_iterator<std::string>(words), {});
    if (fields.size() > 9 && fields[3] == "01" && own.contains("socket:[" + fields[9] + "]")) return true;
  }
  return false;
}

// Two ranks have met, and nobody ends them when one is killed (fault table row 1). They meet in a folder where no other job sweeps what the
// dead left.
TEST(Failures, ARankThatIsKilledBeforeTheLastHasComeEndsTheOthers) {
  for (const int victim : {1, 0}) {
    const test::TemporaryFolder folder;
    RankProcesses run(kRanks, folder.path(), [](int rank) {
      const std::string command = "XDG_RUNTIME_DIR=. exec " MANTISSA_BINARY " bench comm";
      return std::vector<std::string>{"sh", "-c", (rank == 2 ? "while [ ! -e go ]; do sleep 0.05; done; " : "") + command};
    });
    ASSERT_TRUE(eventually([&] { return has_a_connection(run.pid(1)); }));
    std::this_thread::sleep_for(std::chrono::seconds(1));  // for the proof
    ASSERT_FALSE(run.ended(0) || run.ended(1)) << run.errors(0) << run.errors(1);
    run.send(victim, SIGKILL);
    ASSERT_TRUE(run.wait_for({victim}));
    test::write_file(folder / "go", "");
    EXPECT_TRUE(run.wait_for_all());
    for (const int rank : {0, 1, 2}) {
      if (rank == victim) continue;
      EXPECT_EQ(run.code(rank), 6) << run.errors(rank);
      EXPECT_THAT(run.errors(rank), HasSubstr(text("rank ", victim)));
    }
  }
}

// The jobs run at the same time, because they wait.
TEST(Failures, StoppedAndStuckRanksEndAllUnlessTheWholeJobWasStopped) {
  const auto after_start = [](const std::function<void(Job&, int)>& body, int rank, const std::vector<std::string>& sets) {
    return std::thread([=] {
      Job job;
      job.start(sets);
      ASSERT_TRUE(job.appears("checkpoints/step-00000010"));
      body(job, rank);
    });
  };
  std::vector<std::thread> jobs;
  for (const int rank : {0, 1}) {
    jobs.push_back(after_start(stop_one_rank, rank, {"parallel.heartbeat_timeout_s=4"}));
    jobs.push_back(after_start(stop_all_ranks, rank, {"parallel.heartbeat_timeout_s=4", "parallel.step_timeout_s=4"}));
  }
  Job stuck;
  stick_in_write(stuck);
  for (std::thread& each : jobs) each.join();
}

// Nearly always one rank reads beyond the end first; all others end with its code, and often before it.
TEST(Failures, DataThatIsCutEndsAllRanksWith4AndTheLauncherNamesTheFirst) {
  const Job job;
  std::vector<uint16_t> ids(200000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint16_t>(i % 50);
  test::write_file(job.folder / "tokens.bin", {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(uint16_t)});
  std::vector<std::string> all =
      Job::words({"data.path=tokens.bin", "data.tokenizer=null", "data.format=nanogpt", "model.vocab_size=50", "training.steps=20000"});
  all.insert(all.begin() + 1, {"launch", "--nproc-per-node", "3", "--"});
  std::thread cutter([&] {
    EXPECT_TRUE(job.appears("checkpoints/step-00000010"));
    fs::resize_file(job.folder / "tokens.bin", 340000);  // a tenth of the text is for validation
  });
  const auto run = test::run_process(all, job.folder.path());
  cutter.join();
  EXPECT_EQ(run.exit_code, 4) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("tokens.bin"));
  std::smatch named;
  ASSERT_TRUE(std::regex_search(run.errors, named, std::regex("error: rank ([0-9]) \\("))) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("mantissa launch: rank " + named[1].str() + " failed first: exit code 4"));
  for (const char* rank : {"0", "1", "2"}) EXPECT_THAT(run.errors, ContainsRegex(text("\n +", rank, " .* exit code 4")));
}

TEST(Failures, TooManyNonfiniteStepsEndAllRanksWith5AndSaveNothing) {
  Job job;
  job.start({"optimizer.lr=1e30", "optimizer.grad_clip=0", "schedule.warmup_steps=0", "checkpoint.interval=1000"});
  job.expect_codes(5);
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_THAT(job.run->errors(rank), HasSubstr("3 steps in a row were not finite"));
  EXPECT_THAT(job.run->errors(1), HasSubstr("warning rank 1: step ")) << "others say who they are";
  EXPECT_THAT(job.run->errors(0), Not(HasSubstr("warning rank 0")));
  EXPECT_THAT(job.run->output(1), "") << "only rank 0 prints";
  job.expect_no_checkpoint();
}

// One rank can write no file of more than a page: its disk is full.
TEST(Failures, AFullDiskOfOneRankFailsTheSaveOfAllAndTrainingGoesOnButForTheLast) {
  Job job;
  job.start({"checkpoint.interval=20", "training.steps=400"});
  ASSERT_TRUE(job.appears("checkpoints/step-00000020"));
  ASSERT_TRUE(job.limit_files(1, 4096));
  EXPECT_TRUE(job.prints("FAILED: rank 1: ")) << job.run->output(0);
  ASSERT_TRUE(job.limit_files(1, RLIM_INFINITY));
  job.expect_codes(0);
  EXPECT_THAT(job.run->output(0), HasSubstr("done | step 400"));
  EXPECT_TRUE(fs::exists(job.folder / "run/checkpoints/step-00000400"));

  Job last;
  last.start({"checkpoint.interval=0", "training.steps=600"});
  ASSERT_TRUE(last.appears("metrics.jsonl"));
  ASSERT_TRUE(last.limit_files(2, 4096));
  last.expect_codes(7);
  EXPECT_THAT(last.run->output(0), HasSubstr("save  600 | FAILED: rank 2: "));
  EXPECT_THAT(last.run->output(0), HasSubstr("not saved | step 600"));
  last.expect_no_checkpoint();
}

TEST(Failures, SignalsToOneRankAreAnsweredByAll) {
  Job job;
  job.start({"checkpoint.interval=0"});
  ASSERT_TRUE(job.appears("metrics.jsonl"));
  job.run->send(2, SIGUSR2);  // save and go on
  EXPECT_TRUE(job.prints("save  "));
  EXPECT_FALSE(job.run->ended(0) || job.run->ended(1) || job.run->ended(2));
  job.run->send(1, SIGUSR1);
  job.expect_codes(75);
  EXPECT_THAT(job.run->output(0), HasSubstr("The same command with --resume continues."));
}

// It runs a sixth of the time, and forward and backward take longer than it runs at once; on a busy machine, where it may run on, it is
// stopped for longer the longer that lasts. Ranks that are not slow are not reported, which
// tests/train/stragglers_test.cpp holds: on a busy machine some are.
TEST(Failures, ASlowRankIsReportedAndEndsNothing) {
  Job job;
  job.start({"training.grad_accum=8", "checkpoint.interval=120"});
  const auto metrics = [&] { return test::read_file(job.folder / "run/metrics.jsonl"); };
  ASSERT_TRUE(job.appears("checkpoints/step-00000120"));
  const auto reported = [&] {
    return job.run->errors(0).find("the others wait for rank 1, whose forward and backward ran at less than 0.7") != -1UL;
  };
  const double began = RankProcesses::now();
  while (!reported() && !job.run->ended(1)) {
    const double stopped = 0.02 * std::max(1.0, (RankProcesses::now() - began) / 10);
    for (const auto& [signal, seconds] : {std::pair(SIGSTOP, stopped), std::pair(SIGCONT, 0.004)}) {
      job.run->send(1, signal);
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    }
  }
  job.run->send(1, SIGTERM);
  job.expect_codes(75);
  EXPECT_TRUE(reported()) << job.run->errors(0);
  EXPECT_THAT(metrics(), ContainsRegex("\"type\":\"straggler\",.*\"rank\":1,\"section\":\"forward and backward\",\"ratio\":0\\.[0-6]"));
  EXPECT_THAT(job.run->errors(1) + job.run->errors(2), Not(HasSubstr("wait for rank"))) << "only rank 0 says it";
}

TEST(Failures, ASecondJobInTheSameFolderEndsWith3OnAllRanks) {
  Job first, second;
  first.start();
  ASSERT_TRUE(first.appears("checkpoints/step-00000010"));
  const std::vector<std::string> same = {"logging.dir=" + (first.folder / "run"), "checkpoint.resume=auto"};
  second.start(same);
  second.expect_codes(3);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_THAT(second.run->errors(rank), HasSubstr("is in use by"));
    EXPECT_FALSE(first.run->ended(rank));
  }
  // Remains of a killed job do not stand in the way of the next.
  for (int rank = 0; rank < kRanks; ++rank) first.run->send(rank, SIGKILL);
  ASSERT_TRUE(first.run->wait_for_all());
  second.start(same);
  EXPECT_TRUE(second.prints("continues at"));
  second.run->send(0, SIGTERM);
  second.expect_codes(75);
}

}  // namespace mantissa::failures_test
