#include "base/parallel.h"

#include <gtest/gtest.h>
#include <omp.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "hang.h"

namespace mantissa::parallel_test {

class ParallelFor : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { set_num_threads(GetParam()); }
  void TearDown() override { set_num_threads(0); }
};

std::set<std::pair<int64_t, int64_t>> pieces_of(int64_t count, int64_t chunk) {
  std::mutex mutex;
  std::set<std::pair<int64_t, int64_t>> pieces;
  parallel_for(count, chunk, [&](int64_t begin, int64_t end) {
    const std::lock_guard<std::mutex> lock(mutex);
    EXPECT_TRUE(pieces.emplace(begin, end).second);
  });
  return pieces;
}

TEST_P(ParallelFor, PiecesDependOnCountAndChunkOnly) {
  const std::set<std::pair<int64_t, int64_t>> expected{{0, 4}, {4, 8}, {8, 10}};
  EXPECT_EQ(pieces_of(10, 4), expected);
}

TEST_P(ParallelFor, AnExceptionReachesTheCallerAndTheNextLoopIsWhole) {
  for (int round = 0; round < 50; ++round) {
    EXPECT_THROW(parallel_for(64, 1,
                              [](int64_t begin, int64_t) {
                                if (begin % 7 == 3) throw std::runtime_error("piece");
                              }),
                 std::runtime_error);
    EXPECT_EQ(pieces_of(64, 1).size(), 64U);
  }
}

// The caller blocks a signal to wait for it, as `launch` and `compare` do, after threads have started. On one of them its default action
// would end the process.
TEST_P(ParallelFor, ItsThreadsTakeNoSignalThatIsSentToTheProcess) {
  pieces_of(64, 1);
  sigset_t one, before;
  sigemptyset(&one);
  sigaddset(&one, SIGUSR2);
  ::pthread_sigmask(SIG_BLOCK, &one, &before);
  for (int round = 0; round < 20; ++round) {
    EXPECT_EQ(::kill(::getpid(), SIGUSR2), 0);
    const timespec limit{.tv_sec = 10, .tv_nsec = 0};
    EXPECT_EQ(::sigtimedwait(&one, nullptr, &limit), SIGUSR2);
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Starting threads blocks signals for a moment: afterwards those that the caller takes are the same.
TEST(ParallelForOfMoreThreads, LeavesTheSignalsOfItsCaller) {
  sigset_t before{}, after{};
  ::pthread_sigmask(SIG_SETMASK, nullptr, &before);
  set_num_threads(11);  // more than other cases have started
  EXPECT_EQ(pieces_of(64, 1).size(), 64U);
  set_num_threads(0);
  ::pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int signal = 1; signal <= SIGRTMAX; ++signal) EXPECT_EQ(::sigismember(&after, signal), ::sigismember(&before, signal)) << signal;
}

bool on_alternate_stack() {
  stack_t stack{};
  return ::sigaltstack(nullptr, &stack) == 0 && (stack.ss_flags & SS_ONSTACK) != 0;
}

TEST(AlternateStack, GivesBackTheOneBefore) {
  stack_t before{}, during{}, after{};
  ::sigaltstack(nullptr, &before);
  {
    const AlternateStack stack;
    ::sigaltstack(nullptr, &during);
  }
  ::sigaltstack(nullptr, &after);
  EXPECT_NE(during.ss_sp, before.ss_sp);
  EXPECT_EQ(during.ss_flags & SS_DISABLE, 0);
  EXPECT_EQ(after.ss_sp, before.ss_sp);
  EXPECT_EQ(after.ss_flags, before.ss_flags);
}

// Counts the pieces that threads of the pool take of one loop. The caller waits in each of its own until there is one: on a busy machine it
// would take all of them before another thread runs.
class PiecesOfThePool {
 public:
  explicit PiecesOfThePool(int threads) : none_expected_(threads == 1) {}
  // Called in a piece; returns true if the piece is the pool's.
  bool take() {
    if (std::this_thread::get_id() != caller_) return ++taken_ > 0;
    while (!none_expected_ && taken_ == 0 && std::chrono::steady_clock::now() - began_ < test::kHang) std::this_thread::yield();
    return false;
  }
  bool enough() const { return none_expected_ || taken_ > 0; }

 private:
  const bool none_expected_;
  const std::thread::id caller_ = std::this_thread::get_id();
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  std::atomic<int> taken_{0};
};

// Code that a body runs may keep data in the stack pointer.
TEST_P(ParallelFor, ThreadsOfThePoolHandleFaultsOnAStackOfTheirOwn) {
  static std::atomic<int> on_own, elsewhere;
  on_own = elsewhere = 0;
  struct sigaction action {
  }, before{};
  action.sa_handler = [](int) { ++(on_alternate_stack() ? on_own : elsewhere); };
  action.sa_flags = SA_ONSTACK;
  ASSERT_EQ(::sigaction(SIGBUS, &action, &before), 0);
  PiecesOfThePool pool(GetParam());
  parallel_for(64, 1, [&](int64_t, int64_t) {
    if (pool.take()) ::raise(SIGBUS);
  });
  ::sigaction(SIGBUS, &before, nullptr);
  EXPECT_EQ(elsewhere, 0);
  EXPECT_EQ(on_own > 0, GetParam() > 1);
}

TEST_P(ParallelFor, NothingToDoCallsNothing) { EXPECT_TRUE(pieces_of(0, 4).empty()); }

TEST_P(ParallelFor, ManyShortLoopsVisitEveryItemOnce) {
  std::vector<int> visits(257, 0);
  for (int round = 0; round < 300; ++round) {
    parallel_for(257, 3, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
    });
  }
  EXPECT_EQ(visits, std::vector<int>(257, 300));
}

