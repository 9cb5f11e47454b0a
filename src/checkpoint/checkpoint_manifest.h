// The table of contents of a checkpoint, manifest.json: one top-level key a line, then, as the last line, the xxh64 (16 hex digits) of all
// bytes before that line.
//
//   {
//   "format_version": 2, "step": 1000, "samples": 64000,
//   "config": {…}, "tokenizer": {…}, "plan": {…} or null, "layout": {"tensor": 1, "data": 1, "expert": 1},
//   "fingerprints": {"config": "…", "dataset": "…", "build": "…"}, "state": {…},
//   "shards": [{"file": "shard-00000.safetensors", "bytes": 9000000, "chunk_bytes": 4194304, "xxh64": ["…", …]}],
//   "tensors": [{"name": "…", "dtype": "fp32", "shape": [50257, 768],
//                "pieces": [{"shard": 0, "start": [0, 0], "size": [50257, 768], "offset": 0}]}]
//   }
//   0123456789abcdef
//
// A piece is a box of the tensor in global coordinates, stored row-major at a byte offset of a shard. The pieces of a tensor tile it
// exactly, and the pieces in a shard tile the shard exactly, so any layout of ranks can read what any other wrote. A shard is a file in the
// safetensors format: bytes, offsets and hashes count from the end of its header, which follows from the pieces (shard_header()). There a
// piece has the name of its tensor, or, where it is a part of one, "NAME[0:128,0:64]".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.h"
#include "mantissa/json/fields.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {

struct Box {
  std::vector<int64_t> start, size;  // one entry per dimension
  int64_t elements() const;
  bool operator==(const Box& other) const = default;
};

std::vector<int64_t> dimensions(const Shape& shape);
Box whole_box(const std::vector<int64_t>& shape);
std::string shape_text(const std::vector<int64_t>& shape);  // "[2, 3]"

struct Piece {
  int64_t shard = 0;
  Box box;
  int64_t offset = 0;  // bytes

  void fields(auto& v) {
    v("offset", offset, limits::not_negative);
    v("shard", shard, limits::not_negative);
    v("size", box.size, limits::not_negative);
    v("start", box.start, limits::not_negative);
  }
  bool operator==(const Piece& other) const = default;
};

// Names any dtype; a config takes few of them.
struct NamedDtype {
  static constexpr const char* kTextForm = "one of fp32, bf16, fp64, i32, u8";
  Dtype dtype = Dtype::f32;

  NamedDtype() = default;
  NamedDtype(Dtype value) : dtype(value) {}
  operator Dtype() const { return dtype; }
  std::string text() const { return dtype_name(dtype); }
  static std::optional<NamedDtype> parse(const std::string& name);
};

struct ManifestTensor {
  std::string name;
  NamedDtype dtype;
  std::vector<int64_t> shape;
  std::vector<Piece> pieces;

  void fields(auto& v) {
    v("dtype", dtype);
    v("name", name);
    v("pieces", pieces);
    v("shape", shape, limits::not_negative);
  }
  bool operator==(const ManifestTensor& other) const = default;
};

struct Shard {
  std::string file;   // a plain file name in the checkpoint's folder
  int64_t bytes = 0;  // behind its header
  int64_t chunk_bytes = 0;
  std::vector<Hash64> hashes;  // one for each chunk

  void fields(auto& v) {
    v("bytes", bytes, limits::not_negative);
    v("chunk_bytes", chunk_bytes, limits::not_negative);
    v("file", file);
    v("xxh64", hashes);
  }
  bool operator==(const Shard& other) const = default;
};

struct Fingerprints {
  std::string build = {}, config = {}, dataset = {};

  void fields(auto& v) {
    v("build", build);
    v("config", config);
    v("dataset", dataset);
  }
};

// Facts that a checkpoint holds beside its tensors.
struct CheckpointHead {
  int64_t step = 0;
  int64_t samples = 0;
  // These are JSON texts. NaN has no JSON form, so what may be NaN is stored as bits.
  std::string config = "null", tokenizer = "null", plan = "null", layout = R"({"data":1,"expert":1,"tensor":1})", state = "null";
  Fingerprints fingerprints = {};

  void fields(auto& v) {
    v("step", step, limits::not_negative);
    v("samples", samples, limits::not_negative);
    v("config", config, limits::json);
    v("tokenizer", tokenizer, limits::json);
    v("plan", plan, limits::json);
    v("layout", layout, limits::json);
    v("fingerprints", fingerprints);
    v("state", state, limits::json);
  }
};

struct Manifest : CheckpointHead {
  static constexpr int64_t kFormatVersion = 2;  // 1 had shards without headers
  static constexpr int64_t kMaxBytes = 100'000'000;
  static constexpr int64_t kMaxChunkBytes = 64 << 20;
  static constexpr size_t kMaxTensors = 1'000'000, kMaxPieces = 4'096, kMaxShards = 100'000, kMaxNameBytes = 768;

  int64_t format_version = kFormatVersion;
  std::vector<Shard> shards;
  std::vector<ManifestTensor> tensors;

  int64_t bytes() const;  // bytes of all shards, without headers

  void fields(auto& v) {
    v("format_version", format_version);
    CheckpointHead::fields(v);
    v("shards", shards);
    v("tensors", tensors);
  }
};
extern template const FieldType& detail::field_type<Manifest>();

// Lists the pieces in each shard of a manifest. They point into the argument.
struct ShardPiece {
  const ManifestTensor* tensor;
  const Piece* piece;
};
using ShardPieces = std::vector<ShardPiece>;
std::vector<ShardPieces> shard_pieces(const Manifest& manifest);
// Returns the first bytes of a shard with these pieces: the header of a safetensors file.
std::string shard_header(ShardPieces pieces);

// Throws Error(code) unless counts, names, boxes, offsets and chunks fit together as said above, within the caps.
void check_manifest(const Manifest& manifest, const std::string& source, ExitCode code);

// Write and read the file's text. Parsing verifies the hash first, then every field, and throws Error(data) naming `source` and the field;
// memory and time are bounded by the size of the text. Formatting throws Error(internal) for texts that are not JSON and for what
// check_manifest refuses, because it could not be read again.
std::string format_manifest(const Manifest& manifest);
Manifest parse_manifest(std::string_view content, const std::string& source);

// Returns the 16 digits of the last line, which the file `latest` repeats. The content must have passed parse_manifest or come from
// format_manifest.
std::string manifest_hash(std::string_view content);

}  // namespace mantissa
