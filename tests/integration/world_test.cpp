// Configurations of many ranks, looked at by one process; and commands that are one process, started as many.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "mantissa/base/text.h"
#include "process.h"

namespace mantissa::world_test {

using nlohmann::json;
using test::ProcessResult;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using Words = std::vector<std::string>;

class World : public ::testing::Test {
 protected:
  World() {
    test::write_file(folder_ / "text.txt", std::string(5000, 'a') + "bc");
    write(json::object());
  }
  void write(const json& parallel) const {
    const json config = {{"model", {{"hidden_size", 64}, {"num_layers", 2}, {"num_attention_heads", 2}, {"intermediate_size", 96}}},
                         {"training", {{"seq_len", 16}, {"micro_batch_size", 2}, {"grad_accum", 2}}},
                         {"parallel", parallel},
                         {"data", {{"path", "text.txt"}, {"tokenizer", "byte"}}}};
    test::write_file(folder_ / "run.json", config.dump());
  }
  ProcessResult mantissa(Words words, const Words& environment = {}) const {
    words.insert(words.begin(), MANTISSA_BINARY);
    words.insert(words.begin(), environment.begin(), environment.end());
    words.insert(words.begin(), "env");
    return test::run_process(words, folder_.path());
  }
  static Words rank_of_two(int rank) {
    return {text("RANK=", rank),  "WORLD_SIZE=2",          text("LOCAL_RANK=", rank),
            "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29999"};
  }
  // Expects the same number of ranks from `config check`, `explain` and `train --dry-run` with these words.
  void expect_ranks(int ranks, const Words& more = {}) const {
    const auto output = [&](Words words) {
      words.insert(words.end(), more.begin(), more.end());
      const ProcessResult result = mantissa(words);
      EXPECT_EQ(result.exit_code, 0) << result.errors;
      return result.output;
    };
    EXPECT_EQ(json::parse(output({"config", "check", "run.json"}), nullptr, true, true).at("parallel").at("data"), ranks);
    EXPECT_EQ(json::parse(output({"explain", "run.json", "--json"})).at("layout").at("data"), ranks);
    EXPECT_THAT(output({"explain", "run.json"}), HasSubstr(ranks > 1 ? text(" | ", ranks, " ranks: data ", ranks, " | ") : " | 1 rank | "));
    const std::string preview = output({"train", "run.json", "--dry-run"});
    EXPECT_THAT(preview, HasSubstr((ranks > 1 ? text(ranks, " data ranks x ") : "step     ") +
                                   "2 x 2 sequences of 16 = " + std::to_string(64 * ranks) + " tokens"));
    EXPECT_EQ(preview.find(text("layout   ", ranks, " ranks: data ", ranks, '\n')) != std::string::npos, ranks > 1);
    EXPECT_EQ(preview.find("  exchange        ") != std::string::npos, ranks > 1);
    EXPECT_EQ(preview.find("on each rank") != std::string::npos, ranks > 1);
    EXPECT_FALSE(std::filesystem::exists(folder_ / "runs"));
  }
  // Expects all three to refuse these words with this message.
  void expect_refusal(const Words& more, const std::string& message) const {
    for (Words words : {Words{"config", "check", "run.json"}, {"explain", "run.json"}, {"train", "run.json", "--dry-run"}}) {
      words.insert(words.end(), more.begin(), more.end());
      const ProcessResult result = mantissa(words);
      EXPECT_EQ(result.exit_code, 2) << words.front();
      EXPECT_THAT(result.errors, HasSubstr(message));
      EXPECT_THAT(result.output, IsEmpty());
    }
  }

