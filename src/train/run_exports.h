// Makes the exports of checkpoint.export beside training: <logging.dir>/exports/step-00000010, from the checkpoint of that step, which
// holds what forward multiplies by and is kept until its export is there. Each rank writes a shard of the tensors into the same files, in a
// thread of its own and without a message to the others, and then compares a part of what is there with the checkpoint, as `mantissa
// export` does; that all have done so is agreed where advance() is called. One export is made at a time; the others wait, after a resume
// all that were missing.
#pragma once

#include <atomic>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/checkpoint_directory.h"
#include "comm/mesh.h"
#include "mantissa/config/run_config.h"
#include "mantissa/metrics/events.h"

namespace mantissa {

std::filesystem::path export_folder(const RunConfig& config, int64_t step);

// Returns whether a run saves, evaluates or writes samples after this step because of an interval or because it is the last one.
inline bool is_due(const RunConfig& config, int64_t interval, int64_t step) {
  return step == config.training.steps || (interval > 0 && step > 0 && step % interval == 0);
}

// All ranks of a run make the same calls in the same order.
class RunExports {
 public:
  // Rank 0 alone has the checkpoints. config must outlive this.
  RunExports(const RunConfig& config, const Communicator& world, std::function<void(const ExportEvent&)> made);
  ~RunExports();  // leaves what is not finished: the next start of the run makes it
  RunExports(const RunExports&) = delete;
  RunExports& operator=(const RunExports&) = delete;

  // Asks for the export of a checkpoint that was committed; it waits for those asked for before. Does nothing where it is there or asked
  // for already. saved: of rank 0.
  void add(const SavedCheckpoint& saved, std::optional<CheckpointDirectory>& checkpoints);
  // Asks for those of the newest checkpoints that a run did not make because it ended before. One that was saved for nothing but being the
  // best is left out: the end of the run asks for that of the best.
  void add_missing(std::optional<CheckpointDirectory>& checkpoints);

  size_t pending() const { return orders_.size(); }  // with the one that is being made
  // Has an export compared whose shards are written, gives it its name when it was, and begins the next. A failure is an event; nothing is
  // thrown but for lost ranks.
  void advance(std::optional<CheckpointDirectory>& checkpoints);
  int64_t progress() const { return progress_; }  // progress of this rank: a number that grows while it works
  int64_t failures() const { return failures_; }
  // Returns the problems of exports that failed and were not made since, by step, of checkpoints that are still there. A call of all ranks.
  std::map<int64_t, std::string> failed(const std::optional<CheckpointDirectory>& checkpoints) const;

 private:
  struct Order {
    int64_t step = 0;
    std::string checkpoint, manifest;  // its path and hash
  };
  class Shard;

  void begin(const Order& order);
  void end(const Order& order, const std::string& problem, std::optional<CheckpointDirectory>& checkpoints);

  const RunConfig& config_;
  Communicator world_;
  std::function<void(const ExportEvent&)> made_;
  std::deque<Order> orders_;  // the first is being made
  std::atomic<int64_t> progress_{0};
  int64_t failures_ = 0;
  std::map<int64_t, std::string> failed_;  // also of checkpoints that were deleted since
  std::unique_ptr<Shard> shard_;           // whose thread uses what stands above
};

}  // namespace mantissa