TEST_P(ParallelFor, EveryCountAndChunkCoversItsRangeOnce) {
  for (int64_t count = 0; count < 40; ++count) {
    for (const int64_t chunk : {1, 2, 7, 39, 40, 1000}) {
      std::vector<int> visits(static_cast<size_t>(count), 0);
      parallel_for(count, chunk, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
      });
      EXPECT_EQ(visits, std::vector<int>(static_cast<size_t>(count), 1)) << count << " in pieces of " << chunk;
    }
  }
}

TEST_P(ParallelFor, BodiesSeeOneLibraryThread) {
  omp_set_num_threads(3);
  std::atomic<int> wrong{0};
  parallel_for(64, 1, [&](int64_t, int64_t) { wrong += omp_get_max_threads() != 1; });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(omp_get_max_threads(), 3) << "the caller's setting is restored";
}

// Returns true if flush-to-zero and denormals-are-zero are as asked, and so is what the thread does with a subnormal result and a subnormal
// operand.
bool sees(Subnormals asked) {
  const volatile float smallest_normal = 0x1p-126F, subnormal = 0x1p-130F, factor = 0x1p-4F, large = 0x1p+20F;
  const bool flushed = asked == Subnormals::flushed;
  const bool bits = (_mm_getcsr() & 0x8040U) == (flushed ? 0x8040U : 0U);
  return bits && (smallest_normal * factor == 0.0F) == flushed && (subnormal * large == 0.0F) == flushed;
}

// The caller's own setting, until the end of the block.
class CallerSubnormals {
 public:
  explicit CallerSubnormals(Subnormals setting) : before_(_mm_getcsr()) {
    _mm_setcsr(setting == Subnormals::flushed ? before_ | 0x8040U : before_ & ~0x8040U);
  }
  ~CallerSubnormals() { _mm_setcsr(before_); }
  CallerSubnormals(const CallerSubnormals&) = delete;
  CallerSubnormals& operator=(const CallerSubnormals&) = delete;

 private:
  unsigned before_;
};

constexpr Subnormals kBoth[] = {Subnormals::honored, Subnormals::flushed};

