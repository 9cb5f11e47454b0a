#include "hf/export_weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "hf/hf_weights.h"
#include "hf/mlx.h"
#include "hf/tile_scales.h"
#include "mantissa/backend/functions.h"
#include "mantissa/formats/bf16.h"
#include "mantissa/formats/element.h"
#include "mantissa/formats/nvfp4.h"
#include "mantissa/formats/swizzle.h"
#include "mantissa/tensor/tensor.h"
#include "models/model_shape.h"

namespace mantissa {

Quantization ForwardWeights::quantized(const std::string& parameter) const {
  const ModulePrecision& module = module_of(parameter);
  const bool high = module.exported == StoredType::fp32 || module.exported == StoredType::bf16;
  return high || !parameter.ends_with(".weight") ? Quantization{} : module.resident_codes();
}

Format ForwardWeights::input_format(const std::string& parameter) const {
  const Recipe& recipe = module_of(parameter).recipe;
  return recipe.gemms.fprop ? recipe.input.format : Format::none;
}

bool ForwardWeights::has_mxfp4_inputs(const std::string& parameter) const {
  return input_format(parameter) == Format::e2m1 && module_of(parameter).recipe.input.block_cols == kPackedBlock;
}

Dtype ForwardWeights::dtype(const std::string& parameter) const {
  if (quantized(parameter)) return Dtype::bf16;
  const WeightForm kept = form(parameter);
  return kept.master ? module_of(parameter).recipe.compute : kept.dtype;
}

bool ForwardWeights::rounds(const std::string& parameter) const {
  const WeightForm form = this->form(parameter);
  return form.products && !quantized(parameter) && module_of(parameter).recipe.compute == Dtype::bf16;
}

ForwardWeights::ForwardWeights(TensorReader& source, const PrecisionPlan& plan, std::unique_ptr<Backend> device, bool takes_codes)
    : source_(&source), plan_(plan), device_(std::move(device)), takes_codes_(takes_codes) {
  std::vector<ModuleShape> modules;
  for (const ModulePrecision& module : plan.modules()) modules.push_back(module.module);
  for (const ParameterShape& parameter : parameter_shapes({.modules = std::move(modules)})) shapes_[parameter.name] = parameter.shape;
}

Tensor ForwardWeights::values(const std::string& parameter, int64_t begin, int64_t end) {
  const Shape& whole = shapes_.at(parameter);
  Box box = whole_box(dimensions(whole));
  box.start[0] = begin;
  box.size[0] = end - begin;
  const Tensor out = empty(*device_, Dtype::f32, whole.with_dim0(end - begin));
  fill_from_host(out, [&](std::span<std::byte> bytes) {
    source_->read_fp32(parameter, box, {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)});
  });
  return out;
}

ForwardWeights::Blocks ForwardWeights::blocks(const std::string& parameter, int64_t begin, int64_t end) {
  const Quantization how = quantized(parameter);
  const WeightForm kept = form(parameter);
  const int64_t first = begin / how.block_rows * how.block_rows;
  const int64_t last = std::min(shapes_.at(parameter)[0], (end + how.block_rows - 1) / how.block_rows * how.block_rows);
  Quantization as_kept = how;
  if (how.format == Format::nvfp4) as_kept.rule = kept.codes.rule;  // no file names it, and nothing that reads codes does
  if (takes_codes_ &&
      kept.codes == as_kept) {  // quantizing the values again could find another pair of scale and codes that stands for them
    const QuantizedTensor out = empty_quantized(*device_, {last - first, kept.columns}, how);
    fill_from_host(out.codes, [&](std::span<std::byte> codes) {
      fill_from_host(out.scales, [&](std::span<std::byte> scales) { source_->read_codes(parameter, first, last, codes, scales); });
    });
    return {.codes = out, .first = first};
  }
  const Tensor rounded = converted(values(parameter, first, last), Dtype::bf16);
  const int64_t columns = rounded.dim(1), bad = first_nonfinite(Dtype::bf16, HostBytes(rounded).get());
  require(bad < 0, ExitCode::data, where(), ": ", parameter, "[", first + bad / columns, ", ", bad % columns, "] is NaN or Inf");
  return {.codes = mantissa::quantized(rounded, how), .first = first};
}

