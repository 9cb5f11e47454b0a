// Saves the state of a run in a checkpoint: for each parameter the fp32 master ("master.<name>") and, unless it is frozen, its
// moments ("m.<name>" and, of AdamW, "v.<name>"; fp32 or bf16), each buffer ("buffer.<name>"), tokenizer files of the model that it started
// from ("file.<name>"), the counters, the resolved config, the tokenizer and the fingerprints of the data. The learning rate is a function
// of the step; values in the compute dtype are rounded from the masters on load.
#pragma once

#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "checkpoint/checkpoint_directory.h"
#include "checkpoint/checkpoint_search.h"
#include "checkpoint/precision_setup.h"
#include "comm/mesh.h"
#include "data/open_data.h"
#include "mantissa/config/run_config.h"
#include "models/gpt.h"
#include "optim/optimizer.h"

namespace mantissa {

// The checkpoint that the file `best` names: the one with the lowest validation loss, or figure of a run with a teacher, of those that
// checkpoint.keep_best had to compare.
struct BestCheckpoint {
  int64_t step = 0;
  double loss = 0.0;

  void fields(auto& v) {
    v("step", step, limits::not_negative);
    v("loss", loss);
  }
};

struct TrainState {
  int64_t step = 0;     // steps done, skipped ones included
  int64_t samples = 0;  // sequences consumed: the position in the data
  int64_t updates = 0;  // updates of the optimizer
  int64_t tokens = 0;
  int64_t skipped_steps = 0;
  int64_t nonfinite_in_a_row = 0;
  std::optional<double> best_valid_loss = {};
  std::optional<BestCheckpoint> best_checkpoint = {};
  bool pending_evaluation = false, pending_samples = false;  // due after this step, but cut short by a stop or an error
  std::optional<std::string> teacher = {};                   // hash of the files of training.teacher

  // The manifest's "state"; step and samples stand beside it.
  void fields(auto& v) {
    v("updates", updates, limits::not_negative);
    v("tokens", tokens, limits::not_negative);
    v("skipped_steps", skipped_steps, limits::not_negative);
    v("nonfinite_in_a_row", nonfinite_in_a_row, limits::not_negative);
    v("best_valid_loss", best_valid_loss);
    v("best_checkpoint", best_checkpoint, limits::later);
    v("pending_evaluation", pending_evaluation);
    v("pending_samples", pending_samples);
    v("teacher", teacher, limits::later);
  }

  bool has_pending() const { return pending_evaluation || pending_samples; }
};

// The bytes of a file that came with a model and is exported with it: tokenizers, generation_config.json, its config.json. In a
// checkpoint it is "file.<name>".
struct TokenizerFile {
  std::string name, bytes;
};
inline const std::string kTokenizerFilePrefix = "file.";
inline constexpr std::array kTokenizerFiles = {"config.json",
                                               "generation_config.json",
                                               "tokenizer.json",
                                               "tokenizer_config.json",
                                               "special_tokens_map.json",
                                               "added_tokens.json",
                                               "vocab.json",
                                               "merges.txt",
                                               "tokenizer.model",
                                               "chat_template.jinja",
                                               "chat_template.json"};

// Parts of a run that a checkpoint is made of, and restored into.
struct TrainedParts {
  const RunConfig& config;
  const PrecisionPlan& plan;  // resolved from config
  const Data& data;
  ParameterSet& parameters;
  Optimizer& optimizer;
  std::span<const TokenizerFile> files = {};
};

// Returns what this rank saves of its shards; the updates are those of the optimizer. It refers to the memory of parameters and optimizer.
// All ranks call it together, as they do the next two.
CheckpointContent checkpoint_content(const TrainedParts& parts, const TrainState& state);

// Restores a run from a checkpoint. Throws Error(usage) if the checkpoint is of another model or tokenizer, beyond training.steps, has no
// moments of what is trained here, or is of settings that give other tokens or another order of them: section data without the masks,
// shares in data.train, training.seed and training.seq_len. Throws Error(data) if the training data changed or a part is damaged, and what
// load_weights() throws; codes other than the manifest's are a line in the log under checkpoint.allow_recipe_change. Other settings may
// differ; each that does is a line in the log.
TrainState restore(CheckpointReader& reader, const TrainedParts& parts);

// Throw what restore(), and load_weights() for a run that starts with the weights, would, as far as it shows without reading tensors.
void require_resumable(const CheckpointReader& reader, const RunConfig& config, const PrecisionPlan& plan, const Data& data);
void require_weights_fit(const CheckpointReader& reader, const ModelConfig& model);

// Throws Error(usage) if this run would train on another global batch than the checkpoint's only because it has another number of ranks:
// nobody stated one, and micro batches and their number per rank are the same.
void require_same_batch(const RunConfig& saved, const LoadedConfig& current, const std::string& source);

// Loads the weights of a model of `plan` from the masters, which the optimizer keeps, if there is one. Throws Error(usage) if a tensor is
// missing or of another shape; Error(numerical) that names the first weight which is NaN or Inf; and for codes the errors of
// require_same_codes(). Neither is a reason to take another checkpoint. Expert biases start at 0, which the log says, where the checkpoint
// was trained without; Error(usage) where the model has none and the checkpoint does, because routers would choose others. replica: without
// an optimizer, the ranks that hold the model together.
void load_weights(CheckpointReader& reader, const PrecisionPlan& plan, LoadFor purpose, ParameterSet& parameters,
                  Optimizer* optimizer = nullptr, const Communicator& replica = {});

// Lets the ranks of a run save and read a checkpoint together. Every rank makes these calls; a group of one does the work alone.

// Returns true if rank 0 has this folder and locked it (`there` of rank 0). If then some rank cannot see the file that rank 0 writes into
// it, throws Error(environment) on all ranks, naming that rank: each host has a folder of its own under this name.
bool is_shared_folder(const Communicator& world, bool there, const std::filesystem::path& folder, const char* key = "checkpoint.dir");

// Like agree() (comm/mesh.h), for reading a checkpoint: CheckpointUnread or other CheckpointDamage met by one rank is thrown on all, so
// that all try again, or go on to the same next candidate. The body must not communicate.
void agree_on_reading(const Communicator& world, const std::function<void()>& body);

// Lets rank 0 choose the candidates; all ranks open the same one, in the same version.
class RanksTogether : public SearchTogether {
 public:
  explicit RanksTogether(const Communicator& world) : world_(world) {}
  std::vector<CheckpointCandidate> first_of(const std::vector<CheckpointCandidate>& own) const override;
  void read(const std::function<void()>& body) const override { agree_on_reading(world_, body); }
  void require_same(const std::string& what, const std::string& own) const override;

 private:
  const Communicator& world_;
};

// Saves a checkpoint: every rank writes its shard; rank 0, which alone has the directory, begins and commits. Throws on all ranks as
// CheckpointDirectory::save() does on one, and returns rank 0's result. `progressed` is called at each phase and, with several ranks,
// within phases.
SavedCheckpoint save_together(const Communicator& world, std::optional<CheckpointDirectory>& directory, const CheckpointContent& content,
                              const Progressed& progressed, AfterSave after = AfterSave::run_goes_on);

}  // namespace mantissa
