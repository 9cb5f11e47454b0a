#include "hf/hf_weights.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "hf/tile_scales.h"
#include "mantissa/formats/element.h"
#include "mantissa/formats/fp16.h"
#include "mantissa/formats/nvfp4.h"
#include "mantissa/formats/swizzle.h"

namespace mantissa {
namespace {

constexpr size_t kTieChunkBytes = 8 << 20;
constexpr size_t kShownNames = 8;
constexpr int64_t kE2m1InU32 = 8, kE4m3InU32 = 4;  // codes

constexpr uint8_t kScaleOfOne = 127;  // E8M0

float e4m3_value(std::byte code) {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> all;
    for (unsigned each = 0; each < all.size(); ++each)
      all[each] = std::bit_cast<float>(E4M3::decode(static_cast<uint8_t>(each), kScaleOfOne));
    return all;
  }();
  return values[std::to_integer<uint8_t>(code)];
}

int64_t value_bytes(FileDtype dtype) { return file_dtype_bits(dtype) / 8; }

// Converts values of a file to `to`, which is the same type or fp32.
void convert_values(FileDtype from, std::span<const std::byte> in, Dtype to, std::span<std::byte> out) {
  if (value_bytes(from) == dtype_bytes(to)) {
    std::memcpy(out.data(), in.data(), in.size());
    return;
  }
  const size_t count = in.size() / sizeof(uint16_t);
  for (size_t i = 0; i < count; ++i) {
    uint16_t half = 0;
    std::memcpy(&half, in.data() + i * sizeof half, sizeof half);
    const uint32_t wide = from == FileDtype::f16 ? fp32_bits_from_fp16_bits(half) : static_cast<uint32_t>(half) << 16;
    std::memcpy(out.data() + i * sizeof wide, &wide, sizeof wide);
  }
}

void require_whole_blocks(int64_t columns, int64_t block, const std::string& where, const std::string& name) {
  require(columns % block == 0, ExitCode::data, where, ": ", name, " has ", columns, " columns, which are not whole blocks of ", block);
}

std::string names_text(const std::vector<std::string>& names, const char* least = "") {
  const size_t shown = std::min(kShownNames, names.size());
  const std::string list = joined(std::span(names).first(shown), "\n  ");
  return shown < names.size() ? text(list, "\n  and ", least, names.size() - shown, " more") : list;
}

// Norms, biases and routers are F32 in every GGUF file, also of a model that is BF16, and so are positions in those of llama.cpp's scripts.
bool ggml_wants_f32(const ArchitectureTensor& tensor) {
  return tensor.shape.size() < 2 || !tensor.parameter.ends_with(".weight") || tensor.parameter.find(".router.") != std::string::npos ||
         tensor.parameter == "position.weight";
}

ExportFormat format_of(ModelFiles& files, const ArchitectureConfig& config) {
  if (const std::optional<ExportFormat> format = files.format()) return *format;
  const bool mlx = !config.quantization.empty() && parse_json(config.quantization, "quantization").contains("quantization");
  return mlx ? ExportFormat::mlx : ExportFormat::hf;
}

}  // namespace

std::string HfWeights::fingerprint() {
  constexpr int64_t kSample = 4096;
  StreamHash hash;
  const auto add = [&](const std::string& line) { hash.update(std::as_bytes(std::span(line))); };
  add(file("config.json").value_or(""));
  std::vector<std::byte> sample;
  for (const SafetensorsEntry& entry : files_->entries()) {
    add(text(entry.name, ' ', entry.dtype, " [", joined(entry.shape), "] ", entry.file, ' ', entry.begin));
    sample.resize(static_cast<size_t>(std::min(entry.bytes(), kSample)));
    files_->read(entry, 0, sample);
    hash.update(sample);
  }
  return hash.finish().text();
}

std::vector<TokenizerFile> tokenizer_files(HfWeights& weights) {
  std::vector<TokenizerFile> files;
  for (const char* const name : kTokenizerFiles) {
    std::optional<std::string> bytes = weights.file(name);
    if (!bytes) continue;
    const std::string_view known(name);
    if (known == "config.json" || known == "generation_config.json")
      read_special_tokens(*bytes, (std::filesystem::path(weights.where()) / name).string());
    files.push_back({.name = name, .bytes = std::move(*bytes)});
  }
  return files;
}

