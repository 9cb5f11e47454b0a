// eval --logprobs, and token ids in place of text.
#include <gmock/gmock.h>

#include <cmath>
#include <sstream>

#include "checkpoint/checkpoint.h"
#include "hf/load_model.h"
#include "mantissa/base/text.h"
#include "shared_run.h"
#include "tool_commands.h"
#include "train/evaluate.h"

namespace mantissa::logprobs_test {

using nlohmann::json;
using ::testing::HasSubstr;
using Words = std::vector<std::string>;

class LogprobsTest : public test::TrainingTest {
 protected:
  static void SetUpTestSuite() {
    shared_ = std::make_unique<test::SharedRun>(Words{"training.steps=3", "data.tokenizer=byte", "precision.dtype=bf16"});
  }
  static void TearDownTestSuite() { shared_.reset(); }

  // Returns the output of a command that succeeds.
  static std::string output(const Words& words, const Words& more = {}) {
    Words all = words;
    all.insert(all.end(), more.begin(), more.end());
    const test::CommandResult result = test::command_result(all);
    EXPECT_EQ(result.exit_code, 0) << ::testing::PrintToString(all) << result.error;
    return result.output;
  }
  static std::vector<json> lines() {
    std::istringstream text(test::read_file("out.jsonl"));
    std::vector<json> lines;
    for (std::string line; std::getline(text, line);) lines.push_back(json::parse(line));
    return lines;
  }

  static inline std::unique_ptr<test::SharedRun> shared_;
  const std::string path_ = shared_->path();
  test::WorkingFolder here_{folder_.path()};
};

TEST_F(LogprobsTest, EachSequenceOfIdsIsALineWithTheBitsOfTheModel) {
  const std::string printed =
      output({"eval", path_, "--prompt-ids", "97,98,99,100", "--prompt-ids", " 104 97, 255", "--logprobs", "out.jsonl"});
  const std::vector<json> found = lines();
  ASSERT_EQ(found.size(), 2U);
  const LoadedModel loaded = load_model(path_, make_backend("cpu"));
  double sum = 0.0;
  for (const auto& [i, tokens] : {std::pair<size_t, std::vector<int32_t>>{0, {97, 98, 99, 100}}, {1, {104, 97, 255}}}) {
    EXPECT_EQ(found[i].at("tokens").get<std::vector<int32_t>>(), tokens);
    const json& logprobs = found[i].at("logprobs");
    const std::vector<float> expected = target_logprobs(*loaded.model, batch_of(tokens));
    ASSERT_EQ(logprobs.size(), tokens.size());
    EXPECT_TRUE(logprobs[0].is_null());
    for (size_t t = 0; t < expected.size(); ++t) EXPECT_EQ(logprobs[t + 1].get<float>(), expected[t]) << "all digits";
    for (const float logprob : expected) sum -= double{logprob};
  }
  EXPECT_THAT(printed, HasSubstr("| 5 targets\n"));
  EXPECT_NEAR(std::stod(printed.substr(printed.find("loss ") + 5)), sum / 5.0, 1e-5);
}

TEST_F(LogprobsTest, DataIsWrittenInWindowsThatCoverIt) {
  const std::string bytes = test::second_order_text(38);
  test::write_file("other.txt", bytes);
  const std::string with = output({"eval", path_, "--data", "other.txt", "--logprobs", "out.jsonl"});
  EXPECT_EQ(with, output({"eval", path_, "--data", "other.txt"}));
  std::string read;
  double sum = 0.0;
  const std::vector<json> found = lines();
  ASSERT_EQ(found.size(), 3U) << "16 + 16 + 5 targets";
  for (const json& line : found) {
    const auto tokens = line.at("tokens").get<std::vector<int>>();
    ASSERT_EQ(tokens.size(), line.at("logprobs").size());
    for (size_t t = 0; t < tokens.size(); ++t) {
      if (t > 0 || read.empty()) read += static_cast<char>(tokens[t]);
      if (t > 0) sum -= line.at("logprobs")[t].get<double>();
    }
  }
  EXPECT_EQ(read, bytes);
  EXPECT_NEAR(std::stod(with.substr(with.find("loss ") + 5)), sum / 37.0, 1e-5);
  output({"eval", path_, "--data", "other.txt", "--iters", "2", "--micro-batch-size", "1", "--logprobs", "out.jsonl"});
  EXPECT_EQ(lines(), (std::vector<json>(found.begin(), found.begin() + 2)));
}

// The window belongs to the loss, as a target near its begin is predicted from little: it is printed, and may be given.
TEST_F(LogprobsTest, TheWindowOfALossIsPrintedAndMayBeGiven) {
  test::write_file("other.txt", test::second_order_text(64));
  const Words eval = {"eval", path_, "--data", "other.txt"};
  EXPECT_THAT(output(eval), HasSubstr("| 63 targets | seq_len 16\n")) << "that of the run";
  EXPECT_EQ(output(eval), output(eval, {"--seq-len", "16"}));
  const std::string shorter = output(eval, {"--seq-len", "4", "--logprobs", "out.jsonl"});
  EXPECT_THAT(shorter, HasSubstr("| 63 targets | seq_len 4\n"));
  EXPECT_EQ(lines().size(), 16U);
  EXPECT_NE(shorter.substr(0, shorter.find(" targets")), output(eval).substr(0, output(eval).find(" targets")));
  // A folder has none of its own; with the same window its loss is that of the run.
  output({"export", path_, "--output", "hf"});
  const auto loss = [&](const std::string& of) {
    const std::string printed = output({"eval", of, "--data", "other.txt", "--seq-len", "8"});
    return printed.substr(printed.find("loss"), printed.find(" | perplexity") - printed.find("loss"));
  };
  EXPECT_EQ(loss("hf"), loss(path_));
  EXPECT_THAT(output({"eval", "hf", "--data", "other.txt"}), HasSubstr("| seq_len 16\n")) << "its positions";
}

TEST_F(LogprobsTest, TokensThatDoNotCountAreNull) {
  run("masked", {"training.steps=1", "data.tokenizer=byte", "data.eod_id=97", "data.mask_eod_loss=true"});
  test::write_file("other.txt", "bcada");
  output({"eval", run_folder("masked"), "--data", "other.txt", "--logprobs", "out.jsonl"});
  const std::vector<json> found = lines();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].at("tokens"), json::parse("[98,99,97,100,97]"));
  std::string nulls;
  for (const json& logprob : found[0].at("logprobs")) nulls += logprob.is_null() ? '0' : '1';
  EXPECT_EQ(nulls, "01101") << "what follows the end of a document is not predicted";
}