void ForwardWeights::read(const std::string& parameter, int64_t begin, int64_t end, std::span<float> out) {
  require(std::ssize(out) == shapes_.at(parameter).with_dim0(end - begin).elements(), parameter, ": ", out.size(), " values for rows ",
          begin, " to ", end);
  if (!quantized(parameter)) {
    const Tensor read = values(parameter, begin, end);
    const bool rounded = dtype(parameter) == Dtype::bf16 && form(parameter).master;
    const Tensor exact = rounded ? converted(converted(read, Dtype::bf16), Dtype::f32) : read;
    return device_->download(exact, out.data());
  }
  const auto [codes, first] = blocks(parameter, begin, end);
  const Tensor all = empty(*device_, Dtype::f32, codes.shape);
  device_->run(Dequantize{.x = codes, .out = all});
  device_->download(all.slice(begin - first, end - first), out.data());
}

std::vector<std::byte> ForwardWeights::codes(const std::string& parameter, int64_t begin, int64_t end) {
  const auto [codes, first] = blocks(parameter, begin, end);
  const HostBytes rows(codes.codes.slice(begin - first, end - first));
  std::vector<std::byte> out(rows.get().begin(), rows.get().end());
  if (codes.how.rule != ScaleRule::flashinfer) return out;
  const auto unsigned_zero = [](unsigned code) { return static_cast<uint8_t>(code == E2M1::sign_bit ? 0U : code); };
  for (std::byte& pair : out) {
    const auto both = std::to_integer<unsigned>(pair);
    pair = std::byte{pack_nibbles(unsigned_zero(both & 0xFU), unsigned_zero(both >> 4U))};
  }
  return out;
}

std::vector<std::byte> ForwardWeights::scales(const std::string& parameter, int64_t begin, int64_t end) {
  const auto [codes, first] = blocks(parameter, begin, end);
  const HostBytes kept(codes.scales);
  const int64_t block = packed_form(codes.how.format).block_cols, row_scales = codes.scales.dim(1), wide = codes.how.block_cols / block;
  const int64_t blocks = codes.shape[1] / block;
  std::vector<std::byte> out;
  out.reserve(static_cast<size_t>((end - begin) * blocks));
  for (int64_t row = begin - first; row < end - first; ++row) {
    for (int64_t column = 0; column < blocks; ++column)
      out.push_back(kept.get()[static_cast<size_t>(row / codes.how.block_rows * row_scales + column / wide)]);
  }
  return out;
}

std::vector<std::byte> ForwardWeights::tile_scales(const std::string& parameter, int64_t begin, int64_t end) {
  const auto [codes, first] = blocks(parameter, begin, end);
  require(first == begin && codes.shape[0] == end - begin, parameter, ": rows ", begin, " to ", end, " are no whole tiles");
  const HostBytes scales(codes.scales);
  return {scales.get().begin(), scales.get().end()};
}

namespace {

constexpr int64_t kChunkElements = 2 << 20;

bool is_grouped(const ArchitectureTensor& tensor) { return tensor.transposed && !tensor.name.ends_with(".weight"); }

// Names the linear that a server knows; a grouped weight of experts is named as its tensor.
std::string module_name(const ArchitectureTensor& tensor) {
  return is_grouped(tensor) ? tensor.name : tensor.name.substr(0, tensor.name.rfind('.'));
}

// Returns true if bf16 holds all values of a tensor. Of codes it looks at values only where their scales leave it open.
bool bf16_holds(HfWeights& folder, const ArchitectureTensor& tensor) {
  // bf16 holds multiples of 2^-133, and E4M3 codes are multiples of 2^-9: so it holds all codes with this scale, 2^-124, or a larger one.
  constexpr std::byte kLeastScale{3};
  const WeightForm form = folder.form(tensor.parameter);
  if (is_four_bit(form.codes.format)) return true;  // multiples of 2^-128, and of NVFP4 products of 7 digits
  bool holds = true;
  std::vector<std::byte> scales;
  std::vector<float> values;
  for_chunks(tensor, [&](const RowRun&, int64_t begin, int64_t end) {
    if (!holds) return;
    if (form.codes) {
      scales.resize(static_cast<size_t>((end - begin + form.codes.block_rows - 1) / form.codes.block_rows * scale_bytes(form)));
      folder.read_codes(tensor.parameter, begin, end, {}, scales);
      if (std::ranges::all_of(scales, [](std::byte scale) { return scale >= kLeastScale; })) return;
    }
    values.resize(static_cast<size_t>((end - begin) * tensor.columns()));
    Box box{.start = {begin}, .size = {end - begin}};
    if (tensor.shape.size() > 1) box = {.start = {begin, 0}, .size = {end - begin, tensor.columns()}};
    folder.read_fp32(tensor.parameter, box, values);
    holds = std::ranges::all_of(
        values, [](float value) { return std::bit_cast<uint32_t>(to_float(to_bf16(value))) == std::bit_cast<uint32_t>(value); });
  });
  return holds;
}

}  // namespace