// Checks quantization_config before tensors; otherwise those that it renames would be reported as missing.
HfWeights::HfWeights(const std::filesystem::path& folder)
    : folder_(folder),
      files_(open_model_files(folder)),
      config_(read_architecture_config(files_->config(), files_->config_source())),
      block_fp8_(!config_.quantization.empty() && PackedConfig(config_.quantization, files_->config_source()).block_fp8()),
      format_(format_of(*files_, config_)) {
  find_tensors();
  if (config_.says_dtype) return;
  bool bf16 = false, other = false;  // among values; there may be codes beside them
  for (const auto& [name, pieces] : pieces_) {
    for (const Piece& piece : pieces) {
      if (format_ == ExportFormat::gguf && ggml_wants_f32(*piece.tensor)) continue;
      bf16 = bf16 || piece.entry->dtype == FileDtype::bf16;
      other = other || piece.entry->dtype == FileDtype::f32 || piece.entry->dtype == FileDtype::f16;
    }
  }
  config_.dtype = bf16 && !other ? Dtype::bf16 : Dtype::f32;
}
HfWeights::~HfWeights() = default;

// Moves the entries that hold a tensor of the model out of `unused`; returns false if the folder lacks them.
bool HfWeights::find(const ArchitectureTensor& tensor, Unused& unused) {
  const auto take = [&](const std::string& name) -> const SafetensorsEntry* {
    const auto found = unused.find(name);
    return found == unused.end() ? nullptr : unused.extract(found).mapped();
  };
  const SafetensorsEntry* scales = nullptr;
  const bool stacked = tensor.transposed && !tensor.name.ends_with(".weight");
  const bool may_be_codes = stacked || (tensor.name.ends_with(".weight") && tensor.shape.size() >= 2 && !tensor.transposed);
  for (const Convention convention : {Convention::compressed_tensors, Convention::sglang}) {
    if (may_be_codes && !scales) scales = take(packed_names(tensor.name, Format::e4m3, convention, format_).scales);
  }
  if (may_be_codes && !scales && block_fp8_ && !stacked) {
    scales = take(tensor.name.substr(0, tensor.name.rfind('.')) + ".scale");  // as DeepSeek-V4 names it
  }
  const SafetensorsEntry* entry = take(tensor.name);
  if (!entry && scales) entry = take(packed_names(tensor.name, Format::e2m1, Convention::compressed_tensors).codes);
  if (!entry) return false;
  require_form(tensor, *entry, scales);
  std::optional<TensorScale> tensor_scale, input_scale;
  if (scales && scales->dtype == FileDtype::f8_e4m3) {
    for (const Convention convention : {Convention::compressed_tensors, Convention::modelopt}) {
      const PackedNames names = packed_names(tensor.name, Format::nvfp4, convention);
      const bool divides = convention == Convention::compressed_tensors;
      if (const SafetensorsEntry* found = take(names.input_scale)) input_scale = read_tensor_scale(*found, divides);
      if (tensor_scale) continue;
      if (const SafetensorsEntry* found = take(names.tensor_scale)) tensor_scale = read_tensor_scale(*found, divides);
    }
    require(tensor_scale.has_value(), ExitCode::data, where(), ": ", scales->name, " holds scales of NVFP4, but there is neither ",
            tensor.name, "_global_scale nor ", tensor.name, "_scale_2, the scale of the tensor");
  }
  const TileScales* tiles = nullptr;
  if (scales && block_fp8_ && entry->dtype == FileDtype::f8_e4m3) {
    std::vector<std::byte> bytes(static_cast<size_t>(scales->bytes()));
    files_->read(*scales, 0, bytes);
    tiles = (tile_scales_[scales] = std::make_unique<TileScales>(read_tile_scales(bytes, *scales, where()))).get();
  }
  for (const RowRun& run : tensor.runs)
    pieces_[tensor.parameter].push_back({.tensor = &tensor,
                                         .entry = entry,
                                         .scales = scales,
                                         .tiles = tiles,
                                         .tensor_scale = tensor_scale,
                                         .input_scale = input_scale,
                                         .run = run});
  return true;
}

