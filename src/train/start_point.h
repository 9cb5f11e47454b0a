// Finds what a run starts from and refuses what does not fit it: one way for the run and for a dry run, which takes none of its steps.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/checkpoint/checkpoint_search.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"
#include "mantissa/data/open_data.h"
#include "mantissa/hf/hf_weights.h"
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
  bool saves = false;                                               // needs room on the disk; else a warning tells of it
};

struct StartPoint {
  std::vector<TokenizerFile> files = {};         // files that go along with the model
  std::optional<LoadedCheckpoint> resumed = {};  // none: the run starts at step 0
  bool own = false;                              // it is of the run's folder
  bool adopted = false;                          // and others there may have been passed over for it
  bool needs_unused_folder = false;              // until it is locked another process may train there
};

// Throws Error: usage for a folder in use and for a checkpoint, a folder or a tokenizer that does not fit the run, environment if another
// process trains there or the disk has no room for a single checkpoint, data for what is damaged, and what the steps throw.
StartPoint find_start(const StartParts& parts, const StartSteps& steps);

}  // namespace mantissa
