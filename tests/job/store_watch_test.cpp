// The store's watch over the main threads of ranks.
#include <gmock/gmock.h>

#include <atomic>
#include <mutex>

#include "store_ranks.h"

namespace mantissa::store_watch_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

class StoreWatch : public test::StoreTest {
 protected:
  StoreOptions fast() const {
    StoreOptions out = options();
    out.heartbeat_timeout_s = 2;
    return out;
  }
  // Notes what each rank reports.
  Watch watch(int rank, const WatchdogTimeouts& timeouts) {
    return {.timeouts = timeouts, .report = [this, rank](const std::string& why) {
              const std::lock_guard lock(mutex_);
              reports_[rank].push_back(why);
            }};
  }

  std::mutex mutex_;
  std::map<int, std::vector<std::string>> reports_;
};

TEST_F(StoreWatch, AMainThreadWithoutProgressEndsTheJobAndAllRanksReport) {
  const auto errors = in_store(3, fast(), [&](Store& store, int rank) {
    store.progress().at(4, "step");
    // The other two would wait for ever.
    store.watch(watch(rank, {.step_timeout_s = rank == 1 ? 0.5 : 1000}));
    wait_for_failure(store);
  });
  const std::string why = "no progress for 0.5 s (parallel.step_timeout_s), at step 4 (step)";
  for (int rank = 0; rank < 3; ++rank) {
    expect_error(errors[static_cast<size_t>(rank)], ExitCode::peer_lost, why);
    ASSERT_THAT(reports_[rank], SizeIs(1)) << rank;
    EXPECT_THAT(reports_[rank][0], HasSubstr(why)) << rank;
    EXPECT_THAT(errors[static_cast<size_t>(rank)]->what(), StartsWith("rank 1 ("));
  }
}

TEST_F(StoreWatch, WhoHasBegunFewerCollectivesIsNamed) {
  const auto errors = in_store(3, fast(), [&](Store& store, int rank) {
    store.progress().at(4, "step");
    Watch of = watch(rank, {.step_timeout_s = rank == 0 ? 2.5 : 1000});
    of.collectives = [rank] { return rank == 2 ? 17 : 18; };
    store.watch(of);
    wait_for_failure(store);
  });
  for (const auto& error : errors) expect_error(error, ExitCode::peer_lost, "no progress for 2.5 s");
  EXPECT_THAT(errors[1]->what(), HasSubstr("rank 2"));
  EXPECT_THAT(errors[1]->what(), HasSubstr("is behind: at collective 17 (step 4, step), others at 18"));
}

TEST_F(StoreWatch, ProgressIsWhatCounts) {
  expect_no_errors(in_store(2, fast(), [&](Store& store, int rank) {
    store.watch(watch(rank, {.section_timeout_s = 1}));
    for (int i = 0; i < 40; ++i) {
      store.progress().at(1, "evaluation");
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    store.check();
    store.watch({});
  }));
  EXPECT_THAT(reports_, IsEmpty());
}

TEST_F(StoreWatch, WithoutAWatchNothingEnds) {
  expect_no_errors(in_store(2, fast(), [&](Store& store, int rank) {
    store.watch(watch(rank, {.section_timeout_s = 0.1}));
    store.watch({});
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    store.check();
  }));
}

TEST_F(StoreWatch, ARankThatDiedIsNoReasonForReports) {
  const auto errors = on_ranks(3, [&](int rank) {
    Store store(launch(rank, 3), fast());
    store.watch(watch(rank, {}));
    store.barrier("begin");
    if (rank != 1) wait_for_failure(store);
  });
  expect_error(errors[0], ExitCode::peer_lost, "rank 1");
  EXPECT_THAT(reports_, IsEmpty());
}

TEST_F(StoreWatch, AMainThreadThatDoesNotComeBackIsLeftBehind) {
  std::atomic<int> left{0};
  const auto errors = in_store(2, fast(), [&](Store& store, int rank) {
    if (rank == 0) return store.fail_all(ExitCode::data, "x.bin: damaged");
    Watch of;
    of.leave = [&](const Failure& failure) {
      EXPECT_EQ(failure.code, ExitCode::data);
      EXPECT_THAT(failure.message, HasSubstr("x.bin: damaged"));
      ++left;
    };
    store.watch(of);
    for (int i = 0; i < 2000 && left == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  });
  EXPECT_GE(left, 1);
}

}  // namespace mantissa::store_watch_test
