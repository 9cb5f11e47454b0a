// Treatment of words by the command line, help, and the advice and warnings that a run gets. The wording of refusals is in
// tests/golden/errors.
#include <gmock/gmock.h>

#include <sstream>

#include "mantissa/base/log.h"
#include "process.h"
#include "training.h"

namespace mantissa::command_line_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;

class CommandLine : public test::TrainingTest {
 protected:
  CommandLine() {
    test::write_file(folder_ / "run.json", effective_config(config("run", {"training.steps=1", "data.tokenizer=byte"}).config));
  }

  test::ProcessResult mantissa(const Words& words) const { return test::run_mantissa(words, folder_.path()); }
  // Returns the output of a command that succeeds.
  std::string output(const Words& words) const {
    const auto result = mantissa(words);
    EXPECT_EQ(result.exit_code, 0) << ::testing::PrintToString(words) << result.errors;
    return result.output;
  }
};

TEST_F(CommandLine, HelpAndVersionAreWordsAndOptions) {
  EXPECT_NE(output({"-V"}), "");
  EXPECT_EQ(output({"-V"}), output({"--version"}));
  EXPECT_EQ(output({"help", "config", "check"}), output({"config", "check", "--help"}));
  EXPECT_THAT(output({"generate", "--help"}),
              AllOf(HasSubstr("--seed UINT"), HasSubstr("--top-k INT"), ::testing::ContainsRegex("--prompt TEXT[^\n]*\\\\n")));
}

TEST_F(CommandLine, IntegersAreDecimalUpToTheirLimits) {
  output({"train", "run.json"});
  const auto text = [&](const std::string& seed, const std::string& count) {
    return output({"generate", run_folder("run"), "--prompt=a=", "--max-new-tokens", count, "--seed", seed});
  };
  EXPECT_EQ(text("0", "010"), text("0", "10"));
  EXPECT_NE(text("18446744073709551615", "10"), text("0", "10"));
  EXPECT_THAT(text("0", "1"), ::testing::StartsWith("a=")) << "the first = ends the name of an option";
}

TEST_F(CommandLine, LaunchLeavesTheOptionsOfACommandToIt) {
  EXPECT_THAT(output({"launch", "--nproc-per-node", "1", "--standalone", "config", "check", "run.json", "--set", "training.steps=7"}),
              HasSubstr("\"steps\": 7"));
  EXPECT_THAT(output({"launch", "--nproc-per-node=1", "echo", "--a=b", "--", "c"}), HasSubstr("--a=b -- c\n"));
  EXPECT_EQ(mantissa({"launch", "--nproc-per-node", "gpu", "echo"}).exit_code, 3);
  const auto absent = mantissa({"launch", "--nproc-per-node", "2", "--", "./absent"});
  EXPECT_EQ(absent.exit_code, 2);
  EXPECT_THAT(absent.errors, HasSubstr("./absent: cannot be run: No such file or directory"));
}

// Each advice is followed: it starts another run.
TEST_F(CommandLine, AUsedRunFolderAdvisesSettingsThatStartAnotherRun) {
  const auto train = [&](const std::string& file, const Words& sets) {
    const std::filesystem::path here = std::filesystem::current_path();
    std::filesystem::current_path(folder_.path());  // names stay relative to it
    std::string error;
    try {
      mantissa::train(load_run_config({.file = file, .sets = sets}), {"test"}, {});
    } catch (const Error& refused) {
      EXPECT_EQ(refused.code(), ExitCode::usage);
      error = refused.what();
    }
    std::filesystem::current_path(here);
    return error;
  };
  nlohmann::json plain = nlohmann::json::parse(test::read_file(folder_ / "run.json"));
  plain.erase("logging");
  plain["checkpoint"].erase("dir");
  test::write_file(folder_ / "plain.json", plain.dump());
  EXPECT_EQ(train("plain.json", {}), "");
  const auto expect_advice = [&](const std::string& file, Words sets, const std::string& used, const Words& advice) {
    const std::string error = train(file, sets);
    EXPECT_THAT(error, AllOf(::testing::StartsWith(used + ": holds metrics or checkpoints of an earlier run"),
                             ::testing::EndsWith("start another with --set " + joined(advice, " --set "))));
    sets.insert(sets.end(), advice.begin(), advice.end());
    EXPECT_EQ(train(file, sets), "");
  };
  expect_advice("plain.json", {}, "runs/plain", {"logging.run_name=plain-2"});
  expect_advice("plain.json", {"logging.run_name=plain-2"}, "runs/plain-2", {"logging.run_name=plain-3"});
  expect_advice("runs/plain/config.json", {}, "runs/plain", {"logging.run_name=plain-4"});
  // One folder that does not follow the name of the run is enough.
  expect_advice("plain.json", {"checkpoint.dir=saved"}, "runs/plain", {"logging.dir=runs/plain-5", "checkpoint.dir=%d/checkpoints"});
  expect_advice("plain.json", {"logging.dir=runs/plain"}, "runs/plain", {"logging.dir=runs/plain-6"});
  // A name of which nothing would be left without its number.
  for (const std::string name : {"-5", "7", "a7"}) {
    const Words sets = {"logging.dir=runs/" + name, "checkpoint.dir=%d/saved"};
    EXPECT_EQ(train("run.json", sets), "");
    EXPECT_THAT(train("run.json", sets), HasSubstr("--set logging.dir=runs/" + name + "-2 "));
  }
}

