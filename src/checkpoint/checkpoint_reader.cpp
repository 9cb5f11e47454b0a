#include "checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/hash.h"
#include "base/parallel.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "mantissa/formats/bf16.h"
#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/with_element.h"

namespace mantissa {
namespace {

// Runs `body` and reports what it finds wrong with a file as damage of the checkpoint.
template <class Body>
auto reading(Body&& body) {
  try {
    return body();
  } catch (const CheckpointDamage&) {
    throw;
  } catch (const ReadError& error) {
    throw CheckpointUnread(error.what());
  } catch (const Error& error) {
    if (error.code() == ExitCode::data) throw CheckpointDamage(error.what());
    throw;
  }
}

// A reader keeps so many bytes of verified chunks. They are the chunks of eight streams: a rank that loads what four others saved goes
// through m and v of each of their shards in turn, and would read a chunk again for each tensor in it.
constexpr int64_t kKeptBytes = int64_t{32} << 20;

// Returns the row-major position of a point, given in global coordinates, inside a box.
int64_t position_in(const Box& box, const std::vector<int64_t>& point) {
  int64_t position = 0;
  for (size_t d = 0; d < point.size(); ++d) position = position * box.size[d] + point[d] - box.start[d];
  return position;
}

}  // namespace

CheckpointReader::CheckpointReader(const std::filesystem::path& directory) : directory_(directory) {
  std::error_code error;
  require(std::filesystem::is_directory(directory, error), ExitCode::usage, directory.string(), ": there is no such checkpoint folder");
  reading([&] {
    const std::filesystem::path path = directory_ / "manifest.json";
    const std::string content = File::open(path).content(Manifest::kMaxBytes);
    manifest_ = parse_manifest(content, path.string());
    hash_ = manifest_hash(content);
    for (size_t i = 0; i < manifest_.tensors.size(); ++i) index_.emplace(manifest_.tensors[i].name, i);
    check_shards();
  });
}

void CheckpointReader::check_shards() {
  std::string found;
  std::vector<ShardPieces> shards = shard_pieces(manifest_);
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string header = shard_header(std::move(shards[i]));
    const File file = File::open(directory_ / manifest_.shards[i].file);
    header_bytes_.push_back(static_cast<int64_t>(header.size()));
    const int64_t bytes = header_bytes_.back() + manifest_.shards[i].bytes;
    require(file.size() == bytes, ExitCode::data, file.path().string(), ": has ", file.size(), " bytes, but the manifest says ", bytes);
    found.resize(header.size());
    file.read_at(0, std::as_writable_bytes(std::span(found)));
    require(found == header, ExitCode::data, file.path().string(), ": is damaged: its header does not match the manifest");
  }
}

const RunConfig& CheckpointReader::config() const {
  if (config_) return *config_;
  RunConfig config = config_from_json<RunConfig>(manifest_.config, config_source(), ExitCode::data);
  require(config.model.vocab_size.has_value(), ExitCode::data, config_source(), ": model.vocab_size is null");
  return config_.emplace(std::move(config));
}

const ManifestTensor& CheckpointReader::tensor(const std::string& name) const {
  const auto found = index_.find(name);
  require(found != index_.end(), ExitCode::usage, directory_.string(), ": has no tensor ", name, ": it is a checkpoint of another model");
  return manifest_.tensors[found->second];
}