RowRun rows_between(const RowRun& run, int64_t file_begin, int64_t file_end) {
  const auto at = [&](int64_t file_row) { return std::clamp<int64_t>((file_row - run.file_row + run.step - 1) / run.step, 0, run.rows); };
  const int64_t first = file_begin <= run.file_row ? 0 : at(file_begin), last = file_end <= run.file_row ? 0 : at(file_end);
  return {.file_row = run.file_row + first * run.step, .row = run.row + first, .rows = last - first, .step = run.step};
}

// Chunks begin at multiples of 128 rows of the run.
void for_chunks(const ArchitectureTensor& tensor, const std::function<void(const RowRun&, int64_t, int64_t)>& body) {
  const int64_t step = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, tensor.columns()) / kTile) * kTile;
  for (const RowRun& run : tensor.runs) {
    for (int64_t row = 0; row < run.rows; row += step) body(run, run.row + row, run.row + std::min(run.rows, row + step));
  }
}

ExportedWeights::ExportedWeights(const ForwardWeights& types, const ModelConfig& model, const ExportOptions& options, HfWeights* folder)
    : types_(types),
      options_(options),
      architecture_(architecture_of(model)),
      tensors_(architecture_tensors(architecture_, model, options.format)),
      folder_(folder) {
  require(options.weights == ExportWeights::packed || options.convention == Convention::compressed_tensors, ExitCode::usage, "convention ",
          choice_name(options.convention), " is of packed weights, and these are dequantized: drop it, or take weights packed");
  require(!of_mlx() || options.convention == Convention::compressed_tensors, ExitCode::usage, "convention ",
          choice_name(options.convention), " needs the format hf, got mlx: drop it");
  require(of_mlx() || !options.allow_different, ExitCode::usage, "allow_different needs the format mlx, got hf: drop it");
  if (of_mlx()) deviations_ = mlx_differences(architecture_, model);
  if (options.weights == ExportWeights::packed) find_modules();
  require(deviations_.empty() || options.allow_different, ExitCode::usage,
          "mlx-lm computes this model otherwise than mantissa, or cannot load it:\n  ", joined(deviations_, "\n  "),
          "\nuse it without these, take the format hf, or export it all the same with --allow-different "
          "(checkpoint.export.allow_different)");
  for (const ArchitectureTensor& tensor : tensors_) {
    const auto module = modules_.find(module_name(tensor));
    if (module != modules_.end() && module->second && tensor.parameter.ends_with(".weight")) {
      add_packed(tensor);
    } else {
      const FileDtype dtype = values_dtype(tensor) == Dtype::bf16 ? FileDtype::bf16 : FileDtype::f32;
      items_.push_back({.tensor = &tensor, .role = Role::values, .file = {tensor.name, dtype, tensor.shape}});
    }
  }
  std::vector<SafetensorsTensor> files;
  std::map<std::string, Item> by_name;
  for (const Item& item : items_) {
    files.push_back(item.file);
    by_name.emplace(item.file.name, item);
  }
  layout_.emplace(std::move(files), of_mlx() ? SafetensorsMetadata{{"format", choice_name(options.format)}} : SafetensorsMetadata());
  items_.clear();
  for (const SafetensorsTensor& tensor : layout_->tensors()) items_.push_back(by_name.at(tensor.name));
}

