// Messages of commands about words, files and folders that do not fit; they leave nothing behind.
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "process.h"
#include "shared_run.h"
#include "tool_commands.h"

namespace mantissa::command_errors_test {

using ::testing::HasSubstr;
using Words = std::vector<std::string>;

// Works in the folder of a run of the byte tokenizer with one step.
class CommandErrors : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    shared_ = std::make_unique<test::SharedRun>(Words{"training.steps=1", "data.tokenizer=byte"});
    here_ = std::make_unique<test::WorkingFolder>(shared_->folder().path());
    for (const auto& [name, content] : {std::pair{"empty.txt", ""}, {"gap.txt", "abc\n\nd\n"}, {"bad.txt", "ab\xff"}, {"a.txt", "abca"}})
      test::write_file(name, content);
    test::write_file("chat.jsonl", R"({"messages": [{"role": "user", "content": "a"}]})");
    test::write_file("answer.jsonl", R"({"messages": [{"role": "assistant", "content": "a"}]})");
    test::write_file("pairs.jsonl", R"({"prompt": "a", "completion": "bc"})");
    test::write_file("texts.jsonl", R"({"text": "ab"})");
    test::write_file("vocabulary.json", R"({"type":"char","characters":[98]})");
  }
  static void TearDownTestSuite() {
    here_.reset();
    shared_.reset();
  }
  static std::vector<std::string> listing() {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(".")) names.push_back(entry.path().string());
    std::ranges::sort(names);
    return names;
  }
  // Runs a command. A comparison that is not refused ends where its folder is to be made: to train, it would start this executable, all
  // tests of which would run again.
  static std::string outcome_of(Words words) {
    if (words.front() == "compare") words.insert(words.end(), {"--output", "a.txt/runs"});
    return test::outcome_of([&] { test::run_command(words); });
  }
  static std::string without_folder(const std::string& message) {
    return test::replaced(message, shared_->folder().path().string(), "FOLDER");
  }

  static inline std::unique_ptr<test::SharedRun> shared_;
  static inline std::unique_ptr<test::WorkingFolder> here_;
};

class CommandMessages : public CommandErrors {};

TEST_F(CommandMessages, AreTheExpectedOnesAndNothingIsWritten) {
  const std::vector<std::string> before = listing();
  test::expect_messages("commands", [](const std::string& line) { return without_folder(outcome_of(test::words_of(line))); });
  EXPECT_EQ(listing(), before);
}

// Messages of the program alone: of its parser, and of train.
TEST_F(CommandMessages, OfTheProgramAreTheExpectedOnesAndNothingIsWritten) {
  const std::vector<std::string> before = listing();
  test::expect_messages("program", [](const std::string& line) {
    const auto run = test::run_process({"sh", "-c", "mantissa() { exec " MANTISSA_BINARY " \"$@\"; }; " + line}, ".");
    EXPECT_EQ(run.output, "") << line;
    EXPECT_TRUE(run.errors.starts_with("error: ") && run.errors.ends_with("\n")) << line << '\n' << run.errors;
    const size_t length = std::string("error: ").size();
    return without_folder(text(run.exit_code, ", ", run.errors.substr(length, run.errors.size() - length - 1)));
  });
  EXPECT_EQ(listing(), before);
}

TEST_F(CommandErrors, WordsThatTheParserRefusesAreErrorsLikeAllOthers) {
  for (const Words& words : {Words{},
                             {"train"},
                             {"bench", "--foo"},
                             {"eval", "a", "b"},
                             {"config"},
                             {"config", "check"},
                             {"launch"},
                             {"tokenize", "a.txt"},
                             {"tokenize", "--output", "out"},
                             {"eval", "a", "--dtype", "fp16"},
                             {"tokenize", "a.txt", "--output", "out", "--format", "raw"},
                             {"bench", "train", "run.json", "--filter", "x"}}) {
    const auto refused = test::run_mantissa(words, ".");
    EXPECT_EQ(refused.exit_code, 2) << ::testing::PrintToString(words);
    EXPECT_EQ(refused.output, "");
    EXPECT_TRUE(refused.errors.starts_with("error: ")) << refused.errors;
  }
}

