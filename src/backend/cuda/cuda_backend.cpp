#include "backend/cuda/cuda_backend.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "backend/gpus.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

constexpr int64_t kPieceBytes = int64_t{16} << 20;  // bytes of a copy that are staged at a time

// Says how much memory the GPU has, and what needs less.
std::string limits_of(const gpu::Facts& facts, int gpu) {
  const std::optional<Gpu> now = gpu::find_gpu(gpu);
  return text(
      "; ", facts.name, " has ", facts.memory, " bytes, of which ", now ? now->free : 0,
      " are free; training needs less with a smaller training.micro_batch_size, with training.recompute selective or full, or with more "
      "ranks in parallel.tensor or parallel.expert; other commands need less with smaller batches and shorter texts");
}

// Device memory for the pool of a lane; the pool of the other lane takes from the same memory.
class DeviceMemory final : public MemorySource {
 public:
  DeviceMemory(const gpu::Facts& facts, int gpu, std::function<void()> settle) : facts_(facts), gpu_(gpu), settle_(std::move(settle)) {}
  std::byte* take(int64_t bytes) override { return gpu::take_memory(bytes); }
  void give_back(std::byte* block) noexcept override { gpu::give_memory(block); }
  void settle() override { settle_(); }
  void make_room() override {
    if (const auto other = other_.lock()) other->release_kept();
  }
  std::string limits() const override { return limits_of(facts_, gpu_); }
  void set_other(const std::shared_ptr<CachingAllocator>& other) { other_ = other; }

 private:
  const gpu::Facts facts_;
  const int gpu_;
  const std::function<void()> settle_;
  std::weak_ptr<CachingAllocator> other_;
};

class PinnedMemory final : public MemorySource {
 public:
  std::byte* take(int64_t bytes) override { return gpu::take_staging(bytes); }
  void give_back(std::byte* block) noexcept override { gpu::give_staging(block); }
  std::string limits() const override { return "; this is pinned host memory, which copies to and from the GPU go through"; }
};

}  // namespace

CudaBackend::CudaBackend(int gpu)
    : gpu_(gpu), facts_(gpu::open_device(gpu)), library_(gpu::load_gemm_library()), host_(make_backend("cpu")) {
  std::array<std::shared_ptr<CachingAllocator>, 2> pools;
  std::array<DeviceMemory*, 2> sources{};
  for (size_t i = 0; i < pools.size(); ++i) {
    auto source = std::make_unique<DeviceMemory>(facts_, gpu, [this] { await_lanes(); });
    sources[i] = source.get();
    pools[i] = std::make_shared<CachingAllocator>(std::move(source));
  }
  for (size_t i = 0; i < pools.size(); ++i) sources[i]->set_other(pools[1 - i]);
  for (size_t lane = 0; lane < parts_.size(); ++lane) {
    LaneParts& each = parts_[lane];
    each.stream = gpu::make_stream(static_cast<Lane>(lane));
    each.memory = pools[lane];
    each.staging = std::make_shared<CachingAllocator>(std::make_unique<PinnedMemory>());
    std::byte* const report = gpu::take_memory(sizeof(gpu::LaneReport));  // from no pool, because those count the memory of tensors
    require(report != nullptr, ExitCode::environment, "out of memory for the errors that kernels report", limits_of(facts_, gpu));
    each.report = {reinterpret_cast<gpu::LaneReport*>(report), [report](gpu::LaneReport*) { gpu::give_memory(report); }};
    const gpu::LaneReport nothing{};
    copy_in(each, reinterpret_cast<const std::byte*>(&nothing), reinterpret_cast<std::byte*>(each.report.get()), sizeof nothing);
  }
}

// Memory may go when nothing uses it any more.
CudaBackend::~CudaBackend() {
  for (const LaneParts& each : parts_) gpu::drain(*each.stream);
}

std::shared_ptr<std::byte> CudaBackend::allocate(int64_t bytes) {
  LaneParts& own = part();
  std::shared_ptr<std::byte> block = own.memory->allocate(bytes);
  std::byte* const address = block.get();
  // The block is free in its lane behind all that the lane was asked for.
  return {address, [stream = own.stream, bytes, held = std::move(block)](std::byte* memory) mutable {
            gpu::discard(*stream, memory, bytes);
            held.reset();
          }};
}

