// What the command line says of words that do not fit, and that it takes none of them for something else.
#include <gmock/gmock.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "process.h"
#include "training.h"

namespace mantissa::command_line_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class CommandLine : public test::TrainingTest {
 protected:
  CommandLine() {
    test::write_file(folder_ / "run.json", effective_config(config("run", {"training.steps=1", "data.tokenizer=byte"}).config));
  }

  test::ProcessResult mantissa(std::vector<std::string> arguments) const {
    return test::run_mantissa(std::move(arguments), folder_.path());
  }
  void expect_refused(const std::vector<std::string>& arguments, const std::string& message) const {
    const auto refused = mantissa(arguments);
    EXPECT_EQ(refused.exit_code, 2) << ::testing::PrintToString(arguments) << refused.errors;
    EXPECT_EQ(refused.output, "") << ::testing::PrintToString(arguments);
    EXPECT_THAT(refused.errors, HasSubstr(message)) << ::testing::PrintToString(arguments);
  }
};

TEST_F(CommandLine, MistakesAreUsageErrorsWithASuggestion) {
  EXPECT_THAT(mantissa({"trian"}).errors, HasSubstr("did you mean 'train'?"));
  EXPECT_THAT(mantissa({"config", "chekc"}).errors, HasSubstr("did you mean 'check'?"));
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{{},
                                                                                     {"trian"},
                                                                                     {"config"},
                                                                                     {"config", "check"},
                                                                                     {"config", "check", "none.json"},
                                                                                     {"config", "schema", "--no-such"},
                                                                                     {"--no-such"}}) {
    EXPECT_EQ(mantissa(words).exit_code, 2) << ::testing::PrintToString(words);
  }
  EXPECT_EQ(mantissa({"--version"}).exit_code, 0);
}

TEST_F(CommandLine, EverySubcommandHelpsWithAnExample) {
  const std::vector<std::string> names = {"train", "eval", "generate", "tokenize", "inspect", "verify", "bench", "doctor", "config"};
  for (const std::string& name : names) {
    const test::ProcessResult result = mantissa({name, "--help"});
    EXPECT_EQ(result.exit_code, 0) << name;
    EXPECT_THAT(result.output, HasSubstr("Example:\n  mantissa " + name));
  }
}

TEST_F(CommandLine, AnOptionWithNothingBehindItsEqualsSignTakesNoOtherWord) {
  expect_refused({"export", "run", "--output=", "--weights=packed"}, "--output=: there is no value");
  expect_refused({"report", "--output=", "run"}, "--output=: there is no value");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "--weights=packed"));
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  const auto given = mantissa({"generate", run_folder("run"), "--prompt=a=", "--max-new-tokens=1"});
  EXPECT_EQ(given.exit_code, 0) << given.errors;
  EXPECT_THAT(given.output, ::testing::StartsWith("a="));
}

TEST_F(CommandLine, IntegersThatDoNotFitAreRefused) {
  for (const std::string option :
       {"--top-k=99999999999999999999", "--max-new-tokens=9223372036854775808", "--seed=-1", "--seed=18446744073709551616",
        "--threads=4294967296", "--top-k=1.5", "--top-k=0x10", "--top-k=1e3", "--top-k= 1"}) {
    const std::string name = option.substr(0, option.find('='));
    expect_refused({"generate", "run", option}, name + ": must be a whole number from ");
  }
  expect_refused({"eval", "run", "--iters", "99999999999999999999"}, "--iters: must be a whole number from ");
  expect_refused({"launch", "--nproc_per_node=1", "--master_port=x", "--", "true"}, "--master-port: must be a whole number from ");
}

TEST_F(CommandLine, IntegersAreDecimalUpToTheirLimits) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  const auto text = [&](const std::string& seed, const std::string& count) {
    const auto run = mantissa({"generate", run_folder("run"), "--prompt=a", "--max-new-tokens", count, "--seed", seed});
    EXPECT_EQ(run.exit_code, 0) << run.errors;
    return run.output;
  };
  EXPECT_EQ(text("0", "010"), text("0", "10"));
  EXPECT_NE(text("18446744073709551615", "10"), text("0", "10"));
  EXPECT_THAT(mantissa({"generate", "--help"}).output, AllOf(HasSubstr("--seed UINT"), HasSubstr("--top-k INT")));
}