HfWeights::TensorScale HfWeights::read_tensor_scale(const SafetensorsEntry& entry, bool divides) const {
  require(entry.dtype == FileDtype::f32 && entry.bytes() == sizeof(float), ExitCode::data, where(), ": ", entry.name, " is ", entry.dtype,
          ' ', shape_text(entry.shape), ", and the scale of a tensor is one number in F32");
  TensorScale out{.name = entry.name, .divides = divides};
  files_->read(entry, 0, std::as_writable_bytes(std::span(&out.value, 1)));
  require(std::isfinite(out.value) && out.value > 0.0F, ExitCode::data, where(), ": ", entry.name, " is ", out.value,
          ": a scale must be positive and finite");
  return out;
}

std::optional<int8_t> HfWeights::TensorScale::exponent() const {
  int binade = 0;
  const bool power = std::frexp(value, &binade) == 0.5F;
  const int own = divides ? 1 - binade : binade - 1;
  return power && std::abs(own) <= kMostTensorExponent ? std::optional(static_cast<int8_t>(own)) : std::nullopt;
}

// Returns the exponent of a scale that all pieces have; none if there is none, or if they have several.
std::optional<int8_t> HfWeights::common_exponent(const std::vector<Piece>& pieces, std::optional<TensorScale> Piece::*scale) {
  const std::optional<TensorScale>& first = pieces.front().*scale;
  const std::optional<int8_t> exponent = first ? first->exponent() : std::nullopt;
  const auto has_it = [&](const Piece& piece) { return piece.*scale && (piece.*scale)->exponent() == exponent; };
  return std::ranges::all_of(pieces, has_it) ? exponent : std::nullopt;
}

void HfWeights::require_shape(const SafetensorsEntry& found, const std::vector<int64_t>& wanted) const {
  require(found.shape == wanted, ExitCode::data, where(), ": ", found.name, " is ", shape_text(found.shape), ", but ",
          format_ == ExportFormat::gguf ? "its keys make" : "config.json makes", " it ", shape_text(wanted));
}

// Checks codes of mlx-lm and GGUF.
void HfWeights::require_other_format(const ArchitectureTensor& tensor, const SafetensorsEntry& entry,
                                     const SafetensorsEntry& scales) const {
  const int64_t columns = tensor.columns();
  const auto require_columns = [&](int64_t of_codes, int64_t block) {  // other sizes are those of the tensor
    std::vector<int64_t> codes = tensor.shape, of_scales = tensor.shape;
    codes.back() = of_codes;
    of_scales.back() = columns / block;
    require_shape(entry, codes);
    require_shape(scales, of_scales);
  };
  if (format_ == ExportFormat::gguf) {
    require(entry.dtype == FileDtype::u8, ExitCode::data, where(), ": has tensors \"", entry.name, "\" and \"", scales.name,
            "\", but the first is ", entry.dtype, ", which has no scales");
    return require_columns(columns / 2, kPackedBlock);
  }
  require(entry.dtype == FileDtype::u32 && scales.dtype == FileDtype::u8, ExitCode::usage, where(), ": ", entry.name, " is ", entry.dtype,
          " with scales in ", scales.dtype, "; of mlx-lm mantissa reads U32 with scales in U8, which are MXFP8, MXFP4 and NVFP4");
  const bool four = entry.shape.empty() || entry.shape.back() != columns / kE4m3InU32;
  const bool two_levels = four && !scales.shape.empty() && scales.shape.back() == columns / kNvfp4Block;
  const int64_t block = two_levels ? kNvfp4Block : kPackedBlock;
  require_whole_blocks(columns, block, where(), entry.name);
  require_columns(columns / (four ? kE2m1InU32 : kE4m3InU32), block);
}

