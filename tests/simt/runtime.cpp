#include "gpu/runtime.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "lane_thread.h"
#include "mantissa/base/error.h"
#include "simt/executor.h"

namespace mantissa::simt {
namespace {

constexpr int64_t kMemory = int64_t{8} << 30;

// Sizes of the blocks that are taken.
struct Blocks {
  std::mutex mutex;
  std::map<std::byte*, int64_t> sizes;
  int64_t taken = 0;
};
Blocks& blocks_taken() {
  static Blocks blocks;
  return blocks;
}

}  // namespace

bool stands_for_a_chip() { return std::getenv("MANTISSA_SIMT_ARCHITECTURE") != nullptr; }
int architecture() {
  constexpr int kOldest = 80;
  const char* const given = std::getenv("MANTISSA_SIMT_ARCHITECTURE");
  return given ? static_cast<int>(std::strtol(given, nullptr, 10)) : kOldest;
}
Gpu& described_gpu() {
  static Gpu gpu{.name = "host executor", .memory = kMemory, .free = kMemory, .place = 1};
  return gpu;
}

int& current_device() {
  thread_local int device = 0;
  return device;
}

}  // namespace mantissa::simt

namespace mantissa::gpu {
namespace {

constexpr int kPoison = 0xff;  // NaN in all formats

uint32_t next_seed() {
  static std::atomic<uint32_t> drawn = [] {
    const char* const given = std::getenv("MANTISSA_SIMT_SEED");
    return given ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10)) * 1'000'003U + 1 : 1U;
  }();
  return drawn++;
}

struct Point {
  std::shared_ptr<const test::LanePoint> at;
  std::shared_ptr<Stream> stream;
};
const Point& point_of(const Event& event) { return *static_cast<const Point*>(event.get()); }

// Memory ends where it was asked to, so that AddressSanitizer knows the end.
std::byte* aligned(int64_t bytes) {
  void* memory = nullptr;
  return posix_memalign(&memory, 256, static_cast<size_t>(bytes)) == 0 ? static_cast<std::byte*>(memory) : nullptr;
}

}  // namespace

class Stream : public test::LaneThread, public std::enable_shared_from_this<Stream> {
 public:
  Stream() : LaneThread(next_seed()) {
    const std::lock_guard lock(all().mutex);
    all().streams.insert(this);
  }
  ~Stream() {
    const std::lock_guard lock(all().mutex);
    all().streams.erase(this);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  // Frees memory when no stream can use it any more.
  static void free_behind_all(std::byte* memory) {
    const std::shared_ptr<std::byte> held(memory, std::free);
    const std::lock_guard lock(all().mutex);
    for (Stream* each : all().streams) each->submit([held] {});
  }

 private:
  struct All {
    std::mutex mutex;
    std::set<Stream*> streams;
  };
  static All& all() {
    static All all;
    return all;
  }
};

// Nobody takes an executor for a GPU who has not asked for it by name.
Gpus find_gpus() { return {.usable = false, .text = "an executor of the host in place of a GPU"}; }
int count_gpus() { return 1; }

std::optional<Gpu> find_gpu(int index) { return index == 0 ? std::optional(simt::described_gpu()) : std::nullopt; }

Facts open_device(int index) {
  require(index == 0, ExitCode::environment, "the executor has one device, not a number ", index);
  return {.name = "host executor", .memory = simt::kMemory, .architecture = simt::architecture()};
}

int current_device() { return simt::current_device(); }

std::byte* take_memory(int64_t bytes) {
  simt::Blocks& all = simt::blocks_taken();
  const std::lock_guard lock(all.mutex);
  if (bytes > simt::described_gpu().memory - all.taken) return nullptr;
  std::byte* const memory = aligned(bytes);
  if (memory == nullptr) return nullptr;
  std::memset(memory, kPoison, static_cast<size_t>(bytes));
  all.sizes[memory] = bytes, all.taken += bytes;
  return memory;
}
void give_memory(std::byte* memory) noexcept {
  simt::Blocks& all = simt::blocks_taken();
  const std::lock_guard lock(all.mutex);
  const auto found = all.sizes.find(memory);
  if (found == all.sizes.end()) std::abort();
  all.taken -= found->second;
  all.sizes.erase(found);
  Stream::free_behind_all(memory);
}
std::byte* take_staging(int64_t bytes) { return bytes > simt::kMemory ? nullptr : aligned(bytes); }
void give_staging(std::byte* memory) noexcept { std::free(memory); }

std::shared_ptr<Stream> make_stream(Lane) { return std::make_shared<Stream>(); }
void* handle_of(Stream& stream) { return &stream; }

// Throws what has failed before, as on a chip: the next call reports it.
void copy_to_device(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes) {
  stream.rethrow();
  stream.submit([=] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
}
void copy_to_host(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes) {
  stream.rethrow();
  std::memset(to, kPoison, static_cast<size_t>(bytes));
  stream.submit([=] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
}
void copy_on_device(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes) {
  stream.submit([=] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
}
void discard(Stream& stream, std::byte* memory, int64_t bytes) {
  stream.submit([=] { std::memset(memory, kPoison, static_cast<size_t>(bytes)); });
}

Event record(Stream& stream) {
  stream.rethrow();
  return std::make_shared<const Point>(Point{.at = stream.mark(), .stream = stream.shared_from_this()});
}
void follow(Stream& stream, const Event& event) {
  stream.rethrow();
  stream.LaneThread::follow(point_of(event).at);
}
// Throws what failed before the point was reached, also if both happen while this asks.
bool reached(const Event& event) {
  const bool come = point_of(event).at->is_reached();
  point_of(event).stream->rethrow();
  return come;
}
double seconds(const Event& from, const Event& to) { return point_of(from).at->seconds_until(*point_of(to).at); }
void drain(Stream& stream) noexcept { stream.end(); }

void submit(Stream& stream, std::function<void()> work) { stream.submit(std::move(work)); }
void launch(Stream& stream, Grid grid, std::function<void()> body) {
  require(grid.blocks > 0, "a launch of ", grid.blocks, " blocks");
  stream.rethrow();
  stream.submit([=, seed = next_seed()] { simt::run_blocks(grid.blocks, grid.threads, seed, body, grid.shared); });
}

}  // namespace mantissa::gpu