// Tile scales keep the type that a source folder has. Otherwise they are E8M0 as in DeepSeek-V4 if there are weights in E2M1, else fp32 as
// in DeepSeek-V3, which more programs read.
void ExportedWeights::add_packed(const ArchitectureTensor& tensor) {
  const Format format = types_.quantized(tensor.parameter).format;
  const PackedNames names = packed_names(tensor.name, format, options_.convention, options_.format);
  const bool two_levels = format == Format::nvfp4, narrow = is_four_bit(format), fp8 = options_.convention == Convention::fp8,
             tiles = fp8 && !narrow;
  const int64_t rows = tensor.rows(), columns = tensor.columns(), each = rows / tensor.matrices,
                blocks = columns / packed_form(format).block_cols;
  SafetensorsTensor codes{names.codes,
                          !narrow ? FileDtype::f8_e4m3
                          : fp8   ? FileDtype::i8
                                  : FileDtype::u8,
                          {rows, narrow ? columns / 2 : columns}};
  SafetensorsTensor scales{names.scales, fp8 ? FileDtype::f8_e8m0 : two_levels ? FileDtype::f8_e4m3 : FileDtype::u8, {rows, blocks}};
  if (of_mlx()) {
    scales.dtype = FileDtype::u8;
    codes.dtype = FileDtype::u32;
    codes.shape = scales.shape = tensor.shape;
    codes.shape.back() = columns / (narrow ? 8 : 4);
    scales.shape.back() = blocks;
  }
  if (is_grouped(tensor)) {
    codes.shape = {tensor.matrices, each, blocks, kPackedBlock / 2};
    scales.shape = {tensor.matrices, each, blocks};
  }
  if (tiles) {
    const std::optional<FileDtype> kept = folder_ ? folder_->tile_scales_dtype(tensor) : std::nullopt;
    const bool e2m1 =
        std::ranges::any_of(modules_, [](const auto& module) { return module.second && module.second->format == Format::e2m1; });
    scales.dtype = kept.value_or(e2m1 ? FileDtype::f8_e8m0 : FileDtype::f32);
    scales.shape = {tiles_along(rows), tiles_along(columns)};
  }
  if (two_levels && !of_mlx()) {  // shapes are those of llm-compressor and of ModelOpt
    const auto one = options_.convention == Convention::modelopt ? std::vector<int64_t>() : std::vector<int64_t>{1};
    items_.push_back({.tensor = &tensor, .role = Role::tensor_scale, .file = {names.tensor_scale, FileDtype::f32, one}});
    if (types_.input_format(tensor.parameter) != Format::none)
      items_.push_back({.tensor = &tensor, .role = Role::input_scale, .file = {names.input_scale, FileDtype::f32, one}});
  }
  items_.push_back({.tensor = &tensor, .role = Role::codes, .file = std::move(codes)});
  items_.push_back({.tensor = &tensor, .role = tiles ? Role::tile_scales : Role::scales, .file = std::move(scales)});
}

void ExportedWeights::find_modules() {
  for (const ArchitectureTensor& tensor : tensors_) {
    const ModulePrecision& module = types_.module_of(tensor.parameter);
    const ModuleKind kind = module.module.kind;
    const bool linear = kind == ModuleKind::linear || kind == ModuleKind::router || kind == ModuleKind::output;
    const bool embedding = of_mlx() && kind == ModuleKind::embedding;  // which mlx-lm may have as codes
    require(of_mlx() || !module.module.is_token_table() || !types_.quantized(tensor.parameter), ExitCode::usage,
            "packed weights: ", module.module.path, " (recipe ", module.recipe.name, ", ", types_.quantized(tensor.parameter),
            "): servers of the format hf have embeddings, and an output projection that is tied to them, in high precision: take the "
            "format mlx or gguf, or dequantized weights");
    if (!(linear || embedding) || !tensor.parameter.ends_with(".weight")) continue;
    const SimulatedOperands& simulated = module.recipe.simulated;
    require(!module.recipe.gemms.fprop || !(simulated.weight || simulated.input), ExitCode::usage, "packed weights: ", module.module.path,
            " (recipe ", module.recipe.name, ") is trained on simulated operands, which have no codes: take dequantized weights");
    std::optional<PackedScheme>& scheme = modules_[module_name(tensor)];
    const Quantization how = types_.quantized(tensor.parameter);
    scheme.reset();
    if (!how) continue;
    scheme = packed_scheme(how.format, types_.input_format(tensor.parameter));
    require_expressible(tensor);
  }
  const bool packs_any = std::ranges::any_of(modules_, [](const auto& module) { return module.second.has_value(); });
  require(packs_any, ExitCode::usage,
          "packed weights: no recipe of the plan quantizes a weight, so there is nothing to pack: take dequantized weights");
  if (of_mlx()) return settle_mlx_inputs();
  if (architecture_ != Architecture::gpt2) modules_.try_emplace("lm_head");  // a server has it, also where it is the embedding
  require_one_scheme_per_layer();
  quantization();  // throws for what the convention lacks
}

