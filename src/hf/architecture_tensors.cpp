// Defines names and layouts of the tensors of an architecture.
#include <algorithm>

#include "mantissa/hf/hugging_face.h"
#include "mantissa/models/model_shape.h"

namespace mantissa {
namespace {

// Suffix after "model.layers.0." or "transformer.h.0." for a part of a module.
struct PartName {
  const char* part;  // "" for a module without parts
  const char* name;
};
struct ModuleName {
  const char* module;
  std::vector<PartName> parts;
};

const std::vector<ModuleName>& rms_names() {
  static const std::vector<ModuleName> names = {
      {"attn_norm", {{"", "input_layernorm"}}},
      {"attn.qkv", {{"q", "self_attn.q_proj"}, {"k", "self_attn.k_proj"}, {"v", "self_attn.v_proj"}}},
      {"attn.out", {{"", "self_attn.o_proj"}}},
      {"attn.q_norm", {{"", "self_attn.q_norm"}}},
      {"attn.k_norm", {{"", "self_attn.k_norm"}}},
      {"attn.sinks", {{"", "self_attn.sinks"}}},
      {"mlp_norm", {{"", "post_attention_layernorm"}}},
      {"mlp.gate_up", {{"gate", "mlp.gate_proj"}, {"up", "mlp.up_proj"}}},
      {"mlp.down", {{"", "mlp.down_proj"}}},
      {"moe.router", {{"", "mlp.gate"}}},
      {"moe.experts.gate_up", {{"gate", "mlp.experts.*.gate_proj"}, {"up", "mlp.experts.*.up_proj"}}},
      {"moe.experts.down", {{"", "mlp.experts.*.down_proj"}}}};
  return names;
}

const std::vector<ModuleName>& mixtral_names() {
  static const std::vector<ModuleName> names = {
      {"moe.router", {{"", "block_sparse_moe.gate"}}},
      {"moe.experts.gate_up", {{"gate", "block_sparse_moe.experts.*.w1"}, {"up", "block_sparse_moe.experts.*.w3"}}},
      {"moe.experts.down", {{"", "block_sparse_moe.experts.*.w2"}}}};
  return names;
}

const std::vector<ModuleName>& gpt_oss_names() {
  static const std::vector<ModuleName> names = {{"moe.router", {{"", "mlp.router"}}},
                                                {"moe.experts.gate_up", {{"", "mlp.experts.gate_up_proj"}}},
                                                {"moe.experts.down", {{"", "mlp.experts.down_proj"}}}};
  return names;
}

const std::vector<ModuleName>& gpt2_names() {
  static const std::vector<ModuleName> names = {{"attn_norm", {{"", "ln_1"}}},       {"attn.qkv", {{"", "attn.c_attn"}}},
                                                {"attn.out", {{"", "attn.c_proj"}}}, {"mlp_norm", {{"", "ln_2"}}},
                                                {"mlp.up", {{"", "mlp.c_fc"}}},      {"mlp.down", {{"", "mlp.c_proj"}}}};
  return names;
}

const ModuleName* found_in(const std::vector<ModuleName>& names, const std::string& module) {
  for (const ModuleName& name : names) {
    if (module == name.module) return &name;
  }
  return nullptr;
}

const ModuleName& layer_name(Architecture architecture, const std::string& module) {
  const ModuleName* found = architecture == Architecture::gpt2 ? found_in(gpt2_names(), module) : nullptr;
  if (architecture == Architecture::mixtral) found = found_in(mixtral_names(), module);
  if (architecture == Architecture::gpt_oss) found = found_in(gpt_oss_names(), module);
  if (!found && architecture != Architecture::gpt2) found = found_in(rms_names(), module);
  require(found != nullptr, "no architecture has the module ", module);
  return *found;
}

// Names modules that belong to no layer.
std::string outer_name(Architecture architecture, const std::string& module) {
  const bool gpt2 = architecture == Architecture::gpt2;
  if (module == "embed") return gpt2 ? "transformer.wte" : "model.embed_tokens";
  if (module == "position") return "transformer.wpe";
  if (module == "final_norm") return gpt2 ? "transformer.ln_f" : "model.norm";
  require(module == "output", "no architecture has the module ", module);
  return "lm_head";
}

std::string with_expert(std::string name, int64_t expert) {
  const size_t star = name.find('*');
  return star == std::string::npos ? name : name.replace(star, 1, text(expert));
}

// Makes the tensors of one module.
class Tensors {
 public:
  Tensors(Architecture architecture, const ModuleShape& module, size_t most, std::vector<ArchitectureTensor>& out)
      : architecture_(architecture), module_(module), most_(most), out_(out) {}

  void add() {
    if (full()) return;
    const std::string layers = "layers.";
    if (!module_.path.starts_with(layers)) return add_part(outer_name(architecture_, module_.path), 0, module_.rows() - module_.padding);
    const size_t dot = module_.path.find('.', layers.size());
    const std::string layer = module_.path.substr(layers.size(), dot - layers.size());
    const std::string prefix = (architecture_ == Architecture::gpt2 ? "transformer.h." : "model.layers.") + layer + ".";
    const ModuleName& names = layer_name(architecture_, module_.path.substr(dot + 1));
    if (architecture_ == Architecture::gpt_oss && module_.experts) return add_grouped(prefix + names.parts[0].name);
    for (int64_t expert = 0; expert < module_.matrices && !full(); ++expert) add_matrix(prefix, names, expert);
  }