// Paths that a user may name by mistake: loops of links, names that are too long, folders, sockets and pipes where a file is wanted.
class OddPaths : public CommandErrors {
 protected:
  static void SetUpTestSuite() {
    CommandErrors::SetUpTestSuite();
    std::filesystem::create_symlink("loop", "loop");
    std::filesystem::create_directory("folder");
    ASSERT_EQ(::mkfifo("pipe", 0600), 0);
    sockaddr_un address{.sun_family = AF_UNIX, .sun_path = "socket"};
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    ::close(fd);
  }
  // Each command with an odd path in place of %.
  static void expect_usage_errors(const std::vector<std::string>& paths, const std::vector<std::string>& lines) {
    for (const std::string& path : paths)
      for (const std::string& line : lines) expect_usage_error(test::replaced(line, "%", path));
  }
  static void expect_usage_error(const std::string& line) {
    SCOPED_TRACE(line.substr(0, 200));
    EXPECT_THAT(test::outcome_of([&] { test::run_command(test::words_of(line)); }).substr(0, 200), ::testing::StartsWith("2, "));
  }
  static std::vector<std::string> no_folders() {
    return {"loop", "pipe", "socket", "loop/x", "socket/x", std::string(300, 'y'), std::string(5000, 'z')};
  }
  // These are no files, either.
  static std::vector<std::string> odd() {
    std::vector<std::string> all = no_folders();
    all.emplace_back("folder");
    return all;
  }
};

TEST_F(OddPaths, WhereAConfigOrAnInputIsWantedAreUsageErrors) {
  expect_usage_errors(odd(), {"config check %", "config check run.json --set-file %", "config check run.json --set data.path=%",
                              "config check run.json --set data.path=null --set data.valid_fraction=0.1 --set data.train.0.path=text.txt "
                              "--set data.valid.0.path=%",
                              "tokenize --output out %", "tokenize --tokenizer char --output out text.txt --vocabulary %"});
}

TEST_F(OddPaths, WhereACheckpointOrAFolderIsWantedAreUsageErrors) {
  expect_usage_errors(no_folders(), {"eval %", "verify %", "inspect %", "report %", "conformance %", "inspect --diff folder %"});
}

TEST_F(OddPaths, OfARunAreUsageErrors) {
  for (const std::string& path : no_folders()) {
    for (const Words& sets : {Words{"checkpoint.init_from=%"},
                              {"checkpoint.resume=%"},
                              {"checkpoint.dir=%"},
                              {"logging.dir=%"},
                              {"checkpoint.dir=%", "checkpoint.resume=auto"},
                              {"logging.dir=%", "checkpoint.resume=auto"}}) {
      ConfigSources sources{.file = "run.json", .sets = {"logging.dir=new", "checkpoint.dir=%d/saved"}};
      for (const std::string& set : sets) sources.sets.push_back(test::replaced(set, "%", path));
      EXPECT_THAT(test::outcome_of([&] { train(load_run_config(sources), {"test"}, {}); }), ::testing::StartsWith("2, "))
          << ::testing::PrintToString(sets) << path.substr(0, 200);
      std::filesystem::remove_all("new");
    }
  }
}

TEST_F(OddPaths, WhereAFileIsToBeWrittenAreUsageErrorsAndStayAsTheyAre) {
  expect_usage_errors(odd(), {"report runs/run --output %", "bench gemm --json %"});
  expect_usage_error("report runs/run --output \"\"");
  expect_usage_error("report runs/run --output " + std::string(253, 'a'));  // with .tmp it is too long
  std::filesystem::create_directory("taken.idx");
  for (const char* const prefix : {"loop/x", "missing/x", "taken"}) expect_usage_error(std::string("tokenize text.txt --output ") + prefix);
  EXPECT_TRUE(std::filesystem::is_symlink("loop"));
  EXPECT_TRUE(std::filesystem::is_fifo("pipe"));
  EXPECT_TRUE(std::filesystem::is_socket("socket"));
}

TEST_F(OddPaths, FolderThatIsGoneIsNoInternalError) {
  const std::string check = MANTISSA_BINARY " config check " + (shared_->folder() / "run.json") + " --set data.path=text.txt";
  const auto run = test::run_process({"bash", "-c", "mkdir gone; cd gone; rmdir ../gone; exec " + check}, ".");
  EXPECT_EQ(run.exit_code, 2) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("error: "));
}

TEST_F(CommandErrors, AComparisonThatIsNotRefusedEndsBeforeItsRuns) {
  EXPECT_THAT(outcome_of({"compare", "run.json", "--recipes", "high,bf16"}), ::testing::StartsWith("2, a.txt/runs: "));
}

TEST_F(CommandErrors, AComparisonDoesNotResume) {
  test::write_file("resumes.json", R"({"checkpoint": {"resume": "runs/run"}})");
  EXPECT_THAT(outcome_of({"compare", "run.json", "--recipes", "high,bf16", "--set-file", "resumes.json"}),
              ::testing::AllOf(::testing::StartsWith("2, checkpoint.resume names "), HasSubstr("but the runs of a comparison are new")));
  std::filesystem::remove("resumes.json");
}