std::span<const std::byte> CheckpointReader::chunk(int64_t shard_index, int64_t index) {
  const auto found = std::ranges::find_if(kept_, [&](const KeptChunk& kept) { return kept.shard == shard_index && kept.index == index; });
  if (found != kept_.end()) {
    std::rotate(found, found + 1, kept_.end());
    return kept_.back().bytes;
  }
  const Shard& shard = manifest_.shards[static_cast<size_t>(shard_index)];
  if (open_shard_ != shard_index) {
    open_shard_ = -1;
    file_ = File::open(directory_ / shard.file);
    open_shard_ = shard_index;
  }
  const int64_t begin = index * shard.chunk_bytes, size = std::min(shard.chunk_bytes, shard.bytes - begin);
  // Gives up chunks that were asked for longest ago, and takes their memory.
  constexpr size_t kMost = 8;
  std::vector<std::byte> bytes;
  while (!kept_.empty() && (kept_.size() == kMost || kept_bytes_ + size > kKeptBytes)) {
    kept_bytes_ -= static_cast<int64_t>(kept_.front().bytes.size());
    bytes = std::move(kept_.front().bytes);
    kept_.erase(kept_.begin());
  }
  if (std::cmp_less(size, bytes.capacity())) bytes = {};  // a smaller one would keep the memory
  bytes.resize(static_cast<size_t>(size));
  file_.read_at(header_bytes_[static_cast<size_t>(shard_index)] + begin, bytes);
  require(xxh64(bytes) == shard.hashes[static_cast<size_t>(index)], ExitCode::data, file_.path().string(), ": chunk ", index, " (bytes ",
          begin, " to ", begin + static_cast<int64_t>(bytes.size()), ") is damaged");
  kept_bytes_ += static_cast<int64_t>(bytes.size());
  kept_.push_back({.shard = shard_index, .index = index, .bytes = std::move(bytes)});
  return kept_.back().bytes;
}

void CheckpointReader::read_bytes(int64_t shard, int64_t offset, std::span<std::byte> out) {
  const int64_t chunk_bytes = manifest_.shards[static_cast<size_t>(shard)].chunk_bytes;
  while (!out.empty()) {
    const auto source = chunk(shard, offset / chunk_bytes).subspan(static_cast<size_t>(offset % chunk_bytes));
    const size_t count = std::min(source.size(), out.size());
    std::memcpy(out.data(), source.data(), count);
    out = out.subspan(count);
    offset += static_cast<int64_t>(count);
  }
}

void CheckpointReader::read_piece(const ManifestTensor& tensor, const Piece& piece, const Box& box, std::span<std::byte> out) {
  Box part = box;  // the intersection
  for (size_t d = 0; d < part.size.size(); ++d) {
    part.start[d] = std::max(piece.box.start[d], box.start[d]);
    part.size[d] = std::min(piece.box.start[d] + piece.box.size[d], box.start[d] + box.size[d]) - part.start[d];
    if (part.size[d] <= 0) return;
  }
  // A run over the last dimensions that span the whole of both boxes, and over the one before them, is contiguous in both.
  const int64_t width = dtype_bytes(tensor.dtype);
  int64_t run = width;
  size_t outer = part.size.size();
  while (outer > 0) {
    run *= part.size[--outer];
    if (part.size[outer] != piece.box.size[outer] || part.size[outer] != box.size[outer]) break;
  }
  std::vector<int64_t> point = part.start;
  for (size_t d = outer;; d = outer) {
    const int64_t from = piece.offset + position_in(piece.box, point) * width, to = position_in(box, point) * width;
    read_bytes(piece.shard, from, out.subspan(static_cast<size_t>(to), static_cast<size_t>(run)));
    for (; d > 0 && ++point[d - 1] == part.start[d - 1] + part.size[d - 1]; --d) point[d - 1] = part.start[d - 1];
    if (d == 0) return;
  }
}

void CheckpointReader::read(const std::string& name, const Box& box, std::span<std::byte> out) {
  const ManifestTensor& entry = tensor(name);
  require(box.start.size() == entry.shape.size() && box.size.size() == entry.shape.size(), name,
          ": the box has another number of dimensions than the tensor");
  for (size_t d = 0; d < entry.shape.size(); ++d)
    require(box.start[d] >= 0 && box.size[d] >= 0 && box.start[d] <= entry.shape[d] - box.size[d], name, ": the box at ",
            shape_text(box.start), " of size ", shape_text(box.size), " is not inside ", shape_text(entry.shape));
  require(std::cmp_equal(out.size(), box.elements() * dtype_bytes(entry.dtype)), name, ": ", out.size(), " bytes for a box of size ",
          shape_text(box.size), " of ", entry.dtype);
  reading([&] {
    for (const Piece& piece : entry.pieces) read_piece(entry, piece, box, out);
  });
}