// Threads of the pool keep no setting of the loop before.
TEST_P(ParallelFor, BodiesSeeSubnormalsAsAskedOnEveryThread) {
  for (const Subnormals before : kBoth) {
    const CallerSubnormals setting(before);
    for (int round = 0; round < 40; ++round) {
      const Subnormals asked = kBoth[round % 2];
      std::atomic<int> wrong{0};
      PiecesOfThePool pool(GetParam());
      parallel_for(64, 1, asked, [&](int64_t, int64_t) {
        if (!sees(asked)) ++wrong;
        pool.take();
      });
      EXPECT_TRUE(pool.enough()) << "no thread of the pool took a piece";
      EXPECT_EQ(wrong, 0);
      EXPECT_TRUE(sees(before));
    }
  }
}

TEST_P(ParallelFor, SubnormalsAreHonoredUnlessAskedOtherwise) {
  const CallerSubnormals setting(Subnormals::flushed);
  std::atomic<int> wrong{0};
  parallel_for(64, 1, [&](int64_t, int64_t) { wrong += !sees(Subnormals::honored); });
  EXPECT_EQ(wrong, 0);
}

TEST_P(ParallelFor, AnInnerLoopGivesTheOuterOneItsSubnormalsBack) {
  for (const Subnormals outer : kBoth) {
    for (const Subnormals inner : kBoth) {
      std::atomic<int> wrong{0};
      parallel_for(64, 1, outer, [&](int64_t, int64_t) {
        parallel_for(3, 1, inner, [&](int64_t, int64_t) { wrong += !sees(inner); });
        wrong += !sees(outer);
      });
      EXPECT_EQ(wrong, 0);
    }
  }
}

TEST_P(ParallelFor, AnExceptionGivesTheCallerItsSubnormalsBack) {
  for (const Subnormals before : kBoth) {
    const CallerSubnormals setting(before);
    for (const Subnormals asked : kBoth) {
      EXPECT_THROW(parallel_for(8, 1, asked, [](int64_t, int64_t) { throw std::runtime_error("piece"); }), std::runtime_error);
      EXPECT_TRUE(sees(before));
    }
  }
}

TEST_P(ParallelFor, SeveralThreadsMayCallItAtOnce) {
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        parallel_for(100, 9, [&](int64_t begin, int64_t end) { sum += end - begin; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 3 * 50 * 100);
}

// Enough pieces, each long enough, that a thread of the pool would take one.
TEST_P(ParallelFor, LoopsOfAThreadStayOnItWhereItAsks) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  const auto loop = [&] {
    parallel_for(200, 1, [&](int64_t, int64_t) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      const std::lock_guard<std::mutex> lock(mutex);
      threads.insert(std::this_thread::get_id());
    });
  };
  {
    const SingleThreadedLoops alone;
    loop();
    EXPECT_EQ(threads, std::set{std::this_thread::get_id()});
  }
  for (int i = 0; i < 50 && GetParam() > 1 && threads.size() == 1; ++i) loop();
  EXPECT_EQ(threads.size() > 1, GetParam() > 1) << "as before, once it is over";
}

INSTANTIATE_TEST_SUITE_P(Threads, ParallelFor, testing::Values(1, 2, 3, 8));

TEST(Threads, DefaultIsRestoredByZero) {
  const int cores = num_threads();
  set_num_threads(cores + 5);
  EXPECT_EQ(num_threads(), cores + 5);
  set_num_threads(0);
  EXPECT_EQ(num_threads(), cores);
  set_default_threads(cores + 2);
  EXPECT_EQ(num_threads(), cores + 2);
  set_num_threads(1);
  EXPECT_EQ(num_threads(), 1) << "a number that somebody gives beats the default";
  set_num_threads(0);
  EXPECT_EQ(num_threads(), cores + 2);
  set_default_threads(0);
  EXPECT_EQ(num_threads(), cores);
}

}  // namespace mantissa::parallel_test