void HfWeights::require_form(const ArchitectureTensor& tensor, const SafetensorsEntry& entry, const SafetensorsEntry* scales) const {
  if (!scales) {
    require(entry.dtype == FileDtype::f32 || entry.dtype == FileDtype::bf16 || entry.dtype == FileDtype::f16, ExitCode::usage, where(),
            ": ", entry.name, " is ", entry.dtype, "; mantissa reads F32, BF16, F16 and, beside scales, F8_E4M3 and packed E2M1");
    return require_shape(entry, tensor.shape);
  }
  const int64_t rows = tensor.rows(), columns = tensor.columns(), each = rows / tensor.matrices, blocks = columns / kPackedBlock;
  if (format_ == ExportFormat::mlx || format_ == ExportFormat::gguf) return require_other_format(tensor, entry, *scales);
  const bool tiles = entry.dtype == FileDtype::f8_e4m3, four_bits = entry.dtype == FileDtype::i8 && entry.name.ends_with(".weight");
  const bool block_fp8 = block_fp8_ && (tiles || four_bits);
  if (block_fp8) {
    require(!tensor.transposed, ExitCode::usage, where(), ": ", entry.name,
            " holds the experts of a layer in one tensor, which mantissa reads as blocks and scales of MXFP4, not as block FP8");
    require(tiles ? holds_tile_scales(scales->dtype) : scales->dtype == FileDtype::f8_e8m0, ExitCode::usage, where(), ": ", entry.name,
            " is ", entry.dtype, " with scales in ", scales->dtype,
            "; under quant_method fp8 mantissa reads F8_E4M3 with scales in F32, BF16 or F8_E8M0, and I8, which is E2M1, with F8_E8M0");
  }
  if (block_fp8 && tiles) {
    require_shape(entry, tensor.shape);
    return require_shape(*scales, {tiles_along(rows), tiles_along(columns)});
  }
  const bool stacked = entry.name.ends_with("_blocks");
  if (entry.dtype == FileDtype::u8 && scales->dtype == FileDtype::f8_e4m3 && !stacked) {  // NVFP4
    require_whole_blocks(columns, kNvfp4Block, where(), entry.name);
    require_shape(entry, {rows, columns / 2});
    return require_shape(*scales, {rows, columns / kNvfp4Block});
  }
  require_whole_blocks(columns, kPackedBlock, where(), entry.name);
  const bool right =
      (entry.dtype == FileDtype::f8_e4m3 && !stacked) || (entry.dtype == FileDtype::u8 && (stacked || entry.name.ends_with("_packed")));
  require(block_fp8 || (right && (scales->dtype == FileDtype::u8 || scales->dtype == FileDtype::f8_e8m0)), ExitCode::usage, where(), ": ",
          entry.name, " is ", entry.dtype, " with scales in ", scales->dtype,
          "; mantissa reads F8_E4M3 and packed E2M1 with E8M0 scales, NVFP4, which is U8 with scales in F8_E4M3, and others where "
          "quantization_config has quant_method fp8");
  if (stacked && !block_fp8) {
    require_shape(entry, {tensor.matrices, each, blocks, kPackedBlock / 2});
    return require_shape(*scales, {tensor.matrices, each, blocks});
  }
  require_shape(entry, {rows, entry.dtype == FileDtype::f8_e4m3 ? columns : columns / 2});
  require_shape(*scales, {rows, blocks});
}

Format HfWeights::Piece::format() const {
  if (!scales) return Format::none;
  const bool two_levels = scales->dtype == FileDtype::f8_e4m3;
  if (entry->dtype == FileDtype::u32) {
    if (entry->shape.back() == tensor->columns() / kE4m3InU32) return Format::e4m3;
    return scales->shape.back() == tensor->columns() / kNvfp4Block ? Format::nvfp4 : Format::e2m1;
  }
  if (entry->dtype == FileDtype::u8 && two_levels) return Format::nvfp4;
  return entry->dtype == FileDtype::u8 || entry->dtype == FileDtype::i8 ? Format::e2m1 : Format::e4m3;
}

// Returns the first piece of a parameter, but the last, that ends within a tile: then the tiles of those behind it are none of the
// parameter. Null: none does.
const HfWeights::Piece* HfWeights::ends_within_tile(const std::vector<Piece>& pieces) {
  const auto end = pieces.end() - 1;
  const auto found = std::find_if(pieces.begin(), end, [](const Piece& piece) { return piece.run.rows % kTile != 0; });
  return found == end ? nullptr : &*found;
}

