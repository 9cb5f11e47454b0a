// Ranks as threads that meet in a store on this host.
#pragma once

#include <gmock/gmock.h>

#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "files.h"
#include "hang.h"
#include "job/store.h"

namespace mantissa::test {

using Errors = std::vector<std::optional<Error>>;

inline void pause_ms(int64_t milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// Runs body(rank) in a thread for each rank; returns the Error that each ended with, if it did.
inline Errors on_ranks(int world, const std::function<void(int)>& body) {
  Errors errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const Error& error) {
        errors[static_cast<size_t>(rank)] = error;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void expect_no_errors(const Errors& errors) {
  for (size_t rank = 0; rank < errors.size(); ++rank) EXPECT_FALSE(errors[rank]) << "rank " << rank << ": " << errors[rank]->what();
}

inline void expect_error(const std::optional<Error>& error, ExitCode code, const std::string& message) {
  ASSERT_TRUE(error) << "expected: " << message;
  EXPECT_EQ(error->code(), code) << error->what();
  EXPECT_THAT(error->what(), ::testing::HasSubstr(message));
}

inline void wait_for_failure(const Store& store) {
  eventually([&] { return store.aborted().load(); });
  store.check();
}

// A job whose ranks publish what they must in a folder of their own.
struct StoreJob {
  static constexpr const char* kSecret = "0123456789abcdef0123456789abcdef";

  Launch launch(int rank, int world, const std::string& job = "job") const {
    Launch out;
    out.rank = out.local_rank = rank;
    out.world = out.local_size = world;
    out.in_order = true;
    out.job = job;
    return out;
  }
  StoreOptions options(double heartbeat_timeout_s = 20, double init_timeout_s = kHangSeconds) const {
    return {.init_timeout_s = init_timeout_s,
            .heartbeat_timeout_s = heartbeat_timeout_s,
            .secret = std::string(kSecret),
            .folder = folder.path()};
  }
  // Runs body on ranks with a store, which they leave at the end.
  Errors in_store(int world, const StoreOptions& options, const std::function<void(Store&, int)>& body) const {
    return on_ranks(world, [&](int rank) {
      Store store(launch(rank, world), options);
      body(store, rank);
      store.leave();
    });
  }

  TemporaryFolder folder;
};

// A job, and the ends of those of its ranks that have an error: they have this code, and a message with a match of this regular expression.
struct StoreCase {
  const char* name;
  std::function<Errors(const StoreJob&)> run;
  size_t errors = 0;
  ExitCode code = ExitCode::peer_lost;
  std::string says = {};
};

// Runs them at the same time, because most of them wait.
inline void expect_at_once(const std::vector<StoreCase>& cases) {
  expect_no_errors(on_ranks(static_cast<int>(cases.size()), [&](int number) {
    const StoreCase& each = cases[static_cast<size_t>(number)];
    const ::testing::ScopedTrace trace("", 0, each.name);
    size_t found = 0;
    const StoreJob job;
    for (const std::optional<Error>& error : each.run(job)) {
      if (!error) continue;
      ++found;
      EXPECT_EQ(error->code(), each.code) << error->what();
      EXPECT_THAT(error->what(), ::testing::ContainsRegex(each.says));
    }
    EXPECT_EQ(found, each.errors);
  }));
}

}  // namespace mantissa::test