AllocatorStats CudaBackend::allocator_stats() const {
  AllocatorStats sum;
  for (const LaneParts& each : parts_) {
    const AllocatorStats stats = each.memory->stats();
    sum.in_use += stats.in_use, sum.peak_in_use += stats.peak_in_use, sum.reserved += stats.reserved;
    sum.system_calls += stats.system_calls;
  }
  return sum;
}

void CudaBackend::upload(const void* from, const Tensor& to) {
  LaneParts& own = part();
  const auto* bytes = static_cast<const std::byte*>(from);
  for (int64_t at = 0; at < to.bytes(); at += kPieceBytes)
    copy_in(own, bytes + at, to.device_bytes() + at, std::min(kPieceBytes, to.bytes() - at));
}

void CudaBackend::download(const Tensor& from, void* to) {
  LaneParts& own = part();
  const Staged report = ask_report(own);
  auto* bytes = static_cast<std::byte*>(to);
  for (int64_t at = 0; at < from.bytes(); at += kPieceBytes) {
    const int64_t count = std::min(kPieceBytes, from.bytes() - at);
    const Staged piece = copy_out(own, from.device_bytes() + at, count);
    wait(piece.copied);
    std::memcpy(bytes + at, piece.bytes.get(), static_cast<size_t>(count));
  }
  wait(report.copied);
  heed_report(own, report);
}

std::function<void(void* to)> CudaBackend::begin_download(const Tensor& from) {
  LaneParts& own = part();
  const Staged copy = copy_out(own, from.device_bytes(), from.bytes()), report = ask_report(own);
  return [this, &own, copy, report, bytes = static_cast<size_t>(from.bytes())](void* to) {
    wait(report.copied);
    std::memcpy(to, copy.bytes.get(), bytes);
    heed_report(own, report);
  };
}

void CudaBackend::synchronize() {
  const std::array<Staged, 2> reports{ask_report(parts_[0]), ask_report(parts_[1])};
  for (const Staged& each : reports) wait(each.copied);
  for (size_t lane = 0; lane < parts_.size(); ++lane) heed_report(parts_[lane], reports[lane]);
}

void CudaBackend::copy_in(LaneParts& lane, const std::byte* from, std::byte* to, int64_t bytes) {
  const std::shared_ptr<std::byte> staged = lane.staging->allocate(bytes);
  std::memcpy(staged.get(), from, static_cast<size_t>(bytes));
  asked([&] { gpu::copy_to_device(*lane.stream, to, staged.get(), bytes); });
  keep(lane, staged);
}

CudaBackend::Staged CudaBackend::copy_out(LaneParts& lane, const std::byte* from, int64_t bytes) {
  const std::shared_ptr<std::byte> staged = lane.staging->allocate(bytes);
  asked([&] { gpu::copy_to_host(*lane.stream, staged.get(), from, bytes); });
  return keep(lane, staged);
}

void CudaBackend::copy(const Tensor& from, const Tensor& to) {
  if (from.bytes() > 0) asked([&] { gpu::copy_on_device(stream(), to.device_bytes(), from.device_bytes(), from.bytes()); });
}

// Keeps bytes until they are copied, also those that are copied out: an interrupt may end the wait for them.
const CudaBackend::Staged& CudaBackend::keep(LaneParts& lane, const std::shared_ptr<std::byte>& bytes) {
  while (!lane.staged.empty() && has_come(lane.staged.front().copied)) lane.staged.pop_front();
  return lane.staged.emplace_back(Staged{.bytes = bytes, .copied = asked([&] { return gpu::record(*lane.stream); })});
}

void CudaBackend::heed_report(LaneParts& lane, const Staged& answer) {
  gpu::LaneReport report;
  std::memcpy(&report, answer.bytes.get(), sizeof report);
  lane.fp32_gemms = report.fp32_gemms;
  if (report.error.taken == 0) return;
  const gpu::ErrorWord none{};
  copy_in(lane, reinterpret_cast<const std::byte*>(&none), reinterpret_cast<std::byte*>(&lane.report->error), sizeof none);
  report.error.rule.refuse(report.error.index, report.error.value);
}