void HfWeights::find_tensors() {
  // A config may ask for more tensors than memory holds. Of those that the folder lacks, enough are listed to name the first.
  const size_t held = files_->entries().size(), spare = held + 100;
  tensors_ = first_architecture_tensors(config_.architecture, config_.model, format_, std::min(spare, kMostArchitectureTensors) + 1);
  require(tensors_.size() <= kMostArchitectureTensors, ExitCode::usage, files_->config_source(), ": the model has more than ",
          kMostArchitectureTensors, " tensors, and the folder holds ", held);
  Unused unused;
  for (const SafetensorsEntry& entry : files_->entries()) {
    if (is_architecture_buffer(config_.architecture, entry.name)) continue;
    const std::string name = with_base_prefix(config_.architecture, entry.name, format_);
    require(unused.emplace(name, &entry).second, ExitCode::data, where(), ": holds ", name, " twice, with and without its prefix");
  }
  std::vector<std::string> missing, left;
  for (const ArchitectureTensor& tensor : tensors_) {
    if (!find(tensor, unused)) missing.push_back(tensor.name);
  }
  require(missing.empty(), ExitCode::data, where(), ": lacks tensors of its model:\n  ",
          names_text(missing, tensors_.size() > spare ? "at least " : ""));
  const auto output = unused.find(format_ == ExportFormat::gguf ? "output.weight" : "lm_head.weight");
  if (config_.model.tie_word_embeddings && output != unused.end()) {
    require_tied_output(*output->second);
    unused.erase(output);
  }
  for (const auto& [name, entry] : unused) left.push_back(entry->name);
  require(left.empty(), ExitCode::data, where(), ": holds tensors that its model has no place for:\n  ", names_text(left));
  for (auto& [name, pieces] : pieces_) {
    std::ranges::sort(pieces, {}, [](const Piece& piece) { return piece.run.row; });
    const Piece& first = pieces.front();
    for (const Piece& piece : pieces)  // tensors that are fused into one parameter (q, k, v) have one storage format
      require(piece.format() == first.format(), ExitCode::usage, where(), ": ", first.entry->name, " is ", first.entry->dtype, " and ",
              piece.entry->name, " is ", piece.entry->dtype, ", but both are parts of ", name, ", which must have one format");
  }
}

void HfWeights::require_tied_output(const SafetensorsEntry& output) {
  const SafetensorsEntry& embedding = *pieces_of("embed.weight").front().entry;
  require(output.shape == embedding.shape && output.dtype == embedding.dtype, ExitCode::data, where(), ": ", output.name,
          " does not have the shape and type of the embeddings, to which config.json ties it");
  std::vector<std::byte> a(kTieChunkBytes), b(kTieChunkBytes);
  for (int64_t at = 0; at < output.bytes(); at += static_cast<int64_t>(kTieChunkBytes)) {
    const auto count = static_cast<size_t>(std::min<int64_t>(output.bytes() - at, static_cast<int64_t>(kTieChunkBytes)));
    files_->read(output, at, std::span(a).first(count));
    files_->read(embedding, at, std::span(b).first(count));
    require(std::memcmp(a.data(), b.data(), count) == 0, ExitCode::data, where(), ": ", output.name,
            " differs from the embeddings, but config.json ties them: set tie_word_embeddings to false");
  }
}

const std::vector<HfWeights::Piece>& HfWeights::pieces_of(const std::string& parameter) const {
  const auto found = pieces_.find(parameter);
  require(found != pieces_.end(), where(), ": no parameter ", parameter);
  return found->second;
}

std::string HfWeights::element(const std::string& parameter, int64_t row, int64_t column) const {
  const std::vector<Piece>& pieces = pieces_of(parameter);  // in the order of their rows
  const auto piece = std::ranges::find_if(pieces, [&](const Piece& next) { return row < next.run.row + next.run.rows; });
  require(piece != pieces.end(), where(), ": ", parameter, " has no row ", row);
  return element_name(*piece->tensor, piece->run.file_row + (row - piece->run.row) * piece->run.step, column);
}

