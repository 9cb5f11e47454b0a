// Ranks as threads of the test.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "thread_transport.h"

namespace mantissa::test {

// A rank whose thread sleeps in every wait before it looks whether to go on, so that it is the last to leave a collective.
struct SlowRank {
  int rank = -1;
  std::chrono::milliseconds sleep{0};
};

// Runs body as each of `ranks` ranks, between whose devices the maker makes links; without it, messages go through the host. One that
// throws ends the waits of the others with peer_lost, as the store of a job does. Returns what each threw, "" for nothing, behind its code:
// "70: ranks 0 and 1 make different calls".
inline std::vector<std::string> run_ranks(int ranks, const std::function<void(const Communicator&)>& body, const SlowRank& slow = {},
                                          const MakeDeviceLink& make_link = {}) {
  std::atomic<bool> lost{false};
  static thread_local int own_rank = -1;
  auto transports = thread_transports(ranks, [&] {
    if (own_rank == slow.rank) std::this_thread::sleep_for(slow.sleep);
    require(!lost, ExitCode::peer_lost, "a peer was lost");
  });
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (size_t r = 0; r < errors.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        own_rank = static_cast<int>(r);
        body(Communicator(std::move(transports[r]), make_link));
      } catch (const Error& error) {
        errors[r] = text(static_cast<int>(error.code()), ": ", error.what());
        lost = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

}  // namespace mantissa::test
