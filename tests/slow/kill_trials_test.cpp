// kill -9 of a random rank at a random time of a run with evaluations, texts and saves, 200 times (MANTISSA_TRIALS: another number): the
// others leave with 6 within 10 s, nothing reported is lost, and a resume continues bit for bit, at this number of ranks and at another.
#include <gmock/gmock.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_search.h"
#include "mantissa/base/rng.h"
#include "process.h"
#include "rank_processes.h"

namespace mantissa::kill_trials_test {

namespace fs = std::filesystem;
using test::RankProcesses;

constexpr int kRanks = 4, kSteps = 40;
constexpr double kPromptSeconds = 1;

class KillTrials : public ::testing::Test {
 protected:
  KillTrials() {
    std::string letters;
    for (int i = 0; i < 4000; ++i) letters += "abcdefgh"[(i * i + i / 7) % 8];
    test::write_file(folder_ / "text.txt", letters);
    const nlohmann::json config = {
        {"model",
         {{"hidden_size", 64}, {"num_layers", 1}, {"num_attention_heads", 2}, {"intermediate_size", 96}, {"max_position_embeddings", 16}}},
        {"precision", {{"recipe", "mxfp8"}, {"fp8_param_gather", true}}},
        {"training",
         {{"steps", kSteps},
          {"seq_len", 16},
          {"micro_batch_size", 1},
          {"grad_accum", nullptr},
          {"global_batch_size", 8},
          {"accumulation", "tree"},
          {"threads", 1}}},
        {"parallel", {{"init_timeout_s", 8}}},
        {"data", {{"path", "text.txt"}, {"tokenizer", "char"}}},
        {"eval", {{"interval", 6}, {"iters", 4}, {"samples", {{"interval", 9}, {"max_new_tokens", 8}, {"prompts", {"ab"}}}}}},
        {"checkpoint", {{"interval", 4}}},
        {"logging", {{"tensorboard", false}}}};
    test::write_file(folder_ / "run.json", config.dump());
  }

  std::vector<std::string> words(const std::string& name) const {
    return {MANTISSA_BINARY, "train", "run.json", "--set", "checkpoint.resume=auto", "--set", "logging.dir=" + name};
  }
  void finish_on(int ranks, const std::string& name) const {
    if (ranks == 1) {
      const auto run = test::run_process(words(name), folder_.path());
      ASSERT_EQ(run.exit_code, 0) << run.errors;
      return;
    }
    RankProcesses run(ranks, folder_.path(), [&](int) { return words(name); });
    ASSERT_TRUE(run.wait_for_all()) << name;
    for (int rank = 0; rank < ranks; ++rank) ASSERT_EQ(run.code(rank), 0) << "rank " << rank << ": " << run.errors(rank);
  }

  // Step and every tensor of the newest checkpoint that is whole, by name; step 0 if there is none.
  std::pair<int64_t, std::map<std::string, std::string>> newest(const std::string& name) const {
    std::map<std::string, std::string> out;
    const fs::path checkpoints = folder_ / (name + "/checkpoints");
    if (!fs::exists(checkpoints)) return {0, out};
    const auto loaded = load_newest(checkpoints, [&](CheckpointReader& reader) {
      out = {{"state", reader.manifest().state}, {"plan", reader.manifest().plan}};
      for (const ManifestTensor& tensor : reader.manifest().tensors) {
        std::string bytes(static_cast<size_t>(whole_box(tensor.shape).elements() * dtype_bytes(tensor.dtype)), '\0');
        reader.read(tensor.name, std::as_writable_bytes(std::span(bytes)));
        out[tensor.name] = std::move(bytes);
      }
    });
    return {loaded ? loaded->step : 0, out};
  }

  static int64_t last_reported_save(const std::string& output) {
    int64_t step = 0;
    for (size_t at = output.find("save  "); at != std::string::npos; at = output.find("save  ", at + 1))
      step = std::max<int64_t>(step, std::atoll(output.c_str() + at + 6));
    return step;
  }

  double draw(uint64_t trial, uint32_t what) const {
    return random_words({.seed = 11, .stream = RngStream::test}, what, trial)[0] / 4294967296.0;
  }

  struct Trial {
    double seconds = 0;  // until the last of the others had left
    bool came = true;    // one that never came is waited for until parallel.init_timeout_s
  };

