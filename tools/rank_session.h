// Connects the ranks of this job for a command that runs on all of them: from the environment to a communicator.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/mesh.h"
#include "job/store.h"
#include "mantissa/config/run_config.h"
#include "tools/command.h"

namespace mantissa::tools {

class RankSession {
 public:
  // Returns when all ranks are there and have the same config and build. A process alone opens nothing. Throws as Store does; once the
  // ranks have met, an error of one is thrown on all.
  RankSession(const Launch& launch, const RunConfig& config, const std::function<bool()>& stop_asked = {});
  ~RankSession();
  RankSession(const RankSession&) = delete;
  RankSession& operator=(const RankSession&) = delete;

  const Communicator& world() const { return world_; }
  // Starts the watchdog: set_phase() must be called within parallel.step_timeout_s and parallel.section_timeout_s, else the job ends with
  // peer_lost. Then, and when another rank is stuck, this rank writes its position to standard error. The calling thread is the main one.
  void watch(const ParallelConfig& config);
  // Reports the phase of this rank to the others, with the next heartbeat. `section` is a literal.
  void set_phase(int64_t step, const char* section);
  // Runs body; an error that it throws ends the job on every rank, with its code. Returns when all ranks are through.
  void run(const std::function<void()>& body);

 private:
  void meet(const Launch& launch, const RunConfig& config);
  void reported_to_all(const std::function<void()>& body);
  void watch_the_end();

  int rank_;
  std::unique_ptr<Store> store_;
  Communicator world_;
};

// Arguments of a command that computes with a saved model, which its ranks hold together.
struct ModelArguments {
  std::string checkpoint, device = "auto";
  std::optional<std::string> dtype;
  std::vector<std::string> precision, precision_files;
  int threads = 0;
  int64_t tensor = 1;
};
Option checkpoint_option(std::string& checkpoint);
Option tensor_option(int64_t& tensor);
// Runs body on each of the tensor ranks, with its threads; one alone needs no launcher.
void on_tensor_ranks(const ModelArguments& model, const std::function<void(const Mesh&)>& body);

// Makes training.threads 0 mean this rank's share of the cores of its host (threads_of_rank), and its GPU that of its number there.
void share_host(const Launch& launch);

// Reports where the main thread is in a process that makes no progress.

// Makes the calling thread the one whose stack print_main_stack() writes. It takes a signal for that, even if it blocked it before, and
// needs an AlternateStack.
void watch_main_stack();

// Writes the stack of the main thread, with the names of functions, to standard error, from another thread. Returns false if the main
// thread does not answer within a second because it is stopped.
bool print_main_stack();

}  // namespace mantissa::tools