Dtype HfWeights::file_dtype(const ArchitectureTensor& tensor) const {
  const auto overlap = [](const RowRun& a, const RowRun& b) { return a.row < b.row + b.rows && b.row < a.row + a.rows; };
  const auto is_wide_part = [&](const Piece& piece) {
    return piece.entry->dtype != FileDtype::bf16 &&
           std::ranges::any_of(tensor.runs, [&](const RowRun& run) { return overlap(run, piece.run); });
  };
  return std::ranges::any_of(pieces_of(tensor.parameter), is_wide_part) ? Dtype::f32 : Dtype::bf16;
}

std::optional<FileDtype> HfWeights::tile_scales_dtype(const ArchitectureTensor& tensor) const {
  for (const Piece& piece : pieces_of(tensor.parameter))  // the one with its first row
    if (tensor.runs.front().row < piece.run.row + piece.run.rows) return piece.tiles ? std::optional(piece.scales->dtype) : std::nullopt;
  return {};
}

WeightForm HfWeights::form(const std::string& parameter) const {
  const std::vector<Piece>& pieces = pieces_of(parameter);
  const Piece& first = pieces.front();
  if (first.tiles) {
    const bool powers = std::ranges::none_of(pieces, [](const Piece& piece) { return piece.tiles->no_power_of_two.has_value(); });
    if (!powers || ends_within_tile(pieces)) return {.dtype = Dtype::f32, .products = true};
    const PackedScheme scheme{.format = Format::e4m3, .block = kTile};
    return {.dtype = Dtype::f32, .codes = form_of(scheme), .columns = first.tensor->columns()};
  }
  if (first.scales) {
    Quantization how = packed_form(first.format());
    if (first.tensor_scale) {
      const std::optional<int8_t> exponent = common_exponent(pieces, &Piece::tensor_scale);
      if (!exponent) return {.dtype = Dtype::f32, .products = true};
      how.tensor_exponent = *exponent;
    }
    return {.dtype = Dtype::f32, .codes = how, .columns = first.tensor->columns()};
  }
  const bool narrow = std::ranges::all_of(pieces, [](const Piece& piece) { return piece.entry->dtype == FileDtype::bf16; });
  return {.dtype = narrow ? Dtype::bf16 : Dtype::f32};
}

void HfWeights::read(const std::string& parameter, const Box& box, std::span<std::byte> out) {
  const std::vector<Piece>& pieces = pieces_of(parameter);
  const int64_t width = dtype_bytes(form(parameter).dtype), columns = pieces.front().tensor->columns();
  const bool whole_rows = box.size.size() < 2 || box.size[1] == columns;
  const int64_t first_column = box.size.size() < 2 ? 0 : box.start[1], wanted = box.size.size() < 2 ? 1 : box.size[1];
  std::vector<std::byte> rows;
  for (const Piece& piece : pieces) {
    const int64_t begin = std::max(box.start[0], piece.run.row), end = std::min(box.start[0] + box.size[0], piece.run.row + piece.run.rows);
    if (begin >= end) continue;
    const auto place =
        out.subspan(static_cast<size_t>((begin - box.start[0]) * wanted * width), static_cast<size_t>((end - begin) * wanted * width));
    if (whole_rows) {
      read_rows(piece, begin, end, place);
      continue;
    }
    rows.resize(static_cast<size_t>((end - begin) * columns * width));
    read_rows(piece, begin, end, rows);
    for (int64_t row = 0; row < end - begin; ++row)
      std::memcpy(place.data() + row * wanted * width, rows.data() + (row * columns + first_column) * width,
                  static_cast<size_t>(wanted * width));
  }
}

void HfWeights::require_no_sign(const Piece& piece, std::span<const std::byte> scales) const {
  const auto wrong = std::ranges::find_if(scales, [](std::byte scale) { return (scale & std::byte{E4M3::sign_bit}) != std::byte{}; });
  require(wrong == scales.end(), ExitCode::data, where(), ": ", piece.scales->name,
          " has a negative scale, and servers read scales of NVFP4 without their signs: quantize the weights again");
}

