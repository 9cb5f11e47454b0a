// Runs that signals hit at random times while fp32 GEMMs take most of the time, against the same run without a signal. oneDNN's fp32
// kernels keep data in the stack pointer, so a handler on the stack of a thread that multiplies writes its frame into the heap.
#pragma once

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "launched_training.h"
#include "mantissa/base/rng.h"

namespace mantissa::test {

struct SignalCase {
  const char* name;
  const char* isa;  // ONEDNN_MAX_CPU_ISA
  int ranks;        // 1: without a launcher
};
inline void PrintTo(const SignalCase& c, std::ostream* out) { *out << c.name; }

class SignalTrials : public LaunchedTraining, public ::testing::WithParamInterface<SignalCase> {
 protected:
  SignalTrials() {
    nlohmann::json config = nlohmann::json::parse(read_file(folder_ / "run.json"));
    config["model"] = {
        {"hidden_size", 256}, {"num_layers", 1}, {"num_attention_heads", 4}, {"intermediate_size", 768}, {"max_position_embeddings", 128}};
    config["precision"] = {{"dtype", "fp32"}};
    config["training"] = {{"steps", 1000000}, {"seq_len", 128}, {"micro_batch_size", 4}, {"grad_accum", 1}, {"threads", 1}};
    config["eval"]["interval"] = 0;
    config["checkpoint"]["interval"] = 0;
    config["logging"]["interval"] = 1;
    write_file(folder_ / "run.json", config.dump());
  }

  // Stops a run by SIGTERM so many times, and between two stops sends so many SIGUSR2. Expects exit codes of 75, and the results of the run
  // that no signal hit.
  void stop_and_save_at_random_times(size_t stops, size_t saves) {
    int64_t saved = 0;
    for (size_t trial = 0; trial < stops; ++trial) {
      saved += stop("hit", trial, saves);
      if (HasFailure()) return;
    }
    EXPECT_GT(saved, 0);
    const int64_t last = steps_of("hit") + 3;
    const std::string end = "training.steps=" + std::to_string(last);
    for (const char* name : {"hit", "quiet"}) {
      BackgroundProcess run(words(name, {end}), folder_.path(), folder_ / "end");
      ASSERT_EQ(run.wait(), 0) << run.output();
    }
    EXPECT_EQ(course("hit"), course("quiet"));
    expect_equal("hit", "quiet", last);
    std::cout << GetParam().name << ": " << stops << " times SIGTERM, " << stops * saves << " times SIGUSR2 made " << saved << " saves, "
              << last << " steps\n";
  }

  std::vector<std::string> words(const std::string& name, const std::vector<std::string>& sets = {}) const {
    std::vector<std::string> out = {"env", std::string("ONEDNN_MAX_CPU_ISA=") + GetParam().isa, MANTISSA_BINARY};
    if (GetParam().ranks > 1) out.insert(out.end(), {"launch", "--nproc-per-node", std::to_string(GetParam().ranks), "--"});
    out.insert(out.end(), {"train", "run.json", "--set", "checkpoint.resume=auto", "--set", "logging.dir=" + name});
    for (const std::string& set : sets) out.insert(out.end(), {"--set", set});
    return out;
  }

 private:
  static constexpr double kMostSeconds = 0.8, kMostPause = 0.04;  // the shorter ones let a signal come while the one before saves

  static double draw(uint64_t trial, uint32_t number) {
    return static_cast<double>(random_words({.seed = 11, .stream = RngStream::test}, number, trial)[0]) * 0x1p-32;
  }
  static int64_t occurrences(const std::string& where, const std::string& what) {
    int64_t count = 0;
    for (size_t at = where.find(what); at != std::string::npos; at = where.find(what, at + 1)) ++count;
    return count;
  }
  static void pause(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

  // Goes on where the last one stopped. Returns how many SIGUSR2 had a checkpoint of their own.
  int64_t stop(const std::string& name, uint64_t trial, size_t saves) const {
    std::filesystem::remove(folder_ / "out");
    BackgroundProcess run(words(name), folder_.path(), folder_ / "out");
    const bool started = run.prints(" parameters | ");
    EXPECT_TRUE(started) << run.output();
    pause(draw(trial, 0) * kMostSeconds);
    for (uint32_t i = 0; i < saves; ++i) {
      run.send(SIGUSR2);
      const bool seen = trial > 0 || i > 0 || run.prints("save  ");  // steps may be longer than the trials
      EXPECT_TRUE(seen) << run.output();
      pause(draw(trial, i + 1) * kMostPause);
    }
    run.send(SIGTERM);
    EXPECT_EQ(run.wait(), 75) << "trial " << trial << ": " << run.output();
    return occurrences(run.output(), "save  ") - 1;  // the last one is that of the stop
  }

  int64_t steps_of(const std::string& name) const { return static_cast<int64_t>(course(name).size()); }
};

inline std::string case_name(const ::testing::TestParamInfo<SignalCase>& info) { return info.param.name; }

}  // namespace mantissa::test