TEST_F(LogprobsTest, GenerateContinuesIdsAsItContinuesTheirText) {
  const Words words = {"generate", path_, "--max-new-tokens", "9"};
  const std::string line = output(words, {"--prompt-ids", "97,98"});
  std::istringstream ids(line);
  std::string text;
  for (int id = 0; ids >> id;) text += static_cast<char>(id);
  if (const size_t whole = whole_characters(text); whole < text.size()) text = text.substr(0, whole) + "\xEF\xBF\xBD";
  EXPECT_EQ(text + "\n", output(words, {"--prompt", "ab"}));
  EXPECT_TRUE(line.starts_with("97 98 ") && line.ends_with('\n')) << line;
}

TEST_F(LogprobsTest, DtypeIsWhatTheModelComputesIn) {
  const auto logprobs = [&](const Words& more) {
    output({"eval", path_, "--prompt-ids", "97,98,99", "--logprobs", "out.jsonl"}, more);
    return lines()[0].at("logprobs");
  };
  const json saved = logprobs({}), fp32 = logprobs({"--dtype", "fp32"});
  EXPECT_EQ(saved, logprobs({"--dtype", "bf16"}));
  EXPECT_NE(saved, fp32);
  EXPECT_NEAR(saved[1].get<double>(), fp32[1].get<double>(), 0.1);
  EXPECT_EQ(load_model(path_, make_backend("cpu"), {}, {.dtype = Dtype::f32}).model->compute(), Dtype::f32);
  EXPECT_NE(output({"generate", path_, "--dtype", "fp32", "--prompt", "a"}), "");
}

TEST_F(LogprobsTest, ASequenceMayHaveOneTokenMoreThanPositions) {
  EXPECT_THAT(output({"eval", path_, "--prompt-ids", test::repeated("97,", 16) + "97"}), HasSubstr("| 16 targets"));
}

TEST_F(LogprobsTest, AModelWithoutATokenizerTakesIds) {
  std::string ids;
  for (int i = 0; i < 400; ++i) ids += {static_cast<char>(i % 7), '\0'};
  test::write_file("ids.bin", ids);
  run("ids", {"training.steps=1", R"(data={"path":")" + (folder_ / "ids.bin") + R"(","dtype":"u16"})", "model.vocab_size=11"});
  const Words generate = {"generate", run_folder("ids"), "--max-new-tokens", "1"};
  EXPECT_EQ(output(generate, {"--prompt-ids", "1 2 3"}).substr(0, 6), "1 2 3 ");
  EXPECT_THAT(test::command_result(generate).error, HasSubstr("has no tokenizer; give --prompt-ids"));
}

}  // namespace mantissa::logprobs_test
