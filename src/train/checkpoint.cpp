#include "mantissa/train/checkpoint.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "mantissa/backend/functions.h"
#include "mantissa/base/json.h"
#include "mantissa/base/log.h"
#include "mantissa/base/version.h"

namespace mantissa {
namespace {

using nlohmann::ordered_json;

std::string state_text(const TrainState& state, int64_t updates) {
  ordered_json json = {{"updates", updates},
                       {"tokens", state.tokens},
                       {"skipped_steps", state.skipped_steps},
                       {"nonfinite_in_a_row", state.nonfinite_in_a_row},
                       {"best_valid_loss", nullptr},
                       {"owes_evaluation", state.owes_evaluation},
                       {"owes_samples", state.owes_samples}};
  if (state.best_valid_loss) json["best_valid_loss"] = *state.best_valid_loss;
  return json.dump();
}

int64_t counter(const nlohmann::json& json, const char* name, const std::string& source) {
  const auto found = json.find(name);
  const bool good = found != json.end() && found->is_number_integer() && found->get<int64_t>() >= 0;
  require(good, ExitCode::data, source, ": state.", name, " must be an integer of at least 0");
  return found->get<int64_t>();
}

// False if it is missing.
bool flag(const nlohmann::json& json, const char* name, const std::string& source) {
  const auto found = json.find(name);
  if (found == json.end()) return false;
  require(found->is_boolean(), ExitCode::data, source, ": state.", name, " must be true or false");
  return found->get<bool>();
}

struct SavedState {
  TrainState state;
  int64_t updates = 0;
};

SavedState parse_state(const Manifest& manifest, const std::string& source) {
  const nlohmann::json json = parse_strict_json(manifest.state, source);
  require(json.is_object(), ExitCode::data, source, ": state must be an object");
  SavedState saved{.state = {.step = manifest.step,
                             .samples = manifest.samples,
                             .tokens = counter(json, "tokens", source),
                             .skipped_steps = counter(json, "skipped_steps", source),
                             .nonfinite_in_a_row = counter(json, "nonfinite_in_a_row", source),
                             .owes_evaluation = flag(json, "owes_evaluation", source),
                             .owes_samples = flag(json, "owes_samples", source)},
                   .updates = counter(json, "updates", source)};
  if (const auto best = json.find("best_valid_loss"); best != json.end() && best->is_number()) {
    saved.state.best_valid_loss = best->get<double>();
  }
  return saved;
}

void add_tensor(CheckpointContent& content, const std::string& name, const Tensor& tensor) {
  content.tensors.push_back({.name = name, .shape = tensor.shape(), .boxes = {}, .data = tensor});
}

void read_tensor(CheckpointReader& reader, const std::string& name, const Tensor& out) {
  const ManifestTensor& saved = reader.tensor(name);
  require(saved.dtype == out.dtype() && saved.shape == dimensions(out.shape()), ExitCode::usage, reader.directory().string(), ": ", name,
          " is ", saved.dtype, " ", shape_text(saved.shape), ", the model needs ", out.dtype(), " ", shape_text(dimensions(out.shape())));
  fill_from_host(out, [&](std::span<std::byte> bytes) { reader.read(name, bytes); });
}

std::string scalar_text(const Scalar& scalar) {
  return std::visit(
      []<class T>(const T& value) {
        if constexpr (std::is_same_v<T, std::monostate>) return std::string("null");
        if constexpr (std::is_same_v<T, bool>) return std::string(value ? "true" : "false");
        if constexpr (!std::is_same_v<T, std::monostate> && !std::is_same_v<T, bool>) return text(value);
      },
      scalar);
}

// "hidden_size: 64 in the checkpoint, 128 here" for every scalar that differs.
template <class T>
std::vector<std::string> differences(const char* section, T saved, T current) {
  const std::vector<Field> left = fields_of(saved), right = fields_of(current);
  std::vector<std::string> found;
  for (size_t i = 0; i < left.size(); ++i) {
    const FieldKind kind = left[i].kind();
    const bool single = kind != FieldKind::list && kind != FieldKind::map && kind != FieldKind::object;
    if (!single || left[i].get() == right[i].get()) continue;
    found.push_back(
        text(section, ".", left[i].name, ": ", scalar_text(left[i].get()), " in the checkpoint, ", scalar_text(right[i].get()), " here"));
  }
  return found;
}

void require_same_model(const RunConfig& saved, const RunConfig& current, const std::string& source) {
  const std::vector<std::string> list = differences("model", saved.model, current.model);
  require(list.empty(), ExitCode::usage, source, " is a checkpoint of another model:\n  ", joined(list, "\n  "));
}

std::string weights_text(const DataConfig& data) { return "[" + joined(data.train, ", ", &WeightedPath::weight) + "]"; }

// As the sampler sees them.
std::vector<double> shares(const DataConfig& data) {
  double sum = 0.0;
  for (const WeightedPath& set : data.train) sum += set.weight;
  std::vector<double> out;
  for (const WeightedPath& set : data.train) out.push_back(set.weight / sum);
  return out;
}

// What decides, beside the files, which tokens are trained on and in which order.
void require_same_order(const RunConfig& saved, const RunConfig& current, const std::string& source) {
  const std::set<std::string> deciding = {"data.valid_fraction", "data.format",   "data.dtype",      "data.append_eod",
                                          "data.eod_id",         "training.seed", "training.seq_len"};
  std::vector<std::string> lines = differences("data", saved.data, current.data);
  std::ranges::move(differences("training", saved.training, current.training), std::back_inserter(lines));
  std::erase_if(lines, [&](const std::string& line) { return !deciding.contains(line.substr(0, line.find(':'))); });
  if (shares(saved.data) != shares(current.data)) {
    lines.insert(lines.begin(),
                 text("data.train: weights ", weights_text(saved.data), " in the checkpoint, ", weights_text(current.data), " here"));
  }
  require(lines.empty(), ExitCode::usage, source, " is a checkpoint of other tokens or another order of them:\n  ", joined(lines, "\n  "),
          "\ncheckpoint.init_from starts a new run with its weights");
}

void log_changes(const RunConfig& saved, const RunConfig& current, const std::vector<std::string>& plan, const Manifest& manifest) {
  const auto log_all = [](const std::vector<std::string>& lines) {
    for (const std::string& line : lines) log_warning("changed since the checkpoint: ", line);
  };
  log_all(differences("precision", saved.precision, current.precision));
  for (const std::string& line : plan) log_warning("changed since the checkpoint: the precision of ", line);
  log_all(differences("optimizer", saved.optimizer, current.optimizer));
  log_all(differences("schedule", saved.schedule, current.schedule));
  log_all(differences("training", saved.training, current.training));
  log_all(differences("data", saved.data, current.data));
  if (manifest.build_fingerprint != build_fingerprint()) {
    log_warning("the checkpoint was written by another build (", manifest.build_fingerprint, "; this one: ", build_fingerprint(),
                "): the run continues, but not bit for bit as it would have");
  }
}

}  // namespace

CheckpointContent checkpoint_content(const TrainedParts& parts, const TrainState& state) {
  const std::optional<Tokenizer>& tokenizer = parts.data.tokenizer;
  CheckpointContent content{.step = state.step,
                            .samples = state.samples,
                            .config = effective_config(parts.config),
                            .plan = plan_manifest(parts.plan, parts.parameters),
                            .tokenizer = tokenizer ? tokenizer->to_json() : "null",
                            .state = state_text(state, parts.optimizer.updates()),
                            .dataset_fingerprint = fingerprints_to_json(parts.data.fingerprints),
                            .build_fingerprint = build_fingerprint(),
                            .tensors = {}};
  size_t i = 0;
  for (const Parameter& parameter : parts.parameters.all()) {
    add_tensor(content, "master." + parameter.name, parts.optimizer.master(i));
    add_tensor(content, "m." + parameter.name, parts.optimizer.first_moment(i));
    add_tensor(content, "v." + parameter.name, parts.optimizer.second_moment(i));
    ++i;
  }
  return content;
}

TrainState restore(CheckpointReader& reader, const TrainedParts& parts) {
  const RunConfig& config = parts.config;
  const LoadFor purpose = config.checkpoint.allow_recipe_change ? LoadFor::resume_changed : LoadFor::resume;
  const std::string source = (reader.directory() / "manifest.json").string();
  const RunConfig saved = saved_config(reader);
  require_same_model(saved, config, reader.directory().string());
  require_same_data(fingerprints_from_json(reader.manifest().dataset_fingerprint, source), parts.data.fingerprints);
  require_same_order(saved, config, reader.directory().string());
  require_same_tokenizer(reader, parts.data);
  const SavedState state = parse_state(reader.manifest(), source);
  const std::vector<std::string> plan_changes = allowed_plan_changes(reader.manifest().plan, parts.plan, source, purpose);
  require(state.state.step <= config.training.steps, ExitCode::usage, "training.steps: ", config.training.steps, " is less than the ",
          state.state.step, " steps of ", reader.directory().string());
  load_weights(reader, parts.plan, purpose, parts.parameters, &parts.optimizer);
  size_t i = 0;
  for (const Parameter& parameter : parts.parameters.all()) {
    read_tensor(reader, "m." + parameter.name, parts.optimizer.first_moment(i));
    read_tensor(reader, "v." + parameter.name, parts.optimizer.second_moment(i));
    ++i;
  }
  parts.optimizer.set_updates(state.updates);
  log_changes(saved, config, plan_changes, reader.manifest());
  return state.state;
}

void load_weights(CheckpointReader& reader, const PrecisionPlan& plan, LoadFor purpose, ParameterSet& parameters, Optimizer* optimizer) {
  parameters.clear_nonfinite();  // a candidate that was given up may have raised it
  std::string bad;
  size_t i = 0;
  for (const Parameter& parameter : parameters.all()) {
    const Tensor master = optimizer ? optimizer->master(i++) : parameters.room_for_master(parameter);
    read_tensor(reader, "master." + parameter.name, master);
    parameters.store(parameter, master);
    if (bad.empty()) bad = nonfinite_weight(parameter, master);
  }
  for (const ManifestTensor& tensor : reader.manifest().tensors) {
    if (!tensor.name.ends_with("_extra_state") || tensor.pieces.empty()) continue;
    log_warning(reader.directory().string(), ": ", tensor.name, " is ignored: quantisation here keeps no state of its own");
  }
  require(bad.empty(), ExitCode::numerical, reader.directory().string(), ": ", bad, ": weights must be finite");
  require_same_codes(reader.manifest().plan, plan, parameters, (reader.directory() / "manifest.json").string(), purpose);
}

}  // namespace mantissa
