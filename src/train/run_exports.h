// Makes the exports of checkpoint.export beside training: <logging.dir>/exports/step-00000010, from the checkpoint of that step, which
// holds what forward multiplies by and is kept until its export is there. Each rank writes a part of the tensors into the same files, in a
// thread of its own and without a message to the others; ranks compare notes where advance() is called. One export is made at a time.
#pragma once

#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "mantissa/checkpoint/checkpoint_directory.h"
#include "mantissa/comm/mesh.h"
#include "mantissa/config/run_config.h"
#include "mantissa/metrics/events.h"

namespace mantissa {

std::filesystem::path export_folder(const RunConfig& config, int64_t step);

// All ranks of a run make the same calls in the same order.
class RunExports {
 public:
  // Rank 0 alone has the checkpoints. config must outlive this.
  RunExports(const RunConfig& config, const Communicator& world, std::function<void(const ExportEvent&)> made);
  ~RunExports();  // leaves what is not finished: the next start of the run makes it
  RunExports(const RunExports&) = delete;
  RunExports& operator=(const RunExports&) = delete;

  // Asks for the export of a checkpoint that was committed; it waits for those asked for before. saved: of rank 0.
  void add(const SavedCheckpoint& saved, std::optional<CheckpointDirectory>& checkpoints);
  // Asks for those that the checkpoints in the folder lack, because a run ended before it had made them.
  void add_missing(std::optional<CheckpointDirectory>& checkpoints);

  bool busy() const { return !orders_.empty(); }
  // Finishes an export whose parts are written, and begins the next. A failure is an event; nothing is thrown but for lost ranks.
  void advance(std::optional<CheckpointDirectory>& checkpoints);
  int64_t failed() const { return failed_; }
  bool last_failed() const { return last_failed_; }

 private:
  struct Order {
    int64_t step = 0;
    std::string checkpoint, manifest;  // its path and hash
  };
  class Part;

  void begin(const Order& order);
  void end(const Order& order, const std::string& problem, std::optional<CheckpointDirectory>& checkpoints);

  const RunConfig& config_;
  Communicator world_;
  std::function<void(const ExportEvent&)> made_;
  std::deque<Order> orders_;  // the first is being made
  std::unique_ptr<Part> part_;
  int64_t failed_ = 0;
  bool last_failed_ = false;
};

}  // namespace mantissa
