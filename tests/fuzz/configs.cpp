// Accepted: the config, written out, is read as the same. Refused: an error says where, for configs that people write.
#include <algorithm>
#include <vector>

#include "data/tokenizer.h"
#include "hf/hugging_face.h"
#include "hf/packing.h"
#include "json/json_fields.h"
#include "mantissa/config/run_config.h"
#include "targets.h"

namespace mantissa::fuzz {

bool run_config(std::string_view input) {
  RunConfig config;
  const auto read = [](std::string_view text, const char* name) {
    return config_from_json<RunConfig>(std::string(text), name, ExitCode::data);
  };
  try {
    config = read(input, "config");
  } catch (const Error& error) {
    promise(std::string_view(error.what()).find("config:") != std::string_view::npos, "an error has a position");
    promise(error.code() == ExitCode::data, error.what());
    return false;
  }
  const std::string text = effective_config(config);
  promise(effective_config(read(text, "effective")) == text, "a configuration is read as it was written");
  return true;
}

bool tokenizer(std::string_view input) {
  const bool meta = take_byte(input) % 2 == 1;
  return accepted([&] {
    const Tokenizer read = meta ? Tokenizer::from_nanogpt_meta(input, "meta") : Tokenizer::from_json(input, "tokenizer");
    promise(Tokenizer::from_json(read.to_json(), "again").to_json() == read.to_json(), "a tokenizer is read as it was written");
    std::vector<int32_t> ids;
    for (int32_t id = 0; id < std::min<int64_t>(read.size(), 300); ++id) ids.push_back(id);
    promise(read.encode(read.decode(ids)) == ids, "ids of a text are those it was decoded from");
    promise(read.kind() != TokenizerKind::byte || read.decode(read.encode(input)) == input, "bytes stay bytes");
  });
}

bool hugging_face_config(std::string_view input) {
  return accepted([&] {
    const ArchitectureConfig read = read_architecture_config(input, "config.json");
    const SpecialTokens tokens = read_special_tokens(input, "config.json");
    promise(read.model.vocab_size.has_value() && *read.model.vocab_size > 0, "a model of Hugging Face has a vocabulary");
    const auto written_as = [](const ArchitectureConfig& config, const SpecialTokens& special, std::string_view from) {
      return architecture_config(config.model, config.dtype, special, config.quantization, read_router_loss_keys(from, "config.json"));
    };
    const std::string written = written_as(read, tokens, input);
    const ArchitectureConfig again = read_architecture_config(written, "again");
    promise(again.dtype == read.dtype && again.quantization == read.quantization, "the file's types are read as they were written");
    const std::string twice = written_as(again, read_special_tokens(written, "again"), written);
    promise(twice == written, "a model is read as it was written");  // defaults are then written out
  });
}

bool quantization_config(std::string_view input) {
  return accepted([&] {
    const PackedConfig read(input, "config.json");
    const bool mlx = parse_json(input, "config.json").get("quantization").is_object();  // names those that differ
    for (const char* const module : {"model.layers.0.mlp.down_proj", "model.layers.11.self_attn.q_proj", "lm_head"}) {
      const std::optional<PackedScheme> scheme = read.scheme(module);
      promise(!scheme || scheme->format == Format::e4m3 || scheme->format == Format::e2m1, "a scheme is MXFP8 or MXFP4");
      promise(read.names_modules() || mlx || scheme == read.scheme("another"), "one scheme is that of all modules");
    }
  });
}

}  // namespace mantissa::fuzz