void CheckpointReader::read(const std::string& name, std::span<std::byte> out) { read(name, whole_box(tensor(name).shape), out); }

void CheckpointReader::verify() {
  kept_.clear();
  kept_bytes_ = 0;
  reading([&] {
    for (size_t s = 0; s < manifest_.shards.size(); ++s)
      for (size_t c = 0; c < manifest_.shards[s].hashes.size(); ++c) chunk(static_cast<int64_t>(s), static_cast<int64_t>(c));
  });
}

namespace {

// The values of all codes under a scale. Those of a scale are computed when it is asked for first: a tensor has few scales.
template <class E>
class DecodedCodes {
 public:
  static constexpr bool kPacked = E::codes_per_byte == 2;

  explicit DecodedCodes(CodeRule rule) : rule_(rule), values_(kScales * kCodes) {}

  const float* of(uint8_t scale) {
    float* const values = values_.data() + scale * kCodes;
    if (!known_[scale]) {
      for (size_t code = 0; code < kCodes; ++code)
        values[code] = std::bit_cast<float>(decode_in_block<E>(static_cast<uint8_t>(code), scale, rule_));
      known_[scale] = true;
    }
    return values;
  }

 private:
  static constexpr size_t kScales = 256, kCodes = kPacked ? 16 : 256;
  CodeRule rule_;
  std::vector<float> values_;
  std::array<bool, kScales> known_{};
};

// Decodes columns [first, first + out.size()) of a row, given all its codes and scales.
template <class E>
void decode_row(std::span<const std::byte> codes, std::span<const std::byte> scales, int64_t block, int64_t first, std::span<float> out,
                DecodedCodes<E>& values) {
  const int64_t end = first + static_cast<int64_t>(out.size());
  for (int64_t column = first; column < end;) {
    const int64_t stop = std::min(end, (column / block + 1) * block);
    const float* const of = values.of(std::to_integer<uint8_t>(scales[static_cast<size_t>(column / block)]));
    for (; column < stop; ++column) {
      const auto byte = std::to_integer<uint8_t>(codes[static_cast<size_t>(DecodedCodes<E>::kPacked ? column / 2 : column)]);
      const unsigned code = !DecodedCodes<E>::kPacked ? byte : column % 2 == 0 ? byte & 0xFU : byte >> 4U;
      out[static_cast<size_t>(column - first)] = of[code];
    }
  }
}

}  // namespace

Quantization packed_form(Format format) {
  if (format == Format::nvfp4) return {.format = format, .block_rows = 1, .block_cols = kNvfp4Block, .rule = ScaleRule::nearest};
  return {.format = format, .block_rows = 1, .block_cols = kPackedBlock, .rule = ScaleRule::rceil};
}

int64_t code_bytes(const WeightForm& form) { return is_four_bit(form.codes.format) ? form.columns / 2 : form.columns; }
int64_t scale_bytes(const WeightForm& form) { return ceil_div(form.columns, form.codes.block_cols); }

