// Ranks as threads that meet in a store on this host.
#pragma once

#include <gmock/gmock.h>
#include <sys/socket.h>

#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "files.h"
#include "mantissa/job/store.h"

namespace mantissa::test {

class StoreTest : public ::testing::Test {
 protected:
  Launch launch(int rank, int world) const {
    Launch out;
    out.rank = out.local_rank = rank;
    out.world = out.local_size = world;
    out.in_order = true;
    out.job = "job";
    return out;
  }

  StoreOptions options() const {
    return {.init_timeout_s = 60,
            .heartbeat_timeout_s = 20,
            .secret = std::string("0123456789abcdef0123456789abcdef"),
            .folder = folder_.path()};
  }

  // body(rank) in a thread for each rank; the Error that each ended with, if it did.
  static std::vector<std::optional<Error>> on_ranks(int world, const std::function<void(int)>& body) {
    std::vector<std::optional<Error>> errors(static_cast<size_t>(world));
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

  // The same with a store, which they leave at the end.
  std::vector<std::optional<Error>> in_store(int world, const StoreOptions& options, const std::function<void(Store&, int)>& body) const {
    return on_ranks(world, [&](int rank) {
      Store store(launch(rank, world), options);
      body(store, rank);
      store.leave();
    });
  }

  static void expect_no_errors(const std::vector<std::optional<Error>>& errors) {
    for (size_t rank = 0; rank < errors.size(); ++rank) EXPECT_FALSE(errors[rank]) << "rank " << rank << ": " << errors[rank]->what();
  }

  static void expect_error(const std::optional<Error>& error, ExitCode code, const std::string& message) {
    ASSERT_TRUE(error) << "expected: " << message;
    EXPECT_EQ(error->code(), code) << error->what();
    EXPECT_THAT(error->what(), ::testing::HasSubstr(message));
  }

  static void wait_for_failure(const Store& store, double seconds = 60) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!store.aborted() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    store.check();
  }

  TemporaryFolder folder_;
};

}  // namespace mantissa::test
