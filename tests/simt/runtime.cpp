#include "gpu/runtime.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "lane_thread.h"
#include "mantissa/base/error.h"
#include "simt/executor.h"

namespace mantissa::simt {
namespace {

constexpr int64_t kMemory = int64_t{8} << 30;

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
  if (bytes > simt::kMemory) return nullptr;
  return posix_memalign(&memory, 256, static_cast<size_t>(bytes)) == 0 ? static_cast<std::byte*>(memory) : nullptr;
}

}  // namespace

class Stream : public test::LaneThread, public std::enable_shared_from_this<Stream> {
 public:
  Stream() : LaneThread(next_seed()) {}
};

// Nobody takes an executor for a GPU who has not asked for it by name.
Gpus find_gpus() { return {.usable = false, .text = "an executor of the host in place of a GPU"}; }
int count_gpus() { return 1; }

std::optional<Gpu> find_gpu(int index) { return index == 0 ? std::optional(simt::described_gpu()) : std::nullopt; }

Facts open_device(int index) {
  require(index == 0, ExitCode::environment, "the executor has one device, not a number ", index);
  return {.name = "host executor", .memory = simt::kMemory, .multiprocessors = 2, .architecture = simt::architecture()};
}

std::byte* take_memory(int64_t bytes) {
  std::byte* const memory = aligned(bytes);
  if (memory) std::memset(memory, kPoison, static_cast<size_t>(bytes));
  return memory;
}
void give_memory(std::byte* memory) noexcept { std::free(memory); }
std::byte* take_staging(int64_t bytes) { return aligned(bytes); }
void give_staging(std::byte* memory) noexcept { std::free(memory); }

std::shared_ptr<Stream> make_stream() { return std::make_shared<Stream>(); }
void* handle_of(Stream& stream) { return &stream; }

void copy_to_device(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes) {
  stream.submit([=] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
}
void copy_to_host(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes) {
  std::memset(to, kPoison, static_cast<size_t>(bytes));
  stream.submit([=] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
}
void discard(Stream& stream, std::byte* memory, int64_t bytes) {
  stream.submit([=] { std::memset(memory, kPoison, static_cast<size_t>(bytes)); });
}

Event record(Stream& stream) { return std::make_shared<const Point>(Point{.at = stream.mark(), .stream = stream.shared_from_this()}); }
void follow(Stream& stream, const Event& event) { stream.LaneThread::follow(point_of(event).at); }
bool reached(const Event& event) {
  point_of(event).stream->rethrow();
  return point_of(event).at->is_reached();
}
double seconds(const Event& from, const Event& to) { return point_of(from).at->seconds_until(*point_of(to).at); }
void drain(Stream& stream) noexcept { stream.end(); }

void submit(Stream& stream, std::function<void()> work) { stream.submit(std::move(work)); }
void launch(Stream& stream, Grid grid, std::function<void()> body) {
  require(grid.blocks > 0, "a launch of ", grid.blocks, " blocks");
  stream.submit([=, seed = next_seed()] { simt::run_blocks(grid.blocks, grid.threads, seed, body); });
}

}  // namespace mantissa::gpu