TEST_F(CommandLine, AMistypedOptionIsSuggestedAndHelpIsAWordToo) {
  expect_refused({"--verison"}, "no option '--verison'; did you mean '--version'?");
  expect_refused({"train", "run.json", "--resum"}, "no option '--resum'; did you mean '--resume'?");
  expect_refused({"train", "run.json", "--dryrun"}, "no option '--dryrun'; did you mean '--dry-run'?");
  expect_refused({"config", "check", "run.json", "--wrld=2"}, "no option '--wrld'; did you mean '--world'?");
  const auto same = [&](const std::vector<std::string>& one, const std::vector<std::string>& other) {
    const auto a = mantissa(one), b = mantissa(other);
    EXPECT_EQ(a.exit_code, 0) << a.errors;
    EXPECT_NE(a.output, "");
    EXPECT_EQ(a.output, b.output);
  };
  same({"-V"}, {"--version"});
  same({"help"}, {"--help"});
  same({"help", "config", "check"}, {"config", "check", "--help"});
}

TEST_F(CommandLine, LaunchLeavesTheOptionsOfACommandToIt) {
  const auto checked =
      mantissa({"launch", "--nproc-per-node", "1", "--standalone", "config", "check", "run.json", "--set", "training.steps=7"});
  EXPECT_EQ(checked.exit_code, 0) << checked.errors;
  EXPECT_THAT(checked.output, HasSubstr("\"steps\": 7"));
  const auto words = mantissa({"launch", "--nproc-per-node=1", "echo", "--a=b", "--", "c"});
  EXPECT_THAT(words.output, HasSubstr("--a=b -- c\n")) << words.errors;
  EXPECT_EQ(mantissa({"launch", "--help"}).exit_code, 0);
}

TEST_F(CommandLine, EvalNamesItsOwnOptionWhereThereIsNoData) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  const auto expect_own = [&](const std::vector<std::string>& options) {
    std::vector<std::string> words = {"eval", run_folder("run")};
    words.insert(words.end(), options.begin(), options.end());
    expect_refused(words, "matches no file; ");
    const std::string errors = mantissa(words).errors;
    EXPECT_THAT(errors, AllOf(HasSubstr("--data FILE"), Not(HasSubstr("--set"))));
  };
  expect_own({"--data", "nothing*"});
  std::filesystem::remove(folder_ / "text.txt");
  expect_own({});
}

// Each advice is followed: it starts another run.
TEST_F(CommandLine, AUsedRunFolderAdvisesSettingsThatStartAnotherRun) {
  nlohmann::json plain = nlohmann::json::parse(test::read_file(folder_ / "run.json"));
  plain.erase("logging");
  plain["checkpoint"].erase("dir");
  test::write_file(folder_ / "plain.json", plain.dump());
  ASSERT_EQ(mantissa({"train", "plain.json"}).exit_code, 0);
  const auto expect_advice = [&](std::vector<std::string> words, const std::string& used, const std::vector<std::string>& advice) {
    words.insert(words.begin(), "train");
    expect_refused(words, used + ": holds metrics or checkpoints of an earlier run");
    expect_refused(words, "start another with --set " + joined(advice, " --set ") + "\n");
    for (const std::string& set : advice) words.insert(words.end(), {"--set", set});
    const auto other = mantissa(words);
    EXPECT_EQ(other.exit_code, 0) << other.errors;
  };
  expect_advice({"plain.json"}, "runs/plain", {"logging.run_name=plain-2"});
  expect_advice({"plain.json", "--set", "logging.run_name=plain-2"}, "runs/plain-2", {"logging.run_name=plain-3"});
  const std::vector<std::string> saved = {"runs/plain/config.json", "--set", "logging.run_name=again"};
  expect_advice(saved, "runs/plain", {"logging.dir=runs/plain-4", "checkpoint.dir=%d/checkpoints"});
  expect_advice({"runs/plain/config.json", "--set", "logging.dir=runs/elsewhere"}, "runs/plain/checkpoints",
                {"checkpoint.dir=%d/checkpoints"});
  // One folder that does not follow the name of the run is enough.
  const std::vector<std::string> apart = {"logging.dir=runs/plain-5", "checkpoint.dir=%d/checkpoints"};
  expect_advice({"plain.json", "--set", "checkpoint.dir=saved"}, "runs/plain", apart);
  expect_advice({"plain.json", "--set", "logging.dir=runs/plain"}, "runs/plain", {"logging.dir=runs/plain-6"});
}

