#include "mantissa/backend/backend.h"

#include "backend/cpu/fast/cpu_backend.h"

namespace mantissa {

std::unique_ptr<Backend> make_backend(const std::string& name) {
  if (name == "cpu") return std::make_unique<CpuBackend>();
  if (name == "cpu_reference") return std::make_unique<CpuReference>();
  fail(ExitCode::environment, "training.device: this build has no backend ", name, "; there are cpu and cpu_reference");
}

}  // namespace mantissa