  // Returns nothing if the run had ended before the kill.
  std::optional<Trial> kill_one(uint64_t trial, double run_seconds) const {
    const int victim = static_cast<int>(draw(trial, 1) * kRanks);
    RankProcesses run(kRanks, folder_.path(), [&](int) { return words("trial"); });
    std::this_thread::sleep_for(std::chrono::duration<double>(draw(trial, 2) * run_seconds));
    run.send(victim, SIGKILL);
    const double killed = RankProcesses::now();
    EXPECT_TRUE(run.wait_for_all()) << "trial " << trial;
    if (run.code(victim) != 128 + SIGKILL) return {};
    double last = killed;
    bool came = true;
    const int64_t step = newest("trial").first;
    EXPECT_GE(step, last_reported_save(run.output(0))) << "trial " << trial;
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      EXPECT_TRUE(run.code(rank) == 6 || (step == kSteps && run.code(rank) == 0))
          << "trial " << trial << ", rank " << rank << " ended with " << run.code(rank) << ": " << run.errors(rank);
      last = std::max(last, run.ended_at(rank));
      came = came && run.errors(rank).find("parallel.init_timeout_s") == std::string::npos;
    }
    for (int rank = 0; rank < kRanks && last - killed > kPromptSeconds; ++rank)  // where did who was late stand?
      std::cout << "trial " << trial << ": rank " << rank << (rank == victim ? " (killed)" : "") << " left after "
                << run.ended_at(rank) - killed << " s: " << run.errors(rank) << std::endl;
    return Trial{.seconds = last - killed, .came = came};
  }

  test::TemporaryFolder folder_;
};

TEST_F(KillTrials, TheOthersLeaveAndTheRunContinuesBitForBit) {
  const char* const asked = std::getenv("MANTISSA_TRIALS");
  const size_t trials = asked != nullptr ? static_cast<size_t>(std::atoi(asked)) : 200;
  ASSERT_NO_FATAL_FAILURE(finish_on(1, "alone"));
  const auto [steps, reference] = newest("alone");
  ASSERT_EQ(steps, kSteps);
  const double began = RankProcesses::now();
  ASSERT_NO_FATAL_FAILURE(finish_on(kRanks, "whole"));
  const double run_seconds = RankProcesses::now() - began;
  ASSERT_EQ(newest("whole").second, reference);

  std::vector<double> seconds, waited;  // where the victim had come, and where not
  std::map<int64_t, int> at_step;       // counts by the step of the newest checkpoint
  for (uint64_t trial = 0; seconds.size() + waited.size() < trials && trial < 3 * trials && !HasFailure(); ++trial) {
    fs::remove_all(folder_ / "trial");
    const std::optional<Trial> killed = kill_one(trial, run_seconds);
    if (!killed) continue;
    (killed->came ? seconds : waited).push_back(killed->seconds);
    if ((seconds.size() + waited.size()) % 20 == 0) std::cout << seconds.size() + waited.size() << " trials" << std::endl;
    EXPECT_LT(killed->seconds, test::kHangSeconds) << "trial " << trial;
    ++at_step[newest("trial").first];
    fs::remove_all(folder_ / "other");
    if (fs::exists(folder_ / "trial")) fs::copy(folder_ / "trial", folder_ / "other", fs::copy_options::recursive);
    constexpr int kOthers[] = {1, 2, 1, 2, 8};
    const int other = kOthers[trial % std::size(kOthers)];
    ASSERT_NO_FATAL_FAILURE(finish_on(kRanks, "trial")) << "trial " << trial;
    EXPECT_EQ(newest("trial").second, reference) << "trial " << trial;
    ASSERT_NO_FATAL_FAILURE(finish_on(other, "other")) << "trial " << trial << " on " << other;
    EXPECT_EQ(newest("other").second, reference) << "trial " << trial << " on " << other;
  }
  std::sort(seconds.begin(), seconds.end());
  ASSERT_EQ(seconds.size() + waited.size(), trials);
  ASSERT_FALSE(seconds.empty());
  const auto quantile = [&](double q) { return seconds[static_cast<size_t>(q * static_cast<double>(seconds.size() - 1))]; };
  std::cout << trials << " trials: the others left after p50 " << quantile(0.5) << " s, p99 " << quantile(0.99) << " s, at most "
            << seconds.back() << " s, without " << waited.size()
            << " whose rank was killed before it came; newest checkpoint (step: trials)";
  for (const auto& [step, count] : at_step) std::cout << " " << step << ": " << count;
  std::cout << '\n';
}

}  // namespace mantissa::kill_trials_test
