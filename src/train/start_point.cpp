#include "train/start_point.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <utility>

#include "base/file.h"
#include "checkpoint/saved_model.h"
#include "comm/mesh.h"
#include "hf/export.h"
#include "hf/export_files.h"
#include "hf/load_model.h"
#include "mantissa/base/log.h"
#include "metrics/run_folder.h"
#include "models/model_shape.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

// Returns the folder, else the nearest above it that is there.
fs::path existing(const fs::path& folder) {
  std::error_code error;
  fs::path at = fs::absolute(folder, error).lexically_normal();
  while (at.has_relative_path() && !fs::is_directory(at, error)) at = at.parent_path();
  return at;
}

bool on_one_disk(const fs::path& a, const fs::path& b) {
  struct stat first {};
  struct stat second {};
  return ::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0 && first.st_dev == second.st_dev;
}

int64_t multiples(int64_t of, int64_t after, int64_t last) { return last / of - after / of; }

// Returns how many of the saves to come are at multiples of `every`, which are kept for good.
int64_t kept_for_good(const CheckpointConfig& config, int64_t step, int64_t steps) {
  const int64_t every = config.keep_every, interval = config.interval;
  if (every == 0) return 0;
  const bool last_alone = steps % every == 0 && (interval == 0 || steps % interval != 0);
  const int64_t factor = interval == 0 ? 0 : interval / std::gcd(interval, every);
  const bool any = interval > 0 && factor <= steps / every;  // else the product may be beyond 64 bits
  return (any ? multiples(factor * every, step, steps) : 0) + (last_alone ? 1 : 0);
}

bool stays(const CheckpointConfig& config, int64_t step) { return config.keep_every > 0 && step % config.keep_every == 0; }

}  // namespace

int64_t checkpoint_bytes(const ModelConfig& model, const std::vector<TokenizerFile>& files) {
  constexpr int64_t kValue = sizeof(float), kMasterAndMoments = 3 * kValue;
  int64_t bytes = 0;
  for (const ParameterShape& parameter : parameter_shapes(model_shape(model))) bytes += kMasterAndMoments * parameter.shape.elements();
  for (const ParameterShape& buffer : buffer_shapes(model_shape(model))) bytes += kValue * buffer.shape.elements();
  for (const TokenizerFile& file : files) bytes += std::ssize(file.bytes);
  return bytes;
}

int64_t most_new_checkpoints(const RunConfig& config, int64_t step, int64_t kept) {
  const int64_t steps = config.training.steps, interval = config.checkpoint.interval, latest = config.checkpoint.keep_latest;
  const bool last_alone = interval == 0 || steps % interval != 0;
  const int64_t saves = (interval > 0 ? multiples(interval, step, steps) : 0) + (last_alone ? 1 : 0);
  const int64_t rotating = latest + 1 - std::min(kept, latest);  // a new one is written before the oldest goes
  return std::min(saves, rotating + kept_for_good(config.checkpoint, step, steps));
}

