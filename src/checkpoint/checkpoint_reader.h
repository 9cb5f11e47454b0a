// Reads one checkpoint folder. Only verified content leaves this class: the manifest is checked by its own hash and rules, the shards by
// their sizes and headers, and every byte of content by the hash of its chunk while it is read. It needs no GPU.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/file.h"
#include "checkpoint/checkpoint_manifest.h"
#include "mantissa/config/run_config.h"
#include "mantissa/tensor/quantized_tensor.h"
#include "nn/parameter.h"

namespace mantissa {

// Thrown if the checkpoint is torn or changed; the message names file and, where it applies, chunk. A search for a good one skips it.
class CheckpointDamage : public Error {
 public:
  explicit CheckpointDamage(const std::string& message) : Error(ExitCode::data, message) {}
};

// Thrown if the system could not read a file that may be intact: a second try may succeed.
class CheckpointUnread : public CheckpointDamage {
 public:
  using CheckpointDamage::CheckpointDamage;
};

// A reader is not for use by several threads at once.
class CheckpointReader {
 public:
  // Throws CheckpointDamage if the manifest, a header or a size is wrong, Error(usage) if there is no such folder.
  explicit CheckpointReader(const std::filesystem::path& directory);

  const std::filesystem::path& directory() const { return directory_; }
  const Manifest& manifest() const { return manifest_; }
  const std::string& hash() const { return hash_; }  // hash of the manifest, as in the file `latest`
  int64_t bytes() const { return manifest_.bytes(); }
  // Returns the config that the checkpoint was made with, parsed once, and its place for messages. Throws Error(data).
  const RunConfig& config() const;
  std::string config_source() const { return (directory_ / "manifest.json").string() + " (config)"; }

  bool has(const std::string& name) const { return index_.contains(name); }
  // Throws Error(usage) if the checkpoint has no such tensor: it is of another model.
  const ManifestTensor& tensor(const std::string& name) const;

  // Reads a box, or the whole tensor, row-major into out, which has exactly the right number of bytes. Throws CheckpointDamage if a byte
  // that is needed cannot be trusted; out is then unspecified.
  void read(const std::string& name, const Box& box, std::span<std::byte> out);
  void read(const std::string& name, std::span<std::byte> out);

  // Reads and hashes everything, also what was read before.
  void verify();

 private:
  struct KeptChunk {
    int64_t shard, index;
    std::vector<std::byte> bytes;
  };

  void check_shards();
  std::span<const std::byte> chunk(int64_t shard, int64_t index);
  void read_bytes(int64_t shard, int64_t offset, std::span<std::byte> out);
  void read_piece(const ManifestTensor& tensor, const Piece& piece, const Box& box, std::span<std::byte> out);

  std::filesystem::path directory_;
  Manifest manifest_;
  mutable std::optional<RunConfig> config_;  // none: nobody asked yet
  std::string hash_;
  std::unordered_map<std::string, size_t> index_;  // name -> position in manifest_.tensors
  std::vector<int64_t> header_bytes_;              // by shard
  File file_;                                      // shard number open_shard_
  int64_t open_shard_ = -1;
  std::vector<KeptChunk> kept_;  // verified, in the order in which they were last asked for
  int64_t kept_bytes_ = 0;       // bytes of all kept chunks
};

// Reads the weights of a model from wherever they are: the checkpoint of a run, or a folder of Hugging Face's form (hf/hf_weights.h).

// Number of values for each scale of packed weights, along a row.
inline constexpr int64_t kPackedBlock = 32;

// Form in which a parameter is kept: as values or, in a file that is packed, as codes.
struct WeightForm {
  Dtype dtype = Dtype::f32;  // dtype of its values
  bool master = false;       // a run's master: fp32, whatever forward reads
  Quantization codes = {};   // in blocks of [1, 32], of NVFP4 of [1, 16], or in tiles
  int64_t columns = 0;       // number of columns of codes
  bool products = false;     // values are codes times scales, which are any numbers of fp32
};

// Reads parameters by their names in the model, whole, also those that ranks share. Throws Error(data) for damage, which names file and
// tensor. Not for use by several threads at once.
class TensorReader {
 public:
  TensorReader() = default;
  virtual ~TensorReader() = default;
  TensorReader(const TensorReader&) = delete;
  TensorReader& operator=(const TensorReader&) = delete;

  virtual std::string where() const = 0;  // for messages
  virtual bool has(const std::string& parameter) const = 0;
  virtual WeightForm form(const std::string& parameter) const = 0;
  // Read a box of values, row-major, in form().dtype; of codes whole rows [begin, end), E2M1 two in a byte, and the scales of their blocks,
  // which begin with row `begin`. An empty span is not read.
  virtual void read(const std::string& parameter, const Box& box, std::span<std::byte> out) = 0;
  virtual void read_codes(const std::string& parameter, int64_t begin, int64_t end, std::span<std::byte> codes,
                          std::span<std::byte> scales) = 0;

  // Throws Error(data) if the files changed between two reads. Checkpoints need no such check, because every read verifies hashes.
  virtual void require_unchanged() {}

  // Reads values in fp32, which is exact.
  void read_fp32(const std::string& parameter, const Box& box, std::span<float> out);

 private:
  void decode(const std::string& parameter, const WeightForm& kept, const Box& box, std::span<float> out);
};

// Returns the form of a file's codes. A file names no rule: its codes are read as their format defines them, -0 too. Quantizing their
// values by rceil keeps each of them. Of NVFP4 the scale of the tensor is 1.
Quantization packed_form(Format format);

// Return the bytes of a row of codes, and of a row of its scales, which are those of block_rows rows.
int64_t code_bytes(const WeightForm& form);
int64_t scale_bytes(const WeightForm& form);

// Reads the masters "master.NAME" of a checkpoint, which are fp32.
class CheckpointWeights : public TensorReader {
 public:
  // The reader must outlive this.
  explicit CheckpointWeights(CheckpointReader& reader) : reader_(reader) {}
  std::string where() const override { return reader_.directory().string(); }
  bool has(const std::string& parameter) const override { return reader_.has(name_of(parameter)); }
  WeightForm form(const std::string&) const override { return {.master = true}; }
  void read(const std::string& parameter, const Box& box, std::span<std::byte> out) override { reader_.read(name_of(parameter), box, out); }
  void read_codes(const std::string& parameter, int64_t begin, int64_t end, std::span<std::byte> codes,
                  std::span<std::byte> scales) override;

 private:
  static std::string name_of(const std::string& parameter) { return "master." + parameter; }
  CheckpointReader& reader_;
};

// Reads shards of parameters from a checkpoint or a folder.

// Returns the box of a shard's chunk in the whole tensor.
Box box_of(const ParameterShard& shard, const ParameterShard::Chunk& chunk);

// Reads a master in fp32; padding becomes zeros. Returns nonfinite_read() of its first element that is NaN or Inf.
std::string read_shard(TensorReader& weights, const ParameterShard& shard, const Tensor& master);

// Divides a shard, or all parameters, into shards whose masters fit into some megabytes.
std::vector<ParameterShard> chunks_of(const ParameterShard& shard);
std::vector<ParameterShard> chunks_of(ParameterSet& parameters);

}  // namespace mantissa
