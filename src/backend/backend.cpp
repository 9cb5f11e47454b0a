#include "mantissa/backend/backend.h"

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/make_cuda.h"

namespace mantissa {

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
  if (name == "cuda") return make_cuda_backend();
  fail(ExitCode::internal, "there is no backend ", name);
}

}  // namespace mantissa
