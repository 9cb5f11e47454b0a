#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include "base/hash.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/saved_model.h"
#include "job/store.h"
#include "json/json_fields.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"
#include "mantissa/base/version.h"
#include "mantissa/tensor/tensor.h"
#include "models/model_shape.h"

namespace mantissa {
namespace {

// Adds a tensor to save. Tensors that several tensor ranks hold alike are written by the first of them.
void add_tensor(CheckpointContent& content, const char* prefix, const ParameterShard& shard, const Tensor& data) {
  std::vector<Box> boxes;
  for (const ParameterShard::Chunk& chunk : shard.chunks()) boxes.push_back(box_of(shard, chunk));
  if (boxes.empty() || shard.of->sharding.is_copy()) return;
  content.tensors.push_back({.name = prefix + shard.of->name,
                             .shape = shard.of->stored_shape(),
                             .boxes = std::move(boxes),
                             .data = data.slice(0, shard.stored_end() - shard.begin)});
}

void require_saved_as(const ManifestTensor& saved, Dtype dtype, const std::vector<int64_t>& needed, const CheckpointReader& reader) {
  require(saved.dtype == dtype && saved.shape == needed, ExitCode::usage, reader.directory().string(), ": ", saved.name, " is ",
          saved.dtype, " ", shape_text(saved.shape), ", but the model needs ", dtype, " ", shape_text(needed));
}

// Reads the master of a shard, as read_shard() does.
std::string read_master(CheckpointReader& reader, const ParameterShard& shard, const Tensor& out) {
  require_saved_as(reader.tensor("master." + shard.of->name), out.dtype(), dimensions(shard.of->stored_shape()), reader);
  CheckpointWeights weights(reader);
  return read_shard(weights, shard, out);
}

// Reads a moment of a shard, "m." or "v."; padding becomes zeros.
void read_moment(CheckpointReader& reader, const char* prefix, const ParameterShard& shard, const Tensor& out) {
  if (!out.defined()) return;
  const std::string name = prefix + shard.of->name;
  require_saved_as(reader.tensor(name), out.dtype(), dimensions(shard.of->stored_shape()), reader);
  for (const ParameterShard::Chunk& chunk : shard.chunks()) {
    fill_from_host(out.slice(chunk.begin - shard.begin, chunk.end - shard.begin),
                   [&](std::span<std::byte> bytes) { reader.read(name, box_of(shard, chunk), bytes); });
  }
  out.device().run(Fill{.out = out.slice(shard.stored_end() - shard.begin, out.dim(0)), .value = 0.0});
}

// Reads buffers whole, on every rank.
void read_buffer(CheckpointReader& reader, const Buffer& buffer) {
  const std::string name = "buffer." + buffer.name;
  const std::vector<int64_t> needed = dimensions(buffer.shape);
  require_saved_as(reader.tensor(name), buffer.value.dtype(), needed, reader);
  fill_from_host(buffer.value, [&](std::span<std::byte> bytes) {
    reader.read(name, bytes);
    const int64_t bad = first_nonfinite(Dtype::f32, bytes);
    if (bad < 0) return;
    const float value = reinterpret_cast<const float*>(bytes.data())[bad];
    fail(ExitCode::numerical, reader.directory().string(), ": ", buffer.name, "[", bad, "] = ", value, ": must be finite");
  });
}

bool has_expert_bias(const ModelConfig& model) { return model.moe && model.moe->has_expert_bias(); }

void require_biases_kept(const CheckpointReader& reader, bool keeps) {
  require(keeps || !has_expert_bias(reader.config().model), ExitCode::usage, reader.directory().string(),
          ": has expert biases, but model.moe.bias_update_rate is 0 here, and without them its routers would choose other experts: set it; "
          "1e-30 keeps the biases as they are");
}

// Requires the same settings that decide, beside the files, which tokens are trained on and in which order.
void require_same_order(const RunConfig& saved, const RunConfig& current, const std::string& source) {
  const std::set<std::string> deciding = {"data.valid_fraction", "data.format", "data.dtype",    "data.chat_template", "data.chat_date",
                                          "data.append_eod",     "data.eod_id", "training.seed", "training.seq_len"};
  std::vector<Difference> list = differences("data", saved.data, current.data);
  std::ranges::move(differences("training", saved.training, current.training), std::back_inserter(list));
  std::erase_if(list, [&](const Difference& one) { return !deciding.contains(one.key); });
  const auto shares = [](const DataConfig& data) {  // as the sampler sees them
    double sum = 0.0;
    for (const WeightedPath& set : data.train) sum += set.weight;
    std::vector<double> out;
    for (const WeightedPath& set : data.train) out.push_back(set.weight / sum);
    return out;
  };
  const auto weights = [](const DataConfig& data) { return "[" + joined(data.train, ", ", &WeightedPath::weight) + "]"; };
  if (shares(saved.data) != shares(current.data))
    list.insert(list.begin(), Difference{"data.train", "weights " + weights(saved.data), weights(current.data)});
  require(list.empty(), ExitCode::usage, source, " was trained on other tokens, or in another order:\n  ", joined(list, "\n  "),
          "\nto start a new run from its weights, use checkpoint.init_from");
}

// Requires the moments of all that is trained, as the optimizer needs them. Those of what is frozen from now on are left behind.
void require_moments(const CheckpointReader& reader, const PrecisionPlan& plan, Dtype dtype) {
  std::map<std::string, Dtype> saved;
  for (const ManifestTensor& tensor : reader.manifest().tensors) saved.emplace(tensor.name, tensor.dtype);
  constexpr const char* kStartAnew = "start a new run from these weights with checkpoint.init_from";
  for (const ModulePrecision& entry : plan.modules()) {
    const std::string name = entry.module.weight_name(), folder = reader.directory().string();
    if (entry.training.frozen() || !saved.contains("master." + name)) continue;
    const auto first = saved.find("m." + name);
    require(first != saved.end(), ExitCode::usage, "optimizer.rules: ", entry.module.path, " is trained here, but was frozen in ", folder,
            ", which has no moments of it; to train it, ", kStartAnew);
    const char* const names[] = {"AdamW", "Muon"};
    const bool muon = entry.training.muon, was_muon = !saved.contains("v." + name);
    require(muon == was_muon, ExitCode::usage, "optimizer.type: ", entry.module.path, " is trained by ", names[muon ? 1 : 0],
            " here, but by ", names[was_muon ? 1 : 0], " in ", folder, ", whose moments are of no use to the other; to change it, ",
            kStartAnew);
    require(first->second == dtype, ExitCode::usage, "optimizer.moments: ", dtype, ", but those in ", folder, " are ", first->second,
            ": set it to ", first->second, ", or ", kStartAnew);
  }
}

LoadFor purpose_of_resume(const RunConfig& config) {
  return config.checkpoint.allow_recipe_change ? LoadFor::resume_changed : LoadFor::resume;
}

// The steps of epochs are counted from the start of a run, with one global batch.
void require_steps_of_epochs(const Manifest& manifest, const TrainingConfig& training, int64_t sequences, const std::string& source) {
  const int64_t batch = *training.global_batch_size;
  if (!training.epochs || manifest.samples == manifest.step * batch) return;
  const double left = *training.epochs * static_cast<double>(sequences) - static_cast<double>(manifest.samples);
  const int64_t steps = manifest.step + static_cast<int64_t>(steps_of(std::max(0.0, left), batch));
  fail(ExitCode::usage, "training.epochs: ", *training.epochs, " are ", *training.steps, " steps of ", batch, " sequences, but ", source,
       " has taken ", manifest.samples, " in ", count_text(manifest.step, "step"), "; set training.epochs to null and training.steps to ",
       steps, ", with which the run ends where these epochs do");
}

// Holds all that a checkpoint says of a run which may go on from it.
struct Resumable {
  TrainState state;
  std::vector<std::string> plan_changes;
};

// Requires that the checkpoint has the same model, data, order of tokens, tokenizer and plan as this run.
Resumable resumable(const CheckpointReader& reader, const RunConfig& config, const PrecisionPlan& plan, const Data& data) {
  const std::string folder = reader.directory().string(), source = (reader.directory() / "manifest.json").string();
  const RunConfig& saved = reader.config();
  const Manifest& manifest = reader.manifest();
  require_same_model(saved, config, folder);
  require_same_data(from_json<DataFingerprints>(manifest.fingerprints.dataset, source + ": fingerprints.dataset"), data.fingerprints);
  require_same_order(saved, config, folder);
  require(!has_other_tokenizer(reader, data), ExitCode::usage, folder, " was trained with a tokenizer that differs from data.tokenizer");
  require_biases_kept(reader, has_expert_bias(config.model));
  require_moments(reader, plan, config.optimizer.moments);
  require_steps_of_epochs(manifest, config.training, data.train->samples(), folder);
  auto state = from_json<TrainState>(manifest.state, source + ": state");
  state.step = manifest.step;
  state.samples = manifest.samples;
  std::vector<std::string> changes = allowed_plan_changes(manifest.plan, plan, source, purpose_of_resume(config));
  require(state.step <= *config.training.steps, ExitCode::usage, "training.steps: ", *config.training.steps, " is less than the ",
          state.step, " steps of ", folder);
  return {.state = state, .plan_changes = std::move(changes)};
}

void log_changes(const RunConfig& saved, const RunConfig& current, const std::vector<std::string>& plan, const Manifest& manifest) {
  const auto log_all = [](const std::vector<Difference>& list) {
    for (const Difference& difference : list) log_warning("changed since the checkpoint: ", difference);
  };
  log_all(differences("model", saved.model, current.model));  // the padding of the vocabulary: all else was refused
  if (saved.model.moe && current.model.moe) log_all(differences("model.moe", *saved.model.moe, *current.model.moe));
  log_all(differences("precision", saved.precision, current.precision));
  for (const std::string& line : plan) log_warning("changed since the checkpoint: the precision of ", line);
  log_all(differences("optimizer", saved.optimizer, current.optimizer));
  log_all(differences("schedule", saved.schedule, current.schedule));
  log_all(differences("training", saved.training, current.training));
  log_all(differences("data", saved.data, current.data));
  if (manifest.fingerprints.build != build_fingerprint()) {
    log_warning("the checkpoint was written by another build (", manifest.fingerprints.build, "; this one: ", build_fingerprint(),
                "): the run continues, but its bits may differ from those of that build");
  }
}

}  // namespace

void require_same_batch(const RunConfig& saved, const LoadedConfig& current, const std::string& source) {
  const TrainingConfig &before = saved.training, &now = current.config.training;
  const bool derived = current.report.origin("training.global_batch_size") == "derived";
  if (!derived || before.global_batch_size == now.global_batch_size || before.micro_batch_size != now.micro_batch_size ||
      before.grad_accum != now.grad_accum)
    return;
  fail(ExitCode::usage, source, " was trained with a global batch of ", *before.global_batch_size, " on ",
       count_text(saved.parallel.data, "data rank"), ", but on ", count_text(current.config.parallel.data, "data rank"), " it would be ",
       *now.global_batch_size, "; set training.global_batch_size to ", *before.global_batch_size,
       " and training.grad_accum to null to keep it, or training.global_batch_size to ", *now.global_batch_size, " to change it");
}

CheckpointContent checkpoint_content(const TrainedParts& parts, const TrainState& state) {
  const std::optional<Tokenizer>& tokenizer = parts.data.tokenizer;
  const Shards& shards = parts.optimizer.shards();
  TrainState now = state;
  now.updates = parts.optimizer.updates();
  CheckpointContent content{
      {.step = state.step,
       .samples = state.samples,
       .config = effective_config(parts.config),
       .tokenizer = tokenizer ? tokenizer->to_json() : "null",
       .plan = plan_manifest(parts.plan, codes_by_weight(parts.parameters, parts.plan, shards.own(), shards.mesh().world)),
       .layout = text(R"({"data":)", shards.mesh().data.size(), R"(,"expert":)", shards.mesh().expert.size(), R"(,"tensor":)",
                      shards.mesh().tensor.size(), "}"),
       .state = json_text(now),
       .fingerprints = {.build = build_fingerprint(), .dataset = json_text(parts.data.fingerprints)}},
      {}};
  for (const Optimizer::State& own : parts.optimizer.states()) {
    add_tensor(content, "master.", own.shard, own.master);
    if (own.first_moment.defined()) add_tensor(content, "m.", own.shard, own.first_moment);
    if (own.second_moment.defined()) add_tensor(content, "v.", own.shard, own.second_moment);
  }
  if (shards.mesh().world.rank() > 0) return content;
  for (const TokenizerFile& file : parts.files) {
    const Shape size{static_cast<int64_t>(file.bytes.size())};
    content.tensors.push_back({.name = kTokenizerFilePrefix + file.name,
                               .shape = size,
                               .boxes = {},
                               .data = from_host(parts.parameters.device(), Dtype::u8, size, file.bytes.data())});
  }
  for (const Buffer& buffer : parts.parameters.buffers()) {
    const std::vector<int64_t> shape = dimensions(buffer.shape);
    content.tensors.push_back({.name = "buffer." + buffer.name, .shape = buffer.shape, .boxes = {whole_box(shape)}, .data = buffer.value});
  }
  return content;
}

void require_resumable(const CheckpointReader& reader, const RunConfig& config, const PrecisionPlan& plan, const Data& data) {
  resumable(reader, config, plan, data);
}

void require_weights_fit(const CheckpointReader& reader, const ModelConfig& model) {
  require_biases_kept(reader, has_expert_bias(model));
  for (const ParameterShape& parameter : parameter_shapes(model_shape(model)))
    require_saved_as(reader.tensor("master." + parameter.name), Dtype::f32, dimensions(parameter.shape), reader);
}

TrainState restore(CheckpointReader& reader, const TrainedParts& parts) {
  const Communicator& world = parts.optimizer.shards().mesh().world;
  Resumable found;
  agree_on_reading(world, [&] { found = resumable(reader, parts.config, parts.plan, parts.data); });
  load_weights(reader, parts.plan, purpose_of_resume(parts.config), parts.parameters, &parts.optimizer);
  agree_on_reading(world, [&] {
    for (const Optimizer::State& own : parts.optimizer.states()) {
      read_moment(reader, "m.", own.shard, own.first_moment);
      read_moment(reader, "v.", own.shard, own.second_moment);
    }
  });
  parts.optimizer.set_updates(found.state.updates);
  if (world.rank() == 0) log_changes(reader.config(), parts.config, found.plan_changes, reader.manifest());
  return found.state;
}

void load_weights(CheckpointReader& reader, const PrecisionPlan& plan, LoadFor purpose, ParameterSet& parameters, Optimizer* optimizer,
                  const Communicator& replica) {
  const Communicator ranks = optimizer ? optimizer->shards().mesh().world : replica;
  parameters.clear_nonfinite();  // a candidate that was given up may have raised it
  agree_on_reading(ranks, [&] {
    std::string bad;
    const auto load = [&](const ParameterShard& shard, const Tensor& master) {
      const std::string found = read_master(reader, shard, master);
      parameters.store(shard, master);
      if (bad.empty()) bad = found;
    };
    if (optimizer) {
      for (const Optimizer::State& state : optimizer->states()) load(state.shard, state.master);
    } else {
      for (const ParameterShard& shard : chunks_of(parameters)) load(shard, parameters.room_for_master(shard));
    }
    require(bad.empty(), ExitCode::numerical, reader.directory().string(), ": ", bad, ": weights must be finite");
    require_biases_kept(reader, !parameters.buffers().empty());
    for (const Buffer& buffer : parameters.buffers()) {
      has_expert_bias(reader.config().model) ? read_buffer(reader, buffer)
                                             : parameters.device().run(Fill{.out = buffer.value, .value = 0.0});
    }
  });
  if (optimizer) optimizer->shards().gather();
  if (!parameters.buffers().empty() && !has_expert_bias(reader.config().model))
    log_warning(reader.directory().string(), ": was trained without model.moe.bias_update_rate, so expert biases start at 0");
  for (const ManifestTensor& tensor : reader.manifest().tensors) {
    if (!tensor.name.ends_with("_extra_state") || tensor.pieces.empty()) continue;
    log_warning(reader.directory().string(), ": ", tensor.name, " is ignored, because quantization in mantissa has no state");
  }
  const std::vector<ParameterShard> own = optimizer ? optimizer->shards().own() : parameters.whole_shards();
  const std::string source = (reader.directory() / "manifest.json").string();
  const CodesByWeight codes = codes_by_weight(parameters, plan, own, ranks);
  agree_on_reading(ranks, [&] { require_same_codes(reader.manifest().plan, plan, codes, source, purpose); });
}

bool is_shared_folder(const Communicator& world, bool there, const std::filesystem::path& folder, const char* key) {
  if (world.size() == 1) return there;
  if (world.all(uint8_t{there}).front() == 0) return false;
  // Uses a new name, which no cache of a network file system can hold. The folder is this run's, so other such files are of killed
  // processes.
  constexpr std::string_view kPrefix = ".tmp-nonce-";
  const std::string nonce = all_gather_strings(world, world.rank() == 0 ? new_secret() : "").front();
  const std::filesystem::path file = folder / (std::string(kPrefix) + nonce);
  agree(world, [&] {
    if (world.rank() != 0) return;
    std::vector<std::filesystem::path> left;
    std::error_code listing;
    for (std::filesystem::directory_iterator entry(folder, listing), end; !listing && entry != end; entry.increment(listing))
      if (entry->path().filename().string().starts_with(kPrefix)) left.push_back(entry->path());
    for (const std::filesystem::path& path : left) std::filesystem::remove(path, listing);
    try {
      File::create(file).close();
    } catch (const Error& error) {
      fail(ExitCode::environment, error.what());  // no work was lost
    }
  });
  std::error_code error;
  const bool found = std::filesystem::exists(file, error);
  const std::vector<uint8_t> all = world.all(static_cast<uint8_t>(found));
  if (world.rank() == 0) std::filesystem::remove(file, error);
  const auto lost = std::ranges::find(all, 0);
  if (lost == all.end()) return true;
  fail_alike(world, ExitCode::environment,
             text(key, ": rank ", lost - all.begin(), " does not see in ", folder.string(),
                  " what rank 0 writes there: the folder is not shared between hosts"));
}

void agree_on_reading(const Communicator& world, const std::function<void()>& body) {
  if (world.size() == 1) return body();
  enum class Met { nothing, unread, damage } met = Met::nothing;
  try {
    agree(world, [&] {
      try {
        body();
      } catch (const CheckpointUnread&) {
        met = Met::unread;
        throw;
      } catch (const CheckpointDamage&) {
        met = Met::damage;
        throw;
      }
    });
  } catch (const Error& error) {
    if (error.code() != ExitCode::data) throw;
    const Met worst = std::ranges::max(world.all(met));
    await_all(world);
    if (worst == Met::unread) throw CheckpointUnread(error.what());
    if (worst == Met::damage) throw CheckpointDamage(error.what());
    throw;
  }
}

std::vector<CheckpointCandidate> RanksTogether::first_of(const std::vector<CheckpointCandidate>& own) const {
  std::string reported;
  for (const CheckpointCandidate& candidate : own) {
    for (const std::string& word :
         {candidate.path.string(), candidate.step ? text(*candidate.step) : "", candidate.hash, candidate.problem})
      reported += word + '\0';
  }
  std::istringstream words(broadcast_string(world_, reported));
  std::vector<CheckpointCandidate> candidates;
  for (std::string path, step, hash, problem; std::getline(words, path, '\0');) {
    std::getline(words, step, '\0');
    std::getline(words, hash, '\0');
    std::getline(words, problem, '\0');
    candidates.push_back(
        {.path = path, .step = step.empty() ? std::nullopt : std::optional<int64_t>(std::stoll(step)), .hash = hash, .problem = problem});
  }
  return candidates;
}

void RanksTogether::require_same(const std::string& what, const std::string& own) const {
  const std::vector<Hash64> all = world_.all(xxh64(own));
  const auto mismatching = std::ranges::find_if(all, [&](const Hash64& hash) { return hash != all.front(); });
  if (mismatching == all.end()) return;
  await_all(world_);
  throw CheckpointDamage(text("rank ", mismatching - all.begin(), " does not see the same ", what, " as rank 0"));
}

SavedCheckpoint save_together(const Communicator& world, std::optional<CheckpointDirectory>& directory, const CheckpointContent& content,
                              const Progressed& progressed, AfterSave after) {
  progressed();
  if (world.size() == 1) return directory->save(content, after);
  ShardEntry own;
  agree(world, [&] { own = describe_shard(content.tensors, world.rank(), content.step, progressed); });
  const std::vector<std::string> strings = gather_strings(world, json_text(own));
  CheckpointDirectory::Save save;
  progressed();
  agree(world, [&] {
    if (!directory) return;
    std::vector<ShardEntry> shards;
    for (size_t r = 0; r < strings.size(); ++r) shards.push_back(from_json<ShardEntry>(strings[r], text("the shard of rank ", r)));
    save = directory->begin(assemble_manifest(content, shards), after);
  });
  const std::string folder = broadcast_string(world, save.folder.string());
  progressed();
  try {
    agree(world, [&] {
      if (!folder.empty()) write_shard(content.tensors, own, folder, progressed);
    });
  } catch (...) {
    if (directory) CheckpointDirectory::abandon(save);
    throw;
  }
  SavedCheckpoint saved;
  progressed();
  agree(world, [&] {
    if (directory) saved = directory->commit(save);
  });
  return saved;
}

}  // namespace mantissa