// A name of which nothing would be left without its number.
TEST_F(CommandLine, AUsedNameThatIsANumberIsAdvisedWithAnother) {
  for (const std::string name : {"-5", "7", "a7"}) {
    const std::vector<std::string> words = {"train", "run.json", "--set", "logging.dir=runs/" + name, "--set", "checkpoint.dir=%d/saved"};
    ASSERT_EQ(mantissa(words).exit_code, 0);
    expect_refused(words, "--set logging.dir=runs/" + name + "-2 ");
  }
}

TEST_F(CommandLine, AMissingStepListsThoseThatExist) {
  ASSERT_EQ(mantissa({"train", "run.json", "--set=training.steps=10", "--set=checkpoint.interval=1", "--set=checkpoint.keep_latest=10"})
                .exit_code,
            0);
  const std::string folder = run_folder("run") + "/checkpoints/", listed = "; there are 2 older and step-00000003, step-00000004, ";
  expect_refused({"eval", folder + "step-00000011"}, listed);
  expect_refused({"train", "run.json", "--set", "checkpoint.resume=" + folder + "step-00000011"}, listed);
  for (int step = 1; step < 10; ++step) std::filesystem::remove_all(folder + checkpoint_name(step));
  expect_refused({"verify", folder + "step-00000011"}, "; there is step-00000010\n");
}

TEST_F(CommandLine, InspectShowsAnExport) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  ASSERT_EQ(mantissa({"export", run_folder("run"), "--output", "out"}).exit_code, 0);
  const auto shown = mantissa({"inspect", "out"});
  EXPECT_EQ(shown.exit_code, 0) << shown.errors;
  EXPECT_THAT(shown.output, AllOf(HasSubstr("out: a model in Hugging Face's form\narchitecture  "), HasSubstr(" in 1 file\n"),
                                  HasSubstr("  model.embed_tokens.weight "), Not(HasSubstr("no checkpoints"))));
}

// The lines below "Example:" of all commands, in the order of --help.
std::vector<std::string> help_examples(const std::function<std::string(std::vector<std::string>)>& output) {
  std::vector<std::string> commands, examples;
  const auto lines_after = [](const std::string& help, const std::string& head, const std::function<void(const std::string&)>& take) {
    std::istringstream lines(help.substr(std::min(help.find(head), help.size())));
    std::string line;
    for (std::getline(lines, line); std::getline(lines, line) && line.starts_with("  ");) take(line.substr(2));
  };
  lines_after(output({"--help"}), "Subcommands:", [&](const std::string& line) {
    if (!line.starts_with(' ')) commands.push_back(line.substr(0, line.find(' ')));  // else a summary goes on
  });
  for (const std::string& command : commands) {
    const auto add = [&](const std::string& line) { examples.push_back(line); };
    lines_after(output({command, "--help"}), "Example:", add);
    if (command == "config") lines_after(output({command, "schema", "--help"}), "Example:", add);
  }
  return examples;
}

// With a model so small that its 700 steps take a moment. What `bench` measures for minutes is left out.
TEST_F(CommandLine, ExamplesOfHelpWorkAfterTheQuickstart) {
  for (const char* const name : {"configs", "include", "src", "tools", "tests", "README.md"})
    std::filesystem::create_symlink(std::filesystem::path(MANTISSA_SOURCE_DIR) / name, folder_ / name);
  const std::string tiny =
      " --set model.hidden_size=32 --set model.num_layers=1 --set model.num_attention_heads=1 --set model.intermediate_size=32"
      " --set training.micro_batch_size=2 --set training.seq_len=32 --set eval.iters=1 --set eval.samples=null";
  const auto shell = [&](const std::string& line) {
    return test::run_process({"sh", "-c", "mantissa() { " MANTISSA_BINARY " \"$@\"; }; " + line}, folder_.path());
  };
  const auto quickstart = shell("mantissa train configs/quickstart.json" + tiny);
  ASSERT_EQ(quickstart.exit_code, 0) << quickstart.errors;
  const std::vector<std::string> examples = help_examples([&](const auto& words) { return mantissa(words).output; });
  EXPECT_GE(examples.size(), 24U);
  for (const std::string& example : examples) {
    if (example.starts_with("mantissa bench ")) continue;
    const bool trains = example.find(" train ") != std::string::npos;
    const auto run = shell(example + (trains ? tiny + " --set training.steps=2" : ""));
    EXPECT_EQ(run.exit_code, example.find("--diff") == std::string::npos ? 0 : 1) << example << '\n' << run.output << run.errors;
  }
}