// With quantize_activations mlx-lm quantizes the inputs of every packed linear, to MXFP8 by rceil in blocks of 32; their weights must be
// MXFP8 without biases. It never quantizes the inputs of experts or of a tied output projection.
void ExportedWeights::settle_mlx_inputs() {
  std::vector<std::string> quantizing;  // modules, in training
  bool as_trained = true;               // with quantize_activations
  for (const ArchitectureTensor& tensor : tensors_) {
    const auto scheme = modules_.find(module_name(tensor));
    if (!tensor.parameter.ends_with(".weight") || scheme == modules_.end() || !scheme->second) continue;
    const ModulePrecision& module = types_.module_of(tensor.parameter);
    const Quantization& input = module.recipe.input;
    const bool inputs = scheme->second->inputs != Format::none, apart = module.module.experts || module.module.is_token_table();
    const bool alike = inputs && scheme->second->format == Format::e4m3 && module.module.bias == 0 &&
                       as_servers_quantize(input, Format::e4m3) && input.block_cols == kPackedBlock;
    as_trained = as_trained && (apart ? !inputs : alike);
    if (inputs && (quantizing.empty() || quantizing.back() != module.module.path)) quantizing.push_back(module.module.path);
  }
  if (as_trained || quantizing.empty()) return;
  for (auto& [name, scheme] : modules_)
    if (scheme) scheme->inputs = Format::none;
  deviations_.push_back(text("precision: inputs of ", count_text(quantizing.size(), "module"), ", the first of ", quantizing.front(),
                             ", are quantized in forward, and mlx-lm reads them in high precision: it quantizes those of all packed "
                             "linears or of none, to MXFP8 by rceil, beside MXFP8 weights without biases, and never those of experts"));
}