TEST_F(CommandLine, InspectShowsAnExport) {
  run("run", {"training.steps=1", "data.tokenizer=byte"});
  output({"export", run_folder("run"), "--output", "out"});
  EXPECT_THAT(output({"inspect", "out"}), AllOf(HasSubstr("out: a model in Hugging Face's form\narchitecture  "), HasSubstr(" in 1 file\n"),
                                                HasSubstr("  model.embed_tokens.weight "), Not(HasSubstr("no checkpoints"))));
}

// Returns the lines behind a head that are indented, without the indentation.
Words lines_after(const std::string& help, const std::string& head) {
  std::istringstream in(help.substr(std::min(help.find(head), help.size())));
  Words lines;
  std::string line;
  for (std::getline(in, line); std::getline(in, line) && line.starts_with("  ");) lines.push_back(line.substr(2));
  return lines;
}

// Uses a model so small that its 700 steps take a moment. The part of `bench` that measures for minutes is left out.
TEST_F(CommandLine, ExamplesOfHelpWorkAfterTheQuickstart) {
  for (const char* const name : {"configs", "include", "src", "tools", "tests", "README.md"})
    std::filesystem::create_symlink(std::filesystem::path(MANTISSA_SOURCE_DIR) / name, folder_ / name);
  const std::string tiny =
      " --set model.hidden_size=32 --set model.num_layers=1 --set model.num_attention_heads=1 --set model.intermediate_size=32"
      " --set training.micro_batch_size=2 --set training.seq_len=32 --set eval.iters=1 --set eval.samples=null";
  const auto shell = [&](const std::string& line) {
    return test::run_process({"sh", "-c", "mantissa() { " MANTISSA_BINARY " \"$@\"; }; " + line}, folder_.path());
  };
  const auto quickstart = shell("mantissa train configs/quickstart.json --set 'training.trace={\"steps\":[2,3]}'" + tiny);
  ASSERT_EQ(quickstart.exit_code, 0) << quickstart.errors;
  const std::string help = output({"help"});
  EXPECT_EQ(help, output({"--help"}));
  Words commands = {"config schema"}, examples;
  for (const std::string& line : lines_after(help, "Subcommands:"))
    if (!line.starts_with(' ')) commands.push_back(line.substr(0, line.find(' ')));  // else a summary goes on
  EXPECT_GE(commands.size(), 15U);
  for (const std::string& command : commands) {
    const Words lines = lines_after(shell("mantissa " + command + " --help").output, "Example:");
    EXPECT_FALSE(lines.empty()) << command;
    for (const std::string& line : lines)
      EXPECT_TRUE(line.starts_with("mantissa " + command + " ") || line == "mantissa " + command) << line;
    examples.insert(examples.end(), lines.begin(), lines.end());
  }
  for (const std::string& example : examples) {
    if (example.starts_with("mantissa bench ")) continue;
    const bool trains = example.find(" train ") != std::string::npos || example.starts_with("mantissa compare ");
    const auto run = shell(example + (trains ? tiny + " --set training.steps=2" : ""));
    EXPECT_EQ(run.exit_code, example.find("--diff") == std::string::npos ? 0 : 1) << example << '\n' << run.output << run.errors;
  }
}

TEST_F(CommandLine, WhatARunWillNotDoIsAWarning) {
  const std::string short_run = "schedule.warmup_steps 5: the run ends after 1 step", no_export = "the model cannot be exported: ",
                    no_documents = "data.document_mask has no effect: each data set is one text", no_model = "has no section model";
  for (const char* const flag : {"--dry-run", "--set=checkpoint.resume=auto"}) {
    const auto warned = mantissa({"train", "run.json", flag, "--set", "model.activation=gelu_erf", "--set", "data.document_mask=true"});
    EXPECT_EQ(warned.exit_code, 0) << warned.errors;
    EXPECT_THAT(warned.errors, AllOf(HasSubstr(short_run), HasSubstr(no_export), HasSubstr(no_documents), Not(HasSubstr(no_model))))
        << flag;
  }
  EXPECT_THAT(output({"explain", "run.json", "--wide", "--set", "model.activation=gelu_erf"}), HasSubstr("warning: " + no_export));
  test::write_file(folder_ / "bare.json", R"({"data": {"path": "text.txt", "tokenizer": "byte"}, "training": {"steps": 1, "seq_len": 16,
    "micro_batch_size": 1, "grad_accum": 1}, "schedule": {"warmup_steps": 0}, "eval": {"iters": 1}})");
  open_log({.console = false, .file = folder_ / "log"});
  TrainEvents events;
  events.request = []() -> Request { fail(ExitCode::stopped, "before the first step"); };
  const LoadedConfig bare = load_run_config({.file = folder_ / "bare.json", .sets = {"logging.dir=" + run_folder("bare")}});
  EXPECT_EQ(test::error_of([&] { train(bare, {"test"}, events); }).code(), ExitCode::stopped);
  close_log();
  EXPECT_THAT(test::read_file(folder_ / "log"), HasSubstr("the configuration " + no_model + ": this run trains the default model, of "));
}

}  // namespace mantissa::command_line_test
