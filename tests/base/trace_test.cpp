// Spans that are kept, their clocks, and the calls that a profiler gets for them.
#include "mantissa/base/trace.h"

#include <gmock/gmock.h>

#include <map>
#include <string>
#include <thread>

namespace mantissa::trace_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(Trace, KeepsNothingUnlessStarted) {
  EXPECT_FALSE(tracing());
  {
    const TraceSpan span(Track::kernel, "gemm");
    EXPECT_EQ(span.ended(), nullptr);
  }
  EXPECT_THAT(end_trace(), IsEmpty());
  EXPECT_TRUE(start_trace());
  EXPECT_TRUE(tracing());
  EXPECT_FALSE(start_trace()) << "it is traced already";
  { const TraceSpan span(Track::kernel, "gemm"); }
  EXPECT_THAT(end_trace(), SizeIs(1));
  EXPECT_FALSE(tracing());
  EXPECT_THAT(end_trace(), IsEmpty()) << "spans are forgotten";
}

TEST(Trace, HoldsSpansOfEveryThreadWithTheirTimes) {
  start_trace();
  {
    const TraceSpan outer(Track::pass, "backward", 7);
    std::thread([] {
      const TraceSpan span(Track::exchange, "gradients");
      span.ended()->bytes = 4096;
    }).join();
    const TraceSpan inner(Track::wait, "wait");
  }
  const std::vector<RecordedSpan> all = end_trace();
  ASSERT_THAT(all, SizeIs(3));
  const auto &sent = all[0], &inner = all[1], &outer = all[2];  // in the order of their ends
  EXPECT_EQ(sent.name, "gradients");
  EXPECT_EQ(sent.track, Track::exchange);
  EXPECT_EQ(sent.bytes, 4096);
  EXPECT_EQ(outer.number, 7);
  EXPECT_EQ(inner.number, -1);
  EXPECT_EQ(inner.thread, outer.thread);
  EXPECT_NE(sent.thread, outer.thread);
  const auto end = [](const RecordedSpan& span) { return span.begin + span.duration; };
  EXPECT_LE(outer.begin, sent.begin);
  EXPECT_LE(end(sent), inner.begin);
  EXPECT_LE(end(inner), end(outer));
}

