// What no table can say of a config.json, by topic: read and written.
#include <algorithm>
#include <set>

#include "hf/architecture_table.h"
#include "mantissa/json/json_fields.h"

namespace mantissa {
namespace {

// `rope`: rope_scaling or rope_parameters.
std::optional<RopeScaling> scaling_type(ArchitectureKeys& rope) {
  const std::string type = rope.word("rope_type", rope.word("type", "default"));
  if (rope.word("type", type) != type) rope.refuse("type", "rope_type is \"" + type + "\"");
  const std::optional<RopeScaling> scaling = choice_of<RopeScaling>(type);
  if (!scaling && type != "default") rope.refuse(rope.has("rope_type") ? "rope_type" : "type", "mantissa knows default, llama3 and yarn");
  return scaling;
}

// Members of rope_scaling, which are named alike in section "model.rope_scaling".
std::vector<std::string> scaling_keys(RopeScaling type) {
  if (type == RopeScaling::llama3) return {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"};
  return {"factor",        "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
          "mscale_all_dim"};
}

void read_scaling(ArchitectureReader& reader, ArchitectureKeys& rope, RopeScaling type) {
  const int64_t longest = reader.model.max_position_embeddings;
  RopeScalingConfig& scaling = reader.model.rope_scaling.emplace();
  scaling.type = type;
  scaling.original_max_position_embeddings = longest;
  for (const std::string& key : scaling_keys(type)) {
    const std::string option = "rope_scaling." + key;
    const Json* const stated = rope.stated(key, option_field(reader.model, option).kind());
    reader.set(option, rope.name(key), stated != nullptr ? *stated : Json());
  }
  reader.set("rope_scaling.type", rope.name("rope_type"), choice_name(type));
  if (type == RopeScaling::yarn && rope.is_null("factor")) {
    const auto original = static_cast<double>(scaling.original_max_position_embeddings);
    return reader.set("rope_scaling.factor", rope.name("factor"), static_cast<double>(longest) / original);
  }
  rope.require_present("factor");
  if (type == RopeScaling::yarn) return;
  rope.require_present("low_freq_factor");
  rope.require_present("high_freq_factor");
}

void require_clear_scaling(ArchitectureKeys& keys) {
  const bool empty = keys.is_null("rope_scaling") || (keys.has("rope_scaling") && keys.value("rope_scaling") == Json(Json::Members()));
  if (empty && !keys.has("rope_parameters"))
    keys.refuse("rope_scaling",
                "transformers 4 takes this as unscaled and transformers 5 as yarn; write {\"rope_type\": \"default\"} or the scaling");
}

std::vector<int64_t> layers_by_type(ArchitectureKeys& keys, int64_t layers) {
  const Json& types = keys.value("layer_types");
  const bool known = types.is_list() && std::cmp_equal(types.size(), layers) && std::ranges::all_of(types.entries(), [](const Json& type) {
                       return type == "full_attention" || type == "sliding_attention";
                     });
  if (!known) keys.refuse("layer_types", "mantissa knows \"full_attention\" and \"sliding_attention\", one for each layer");
  std::vector<int64_t> sliding;
  for (int64_t i = 0; i < layers; ++i) {
    if (types.at(static_cast<size_t>(i)) == "sliding_attention") sliding.push_back(i);
  }
  return sliding;
}

// Returns none if all tokens are seen, or no layer says otherwise.
std::optional<int64_t> window_of(ArchitectureKeys& keys, Architecture architecture) {
  const std::optional<int64_t> given = keys.integer("sliding_window");
  const bool absent = !given && !keys.is_null("sliding_window");
  if (architecture == Architecture::mixtral) return given;
  if (architecture == Architecture::gpt_oss) return absent ? 128 : given;
  keys.require_not_null("use_sliding_window", FieldKind::boolean);
  const Json* const used = keys.stated("use_sliding_window", FieldKind::boolean);
  if (used == nullptr || *used == false) return {};
  return absent ? 4096 : given;
}

std::vector<int64_t> layers_by_class(ArchitectureReader& reader, bool windows) {
  const bool qwen = reader.architecture == Architecture::qwen2 || reader.architecture == Architecture::qwen3;
  if (qwen && windows) reader.keys.require_not_null("max_window_layers", FieldKind::integer);
  const int64_t first = reader.keys.integer("max_window_layers").value_or(28);
  std::vector<int64_t> sliding;
  for (int64_t i = 0; i < reader.layers(); ++i) {
    if (reader.architecture == Architecture::gpt_oss ? i % 2 == 0 : windows && (!qwen || i >= first)) sliding.push_back(i);
  }
  return sliding;
}

// Whose classes have windows in all layers or none.
bool layers_alike(Architecture architecture) { return architecture == Architecture::mixtral || architecture == Architecture::qwen3_moe; }

}  // namespace

// transformers 4 writes rope_theta and rope_scaling, 5 writes both in rope_parameters.
void read_rope(ArchitectureReader& reader) {
  ArchitectureKeys& keys = reader.keys;
  if (reader.architecture == Architecture::gpt_oss) require_clear_scaling(keys);
  std::optional<double> theta = keys.number("rope_theta");
  std::optional<std::string> before;
  for (const std::string name : {"rope_scaling", "rope_parameters"}) {
    if (!keys.has(name)) continue;
    ArchitectureKeys rope(keys.value(name), keys.source(), name + ".");
    const std::optional<double> inner = rope.number("rope_theta");
    rope.only("partial_rotary_factor", {1.0});
    reader.model.rope_scaling.reset();
    if (const std::optional<RopeScaling> type = scaling_type(rope)) read_scaling(reader, rope, *type);
    rope.require_all_known();
    if (theta && inner && *theta != *inner) keys.refuse(name, text("rope_theta differs: ", *theta, " stands beside it"));
    if (inner && !theta) reader.set("rope_theta", rope.name("rope_theta"), *inner);
    if (inner) theta = inner;
    const std::string scaling = json_text(reader.model.rope_scaling);
    if (before && *before != scaling) keys.refuse(name, "rope_scaling says otherwise");
    before = scaling;
  }
  if (!before && reader.architecture == Architecture::gpt_oss)  // whose class scales by default
    reader.model.rope_scaling = {.type = RopeScaling::yarn,
                                 .factor = 32.0,
                                 .original_max_position_embeddings = 4096,
                                 .beta_fast = 32.0,
                                 .beta_slow = 1.0,
                                 .truncate = false};
}

void write_rope(Architecture architecture, ModelConfig& model, Json& out) {
  if (model.rope_scaling) {
    Json& rope = out.add("rope_scaling", {{"rope_type", choice_name(model.rope_scaling->type)}});
    for (const std::string& key : scaling_keys(model.rope_scaling->type)) {
      const Json value = json_of(option_field(model, "rope_scaling." + key).get());
      if (!value.is_null()) rope.add(key, value);
    }
  } else if (architecture == Architecture::gpt_oss) {
    out.add("rope_scaling", {{"rope_type", "default"}});  // without it it is yarn
  }
}

// Which layers see only the last tokens: by layer_types, else all of Mixtral's, and of Qwen's those from max_window_layers on.
void read_windows(ArchitectureReader& reader) {
  ArchitectureKeys& keys = reader.keys;
  const std::optional<int64_t> window = window_of(keys, reader.architecture);
  std::vector<int64_t> sliding = layers_by_class(reader, window.has_value());
  const bool typed = keys.has("layer_types");
  if (typed) {
    const std::vector<int64_t> by_type = layers_by_type(keys, reader.layers());
    if (layers_alike(reader.architecture) && by_type != sliding)
      keys.refuse("layer_types", "layers of this architecture are all alike, by sliding_window");
    sliding = by_type;
  }
  if (sliding.empty()) return;
  if (!window && typed) keys.refuse("layer_types", "there is no sliding_window");
  if (!window) keys.refuse("sliding_window", "every second layer of gpt-oss has one, unless layer_types says otherwise");
  reader.set("sliding_window", "sliding_window", *window);
  if (std::cmp_less(sliding.size(), reader.layers())) reader.model.sliding_layers = sliding;
}

void write_windows(Architecture architecture, ModelConfig& model, Json& out) {
  const bool qwen = architecture != Architecture::mixtral && architecture != Architecture::gpt_oss;
  if (qwen) out.add("use_sliding_window", model.sliding_window.has_value());
  const bool stated = architecture == Architecture::gpt_oss;  // must be there, though no layer slides
  out.add("sliding_window", model.sliding_window || !stated ? Json(model.sliding_window) : 128);
  if (layers_alike(architecture) || (!model.sliding_window && architecture != Architecture::gpt_oss)) return;
  std::vector<std::string> types;
  for (int64_t i = 0; i < model.num_layers; ++i) types.emplace_back(model.window(i) > 0 ? "sliding_attention" : "full_attention");
  out.add("layer_types", types);
  if (qwen) out.add("max_window_layers", 0);
}

// Some files have the name of another architecture.
void read_number_of_experts(ArchitectureReader& reader) {
  ArchitectureKeys& keys = reader.keys;
  const std::optional<int64_t> local = keys.integer("num_local_experts"), plain = keys.integer("num_experts");
  if (local && plain && *local != *plain) keys.refuse("num_experts", text("num_local_experts is ", *local));
  for (const char* const key : {"num_local_experts", "num_experts"}) {
    keys.require_not_null(key, FieldKind::integer);
    if (keys.has(key)) reader.set("moe.num_experts", key, keys.value(key));
  }
}

// Layer i has experts unless it is listed in mlp_only_layers or decoder_sparse_step passes over it.
void read_dense_layers(ArchitectureReader& reader) {
  ArchitectureKeys& keys = reader.keys;
  for (const char* const key : {"num_local_experts", "num_experts"}) {
    if (keys.has(key) && keys.value(key) == 0)
      fail(ExitCode::usage, keys.source(), ": num_experts: a qwen3_moe without experts; write it as qwen3");
  }
  const Json* const given = keys.stated("mlp_only_layers", FieldKind::list);
  const auto listed = given != nullptr ? given->as<std::vector<int64_t>>() : std::vector<int64_t>();
  const int64_t step = keys.integer_or("decoder_sparse_step", 1);
  if (step < 1) keys.wrong("decoder_sparse_step", "1 or more");
  for (int64_t i = 0; i < reader.layers(); ++i) {
    if (std::ranges::find(listed, i) != listed.end() || (i + 1) % step != 0) reader.model.moe->dense_layers.push_back(i);
  }
  if (std::cmp_equal(reader.model.moe->dense_layers.size(), reader.layers())) reader.drop_experts();
}

void write_dense_layers(Architecture, ModelConfig& model, Json& out) {
  out.add("decoder_sparse_step", 1);
  out.add("mlp_only_layers", model.moe->dense_layers);
}

// Weights of gpt-oss are a softmax over the chosen logits, which needs more than one expert.
void read_gpt_oss_router(ArchitectureReader& reader) { reader.set("moe.softmax_after_topk", "num_experts_per_tok", true); }

void read_gpt2_width(ArchitectureReader& reader) {
  ArchitectureKeys& keys = reader.keys;
  const int64_t heads = keys.integer("n_head").value_or(0), width = keys.integer("n_embd").value_or(0);
  if (heads > 0 && width % heads != 0) keys.refuse("n_embd", text("must be a multiple of n_head ", heads));
  if (!keys.has("n_inner")) reader.model.intermediate_size = 4 * reader.model.hidden_size;
}

}  // namespace mantissa