void HfWeights::read_codes(const std::string& parameter, int64_t begin, int64_t end, std::span<std::byte> codes,
                           std::span<std::byte> scales) {
  const WeightForm kept = form(parameter);
  for (const Piece& piece : pieces_of(parameter)) {
    const int64_t first = std::max(begin, piece.run.row), last = std::min(end, piece.run.row + piece.run.rows);
    if (first >= last) continue;
    const auto take = [&](const SafetensorsEntry& entry, int64_t row_bytes, std::span<std::byte> out) {
      const auto count = static_cast<size_t>((last - first) * row_bytes);
      read_file_rows(piece, entry, row_bytes, first, last, out.subspan(static_cast<size_t>((first - begin) * row_bytes), count));
    };
    if (!codes.empty()) take(*piece.entry, code_bytes(kept), codes);
    if (scales.empty()) continue;
    if (!piece.tiles) {
      take(*piece.scales, scale_bytes(kept), scales);
      if (kept.codes.format == Format::nvfp4) {
        const auto rows = static_cast<size_t>((last - first) * scale_bytes(kept));
        require_no_sign(piece, scales.subspan(static_cast<size_t>((first - begin) * scale_bytes(kept)), rows));
      }
      continue;
    }
    auto out = scales.begin() + (first - begin) / kTile * scale_bytes(kept);
    for (int64_t row = first; row < last; row += kTile) {
      for (int64_t column = 0; column < piece.tiles->columns; ++column)
        *out++ = std::byte{*e8m0_of_scale(piece.tiles->at(piece.run.file_row + row - piece.run.row, column * kTile))};
    }
  }
}

// Reads rows [begin, end) of the parameter, all in this piece, in the file's form. Where the rows lie apart, all rows between them are
// read, too.
void HfWeights::read_file_rows(const Piece& piece, const SafetensorsEntry& entry, int64_t row_bytes, int64_t begin, int64_t end,
                               std::span<std::byte> out) {
  const RowRun& run = piece.run;
  const int64_t first = run.file_row + (begin - run.row) * run.step;
  if (run.step == 1) return files_->read(entry, first * row_bytes, out);
  std::vector<std::byte> all(static_cast<size_t>(((end - begin - 1) * run.step + 1) * row_bytes));
  files_->read(entry, first * row_bytes, all);
  for (int64_t row = 0; row < end - begin; ++row)
    std::memcpy(out.data() + row * row_bytes, all.data() + row * run.step * row_bytes, static_cast<size_t>(row_bytes));
}

void HfWeights::read_rows(const Piece& piece, int64_t begin, int64_t end, std::span<std::byte> out) {
  if (piece.tiles) return read_tiles(piece, begin, end, out);
  if (piece.tensor_scale) return read_two_levels(piece, begin, end, out);
  const FileDtype from = piece.entry->dtype;
  const Dtype to = form(piece.tensor->parameter).dtype;
  const int64_t row_bytes = piece.tensor->columns() * value_bytes(from), out_bytes = piece.tensor->columns() * dtype_bytes(to);
  if (!piece.tensor->transposed) {
    if (value_bytes(from) == dtype_bytes(to)) return read_file_rows(piece, *piece.entry, row_bytes, begin, end, out);
    std::vector<std::byte> narrow(static_cast<size_t>((end - begin) * row_bytes));
    read_file_rows(piece, *piece.entry, row_bytes, begin, end, narrow);
    return convert_values(from, narrow, to, out);
  }
  const int64_t each = piece.tensor->rows() / piece.tensor->matrices;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t file_row = piece.run.file_row + (row - piece.run.row) * piece.run.step;
    const auto stored =
        turned_matrix(piece, file_row / each).subspan(static_cast<size_t>(file_row % each * row_bytes), static_cast<size_t>(row_bytes));
    convert_values(from, stored, to, out.subspan(static_cast<size_t>((row - begin) * out_bytes), static_cast<size_t>(out_bytes)));
  }
}

