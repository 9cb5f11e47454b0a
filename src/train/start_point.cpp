#include "train/start_point.h"

#include <algorithm>
#include <filesystem>
#include <tuple>
#include <utility>

#include "mantissa/base/log.h"
#include "mantissa/checkpoint/config_differences.h"
#include "mantissa/checkpoint/ranks_together.h"
#include "mantissa/checkpoint/saved_model.h"
#include "mantissa/comm/agreement.h"
#include "mantissa/hf/chat_files.h"
#include "mantissa/hf/export_files.h"
#include "mantissa/hf/load_model.h"
#include "mantissa/metrics/run_folder.h"

namespace mantissa {
namespace {

// Keeps the tokenizer files of a model. Those of another tokenizer would give its ids other words in an export.
std::vector<TokenizerFile> kept_files(std::vector<TokenizerFile> files, const std::string& source, const StartParts& parts) {
  const RunConfig& config = parts.loaded.config;
  if (!parts.data.tokenizer || !has_other_tokenizer(files, *parts.data.tokenizer)) return files;
  require(
      config.checkpoint.allow_tokenizer_change, ExitCode::usage, source, " came with another tokenizer than data.tokenizer ",
      *config.data.tokenizer,
      ": the same ids are other pieces of text\ntokenize the data with the model's own and train on token files with data.tokenizer=null, "
      "or set checkpoint.allow_tokenizer_change to true to teach the model these ids");
  log_warning("checkpoint.allow_tokenizer_change: tokenizer and generation files of ", source, " are left behind");
  return {};
}

void require_known_ids(const CheckpointReader& reader, const StartParts& parts) {
  const std::string source = reader.directory().string();
  if (!has_other_tokenizer(reader, parts.data)) return;
  require(
      parts.loaded.config.checkpoint.allow_tokenizer_change, ExitCode::usage, source,
      " was trained with another tokenizer than data.tokenizer names; checkpoint.allow_tokenizer_change takes its weights all the same");
  log_warning("checkpoint.allow_tokenizer_change: ", source, " was trained with another tokenizer");
}

// A tokenizer.json goes along with what is trained on its ids, in the place of one that gives the same.
void keep_own_tokenizer(const std::optional<Tokenizer>& tokenizer, std::vector<TokenizerFile>& files) {
  if (!tokenizer || tokenizer->files() == nullptr) return;
  for (TokenizerFile& own : files_of(*tokenizer)) {
    const bool made = own.name == "tokenizer_config.json" && tokenizer->files()->config.empty();
    const auto found = std::ranges::find(files, own.name, &TokenizerFile::name);
    if (found == files.end())
      files.push_back(std::move(own));
    else if (!made)
      *found = std::move(own);
  }
}

void warn_of_values(const HfWeights& weights, const StartParts& parts) {
  if (parts.world.rank() > 0) return;
  for (const std::string& finding : weights.weights_as_values()) log_warning(finding);
}

// Logs which keys of training in config.json are not taken, or as what, and the coefficient that a run has instead.
void log_training_keys(const HfWeights& weights, const StartParts& parts) {
  if (parts.world.rank() > 0) return;
  for (const std::string& line : weights.config().training_keys) log_warning(weights.where(), "/config.json: ", line);
  const std::optional<MoeConfig>&there = weights.config().model.moe, &here = parts.loaded.config.model.moe;
  if (there && here && there->aux_loss_coef != here->aux_loss_coef)
    log_info("model.moe.aux_loss_coef: ", there->aux_loss_coef, " by ", weights.where(), ", ", here->aux_loss_coef, " here");
}

// A model that knows conversations in another form than this run renders has to learn that first.
void warn_of_template(const std::string& source, const std::optional<ChatTemplate>& trained, const StartParts& parts,
                      const std::vector<TokenizerFile>& files) {
  const DataConfig& data = parts.loaded.config.data;
  if (parts.world.rank() > 0 || !data.chat_template || trained == data.chat_template) return;
  if (trained)
    return log_warning(source, ": was trained with data.chat_template ", choice_name(*trained), ", and this run has ",
                       choice_name(*data.chat_template));
  const std::string difference = chat_template_difference(files, *data.chat_template, data.chat_date);
  if (!difference.empty()) log_warning(source, ": ", difference);
}

// A folder of Hugging Face's form, of which each rank reads its shards.
void start_from_folder(const StartParts& parts, const StartSteps& steps, const std::string& folder, StartPoint& found) {
  const RunConfig& config = parts.loaded.config;
  std::string fingerprint;
  agree_on_reading(parts.world, [&] {
    HfWeights weights(folder);
    fingerprint = weights.fingerprint();
    require_initial_model(weights.run_config(), config, folder);
    require_weights_fit(weights, config.model);
    found.files = kept_files(tokenizer_files(weights), folder, parts);
    warn_of_values(weights, parts);
    warn_of_template(folder, {}, parts, found.files);
    log_training_keys(weights, parts);
    steps.load_folder(weights);
  });
  require_same(parts.world, "the folder of checkpoint.init_from", fingerprint);
  steps.after_folder();
  log_info("weights from ", folder);
}

void start_from_checkpoint(const StartParts& parts, const StartSteps& steps, const std::string& path, StartPoint& found) {
  const RunConfig& config = parts.loaded.config;
  std::optional<ChatTemplate> trained;
  const auto load = [&](CheckpointReader& reader) {
    agree_on_reading(parts.world, [&] {
      const RunConfig saved = saved_config(reader);
      trained = saved.data.chat_template;
      require_initial_model(saved, config, reader.directory().string());
      require_weights_fit(reader, config.model);
      require_known_ids(reader, parts);
      found.files = kept_files(tokenizer_files(reader), reader.directory().string(), parts);
    });
    if (steps.load_weights) steps.load_weights(reader);
  };
  const std::string source = load_checkpoint(path, load, RanksTogether(parts.world)).path.string();
  warn_of_template(source, trained, parts, found.files);
  log_info("weights from ", source);
}

void find_initial_weights(const StartParts& parts, const StartSteps& steps, StartPoint& found) {
  const std::optional<std::string>& from = parts.loaded.config.checkpoint.init_from;
  if (!from) {
    steps.initialize();
  } else if (starts_from_folder(parts.world, *from)) {
    start_from_folder(parts, steps, *from, found);
  } else {
    start_from_checkpoint(parts, steps, *from, found);
  }
  keep_own_tokenizer(parts.data.tokenizer, found.files);
}

void need_unused_folder(const StartParts& parts, StartPoint& found) {
  if (parts.world.rank() > 0) return;
  require_nobody_trains(parts.loaded.config);
  if (parts.loaded.restarted) return require_no_checkpoints(parts.loaded);  // it has the metrics of the attempt before
  require_unused_folder(parts.loaded);
  found.needs_unused_folder = true;
}

// Returns the checkpoints to go on from, and whether they are those of this run's folder.
std::pair<NamedCheckpoint, bool> named_to_resume(const CheckpointConfig& config) {
  std::error_code missing;
  if (!config.resumes_named()) return {{.folder = config.dir, .name = ""}, true};
  require(!is_hf_folder(config.resume), ExitCode::usage, config.resume,
          ": holds weights, and no state of a run to continue; checkpoint.init_from starts a new run with them");
  NamedCheckpoint named = find_checkpoint(config.resume);
  const bool own = std::filesystem::equivalent(named.folder, config.dir, missing);
  return {std::move(named), own};
}

// Returns false if there is no checkpoint.
bool resume(const StartParts& parts, const StartSteps& steps, StartPoint& found) {
  const CheckpointConfig& config = parts.loaded.config.checkpoint;
  NamedCheckpoint named;
  bool own = true;
  agree(parts.world, [&] {
    std::error_code missing;
    std::tie(named, own) = named_to_resume(config);
    if (!own) need_unused_folder(parts, found);
    // Lock before reading: another process that trains here could save between our load and our lock.
    if (std::filesystem::exists(config.dir, missing)) steps.lock();
  });
  if (!steps.share() && !config.resumes_named()) return false;
  const auto load = [&](CheckpointReader& reader) {
    agree_on_reading(parts.world, [&] {
      require_same_batch(saved_config(reader), parts.loaded, reader.directory().string());
      found.files = kept_files(tokenizer_files(reader), reader.directory().string(), parts);
      keep_own_tokenizer(parts.data.tokenizer, found.files);
    });
    steps.restore ? steps.restore(reader) : require_resumable(reader, parts.loaded.config, parts.plan, parts.data);
  };
  const RanksTogether together(parts.world);
  if (config.resumes_named())
    found.resumed = load_checkpoint(config.resume, load, together);
  else
    found.resumed = load_newest(named.folder, load, together);
  found.own = found.resumed && own;
  return found.resumed.has_value();
}

}  // namespace

StartPoint find_start(const StartParts& parts, const StartSteps& steps) {
  StartPoint found;
  if (parts.loaded.config.checkpoint.resume == "never") agree(parts.world, [&] { need_unused_folder(parts, found); });
  if (parts.loaded.config.checkpoint.resume == "never" || !resume(parts, steps, found)) find_initial_weights(parts, steps, found);
  agree(parts.world, [&] {
    if (parts.world.rank() > 0) return;
    const StartStep start{.step = found.resumed ? found.resumed->step : 0, .own = found.own};
    const std::string lack = find_room_for_saves(parts.loaded.config, parts.plan, found.files, start);
    require(lack.empty(), ExitCode::environment, lack);
  });
  return found;
}

}  // namespace mantissa