  test::TemporaryFolder folder_;
};

TEST_F(World, IsWhatIsGivenInWordsOrWhatParallelImplies) {
  expect_ranks(1);
  expect_ranks(8, {"--world", "8"});
  write({{"data", 4}});
  expect_ranks(4);
  expect_refusal({"--world", "2"}, "parallel.data: data 4 * tensor 1 needs 4 ranks, but there are 2");
  expect_refusal({"--world", "1"}, "needs 4 ranks, but this is one process alone");
  for (const std::string wrong : {"0", "65537"}) expect_refusal({"--world", wrong}, "--world: must be 1 to 65536, got " + wrong);
}

TEST_F(World, IsNamedByWhatTheRanksShare) {
  json config = json::parse(test::read_file(folder_ / "run.json"));
  config["model"]["moe"] = {{"num_experts", 4}, {"num_experts_per_tok", 2}, {"intermediate_size", 32}};
  config["parallel"] = {{"tensor", 2}, {"expert", 2}};
  test::write_file(folder_ / "run.json", config.dump());
  const ProcessResult preview = mantissa({"train", "run.json", "--dry-run", "--world", "8"});
  EXPECT_EQ(preview.exit_code, 0) << preview.errors;
  for (const char* const part :
       {"layout   8 ranks: data 4 x tensor 2, experts over 2 data ranks\n", "4 data ranks x 2 x 2 sequences of 16 = 256 tokens",
        " on each rank\n", "  exchange        ", "  program         38.0 MiB (code, libraries, stacks, transport)\n"}) {
    EXPECT_THAT(preview.output, HasSubstr(part));
  }
}

TEST_F(World, ToTrainInIsStartedByALauncherWhichADryRunIsToldOf) {
  const ProcessResult run = mantissa({"train", "run.json", "--world", "4"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.errors, HasSubstr("mantissa launch --nproc-per-node N -- train"));
  const ProcessResult told = mantissa({"train", "run.json", "--dry-run"}, rank_of_two(0));
  EXPECT_EQ(told.exit_code, 0) << told.errors;
  EXPECT_THAT(told.output, HasSubstr("2 data ranks x 2 x 2"));
  const ProcessResult other = mantissa({"train", "run.json", "--dry-run", "--world", "4"}, rank_of_two(0));
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_THAT(other.errors, HasSubstr("--world 4, but this is rank 0 of 2"));
  write({{"data", 4}});
  EXPECT_EQ(mantissa({"train", "run.json"}).exit_code, 2);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "runs"));
}

TEST_F(World, OfExplainTellsBytesAndWhichRateIsMissingForTheTime) {
  const auto explained = [&](Words more) {
    more.insert(more.begin(), {"explain", "run.json", "--wide"});
    const ProcessResult result = mantissa(more);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return result.output;
  };
  const std::string alone = explained({});
  for (const char* const line : {"bytes sent a step", "a gather moves", "time", "of a rank"}) EXPECT_THAT(alone, Not(HasSubstr(line)));
  const std::string neither = explained({"--world", "4"}), flops = explained({"--world", "4", "--flops", "1e9"}),
                    link = explained({"--world", "4", "--link", "1e6"}),
                    both = explained({"--world", "4", "--flops", "1e9", "--link", "1e6"});
  for (const std::string& output : {neither, flops, link, both}) {
    for (const char* const part : {"memory of a rank | total ", " B | masters ", " B | exchange ",
                                   "bytes sent a step, all ranks | gradients ", "a gather moves 2.002 B per parameter that is a value\n"})
      EXPECT_THAT(output, HasSubstr(part));
  }
  const char* const give_flops = "give --flops, FLOP/s of a rank, which bench train or bench gemm measures";
  const char* const give_link = "give --link, bytes/s of a rank, which bench comm measures";
  EXPECT_THAT(neither, AllOf(HasSubstr("time of a step | not known | "), HasSubstr(give_flops), HasSubstr(give_link)));
  EXPECT_THAT(flops, AllOf(HasSubstr("time of a step | not known | compute "), HasSubstr(give_link), Not(HasSubstr(give_flops))));
  EXPECT_THAT(link, AllOf(HasSubstr("time of a step | not known | exchange "), HasSubstr(give_flops), Not(HasSubstr(give_link))));
  EXPECT_THAT(both, AllOf(HasSubstr("time | "), HasSubstr(" a step, "), HasSubstr(" of it not behind backward | gather "),
                          HasSubstr(" of it not behind forward\n"), Not(HasSubstr("give --"))));
}

TEST_F(World, OfExplainInJsonHasTheSameNumbers) {
  const auto explained = [&](Words more) {
    more.insert(more.begin(), {"explain", "run.json", "--json"});
    return json::parse(mantissa(more).output);
  };
  const json both = explained({"--world", "4", "--flops", "1e9", "--link", "1e6"}), none = explained({"--world", "4"}), one = explained({});
  const json &seconds = both.at("seconds_per_step"), &bytes = both.at("bytes_per_step");
  EXPECT_DOUBLE_EQ(seconds.at("step"), seconds.at("compute").get<double>() + seconds.at("exchange_not_hidden").get<double>() +
                                           seconds.at("gather_not_hidden").get<double>());
  EXPECT_GT(bytes.at("gradients"), 3 * 4 * both.at("parameters").get<int64_t>() - 1);
  EXPECT_EQ(bytes.at("other"), 0);
  EXPECT_EQ(none.at("bytes_per_step"), bytes);
  for (const auto& [name, value] : none.at("seconds_per_step").items()) EXPECT_TRUE(value.is_null()) << name;
  EXPECT_EQ(one.at("bytes_per_step").at("gradients"), 0);
  EXPECT_LT(both.at("memory").at("optimizer"), one.at("memory").at("optimizer").get<int64_t>() / 3);
}

