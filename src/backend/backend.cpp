#include "mantissa/backend/backend.h"

#include <algorithm>

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/gpus.h"

namespace mantissa {
namespace {

thread_local Lane lane = Lane::compute;

}  // namespace

Lane current_lane() { return lane; }

LaneScope::LaneScope(Lane of) : outer_(lane) { lane = of; }
LaneScope::~LaneScope() { lane = outer_; }

namespace {

int gpu_of_process = 0;

}  // namespace

std::function<void(void* to)> Backend::begin_download(const Tensor& from) {
  std::vector<std::byte> bytes(static_cast<size_t>(from.bytes()));
  download(from, bytes.data());
  return [bytes = std::move(bytes)](void* to) { std::ranges::copy(bytes, static_cast<std::byte*>(to)); };
}

std::vector<std::string> KernelLog::latest() const {
  std::vector<std::string> out;
  const uint32_t asked = asked_.load(std::memory_order_relaxed);
  for (size_t i = 0; i < latest_.size(); ++i) {
    const char* const kernel = latest_[(asked + i) % latest_.size()].load(std::memory_order_relaxed);
    if (kernel) out.emplace_back(kernel);
  }
  return out;
}

std::unique_ptr<Backend> make_backend(const std::string& name) {
  if (name == "cpu") return std::make_unique<CpuBackend>();
  if (name == "cpu_reference") return std::make_unique<CpuReference>();
  if (name == "cuda") return make_cuda_backend(default_gpu());
  fail(ExitCode::internal, "there is no backend ", name);
}

void set_default_gpu(int index) { gpu_of_process = index; }
int default_gpu() { return gpu_of_process; }

}  // namespace mantissa
