#include "mantissa/checkpoint/saved_model.h"

#include <algorithm>
#include <span>

#include "mantissa/backend/functions.h"
#include "mantissa/checkpoint/checkpoint_search.h"
#include "mantissa/models/model_shape.h"

namespace mantissa {
namespace {

std::string source_of_config(const CheckpointReader& reader) { return (reader.directory() / "manifest.json").string() + " (config)"; }

// Requires that the checkpoint has these tensors of a model, PREFIX.NAME in fp32, and no others of this prefix.
void require_tensors(const CheckpointReader& reader, const std::string& prefix, const char* kind, const std::vector<ParameterShape>& of) {
  const std::string source = source_of_config(reader);
  for (const ParameterShape& needed : of) {
    const std::string name = prefix + needed.name;
    require(reader.has(name), ExitCode::data, source, ": its model has ", needed.name, ", but there is no tensor ", name);
    const ManifestTensor& saved = reader.tensor(name);
    require(saved.dtype == Dtype::f32 && saved.shape == dimensions(needed.shape), ExitCode::data, source, ": ", needed.name,
            " of its model is fp32 ", shape_text(dimensions(needed.shape)), ", but the tensor is ", saved.dtype, " ",
            shape_text(saved.shape));
  }
  const auto found = std::ranges::count_if(reader.manifest().tensors, [&](const auto& tensor) { return tensor.name.starts_with(prefix); });
  require(std::cmp_equal(found, of.size()), ExitCode::data, source, ": its model has ", of.size(), " ", kind, ", but there are ", found);
}

// Reports an invalid config as damage of the checkpoint that holds it.
template <class Check>
auto as_data(const std::string& source, const Check& check) {
  try {
    return check();
  } catch (const Error& error) {
    fail(ExitCode::data, source, ": ", error.what());
  }
}

// Checks as a run does; a saved config passed that before it was saved.
void check_saved(const RunConfig& config) {
  ConfigReport report;
  config.model.validate(report);
  if (config.training.seq_len > config.model.max_position_embeddings) {
    report.error("training.seq_len", text("must be at most model.max_position_embeddings ", config.model.max_position_embeddings, ", got ",
                                          config.training.seq_len));
  }
  report.throw_if_failed();
}

// Vocabulary padding is not stored: use the smallest that the plan allows.
RunConfig with_least_padding(RunConfig config) {
  config.model.pad_vocab_to = config.parallel.tensor * (config.precision.fp8_output_proj.enabled ? 32 : 1);
  return config;
}

// Returns true if a manifest describes this tokenizer.
bool same_tokenizer(const std::string& described, const Tokenizer& tokenizer) {
  return parse_json(described, "the tokenizer of a manifest") == parse_json(tokenizer.to_json(), "a tokenizer");
}

}  // namespace

RunConfig for_ranks(RunConfig config, const ModelRanks& ranks) {
  config.parallel.data = config.parallel.expert = 1;
  config.parallel.tensor = ranks.tensor;
  config.parallel.sequence_parallel = ranks.sequence_parallel;
  ConfigReport report;
  divide_model(config.model, config.parallel.tensor, report);
  report.throw_if_failed();
  return with_least_padding(config);
}

PrecisionPlan plan_for_tensors(const RunConfig& config, const CheckpointReader& reader, const RunConfig& use) {
  const std::string source = source_of_config(reader);
  as_data(source, [&] { check_saved(config); });
  const ModelShape model = model_shape(config.model);
  require_tensors(reader, "master.", "parameters", parameter_shapes(model));
  require_tensors(reader, "buffer.", "buffers", buffer_shapes(model));
  as_data(source, [&] { resolve_plan(for_ranks(config, {})); });
  return resolve_plan(use);  // only the number of ranks can be wrong now
}

RunConfig saved_config(const CheckpointReader& reader) {
  const std::string source = source_of_config(reader);
  const RunConfig config = config_from_json<RunConfig>(reader.manifest().config, source, ExitCode::data);
  require(config.model.vocab_size.has_value(), ExitCode::data, source, ": model.vocab_size is null");
  return config;
}

std::optional<Tokenizer> saved_tokenizer(CheckpointReader& reader) {
  const std::string& described = reader.manifest().tokenizer;
  if (described == "null") return std::nullopt;
  const std::string name = (reader.directory() / "manifest.json").string() + " (tokenizer)";
  if (parse_json(described, name).get("type").string() != choice_name(TokenizerKind::bpe)) return Tokenizer::from_json(described, name);
  std::optional<Tokenizer> read = tokenizer_of(tokenizer_files(reader), reader.directory().string());
  require(read && same_tokenizer(described, *read), ExitCode::data, name, ": is not that of the checkpoint's tokenizer.json");
  return read;
}

RunConfig config_saved_at(const std::filesystem::path& path) {
  RunConfig config;
  load_checkpoint(path, [&config](CheckpointReader& reader) { config = saved_config(reader); });
  return config;
}

std::optional<Tokenizer> tokenizer_saved_at(const std::filesystem::path& path) {
  std::optional<Tokenizer> tokenizer;
  load_checkpoint(path, [&tokenizer](CheckpointReader& reader) {
    tokenizer = saved_tokenizer(reader);
    if (!tokenizer) tokenizer = tokenizer_of(tokenizer_files(reader), reader.directory().string());
  });
  return tokenizer;
}

std::optional<Tokenizer> tokenizer_of(const std::vector<TokenizerFile>& files, const std::string& source) {
  const auto bytes_of = [&](const char* name) {
    const auto found = std::ranges::find(files, name, &TokenizerFile::name);
    return found == files.end() ? std::string() : found->bytes;
  };
  std::string tokenizer = bytes_of("tokenizer.json");
  if (tokenizer.empty()) return std::nullopt;
  return Tokenizer::bpe({.tokenizer = std::move(tokenizer), .config = bytes_of("tokenizer_config.json")}, source + "/tokenizer.json");
}

std::vector<TokenizerFile> tokenizer_files(CheckpointReader& reader) {
  std::vector<TokenizerFile> files;
  for (const ManifestTensor& tensor : reader.manifest().tensors) {
    if (!tensor.name.starts_with(kTokenizerFilePrefix)) continue;
    const std::string name = tensor.name.substr(kTokenizerFilePrefix.size());
    const bool known = std::ranges::find(kTokenizerFiles, name) != kTokenizerFiles.end();
    require(known && tensor.dtype == Dtype::u8 && tensor.shape.size() == 1, ExitCode::data, reader.directory().string(), ": ", tensor.name,
            " must be the bytes of a file that goes with a model");
    std::string bytes(static_cast<size_t>(tensor.shape[0]), '\0');
    reader.read(tensor.name, std::as_writable_bytes(std::span(bytes)));
    files.push_back({.name = name, .bytes = std::move(bytes)});
  }
  return files;
}

bool has_other_tokenizer(const CheckpointReader& reader, const Data& data) {
  const std::string& described = reader.manifest().tokenizer;
  return described != "null" && data.tokenizer && !same_tokenizer(described, *data.tokenizer);
}

SavedModel saved_model(const CheckpointReader& reader) {
  const RunConfig saved = saved_config(reader), config = for_ranks(saved, {});
  return {.config = config, .plan = plan_for_tensors(saved, reader, config)};
}

int64_t verify_codes(CheckpointReader& reader, Backend& device) {
  if (reader.manifest().plan == "null") return 0;
  const PrecisionPlan plan = saved_model(reader).plan;
  CodesByWeight codes;
  for (const ModulePrecision& module : plan.modules()) {
    const Quantization how = module.resident_codes();
    if (!how) continue;
    const std::string name = module.module.path + ".weight";
    const Shape shape{module.module.rows() - module.module.padding, module.module.in};
    const Tensor master = empty(device, Dtype::f32, shape);
    const Box unpadded{.start = {0, 0}, .size = dimensions(shape)};
    fill_from_host(master, [&](std::span<std::byte> bytes) { reader.read("master." + name, unpadded, bytes); });
    const int64_t matrices = module.module.matrices;
    const CodePlace whole{.rows = shape[0], .columns = shape[1], .matrix_rows = matrices > 1 ? module.module.out : 0};
    codes[name] = {.how = text(how), .sums = std::vector<CodeSums>(static_cast<size_t>(matrices))};
    add_code_sums(quantized(converted(master, Dtype::bf16), how), whole, codes[name].sums);
  }
  require_same_codes(reader.manifest().plan, plan, codes, (reader.directory() / "manifest.json").string(), LoadFor::use);
  return static_cast<int64_t>(codes.size());
}

}  // namespace mantissa
