// eval --logprobs, and token ids in place of text, as a user runs them.
#include <gmock/gmock.h>

#include <cmath>
#include <sstream>

#include "mantissa/base/utf8.h"
#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/hf/load_model.h"
#include "mantissa/train/evaluate.h"
#include "process.h"
#include "training.h"

namespace mantissa::logprobs_test {

using nlohmann::json;
using ::testing::HasSubstr;

class LogprobsTest : public test::TrainingTest {
 protected:
  LogprobsTest() { run("run", {"training.steps=3", "data.tokenizer=byte", "precision.dtype=bf16"}); }

  test::ProcessResult mantissa(std::vector<std::string> arguments) const {
    return test::run_mantissa(std::move(arguments), folder_.path());
  }
  // Of a command that succeeds.
  std::string output(std::vector<std::string> arguments) const {
    const auto result = mantissa(std::move(arguments));
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return result.output;
  }
  std::vector<json> lines(const char* file = "out.jsonl") const {
    std::istringstream text(test::read_file(folder_ / file));
    std::vector<json> lines;
    for (std::string line; std::getline(text, line);) lines.push_back(json::parse(line));
    return lines;
  }
  std::string refused(std::vector<std::string> arguments, int code = 2) const {
    const auto result = mantissa(std::move(arguments));
    EXPECT_EQ(result.exit_code, code) << result.errors;
    return result.errors;
  }
  std::string path_ = run_folder("run");
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
  test::write_file(folder_ / "other.txt", bytes);
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

TEST_F(LogprobsTest, TokensThatDoNotCountAreNull) {
  run("masked", {"training.steps=1", "data.tokenizer=byte", "data.eod_id=97", "data.mask_eod_loss=true"});
  test::write_file(folder_ / "other.txt", "bcada");
  output({"eval", run_folder("masked"), "--data", "other.txt", "--logprobs", "out.jsonl"});
  const std::vector<json> found = lines();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].at("tokens"), json::parse("[98,99,97,100,97]"));
  std::string nulls;
  for (const json& logprob : found[0].at("logprobs")) nulls += logprob.is_null() ? '0' : '1';
  EXPECT_EQ(nulls, "01101") << "what follows the end of a document is not predicted";
}

TEST_F(LogprobsTest, GenerateContinuesIdsAsItContinuesTheirText) {
  const std::vector<std::string> options = {"generate", path_, "--max-new-tokens", "9"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), options.begin(), options.end());
    return output(more);
  };
  std::istringstream ids(with({"--prompt-ids", "97,98"}));
  std::string text, line = ids.str();
  for (int id = 0; ids >> id;) text += static_cast<char>(id);
  if (const size_t whole = whole_characters(text); whole < text.size()) text = text.substr(0, whole) + "\xEF\xBF\xBD";
  EXPECT_EQ(text + "\n", with({"--prompt", "ab"}));
  EXPECT_EQ(line.substr(0, 6), "97 98 ");
  EXPECT_EQ(line.back(), '\n');
}

TEST_F(LogprobsTest, DtypeIsWhatTheModelComputesIn) {
  const auto logprobs = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"eval", path_, "--prompt-ids", "97,98,99", "--logprobs", "out.jsonl"});
    output(more);
    return lines()[0].at("logprobs");
  };
  const json saved = logprobs({}), fp32 = logprobs({"--dtype", "fp32"});
  EXPECT_EQ(saved, logprobs({"--dtype", "bf16"}));
  EXPECT_NE(saved, fp32);
  EXPECT_NEAR(saved[1].get<double>(), fp32[1].get<double>(), 0.1);
  EXPECT_EQ(load_model(path_, make_backend("cpu"), {}, Dtype::f32).model->compute(), Dtype::f32);
  EXPECT_NE(output({"generate", path_, "--dtype", "fp32", "--prompt", "a"}), "");
  EXPECT_THAT(refused({"eval", path_, "--dtype", "fp16"}), HasSubstr("--dtype"));
}

TEST_F(LogprobsTest, MistakesAreNamed) {
  const auto of_ids = [&](const std::string& ids) { return refused({"eval", path_, "--prompt-ids", ids}); };
  EXPECT_THAT(of_ids("97,x"), HasSubstr("--prompt-ids: \"x\" is no token id"));
  EXPECT_THAT(of_ids("97,-1"), HasSubstr("\"-1\" is no token id"));
  EXPECT_THAT(of_ids("97,99999999999"), HasSubstr("is no token id"));
  EXPECT_THAT(of_ids("97,256"), HasSubstr("the token 256 is outside the vocabulary of 256"));
  EXPECT_THAT(of_ids(" ,"), HasSubstr("there are no token ids"));
  for (const char* const missing : {"97,,98", "97, ", ",97"}) EXPECT_THAT(of_ids(missing), HasSubstr("a token id is missing"));
  EXPECT_THAT(of_ids("97"), HasSubstr("at least two"));
  EXPECT_THAT(of_ids(test::repeated("97,", 17) + "97"), HasSubstr("18 tokens, the model has 16 positions"));
  EXPECT_THAT(output({"eval", path_, "--prompt-ids", test::repeated("97,", 16) + "97"}), HasSubstr("| 16 targets"));
  EXPECT_THAT(refused({"eval", path_, "--prompt-ids", "1,2", "--data", "text.txt"}), HasSubstr("do not go with it"));
  EXPECT_THAT(refused({"eval", path_, "--logprobs", "nowhere/out.jsonl"}), HasSubstr("there is no folder nowhere"));
  EXPECT_THAT(refused({"generate", path_, "--prompt", "a", "--prompt-ids", "1"}), HasSubstr("exclude each other"));
  EXPECT_THAT(refused({"generate", path_, "--prompt-ids", "256"}), HasSubstr("outside the vocabulary"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out.jsonl"));
}

TEST_F(LogprobsTest, AModelWithoutATokenizerTakesIds) {
  std::string ids;
  for (int i = 0; i < 400; ++i) ids += {static_cast<char>(i % 7), '\0'};
  test::write_file(folder_ / "ids.bin", ids);
  const std::string data = R"(data={"path":")" + (folder_ / "ids.bin") + R"(","dtype":"u16"})";
  run("ids", {"training.steps=1", data, "model.vocab_size=11"});
  EXPECT_THAT(refused({"generate", run_folder("ids"), "--prompt", "a"}), HasSubstr("--prompt-ids"));
  EXPECT_EQ(output({"generate", run_folder("ids"), "--prompt-ids", "1 2 3", "--max-new-tokens", "1"}).substr(0, 6), "1 2 3 ");
}

}  // namespace mantissa::logprobs_test