// A file of a recipe changes what is trained, neither what compare sets nor what losses are of.
TEST_F(CommandErrors, AComparisonRefusesKeysOfARecipeThatDoNothingOrCompareNothing) {
  const auto refused = [](const std::string& recipe, const Words& more = {}) {
    test::write_file("own.json", recipe);
    Words words = {"compare", "run.json", "--recipes", "high,own.json"};
    words.insert(words.end(), more.begin(), more.end());
    const std::string message = outcome_of(words);
    std::filesystem::remove("own.json");
    return message;
  };
  const auto ignored = [](const std::string& key, const std::string& how) {
    return "2, with the recipe own: " + key + ": compare sets it " + how + "; take it out of own.json";
  };
  const std::string each = "for each run by --recipes, --seeds and --output";
  EXPECT_EQ(refused(R"({"training": {"seed": 3}})"), ignored("training.seed", each));
  EXPECT_EQ(refused(R"({"logging": {"dir": "a"}})"), ignored("logging.dir", each));
  EXPECT_EQ(refused(R"({"training": {"threads": 1}})"), ignored("training.threads", "for all runs alike: give it in the configuration"));
  EXPECT_EQ(refused(R"({"logging": {"interval": 5}})"), ignored("logging.interval", "to 1, since a median needs the time of every step"));
  EXPECT_EQ(refused(R"({"checkpoint": {"export": {}}})"), ignored("checkpoint.export", "to null: a comparison exports nothing"));
  EXPECT_EQ(refused(R"({"optimizer": {"lr": 0.5}})", {"--set", "optimizer.lr=0.25"}),
            "2, with the recipe own: optimizer.lr: --set optimizer.lr would replace it in all runs: give that by --set-file or in the "
            "configuration");
  EXPECT_THAT(refused(R"({"optimizer": {"lr": 0.5}})", {"--set", R"(optimizer={"beta1": 0.5})"}), HasSubstr("--set optimizer would"));
  const auto other = [](const std::string& differences) {
    return "2, with the recipe own: its losses would not compare, since they are of other tokens: " + differences;
  };
  EXPECT_EQ(refused(R"({"training": {"seq_len": 8}})"), other("training.seq_len is 8 and 16 with high"));
  EXPECT_EQ(refused(R"({"data": {"valid_fraction": 0.5}})"), other("data.valid_fraction is 0.5 and 0.1 with high"));
  EXPECT_EQ(refused(R"({"data": {"tokenizer": "char"}})"), other("data.tokenizer is \"char\" and \"byte\" with high"));
  EXPECT_EQ(refused(R"({"model": {"vocab_size": 300}})"), other("model.vocab_size is 300 and 256 with high"));
  const std::string hint = "; eval.iters null evaluates all of the validation data";
  EXPECT_EQ(refused(R"({"eval": {"iters": 3}})"), other("eval.iters is 3 and 2 with high" + hint));
  EXPECT_EQ(refused(R"({"training": {"micro_batch_size": 8, "grad_accum": 1}})"),
            other("training.micro_batch_size is 8 and 4 with high" + hint));
  EXPECT_THAT(refused(R"({"training": {"micro_batch_size": 8, "grad_accum": 1}, "eval": {"iters": 1}})"),
              ::testing::StartsWith("2, a.txt/runs: "))
      << "as many windows";
  for (const char* const fine : {R"({"training": {"steps": 3}})", R"({"data": {"document_mask": true}})", R"({"model": {"num_layers": 1}})",
                                 R"({"precision": {"recipe": "bf16"}})"})
    EXPECT_THAT(refused(fine), ::testing::StartsWith("2, a.txt/runs: ")) << fine;
}

TEST_F(CommandErrors, AMissingStepListsThoseThatExist) {
  for (const auto& [steps, listed] :
       {std::pair{10, "; there are 2 older and step-00000003, step-00000004, "}, {1, "; there is step-00000001"}}) {
    const std::filesystem::path folder = text("of", steps);
    for (int step = 1; step <= steps; ++step) std::filesystem::create_directories(folder / checkpoint_name(step));
    const std::string missing = (folder / "step-00000011").string();
    for (const Words& words :
         {Words{"eval", missing}, {"verify", missing}, {"config", "check", "run.json", "--set", "checkpoint.resume=" + missing}})
      EXPECT_THAT(test::outcome_of([&] { test::run_command(words); }), ::testing::AllOf(::testing::StartsWith("2, "), HasSubstr(listed)));
    std::filesystem::remove_all(folder);
  }
}

}  // namespace mantissa::command_errors_test