void ExportedWeights::require_expressible(const ArchitectureTensor& tensor) const {
  const Quantization how = types_.quantized(tensor.parameter);
  const ModulePrecision& module = types_.module_of(tensor.parameter);
  const Quantization& input = module.recipe.input;
  const bool inputs = types_.input_format(tensor.parameter) != Format::none;
  const std::string who = text(module.module.path, " (recipe ", module.recipe.name, ", ", how, ")");
  const int64_t columns = tensor.columns();
  require(!tensor.transposed || is_grouped(tensor), ExitCode::usage, who,
          ": GPT-2 keeps its weights [in, out], where no server reads blocks: take dequantized weights");
  require(how.format != Format::e5m2, ExitCode::usage, who, ": no server reads E5M2 weights: take dequantized weights");
  const int64_t block = packed_form(how.format).block_cols;
  require(how.block_cols % block == 0 && (!is_four_bit(how.format) || how.block_cols == block), ExitCode::usage, who,
          ": packed weights have blocks of ", block, ": take dequantized weights");
  const std::string form = of_mlx()                                 ? "the format mlx"
                           : architecture_ == Architecture::gpt_oss ? "gpt-oss"
                                                                    : text("the convention ", choice_name(options_.convention));
  require(columns % block == 0, ExitCode::usage, who, ": its rows of ", columns, " elements end within a block of ", block, ", and ", form,
          " has whole blocks only: take dequantized weights, or leave it in high precision by a rule");
  if (of_mlx()) return;
  if (architecture_ == Architecture::gpt_oss) {
    require(is_grouped(tensor) && how.format == Format::e2m1 && !module.recipe.gemms.any(), ExitCode::usage, who,
            ": of gpt-oss only experts are packed, in E2M1, with inputs in high precision: take dequantized weights");
    return;
  }
  if (options_.convention == Convention::fp8) {
    const bool tiles = how.format == Format::e4m3 && how.tiles() && how.block_rows == kTile;
    require(tiles || (how.format == Format::e2m1 && is_routed_expert(tensor.name)), ExitCode::usage, who,
            ": the convention fp8 has E4M3 in tiles of 128x128 and, of routed experts only, E2M1: take the convention compressed-tensors");
    require(inputs && as_servers_quantize(input, how.format, kTile) && input.block_cols == kTile, ExitCode::usage, who, ": its input is ",
            inputs ? text(input) : "in high precision",
            ", and servers quantize inputs of the convention fp8 to E4M3 in blocks of 1x128, by rceil: take dequantized weights");
    require(columns % kTile == 0, ExitCode::usage, who, ": its inputs of ", columns, " elements end within a block of ", kTile,
            ", and servers of the convention fp8 quantize whole blocks only: take ",
            tiles ? "the convention compressed-tensors" : "dequantized weights");
    const auto has_own_tiles = [&](const RowRun& run) {
      return run.row % kTile == 0 && (run.rows % kTile == 0 || run.row + run.rows == module.module.rows());
    };
    require(!tiles || std::ranges::all_of(tensor.runs, has_own_tiles), ExitCode::usage, who, ": tiles of 128x128 lie across the rows of ",
            tensor.name,
            " and of what it is fused with, and those of the convention fp8 begin with each weight: take the convention "
            "compressed-tensors");
    return;
  }
  require(!inputs || (as_servers_quantize(input, how.format) && input.block_cols == how.block()), ExitCode::usage, who, ": its input is ",
          input, ", and servers quantize inputs ",
          how.format == Format::nvfp4  ? "of these weights to NVFP4 only, by nearest"
          : how.format == Format::e2m1 ? "to E4M3 by rceil with any scale, or to E2M1 by flashinfer"
                                       : "to E4M3 only, by rceil with any scale",
          how.format == Format::e2m1 && input.block_cols == kTile ? ", of these weights in blocks of 32: take the convention fp8, or "
                                                                  : ": take ",
          "dequantized weights");
}

// Throws if experts of a layer differ: servers fuse all of them, and all three of their weights.
void ExportedWeights::require_one_scheme_per_layer() const {
  std::map<std::string, const ArchitectureTensor*> first;
  for (const ArchitectureTensor& tensor : tensors_) {
    const size_t experts = tensor.name.find(kOfExperts);
    if (!is_routed_expert(tensor.name) || !modules_.contains(module_name(tensor))) continue;
    const ArchitectureTensor& other = *first.emplace(tensor.name.substr(0, experts), &tensor).first->second;
    const ModulePrecision &a = types_.module_of(other.parameter), &b = types_.module_of(tensor.parameter);
    require(modules_.at(module_name(other)) == modules_.at(module_name(tensor)), ExitCode::usage, "servers multiply by all experts of ",
            tensor.name.substr(0, experts), " in one format, but ", a.module.path, " has recipe ", a.recipe.name, " (",
            a.rule.empty() ? "no rule" : a.rule, ") and ", b.module.path, " has ", b.recipe.name, " (", b.rule.empty() ? "no rule" : b.rule,
            "): give both one rule, or take dequantized weights");
  }
}

std::string ExportedWeights::quantization() const {
  if (modules_.empty()) return "";
  if (of_mlx()) return mlx_quantization(modules_);
  if (architecture_ == Architecture::gpt_oss) {
    for (const auto& [name, scheme] : modules_) {
      require(scheme || !is_routed_expert(name), ExitCode::usage, name,
              " is in high precision, and gpt-oss has MXFP4 in all layers or none: take dequantized weights");
    }
    require(options_.convention == Convention::compressed_tensors, ExitCode::usage, "convention ", choice_name(options_.convention),
            ": gpt-oss has a form of its own, blocks and scales: drop the convention");
    return kMxfp4Config;
  }
  return quantization_config(modules_, options_.convention);
}

