// Ranks as threads of the test.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "mantissa/comm/communicator.h"

namespace mantissa::test {

// Runs body as each of `ranks` ranks. One that throws ends the waits of the others with peer_lost, as the store of a job does. Returns what
// each threw, "" for nothing, behind its code: "70: ranks 0 and 1 make different calls".
inline std::vector<std::string> run_ranks(int ranks, const std::function<void(const Communicator&)>& body) {
  std::atomic<bool> lost{false};
  auto transports = thread_transports(ranks, [&] { require(!lost, ExitCode::peer_lost, "a peer was lost"); });
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (size_t r = 0; r < errors.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        body(Communicator(std::move(transports[r])));
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
