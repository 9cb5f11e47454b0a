#include <algorithm>
#include <iterator>
#include <utility>

#include "hf/architecture_table.h"
#include "models/model_shape.h"

namespace mantissa {
namespace {

// Defines names and layouts of the tensors of an architecture.

using namespace architectures;

constexpr unsigned bit_of(ExportFormat format) { return 1U << static_cast<unsigned>(format); }
constexpr unsigned kHf = bit_of(ExportFormat::hf), kMlx = bit_of(ExportFormat::mlx), kGguf = bit_of(ExportFormat::gguf),
                   kFolders = kHf | kMlx;

// Name after "model.layers.0.", "transformer.h.0." or "blk.0." of a module, or of each of its parts in the order of their rows; * is an
// expert.
struct TensorName {
  unsigned architectures;
  const char* module;
  const char* name;
  unsigned formats = kFolders;
};
constexpr TensorName kNames[] = {
    {kRms, "attn_norm", "input_layernorm"},
    {kRms, "attn.qkv", "self_attn.q_proj"},
    {kRms, "attn.qkv", "self_attn.k_proj"},
    {kRms, "attn.qkv", "self_attn.v_proj"},
    {kRms, "attn.out", "self_attn.o_proj"},
    {kRms, "attn.q_norm", "self_attn.q_norm"},
    {kRms, "attn.k_norm", "self_attn.k_norm"},
    {kRms, "attn.sinks", "self_attn.sinks"},
    {kRms, "mlp_norm", "post_attention_layernorm"},
    {kRms, "mlp.gate_up", "mlp.gate_proj"},
    {kRms, "mlp.gate_up", "mlp.up_proj"},
    {kRms, "mlp.down", "mlp.down_proj"},
    {kRms & ~(kMixtral | kGptOss), "moe.router", "mlp.gate"},
    {kRms & ~(kMixtral | kGptOss), "moe.experts.gate_up", "mlp.experts.*.gate_proj", kHf},
    {kRms & ~(kMixtral | kGptOss), "moe.experts.gate_up", "mlp.experts.*.up_proj", kHf},
    {kRms & ~(kMixtral | kGptOss), "moe.experts.down", "mlp.experts.*.down_proj", kHf},
    {kRms & ~(kMixtral | kGptOss), "moe.experts.gate_up", "mlp.switch_mlp.gate_proj", kMlx},
    {kRms & ~(kMixtral | kGptOss), "moe.experts.gate_up", "mlp.switch_mlp.up_proj", kMlx},
    {kRms & ~(kMixtral | kGptOss), "moe.experts.down", "mlp.switch_mlp.down_proj", kMlx},
    {kMixtral, "moe.router", "block_sparse_moe.gate"},
    {kMixtral, "moe.experts.gate_up", "block_sparse_moe.experts.*.w1", kHf},
    {kMixtral, "moe.experts.gate_up", "block_sparse_moe.experts.*.w3", kHf},
    {kMixtral, "moe.experts.down", "block_sparse_moe.experts.*.w2", kHf},
    {kMixtral, "moe.experts.gate_up", "block_sparse_moe.switch_mlp.gate_proj", kMlx},
    {kMixtral, "moe.experts.gate_up", "block_sparse_moe.switch_mlp.up_proj", kMlx},
    {kMixtral, "moe.experts.down", "block_sparse_moe.switch_mlp.down_proj", kMlx},
    {kGptOss, "moe.router", "mlp.router"},
    {kGptOss, "moe.experts.gate_up", "mlp.experts.gate_up_proj", kHf},
    {kGptOss, "moe.experts.gate_up", "mlp.experts.gate_proj", kMlx},
    {kGptOss, "moe.experts.gate_up", "mlp.experts.up_proj", kMlx},
    {kGptOss, "moe.experts.down", "mlp.experts.down_proj"},
    {kGpt2, "attn_norm", "ln_1"},
    {kGpt2, "attn.qkv", "attn.c_attn"},
    {kGpt2, "attn.out", "attn.c_proj"},
    {kGpt2, "mlp_norm", "ln_2"},
    {kGpt2, "mlp.up", "mlp.c_fc"},
    {kGpt2, "mlp.down", "mlp.c_proj"},
    {kAll, "attn_norm", "attn_norm", kGguf},
    {kRms, "attn.qkv", "attn_q", kGguf},
    {kRms, "attn.qkv", "attn_k", kGguf},
    {kRms, "attn.qkv", "attn_v", kGguf},
    {kGpt2, "attn.qkv", "attn_qkv", kGguf},
    {kAll, "attn.out", "attn_output", kGguf},
    {kRms, "attn.q_norm", "attn_q_norm", kGguf},
    {kRms, "attn.k_norm", "attn_k_norm", kGguf},
    {kRms, "attn.sinks", "attn_sinks", kGguf},
    {kAll & ~kGptOss, "mlp_norm", "ffn_norm", kGguf},
    {kGptOss, "mlp_norm", "post_attention_norm", kGguf},
    {kRms, "mlp.gate_up", "ffn_gate", kGguf},
    {kRms, "mlp.gate_up", "ffn_up", kGguf},
    {kGpt2, "mlp.up", "ffn_up", kGguf},
    {kAll, "mlp.down", "ffn_down", kGguf},
    {kRms, "moe.router", "ffn_gate_inp", kGguf},
    {kRms, "moe.experts.gate_up", "ffn_gate_exps", kGguf},
    {kRms, "moe.experts.gate_up", "ffn_up_exps", kGguf},
    {kRms, "moe.experts.down", "ffn_down_exps", kGguf},
};

// mlx-lm transposes matrices of GPT-2 whose names begin with "h.", as in old files, but no "model.h.".
std::string base_prefix(Architecture architecture, ExportFormat format) {
  if (format == ExportFormat::gguf) return "";
  return architecture == Architecture::gpt2 && format == ExportFormat::hf ? "transformer." : "model.";
}

constexpr std::pair<std::string_view, const char*> kGgufOuterNames[] = {
    {"embed", "token_embd"}, {"position", "position_embd"}, {"final_norm", "output_norm"}, {"output", "output"}};

// Names modules that belong to no layer.
std::string outer_name(Architecture architecture, ExportFormat format, const std::string& module) {
  const bool gpt2 = architecture == Architecture::gpt2;
  const std::string base = base_prefix(architecture, format);
  if (format == ExportFormat::gguf) {
    const auto found = std::ranges::find(kGgufOuterNames, module, &std::pair<std::string_view, const char*>::first);
    require(found != std::end(kGgufOuterNames), "no GGUF file has the module ", module);
    return found->second;
  }
  if (module == "embed") return base + (gpt2 ? "wte" : "embed_tokens");
  if (module == "position") return base + "wpe";
  if (module == "final_norm") return base + (gpt2 ? "ln_f" : "norm");
  require(module == "output", "no architecture has the module ", module);
  return "lm_head";
}

// Makes the tensors of one module.
class Tensors {
 public:
  Tensors(Architecture architecture, ExportFormat format, const ModelConfig& model, const ModuleShape& module, size_t most,
          std::vector<ArchitectureTensor>& out)
      : architecture_(architecture), format_(format), head_(model.head_size()), module_(module), most_(most), out_(out) {}

