// Accepted: the boxes of a manifest tile its tensors, and it is read as it was written; all tokens of a data file can be read or are named.
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "base/hash.h"
#include "checkpoint/checkpoint_manifest.h"
#include "data/token_file.h"
#include "io/safetensors.h"
#include "targets.h"

namespace mantissa::fuzz {
namespace {

void read_tokens(const TokenFile& file, int64_t vocab_size) {
  const int64_t count = std::min<int64_t>(file.tokens(), 1 << 16);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::vector<uint8_t> marks(ids.size());
  for (const int64_t begin : {int64_t{0}, file.tokens() - count}) {
    if (!accepted([&] { file.read(begin, count, ids.data(), marks.data()); })) continue;
    for (const int32_t id : ids) promise(id >= 0 && id < vocab_size, "an id is below the vocabulary");
  }
}

}  // namespace

MemoryFile::MemoryFile(std::string_view content) : fd_(::memfd_create("fuzz", MFD_CLOEXEC)), path_("/proc/self/fd/" + std::to_string(fd_)) {
  promise(fd_ >= 0, "a file in memory");
  while (!content.empty()) {
    const ssize_t written = ::write(fd_, content.data(), content.size());
    promise(written > 0, "a file in memory");
    content.remove_prefix(static_cast<size_t>(written));
  }
}
MemoryFile::~MemoryFile() { ::close(fd_); }

ScratchFolder::ScratchFolder() {
  std::string name =
      (std::filesystem::exists("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path().string()) + "/mantissa-fuzz-XXXXXX";
  promise(::mkdtemp(name.data()) != nullptr, "a temporary folder");
  path = name;
}
ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}
std::string ScratchFolder::file(const char* name, std::string_view content) const {
  const std::string full = (path / name).string();
  std::ofstream(full, std::ios::binary | std::ios::trunc).write(content.data(), static_cast<std::streamsize>(content.size()));
  return full;
}

bool manifest(std::string_view input) {
  std::string content(input);
  content += "\n";
  content += xxh64(content).text() + "\n";
  Manifest read;
  if (!accepted([&] { read = parse_manifest(content, "manifest.json"); })) return false;
  for (const ManifestTensor& tensor : read.tensors) {
    int64_t covered = 0;
    for (const Piece& piece : tensor.pieces) {
      promise(piece.shard >= 0 && static_cast<size_t>(piece.shard) < read.shards.size(), "a piece is in a shard");
      const int64_t bytes = piece.box.elements() * dtype_bytes(tensor.dtype);
      promise(piece.offset >= 0 && bytes <= read.shards[static_cast<size_t>(piece.shard)].bytes - piece.offset,
              "a piece is inside its shard");
      covered += piece.box.elements();
    }
    promise(covered == whole_box(tensor.shape).elements(), "pieces cover a tensor");
  }
  for (const Shard& shard : read.shards)
    promise(shard.file.find('/') == std::string::npos && shard.file.front() != '.', "a shard is beside the manifest");
  const std::vector<ShardPieces> shards = shard_pieces(read);
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string header = shard_header(shards[i]);
    parse_safetensors_header(std::string_view(header).substr(8), static_cast<int64_t>(header.size()) + read.shards[i].bytes, "shard");
  }
  const std::string again = format_manifest(read);
  promise(format_manifest(parse_manifest(again, "again")) == again, "a manifest is read as it was written");
  return true;
}

bool token_file(std::string_view input) {
  static const ScratchFolder scratch;
  static constexpr DataFormat formats[] = {DataFormat::automatic, DataFormat::text, DataFormat::jsonl, DataFormat::megatron,
                                           DataFormat::nanogpt,   DataFormat::llmc, DataFormat::llmq};
  static const Tokenizer bytes = Tokenizer::bytes();
  const size_t choice = take_byte(input);
  const size_t idx_bytes = take_byte(input);
  const std::string_view idx = input.substr(0, idx_bytes);
  const std::string path = scratch.file("a.bin", input.substr(idx.size()));
  if (idx.empty()) {
    std::filesystem::remove(scratch.path / "a.idx");
  } else {
    scratch.file("a.idx", idx);
  }
  const TokenFileOptions options{.format = formats[choice % std::size(formats)],
                                 .dtype = choice & 0x40 ? TokenDtype::u32 : TokenDtype::u16,
                                 .tokenizer = &bytes,
                                 .vocab_size = 50'257,
                                 .eod_id = choice & 0x80 ? std::optional<int32_t>(50'256) : std::nullopt,
                                 .append_eod = (choice & 0x80) != 0};
  return accepted([&] { read_tokens(TokenFile(path, options), options.vocab_size); });
}

}  // namespace mantissa::fuzz