TEST_F(World, OfExplainHasThePriceOfTheRun) {
  const Words words = {"explain", "run.json", "--world",          "4", "--flops",     "1G",
                       "--link",  "10M",      "--nproc-per-node", "2", "--host-link", "1M"};
  const auto with = [&](Words more) {
    more.insert(more.begin(), words.begin(), words.end());
    const ProcessResult result = mantissa(more);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return std::regex_replace(result.output, std::regex("\n  "), " ");  // lines that were broken
  };
  const json all = json::parse(with({"--price", "2.5", "--json"})), &run = all.at("run");
  EXPECT_EQ(all.at("seconds_per_step").at("host_link"), 1e6);
  EXPECT_EQ(run.at("steps"), 1000);
  EXPECT_DOUBLE_EQ(run.at("seconds"), 1000 * all.at("seconds_per_step").at("step").get<double>());
  EXPECT_DOUBLE_EQ(run.at("rank_hours"), 4 * run.at("seconds").get<double>() / 3600);
  EXPECT_DOUBLE_EQ(run.at("cost"), 2.5 * run.at("rank_hours").get<double>());
  EXPECT_EQ(run.at("sequences_per_step"), 16);
  EXPECT_EQ(run.at("tokens"), 1000 * 16 * 16);
  EXPECT_GT(all.at("bytes_per_step").at("between_hosts").at("gradients"), 0);
  EXPECT_THAT(with({}),
              AllOf(HasSubstr("run | 1000 steps of 16 sequences, "), HasSubstr(" rank hours | without evaluations, samples and saves\n"),
                    HasSubstr("of these between hosts of 2 ranks | gradients "), Not(HasSubstr("cost"))));
  EXPECT_THAT(with({"--price", "2.5"}), HasSubstr(" at 2.5 an hour | without"));
  EXPECT_THAT(mantissa({"explain", "run.json", "--world", "4", "--flops", "1G", "--link", "1G", "--nproc-per-node", "2"}).output,
              HasSubstr("give --host-link, bytes/s of a rank to other hosts"));
}

TEST_F(World, IsSearchedForLayoutsThatFit) {
  const auto search = [&](Words more) {
    const Words words = {"explain", "run.json", "--search", "--world", "4", "--flops", "1G"};
    more.insert(more.begin(), words.begin(), words.end());
    return mantissa(more);
  };
  const ProcessResult text = search({"--link", "100M", "--memory", "1G", "--price", "3"});
  EXPECT_EQ(text.exit_code, 0) << text.errors;
  EXPECT_THAT(text.output, HasSubstr("3 layouts of 4 ranks with 16 sequences a step fit into 953.7 MiB of a rank; the fastest of them\n"));
  const json all = json::parse(search({"--link", "100M", "--memory", "1G", "--json"}).output);
  EXPECT_EQ(all.at("fit"), 3) << "four data ranks; two heads: two tensor ranks, with tokens divided or not";
  double before = 0.0;
  for (const json& layout : all.at("layouts")) {
    EXPECT_EQ(layout.at("data").get<int>() * layout.at("tensor").get<int>(), 4);
    EXPECT_EQ(layout.at("micro_batch_size").get<int>() * layout.at("grad_accum").get<int>() * layout.at("data").get<int>(), 16);
    EXPECT_EQ(layout.at("recompute"), "none");
    EXPECT_EQ(layout.at("grad_accum"), 1) << "all of it fits";
    EXPECT_LE(before, layout.at("step"));
    EXPECT_LT(layout.at("memory"), 1e9);
    EXPECT_TRUE(layout.at("cost").is_null());
    before = layout.at("step");
    // Its step and its memory are those that explain tells of the layout.
    const json alone =
        json::parse(mantissa({"explain", "run.json", "--json", "--world", "4", "--flops", "1G", "--link", "100M", "--set",
                              "parallel.tensor=" + layout.at("tensor").dump(), "--set",
                              "parallel.sequence_parallel=" + layout.at("sequence_parallel").dump(), "--set",
                              "training.micro_batch_size=" + layout.at("micro_batch_size").dump(), "--set", "training.grad_accum=1"})
                        .output);
    EXPECT_EQ(alone.at("seconds_per_step").at("step"), layout.at("step"));
    EXPECT_EQ(alone.at("memory").at("total"), layout.at("memory"));
  }
  // With less memory the largest micro batch that still fits.
  const auto most = all.at("layouts").at(0).at("memory").get<int64_t>();
  const json less = json::parse(search({"--link", "100M", "--memory", std::to_string(most - 1), "--json"}).output);
  for (const json& layout : less.at("layouts")) EXPECT_LT(layout.at("memory"), most);
  EXPECT_GE(less.at("fit"), 1);
  // Six sequences do not divide among four data ranks, but the configuration by itself is fine.
  const json few = json::parse(
      search({"--link", "100M", "--memory", "1G", "--json", "--set", "training.global_batch_size=6", "--set", "training.grad_accum=null"})
          .output);
  EXPECT_EQ(few.at("fit"), 2);
  for (const json& layout : few.at("layouts")) EXPECT_EQ(layout.at("tensor"), 2);
  const ProcessResult none = search({"--link", "100M", "--memory", "1k"});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_THAT(none.errors, HasSubstr("no layout of 4 ranks fits into 1000 B of a rank; the smallest takes "));
  const ProcessResult odd =
      mantissa({"explain", "run.json", "--search", "--world", "7", "--flops", "1G", "--link", "1G", "--memory", "1P", "--set",
                "training.global_batch_size=16", "--set", "training.grad_accum=null", "--set", "training.micro_batch_size=1"});
  EXPECT_EQ(odd.exit_code, 2);
  const ProcessResult tree = mantissa({"explain", "run.json", "--search", "--world", "3", "--flops", "1G", "--link", "1G", "--memory", "1P",
                                       "--set", "training.global_batch_size=12", "--set", "training.grad_accum=null", "--set",
                                       "training.accumulation=tree", "--set", "training.micro_batch_size=3"});
  EXPECT_THAT(tree.errors, HasSubstr("tree needs a power-of-two number of replicas, got parallel.data 3"));
  EXPECT_THAT(odd.errors, HasSubstr("no layout of 7 ranks divides the run: that of data ranks must divide the 16 sequences of a step"));
}