TEST(Trace, ASpanThatEndedBeforeTheEndOfItsBlockKeepsThatEnd) {
  start_trace();
  {
    const TraceSpan early(Track::kernel, "early");
    const RecordedSpan* const described = early.ended();
    const auto duration = described->duration;
    EXPECT_GT(duration.count(), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_EQ(early.ended()->duration, duration);
  }
  const std::vector<RecordedSpan> all = end_trace();
  ASSERT_THAT(all, SizeIs(1));
  EXPECT_LT(all[0].duration, std::chrono::milliseconds(2));
}

// A device whose lane comes to a mark when it is told to.
class ToldClock final : public TraceClock {
 public:
  int lane() const override { return 5; }
  std::shared_ptr<const void> mark() override { return std::make_shared<int>(++marks_); }
  bool reached(const std::shared_ptr<const void>& mark) const override { return number(mark) <= come_; }
  std::chrono::nanoseconds time(const std::shared_ptr<const void>& mark) override { return std::chrono::microseconds(100 * number(mark)); }
  void come_to(int mark) { come_ = mark; }

 private:
  static int number(const std::shared_ptr<const void>& mark) { return *std::static_pointer_cast<const int>(mark); }
  int marks_ = 0, come_ = 0;
};

TEST(Trace, ASpanOfADeviceIsHandedOnWithTheTimesOfItsLaneOnceThatHasCome) {
  ToldClock clock;
  std::vector<RecordedSpan> got;
  start_trace([&got](const std::vector<RecordedSpan>& spans) { got.insert(got.end(), spans.begin(), spans.end()); }, &clock);
  {
    const TraceSpan outer(Track::pass, "forward");     // from mark 1 to 4
    { const TraceSpan inner(Track::kernel, "gemm"); }  // from mark 2 to 3
  }
  { const TraceSpan late(Track::kernel, "late"); }  // to mark 6
  flush_trace();
  EXPECT_THAT(got, IsEmpty());
  clock.come_to(5);  // the last one has begun
  flush_trace();
  ASSERT_THAT(got, SizeIs(2));
  EXPECT_EQ(got[0].name, "gemm");
  EXPECT_EQ(got[0].begin, std::chrono::microseconds(200));
  EXPECT_EQ(got[0].duration, std::chrono::microseconds(100));
  EXPECT_EQ(got[0].thread, 5);
  EXPECT_EQ(got[1].begin, std::chrono::microseconds(100));
  EXPECT_EQ(got[1].duration, std::chrono::microseconds(300));
  EXPECT_THAT(end_trace(), IsEmpty()) << "the device has not come to the last one";
  EXPECT_THAT(got, SizeIs(2));
}

// A thread beside the one that submits to the device computes on the host: its lane and its marks would be those of another.
TEST(Trace, ASpanOfAThreadBesideADeviceHasTheTimesOfTheHost) {
  ToldClock clock;
  std::vector<RecordedSpan> got;
  start_trace([&got](const std::vector<RecordedSpan>& spans) { got.insert(got.end(), spans.begin(), spans.end()); }, &clock);
  std::thread([] { const TraceSpan beside(Track::kernel, "beside"); }).join();
  { const TraceSpan own(Track::kernel, "own"); }
  clock.come_to(2);
  end_trace();
  ASSERT_EQ(got.size(), 2U);
  EXPECT_EQ(got[0].name, "beside");
  EXPECT_NE(got[0].thread, clock.lane());
  EXPECT_GE(got[0].thread, 16);
  EXPECT_LT(std::chrono::steady_clock::now().time_since_epoch() - got[0].begin, std::chrono::hours(1));
  EXPECT_EQ(got[1].thread, clock.lane());
  EXPECT_EQ(got[1].begin, std::chrono::microseconds(100)) << "the first mark is the device's own";
}

class BrokenClock final : public TraceClock {
 public:
  int lane() const override { return 0; }
  std::shared_ptr<const void> mark() override { throw Error(ExitCode::environment, "no event"); }
  bool reached(const std::shared_ptr<const void>&) const override { return false; }
  std::chrono::nanoseconds time(const std::shared_ptr<const void>&) override { return {}; }
};

TEST(Trace, AMarkThatCannotBeMadeLeavesTheSpanOut) {
  BrokenClock clock;
  start_trace({}, &clock);
  { const TraceSpan span(Track::kernel, "gemm"); }
  EXPECT_THAT(end_trace(), ::testing::IsEmpty());
}

TEST(Trace, HandsSpansOnBeforeTooManyAreKept) {
  size_t got = 0, most = 0;
  start_trace([&](const std::vector<RecordedSpan>& spans) { got += spans.size(), most = std::max(most, spans.size()); });
  for (size_t i = 0; i < kBufferedSpans + 10; ++i) const TraceSpan span(Track::kernel, "fill");
  EXPECT_EQ(got, kBufferedSpans);
  EXPECT_THAT(end_trace(), IsEmpty());
  EXPECT_EQ(got, kBufferedSpans + 10);
  EXPECT_EQ(most, kBufferedSpans);
}

std::vector<std::string>& told() {
  static std::vector<std::string> all;
  return all;
}

TEST(SpanHooks, AreToldOfSpansWhetherOrNotTheyAreTraced) {
  static constexpr SpanHook kHook{.begin = [](const char* name) { told().emplace_back(name); }, .end = [] { told().emplace_back("end"); }};
  set_span_hook(&kHook);
  {
    const TraceSpan outer(Track::pass, "forward");
    const TraceSpan inner(Track::wait, "wait");
  }
  start_trace();
  { const TraceSpan traced(Track::exchange, "gather"); }
  EXPECT_EQ(end_trace().size(), 1U);
  set_span_hook(nullptr);
  { const TraceSpan untold(Track::pass, "backward"); }
  EXPECT_THAT(told(), ElementsAre("forward", "wait", "end", "end", "gather", "end"));
}

// A span that begins before the hook is set does not end it.
TEST(SpanHooks, HearOfBothEndsOrOfNone) {
  static constexpr SpanHook kHook{.begin = [](const char*) { told().emplace_back("begin"); }, .end = [] { told().emplace_back("end"); }};
  told().clear();
  {
    const TraceSpan early(Track::pass, "forward");
    set_span_hook(&kHook);
  }
  EXPECT_THAT(told(), ElementsAre());
  set_span_hook(nullptr);
}

}  // namespace mantissa::trace_test