TEST_F(CommandLine, PackingWhatNoRecipeQuantizesIsRefused) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  expect_refused({"export", run_folder("run"), "--output", "out", "--weights", "packed"}, "there is nothing to pack: take dequantized");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out"));
  expect_refused({"train", "run.json", "--dry-run", "--set", R"(checkpoint.export={"weights": "packed"})"},
                 "checkpoint.export: packed weights");
}

TEST_F(CommandLine, WhatARunWillNotDoIsAWarning) {
  for (const char* const flag : {"--dry-run", "--resume"}) {
    const auto warned = mantissa({"train", "run.json", flag, "--set", "model.activation=gelu_erf"});
    EXPECT_EQ(warned.exit_code, 0) << warned.errors;
    EXPECT_THAT(warned.errors, HasSubstr("schedule.warmup_steps 5: the run ends after 1 step")) << flag;
    EXPECT_THAT(warned.errors, HasSubstr("the model cannot be exported: ")) << flag;
  }
  EXPECT_THAT(mantissa({"explain", "run.json", "--wide", "--set", "model.activation=gelu_erf"}).output,
              HasSubstr("warning: the model cannot be exported: "));
}

TEST_F(CommandLine, ARunOfTheDefaultModelSaysSo) {
  test::write_file(folder_ / "bare.json", R"({"data": {"path": "text.txt", "tokenizer": "byte"}, "training": {"steps": 1, "seq_len": 16,
    "micro_batch_size": 1, "grad_accum": 1}, "schedule": {"warmup_steps": 0}, "eval": {"iters": 1}})");
  const auto run = mantissa({"train", "bare.json"});
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("the configuration has no section model: this is the default, of "));
  EXPECT_THAT(mantissa({"train", "run.json"}).errors, Not(HasSubstr("has no section model")));
}

TEST_F(CommandLine, DocumentOptionsThatDoNothingAreWarnings) {
  for (const char* const flag : {"--dry-run", "--resume"}) {
    const auto warned = mantissa({"train", "run.json", flag, "--set", "data.document_mask=true"});
    EXPECT_EQ(warned.exit_code, 0) << warned.errors;
    EXPECT_THAT(warned.errors, HasSubstr("data.document_mask does nothing: each data set is one text")) << flag;
  }
}

TEST_F(CommandLine, MistakesOfLaunchAreRefusedBeforeAnythingRuns) {
  const auto refused = [&](std::vector<std::string> options, const std::string& because, int code = 2) {
    options.insert(options.begin(), "launch");
    options.insert(options.end(), {"--", "sh", "-c", "echo ran"});
    const auto run = mantissa(options);
    EXPECT_EQ(run.exit_code, code) << because;
    EXPECT_THAT(run.errors, HasSubstr(because));
    EXPECT_THAT(run.output, Not(HasSubstr("ran")));
  };
  for (const std::string count : {"0", "-1", "x", "1.5", "65537", ""}) refused({"--nproc-per-node", count}, "--nproc-per-node");
  refused({"--nproc-per-node", "gpu"}, "no GPU can be used", 3);
  refused({"--nnodes", "0"}, "--nnodes: must be 1 to");
  refused({"--nnodes", "2"}, "--nnodes=2 needs --master-addr");
  refused({"--nnodes", "2", "--node-rank", "2", "--master-addr", "a"}, "--node-rank: must be below --nnodes=2");
  refused({"--max-restarts", "-1"}, "--max-restarts");
  refused({"--master-port", "0"}, "--master-port: must be 1 to 65535");
  refused({"--master-port", "65536"}, "--master-port: must be 1 to 65535");
  refused({"--standalone", "--master-port", "1234"}, "--standalone takes a free port");
  refused({"--tee", "1"}, "needs --log-dir");
  refused({"--tee", "4", "--log-dir", "x"}, "--tee: must be 0 to 3");
  refused({"--ranks-filter", "1"}, "--ranks-filter");
  refused({"--ranks-filter", "0,,"}, "--ranks-filter");
  const auto absent = mantissa({"launch", "--nproc-per-node", "2", "--", "./absent"});
  EXPECT_EQ(absent.exit_code, 2);
  EXPECT_THAT(absent.errors, HasSubstr("./absent: cannot be run: No such file or directory"));
  EXPECT_EQ(mantissa({"launch", "--nproc-per-node", "2"}).exit_code, 2) << "no command";
}

}  // namespace mantissa::command_line_test