// Rates that are not positive, and ranks of a launcher where they make no sense.
TEST_F(World, WhatMakesNoSenseIsRefused) {
  const auto expect_refused = [&](const Words& words, const Words& environment, const std::string& message) {
    const ProcessResult result = mantissa(words, environment);
    EXPECT_EQ(result.exit_code, 2) << words.front() << result.errors;
    EXPECT_THAT(result.errors, HasSubstr(message));
    EXPECT_THAT(result.output, IsEmpty());
  };
  for (const char* const wrong : {"0", "-1", "inf", "nan", "fast", "4X"})
    expect_refused({"explain", "run.json", "--flops", wrong}, {}, "--flops: must be a positive number");
  for (const char* const option : {"--link", "--price"})
    expect_refused({"explain", "run.json", option, "0"}, {}, text(option, ": must be a positive number"));
  expect_refused({"explain", "run.json", "--host-link", "1G"}, {}, "--host-link needs --nproc-per-node");
  expect_refused({"explain", "run.json", "--nproc-per-node", "0"}, {}, "--nproc-per-node: must be 1 to 65536, got 0");
  expect_refused({"explain", "run.json", "--price", "2"}, {}, "--price needs the time of a step: give --flops\n");
  expect_refused({"explain", "run.json", "--world", "2", "--flops", "1T", "--price", "2"}, {}, "give --flops, --link and");
  expect_refused({"explain", "run.json", "--memory", "1G"}, {}, "--memory is for --search");
  expect_refused({"explain", "run.json", "--search", "--world", "2", "--memory", "1G"}, {}, "--search needs --flops");
  expect_refused({"explain", "run.json", "--search", "--world", "2", "--memory", "1G", "--flops", "1T"}, {},
                 "--search of several ranks needs --link");
  expect_refused({"explain", "run.json", "--search", "--world", "2", "--memory", "1G", "--flops", "1T", "--link", "1G", "--wide"}, {},
                 "--search shows layouts alone: leave out --wide and --device");
  for (const Words& command : {Words{"config", "check", "run.json"},
                               {"config", "schema"},
                               {"explain", "run.json"},
                               {"eval", "runs/a"},
                               {"generate", "runs/a"},
                               {"tokenize", "text.txt", "--output", "t"},
                               {"inspect", "runs/a"},
                               {"verify", "runs/a"},
                               {"report", "runs/a"},
                               {"bench", "kernels"},
                               {"bench", "gemm"},
                               {"bench", "attention"},
                               {"conformance", "."},
                               {"doctor"}}) {
    expect_refused(command, rank_of_two(1), "runs as one process, and this is rank 1 of 2");
  }
  for (const Words& command :
       {Words{"doctor"}, {"train", "run.json"}, {"train", "run.json", "--dry-run"}, {"bench", "train", "run.json"}, {"bench", "comm"}}) {
    expect_refused(command, {"RANK=0"}, "WORLD_SIZE");
  }
}

}  // namespace mantissa::world_test