// Multiplies elements of NVFP4 by the quotient, or product, of the scales of their block and the tensor, each rounded once to fp32, as
// compressed-tensors does.
void HfWeights::read_two_levels(const Piece& piece, int64_t begin, int64_t end, std::span<std::byte> out) {
  const int64_t columns = piece.tensor->columns(), row_scales = columns / kNvfp4Block;
  std::vector<std::byte> codes(static_cast<size_t>((end - begin) * columns / 2)), scales(static_cast<size_t>((end - begin) * row_scales));
  read_file_rows(piece, *piece.entry, columns / 2, begin, end, codes);
  read_file_rows(piece, *piece.scales, row_scales, begin, end, scales);
  require_no_sign(piece, scales);
  const float of_tensor = piece.tensor_scale->value;
  for (size_t block = 0; block < scales.size(); ++block) {
    const float own = e4m3_value(scales[block]), scale = piece.tensor_scale->divides ? own / of_tensor : own * of_tensor;
    for (size_t i = 0; i < kNvfp4Block; ++i) {
      const size_t at = block * kNvfp4Block + i;
      const uint8_t code = unpack_nibble(std::to_integer<uint8_t>(codes[at / 2]), static_cast<int64_t>(i));
      const float value = std::bit_cast<float>(E2M1::decode(code, kScaleOfOne)) * scale;
      std::memcpy(out.data() + at * sizeof value, &value, sizeof value);
    }
  }
}

std::optional<std::string> HfWeights::inverted_scales() const {
  constexpr int64_t kSample = 4096;              // scales of a tensor
  constexpr float kLarge = 64.0F, kMost = 6.0F;  // magnitude of a weight, and of an element
  int64_t all = 0, inverted = 0;
  std::string first;
  std::vector<std::byte> scales;
  for (const auto& [parameter, pieces] : pieces_) {
    for (const Piece& piece : pieces) {
      if (!piece.tensor_scale) continue;
      scales.resize(static_cast<size_t>(std::min(kSample, piece.scales->bytes())));
      files_->read(*piece.scales, 0, scales);
      float largest = 0.0F;
      for (const std::byte scale : scales) largest = std::max(largest, kMost * std::abs(e4m3_value(scale)));
      const auto& [name, value, divides] = *piece.tensor_scale;
      const float quotient = largest / value, product = largest * value, read = divides ? quotient : product;
      ++all;
      if (!(read > kLarge) || (divides ? product : quotient) > kLarge) continue;
      if (inverted++ == 0)
        first = text(name, " is ", value, ", by which scales are ", divides ? "divided" : "multiplied",
                     ", so that weights are as large as ", read, ", and with its inverse as large as ", divides ? product : quotient);
    }
  }
  if (2 * inverted <= all) return {};
  return text(where(), ": ", inverted, " of ", count_text(all, "scale"),
              " of tensors of NVFP4 seem to be the inverse of what their names say (first: ", first,
              "): weight_global_scale of compressed-tensors is a divisor, weight_scale_2 of ModelOpt a factor; write 1 / it");
}

// Multiplies codes by the scales of their tiles, rounded once to fp32.
void HfWeights::read_tiles(const Piece& piece, int64_t begin, int64_t end, std::span<std::byte> out) {
  const int64_t columns = piece.tensor->columns();
  std::vector<std::byte> codes(static_cast<size_t>((end - begin) * columns));
  read_file_rows(piece, *piece.entry, columns, begin, end, codes);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t file_row = piece.run.file_row + (row - piece.run.row) * piece.run.step;
    for (int64_t column = 0; column < columns; ++column) {
      const auto at = static_cast<size_t>((row - begin) * columns + column);
      const float value = e4m3_value(codes[at]) * piece.tiles->at(file_row, column);
      std::memcpy(out.data() + at * sizeof value, &value, sizeof value);
    }
  }
}

std::span<const std::byte> HfWeights::turned_matrix(const Piece& piece, int64_t matrix) {
  if (turned_ == piece.entry && turned_matrix_ == matrix) return turned_bytes_;
  const int64_t rows = piece.tensor->columns(), columns = piece.tensor->rows() / piece.tensor->matrices;
  std::vector<std::byte> stored(static_cast<size_t>(rows * columns * value_bytes(piece.entry->dtype)));
  files_->read(*piece.entry, matrix * static_cast<int64_t>(stored.size()), stored);
  turned_bytes_.resize(stored.size());
  transpose(stored, rows, columns, turned_bytes_);
  turned_ = piece.entry;
  turned_matrix_ = matrix;
  return turned_bytes_;
}

}  // namespace mantissa
