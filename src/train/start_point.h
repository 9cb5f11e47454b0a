// Finds what a run starts from and refuses what does not fit it: one way for the run and for a dry run, which takes none of its steps.
// start_point.cpp compares what the saves of the run need of the disk with what is free there.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_search.h"
#include "data/open_data.h"
#include "hf/hf_weights.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"
#include "mantissa/precision/plan.h"

namespace mantissa {

// Holds all that is known of a run before it has weights.
struct StartParts {
  const LoadedConfig& loaded;
  const Communicator& world;
  const Data& data;
  const PrecisionPlan& plan;
};

// Holds the steps that a run takes on the way, each of them on every rank.
struct StartSteps {
  std::function<void()> lock = [] {};                               // takes the folder of checkpoints, which is there
  std::function<bool()> share = [] { return true; };                // returns whether rank 0 has locked it
  std::function<void()> initialize = [] {};                         // draws weights
  std::function<void(HfWeights&)> load_folder = [](HfWeights&) {};  // once the folder was found to fit
  std::function<void()> after_folder = [] {};                       // once all ranks have loaded it
  std::function<void(CheckpointReader&)> load_weights = {};         // from a checkpoint to start from; agrees by itself
  std::function<void(CheckpointReader&)> restore = {};              // from one to go on from; agrees by itself
};

struct StartPoint {
  std::vector<TokenizerFile> files = {};         // files that go along with the model
  std::optional<LoadedCheckpoint> resumed = {};  // none: the run starts at step 0
  bool own = false;                              // it is of the run's folder, and others there may have been passed over for it
  bool needs_unused_folder = false;              // until it is locked another process may train there
};

// Throws Error: usage for a folder in use and for a checkpoint, a folder or a tokenizer that does not fit the run, environment if another
// process trains there or the disk has no room for a single checkpoint, data for what is damaged, and what the steps throw.
StartPoint find_start(const StartParts& parts, const StartSteps& steps);

// Returns the size of a checkpoint as Manifest::bytes() has it.
int64_t checkpoint_bytes(const ModelConfig& model, const std::vector<TokenizerFile>& files);

// Returns how many checkpoints lie side by side at most beyond those that are there. step: that at which the run goes on; kept: the
// checkpoints there, which later ones replace.
int64_t most_new_checkpoints(const RunConfig& config, int64_t step, int64_t kept);

// Place where a run starts: 0, or the step of the checkpoint from which it goes on.
struct StartStep {
  int64_t step = 0;
  bool own = false;  // the checkpoint lies in the folder of the run, which may have others
};

// Says with both numbers that the disk of checkpoint.dir cannot take the last state of the run; "": it can. Warns if it cannot take all
// checkpoints that the run keeps side by side.
std::string find_room_for_saves(const RunConfig& config, const PrecisionPlan& plan, const std::vector<TokenizerFile>& files,
                                const StartStep& start);

}  // namespace mantissa