 private:
  bool full() const { return out_.size() >= most_; }

  void add_matrix(const std::string& prefix, const ModuleName& names, int64_t expert) {
    int64_t row = expert * module_.out;
    for (size_t i = 0; i < names.parts.size(); ++i) {
      const int64_t rows = names.parts.size() == 1 ? module_.out : module_.parts[i].out;
      add_part(prefix + with_expert(names.parts[i].name, expert), row, rows);
      row += rows;
    }
  }

  void add_part(const std::string& name, int64_t row, int64_t rows) {
    const std::vector<RowRun> runs = {{.file_row = 0, .row = row, .rows = rows}};
    const bool conv = architecture_ == Architecture::gpt2 && module_.kind == ModuleKind::linear;
    std::vector<int64_t> shape = {rows};
    if (module_.in > 0) shape = conv ? std::vector{module_.in, rows} : std::vector{rows, module_.in};
    const bool plain = module_.kind == ModuleKind::sinks;  // a parameter of the layer itself
    out_.push_back({.name = name + (plain ? "" : ".weight"),
                    .shape = shape,
                    .parameter = module_.path + (plain ? "" : ".weight"),
                    .runs = runs,
                    .transposed = conv,
                    .width = std::max<int64_t>(1, module_.in)});
    if (module_.bias == 0) return;
    out_.push_back({.name = name + ".bias", .shape = {rows}, .parameter = module_.path + ".bias", .runs = runs});
  }

  // All experts are in one tensor, [E, in, out]; of gate and up the even columns are gate.
  void add_grouped(const std::string& name) {
    const int64_t experts = module_.matrices, out = module_.out, half = out / 2;
    std::vector<RowRun> runs = {{.file_row = 0, .row = 0, .rows = experts * out}};
    if (!module_.parts.empty()) runs.clear();
    for (int64_t e = 0; !module_.parts.empty() && e < experts; ++e) {
      runs.push_back({.file_row = e * out, .row = e * out, .rows = half, .step = 2});
      runs.push_back({.file_row = e * out + 1, .row = e * out + half, .rows = half, .step = 2});
    }
    out_.push_back({.name = name,
                    .shape = {experts, module_.in, out},
                    .parameter = module_.path + ".weight",
                    .runs = runs,
                    .transposed = true,
                    .matrices = experts,
                    .width = module_.in});
    if (module_.bias > 0)
      out_.push_back(
          {.name = name + "_bias", .shape = {experts, out}, .parameter = module_.path + ".bias", .runs = runs, .matrices = experts});
  }

  Architecture architecture_;
  const ModuleShape& module_;
  size_t most_;
  std::vector<ArchitectureTensor>& out_;
};

}  // namespace

int64_t ArchitectureTensor::rows() const {
  int64_t sum = 0;
  for (const RowRun& run : runs) sum += run.rows;
  return sum;
}

std::string element_name(const ArchitectureTensor& tensor, int64_t file_row, int64_t column) {
  const int64_t rows = tensor.rows() / tensor.matrices, matrix = file_row / rows, row = file_row % rows;
  std::vector<int64_t> index;
  if (tensor.matrices > 1) index.push_back(matrix);
  index.push_back(tensor.transposed ? column : row);
  const bool vectors = tensor.shape.size() == (tensor.matrices > 1 ? 2U : 1U);
  if (!vectors) index.push_back(tensor.transposed ? row : column);
  return text(tensor.name, "[", joined(index), "]");
}

std::vector<ArchitectureTensor> first_architecture_tensors(Architecture architecture, const ModelConfig& model, size_t most) {
  std::vector<ArchitectureTensor> tensors;
  for (const ModuleShape& module : model_shape(model).modules) Tensors(architecture, module, most, tensors).add();
  tensors.resize(std::min(most, tensors.size()));  // a matrix is added with all its parts
  return tensors;
}

std::vector<ArchitectureTensor> architecture_tensors(Architecture architecture, const ModelConfig& model) {
  std::vector<ArchitectureTensor> tensors = first_architecture_tensors(architecture, model, kMostArchitectureTensors + 1);
  require(tensors.size() <= kMostArchitectureTensors, ExitCode::usage, "the model has more than ", kMostArchitectureTensors, " tensors");
  return tensors;
}

bool is_architecture_buffer(Architecture architecture, const std::string& name) {
  if (architecture == Architecture::gpt2) return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
  return name.ends_with(".rotary_emb.inv_freq");
}

std::string with_base_prefix(Architecture architecture, const std::string& name) {
  const std::string prefix = architecture == Architecture::gpt2 ? "transformer." : "model.";
  return name.starts_with(prefix) || name.starts_with("lm_head.") ? name : prefix + name;
}

}  // namespace mantissa
