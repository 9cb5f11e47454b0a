#include "tools/report/read_progress.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <fstream>
#include <functional>
#include <mutex>
#include <set>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_search.h"
#include "checkpoint/saved_model.h"
#include "hf/export.h"
#include "hf/hf_weights.h"
#include "tools/console.h"

namespace mantissa::tools {
namespace {

using Clock = std::chrono::steady_clock;

void draw(const std::string& line) { std::fputs(drawn_over(line).c_str(), stderr); }

std::string time_left(double share, double seconds) {
  return share > 0.0 ? " | " + duration_text(seconds * (1.0 - share) / share) + " left" : "";
}

void draw_until(const std::stop_token& stop, int64_t bytes, int64_t before) {
  const auto start = Clock::now();
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock lock(mutex);
  bool drawn = false;
  for (auto wait = std::chrono::milliseconds(2000); !stopped.wait_for(lock, stop, wait, [&] { return stop.stop_requested(); });) {
    const std::optional<int64_t> now = bytes_read();
    if (!now) return;
    draw(read_progress_line(*now - before, bytes, std::chrono::duration<double>(Clock::now() - start).count()));
    drawn = true;
    wait = std::chrono::milliseconds(200);
  }
  if (drawn) draw("");
}

int64_t size_of(const std::filesystem::path& file) {
  std::error_code unknown;
  const auto size = std::filesystem::file_size(file, unknown);
  return unknown ? 0 : static_cast<int64_t>(size);
}

bool is_weight(const std::string& tensor) { return !tensor.starts_with("m.") && !tensor.starts_with("v."); }

// A checkpoint is read in whole chunks, of which the latest is kept.
struct ReadChunks {
  int64_t bytes = 0;
  std::pair<int64_t, int64_t> latest{-1, -1};  // shard, chunk

  void read(int64_t number, const Shard& shard, int64_t chunk) {
    if (latest == std::pair{number, chunk}) return;
    bytes += std::min(shard.chunk_bytes, shard.bytes - chunk * shard.chunk_bytes);
    latest = {number, chunk};
  }
};

// Counts the bytes of the chunks that a reader of these tensors reads, in their order.
int64_t chunk_bytes(const CheckpointReader& reader, const std::function<bool(const std::string&)>& read) {
  ReadChunks chunks;
  for (const ManifestTensor& tensor : reader.manifest().tensors) {
    if (!read(tensor.name)) continue;
    for (const Piece& piece : tensor.pieces) {
      const Shard& shard = reader.manifest().shards.at(static_cast<size_t>(piece.shard));
      const int64_t end = piece.offset + piece.box.elements() * dtype_bytes(tensor.dtype), size = shard.chunk_bytes;
      for (int64_t chunk = piece.offset / size; chunk * size < end; ++chunk) chunks.read(piece.shard, shard, chunk);
    }
  }
  return chunks.bytes;
}

}  // namespace

ReadProgress::ReadProgress(int64_t bytes) {
  const std::optional<int64_t> before = bytes_read();
  if (bytes <= 0 || !before || !draws_progress()) return;
  drawing_ = std::jthread([bytes, before](const std::stop_token& stop) { draw_until(stop, bytes, *before); });
}

CountProgress::CountProgress(std::string name, int64_t count, const ProgressWaits& waits)
    : name_(std::move(name)), count_(count), waits_(waits), draws_(draws_progress()), next_(draws_ ? 2.0 : waits.first) {}

CountProgress::~CountProgress() {
  if (drawn_) draw("");
}

void CountProgress::begin_next() {
  ++done_;
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  if (count_ == 0 || done_ == 0 || seconds < next_) return;
  if (draws_) {
    draw(read_progress_line(done_, count_, seconds));
    drawn_ = true;
  } else {
    const double share = static_cast<double>(done_) / static_cast<double>(count_);
    std::fprintf(stderr, "%s: %d%%%s\n", name_.c_str(), static_cast<int>(100 * share), time_left(share, seconds).c_str());
  }
  next_ = seconds + (draws_ ? 0.2 : waits_.next);
}

std::string read_progress_line(int64_t done, int64_t bytes, double seconds) {
  const double share = std::min(0.99, static_cast<double>(done) / static_cast<double>(bytes));  // bytes to come may have been estimated
  return progress_bar(share) + time_left(share, seconds);
}

std::optional<int64_t> bytes_read() {
  std::ifstream counters("/proc/self/io");
  int64_t bytes = 0;
  for (std::string name; counters >> name >> bytes;) {
    if (name == "rchar:") return bytes;
  }
  return std::nullopt;
}

// Counts everything, and again the masters whose codes are made.
int64_t bytes_to_verify(const CheckpointReader& reader) {
  std::set<std::string> masters;
  if (reader.manifest().plan != "null") {
    const SavedModel saved = saved_model(reader);
    for (const ModulePrecision& module : saved.plan.modules()) {
      if (module.resident_codes()) masters.insert("master." + module.module.path + ".weight");
    }
  }
  return reader.bytes() + chunk_bytes(reader, [&](const std::string& tensor) { return masters.contains(tensor); });
}

// Counts the weights twice, to write and to compare, and twice what was written: its bytes and its values.
int64_t bytes_to_export(const std::filesystem::path& from, const ExportOptions& options, const std::vector<std::string>& precision) {
  return 2 * (bytes_of_weights(from) +
              ModelExport(from, options, make_backend("cpu"), precision).summary().bytes);  // the export computes nothing here
}

int64_t bytes_to_compare(const std::filesystem::path& folder, const std::filesystem::path& against) {
  return bytes_of_folder(folder) + bytes_of_weights(against);
}

int64_t bytes_of_weights(const std::filesystem::path& model) {
  return is_published_model(model) ? bytes_of_folder(model) : chunk_bytes(open_checkpoint(model), is_weight);
}

int64_t bytes_of_folder(const std::filesystem::path& folder) {
  std::error_code error;
  if (std::filesystem::is_regular_file(folder, error)) return size_of(folder);
  int64_t bytes = 0;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    bytes += size_of(entry->path());
  return bytes;
}

// Counts once to tell the format, once to encode; characters are collected in as many passes.
int64_t bytes_to_tokenize(const std::vector<std::string>& paths, bool collects_characters) {
  int64_t bytes = 0;
  for (const std::string& path : paths) bytes += size_of(path);
  return bytes * (collects_characters ? 4 : 2);
}

}  // namespace mantissa::tools
