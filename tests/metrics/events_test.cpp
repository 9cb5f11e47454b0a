#include "mantissa/metrics/events.h"

#include <gmock/gmock.h>

#include <functional>
#include <limits>

namespace mantissa::events_test {

using ::testing::HasSubstr;

StepEvent report() {
  return {.step = 120,
          .steps = 2000,
          .loss = 3.28264,
          .gradient_norm = 1.234,
          .lr = 6e-4,
          .milliseconds = 1709.2,
          .tokens_per_second = 38347.0,
          .mfu = 0.469,
          .memory_gib = 4.5,
          .remaining_seconds = 3213.0,
          .tokens = 1};
}

// The peak of the data sheet is that of bf16, whatever the GEMMs multiply, and one that is not known is not guessed.
TEST(StepLine, IsTheDocumentedOne) {
  EXPECT_EQ(step_line(report()),
            "step   120/2000 | loss 3.2826 | norm 1.234 | lr 6.00e-04 | 1709 ms | 38347 tok/s | mfu 46.9% | mem 4.5 GiB | eta 53m33s");
  const std::pair<std::function<void(StepEvent&)>, const char*> changes[] = {
      {[](StepEvent& e) { e.mfu.reset(); }, "| mfu n/a |"},
      {[](StepEvent& e) { e.mfu.reset(), e.mfu_measured = 0.314; }, "| mfu_meas 31.4% |"},
      {[](StepEvent& e) { e.other_gemms = true; }, " | mfu(bf16) 46.9% | "},
      {[](StepEvent& e) { e.other_gemms = true, e.mfu.reset(); }, " | mfu n/a | "},
      {[](StepEvent& e) { e.gpu_memory_gib = 34.5; }, " | mem 4.5 GiB | gpu 34.5 GiB | eta "},
      {[](StepEvent& e) { e.divergence = 0.12344, e.cross_entropy = 3.25; }, "loss 3.2826 | kl 0.1234 | ce 3.2500 | norm 1.234 | "},
      {[](StepEvent& e) { e.padding = 0.1234; }, " | 38347 tok/s, 12.3% padding | mfu 46.9% | "},
      {[](StepEvent& e) { e.loss = std::numeric_limits<double>::quiet_NaN(); }, "loss nan"},
      {[](StepEvent& e) { e.loss.reset(); }, "step   120/2000 | no targets | norm 1.234 | lr "},
      {[](StepEvent& e) { e.skipped = true; }, "eta 53m33s | skipped"}};
  for (const auto& [change, part] : changes) {
    StepEvent event = report();
    change(event);
    EXPECT_THAT(step_line(event), HasSubstr(part));
  }
}

TEST(EvaluationLine, NamesTheSetsOnlyIfThereAreSeveral) {
  EvaluationEvent evaluation{.step = 20, .seconds = 1.25, .best = true};
  evaluation.result = {.loss = 2.0, .targets = 30, .sets = {{.name = "a.txt", .loss = 2.0, .targets = 30}}};
  EXPECT_EQ(evaluation_line(evaluation), "eval    20 | loss 2.0000 | ppl 7.389 | 30 targets | 1.2 s | best");
  evaluation.result.divergence = 0.12344;
  EXPECT_EQ(evaluation_line(evaluation), "eval    20 | loss 2.0000 | ppl 7.389 | kl 0.1234 | 30 targets | 1.2 s | best");
  evaluation.result.sets.push_back({.name = "b.txt", .loss = 2.5, .targets = 10});
  EXPECT_THAT(evaluation_line(evaluation), ::testing::EndsWith(" | a.txt 2.0000 | b.txt 2.5000"));
  evaluation.result.sets[1] = {.name = "b.txt", .loss = std::numeric_limits<double>::quiet_NaN()};
  EXPECT_THAT(evaluation_line(evaluation), ::testing::EndsWith(" | a.txt 2.0000 | b.txt no targets"));
}

TEST(Durations, AreShortAndReadable) {
  EXPECT_EQ(duration_text(0.4), "0s");
  EXPECT_EQ(duration_text(59.6), "1m00s");
  EXPECT_EQ(duration_text(3213), "53m33s");
  EXPECT_EQ(duration_text(7500), "2h05m");
}

TEST(SampleBox, EveryLineIsAsWideAsTheOthersAndControlCharactersAreEscaped) {
  const std::string box = sample_box({.step = 7, .prompt = "Zoë: ", .text = "\x1b[31m" + std::string(200, 'x') + "\nend\t"});
  EXPECT_THAT(box, HasSubstr("Zoë: \\x1b[31m"));
  EXPECT_THAT(box, HasSubstr("end\\x09"));
  EXPECT_EQ(box.find('\x1b'), std::string::npos);
  std::vector<long> widths;
  for (size_t begin = 0; begin < box.size();) {
    const size_t end = std::min(box.find('\n', begin), box.size());
    widths.push_back(std::count_if(box.begin() + static_cast<long>(begin), box.begin() + static_cast<long>(end),
                                   [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
    begin = end + 1;
  }
  EXPECT_EQ(widths, std::vector<long>(widths.size(), 100));
  EXPECT_EQ(widths.size(), 6U);
}

TEST(Throughput, LeavesOutTheFirstStepAndCountsAStallByItsLength) {
  Throughput throughput;
  throughput.add(100, 10.0);
  EXPECT_DOUBLE_EQ(throughput.tokens_per_second(), 10.0);
  throughput.add(100, 0.1);
  EXPECT_NEAR(throughput.tokens_per_second(), 1000.0, 1e-9);
  for (int i = 0; i < 1000; ++i) throughput.add(100, i % 2 == 0 ? 0.1 : 1.9);
  EXPECT_NEAR(throughput.tokens_per_second(), 100.0, 5.0);
  EXPECT_NEAR(throughput.mean_tokens_per_second(), 100.0, 1.0);
}

}  // namespace mantissa::events_test