  void add() {
    if (full()) return;
    const std::string layers = "layers.";
    if (!module_.path.starts_with(layers))
      return add_part(outer_name(architecture_, format_, module_.path), 0, module_.rows() - module_.padding);
    const size_t dot = module_.path.find('.', layers.size());
    const std::string layer = module_.path.substr(layers.size(), dot - layers.size());
    const char* const block = format_ == ExportFormat::gguf ? "blk." : architecture_ == Architecture::gpt2 ? "h." : "layers.";
    const std::string prefix = base_prefix(architecture_, format_) + block + layer + ".";
    const std::string module = module_.path.substr(dot + 1);
    std::vector<std::string> names;
    for (const TensorName& one : kNames)
      if ((one.architectures & bit(architecture_)) != 0 && module == one.module && (one.formats & bit_of(format_)) != 0)
        names.push_back(prefix + one.name);
    require(!names.empty(), "no architecture has the module ", module);
    if (format_ != ExportFormat::hf && module_.experts) return add_stacked(names);
    if (architecture_ == Architecture::gpt_oss && module_.experts) return add_grouped(names[0]);
    for (int64_t expert = 0; expert < module_.matrices && !full(); ++expert) {
      int64_t row = expert * module_.out;
      for (size_t i = 0; i < names.size(); ++i) {
        const int64_t rows = names.size() == 1 ? module_.out : module_.parts[i].out;
        const size_t star = names[i].find('*');
        add_part(star == std::string::npos ? names[i] : std::string(names[i]).replace(star, 1, text(expert)), row, rows);
        row += rows;
      }
    }
  }

 private:
  bool full() const { return out_.size() >= most_; }