void CudaBackend::follow(const Mark& mark) {
  if (mark) asked([&] { gpu::follow(stream(), mark); });
}

bool CudaBackend::has_come(const gpu::Event& event) const {
  return asked([&] { return gpu::reached(event); });
}

void CudaBackend::fail_with_kernels(const Error& error) const {
  const std::vector<std::string> latest = kernel_log()->latest();
  fail(error.code(), error.what(), latest.empty() ? "" : "; the latest kernels that were launched: ", joined(latest));
}

// A spin of the host answers in microseconds, as most waits ask for; longer ones sleep between looks.
void CudaBackend::wait(const gpu::Event& event) const {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kSpin(200), kLook(5000);
  const auto began = Clock::now();
  auto looked = began;
  while (!has_come(event)) {
    const auto now = Clock::now();
    if (now - looked > kLook) heed_interrupt(), looked = now;
    if (now - began > kSpin) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// CUDA frees memory behind all work of a GPU, also behind a message of a lost peer: this wait looks at ranks, that one does not.
void CudaBackend::await_lanes() const {
  for (const LaneParts& each : parts_) wait(gpu::record(*each.stream));
}

void CudaBackend::execute(const Simulate&) {
  fail(ExitCode::internal, "the CUDA backend has no kernel that simulates formats; models refuse it earlier");
}

// The CPU backend draws: no chip has the logarithm and the cosine of the C library to the bit.
void CudaBackend::execute(const RandomNormal& k) {
  constexpr int64_t kPieceElements = int64_t{4} << 20;  // elements of a large tensor that the host holds at a time
  const int64_t elements = k.out.elements();
  if (elements == 0) return;
  const bool whole_rows = k.row_stride == 0 || k.out.shape().rank() == 0 || k.row_stride == k.out.shape()[-1];
  const int64_t columns = whole_rows ? elements : k.out.shape()[-1];
  const Tensor out = k.out.view({elements});
  const auto draw = [&](int64_t first, int64_t rows, int64_t width) {  // from element `first` of out on
    const Tensor drawn = empty(*host_, out.dtype(), {rows, width});
    const int64_t index = k.first_index + (whole_rows ? first : first / columns * k.row_stride + first % columns);
    host_->run(RandomNormal{
        .out = drawn, .key = k.key, .what = k.what, .first_index = index, .std = k.std, .row_stride = rows == 1 ? 0 : k.row_stride});
    upload(drawn.device_bytes(), out.slice(first, first + rows * width));
  };
  if (columns < kPieceElements && !whole_rows) {
    const int64_t rows = kPieceElements / columns;
    for (int64_t at = 0; at < elements; at += rows * columns) draw(at, std::min(rows, (elements - at) / columns), columns);
    return;
  }
  for (int64_t row = 0; row < elements; row += columns) {
    for (int64_t at = 0; at < columns; at += kPieceElements) draw(row + at, 1, std::min(kPieceElements, columns - at));
  }
}

std::unique_ptr<Backend> make_cuda_backend(int gpu) { return std::make_unique<CudaBackend>(gpu); }

Gpus find_gpus() { return gpu::find_gpus(); }
std::optional<Gpu> find_gpu(int index) { return gpu::find_gpu(index); }
int count_gpus() { return gpu::count_gpus(); }

void* cuda_stream(Backend& device) {
  auto* const cuda = dynamic_cast<CudaBackend*>(&device);
  require(cuda != nullptr, "the device ", device.name(), " has no CUDA stream");
  return gpu::handle_of(cuda->stream());
}

CudaScratch::CudaScratch(int64_t bytes) {
  gpu::open_device(default_gpu());
  stream_ = gpu::make_stream();
  memory_ = gpu::take_memory(bytes);
  require(memory_ != nullptr, ExitCode::environment, "out of GPU memory: ", bytes, " bytes are needed");
}
CudaScratch::~CudaScratch() {
  gpu::drain(*stream_);
  gpu::give_memory(memory_);
}
void* CudaScratch::stream() const { return gpu::handle_of(*stream_); }
bool CudaScratch::finished() {
  if (!end_) end_ = gpu::record(*stream_);
  return gpu::reached(end_);
}

}  // namespace mantissa
