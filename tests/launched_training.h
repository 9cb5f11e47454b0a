// Runs of several processes over UCX, as a user starts them: in a folder with a text and a configuration of 40 steps of 4 sequences.
#pragma once

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "files.h"
#include "process.h"

namespace mantissa::test {

class LaunchedTraining : public ::testing::Test {
 protected:
  LaunchedTraining() { write_inputs(folder_); }

  static void write_inputs(const TemporaryFolder& folder) {
    std::string words;
    for (int i = 0; i < 4000; ++i) words += "abcdefgh"[(i * i + i / 7) % 8];
    write_file(folder / "text.txt", words);
    const nlohmann::json config = {
        {"model",
         {{"hidden_size", 64}, {"num_layers", 1}, {"num_attention_heads", 2}, {"intermediate_size", 96}, {"max_position_embeddings", 16}}},
        {"precision", {{"recipe", "mxfp8"}, {"fp8_param_gather", true}}},
        {"schedule", {{"type", "constant"}}},  // the rate of a step does not depend on how many there are
        {"training",
         {{"steps", 40},
          {"seq_len", 16},
          {"micro_batch_size", 1},
          {"grad_accum", nullptr},
          {"global_batch_size", 4},
          {"accumulation", "tree"},
          {"threads", 1}}},
        {"data", {{"path", "text.txt"}, {"tokenizer", "char"}}},
        {"eval", {{"interval", 20}, {"iters", 2}}},
        {"checkpoint", {{"interval", 10}}},
        {"parallel", {{"init_timeout_s", kHangSeconds}}},
        {"logging", {{"tensorboard", false}}}};
    write_file(folder / "run.json", config.dump());
  }
  // The path of a run of one process, which all tests of a process share.
  static const std::string& alone() {
    static const TemporaryFolder folder;
    static const std::string path = [] {
      write_inputs(folder);
      const ProcessResult run = run_mantissa(train("alone"), folder.path());
      EXPECT_EQ(run.exit_code, 0) << run.errors;
      return folder / "alone";
    }();
    return path;
  }

  static std::vector<std::string> train(const std::string& name, std::vector<std::string> more = {}) {
    std::vector<std::string> words = {"train", "run.json", "--set", "logging.dir=" + name};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  ProcessResult mantissa(std::vector<std::string> words) const { return run_mantissa(std::move(words), folder_.path()); }
  ProcessResult launch(int ranks, std::vector<std::string> command, std::vector<std::string> options = {}) const {
    std::vector<std::string> words = {"launch", "--nproc-per-node", std::to_string(ranks)};
    words.insert(words.end(), options.begin(), options.end());
    words.emplace_back("--");
    words.insert(words.end(), command.begin(), command.end());
    return mantissa(words);
  }

  bool appears(const std::string& file) const {
    return eventually([&] { return std::filesystem::exists(folder_ / file); });
  }

  // Step, loss, norm and padding of every step and step and loss of every evaluation, to the last digit.
  std::vector<std::string> course(const std::string& name) const {
    std::istringstream lines(read_file(folder_ / (name + "/metrics.jsonl")));
    std::vector<std::string> out;
    for (std::string line; std::getline(lines, line);) {
      const nlohmann::json event = nlohmann::json::parse(line);
      if (event["type"] == "step")
        out.push_back(event["step"].dump() + " " + event["loss"].dump() + " " + event["grad_norm"].dump() + " " +
                      (event.contains("padding") ? event["padding"].dump() : "0"));
      if (event["type"] == "eval") out.push_back(event["step"].dump() + " " + event["loss"].dump());
    }
    return out;
  }
  // Expects equal last checkpoints of two runs.
  void expect_equal(const std::string& a, const std::string& b, int64_t step = 40) const {
    const auto diff = mantissa({"inspect", a + "/checkpoints", "--diff", b + "/checkpoints"});
    EXPECT_EQ(diff.exit_code, 0) << diff.output;
    EXPECT_THAT(diff.output, ::testing::HasSubstr("step " + std::to_string(step) + " and step " + std::to_string(step) + ": all"));
  }

  TemporaryFolder folder_;
};

}  // namespace mantissa::test