void TensorReader::decode(const std::string& parameter, const WeightForm& kept, const Box& box, std::span<float> out) {
  const int64_t rows = box.size[0], first = box.start[1], wanted = box.size[1], height = kept.codes.block_rows,
                block = kept.codes.block_cols;
  const int64_t above = box.start[0] % height, begin = box.start[0] - above, read = above + rows;  // from the start of a block
  std::vector<std::byte> codes(static_cast<size_t>(read * code_bytes(kept)));
  std::vector<std::byte> scales(static_cast<size_t>((read + height - 1) / height * scale_bytes(kept)));
  read_codes(parameter, begin, begin + read, codes, scales);
  with_any_element(kept.codes.format, [&]<class E>() {
    constexpr int64_t kRows = 64;
    parallel_for(rows, kRows, [&](int64_t from, int64_t to) {
      DecodedCodes<E> values(kept.codes.code_rule());
      for (int64_t row = from; row < to; ++row)
        decode_row(std::span(codes).subspan(static_cast<size_t>((above + row) * code_bytes(kept))),
                   std::span(scales).subspan(static_cast<size_t>((above + row) / height * scale_bytes(kept))), block, first,
                   out.subspan(static_cast<size_t>(row * wanted), static_cast<size_t>(wanted)), values);
    });
  });
}

void TensorReader::read_fp32(const std::string& parameter, const Box& box, std::span<float> out) {
  const WeightForm kept = form(parameter);
  if (kept.codes) return decode(parameter, kept, box, out);
  if (kept.dtype == Dtype::f32) return read(parameter, box, std::as_writable_bytes(out));
  require(kept.dtype == Dtype::bf16, parameter, " of ", where(), " is ", kept.dtype, ", expected fp32 or bf16");
  // Reads into the second half of the output, so that it can be widened from the front.
  const std::span<std::byte> narrow = std::as_writable_bytes(out).subspan(out.size() * sizeof(bf16));
  read(parameter, box, narrow);
  for (size_t i = 0; i < out.size(); ++i) {
    bf16 value;
    std::copy_n(narrow.begin() + static_cast<std::ptrdiff_t>(i * sizeof value), sizeof value,
                std::as_writable_bytes(std::span(&value, 1)).begin());
    out[i] = to_float(value);
  }
}

void CheckpointWeights::read_codes(const std::string& parameter, int64_t, int64_t, std::span<std::byte>, std::span<std::byte>) {
  fail(ExitCode::internal, parameter, ": a checkpoint holds masters, no codes");
}

Box box_of(const ParameterShard& shard, const ParameterShard::Chunk& chunk) {
  Box box = whole_box(dimensions(shard.shape()));
  box.start.front() = chunk.row;
  box.size.front() = chunk.end - chunk.begin;
  if (box.start.size() > 1) box.start.back() = chunk.column;
  return box;
}

std::string read_shard(TensorReader& weights, const ParameterShard& shard, const Tensor& master) {
  std::string bad;
  for (const ParameterShard::Chunk& chunk : shard.chunks()) {
    const Tensor rows = master.slice(chunk.begin - shard.begin, chunk.end - shard.begin);
    fill_from_host(rows, [&](std::span<std::byte> bytes) {
      const std::span<float> values(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float));
      weights.read_fp32(shard.of->name, box_of(shard, chunk), values);
      if (bad.empty()) bad = nonfinite_read(shard, (chunk.begin - shard.begin) * (rows.elements() / rows.dim(0)), values);
    });
  }
  master.device().run(Fill{.out = master.slice(shard.stored_end() - shard.begin, master.dim(0)), .value = 0.0});
  return bad;
}

std::vector<ParameterShard> chunks_of(const ParameterShard& shard) {
  constexpr int64_t kElements = 4 << 20, kRowBlock = 128;
  std::vector<ParameterShard> chunks;
  const int64_t columns = shard.of->shape.with_dim0(1).elements(), rows = std::max<int64_t>(1, kElements / columns / kRowBlock) * kRowBlock;
  for (int64_t row = shard.begin; row < shard.end; row += rows)
    chunks.push_back({.of = shard.of, .begin = row, .end = std::min(shard.end, row + rows)});
  return chunks;
}

std::vector<ParameterShard> chunks_of(ParameterSet& parameters) {
  std::vector<ParameterShard> chunks;
  for (const ParameterShard& whole : parameters.whole_shards()) std::ranges::move(chunks_of(whole), std::back_inserter(chunks));
  return chunks;
}

}  // namespace mantissa
