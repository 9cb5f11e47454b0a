#include "mantissa/hf/load_model.h"

#include <algorithm>
#include <map>
#include <string>

#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"
#include "mantissa/checkpoint/checkpoint_search.h"
#include "mantissa/checkpoint/ranks_together.h"
#include "mantissa/checkpoint/read_shard.h"
#include "mantissa/checkpoint/saved_model.h"
#include "mantissa/data/end_tokens.h"
#include "mantissa/hf/chat_files.h"
#include "mantissa/models/model_shape.h"
#include "mantissa/tensor/nonfinite.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

// Reads the end tokens in the files that belong to a model. Called only when somebody generates: nothing else needs the files to be right.
std::vector<int32_t> end_tokens(const std::vector<TokenizerFile>& files, int64_t vocab_size) {
  for (const char* const name : {"generation_config.json", "config.json"}) {
    const auto file = std::ranges::find(files, name, &TokenizerFile::name);
    if (file == files.end()) continue;
    std::vector<int32_t> ids;
    for (const int64_t id : read_special_tokens(file->bytes, name).end)
      if (id >= 0 && id < vocab_size) ids.push_back(static_cast<int32_t>(id));
    if (!ids.empty()) return ids;
  }
  return {};
}

// Returns none for a tokenizer that is not supported: ids can be read and written all the same.
std::optional<Tokenizer> usable_tokenizer(const std::vector<TokenizerFile>& files, const std::string& source) {
  try {
    return tokenizer_of(files, source);
  } catch (const Error& error) {
    log_warning(error.what());
    return std::nullopt;
  }
}

// Returns the ids that the files name and those that the data taught; without named ones, all that the model learned.
void take_files(std::vector<TokenizerFile> files, LoadedModel& loaded) {
  std::erase_if(files,
                [](const TokenizerFile& file) { return !file.name.ends_with("config.json") && !file.name.starts_with("chat_template"); });
  loaded.files = files;
  std::vector<int32_t> learned = learned_end_tokens(loaded.config.data, loaded.tokenizer);
  std::erase_if(learned, [size = *loaded.config.model.vocab_size](int32_t id) { return id >= size; });
  std::vector<int32_t> taught = taught_end_tokens(loaded.config.data, loaded.tokenizer);
  loaded.end_tokens = [files = std::move(files), size = *loaded.config.model.vocab_size, learned = std::move(learned),
                       taught = std::move(taught)] {
    std::vector<int32_t> named = end_tokens(files, size);
    if (named.empty()) return learned;
    for (const int32_t id : taught)
      if (std::ranges::find(named, id) == named.end()) named.push_back(id);
    return named;
  };
}

// Sets the type of computation, also in the recipes that stand for the files of a folder, which name it.
void compute_in(Dtype dtype, PrecisionConfig& precision) {
  for (auto& [name, recipe] : precision.recipes) {
    if (recipe.compute == precision.dtype) recipe.compute = dtype;
  }
  precision.dtype = dtype;
}

// Loads the model of a folder of Hugging Face's form.
LoadedModel load_hf_folder(const fs::path& folder, std::unique_ptr<Backend> device, const Mesh& mesh, std::optional<Dtype> dtype) {
  LoadedModel loaded;
  loaded.path = folder;
  loaded.device = std::move(device);
  agree_on_reading(mesh.tensor, [&] {
    HfWeights weights(folder);
    if (mesh.tensor.rank() == 0) {
      for (const std::string& finding : weights.block_fp8_findings()) log_warning(finding);
    }
    loaded.config = for_ranks(weights.run_config(), mesh.ranks());
    if (dtype) compute_in(*dtype, loaded.config.precision);
    const PrecisionPlan plan = resolve_plan(loaded.config);
    std::vector<TokenizerFile> files;
    for (const char* const name : {"generation_config.json", "config.json", "tokenizer.json", "tokenizer_config.json",
                                   "chat_template.jinja", "chat_template.json"}) {
      if (std::optional<std::string> content = weights.file(name)) files.push_back({.name = name, .bytes = std::move(*content)});
    }
    loaded.tokenizer = usable_tokenizer(files, weights.where());
    take_files(std::move(files), loaded);
    loaded.model = std::make_unique<Gpt>(loaded.config.model, *loaded.device, plan, GptOptions{.gradients = false, .mesh = mesh});
    load_hf_weights(weights, loaded.model->parameters());
  });
  return loaded;
}

