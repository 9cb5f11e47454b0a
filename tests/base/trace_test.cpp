// Calls that a profiler gets for spans. tests/metrics/trace_test.cpp tests the spans that are kept.
#include "mantissa/base/trace.h"

#include <gmock/gmock.h>

#include <string>

namespace mantissa::trace_test {

using ::testing::ElementsAre;

std::vector<std::string>& told() {
  static std::vector<std::string> all;
  return all;
}

TEST(SpanHooks, AreToldOfSpansWhetherOrNotTheyAreTraced) {
  static constexpr SpanHook kHook{.begin = [](const char* name) { told().emplace_back(name); }, .end = [] { told().emplace_back("end"); }};
  set_span_hook(&kHook);
  {
    const TraceSpan outer(Track::compute, "forward");
    const TraceSpan inner(Track::wait, "wait");
  }
  start_trace();
  { const TraceSpan traced(Track::communication, "gather"); }
  EXPECT_EQ(end_trace().size(), 1U);
  set_span_hook(nullptr);
  { const TraceSpan untold(Track::compute, "backward"); }
  EXPECT_THAT(told(), ElementsAre("forward", "wait", "end", "end", "gather", "end"));
}

// A span that begins before the hook is set does not end it.
TEST(SpanHooks, HearOfBothEndsOrOfNone) {
  static constexpr SpanHook kHook{.begin = [](const char*) { told().emplace_back("begin"); }, .end = [] { told().emplace_back("end"); }};
  told().clear();
  {
    const TraceSpan early(Track::compute, "forward");
    set_span_hook(&kHook);
  }
  EXPECT_THAT(told(), ElementsAre());
  set_span_hook(nullptr);
}

}  // namespace mantissa::trace_test