  void add_part(const std::string& name, int64_t row, int64_t rows) {
    const bool turned = format_ == ExportFormat::gguf && (architecture_ == Architecture::llama || architecture_ == Architecture::mixtral) &&
                        (name.ends_with(".attn_q") || name.ends_with(".attn_k"));
    const std::vector<RowRun> runs = turned ? turned_heads(row, rows) : std::vector<RowRun>{{.file_row = 0, .row = row, .rows = rows}};
    const bool conv = architecture_ == Architecture::gpt2 && format_ == ExportFormat::hf && module_.kind == ModuleKind::linear;
    std::vector<int64_t> shape = {rows};
    if (module_.in > 0) shape = conv ? std::vector{module_.in, rows} : std::vector{rows, module_.in};
    const bool plain = module_.kind == ModuleKind::sinks;  // a parameter of the layer itself
    out_.push_back({.name = name + (plain && format_ != ExportFormat::gguf ? "" : ".weight"),
                    .shape = shape,
                    .parameter = module_.path + (plain ? "" : ".weight"),
                    .runs = runs,
                    .transposed = conv,
                    .width = std::max<int64_t>(1, module_.in)});
    if (module_.bias == 0) return;
    out_.push_back({.name = name + ".bias", .shape = {rows}, .parameter = module_.path + ".bias", .runs = runs});
  }

  // ggml rotates neighbors in the architecture llama: of each head, row j of the first half is at 2j, and row j of the second at 2j + 1.
  std::vector<RowRun> turned_heads(int64_t row, int64_t rows) const {
    const int64_t half = head_ / 2;
    std::vector<RowRun> runs;
    for (int64_t head = 0; head < rows; head += head_) {
      runs.push_back({.file_row = head, .row = row + head, .rows = half, .step = 2});
      runs.push_back({.file_row = head + 1, .row = row + head + half, .rows = half, .step = 2});
    }
    return runs;
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

  // All experts are in one tensor of each part, [E, out, in].
  void add_stacked(const std::vector<std::string>& names) {
    const int64_t experts = module_.matrices, out = module_.out;
    int64_t first = 0;  // row of the part in a matrix of the parameter
    for (size_t i = 0; i < names.size(); ++i) {
      const int64_t rows = names.size() == 1 ? out : module_.parts[i].out;
      std::vector<RowRun> runs;
      for (int64_t e = 0; e < experts && names.size() > 1; ++e)
        runs.push_back({.file_row = e * rows, .row = e * out + first, .rows = rows});
      if (names.size() == 1) runs = {{.file_row = 0, .row = 0, .rows = experts * out}};
      out_.push_back({.name = names[i] + ".weight",
                      .shape = {experts, rows, module_.in},
                      .parameter = module_.path + ".weight",
                      .runs = runs,
                      .matrices = experts,
                      .width = module_.in});
      if (module_.bias > 0)
        out_.push_back(
            {.name = names[i] + ".bias", .shape = {experts, rows}, .parameter = module_.path + ".bias", .runs = runs, .matrices = experts});
      first += rows;
    }
  }

  Architecture architecture_;
  ExportFormat format_;
  int64_t head_;  // rows of a head
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

std::vector<ArchitectureTensor> first_architecture_tensors(Architecture architecture, const ModelConfig& model, ExportFormat format,
                                                           size_t most) {
  std::vector<ArchitectureTensor> tensors;
  for (const ModuleShape& module : model_shape(model).modules) Tensors(architecture, format, model, module, most, tensors).add();
  tensors.resize(std::min(most, tensors.size()));  // a matrix is added with all its parts
  return tensors;
}

std::vector<ArchitectureTensor> architecture_tensors(Architecture architecture, const ModelConfig& model, ExportFormat format) {
  std::vector<ArchitectureTensor> tensors = first_architecture_tensors(architecture, model, format, kMostArchitectureTensors + 1);
  require(tensors.size() <= kMostArchitectureTensors, ExitCode::usage, "the model has more than ", kMostArchitectureTensors, " tensors");
  return tensors;
}

bool is_architecture_buffer(Architecture architecture, const std::string& name) {
  if (architecture == Architecture::gpt2) return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
  return name.ends_with(".rotary_emb.inv_freq");
}

std::string with_base_prefix(Architecture architecture, const std::string& name, ExportFormat format) {
  const std::string prefix = base_prefix(architecture, format);
  return name.starts_with(prefix) || name.starts_with("lm_head.") ? name : prefix + name;
}

}  // namespace mantissa