// Names an element that is NaN or Inf as the folder does; `bad` names it as the model does, or one that only its dtype here cannot hold.
[[noreturn]] void refuse_nonfinite(HfWeights& weights, const ParameterShard& shard, const std::string& bad) {
  for (const ParameterShard::Chunk& chunk : shard.chunks()) {
    const Box box = box_of(shard, chunk);
    std::vector<float> values(static_cast<size_t>(box.elements()));
    weights.read_fp32(shard.of->name, box, values);
    const int64_t at = first_nonfinite(Dtype::f32, std::as_bytes(std::span(values))), columns = box.elements() / box.size.front();
    if (at < 0) continue;
    const int64_t first_column = box.start.size() > 1 ? box.start.back() : 0;
    fail(ExitCode::data, weights.where(), ": ",
         weights.element(shard.of->name, box.start.front() + at / columns, first_column + at % columns), " is NaN or Inf");
  }
  fail(ExitCode::data, weights.where(), ": ", bad, ": weights must be finite");
}

// Makes the model of a checkpoint, without its weights; returns its plan.
PrecisionPlan make_model(CheckpointReader& reader, const Mesh& mesh, std::optional<Dtype> dtype, LoadedModel& loaded) {
  const RunConfig saved = saved_config(reader);
  loaded.config = for_ranks(saved, mesh.ranks());
  PrecisionPlan plan = plan_for_tensors(saved, reader, loaded.config);
  if (dtype) {
    compute_in(*dtype, loaded.config.precision);
    plan = resolve_plan(loaded.config);
  }
  const std::vector<TokenizerFile> files = tokenizer_files(reader);
  loaded.tokenizer = saved_tokenizer(reader);
  if (!loaded.tokenizer) loaded.tokenizer = usable_tokenizer(files, reader.directory().string());
  take_files(files, loaded);
  loaded.model.reset();  // frees the model of a candidate that was given up
  loaded.model = std::make_unique<Gpt>(loaded.config.model, *loaded.device, plan, GptOptions{.gradients = false, .mesh = mesh});
  return plan;
}

}  // namespace

void require_weights_fit(const HfWeights& weights, const ModelConfig& model) {
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const ParameterShape& parameter : parameter_shapes(model_shape(weights.config().model)))
    shapes[parameter.name] = dimensions(parameter.shape);
  for (const ParameterShape& parameter : parameter_shapes(model_shape(model))) {
    const std::vector<int64_t> needed = dimensions(parameter.shape);
    const auto found = shapes.find(parameter.name);
    require(found != shapes.end(), ExitCode::usage, weights.where(), ": has no ", parameter.name, ", which the model needs");
    require(found->second == needed, ExitCode::usage, weights.where(), ": ", parameter.name, " is ", shape_text(found->second),
            ", but the model needs ", shape_text(needed));
  }
}

void load_hf_weights(HfWeights& weights, ParameterSet& parameters, const Optimizer* optimizer) {
  const auto load = [&](const ParameterShard& shard, const Tensor& master) {
    if (const std::string bad = read_shard(weights, shard, master); !bad.empty()) refuse_nonfinite(weights, shard, bad);
    parameters.store(shard, master);
  };
  if (optimizer) {
    for (const Optimizer::State& state : optimizer->states()) {
      for (const ParameterShard& chunk : chunks_of(state.shard))
        load(chunk, state.master.slice(chunk.begin - state.shard.begin, chunk.end - state.shard.begin));
    }
  } else {
    for (const ParameterShard& shard : chunks_of(parameters)) load(shard, parameters.room_for_master(shard));
  }
  weights.require_unchanged();
}

bool starts_from_folder(const Communicator& ranks, const fs::path& path) {
  // Rank 0 decides, so that all ranks read alike, or fail together.
  return ranks.all(static_cast<uint8_t>(is_hf_folder(path))).front() != 0;
}

std::string chat_template_warning(const LoadedModel& loaded, ChatTemplate which, const std::optional<std::string>& date) {
  const std::optional<ChatTemplate>& trained = loaded.config.data.chat_template;
  if (trained && *trained != which)
    return text(loaded.path.string(), ": was trained with data.chat_template ", choice_name(*trained), ", not with ", choice_name(which));
  const std::string difference = trained ? "" : chat_template_difference(loaded.files, which, date);
  return difference.empty() ? "" : text(loaded.path.string(), ": ", difference);
}

RunConfig config_of_model(const fs::path& path) { return is_hf_folder(path) ? HfWeights(path).run_config() : config_saved_at(path); }

LoadedModel load_model(const fs::path& path, std::unique_ptr<Backend> device, const Mesh& mesh, std::optional<Dtype> dtype) {
  if (starts_from_folder(mesh.tensor, path)) return load_hf_folder(path, std::move(device), mesh, dtype);
  LoadedModel loaded;
  loaded.device = std::move(device);
  const auto load = [&](CheckpointReader& reader) {
    std::optional<PrecisionPlan> plan;
    agree_on_reading(mesh.tensor, [&] { plan = make_model(reader, mesh, dtype, loaded); });
    load_weights(reader, *plan, LoadFor::use, loaded.model->parameters(), nullptr, mesh.tensor);
  };
  const LoadedCheckpoint from = load_checkpoint(path, load, RanksTogether(mesh.tensor));
  loaded.path = from.path;
  loaded.step = from.step;
  return loaded;
}

}  // namespace mantissa
