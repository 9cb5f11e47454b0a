// 200 SIGTERM and 2,000 SIGUSR2 at random times over one process and two ranks with each instruction set of oneDNN that this host has
// (MANTISSA_TRIALS: another number of SIGTERM, with ten times as many SIGUSR2).
#include "signal_trials.h"

#include "mantissa/base/integers.h"

namespace mantissa::signal_trials_test {

using test::SignalCase;
using test::SignalTrials;

TEST_P(SignalTrials, AnswersSignalsAtAnyTimeAndResumesBitForBit) {
  constexpr size_t kCases = 6;
  const char* const asked = std::getenv("MANTISSA_TRIALS");
  const size_t trials = ceil_div(asked != nullptr ? static_cast<size_t>(std::atoi(asked)) : 200, kCases);
  stop_and_save_at_random_times(trials, 10);
}

INSTANTIATE_TEST_SUITE_P(, SignalTrials,
                         ::testing::Values(SignalCase{"avx2_alone", "AVX2", 1}, SignalCase{"avx2_ranks", "AVX2", 2},
                                           SignalCase{"avx512_alone", "AVX512_CORE", 1}, SignalCase{"avx512_ranks", "AVX512_CORE", 2},
                                           SignalCase{"native_alone", "ALL", 1}, SignalCase{"native_ranks", "ALL", 2}),
                         test::case_name);

}  // namespace mantissa::signal_trials_test