// Returns, under auto, the narrowest type that holds the tensor exactly; a tensor that is codes in a folder is looked at. So are F32 values
// of a bf16 model, such as norms of a GGUF file, where the folder is mlx-lm's: one F32 tensor makes it compute in fp32.
Dtype ExportedWeights::values_dtype(const ArchitectureTensor& tensor) const {
  const Dtype dtype = dtype_of_values(tensor, types_, options_.dtype, folder_);
  const bool looks = of_mlx() && folder_ != nullptr && options_.dtype == ExportDtype::automatic && dtype == Dtype::f32 &&
                     types_.module_of(tensor.parameter).recipe.compute == Dtype::bf16;
  return looks && bf16_holds(*folder_, tensor) ? Dtype::bf16 : dtype;
}

Dtype dtype_of_values(const ArchitectureTensor& tensor, const ForwardWeights& types, ExportDtype asked, HfWeights* folder) {
  if (asked == ExportDtype::fp32) return Dtype::f32;
  const bool router = types.module_of(tensor.parameter).module.kind == ModuleKind::router;  // computes in fp32
  if (asked == ExportDtype::bf16 && !router) return Dtype::bf16;
  if (folder != nullptr) {
    const WeightForm form = folder->form(tensor.parameter);
    if (folder->file_dtype(tensor) != form.dtype) return Dtype::bf16;  // although its parameter is kept in fp32
    if (form.codes || form.products) return bf16_holds(*folder, tensor) ? Dtype::bf16 : Dtype::f32;
  }
  return types.dtype(tensor.parameter);
}

ProvenTensor ExportedWeights::description(size_t tensor) const {
  const Item& item = items_.at(tensor);
  return {.name = item.file.name,
          .module = types_.module_of(item.tensor->parameter).module.path,
          .dtype = file_dtype_name(item.file.dtype),
          .shape = item.file.shape,
          .how = types_.quantized(item.tensor->parameter)};
}

// Rows that are in another order than the parameter's are put into that of the file one matrix at a time.
void ExportedWeights::write(size_t number, ForwardWeights& weights, const Put& put) const {
  const Item& item = items_.at(number);
  const ArchitectureTensor& tensor = *item.tensor;
  if (item.role == Role::tensor_scale || item.role == Role::input_scale) {
    const float scale = scale_of_tensor(item);
    return put(std::as_bytes(std::span(&scale, 1)));
  }
  if (tensor.in_order())
    return for_chunks(tensor, [&](const RowRun& run, int64_t begin, int64_t end) {
      put(rows_of(item, {.file_row = run.file_row + begin - run.row, .row = begin, .rows = end - begin}, weights));
    });
  const int64_t each = tensor.rows() / tensor.matrices;
  const bool turns = item.role == Role::values && tensor.transposed;
  std::vector<std::byte> matrix, turned;
  for (int64_t first = 0; first < tensor.rows(); first += each) {
    for (const RowRun& run : tensor.runs) {
      const RowRun part = rows_between(run, first, first + each);
      if (part.rows == 0) continue;
      const std::vector<std::byte> rows = rows_of(item, part, weights);
      const size_t width = rows.size() / static_cast<size_t>(part.rows);
      matrix.resize(static_cast<size_t>(each) * width);
      for (int64_t row = 0; row < part.rows; ++row)
        std::ranges::copy(std::span(rows).subspan(static_cast<size_t>(row) * width, width),
                          matrix.begin() + (part.file_row - first + row * part.step) * static_cast<int64_t>(width));
    }
    if (turns) {
      turned.resize(matrix.size());
      transpose(matrix, each, tensor.columns(), turned);
    }
    put(turns ? turned : matrix);
  }
}

