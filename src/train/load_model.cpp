// What a checkpoint says of its model, and the model made from it.
#include <algorithm>
#include <span>

#include "mantissa/backend/functions.h"
#include "mantissa/models/model_shape.h"
#include "mantissa/train/checkpoint.h"
#include "train/ranks.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

std::string source_of_config(const CheckpointReader& reader) { return (reader.directory() / "manifest.json").string() + " (config)"; }

// That the checkpoint has these tensors of a model, and no others of their kind; padded: once stored with its padding.
void require_tensors(const CheckpointReader& reader, const std::string& prefix, const char* kind, const std::vector<ParameterShape>& of) {
  const std::string source = source_of_config(reader);
  for (const ParameterShape& needed : of) {
    const std::string name = prefix + needed.name;
    require(reader.has(name), ExitCode::data, source, ": its model has ", needed.name, ", but there is no tensor ", name);
    const ManifestTensor& saved = reader.tensor(name);
    const bool fits = saved.shape == dimensions(needed.shape) || saved.shape == dimensions(needed.padded);
    require(saved.dtype == Dtype::f32 && fits, ExitCode::data, source, ": ", needed.name, " of its model is fp32 ",
            shape_text(dimensions(needed.shape)), ", but the tensor is ", saved.dtype, " ", shape_text(saved.shape));
  }
  const auto found = std::ranges::count_if(reader.manifest().tensors, [&](const auto& tensor) { return tensor.name.starts_with(prefix); });
  require(std::cmp_equal(found, of.size()), ExitCode::data, source, ": its model has ", of.size(), " ", kind, ", but there are ", found);
}

// What is wrong with a config is wrong with the checkpoint that it was saved in.
template <class Check>
auto as_data(const std::string& source, const Check& check) {
  try {
    return check();
  } catch (const Error& error) {
    fail(ExitCode::data, source, ": ", error.what());
  }
}

// As a run checks its config, which a saved one has passed before it was saved.
void check_saved(const RunConfig& config) {
  ConfigReport report;
  config.model.validate(report);
  if (config.training.seq_len > config.model.max_position_embeddings) {
    report.error("training.seq_len", text("must be at most model.max_position_embeddings ", config.model.max_position_embeddings, ", got ",
                                          config.training.seq_len));
  }
  report.throw_if_failed();
}

// Padding changes no value and no tensor shows how much there was: no more than the plan needs, whatever the config says.
RunConfig with_least_padding(RunConfig config) {
  config.model.pad_vocab_to = config.parallel.tensor * (config.precision.fp8_output_proj.enabled ? 32 : 1);
  return config;
}

// As it is to be held by so many ranks, whatever it was trained on. Throws Error(usage) where it cannot be divided so.
RunConfig for_ranks(RunConfig config, const TensorRanks& ranks) {
  config.parallel.data = config.parallel.expert = 1;
  config.parallel.tensor = ranks.group.size();
  config.parallel.sequence_parallel = ranks.sequence;
  ConfigReport report;
  divide_model(config.model, config.parallel.tensor, report);
  report.throw_if_failed();
  return with_least_padding(config);
}

// The plan of its model, as `use` holds it. Before anything of the size that the saved config asks for is made.
PrecisionPlan plan_for_tensors(const RunConfig& config, const CheckpointReader& reader, const RunConfig& use) {
  const std::string source = source_of_config(reader);
  as_data(source, [&] { check_saved(config); });
  const ModelShape model = model_shape(config.model);
  require_tensors(reader, "master.", "parameters", parameter_shapes(model));
  require_tensors(reader, "buffer.", "buffers", buffer_shapes(model));
  return as_data(source, [&] { return resolve_plan(use); });
}

}  // namespace

RunConfig saved_config(const CheckpointReader& reader) {
  const std::string source = source_of_config(reader);
  const RunConfig config = config_from_json<RunConfig>(reader.manifest().config, source, ExitCode::data);
  require(config.model.vocab_size.has_value(), ExitCode::data, source, ": model.vocab_size is null");
  return config;
}

std::optional<Tokenizer> saved_tokenizer(const CheckpointReader& reader) {
  if (reader.manifest().tokenizer == "null") return std::nullopt;
  return Tokenizer::from_json(reader.manifest().tokenizer, (reader.directory() / "manifest.json").string() + " (tokenizer)");
}

void require_same_tokenizer(const CheckpointReader& reader, const Data& data) {
  const std::optional<Tokenizer> saved = saved_tokenizer(reader);
  require(!saved || !data.tokenizer || saved->to_json() == data.tokenizer->to_json(), ExitCode::usage, reader.directory().string(),
          " was trained with another tokenizer than data.tokenizer names");
}

int64_t verify_codes(CheckpointReader& reader) {
  if (reader.manifest().plan == "null") return 0;
  const RunConfig saved = saved_config(reader);
  const PrecisionPlan plan = plan_for_tensors(saved, reader, for_ranks(saved, {}));
  const std::unique_ptr<Backend> device = make_backend("cpu");
  CodesByWeight codes;
  for (const ModulePrecision& module : plan.modules()) {
    const Quantization how = module.resident_codes();
    if (!how) continue;
    const std::string name = module.module.path + ".weight";
    const Shape shape{module.module.rows() - module.module.padding, module.module.in};
    const Tensor master = empty(*device, Dtype::f32, shape);
    const Box unpadded{.start = {0, 0}, .size = dimensions(shape)};
    reader.read("master." + name, unpadded, std::as_writable_bytes(std::span(master.data<float>(), static_cast<size_t>(shape.elements()))));
    const int64_t matrices = module.module.matrices;
    const CodePlace whole{.rows = shape[0], .columns = shape[1], .matrix_rows = matrices > 1 ? module.module.out : 0};
    codes[name] = {.how = text(how), .sums = std::vector<CodeSums>(static_cast<size_t>(matrices))};
    add_code_sums(quantized(converted(master, Dtype::bf16), how), whole, codes[name].sums);
  }
  require_same_codes(reader.manifest().plan, plan, codes, (reader.directory() / "manifest.json").string(), LoadFor::use);
  return static_cast<int64_t>(codes.size());
}

LoadedModel load_model(const fs::path& path, const TensorRanks& ranks) {
  LoadedModel loaded;
  const auto load = [&](CheckpointReader& reader) {
    const RunConfig saved = saved_config(reader);
    loaded.config = for_ranks(saved, ranks);
    const PrecisionPlan plan = plan_for_tensors(saved, reader, loaded.config);
    loaded.tokenizer = saved_tokenizer(reader);
    loaded.model.reset();  // before the device it lives on
    loaded.device = make_backend(loaded.config.training.backend());
    loaded.model = std::make_unique<Gpt>(loaded.config.model, *loaded.device, plan, GptOptions{.gradients = false, .tensor = ranks});
    load_weights(reader, plan, LoadFor::use, loaded.model->parameters(), nullptr, ranks.group);
  };
  const LoadedCheckpoint from = load_checkpoint(path, load, RanksTogether(ranks.group));
  loaded.path = from.path;
  loaded.step = from.step;
  return loaded;
}

}  // namespace mantissa