std::string find_room_for_saves(const RunConfig& config, const PrecisionPlan& plan, const std::vector<TokenizerFile>& files,
                                const StartStep& start) {
  const CheckpointConfig& checkpoint = config.checkpoint;
  const bool finished = start.step == config.training.steps;
  if (finished && start.own) return "";  // all is saved
  const fs::path disk = existing(checkpoint.dir);
  const std::optional<int64_t> free = free_bytes(disk);
  if (!free) return "";
  std::vector<CheckpointStatus> own;  // those in the folder of the run up to its step, oldest first
  if (start.own) own = list_checkpoints(checkpoint.dir);
  std::erase_if(own, [&](const CheckpointStatus& saved) { return !saved.problem.empty() || saved.step > start.step; });
  const int64_t one = checkpoint_bytes(config.model, files);
  int64_t reclaimable = 0;  // for the last state: all but the newest
  for (size_t i = 0; i + 1 < own.size(); ++i)
    if (!stays(checkpoint, own[i].step)) reclaimable += own[i].bytes;
  if (*free + reclaimable < room_for(one)) {
    return text("checkpoint.dir: a checkpoint of this run needs ", room_for(one), " bytes, and ", *free, " are free in ", disk.string(),
                ": free some, or set checkpoint.dir to a larger disk");
  }
  const bool exports = checkpoint.exported && on_one_disk(disk, existing(config.logging.dir));
  const int64_t with_export = one + (exports ? export_bytes(config.model, plan, *checkpoint.exported) : 0);
  const auto kept = std::ranges::count_if(own, [&](const CheckpointStatus& saved) { return !stays(checkpoint, saved.step); });
  const int64_t most = finished ? 1 : most_new_checkpoints(config, start.step, kept);
  const double wanted = static_cast<double>(most) * static_cast<double>(with_export) + 0.1 * static_cast<double>(one);
  if (static_cast<double>(*free) >= wanted) return "";
  log_warning(
      "checkpoint.dir: ", count_text(most, "checkpoint"), " of ", with_export, " bytes", exports ? " with their exports" : "",
      " lie side by side in this run, and ", *free, " bytes are free in ", disk.string(),
      ": saves will fail or delete older ones first; free some, lower checkpoint.keep_latest, or set checkpoint.dir to a larger disk");
  return "";
}

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
    const bool is_rank0 = parts.world.rank() == 0;
    if (is_rank0) {
      for (const std::string& finding : weights.weights_as_values()) log_warning(finding);
    }
    warn_of_template(folder, {}, parts, found.files);
    if (is_rank0) {  // keys of training that are not taken, or as what, and the coefficient that a run has instead
      for (const std::string& line : weights.config().training_keys) log_warning(weights.where(), "/config.json: ", line);
      const std::optional<MoeConfig>&there = weights.config().model.moe, &here = config.model.moe;
      if (there && here && there->aux_loss_coef != here->aux_loss_coef)
        log_info("model.moe.aux_loss_coef: ", there->aux_loss_coef, " by ", weights.where(), ", ", here->aux_loss_coef, " here");
    }
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
      const std::string source = reader.directory().string();
      trained = saved.data.chat_template;
      require_initial_model(saved, config, source);
      require_weights_fit(reader, config.model);
      if (has_other_tokenizer(reader, parts.data)) {
        require(config.checkpoint.allow_tokenizer_change, ExitCode::usage, source,
                " was trained with another tokenizer than data.tokenizer names; checkpoint.allow_tokenizer_change takes its weights all "
                "the same");
        log_warning("checkpoint.allow_tokenizer_change: ", source, " was trained with another tokenizer");
      }
      found.files = kept_files(tokenizer_files(reader), source, parts);
    });
    if (steps.load_weights) steps.load_weights(reader);
  };
  const std::string source = load_checkpoint(path, load, RanksTogether(parts.world)).path.string();
  warn_of_template(source, trained, parts, found.files);
  log_info("weights from ", source);
}

void need_unused_folder(const StartParts& parts, StartPoint& found) {
  if (parts.world.rank() > 0) return;
  require_nobody_trains(parts.loaded.config);
  if (parts.loaded.restarted) return require_no_checkpoints(parts.loaded);  // it has the metrics of the attempt before
  require_unused_folder(parts.loaded);
  found.needs_unused_folder = true;
}

// Returns false if there is no checkpoint.
bool resume(const StartParts& parts, const StartSteps& steps, StartPoint& found) {
  const CheckpointConfig& config = parts.loaded.config.checkpoint;
  NamedCheckpoint named{.folder = config.dir, .name = ""};
  bool own = true;  // they are those of this run's folder
  agree(parts.world, [&] {
    std::error_code missing;
    if (config.resumes_named()) {
      require(!is_hf_folder(config.resume), ExitCode::usage, config.resume,
              ": holds weights, and no state of a run to continue; checkpoint.init_from starts a new run with them");
      named = find_checkpoint(config.resume);
      own = std::filesystem::equivalent(named.folder, config.dir, missing);
    }
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
  const CheckpointConfig& config = parts.loaded.config.checkpoint;
  const bool never = config.resume == "never";
  if (never) agree(parts.world, [&] { need_unused_folder(parts, found); });
  if (never || !resume(parts, steps, found)) {
    if (!config.init_from) {
      steps.initialize();
    } else if (starts_from_folder(parts.world, *config.init_from)) {
      start_from_folder(parts, steps, *config.init_from, found);
    } else {
      start_from_checkpoint(parts, steps, *config.init_from, found);
    }
    keep_own_tokenizer(parts.data.tokenizer, found.files);
  }
  agree(parts.world, [&] {
    if (parts.world.rank() > 0) return;
    const StartStep start{.step = found.resumed ? found.resumed->step : 0, .own = found.own};
    const std::string lack = find_room_for_saves(parts.loaded.config, parts.plan, found.files, start);
    require(lack.empty(), ExitCode::environment, lack);
  });
  return found;
}

}  // namespace mantissa