std::vector<std::byte> value_rows(const ArchitectureTensor& tensor, const RowRun& run, Dtype dtype, ForwardWeights& weights,
                                  const char* others) {
  std::vector<float> values(static_cast<size_t>(run.rows * tensor.columns()));
  weights.read(tensor.parameter, run.row, run.row + run.rows, values);
  const bool wide = dtype == Dtype::f32, rounds = weights.rounds(tensor.parameter);
  std::vector<std::byte> out(values.size() * (wide ? sizeof(float) : sizeof(bf16)));
  for (size_t i = 0; i < values.size(); ++i) {
    const float value = values[i];
    const auto at = [&] {  // asked for where there is an error only: it costs more than all else
      const int64_t index = static_cast<int64_t>(i), columns = tensor.columns();
      return text(weights.where(), ": ", element_name(tensor, run.file_row + index / columns * run.step, index % columns));
    };
    if (!std::isfinite(value)) fail(ExitCode::data, at(), " is ", value, ": not exported");
    if (wide) {
      std::memcpy(out.data() + i * sizeof value, &value, sizeof value);
      continue;
    }
    const bf16 narrow = to_bf16(value);
    if (!rounds && std::bit_cast<uint32_t>(to_float(narrow)) != std::bit_cast<uint32_t>(value))
      fail(ExitCode::usage, at(), " is ", value, ", which bf16 does not hold exactly: take dtype ", others);
    std::memcpy(out.data() + i * sizeof narrow, &narrow, sizeof narrow);
  }
  return out;
}

// Returns the scale of a tensor of NVFP4, or of what it multiplies, as the file has it: compressed-tensors divides by it.
float ExportedWeights::scale_of_tensor(const Item& item) const {
  const std::string& parameter = item.tensor->parameter;
  const bool of_input = item.role == Role::input_scale, divides = options_.convention == Convention::compressed_tensors;
  const int exponent = (of_input ? types_.module_of(parameter).recipe.input : types_.quantized(parameter)).tensor_exponent;
  return std::ldexp(1.0F, divides ? -exponent : exponent);
}

namespace {

// Puts the scale of a tensor, 2^exponent, into the E4M3 scales of its blocks. Returns false if one of the products is no number of E4M3.
bool fold_scale(std::span<std::byte> scales, int8_t exponent) {
  for (std::byte& scale : scales) {
    const auto code = std::to_integer<uint8_t>(scale);
    const auto from = static_cast<uint8_t>(127 + exponent);
    const uint8_t folded = E4M3::encode(E4M3::decode(code, from), 127);
    if (E4M3::decode(folded, 127) != E4M3::decode(code, from)) return false;
    scale = std::byte{folded};
  }
  return true;
}

}  // namespace

// Returns rows in the form that the file has.
std::vector<std::byte> ExportedWeights::rows_of(const Item& item, const RowRun& run, ForwardWeights& weights) const {
  const ArchitectureTensor& tensor = *item.tensor;
  const int64_t begin = run.row, end = run.row + run.rows;
  if (item.role == Role::values) {
    const Dtype dtype = item.file.dtype == FileDtype::f32 ? Dtype::f32 : Dtype::bf16;
    return value_rows(tensor, run, dtype, weights, options_.dtype == ExportDtype::bf16 ? "auto or fp32" : "fp32");
  }
  if (item.role == Role::codes) return weights.codes(tensor.parameter, begin, end);
  const bool tiles = item.role == Role::tile_scales;
  std::vector<std::byte> scales = tiles ? weights.tile_scales(tensor.parameter, begin, end) : weights.scales(tensor.parameter, begin, end);
  const Quantization how = weights.quantized(tensor.parameter);
  const bool two_levels = how.format == Format::nvfp4;
  const auto is_nan = [&](std::byte scale) {
    return two_levels ? (std::to_integer<unsigned>(scale) & E4M3::magnitude_mask) == Nvfp4::nan_scale : scale == std::byte{kScaleNan};
  };
  require(std::ranges::none_of(scales, is_nan), ExitCode::data, weights.where(), ": a block of ", tensor.name, " between rows ",
          run.file_row, " and ", run.file_row + run.rows * run.step, " holds NaN or Inf: not exported");
  if (two_levels && of_mlx())
    require(fold_scale(scales, how.tensor_exponent), ExitCode::usage, weights.where(), ": ", tensor.name, " (", how,
            "): mlx-lm has no scale for a tensor of NVFP4, and a scale of a block times 2^", int{how.tensor_exponent},
            " is no number of E4M3: train with \"tensor_exponent\": 0, take dequantized weights, or the format hf");
  return tiles ? tile_scales_as(item.file.dtype, scales) : scales;
}

}  // namespace mantissa
